"""Identities between LSD, QLSD, QLSD*, QLSD++ and SGLD, chain by chain with the same draws.

Gradients are below 2,000 with float32 errors of 1e-4. Over a few rounds, such errors times the step
size are below 1e-5.
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
MASKED = dict(step_size=STEP_SIZE, participation=fedmcmc.bernoulli(P))
PLAIN = dict(step_size=STEP_SIZE)
IDENTITY = fedmcmc.compression.identity()


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def run_round(kernel, data, key, state):
    return fedmcmc.simulate(kernel, data).step(key, state)[0]


def path(kernel, data=DATA, *, start=START, num_rounds=7, key=KEY):
    """Return the chain after every round, ``[num_rounds, ...]``."""
    state, positions = fedmcmc.simulate(kernel, data).init(start), []
    for _ in range(num_rounds):
        state = run_round(kernel, data, key, state)
        positions.append(np.asarray(state.broadcast.position))
    return np.stack(positions)


def assert_same(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def assert_different(a, b):
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
def full_gradient_path(masked):
    return path(lsd(**(MASKED if masked else PLAIN)))


@functools.cache
def lsd_pp_path(masked):
    return path(lsd_pp(**(MASKED if masked else PLAIN)))


def test_i6_qlsd_without_compression_is_lsd():
    kernel = lsd(**MASKED, batch_size=2)
    plain = path(kernel)
    assert_same(path(fedmcmc.compress(kernel, IDENTITY)), plain)

    def qlsd(num_levels):
        settings = dict(compressor=fedmcmc.quantize(num_levels), batch_size=2, **MASKED)
        return path(fedmcmc.qlsd(FEDERATION.posterior, **settings))

    # A level is then no more than the rounding of the norm.
    np.testing.assert_allclose(qlsd(2**23), plain, rtol=1e-4, atol=1e-4)
    assert_different(qlsd(2), plain)


def test_i6_qlsd_star_without_compression_is_lsd_star():
    star = path(lsd_star(batch_size=2, **MASKED))
    settings = dict(compressor=IDENTITY, batch_size=2, **MASKED)
    assert_same(path(fedmcmc.qlsd_star(FEDERATION.posterior, CENTRE, **settings)), star)
    assert_different(star, full_gradient_path(masked=True))


def test_i6_i11_qlsd_pp_without_compression_is_lsd_pp():
    for rate in (0.0, 0.3, 1.0):
        assert_same(path(qlsd_pp(IDENTITY, memory_rate=rate, **PLAIN)), lsd_pp_path(masked=False))
    # With masks, the memories of absent clients make a difference if the server adds them.
    masked = [path(qlsd_pp(IDENTITY, memory_rate=rate, **MASKED)) for rate in (0.0, 0.5)]
    assert_different(*masked)
    assert_different(masked[1], lsd_pp_path(masked=True))
    active = path(qlsd_pp(IDENTITY, memory_of="active", memory_rate=0.4, **MASKED))
    assert_same(active, lsd_pp_path(masked=True))


@pytest.mark.parametrize(
    "settings",
    [dict(refresh_every=1, batch_size=1), dict(batch_size=12, replace=False)],
    ids=["refreshed every round", "all rows"],
)
def test_i7_lsd_pp_has_full_gradients(settings):
    assert_same(path(lsd_pp(**MASKED, **settings)), full_gradient_path(masked=True))
    assert_different(lsd_pp_path(masked=True), full_gradient_path(masked=True))


def test_i8_i12_memory_matters_only_if_it_moves_and_whose_only_if_clients_are_absent():
    compressor = fedmcmc.quantize(4)
    without = path(fedmcmc.compress(lsd_pp(**MASKED), compressor))
    assert_same(path(qlsd_pp(compressor, memory_rate=0.0, **MASKED)), without)
    assert_different(path(qlsd_pp(compressor, memory_rate=0.3, **MASKED)), without)
    settings = dict(memory_rate=0.4, **PLAIN)
    of_all, of_active = (
        path(qlsd_pp(compressor, memory_of=of, **settings)) for of in ("all", "active")
    )
    assert_same(of_active, of_all)


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
        assert_same(path(kernel, data, start=start), plain)


def test_i10_rows_of_equal_curvature_leave_nothing_to_minibatches():
    data = Federation().data
    full = path(lsd(**PLAIN), data)
    assert_same(path(lsd_star(batch_size=2, **PLAIN), data), full)
    assert_same(path(lsd_pp(**PLAIN), data), full)
    assert_different(path(lsd_star(batch_size=2, **PLAIN)), full_gradient_path(masked=False))


def test_i13_one_client_without_compression_is_sgld():
    """The client draws Langevin noise in SGLD and the server in LSD, so both get the same noise."""
    pooled = DATA.pooled()
    client = pooled.client(0)
    sgld = fedmcmc.sgld(FEDERATION.posterior, step_size=STEP_SIZE, batch_size=3)
    kernel = lsd(**PLAIN, batch_size=3)

    @jax.jit
    def both(key, state, lsd_state):
        draws = sgld.prepare(key, state.broadcast, client)
        noise, gradient = jax.tree.map(lambda x: x[0], (draws.noise, draws.gradient))
        moved = move_client(sgld, draws, None, state)
        return moved, move_client(kernel, gradient, noise, lsd_state)

    def move_client(kernel_, draws, noise, state):
        message, _, _ = kernel_.step(draws, state.broadcast, state.clients, client)
        broadcast, _, _ = kernel_.aggregate(noise, state.broadcast, state.server, message)
        return state._replace(broadcast=broadcast)

    states = [k.init(KEY, START, pooled) for k in (sgld, kernel)]
    for round_ in range(4):
        states = both(jax.random.fold_in(KEY, round_), *states)
        assert_same(states[1].broadcast.position, states[0].broadcast.position)
    assert_different(states[0].broadcast.position, START)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [lsd, lsd_star, lsd_pp])
def test_i13_it_does_not_matter_who_adds_the_prior_with_minibatches(algorithm):
    settings = dict(batch_size=2, **PLAIN)
    assert_same(path(algorithm(prior="split", **settings)), path(algorithm(**settings)))


def test_i13_i37_the_chain_depends_neither_on_who_adds_the_prior_nor_on_labels():
    trees = FEDERATION.client_trees()
    relabeled = fedmcmc.FederatedData.from_clients([trees[i] for i in (2, 0, 3, 1)])
    split = lsd(**PLAIN, prior="split")
    for kernel, data in ((split, DATA), (lsd(**PLAIN), relabeled), (split, relabeled)):
        assert_same(path(kernel, data), full_gradient_path(masked=False))


@pytest.mark.slow
def test_i37_a_client_split_in_two_moves_the_chain_alike():
    trees = FEDERATION.client_trees()
    halves = [jax.tree.map(lambda x, p=p: x[p], trees[2]) for p in (slice(5), slice(5, 12))]
    data = fedmcmc.FederatedData.from_clients([*trees[:2], *halves, trees[3]])
    assert_same(path(lsd(**PLAIN, prior="split"), data), full_gradient_path(masked=False))
