"""Latents of clients and of their groups: what the model says, what a run keeps, what refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from numpyro.infer.util import log_density

import fedmcmc
from fedmcmc import Record, hierarchy
from fedmcmc._types import check_start
from fedmcmc.hierarchy import conjugate, hmc, independence, with_moments
from tests.oracles import federations_two_levels as two

KEY = jax.random.key(4)
LOCAL = {"client": ["ward"], "group": ["effect"]}
LABELS = [np.array([0, 1, 0, 1, 1]), np.array([0, 0, 0])]
START = {"mu": 0.3, "tau": -0.5}
BOTH = hierarchy.two_levels(independence(), independence())


def model(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    ward = numpyro.sample("ward", dist.Normal(mu, tau))
    effect = numpyro.sample("effect", dist.Normal(ward, 0.5 * tau))
    numpyro.deterministic("gap", effect - ward)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect + 0.5 * x), obs=y)


def rows():
    rng = np.random.default_rng(1)
    for labels in LABELS:
        num = len(labels)
        yield {"x": rng.normal(size=num), "y": (rng.random(num) < 0.6).astype(int)}


ROWS = list(rows())
DATA = fedmcmc.FederatedData.from_clients(ROWS, groups=LABELS)


def whole(x, y, ward_of, group_of):
    """Write all clients and groups out in one model."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("wards", 2):
        ward = numpyro.sample("ward", dist.Normal(mu, tau))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(ward[np.array([0, 0, 1])], 0.5 * tau))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group_of] + 0.5 * x), obs=y)


@pytest.mark.slow
def test_densities_of_all_clients_are_those_of_the_model_written_out():
    posterior = fedmcmc.from_numpyro(model, example=DATA, local=LOCAL, centered=1.0)
    ward, effect = np.array([0.2, -0.7]), np.array([0.5, 0.1, -0.4])
    own = [(ward[0], effect[:2]), (ward[1], np.array([effect[2], 0.0]))]
    position = jax.tree.map(jnp.asarray, START)
    total = posterior.logprior_fn(position)
    for index, (of_client, of_groups) in enumerate(own):
        latents = {"client": {"ward": jnp.asarray(of_client)}, "group": {"effect": of_groups}}
        client = hierarchy.latents_of(posterior.local, DATA.client(index))
        total += client.total(position, client.as_flat(latents))
    pooled = {k: np.concatenate([r[k] for r in ROWS]) for k in ("x", "y")}
    arguments = (pooled["x"], pooled["y"], None, np.concatenate([LABELS[0], LABELS[1] + 2]))
    tau = np.exp(START["tau"])
    values = {"mu": START["mu"], "tau": tau, "ward": ward, "effect": effect}
    wanted = log_density(whole, arguments, {}, values)[0] + START["tau"]  # the Jacobian
    np.testing.assert_allclose(total, wanted, rtol=1e-5)


@pytest.mark.slow
def test_latents_are_kept_and_shown_as_the_model_names_them():
    posterior = fedmcmc.from_numpyro(model, example=DATA, local=LOCAL)
    path = hmc(2, num_adapt=0)
    kernel = fedmcmc.lsd(posterior, step_size=0.02, refresh=hierarchy.two_levels(path, path))
    samples = fedmcmc.sample(
        KEY, kernel, DATA, START, num_rounds=5, record=Record(local=True), progress=False
    )
    shown = samples.constrained_local
    shapes = {name: value.shape for name, value in shown.items()}
    assert shapes == {"ward": (1, 5, 2), "effect": (1, 5, 2, 2), "gap": (1, 5, 2, 2)}
    # Standard normals, shifted and scaled by the draw of their round.
    mu, tau = samples.draws["mu"][..., None], np.exp(samples.draws["tau"])[..., None]
    standard = {level: next(iter(x.values())) for level, x in samples.local.items()}
    ward = mu + tau * standard["client"]
    np.testing.assert_allclose(shown["ward"], ward, rtol=1e-5, atol=1e-6)
    gap = 0.5 * tau[..., None] * standard["group"]
    gap[..., 1, 1] = np.nan
    np.testing.assert_allclose(shown["gap"], gap, rtol=1e-4, atol=1e-5)
    assert (standard["group"][..., 1, 1] == 0).all()  # a group that the second client has not
    assert (np.diff(standard["client"], axis=1) != 0).any()


