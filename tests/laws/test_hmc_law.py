"""Adjusted kernels stay in their target: chains from exact draws keep its law in every round.

Unadjusted, they would not: at a step size of 0.6 a variance would be 10 % too large, |z| = 6.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.compression import Dense
from fedmcmc.tuning import hmc_acceptance
from fedmcmc.types import register_dataclass
from tests.oracles import laws_adjusted
from tests.oracles.exact_starts import FEDERATION, POSTERIOR, exact_draws, run
from tests.oracles.federations import LIMIT, worst_z, z_scores
from tests.support.lanes import fast_and_slow

COVARIANCE = POSTERIOR.covariance
SCALES = np.array([0.08, 0.05, 0.02])  # a metric that is not the covariance


@register_dataclass
@dataclass(frozen=True, eq=False)
class Rounded(fedmcmc.Compressor):
    """Numbers rounded to multiples of eight: a function of the message alone."""

    def encode(self, draws, message, state, client):
        return Dense(jax.tree.map(lambda x: 8 * jnp.round(x / 8), message)), state


CASES = {
    "one step": dict(step_size=1.2, max_integration_steps=1, metric=COVARIANCE),
    "1-3 steps": dict(step_size=1.2, max_integration_steps=3, metric=COVARIANCE),
    "another metric": dict(step_size=0.7, max_integration_steps=4, metric=SCALES),
    "default": dict(metric=COVARIANCE),
}
ROUNDS = {"one step": 13, "1-3 steps": 13, "another metric": 25, "default": 13}


def build(case, centre=POSTERIOR.mean):
    return fedmcmc.hmc(FEDERATION.posterior, centre + 0.3, **CASES[case])


def assert_law(draws, rounds):
    for round_ in rounds:
        assert worst_z(draws[:, round_], POSTERIOR) < LIMIT, f"after {round_ + 1} rounds"


def collect_acceptances(result, length):
    """Return the acceptances of all trajectories that end after `length` steps."""
    acceptances = []
    for round_, server in enumerate(result.servers):
        steps = server.num_points + 1
        ends = (server.num_points >= 0) & (steps == length) & (server.length == length)
        acceptances.append(result.info.acceptance[ends, round_])
    return np.concatenate(acceptances)


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["1-3 steps", "default"], ["1-3 steps"]))
def test_chains_from_exact_draws_keep_the_law_and_accept_as_often_as_told(case):
    result = run(build(case), exact_draws(), ROUNDS[case])
    assert_law(result.draws, (2, 5, ROUNDS[case] - 1))
    settings = CASES[case]
    whitened = np.linalg.cholesky(np.diag(SCALES) if case == "another metric" else COVARIANCE)
    curvatures = np.linalg.eigvalsh(whitened.T @ np.linalg.inv(COVARIANCE) @ whitened)
    step_size = settings.get("step_size") or float(result.servers[0].step_size[0])
    for length in range(1, settings.get("max_integration_steps", 1) + 1):
        expected = hmc_acceptance(step_size, curvatures, length)
        # The acceptances of a chain are hardly correlated: it mixes within few rounds.
        z = z_scores(collect_acceptances(result, length), expected)
        assert abs(z) < LIMIT, f"{length} steps"
    if case == "default":
        assert expected == pytest.approx(0.57, abs=1e-4)


def test_mala_is_a_trajectory_of_one_step():
    start = exact_draws(num=64)
    settings = dict(metric=COVARIANCE)
    mala = fedmcmc.mala(FEDERATION.posterior, POSTERIOR.mean, step_size=0.72, **settings)
    settings |= dict(step_size=1.2, max_integration_steps=1)
    hmc = fedmcmc.hmc(FEDERATION.posterior, POSTERIOR.mean, **settings)
    draws = [run(kernel, start, 5).draws for kernel in (mala, hmc)]
    np.testing.assert_allclose(*draws, rtol=1e-5, atol=1e-6)


NOISE = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_noise_in_what_decides_is_paid_for_and_leaves_the_law_alone(steps):
    """Every round from exact draws; without the penalty variances would be a fifth too large."""
    settings = dict(step_size=1.2, metric=COVARIANCE, value_noise=NOISE)
    kernel = fedmcmc.hmc(
        FEDERATION.posterior, POSTERIOR.mean, max_integration_steps=steps, **settings
    )
    result = run(kernel, exact_draws(), 13)
    assert_law(result.draws, (2, 5, 12))
    for length in range(1, steps + 1):
        # An acceptance is a probability given the noise: its mean is the average over the noise.
        expected, error = laws_adjusted.hmc(1.2, np.ones(3), length, noise=NOISE)
        rates = collect_acceptances(result, length)
        z = (rates.mean() - expected) / np.hypot(rates.std() / np.sqrt(len(rates)), error)
        assert abs(z) < LIMIT, f"{length} steps"
    without = run(
        fedmcmc.hmc(
            FEDERATION.posterior,
            POSTERIOR.mean,
            step_size=1.2,
            max_integration_steps=steps,
            metric=COVARIANCE,
        ),
        exact_draws(num=512),
        13,
    )
    assert result.info.acceptance[:, 4:].mean() < without.info.acceptance[:, 4:].mean() - 0.1


def test_no_flow_goes_one_way():
    """Antisymmetric statistics of two rounds in a row have mean zero in a reversible chain."""
    result = run(build("one step"), exact_draws(3), 3)
    root = np.linalg.inv(np.linalg.cholesky(COVARIANCE))
    u, v = ((result.draws[:, i] - POSTERIOR.mean) @ root.T for i in (1, 2))
    assert np.abs(z_scores(u**3 * v - v**3 * u, 0)).max() < LIMIT
    assert (u != v).any(1).mean() > 0.5


@pytest.mark.parametrize("case", ["1-3 steps"])
def test_faults_make_rounds_void_and_leave_the_law_alone(case):
    kernel = fedmcmc.faults(build(case), drop=0.1, nan=0.05, rescale=False)
    result = run(kernel, exact_draws(), 25)
    assert_law(result.draws, (12, 24))
    whole = np.asarray(result.info.server.whole, float)
    assert np.abs(z_scores(whole.mean(1), (0.9 * 0.95) ** 4)) < LIMIT
    moved = (np.diff(result.draws, axis=1) != 0).any(-1)
    assert moved.any() and not moved[~result.info.server.whole[:, 1:]].any()
    # The same is asked again.
    assert not result.info.server.adapting.any()


@pytest.mark.parametrize(
    "compressor",
    [
        Rounded(),
        pytest.param(fedmcmc.top_k(0.4, error_feedback=False), marks=pytest.mark.slow),
    ],
    ids=["rounded", "top_k"],
)
def test_gradients_compressed_by_a_function_of_them_leave_the_law_alone(compressor):
    settings = dict(step_size=0.6, max_integration_steps=3, metric=COVARIANCE)
    kernel = fedmcmc.hmc(FEDERATION.posterior, POSTERIOR.mean, **settings)
    result = run(fedmcmc.compress(kernel, compressor), exact_draws(), 20)
    assert_law(result.draws, (3, 19))
    plain = run(kernel, exact_draws(num=512), 20)
    assert result.info.acceptance[:, 5:].mean() < plain.info.acceptance[:, 5:].mean() - 0.1


def box(theta, rows):
    """Rows of any kind, ``theta`` uniform between zero and one."""
    return jnp.where(jnp.abs(theta[0] - 0.5) <= 0.5, jnp.zeros(len(rows)), -jnp.inf)


def test_walls_do_not_push_chains_to_where_trajectories_end_soon():
    """Trajectories that meet a wall are rejected, but when their time has come.

    If they ended there, chains near walls would begin more trajectories, and draws of a round would
    hold too few of those near walls: |z| = 12.
    """
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), box)
    data = fedmcmc.FederatedData.from_clients([np.zeros(1, np.float32)])
    kernel = fedmcmc.hmc(posterior, jnp.full(1, 0.5), step_size=0.2, max_integration_steps=6)
    start = np.random.default_rng(0).random((32_768, 1))
    result = run(kernel, start, 12, data=data)
    assert (result.info.acceptance[:, 6:] == 0).mean() > 0.1
    for round_ in (6, 11):
        gap = result.draws[:, round_, 0] - 0.5
        assert np.abs(gap).max() <= 0.5
        assert abs(z_scores(gap, 0.0)) < LIMIT
        assert abs(z_scores(gap**2, 1 / 12)) < LIMIT
