"""Predicted probabilities of classes: scores, curves over confidence and entropy, and references.

Curves are tuples ``(settings, metric, value)``, in whose settings ``x`` is the place on the curve.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats
from jax import Array

import fedmcmc
from experiments import reference as exact
from experiments.claims import Number
from experiments.study import JobRows
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics

__all__ = [
    "Draws",
    "Predictions",
    "Published",
    "at_start",
    "comparison",
    "confident",
    "curves",
    "hmc",
    "labels_of",
    "log_predictive",
    "predict",
    "scores",
    "share",
]

ROWS_AT_A_TIME = 1_000
ROWS_OF_POTENTIAL = 2_000
NUM_QUANTILES, NUM_THRESHOLDS = 51, 50
FEW = 10
"""Rows in a bin of confidence, below which its accuracy is too uncertain."""
ENOUGH = 100
"""Rows that every method must predict with a confidence that `confident` chooses."""
EDGES = np.linspace(0, np.log(10), 31)
"""Edges of histograms of entropies."""

Curves = Iterator[tuple[Mapping[str, Any], str, Any]]


def predict(problem: Any, positions: Any, rows: Any, outcome: str) -> np.ndarray:
    """Return probabilities ``[num_rows, num_classes]``, averaged over leading axes of positions."""
    classes = np.unique(np.asarray(problem.data.rows[outcome]))
    terms = jax.tree_util.Partial(problem.posterior.loglikelihood_fn)
    return np.exp(log_predictive(terms, classes, positions, rows, outcome))


def log_predictive(
    terms: Any, classes: Any, positions: Any, rows: Any, outcome: str | None
) -> np.ndarray:
    """Return log predictive probabilities of every class, or of the rows if there are none.

    They are averages over positions, ``[num_rows, num_classes]`` or ``[num_rows]``.
    """
    total = len(jax.tree.leaves(rows)[0])
    cuts = [slice(i, i + ROWS_AT_A_TIME) for i in range(0, total, ROWS_AT_A_TIME)]
    blocks = [jax.tree.map(lambda leaf, cut=cut: jnp.asarray(leaf)[cut], rows) for cut in cuts]
    sums = [_log_sums(terms, classes, positions, block, outcome=outcome) for block in blocks]
    return np.concatenate(sums).astype(np.float64) - np.log(len(jax.tree.leaves(positions)[0]))


@partial(jax.jit, static_argnames="outcome")
def _log_sums(terms: Any, classes: Any, positions: Any, rows: Any, *, outcome: str | None) -> Any:
    def score(position: Any) -> Any:
        return _scores(terms, classes, position, rows, outcome)

    def add(total: Any, position: Any) -> tuple[Any, None]:
        return jnp.logaddexp(total, score(position)), None

    shape = jax.eval_shape(score, jax.tree.map(lambda leaf: leaf[0], positions))
    start = jnp.full(shape.shape, -jnp.inf, shape.dtype)
    return jax.lax.scan(add, start, positions)[0]


def _scores(terms: Any, classes: Any, position: Any, rows: Any, outcome: str | None) -> Any:
    """Return log probabilities of every class, or of the rows if there are none."""
    if outcome is None:
        return terms(position, rows)
    labels = jnp.broadcast_to(classes[:, None], (len(classes), len(rows[outcome])))
    each = [terms(position, {**rows, outcome: label}) for label in labels]
    return jax.nn.log_softmax(jnp.stack(each, axis=-1), axis=-1)


def labels_of(problem: Any, outcome: str) -> np.ndarray:
    """Return the labels of held-out rows, as numbers of columns of their predictions."""
    return np.searchsorted(np.unique(problem.data.rows[outcome]), problem.test[outcome])


def share(value: Any, num_rows: int) -> Number:
    """Return a share of `num_rows` rows with its binomial standard error."""
    return Number(float(value), float((value * (1 - value) / num_rows) ** 0.5))


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return accuracy, calibration error, Brier score and negative log likelihood (nats)."""
    return {
        "accuracy": share(metrics.accuracy(probabilities, labels), len(labels)),
        "calibration_error": metrics.expected_calibration_error(probabilities, labels),
        "brier": metrics.brier_score(probabilities, labels),
        "negative_log_likelihood": metrics.negative_log_likelihood(probabilities, labels),
    }


