"""Messages for unsuitable arguments of kernels, before anything is compiled."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import Mixture, inference
from tests.contracts.model import DATA, KEY, POSITIONS, POSTERIOR, P, logprior, surrogates

VECTOR = POSITIONS["vector"]
INPUTS = np.ones((3, 2))
SURROGATES = surrogates(VECTOR)
FULL = fedmcmc.full_gradient()
SGD = optax.sgd(0.1)
FLAT = POSTERIOR._replace(logprior_fn=lambda theta: jnp.zeros(()))
SETTINGS = dict(step_size=0.1, num_local_steps=2)
HALVES = jnp.ones(2) / 2
Q = fedmcmc.Gaussian.from_moments(VECTOR, np.diag([0.3, 0.2, 0.4]))
MIXED = Mixture.of([(0.5, np.inf, np.zeros(3), np.eye(3)), (0.5, 5.0, np.ones(3), np.eye(3))])
TILTED_MEAN = inference.sgd_mean(SGD, num_samples=4, batch_size=3)
MCMC = inference.mcmc(TILTED_MEAN, shrinkage=0.3)


def start(kernel, position=VECTOR, data=DATA):
    return kernel.init(KEY, position, data)


def fa_hmc(**changes):
    return fedmcmc.fa_hmc(POSTERIOR, **(SETTINGS | dict(num_integration_steps=2) | changes))


def averaging(estimator=FULL, **changes):
    settings = dict(integrator=fedmcmc.dynamics.leapfrog(2), step_size=0.1) | changes
    return fedmcmc.averaging(POSTERIOR, estimator, **settings)


def fed_be(**changes):
    settings = dict(client_optimizer=SGD, num_local_steps=4) | changes
    return fedmcmc.fed_be(POSTERIOR, **settings)


def distill(inputs=INPUTS, **changes):
    settings = dict(optimizer=SGD, num_steps=5) | changes
    return fedmcmc.distillation(lambda w, x: x @ w, inputs, **settings)


def fed_ep(**changes):
    return fedmcmc.fed_ep(FLAT, **(dict(inference=MCMC) | changes))


def fsgld(q=SURROGATES, **changes):
    settings = SETTINGS | dict(probabilities=P, refresh_every=3) | changes
    return fedmcmc.fsgld(POSTERIOR, q, **settings)


def hmc(centre=VECTOR, posterior=POSTERIOR, **settings):
    return start(fedmcmc.hmc(posterior, centre, **settings))


def gaussian_mh(approximation=Q, **settings):
    return start(fedmcmc.gaussian_mh(POSTERIOR, approximation, **settings))


def several(**moments):
    return fedmcmc.Gaussian.from_moments(np.zeros((2, 3)), **moments)


WIDE_DATA = fedmcmc.FederatedData.from_clients([{"x": np.ones((n, 65))} for n in (2, 1)])
WITH_REPEATS = fedmcmc.categorical(cohort_size=2)
NEEDS_SUM = "needs the sum of all clients' gradients before each round"
SHAPE_OF_CLIENTS = r"must have shape \(3,\)"
NO_SCHEDULE = "must be a number, not a schedule"
SHAPE_OF_METRIC = (
    r"inverse_mass_matrix must be shaped as the position, \(3,\), or be a matrix \(3, 3\)"
)

VALUE_ERRORS = [
    # Averaging
    (lambda: fa_hmc(step_size=0.0), "step_size must be a finite number above 0"),
    (lambda: fa_hmc(num_integration_steps=0), "num_integration_steps must be a positive.*0"),
    (lambda: fa_hmc(num_integration_steps=1.5), "num_integration_steps must be a positive integer"),
    (lambda: fa_hmc(num_local_steps=0), "num_local_steps must be a positive integer"),
    (lambda: fa_hmc(gradients="old"), "gradients must be .fresh. or .reuse., got 'old'"),
    (lambda: fa_hmc(rho=1.5), r"rho must be in \[0, 1\], got 1.5"),
    (lambda: fa_hmc(rho=-0.1), r"rho must be in \[0, 1\], got -0.1"),
    (lambda: fa_hmc(gradient_noise=-1.0), "gradient_noise must be a finite number at least 0"),
    (lambda: fa_hmc(temperature=-1.0), "temperature must be a finite number at least 0"),
    (lambda: fa_hmc(weights=[0.5, 0.6]), "weights must be positive and sum to one.*1.1"),
    (lambda: fa_hmc(weights=[1.5, -0.5]), "smallest entry of -0.5"),
    (lambda: fa_hmc(weights=0.5), r"weights must have shape \[num_clients\], got shape \(\)"),
    (lambda: start(fa_hmc(weights=HALVES)), SHAPE_OF_CLIENTS + ", one per client"),
    (lambda: start(fa_hmc(inverse_mass_matrix=jnp.array([1.0, 0, 1]))), "positive in every"),
    (lambda: start(fa_hmc(inverse_mass_matrix=jnp.ones((2, 3)))), r"got \(2, 3\)"),
    (lambda: start(fa_hmc(inverse_mass_matrix=jnp.ones((3, 3)))), "symmetric and positive def"),
    (lambda: start(fa_hmc(inverse_mass_matrix=jnp.ones(2))), SHAPE_OF_METRIC),
    (lambda: start(fa_hmc(inverse_mass_matrix=jnp.eye(2))), r"got \(2, 2\)"),
    (
        lambda: start(fa_hmc(control_variate=True, participation=fedmcmc.uniform(1))),
        "need the gradients of all clients",
    ),
    (
        lambda: fedmcmc.compress(
            fa_hmc(participation=WITH_REPEATS), fedmcmc.memory(fedmcmc.quantize(2), of="all")
        ),
        "a client that is drawn twice updates its memory once",
    ),
    (
        lambda: start(averaging(fedmcmc.noisy(FULL, 1.0, weighted=True, weights=HALVES))),
        "weights " + SHAPE_OF_CLIENTS,
    ),
    (lambda: fedmcmc.noisy(FULL, 1.0, weights=HALVES), "weights only with weighted=True"),
    (
        lambda: start(averaging(fedmcmc.scaffold(FULL, shares=HALVES))),
        "shares " + SHAPE_OF_CLIENTS,
    ),
    (lambda: fedmcmc.scaffold(fedmcmc.scaffold(FULL)), "does not itself need a sum"),
    (
        lambda: start(fedmcmc.langevin(POSTERIOR, fedmcmc.scaffold(FULL), step_size=0.1)),
        NEEDS_SUM,
    ),
    (
        lambda: start(
            fedmcmc.consensus(POSTERIOR, fedmcmc.scaffold(FULL), tolerance=0.1, **SETTINGS)
        ),
        NEEDS_SUM,
    ),
    (lambda: fedmcmc.categorical(cohort_size=0), "must be a positive integer, got 0"),
    # Ensembles and their distillation
    (lambda: fed_be(ensemble="student"), 'must be "gaussian" or "dirichlet", got'),
    (lambda: fed_be(num_local_steps=0), "num_local_steps must be a positive integer"),
    (lambda: fed_be(num_models=0), "num_models must be a positive integer, got 0"),
    (lambda: fed_be(learning_rate=0.0), "learning_rate must be a finite number above 0"),
    (lambda: fed_be(ensemble="dirichlet", concentration=0.0), "concentration must be"),
    (lambda: distill({"a": np.ones(3), "b": np.ones(4)}), "of the same positive"),
    (lambda: distill(()), "of the same positive length"),
    (lambda: distill(num_steps=0), "num_steps must be a positive integer"),
    (lambda: distill(average_from=5), "average_from must be below num_steps, got 5 and 5"),
    (lambda: distill(average_from=-1), "average_from must be"),
    (lambda: distill(average_every=0), "average_every must be a positive integer"),
    (lambda: distill(batch_size=0), "batch_size must be a positive integer"),
    # Expectation propagation
    (lambda: fed_ep(structure="banded"), "structure must be one of"),
    (lambda: fed_ep(damping=0.0), "damping must be"),
    (lambda: fed_ep(cohort_size=2, participation=fedmcmc.full()), "either cohort_size"),
    (lambda: fed_ep(participation=WITH_REPEATS), "at most once per round"),
    (lambda: fedmcmc.fed_sep(FLAT, inference=MCMC, cavity="site"), "cavity must be"),
    (lambda: fed_ep(prior=Q, structure="diagonal"), "structure of the approximation, diagonal"),
    (
        lambda: start(
            fed_ep(prior=fedmcmc.Gaussian.from_moments(jnp.ones(2), variance=jnp.ones(2)))
        ),
        "over the position",
    ),
    (lambda: inference.importance(100), "num_points must be a power of two"),
    (
        lambda: start(fedmcmc.fed_ep(POSTERIOR), {"a": VECTOR, "b": jnp.zeros(2)}),
        "loglikelihood_fn does not take",
    ),
    (
        lambda: start(fed_ep(inference=inference.importance(8))),
        "four points per dimension, got 3 dimensions and num_points=8",
    ),
    (
        lambda: start(fedmcmc.fed_ep(POSTERIOR), jnp.zeros(65), WIDE_DATA),
        r"up to 64 dimensions.*another inference=",
    ),
    (lambda: fed_ep(structure="scaled_identity", first_sites="expansion"), "needs a structure"),
    (lambda: fed_ep(first_sites="mode"), "first_sites must be"),
    # Surrogates that clients refit
    (lambda: fsgld(refresh_every=None, refresh_until=3), "refresh_until needs refresh_every"),
    (lambda: fsgld(refresh_every=0), "refresh_every must be a positive integer"),
    (lambda: fsgld(refresh_until=-1), "refresh_until must be a round, at least 0, got -1"),
    (
        lambda: fsgld(fedmcmc.Gaussian.from_moments(jnp.zeros((3, 3)), variance=jnp.ones(3))),
        "refitted by expansions, which are dense or diagonal",
    ),
    (lambda: fedmcmc.faults(fsgld(), late=0.2), "late: this kernel needs a client's message of a"),
    (
        lambda: fedmcmc.kernels.refreshed_relay(
            POSTERIOR,
            fedmcmc.svrg(fedmcmc.minibatch(2), 3),
            SURROGATES,
            participation=fedmcmc.categorical(P),
            refresh_every=2,
            step_size=0.01,
        ),
        r"supports no estimator that broadcasts a reference \(svrg\)",
    ),
    # Trajectories that are accepted or rejected
    (lambda: hmc(step_size=0.0), "step_size"),
    (lambda: hmc(max_integration_steps=0), "max_integration_steps"),
    (lambda: hmc(num_adapt=1.5), "num_adapt"),
    (lambda: hmc(target_accept=1.0), "target_accept"),
    (lambda: hmc(np.zeros(2)), "centre must have the shapes of the position"),
    (lambda: hmc(metric=np.ones(2)), "metric must be shaped as the position"),
    (lambda: hmc(metric=-np.eye(3)), "positive definite"),
    # Proposals from an approximation
    (lambda: gaussian_mh(SURROGATES), "whole posterior"),
    (lambda: gaussian_mh(several(covariance=np.stack([np.eye(3)] * 2))), "whole posterior"),
    (lambda: gaussian_mh(several(variance=np.ones(2))), "whole posterior"),
    (lambda: gaussian_mh(fedmcmc.Gaussian.uniform(VECTOR)), "not proper"),
    (lambda: gaussian_mh(Q / Q**2), "not proper: the smallest eigenvalue .* -5"),
    (lambda: gaussian_mh(MIXED, correlation=0.5), "need a Gaussian"),
    (lambda: gaussian_mh(correlation=1.0), r"correlation must be in \[0, 1\)"),
    (lambda: gaussian_mh(correlation=-0.1), "correlation"),
    (lambda: gaussian_mh(tail=1.0), "tail"),
    (lambda: fedmcmc.multiple_try(POSTERIOR, Q, num_tries=1), "num_tries must be at least 2"),
    (lambda: fedmcmc.multiple_try(POSTERIOR, Q, num_tries=2.5), "num_tries"),
]
TYPE_ERRORS = [
    (
        lambda: averaging(integrator=fedmcmc.dynamics.leapfrog),
        "integrator must be a fedmcmc.dynamics.Integrator",
    ),
    (lambda: averaging(momentum=0.5), "momentum must be a fedmcmc.dynamics.Momentum, got float"),
    (lambda: averaging(5), "estimator must be a fedmcmc.types.GradientEstimator"),
    (lambda: fa_hmc(control_variate="no"), "control_variate must be True or False, got 'no'"),
    (lambda: fed_be(client_optimizer=0.1), "client_optimizer must be an optax"),
    (lambda: fed_be(distill=3), "distill must be a function or None, got int"),
    (
        lambda: fed_be(ensemble="dirichlet", concentration=lambda r: 1.0),
        "concentration must be a number",
    ),
    (
        lambda: fedmcmc.ensemble(
            POSTERIOR, FULL, "gaussian", client_optimizer=SGD, num_local_steps=1
        ),
        "family must be an Ensemble",
    ),
    (lambda: distill(optimizer=None), "optimizer must be an optax"),
    (lambda: fed_ep(server_optimizer=0.1), "server_optimizer must be an optax"),
    (lambda: fed_ep(inference=TILTED_MEAN), "inference"),
    (lambda: fed_ep(prior=1.0), r"must be a fedmcmc\.Gaussian"),
    (lambda: hmc(step_size=lambda round_: 0.1), NO_SCHEDULE),
    (lambda: hmc(np.zeros(3, int)), "centre must hold floats"),
    (lambda: hmc(0), "centre must hold floats"),
    (lambda: hmc(posterior=logprior), "posterior"),
    (lambda: gaussian_mh(np.zeros(3)), "fedmcmc.Gaussian"),
    (lambda: gaussian_mh(correlation=lambda round_: 0.1), "correlation must be a number"),
]


@pytest.mark.parametrize(("build", "message"), VALUE_ERRORS)
def test_bad_values_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(("build", "message"), TYPE_ERRORS)
def test_bad_types_are_named(build, message):
    with pytest.raises(TypeError, match=message):
        build()


@pytest.mark.parametrize(
    "kernel", [fedmcmc.hmc(POSTERIOR, VECTOR), fedmcmc.gaussian_mh(POSTERIOR, Q)]
)
def test_kernels_that_need_all_clients_refuse_to_lack_any(kernel):
    for rule in (fedmcmc.uniform(2), fedmcmc.bernoulli(0.5), fedmcmc.full()):
        with pytest.raises(ValueError, match="needs the log likelihood of every client"):
            start(replace(kernel, participation=rule))
    with pytest.raises(ValueError, match="late"):
        fedmcmc.faults(kernel, late=0.1)
    with pytest.raises(ValueError, match="cannot be part of a sequence"):
        fedmcmc.sequence(kernel, fedmcmc.mala(POSTERIOR, VECTOR))


def test_only_exact_functions_of_the_message_compress_trajectories():
    compression, top_k = fedmcmc.compression, fedmcmc.top_k(0.5, error_feedback=False)
    kernel = fedmcmc.hmc(POSTERIOR, VECTOR)
    for compressor in (
        fedmcmc.quantize(8),
        fedmcmc.sparsify(0.5),
        fedmcmc.top_k(0.5),
        fedmcmc.memory(fedmcmc.quantize(8)),
        fedmcmc.memory(compression.identity()),
        compression.chain(compression.clip(1.0), fedmcmc.quantize(4)),
    ):
        with pytest.raises(ValueError, match=r"top_k\(\.\.\., error_feedback=False\)"):
            fedmcmc.compress(kernel, compressor)
    for compressor in (compression.identity(), compression.chain(compression.clip(1.0), top_k)):
        once = fedmcmc.compress(kernel, compressor)
        assert fedmcmc.compress(once, compression.clip(2.0)).depth == 1
    for compressor in (fedmcmc.quantize(8), top_k):
        with pytest.raises(ValueError, match="there is nothing to compress"):
            fedmcmc.compress(fedmcmc.gaussian_mh(POSTERIOR, Q), compressor)


def test_schedules_are_checked_in_the_rounds_that_use_them():
    sample = partial(fedmcmc.sample, KEY, data=DATA, num_rounds=5, progress=False)
    lsd = partial(fedmcmc.lsd, POSTERIOR)
    with pytest.raises(ValueError, match=r"step_size must be .* above 0, got 0 in round 2"):
        sample(lsd(step_size=lambda r: 0.01 - 0.005 * r), position=VECTOR)
    with pytest.raises(ValueError, match=r"rho must be in \[0, 1\], got 1.5 in round 0"):
        sample(fa_hmc(rho=lambda r: 1.5 + 0 * r), position=VECTOR)
    # Values after the last round or before the first do not matter.
    samples = sample(lsd(step_size=lambda r: 0.01 - 0.002 * r), position=VECTOR)
    infinite_at_zero = lsd(step_size=lambda r: 0.05 / r)
    assert int(sample(infinite_at_zero, state=samples.state).state.broadcast.round[0]) == 10
    with pytest.raises(ValueError, match="got inf in round 0"):
        sample(infinite_at_zero, position=VECTOR)


def test_weights_are_checked_if_a_kernel_is_built_in_compiled_code():
    @jax.jit
    def build(weights):
        return fedmcmc.fa_ld(POSTERIOR, weights=weights, **SETTINGS)

    with pytest.raises(ValueError, match=r"weights must .* got a sum of 1\.1"):
        start(build(jnp.array([0.5, 0.3, 0.3])))


def test_a_rule_of_rest_needs_an_approximation():
    kernel = fedmcmc.lsd(POSTERIOR, step_size=1e-3)
    with pytest.raises(ValueError, match=r"needs a kernel with an approximation, such as"):
        fedmcmc.sample(KEY, kernel, DATA, VECTOR, until=fedmcmc.at_rest(), max_rounds=10)
    with pytest.raises(ValueError, match="threshold must be a positive number"):
        fedmcmc.at_rest(0.0)
