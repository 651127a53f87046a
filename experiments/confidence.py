"""Predicted probabilities of classes: scores, curves over confidence and entropy, and references.

Numbers are tuples ``(settings, metric, value)``, in whose settings ``x`` is the place on a curve.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments import reference, tidy
from experiments.claims import Number
from experiments.reference import Reference
from experiments.study import JobRows
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics
from fedmcmc.diagnostics import worst_mixing

OUTCOMES = ("label", "y")  # names of columns that hold the outcome
ROWS_AT_A_TIME, ROWS_OF_POTENTIAL = 1_000, 2_000
NUM_QUANTILES, NUM_THRESHOLDS = 51, 50
FEW = 10  # rows in a bin of confidence, below which its accuracy is too uncertain
ENOUGH = 100  # rows that every method must predict with the confidence that `confident` chooses
EDGES = np.linspace(0, np.log(10), 31)  # of histograms of entropies

Numbers = Iterator[tuple[Mapping[str, Any], str, Any]]


def outcome_of(rows: Any) -> str | None:
    """Return the name of the column of classes, if rows have one."""
    name = next((n for n in OUTCOMES if isinstance(rows, dict) and n in rows), None)
    is_class = name is not None and jnp.issubdtype(jnp.result_type(rows[name]), jnp.integer)
    return name if is_class else None


def predict(problem: Any, draws: Any, rows: Any) -> np.ndarray:
    """Return probabilities of classes, averaged over the draws of each chain.

    Draws have leaves ``[num_chains, num_draws, ...]``; the result is ``[num_chains, num_rows,
    num_classes]``.
    """
    average = jax.vmap(partial(metrics.predictive, _probabilities_fn(problem)), (0, None))
    return np.asarray(average(*jax.tree.map(jnp.asarray, (draws, rows))), np.float64)


def _probabilities_fn(problem: Any) -> Any:
    classes = np.unique(np.asarray(problem.data.rows[outcome_of(problem.data.rows)]))
    return Partial(class_probabilities, classes, Partial(problem.posterior.loglikelihood_fn))


def class_probabilities(classes: Any, terms: Any, position: Any, rows: Any) -> Array:
    """Return ``[num_rows, num_classes]`` from the log likelihoods of rows with each class."""
    outcome = outcome_of(rows)

    def of_row(row: Any) -> Array:
        one_row = jax.tree.map(lambda leaf: leaf[None], row)
        term = jax.vmap(lambda label: terms(position, {**one_row, outcome: label[None]})[0])
        return jax.nn.softmax(term(classes))

    return jax.lax.map(of_row, rows, batch_size=ROWS_AT_A_TIME)


def _labels_of(problem: Any) -> np.ndarray:
    """Return the labels of held-out rows, as numbers of columns of their predictions."""
    outcome = outcome_of(problem.test)
    return np.searchsorted(np.unique(problem.data.rows[outcome]), problem.test[outcome])


def _share(value: Any, num_rows: int) -> Number:
    """Return a share of `num_rows` rows with its binomial standard error."""
    return Number(float(value), float((value * (1 - value) / num_rows) ** 0.5))


def scores(problem: Any, probabilities: np.ndarray) -> dict[str, Any]:
    """Return accuracy, calibration error, Brier score and negative log likelihood (nats)."""
    labels = _labels_of(problem)
    return {
        "accuracy": _share(metrics.accuracy(probabilities, labels), len(labels)),
        "calibration_error": metrics.expected_calibration_error(probabilities, labels),
        "brier": metrics.brier_score(probabilities, labels),
        "negative_log_likelihood": metrics.negative_log_likelihood(probabilities, labels),
    }


def curves(problem: Any, draws: Any, probabilities: np.ndarray) -> Numbers:
    """Return accuracy and calibration by confidence, and the distribution of entropies.

    `probabilities` are predictions of `draws` for held-out rows. Entropies have ``data=in``, and
    ``data=out`` for rows of another data set, if the problem has them.
    """
    labels = _labels_of(problem)
    credible = metrics.credibility_accuracy_curve(probabilities, labels)
    chosen = np.unique(np.linspace(0, len(credible.threshold) - 1, NUM_THRESHOLDS).astype(int))
    confidence = probabilities.max(axis=-1)
    for place, value in zip(*(np.asarray(c)[chosen] for c in credible[:2]), strict=True):
        yield {"x": place}, "accuracy_by_confidence", value
        yield {"x": place}, "images_by_confidence", (confidence >= place).sum()
    bins = metrics.reliability(probabilities, labels)
    for num, place, gap in zip(bins.num_rows, bins.confidence, bins.gap, strict=True):
        if num >= FEW:
            yield {"x": float(place)}, "calibration_gap", gap
            yield {"x": float(place)}, "images_in_bin", num
    entropies = {"in": np.asarray(metrics.predictive_entropy(probabilities))}
    if problem.other is not None:
        outside = predict(problem, draws, problem.other).mean(axis=0)
        entropies["out"] = np.asarray(metrics.predictive_entropy(outside))
        yield {}, "auc", metrics.ood_auc(*entropies.values())
    for name, entropy in entropies.items():
        for place in np.linspace(0, 1, NUM_QUANTILES):
            yield {"data": name, "x": place}, "entropy_quantile", np.quantile(entropy, place)
        density = np.histogram(entropy, EDGES, density=True)[0]
        for place, height in zip(EDGES, density, strict=False):
            yield {"data": name, "x": place}, "entropy_density", height


def comparison(probabilities: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Return agreement and total variation of two samplers' predictions."""
    agreement = _share(metrics.agreement(probabilities, right), len(right))
    return {"agreement": agreement, "tv": metrics.total_variation(probabilities, right)}


