"""Bayesian networks on label-skewed shards: El Mekkaoui et al. (2021), section 5.3, table 1."""

import dataclasses
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

import fedmcmc
from experiments import data, restarts
from experiments.data import Table
from experiments.fsgld import mlp_scores, repetitions
from experiments.fsgld.mlp_model import Shards, make_posterior, make_shards, standardise, start
from experiments.fsgld.mlp_scores import draw
from experiments.qlsd import networks
from fedmcmc import surrogates
from fedmcmc.pytrees import named_leaves

__all__ = ["TITLE", "Config", "draw", "run"]

TITLE = "Section 5.3: Bayesian networks on label-skewed shards"
SPLITS = ("iid", "non_iid")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's where it states them.

    It does not state `prior_scale` and how the surrogates' samples were drawn. Its step size
    ``h = 1e-4`` is twice our `step_size`. A client's own likelihood is `num_shards` times flatter
    than what a visit of the relay sees, so `surrogate_step_size` is larger by as much or more:
    3000 samples have a long way to go. A network's local likelihood is improper, hence
    `prior_fraction` of the prior, divided out again.

    `table` is ``susy`` or ``covtype`` (lodgepole pine, its class 2, against the rest). `pooled`
    adds SGLD on all rows. `surrogate` is ``sampled``, as in the paper, or an expansion of each
    shard's likelihood at the start, whose curvature is the Fisher information of the labels that
    the network there expects, ``fisher`` (diagonal) or ``fisher_dense``, or that of the labels
    there are, ``empirical`` (diagonal). Those need a start that means something: all methods
    begin at the network that Adam finds in `num_warm_steps` steps on all rows.

    Scores are computed from `num_evaluated` rows a shard and the held-out shard, of four local
    states in every `keep_every`-th round.
    """

    seed: int = 0
    num_repetitions: int = 10
    table: str = "susy"
    num_shards: int = 30
    rows_per_shard: int = 90_000
    num_test: int = 90_000
    num_evaluated: int = 100
    iid_concentration: float = 100.0
    non_iid_concentration: float = 0.5
    prior_scale: float = 1.0
    step_size: float = 5e-5
    batch_size: int = 50
    num_local_steps: int = 40
    num_rounds: int = 5000
    num_burnin: int = 500
    keep_every: int = 50
    num_surrogate_samples: int = 3000
    surrogate_step_size: float = 1.5e-3
    prior_fraction: float = 1.0
    pooled: bool = True
    surrogate: str = "sampled"
    num_warm_steps: int = 0
    warm_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        least = {
            "seed": 0,
            "num_warm_steps": 0,
            "num_burnin": 0,
            "num_surrogate_samples": 2,
            "num_local_steps": 4,
        }
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type is int and value < least.get(item.name, 1):
                raise ValueError(f"{item.name} must be at least {least.get(item.name, 1)}: {value}")
            if item.type is float and not value > 0:
                raise ValueError(f"{item.name} must be positive: {value}")
        if self.table not in ("susy", "covtype"):
            raise ValueError(f"table must be susy or covtype: {self.table!r}")
        if self.surrogate not in mlp_scores.SURROGATES:
            listed = ", ".join(mlp_scores.SURROGATES)
            raise ValueError(f"surrogate must be one of {listed}: {self.surrogate!r}")
        if self.num_evaluated > self.rows_per_shard:
            raise ValueError(f"num_evaluated must be at most rows_per_shard: {self.num_evaluated}")
        if self.num_local_steps % 4:
            raise ValueError(f"num_local_steps must be a multiple of 4: {self.num_local_steps}")
        if self.num_burnin >= self.num_rounds:
            raise ValueError(f"num_burnin must be below num_rounds: {self.num_burnin}")
        if self.num_rounds % self.keep_every or self.num_burnin % self.keep_every:
            raise ValueError(f"keep_every must divide num_rounds and num_burnin: {self.keep_every}")


def run(config: Config, out: pathlib.Path) -> dict[str, Any]:
    """Run all methods on IID and non-IID shards; write figures, scores and draws."""
    table = load(config.table)
    scores = {split: run_split(config, table, split, out) for split in SPLITS}
    curves = {
        f"{split}_{method}_{name}": curve
        for split, methods in scores.items()
        for method, of in methods.items()
        for name, curve in of.items()
    }
    np.savez_compressed(out / "scores.npz", **curves)
    metrics = mlp_scores.summarise(scores, config.num_burnin // config.keep_every)
    rows = config.num_shards * config.rows_per_shard
    metrics |= {
        "data": mlp_scores.TABLES[config.table],
        "curves": mlp_scores.curves(scores),
        "steps_a_draw": config.num_local_steps * config.keep_every,
        "num_rows": rows,
        # What decides about stability: the step on the mean log likelihood of a row.
        "step_size_times_rows": config.step_size * rows,
    }
    return metrics | {"figures": draw(metrics, out)}


def load(name: str) -> Table:
    """Return standardised features and labels 0 or 1."""
    if name == "susy":
        table = data.susy()
        return Table(standardise(table.features), table.labels)
    table = data.covtype()
    return Table(standardise(table.features), (table.labels == 2).astype(np.int32))


def run_split(
    config: Config, table: Table, split: str, out: pathlib.Path
) -> dict[str, dict[str, np.ndarray]]:
    """Return the scores of every method on shards of one kind, new ones for each repetition.

    Writes the position at the end of every kept round, ``[num_repetitions, num_kept, ...]``.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), SPLITS.index(split))
    shard_key, start_key, fit_key, run_key = jax.random.split(key, 4)
    num = config.num_repetitions
    shards = [
        make_shards(
            k,
            table.labels,
            num_shards=config.num_shards,
            rows_per_shard=config.rows_per_shard,
            num_test=config.num_test,
            num_evaluated=config.num_evaluated,
            concentration=getattr(config, f"{split}_concentration"),
        )
        for k in jax.random.split(shard_key, num)
    ]
    posterior = make_posterior(table, config.prior_scale)
    keys = jax.random.split(run_key, num)
    starts = jax.vmap(lambda k: start(k, table.features.shape[1]))(jax.random.split(start_key, num))
    if config.num_warm_steps:
        warm_keys = jax.random.split(jax.random.fold_in(start_key, 1), num)
        starts = warm(config, posterior, shards, starts, warm_keys)
    federation = repetitions.stack([s.data for s in shards])
    settings = dict(
        step_size=config.step_size,
        num_local_steps=config.num_local_steps,
        batch_size=config.batch_size,
    )
    lengths = (config.num_local_steps, config.batch_size)
    relay, conducive = repetitions.Relay(False, *lengths), repetitions.Relay(True, *lengths)
    runs = [("DSGLD", relay, (), federation)]
    fitted = fit(config, posterior, shards, starts, jax.random.split(fit_key, num))
    runs.append(("FSGLD", conducive, fitted, federation))
    if config.pooled:
        everything = repetitions.stack([s.data.pooled() for s in shards])
        runs.append(("pooled SGLD", relay, (), everything))
    scores = {}
    for name, kernel_fn, arguments, rows in runs:
        draws = repetitions.run(
            kernel_fn,
            (posterior, jnp.asarray(config.step_size)),
            arguments,
            rows,
            keys,
            starts,
            num_kept=config.num_rounds // config.keep_every,
            keep_every=config.keep_every,
            collect=four_local_states,
        )
        positions = {leaf: x[:, :, -1] for leaf, x in named_leaves(draws).items()}
        np.savez_compressed(out / f"draws_{split}_{name.replace(' ', '_')}.npz", **positions)
        scores[name] = mlp_scores.score(posterior, draws, shards)
        if name != "pooled SGLD":
            kernel = fedmcmc.dsgld(posterior, **settings)
            rounds = np.arange(config.keep_every - 1, config.num_rounds, config.keep_every)
            visited = repetitions.visited_clients(kernel, keys, rounds, config.num_shards)
            mlp_scores.add_visited(scores[name], visited)
    return scores


