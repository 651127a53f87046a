"""Result of a fit."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedmcmc.data import in_words
from fedmcmc.diagnostics import Verdict
from fedmcmc.exact import Corrected
from fedmcmc.fitting._report import Report, StageReport
from fedmcmc.fitting._saving import restore_fitted, store_fitted
from fedmcmc.gaussian import Gaussian
from fedmcmc.records import Samples, SavedResult, write_netcdf
from fedmcmc.reports import Figure, figures_of, histogram, summarize
from fedmcmc.runs import Consortium, SimulatedConsortium
from fedmcmc.storage import versions
from fedmcmc.types import Federation, Posterior, WithFunctions


@dataclass(frozen=True, repr=False)
class Fitted(WithFunctions):
    """Draws from a posterior with a verdict on their quality.

    Attributes
    ----------
    samples
        `Samples` of equal weight: ``.draws``, ``.constrained``, ``.to_datatree()``. Importance
        draws are resampled and form one chain.
    verdict
        `fedmcmc.diagnostics.Verdict`: a sentence that begins with ``passed``, ``doubtful``,
        ``approximate`` or ``failed``, with attributes ``.kind``, ``.k_hat``, ``.error``, ....
    log_evidence, log_evidence_sd
        Log of ``p(data)`` in nats, and its standard error; NaN if no correction passed or if a
        prior is improper. Correct if log prior and log likelihood are normalized, as in a model
        from `fedmcmc.from_numpyro`.
    report
        Report on the stages: ``print(fitted.report)``, ``.save(path)`` for a page, ``.to_dict()``.
    posterior
        Model as a `Posterior`, for `fedmcmc.criticism`.
    corrected
        Weighted draws from which `samples` were resampled, or ``None`` for other methods.
    gaussian
        Laplace approximation at the highest mode, over sampled positions, or ``None``.
    """

    samples: Samples
    verdict: Verdict
    log_evidence: float
    log_evidence_sd: float
    report: Report
    posterior: Posterior
    corrected: Corrected | None = field(default=None)
    gaussian: Gaussian | None = field(default=None)

    FUNCTIONS: ClassVar[dict[str, str]] = {"posterior": ""}

    def __repr__(self) -> str:
        """Return the report and a summary of the parameters."""
        lines = [str(self.report), ""]
        for name, row in self.report.summary.items():
            lines.append(
                f"{name}: {row['mean']:.4g} (sd {row['sd']:.2g}), 90 % in "
                f"[{row['5 %']:.4g}, {row['95 %']:.4g}]"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the report as HTML, for notebooks."""
        return self.report.page().body

    def save(self, path: str | Path) -> Path:
        """Write draws, verdict, evidence and report to a NetCDF file, for `fedmcmc.load`.

        ArviZ reads the file, too. It contains no rows, no functions, and no weighted draws
        (`corrected`); `samples` are draws of equal weight.

        Parameters
        ----------
        path
            Path of the file, such as ``"fit.nc"``; missing folders are created.

        Raises
        ------
        ImportError
            If the extra ``arviz`` is not installed.
        ValueError
            If draws have containers other than dictionaries, lists and tuples.
        """
        return write_netcdf(path, store_fitted(self), self.samples.to_datatree())

    @classmethod
    def from_saved(cls, saved: SavedResult, posterior: Posterior | None = None) -> "Fitted":
        """Return the fit in the content of a file, with the functions of `posterior`."""
        return restore_fitted(cls, saved, posterior, _draw_figures)


def describe(fitted: Fitted, consortium: Consortium, settings: dict[str, Any]) -> Fitted:
    """Return a fit that lists clients, codes, outcome and the settings of the call."""
    facts: dict[str, Any] = {}
    if isinstance(consortium, SimulatedConsortium):
        facts = in_words(consortium.data)
    elif type(consortium).__repr__ is not object.__repr__:  # `deploy.Sites` lists its sites
        facts = {"sites": str(consortium)}
    if fitted.posterior.observed:
        facts["outcome"] = fitted.posterior.observed
    facts["fit"] = ", ".join(f"{name}={x!r}" for name, x in settings.items() if x is not None)
    report, samples = fitted.report, fitted.samples
    # The samples of a single stage already contain its cost.
    cost = {"cost": report.cost} if len(report.stages) > 1 else {}
    return replace(
        fitted,
        report=replace(report, about=facts | report.about),
        samples=replace(samples, settings=facts | samples.settings, stopped=samples.stopped | cost),
    )


def make_report(
    stages: tuple[StageReport, ...],
    verdict: Verdict,
    samples: Samples,
    federation: Federation,
    num_parameters: int,
    *,
    evidence: tuple[float, float] = (np.nan, np.nan),
    weighted: Corrected | None = None,
    improper: tuple[str, ...] = (),
) -> Report:
    """Return the report of a fit.

    `evidence` holds the log evidence and its standard error; `improper` lists the sites with an
    improper prior.
    """
    log_evidence, sd = evidence
    no_evidence = (
        f"none, because the prior of {', '.join(improper)} is improper" if improper else ""
    )
    return Report(
        stages,
        verdict,
        summarize(samples.constrained),
        {
            "clients": federation.num_clients,
            "rows": federation.num_rows,
            "parameters": num_parameters,
            "log evidence": f"{log_evidence:.4f} (sd {sd:.2g})" if sd >= 0 else no_evidence,
            **versions(),
        },
        partial(_draw_figures, samples, weighted),
    )


def _draw_figures(samples: Samples, corrected: Corrected | None) -> list[Figure]:
    """Return a forest plot, and traces or weights."""
    has_chains = samples.num_chains > 1
    figures = figures_of(samples.constrained, with_traces=has_chains)
    if corrected is not None and not has_chains:
        figures.append(
            histogram(
                "Importance weights",
                corrected.weights * corrected.num_draws,
                "weight of a draw relative to the mean weight (ideally 1)",
                "Weights of the draws. A few draws with large weights would dominate the result.",
            )
        )
    return figures
