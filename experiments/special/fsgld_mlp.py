"""El Mekkaoui et al. (2021), 5.3: networks on label-skewed shards, other shards each time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import data as tables
from experiments import models, setup, shards
from experiments.special import fsgld_repetitions as repetitions
from experiments.tidy import Row, from_numbers

TEST, VISITED = "test_log_likelihood", "visited_log_likelihood"


def rows(
    table: Literal["susy", "covtype"],
    positive: int,
    data: Mapping[str, int],
    concentrations: Mapping[str, float],
    num_evaluated: int,
    widths: Sequence[int],
    prior_scale: float,
    kernel: Mapping[str, Any],
    surrogates: Callable[..., fedmcmc.Gaussian],
    num_warm_steps: int,
    warm_learning_rate: float,
    pooled: bool,
    num_repetitions: int,
    num_rounds: int,
    num_burnin: int,
    thinning: int,
    seed: int,
) -> list[Row]:
    """Return scores of DSGLD, FSGLD and (if `pooled`) SGLD on all rows, by kind of shards.

    The label `positive` of the table counts as 1. `concentrations`, by kind of shards, and `data`
    are arguments of `experiments.shards.skewed_labels`. Scores use `num_evaluated` rows per shard.
    Chains start where Adam arrives on all rows after `num_warm_steps`.
    """
    features, labels = getattr(tables, table)()
    labels = (labels == positive).astype(np.int32)
    columns = {"features": shards.standardize(features), "label": labels}
    posterior, start = _network(columns, widths, prior_scale)
    steps = thinning * kernel["num_local_steps"] * (1 + np.arange(num_rounds // thinning))
    settings = dict(kernel, num_rounds=num_rounds, thinning=thinning, pooled=pooled)
    settings["collect"] = setup.local_states(kernel["num_local_steps"] // 4)
    scaled = kernel["step_size"] * data["num_clients"] * data["rows_per_client"]
    result = from_numbers("data", {}, {"step_size_times_rows": scaled})
    for index, (split, concentration) in enumerate(concentrations.items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        shard_key, start_key, fit_key, run_key = jax.random.split(key, 4)
        draw = partial(shards.skewed_labels, labels=labels, concentration=concentration, **data)
        drawn = map(draw, jax.random.split(shard_key, num_repetitions))
        clients, tests = zip(*drawn, strict=True)
        starts = jax.vmap(start)(jax.random.split(start_key, num_repetitions))
        all_rows = jnp.stack([client.rows for client in clients])
        if num_warm_steps:
            keys = jax.random.split(jax.random.fold_in(start_key, 1), num_repetitions)
            adam = partial(setup.adam, num_warm_steps, kernel["batch_size"])
            train = jax.jit(jax.vmap(adam, (0, None, 0, 0, None)))
            starts = train(keys, posterior, all_rows, starts, warm_learning_rate)
        runs = repetitions.run(posterior, surrogates, clients, starts, fit_key, run_key, **settings)
        by_client = all_rows.reshape(num_repetitions, data["num_clients"], -1)
        scored = (by_client[..., :num_evaluated], jnp.stack(tests))
        curves = {method: _curves(posterior, *scored, *both) for method, both in runs.items()}
        curves.get("pooled SGLD", {}).pop(VISITED, None)
        curves = jax.tree.map(lambda curve: np.asarray(curve, float), curves)
        result += _rows_of(curves, {"split": split}, steps, num_burnin // thinning)
    return result


def _network(
    columns: Mapping[str, np.ndarray], widths: Sequence[int], prior_scale: float
) -> tuple[fedmcmc.Posterior, Callable[[Array], Any]]:
    """Return a network over numbers of rows, and what draws a start (He et al. 2015)."""
    example = {"features": columns["features"][:2], "label": np.arange(2, dtype=np.int32)}
    network = models.mlp(fedmcmc.FederatedData.from_clients([example]), tuple(widths), prior_scale)
    terms = Partial(_of_rows, network.loglikelihood_fn, jax.tree.map(jnp.asarray, dict(columns)))
    layers = jax.eval_shape(network.init_fn, jax.random.key(0))
    draw = jax.nn.initializers.variance_scaling(2.0, "fan_in", "normal")

    def start(rng_key: Array) -> Any:
        position = jax.tree.map(jnp.zeros_like, layers)
        for name, key in zip(layers, jax.random.split(rng_key, len(layers)), strict=True):
            position[name]["kernel"] = draw(key, layers[name]["kernel"].shape)
        return position

    return fedmcmc.Posterior(network.logprior_fn, terms), start


def _of_rows(terms: Any, columns: Mapping[str, Array], position: Any, rows_: Array) -> Any:
    return terms(position, {name: column[rows_] for name, column in columns.items()})


@partial(jax.jit, static_argnames="structure")
def fisher(
    posterior: Any, data: fedmcmc.FederatedData, position: Any, structure: str, **_: Any
) -> fedmcmc.Gaussian:
    """Expand the log likelihoods of clients of one size at `position`.

    The curvature is the Fisher information of binary labels that the network there expects;
    `structure` is ``"diagonal"`` or ``"dense"``.
    """
    flat, unravel = ravel_pytree(position)

    def of_row(x: Array, row: Array) -> Array:
        return posterior.loglikelihood_fn(unravel(x), row[None])[0]

    def of_client(rows_: Array) -> fedmcmc.Gaussian:
        values, gradients = jax.vmap(jax.value_and_grad(of_row), (None, 0))(flat, rows_)
        # The label of probability p has the score (1 - p) v, the other one -p v: the expected
        # square p (1 - p) v v' is p / (1 - p) times the square of the first.
        odds = jnp.exp(values) / -jnp.expm1(jnp.minimum(values, -1e-6))
        scores, total = gradients * jnp.sqrt(odds)[:, None], gradients.sum(axis=0)
        if structure == "diagonal":
            squares = (scores**2).sum(axis=0)
            return fedmcmc.Gaussian(unravel(total + squares * flat), unravel(squares), structure)
        information = jnp.matmul(scores.T, scores, precision="highest")
        shift = total + jnp.matmul(information, flat, precision="highest")
        return fedmcmc.Gaussian(unravel(shift), information, structure)

    return jax.lax.map(of_client, jnp.reshape(data.rows, (data.num_clients, -1)))


@jax.jit
def _curves(posterior: Any, evaluated: Array, test: Array, draws: Any, visited: Array) -> Any:
    """Return scores of rounds, ``[num_repetitions, num_rounds]``, means of four local states."""
    labels = posterior.loglikelihood_fn.args[1]["label"]

    def of_repetition(each: Any) -> dict[str, Array]:
        draws, visited, evaluated, test = each

        def of_draw(position: Any, rows_: Array) -> dict[str, Array]:
            terms = posterior.loglikelihood_fn(position, test)
            of_one = jnp.where(labels[test] == 1, jnp.exp(terms), 1 - jnp.exp(terms))
            return {
                TEST: terms.mean(),
                VISITED: posterior.loglikelihood_fn(position, rows_).mean(),
                "accuracy": (terms > jnp.log(0.5)).mean(),
                "share_ignoring_input": of_one.std() < 1e-3,
            }

        of_four = jax.vmap(of_draw, (0, None))
        scores = jax.lax.map(lambda each: of_four(*each), (draws, evaluated[visited]))
        return {metric: values.mean(axis=1) for metric, values in scores.items()}

    return jax.lax.map(of_repetition, (draws, visited, evaluated, test))


def _rows_of(
    curves: Mapping[str, Any], settings: Mapping[str, str], steps: np.ndarray, burnin: int
) -> list[Row]:
    """Return the rows of one kind of shards; chains that were lost are counted and left out."""
    numbers = {}
    for method, scores in curves.items():
        each = {metric: curve[:, burnin:].mean(axis=1) for metric, curve in scores.items()}
        if VISITED in each:
            each["visited_minus_test_log_likelihood"] = each[VISITED] - each[TEST]
        numbers[method] = each
    result, values = repetitions.finals(settings, numbers)
    chosen = repetitions.points(len(steps))
    quarter = len(chosen) // 4
    for method, scores in curves.items():
        left = np.isfinite(values[method][TEST])
        for metric in [m for m in (TEST, VISITED) if m in scores and left.any()]:
            levels = np.quantile(scores[metric][left], [0.1, 0.5, 0.9], axis=0)
            names = [f"{metric}_q{level}_by_step" for level in (10, 50, 90)]
            bands = dict(zip(names, levels, strict=True))
            result += repetitions.by_x(method, settings, steps, bands)
            medians = {f"median_{metric}": np.median(values[method][metric][left])}
            if metric == TEST and quarter:
                before, after = np.split(levels[1][chosen[-2 * quarter :]], 2)
                medians["rise_of_median_in_last_quarter"] = after.mean() - before.mean()
            result += from_numbers(method, settings, medians)
    ratio = values["FSGLD"][TEST], values["DSGLD"][TEST]
    return result + repetitions.sd_ratio("test_sd_ratio", settings, *ratio)
