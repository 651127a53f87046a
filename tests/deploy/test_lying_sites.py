"""Sites that send wrong messages: the server names them, and keeps the draws before."""

import contextlib
import functools
import itertools
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame, pack, unpack
from fedmcmc.deploy._guard import Guard, norms_of
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.recorded_sites import run_over
from tests.support.site_runs import POSITION

STUDY = studies.study_of(kernels={"main": f"{studies.HERE}:everyone"}, settings={"step_size": 0.01})
KEEPS = studies.study_of("compress: lsd_pp, memory: per client")
MASKED = studies.masked_study("lsd_pp")
PHASES = studies.study_of("sequence")
QUESTIONS = studies.study_of(asks=deploy.SETUP, kernels={})
NUM_ROUNDS = 12


def meddling(site, change):
    """Return a site whose messages are ``change(frame of the request, frame of the answer)``."""
    answer = site.answer

    def changed(data):
        reply = answer(data)
        if reply is None:
            return None
        frame = change(Frame.parse(data), Frame.parse(reply))
        return None if frame is None else frame.to_bytes()

    site.answer = changed
    return site


def join(study, folder, lies):
    """Return a transport with all sites; `lies` map answers and their rounds to others."""
    local = deploy.LocalTransport()
    for name in study.sites:
        site = studies.site_of(study, name, folder)
        if name in lies:

            def change(request, frame, lie=lies[name]):
                return lie(frame, frame.tag.round) if frame.kind == "answer" else frame

            meddling(site, change)
        local.join(site)
    return local


def run(study, local, **settings):
    return run_over(local, study, **(dict(num_rounds=NUM_ROUNDS) | settings))


