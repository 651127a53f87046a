"""Words and pages about a formula model: report, forest plot, and methods section of a paper."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import numpy as np

from fedmcmc import hierarchy
from fedmcmc.fitting import Report
from fedmcmc.models import _tables
from fedmcmc.models._draws import local_term, scale_factor, thin
from fedmcmc.models._priors import describe
from fedmcmc.reports import Figure, Page, figures_of, summarize
from fedmcmc.storage import versions

RATIOS = {
    "logit": "odds",
    "log": "rate",
    "cloglog": "hazard",
    "log hazard": "hazard",
    "log time": "time",
}
"""Quantity whose ratio is the exponential of a coefficient, by link."""
MEANS = ("gaussian", "student", "gamma", "beta")
"""Families whose expected outcome is a mean instead of a rate."""
NUM_UNPOOLED = 200
"""Number of draws of the shared parameters for estimates without pooling."""
PAGE_DIGITS = "{:.3g}"


def ratio_of(family: Any) -> str:
    """Return the quantity whose ratios are exponentials of coefficients, or an empty text."""
    quantity = RATIOS.get(family.link, "")
    return "mean" if quantity == "rate" and family.name in MEANS else quantity


@dataclass(frozen=True)
class ModelReport(Report):
    """Report of a fit, with the tables of its formula model.

    Attributes
    ----------
    parts
        Pairs of a heading, and a table's header with rows, or a text.
    """

    parts: tuple[tuple[str, Any], ...] = ()

    def page(self, figures: Sequence[Figure] = ()) -> Page:
        """Return the page that `save` writes."""
        page = super().page(figures)
        tables = Page("")
        for heading, content in self.parts:
            tables.heading(heading)
            if isinstance(content, str):
                tables.paragraph(content)
            else:
                header, rows = content
                tables.table(header, rows, texts=("direction", "kind", "effect", "prior"))
        start = 4 if self.warnings else 2  # after introduction, verdict and warnings
        page.parts[start:start] = tables.parts
        return page


def make_report(fit: Any) -> ModelReport:
    """Return the report of a fit with tables of coefficients, spreads and priors."""
    report = fit.fitted.report
    parts: list[tuple[str, Any]] = [("Model", f"{fit.formula} ({describe_family(fit.family)}).")]
    ratio = ratio_of(fit.family)
    quantity = f"{ratio} ratio" if ratio else "difference"
    if fit.design.names:
        summary = fit.summary(exponentiate=bool(ratio))
        rows = _tables.words(summary.loc[list(fit.design.names)], ratio)
        header = ("coefficient", f"{quantity} (90 % interval)", "direction")
        parts.append((f"{quantity.capitalize()}s", (header, rows)))
    if fit.design.terms:
        parts.append(("Differences between groups", page_table(fit.varcorr())))
    priors = [(name, describe(prior)) for name, prior in fit.priors.items()]
    parts += [("Priors", (("parameter", "prior"), priors)), ("Methods", methods(fit))]
    values = {x.name: getattr(report, x.name) for x in fields(report)}
    values["summary"] = summarize(fit.draws)
    if report.draw_figures is not None:
        has_chains = fit.samples.num_chains > 1
        values["draw_figures"] = partial(figures_of, fit.draws, with_traces=has_chains)
    return ModelReport(**values, parts=tuple(parts))


def page_table(frame: Any) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of a data frame for `Page.table`."""
    if frame.index.name:
        frame = frame.reset_index()

    def cell(value: Any) -> str:
        if isinstance(value, str):
            return value
        return "" if value is None or value != value else PAGE_DIGITS.format(value)

    return tuple(map(str, frame.columns)), [
        tuple(map(cell, row)) for row in frame.itertuples(index=False)
    ]


def describe_family(family: Any) -> str:
    """Return the family and its link in words."""
    return f"{family.name} family, {family.link} link"


