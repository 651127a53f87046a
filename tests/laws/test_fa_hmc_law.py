"""FA-LD and FA-HMC have the very law of the closed form, round by round.

Independent chains from one start are compared with the exact mean and covariance after a finite
number of rounds at the step size used: no burn-in, no discretisation bias, no tolerance.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws_averaging
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_averaging import FEDERATION, law
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
NUM_CLIENTS = 4
ETA = 0.05
W = np.array([0.2, 0.35, 0.15, 0.3])
INVERSE_MASS = np.array([[1.2, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])
P = np.array([0.9, 0.5, 0.7, 0.8])
HMC = dict(num_steps=4, num_local_steps=3)
# Cold, so that nothing hides the noise of gradients.
COLD = dict(temperature=0.01, batch=2)
CASES = {
    "one-step": dict(num_steps=1, num_local_steps=1, rho=0.3),
    "shared": dict(**HMC, rho=1.0),
    "private": dict(**HMC, rho=0.0),
    "half": dict(**HMC, rho=0.5),
    "one-trajectory": dict(num_steps=5, num_local_steps=1, rho=0.5, temperature=0.5),
    "many-trajectories": dict(num_steps=1, num_local_steps=7, rho=0.2, weights=W),
    "noise-fresh": dict(**HMC, rho=0.5, gradient_noise=20.0, weights=W),
    "noise-reuse": dict(**HMC, rho=0.5, gradient_noise=20.0, gradients="reuse"),
    "batch-fresh": dict(**HMC, **COLD, weights=W),
    "batch-reuse": dict(**HMC, **COLD, gradients="reuse", replace=False, rho=0.0),
    "control-variate": dict(**HMC, **COLD, rho=0.5, control_variate=True),
    "control-variate-weights-noise": dict(
        **HMC, rho=0.5, control_variate=True, weights=W, gradient_noise=20.0
    ),
    "mass-diagonal": dict(**HMC, rho=0.4, inverse_mass=np.array([0.5, 1.5, 0.8])),
    "mass-dense": dict(**HMC, rho=0.4, inverse_mass=INVERSE_MASS, gradient_noise=5.0),
    "scheme-one": dict(
        **HMC, rho=0.4, weights=W, cohorts=laws_averaging.scheme_one(W, 3), gradient_noise=5.0
    ),
    "scheme-one-other-probabilities": dict(**HMC, rho=0.4, cohorts=laws_averaging.scheme_one(W, 2)),
    "scheme-two": dict(**HMC, rho=0.4, cohorts=laws_averaging.scheme_two(NUM_CLIENTS, 2)),
    "bernoulli": dict(**HMC, rho=0.4, cohorts=laws_averaging.bernoulli(P)),
    "langevin": dict(num_steps=0, num_local_steps=4, rho=0.5, batch=2, weights=W),
    "langevin-cold-control-variate": dict(
        num_steps=0,
        num_local_steps=4,
        rho=0.0,
        temperature=0.01,
        control_variate=True,
        gradient_noise=5.0,
    ),
}
# In the fast lane: trajectories, and Langevin steps.
FAST = ("half", "langevin")
PARTICIPATION = {
    "scheme-one": lambda: fedmcmc.categorical(W, cohort_size=3),
    "scheme-one-other-probabilities": lambda: fedmcmc.categorical(W, cohort_size=2),
    "scheme-two": lambda: fedmcmc.uniform(2),
    "bernoulli": lambda: fedmcmc.bernoulli(P),
}


def build(case):
    """Return the kernel and its law."""
    settings = dict(CASES[case])
    step_size = ETA**2 if settings["num_steps"] == 0 else ETA
    public = {key: x for key, x in settings.items() if key != "cohorts"}
    names = dict(batch="batch_size", inverse_mass="inverse_mass_matrix")
    public = {names.get(key, key): x for key, x in public.items()}
    if case in PARTICIPATION:
        public["participation"] = PARTICIPATION[case]()
    num_steps = public.pop("num_steps")
    if num_steps == 0:
        kernel = fedmcmc.fa_ld(FEDERATION.posterior, step_size=step_size, **public)
    else:
        kernel = fedmcmc.fa_hmc(
            FEDERATION.posterior, step_size=step_size, num_integration_steps=num_steps, **public
        )
    return kernel, law(step_size=step_size, **settings)


def run(kernel, *, num_rounds=4, thinning=2, seed=0):
    return fedmcmc.sample(
        jax.random.key(seed),
        kernel,
        FEDERATION.data,
        FEDERATION.start,
        num_rounds=num_rounds,
        thinning=thinning,
        num_chains=NUM_CHAINS,
        progress=False,
    ).draws


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST, ["half"]))
def test_law_after_two_and_four_rounds(case):
    kernel, expected = build(case)
    expected = expected.rounds(FEDERATION.start, 4)
    draws = run(kernel)
    assert worst_z(draws[:, 0], expected[2]) < LIMIT
    assert worst_z(draws[:, 1], expected[4]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["half", "noise-fresh", "control-variate", "scheme-two"])
def test_stationary_law(case):
    kernel, expected = build(case)
    limit, late = expected.stationary(), expected.rounds(FEDERATION.start, 120)[-1]
    np.testing.assert_allclose(late.mean, limit.mean, rtol=0, atol=1e-4)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-3, atol=1e-5)
    assert worst_z(run(kernel, num_rounds=120, thinning=60)[:, 1], limit) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_conducive_gradients_within_local_trajectories(where):
    surrogates, parameters = FEDERATION.surrogates("dense", seed=1)
    estimator = fedmcmc.full_gradient()
    if where == "inside":
        estimator = fedmcmc.noisy(
            fedmcmc.conducive(estimator, surrogates, 0.7, shares=W), 5.0, weighted=True, weights=W
        )
    else:
        estimator = fedmcmc.conducive(
            fedmcmc.noisy(estimator, 5.0, weighted=True, weights=W), surrogates, 0.7, shares=W
        )
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        estimator,
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
        momentum=fedmcmc.dynamics.shared_momentum(0.5),
        weights=W,
    )
    expected = law(
        **HMC,
        step_size=ETA,
        rho=0.5,
        weights=W,
        gradient_noise=5.0,
        surrogates=parameters,
        alpha=0.7,
    )
    assert worst_z(run(kernel)[:, 1], expected.rounds(FEDERATION.start, 4)[4]) < LIMIT


@pytest.mark.slow
def test_exact_surrogates_make_the_law_that_of_one_machine_whatever_the_number_of_local_steps():
    surrogates, parameters = FEDERATION.surrogates("exact")
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        fedmcmc.conducive(fedmcmc.full_gradient(), surrogates),
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
        momentum=fedmcmc.dynamics.independent_momentum(),
    )
    pooled = law(**HMC, step_size=ETA, surrogates=parameters, rho=1.0)
    pooled = pooled._replace(
        precisions=FEDERATION.precisions.sum(0)[None],
        means=np.linalg.solve(
            FEDERATION.precisions.sum(0),
            np.einsum("cij,cj->i", FEDERATION.precisions, FEDERATION.means),
        )[None],
        weights=np.ones(1),
        surrogates=None,
        noises=None,
    )
    assert worst_z(run(kernel)[:, 1], pooled.rounds(FEDERATION.start, 4)[4]) < LIMIT


@pytest.mark.slow
def test_the_noise_of_an_oracle_cancels_inside_a_control_variate():
    kernel = fedmcmc.averaging(
        FEDERATION.posterior,
        fedmcmc.scaffold(fedmcmc.noisy(fedmcmc.full_gradient(), 5.0, weighted=True)),
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
    )
    expected = law(
        **HMC, step_size=ETA, control_variate=True, gradient_noise=5.0, noise_inside=True
    )
    assert worst_z(run(kernel)[:, 1], expected.rounds(FEDERATION.start, 4)[4]) < LIMIT


@pytest.mark.slow
def test_schedules_of_step_size_correlation_and_temperature():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior,
        step_size=lambda r: ETA / (1 + r),
        num_integration_steps=4,
        num_local_steps=3,
        rho=lambda r: 1.0 - 0.5 * r,
        temperature=lambda r: 1.0 + r,
    )
    expected = [
        law(**HMC, step_size=ETA / (1 + r), rho=1.0 - 0.5 * r, temperature=1.0 + r)
        for r in range(2)
    ]
    first = expected[0].rounds(FEDERATION.start, 1)[-1]
    a, b, v = expected[1].map_of(np.ones(4))
    second = first._replace(mean=a @ first.mean + b, covariance=a @ first.covariance @ a.T + v)
    draws = run(kernel, num_rounds=2, thinning=1)
    assert worst_z(draws[:, 0], first) < LIMIT
    assert worst_z(draws[:, 1], second) < LIMIT


ANCHORS = [
    (dict(rho=0.5), 0.9197732, 0.5559346),
    (dict(rho=0.5, gradient_noise=1.0), 0.9197732, 0.5865809),
    (dict(rho=0.5, control_variate=True), 1.4545455, 0.6248905),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings, mean, variance", ANCHORS)
def test_anchors_of_two_scalar_clients(settings, mean, variance):
    """Stationary mean and variance, from independent simulations of 2e5 chains."""
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0 * theta,
        lambda theta, rows: -0.5 * rows["a"] * (theta - rows["m"]) ** 2,
    )
    w = np.array([0.4, 0.6])
    data = fedmcmc.FederatedData.from_clients(
        [
            {"a": np.array([a]), "m": np.array([m])}
            for a, m in zip(w * (1, 3), (-1.0, 2.0), strict=True)
        ]
    )
    kernel = fedmcmc.fa_hmc(
        posterior, step_size=0.3, num_integration_steps=4, num_local_steps=3, weights=w, **settings
    )
    draws = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        data,
        jnp.array(1.0),
        num_rounds=40,
        thinning=40,
        num_chains=NUM_CHAINS,
        progress=False,
    ).draws[:, 0]
    z_mean = (draws.mean() - mean) / (draws.std() / np.sqrt(NUM_CHAINS))
    z_variance = (draws.var() - variance) / (variance * np.sqrt(2 / NUM_CHAINS))
    assert max(abs(z_mean), abs(z_variance)) < LIMIT
