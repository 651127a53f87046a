"""Acceptance of latents and adaptation of their steps, as runs report them."""

import warnings

import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import FederatedData, hierarchy
from tests.hierarchy.test_gibbs import of

KEY, START = jax.random.key(3), {"mu": 0.0, "tau": 0.0}


def counts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(5))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jax.numpy.exp(effect)), obs=y)


@pytest.mark.slow
def test_a_group_whose_latents_hardly_move_is_named():
    """Steps that suit a rate of one are a hundred times too long for one of ten thousand."""
    rows = [{"y": np.array([1, 2, 0, 10_000, 10_100])}, {"y": np.array([3, 1])}]
    labels = [["low"] * 3 + ["high"] * 2, ["low"] * 2]
    data = FederatedData.from_clients(rows, groups=labels)
    kernel = fedmcmc.fed_gibbs(of(counts, data), refresh=hierarchy.hmc(1, num_steps=5, num_adapt=0))
    with pytest.warns(
        fedmcmc.SamplingWarning,
        match=r"0% of the proposals for the latents of group 'high' of client 0",
    ):
        samples = fedmcmc.sample(KEY, kernel, data, START, num_rounds=40, progress=False)
    accepted = samples.state.clients.accepted
    assert (accepted.num == 40).all() and (accepted.mean[:, 1, 1] == 1).all()
    assert accepted.mean[:, 0, 1].max() < 0.2 < 0.5 < accepted.mean[:, :, 0].min()


@pytest.mark.slow
def test_draws_of_rounds_in_which_steps_adapt_are_counted():
    data = FederatedData.from_clients([{"y": np.array([1, 2, 0])}] * 5)
    refresh = hierarchy.hmc(1, num_adapt=30, target_accept=0.57)
    kernel = fedmcmc.fed_gibbs(of(counts, data), refresh=refresh)
    settings = dict(num_rounds=420, progress=False)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"^20 of 410 kept draws.*num_burnin=30"):
        fedmcmc.sample(KEY, kernel, data, START, num_burnin=10, **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fedmcmc.sample(KEY, kernel, data, START, num_burnin=30, **settings)
    assert not any("still adapted" in str(each.message) for each in told)
