"""Properties of all metrics: they compile, map, batch, and keep precision."""

import chex
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


# Arguments have a leading axis of NUM. Metrics in BATCHED broadcast leading axes; the caller maps
# those in MAPPED.
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
    "relative_efficiency": (lambda bits: metrics.relative_efficiency(bits, 5), np.exp(normals(2))),
    "reliability": (metrics.reliability, P, Y),
    "rounds_to_threshold": (lambda v: metrics.rounds_to_threshold(v, 0.5, window=2), normals(30)),
    "total_variation": (metrics.total_variation, P, Q),
}
MAPPED = {
    "marginal_error": (metrics.marginal_error, normals(30, 2), normals(20, 2)),
    "marginal_error_floor": (
        lambda r: metrics.marginal_error_floor(KEY, r, 8, num_repeats=2),
        normals(20, 2),
    ),
    "potential": (lambda d: metrics.potential(POSTERIOR, DATA, d), normals(5, 2)),
    "predictive": (lambda d, x: metrics.predictive(apply_fn, d, x), normals(5, 2), normals(4)),
}
TABLE = BATCHED | MAPPED


def check_close(result, expected):
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    chex.assert_trees_all_close(result, expected, rtol=1e-5, atol=1e-6)


def evaluate_pairs(name, arguments):
    """Return the metric by broadcasting: each first argument with each label or reference."""
    fn = BATCHED[name][0]
    split = (len(arguments) + 1) // 2
    first, second = arguments[:split], arguments[split:]
    if not second:
        return fn(*first)
    result = fn(*(a[:, None] for a in first), *(a[None] for a in second))
    if name in ("credibility_accuracy_curve", "reliability"):  # thresholds and ends of bins
        result = result._replace(**{result._fields[0]: np.tile(result[0], (NUM, NUM, 1))})
    pairs = np.arange(NUM)
    return jax.tree.map(lambda leaf: leaf[pairs, pairs], result)


@pytest.mark.parametrize("name", TABLE)
def test_metrics_compile_map_and_broadcast(name):
    fn, *arguments = TABLE[name]
    each = [fn(*(argument[i] for argument in arguments)) for i in range(NUM)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    on_device = jax.device_put(arguments)
    mapped = jax.jit(jax.vmap(fn)).lower(*on_device).compile()
    with jax.transfer_guard("disallow"):
        result = mapped(*on_device)
    check_close(result, expected)
    if name in BATCHED:
        check_close(evaluate_pairs(name, arguments), expected)


def test_the_table_has_all_metrics():
    public = {
        name
        for name in vars(metrics)
        if not name.startswith("_") and not isinstance(getattr(metrics, name), type)
    }
    assert public == set(TABLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_metrics_support_strict_promotion_and_double_precision(name):
    fn, *arguments = TABLE[name]
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
    chex.assert_trees_all_close(double, single, rtol=1e-4, atol=1e-5)
    for leaf, reference in zip(jax.tree.leaves(double), jax.tree.leaves(single), strict=True):
        assert leaf.dtype == (np.float64 if reference.dtype == np.float32 else reference.dtype)


def test_half_precision_is_summed_in_single():
    half = jnp.asarray(P, jnp.bfloat16)
    result = metrics.brier_score(half, Y)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, metrics.brier_score(half.astype(jnp.float32), Y), rtol=1e-6)


def test_labels_have_any_integer_type():
    wide = RNG.dirichlet(np.ones(300), 12)
    expected = metrics.negative_log_likelihood(wide, Y[0])
    for dtype in (np.int8, np.uint8, np.int64):
        labels = jnp.asarray(Y[0].astype(dtype))
        assert jax.jit(metrics.negative_log_likelihood)(wide, labels) == expected


@pytest.mark.parametrize(
    "name", ["accuracy", "brier_score", "negative_log_likelihood", "expected_calibration_error"]
)
def test_compiled_metrics_turn_impossible_labels_into_nan(name):
    metric = jax.jit(getattr(metrics, name))
    for label in (-1, 4):
        assert np.isnan(metric(P[0], jnp.asarray(Y[0]).at[2].set(label)))
