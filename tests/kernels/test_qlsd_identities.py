"""Identities between LSD, QLSD, QLSD*, QLSD++ and SGLD, chain by chain with the same draws.

Two programs of the same mathematics differ by rounding. Gradients here are below 2,000, of which
float32 is off by 1e-4; times the step size and over a few rounds that is below 1e-5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles.federations import Federation
from tests.oracles.federations_qlsd import Curved

FEDERATION = Curved()
DATA = FEDERATION.data
START = jnp.asarray(Curved.start)
CENTRE = jnp.asarray(FEDERATION.centre)
P = jnp.array([0.5, 0.9, 0.6, 0.3])
KEY = jax.random.key(5)
STEP_SIZE = 0.006
SAME = dict(rtol=2e-5, atol=2e-5)
MASKED = dict(step_size=STEP_SIZE, participation=fedmcmc.bernoulli(P))
PLAIN = dict(step_size=STEP_SIZE)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def one_round(kernel, data, key, state):
    return fedmcmc.simulate(kernel, data).step(key, state)[0]


def path(kernel, data=DATA, *, start=START, num_rounds=7, key=KEY):
    """Return the chain after every round, ``[num_rounds, ...]``."""
    state, found = fedmcmc.simulate(kernel, data).init(start), []
    for _ in range(num_rounds):
        state = one_round(kernel, data, key, state)
        found.append(np.asarray(state.broadcast.position))
    return np.stack(found)


def same(a, b):
    np.testing.assert_allclose(a, b, **SAME)


def differ(a, b):
    assert np.abs(a - b).max() > 1e-2


def lsd(**settings):
    return fedmcmc.lsd(FEDERATION.posterior, **settings)


def lsd_star(**settings):
    return fedmcmc.lsd_star(FEDERATION.posterior, CENTRE, **settings)


def lsd_pp(**settings):
    settings = dict(batch_size=2, refresh_every=3) | settings
    return fedmcmc.lsd_pp(FEDERATION.posterior, **settings)


def qlsd_pp(compressor, **settings):
    settings = dict(batch_size=2, refresh_every=3) | settings
    return fedmcmc.qlsd_pp(FEDERATION.posterior, compressor=compressor, **settings)


@functools.cache
def full_gradients():
    """Return the paths of LSD without minibatches, with masks and without."""
    return path(lsd(**MASKED)), path(lsd(**PLAIN))


def test_i6_qlsd_without_compression_is_lsd():
    kernel = lsd(**MASKED, batch_size=2)
    plain = path(kernel)
    same(path(fedmcmc.compress(kernel, fedmcmc.compression.identity())), plain)

    def qlsd(num_levels):
        compressor = fedmcmc.quantize(num_levels)
        settings = dict(compressor=compressor, batch_size=2, **MASKED)
        return path(fedmcmc.qlsd(FEDERATION.posterior, **settings))

    # A level is then no more than the rounding of the norm.
    np.testing.assert_allclose(qlsd(2**23), plain, rtol=1e-4, atol=1e-4)
    differ(qlsd(2), plain)


def test_i6_qlsd_star_without_compression_is_lsd_star():
    star = path(lsd_star(batch_size=2, **MASKED))
    settings = dict(compressor=fedmcmc.compression.identity(), batch_size=2, **MASKED)
    same(path(fedmcmc.qlsd_star(FEDERATION.posterior, CENTRE, **settings)), star)
    differ(star, full_gradients()[0])


def test_i6_qlsd_pp_without_compression_is_lsd_pp_at_every_memory_rate():
    plain = path(lsd_pp(**PLAIN))
    for rate in (0.0, 0.3, 1.0):
        same(path(qlsd_pp(fedmcmc.compression.identity(), memory_rate=rate, **PLAIN)), plain)
    # With masks the memories of the silent make a difference.
    masked = [
        path(qlsd_pp(fedmcmc.compression.identity(), memory_rate=r, **MASKED)) for r in (0.0, 0.5)
    ]
    differ(*masked)


@pytest.mark.parametrize(
    "settings",
    [dict(refresh_every=1, batch_size=1), dict(batch_size=12, replace=False)],
    ids=["refreshed every round", "all rows"],
)
def test_i7_lsd_pp_has_full_gradients(settings):
    same(path(lsd_pp(**MASKED, **settings)), full_gradients()[0])
    differ(path(lsd_pp(**MASKED)), full_gradients()[0])


def test_i8_no_memory_is_a_memory_that_never_moves():
    compressor = fedmcmc.quantize(4)
    forgetful = path(qlsd_pp(compressor, memory_rate=0.0, **MASKED))
    same(forgetful, path(fedmcmc.compress(lsd_pp(**MASKED), compressor)))
    differ(forgetful, path(qlsd_pp(compressor, memory_rate=0.3, **MASKED)))


def test_i9_one_number_is_never_rounded():
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * theta**2, lambda theta, x: -jnp.cosh(x - theta)
    )
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=n) for n in (5, 1, 3, 8)])
    settings = dict(step_size=0.02, batch_size=2, participation=fedmcmc.bernoulli(P))
    start = jnp.array(0.7)
    plain = path(fedmcmc.lsd(posterior, **settings), data, start=start)
    for num_levels in (1, 3, 1000):
        kernel = fedmcmc.qlsd(posterior, compressor=fedmcmc.quantize(num_levels), **settings)
        same(path(kernel, data, start=start), plain)


def test_i10_rows_of_equal_curvature_leave_nothing_to_minibatches():
    data = Federation().data
    full = path(lsd(**PLAIN), data)
    same(path(lsd_star(batch_size=2, **PLAIN), data), full)
    same(path(lsd_pp(**PLAIN), data), full)
    differ(path(lsd_star(batch_size=2, **PLAIN)), full_gradients()[1])


def test_i11_without_compression_the_memory_of_the_active_is_no_memory():
    plain = path(lsd_pp(**MASKED))
    settings = dict(memory_rate=0.4, **MASKED)
    same(path(qlsd_pp(fedmcmc.compression.identity(), memory_of="active", **settings)), plain)
    differ(path(qlsd_pp(fedmcmc.compression.identity(), memory_of="all", **settings)), plain)


def test_i12_where_all_take_part_it_does_not_matter_whose_memory_is_added():
    compressor, settings = fedmcmc.quantize(4), dict(memory_rate=0.4, **PLAIN)
    everyone = path(qlsd_pp(compressor, memory_of="all", **settings))
    same(path(qlsd_pp(compressor, memory_of="active", **settings)), everyone)


def test_i13_one_client_without_compression_is_sgld():
    """Langevin's noise has other owners in the two (client and server): it is handed over."""
    pooled = DATA.pooled()
    client = pooled.client(0)
    sgld = fedmcmc.sgld(FEDERATION.posterior, step_size=STEP_SIZE, batch_size=3)
    kernel = lsd(**PLAIN, batch_size=3)

    @jax.jit
    def both(key, state, other):
        draws = sgld.prepare(key, state.broadcast, client)
        noise, gradient = jax.tree.map(lambda x: x[0], (draws.noise, draws.gradient))
        moved = one_client(sgld, draws, None, state)
        return moved, one_client(kernel, gradient, noise, other)

    def one_client(kernel_, draws, noise, state):
        message, _, _ = kernel_.step(draws, state.broadcast, state.clients, client)
        broadcast, _, _ = kernel_.aggregate(noise, state.broadcast, state.server, message)
        return state._replace(broadcast=broadcast)

    states = [k.init(KEY, START, pooled) for k in (sgld, kernel)]
    for round_ in range(4):
        states = both(jax.random.fold_in(KEY, round_), *states)
        same(states[1].broadcast.position, states[0].broadcast.position)
    differ(states[0].broadcast.position, START)