def methods(fit: Any) -> str:
    """Return the paragraph of `ModelFit.methods_text`."""
    about = fit.fitted.report.about
    numbers = {**versions(), **{k: v for k, v in fit.samples.versions.items() if v}}
    software = f"fedmcmc {numbers['fedmcmc']} (JAX {numbers['jax']}, NumPy {numbers['numpy']})"
    kind = "Bayesian hierarchical regression" if fit.design.terms else "Bayesian regression"
    priors = "; ".join(f"{name}: {describe(x)}" for name, x in fit.priors.items())
    verdict = fit.verdict
    method = {
        "importance": "importance sampling with Gaussian approximations at the posterior modes",
        "MCMC": "Markov chain Monte Carlo",
        "SMC": "sequential Monte Carlo with tempering",
    }.get(verdict.method, "Gaussian approximations at the posterior modes")
    return (
        f"We fitted the {kind} {fit.formula} ({describe_family(fit.family)}) to "
        f"{int(about['rows']):,} rows of {int(about['clients']):,} sites with {software}. Rows "
        f"stayed at their sites; the server received only sums over sites, and the posterior is "
        f"the posterior of the pooled rows. Priors were {priors}, with continuous covariates "
        f"centered at their means over all sites. Draws came from {method}. The software's checks "
        f"of these draws resulted in the verdict: {str(verdict).rstrip('.')}. We report posterior "
        f"medians and central 90 % intervals."
    )


def forest(fit: Any, effect: str, exponentiate: bool, prob: float) -> _tables.Forest:
    """Return the result of `ModelFit.forest`."""
    term = local_term(fit.design)
    if term is None or effect not in term.names:
        names = "none" if term is None else ", ".join(map(repr, term.names))
        raise ValueError(
            f"effect must be an effect of the groups of clients ({names}), got {effect!r}."
        )
    ratio = ratio_of(fit.family)
    if exponentiate and not ratio:
        raise ValueError("exponentiate=True needs a link whose coefficients are log ratios.")
    effects = fit.effect_draws
    values, latents = effects.values, effects.latents
    assert latents is not None
    direction, average = _direction(fit, term, effect, values)
    factor = scale_factor(term, values)
    rng = np.random.default_rng(0)
    new = np.einsum("sij,sj,i->s", factor, rng.standard_normal(factor.shape[:2]), direction)
    positions = jax.tree.map(lambda leaf: thin(leaf, NUM_UNPOOLED)[None], effects.positions)
    alone = fit._shared_draws(NUM_UNPOOLED)._replace(positions=positions)
    raw = hierarchy.unpooled(fit.posterior, fit._data(), positions, rng_key=jax.random.key(1))
    alone = alone._replace(latents=raw)
    alone_average = thin(average[None], NUM_UNPOOLED)
    pooled, unpooled = {}, {}
    for i, j in np.argwhere(latents.mask):
        label = str(latents.labels[i])
        if latents.group_labels is not None:
            label += f", {latents.group_labels[i][j]}"
        pooled[label] = average + effects.of_term(term)[:, i, j] @ direction
        unpooled[label] = alone_average + alone.of_term(term)[:, i, j] @ direction
    transform = np.exp if exponentiate else np.asarray
    table = _tables.forest_table(
        transform(average),
        {label: transform(x) for label, x in pooled.items()},
        {label: transform(x) for label, x in unpooled.items()},
        transform(average + new),
        prob,
    )
    scale = ratio if exponentiate and effect == "Intercept" else "coefficient"
    scale = f"{ratio} ratio" if exponentiate and effect != "Intercept" else scale
    reference = float(np.mean(transform(average)))
    return _tables.Forest(_tables.forest_figure(table, effect, scale, reference), table)


def _direction(fit: Any, term: Any, effect: str, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights ``[k]`` of a group's effects, and the population's draws ``[num]``.

    The intercept is taken at average covariates, where most rows are.
    """
    design = fit.design
    direction = np.zeros(len(term.names))
    direction[term.names.index(effect)] = 1
    if effect != "Intercept":
        if effect in design.names:
            slope = np.asarray(values["b"], np.float64)[:, list(design.names).index(effect)]
        else:
            slope = np.zeros(len(next(iter(values.values()))))
        return direction, slope
    for i, name in enumerate(term.names):
        if name in design.names:
            direction[i] = design.centers[list(design.names).index(name)]
    zeros = np.zeros(len(next(iter(values.values()))))
    return direction, np.asarray(values.get("Intercept", zeros), np.float64)
