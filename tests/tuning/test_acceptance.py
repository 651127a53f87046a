"""Closed forms of acceptance probabilities against simulation in NumPy."""

import numpy as np
import pytest

from fedmcmc.tuning import (
    gaussian_mh_acceptance,
    hmc_acceptance,
    hmc_step_size,
    mala_acceptance,
)
from tests.oracles import laws_adjusted
from tests.oracles.federations import LIMIT

CURVATURES = np.array([0.1, 1.0, 1.0, 3.0, 7.5])


def assert_agree(formula, simulated):
    mean, error = simulated
    assert abs(formula - mean) < LIMIT * error


@pytest.mark.parametrize(
    ("step_size", "length", "size"), [(0.5, 1, 10), (0.8, 5, 10), (1.2, 3, 30), (1.7, 2, 1)]
)
def test_acceptance_of_trajectories_in_whitened_coordinates(step_size, length, size):
    formula = hmc_acceptance(step_size, size, length)
    assert_agree(formula, laws_adjusted.hmc(step_size, np.ones(size), length))
    # The other formula is for any curvatures.
    assert abs(formula - hmc_acceptance(step_size, np.ones(size), length)) < 1e-9


@pytest.mark.parametrize("length", [1, 2, 4])
def test_acceptance_of_trajectories_with_unequal_curvatures(length):
    formula = hmc_acceptance(0.7, CURVATURES, length)
    assert_agree(formula, laws_adjusted.hmc(0.7, CURVATURES.tolist(), length))


@pytest.mark.parametrize(
    ("size", "variance", "distance", "correlation"),
    [
        (5, 1.3, 0.0, 0.0),
        (20, 0.8, 0.0, 0.0),
        (20, 1.5, 0.0, 0.8),
        (50, 0.7, 0.0, 0.5),
        (4, 1.0, 0.7, 0.0),
        (4, 1.0, 1.5, 0.6),
    ],
)
def test_acceptance_of_proposals_from_an_approximation(size, variance, distance, correlation):
    settings = dict(variance=variance, distance=distance, correlation=correlation)
    formula = gaussian_mh_acceptance(size, **settings)
    assert_agree(formula, laws_adjusted.gaussian_mh(size, **settings))


def test_formulas_agree_in_special_cases():
    # Unstable trajectories are never accepted, and steps of zero always.
    assert hmc_acceptance(2.0, 3) == 0
    assert hmc_acceptance(0.5, np.array([1.0, 16.0])) == 0
    assert hmc_acceptance(0.0, np.array([1.0, 16.0])) == 1
    # The acceptance of several lengths is their mean.
    by_length = [hmc_acceptance(0.9, 20, length) for length in (1, 2, 3)]
    assert hmc_acceptance(0.9, 20, (1, 2, 3)) == pytest.approx(np.mean(by_length))
    # A Langevin step is a trajectory of one step.
    assert mala_acceptance(0.5, 7) == pytest.approx(hmc_acceptance(1.0, 7, 1))
    # Roberts and Rosenthal (1998): many dimensions, a step that falls with the cube root.
    size = 10**6
    assert mala_acceptance(size ** (-1 / 3), size) == pytest.approx(0.7237, abs=1e-3)


@pytest.mark.parametrize(
    ("size", "target", "max_length"), [(1, 0.57, 1), (10, 0.57, 1), (100, 0.8, 3), (1000, 0.8, 5)]
)
def test_a_step_size_has_its_target_acceptance(size, target, max_length):
    step_size, lengths = hmc_step_size(size, target, max_length), range(1, max_length + 1)
    assert hmc_acceptance(step_size, size, lengths) == pytest.approx(target, abs=1e-9)
    shares = np.linspace(0, 0.99, 50)
    assert min(hmc_acceptance(share * step_size, size, lengths) for share in shares) > target


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: hmc_acceptance(0.5, np.array([1.0, -1.0])), "curvatures must be positive"),
        (lambda: hmc_step_size(3, 1.0), "target_accept"),
        (lambda: gaussian_mh_acceptance(3, variance=2.0, distance=1.0), "not both"),
    ],
)
def test_invalid_arguments_raise(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()