def test_normal_latents_of_clients_and_groups_are_taken():
    normal = hierarchy.two_levels(conjugate(), conjugate())
    kernel = fedmcmc.lsd(two.POSTERIOR, step_size=0.02, refresh=normal)
    check_start(kernel, KEY, jnp.asarray(two.START), two.DATA.federation)


@pytest.mark.slow
def test_moments_of_groups_are_kept():
    moments = with_moments(hmc(5, num_adapt=20), num_burnin=20)
    kernel = fedmcmc.lsd(
        two.POSTERIOR, step_size=0.02, refresh=hierarchy.two_levels(conjugate(), moments)
    )
    samples = fedmcmc.sample(
        KEY, kernel, two.DATA, two.START, num_rounds=40, num_burnin=20, progress=False
    )
    found = hierarchy.local_moments(samples.state.clients)
    np.testing.assert_array_equal(found.num > 0, two.DATA.group_mask)


@pytest.mark.slow
def test_chunks_cut_groups_without_a_difference(monkeypatch):
    from fedmcmc.data import _federated
    from fedmcmc.hierarchy import _latents

    kernel = fedmcmc.lsd(two.POSTERIOR, step_size=0.05, refresh=BOTH)
    settings = dict(num_rounds=4, progress=False)
    wanted = fedmcmc.sample(KEY, kernel, two.DATA, two.START, **settings).draws
    for module in (_federated, _latents):
        monkeypatch.setattr(module, "CHUNK_ROWS", 2)
    jax.clear_caches()
    found = fedmcmc.sample(KEY, kernel, two.DATA, two.START, **settings).draws
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    jax.clear_caches()


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    posterior = two.POSTERIOR
    for refused in (
        lambda: fedmcmc.marginal(posterior),
        lambda: fedmcmc.fed_gibbs(posterior, refresh=conjugate()),
        lambda: fedmcmc.fed_ep(posterior),
        lambda: fedmcmc.fit(posterior, two.DATA, rng_key=KEY, position=two.START),
        lambda: fedmcmc.local_draws(posterior, two.DATA, np.zeros((1, 3, 2)), rng_key=KEY),
    ):
        with pytest.raises(ValueError, match="latents of clients and of their groups"):
            refused()

    def many(x, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        ward = numpyro.sample("ward", dist.Normal(mu, 1))
        effect = numpyro.sample("effect", dist.Normal(ward, 1).expand([4]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=effect.sum() + x), obs=y)

    for centered in (0.0, 1.0):  # for so many numbers per group fit has chains that move them
        wide = fedmcmc.from_numpyro(many, example=DATA, local=LOCAL, centered=centered)
        with pytest.raises(ValueError, match="latents of clients and of their groups"):
            fedmcmc.fit(wide, DATA, rng_key=KEY)
    with pytest.raises(ValueError, match="takes refresh=hierarchy"):
        fedmcmc.lsd(posterior, step_size=0.1, refresh=conjugate())
    with pytest.raises(ValueError, match="with_moments is for latents"):
        hierarchy.two_levels(with_moments(conjugate(), num_burnin=0), conjugate())
    one_level = fedmcmc.from_numpyro(model, example=DATA, local=["ward", "effect"])
    with pytest.raises(ValueError, match="and no other model does"):
        fedmcmc.lsd(one_level, step_size=0.1, refresh=BOTH)
    for local, message in (
        ({"client": ["ward"]}, "has sites for 'client' and for 'group'"),
        ({"client": ["ward"], "group": ["ward"]}, "for clients and for groups"),
        ({"client": ["effect"], "group": ["ward"]}, "depends on a local one"),
    ):
        with pytest.raises(ValueError, match=message):
            fedmcmc.from_numpyro(model, example=DATA, local=local, centered=1.0)
    normal = hierarchy.two_levels(conjugate(), conjugate())
    logistic = fedmcmc.from_numpyro(model, example=DATA, local=LOCAL)
    kernel = fedmcmc.lsd(logistic, step_size=0.1, refresh=normal)
    with pytest.raises(ValueError, match="not normal given the rest"):
        kernel.init(KEY, START, DATA)