def curves(probabilities: np.ndarray, labels: np.ndarray, other: np.ndarray | None) -> Curves:
    """Return accuracy and calibration by confidence, and the distribution of entropies.

    Parameters
    ----------
    probabilities, labels
        Predictions for held-out rows, and their labels.
    other
        Predictions for rows of another data set; entropies have ``data=in`` and ``data=out``.
    """
    credible = metrics.credibility_accuracy_curve(probabilities, labels)
    chosen = np.unique(np.linspace(0, len(credible.threshold) - 1, NUM_THRESHOLDS).astype(int))
    confidence = probabilities.max(axis=-1)
    for place, accuracy in zip(*(np.asarray(c)[chosen] for c in credible[:2]), strict=True):
        yield {"x": place}, "accuracy_by_confidence", accuracy
        yield {"x": place}, "images_by_confidence", (confidence >= place).sum()
    bins = metrics.reliability(probabilities, labels)
    for num, place, gap in zip(bins.num_rows, bins.confidence, bins.gap, strict=True):
        if num >= FEW:
            yield {"x": float(place)}, "calibration_gap", gap
            yield {"x": float(place)}, "images_in_bin", num
    for name, part in {"in": probabilities, "out": other}.items():
        if part is not None:
            yield from _entropies(name, np.asarray(metrics.predictive_entropy(part)))
    if other is not None:
        entropies = map(metrics.predictive_entropy, (probabilities, other))
        yield {}, "auc", metrics.ood_auc(*entropies)


def _entropies(name: str, entropy: np.ndarray) -> Curves:
    for place in np.linspace(0, 1, NUM_QUANTILES):
        yield {"data": name, "x": place}, "entropy_quantile", np.quantile(entropy, place)
    density = np.histogram(entropy, EDGES, density=True)[0]
    for place, height in zip(EDGES, density, strict=False):
        yield {"data": name, "x": place}, "entropy_density", height


def comparison(probabilities: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Return agreement and total variation of two samplers' predictions."""
    agreement = share(metrics.agreement(probabilities, reference), len(reference))
    return {"agreement": agreement, "tv": metrics.total_variation(probabilities, reference)}


def confident(jobs: Sequence[JobRows]) -> list[Row]:
    """Return what depends on the curves of several methods.

    Methods that predict fewer than half as many rows as the best one, and the start, are left out.
    ``accuracy_if_confident`` is at the highest confidence that all methods reach for 100 rows;
    ``share_told_by_entropy`` is the share of rows that have the entropy of their own data set, if
    entropies are taken for those of the data set with the higher density.
    """
    rows = [row for job in jobs for row in job.rows if row.method != "start"]
    by_method: dict[str, dict[Any, float]] = {}
    for row in rows:
        place = (row.metric, row.settings.get("data"), row.x)
        by_method.setdefault(row.method, {})[place] = row.value
    best = max(numbers["accuracy", None, None] for numbers in by_method.values())
    learned = {m: n for m, n in by_method.items() if n["accuracy", None, None] >= best / 2}

    def curve(method: str, metric: str, data: str | None = None) -> dict[float, float]:
        places = {k[2]: v for k, v in learned[method].items() if k[:2] == (metric, data)}
        return {place: places[place] for place in sorted(places)}

    counts = np.min([[*curve(m, "images_by_confidence").values()] for m in learned], axis=0)
    chosen = int(np.flatnonzero(counts >= min(ENOUGH, counts[0]))[-1])
    summaries: list[Row] = []
    for method in learned:
        accuracy = curve(method, "accuracy_by_confidence")
        at_place = [*accuracy.values()][chosen]
        gain = {"gain_if_confident": at_place - accuracy[0.0]}
        summaries += from_numbers(method, {}, {"accuracy_if_confident": at_place, **gain})
        inside, outside = (
            np.array([*curve(method, "entropy_density", data).values()]) for data in ("in", "out")
        )
        if outside.size:
            width, is_inside = np.diff(EDGES), inside > outside
            shares = {
                "digits": (inside * width)[is_inside].sum(),
                "clothes": (outside * width)[~is_inside].sum(),
            }
            for data, value in shares.items():
                summaries += from_numbers(method, {"data": data}, {"share_told_by_entropy": value})
    return summaries + from_numbers("all", {}, {"confident_from": [*accuracy][chosen]})


class Predictions(NamedTuple):
    """Predictions for held-out rows, and numbers of the reference that made them.

    Runs are compared with these predictions if `compares`.
    """

    probabilities: np.ndarray
    compares: bool
    numbers: list[tuple[Mapping[str, Any], str, Any]]


class Draws(NamedTuple):
    """Positions ``[num_chains, num_draws, ...]`` with numbers for rows."""

    draws: Any
    summary: Mapping[str, Any]

    def predictions(self, problem: Any) -> Predictions:
        """Return the predictions; of several chains, the first is compared with the others."""
        num_chains = len(jax.tree.leaves(self.draws)[0])
        chains = [jax.tree.map(lambda leaf, c=c: leaf[c], self.draws) for c in range(num_chains)]

        def predicted(rows: Any) -> np.ndarray:
            return np.stack([predict(problem, chain, rows, "label") for chain in chains])

        each = predicted(problem.test)
        other = None if problem.other is None else predicted(problem.other).mean(axis=0)
        if num_chains > 1:
            between = comparison(each[0], each[1:].mean(axis=0))
            between["rhat_of_predictions"] = rhat_of_predictions(problem, chains)
        else:
            between = {"draws": len(jax.tree.leaves(chains)[0]), "relative_bits": 0}
        numbers = {**self.summary, **between}
        return _predictions(problem, each.mean(axis=0), other, numbers, num_chains > 1)


class Published(NamedTuple):
    """File of probabilities ``[num_test, 10]``, ``.npy`` or text with commas, in the data's order.

    The JPEG test images of `experiments.data.cifar10` are sorted by class and so do not fit.
    """

    path: str

    def predictions(self, problem: Any) -> Predictions:
        """Read the file; raise `ValueError` if it does not fit the held-out rows."""
        read = np.load if self.path.endswith(".npy") else partial(np.loadtxt, delimiter=",")
        shares, labels = read(self.path), labels_of(problem, "label")
        if shares.shape != (len(labels), 10) or not np.allclose(shares.sum(axis=1), 1, atol=1e-3):
            raise ValueError(f"{self.path} must hold probabilities [{len(labels)}, 10].")
        if np.all(np.diff(labels) >= 0):
            raise ValueError("Test images are sorted by class: take them from OpenML.")
        return _predictions(problem, shares / shares.sum(axis=1, keepdims=True), None, {}, True)


def _predictions(
    problem: Any,
    probabilities: np.ndarray,
    other: np.ndarray | None,
    numbers: Mapping[str, Any],
    compares: bool,
) -> Predictions:
    labels = labels_of(problem, "label")
    named = {**scores(probabilities, labels), **numbers}
    single = [({}, name, value) for name, value in named.items()]
    return Predictions(probabilities, compares, [*single, *curves(probabilities, labels, other)])


def at_start(start: Any) -> Draws:
    """Return the one network at which all chains start."""
    return Draws(jax.tree.map(lambda leaf: leaf[None, None], start), {})


def rhat_of_predictions(problem: Any, chains: Sequence[Any], num_rows: int = 100) -> float:
    """Return the largest R-hat of the probabilities of some rows.

    Weights of a network have many modes that predict the same, so that chains can agree in
    predictions if they differ in weights.
    """
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:num_rows]), problem.test)
    classes = np.unique(np.asarray(problem.data.rows["label"]))
    at = partial(_scores, problem.posterior.loglikelihood_fn, classes, rows=rows, outcome="label")
    fn = jax.jit(lambda draws: jax.lax.map(lambda p: jnp.exp(at(p)), draws, batch_size=64))
    each = np.stack([np.asarray(fn(chain), np.float64) for chain in chains])
    flat = each.reshape(*each.shape[:2], -1)
    with np.errstate(invalid="ignore", divide="ignore"):  # chains that do not move
        return float(np.max(array_stats.rhat(flat, chain_axis=0, draw_axis=1)))


