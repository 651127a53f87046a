"""Effects of groups without rows, drawn from the population."""

import jax
import numpy as np
import pytest
from scipy.special import expit

import fedmcmc
from fedmcmc import hierarchy
from tests.hierarchy.models import SPREAD, clients, gaussian, shared_spread
from tests.support.lanes import fast_and_slow

NUM, LIMIT = 4000, 5.0
MU = np.random.default_rng(0).normal(0.5, 0.3, (2, NUM // 2)).astype(np.float32)


def draw(model, shared, centered):
    data = fedmcmc.FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(model, example=data, centered=centered)
    return hierarchy.new_group(posterior, data, shared, rng_key=jax.random.key(1))["effect"]


@pytest.mark.parametrize("centered", fast_and_slow([0.0, 1.0], fast=[0.0]))
def test_a_new_group_is_drawn_from_the_population(centered):
    gaps = (draw(gaussian, {"mu": MU, "slope": np.zeros_like(MU)}, centered) - MU) / SPREAD
    assert gaps.shape == MU.shape
    assert abs(gaps.mean()) * np.sqrt(NUM) < LIMIT
    assert abs(gaps.std() - 1) * np.sqrt(2 * NUM) < LIMIT
    assert abs(np.corrcoef(gaps.ravel(), MU.ravel())[0, 1]) * np.sqrt(NUM) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("centered", [0.0, 1.0])
def test_a_new_group_of_equal_groups_is_the_mean(centered):
    """Predictions for a new hospital and at the mean effect are equal if tau is zero."""

    def gap(tau):
        shared = {"mu": MU + 1.0, "tau": np.full_like(MU, np.log(tau))}
        effects = np.float64(draw(shared_spread, shared, centered))
        return expit(np.float64(MU + 1.0)).mean() - expit(effects).mean()

    assert abs(gap(1e-4)) < 1e-4
    assert gap(1.0) > 0.02  # the mean chance is nearer to one half than the chance at the mean
