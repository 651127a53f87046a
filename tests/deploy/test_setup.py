"""What is done before a run, asked of real sites: the mode, surrogates, whitening, settings."""

import contextlib
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import criticism, deploy, surrogates
from fedmcmc.data import labels_of
from fedmcmc.deploy._frames import Frame, unpack
from fedmcmc.gaussian import defensive
from fedmcmc.kernels import Dithered, PointRecipe, evaluations
from fedmcmc.runs import Consortium, SimulatedConsortium
from fedmcmc.types import as_functions
from tests.contracts.model import DATA, KEY, SIZES
from tests.support import studies
from tests.support.lanes import fast_and_slow
from tests.support.site_runs import POSITION, close

ASKS = (*deploy.SETUP, "Evaluations", "LeaveOneOut", "Langevin", "Relay", "Conducive")
STUDY = studies.study_of(asks=ASKS, kernels={}, reproducible=True)
MODEL = STUDY.model
CENTER = {"a": jnp.array(0.4), "b": {"c": jnp.array([0.9, 0.7])}}
SIMULATED = SimulatedConsortium(DATA)


@pytest.fixture(scope="module")
def heard():
    """What each site answered, in bytes."""
    return {name: [] for name in STUDY.sites}


@pytest.fixture(scope="module")
def sites(tmp_path_factory, heard):
    folder, local = tmp_path_factory.mktemp("sites"), deploy.LocalTransport()
    for name, answers in heard.items():
        site = studies.site_of(STUDY, name, folder)
        local.join(site, heard=lambda asked, answer, to=answers: to.append(answer))
    found = deploy.Sites(STUDY, local)
    assert isinstance(found, Consortium)
    yield found
    found.close()


def near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["recipe", "dithered"])
def test_points_that_clients_draw_and_round_themselves(content, sites):
    """Key words cross as they are."""
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    asked = PointRecipe(words, defensive(np.zeros(3), np.eye(3)), CENTER, 50)
    if content == "dithered":
        asked = Dithered(asked, words, jnp.asarray(0.5))
    there, here = (data.ask(evaluations(MODEL), asked) for data in (sites, SIMULATED))
    np.testing.assert_allclose(there.value.value, here.value.value, rtol=1e-5, atol=1e-5)
    assert there.bits_up == here.bits_up


SEPARATE = {
    "taylor": lambda data: surrogates.taylor(MODEL, data, CENTER),
    "taylor-diagonal": lambda data: surrogates.taylor(MODEL, data, CENTER, structure="diagonal"),
    "laplace": lambda data: surrogates.laplace(KEY, MODEL, data, position=CENTER, check="ignore"),
    "scores": lambda data: surrogates.score_covariance(MODEL, data, CENTER),
}


@pytest.mark.parametrize("name", fast_and_slow(SEPARATE, ["taylor", "scores"]))
def test_what_each_client_is_asked(name, sites):
    there = SEPARATE[name](sites)
    near(there, SEPARATE[name](DATA))
    near(there, SEPARATE[name](SIMULATED))


@pytest.mark.parametrize(
    "transform",
    [
        fedmcmc.secure_sum,
        lambda kernel: fedmcmc.faults(kernel, drop=0.2, rescale=False),
        lambda kernel: fedmcmc.compress(kernel, fedmcmc.quantize(4)),
    ],
    ids=["secure_sum", "faults", "compress"],
)
def test_answers_of_single_clients_are_exact_however_sums_are_made(transform):
    there = surrogates.taylor(MODEL, SimulatedConsortium(DATA, transform=transform), CENTER)
    chex.assert_trees_all_equal(there, SEPARATE["taylor"](SIMULATED))


def test_what_is_wrong_with_a_client_is_said_by_its_name(sites):
    nowhere = CENTER | {"a": jnp.array(jnp.nan)}
    name = next(iter(STUDY.sites))
    for data, label in ((sites, repr(name)), (DATA, "0")):
        message = rf"3 of 3 clients. client {label} \(5 rows\).* not finite"
        with pytest.raises(ValueError, match=message):
            surrogates.taylor(MODEL, data, nowhere)
    assert labels_of(sites) == surrogates.taylor(MODEL, sites, CENTER).labels == tuple(STUDY.sites)


@pytest.mark.slow
def test_the_mode(sites):
    there = surrogates.mode(MODEL, sites, POSITION)
    for data in (DATA, SIMULATED):
        here = surrogates.mode(MODEL, data, POSITION)
        near(there.position, here.position)
        assert there.num_exchanges == here.num_exchanges
        assert (there.bits_up, there.bits_down) == (here.bits_up, here.bits_down)


@pytest.fixture(scope="module")
def white(sites):
    return fedmcmc.whiten(MODEL, sites, POSITION)


@pytest.mark.slow
def test_whitened_coordinates_and_kernels_in_them(sites, white):
    """Sites are told of the coordinates, so that a kernel on them runs as in a simulation."""
    here = fedmcmc.whiten(MODEL, DATA, POSITION)
    near(white.surrogates, here.surrogates)
    near(white.metric, here.metric)
    settings = dict(num_rounds=4, progress=False)
    for build in (
        lambda w: fedmcmc.lsd(w.posterior, step_size=0.1),
        lambda w: fedmcmc.fsgld(w.posterior, w.surrogates, step_size=0.02, num_local_steps=2),
    ):
        there = sites.sample(KEY, build(white), white.position, **settings)
        simulated = fedmcmc.sample(KEY, build(here), DATA, here.position, **settings)
        jax.tree.map(close, there.draws, simulated.draws)


