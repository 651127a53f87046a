"""Questions under masks: the numbers of a simulated secure sum, and nothing else leaves a site."""

import dataclasses
from functools import partial

import chex
import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy, surrogates
from fedmcmc.deploy import secure
from fedmcmc.deploy._frames import Frame
from fedmcmc.fitting._chains import run_chains
from fedmcmc.fitting._modes import find_modes
from fedmcmc.kernels import Points, evaluations
from fedmcmc.runs import SimulatedConsortium
from tests.contracts.model import DATA, KEY
from tests.deploy.test_masks import Lossy
from tests.support import studies
from tests.support.site_runs import POSITION, close

ASKS = deploy.SUMS
STUDY = studies.masked_study("lsd", asks=ASKS, kernels={}, secure={"rounds": 400})
MODEL = STUDY.model
SECURE = partial(fedmcmc.secure_sum, max_abs=2.0**30, resolution=2.0**-22)
SIMULATED = SimulatedConsortium(DATA, transform=SECURE, of_runs=True)
POINTS = jax.tree.map(
    lambda leaf: leaf + jax.random.normal(jax.random.key(5), (20, *leaf.shape)), POSITION
)
QUESTION, CONTENT = evaluations(MODEL), Points(POINTS, POSITION)


@pytest.fixture(scope="module")
def heard():
    """Each site's pairs of messages."""
    return {name: [] for name in STUDY.sites}


@pytest.fixture(scope="module")
def sites(tmp_path_factory, heard):
    folder, local = tmp_path_factory.mktemp("sites"), deploy.LocalTransport()
    for name, pairs in heard.items():
        site = studies.site_of(STUDY, name, folder)
        local.join(site, heard=lambda *pair, to=pairs: to.append(pair))
    found = deploy.Sites(STUDY, local)
    yield found
    found.close()


def test_an_answer_has_the_bits_of_a_simulated_secure_sum(sites):
    there, here = (x.ask(QUESTION, CONTENT) for x in (sites, SIMULATED))
    chex.assert_trees_all_equal(there, here)
    plain = SimulatedConsortium(DATA).ask(QUESTION, CONTENT)
    assert here.bits_up == 2 * plain.bits_up + 3 * 2 * 64
    # Three clients' roundings, and that of a sum of float32.
    np.testing.assert_allclose(here.value.value, plain.value.value, rtol=3e-7, atol=1.5 * 2.0**-22)


@pytest.mark.slow
def test_a_fit_is_that_of_a_simulated_secure_sum(sites):
    settings = dict(rng_key=jax.random.key(1), position=POSITION, num_draws=400, progress=False)
    there, here, plain = (fedmcmc.fit(MODEL, x, **settings) for x in (sites, SIMULATED, DATA))
    assert there.verdict == here.verdict
    assert there.report.rounds == here.report.rounds == plain.report.rounds
    jax.tree.map(close, there.samples.draws, here.samples.draws)
    np.testing.assert_allclose(there.log_evidence, here.log_evidence, atol=1e-5)
    np.testing.assert_allclose(there.log_evidence, plain.log_evidence, atol=1e-3)


@pytest.mark.slow
def test_whitening_asks_for_sums_alone(sites):
    """And a kernel on these coordinates runs at the sites, as a secure sum that they make."""
    there = fedmcmc.whiten(MODEL, sites, POSITION, surrogates=False)
    assert there.surrogates is None
    here = fedmcmc.whiten(MODEL, SIMULATED, POSITION, surrogates=False)
    jax.tree.map(close, there.metric, here.metric)
    jax.tree.map(close, there.metric, fedmcmc.whiten(MODEL, DATA, POSITION).metric)
    runs = [
        data.sample(
            KEY,
            fedmcmc.lsd(white.posterior, step_size=0.1),
            white.position,
            num_rounds=4,
            progress=False,
        )
        for data, white in ((sites, there), (SIMULATED, here))
    ]
    jax.tree.map(close, *(run.draws for run in runs))
    assert runs[0].totals["bits_up"] == runs[1].totals["bits_up"] == 4 * 3 * 64 * (3 + 2)


