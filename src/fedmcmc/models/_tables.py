"""Tables of a formula model: coefficients, spreads, effects of groups, and words about them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import Verdict, mixing
from fedmcmc.models._draws import EffectDraws, cor_names, shared_effects
from fedmcmc.models._priors import sd_names

BATCH_SIZE = 8
"""Number of parameters per call of `mixing`, which never leaves any of 8 out."""
MAX_GROUPS = 80
"""Number of rows of a forest plot; its table has all groups."""


def pandas() -> Any:
    """Return the package pandas."""
    try:
        import pandas as pd
    except ImportError as error:
        raise missing_extra_error("Tables of a formula model need pandas", "models") from error
    return pd


def num_rows(table: Any) -> int:
    """Return the number of rows of a table of pandas or Polars."""
    import narwhals as nw

    return len(nw.from_native(table, eager_only=True))


def check_prob(prob: float) -> tuple[float, float]:
    """Return the lower and upper probability of a central interval."""
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie between 0 and 1, got {prob!r}.")
    return (1 - prob) / 2, (1 + prob) / 2


def describe(values: np.ndarray, prob: float) -> dict[str, float]:
    """Return mean, median, sd and the limits of the central interval of draws of any shape."""
    low, high = check_prob(prob)
    flat = np.ravel(values)
    lower, median, upper = np.quantile(flat, [low, 0.5, high])
    columns = {"mean": flat.mean(), "median": median, "sd": flat.std()}
    columns |= {_percent(low): lower, _percent(high): upper}
    return {name: float(x) for name, x in columns.items()}


def _percent(probability: float) -> str:
    return f"{100 * probability:.4g} %"


def summary_table(
    draws: Mapping[str, np.ndarray],
    coefficients: Iterable[str],
    verdict: Verdict,
    prob: float,
    ratio: str = "",
) -> Any:
    """Return the table of `ModelFit.summary`.

    `coefficients` are the names of intercept and slopes; with `ratio`, their draws become
    exponentials, and other parameters are left out.
    """
    names = set(coefficients)
    shown = {name: x for name, x in draws.items() if name in names or not ratio}
    if not shown:  # an ordinal model without covariates
        return pandas().DataFrame()
    rows = []
    for name, values in shown.items():
        row = describe(np.exp(values) if ratio else values, prob)
        positive = float(np.mean(values > 0)) if name in names else np.nan
        rows.append(row | {"P(>1)" if ratio else "P(>0)": positive})
    frame = pandas().DataFrame(rows, index=list(shown))
    frame.index.name = "parameter"
    stacked = np.stack(list(shown.values()), -1)
    if len(stacked) > 1:
        parts = [
            mixing(stacked[..., i : i + BATCH_SIZE])
            for i in range(0, stacked.shape[-1], BATCH_SIZE)
        ]
        frame["ESS"] = np.concatenate([part.ess_bulk for part in parts])
        frame["ESS tail"] = np.concatenate([part.ess_tail for part in parts])
        frame["R-hat"] = np.concatenate([part.rhat for part in parts])
    else:  # draws by importance are resampled, and form one chain
        frame["ESS"] = verdict.ess
        frame["k-hat"] = verdict.k_hat
    return frame.dropna(axis=1, how="all")


def spread_table(draws: Mapping[str, np.ndarray], design: Any, prob: float) -> Any:
    """Return sds and correlations of random effects, one row each."""
    rows = []
    for term in design.terms:
        names = {name: ("sd", x) for name, x in zip(sd_names(term), term.names, strict=True)}
        names |= {
            name: ("correlation", f"{term.names[i]}, {term.names[j]}")
            for name, (i, j) in cor_names(term).items()
        }
        for name, (kind, effect) in names.items():
            if name in draws:
                place = dict(group=term.label, kind=kind, effect=effect)
                rows.append(place | describe(draws[name], prob))
    return pandas().DataFrame(rows)


def effect_table(design: Any, effects: EffectDraws, labels: Any, prob: float) -> Any:
    """Return the effects of all groups and shared levels, one row each."""
    rows = []
    for term in design.terms:
        if term.kind == "shared":
            draws = shared_effects(term, effects.values)
            places = [(None, level, draws[:, i]) for i, level in enumerate(term.levels)]
        else:
            latents = effects.latents
            assert latents is not None
            draws, groups = effects.of_term(term), latents.group_labels
            places = [
                (labels[i], None if groups is None else groups[i][j], draws[:, i, j])
                for i, j in np.argwhere(latents.mask)
            ]
        for client, group, values in places:
            for k, name in enumerate(term.names):
                place = dict(term=term.label, client=client, group=group, effect=name)
                rows.append(place | describe(values[:, k], prob))
    return pandas().DataFrame(rows)


class Forest(NamedTuple):
    """Figure and table of `ModelFit.forest`."""

    figure: Any
    table: Any


def forest_table(
    population: np.ndarray,
    effects: Mapping[Any, np.ndarray],
    unpooled: Mapping[Any, np.ndarray],
    new: np.ndarray,
    prob: float,
) -> Any:
    """Return intervals of each group, of the population and of a new group."""
    rows = []
    for label, values in effects.items():
        alone = unpooled.get(label)
        if alone is not None and np.isfinite(alone).all():
            rows.append(dict(group=label, kind="its rows alone") | describe(alone, prob))
        rows.append(dict(group=label, kind="with all groups") | describe(values, prob))
    rows.append(dict(group="population", kind="population") | describe(population, prob))
    rows.append(dict(group="new", kind="new group") | describe(new, prob))
    return pandas().DataFrame(rows)


def forest_figure(table: Any, title: str, axis_label: str, reference: float) -> Any:
    """Return a matplotlib figure of a result of `forest_table`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra_error("forest needs matplotlib", "plots") from error
    groups = list(dict.fromkeys(table["group"]))
    groups = groups[: MAX_GROUPS - 2] + groups[-2:] if len(groups) > MAX_GROUPS else groups
    table = table[table["group"].isin(groups)]
    figure = Figure(figsize=(7, 1.2 + 0.32 * len(groups)), layout="constrained")
    axes = figure.subplots()
    low, high = [name for name in table.columns if str(name).endswith(" %")]
    styles = {"its rows alone": (-0.15, "0.6", "o"), "with all groups": (0.15, "C0", "s")}
    for kind, part in table.groupby("kind", sort=False):
        shift, color, marker = styles.get(str(kind), (0.0, "C1", "D"))
        heights = [-groups.index(group) - shift for group in part["group"]]
        axes.hlines(heights, part[low], part[high], color=color)
        axes.plot(part["mean"], heights, marker, color=color, label=kind)
    axes.axvline(reference, color="0.8", zorder=0)
    axes.set_yticks([-i for i in range(len(groups))], [str(group) for group in groups])
    axes.set_xlabel(axis_label)
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def prediction_table(mean: np.ndarray, draws: np.ndarray, prob: float) -> Any:
    """Return the table of `ModelFit.predict` from ``[num_rows, ...]`` and ``[num_draws, ...]``."""
    low, high = check_prob(prob)
    lower, median, upper = np.quantile(draws, [low, 0.5, high], axis=0)
    columns = {"mean": mean, "median": median, "sd": draws.std(0)}
    columns |= {_percent(low): lower, _percent(high): upper}
    frame = pandas().DataFrame({name: np.ravel(x) for name, x in columns.items()})
    if mean.ndim == 1:
        return frame
    frame.insert(0, "row", np.repeat(np.arange(len(mean)), mean.shape[1]))
    frame.insert(1, "category", np.tile(np.arange(mean.shape[1]), len(mean)))
    return frame


def words(frame: Any, ratio: str) -> list[tuple[str, str, str]]:
    """Return name, median with interval, and direction in words, of the rows of a summary.

    `ratio` is the quantity whose ratios the rows are, or empty for differences.
    """
    low, high = [name for name in frame.columns if str(name).endswith(" %")]
    null, quantity, change = (1, ratio, "ratio") if ratio else (0, "outcome", "difference")
    rows = []
    for name, row in frame.iterrows():
        interval = f"{row['median']:.3g} ({row[low]:.3g} to {row[high]:.3g})"
        if row[high] < null:
            direction = f"lower {quantity}"
        elif row[low] > null:
            direction = f"higher {quantity}"
        else:
            direction = f"direction uncertain: the interval contains {null}"
        above = float(row[f"P(>{null})"])
        sign, chance = (">", above) if above > 0.5 else ("<", 1 - above)
        rows.append((str(name), interval, f"{direction}; P({change} {sign} {null}) = {chance:.3f}"))
    return rows
