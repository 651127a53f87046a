"""Searches for a mode that share their evaluations."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedmcmc.surrogates import Expansion, lbfgs, newton, run_ascents
from fedmcmc.surrogates._ascents import _minimize_within

STARTS = np.array([[1.0, -2.0], [0.1, 0.0], [5.0, 5.0]])


def expand_quartic(point):
    """Expand ``sum(x^4 + x^2)``."""
    value = (point**4).sum() + (point**2).sum()
    return Expansion(point, value, 4 * point**3 + 2 * point, np.diag(12 * point**2 + 2))


def expand_well(point):
    """Expand ``(x^2 - 1)^2 + y^2``, with modes at 1 and -1 and a saddle at 0."""
    x, y = point
    gradient = np.array([4 * x * (x**2 - 1), 2 * y])
    return Expansion(point, (x**2 - 1) ** 2 + y**2, gradient, np.diag([12 * x**2 - 4, 2]))


def run(expand, ascents, max_evaluations=100):
    """Run searches; return the results and the shapes of all evaluations."""
    shapes = []

    def evaluate(points):
        shapes.append(points.shape)
        return [expand(point) for point in points]

    return run_ascents(evaluate, ascents, max_evaluations), shapes


@pytest.mark.parametrize("ascend", [newton, lbfgs])
def test_searches_in_parallel_equal_separate_searches(ascend):
    results, shapes = run(expand_quartic, [ascend(x, min_gain=1e-9) for x in STARTS])
    counts = []
    for start, result in zip(STARTS, results, strict=True):
        (alone,), evaluations = run(expand_quartic, [ascend(start, min_gain=1e-9)])
        np.testing.assert_array_equal(alone.point, result.point)
        np.testing.assert_allclose(result.point, 0, atol=1e-4)
        counts.append(len(evaluations))
    assert len(shapes) == max(counts)
    assert set(shapes) == {(3, 2)}  # one program serves all


@pytest.mark.parametrize("ascend", [newton, lbfgs])
def test_searches_stop_at_the_number_of_evaluations(ascend):
    (result,), shapes = run(expand_quartic, [ascend(STARTS[2], min_gain=1e-9)], 3)
    assert len(shapes) == 3 and result.gain > 1e-9
    assert result.value < expand_quartic(STARTS[2]).value


def test_errors_of_the_evaluation_are_raised():
    def evaluate(points):
        raise RuntimeError("the line is dead")

    with pytest.raises(RuntimeError, match="the line is dead"):
        run_ascents(evaluate, [newton(x, min_gain=1e-9) for x in STARTS], 3)


def test_newton_leaves_a_saddle_and_stays_at_a_start_without_possible_points():
    (result,), _ = run(expand_well, [newton(np.zeros(2), min_gain=1e-9)])
    np.testing.assert_allclose(np.abs(result.point), [1, 0], atol=1e-4)
    impossible = Expansion(np.zeros(2), 1e100, np.zeros(2), np.eye(2))
    (result,), shapes = run(lambda point: impossible, [newton(np.zeros(2), min_gain=1e-9)])
    assert result is impossible and len(shapes) == 1


@pytest.mark.parametrize(
    ("gradient", "diagonal", "radius"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),  # a minimum outside of the ball
        ([1.0, 2.0], [-1.0, 4.0], 0.5),  # a saddle
        ([0.0, 2.0], [-1.0, 4.0], 3.0),  # no gradient along the lowest direction
        ([0.0, 0.0], [-1.0, 4.0], 3.0),  # no gradient at all
        ([1.0, 0.0], [0.0, 1e9], 1e9),  # a linear function
    ],
)
def test_steps_minimize_a_quadratic_function_in_a_ball(gradient, diagonal, radius):
    gradient, hessian = np.array(gradient), np.diag(diagonal)
    angle = 0.3
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    gradient, hessian = turn @ gradient, turn @ hessian @ turn.T

    def value(step):
        return gradient @ step + step @ hessian @ step / 2

    step = _minimize_within(gradient, hessian, radius)
    assert np.linalg.norm(step) == pytest.approx(radius, rel=1e-6)
    directions = np.linspace(0, 2 * np.pi, 20_001)
    circle = radius * np.stack([np.cos(directions), np.sin(directions)])
    lowest = (gradient @ circle + np.einsum("in,ij,jn->n", circle, hessian, circle) / 2).min()
    assert value(step) <= lowest + 1e-6 * abs(lowest)


def test_newton_takes_as_few_evaluations_as_scipy():
    for start in STARTS:
        _, shapes = run(expand_quartic, [newton(start, min_gain=1e-9)])
        fitted = minimize(
            lambda x: expand_quartic(x).value,
            start,
            jac=lambda x: expand_quartic(x).gradient,
            hess=lambda x: expand_quartic(x).hessian,
            method="trust-exact",
            options={"gtol": 1e-4},
        )
        assert len(shapes) <= fitted.nfev + 1