@pytest.mark.slow
def test_propagation_and_whole_chains_are_those_of_a_simulation(sites):
    """Each reads its server's own state, which is within the sum's."""
    settings = dict(position=POSITION, num_rounds=3, progress=False)
    kernel = fedmcmc.fed_ep(MODEL)
    there, here = (x.sample(KEY, kernel, **settings) for x in (sites, SIMULATED))
    jax.tree.map(close, there.final_draws, here.final_draws)
    again = sites.sample(KEY, kernel, state=there.state, num_rounds=2, progress=False)
    assert again.state.broadcast.round.tolist() == [5]


@pytest.mark.slow
def test_chains_of_a_fit_start_from_states_of_the_kernel_within_the_sum(sites):
    kernel = fedmcmc.hmc(MODEL, POSITION, step_size=0.3)

    def begin(position):
        broadcast, server = kernel.server_init(KEY, position, sites.federation, ())
        return fedmcmc.FederatedState(broadcast, server, ())

    state = jax.vmap(begin)(jax.tree.map(lambda leaf: leaf[:8], POINTS))
    settings = dict(num_rounds=6, num_chains=8, progress=False)
    there, here = (x.sample(KEY, kernel, state=state, **settings) for x in (sites, SIMULATED))
    jax.tree.map(close, there.draws, here.draws)
    assert 0.1 < there.info["acceptance"].mean() < 1


@pytest.mark.slow
def test_chains_of_a_fit_are_those_of_a_simulated_secure_sum(sites):
    def chains(consortium):
        search = find_modes(KEY, MODEL, consortium, position=POSITION)
        return run_chains(KEY, MODEL, consortium, search, None, max_rounds=20)

    there, here = map(chains, (sites, SIMULATED))
    # A last bit may decide a trajectory in 160 rounds of 64 chains.
    same = [
        np.isclose(a, b, atol=1e-3).all(axis=-1).mean()
        for a, b in zip(
            *(
                [np.reshape(x, (64, 50, -1)) for x in jax.tree.leaves(c.samples.draws)]
                for c in (there, here)
            ),
            strict=True,
        )
    ]
    assert min(same) > 0.9 and abs(there.rhat - here.rhat) < 0.02


def test_nothing_but_masked_words_leaves_a_site(sites, heard):
    sites.ask(QUESTION, CONTENT)  # all sites have joined by then
    for pairs in heard.values():
        pairs.clear()
    sites.ask(QUESTION, CONTENT)
    for index, pairs in enumerate(heard.values()):
        kinds = []
        for asked, answer in pairs:
            kind, told = Frame.parse(asked).kind, Frame.parse(answer)
            kinds.append(kind)
            assert set(told.header) == {"tag"} and told.kind in ("answer", "ready")
            if kind == "step":
                _, _, number, words = secure.read_masked(told.body)
                # Values, three parts at the center, two counts of the question, two of the sum.
                assert number == index and words.size == 20 + 3 + 1 + 1 + 2
            else:
                assert len(told.body) in (116, 64, 0)  # a fresh key, a signature, nothing
        assert kinds == ["begin", "open", "confirm", "seal", "step"]


def test_the_same_question_again_has_the_same_words_under_other_masks(sites, heard):
    for pairs in heard.values():
        pairs.clear()
    first, second = (sites.ask(QUESTION, CONTENT).value for _ in range(2))
    chex.assert_trees_all_equal(first, second)
    for pairs in heard.values():
        steps = [pair for pair in pairs if Frame.parse(pair[0]).kind == "step"]
        words = [secure.read_masked(Frame.parse(answer).body)[3] for _, answer in steps]
        assert len(words) == 2 and not (words[0] == words[1]).any()


