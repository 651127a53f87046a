"""Sites answer what a server computes before a run: mode, surrogates, whitening, settings."""

import contextlib
import functools
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
def answers():
    """Return the bytes of each site's answers."""
    return {name: [] for name in STUDY.sites}


@pytest.fixture(scope="module")
def sites(tmp_path_factory, answers):
    folder, local = tmp_path_factory.mktemp("sites"), deploy.LocalTransport()
    for name, sent in answers.items():
        site = studies.site_of(STUDY, name, folder)
        local.join(site, heard=lambda request, answer, to=sent: to.append(answer))
    consortium = deploy.Sites(STUDY, local)
    assert isinstance(consortium, Consortium)
    yield consortium
    consortium.close()


def near(a, b):
    chex.assert_trees_all_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("content", ["recipe", "dithered"])
def test_clients_draw_and_round_points(content, sites):
    """Key words cross unchanged."""
    words = jax.random.bits(KEY, (2,), jnp.uint32)
    points = PointRecipe(words, defensive(np.zeros(3), np.eye(3)), CENTER, 50)
    if content == "dithered":
        points = Dithered(points, words, jnp.asarray(0.5))
    deployed, simulated = (data.ask(evaluations(MODEL), points) for data in (sites, SIMULATED))
    np.testing.assert_allclose(deployed.value.value, simulated.value.value, rtol=1e-5, atol=1e-5)
    assert deployed.bits_up == simulated.bits_up


SEPARATE = {
    "taylor": lambda data: surrogates.taylor(MODEL, data, CENTER),
    "taylor-diagonal": lambda data: surrogates.taylor(MODEL, data, CENTER, structure="diagonal"),
    "laplace": lambda data: surrogates.laplace(KEY, MODEL, data, position=CENTER, check="ignore"),
    "scores": lambda data: surrogates.score_covariance(MODEL, data, CENTER),
}


@functools.cache
def simulate_answers(name):
    """Return the result of one of `SEPARATE` in a simulation; the data give the same."""
    simulated = SEPARATE[name](SIMULATED)
    near(simulated, SEPARATE[name](DATA))
    return simulated


@pytest.mark.parametrize("name", fast_and_slow(SEPARATE, ["scores"]))
def test_sites_answer_as_simulated_clients(name, sites):
    near(SEPARATE[name](sites), simulate_answers(name))


@pytest.mark.parametrize(
    "transform",
    [
        fedmcmc.secure_sum,
        lambda kernel: fedmcmc.faults(
            fedmcmc.compress(kernel, fedmcmc.quantize(4)), drop=0.2, rescale=False
        ),
    ],
    ids=["secure_sum", "faults and compress"],
)
def test_transforms_of_sums_leave_answers_of_single_clients_exact(transform):
    transformed = surrogates.taylor(MODEL, SimulatedConsortium(DATA, transform=transform), CENTER)
    chex.assert_trees_all_equal(transformed, simulate_answers("taylor"))


def test_an_error_names_the_client(sites):
    nowhere = CENTER | {"a": jnp.array(jnp.nan)}
    name = next(iter(STUDY.sites))
    for data, label in ((sites, repr(name)), (DATA, "0")):
        message = rf"3 of 3 clients. client {label} \(5 rows\).* not finite"
        with pytest.raises(ValueError, match=message):
            surrogates.taylor(MODEL, data, nowhere)
    assert labels_of(sites) == tuple(STUDY.sites)


@pytest.mark.slow
def test_sites_find_the_mode_of_a_simulation(sites):
    deployed = surrogates.mode(MODEL, sites, POSITION)
    for data in (DATA, SIMULATED):
        simulated = surrogates.mode(MODEL, data, POSITION)
        near(deployed.position, simulated.position)
        assert deployed.num_exchanges == simulated.num_exchanges
        assert (deployed.bits_up, deployed.bits_down) == (simulated.bits_up, simulated.bits_down)


@pytest.fixture(scope="module")
def white(sites):
    return fedmcmc.whiten(MODEL, sites, POSITION)


@pytest.mark.slow
def test_kernels_run_in_whitened_coordinates(sites, white):
    """Sites get the coordinates, so that a kernel on them runs as in a simulation."""
    simulated = fedmcmc.whiten(MODEL, DATA, POSITION)
    near(white.surrogates, simulated.surrogates)
    near(white.metric, simulated.metric)
    settings = dict(num_rounds=4, progress=False)
    for build in (
        lambda w: fedmcmc.lsd(w.posterior, step_size=0.1),
        lambda w: fedmcmc.fsgld(w.posterior, w.surrogates, step_size=0.02, num_local_steps=2),
    ):
        samples = sites.sample(KEY, build(white), white.position, **settings)
        expected = fedmcmc.sample(KEY, build(simulated), DATA, simulated.position, **settings)
        jax.tree.map(close, samples.draws, expected.draws)


