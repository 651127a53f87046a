"""What a fit warns of, and how it says it."""

import warnings
from dataclasses import replace

from fedmcmc.data import Grouped
from fedmcmc.diagnostics import DiagnosisWarning, SamplingWarning
from fedmcmc.fitting._fitted import Fitted
from fedmcmc.hierarchy import of_few_groups
from fedmcmc.runs import Consortium, SimulatedConsortium


def warned(
    fitted: Fitted, effort: str, consortium: Consortium, untold: tuple[str, ...] = ()
) -> Fitted:
    """Warn of what is wrong, and return the fit with what was said.

    `untold` are the parameters that no row depends on. The warnings name the line that called the
    caller.
    """
    said = []
    if effort != "approximate" and not fitted.verdict.startswith("exact"):
        warnings.warn(f"fit: {fitted.verdict}", SamplingWarning, stacklevel=3)
    if untold:
        said.append(_nothing_told(untold, consortium))
    few = _of_few(fitted, consortium)
    if few is not None:
        said.append(few)
    for finding in said:
        warnings.warn(finding, DiagnosisWarning, stacklevel=3)
    report = replace(fitted.report, warnings=(*fitted.report.warnings, *said))
    samples = replace(fitted.samples, warnings=(*fitted.samples.warnings, *said))
    return replace(fitted, report=report, samples=samples)


def _nothing_told(untold: tuple[str, ...], consortium: Consortium) -> str:
    """Return what is said of parameters that no row depends on."""
    which = ", ".join(untold[:5]) + (", ..." if len(untold) > 5 else "")
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
