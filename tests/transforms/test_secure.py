"""Secure sums: the bits of the sum, runs with numbers out of range, and errors."""

import functools
import platform
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import Placement, inference, rounds, wire
from fedmcmc.compression import host_words, limbs_of_host
from fedmcmc.pytrees import trees
from fedmcmc.transforms import counts_of
from fedmcmc.tuning._linearized import affine_map
from tests.contracts.model import DATA, KEY, POSITIONS, POSTERIOR, P
from tests.support.deployed import hold_against_the_simulation
from tests.support.processes import environment

VECTOR = POSITIONS["vector"]


def logprior(theta):
    return -0.5 * jnp.sum(theta**2)


def loglikelihood(theta, rows):
    return -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)


GAUSSIAN = fedmcmc.Posterior(logprior, loglikelihood)


def few_rows(order=None):
    """Return nine clients with one or two rows, whose sums over rows do not depend on the order."""
    rng = np.random.default_rng(0)
    clients = [rng.normal(3 * i, 9, size=(1 + i % 2, 3)).astype(np.float32) for i in range(9)]
    return fedmcmc.FederatedData.from_clients([clients[i] for i in order or range(9)])


def sampled(kernel, data, position=VECTOR, **settings):
    settings = dict(num_rounds=8, progress=False) | settings
    return fedmcmc.sample(KEY, kernel, data, position, **settings)


def same_numbers(a, b):
    """Compare all results of sums; the mean gradient norm is not a result of integer sums."""
    for name in ("num_active", "bits_up", "num_lost"):
        np.testing.assert_array_equal(a.info[name], b.info[name])
    parts = [(s.draws, s.totals, s.state._replace(clients=())) for s in (a, b)]
    chex.assert_trees_all_equal(*parts)


