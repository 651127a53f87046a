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


def secured(digits=22, max_abs=2.0**30, data=DATA):
    """Return clients whose answers and messages are integers, as with masks."""
    transform = partial(fedmcmc.secure_sum, resolution=2.0**-digits, max_abs=max_abs)
    return SimulatedConsortium(data, transform=transform, of_runs=True)


def where(condition, value):
    """Return the model with another log likelihood per row if a condition holds."""

    def loglikelihood_fn(theta, rows):
        return jnp.where(condition(theta), value, POSTERIOR.loglikelihood_fn(theta, rows))

    return POSTERIOR._replace(loglikelihood_fn=loglikelihood_fn)


@pytest.mark.parametrize("digits", fast_and_slow([22, 8, 4], [8]))
def test_a_log_weight_is_off_by_half_a_step_per_client_at_most(digits):
    exact, found = (
        x.ask(evaluations(POSTERIOR, gradients=True), CONTENT).value
        for x in (PLAIN, secured(digits))
    )
    for a, b in ((exact.value, found.value), (exact.gradient, found.gradient)):
        error = np.abs(np.asarray(a, np.float64) - b).max()
        rounding = 3e-7 * np.abs(a).max()
        assert error <= 3 * 2.0**-digits / 2 + rounding
        assert error > rounding or digits == 22


def test_a_coarse_grid_changes_weights_by_its_rounding_only():
    approximation = fedmcmc.Gaussian.from_moments(jnp.full(3, 0.8), variance=jnp.full(3, 0.2))
    settings = dict(num_draws=200, adapt=False, centre=CENTRE)
    exact, found = (
        fedmcmc.correct(KEY, POSTERIOR, x, approximation, **settings) for x in (PLAIN, secured(4))
    )
    error = np.abs(exact.log_ratios - found.log_ratios)
    assert 0.01 < error.max() <= 3 * 2.0**-4 / 2 + 1e-5
    assert abs(exact.log_evidence - found.log_evidence) <= error.max()


def test_a_density_of_zero_stays_zero_in_a_secure_sum():
    """The lowest number represents minus infinity, even after other clients add to it."""
    posterior = where(lambda theta: theta[0] < 0, -jnp.inf)
    for gradients in (False, True):
        exact, found = (
            x.ask(evaluations(posterior, gradients=gradients), CONTENT).value
            for x in (PLAIN, secured())
        )
        none = np.asarray(POINTS)[:, 0] < 0
        assert 0 < none.sum() < 20
        np.testing.assert_array_equal(np.asarray(found.value) < LOG_ZERO_THRESHOLD, none)
        np.testing.assert_allclose(found.value[~none], exact.value[~none], rtol=1e-6, atol=1e-6)
        if gradients:
            assert not np.asarray(found.gradient)[none].any()
            np.testing.assert_allclose(found.gradient, exact.gradient, rtol=1e-5, atol=1e-6)


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
    exact, found = (x.sample(KEY, kernel, CENTRE, **settings) for x in (PLAIN, secured()))
    np.testing.assert_allclose(found.draws, exact.draws, rtol=1e-4, atol=1e-4)
    assert (found.info["acceptance"] == 0).any() and found.draws[..., 0].min() > 0.2


def test_a_question_without_a_client_has_the_range_of_the_question():
    posterior = where(lambda theta: theta[0] < 0, -jnp.inf)
    values = [
        LeaveOneOutConsortium(x, 1).ask(evaluations(posterior), CONTENT).value.value
        for x in (PLAIN, secured())
    ]
    none = np.asarray(POINTS)[:, 0] < 0
    np.testing.assert_array_equal(np.asarray(values) < LOG_ZERO_THRESHOLD, [none, none])
    np.testing.assert_allclose(values[1][~none], values[0][~none], rtol=1e-6, atol=1e-6)


def test_a_move_of_rows_that_is_impossible_for_one_client_is_for_all():
    """Three clients of `fed_gibbs` send answers as a sum of integers."""
    most = 2.0**20
    for value, steep in ((-jnp.inf, 1.0), (IMPOSSIBLE, 1.0), (-3.0, 2.0**21)):
        answers = [
            ProposalEvaluation(jnp.float32(difference), jnp.array([slope, 1.0]), jnp.float32(1))
            for difference, slope in ((2.5, 1.0), (value, steep), (70.0, -2.0))
        ]
        sent = [x.to_range(most) for x in answers]
        assert all(np.abs(leaf).max() <= most for leaf in jax.tree.leaves(sent))
        total = jax.tree.map(lambda *x: sum(x), *sent).from_range(most)
        assert total.difference < LOG_ZERO_THRESHOLD
        np.testing.assert_array_equal(total.gradient, [-1.0, 2.0])
    within = jax.tree.map(lambda *x: sum(x), answers[0], answers[2])
    chex.assert_trees_all_equal(within.from_range(most), within)


def test_a_candidate_that_is_impossible_for_one_client_is_for_all_and_the_others_are_not():
    most = 2.0**20
    answers = [
        ProposalEvaluation(jnp.array([2.5, x]), (), jnp.float32(1))
        for x in (1.0, -jnp.inf, IMPOSSIBLE, -3.0)
    ]
    sent = [x.to_range(most) for x in answers]
    assert all(np.abs(leaf).max() <= most for leaf in jax.tree.leaves(sent))
    total = jax.tree.map(lambda *x: sum(x), *sent).from_range(most)
    assert total.difference[0] == 10 and total.difference[1] < LOG_ZERO_THRESHOLD
    assert total.num_answers == 4


@pytest.mark.slow
@pytest.mark.parametrize("value", [-jnp.inf, jnp.nan, jnp.inf, -1e12], ids=str)
def test_a_search_does_not_end_at_numbers_that_are_not_representable(value):
    """Such numbers count as not finite, and the remaining points do not change."""
    question = expansions(where(lambda theta: theta[0] < 0, value))
    exact, found = (x.ask(question, CONTENT).value for x in (PLAIN, secured()))
    none = np.asarray(POINTS)[:, 0] < 0
    np.testing.assert_array_equal(np.isneginf(found.value), none)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b[~none], a[~none], rtol=1e-5, atol=1e-5)


def test_excluded_points_of_positive_density_warn():
    steep = POSTERIOR._replace(
        loglikelihood_fn=lambda theta, rows: (
            POSTERIOR.loglikelihood_fn(theta, rows)
            - jnp.where(theta[0] < 0, 1e6 * theta[0] ** 2, 0)
        )
    )
    none = np.asarray(POINTS)[:, 0] < 0
    coarse = secured(digits=32, max_abs=2.0**20)
    with pytest.warns(
        UserWarning, match=r"3 client\(s\) answered Expansions .*count as impossible"
    ):
        found = coarse.ask(expansions(steep), CONTENT).value
    np.testing.assert_array_equal(np.isneginf(found.value), none)


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
