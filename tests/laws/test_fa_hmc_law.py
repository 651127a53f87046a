"""FA-LD and FA-HMC have exactly the law of the closed form, round by round.

Independent chains from one start are compared with the exact mean and covariance after a finite
number of rounds at the step size of the run: no burn-in, no discretization bias, no tolerance.
"""

import numpy as np
import pytest

import fedmcmc
from tests.oracles import chains, laws, laws_averaging
from tests.oracles.chains import split_keys
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
# Trajectories, and Langevin steps.
FAST = ("half", "langevin")
PARTICIPATION = {
    "scheme-one": lambda: fedmcmc.categorical(W, cohort_size=3),
    "scheme-one-other-probabilities": lambda: fedmcmc.categorical(W, cohort_size=2),
    "scheme-two": lambda: fedmcmc.uniform(2),
    "bernoulli": lambda: fedmcmc.bernoulli(P),
}


COMPOSED = (
    "conducive-inside",
    "conducive-outside",
    "exact-surrogates-are-one-machine",
    "noise-inside-control-variate",
)


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


def average(estimator, **settings):
    """Return the kernel that averages trajectories along an estimator."""
    return fedmcmc.averaging(
        FEDERATION.posterior,
        estimator,
        integrator=fedmcmc.dynamics.leapfrog(4),
        step_size=ETA,
        num_local_steps=3,
        **settings,
    )


def compose(case):
    """Return a kernel that no published algorithm has, and its law."""
    full, dynamics = fedmcmc.full_gradient(), fedmcmc.dynamics
    if case == "noise-inside-control-variate":
        kernel = average(fedmcmc.scaffold(fedmcmc.noisy(full, 5.0, weighted=True)))
        return kernel, law(
            **HMC, step_size=ETA, control_variate=True, gradient_noise=5.0, noise_inside=True
        )
    if case == "exact-surrogates-are-one-machine":
        surrogates, parameters = FEDERATION.surrogates("exact")
        precisions, means = laws.pool(*parameters)
        pooled = law(**HMC, step_size=ETA, rho=1.0)._replace(
            precisions=precisions, means=means, weights=np.ones(1), noises=None
        )
        momentum = dynamics.independent_momentum()
        return average(fedmcmc.conducive(full, surrogates), momentum=momentum), pooled
    surrogates, parameters = FEDERATION.surrogates("dense", seed=1)
    if case == "conducive-inside":
        inner = fedmcmc.conducive(full, surrogates, 0.7, shares=W)
        estimator = fedmcmc.noisy(inner, 5.0, weighted=True, weights=W)
    else:
        noisy = fedmcmc.noisy(full, 5.0, weighted=True, weights=W)
        estimator = fedmcmc.conducive(noisy, surrogates, 0.7, shares=W)
    kernel = average(estimator, momentum=dynamics.shared_momentum(0.5), weights=W)
    settings = dict(rho=0.5, weights=W, gradient_noise=5.0, surrogates=parameters, alpha=0.7)
    return kernel, law(**HMC, step_size=ETA, **settings)


def run(kernel, num_rounds=4):
    keys = split_keys(NUM_CHAINS)
    return chains.run(kernel, FEDERATION.data, FEDERATION.start, keys, num_rounds)


@pytest.mark.parametrize("case", fast_and_slow([*CASES, *COMPOSED], FAST, ["half"]))
def test_law_after_two_and_four_rounds(case):
    kernel, expected = compose(case) if case in COMPOSED else build(case)
    expected, draws = expected.rounds(FEDERATION.start, 4), run(kernel)
    assert worst_z(draws[:, 1], expected[2]) < LIMIT
    assert worst_z(draws[:, 3], expected[4]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["half", "noise-fresh", "control-variate", "scheme-two"])
def test_law_after_many_rounds_is_stationary(case):
    kernel, expected = build(case)
    limit, late = expected.stationary(), expected.rounds(FEDERATION.start, 120)[-1]
    np.testing.assert_allclose(late.mean, limit.mean, rtol=0, atol=1e-4)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-3, atol=1e-5)
    assert worst_z(run(kernel, 120)[:, -1], limit) < LIMIT


@pytest.mark.slow
def test_schedules_of_step_size_correlation_and_temperature_have_their_law():
    kernel = fedmcmc.fa_hmc(
        FEDERATION.posterior,
        step_size=lambda r: ETA / (1 + r),
        num_integration_steps=4,
        num_local_steps=3,
        rho=lambda r: 1.0 - 0.5 * r,
        temperature=lambda r: 1.0 + r,
    )
    settings = [
        dict(step_size=ETA / (1 + r), rho=1.0 - 0.5 * r, temperature=1.0 + r) for r in range(2)
    ]
    moves = [law(**HMC, **numbers).map_of(np.ones(NUM_CLIENTS)) for numbers in settings]
    start = laws.at_point(FEDERATION.start)
    expected = laws.iterate(lambda law, r: laws.push(law, *moves[r]), start, 2)
    draws = run(kernel, 2)
    for round_ in range(2):
        assert worst_z(draws[:, round_], expected[round_ + 1]) < LIMIT
