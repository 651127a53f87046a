"""Checks at the end of a run that an approximation is at rest and counts each row once."""

from typing import Any

import jax
import numpy as np

from fedmcmc.diagnostics import last_passes
from fedmcmc.records import Samples
from fedmcmc.types import ArrayTree

MAX_SHIFT = 0.1
"""Largest shift per round, in standard deviations, of an approximation at rest."""
MAX_DRIFT = 0.5
"""Largest remaining drift, in standard deviations, of an approximation at rest."""
NUM_FINAL_PASSES = 3
"""Number of final passes over the clients in which lost fits are counted."""
MAX_CONSTANT_SHIFT = 1e-3
"""Largest shift per round, in standard deviations, of an approximation that does not move."""
NUM_RATIOS, MAX_RATIO_RANGE = 5, 0.02
"""Number of ratios of successive shifts that reveal a drift, and their largest range."""


def check_at_rest(samples: Samples) -> str | None:
    """Return a warning if an approximation moves, is improper, or lacks clients' fits."""
    shift = np.asarray(samples.info.get("shift", ()))
    if not shift.size or leaves_named(samples.state.server, "num_filtered"):
        return None  # a filter moves with each new row
    if not all(proper.all() for proper in leaves_named(samples.state.broadcast, "proper")):
        return (
            "The approximation is not proper at the end of the run (the product of the prior "
            "and all clients' factors is not a density), so the draws come from an earlier "
            "approximation. Start at the mode (fedmcmc.surrogates.mode, fedmcmc.whiten), use a "
            "smaller damping=, or give initial_precision=. If it stays improper, a Gaussian is not "
            "suitable: use fedmcmc.fit."
        )
    num_clients = leaves_named(samples.state.server, "num_clients")[0].max()
    shifts, _ = last_passes(samples.info | {"num_clients": num_clients}, 1)
    max_shift = max(chain.max() for chain in shifts)
    if not np.isfinite(max_shift):
        return (
            "The approximation became proper only in the last rounds, too late to see whether it "
            "still moves: continue with sample(..., state=samples.state) or "
            "until=fedmcmc.at_rest()."
        )
    if max_shift > MAX_SHIFT:
        return (
            f"The approximation still moves by {max_shift:.2g} of its sds per round at the end of "
            f"the run: continue with sample(..., state=samples.state) or until=fedmcmc.at_rest(). "
            f"If it oscillates, use a smaller damping=, or make the clients' inference less random."
        )
    drift = max(_remaining_drift(chain) for chain in shift)
    if drift > MAX_DRIFT:
        return (
            f"The approximation still drifts slowly: at the rate of the last rounds it has about "
            f"{drift:.2g} of its sds to go. Continue with sample(..., state=samples.state), or "
            f"use a larger damping=."
        )
    return _check_lost_fits(samples.info | {"num_clients": num_clients})


def _check_lost_fits(info: dict[str, Any]) -> str | None:
    """Return a warning if an approximation does not move because clients' fits are lost."""
    shifts, complete = last_passes(info, NUM_FINAL_PASSES)
    for shift, lost in zip(shifts, info.get("num_lost", ()), strict=False):
        num_lost = lost[-len(shift) :].sum()
        if complete and shift.max() < MAX_CONSTANT_SHIFT and num_lost >= NUM_FINAL_PASSES:
            return (
                f"The approximation is at rest, but {num_lost} fits of clients in the last "
                f"{len(shift)} rounds were not proper and changed nothing, so the rows of these "
                f"clients do not count: see samples.info['num_lost']. Is the posterior proper? "
                f"Otherwise start at the mode (fedmcmc.surrogates.mode), give a positive "
                f"initial_precision=, or use fedmcmc.fit."
            )
    return None


def _remaining_drift(shifts: np.ndarray) -> float:
    """Return the distance that a chain still has to move, from its shifts ``[num_rounds]``.

    The shifts of a drift that slows down have a constant ratio, so the remaining distance is the
    sum of a geometric series. If the last ratios differ, the shifts are noise.
    """
    tail = shifts[-NUM_RATIOS - 1 :]
    if len(tail) <= NUM_RATIOS or not np.all(np.isfinite(tail)) or not np.all(tail > 0):
        return 0.0
    ratios = tail[1:] / tail[:-1]
    if np.ptp(ratios) > MAX_RATIO_RANGE or not 0.5 < ratios[-1] < 1 or ratios.max() >= 1:
        return 0.0
    return float(tail[-1] * ratios[-1] / (1 - ratios[-1]))


def check_single_pass(samples: Samples) -> str | None:
    """Return a warning if a filter (`fedmcmc.adf`) counted rows more than once."""
    rounds = leaves_named(samples.state.server, "num_filtered")
    active = np.asarray(samples.info.get("num_active", ()))
    if not rounds or not active.size:
        return None
    num_clients = leaves_named(samples.state.server, "num_clients")[0].max()
    mean_active = active.mean()
    visits = rounds[0].max() * mean_active / num_clients
    if visits <= 1 + 1e-4:  # a sum of dampings is rounded
        return None
    num_rounds = int(num_clients / mean_active)
    return (
        f"Assumed density filtering counts a client's rows each time that the client takes part, "
        f"on average {visits:.3g} times in this run, so the approximation is too narrow: run one "
        f"pass over the {num_clients} clients ({num_rounds} round{'s' * (num_rounds != 1)}), or "
        f"use fedmcmc.fed_ep, in which a client's new factor replaces its old one."
    )


def leaves_named(tree: ArrayTree, name: str) -> list[np.ndarray]:
    """Return the leaves of a tree that are stored in a field called `name`."""
    return [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if path and getattr(path[-1], "name", None) == name
    ]
