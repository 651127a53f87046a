"""Hazards and censored times against numerical integration, SciPy and formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from fedmcmc.models._hazards import CensoredTimes, SplineHazard, WeibullHazard

CUTS, END = (1.0, 2.5, 4.0), 6.0
PIECEWISE = SplineHazard(CUTS, END)
MSPLINE = SplineHazard(CUTS, END, degree=3)
LOGS = np.array([-1.2, -0.3, -2.0, 0.4])
CASES = {
    "piecewise": (PIECEWISE, {"baseline": LOGS}),
    "mspline": (MSPLINE, {"baseline": np.array([-1.2, -0.3, -2.0, 0.4, -1.0, 0.1, -0.5])}),
    "weibull": (WeibullHazard(3.0), {"shape": np.float64(1.6)}),
    "falling weibull": (WeibullHazard(3.0), {"shape": 0.6}),
}


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_the_cumulative_hazard_is_the_integral_of_the_hazard(case):
    hazard, parameters = case

    def rate(time):
        return float(jnp.exp(hazard.log_hazard(parameters, time)))

    for start, time in [(0.0, 0.7), (0.0, 4.0), (1.3, 5.9), (0.2, 9.0), (7.0, 8.0)]:
        points = [x for x in (*CUTS, END) if start < x < time]
        expected = integrate.quad(rate, start, time, points=points or None, epsrel=1e-12)[0]
        value = hazard.cumulative_hazard(parameters, time, start)
        np.testing.assert_allclose(value, expected, rtol=1e-8)


def test_splines_are_scipys_and_sum_to_one():
    from scipy.interpolate import BSpline

    knots = np.r_[[0.0] * 4, CUTS, [END] * 4]
    times = np.linspace(0, END, 101)
    expected = BSpline.design_matrix(times[:-1], knots, 3).toarray()
    parameters = {"baseline": np.eye(7)[2] * 800 - 800}  # the third spline alone
    value = jnp.exp(MSPLINE.log_hazard(parameters, times[:-1]))
    np.testing.assert_allclose(value, expected[:, 2], atol=1e-12)
    np.testing.assert_allclose(MSPLINE._evaluate(times)[0].sum(-1), 1, atol=1e-12)


def test_a_time_on_a_cut_belongs_to_the_interval_on_its_left():
    parameters = {"baseline": LOGS}
    for dtype in (np.float32, np.float64):
        times = np.array(
            [0.5, 1.0, np.nextafter(dtype(1), dtype(2)), 2.5, 4.0, 4.1, 6.0, 60], dtype
        )
        value = PIECEWISE.log_hazard(parameters, times)
        np.testing.assert_allclose(value, LOGS[[0, 0, 1, 1, 2, 3, 3, 3]], rtol=1e-6)


def test_a_drawn_time_has_the_drawn_cumulative_hazard(case):
    hazard, parameters = case
    cumulative = np.geomspace(1e-3, 20, 40)
    for start in (0.0, 1.7, 7.0):
        times = hazard.time_at(parameters, cumulative, start)
        assert np.all(np.diff(times) > 0) and np.all(times > start)
        value = hazard.cumulative_hazard(parameters, times, start)
        np.testing.assert_allclose(value, cumulative, rtol=1e-6)


def test_weibull_terms_are_scipys():
    hazard, parameters = CASES["weibull"]
    eta, times = np.array([0.4, -0.2, 0.0]), np.array([0.5, 2.0, 7.0])
    scale = (3 ** (1.6 - 1) * np.exp(-eta)) ** (1 / 1.6)  # H(t) = (t / scale) ** shape
    reference = stats.weibull_min(1.6, scale=scale)
    fn = CensoredTimes(hazard, parameters, eta)
    value = fn.log_prob(np.stack([times, np.ones(3)], -1))
    np.testing.assert_allclose(value, reference.logpdf(times), rtol=1e-10)
    value = fn.log_prob(np.stack([times, np.zeros(3)], -1))
    np.testing.assert_allclose(value, reference.logsf(times), rtol=1e-10)
    late = CensoredTimes(hazard, parameters, eta, 0.3)
    value = late.log_prob(np.stack([times, np.ones(3)], -1))
    np.testing.assert_allclose(value, reference.logpdf(times) - reference.logsf(0.3), rtol=1e-10)


def test_accelerated_failure_times_are_a_shifted_log_time():
    mu, times = np.array([0.4, 1.2]), np.array([0.5, 4.0])
    fn = CensoredTimes(WeibullHazard(3.0, aft=True), {"shape": np.float64(1.6)}, mu)
    value = fn.log_prob(np.stack([times, np.ones(2)], -1))
    expected = stats.weibull_min(1.6, scale=np.exp(mu)).logpdf(times)
    np.testing.assert_allclose(value, expected, rtol=1e-10)


def test_interval_censoring_is_a_difference_of_survival(case):
    hazard, parameters = case
    eta = np.array([0.3, -0.5, 0.0, 0.2, 0.1, 0.0])
    lower = np.array([0.0, 0.8, 1.0, 3.0, 2.0, 0.0])
    upper = np.array([1.0, 0.80001, 5.0, np.inf, 2.0, 9.0])
    value = CensoredTimes(hazard, parameters, eta, interval=True).log_prob(
        np.stack([lower, upper], -1)
    )

    def survival(time):
        total = [hazard.cumulative_hazard(parameters, min(x, 1e3)) for x in time]
        return np.exp(-np.exp(eta) * np.array(total)) * np.isfinite(time)

    is_event = lower == upper
    expected = np.log(survival(lower) - np.where(is_event, 0, survival(upper)))
    expected += np.where(is_event, hazard.log_hazard(parameters, np.maximum(lower, 1)) + eta, 0)
    np.testing.assert_allclose(value, expected, rtol=1e-7)


def test_gradients_are_finite_for_all_kinds_of_rows(case):
    hazard, parameters = case
    outcomes = np.array([[0.0, 1.0], [1.0, 1.0], [2.0, np.inf], [0.0, np.inf], [1.0, 3.0]])
    start = np.array([0.0, 0.5, 0.0, 0.0, 1.0])

    def total(parameters, eta):
        fn = CensoredTimes(hazard, parameters, eta, start, interval=True)
        return jnp.sum(fn.log_prob(outcomes))

    parameters = jax.tree.map(jnp.asarray, parameters)
    gradient = jax.grad(total, (0, 1))(parameters, jnp.zeros(5))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_draws_have_the_survival_function_and_end_with_the_follow_up(case):
    hazard, parameters = case
    num, start, end = 4000, 0.6, 3.5
    fn = CensoredTimes(hazard, parameters, np.full(num, 0.3), start, follow_up=np.full(num, end))
    times, events = np.moveaxis(fn.sample(jax.random.key(0)), -1, 0)
    assert np.all((times == end) == (events == 0))

    def share(time):
        return 1 - np.exp(-np.exp(0.3) * hazard.cumulative_hazard(parameters, time, start))

    total = float(share(end))
    assert abs(events.mean() - total) < 4 * np.sqrt(total * (1 - total) / num)
    test = stats.kstest(times[events == 1], lambda time: np.asarray(share(time)) / total)
    assert test.pvalue > 1e-3


def test_cuts_must_increase():
    with pytest.raises(ValueError, match=r"cuts must increase within \(0, end = 2\), got \(1.0, 1"):
        SplineHazard((1.0, 1.0), 2.0)
    with pytest.raises(ValueError, match="cuts must increase"):
        SplineHazard((3.0,), 2.0)
