"""Verdict on a fit: one word with the figures that it rests on."""

from enum import StrEnum
from typing import Any

import numpy as np

from fedmcmc.diagnostics._errors import MEAN_ERROR, SD_ERROR


class VerdictKind(StrEnum):
    """First word of a verdict.

    Attributes
    ----------
    PASSED
        All checks passed. No check proves that draws follow the posterior: a mode that no draw
        reached shows nowhere.
    DOUBTFUL
        The draws look right, but a check that could show otherwise did not pass.
    APPROXIMATE
        The draws come from Gaussians that were not compared with the posterior.
    FAILED
        A check showed that the draws do not represent the posterior.
    """

    PASSED = "passed"
    DOUBTFUL = "doubtful"
    APPROXIMATE = "approximate"
    FAILED = "failed"


class Verdict(str):
    """Sentence on whether draws can be used, made from a kind and figures.

    Parameters
    ----------
    kind
        A `VerdictKind`, or its value.
    method
        How the draws were checked: ``"importance"``, ``"MCMC"`` or ``"SMC"``; empty for others.
    reason
        Words that precede the figures: why the verdict is not better.
    details
        Words that follow them: modes and costs.
    k_hat
        Shape of the tail of importance weights; below 0.5 to pass.
    r_hat
        Largest R-hat of the chains; below 1.01 to pass.
    ess
        Smallest number of effective draws.
    error, sd_error
        Largest estimated Monte Carlo error of a posterior mean, in posterior sds, and of a
        posterior sd, relative to it; both at most 0.05 to pass.

    Attributes
    ----------
    kind, method, reason, details, k_hat, r_hat, ess, error, sd_error
        The arguments; a figure that was not computed is NaN.

    Examples
    --------
    >>> verdict = Verdict("passed", "importance", k_hat=0.1, ess=3600.0, error=0.016, sd_error=0.01)
    >>> verdict.kind, verdict.error, verdict.kind == "passed"
    (<VerdictKind.PASSED: 'passed'>, 0.016, True)
    >>> print(verdict[:68])
    passed (importance): Monte Carlo errors up to 0.016 sd (means) and 1
    """

    kind: VerdictKind
    method: str
    reason: str
    details: str
    k_hat: float
    r_hat: float
    ess: float
    error: float
    sd_error: float

    def __new__(
        cls,
        kind: VerdictKind | str,
        method: str = "",
        *,
        reason: str = "",
        details: str = "",
        k_hat: float = np.nan,
        r_hat: float = np.nan,
        ess: float = np.nan,
        error: float = np.nan,
        sd_error: float = np.nan,
    ) -> "Verdict":
        kind = VerdictKind(kind)
        figures = _figures(k_hat, r_hat, ess, error, sd_error, kind is VerdictKind.PASSED)
        parts = [part for part in (reason, figures, details) if part]
        verdict = super().__new__(cls, f"{kind}{f' ({method})' * bool(method)}: {_joined(parts)}.")
        verdict.kind, verdict.method, verdict.reason, verdict.details = (
            kind,
            method,
            reason,
            details,
        )
        verdict.k_hat, verdict.r_hat, verdict.ess = k_hat, r_hat, ess
        verdict.error, verdict.sd_error = error, sd_error
        return verdict

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, Any]]:
        """Return the arguments from which a copy or a pickle is made."""
        given = {
            name: value for name, value in vars(self).items() if name not in ("kind", "method")
        }
        return (str(self.kind), self.method), given


def _joined(parts: list[str]) -> str:
    return "; ".join(part.rstrip(".") for part in parts)


def _figures(
    k_hat: float, r_hat: float, ess: float, error: float, sd_error: float, passed: bool
) -> str:
    """Return the figures in words, those that are too large with what is wanted."""
    words = []
    if error == error:
        text = f"Monte Carlo errors up to {error:.2g} sd (means) and {100 * sd_error:.2g} % (sds)"
        if not passed and not (error <= MEAN_ERROR and sd_error <= SD_ERROR):
            text += f" (wanted: at most {MEAN_ERROR:g} sd and {100 * SD_ERROR:g} %)"
        words.append(text)
    if k_hat == k_hat:
        words.append(f"k-hat {k_hat:.2f}")
    if r_hat == r_hat:
        words.append(f"R-hat {r_hat:.3f}")
    if ess == ess:
        words.append(f"{ess:,.0f} effective draws")
    return ", ".join(words)