def sends(value, rounds, *, chain=0, num_chains=1, num_true=0):
    """Return a lie: in these rounds all but the last numbers of a chain's code are `value`."""

    def lie(frame, round_):
        if round_ not in rounds:
            return frame
        parts = unpack(frame.body, 2 * num_chains)
        numbers = np.frombuffer(parts[chain], ">f4").copy()
        numbers[: len(numbers) - num_true] = value
        parts[chain] = numbers.tobytes()
        return frame._replace(body=pack(*parts))

    return lie


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the samples of a run of honest sites, which runs once per number of chains."""

    @functools.cache
    def run_honestly(num_chains=1):
        local = join(STUDY, tmp_path_factory.mktemp("honest"), {})
        return run(STUDY, local, num_chains=num_chains)

    return run_honestly


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_a_message_that_cannot_be_added_names_its_site(value, tmp_path, expected):
    local = join(STUDY, tmp_path, {"basel": sends(value, {7}, chain=1, num_chains=2)})
    message = r"^basel: its message of round 7 \(phase 0, chain 1\) holds numbers that are not"
    with pytest.raises(deploy.SiteError, match=message) as caught:
        run(STUDY, local, num_chains=2)
    samples = caught.value.samples
    np.testing.assert_array_equal(samples.totals["rounds"], [7, 7])
    before = jax.tree.map(lambda leaf: leaf[:, :7], expected(num_chains=2).draws)
    chex.assert_trees_all_equal(samples.draws, before)


@pytest.mark.parametrize(
    "lie",
    [
        sends(np.nan, range(3, 12)),
        lambda frame, round_: (
            Frame("declined", {"tag": list(frame.tag), "reason": "the limit"})
            if round_ > 2
            else frame
        ),
        lambda frame, round_: frame._replace(body=frame.body[:-1]) if round_ > 2 else frame,
    ],
    ids=["not finite", "declined", "cut short"],
)
def test_a_run_goes_on_without_a_site_that_lies_or_declines(lie, tmp_path):
    local = join(STUDY, tmp_path, {"basel": lie})
    sites = deploy.Sites(STUDY, local, on_missing="leave_out")
    with pytest.warns(RuntimeWarning, match="^basel is left out of this round") as warned:
        samples = sites.sample(KEY, STUDY.kernel("main"), POSITION, num_rounds=12, progress=False)
    sites.close()
    assert len(warned) == 1
    assert sites.num_missed == {"bern": 0, "basel": 9, "chur": 0}
    np.testing.assert_array_equal(samples.info["num_active"], [3 * [3] + 9 * [2]])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.draws))


def test_a_site_is_left_out_only_of_the_chain_in_which_it_lies(tmp_path, expected):
    lie = sends(np.nan, {4}, num_chains=2)
    local = join(STUDY, tmp_path, {"chur": lie})
    with pytest.warns(RuntimeWarning, match="^chur is left out"):
        samples = run(STUDY, local, num_chains=2, on_missing="leave_out")
    draws = expected(num_chains=2).draws["a"]
    np.testing.assert_array_equal(samples.info["num_active"][:, 4], [2, 3])
    np.testing.assert_array_equal(samples.draws["a"][1], draws[1])
    assert not np.array_equal(samples.draws["a"][0], draws[0])


def test_a_run_that_diverges_at_all_sites_blames_no_site(tmp_path):
    study = studies.study_of(kernels=STUDY.kernels, settings={"step_size": 1e30})
    for on_missing in ("wait", "leave_out"):
        with pytest.raises(fedmcmc.NonFiniteError, match="step size is too large"):
            run(study, join(study, tmp_path / on_missing, {}), on_missing=on_missing)


def test_a_large_gradient_is_reported(tmp_path):
    local = join(STUDY, tmp_path, {"basel": sends(1e6, range(8, 10))})
    message = r"^basel: its message of round 8 .* norm 1\.73e\+06; the largest of its 8 before"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        run(STUDY, local)
    assert len([w for w in warned if w.category is RuntimeWarning]) == 1


def test_a_limit_of_norms_holds(tmp_path):
    lies = {"basel": sends(1e6, {8})}
    with pytest.raises(deploy.SiteError, match=r"^basel: .* above max_norm = 1000\.0") as caught:
        run(STUDY, join(STUDY, tmp_path / "a", lies), max_norm=1e3)
    assert caught.value.samples.num_draws == 8
    with pytest.warns(RuntimeWarning, match="^basel is left out.*above max_norm"):
        samples = run(
            STUDY, join(STUDY, tmp_path / "b", lies), max_norm=1e3, on_missing="leave_out"
        )
    np.testing.assert_array_equal(samples.info["num_active"][0], 8 * [3] + [2] + 3 * [3])


def test_a_term_of_a_sum_before_the_first_round_is_checked(tmp_path):
    study = studies.study_of("lsd_star")

    def lie(frame, round_):
        if frame.header["tag"][1] or len(frame.body) != 8 + 12:
            return frame
        return frame._replace(body=pack(np.full(3, np.nan, ">f4").tobytes()))

    for on_missing in ("wait", "leave_out"):
        local = join(study, tmp_path / on_missing, {"chur": lie})
        with pytest.raises(deploy.SiteError, match=r"^chur, before the first round: its") as caught:
            run(study, local, on_missing=on_missing)
        assert caught.value.samples is None


def test_bad_limits_of_norms_are_refused():
    with pytest.raises(ValueError, match="nobody can read under masks: remove max_norm = 3"):
        deploy.Sites(studies.masked_study("lsd"), deploy.LocalTransport(), max_norm=3)
    for wrong in (0, -1.0, "3", True, np.nan):
        with pytest.raises(ValueError, match="max_norm must be a number above 0, got"):
            deploy.Sites(STUDY, deploy.LocalTransport(), max_norm=wrong)
        with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, got"):
            deploy.Sites(STUDY, deploy.LocalTransport(), timeout=wrong)
    study = studies.study_of("secure_sum: lsd_star")
    sites = deploy.Sites(study, deploy.LocalTransport(), max_norm=3)
    with pytest.raises(ValueError, match="messages of a secure sum are words: remove max_norm"):
        sites.sample(KEY, study.kernel("main"), POSITION, num_rounds=2)


def test_sites_whose_messages_grow_together_are_not_suspected():
    """A chain that jumps far away: then all gradients grow."""
    guard, sent = Guard(["a", "b"], None), np.ones((2, 1), bool)
    sizes = itertools.chain(6 * [(1.0, 30.0)], [(1e5, 2e7), (1e4, 1e5)])
    for round_, pair in enumerate(sizes):
        codes = [np.full((1, 1), size, np.float32) for size in pair]
        assert guard.check(codes, sent, round_, 0) == []
    with pytest.warns(RuntimeWarning, match="^b: .*round 9"):
        guard.check([np.full((1, 1), x, np.float32) for x in (1e5, 1e12)], sent, 9, 0)


def test_norms_are_those_of_messages():
    """Norms of quantized vectors, of exact parts, and of words."""
    rng = np.random.default_rng(0)
    compressor = fedmcmc.quantize(4)
    message = {"a": rng.normal(size=3).astype(np.float32), "b": np.float32(rng.normal())}
    draws = compressor.prepare(jax.random.key(0), message, None)
    code, _ = compressor.encode(draws, jax.tree.map(jnp.asarray, message), (), None)
    decoded = np.concatenate([np.ravel(x) for x in jax.tree.leaves(compressor.decode(code, None))])
    code = jax.tree.map(lambda leaf: np.asarray(leaf)[None], code)
    np.testing.assert_allclose(norms_of(code, 1), [4 * np.linalg.norm(decoded)], rtol=1e-5)
    impossible = np.array([[3.0, -1e30], [np.nan, 0.0]], np.float32)
    norms = norms_of(
        (fedmcmc.types.Uncompressed(impossible), np.array([[4.0], [0.0]], np.float32)), 2
    )
    np.testing.assert_array_equal(norms, [5.0, np.nan])
    assert norms_of(np.full((1, 2), -1e30, np.float32), 1)[0] > 1e30
    assert norms_of(np.full((1, 2), 7, np.uint32), 1)[0] == 0


def test_proposals_at_impossible_places_are_no_fault(tmp_path):
    """Beyond a wall sites send the lowest number, and the chain turns back."""
    study = studies.study_of("hmc", posterior=f"{studies.HERE}:walled")
    settings = dict(num_rounds=34, num_burnin=4, max_norm=1e4)
    samples = run(study, join(study, tmp_path, {}), **settings)
    assert (samples.info["acceptance"] == 0).any() and samples.num_draws == 30
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.draws))


def ask(folder, lie, **settings):
    """Return the value that sites answer, of which basel lies."""
    sites = deploy.Sites(QUESTIONS, join(QUESTIONS, folder, {"basel": lie}), **settings)
    question = fedmcmc.kernels.expansions(QUESTIONS.model, curvature="none")
    content = fedmcmc.kernels.Points(jax.tree.map(lambda x: x[None], POSITION), POSITION)
    with contextlib.closing(sites):
        return sites.ask(question, content).value.value


def test_answers_to_questions_may_be_infinite(tmp_path, caplog):
    """Beyond a wall Newton's method gets an answer, and the log names the site."""
    caplog.set_level("INFO", "fedmcmc.deploy")
    value = ask(tmp_path, sends(np.nan, {0}, num_true=1))  # the count of answers is right
    assert np.isnan(value).all() and "basel: its message of round 0" in caplog.text


