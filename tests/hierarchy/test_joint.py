"""Kernels that move latents: what stays where, whose rows matter, and what a run keeps."""

import dataclasses

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, Record, rounds
from fedmcmc.hierarchy import conjugate, independence, ula
from tests.hierarchy.models import SD, SPREAD, clients, gaussian, in_two_clients, logistic
from tests.oracles.federations import LIMIT

KEY = jax.random.key(2)
ODDS = {"tau": -0.3, "slope": 0.6}
PLACE = {"mu": 0.4, "slope": -0.2}
BLOCKS = {"ula": ula(), "independence": independence(), "conjugate": conjugate()}


def kernel_of(model, data, refresh=None, **settings):
    posterior = fedmcmc.from_numpyro(model, example=data)
    refresh = independence() if refresh is None else refresh
    return fedmcmc.lsd(posterior, step_size=0.02, refresh=refresh, **settings)


def run(kernel, data, position, num_rounds=6, **settings):
    return fedmcmc.sample(
        KEY, kernel, data, position, num_rounds=num_rounds, progress=False, **settings
    )


@jax.jit
def one_step(kernel, data, state, index):
    """Return the message of a client and its state after a round."""
    client = data.client(index)
    own = jax.tree.map(lambda leaf: leaf[index], state.clients)
    code, kept, _ = rounds.client_step(kernel, 0, KEY, state.broadcast, own, client)
    return code, kept


@pytest.mark.slow
def test_latents_are_kept_with_the_draws_and_in_the_state():
    data = in_two_clients(clients("logistic"))
    kernel = kernel_of(logistic, data)
    samples = run(kernel, data, ODDS, num_chains=2, record=Record(local=True))
    (name, found), *_ = samples.local.items()
    assert name == "effect_decentered" and found.shape == (2, 6, 2, 3)
    assert samples.local_mask.tolist() == [[True] * 3, [True, True, False]]
    np.testing.assert_array_equal(found[:, -1], samples.state.clients.latents[name])
    assert (found[..., 1, 2] == 0).all() and (np.abs(np.diff(found, axis=1)).max((0, 1)) > 0)[
        samples.local_mask
    ].all()
    # The user's effect is the standard one times the spread of the same round.
    spread = np.exp(samples.draws["tau"])[..., None, None]
    effects = samples.constrained_local["effect"]
    there = samples.local_mask
    np.testing.assert_allclose(effects[..., there], (spread * found)[..., there], rtol=1e-6)
    assert np.isnan(effects[..., ~there]).all()
    plain = run(kernel, data, ODDS, num_chains=2)
    assert plain.local is None
    for site in ODDS:
        np.testing.assert_array_equal(plain.draws[site], samples.draws[site])
    with pytest.raises(ValueError, match="No latents were kept"):
        plain.constrained_local  # noqa: B018


@pytest.mark.slow
def test_latents_are_part_of_the_tree_of_arviz(tmp_path):
    data = in_two_clients(clients("logistic"))
    kernel = kernel_of(logistic, data)
    samples = run(kernel, data, ODDS, record=Record(local=True))
    tree = samples.to_datatree()
    assert tree["posterior"]["effect"].shape == (1, 6, 2, 3)
    stored = run(kernel, data, ODDS, record=Record(local=True, draws_to=tmp_path / "draws.zarr"))
    name = "effect_decentered"
    np.testing.assert_array_equal(np.asarray(stored.local[name]), samples.local[name])


