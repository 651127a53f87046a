"""The data and scores of the FSGLD experiments: what the shards promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments.fsgld import metric, metric_scores, mlp, mlp_model, repetitions
from experiments.fsgld.metric_data import make_pairs, project
from experiments.fsgld.metric_model import Pairs, loglikelihood
from jax.flatten_util import ravel_pytree

import fedmcmc
from experiments.data import Table

KEY = jax.random.key(2)
RNG = np.random.default_rng(0)
LETTERS = Table(RNG.normal(size=(520, 12)).astype(np.float32), np.repeat(np.arange(26), 20))


def test_pairs_are_scaled_and_shards_share_no_letter():
    # Projections that are the label itself show which letters a pair is of.
    codes = np.stack([LETTERS.labels, np.arange(520) / 1e6], axis=1).astype(float)
    sizes = dict(num_shards=10, pairs_per_shard=40, test_pairs=60)
    shards, test = make_pairs(KEY, codes, LETTERS.labels, **sizes)
    features = np.concatenate([s.features for s in shards])
    np.testing.assert_allclose(features.mean(axis=0), 0.5, rtol=1e-4)
    for pairs in [*shards, test]:
        assert (pairs.sign == 1).sum() == len(pairs.sign) // 2
        same = pairs.features[:, 0] == 0
        np.testing.assert_array_equal(same, pairs.sign == 1)


def test_no_pair_is_drawn_twice():
    number = RNG.normal(size=(520, 1))  # whose differences tell pairs apart
    shards, test = make_pairs(
        KEY, number, LETTERS.labels, num_shards=10, pairs_per_shard=100, test_pairs=100
    )
    features = np.concatenate([*(s.features for s in shards), test.features])
    assert len(np.unique(features)) > 0.995 * len(features)


def test_projection_is_on_the_top_eigenvectors():
    gram = LETTERS.features.astype(float).T @ LETTERS.features.astype(float)
    top = np.linalg.eigvalsh(gram)[::-1][:3]
    np.testing.assert_allclose((project(LETTERS, 3) ** 2).sum(axis=0), top)


def test_the_two_outcomes_of_a_pair_sum_to_one():
    features = jnp.asarray(RNG.uniform(size=(5, 3)).astype(np.float32))
    position = {"gamma": jnp.array([1.0, -2.0, 3.0]), "mu": jnp.array(0.5)}
    both = [loglikelihood(position, Pairs(features, jnp.full(5, y))) for y in (1.0, -1.0)]
    np.testing.assert_allclose(np.exp(both).sum(axis=0), 1, rtol=1e-6)
    # A distance above mu speaks for different letters.
    far = Pairs(jnp.array([[9.0, 0.0, 0.0]]), jnp.array([-1.0]))
    assert loglikelihood(position, far)[0] > jnp.log(0.99)


def test_running_average_of_predictive_probabilities():
    draws = {"gamma": RNG.normal(size=(2, 6, 3)).astype(np.float32), "mu": np.ones((2, 6))}
    draws["mu"] = draws["mu"].astype(np.float32)
    pairs = Pairs(
        RNG.uniform(size=(2, 7, 3)).astype(np.float32),
        np.where(np.arange(14) % 2, 1, -1).reshape(2, 7).astype(np.float32),
    )
    curves = metric_scores.score(draws, pairs, pairs, burnin=2)
    distance = np.einsum("rdk,rpk->rdp", draws["gamma"], pairs.features) - 1
    p = 1 / (1 + np.exp(pairs.sign[:, None] * distance))
    np.testing.assert_allclose(curves["learn"], np.log(p).mean(axis=2), rtol=1e-4)
    last = np.log(p[:, 2:].mean(axis=1)).mean(axis=1)
    np.testing.assert_allclose(curves["test_predictive"][:, -1], last, rtol=1e-4)


def test_label_skewed_shards():
    labels = RNG.integers(0, 2, 4000)
    sizes = dict(num_shards=10, rows_per_shard=200, num_test=300, num_evaluated=20)
    even, skewed = (
        mlp_model.make_shards(KEY, labels, concentration=c, **sizes) for c in (100.0, 0.5)
    )
    for shards in (even, skewed):
        assert shards.data.sizes.tolist() == [200] * 10
        rows = np.concatenate([shards.data.rows, shards.test])
        assert len(np.unique(rows)) == len(rows)
        assert labels[shards.test].mean() == 0.5
        for s in range(10):
            assert set(shards.train[s]) <= set(np.asarray(shards.data.client_rows(s)))
    spread = [
        labels[np.asarray(s.data.rows)].reshape(10, 200).mean(axis=1).std() for s in (even, skewed)
    ]
    assert spread[0] < 0.1 < 0.2 < spread[1]
    with pytest.raises(ValueError, match="lower num_shards or rows_per_shard"):
        mlp_model.make_shards(KEY, labels, concentration=100.0, **sizes | {"rows_per_shard": 400})


@pytest.mark.parametrize("kind", ["fisher", "fisher_dense", "empirical"])
def test_expansions_at_a_network_have_its_gradients_and_fisher_information(kind):
    features = RNG.normal(size=(30, 3)).astype(np.float32)
    labels = RNG.integers(0, 2, 30).astype(np.int32)
    own, other = (mlp_model.make_posterior(Table(features, y), 1.0) for y in (labels, 1 - labels))
    rows = RNG.permutation(30).astype(np.int32).reshape(3, 10)
    centre = mlp_model.start(KEY, 3)
    data = fedmcmc.FederatedData.from_clients(list(rows))
    fitted = mlp.expand(own, data, centre, kind)
    flat, unravel = ravel_pytree(centre)

    def scores(posterior, row):
        def fn(x):
            return posterior.loglikelihood_fn(unravel(x), np.array([row]))[0]

        value, gradient = jax.value_and_grad(fn)(flat)
        return np.exp(float(value)), np.asarray(gradient, np.float64)

    for shard in range(3):
        total, fisher = 0.0, 0.0
        for row in rows[shard]:
            chosen, not_chosen = scores(own, row), scores(other, row)
            total += chosen[1]
            if kind == "empirical":
                fisher += np.outer(chosen[1], chosen[1])
            else:
                fisher += sum(p * np.outer(g, g) for p, g in (chosen, not_chosen))
        one = jax.tree.map(lambda leaf, shard=shard: leaf[shard], fitted)
        precision = ravel_pytree(one.precision)[0]
        if kind == "fisher_dense":
            precision = one.precision
        else:
            fisher = np.diag(np.diag(fisher))
            precision = np.diag(precision)
        np.testing.assert_allclose(precision, fisher, rtol=1e-4, atol=1e-5)
        shift = ravel_pytree(one.precision_mean)[0]
        np.testing.assert_allclose(shift, total + fisher @ np.asarray(flat), rtol=1e-4, atol=1e-4)


def test_indicators_are_not_standardised():
    features = np.stack([np.arange(100) % 50 == 0, np.arange(100)], axis=1).astype(np.float32)
    scaled = mlp_model.standardise(features)
    np.testing.assert_array_equal(scaled[:, 0], features[:, 0])
    np.testing.assert_allclose([scaled[:, 1].mean(), scaled[:, 1].std()], [0, 1], atol=1e-6)


def test_repetitions_are_runs_of_simulate_and_know_whom_they_visited():
    posterior = fedmcmc.Posterior(
        jax.tree_util.Partial(lambda t: -0.5 * t**2),
        jax.tree_util.Partial(lambda t, x: -0.5 * (x - t) ** 2),
    )
    clients = [[RNG.normal(size=4).astype(np.float32) + 100 * c for c in range(3)] for _ in "ab"]
    data = repetitions.stack([fedmcmc.FederatedData.from_clients(c) for c in clients])
    keys = jax.random.split(KEY, 2)
    settings = dict(step_size=1e-3, num_local_steps=2)
    kept = repetitions.run(
        lambda model, _: fedmcmc.dsgld(model, **settings),
        posterior,
        (),
        data,
        keys,
        jnp.zeros(2),
        num_kept=3,
        keep_every=2,
        collect=lambda state, info: (state.broadcast.position, info.round),
    )
    assert kept[1].tolist() == [[1, 3, 5]] * 2
    kernel = fedmcmc.dsgld(posterior, **settings)
    visited = repetitions.visited_clients(kernel, keys, np.arange(6), 3)
    init, step = fedmcmc.simulate(kernel, fedmcmc.FederatedData.from_clients(clients[1]))
    step = jax.jit(step)
    state, moves = init(jnp.array(0.0)), []
    for _ in range(6):
        before = state.broadcast.position
        state, _info = step(keys[1], state)
        moves.append(float(state.broadcast.position - before))
    np.testing.assert_allclose(kept[0][1, 2], state.broadcast.position, rtol=1e-5)
    # A client whose rows are around 100 c pulls the chain by about 100 c.
    assert np.corrcoef(moves, visited[1])[0, 1] > 0.9


def test_repetitions_with_other_numbers_share_a_program():
    traces = []

    def loglikelihood(t, x):
        traces.append(None)
        return -0.5 * (x - t) ** 2

    posterior = fedmcmc.Posterior(
        jax.tree_util.Partial(lambda t: -0.5 * t**2), jax.tree_util.Partial(loglikelihood)
    )
    clients = [np.full(4, float(c), np.float32) for c in range(3)]
    data = repetitions.stack([fedmcmc.FederatedData.from_clients(clients)] * 2)
    kept, counts = [], []
    for step_size in (1e-3, 1e-3, 2e-3):
        kept.append(
            repetitions.run(
                repetitions.Relay(False, 2, 2),
                (posterior, jnp.asarray(step_size)),
                (),
                data,
                jax.random.split(KEY, 2),
                jnp.zeros(2),
                num_kept=3,
                keep_every=2,
                collect=metric.position_of,
            )
        )
        counts.append(len(traces))
    np.testing.assert_array_equal(kept[0], kept[1])
    assert np.abs(kept[2] - kept[0]).min() > 0
    assert counts[0] > 0 and counts == counts[:1] * 3


@pytest.mark.parametrize(
    ("config", "bad", "message"),
    [
        (metric.Config, {"num_shards": 14}, r"num_shards must lie in \[2, 13\]"),
        (metric.Config, {"surrogate": "none"}, "surrogate must be one of"),
        (metric.Config, {"step_size": 0.0}, "step_size must be positive"),
        (metric.Config, {"pairs_per_shard": 3}, "must be even"),
        (metric.Config, {"keep_every": 7}, "keep_every must divide"),
        (mlp.Config, {"table": "iris"}, "table must be susy or covtype"),
        (mlp.Config, {"surrogate": "laplace"}, "surrogate must be one of sampled, fisher"),
        (mlp.Config, {"num_local_steps": 6}, "multiple of 4"),
        (mlp.Config, {"num_burnin": 5000}, "num_burnin must be below num_rounds"),
        (mlp.Config, {"num_evaluated": 100_000}, "num_evaluated must be at most"),
    ],
)
def test_settings_out_of_range(config, bad, message):
    with pytest.raises(ValueError, match=message):
        config(**bad)
