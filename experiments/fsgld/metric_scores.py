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

from experiments import figures, output
from experiments.fsgld import repetitions, spreads
from experiments.fsgld.metric_model import Pairs, loglikelihood

__all__ = [
    "PAPER",
    "SHOWS_TABLE",
    "WHERE",
    "Bars",
    "about",
    "bars",
    "commentary",
    "curves",
    "draw",
    "from_pooled",
    "of_their_gaps",
    "reference_draws",
    "score",
    "shown",
    "summarise",
]

SHOWS_TABLE = True  # of a run: the commentary does

PAPER = """
Pairs of spoken letters (isolet), 5000 of the same letter and 5000 of different ones, in ten shards
that share no letter; a logistic model of the Mahalanobis distance `A = sum_k gamma_k v_k v_k'`,
dense Gaussian surrogates from 3000 local samples. Figure 5 (without numbers in the text) shows
the average log likelihood of learning pairs and of 1000 held-out pairs against the number of
samples: FSGLD gets higher, sooner, and with less spread over ten repetitions than DSGLD.

Not stated in the paper, and chosen here: ten eigenvectors; squared projections scaled so that an
average pair has distance one at `gamma = 1`; a prior with standard deviation 10; a start at zero;
ten local updates a visit; 5000 rounds, of which 1000 are burn-in; a label of -1 for different
letters (the paper prints 0, for which the probabilities of the two outcomes do not sum to one). The
paper's step size `h = 1e-3` is kept. Every repetition has new pairs and shares the letters anew;
whether the paper's ten seeds do so, our copy does not say.

FSGLD depends on its surrogates, and three choices of ours are made for it, so that its verdicts
hold under them. Local samples are taken with ten times the relay's step size, and nine of ten are
left out; `metric_plain` shows what becomes of FSGLD with the relay's own and all of them kept.
Local samples are of a shard's likelihood times a tenth of the prior, which is divided out again;
the paper's density for them has no prior, and that of a separable shard cannot be normalized. Last,
the library's checks for improper local likelihoods are off, since the letters of some shards are
nearly separable.

Each surrogate is a parabola, the logistic log likelihood is not: where a shard's own pairs are
classified with certainty its curvature vanishes, and that of the conducive term does not. Whether
that is why chains run away was not measured. `metric_laplace` expands at the local
maxima (appendix F.2), `metric_taylor` at the maximum of all pairs, which needs no proper local
likelihood. `metric_start` keeps every round of the first hundred.

"+-" in the tables is the standard deviation over the repetitions, with one less than their number
as its divisor, as everywhere on this page. It is not a standard error.
"""


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


