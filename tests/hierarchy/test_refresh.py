"""Moves of effects given the shared parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.hierarchy import RefreshInput, conjugate, groups_of, hmc, independence, ula
from tests.hierarchy.models import SD, SPREAD, clients, gaussian, in_two_clients, logistic
from tests.support.lanes import fast_and_slow

ODDS = {"tau": 0.2, "slope": 0.6}
PLACE = {"mu": 0.4, "slope": -0.2}
NUM = 40_000
LIMIT = 1.63
"""Statistic of Kolmogorov and Smirnov that one in a hundred exceeds; the seed is fixed."""


def test_draws_of_a_group_do_not_depend_on_other_groups():
    refreshes = [conjugate(), hmc(3), independence(), ula()]

    @jax.jit
    def prepare(key):
        return [[refresh.prepare(key, num, 2) for num in (3, 7)] for refresh in refreshes]

    for few, many in prepare(jax.random.key(1)):
        chex.assert_trees_all_equal(few, jax.tree.map(lambda leaf: leaf[:3], many))
        assert all(len(np.unique(leaf)) == leaf.size for leaf in jax.tree.leaves(many))


class LogisticGroup:
    """A client of one group, and the conditional distribution of its effect on a grid."""

    def __init__(self):
        rows = clients("logistic")[2]
        self.data = FederatedData.from_clients([rows])
        self.local = fedmcmc.from_numpyro(logistic, example=self.data, centered=1.0).local
        tau = np.exp(ODDS["tau"])
        self.axis = np.linspace(-9, 9, 6001)
        eta = self.axis[:, None] + ODDS["slope"] * rows["x"]
        log_density = np.sum(rows["y"] * eta - np.log1p(np.exp(eta)), 1)
        log_density -= self.axis**2 / (2 * tau**2)
        cumulative = np.cumsum(np.exp(log_density - log_density.max()))
        self.cumulative = cumulative / cumulative[-1]

    def move(self, refresh, starts, *state):
        """Move latents once from each start, each with its own key."""

        @jax.jit
        @jax.vmap
        def move(key, start):
            groups = groups_of(self.local, self.data.client(0))
            draws = refresh.prepare(key, groups.num, groups.size)
            return refresh.move(groups, draws, RefreshInput(ODDS, start.reshape(1, 1), *state))

        keys = jax.random.split(jax.random.key(0), NUM)
        return move(keys, jnp.asarray(starts, jnp.float32))

    def distance(self, effects):
        """Return the scaled distance between the distribution functions."""
        ordered = np.sort(np.asarray(effects, np.float64))
        exact = np.interp(ordered, self.axis, self.cumulative)
        return np.abs(exact - (np.arange(NUM) + 0.5) / NUM).max() * np.sqrt(NUM)


def test_moves_reach_the_conditional():
    """Latents that start anywhere follow the conditional after six tries."""
    group = LogisticGroup()
    moved = group.move(independence(num_tries=6), np.full(NUM, 3.0))
    assert group.distance(moved.flat[:, 0, 0]) < LIMIT


TRAJECTORIES = {
    "hmc": (hmc(3, num_steps=2, num_adapt=0), 0.5),
    "one step": (hmc(1, num_steps=2, num_adapt=0), 0.4),
}
"""The second number lengthens the logarithm of steps until about a third is rejected."""


@pytest.mark.parametrize("name", fast_and_slow(TRAJECTORIES, ["hmc"]))
def test_trajectories_keep_a_conditional(name):
    """Exact draws of the conditional are exact after a move, and steps do not adapt."""
    group = LogisticGroup()
    refresh, longer = TRAJECTORIES[name]
    starts = np.interp(np.random.default_rng(1).random(NUM), group.cumulative, group.axis)
    steps = refresh.init(groups_of(group.local, group.data.client(0)), ODDS)
    steps = steps._replace(log_mean=steps.log_mean + longer)
    moved = group.move(refresh, starts, steps, 5)
    assert group.distance(moved.flat[:, 0, 0]) < LIMIT
    assert 0.4 < moved.acceptance.mean() < 0.95
    np.testing.assert_array_equal(moved.kept.log_mean, np.broadcast_to(steps.log_mean, (NUM, 1)))


@pytest.mark.slow
def test_each_group_is_accepted_by_itself():
    data = in_two_clients(clients("logistic"))
    local = fedmcmc.from_numpyro(logistic, example=data).local
    refresh = independence(num_tries=1)

    @jax.jit
    def move(data):
        groups = groups_of(local, data.client(1))
        draws = refresh.prepare(jax.random.key(1), groups.num, groups.size)
        draws = draws._replace(uniforms=jnp.array([[1.0], [0.0], [0.0]]))
        return refresh.move(groups, draws, RefreshInput(ODDS, jnp.full((3, 1), 0.25)))

    moved = move(data)
    assert moved.flat[0, 0] == 0.25 and moved.flat[1, 0] != 0.25
    assert moved.acceptance.tolist() == [0, 1, 0]  # the third group does not exist


def test_step_sizes_adapt_per_group_and_then_stay():
    """A group of one row and a group of 900 rows have steps of their own scale."""
    groups = [{"x": np.zeros(n), "y": np.random.default_rng(n).normal(size=n)} for n in (1, 900)]
    rows = {k: np.concatenate([group[k] for group in groups]) for k in ("x", "y")}
    data = FederatedData.from_clients([rows], groups=[[0] + [1] * 900])
    local = fedmcmc.from_numpyro(gaussian, example=data).local
    refresh = hmc(1, num_steps=4, num_adapt=100, target_accept=0.57)

    @jax.jit
    def run(key):
        groups = groups_of(local, data.client(0))

        def move(carry, round_):
            draws = refresh.prepare(jax.random.fold_in(key, round_), groups.num, groups.size)
            moved = refresh.move(groups, draws, RefreshInput(PLACE, *carry, round_))
            return (moved.flat, moved.kept), (moved.acceptance, moved.kept.log_mean)

        start = (refresh.begin(groups, PLACE), refresh.init(groups, PLACE))
        return jax.lax.scan(move, start, jnp.arange(400))[1]

    acceptance, log_steps = (np.asarray(x) for x in run(jax.random.key(3)))
    assert (log_steps[99:] == log_steps[-1]).all() and (log_steps[99] != log_steps[98]).all()
    np.testing.assert_allclose(acceptance[100:].mean(0), 0.57, atol=0.1)
    # Curvatures of the standard variables: 1 + rows (spread / sd)^2.
    curvatures = 1 + np.array([1, 900]) * (SPREAD / SD) ** 2
    np.testing.assert_allclose(np.exp(log_steps[-1]) * np.sqrt(curvatures), 1.75, rtol=0.35)


def test_degrees_of_freedom_must_be_positive():
    with pytest.raises(ValueError, match="df must be"):
        independence(df=0.0)