def four_local_states(state: fedmcmc.FederatedState, info: fedmcmc.RoundInfo) -> Any:
    """Keep four local states of a round, evenly spaced: leaves ``[4, *event]``."""
    del state
    iterates = jax.tree.map(lambda leaf: leaf[0], info.clients.local_positions)
    return jax.tree.map(lambda x: x[x.shape[0] // 4 - 1 :: x.shape[0] // 4], iterates)


def warm(
    config: Config, posterior: fedmcmc.Posterior, shards: list[Shards], starts: Any, keys: Array
) -> Any:
    """Return the network that Adam finds for each repetition, on the rows of all its shards."""
    rows = jnp.stack([jnp.asarray(s.data.pooled().rows) for s in shards])
    rate = jnp.float32(config.warm_learning_rate)

    @jax.jit
    def train(keys_: Array, model: Any, rows_: Array, starts_: Any) -> Any:
        adam = partial(networks.adam, config.num_warm_steps, config.batch_size)
        return jax.vmap(lambda *of: adam(of[0], model, of[1], of[2], rate))(keys_, rows_, starts_)

    return restarts.once(lambda: jax.tree.map(np.asarray, train(keys, posterior, rows, starts)))


def fit(
    config: Config,
    posterior: fedmcmc.Posterior,
    shards: list[Shards],
    starts: Any,
    keys: Array,
) -> fedmcmc.Gaussian:
    """Fit the surrogates of every repetition, leaves ``[num_repetitions, num_shards, ...]``."""
    if config.surrogate == "sampled":
        return fit_sampled(config, posterior, shards, starts, keys)
    fitted = [
        expand(
            posterior, shard.data, jax.tree.map(lambda leaf, i=i: leaf[i], starts), config.surrogate
        )
        for i, shard in enumerate(shards)
    ]
    return repetitions.stack(fitted)


def expand(
    posterior: fedmcmc.Posterior, data_: fedmcmc.FederatedData, centre: Any, kind: str
) -> fedmcmc.Gaussian:
    """Return expansions of the shards' likelihoods at `centre`, with their gradients there.

    `kind` is that of `Config.surrogate`. Shards are of one size.
    """
    rows = jnp.reshape(jnp.asarray(data_.rows), (data_.num_clients, -1))
    return _expanded(posterior, rows, centre, kind)


@partial(jax.jit, static_argnames="kind")
def _expanded(
    posterior: fedmcmc.Posterior, rows: Array, centre: Any, kind: str
) -> fedmcmc.Gaussian:
    flat, unravel = ravel_pytree(centre)

    def of_row(x: Array, row: Array) -> Array:
        return posterior.loglikelihood_fn(unravel(x), row[None])[0]

    def of_shard(own: Array) -> fedmcmc.Gaussian:
        values, gradients = jax.vmap(jax.value_and_grad(of_row), (None, 0))(flat, own)
        scores = gradients
        if kind != "empirical":
            # Of two labels, that of probability p has the score (1 - p) v, the other -p v: the
            # expected square is p (1 - p) v v', which is p / (1 - p) times the first one's.
            odds = jnp.exp(values) / -jnp.expm1(jnp.minimum(values, -1e-6))
            scores = gradients * jnp.sqrt(odds)[:, None]
        total = gradients.sum(axis=0)
        if kind == "fisher_dense":
            fisher = jnp.matmul(scores.T, scores, precision="highest")
            shift = total + jnp.matmul(fisher, flat, precision="highest")
            return fedmcmc.Gaussian(unravel(shift), fisher, "dense")
        squares = (scores**2).sum(axis=0)
        return fedmcmc.Gaussian(unravel(total + squares * flat), unravel(squares), "diagonal")

    return jax.lax.map(of_shard, rows)


def fit_sampled(
    config: Config,
    posterior: fedmcmc.Posterior,
    shards: list[Shards],
    starts: Any,
    keys: Array,
) -> fedmcmc.Gaussian:
    """Fit diagonal surrogates to local SGLD samples, each from where the repetition starts."""
    fitted = []
    for i, (shard, key) in enumerate(zip(shards, keys, strict=True)):
        fitted.append(
            surrogates.sampled(
                key,
                posterior,
                shard.data,
                config.surrogate_step_size,
                config.num_surrogate_samples,
                structure="diagonal",
                position=jax.tree.map(lambda leaf, i=i: leaf[i], starts),
                batch_size=config.batch_size,
                prior_fraction=config.prior_fraction,
                check="ignore",
            )
        )
    return repetitions.stack(fitted)
