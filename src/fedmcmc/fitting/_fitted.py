"""What a fit returns."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fedmcmc._types import Federation, Posterior, WithFunctions
from fedmcmc.data import in_words
from fedmcmc.diagnostics import Verdict
from fedmcmc.exact import Corrected
from fedmcmc.fitting._report import Report, Stage
from fedmcmc.gaussian import Gaussian
from fedmcmc.records import Samples
from fedmcmc.reports import Figure, figures_of, histogram, summarized
from fedmcmc.runs import Consortium, SimulatedConsortium
from fedmcmc.storage import versions


@dataclass(frozen=True, repr=False)
class Fitted(WithFunctions):
    """Draws of a posterior, with a verdict on whether they can be used.

    Attributes
    ----------
    samples
        `Samples` of equal weight: ``.draws``, ``.constrained``, ``.to_datatree()``. Where they are
        of importance weights, resampled, one chain.
    verdict
        A `fedmcmc.diagnostics.Verdict`: a sentence that begins with ``passed``, ``doubtful``,
        ``approximate`` or ``failed``, with the figures ``.kind``, ``.k_hat``, ``.error``, ....
    log_evidence, log_evidence_sd
        Log of ``p(data)`` in nats, and its standard error; NaN if no correction passed, or if a
        prior is improper, so that there is no evidence. Right if log prior and log likelihood are
        normalized, as those of `fedmcmc.from_numpyro` are.
    report
        Stage by stage: ``print(fitted.report)``, ``.save(path)`` for a page, ``.to_dict()``.
    posterior
        The model as a `Posterior`, as `fedmcmc.criticism` takes it.
    corrected
        The weighted draws that `samples` were resampled from, or ``None`` where they are others.
    gaussian
        Laplace's approximation at the highest mode, over sampled positions, or ``None``.
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
        """Return the verdict, the parameters and what was done."""
        lines = [str(self.report), ""]
        for name, row in self.report.summary.items():
            lines.append(
                f"{name}: {row['mean']:.4g} (sd {row['sd']:.2g}), 90 % in "
                f"[{row['5 %']:.4g}, {row['95 %']:.4g}]"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same for notebooks, as tables."""
        return self.report.page().body


def with_names(fitted: Fitted, consortium: Consortium, asked: dict[str, Any]) -> Fitted:
    """Return a fit that says who the clients are, what codes stand for, and what is predicted.

    And what its user asked for, by argument.
    """
    named: dict[str, Any] = {}
    if isinstance(consortium, SimulatedConsortium):
        named = in_words(consortium.data)
    elif type(consortium).__repr__ is not object.__repr__:  # `deploy.Sites` say who they are
        named = {"sites": str(consortium)}
    if fitted.posterior.observed:
        named["outcome"] = fitted.posterior.observed
    given = {name: value for name, value in asked.items() if value is not None}
    named["fit"] = ", ".join(f"{name}={value!r}" for name, value in given.items())
    report, samples = fitted.report, fitted.samples
    # Of one stage its own draws say it all.
    cost = {"cost": report.cost} if len(report.stages) > 1 else {}
    return replace(
        fitted,
        report=replace(report, about=named | report.about),
        samples=replace(
            samples,
            settings=named | samples.settings,
            stopped=samples.stopped | cost,
        ),
    )


def reported(
    stages: tuple[Stage, ...],
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

    `evidence` is its logarithm and the standard error of that, `improper` are the sites whose prior
    is no density.
    """
    log_evidence, sd = evidence
    no_evidence = f"none, as the prior of {', '.join(improper)} is improper" if improper else ""
    return Report(
        stages,
        verdict,
        summarized(samples.constrained),
        {
            "clients": federation.num_clients,
            "rows": federation.num_rows,
            "parameters": num_parameters,
            "log evidence": f"{log_evidence:.4f} (sd {sd:.2g})" if sd >= 0 else no_evidence,
            **versions(),
        },
        partial(_figures, samples, weighted),
    )


def _figures(samples: Samples, corrected: Corrected | None) -> list[Figure]:
    """Return a forest plot, and traces or weights."""
    several = samples.num_chains > 1
    drawn = figures_of(samples.constrained, with_traces=several)
    if corrected is not None and not several:
        drawn.append(
            histogram(
                "Importance weights",
                corrected.weights * corrected.num_draws,
                "weight of a draw over the mean weight: all at one is perfect",
                "How much each weighted draw counts. Few draws with large weights would carry the "
                "result alone.",
            )
        )
    return drawn
