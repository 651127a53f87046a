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


def assert_agree(formula, simulated):
    mean, error = simulated
    assert abs(formula - mean) < LIMIT * error


@pytest.mark.parametrize(
    ("step_size", "length", "size"), [(0.5, 1, 10), (0.8, 5, 10), (1.2, 3, 30), (1.7, 2, 1)]
)
def test_acceptance_of_trajectories_in_whitened_coordinates(step_size, length, size):
    formula = hmc_acceptance(step_size, size, length)
    assert_agree(formula, laws_adjusted.hmc(step_size, np.ones(size), length))
    # The same by the other formula, which is for any curvatures.
    assert abs(formula - hmc_acceptance(step_size, np.ones(size), length)) < 1e-9


@pytest.mark.parametrize("length", [1, 2, 4])
def test_acceptance_of_trajectories_where_curvatures_differ(length):
    curvatures = [0.1, 1.0, 1.0, 3.0, 7.5]
    assert_agree(
        hmc_acceptance(0.7, np.array(curvatures), length),
        laws_adjusted.hmc(0.7, curvatures, length),
    )


def test_unstable_trajectories_are_never_accepted():
    assert hmc_acceptance(2.0, 3) == 0
    assert hmc_acceptance(0.5, np.array([1.0, 16.0])) == 0
    assert hmc_acceptance(0.0, np.array([1.0, 16.0])) == 1


def test_acceptance_of_several_lengths_is_their_mean():
    each = [hmc_acceptance(0.9, 20, length) for length in (1, 2, 3)]
    assert hmc_acceptance(0.9, 20, (1, 2, 3)) == pytest.approx(np.mean(each))


def test_a_langevin_step_is_a_trajectory_of_one_step():
    assert mala_acceptance(0.5, 7) == pytest.approx(hmc_acceptance(1.0, 7, 1))
    # Roberts and Rosenthal (1998): many dimensions, a step that falls with the cube root.
    many = 10**6
    step_size = many ** (-1 / 3)
    assert mala_acceptance(step_size, many) == pytest.approx(0.7237, abs=1e-3)


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
    off = dict(variance=variance, distance=distance, correlation=correlation)
    assert_agree(gaussian_mh_acceptance(size, **off), laws_adjusted.gaussian_mh(size, **off))


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="curvatures must be positive"):
        hmc_acceptance(0.5, np.array([1.0, -1.0]))
    with pytest.raises(ValueError, match="target_accept"):
        hmc_step_size(3, 1.0)


def test_an_approximation_that_is_off_in_two_ways_has_no_closed_form():
    with pytest.raises(ValueError, match="not both"):
        gaussian_mh_acceptance(3, variance=2.0, distance=1.0)


@pytest.mark.parametrize(
    ("size", "target", "most"), [(1, 0.57, 1), (10, 0.57, 1), (100, 0.8, 3), (1000, 0.8, 5)]
)
def test_a_step_size_has_the_acceptance_that_was_asked_for(size, target, most):
    found = hmc_step_size(size, target, most)
    lengths = range(1, most + 1)
    assert hmc_acceptance(found, size, lengths) == pytest.approx(target, abs=1e-9)
    below = [hmc_acceptance(share * found, size, lengths) for share in np.linspace(0, 0.99, 50)]
    assert min(below) > target
