"""Draws of a ground truth with their diagnostics, and the refusal of bad ones."""

from typing import Any, NamedTuple

import jax
import numpy as np
from arviz_stats.base import array_stats

__all__ = ["NotConverged", "Reference", "check_run", "diagnosed", "require_converged"]

MAX_CHECKED = 256  # coordinates, evenly spaced, that are diagnosed


class NotConverged(RuntimeError):
    """A ground truth that is none."""


class Reference(NamedTuple):
    """Draws and how far to trust them.

    Attributes
    ----------
    draws
        Leaves ``[num_chains, num_draws, ...]``.
    potential
        ``U`` at the draws, ``[num_chains, num_draws]``.
    acceptance
        Mean acceptance probability after the warm-up.
    step_size
        After the warm-up; the mean over chains where each has its own.
    rhat, ess
        The largest rank-normalised split R-hat and the smallest bulk effective sample size
        (Vehtari et al. 2021) of the potential and the coordinates checked.
    num_checked
        How many coordinates: all, or some evenly spaced where there are many.
    num_divergent
        Divergent transitions; none of MALA's.
    """

    draws: Any
    potential: np.ndarray
    acceptance: float
    step_size: float
    rhat: float
    ess: float
    num_checked: int
    num_divergent: int = 0

    def summary(self) -> dict[str, float]:
        """Return the diagnostics without the draws."""
        names = ("acceptance", "step_size", "rhat", "ess", "num_checked", "num_divergent")
        return {name: getattr(self, name) for name in names}


def require_converged(
    reference: Reference, *, max_rhat: float = 1.01, min_ess: float = 400.0
) -> Reference:
    """Return `reference` if its diagnostics are good.

    Raises
    ------
    NotConverged
        If R-hat is above `max_rhat`, the effective sample size below `min_ess`, either is not a
        number, or transitions diverged.
    """
    converged = reference.rhat <= max_rhat and reference.ess >= min_ess
    if not converged or reference.num_divergent:
        raise NotConverged(
            f"no ground truth: R-hat {reference.rhat:.4g} (at most {max_rhat}), effective sample "
            f"size {reference.ess:.4g} (at least {min_ess}), {reference.num_divergent} divergent "
            f"transitions (none), acceptance {reference.acceptance:.3g}: run longer, or from "
            f"better positions."
        )
    return reference


def check_run(positions: Any, num_warmup: int, num_draws: int, thinning: int) -> None:
    """Raise `ValueError` where there are not two chains or too few draws to diagnose."""
    counts = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(positions)}
    if len(counts) != 1 or next(iter(counts)) < (2,):
        raise ValueError(
            f"positions need one leading axis of two or more chains, got leading axes "
            f"{sorted(counts)}."
        )
    if num_draws < 4 or thinning < 1 or num_warmup < 0:
        raise ValueError(
            f"num_draws must be at least 4, thinning at least 1 and num_warmup not negative, got "
            f"{num_draws}, {thinning} and {num_warmup}."
        )


def diagnosed(draws: Any, potential: np.ndarray, acceptance: Any, step_size: Any) -> Reference:
    """Return draws with R-hat and effective sample size."""
    shape = potential.shape
    columns = [leaf.reshape(*shape, -1) for leaf in jax.tree.leaves(draws)]
    flat = np.concatenate(columns, axis=-1)
    chosen = np.unique(np.linspace(0, flat.shape[-1] - 1, MAX_CHECKED).round().astype(int))
    checked = np.concatenate([potential[..., None], flat[..., chosen]], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # chains that do not move: R-hat is NaN
        rhat, ess = (
            np.asarray(diagnose(checked.astype(np.float64), chain_axis=0, draw_axis=1))
            for diagnose in (array_stats.rhat, array_stats.ess)
        )
    return Reference(
        draws,
        potential,
        float(acceptance),
        float(step_size),
        float(rhat.max()),
        float(ess.min()),
        len(chosen),
    )
