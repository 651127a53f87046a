"""Recommended parametrization of local sites, from the information in their rows."""

import jax
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc import FederatedData, from_numpyro, hierarchy
from fedmcmc.hierarchy._latents import find_modes
from fedmcmc.interop.numpyro import centering

NUM_ROWS, LIMIT = 4, 1e-3


def one_way(y, noise=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, 50))
    tau = numpyro.sample("tau", dist.HalfNormal(50))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, noise), obs=y)


def draw_outcomes(num_groups=6, seed=0):
    rng = np.random.default_rng(seed)
    return [{"y": rng.normal(rng.normal(), 1, NUM_ROWS)} for _ in range(num_groups)]


def missing_fraction(centered, data, position):
    """Return the fraction of the information about `mu` that is lost with the latents."""
    local = from_numpyro(one_way, example=data, centered=centered, check_rows=False).local

    @jax.jit
    def share(point):
        client = data.client(0)
        groups = hierarchy.groups_of(local, client)
        flat = find_modes(groups, point).flat
        complete = jax.grad(jax.grad(lambda mu: -groups.total({**point, "mu": mu}, flat)))(
            point["mu"]
        )
        return hierarchy.missing_information(local, client, point)[0, 0] / complete

    return float(share(position))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tau", "low", "high"),
    [(0.02, 0, 0.1), (1.0, 0.5, 0.95), (30.0, 0, 1)],
)
def test_the_recommended_centering_loses_no_information(tau, low, high):
    """With groups of equal size no information is missing, in any unit of the outcome."""
    data = FederatedData.from_clients(draw_outcomes())
    position = {"mu": 0.3, "tau": np.log(tau)}
    numbers = centering(from_numpyro(one_way, example=data), data, position)
    assert list(numbers) == ["effect"] and low <= numbers["effect"] <= high
    assert abs(missing_fraction(numbers, data, position)) < LIMIT
    extremes = [missing_fraction(centered, data, position) for centered in (0.0, 1.0)]
    fraction = NUM_ROWS * tau**2 / (1 + NUM_ROWS * tau**2)
    np.testing.assert_allclose(extremes, [fraction, 1 - fraction], rtol=1e-2, atol=1e-5)


@pytest.mark.slow
def test_groups_of_a_client_count_like_clients():
    clients = draw_outcomes()
    rows = {"y": np.concatenate([group["y"] for group in clients])}
    groups = np.repeat(np.arange(len(clients)), NUM_ROWS)
    together = FederatedData.from_clients([rows], groups=[groups])
    apart = FederatedData.from_clients(clients)
    numbers = [
        centering(from_numpyro(one_way, example=data), data, {"mu": 0.0, "tau": 0.4})["effect"]
        for data in (together, apart)
    ]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5)


def test_centering_needs_a_decentered_model():
    data = FederatedData.from_clients(draw_outcomes())
    for posterior in (
        from_numpyro(one_way, example=data, centered=1.0, check_rows=False),
        from_numpyro(one_way, example=data, centered=0.5, check_rows=False),
        fedmcmc.marginal(from_numpyro(one_way, example=data, check_rows=False)),
    ):
        with pytest.raises(ValueError, match=r"from_numpyro\(model, centered=0.0\)"):
            centering(posterior, data, {"mu": 0.0, "tau": 0.0})


def one_spread(y):
    mu = numpyro.sample("mu", dist.Normal(0, 50))
    effect = numpyro.sample("effect", dist.Normal(mu, 0.5), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@pytest.mark.slow
def test_recommended_centering_has_the_variance_of_marginal_langevin_dynamics():
    """Latent draws add to the variance as much as the location depends on them."""
    data, step, num = FederatedData.from_clients(draw_outcomes()), 0.15, 20_000
    posterior = from_numpyro(one_spread, example=data)
    best = centering(posterior, data, {"mu": 0.0})["effect"]
    precision = 6 / (0.5**2 + 1 / NUM_ROWS) + 1 / 50**2
    marginal = 1 / (1 - step * precision / 2)
    ratios = []
    for centered in (best, 0.0, 1.0):
        kernel = fedmcmc.lsd(
            from_numpyro(one_spread, example=data, centered=centered),
            step_size=step,
            refresh=hierarchy.conjugate(),
        )
        settings = dict(num_rounds=60, num_burnin=59, num_chains=num, progress=False)
        draws = fedmcmc.sample(jax.random.key(0), kernel, data, {"mu": 0.0}, **settings).draws
        ratios.append(np.var(draws["mu"]) * precision / marginal)
    assert abs(ratios[0] - 1) * np.sqrt(num / 2) < 5
    assert min(ratios[1:]) - 1 > 20 / np.sqrt(num / 2)
