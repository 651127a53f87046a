"""Faults: the distribution with each kind of fault, and runs of all kernels with faults."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from fedmcmc.pytrees import trees
from fedmcmc.random import cohort_key, realize_normals, server_key
from fedmcmc.rounds import SINGLE_DEVICE, prepare_round
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import BARE
from tests.oracles import laws, laws_faults, laws_qlsd
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.oracles.federations_qlsd import Curved
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
NUM_ROUNDS = 4
FEDERATION = Curved()
NUM = len(FEDERATION.sizes)
STEP_SIZE = 0.006
TEMPERATURE = 0.5
Q = np.array([0.2, 0.6, 0.1, 0.4])
NESTED = POSITIONS["nested"]


# The distribution of the draws


CASES = {
    "drop": dict(drop=0.4),
    "drop-one-a-client": dict(drop=Q),
    "nan": dict(nan=0.3),
    "late": dict(late=0.5),
    "all": dict(drop=0.2, late=0.4, nan=Q / 2),
    "all-not-rescaled": dict(drop=0.3, late=0.4, nan=0.2, rescale=False),
    "all-of-a-cohort": dict(drop=Q, late=0.3, nan=0.2, cohort=2),
    "memory": dict(drop=0.3, late=0.4, nan=0.2, rate=0.4),
    "memory-in-a-sequence": dict(drop=0.3, late=0.4, rate=0.4, twice=True),
}


def settings_of(case):
    settings = dict(drop=0.0, late=0.0, nan=0.0, rescale=True, cohort=None, rate=None, twice=False)
    return settings | CASES[case]


def build(case):
    settings = settings_of(case)
    cohort = settings["cohort"]
    kernel = fedmcmc.lsd(
        FEDERATION.posterior,
        step_size=STEP_SIZE,
        temperature=TEMPERATURE,
        participation=None if cohort is None else fedmcmc.uniform(cohort),
    )
    if settings["rate"] is not None:
        memory = fedmcmc.memory(fedmcmc.compression.identity(), jnp.full(NUM, settings["rate"]))
        kernel = fedmcmc.compress(kernel, memory)
    if settings["twice"]:
        # The kernel before it moves nothing, so the sequence has the second kernel's distribution.
        still = fedmcmc.lsd(FEDERATION.posterior, step_size=1e-30, temperature=0.0)
        still = fedmcmc.compress(still, memory)
        kernel = fedmcmc.sequence(still, kernel)
    names = ("drop", "late", "nan", "rescale")
    return fedmcmc.faults(kernel, **{name: settings[name] for name in names})


def law_of(case, factor=1.0, num_rounds=NUM_ROUNDS, **settings):
    """Return the moments of ``(theta, pending, memories)``, with weights wrong by `factor`."""
    rates = settings_of(case)
    drop, late, nan = (np.broadcast_to(rates[name], (NUM,)) for name in ("drop", "late", "nan"))
    arrive = (1 - drop) * (1 - nan)
    weights = 1 / arrive if rates["rescale"] else np.ones(NUM)
    masks = None if rates["cohort"] is None else laws_qlsd.cohorts(rates["cohort"], NUM)
    settings = dict(temperature=TEMPERATURE, rate=rates["rate"]) | settings
    return laws_faults.rounds(
        FEDERATION.precisions,
        FEDERATION.means,
        **FEDERATION.prior,
        cases=laws_faults.cases(arrive, late, factor * weights, masks),
        step_size=STEP_SIZE,
        position=FEDERATION.start,
        num_rounds=num_rounds,
        **settings,
    )


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def one_round(kernel, data, keys, states):
    step = fedmcmc.simulate(kernel, data).step
    states, info = jax.vmap(step)(keys, states)
    return states, (info.num_active, info.num_excluded)


def run(kernel, data=None, num_rounds=NUM_ROUNDS, start=FEDERATION.start):
    """Return the states after each round, and the numbers of active and excluded clients."""
    data = FEDERATION.data if data is None else data
    keys = jax.vmap(lambda c: jax.random.fold_in(KEY, c))(jnp.arange(NUM_CHAINS))
    state = fedmcmc.simulate(kernel, data).init(jnp.asarray(start))
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (NUM_CHAINS, *x.shape)), state)
    states, counts = [], []
    for _ in range(num_rounds):
        state, count = one_round(kernel, data, keys, state)
        states.append(state)
        counts.append(np.stack(count, axis=-1))
    return states, np.stack(counts, axis=1)


def flatten(state, case):
    """Return theta, the pending messages and the memories, if the case has them."""
    parts = [state.broadcast.position]
    if hasattr(state.server, "pending"):
        pending = state.server.pending
        parts.append(getattr(pending, "message", pending))
    clients = state.clients[-1] if settings_of(case)["twice"] else state.clients
    if hasattr(clients, "compressor"):
        parts.append(clients.compressor.memory.reshape(NUM_CHAINS, -1))
    return np.concatenate(parts, axis=1)


def without_pending(law, case):
    """Return the moments of `flatten`; without late messages nothing is pending."""
    if settings_of(case)["late"]:
        return law
    d = len(FEDERATION.start)
    keep = np.delete(np.arange(len(law.mean)), np.arange(d, 2 * d))
    return laws.Moments(law.mean[keep], law.covariance[np.ix_(keep, keep)])


def largest_z(draws, expected, case):
    """Return the largest |z| of each round."""
    pairs = zip(draws, expected[1:], strict=True)
    return np.array([worst_z(x, without_pending(law, case)) for x, law in pairs])


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["all"]))
def test_each_round_has_the_exact_distribution(case):
    states, counts = run(build(case))
    draws = [flatten(state, case) for state in states]
    assert largest_z(draws, law_of(case), case).max() < LIMIT
    rates = settings_of(case)
    wrong = [dict(temperature=TEMPERATURE * 2), dict(factor=1.2)]
    if rates["rate"] is None and rates["late"]:
        wrong.append(dict(stale=False))
    for settings in wrong:
        assert largest_z(draws, law_of(case, **settings), case).max() > LIMIT, settings
    # Numbers of active and of excluded clients.
    drop, nan = (np.broadcast_to(rates[name], (NUM,)) for name in ("drop", "nan"))
    share = 1.0 if rates["cohort"] is None else rates["cohort"] / NUM
    expected = share * np.array([np.sum((1 - drop) * (1 - nan)), np.sum((1 - drop) * nan)])
    for kind, mean in enumerate(expected):
        statistics = counts[..., kind].mean(axis=1)
        if statistics.std() == 0:
            np.testing.assert_array_equal(statistics, mean)
        else:
            assert abs(z_scores(statistics, mean)) < LIMIT
    if not np.any(drop) and rates["cohort"] is None:
        assert (counts.sum(-1) == NUM).all()


@pytest.mark.parametrize("rate", [None, 0.4], ids=["plain", "memory"])
def test_dropping_clients_is_bernoulli_participation(rate):
    expected = FEDERATION.langevin(
        participation=laws_qlsd.bernoulli(1 - Q),
        step_size=STEP_SIZE,
        temperature=TEMPERATURE,
        rates=rate,
    ).rounds(FEDERATION.start, 6)
    dropped = laws_faults.rounds(
        FEDERATION.precisions,
        FEDERATION.means,
        **FEDERATION.prior,
        cases=laws_faults.cases(1 - Q, np.zeros(NUM), 1 / (1 - Q)),
        step_size=STEP_SIZE,
        position=FEDERATION.start,
        num_rounds=6,
        rate=rate,
        temperature=TEMPERATURE,
    )
    keep = np.delete(np.arange(len(dropped[0].mean)), np.arange(3, 6))
    for law, moments in zip(dropped, expected, strict=True):
        np.testing.assert_allclose(law.mean[keep], moments.mean, rtol=1e-9, atol=1e-12)
        covariance = law.covariance[np.ix_(keep, keep)]
        np.testing.assert_allclose(covariance, moments.covariance, rtol=1e-9, atol=1e-12)


def test_late_messages_leave_the_mean():
    target = laws.posterior(FEDERATION.precisions, FEDERATION.means, **FEDERATION.prior)
    mean = law_of("late", num_rounds=500)[-1].mean
    gaps = FEDERATION.means - target.mean
    sent = np.einsum("sij,sj->i", FEDERATION.precisions, gaps)
    np.testing.assert_allclose(mean, [*target.mean, *0.5 * sent], rtol=1e-5, atol=1e-6)


def test_a_relay_that_drops_out_stays_where_it_is():
    """Faults must not change the weights, which multiply gradients."""
    federation = Federation()
    kernel = fedmcmc.dsgld(
        federation.posterior,
        step_size=0.004,
        num_local_steps=3,
        probabilities=jnp.asarray(federation.probabilities),
    )
    law = federation.law(step_size=0.004, num_local_steps=3, probabilities=federation.probabilities)
    states, _ = run(fedmcmc.faults(kernel, drop=0.3, nan=0.2), federation.data)
    expected = laws.Moments(federation.start, np.zeros((3, 3)))
    for state in states:
        expected = laws.mixture([0.44, 0.56], [expected, law.after(expected, 3)])
        assert worst_z(np.asarray(state.broadcast.position), expected) < LIMIT


@pytest.mark.slow
def test_faults_of_a_client_depend_only_on_its_round_and_the_seed():
    def cohort(participation, seed=0, **kinds):
        kernel = fedmcmc.lsd(FEDERATION.posterior, step_size=0.1, participation=participation)
        kinds = kinds or dict(drop=0.3, late=0.4, nan=0.3)
        kernel = fedmcmc.faults(kernel, seed=seed, **kinds)
        keys = jax.vmap(lambda r: cohort_key(KEY, r))(jnp.arange(50))
        return jax.jit(jax.vmap(lambda key: kernel.participation.prepare(key, NUM)))(keys)

    def faults_in(cohorts):
        return cohorts.active, cohorts.late, cohorts.garbage

    full, pairs = cohort(fedmcmc.full()), cohort(fedmcmc.uniform(2))
    rows = np.arange(50)[:, None]
    for of_all, of_pair in zip(faults_in(full), faults_in(pairs), strict=True):
        np.testing.assert_array_equal(np.asarray(of_all)[rows, pairs.ids], of_pair)
        assert 10 < np.sum(np.asarray(of_pair) == of_pair[0, 0]) < 90
    reseeded = cohort(fedmcmc.full(), seed=1)
    for a, b in zip(faults_in(full), faults_in(reseeded), strict=True):
        assert np.any(np.asarray(a) != np.asarray(b))
    np.testing.assert_array_equal(cohort(fedmcmc.uniform(2), seed=1).ids, pairs.ids)
    for kind, name in (("drop", "active"), ("late", "late")):
        alone = cohort(fedmcmc.full(), **{kind: {"drop": 0.3, "late": 0.4}[kind]})
        np.testing.assert_array_equal(getattr(alone, name), getattr(full, name))
    garbage = np.asarray(full.garbage)
    assert np.isnan(garbage).any() and (garbage == np.inf).any() and (garbage == -np.inf).any()


# Messages that are not finite by themselves


def spoiled(position, rows):
    """Return NaN slopes for client 1, and for client 2 if the first coordinate exceeds one."""
    x, owner = rows["x"], rows["owner"]
    terms = -0.5 * (x - position) ** 2
    bad = (owner == 1) | ((owner == 2) & (position[0] > 1))
    # The gradient's second coordinate is zero times infinity.
    factor = jnp.where(bad, jnp.inf, 1.0)
    return jnp.sum(terms, axis=-1) + 0.0 * factor * position[1]


def spoiled_data(owners=(0, 1, 2)):
    rng = np.random.default_rng(0)
    rows = [rng.normal(i, 1.0, (n, 2)).astype(np.float32) for i, n in enumerate((4, 3, 5))]
    return fedmcmc.FederatedData.from_clients(
        [{"x": rows[i], "owner": np.full(len(rows[i]), i, np.int32)} for i in owners]
    )


SPOILED = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), spoiled)


def test_a_client_is_excluded_only_in_rounds_without_a_finite_message():
    kernel = fedmcmc.faults(fedmcmc.lsd(SPOILED, step_size=0.02))
    settings = dict(position=jnp.array([2.0, 0.0]), num_rounds=60, progress=False)
    samples = fedmcmc.sample(KEY, kernel, spoiled_data(), **settings)
    previous = np.concatenate([[2.0], samples.draws[0, :-1, 0]])
    assert (previous > 1).any() and (previous < 1).any()
    np.testing.assert_array_equal(samples.info["num_excluded"][0], 1 + (previous > 1))
    np.testing.assert_array_equal(samples.info["num_active"][0], 2 - (previous > 1))
    assert np.isfinite(samples.info["gradient_norm"]).all()
    # Excluded messages were sent, so their bits count.
    np.testing.assert_array_equal(samples.info["bits_up"], 3 * 2 * 32)
    # The chain uses the other clients' messages.
    draws = np.asarray(samples.draws[0])
    position = np.array([2.0, 0.0])
    for r in range(60):
        gradient = -position
        for i in (0, 2) if position[0] <= 1 else (0,):
            rows = spoiled_data((i,)).rows["x"]
            gradient = gradient + np.sum(np.asarray(rows) - position, axis=0)
        key = server_key(jax.random.fold_in(KEY, 0), jnp.int32(r))
        z = np.asarray(realize_normals(key, jax.ShapeDtypeStruct((2,), jnp.float32)))
        position = position + 0.02 * gradient + np.sqrt(0.04) * z
        np.testing.assert_allclose(draws[r], position, rtol=1e-3, atol=1e-4)
    with pytest.raises(fedmcmc.NonFiniteError):
        fedmcmc.sample(KEY, fedmcmc.lsd(SPOILED, step_size=0.02), spoiled_data(), **settings)


def test_an_excluded_message_moves_no_memory():
    kernel = fedmcmc.compress(
        fedmcmc.lsd(SPOILED, step_size=0.02), fedmcmc.memory(fedmcmc.compression.identity())
    )
    init, step = fedmcmc.simulate(fedmcmc.faults(kernel), spoiled_data())
    step, state = jax.jit(step), init(jnp.zeros(2))
    for _ in range(3):
        state, info = step(KEY, state)
        memory = np.asarray(state.clients.compressor.memory)
        assert info.num_excluded == 1 and (memory[1] == 0).all() and np.isfinite(memory).all()
        assert (memory[[0, 2]] != 0).all()
        np.testing.assert_allclose(state.server.memory, memory.sum(0), rtol=1e-5)


def test_an_excluded_client_is_absent_from_later_phases():
    """Only the bits of its first message count."""
    spoiled_kernel = fedmcmc.lsd(SPOILED, step_size=0.02, temperature=0.0)
    fine = fedmcmc.Posterior(
        SPOILED.logprior_fn,
        lambda theta, rows: -0.5 * jnp.sum((rows["x"] - theta) ** 2, axis=-1),
    )
    fine_kernel = fedmcmc.lsd(fine, step_size=0.02, temperature=0.0)
    start = jnp.zeros(2)

    def end(*kernels, data):
        init, step = fedmcmc.simulate(fedmcmc.faults(fedmcmc.sequence(*kernels)), data)
        return jax.jit(step)(KEY, init(start))

    state, info = end(spoiled_kernel, fine_kernel, data=spoiled_data())
    assert (int(info.num_active), int(info.num_excluded)) == (2, 1)
    assert int(info.bits_up) == (3 + 2) * 64 and int(info.bits_down) == (3 + 2) * 64
    expected, _ = end(spoiled_kernel, fine_kernel, data=spoiled_data((0, 2)))
    np.testing.assert_allclose(state.broadcast.position, expected.broadcast.position, rtol=1e-5)
    # In the reverse order, the server adds its first message.
    state, info = end(fine_kernel, spoiled_kernel, data=spoiled_data())
    assert (int(info.num_active), int(info.num_excluded)) == (2, 1)
    assert int(info.bits_up) == (3 + 3) * 64
    position = start
    for clients in ((0, 1, 2), (0, 2)):
        rows = np.concatenate([np.asarray(spoiled_data((i,)).rows["x"]) for i in clients])
        position = position + 0.02 * (np.sum(rows - position, axis=0) - position)
    np.testing.assert_allclose(state.broadcast.position, position, rtol=1e-5)


def test_a_run_that_excludes_most_messages_warns():
    kernel = fedmcmc.faults(fedmcmc.lsd(SPOILED, step_size=1e-6))
    with pytest.warns(RuntimeWarning, match="67% of the messages .* not finite"):
        fedmcmc.sample(
            KEY, kernel, spoiled_data(), jnp.array([2.0, 0.0]), num_rounds=3, progress=False
        )


# All kernels


@functools.cache
def kernel_of(name):
    return BARE[name](NESTED, Given())


REPAIRABLE = {name: x for name, x in BARE.items() if not kernel_of(name).traits.noise_in_messages}
"""Kernels whose rounds may lack a message."""


def after(kernel, num_rounds, placement=None):
    """Return the state after `num_rounds` rounds and their `RoundInfo`, leaves ``[num_rounds]``."""
    init, step = fedmcmc.simulate(kernel, DATA, placement=placement)
    chex.clear_trace_counter()
    # Optimization would take longer than the rounds.
    compiled = jax.jit(
        chex.assert_max_traces(step, n=1), compiler_options={"xla_backend_optimization_level": 0}
    )
    # Initial numbers may have a weak type, but numbers after a round do not.
    state, infos = jax.tree.map(lambda x: x.astype(x.dtype), init(NESTED)), []
    for _ in range(num_rounds):
        state, info = compiled(KEY, state)
        infos.append(info)
    return state, jax.tree.map(lambda *leaves: np.stack(leaves), *infos)


def faults_of(name, kernel):
    """Return faults that a kernel supports: not all kernels support `late` and `nan`."""
    late = dict(late=0.3) if kernel.traits.accepts_late_messages else {}
    nan = {} if name.startswith("secure_sum") else dict(nan=0.4)
    return dict(drop=0.3) | late | nan


@pytest.mark.parametrize("name", fast_and_slow(REPAIRABLE, ["qlsd_pp"]))
def test_faults_change_no_other_draw(name):
    """Cohorts and all draws have the same bits with and without faults."""
    kernel = kernel_of(name)
    data = DATA.pooled() if kernel.participation.pooled else DATA
    broadcast = kernel.init(KEY, NESTED, data).broadcast
    kinds = (dict(), dict(**faults_of(name, kernel), rescale=False))
    bare, *faulty = (
        jax.jit(prepare_round)(k, data, SINGLE_DEVICE, KEY, broadcast, jnp.int32(1))
        for k in (kernel, *(fedmcmc.faults(kernel, **kind) for kind in kinds))
    )
    for cohort, draws in faulty:
        actual = cohort.ids, cohort.weight, draws
        chex.assert_trees_all_equal(actual, (bare[0].ids, bare[0].weight, bare[1]))
    assert len(jax.tree.leaves(bare[1])) > 0


@pytest.mark.parametrize("name", fast_and_slow(REPAIRABLE, ["fsgld"]))
def test_a_guard_without_faults_changes_only_rounding(name):
    bare, _ = after(kernel_of(name), 4)
    guarded, info = after(fedmcmc.faults(kernel_of(name), seed=5), 4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), guarded, bare)
    assert (info.num_excluded == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", REPAIRABLE)
def test_faults_stop_no_kernel(name):
    """The runs include rounds without any message, and clients in chunks."""
    bare = kernel_of(name)
    kinds = faults_of(name, bare)
    kernel = fedmcmc.faults(bare, **kinds)
    state, info = after(kernel, 10)
    assert trees.all_finite((state.broadcast, state.server, state.clients))
    assert (info.num_active == 0).any() and (info.num_active > 0).any()
    assert info.num_excluded.any() == ("nan" in kinds) and int(state.broadcast.round) == 10
    assert np.isfinite(info.gradient_norm).all()
    assert trees.all_finite(kernel.draw(KEY, state))
    moved = not np.array_equal(*(trees.ravel(x) for x in (state.broadcast.position, NESTED)))
    assert moved or bare.traits.needs_all_clients  # rounds that miss a client change nothing
    if not bare.participation.pooled:
        chunked, _ = after(kernel, 10, fedmcmc.Placement(clients_at_a_time=2))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
        jax.tree.map(close, state, chunked)


@pytest.mark.parametrize("name", fast_and_slow(REPAIRABLE, ["fsgld", "natural"]))
def test_a_round_without_messages_keeps_all_client_states(name):
    kernel = fedmcmc.faults(kernel_of(name), drop=1 - 1e-6)
    before = fedmcmc.simulate(kernel, DATA).init(NESTED)
    state, info = after(kernel, 2)
    assert (info.num_active == 0).all() and (info.bits_up == 0).all()
    assert trees.all_finite(state)
    client_states = jax.tree.map(
        lambda leaf: () if isinstance(leaf, fedmcmc.types.RecomputableState) else leaf,
        (before.clients, state.clients),
        is_leaf=lambda leaf: isinstance(leaf, fedmcmc.types.RecomputableState),
    )
    chex.assert_trees_all_equal(*client_states)
    if name in ("fsgld", "relay", "fed_avg", "fed_pa", "fa_ld", "averaging", "natural"):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
        if name != "natural":
            jax.tree.map(close, state.broadcast.position, NESTED)
        else:
            jax.tree.map(close, state.broadcast.extra, before.broadcast.extra)


@pytest.mark.slow
@pytest.mark.parametrize("cavity", ["site", "none"])
def test_the_product_and_pending_messages_agree_with_the_sites(cavity):
    """The server's product times the pending messages is the product of prior and sites."""
    federation = Federation()
    prior = fedmcmc.Gaussian.from_moments(jnp.zeros(3), variance=jnp.ones(3))
    flat = federation.posterior._replace(logprior_fn=lambda theta: jnp.zeros(()))
    bare = fedmcmc.natural(
        flat, inference.exact_gaussian(), cavity=cavity, damping=0.5, prior=prior
    )
    kernel = fedmcmc.faults(bare, drop=0.2, late=0.4, nan=0.2)
    init, step = fedmcmc.simulate(kernel, federation.data)
    step, state = jax.jit(step), init(jnp.zeros(3))
    num_waiting = 0
    for _ in range(20):
        state, _ = step(KEY, state)
        product = prior
        for i in range(NUM):
            product = product * jax.tree.map(lambda leaf, i=i: leaf[i], state.clients.site)
        pending = state.server.pending
        num_waiting += np.any(trees.ravel(pending) != 0)
        actual = state.broadcast.extra[0] * pending**0.5
        chex.assert_trees_all_close(actual, product, rtol=1e-4, atol=1e-3)
    assert 5 < num_waiting < 20
    # Faults do not change the fixed point of the sites.
    calm_step = jax.jit(fedmcmc.simulate(bare, federation.data).step)
    calm = fedmcmc.simulate(bare, federation.data).init(jnp.zeros(3))
    for _ in range(60):
        calm, state = calm_step(KEY, calm)[0], step(KEY, state)[0]
    np.testing.assert_allclose(state.broadcast.position, calm.broadcast.position, atol=1e-3)


