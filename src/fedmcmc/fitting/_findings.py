"""What a fit warns of, and how it says it."""

import warnings
from dataclasses import replace

from fedmcmc.data import Grouped
from fedmcmc.diagnostics import DiagnosisWarning, SamplingWarning, VerdictKind
from fedmcmc.fitting._fitted import Fitted
from fedmcmc.hierarchy import of_few_groups
from fedmcmc.runs import Consortium, SimulatedConsortium


def warn_early(untold: tuple[str, ...], consortium: Consortium) -> tuple[str, ...]:
    """Warn of parameters that no row depends on, before what takes long; return what was said.

    The warning names the line that called the caller.
    """
    said = (_nothing_told(untold, consortium),) if untold else ()
    for finding in said:
        warnings.warn(finding, DiagnosisWarning, stacklevel=4)
    return said


def warned(
    fitted: Fitted, effort: str, consortium: Consortium, said: tuple[str, ...] = ()
) -> Fitted:
    """Warn of what is wrong, and return the fit with what was said, by now and before.

    The warnings name the line that called the caller.
    """
    if effort != "approximate" and fitted.verdict.kind != VerdictKind.PASSED:
        warnings.warn(f"fit: {fitted.verdict}", SamplingWarning, stacklevel=4)
    few = _of_few(fitted, consortium)
    if few is not None:
        warnings.warn(few, DiagnosisWarning, stacklevel=4)
        said = (*said, few)
    report = replace(fitted.report, warnings=(*fitted.report.warnings, *said))
    samples = replace(fitted.samples, warnings=(*fitted.samples.warnings, *said))
    return replace(fitted, report=report, samples=samples)


def listed(names: tuple[str, ...]) -> str:
    """Return up to five names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _nothing_told(untold: tuple[str, ...], consortium: Consortium) -> str:
    """Return what is said of parameters that no row depends on."""
    which = listed(untold)
    posterior = "its posterior is its prior" if len(untold) == 1 else "their posterior is the prior"
    told = f"No row says anything of {which}: {posterior}."
    coding = consortium.data.coding if isinstance(consortium, SimulatedConsortium) else {}
    if coding:
        column, levels = next(iter(coding.items()))
        told += (
            f" Text columns are whole numbers in the model: where it compares {column} with "
            f"{levels[0]!r}, write {column} == 0."
        )
    return told


def _of_few(fitted: Fitted, consortium: Consortium) -> str | None:
    """Return what is said of fewer than five groups."""
    federation = consortium.federation
    if isinstance(consortium, SimulatedConsortium):
        num_groups = int(consortium.data.group_mask.sum())
    elif isinstance(federation.rows, Grouped):
        return None  # how many there are only their clients know
    else:
        num_groups = federation.num_clients
    return of_few_groups(fitted.posterior, num_groups, fitted.samples.draws)