def test_a_question_that_misses_a_site_is_void_and_asked_again(tmp_path):
    """With the sum that it has in peace."""
    local = Lossy(STUDY, tmp_path, "basel", {0})
    sites = deploy.Sites(STUDY, local)
    there = sites.ask(QUESTION, CONTENT)
    sites.close()
    chex.assert_trees_all_equal(there, SIMULATED.ask(QUESTION, CONTENT))
    frames = [tuple(map(Frame.parse, pair)) for pair in local.heard]
    first, *_, last = (
        (asked, secure.read_masked(told.body)[3])
        for asked, told in frames
        if (asked.kind, told.kind) == ("step", "answer")
    )
    assert first[0].body == last[0].body and (first[1] != last[1]).all()
    assert first[0].header["masks"]["session"] != last[0].header["masks"]["session"]


@pytest.mark.slow
def test_a_fit_in_which_a_site_is_lost_is_the_same(tmp_path):
    settings = dict(rng_key=KEY, position=POSITION, num_draws=400, progress=False)
    local = Lossy(STUDY, tmp_path, "chur", {0})
    sites = deploy.Sites(STUDY, local)
    there = fedmcmc.fit(MODEL, sites, **settings)
    sites.close()
    assert not local.rounds
    jax.tree.map(
        close, there.samples.draws, fedmcmc.fit(MODEL, SIMULATED, **settings).samples.draws
    )


def test_what_does_not_fit_the_sum_is_said_with_the_remedy(tmp_path):
    """The grid is the study's: too small a range for these log likelihoods."""
    small = studies.masked_study(
        "lsd", asks=ASKS, kernels={}, secure={"max_abs": 2.0, "resolution": 2.0**-40}
    )
    local = deploy.LocalTransport()
    studies.join_all(local, small, tmp_path)
    sites = deploy.Sites(small, local)
    same = SimulatedConsortium(
        DATA, transform=partial(fedmcmc.secure_sum, max_abs=2.0, resolution=2.0**-40)
    )
    for data in (sites, same):
        with pytest.raises(ValueError, match=r"client\(s\) answered Evaluations .*secure.max_abs"):
            data.ask(QUESTION, CONTENT)
    sites.close()


# What is refused

SINGLES = {
    "LeaveOneOutQuestion": "less the sum with it",
    "CommonExpansions": "a table with a row per site",
    "OwnExpansions": "a table with a row per site",
    "ScoreCovariances": "a table with a row per site",
    "WithoutClient": "a table with a row per site",
    "LeaveGroupsOut": "how many groups a site must have",
    "LeaveOneOut": "how many rows a site must have",
    "Replication": "how many rows a site must have",
    "Relay": "only one site",
    "Averaging": "nobody has studied",
}


@pytest.mark.parametrize("name", SINGLES)
def test_a_study_may_not_ask_what_tells_single_answers(name):
    with pytest.raises(ValueError, match=f"may not ask {name} .*{SINGLES[name]}"):
        dataclasses.replace(STUDY, asks=(*ASKS, name))


def test_surrogates_are_refused_by_name(sites):
    with pytest.raises(deploy.Refused, match="does not allow the kernel 'CommonExpansions'"):
        surrogates.taylor(MODEL, sites, POSITION)


def test_the_grid_is_the_studys(sites):
    kernel = fedmcmc.secure_sum(fedmcmc.lsd(MODEL, step_size=0.1))
    with pytest.raises(deploy.Refused, match=r"to steps of 2\*\*-22 up to 1.07374e\+09"):
        sites.sample(KEY, kernel, POSITION, num_rounds=1, progress=False)
    for wrong, message in (
        ({"resolution": 0.3}, "must be a power of two"),
        ({"max_abs": 2.0**40}, "must be below"),
        ({"max_abs": "much"}, "max_abs must be a concrete number"),
    ):
        with pytest.raises(ValueError, match=message):
            studies.masked_study("lsd", asks=ASKS, secure=wrong)