def test_an_average_is_over_the_messages_that_arrived():
    """In federated averaging of quadratics, weights arrive late with their displacements."""
    federation = Federation()
    kernel = fedmcmc.faults(
        fedmcmc.fed_avg(
            federation.posterior,
            client_optimizer=optax.sgd(0.05),
            num_local_steps=2,
        ),
        drop=0.4,
        late=0.5,
    )
    init, step = fedmcmc.simulate(kernel, federation.data)
    step, state = jax.jit(step), init(jnp.asarray(federation.start))
    sizes = np.array(federation.sizes)
    shares, total = sizes / sizes.sum(), sizes.sum()
    prior = federation.prior_precision, federation.prior_mean
    position, pending = federation.start, (0.0, np.zeros(3))
    for r in range(12):
        cohort = kernel.participation.prepare(cohort_key(KEY, jnp.int32(r)), NUM)
        now, late = pending, (0.0, np.zeros(3))
        for i in np.flatnonzero(cohort.active):
            local = position
            for _ in range(2):
                gradient = federation.precisions[i] @ (local - federation.means[i]) / sizes[i]
                local = local - 0.05 * (gradient + prior[0] @ (local - prior[1]) / total)
            weight = shares[i] / 0.6
            message = weight, weight * (local - position)
            if cohort.late[i]:
                late = late[0] + message[0], late[1] + message[1]
            else:
                now = now[0] + message[0], now[1] + message[1]
        if now[0] > 0:
            position = position + now[1] / now[0]
        pending = late
        state, _ = step(KEY, state)
        np.testing.assert_allclose(state.broadcast.position, position, rtol=1e-3, atol=1e-4)


