"""What the network experiment measures: log likelihoods of draws, table 1, the figure."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import figures
from experiments.fsgld.mlp_model import Shards

__all__ = [
    "SURROGATES",
    "TABLES",
    "add_visited",
    "curves",
    "draw",
    "score",
    "summarise",
]

SPLITS = {"iid": "IID", "non_iid": "non-IID"}
CONSTANT = 1e-3  # a network whose probabilities vary less over the test rows ignores its input
SURROGATES = ("sampled", "fisher", "fisher_dense", "empirical")

TABLES = {"susy": "SUSY", "covtype": "Covertype"}


def score(posterior: fedmcmc.Posterior, draws: Any, shards: list[Shards]) -> dict[str, np.ndarray]:
    """Return curves ``[num_repetitions, num_kept, 4]`` over the draws of `four_local_states`.

    ``train`` and ``test`` are average log likelihoods, ``shards`` those of every shard, with one
    more axis. ``spread`` is the standard deviation of the probability of a test row's label 1.
    """
    train = jnp.asarray(np.stack([s.train for s in shards]))
    test = jnp.asarray(np.stack([s.test for s in shards]))

    def of_draw(position: Any, train_: Array, test_: Array) -> dict[str, Array]:
        per_shard = posterior.loglikelihood_fn(position, train_.ravel()).reshape(train_.shape)
        terms = posterior.loglikelihood_fn(position, test_)
        return {
            "shards": per_shard.mean(axis=1),
            "test": terms.mean(),
            "accuracy": (terms > jnp.log(0.5)).mean(),
            "spread": _label_one(terms, posterior, test_).std(),
        }

    @jax.jit
    def of_all(draws_: Any, train_: Array, test_: Array) -> dict[str, Array]:
        def of_repetition(both: Any) -> dict[str, Array]:
            return jax.lax.map(
                lambda four: jax.vmap(lambda p: of_draw(p, both[1], both[2]))(four), both[0]
            )

        return jax.lax.map(of_repetition, (draws_, train_, test_))

    curves = jax.tree.map(np.asarray, of_all(draws, train, test))
    return {"train": curves["shards"].mean(axis=-1), **curves}


def _label_one(terms: Array, posterior: fedmcmc.Posterior, rows: Array) -> Array:
    """Return each row's probability of label 1 from the log likelihood of its own label."""
    labels = posterior.loglikelihood_fn.args[0].labels[rows]
    return jnp.where(labels == 1, jnp.exp(terms), 1 - jnp.exp(terms))


def add_visited(scores: dict[str, np.ndarray], visited: np.ndarray) -> None:
    """Add the average log likelihood of the shard that the chain was at, ``visited``."""
    index = visited[:, :, None, None]
    scores["visited"] = np.take_along_axis(scores["shards"], index, axis=-1)[..., 0]


def summarise(scores: dict[str, Any], burnin: int) -> dict[str, Any]:
    """Return means and standard deviations over repetitions.

    A repetition has diverged if any of its draws gives a log likelihood that is not finite; the
    table leaves such repetitions out and counts them.
    """
    table, values = [], {}
    for split, methods in scores.items():
        for method, curves in methods.items():
            good = np.isfinite(curves["test"]).all(axis=(1, 2))
            row: dict[str, Any] = {"split": split, "method": method}
            each = {}
            for name in ("train", "test", "visited", "accuracy"):
                if name in curves:
                    each[name] = curves[name][:, burnin:].mean(axis=(1, 2))
                row[name] = _mean_sd(each[name][good]) if name in each and good.any() else "-"
            constant = (curves["spread"][:, burnin:] < CONSTANT).mean(axis=(1, 2))
            row["ignores input"] = f"{constant[good].mean():.0%}" if good.any() else "-"
            row["diverged"] = int((~good).sum())
            table.append(row)
            values[f"{split} {method}"] = each | {"constant": constant}
    return {"table": table, "values": values}


def _mean_sd(values: np.ndarray) -> str:
    """Return a cell; a chain that ran off to finite values is told by its order of magnitude."""
    digits = ".3f" if abs(values.mean()) < 1000 else ".0e"
    spread = f" +- {values.std(ddof=1):{digits}}" if values.size > 1 else ""
    return f"{values.mean():{digits}}{spread}"


def curves(scores: dict[str, Any]) -> dict[str, Any]:
    """Return what the figure shows: quantiles over the repetitions that did not diverge."""
    found: dict[str, Any] = {}
    for split, methods in scores.items():
        found[split] = {}
        for method, of in methods.items():
            found[split][method] = {}
            for name in ("test", "visited"):
                if name not in of:
                    continue
                curve = of[name].mean(axis=-1)
                kept = figures.some(curve.shape[1])
                curve = curve[np.isfinite(curve).all(axis=1)][:, kept]
                if len(curve):
                    found[split][method][name] = {
                        "at": kept,
                        "quantiles": np.quantile(curve, [0.1, 0.5, 0.9], axis=0),
                    }
    return found


FLOOR = -1000.0  # nats a row: a curve that falls below it is of a chain that ran off
STYLE = {"DSGLD": ("red", "-"), "FSGLD": ("blue", "--"), "pooled SGLD": ("black", "-.")}


def draw(metrics: dict[str, Any], out: pathlib.Path) -> list[dict[str, str]]:
    """Draw the held-out log likelihood against the number of local steps, per kind of shard."""
    left_out = [
        (split, method)
        for split, methods in metrics["curves"].items()
        for method, of in methods.items()
        if "test" in of and np.min(of["test"]["quantiles"]) < FLOOR
    ]
    with figures.figure(out / "log_likelihood.png", 2, 2, sharex=True, sharey="row") as (_, axes):
        for column, (split, methods) in enumerate(metrics["curves"].items()):
            for method, of in methods.items():
                color, line = STYLE[method]
                for row, name in enumerate(("test", "visited")):
                    if name not in of or (split, method) in left_out:
                        continue
                    at = (np.array(of[name]["at"]) + 1) * metrics["steps_a_draw"]
                    low, middle, high = np.array(of[name]["quantiles"], float)
                    shade = figures.COLORS[color]
                    place = axes[row, column]
                    place.plot(at, middle, color=shade, ls=line, label=method, lw=1.2)
                    place.fill_between(at, low, high, color=shade, alpha=0.15, lw=0)
            for ax in axes[:, column]:
                ax.axhline(np.log(0.5), color="grey", ls=":", lw=1, label="a coin toss")
            axes[0, column].set_title(f"{SPLITS[split]} shards")
            axes[1, column].set_xlabel("local steps")
        axes[0, 0].set_ylabel("held-out log likelihood")
        axes[1, 0].set_ylabel("log likelihood of the shard visited")
        # Log likelihoods of labels are at most zero.
        axes[0, 0].set_ylim(max(axes[0, 0].get_ylim()[0], -4), 0.05)
        axes[0, 0].legend()
    caption = (
        "Average log likelihood against the number of local steps, of held-out rows and of rows of "
        "the shard visited: median and 80 % band over the repetitions, and log(1/2). Curves that "
        "diverged are left out."
    )
    return [{"file": "log_likelihood.png", "caption": caption}]