def hold_everywhere():
    """Compare runs that add in other orders and on other devices with a reference run."""
    data, mesh = few_rows(), jax.make_mesh((4,), ("clients",))
    for kernel in (
        fedmcmc.lsd(GAUSSIAN, step_size=0.01),
        fedmcmc.lsd_star(GAUSSIAN, VECTOR + 9.0, step_size=0.01),
    ):
        kernel = fedmcmc.secure_sum(kernel)
        reference = sampled(kernel, data, placement=Placement(clients_at_a_time=1))
        assert np.abs(np.diff(reference.draws, axis=1)).min() > 0
        for placement in (
            Placement(),
            Placement(clients_at_a_time=4),
            Placement(num_buckets=2),
            Placement(mesh=mesh),
            Placement(mesh=mesh, totals="psum"),
            Placement(mesh=mesh, clients_at_a_time=1, num_buckets=2),
        ):
            same_numbers(reference, sampled(kernel, data, placement=placement))
        order = np.random.default_rng(1).permutation(9).tolist()
        same_numbers(reference, sampled(kernel, few_rows(order), placement=Placement()))
    print("same")


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the flag that leaves out fused arithmetic is for x86",
)
def test_sums_have_the_same_bits_in_any_order_and_on_any_devices():
    # Instructions up to AVX have no fused multiply-add, which a compiler may use in the step that
    # the server takes with the sum, in one program and not in another.
    process = subprocess.run(
        [sys.executable, "-c", "from tests.transforms.test_secure import *; hold_everywhere()"],
        env=environment(devices=4, flags="--xla_cpu_max_isa=AVX") | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout.strip() == "same", process.stderr[-3000:]


def test_a_float_sum_of_the_same_messages_depends_on_the_order():
    """Otherwise every kernel would pass the test above."""
    kernel, order = fedmcmc.lsd(GAUSSIAN, step_size=0.01), [8, 3, 5, 1, 7, 0, 2, 6, 4]
    ordered, permuted = (sampled(kernel, data) for data in (few_rows(), few_rows(order)))
    assert (ordered.draws != permuted.draws).any()


@pytest.mark.parametrize("digits", [32, 12])
def test_a_secure_round_is_the_plain_round_up_to_rounding(digits):
    step_size, data = 0.01, few_rows()
    plain = fedmcmc.lsd(GAUSSIAN, step_size=step_size)
    kernel = fedmcmc.secure_sum(plain, resolution=2.0**-digits)
    expected, actual = (sampled(k, data, num_rounds=1).draws for k in (plain, kernel))
    error = np.abs(np.asarray(expected, np.float64) - actual).max()
    rounding = 2e-7 * np.abs(expected).max()  # rounding of the position itself
    assert error <= step_size * 9 * 2.0**-digits / 2 + rounding
    assert error > rounding or digits == 32


def test_a_run_with_weights_is_a_deployed_one_to_the_last_bit():
    for participation in (fedmcmc.bernoulli(P), fedmcmc.full()):
        kernel = fedmcmc.secure_sum(
            fedmcmc.lsd(POSTERIOR, step_size=0.01, batch_size=2, participation=participation),
            allow_differencing=True,
        )
        hold_against_the_simulation(kernel, DATA, KEY, VECTOR, np.testing.assert_array_equal)


@pytest.mark.slow
def test_words_of_the_host_sum_to_what_a_server_receives():
    """Messages have 64 bits per number, and their sum in NumPy equals the simulation's sum."""
    kernel = fedmcmc.secure_sum(fedmcmc.fed_ep(GAUSSIAN, inference=inference.exact_gaussian()))
    data = few_rows()
    state = kernel.init(KEY, VECTOR, data)
    received = rounds.initialize_received(kernel, 0, state.broadcast)
    total = 0
    for index in range(data.num_clients):
        client_state = jax.tree.map(lambda leaf, i=index: leaf[i], state.clients)
        client = data.client(index)
        code, _, info = rounds.client_step(kernel, 0, KEY, state.broadcast, client_state, client)
        sent = wire.encode(code)
        assert 8 * len(sent) == info.bits == 64 * (6 + 2)
        like = rounds.code_like(kernel, 0, state.broadcast)
        code = wire.decode(sent, like)
        received = rounds.receive(kernel, 0, received, code, index, 1.0)
        total = total + host_words(code)
    read = limbs_of_host(total, kernel.message_like(trees.shapes_of(state.broadcast)))
    args = (kernel, 0, KEY, state.broadcast, state.server)
    chex.assert_trees_all_equal(
        rounds.server_step(*args, received),
        rounds.server_step(*args, read),
    )


@pytest.mark.slow
def test_sites_sum_to_the_global_gaussian_as_the_server_reads_it():
    """A coarse grid reveals a site that stores its unrounded message."""
    kernel = fedmcmc.fed_ep(GAUSSIAN, inference=inference.exact_gaussian(), damping=0.3)
    secured = fedmcmc.secure_sum(kernel, resolution=2.0**-4)
    plain, rounded = (sampled(k, few_rows(), num_rounds=3) for k in (kernel, secured))
    for samples in (plain, rounded):
        site = samples.state.clients.site
        extra = samples.state.broadcast.extra
        product = jax.tree.leaves(extra, is_leaf=lambda x: isinstance(x, fedmcmc.Gaussian))[0]
        np.testing.assert_allclose(
            site.precision.sum(axis=1) + 1.0, product.precision, rtol=1e-5, atol=1e-5
        )
    assert np.abs(plain.draws - rounded.draws).max() > 1e-3


def test_a_number_beyond_the_range_ends_the_run_with_the_reason():
    kernel = fedmcmc.secure_sum(fedmcmc.lsd(GAUSSIAN, step_size=0.3), max_abs=2.0**9)
    with pytest.raises(fedmcmc.NonFiniteError, match="beyond the range of its secure sum") as error:
        sampled(kernel, few_rows(), num_rounds=40, num_chains=2)
    assert 0 < error.value.round < 20
    assert counts_of(error.value.samples.state.server).saturated.tolist() == [0, 0]
    assert np.isfinite(error.value.samples.draws).all()
    # The same run continues with a wider range.
    sampled(
        fedmcmc.secure_sum(fedmcmc.lsd(GAUSSIAN, step_size=0.3), max_abs=2.0**21),
        few_rows(),
        num_rounds=error.value.round + 1,
    )


def test_a_message_that_is_not_finite_ends_the_run():
    def spoiled(theta, rows):
        # The chain reaches this region after several rounds.
        return loglikelihood(theta, rows) * jnp.where(theta[0] > 8, jnp.nan, 1.0)

    kernel = fedmcmc.secure_sum(fedmcmc.lsd(fedmcmc.Posterior(logprior, spoiled), step_size=0.01))
    with pytest.raises(fedmcmc.NonFiniteError, match="not finite"):
        sampled(kernel, few_rows(), num_rounds=60)


@pytest.mark.slow
def test_a_set_up_beyond_the_range_ends_the_run():
    plain = fedmcmc.lsd_star(GAUSSIAN, VECTOR + 1000.0, step_size=1e-4)
    sampled(plain, few_rows())
    with pytest.raises(fedmcmc.NonFiniteError):
        sampled(fedmcmc.secure_sum(plain, max_abs=2.0**7), few_rows())


def curved(theta, rows):
    """Return log likelihoods that are convex for negative signs, which no Gaussian fits."""
    return -0.5 * jnp.sum(rows["sign"][:, None] * (rows["x"] - theta) ** 2, axis=-1)


@pytest.mark.slow
def test_unusable_results_are_counted_and_change_nothing():
    signs = [{"x": np.full((3, 3), i), "sign": np.full(3, 1 - 2.0 * (i == 1))} for i in range(4)]
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), curved)
    plain = fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian())
    expected, actual = (
        sampled(kernel, fedmcmc.FederatedData.from_clients(signs), num_rounds=2)
        for kernel in (plain, fedmcmc.secure_sum(plain))
    )
    assert expected.info["num_lost"].tolist() == actual.info["num_lost"].tolist() == [[1, 0]]
    counts = counts_of(actual.state.server)
    assert (counts.lost.tolist(), counts.saturated.tolist()) == ([1], [0])
    np.testing.assert_allclose(actual.draws, expected.draws, rtol=1e-5)


