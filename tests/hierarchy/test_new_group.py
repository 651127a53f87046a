"""Effects of groups that nobody has seen: the population's, whatever the rows."""

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import hierarchy
from tests.hierarchy.models import SPREAD, clients, gaussian
from tests.hierarchy.test_gibbs import shared_spread
from tests.support.lanes import fast_and_slow

NUM, LIMIT = 4000, 5.0
MU = np.random.default_rng(0).normal(0.5, 0.3, (2, NUM // 2)).astype(np.float32)
SHARED = {"mu": MU, "slope": np.zeros_like(MU)}


def drawn(centered, own):
    data = fedmcmc.FederatedData.from_clients(own)
    posterior = fedmcmc.from_numpyro(gaussian, example=data, centered=centered)
    return hierarchy.new_group(posterior, data, SHARED, rng_key=jax.random.key(1))["effect"]


@pytest.mark.parametrize("centered", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_new_group_is_drawn_from_the_population(centered):
    gaps = (drawn(centered, clients()) - MU) / SPREAD
    assert gaps.shape == MU.shape
    assert abs(gaps.mean()) * np.sqrt(NUM) < LIMIT
    assert abs(gaps.std() - 1) * np.sqrt(2 * NUM) < LIMIT
    assert abs(np.corrcoef(gaps.ravel(), MU.ravel())[0, 1]) * np.sqrt(NUM) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("centered", fast_and_slow([0.0, 1.0], fast=[0.0]))
def test_of_groups_that_do_not_differ_a_new_one_is_the_mean(centered):
    """Predictions for a new hospital and at the mean effect are one number where tau is zero."""
    data = fedmcmc.FederatedData.from_clients(clients())
    posterior = fedmcmc.from_numpyro(shared_spread, example=data, centered=centered)

    def gap(tau):
        shared = {"mu": MU + 1.0, "tau": np.full_like(MU, np.log(tau))}
        new = hierarchy.new_group(posterior, data, shared, rng_key=jax.random.key(1))["effect"]
        chance, at_mean = (1 / (1 + np.exp(-np.float64(x))) for x in (new, MU + 1.0))
        return at_mean.mean() - chance.mean()

    assert abs(gap(1e-4)) < 1e-4
    assert gap(1.0) > 0.02  # the mean chance is nearer to one half than that at the mean


@pytest.mark.slow
def test_rows_do_not_matter():
    other = [{name: 100 + leaf for name, leaf in own.items()} for own in clients()]
    np.testing.assert_array_equal(drawn(0.0, clients()), drawn(0.0, other))


def test_what_has_no_latents_is_refused():
    data = fedmcmc.FederatedData.from_clients(clients())
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(gaussian, example=data))
    with pytest.raises(ValueError, match="no latents of groups to draw"):
        hierarchy.new_group(posterior, data, SHARED, rng_key=jax.random.key(1))