@pytest.mark.slow
def test_a_client_that_is_absent_keeps_its_latents():
    data = FederatedData.from_clients(clients("logistic"))
    kernel = kernel_of(logistic, data, participation=fedmcmc.uniform(2))
    samples = run(kernel, data, ODDS, num_rounds=8, record=Record(local=True))
    latents = samples.local["effect_decentered"][0, :, :, 0]
    moved = np.diff(latents, axis=0) != 0
    assert (moved.sum(1) <= 2).all() and moved.any(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("refresh", BLOCKS)
def test_rows_of_other_groups_and_clients_do_not_enter(refresh):
    """Latents of a group are the same to the last bit whatever the others' rows are."""
    model, place = (gaussian, PLACE) if refresh == "conjugate" else (logistic, ODDS)
    data = in_two_clients(clients("gaussian" if refresh == "conjugate" else "logistic"))
    kernel = kernel_of(model, data, BLOCKS[refresh])
    state = kernel.init(KEY, place, data)
    group = np.asarray(data.rows.group)
    broken = jax.tree.map(np.array, data.rows.values)
    other = (group == 1) | (np.arange(data.num_rows) >= int(data.start[1]))
    broken["x"][other] = np.nan
    rows = fedmcmc.data.Grouped(broken, data.rows.group, data.rows.max_groups)
    dirty = FederatedData(rows, data.start, data.size, data.share, data.max_size)
    (clean_message, clean), (message, found) = (
        one_step(kernel, d, state, 0) for d in (data, dirty)
    )
    clean, found = (np.asarray(*jax.tree.leaves(x.latents)) for x in (clean, found))
    assert np.array_equal(found[[0, 2]], clean[[0, 2]]) and np.isfinite(clean).all()
    assert np.isfinite(clean_message["slope"]) and not np.isfinite(message["slope"])


@pytest.mark.slow
def test_a_latent_that_no_row_looks_at_changes_no_draw():
    own = clients()
    data = FederatedData.from_clients(own)

    def without(x, y=None):
        import numpyro
        from numpyro import distributions as dist

        mu = numpyro.sample("mu", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(mu + slope * x, 1), obs=y)

    def beside(x, y=None):
        import numpyro
        from numpyro import distributions as dist

        numpyro.sample("idle", dist.Normal(0, 1), infer={"local": True})
        without(x, y)

    posterior = fedmcmc.from_numpyro(without, example=data)
    kernels = (kernel_of(beside, data), fedmcmc.lsd(posterior, step_size=0.02))
    first, second = (run(kernel, data, PLACE).draws for kernel in kernels)
    for name in PLACE:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.slow
@pytest.mark.parametrize("centered", [0.0, 1.0])
def test_the_posterior_is_the_same_however_effects_are_written(centered):
    own = clients()
    data = FederatedData.from_clients(own)
    kernel = fedmcmc.lsd(
        fedmcmc.from_numpyro(gaussian, example=data, centered=centered),
        step_size=0.002,
        refresh=conjugate(),
    )
    settings = dict(num_rounds=1200, num_burnin=1199, num_chains=4096, record=Record(local=True))
    samples = fedmcmc.sample(KEY, kernel, data, PLACE, progress=False, **settings)
    size, num = 2 + len(own), sum(len(group["x"]) for group in own)
    design, outcome, row = np.zeros((num, size)), np.concatenate([g["y"] for g in own]), 0
    for i, group in enumerate(own):
        here = slice(row, row + len(group["x"]))
        design[here, 1], design[here, 2 + i], row = group["x"], 1, here.stop
    precision = design.T @ design / SD**2 + np.diag([1 / 4, 1, *[0] * len(own)])
    for i in range(len(own)):
        apart = np.zeros(size)
        apart[0], apart[2 + i] = -1, 1
        precision += np.outer(apart, apart) / SPREAD**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ design.T @ outcome / SD**2
    effects = samples.constrained_local["effect"].reshape(4096, len(own))
    draws = np.column_stack([samples.draws["mu"], samples.draws["slope"], effects])
    z = (draws.mean(0) - mean) / np.sqrt(np.diag(covariance)) * np.sqrt(len(draws))
    assert np.abs(z).max() < LIMIT
    # The step's own error of a variance is some percent, of either sign by form.
    assert np.abs(draws.var(0) / np.diag(covariance) - 1).max() < 0.15


@pytest.mark.slow
def test_groups_lie_in_clients_of_their_own_or_together():
    """Of one place, at the modes: the sum of messages is the same, up to rounding."""
    own = clients("logistic")
    sums = []
    for data in (FederatedData.from_clients(own), in_two_clients(own)):
        kernel = kernel_of(logistic, data, order="gradient_first")
        state = kernel.init(KEY, ODDS, data)
        messages = [one_step(kernel, data, state, i)[0] for i in range(data.num_clients)]
        sums.append(jax.tree.map(lambda *leaves: sum(leaves), *messages))
    for name in ODDS:
        np.testing.assert_allclose(sums[0][name], sums[1][name], rtol=1e-4)


def turned(data, own):
    """Return the two clients the other way round, and the rows of a client group by group."""
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
def test_what_a_client_draws_depends_on_no_order(kind):
    """Of rows and of clients: draws go by the ids of a client and of its groups."""
    data = in_two_clients(clients("logistic"))
    other = turned(data, clients("logistic"))
    if kind == "joint":
        kernel = kernel_of(logistic, data)
    else:
        centered = fedmcmc.from_numpyro(logistic, example=data, centered=1.0)
        kernel = fedmcmc.fed_gibbs(centered, refresh=independence())

    def found(data, index, id_):
        state = kernel.init(KEY, ODDS, data)
        client = dataclasses.replace(data.client(index), index=np.int32(id_))
        own = jax.tree.map(lambda leaf: leaf[index], state.clients)
        message, kept, _ = jax.jit(rounds.client_step, static_argnums=1)(
            kernel, len(kernel.phases) - 1, KEY, state.broadcast, own, client
        )
        return jax.tree.leaves((message, kept.latents))

    for id_ in range(2):
        wanted = found(data, id_, id_)
        assert np.ptp(wanted[-1]) > 0.1
        for a, b in zip(found(other, 1 - id_, id_), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
        apart = found(other, 1 - id_, 1 - id_)[-1]  # with another id it draws other latents
        assert np.abs(apart - wanted[-1]).max() > 0.01


@pytest.mark.slow
def test_a_prior_that_clients_split_enters_once():
    """The shared prior, of which each has its share of rows; that of effects is never split."""
    with jax.enable_x64(True):
        data = in_two_clients(clients("logistic"))
        posterior = fedmcmc.marginal(fedmcmc.from_numpyro(logistic, example=data))
        draws = [
            run(fedmcmc.lsd(posterior, step_size=0.02, prior=prior), data, ODDS).draws
            for prior in ("server", "split")
        ]
        for name in ODDS:
            np.testing.assert_allclose(draws[1][name], draws[0][name], rtol=1e-9)


@pytest.mark.slow
def test_chunks_cut_groups_without_a_difference(monkeypatch):
    from fedmcmc.data import _federated
    from fedmcmc.hierarchy import _latents

    data = in_two_clients(clients("logistic"))
    kernel = kernel_of(logistic, data)
    wanted = run(kernel, data, ODDS).draws
    for module in (_federated, _latents):
        monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    jax.clear_caches()
    for name, found in run(kernel, data, ODDS).draws.items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-4)
    jax.clear_caches()


@pytest.mark.slow
def test_runs_with_latents_go_on_from_checkpoints_and_stores(tmp_path):
    data = FederatedData.from_clients(clients("logistic"))
    kernel = kernel_of(logistic, data, participation=fedmcmc.uniform(2))
    whole = run(kernel, data, ODDS, num_rounds=8)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "run", every_rounds=2)
    run(kernel, data, ODDS, num_rounds=4, checkpoint=checkpoint)
    again = run(kernel, data, ODDS, num_rounds=8, checkpoint=checkpoint)
    stored = run(
        kernel,
        data,
        ODDS,
        num_rounds=8,
        placement=fedmcmc.Placement(client_store=fedmcmc.HostStore()),
    )
    for samples in (again, stored):
        for name in ODDS:
            np.testing.assert_allclose(samples.draws[name], whole.draws[name], rtol=1e-5)
        (found,), (wanted,) = (jax.tree.leaves(x.state.clients.latents) for x in (samples, whole))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_what_does_not_fit_is_refused():
    data = FederatedData.from_clients(clients("logistic"))
    posterior = fedmcmc.from_numpyro(logistic, example=data)
    other = fedmcmc.marginal(posterior)
    lsd = fedmcmc.lsd
    with pytest.raises(ValueError, match="fed_ep sample them"):
        fedmcmc.fa_ld(posterior, step_size=0.1, num_local_steps=2)
    with pytest.raises(ValueError, match="fed_ep sample them"):
        lsd(posterior, step_size=0.1)
    with pytest.raises(ValueError, match="this posterior has none"):
        lsd(other, step_size=0.1, refresh=ula())
    with pytest.raises(TypeError, match="refresh must be a"):
        lsd(posterior, step_size=0.1, refresh="ula")
    with pytest.raises(ValueError, match="temperature one"):
        lsd(posterior, step_size=0.1, refresh=ula(), batch_size=2)
    with pytest.raises(ValueError, match="the server adds the prior"):
        lsd(posterior, step_size=0.1, refresh=ula(), prior="split")
    with pytest.raises(ValueError, match="are settings for latents"):
        lsd(other, step_size=0.1, num_draws=2)
    with pytest.raises(ValueError, match="order must be"):
        lsd(posterior, step_size=0.1, refresh=ula(), order="last")
    with pytest.raises(ValueError, match="step_size must be"):
        ula(2.5)
    kernel = lsd(posterior, step_size=0.1, refresh=conjugate())
    with pytest.raises(ValueError, match="not normal given the rest"):
        run(kernel, data, ODDS)
    with pytest.raises(ValueError, match="drawn twice"):
        two = fedmcmc.categorical(cohort_size=2)
        lsd(posterior, step_size=0.1, refresh=ula(), participation=two)
    some = lsd(posterior, step_size=0.1, refresh=ula(), participation=fedmcmc.bernoulli(0.5))
    with pytest.raises(ValueError, match="absent clients"):
        fedmcmc.compress(some, fedmcmc.memory(fedmcmc.quantize(4)))
    around = fedmcmc.Gaussian.from_moments(ODDS, variance={"tau": 0.1, "slope": 0.1})
    draw = jax.tree.map(lambda x: np.ones(1) * x, ODDS)
    for refused in (
        lambda: fedmcmc.whiten(posterior, data, ODDS),
        lambda: fedmcmc.correct(KEY, posterior, data, around),
        lambda: fedmcmc.metrics.potential(posterior, data, draw),
        lambda: fedmcmc.hmc(posterior, ODDS).init(KEY, ODDS, data),
    ):
        with pytest.raises(ValueError, match="fed_ep sample them"):
            refused()
    plain = fedmcmc.lsd(other, step_size=0.1)
    with pytest.raises(ValueError, match="for kernels that sample latents"):
        run(plain, data, ODDS, record=Record(local=True))
    with pytest.raises(ValueError, match="not both"):
        Record(local=True, keep_draws=False)
