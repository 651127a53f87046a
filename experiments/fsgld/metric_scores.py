"""What the metric learning experiment measures: curves, distances to pooled NUTS, the figure."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist

from experiments import figures
from experiments.fsgld import repetitions
from experiments.fsgld.metric_model import Pairs, loglikelihood

__all__ = [
    "PAIRS",
    "Bars",
    "bars",
    "curves",
    "draw",
    "from_pooled",
    "reference_draws",
    "score",
    "summarise",
]


def score(
    draws: dict[str, np.ndarray], learn: Pairs, test: Pairs, burnin: int
) -> dict[str, np.ndarray]:
    """Return curves ``[num_repetitions, num_kept]`` over the draws.

    ``learn`` and ``test`` are the average log likelihoods of each draw, ``*_predictive`` those of
    the running average of the predictive probabilities from the end of burn-in on, ``*_accuracy``
    the share of pairs that this average gets right.
    """
    curves: dict[str, np.ndarray] = {}
    for name, pairs in (("learn", learn), ("test", test)):
        single, predictive, accuracy = jax.lax.map(
            lambda args: _curves(burnin, *args), (draws, pairs)
        )
        curves[name] = np.asarray(single)
        curves[f"{name}_predictive"] = np.asarray(predictive)
        curves[f"{name}_accuracy"] = np.asarray(accuracy)
    return curves


@jax.jit
def _log_probabilities(draws: dict[str, Array], pairs: Pairs) -> Array:
    return jax.vmap(loglikelihood, in_axes=(0, None))(draws, pairs)


def _curves(burnin: int, draws: dict[str, Array], pairs: Pairs) -> tuple[Array, Array, Array]:
    terms = _log_probabilities(draws, pairs)  # [num_kept, num_pairs]
    kept = terms[burnin:]
    counts = jnp.arange(1, kept.shape[0] + 1)[:, None]
    running = jax.lax.cumlogsumexp(kept, axis=0) - jnp.log(counts)
    right = running > jnp.log(0.5)
    return terms.mean(axis=1), running.mean(axis=1), right.mean(axis=1)


def reference_draws(
    rng_key: Array, learn: Pairs, num_draws: int, prior_scale: float
) -> dict[str, np.ndarray]:
    """Draw from the posterior of all pairs pooled by NUTS, a repetition at a time."""

    def model(features: Array, sign: Array) -> None:
        normal = dist.Normal(0.0, prior_scale)
        gamma = numpyro.sample("gamma", normal.expand([learn.features.shape[-1]]).to_event(1))
        mu = numpyro.sample("mu", normal)
        terms = loglikelihood({"gamma": gamma, "mu": mu}, Pairs(features, sign))
        numpyro.factor("pairs", terms.sum())

    mcmc = numpyro.infer.MCMC(
        numpyro.infer.NUTS(model),
        num_warmup=num_draws,
        num_samples=num_draws,
        progress_bar=False,
        jit_model_args=True,
    )
    draws = []
    for i, key in enumerate(jax.random.split(rng_key, learn.sign.shape[0])):
        mcmc.run(key, learn.features[i], learn.sign[i])
        draws.append(mcmc.get_samples())
    return jax.tree.map(np.asarray, repetitions.stack(draws))


def summarise(
    draws: dict[str, dict[str, np.ndarray]],
    scores: dict[str, dict[str, np.ndarray]],
    burnin: dict[str, int],
) -> dict[str, Any]:
    """Return the final values of every curve a repetition, and the distance to the reference.

    The table has means and standard deviations over the repetitions that did not diverge.
    """
    methods: dict[str, dict[str, Any]] = {}
    for name, curves in scores.items():
        each = {k: curves[k][:, burnin[name] :].mean(axis=1) for k in ("learn", "test")}
        methods[name] = each | {k: v[:, -1] for k, v in curves.items() if k not in each}
        if "NUTS" in draws and name != "NUTS":
            kept = _flat(draws[name])[:, burnin[name] :]
            methods[name] |= _distance(kept, _flat(draws["NUTS"]))
    good = {name: np.isfinite(_flat(of)).all(axis=(1, 2)) for name, of in draws.items()}
    table = [_row(name, methods, good[name]) for name in methods]
    return {"table": table, "methods": methods}


def _row(name: str, methods: Mapping[str, Mapping[str, Any]], good: np.ndarray) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name}
    for column in methods["FSGLD"]:
        value = np.array(methods[name].get(column, np.full(len(good), np.nan)), float)[good]
        value = value[np.isfinite(value)]
        spread = f" +- {value.std(ddof=1):.4f}" if value.size > 1 else ""
        row[column] = f"{value.mean():.4f}{spread}" if value.size else "-"
    return row | {"diverged": int((~good).sum())}


def _flat(draws: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([draws["gamma"], draws["mu"][..., None]], axis=-1)


def _distance(draws: np.ndarray, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Worst over parameters of each repetition: means in reference sds, and ratios of sds."""
    sd = reference.std(axis=1)
    gap = np.abs(draws.mean(axis=1) - reference.mean(axis=1)) / sd
    ratio = draws.std(axis=1) / sd
    return {
        "mean_off_sds": gap.max(axis=1),
        "sd_ratio_min": ratio.min(axis=1),
        "sd_ratio_max": ratio.max(axis=1),
    }


