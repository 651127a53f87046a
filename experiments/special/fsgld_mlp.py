"""El Mekkaoui et al. (2021), 5.3: networks on label-skewed shards, other shards each time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import data as tables
from experiments import models, setup, shards
from experiments.special import fsgld_repetitions as repetitions
from experiments.tidy import Row, from_numbers

__all__ = ["fisher", "rows"]

CONSTANT = 1e-3
"""Standard deviation of predictions below which a network ignores its input."""
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
    """Return scores of DSGLD, FSGLD and (if `pooled`) SGLD on all rows, for each kind of shards.

    Parameters
    ----------
    table, positive
        Table, and its label that counts as 1.
    data, concentrations
        Sizes for `experiments.shards.skewed_labels`, and its concentration by kind of shards.
    num_evaluated
        Rows of each shard that are scored.
    widths, prior_scale, kernel, surrogates
        Network, settings of all kernels, and what makes surrogates from a key, the posterior, data
        and the chain's start.
    num_warm_steps, warm_learning_rate
        Steps of Adam on all rows, by which the start is found.
    num_repetitions, num_rounds, num_burnin, thinning, seed
        As in `fedmcmc.sample`, for each repetition; curves include burn-in.
    """
    features, labels = getattr(tables, table)()
    features, labels = shards.standardize(features), (labels == positive).astype(np.int32)
    columns = {"features": jnp.asarray(features), "label": jnp.asarray(labels)}
    some = {"features": features[:2], "label": np.arange(2, dtype=np.int32)}
    network = models.mlp(fedmcmc.FederatedData.from_clients([some]), tuple(widths), prior_scale)
    terms = Partial(_of_rows, network.loglikelihood_fn, columns)
    posterior = fedmcmc.Posterior(network.logprior_fn, terms)
    like = jax.eval_shape(network.init_fn, jax.random.key(0))
    num_rows = data["num_clients"] * data["rows_per_client"]
    scaled = {"num_rows": num_rows, "step_size_times_rows": kernel["step_size"] * num_rows}
    found = from_numbers("data", {}, scaled)
    steps = thinning * kernel["num_local_steps"] * (1 + np.arange(num_rounds // thinning))
    collect = setup.local_states(kernel["num_local_steps"] // 4)
    for index, (split, concentration) in enumerate(concentrations.items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        shard_key, start_key, fit_key, run_key = jax.random.split(key, 4)
        drawn = [
            shards.skewed_labels(k, labels, concentration=concentration, **data)
            for k in jax.random.split(shard_key, num_repetitions)
        ]
        clients = [split_.data for split_ in drawn]
        everything = repetitions.stack([own.pooled() for own in clients])
        starts = [_start(like, k) for k in jax.random.split(start_key, num_repetitions)]
        if num_warm_steps:
            keys = jax.random.split(jax.random.fold_in(start_key, 1), num_repetitions)
            settings = (num_warm_steps, kernel["batch_size"], warm_learning_rate)
            train = jax.jit(jax.vmap(Partial(_adam, *settings), (0, None, 0, 0)))
            warm = train(keys, posterior, everything.rows, repetitions.stack(starts))
            starts = [jax.tree.map(lambda x, i=i: x[i], warm) for i in range(num_repetitions)]
        fitted = [
            surrogates(rng_key=k, posterior=posterior, data=own, position=start)
            for k, own, start in zip(
                jax.random.split(fit_key, num_repetitions), clients, starts, strict=True
            )
        ]
        federation = repetitions.stack(clients)
        shape = (num_repetitions, data["num_clients"], data["rows_per_client"])
        evaluated = jnp.reshape(federation.rows, shape)[..., :num_evaluated]
        test = jnp.stack([split_.test for split_ in drawn])
        runs = {"DSGLD": (None, federation), "FSGLD": (repetitions.stack(fitted), federation)}
        curves = {}
        for method, (chosen, own) in (runs | {"pooled SGLD": (None, everything)}).items():
            if method in runs or pooled:
                draws, visited = repetitions.run(
                    *(posterior, chosen, own, jax.random.split(run_key, num_repetitions)),
                    repetitions.stack(starts),
                    **dict(kernel, num_rounds=num_rounds, thinning=thinning, collect=collect),
                )
                curves[method] = _curves(posterior, draws, evaluated, test, visited)
        curves.get("pooled SGLD", {}).pop(VISITED, None)
        found += _rows_of(curves, {"split": split}, steps, num_burnin // thinning)
    return found


def _of_rows(terms: Any, columns: Mapping[str, Array], position: Any, rows_: Array) -> Array:
    found: Array = terms(position, {name: column[rows_] for name, column in columns.items()})
    return found


def _start(like: Any, rng_key: Array) -> Any:
    """Draw weights of variance ``2 / inputs`` (He et al. 2015), with no biases."""
    keys = dict(zip(like, jax.random.split(rng_key, len(like)), strict=True))

    def weights(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape) * np.sqrt(2 / shape[0]).astype(np.float32)

    return {
        name: {
            "bias": jnp.zeros(layer["bias"].shape),
            "kernel": weights(keys[name], layer["kernel"].shape),
        }
        for name, layer in like.items()
    }


def _adam(
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    rng_key: Array,
    posterior: fedmcmc.Posterior,
    rows_: Array,
    position: Any,
) -> Any:
    """Return where Adam arrives from `position`, about at the maximum of the posterior."""
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))

    def loss(position: Any, batch: Array) -> Array:
        mean = jnp.mean(posterior.loglikelihood_fn(position, batch))
        return -mean - posterior.logprior_fn(position) / len(rows_)

    def step(carry: Any, key: Array) -> Any:
        position, state = carry
        batch = rows_[jax.random.randint(key, (batch_size,), 0, len(rows_))]
        updates, state = optimizer.update(jax.grad(loss)(position, batch), state)
        return (optax.apply_updates(position, updates), state), None

    keys = jax.random.split(rng_key, num_steps)
    return jax.lax.scan(step, (position, optimizer.init(position)), keys)[0][0]


def fisher(
    posterior: Any, data: fedmcmc.FederatedData, position: Any, structure: str, **_: Any
) -> fedmcmc.Gaussian:
    """Expand the log likelihoods of clients of one size at `position`.

    The curvature is the Fisher information of binary labels that the network there expects;
    `structure` is ``"diagonal"`` or ``"dense"``.
    """
    rows_ = jnp.reshape(jnp.asarray(data.rows), (data.num_clients, -1))
    return _expand(posterior, rows_, position, structure=structure)


def _expand(posterior: Any, rows_: Array, position: Any, *, structure: str) -> fedmcmc.Gaussian:
    flat, unravel = ravel_pytree(position)

    def of_row(x: Array, row: Array) -> Array:
        return posterior.loglikelihood_fn(unravel(x), row[None])[0]

    def of_client(own: Array) -> fedmcmc.Gaussian:
        values, gradients = jax.vmap(jax.value_and_grad(of_row), (None, 0))(flat, own)
        # The label of probability p has the score (1 - p) v, the other one -p v: the expected
        # square p (1 - p) v v' is p / (1 - p) times that of the first.
        odds = jnp.exp(values) / -jnp.expm1(jnp.minimum(values, -1e-6))
        scores, total = gradients * jnp.sqrt(odds)[:, None], gradients.sum(axis=0)
        if structure == "diagonal":
            squares = (scores**2).sum(axis=0)
            return fedmcmc.Gaussian(unravel(total + squares * flat), unravel(squares), structure)
        information = jnp.matmul(scores.T, scores, precision="highest")
        shift = total + jnp.matmul(information, flat, precision="highest")
        return fedmcmc.Gaussian(unravel(shift), information, structure)

    return jax.lax.map(of_client, rows_)


@jax.jit
def _curves(posterior: Any, draws: Any, evaluated: Array, test: Array, visited: Array) -> Any:
    """Return scores of each round, ``[num_repetitions, num_rounds]``, of its four local states."""
    labels = posterior.loglikelihood_fn.args[1]["label"]

    def of_draw(position: Any, client: Array, evaluated: Array, test: Array) -> dict[str, Array]:
        by_client = posterior.loglikelihood_fn(position, evaluated.ravel())
        by_client = by_client.reshape(evaluated.shape).mean(axis=1)
        terms = posterior.loglikelihood_fn(position, test)
        of_one = jnp.where(labels[test] == 1, jnp.exp(terms), 1 - jnp.exp(terms))
        return {
            "train_log_likelihood": by_client.mean(),
            TEST: terms.mean(),
            VISITED: by_client[client],
            "accuracy": (terms > jnp.log(0.5)).mean(),
            "share_ignoring_input": of_one.std() < CONSTANT,
        }

    def of_repetition(each: Any) -> dict[str, Array]:
        draws, visited, evaluated, test = each
        of_four = jax.vmap(of_draw, (0, None, None, None))
        of_rounds = jax.lax.map(lambda x: of_four(*x, evaluated, test), (draws, visited))
        return {metric: values.mean(axis=1) for metric, values in of_rounds.items()}

    return jax.lax.map(of_repetition, (draws, visited, evaluated, test))


def _rows_of(
    curves: Mapping[str, Any], settings: Mapping[str, str], steps: np.ndarray, burnin: int
) -> list[Row]:
    """Return the rows of one kind of shards; chains that were lost are left out and counted."""
    found: list[Row] = []
    tests = {}
    for method, own in curves.items():
        values = {metric: np.asarray(curve)[:, burnin:].mean(1) for metric, curve in own.items()}
        lost = ~np.isfinite(values[TEST])
        values = {metric: np.where(lost, np.nan, each) for metric, each in values.items()}
        tests[method] = values[TEST]
        if VISITED in values:
            values["visited_minus_test_log_likelihood"] = values[VISITED] - values[TEST]
        found += repetitions.summaries(method, settings, values)
        found += from_numbers(method, settings, {"diverged": lost.sum()})
        for metric in {TEST, VISITED} & {*values} if not lost.all() else ():
            found += from_numbers(
                method, settings, {f"median_{metric}": np.nanmedian(values[metric])}
            )
            chosen = repetitions.points(len(steps))
            curve = np.asarray(own[metric])[~lost][:, chosen]
            quantiles = np.quantile(curve, [0.1, 0.5, 0.9], axis=0)
            for x, numbers in zip(steps[chosen], quantiles.T, strict=True):
                names = [f"{metric}_q{level}_by_step" for level in (10, 50, 90)]
                points = dict(zip(names, numbers, strict=True))
                found += from_numbers(method, settings, points, x=float(x))
            if metric == TEST and len(chosen) > 3:
                *_, before, last = np.split(quantiles[1][-2 * (len(chosen) // 4) :], 2)
                rise = {"rise_of_median_in_last_quarter": last.mean() - before.mean()}
                found += from_numbers(method, settings, rise)
    gains = {TEST: tests["FSGLD"] - tests["DSGLD"]}
    found += repetitions.summaries("FSGLD minus DSGLD", settings, gains, by_seed=False)
    return found + repetitions.sd_ratio("test_sd_ratio", settings, tests["FSGLD"], tests["DSGLD"])