def memory_of_all(kernel):
    return fedmcmc.compress(kernel, fedmcmc.memory(fedmcmc.compression.identity(), 0.4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A masked message takes 64 bits")
@pytest.mark.parametrize("compressed", [False, True])
def test_faults_of_a_secure_sum_are_those_of_the_plain_kernel(compressed):
    plain = fedmcmc.lsd(POSTERIOR, step_size=0.01, participation=fedmcmc.bernoulli(P))
    plain = memory_of_all(plain) if compressed else plain
    kernel = fedmcmc.secure_sum(plain, allow_differencing=True)
    expected, actual = (
        sampled(fedmcmc.faults(k, drop=0.3, late=0.4), DATA, num_rounds=30) for k in (plain, kernel)
    )
    np.testing.assert_array_equal(expected.info["num_active"], actual.info["num_active"])
    np.testing.assert_allclose(actual.draws, expected.draws, rtol=1e-4, atol=1e-5)


def relay():
    return fedmcmc.dsgld(POSTERIOR, step_size=0.01, num_local_steps=1)


def lsd(**settings):
    return fedmcmc.lsd(POSTERIOR, step_size=0.01, **settings)


ANY_SUM = dict(allow_differencing=True)


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (lambda: fedmcmc.sgld(POSTERIOR, step_size=0.01), {}, "one client"),
        (relay, ANY_SUM, "the sum of one message"),
        (
            lambda: lsd(participation=fedmcmc.uniform(2)),
            ANY_SUM,
            "compute the other's message",
        ),
        (lambda: lsd(participation=fedmcmc.uniform(3)), {}, "by their difference"),
        (lambda: lsd(participation=fedmcmc.bernoulli(0.5)), {}, "difference"),
        (lambda: fedmcmc.faults(lsd(), drop=0.1), {}, "apply faults to the secure"),
        (lambda: fedmcmc.secure_sum(lsd()), {}, "already"),
        (lsd, dict(resolution=1e-9), "power of two"),
        (lsd, dict(max_abs=2.0**22), r"below 2\*\*54"),
    ],
)
def test_kernels_that_a_sum_cannot_hide_are_refused(build, settings, message):
    with pytest.raises(ValueError, match=message):
        fedmcmc.secure_sum(build(), **settings)


