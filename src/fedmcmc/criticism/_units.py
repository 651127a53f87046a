"""Units that cross-validation leaves out, and checks of weighted likelihood terms."""

import warnings
from collections.abc import Mapping
from typing import Any

from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import MarginalTerms
from fedmcmc.runs import Consortium
from fedmcmc.types import ClientTerms, Posterior

UNITS = {"row": "rows", "group": "groups", "client": "clients"}
"""Names of units as arguments, and their plurals in results."""


def has_groups(data: FederatedData | Consortium) -> bool:
    """Return true if the rows are local and belong to groups (``groups=``)."""
    rows = getattr(data, "data", data)  # simulated clients store their data
    return isinstance(rows, FederatedData) and rows.num_groups is not None


def choose_unit(
    posteriors: tuple[Posterior, ...], data: FederatedData | Consortium, unit: str | None
) -> str:
    """Return `unit`, or by default groups if there are any and otherwise rows.

    Raises
    ------
    ValueError
        If the unit is not in `UNITS`, or is ``"row"`` although latents are integrated out.
    """
    integrates = any(isinstance(model.loglikelihood_fn, ClientTerms) for model in posteriors)
    if unit is None:
        return "group" if integrates or has_groups(data) else "row"
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(map(repr, UNITS))}, got {unit!r}.")
    if unit == "row" and integrates:
        raise ValueError(
            "unit='row' leaves out single rows, but the latents of this model's groups are "
            "integrated out, so that single rows of a group have no densities: use unit='group' or "
            "unit='client'."
        )
    return unit


def weighted_sites(posterior: Posterior) -> tuple[str, ...]:
    """Return the observed sites with weighted terms; empty for models without sites."""
    fn: Any = posterior.loglikelihood_fn
    if isinstance(fn, MarginalTerms):
        fn = fn.local.loglikelihood_fn
    fn = getattr(fn, "func", fn)  # kernels wrap functions
    weighted_fn = getattr(fn, "weighted_fn", None)
    return () if weighted_fn is None else weighted_fn()


def warn_if_weighted(models: Mapping[str, Posterior], name: str, *, stacklevel: int) -> list[str]:
    """Warn about models with weighted terms, and return the texts of the warnings."""
    notes = []
    for model, posterior in models.items():
        sites = weighted_sites(posterior)
        if sites:
            notes.append(
                f"{model + ': ' if model else ''}the likelihood of {', '.join(sites)} is weighted "
                "(numpyro.handlers.scale). A weighted term is not the log density of an outcome, "
                "so elpd does not measure how well outcomes are predicted, unless weights count "
                "identical rows. Compare only models with the same weights."
            )
    for note in notes:
        warnings.warn(f"{name}: {note}", stacklevel=stacklevel)
    return notes


def describe_unjudged(num: int, unit: str, minimum: int) -> str:
    """Return a note on units of clients that have too few units to send a sum."""
    subject = f"1 {unit[:-1]} is not judged: its client has"
    if num > 1:
        subject = f"{num:,} {unit} are not judged: their clients have"
    return (
        f"{subject} fewer than minimum_rows={minimum} {unit}, and a sum over so few would reveal "
        "single values. Lower minimum_rows if the server may see such sums, or pass "
        "secure_sum=True if sums are added securely."
    )
