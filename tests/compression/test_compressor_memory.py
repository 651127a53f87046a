"""Memories of messages, memories that the server adds, and messages that are not finite."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.pytrees import trees
from fedmcmc.random import random_words
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(4)
ROWS = [np.random.default_rng(i).normal(3 * i, 1, size=(n, 4)) for i, n in enumerate((3, 1, 5))]
DATA = fedmcmc.FederatedData.from_clients(ROWS)
START, STEP_SIZE, NUM_ROUNDS = np.full(4, 0.5), 0.02, 6
POSTERIOR = fedmcmc.Posterior(
    lambda theta: 0.0 * jnp.sum(theta),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
P = np.array([0.4, 0.7, 0.9])
RATES = np.array([0.2, 0.0, 0.5])


def simulated(participation, compressor):
    kernel = fedmcmc.lsd(
        POSTERIOR, step_size=STEP_SIZE, temperature=0.0, participation=participation
    )
    init, step = fedmcmc.simulate(fedmcmc.compress(kernel, compressor), DATA)
    step, state = jax.jit(step), init(jnp.asarray(START))
    for _ in range(NUM_ROUNDS):
        state, _ = step(KEY, state)
        yield state


@jax.jit
def decode_sent(compressor, key, message, client):
    draws = compressor.prepare(key, message, client)
    return compressor.decode(compressor.encode(draws, message, (), client)[0], client)


def run_in_numpy(participation, inner, rates, of):
    """Yield positions and memories after each round; only `inner` rounds."""
    theta, eta = START.copy(), np.zeros((3, 4))
    for round_ in range(NUM_ROUNDS):
        key = jax.random.fold_in(KEY, round_)
        cohort = participation.prepare(jax.random.fold_in(key, jnp.uint32(2**32 - 2)), 3)
        total = eta.sum(0) if of == "all" else np.zeros(4)
        for i, weight, active in zip(*map(np.asarray, cohort[:3]), strict=True):
            if not active:
                continue
            message = (ROWS[i] - theta).sum(0)
            compressor_key = jax.random.fold_in(jax.random.fold_in(key, i), jnp.uint32(2**32 - 4))
            difference = jnp.asarray(message - eta[i], jnp.float32)
            decoded = np.asarray(
                decode_sent(inner, compressor_key, difference, DATA.client(int(i)))
            )
            total += weight * (decoded + (eta[i] if of == "active" else 0))
            eta[i] += rates[i] * decoded
        theta = theta + STEP_SIZE * total
        yield theta, eta


@pytest.mark.parametrize("of", ["all", "active"])
@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(None, marks=pytest.mark.slow, id="default"),
        pytest.param(0.0, marks=pytest.mark.slow, id="zero"),
        pytest.param(RATES, id="per client"),
    ],
)
def test_memories_agree_with_a_loop_in_numpy(of, rate):
    inner, participation = fedmcmc.quantize(3), fedmcmc.bernoulli(P)
    rates = 1 / (1 + min(4 / 9, 2 / 3)) if rate is None else rate
    loop = run_in_numpy(participation, inner, np.broadcast_to(rates, 3), of)
    compressor = fedmcmc.memory(inner, rate, of=of)
    for state, (theta, eta) in zip(simulated(participation, compressor), loop, strict=True):
        np.testing.assert_allclose(state.broadcast.position, theta, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(state.clients.compressor.memory, eta, rtol=1e-5, atol=1e-5)
        if of == "all":
            np.testing.assert_allclose(state.server.memory, eta.sum(0), rtol=1e-5, atol=1e-5)
        else:
            assert state.server.memory == ()


def test_another_compression_comes_before_the_memory_that_the_server_adds():
    participation, rate = fedmcmc.bernoulli(jnp.asarray(P)), 0.3
    inner, outer = fedmcmc.sparsify(0.8), fedmcmc.quantize(5)
    lsd = fedmcmc.lsd(POSTERIOR, step_size=STEP_SIZE, participation=participation)
    twice = fedmcmc.compress(fedmcmc.compress(lsd, fedmcmc.memory(inner, rate)), outer)
    at_once = fedmcmc.compress(lsd, fedmcmc.memory(fedmcmc.compression.chain(inner, outer), rate))
    ends = []
    for kernel in (twice, at_once):
        init, step = fedmcmc.simulate(kernel, DATA)
        step, state = jax.jit(step), init(jnp.asarray(START))
        for _ in range(200):
            state, info = step(KEY, state)
        # If the change of a memory were rounded too, the two would drift apart.
        memories = state.clients.compressor.memory.sum(axis=0)
        np.testing.assert_allclose(state.server.memory, memories, rtol=1e-3, atol=1e-3)
        ends.append((state.broadcast.position, info.bits_up))
    np.testing.assert_array_equal(*(position for position, _ in ends))
    assert ends[0][1] == ends[1][1] < 3 * 4 * 32


def test_the_server_adds_a_single_memory():
    kernel = fedmcmc.compress(
        fedmcmc.lsd(POSTERIOR, step_size=STEP_SIZE), fedmcmc.memory(fedmcmc.quantize(4))
    )
    with pytest.raises(ValueError, match="adds the memories of its clients already"):
        fedmcmc.compress(kernel, fedmcmc.memory(fedmcmc.quantize(4)))
    with pytest.raises(ValueError, match="needs unbiased compressors"):
        fedmcmc.compress(kernel, fedmcmc.top_k(0.5))


@pytest.mark.parametrize("rate", [0.45, jnp.array([0.1, 0.45, 0.1])])
def test_a_rate_at_which_memories_diverge_is_refused(rate):
    def init(compressor):
        kernel = fedmcmc.compress(fedmcmc.lsd(POSTERIOR, step_size=STEP_SIZE), compressor)
        return jax.jit(fedmcmc.simulate(kernel, DATA).init)(jnp.asarray(START))

    # sparsify(0.2) has omega = 4.
    with pytest.raises(ValueError, match=r"rate 0.45 .* omega 4 .* 2 / \(1 \+ omega\) = 0.4"):
        init(fedmcmc.memory(fedmcmc.sparsify(0.2), rate))
    init(fedmcmc.memory(fedmcmc.sparsify(0.2), 0.4))
    init(fedmcmc.memory(fedmcmc.top_k(0.5), 1.0))  # biased: contracts at any rate


@pytest.mark.parametrize(
    "build",
    [
        fedmcmc.quantize,
        fedmcmc.sparsify,
        fedmcmc.top_k,
        fedmcmc.compression.clip,
        lambda x: fedmcmc.memory(fedmcmc.compression.identity(), x),
        fedmcmc.bernoulli,
    ],
)
def test_compressors_and_participations_refuse_schedules(build):
    with pytest.raises(TypeError, match=r"schedule|Python number"):
        build(lambda round_: 0.5)


def test_a_memory_converges_to_a_constant_message():
    message = jnp.array([1.0, -2.0, 3.0])
    compressor, client = fedmcmc.memory(fedmcmc.quantize(2), 0.5), DATA.client(0)
    state = compressor.init(message)
    compressed = jax.jit(
        lambda key, state: compressor.encode(
            compressor.prepare(key, message, client), message, state, client
        )
    )
    for i in range(60):
        code, state = compressed(jax.random.fold_in(KEY, i), state)
    np.testing.assert_allclose(state.memory, message, rtol=1e-4)
    assert float(code.norm) < 1e-3


def draws_of_client(kernel):
    broadcast = fedmcmc.types.Broadcast(jnp.int32(0), jnp.asarray(START, jnp.float32))
    return kernel.prepare(KEY, broadcast, DATA.client(2))


def test_a_compressor_shares_no_bits_with_its_kernel_nor_with_another():
    plain = fedmcmc.lsd(POSTERIOR, step_size=STEP_SIZE, batch_size=2)
    once = fedmcmc.compress(plain, fedmcmc.quantize(3))
    twice = fedmcmc.compress(once, fedmcmc.sparsify(0.5))
    drawn = draws_of_client(twice)
    chex.assert_trees_all_equal(drawn.kernel, draws_of_client(once))
    chex.assert_trees_all_equal(drawn.kernel.kernel, draws_of_client(plain))
    drawn_words = [np.asarray(drawn.compressor), np.asarray(drawn.kernel.compressor)]
    # A kernel may split its key any number of times: those keys are fold_in's of 0, 1, 2, ...
    keys = [KEY, *(jax.random.split(KEY, num)[i] for num in (2, 4) for i in range(num))]
    drawn_words += [np.asarray(random_words(key, jnp.zeros(4))) for key in keys]
    # split(key, 4) begins with split(key, 2).
    assert len({tuple(x) for x in drawn_words}) == 2 + 1 + 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "compressor",
    [
        fedmcmc.quantize(4),
        fedmcmc.sparsify(0.01),
        fedmcmc.top_k(0.25),
        fedmcmc.compression.clip(1.0),
        fedmcmc.compression.chain(fedmcmc.sparsify(0.01), fedmcmc.quantize(4)),
        fedmcmc.memory(fedmcmc.quantize(4)),
        fedmcmc.per_client([fedmcmc.compression.clip(1.0), fedmcmc.quantize(4)], [1]),
    ],
    ids=["quantize", "sparsify", "top_k", "clip", "chain", "memory", "per_client"],
)
def test_a_message_that_is_not_finite_stays_so(compressor, value):
    """The bad coordinate is hardly ever among those that are sent."""
    message = jnp.array([1.0, 2.0, value, -1.0])
    client, state = DATA.client(0), compressor.init(message)
    code, _ = compressor.encode(compressor.prepare(KEY, message, client), message, state, client)
    assert not np.isfinite(np.asarray(compressor.decode(code, client))).all()


def test_a_run_stops_if_a_compressed_gradient_is_not_finite():
    def loglikelihood(theta, x):
        return jnp.where(x[:, 0] > 6.5, jnp.nan, -0.5) * jnp.sum((x - theta) ** 2, axis=-1)

    posterior = POSTERIOR._replace(loglikelihood_fn=loglikelihood)
    kernel = fedmcmc.qlsd(
        posterior, step_size=STEP_SIZE, compressor=fedmcmc.sparsify(0.1), batch_size=1
    )
    with pytest.raises(fedmcmc.NonFiniteError, match="not finite"):
        fedmcmc.sample(
            KEY, kernel, DATA, jnp.asarray(START), num_rounds=60, num_burnin=0, progress=False
        )


@pytest.mark.parametrize("dtype", fast_and_slow([jnp.float16, jnp.bfloat16], [jnp.bfloat16]))
def test_positions_of_sixteen_bits_keep_their_type(dtype):
    for compressor in (fedmcmc.memory(fedmcmc.quantize(4)), fedmcmc.sparsify(0.5)):
        kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP_SIZE, participation=fedmcmc.bernoulli(P))
        init, step = fedmcmc.simulate(fedmcmc.compress(kernel, compressor), DATA)
        state = init(jnp.asarray(START, dtype))
        moved, _ = jax.jit(step)(KEY, state)
        assert trees.shapes_of(moved) == trees.shapes_of(state)
        assert moved.broadcast.position.dtype == dtype
        assert np.isfinite(np.asarray(moved.broadcast.position, float)).all()


@pytest.mark.parametrize("build", fast_and_slow([fedmcmc.sgld, fedmcmc.psgld], [fedmcmc.psgld]))
def test_bits_of_a_compressed_centralized_kernel_are_counted(build):
    def bits(kernel):
        return fedmcmc.sample(
            KEY, kernel, DATA, jnp.asarray(START), num_rounds=3, progress=False
        ).info["bits_up"]

    plain = build(POSTERIOR, step_size=STEP_SIZE)
    assert (bits(plain) == 0).all()  # all rows lie in one place
    compressed = bits(fedmcmc.compress(plain, fedmcmc.quantize(2)))
    assert ((compressed > 32) & (compressed < 4 * 32)).all()
