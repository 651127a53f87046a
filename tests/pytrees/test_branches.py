"""Branches that stay branches under vmap, and the full passes of variance reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.pytrees import where_any
from tests.support.lanes import fast_and_slow

X = jnp.array([1.0, 4.0, 9.0])
START = jnp.array([0.3, -0.2])
DATA = fedmcmc.FederatedData.from_clients(
    [np.random.default_rng(i).normal(i, 1, size=(n, 2)) for i, n in enumerate((3, 1, 4))]
)


class ExecutionCounter:
    """Number of executions of a callback in compiled programs."""

    def __init__(self):
        self.num = 0

    def count(self, _):
        self.num += 1

    def read(self):
        jax.effects_barrier()
        return self.num


def test_values_are_those_of_where_under_vmap_jit_and_map():
    def branch(x, condition):
        return where_any(condition, jnp.sqrt, -x, x)

    for condition in (True, False):
        assert branch(X[1], condition) == (2.0 if condition else -4.0)
    flags = jnp.array([True, False, True])
    expected = np.where(flags, np.sqrt(X), -X)
    np.testing.assert_array_equal(jax.jit(jax.vmap(branch))(X, flags), expected)
    np.testing.assert_array_equal(jax.lax.map(lambda pair: branch(*pair), (X, flags)), expected)
    for axes, condition in (((0, None), True), ((0, None), False), ((None, 0), flags)):
        x = X if axes[0] == 0 else X[2]
        expected = np.where(condition, np.sqrt(x), -x)
        np.testing.assert_array_equal(jax.vmap(branch, axes)(x, condition), expected)


def test_values_of_pytrees_are_those_of_where_under_two_vmaps():
    flags = jnp.array([[True, False, False], [False, False, False]])
    table = jnp.stack([X, 2 * X])

    def branch(x, flag):
        tree = {"a": x, "b": jnp.stack([x, -x])}
        result = where_any(flag, lambda t, y: jax.tree.map(lambda leaf: leaf * y, t), tree, tree, x)
        return result["a"], result["b"]

    a, b = jax.jit(jax.vmap(jax.vmap(branch)))(table, flags)
    factor = np.where(flags, table, 1.0)
    np.testing.assert_array_equal(a, table * factor)
    np.testing.assert_array_equal(b[..., 1], -table * factor)
    # A condition that the inner axis shares, and an operand that the outer axis shares.
    inner = jax.vmap(branch, in_axes=(0, None))
    a, _ = jax.vmap(inner, in_axes=(None, 0))(X, flags[:, 0])
    np.testing.assert_array_equal(a, np.where(flags[:, :1], X**2, X))


@pytest.mark.parametrize("flags", [[False] * 3, [False, True, False], [True] * 3])
def test_the_expensive_side_runs_if_an_entry_needs_it(flags):
    counter, mark = ExecutionCounter(), jnp.float32(0)

    def compute(x):
        # The callback depends on a value that no axis maps, so it runs once per execution.
        jax.debug.callback(counter.count, mark)
        return jnp.sqrt(x)

    def branch(x, flag):
        return where_any(flag, compute, x, x)

    flags = jnp.array(flags)
    jax.jit(branch)(X[1], flags[1])
    expected = int(flags[1])
    assert counter.read() == expected
    jax.jit(jax.vmap(branch))(X, flags)
    expected += int(any(flags))
    assert counter.read() == expected
    jax.jit(jax.vmap(jax.vmap(branch)))(jnp.stack([X, X]), jnp.stack([flags, flags]))
    assert counter.read() == expected + any(flags)


def predicate_shapes(jaxpr):
    """Return the shapes of the predicates of all branches in `jaxpr`."""
    shapes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            shapes.append(equation.invars[0].aval.shape)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                shapes += predicate_shapes(value)
    return shapes


def test_the_predicate_is_a_scalar_under_any_number_of_vmaps():
    mapped = lambda x: where_any(x > 2, jnp.sqrt, x, x)  # noqa: E731
    for dimensions in range(4):
        x = jnp.ones((2,) * dimensions)
        assert predicate_shapes(jax.make_jaxpr(mapped)(x).jaxpr) == [()]
        mapped = jax.vmap(mapped)


# Full passes of svrg


def build_counting_posterior(counter):
    """Return a model that counts gradients of the likelihood over more rows than a minibatch."""

    def loglikelihood(position, rows):
        if rows.shape[0] > 1:
            jax.debug.callback(counter.count, jnp.float32(0))
        return -jnp.sum(jnp.sqrt(1 + (rows - position) ** 2), axis=-1)

    return fedmcmc.Posterior(lambda position: -0.5 * jnp.sum(position**2), loglikelihood)


PARTICIPATIONS = {
    "full": fedmcmc.full(),
    "uniform": fedmcmc.uniform(2),
    "bernoulli": fedmcmc.bernoulli(0.6),
}
NUM_ROUNDS, PERIOD, NUM_CHAINS = 14, 5, 3


@pytest.mark.parametrize("name", fast_and_slow(PARTICIPATIONS, ["full", "bernoulli"]))
def test_a_pass_and_a_snapshot_are_due_once_after_a_refresh(name):
    """Executed passes over all rows, with chains and clients vmapped, and bits down."""
    participation, counter = PARTICIPATIONS[name], ExecutionCounter()
    kernel = fedmcmc.lsd_pp(
        build_counting_posterior(counter),
        step_size=0.01,
        batch_size=1,
        refresh_every=PERIOD,
        participation=participation,
    )
    init, step = fedmcmc.simulate(kernel, DATA)
    keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
    state = jax.vmap(lambda key: init(START))(keys)
    step, bits = jax.jit(jax.vmap(step)), 32 * START.size
    snapshots, passes = np.full((2, NUM_CHAINS, DATA.num_clients), -1)
    num_passes = 0
    for round_ in range(NUM_ROUNDS):
        state, info = step(keys, state)
        latest, is_due = round_ - round_ % PERIOD, False
        for chain, key in enumerate(keys):
            cohort_key = jax.random.fold_in(jax.random.fold_in(key, round_), jnp.uint32(2**32 - 2))
            cohort = jax.tree.map(np.asarray, participation.prepare(cohort_key, DATA.num_clients))
            is_due |= (passes[chain, cohort.ids] != latest).any()
            passes[chain, cohort.ids] = latest
            active = cohort.ids[cohort.active]
            # In a round of refresh the snapshot is the position itself.
            missing = (snapshots[chain, active] != latest) & (round_ != latest)
            assert info.bits_down[chain] == bits * (active.size + missing.sum())
            assert info.bits_up[chain] == bits * active.size
            snapshots[chain, active] = latest
        num_passes += is_due
        assert counter.read() == num_passes
    # If only a cohort is computed, another client's pass may be due later.
    assert 3 < num_passes < NUM_ROUNDS if name == "uniform" else num_passes == 3
