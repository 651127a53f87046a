"""What every metric promises: to compile, to map, to batch, to keep precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import metrics

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
NUM = 3


def probabilities(rows=12, classes=4):
    return RNG.dirichlet(np.ones(classes), (NUM, rows)).astype(np.float32)


def normals(*shape):
    return RNG.normal(size=(NUM, *shape)).astype(np.float32)


def covariances(dim=3):
    roots = normals(dim, dim)
    return roots @ roots.transpose(0, 2, 1) + np.eye(dim, dtype=np.float32)


P, Q, Y = probabilities(), probabilities(), RNG.integers(0, 4, (NUM, 12)).astype(np.int32)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, rows: -0.5 * jnp.sum(jnp.square(rows.astype(theta.dtype) - theta[None]), axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients([normals(2)[i, None] for i in range(NUM)])


def apply_fn(theta, x):
    return jax.nn.softmax(x[:, None] * theta[None], axis=-1)


# Arguments have a leading axis of NUM. BATCHED broadcast leading axes on their own; OTHERS are
# mapped by the caller.
BATCHED = {
    "accuracy": (metrics.accuracy, P, Y),
    "agreement": (metrics.agreement, P, Q),
    "best_running_mean": (lambda v: metrics.best_running_mean(v, window=5), normals(30)),
    "brier_score": (metrics.brier_score, P, Y),
    "credibility_accuracy_curve": (metrics.credibility_accuracy_curve, P, Y),
    "estimation_error": (metrics.estimation_error, normals(6, 2), normals(2)),
    "expected_calibration_error": (metrics.expected_calibration_error, P, Y),
    "gaussian_w2": (metrics.gaussian_w2, normals(3), covariances(), normals(3), covariances()),
    "hpd_error": (lambda u, v: metrics.hpd_error(u, v, 0.1), normals(30) - 2, normals(20) - 2),
    "hpd_threshold": (metrics.hpd_threshold, normals(30)),
    "negative_log_likelihood": (metrics.negative_log_likelihood, P, Y),
    "ood_auc": (metrics.ood_auc, normals(9), normals(7)),
    "predictive_entropy": (metrics.predictive_entropy, P),
    "relative_efficiency": (
        lambda bits: metrics.relative_efficiency(bits, 5),
        np.exp(normals(2)),
    ),
    "reliability": (metrics.reliability, P, Y),
    "rounds_to_threshold": (lambda v: metrics.rounds_to_threshold(v, 0.5, window=2), normals(30)),
    "total_variation": (metrics.total_variation, P, Q),
}
OTHERS = {
    "marginal_error": (metrics.marginal_error, normals(30, 2), normals(20, 2)),
    "marginal_error_floor": (
        lambda r: metrics.marginal_error_floor(KEY, r, 8, num_repeats=2),
        normals(20, 2),
    ),
    "potential": (lambda d: metrics.potential(POSTERIOR, DATA, d), normals(5, 2)),
    "predictive": (lambda d, x: metrics.predictive(apply_fn, d, x), normals(5, 2), normals(4)),
}
EVERY = BATCHED | OTHERS


def one_by_one(name):
    fn, *arguments = EVERY[name]
    each = [fn(*(argument[i] for argument in arguments)) for i in range(NUM)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_every_metric_is_in_the_table():
    public = {
        name
        for name in vars(metrics)
        if not name.startswith("_") and not isinstance(getattr(metrics, name), type)
    }
    assert public == set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_compiled_and_mapped_as_one_by_one(name):
    fn, *arguments = EVERY[name]
    arguments = jax.device_put(arguments)
    mapped = jax.jit(jax.vmap(fn)).lower(*arguments).compile()
    with jax.transfer_guard("disallow"):
        found = mapped(*arguments)
    assert_same(found, one_by_one(name))


@pytest.mark.parametrize("name", BATCHED)
def test_leading_axes_are_batched_and_broadcast(name):
    fn, *arguments = BATCHED[name]
    # Each of the first (a sampler's) with each of the others (a reference's, labels).
    split = (len(arguments) + 1) // 2
    first, rest = arguments[:split], arguments[split:]
    if rest:
        first, rest = [a[:, None] for a in first], [a[None] for a in rest]
    found = fn(*first, *rest)
    if name in ("credibility_accuracy_curve", "reliability"):  # one for all: thresholds, ends
        found = found._replace(**{found._fields[0]: np.tile(found[0], (NUM, NUM, 1))})
    if rest:
        pairs = np.arange(NUM)
        found = jax.tree.map(lambda leaf: leaf[pairs, pairs], found)
    assert_same(found, one_by_one(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_strict_promotion_and_double_precision(name):
    fn, *arguments = EVERY[name]
    single = fn(*(argument[0] for argument in arguments))
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.enable_x64(True),
    ):
        data = jax.tree.map(
            lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, arguments
        )
        double = fn(*(jnp.asarray(argument[0]) for argument in data))
    for one, other in zip(jax.tree.leaves(double), jax.tree.leaves(single), strict=True):
        assert one.dtype == (np.float64 if other.dtype == np.float32 else other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_half_precision_is_summed_in_single():
    half = jnp.asarray(P, jnp.bfloat16)
    found = metrics.brier_score(half, Y)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, metrics.brier_score(half.astype(jnp.float32), Y), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_labels_of_any_integer_type(dtype):
    wide = RNG.dirichlet(np.ones(300), 12)
    expected = metrics.negative_log_likelihood(wide, Y[0])
    found = jax.jit(metrics.negative_log_likelihood)(wide, jnp.asarray(Y[0].astype(dtype)))
    assert found == expected


@pytest.mark.parametrize(
    "name",
    ["accuracy", "brier_score", "negative_log_likelihood", "expected_calibration_error"],
)
@pytest.mark.parametrize("label", [-1, 4])
def test_compiled_metrics_turn_impossible_labels_into_nan(name, label):
    labels = jnp.asarray(Y[0]).at[2].set(label)
    assert np.isnan(jax.jit(getattr(metrics, name))(P[0], labels))
