"""Branches that stay branches under vmap, and the full passes of variance reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.pytrees import where_any

X = jnp.array([1.0, 4.0, 9.0])
START = jnp.array([0.3, -0.2])
DATA = fedmcmc.FederatedData.from_clients(
    [np.random.default_rng(i).normal(i, 1, size=(n, 2)) for i, n in enumerate((3, 1, 4))]
)


class Counter:
    """Counts how often a compiled program comes by."""

    def __init__(self):
        self.num = 0

    def come_by(self, _):
        self.num += 1

    def read(self):
        jax.effects_barrier()
        return self.num


def counting(counter, mark):
    """Return a function that counts each execution once, whatever axes it is mapped over.

    The callback depends on `mark` alone, which is not mapped, so vmap leaves it single.
    """

    def compute(x):
        jax.debug.callback(counter.come_by, mark)
        return jnp.sqrt(x)

    return compute


def test_values_alone_and_under_vmap_jit_and_scan():
    def one(x, condition):
        return where_any(condition, jnp.sqrt, -x, x)

    for condition in (True, False):
        assert one(X[1], condition) == (2.0 if condition else -4.0)
    flags = jnp.array([True, False, True])
    expected = np.where(flags, np.sqrt(X), -X)
    np.testing.assert_array_equal(jax.vmap(one)(X, flags), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(one))(X, flags), expected)
    np.testing.assert_array_equal(jax.lax.map(lambda a: one(*a), (X, flags)), expected)
    for which, condition in (((0, None), True), ((0, None), False), ((None, 0), flags)):
        x = X if which[0] == 0 else X[2]
        np.testing.assert_array_equal(
            jax.vmap(one, which)(x, condition), np.where(condition, np.sqrt(x), -x)
        )


def test_values_under_two_vmaps_and_pytrees():
    flags = jnp.array([[True, False, False], [False, False, False]])
    table = jnp.stack([X, 2 * X])

    def one(x, flag):
        tree = {"a": x, "b": jnp.stack([x, -x])}
        doubled = where_any(
            flag, lambda t, y: jax.tree.map(lambda leaf: leaf * y, t), tree, tree, x
        )
        return doubled["a"], doubled["b"]

    for mapped in (jax.vmap(jax.vmap(one)), jax.jit(jax.vmap(jax.vmap(one)))):
        a, b = mapped(table, flags)
        factor = np.where(flags, table, 1.0)
        np.testing.assert_array_equal(a, table * factor)
        np.testing.assert_array_equal(b[..., 1], -table * factor)
    # One shared condition or operand inside, the other axis outside.
    inner = jax.vmap(one, in_axes=(0, None))
    a, _ = jax.vmap(inner, in_axes=(None, 0))(X, flags[:, 0])
    np.testing.assert_array_equal(a, np.where(flags[:, :1], X**2, X))


@pytest.mark.parametrize("flags", [[False] * 3, [False, True, False], [True] * 3])
def test_the_expensive_side_runs_only_if_any_entry_needs_it(flags):
    counter = Counter()
    compute = counting(counter, jnp.float32(0))

    def one(x, flag):
        return where_any(flag, compute, x, x)

    given, expected = jnp.array(flags), int(flags[1])
    jax.jit(one)(X[1], given[1])
    assert counter.read() == expected
    jax.jit(jax.vmap(one))(X, given)
    expected += any(flags)
    assert counter.read() == expected
    jax.jit(jax.vmap(jax.vmap(one)))(jnp.stack([X, X]), jnp.stack([given, given]))
    assert counter.read() == expected + any(flags)


def conds(jaxpr):
    """Return the shapes of the predicates of all branches in `jaxpr`."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            found.append(equation.invars[0].aval.shape)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                found += conds(value)
    return found


def test_the_predicate_is_a_scalar_under_any_number_of_vmaps():
    mapped = lambda x: where_any(x > 2, jnp.sqrt, x, x)  # noqa: E731
    for dimensions in range(4):
        x = jnp.ones((2,) * dimensions)
        assert conds(jax.make_jaxpr(mapped)(x).jaxpr) == [()]
        mapped = jax.vmap(mapped)


# Full passes of svrg


def posterior_counting(counter):
    """Return a model that counts gradients of the likelihood over more rows than a minibatch."""

    def loglikelihood(position, rows):
        if rows.shape[0] > 1:
            jax.debug.callback(counter.come_by, jnp.float32(0))
        return -jnp.sum(jnp.sqrt(1 + (rows - position) ** 2), axis=-1)

    return fedmcmc.Posterior(lambda position: -0.5 * jnp.sum(position**2), loglikelihood)


PARTICIPATIONS = {
    "full": lambda: fedmcmc.full(),
    "uniform": lambda: fedmcmc.uniform(2),
    "bernoulli": lambda: fedmcmc.bernoulli(0.6),
}
NUM_ROUNDS, PERIOD = 14, 5


@pytest.mark.parametrize(
    ("name", "num_chains"),
    [
        ("full", 1),
        ("full", 3),
        pytest.param("uniform", 3, marks=pytest.mark.slow),
        ("bernoulli", 3),
    ],
)
def test_a_pass_and_a_snapshot_are_due_once_after_a_refresh(name, num_chains):
    """Passes over all rows as they are executed, chains and clients vmapped; bits down."""
    participation, counter = PARTICIPATIONS[name](), Counter()
    kernel = fedmcmc.lsd_pp(
        posterior_counting(counter),
        step_size=0.01,
        batch_size=1,
        refresh_every=PERIOD,
        participation=participation,
    )
    init, step = fedmcmc.simulate(kernel, DATA)
    keys = jax.random.split(jax.random.key(1), num_chains)
    state = jax.vmap(lambda key: init(START))(keys)
    step, bits = jax.jit(jax.vmap(step)), 32 * START.size
    known, cached = np.full((2, num_chains, DATA.num_clients), -1)
    due = 0
    for round_ in range(NUM_ROUNDS):
        state, info = step(keys, state)
        latest, anyone = round_ - round_ % PERIOD, False
        for chain, key in enumerate(keys):
            own = jax.random.fold_in(jax.random.fold_in(key, round_), jnp.uint32(2**32 - 2))
            cohort = jax.tree.map(np.asarray, participation.prepare(own, DATA.num_clients))
            anyone |= (cached[chain, cohort.ids] != latest).any()
            cached[chain, cohort.ids] = latest
            active = cohort.ids[cohort.active]
            # In a round of refresh the snapshot is the position itself.
            missing = (known[chain, active] != latest) & (round_ != latest)
            assert info.bits_down[chain] == bits * (active.size + missing.sum())
            assert info.bits_up[chain] == bits * active.size
            known[chain, active] = latest
        due += anyone
        assert counter.read() == due
    # Where only a cohort is computed, another client's pass may be due later.
    assert 3 < due < NUM_ROUNDS if name == "uniform" else due == 3