def hmc(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    start: Any,
    *,
    num_chains: int,
    num_steps: int,
    num_warmup: int,
    num_draws: int,
    random_start: bool = False,
    seed: int = 0,
) -> Draws:
    """Run Hamiltonian Monte Carlo on all rows together.

    Parameters
    ----------
    posterior, data
        Model and rows.
    start
        Position at which all chains start, unless `random_start` draws one for each.
    num_chains, num_warmup, num_draws
        Number of chains, and draws dropped and kept per chain.
    num_steps
        Number of leapfrog steps per draw.
    """
    key = jax.random.key(seed)
    positions = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_chains, *leaf.shape)), start)
    if random_start:
        keys = jax.random.split(jax.random.fold_in(key, 1), num_chains)
        positions = jax.vmap(posterior.init_fn)(keys)
    counts = dict(num_steps=num_steps, num_warmup=num_warmup, num_draws=num_draws)
    chains = exact.hmc(key, potential(posterior, data.pooled().rows), positions, **counts)
    of_chains = ("acceptance", "step_size")
    summary = chains.summary().items()
    numbers = {f"chains_{k}" if k in of_chains else k: v for k, v in summary}
    return Draws(chains.draws, numbers)


def potential(posterior: fedmcmc.Posterior, rows: Any) -> Any:
    """Return ``position -> []``, minus the log posterior, computed for some rows at a time.

    Activations are computed again for the gradient, because those of all rows need much memory.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    size = min(num, ROWS_OF_POTENTIAL)
    places = np.arange(-(-num // size) * size)
    padded = np.where(places < num, places, 0)  # copies of the first row, which are masked
    blocks = jax.tree.map(
        lambda leaf: jnp.asarray(leaf)[padded].reshape(-1, size, *leaf.shape[1:]), rows
    )
    mask = jnp.asarray(places < num, jnp.float32).reshape(-1, size)

    def minus_log_posterior(position: Any) -> Array:
        @jax.checkpoint
        def add(total: Array, block: tuple[Any, Array]) -> tuple[Array, None]:
            terms = posterior.loglikelihood_fn(position, block[0])
            return total + jnp.sum(terms * block[1]), None

        total, _ = jax.lax.scan(add, jnp.zeros(()), (blocks, mask))
        return -total - posterior.logprior_fn(position)

    return minus_log_posterior
