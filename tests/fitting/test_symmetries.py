"""Modes that permutations and reflections of parameters make of one that was found."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc.fitting import find_modes
from fedmcmc.fitting._symmetries import Images, list_symmetries
from fedmcmc.runs import SimulatedConsortium

KEY = jax.random.key(2)
ONE_ROW = fedmcmc.FederatedData.from_clients([np.ones(1, np.float32)])


def test_common_axes_and_scalars_with_a_common_stem_are_exchanged():
    values = {
        "m": np.arange(3.0),
        "w": np.ones((3, 5)),
        "mu_1": np.array(1.0),
        "mu_2": np.array(2.0),
    }
    symmetries = {(each.kind, each.members) for each in list_symmetries(values)}
    assert ("permute", (("m", 0), ("w", 0))) in symmetries and (
        "permute",
        (("w", 1),),
    ) in symmetries
    assert ("permute", ((("mu_1", "mu_2"), None),)) in symmetries
    swap = next(x for x in list_symmetries(values) if x.members == ((("mu_1", "mu_2"), None),))
    image = swap.example(values)
    assert image["mu_1"] == 2 and image["mu_2"] == 1 and image["m"] is values["m"]


def test_all_orders_of_components_are_images_of_one():
    position = {"m": jnp.array([0.0, 1.0, 2.0]), "s": jnp.array([3.0, 4.0, 5.0])}
    images = Images(fedmcmc.Posterior(lambda x: 0.0, lambda x, rows: rows), position)
    (both,) = (
        each
        for each in list_symmetries(images.values)
        if each.kind == "permute" and len(each.members) == 2
    )
    points, complete = images.closure([both])
    flat = images.flat(points)
    assert complete and len(np.unique(flat, axis=0)) == 5
    np.testing.assert_allclose(flat[:, 3:] - flat[:, :3], 3)


def modes_of(loglikelihood_fn, start):
    posterior = fedmcmc.Posterior(
        lambda x: jnp.zeros(()),
        lambda x, rows: rows * loglikelihood_fn(x),
        init_fn=lambda key: jax.tree.map(
            lambda leaf: leaf + 0.1 * jax.random.normal(key, leaf.shape), start
        ),
    )
    return find_modes(KEY, posterior, SimulatedConsortium(ONE_ROW))


def test_modes_that_no_start_reaches_are_found_by_symmetry():
    """All starts lie near one of six orders of three means."""
    means = jnp.array([-2.0, 0.0, 2.0])
    orders = jnp.array([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])

    def density(x):
        gaps = x[None] - means[orders]
        return jax.scipy.special.logsumexp(-0.5 * jnp.sum(gaps**2, 1) / 0.1**2)

    search = modes_of(density, means)
    assert len(search.modes) == search.num_symmetric == 6 and not search.caveats
    mode_orders = np.array([np.argsort(mode.flat) for mode in search.modes])
    assert len(np.unique(mode_orders, axis=0)) == 6
    for mode in search.modes:
        np.testing.assert_allclose(mode.covariance, 0.01 * np.eye(3), atol=1e-4)


def test_reflections_are_found():
    """A product of two parameters is known, not their signs."""

    def density(x):
        product = 0.1 * x["a"] * x["b"] - 0.6
        return -0.5 * (product / 0.01) ** 2 - 0.5 * ((jnp.abs(x["a"]) - 2) / 0.1) ** 2

    search = modes_of(density, {"a": jnp.array(2.0), "b": jnp.array(3.0)})
    places = sorted(tuple(np.round(mode.flat).astype(int)) for mode in search.modes)
    assert places == [(-2, -3), (2, 3)] and search.num_symmetric == 2


def test_too_many_symmetric_modes_are_reported():
    """Seven exchangeable parameters have 5,040 orders."""
    means = jnp.linspace(-3.0, 3.0, 7)

    def density(x):
        return -0.5 * jnp.sum((jnp.sort(x) - means) ** 2) / 0.1**2

    search = modes_of(density, means)
    assert "more than 24 symmetric modes" in search.caveats[0]


def test_a_unique_mode_has_no_images():
    def density(x):
        return -0.5 * jnp.sum((x - jnp.array([1.0, -1.0, 2.0])) ** 2) * 9

    search = modes_of(density, jnp.zeros(3))
    assert len(search.modes) == search.num_symmetric == 1


@pytest.mark.slow
def test_a_mixture_has_all_orders_of_its_components():
    """By symmetry each component has the same posterior, and log evidence includes all orders."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(m, 0.6, n) for m, n in ((-3, 40), (0, 40), (3, 60))])
    rng.shuffle(y)

    def model(y=None):
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([3]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y)):
            mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(mean, sd))
            numpyro.sample("y", mixture, obs=y)

    data = fedmcmc.FederatedData.from_clients([{"y": y[i::4]} for i in range(4)])
    fitted = fedmcmc.fit(model, data, rng_key=KEY, progress=False)
    assert fitted.verdict.kind == "passed" and "6 symmetric modes" in fitted.verdict
    draws = fitted.samples.constrained["mean"].reshape(-1, 3)
    orders, counts = np.unique(np.argsort(draws, axis=1), axis=0, return_counts=True)
    assert len(orders) == 6
    assert abs(counts / counts.sum() - 1 / 6).max() < 5 * np.sqrt(5 / 36 / 3000)
    # Three draws of one mean, each known to its error: components have mean and sd in common.
    error = draws.std() * fitted.verdict.error
    assert np.ptp(draws.mean(0)) < 5 * error
    np.testing.assert_allclose(np.sort(draws, axis=1).mean(0), [-3, 0, 3], atol=0.4)
