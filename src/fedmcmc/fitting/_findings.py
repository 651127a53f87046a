"""Warnings of a fit."""

import warnings
from dataclasses import replace

from fedmcmc.data import Grouped
from fedmcmc.diagnostics import DiagnosisWarning, SamplingWarning, VerdictKind
from fedmcmc.fitting._fitted import Fitted
from fedmcmc.hierarchy import few_groups_warning
from fedmcmc.runs import Consortium, SimulatedConsortium


def warn_of_unidentified(names: tuple[str, ...], consortium: Consortium) -> tuple[str, ...]:
    """Warn of parameters on which no row depends, and return the warnings.

    The warning points to the line that called the caller.
    """
    if not names:
        return ()
    posterior = "its posterior is its prior" if len(names) == 1 else "their posterior is the prior"
    message = f"No row depends on {join_names(names)}: {posterior}."
    coding = consortium.data.coding if isinstance(consortium, SimulatedConsortium) else {}
    if coding:
        column, levels = next(iter(coding.items()))
        message += (
            f" Text columns are integers in the model: instead of comparing {column} with "
            f"{levels[0]!r}, write {column} == 0."
        )
    warnings.warn(message, DiagnosisWarning, stacklevel=4)
    return (message,)


def warn_of_verdict(
    fitted: Fitted, effort: str, consortium: Consortium, messages: tuple[str, ...] = ()
) -> Fitted:
    """Warn of a verdict that is not ``passed`` and of few groups; return the fit with its warnings.

    `messages` are earlier warnings. New warnings point to the line that called the caller.
    """
    if effort != "approximate" and fitted.verdict.kind != VerdictKind.PASSED:
        warnings.warn(f"fit: {fitted.verdict}", SamplingWarning, stacklevel=4)
    few_groups = _few_groups_message(fitted, consortium)
    if few_groups is not None:
        warnings.warn(few_groups, DiagnosisWarning, stacklevel=4)
        messages = (*messages, few_groups)
    report = replace(fitted.report, warnings=(*fitted.report.warnings, *messages))
    samples = replace(fitted.samples, warnings=(*fitted.samples.warnings, *messages))
    return replace(fitted, report=report, samples=samples)


def join_names(names: tuple[str, ...]) -> str:
    """Return up to five names, separated by commas."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _few_groups_message(fitted: Fitted, consortium: Consortium) -> str | None:
    federation = consortium.federation
    if isinstance(consortium, SimulatedConsortium):
        num_groups = int(consortium.data.group_mask.sum())
    elif isinstance(federation.rows, Grouped):
        return None  # only the clients have the number of groups
    else:
        num_groups = federation.num_clients
    return few_groups_warning(fitted.posterior, num_groups, fitted.samples.draws)