def shown(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a record from its values by repetition.

    Tables in older records have standard deviations that are divided by the number of repetitions.
    """
    methods = metrics["methods"]
    finite = {
        name: np.isfinite(np.array([of["learn"], of["test"]], float)).all(axis=0)
        for name, of in methods.items()
    }
    return [_row(name, methods, finite[name]) for name in methods]


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
    since = "the end of burn-in, grey line" if end else "the first"
    caption = (
        "Figure 5: average log likelihood against the number of samples (left: of each sample; "
        f"right: of the predictive probability averaged since {since}), mean "
        "and standard deviation over the repetitions. Below: the difference of the two methods on "
        "the same pairs, with two standard errors."
    )
    finite = int(np.isfinite(np.array(metrics["methods"]["FSGLD"]["test"], float)).sum())
    if not finite:
        caption += " FSGLD diverged in all repetitions: it has no curve, and no difference."
    elif finite < len(metrics["methods"]["FSGLD"]["test"]):
        caption += (
            f" FSGLD stayed finite in {finite} of the repetitions, and its curves are of those "
            "alone: of other pairs than the other methods' curves."
        )
    if finite == 1:
        caption += " The difference is that of one repetition, and has no standard error."
    return [{"file": "log_likelihood.png", "caption": caption}]


def about(config: Mapping[str, Any], metrics: dict[str, Any]) -> str:
    """Return which rows of a run's table are over fewer repetitions than the others."""
    num = config["num_repetitions"]
    return " ".join(
        f"{row['method']} diverged in {row['diverged']} of {num} repetitions."
        if row["diverged"] == num
        else f"{row['method']} diverged in {row['diverged']} of {num} repetitions. Its row shows "
        f"the remaining {num - row['diverged']}. It cannot be compared with rows over all {num}, "
        "because each repetition has pairs of its own."
        for row in metrics["table"]
        if row["diverged"]
    )


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report, and its table."""
    told = output.markdown_table(shown(metrics))
    folded = f"<details><summary>All numbers</summary>\n\n{told}\n\n</details>"
    return f"{_conclusions(metrics)}\n\n{folded}"


def _conclusions(metrics: dict[str, Any]) -> str:
    kept = _both_finite(metrics)
    if kept.sum() < 2:
        return (
            f"Both methods are finite in {kept.sum()} of the repetitions, too few to compare them."
        )
    # A chain that was lost has finite accuracies, which say nothing.
    of = {
        name: {k: np.array(v, float)[kept] for k, v in values.items()}
        for name, values in metrics["methods"].items()
    }
    better = {k: of["FSGLD"][k] - of["DSGLD"][k] for k in of["FSGLD"] if k in of["DSGLD"]}
    where = "" if kept.all() else f"In the {kept.sum()} repetitions that neither method lost "
    text = (
        f"{where}FSGLD's samples are better than DSGLD's on the same pairs, by "
        f"{_paired(better['learn'])} nats per learning pair and {_paired(better['test'])} per "
        "held-out pair; averaged over the samples, the predictive probabilities differ by "
        f"{_paired(better['learn_predictive'], 4)} and {_paired(better['test_predictive'], 4)}, "
        f"the accuracies by {_paired(better['learn_accuracy'], 4)} and "
        f"{_paired(better['test_accuracy'], 4)}. "
        "The standard errors are those of differences within a repetition. "
    )
    if "NUTS" in of:
        gap, wide = (
            {k: of[k][name].mean() for k in ("DSGLD", "FSGLD")}
            for name in ("mean_off_sds", "sd_ratio_max")
        )
        text += (
            f"Neither samples the posterior at this step size: the worst posterior mean is off by "
            f"{gap['DSGLD']:.1f} (DSGLD) and {gap['FSGLD']:.1f} (FSGLD) standard deviations of "
            f"pooled NUTS, the worst standard deviation {wide['DSGLD']:.0f} and "
            f"{wide['FSGLD']:.0f} times too large. "
        )
        text += _spreads(of, metrics)
    return text


WHERE = {"learn": "learning pairs", "test": "pairs held out"}


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
    for key in WHERE:
        curve = metrics["curves"][key]
        after = np.array(curve["at"]) >= metrics["burnin"]
        one, other = (np.array(curve[m]["spread"])[after] for m in ("FSGLD", "DSGLD"))
        found[key] = Bars(float(one.mean()), float(other.mean()), float((one < other).mean()))
    return found


def _both_finite(metrics: Mapping[str, Any]) -> np.ndarray:
    """Return which repetitions neither method lost."""
    scores = [metrics["methods"][m][k] for m in ("FSGLD", "DSGLD") for k in WHERE]
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
        for key in WHERE
    }


def of_their_gaps(metrics: Mapping[str, Any]) -> str:
    """Return spreads of the differences from pooled NUTS beside how large these are."""
    told = []
    for key, gaps in from_pooled(metrics).items():
        each = []
        for method, gap in gaps.items():
            each.append(f"{gap.std(ddof=1):.4f} of {abs(gap.mean()):.3f} nats ({method})")
        told.append(f"{' and '.join(each)} on {WHERE[key]}")
    return "; ".join(told)


def _spreads(of: Mapping[str, Mapping[str, np.ndarray]], metrics: Mapping[str, Any]) -> str:
    """Return how spreads over repetitions compare, with the pairs' part and without it."""

    def deviation(method: str, key: str) -> float:
        return float(of[method][key].std(ddof=1))

    own = [
        f"{', '.join(f'{deviation(m, k):.3f}' for m in ('FSGLD', 'DSGLD'))} and "
        f"{deviation('NUTS', k):.3f} on {name}"
        for k, name in WHERE.items()
    ]
    less = [
        f"{spreads.compare(gaps['FSGLD'], gaps['DSGLD'])} on {WHERE[k]}"
        for k, gaps in from_pooled(metrics).items()
    ]
    single = [
        f"{bar.FSGLD:.3f} and {bar.DSGLD:.3f} on {WHERE[k]}, where FSGLD's is the smaller at "
        f"{output.percent(bar.smaller)} of the points"
        for k, bar in bars(metrics).items()
    ]
    told = (
        " The error bars of Figure 5, which are of single samples, average "
        f"{', and '.join(single)} (FSGLD and DSGLD, after burn-in)."
        if single
        else ""
    )
    return (
        "Standard deviations over the repetitions are, of FSGLD, DSGLD and pooled NUTS, "
        f"{' and '.join(own)}. Pooled NUTS has no shards to visit, so most of FSGLD's is that "
        "between pairs. Of what each method differs from pooled NUTS on the same pairs, "
        f"FSGLD's standard deviation over DSGLD's is {' and '.join(less)}. DSGLD lies further from "
        "pooled NUTS, and a larger gap varies more: the standard deviations are "
        f"{of_their_gaps(metrics)}. These are of averages over all samples after burn-in." + told
    )


def _paired(differences: np.ndarray, digits: int = 3) -> str:
    """Return the mean of differences within repetitions, and its standard error."""
    kept = differences[np.isfinite(differences)]
    if len(kept) < 2:
        return f"{differences.mean():.{digits}f}"
    error = kept.std(ddof=1) / np.sqrt(len(kept))
    return f"{kept.mean():.{digits}f} (s.e. {error:.{digits}f})"
