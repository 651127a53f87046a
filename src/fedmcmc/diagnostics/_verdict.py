"""Verdict on a fit: one word and the figures behind it."""

from enum import StrEnum
from typing import Any

import numpy as np

from fedmcmc.diagnostics._errors import MEAN_ERROR, SD_ERROR


class VerdictKind(StrEnum):
    """First word of a verdict.

    Attributes
    ----------
    PASSED
        All checks passed. They do not prove that draws follow the posterior: no check shows a mode
        that no draw reached.
    DOUBTFUL
        The draws look right, but a check did not pass.
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
    """Verdict on draws in one sentence, built from a kind and figures.

    Parameters
    ----------
    kind
        A `VerdictKind`, or its value.
    method
        Method that produced the draws: ``"importance"``, ``"MCMC"``, ``"SMC"`` or empty.
    reason
        Text before the figures: the reason why the verdict is not better.
    details
        Text after the figures: modes and costs.
    k_hat
        Tail shape of the importance weights; passes below 0.5.
    r_hat
        Largest R-hat of the chains; passes below 1.01.
    ess
        Smallest number of effective draws.
    error, sd_error
        Largest Monte Carlo errors: posterior means in posterior sds, and posterior sds relative to
        the sd; both pass up to 0.05.

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
        text = "; ".join(part.rstrip(".") for part in (reason, figures, details) if part)
        verdict = super().__new__(cls, f"{kind}{f' ({method})' * bool(method)}: {text}.")
        verdict.kind, verdict.method, verdict.reason = kind, method, reason
        verdict.details, verdict.k_hat, verdict.r_hat = details, k_hat, r_hat
        verdict.ess, verdict.error, verdict.sd_error = ess, error, sd_error
        return verdict

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, Any]]:
        """Return the constructor's arguments for copies and pickles."""
        keywords = {
            name: value for name, value in vars(self).items() if name not in ("kind", "method")
        }
        return (str(self.kind), self.method), keywords


def _figures(
    k_hat: float, r_hat: float, ess: float, error: float, sd_error: float, passed: bool
) -> str:
    """Return the figures as text, with the limits if an error is too large."""
    words = []
    if error == error:
        text = f"Monte Carlo errors up to {error:.2g} sd (means) and {100 * sd_error:.2g} % (sds)"
        if not passed and not (error <= MEAN_ERROR and sd_error <= SD_ERROR):
            text += f" (required: at most {MEAN_ERROR:g} sd and {100 * SD_ERROR:g} %)"
        words.append(text)
    if k_hat == k_hat:
        words.append(f"k-hat {k_hat:.2f}")
    if r_hat == r_hat:
        words.append(f"R-hat {r_hat:.3f}")
    if ess == ess:
        words.append(f"{ess:,.0f} effective draws")
    return ", ".join(words)