def test_a_secure_sum_needs_a_kernel():
    with pytest.raises(TypeError, match=r"must be a fedmcmc\.FederatedKernel"):
        fedmcmc.secure_sum(3)


def test_unsuitable_transforms_of_a_secure_kernel_are_refused():
    kernel = fedmcmc.secure_sum(lsd())
    for secured in (kernel, fedmcmc.sequence(kernel, kernel)):
        with pytest.raises(ValueError, match="Codes cannot be added under masks"):
            fedmcmc.compress(secured, fedmcmc.quantize(4))
    with pytest.raises(ValueError, match="already"):
        fedmcmc.secure_sum(fedmcmc.sequence(kernel, kernel))
    with pytest.raises(ValueError, match="could exclude none"):
        fedmcmc.faults(kernel, nan=0.1)
    assert affine_map(kernel, DATA, VECTOR, 0) == "it sends integers"
    with pytest.warns(UserWarning, match="64 bits per number whatever its code"):
        fedmcmc.secure_sum(fedmcmc.qlsd(POSTERIOR, step_size=0.01, compressor=fedmcmc.quantize(4)))


def test_too_few_and_too_many_clients_are_refused():
    few = fedmcmc.FederatedData.from_clients([np.ones((2, 3)), np.zeros((1, 3))])
    with pytest.raises(ValueError, match="needs 3 clients or more, got 2"):
        fedmcmc.secure_sum(fedmcmc.lsd(GAUSSIAN, step_size=0.01)).init(KEY, VECTOR, few)
    kernel = fedmcmc.secure_sum(fedmcmc.lsd(GAUSSIAN, step_size=0.01), max_abs=2.0**21)
    many = fedmcmc.FederatedData.from_arrays(np.zeros((1100, 3)), np.arange(1100))
    with pytest.raises(ValueError, match="The sum of 1100 numbers"):
        kernel.init(KEY, VECTOR, many)
    late = fedmcmc.faults(kernel, late=0.2)
    fewer = fedmcmc.FederatedData.from_arrays(np.zeros((500, 3)), np.arange(500))
    kernel.init(KEY, VECTOR, fewer)
    with pytest.raises(ValueError, match="The sum of 1500 numbers"):
        late.init(KEY, VECTOR, fewer)


# The stationary distribution


@functools.partial(jax.jit, static_argnames="digits")
def moments(digits, key):
    """Return mean and variance with their errors for a chain with four clients.

    The total precision is nine, and messages have a standard deviation of 0.8.
    """
    data = fedmcmc.FederatedData.from_clients([np.full((1, 1), x) for x in MEANS])
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0 * theta[0], lambda theta, x: -1.125 * (x[:, 0] - theta[0]) ** 2
    )
    kernel = fedmcmc.lsd(posterior, step_size=STEP_SIZE)
    if digits is not None:
        kernel = fedmcmc.secure_sum(kernel, resolution=2.0**-digits)
    state = kernel.init(key, jnp.full(1, 0.6), data)

    def run(key):
        draws = rounds.run_rounds(kernel, data, key, state, 4_000, thinning=4)[1].draws[100:, 0]
        return draws.mean(), draws.var()

    statistics = jax.vmap(run)(jax.random.split(key, NUM_CHAINS))
    return jnp.stack([jnp.stack([x.mean(), x.std() / NUM_CHAINS**0.5]) for x in statistics])


MEANS, NUM_CHAINS, STEP_SIZE = (-1.0, 0.3, 0.9, 2.2), 256, 0.02


@pytest.mark.slow
def test_only_a_coarse_grid_changes_the_stationary_distribution():
    plain, fine, coarse = (np.asarray(moments(digits, KEY)) for digits in (None, 32, -2))
    np.testing.assert_allclose(fine, plain, rtol=1e-3, atol=1e-4)
    exact = 2 * STEP_SIZE / (1 - (1 - 9 * STEP_SIZE) ** 2)
    for (value, error), expected in zip(fine, (0.6, exact), strict=True):
        assert abs(value - expected) < 4 * error + 0.01 * expected
    # The nearest multiples of four are a function of the position, which changes the distribution.
    assert coarse[1, 0] > 1.6 * exact
