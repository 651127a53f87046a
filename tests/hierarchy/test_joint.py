"""Kernels that move latents: where latents are stored, which rows enter, and unsupported uses."""

import dataclasses

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, Record, lsd, rounds
from fedmcmc.hierarchy import conjugate, independence, ula
from tests.hierarchy.models import (
    break_other_groups,
    clients,
    gaussian,
    in_two_clients,
    logistic,
)

KEY = jax.random.key(2)
ODDS = {"tau": -0.3, "slope": 0.6}
PLACE = {"mu": 0.4, "slope": -0.2}
BLOCKS = {"ula": ula(), "independence": independence(), "conjugate": conjugate()}


def build_kernel(model, data, refresh=BLOCKS["independence"], **settings):
    posterior = fedmcmc.from_numpyro(model, example=data)
    return lsd(posterior, step_size=0.02, refresh=refresh, **settings)


def run(kernel, data, position, num_rounds=6, **settings):
    return fedmcmc.sample(
        KEY, kernel, data, position, num_rounds=num_rounds, progress=False, **settings
    )


@jax.jit
def take_step(kernel, state, index, client):
    """Return the message of a client and its latents after a round."""
    own_state = jax.tree.map(lambda leaf: leaf[index], state.clients)
    number = len(kernel.phases) - 1
    code, new, _ = rounds.client_step(kernel, number, KEY, state.broadcast, own_state, client)
    return code, new.latents


@pytest.mark.slow
def test_latents_are_stored_with_the_draws_and_in_the_state(tmp_path):
    """In memory, in a store, in the tree of ArviZ, and as effects of the user's model."""
    data = in_two_clients(clients("logistic"))
    kernel = build_kernel(logistic, data)
    samples = run(kernel, data, ODDS, num_chains=2, record=Record(local=True))
    ((name, latents),) = samples.local.items()
    exists = samples.local_mask
    assert name == "effect_decentered" and latents.shape == (2, 6, 2, 3)
    assert exists.tolist() == [[True] * 3, [True, True, False]]
    np.testing.assert_array_equal(latents[:, -1], samples.state.clients.latents[name])
    assert (latents[..., ~exists] == 0).all()
    assert (np.abs(np.diff(latents, axis=1)).max((0, 1)) > 0)[exists].all()
    # The user's effect is the standard effect times the spread of the same round.
    spread = np.exp(samples.draws["tau"])[..., None, None]
    effects = samples.constrained_local["effect"]
    np.testing.assert_allclose(effects[..., exists], (spread * latents)[..., exists], rtol=1e-6)
    assert np.isnan(effects[..., ~exists]).all()
    assert samples.to_datatree()["posterior"]["effect"].shape == (2, 6, 2, 3)
    record = Record(local=True, draws_to=tmp_path / "draws.zarr")
    stored = run(kernel, data, ODDS, num_chains=2, record=record)
    np.testing.assert_array_equal(np.asarray(stored.local[name]), latents)
    plain = run(kernel, data, ODDS, num_chains=2)
    assert plain.local is None
    for site in ODDS:
        np.testing.assert_array_equal(plain.draws[site], samples.draws[site])
    with pytest.raises(ValueError, match="No latents were kept"):
        plain.constrained_local  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_other_groups_and_clients_do_not_enter(name):
    """Latents of a group are equal to the last bit for any rows of the other groups."""
    model, place = (gaussian, PLACE) if name == "conjugate" else (logistic, ODDS)
    data = in_two_clients(clients("gaussian" if name == "conjugate" else "logistic"))
    kernel = build_kernel(model, data, BLOCKS[name])
    state = kernel.init(KEY, place, data)
    (clean_message, clean), (message, latents) = (
        take_step(kernel, state, 0, source.client(0)) for source in (data, break_other_groups(data))
    )
    clean, latents = (np.asarray(*jax.tree.leaves(x)) for x in (clean, latents))
    assert np.array_equal(latents[[0, 2]], clean[[0, 2]]) and np.isfinite(clean).all()
    assert np.isfinite(clean_message["slope"]) and not np.isfinite(message["slope"])


