"""The laws of joint kernels against their anchors, and against closed forms."""

import numpy as np
import pytest

from tests.oracles.laws_joint import (
    Group,
    Model,
    cohorts,
    exact,
    gibbs_round,
    langevin_round,
    stationary,
    ula,
)


def scalar_group(client, a, e):
    return Group(client, *(np.atleast_2d(x) for x in (2.0, -1.0, 3.0)), *np.atleast_1d(a, e))


ANCHOR = Model([scalar_group(0, 1.0, 2.0), scalar_group(1, -1.0, 4.0)], np.eye(1), np.zeros(1))
STEPS = dict(step_size=0.05)


def stationary_law(refresh, probabilities=(1, 1), order="refresh_first", **settings):
    rounds = [
        (chance, langevin_round(ANCHOR, refresh, weights, order=order, **STEPS, **settings))
        for chance, weights in cohorts(probabilities)
    ]
    return stationary(rounds, np.zeros(3))


def figures(law):
    return [law.covariance[0, 0], law.covariance[1, 1], law.covariance[0, 1]]


def test_the_posterior_equals_the_anchor():
    law = ANCHOR.posterior
    np.testing.assert_allclose(law.mean, [0.461538, 0.820513, 1.487179], atol=1e-6)
    np.testing.assert_allclose(figures(law)[:2], [0.230769, 0.358974], atol=1e-6)
    np.testing.assert_allclose(ANCHOR.missing, 2 / 3)


# With ``D = 3`` a step of 0.1 is one of 0.3 relative to the curvature.
@pytest.mark.parametrize(
    ("order", "num_steps", "probabilities", "expected"),
    [
        ("gradient_first", 1, (1, 1), [0.259437, 0.417897, 0.075237]),
        ("refresh_first", 1, (1, 1), [0.264209, 0.421836, 0.089245]),
        ("refresh_first", 3, (1, 1), [0.263984, 0.421616, 0.088742]),
        ("refresh_first", 3, (0.5, 0.5), [0.285378, 0.423480, 0.092861]),
    ],
)
def test_langevin_steps_have_the_laws_of_the_anchors(order, num_steps, probabilities, expected):
    law = stationary_law(lambda g: ula(g, 0.3, num_steps), probabilities, order)
    np.testing.assert_allclose(law.mean, ANCHOR.posterior.mean, rtol=1e-9)
    np.testing.assert_allclose(figures(law), expected, atol=1e-6)


@pytest.mark.parametrize("num_draws", [1, 4])
def test_exact_draws_cost_a_share_of_the_missing_precision(num_draws):
    h, W = 0.05, ANCHOR.missing.item() / num_draws
    precision = 13 / 3
    expected = (1 + h * W / 2) / (precision * (1 - h * precision / 2))
    if num_draws == 1:
        np.testing.assert_allclose(expected, 0.263120, atol=1e-6)
    law = stationary_law(exact, num_draws=num_draws)
    np.testing.assert_allclose(law.covariance[0, 0], expected, rtol=1e-9)
    many = stationary_law(lambda g: ula(g, 0.01, 2000), num_draws=num_draws)
    np.testing.assert_allclose(many.covariance[0, 0], expected, rtol=1e-3)


@pytest.mark.parametrize("probability", [1, 0.5, 0.1])
def test_gibbs_rounds_have_the_posterior_whoever_takes_part(probability):
    rounds = [
        (chance, gibbs_round(ANCHOR, weights > 0)) for chance, weights in cohorts([probability] * 2)
    ]
    law = stationary(rounds, np.zeros(3))
    np.testing.assert_allclose(law.mean, ANCHOR.posterior.mean, rtol=1e-9)
    np.testing.assert_allclose(law.covariance, ANCHOR.posterior.covariance, rtol=1e-9)
    if probability == 1:
        # The regression of phi on itself: the share of the precision that is missing.
        slope = rounds[0][1].matrix[0, 0]
        np.testing.assert_allclose(slope, 2 / 15)
        assert not rounds[0][1].matrix[0, 1:].any()