def curves(scores: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return what the figure shows: means and spreads over repetitions that did not diverge.

    ``DSGLD`` and ``FSGLD`` have means and standard deviations, ``difference`` (FSGLD less DSGLD, on
    the same pairs) means and standard errors, ``NUTS`` its level.
    """
    found: dict[str, Any] = {}
    for name in PANELS:
        both = {m: scores[m][name] for m in ("DSGLD", "FSGLD")}
        kept = figures.some(both["FSGLD"].shape[1])
        of = {m: _spread(values[:, kept], error=False) for m, values in both.items()}
        of["difference"] = _spread((both["FSGLD"] - both["DSGLD"])[:, kept], error=True)
        if "NUTS" in scores:
            curve = scores["NUTS"][name]
            level = curve[:, -1] if name.endswith("_predictive") else curve.mean(axis=1)
            of["NUTS"] = float(level.mean())
        # Predictive curves begin where burn-in ends.
        of["at"] = kept + scores["FSGLD"]["learn"].shape[1] - both["FSGLD"].shape[1]
        found[name] = of
    return found


PANELS = ("learn", "test", "learn_predictive", "test_predictive")


def _spread(values: np.ndarray, *, error: bool) -> dict[str, np.ndarray] | None:
    values = values[np.isfinite(values).all(axis=1)]
    if not len(values):
        return None
    deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return {"mean": values.mean(axis=0), "spread": deviation / len(values) ** (0.5 * error)}


def draw(metrics: dict[str, Any], path: pathlib.Path) -> list[dict[str, str]]:
    """Draw log likelihoods against the number of samples, as Figure 5, and paired differences."""
    per_draw, end = metrics["samples_a_draw"], metrics["burnin"] * metrics["samples_a_draw"]
    with figures.figure(path / "log_likelihood.png", 2, 4, (3.2, 2.7), sharex=True) as (_, axes):
        for column, name in enumerate(PANELS):
            of = metrics["curves"][name]
            samples = (np.array(of["at"]) + 1) * per_draw
            above, below = axes[:, column]
            for method, color in (("DSGLD", "red"), ("FSGLD", "blue")):
                if of[method] is not None:
                    style = dict(color=figures.COLORS[color], label=method)
                    figures.band(above, samples, of[method]["mean"], of[method]["spread"], **style)
            if "NUTS" in of:
                above.axhline(of["NUTS"], color="black", ls="-.", lw=1, label="pooled NUTS")
            above.set_ylim(bottom=max(above.get_ylim()[0], -1))
            if of["difference"] is not None:
                mean, error = (np.array(of["difference"][k]) for k in ("mean", "spread"))
                figures.band(below, samples, mean, 2 * error, color=figures.COLORS["green"])
                after = samples > end + 0.1 * (samples[-1] - end)  # the first averages vary most
                if after.any():
                    low = min((mean - 2 * error)[after].min(), 0.0)
                    high = max((mean + 2 * error)[after].max(), 0.0)
                    below.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))
            below.axhline(0, color="grey", lw=0.8)
            for place in (above, below) if end else ():
                place.axvline(end, color="grey", lw=0.6)
            below.set_xlabel("number of samples")
            pairs = "learning" if name.startswith("learn") else "held-out"
            what = "predictive" if name.endswith("_predictive") else "each sample"
            above.set_title(f"{pairs} pairs, {what}")
        axes[0, 0].set_ylabel("average log likelihood")
        axes[1, 0].set_ylabel("FSGLD less DSGLD")
        axes[0, 0].legend()
    caption = (
        "Figure 5: average log likelihood against the number of samples (left: of each sample; "
        "right: of the predictive probability averaged since the end of burn-in, gray line), mean "
        "and standard deviation over the repetitions that did not diverge. Below: the difference "
        "of the two methods on the same pairs, with two standard errors."
    )
    return [{"file": "log_likelihood.png", "caption": caption}]


PAIRS = {"learn": "learning", "test": "held_out"}


class Bars(NamedTuple):
    """The error bars of Figure 5 after burn-in: standard deviations over the repetitions.

    Attributes
    ----------
    FSGLD, DSGLD
        Their means over the points of the curve.
    smaller
        At which share of the points FSGLD's is the smaller.
    """

    FSGLD: float
    DSGLD: float
    smaller: float


def bars(metrics: Mapping[str, Any]) -> dict[str, Bars]:
    """Return the bars of both methods, by kind of pairs; none where they lost repetitions.

    Curves are of the repetitions that are left, so that the bars would be of other pairs.
    """
    if not _both_finite(metrics).all():
        return {}
    found = {}
    for key in PAIRS:
        curve = metrics["curves"][key]
        after = np.array(curve["at"]) >= metrics["burnin"]
        one, other = (np.array(curve[m]["spread"])[after] for m in ("FSGLD", "DSGLD"))
        found[key] = Bars(float(one.mean()), float(other.mean()), float((one < other).mean()))
    return found


def _both_finite(metrics: Mapping[str, Any]) -> np.ndarray:
    """Return which repetitions neither method lost."""
    scores = [metrics["methods"][m][k] for m in ("FSGLD", "DSGLD") for k in PAIRS]
    finite: np.ndarray = np.isfinite(np.array(scores, float)).all(axis=0)
    return finite


def from_pooled(metrics: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Return how far each method is from pooled NUTS on the same pairs, by kind of pairs.

    Of repetitions that neither method lost.
    """
    of, kept = metrics["methods"], _both_finite(metrics)
    return {
        key: {
            m: (np.array(of[m][key], float) - np.array(of["NUTS"][key], float))[kept]
            for m in ("FSGLD", "DSGLD")
        }
        for key in PAIRS
    }