def reverse(data):
    """Return data of the clients in the other order, and the rows of a client group by group."""
    parts, labels = [], []
    for client in (1, 0):
        begin, size = int(data.start[client]), int(data.size[client])
        group = np.asarray(data.rows.group)[begin : begin + size]
        order = np.argsort(group, kind="stable")
        rows = jax.tree.map(np.asarray, data.client_rows(client))
        parts.append({name: value[order] for name, value in rows.items()})
        labels.append(group[order])
    return FederatedData.from_clients(parts, groups=labels)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["joint", "gibbs"])
def test_draws_depend_on_the_ids_of_clients_and_groups_and_on_no_order(kind):
    data = in_two_clients(clients("logistic"))
    reversed_data = reverse(data)
    if kind == "joint":
        kernel = build_kernel(logistic, data)
    else:
        centered = fedmcmc.from_numpyro(logistic, example=data, centered=1.0)
        kernel = fedmcmc.fed_gibbs(centered, refresh=independence())

    def answer(data, index, id_):
        client = dataclasses.replace(data.client(index), index=np.int32(id_))
        return jax.tree.leaves(take_step(kernel, kernel.init(KEY, ODDS, data), index, client))

    for id_ in range(2):
        expected = answer(data, id_, id_)
        assert np.ptp(expected[-1]) > 0.1
        for a, b in zip(answer(reversed_data, 1 - id_, id_), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
        changed = answer(reversed_data, 1 - id_, 1 - id_)[-1]
        assert np.abs(changed - expected[-1]).max() > 0.01


def test_unsupported_kernels_raise():
    data = FederatedData.from_clients(clients("logistic"))
    posterior = fedmcmc.from_numpyro(logistic, example=data)
    marginal = fedmcmc.marginal(posterior)
    half, twice = fedmcmc.bernoulli(0.5), fedmcmc.categorical(cohort_size=2)
    around = fedmcmc.Gaussian.from_moments(ODDS, variance={"tau": 0.1, "slope": 0.1})
    draws = jax.tree.map(lambda x: np.ones(1) * x, ODDS)
    absent = lsd(posterior, step_size=0.1, refresh=ula(), participation=half)
    not_normal = lsd(posterior, step_size=0.1, refresh=conjugate())

    def build(model=posterior, refresh=BLOCKS["ula"], **settings):
        return lsd(model, step_size=0.1, refresh=refresh, **settings)

    for function, message in (
        (lambda: build(refresh=None), "fed_ep sample them"),
        (lambda: fedmcmc.fa_ld(posterior, step_size=0.1, num_local_steps=2), "fed_ep sample them"),
        (lambda: fedmcmc.whiten(posterior, data, ODDS), "fed_ep sample them"),
        (lambda: fedmcmc.correct(KEY, posterior, data, around), "fed_ep sample them"),
        (lambda: fedmcmc.metrics.potential(posterior, data, draws), "fed_ep sample them"),
        (lambda: fedmcmc.hmc(posterior, ODDS).init(KEY, ODDS, data), "fed_ep sample them"),
        (lambda: build(marginal), "this posterior has none"),
        (lambda: build(batch_size=2), "temperature one"),
        (lambda: build(prior="split"), "the server adds prior and noise"),
        (lambda: build(marginal, None, num_draws=2), "are settings for latents"),
        (lambda: build(order="last"), "order must be"),
        (lambda: ula(2.5), "step_size must be"),
        (lambda: not_normal.init(KEY, ODDS, data), "not normal given position and rows"),
        (lambda: build(participation=twice), "drawn twice"),
        (lambda: fedmcmc.compress(absent, fedmcmc.memory(fedmcmc.quantize(4))), "absent clients"),
        (
            lambda: run(build(marginal, None), data, ODDS, record=Record(local=True)),
            "for kernels that sample latents",
        ),
        (lambda: Record(local=True, keep_draws=False), "not both"),
    ):
        with pytest.raises(ValueError, match=message):
            function()
    with pytest.raises(TypeError, match="refresh must be a"):
        build(refresh="ula")