def predictions_of(problem: Any, exact: Reference) -> tuple[np.ndarray, list[Any]]:
    """Return the average prediction of a reference, and its numbers, as `curves` does.

    The first of several chains is compared with the others.
    """
    by_chain = predict(problem, exact.draws, problem.test)
    average = by_chain.mean(axis=0)
    numbers = scores(problem, average) | exact.summary
    if len(by_chain) > 1:
        numbers |= comparison(by_chain[0], by_chain[1:].mean(axis=0))
        numbers["rhat_of_predictions"] = rhat_of_predictions(problem, exact.draws)
    single = [({}, name, value) for name, value in numbers.items()]
    return average, [*single, *curves(problem, exact.draws, average)]


def rhat_of_predictions(problem: Any, draws: Any, num_rows: int = 100) -> float:
    """Return the largest R-hat of the probabilities of some rows.

    Weights of a network have many modes that predict the same, so that chains can agree in
    predictions if they differ in weights.
    """
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf[:num_rows]), problem.test)
    fn = jax.vmap(jax.vmap(_probabilities_fn(problem), (0, None)), (0, None))
    return worst_mixing(jax.jit(fn)(draws, rows))[0]


def confident(jobs: Sequence[JobRows]) -> list[Row]:
    """Return what depends on the curves of several methods.

    Methods that predict fewer than half as many rows as the best one, and the start, are left out.
    ``accuracy_if_confident`` is at the highest confidence that all methods reach for 100 rows;
    ``share_told_by_entropy`` is the share of rows that are assigned to their data set, if an
    entropy is assigned to the data set with the higher density.
    """
    rows = tidy.distinct(row for job in jobs for row in job.rows if row.method != "start")

    def curve(method: str, metric: str, data: str | None = None) -> np.ndarray:
        """Return places and values ``[2, n]``."""
        where = {"method": method, "data": data}
        points = [(r.x, r.value) for r in rows if r.metric == metric and r.matches(where)]
        return np.array(sorted(points)).reshape(-1, 2).T

    accuracies = {row.method: row.value for row in rows if row.metric == "accuracy"}
    learned = [m for m, value in accuracies.items() if value >= max(accuracies.values()) / 2]
    counts = np.min([curve(method, "images_by_confidence")[1] for method in learned], axis=0)
    chosen = int(np.flatnonzero(counts >= min(ENOUGH, counts[0]))[-1])
    summaries: list[Row] = []
    for method in learned:
        places, values = curve(method, "accuracy_by_confidence")
        gain = {"gain_if_confident": values[chosen] - values[0]}
        summaries += from_numbers(method, {}, {"accuracy_if_confident": values[chosen], **gain})
        inside, outside = (curve(method, "entropy_density", data)[1] for data in ("in", "out"))
        if outside.size:
            right = {"digits": inside[inside > outside], "clothes": outside[inside <= outside]}
            for data, density in right.items():
                share = {"share_told_by_entropy": density.sum() * EDGES[1]}
                summaries += from_numbers(method, {"data": data}, share)
    return summaries + from_numbers("all", {}, {"confident_from": places[chosen]})


def at_start(start: Any) -> Reference:
    """Return the one network at which all chains start."""
    draws = jax.tree.map(lambda leaf: leaf[None, None], start)
    return Reference(draws, {"draws": 1, "relative_bits": 0})


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
) -> Reference:
    """Run Hamiltonian Monte Carlo on all rows together, with `num_steps` leapfrog steps per draw.

    All chains start at `start`, unless `random_start` draws a start for each.
    """
    key = jax.random.key(0)
    keys = jax.random.split(jax.random.fold_in(key, 1), num_chains)
    positions = jax.vmap(posterior.init_fn if random_start else lambda _: start)(keys)
    counts = dict(num_steps=num_steps, num_warmup=num_warmup, num_draws=num_draws)
    potential_fn = Partial(potential, posterior, data.pooled().rows)
    return reference.hmc(key, potential_fn, positions, **counts)


def potential(posterior: fedmcmc.Posterior, rows: Any, position: Any) -> Array:
    """Return minus the log posterior as `experiments.setup.potential`, for some rows at a time.

    Activations are computed again for the gradient, because for all rows they need much memory.
    """

    @jax.checkpoint
    def term(row: Any) -> Array:
        one_row = jax.tree.map(lambda leaf: leaf[None], row)
        return posterior.loglikelihood_fn(position, one_row)[0]

    terms = jax.lax.map(term, rows, batch_size=ROWS_OF_POTENTIAL)
    return -jnp.sum(terms) - posterior.logprior_fn(position)