@pytest.mark.slow
def test_predictions_ask_nobody(sites, white, heard):
    counts = [len(answers) for answers in heard.values()]
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    there, here = (fedmcmc.predict_bias(kernel, x, white.surrogates) for x in (sites, DATA))
    np.testing.assert_array_equal(there.covariance, here.covariance)
    tuned = [
        fedmcmc.tune(
            lambda step_size: fedmcmc.lsd(white.posterior, step_size=step_size),
            white.posterior,
            x,
            white.surrogates,
        )
        for x in (sites, DATA)
    ]
    assert tuned[0].settings == tuned[1].settings
    assert [len(answers) for answers in heard.values()] == counts
    far = fedmcmc.lsd(white.posterior, step_size=1.5)
    with pytest.warns(fedmcmc.SamplingWarning, match="Predicted from Gaussian"):
        sites.sample(
            KEY, far, white.position, surrogates=white.surrogates, num_rounds=1, progress=False
        )


@pytest.mark.parametrize(
    ("spread", "rounds"), [(0.3, 1), pytest.param(2.0, 3, marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning")
def test_rows_are_left_out_one_by_one_at_their_sites(spread, rounds, sites):
    """Of draws that reach far some rows are judged by weighted points."""
    draws = {
        "a": CENTER["a"] + spread * jax.random.normal(KEY, (200,)),
        "b": {"c": CENTER["b"]["c"] + spread * jax.random.normal(KEY, (200, 2))},
    }
    there, here = (
        criticism.loo(MODEL, x, draws, minimum_rows=2, refine=True) for x in (sites, DATA)
    )
    np.testing.assert_allclose([there.elpd, there.se], [here.elpd, here.se], rtol=1e-5)
    assert there.totals["rounds"] == rounds and there.num_mended == here.num_mended


def test_what_leaves_a_site_is_its_own_answer_and_no_row(sites, heard):
    """A table with its own expansion, zeros for all others; and none of its rows' bytes."""
    for answers in heard.values():
        answers.clear()
    fitted = surrogates.taylor(MODEL, sites, CENTER)
    like = surrogates.taylor(MODEL, DATA, CENTER)
    for index, (name, answers) in enumerate(heard.items()):
        frames = [Frame.parse(data) for data in answers]
        (answer,) = (frame for frame in frames if frame.kind == "answer")
        code, _ = unpack(answer.body, 2)
        # Three clients' natural parameters, and one.
        table = np.frombuffer(code, ">f4")
        assert table.size == 3 * (3 + 6) + 1
        eta, triangles = table[:9].reshape(3, 3), table[9:27].reshape(3, 6)
        others = np.arange(3) != index
        assert not eta[others].any() and not triangles[others].any()
        whole = jax.vmap(lambda x: jax.flatten_util.ravel_pytree(x)[0])(like.precision_mean)
        np.testing.assert_allclose(eta[index], whole[index], rtol=1e-5)
        rows = studies.rows_of(name)["x"]
        assert len(rows) == SIZES[index]
        for row in rows.ravel():
            for kind in ("<f4", ">f4"):
                assert row.astype(kind).tobytes() not in code
    near(fitted, like)


def test_what_needs_the_rows_is_refused_by_name(sites, tmp_path):
    for call, instead in {
        lambda: surrogates.sampled(KEY, MODEL, sites, 0.1, position=CENTER): "surrogates.laplace",
        lambda: surrogates.analytic(jnp.sum, jnp.sum, sites): "surrogates.taylor",
        lambda: fedmcmc.estimate_smoothness(KEY, MODEL, sites, CENTER): "surrogates.taylor",
    }.items():
        with pytest.raises(TypeError, match=f"(rows|FederatedData).*{instead}"):
            call()
    with pytest.raises(TypeError, match="or a consortium"):
        surrogates.taylor(MODEL, [1], CENTER)
    # A study that does not ask for it.
    silent = studies.study_of(kernels={})
    with pytest.raises(deploy.Refused, match="does not allow the kernel 'CommonExpansions'"):
        surrogates.taylor(silent.model, deploy.Sites(silent, deploy.LocalTransport()), CENTER)
    # Functions that are in no study.
    other = fedmcmc.Posterior(lambda x: 0.0 * x["a"], lambda x, rows: rows["x"][:, 0] * x["a"])
    with pytest.raises(deploy.Refused, match="has no name at the sites"):
        surrogates.taylor(as_functions(other), sites, CENTER)


@pytest.mark.slow
def test_sites_calibrate_a_fit_on_outcomes_that_they_draw(tmp_path):
    """Ranks are the simulation's; the question within has to be allowed by the study, too."""

    def calibrated(data, model):
        def prior(rng_key):
            return jax.tree.map(lambda x: x + jax.random.normal(rng_key, x.shape), CENTER)

        def fit(rng_key, data):
            around = fedmcmc.Gaussian.from_moments(CENTER, variance=jnp.ones(()))
            return fedmcmc.correct(rng_key, model, data, around, num_draws=100, adapt=False)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
            return criticism.calibrate(
                KEY, model, data, fit, prior, num_repetitions=3, num_draws=9
            ).ranks

    def sites_of(*asks):
        study = studies.study_of(posterior=f"{studies.HERE}:with_outcomes", asks=asks, kernels={})
        local = deploy.LocalTransport()
        for name in study.sites:
            local.join(studies.site_of(study, name, tmp_path / asks[-1]))
        return deploy.Sites(study, local), study.model

    sites, model = sites_of("Evaluations", "Redrawn")
    with contextlib.closing(sites):
        np.testing.assert_array_equal(calibrated(sites, model), calibrated(SIMULATED, model))
    sites, model = sites_of("Expansions", "Redrawn")
    with (
        contextlib.closing(sites),
        pytest.raises(deploy.Refused, match="does not allow the kernel 'Evaluations'"),
    ):
        calibrated(sites, model)
