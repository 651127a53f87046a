"""Convolutions are rewritten to equal numbers, in all programs and in runs."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.pytrees._convolutions import canonical, holds_convolution
from fedmcmc.rounds import _program
from tests.support.lanes import fast_and_slow

LAYOUTS = {
    1: [("NCH", "OIH", "NCH")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CWNH", "IWOH", "HNWC")],
    3: [("CNWHD", "WOIDH", "DCHNW")],
}


def dimension_numbers(jaxpr):
    """Return the dimension numbers of all convolutions of a jaxpr, also in inner jaxprs."""
    numbers = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "conv_general_dilated":
            numbers.append(tuple(eqn.params["dimension_numbers"]))
        for inner in jax.tree.leaves(
            [v for v in eqn.params.values() if isinstance(v, (list, tuple)) or hasattr(v, "eqns")],
            is_leaf=lambda v: hasattr(v, "eqns"),
        ):
            if hasattr(inner, "eqns"):
                numbers += dimension_numbers(inner)
    return numbers


def are_canonical(jaxpr):
    numbers = dimension_numbers(jaxpr)
    assert numbers
    rank = len(numbers[0][0])
    activation, kernel = (0, rank - 1, *range(1, rank - 1)), (rank - 1, rank - 2, *range(rank - 2))
    return all(order == (activation, kernel, activation) for order in numbers)


def convolve(x, w, *, groups, padding, stride, dilation):
    """Convolve ``[batch, *space, in]`` with ``[*window, in / groups, out]``, by its definition."""
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    window, rank = w.shape[:-2], w.ndim - 2
    steps = [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, s, d in zip(x.shape[1:-1], window, stride, dilation, strict=True)
    ]
    out = np.zeros((len(x), *steps, w.shape[-1]))
    per_in, per_out = w.shape[-2], w.shape[-1] // groups
    for place in itertools.product(*map(range, steps)):
        for tap in itertools.product(*map(range, window)):
            source = tuple(place[i] * stride[i] + tap[i] * dilation[i] for i in range(rank))
            for g in range(groups):
                channels = slice(g * per_out, (g + 1) * per_out)
                inputs = x[(slice(None), *source, slice(g * per_in, (g + 1) * per_in))]
                out[(slice(None), *place, channels)] += inputs @ w[(*tap, slice(None), channels)]
    return out


@pytest.mark.parametrize("rank, groups", [(1, 1), (2, 2), (3, 1)])
def test_convolutions_are_equal_for_any_order_of_axes(rank, groups):
    rng = np.random.default_rng(0)
    names, space, window = "HWD"[:rank], (6, 5, 4)[:rank], (3, 2, 1)[:rank]
    x = rng.normal(size=(3, *space, 2 * groups)).astype(np.float32)
    w = rng.normal(size=(*window, 2, 3 * groups)).astype(np.float32)
    options = dict(
        padding=[(2, 1), (0, 1), (1, 0)][:rank], stride=(2, 1, 1)[:rank], dilation=(1, 2, 1)[:rank]
    )
    expected = convolve(x, w, groups=groups, **options)
    weights = rng.normal(size=expected.shape).astype(np.float32)
    for of_x, of_w, of_out in LAYOUTS[rank]:
        # Options of space are in the order of the window's axes.
        axes = [names.index(c) for c in of_w if c in names]
        back = [of_out.index(c) for c in f"N{names}C"]

        def fn(lhs, rhs, specs=(of_x, of_w, of_out), axes=axes):
            return jax.lax.conv_general_dilated(
                lhs,
                rhs,
                [options["stride"][i] for i in axes],
                [options["padding"][i] for i in axes],
                rhs_dilation=[options["dilation"][i] for i in axes],
                dimension_numbers=specs,
                feature_group_count=groups,
            )

        def both(lhs, rhs, fn=fn, back=back):
            # Gradients are convolutions with dilated inputs, reversed windows, groups of batches.
            def total(*operands):
                return jnp.sum(weights * jnp.transpose(fn(*operands), back) ** 2)

            return jnp.transpose(fn(lhs, rhs), back), jax.grad(total, (0, 1))(lhs, rhs)

        lhs = x.transpose([f"N{names}C".index(c) for c in of_x])
        rhs = w.transpose([f"{names}IO".index(c) for c in of_w])
        assert are_canonical(jax.make_jaxpr(canonical(both))(lhs, rhs))
        (result, gradients), (_, plain) = (jax.jit(f)(lhs, rhs) for f in (canonical(both), both))
        np.testing.assert_allclose(result, expected, atol=2e-5)
        for a, b in zip(gradients, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 5, 5)), jnp.float32)


def conv(w):
    return jnp.sum(jax.lax.conv(X, w, (1, 1), "VALID") ** 2)


@jax.custom_vjp
def with_vjp(w):
    return conv(w)


with_vjp.defvjp(lambda w: (conv(w), w), lambda w, g: (jax.grad(conv)(w) * g,))


@jax.custom_jvp
def with_jvp(w):
    return conv(w)


with_jvp.defjvp(lambda w, t: (conv(w[0]), jnp.vdot(jax.grad(conv)(w[0]), t[0])))


@jax.custom_batching.custom_vmap
def with_vmap(w):
    return conv(w)


with_vmap.def_vmap(lambda size, batched, w: (jax.lax.map(conv, w), True))


def descend(w):
    return w - 1e-3 * jax.grad(conv)(w)


PLACES = {
    "jit": lambda w, n: jax.jit(descend)(w),
    "scan": lambda w, n: jax.lax.scan(lambda c, x: (descend(c) + x, c), w, jnp.arange(3.0)),
    "scan back": lambda w, n: jax.lax.scan(
        lambda c, x: (descend(c) + x, c[0]), w, jnp.arange(3.0), reverse=True, unroll=2
    ),
    "while": lambda w, n: jax.lax.fori_loop(0, n, lambda i, c: descend(c) * i, w),
    "condition of while": lambda w, n: jax.lax.while_loop(lambda c: conv(c) > 1, descend, w),
    "cond": lambda w, n: jax.lax.cond(n > 2, descend, lambda w: 2 * w, w),
    "switch": lambda w, n: jax.lax.switch(n, [jnp.sin, descend, lambda w: descend(-w)], w),
    "nested": lambda w, n: jax.lax.map(
        lambda r: jax.lax.fori_loop(0, r, lambda i, c: jax.lax.cond(i > 0, descend, jnp.sin, c), w),
        n - jnp.arange(3),
    ),
    "checkpoint": lambda w, n: jax.grad(jax.checkpoint(conv))(w),
    "custom_vjp": lambda w, n: (with_vjp(w), jax.grad(with_vjp)(w)),
    "custom_jvp": lambda w, n: (with_jvp(w), jax.grad(with_jvp)(w)),
    "custom_vmap": lambda w, n: with_vmap(w),
    "vmap": lambda w, n: jax.vmap(descend)(jnp.stack([w, 2 * w, -w])),
    "key": lambda w, n: descend(w) + jax.random.normal(jax.random.key(n), (48,)).reshape(w.shape),
}


@pytest.mark.parametrize("place", PLACES)
def test_convolutions_are_rewritten_in_inner_programs(place):
    fn, w = PLACES[place], 0.1 * jnp.asarray(np.random.default_rng(2).normal(size=(4, 3, 2, 2)))
    w, n = w.astype(jnp.float32), jnp.int32(3)
    assert not are_canonical(jax.make_jaxpr(fn)(w, n))
    assert are_canonical(jax.make_jaxpr(canonical(fn))(w, n))
    expected, result = jax.jit(fn)(w, n), jax.jit(canonical(fn))(w, n)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    chex.assert_trees_all_close(result, expected, rtol=2e-4, atol=2e-5)


def test_a_function_without_convolutions_does_not_change():
    def fn(tree):
        return {"y": jax.lax.fori_loop(0, tree["n"], lambda i, c: jnp.sin(c), tree["x"])}

    tree = {"x": jnp.ones(3), "n": 4}
    assert not holds_convolution(jax.make_jaxpr(fn)(tree))
    assert str(jax.make_jaxpr(canonical(fn))(tree)) == str(jax.make_jaxpr(fn)(tree))


# Runs

SIZES, LENGTH = (5, 2, 4), 7


def rows():
    rng = np.random.default_rng(3)
    return [
        {"x": rng.normal(size=(n, 2, LENGTH)), "y": rng.normal(size=(n, LENGTH - 2))} for n in SIZES
    ]


def by_convolution(w, batch):
    fitted = jax.lax.conv_general_dilated(batch["x"], w[None], (1,), "VALID")[:, 0]
    return -0.5 * jnp.sum((batch["y"] - fitted) ** 2, axis=-1)


def by_product(w, batch):
    windows = jnp.stack([batch["x"][:, :, i : i + 3] for i in range(LENGTH - 2)], axis=1)
    fitted = jnp.einsum("nlck,ck->nl", windows, w)
    return -0.5 * jnp.sum((batch["y"] - fitted) ** 2, axis=-1)


@functools.cache
def posterior(loglikelihood):
    return fedmcmc.Posterior(lambda w: -0.5 * jnp.sum(w**2), loglikelihood)


def relay(loglikelihood, **changed):
    settings = dict(step_size=0.01, num_local_steps=3, batch_size=2) | changed
    return fedmcmc.dsgld(posterior(loglikelihood), **settings)


def average(loglikelihood, participation):
    """Build clients that each move to another place: their batched convolutions have groups."""
    return fedmcmc.fa_ld(
        posterior(loglikelihood), step_size=0.01, num_local_steps=2, participation=participation
    )


def run(kernel, **changed):
    # Eight draws in every run, so that runs of one kernel share their program.
    settings = dict(position=jnp.zeros((2, 3)), num_rounds=8, num_chains=2) | changed
    data = fedmcmc.FederatedData.from_clients(rows())
    return fedmcmc.sample(jax.random.key(0), kernel, data, progress=False, **settings)


@functools.cache
def build_kernel(name, loglikelihood):
    if name == "relay":
        return relay(loglikelihood)
    if name == "pooled":
        return fedmcmc.sgld(posterior(loglikelihood), step_size=0.01)
    participation = fedmcmc.full() if name == "full" else fedmcmc.uniform(2)
    return average(loglikelihood, participation)


@pytest.mark.parametrize("name", fast_and_slow(["cohort", "relay", "full", "pooled"], ["cohort"]))
def test_a_run_equals_a_run_of_the_model_without_convolutions(name):
    """The two models sum in another order, which is their only difference."""
    samples, plain = (
        run(build_kernel(name, loglikelihood), num_rounds=19, num_burnin=3, thinning=2)
        for loglikelihood in (by_convolution, by_product)
    )
    assert samples.draws.shape == (2, 8, 2, 3)
    chex.assert_trees_all_close(samples.info, plain.info, rtol=1e-4)
    chex.assert_trees_all_equal(samples.totals, plain.totals)
    np.testing.assert_allclose(samples.draws, plain.draws, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(samples.state, plain.state, rtol=1e-4, atol=1e-5)


def test_a_continued_run_is_equal_to_the_last_bit():
    kernel = build_kernel("relay", by_convolution)
    at_once, start = run(kernel, num_rounds=16, thinning=2), run(kernel)
    continued = run(kernel, state=start.state, position=None)
    draws = np.concatenate([start.draws, continued.draws], axis=1)
    np.testing.assert_array_equal(draws[:, 1::2], at_once.draws)


@pytest.mark.slow
def test_a_chain_is_equal_to_the_last_bit_alone_and_with_others():
    kernel = build_kernel("cohort", by_convolution)
    np.testing.assert_array_equal(run(kernel, num_chains=1).draws[0], run(kernel).draws[0])


def test_a_non_finite_round_raises():
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(relay(by_convolution, step_size=1e30))
    samples = caught.value.samples
    assert samples.num_draws == caught.value.round
    assert np.isfinite(samples.draws).all()


def trace_segment(loglikelihood, collect=None):
    kernel = average(loglikelihood, fedmcmc.full())
    data = fedmcmc.FederatedData.from_clients(rows())
    keys = jax.random.split(jax.random.key(0), 2)
    state = jax.vmap(lambda key: kernel.init(key, jnp.zeros((2, 3)), data))(keys)
    plan = _program.Plan(*map(jnp.int32, (0, 4, 0, 1, 0)))
    program = fedmcmc.rounds.Program(kernel, data, fedmcmc.rounds.SINGLE_DEVICE, collect)
    canonical = program.needs_canonical(keys, state)
    options = dict(block=2, capacity=4, canonical=canonical)
    traced = _program.run_segment.trace(program, keys, state, plan, {}, {}, **options)
    return canonical, traced.jaxpr


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="Convolutions are rewritten on CPU.")
def test_a_run_has_only_canonical_convolutions_of_single_clients():
    on, jaxpr = trace_segment(by_convolution)
    assert on and are_canonical(jaxpr)
    assert "feature_group_count=2" not in str(jaxpr) and "feature_group_count=3" not in str(jaxpr)
    assert not trace_segment(by_product)[0]

    def fitted(state, info):
        return jax.lax.conv(X, X[:, :, :2, :2], (1, 1), "VALID") * state.broadcast.position[0, 0]

    on, jaxpr = trace_segment(by_product, fitted)
    assert on and are_canonical(jaxpr)
