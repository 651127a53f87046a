"""Tests of questions as secure sums: accuracy, and numbers out of range."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.criticism._wrapped import LeaveOneOutConsortium
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Points, evaluations, expansions
from fedmcmc.kernels._gibbs_rows import ProposalEvaluation
from fedmcmc.kernels._questions import IMPOSSIBLE
from fedmcmc.runs import SimulatedConsortium
from tests.contracts.model import DATA, KEY, POSTERIOR
from tests.support.lanes import fast_and_slow

CENTRE = jnp.array([0.3, -0.2, 0.5])
POINTS = CENTRE + jax.random.normal(jax.random.key(1), (20, 3))
CONTENT = Points(POINTS, CENTRE)
PLAIN = SimulatedConsortium(DATA)


def secured(digits=22, max_abs=2.0**30):
    """Return clients whose answers and messages are integers, as with masks."""
    transform = partial(fedmcmc.secure_sum, resolution=2.0**-digits, max_abs=max_abs)
    return SimulatedConsortium(DATA, transform=transform, of_runs=True)


def where(condition, value):
    """Return the model with another log likelihood per row if a condition holds."""

    def loglikelihood_fn(theta, rows):
        return jnp.where(condition(theta), value, POSTERIOR.loglikelihood_fn(theta, rows))

    return POSTERIOR._replace(loglikelihood_fn=loglikelihood_fn)


@pytest.mark.parametrize("digits", fast_and_slow([22, 8, 4], [8]))
def test_a_log_weight_is_off_by_half_a_step_per_client_at_most(digits):
    exact, result = (
        x.ask(evaluations(POSTERIOR, gradients=True), CONTENT).value
        for x in (PLAIN, secured(digits))
    )
    for a, b in ((exact.value, result.value), (exact.gradient, result.gradient)):
        error = np.abs(np.asarray(a, np.float64) - b).max()
        rounding = 3e-7 * np.abs(a).max()
        assert error <= 3 * 2.0**-digits / 2 + rounding
        assert error > rounding or digits == 22


def test_a_coarse_grid_changes_weights_by_its_rounding_only():
    approximation = fedmcmc.Gaussian.from_moments(jnp.full(3, 0.8), variance=jnp.full(3, 0.2))
    settings = dict(num_draws=200, adapt=False, centre=CENTRE)
    exact, result = (
        fedmcmc.correct(KEY, POSTERIOR, x, approximation, **settings) for x in (PLAIN, secured(4))
    )
    error = np.abs(exact.log_ratios - result.log_ratios)
    assert 0.01 < error.max() <= 3 * 2.0**-4 / 2 + 1e-5
    assert abs(exact.log_evidence - result.log_evidence) <= error.max()


BELOW_ZERO = np.asarray(POINTS)[:, 0] < 0


def test_a_density_of_zero_stays_zero_in_a_secure_sum():
    """The lowest number represents minus infinity, even after other clients add to it."""
    question = evaluations(where(lambda theta: theta[0] < 0, -jnp.inf), gradients=True)
    exact, result = (x.ask(question, CONTENT).value for x in (PLAIN, secured()))
    assert 0 < BELOW_ZERO.sum() < 20
    np.testing.assert_array_equal(np.asarray(result.value) < LOG_ZERO_THRESHOLD, BELOW_ZERO)
    np.testing.assert_allclose(
        result.value[~BELOW_ZERO], exact.value[~BELOW_ZERO], rtol=1e-6, atol=1e-6
    )
    assert not np.asarray(result.gradient)[BELOW_ZERO].any()
    np.testing.assert_allclose(result.gradient, exact.gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        partial(fedmcmc.hmc, step_size=0.6, max_integration_steps=2),
        partial(fedmcmc.mala, step_size=0.5),
    ],
    ids=["hmc", "mala"],
)
def test_a_chain_turns_back_at_a_wall_in_a_secure_sum(build):
    posterior = where(lambda theta: theta[0] < 0.2, -jnp.inf)
    kernel = build(posterior, CENTRE)
    settings = dict(num_rounds=40, num_chains=2, progress=False)
    exact, result = (x.sample(KEY, kernel, CENTRE, **settings) for x in (PLAIN, secured()))
    np.testing.assert_allclose(result.draws, exact.draws, rtol=1e-4, atol=1e-4)
    assert (result.info["acceptance"] == 0).any() and result.draws[..., 0].min() > 0.2


def test_a_question_without_a_client_has_the_range_of_the_question():
    posterior = where(lambda theta: theta[0] < 0, -jnp.inf)
    exact, result = (
        np.asarray(LeaveOneOutConsortium(x, 1).ask(evaluations(posterior), CONTENT).value.value)
        for x in (PLAIN, secured())
    )
    np.testing.assert_array_equal(exact < LOG_ZERO_THRESHOLD, BELOW_ZERO)
    np.testing.assert_array_equal(result < LOG_ZERO_THRESHOLD, BELOW_ZERO)
    np.testing.assert_allclose(result[~BELOW_ZERO], exact[~BELOW_ZERO], rtol=1e-6, atol=1e-6)


MOST = 2.0**20  # largest number in a secure sum


def add_in_range(answers):
    """Return the sum of answers, each moved to the range of the secure sum."""
    in_range = [x.to_range(MOST) for x in answers]
    assert all(np.abs(leaf).max() <= MOST for leaf in jax.tree.leaves(in_range))
    return jax.tree.map(lambda *x: sum(x), *in_range).from_range(MOST)


def test_a_proposal_that_is_impossible_for_one_client_is_impossible():
    """Three clients of `fed_gibbs` send answers as a sum of integers."""
    for value, steep in ((-jnp.inf, 1.0), (IMPOSSIBLE, 1.0), (-3.0, 2.0**21)):
        answers = [
            ProposalEvaluation(jnp.float32(difference), jnp.array([slope, 1.0]), jnp.float32(1))
            for difference, slope in ((2.5, 1.0), (value, steep), (70.0, -2.0))
        ]
        total = add_in_range(answers)
        assert total.difference < LOG_ZERO_THRESHOLD
        np.testing.assert_array_equal(total.gradient, [-1.0, 2.0])
    within = jax.tree.map(lambda *x: sum(x), answers[0], answers[2])
    chex.assert_trees_all_equal(within.from_range(MOST), within)
    # Of two candidates only the one that two clients exclude is impossible.
    answers = [
        ProposalEvaluation(jnp.array([2.5, x]), (), jnp.float32(1))
        for x in (1.0, -jnp.inf, IMPOSSIBLE, -3.0)
    ]
    total = add_in_range(answers)
    assert total.difference[0] == 10 and total.difference[1] < LOG_ZERO_THRESHOLD
    assert total.num_answers == 4


@pytest.mark.slow
@pytest.mark.parametrize("value", [-jnp.inf, jnp.nan, jnp.inf, -1e12], ids=str)
def test_a_search_continues_at_numbers_that_are_not_representable(value):
    """Such numbers count as not finite, and the remaining points do not change."""
    question = expansions(where(lambda theta: theta[0] < 0, value))
    exact, result = (x.ask(question, CONTENT).value for x in (PLAIN, secured()))
    np.testing.assert_array_equal(np.isneginf(result.value), BELOW_ZERO)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(result), strict=True):
        np.testing.assert_allclose(b[~BELOW_ZERO], a[~BELOW_ZERO], rtol=1e-5, atol=1e-5)


def test_excluded_points_of_positive_density_warn():
    steep = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: (
            POSTERIOR.loglikelihood_fn(theta, rows)
            - jnp.where(theta[0] < 0, 1e6 * theta[0] ** 2, 0)
        )
    )
    coarse = secured(digits=32, max_abs=2.0**20)
    with pytest.warns(
        UserWarning, match=r"3 client\(s\) answered Expansions .*count as impossible"
    ):
        result = coarse.ask(expansions(steep), CONTENT).value
    np.testing.assert_array_equal(np.isneginf(result.value), BELOW_ZERO)


def test_answers_that_do_not_fit_are_an_error_with_the_remedy():
    high = where(lambda theta: theta[0] < 0, 2.0**31)
    with pytest.raises(
        ValueError,
        match=r"answered Evaluations with numbers beyond the range `max_abs` .*Increase `max_abs`",
    ):
        secured().ask(evaluations(high), CONTENT)
    nowhere = Points(POINTS, CENTRE * jnp.nan)
    with pytest.raises(ValueError, match=r"3 client\(s\) to Evaluations are not finite"):
        secured().ask(evaluations(POSTERIOR), nowhere)


@pytest.mark.slow
def test_unbounded_decreases_count_as_decreases():
    """The density may be zero two sds from the mode."""
    posterior = where(lambda theta: theta[0] > 1.2, -jnp.inf)
    for data in (PLAIN, secured()):
        with pytest.warns(UserWarning, match="no guide to the scale"):
            fedmcmc.whiten(posterior, data, CENTRE, surrogates=False)
