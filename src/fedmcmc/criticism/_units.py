"""What is left out of a fit: rows, groups of rows, or clients; and weights of likelihood terms."""

import warnings
from collections.abc import Mapping
from typing import Any

from fedmcmc._types import ClientTerms, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import MarginalTerms

UNITS = {"row": "rows", "group": "groups", "client": "clients"}
"""Names of units as arguments, and in results."""


def has_groups(data: Any) -> bool:
    """Return whether the rows are here and belong to groups (``groups=``)."""
    data = getattr(data, "data", data)  # of simulated clients
    return isinstance(data, FederatedData) and data.num_groups is not None


def unit_of(posteriors: tuple[Posterior, ...], data: Any, unit: str | None) -> str:
    """Return the unit that is left out: the given one, else groups where there are any.

    Raises
    ------
    ValueError
        If the unit is none of `UNITS`, or rows of a model whose latents are integrated out.
    """
    integrates = any(isinstance(model.loglikelihood_fn, ClientTerms) for model in posteriors)
    if unit is None:
        return "group" if integrates or has_groups(data) else "row"
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(map(repr, UNITS))}, got {unit!r}.")
    if unit == "row" and integrates:
        raise ValueError(
            "unit='row' leaves out single rows, but the latents of this model's groups are "
            "integrated out, so that rows of a group have no densities of their own: use "
            "unit='group' or unit='client'."
        )
    return unit


def weighted_sites(posterior: Posterior) -> tuple[str, ...]:
    """Return the observed sites whose terms are weighted, of a model that has sites."""
    fn: Any = posterior.loglikelihood_fn
    if isinstance(fn, MarginalTerms):
        fn = fn.local.loglikelihood_fn
    fn = getattr(fn, "func", fn)  # within a kernel functions are wrapped
    weighted_fn = getattr(fn, "weighted_fn", None)
    return () if weighted_fn is None else weighted_fn()


def weight_notes(models: Mapping[str, Posterior], name: str, *, stacklevel: int) -> list[str]:
    """Warn of models with weighted terms; return what was said."""
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


def few_units(num: int, unit: str, minimum: int) -> str:
    """Return what is said of units whose clients have too few to send a sum."""
    one = num == 1
    return (
        f"{num:,} {unit[:-1] if one else unit} {'is' if one else 'are'} not judged: "
        f"{'its client has' if one else 'their clients have'} fewer than minimum_rows={minimum} "
        f"{unit}, and a sum over so few would show single ones. Lower minimum_rows if such sums "
        "may be seen, or pass secure_sum=True if sums are added securely."
    )