def test_i13_it_does_not_matter_who_adds_the_prior_where_all_take_part():
    same(path(lsd(**PLAIN, prior="split")), full_gradients()[1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [lsd, lsd_star, lsd_pp])
def test_i13_nor_with_minibatches_and_control_variates(algorithm):
    settings = dict(batch_size=2, **PLAIN)
    same(path(algorithm(prior="split", **settings)), path(algorithm(**settings)))


def test_i37_relabelled_clients_move_the_chain_alike():
    trees = FEDERATION.client_trees()
    relabelled = fedmcmc.FederatedData.from_clients([trees[i] for i in (2, 0, 3, 1)])
    same(path(lsd(**PLAIN), relabelled), full_gradients()[1])
    same(path(lsd(**PLAIN, prior="split"), relabelled), full_gradients()[1])


@pytest.mark.slow
def test_i37_a_client_split_in_two_moves_the_chain_alike():
    trees = FEDERATION.client_trees()
    halves = [jax.tree.map(lambda x, p=p: x[p], trees[2]) for p in (slice(5), slice(5, 12))]
    data = fedmcmc.FederatedData.from_clients([*trees[:2], *halves, trees[3]])
    same(path(lsd(**PLAIN, prior="split"), data), full_gradients()[1])


@pytest.mark.slow
def test_the_memory_of_the_server_is_the_sum_of_the_clients():
    settings = dict(step_size=STEP_SIZE, participation=fedmcmc.uniform(2))
    kernel = qlsd_pp(fedmcmc.quantize(2), **settings)
    state = fedmcmc.simulate(kernel, DATA).init(START)
    for _ in range(5):
        state = one_round(kernel, DATA, KEY, state)
    total = np.asarray(state.clients.compressor.memory.sum(0))
    assert np.abs(total).max() > 1
    np.testing.assert_allclose(state.server.memory, total, rtol=1e-5, atol=1e-4)