@pytest.mark.parametrize("count", [0.0, 2.0, np.nan])
def test_an_answer_that_does_not_count_as_one_names_its_site(count, tmp_path):
    text = f"^basel: its answer counts as {count:.3g} answers, and must count as one"
    with pytest.raises(deploy.SiteError, match=text):
        ask(tmp_path, sends(count, range(100)))


def test_a_question_that_a_site_never_answers_names_it(tmp_path):
    with (
        pytest.warns(RuntimeWarning, match="^basel is left out.*it is late"),
        pytest.raises(deploy.SiteError, match=r"all 3 sites answer; .* Rounds missed: basel 20\.$"),
    ):
        ask(tmp_path, lambda frame, round_: decline(frame), on_missing="leave_out")


class Endless(deploy.LocalTransport):
    """A transport over which a site sends without end what is no message."""

    def receive(self, timeout):
        return super().receive(0) or ("basel", b"")


def test_a_site_that_sends_without_end_stops_no_run_and_fills_no_log(tmp_path, caplog):
    endless = Endless()
    studies.join_all(endless, STUDY, tmp_path)
    samples = run(STUDY, endless, num_rounds=3)
    assert samples.num_draws == 3
    logged = [text for text in caplog.messages if "basel: a message was not understood" in text]
    assert 1 < len(logged) < 40 and "(2 so far)" in logged[1]


@pytest.fixture
def ctrl_c():
    """Have Ctrl-C interrupt, also after a test that ran a site's command, which takes signals."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def decline(frame):
    return frame._replace(kind="declined", header={**frame.header, "reason": "it is late"})


def interrupt(frame):
    """Interrupt the server while it waits for this answer."""
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("study", "place", "num_draws", "then"),
    [
        pytest.param(PHASES, (9, 1), 8, interrupt, id="phases, interrupted"),
        pytest.param(PHASES, (9, 1), 8, decline, marks=pytest.mark.slow, id="phases, declined"),
        pytest.param(KEEPS, (9, 0), 9, interrupt, marks=pytest.mark.slow, id="one, interrupted"),
        pytest.param(KEEPS, (9, 0), 9, decline, marks=pytest.mark.slow, id="one, declined"),
        pytest.param(STUDY, (9, 0), 9, decline, id="nothing kept, declined"),
        pytest.param(MASKED, (9, 0), 9, decline, marks=pytest.mark.slow, id="masked, declined"),
        pytest.param(MASKED, (9, 0), 9, interrupt, marks=pytest.mark.slow, id="masked"),
    ],
)
def test_a_run_that_ends_in_a_round_continues_from_it(study, place, num_draws, then, tmp_path):
    """Even long before the next checkpoint; sites return to their states of that round."""
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=5000)
    local = deploy.LocalTransport()

    def change(request, frame):
        is_due = request.kind == "step" and (request.tag.round, request.tag.phase) == place
        return then(frame) if is_due else frame

    for name in study.sites:
        local.join(meddling(studies.site_of(study, name, tmp_path / "sites"), change))
    if then is decline:
        with pytest.raises(deploy.SiteError, match=r"it is late \(in round 9\)$") as caught:
            run(study, local, checkpoint=checkpoint)
        samples = caught.value.samples
    else:
        with pytest.warns(fedmcmc.SamplingWarning, match="Interrupted in or after round"):
            samples = run(study, local, checkpoint=checkpoint)
    assert samples.num_draws == num_draws
    resumed = run(study, join(study, tmp_path / "sites", {}), checkpoint=checkpoint)
    expected = run(study, join(study, tmp_path / "honest", {}))
    chex.assert_trees_all_equal(resumed.draws, expected.draws)
    chex.assert_trees_all_equal(resumed.info, expected.info)