# Errors


def lsd(**settings):
    return fedmcmc.lsd(FEDERATION.posterior, step_size=0.1, **settings)


def faults(kernel=None, **settings):
    return fedmcmc.faults(lsd() if kernel is None else kernel, **settings)


IDENTITY = fedmcmc.compression.identity()
WRONG_VARIANCE = "noise .* has the wrong variance"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: faults(lsd(noise="clients")), WRONG_VARIANCE),
        (lambda: faults(fedmcmc.compress(lsd(noise="clients"), IDENTITY)), WRONG_VARIANCE),
        (lambda: faults(drop=1.0), r"drop must be a probability in \[0"),
        (lambda: faults(late=-0.1), "late must be .* got -0.1"),
        (lambda: faults(nan=float("nan")), "nan must be .* got nan"),
        (lambda: faults(nan="often"), "nan must be .* got 'often'"),
        (lambda: faults(late=lambda r: 0.1), "late must be a probability"),
        (lambda: faults(drop=jnp.zeros((2, 2))), r"drop must be .* shape \(2, 2\)"),
        (lambda: faults(seed=-1), "seed must be an integer from 0"),
        (lambda: faults(seed=0.5), "seed must be an integer .* got 0.5"),
        (
            lambda: faults(late=jnp.full(3, 0.1)).init(KEY, jnp.zeros(3), FEDERATION.data),
            "late has probabilities for 3 clients, but the data has 4",
        ),
        (lambda: faults(faults(), drop=0.1), "has faults already"),
        (lambda: fedmcmc.compress(faults(), IDENTITY), "compress the kernel first"),
        (lambda: fedmcmc.sequence(faults(), faults()), "apply faults to the sequence"),
    ],
)
def test_unsuitable_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_faults_need_a_kernel():
    with pytest.raises(TypeError, match=r"kernel must be a fedmcmc\.FederatedKernel"):
        fedmcmc.faults(None)