@pytest.mark.slow
def test_predictions_send_nothing(sites, white, answers):
    counts = [len(sent) for sent in answers.values()]
    kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    biases = [fedmcmc.predict_bias(kernel, x, white.surrogates) for x in (sites, DATA)]
    np.testing.assert_array_equal(*(bias.covariance for bias in biases))
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
    assert [len(sent) for sent in answers.values()] == counts
    far = fedmcmc.lsd(white.posterior, step_size=1.5)
    with pytest.warns(fedmcmc.SamplingWarning, match="Predicted from Gaussian"):
        sites.sample(
            KEY, far, white.position, surrogates=white.surrogates, num_rounds=1, progress=False
        )


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "rounds"), [(0.3, 1), (2.0, 3)])
@pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning")
def test_sites_leave_out_rows_as_a_simulation(spread, rounds, sites):
    """If draws reach far, weighted points judge some rows."""
    draws = {
        "a": CENTER["a"] + spread * jax.random.normal(KEY, (200,)),
        "b": {"c": CENTER["b"]["c"] + spread * jax.random.normal(KEY, (200, 2))},
    }
    deployed, simulated = (
        criticism.loo(MODEL, x, draws, minimum_rows=2, refine=True) for x in (sites, DATA)
    )
    np.testing.assert_allclose(
        [deployed.elpd, deployed.se], [simulated.elpd, simulated.se], rtol=1e-5
    )
    assert deployed.totals["rounds"] == rounds and deployed.num_refined == simulated.num_refined


def test_a_site_sends_its_answer_and_no_row(sites, answers):
    """A table has the site's expansion, zeros for all others, and no bytes of a row."""
    for sent in answers.values():
        sent.clear()
    fitted = surrogates.taylor(MODEL, sites, CENTER)
    expected = simulate_answers("taylor")
    for index, (name, sent) in enumerate(answers.items()):
        frames = [Frame.parse(data) for data in sent]
        (answer,) = (frame for frame in frames if frame.kind == "answer")
        code, _ = unpack(answer.body, 2)
        # Three clients' natural parameters, and one.
        table = np.frombuffer(code, ">f4")
        assert table.size == 3 * (3 + 6) + 1
        eta, triangles = table[:9].reshape(3, 3), table[9:27].reshape(3, 6)
        is_other = np.arange(3) != index
        assert not eta[is_other].any() and not triangles[is_other].any()
        means = jax.vmap(lambda x: jax.flatten_util.ravel_pytree(x)[0])(expected.precision_mean)
        np.testing.assert_allclose(eta[index], means[index], rtol=1e-5)
        rows = studies.rows_of(name)["x"]
        assert len(rows) == SIZES[index]
        for row in rows.ravel():
            for kind in ("<f4", ">f4"):
                assert row.astype(kind).tobytes() not in code
    near(fitted, expected)
    assert fitted.labels == tuple(STUDY.sites)


def test_functions_that_need_rows_are_refused_by_name(sites, tmp_path):
    for call, instead in {
        lambda: surrogates.sampled(KEY, MODEL, sites, 0.1, position=CENTER): "surrogates.laplace",
        lambda: surrogates.analytic(jnp.sum, jnp.sum, sites): "surrogates.taylor",
        lambda: fedmcmc.estimate_smoothness(KEY, MODEL, sites, CENTER): "surrogates.taylor",
    }.items():
        with pytest.raises(TypeError, match=f"(rows|FederatedData).*{instead}"):
            call()
    with pytest.raises(TypeError, match="or a consortium"):
        surrogates.taylor(MODEL, [1], CENTER)
    # The study does not allow this question.
    silent = studies.study_of(kernels={})
    with pytest.raises(deploy.Refused, match="does not allow the kernel 'CommonExpansions'"):
        surrogates.taylor(silent.model, deploy.Sites(silent, deploy.LocalTransport()), CENTER)
    # Functions that are in no study.
    stranger = fedmcmc.Posterior(lambda x: 0.0 * x["a"], lambda x, rows: rows["x"][:, 0] * x["a"])
    with pytest.raises(deploy.Refused, match="has no name at the sites"):
        surrogates.taylor(as_functions(stranger), sites, CENTER)


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
