"""What is wrong with an approximation at the end of a run: it still moves, or counts rows again."""

from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import last_passes
from fedmcmc.records import Samples

RESTLESS = 0.1
"""An approximation that moves by more of its sds per round is not at rest."""
DRIFT = 0.5
"""An approximation that has still to move by more of its sds is not at rest."""
NUM_PASSES, STILL = 3, 1e-3
"""Number of last passes over the clients in which fits are lost, and how little moves meanwhile."""
NUM_RATIOS, STEADY = 5, 0.02
"""Number of ratios of successive shifts that show a drift, and how far apart they may be."""


def restless(samples: Samples) -> str | None:
    """Return a warning if an approximation still moves, is not proper, or is without clients."""
    shift = np.asarray(samples.info.get("shift", ()))
    if not shift.size or fields(samples.state.server, "num_filtered"):
        return None  # a filter moves with all rows that it takes in
    if not all(proper.all() for proper in fields(samples.state.broadcast, "proper")):
        return (
            "The approximation is not proper at the end of the run (the product of all sites is no "
            "density), so that draws are of an earlier one: start at the mode "
            "(fedmcmc.surrogates.mode, fedmcmc.whiten), damp changes more, or give "
            "initial_precision=. If it stays so, a Gaussian is not suitable here: use fedmcmc.fit."
        )
    num_clients = fields(samples.state.server, "num_clients")[0].max()
    shifts, _ = last_passes(samples.info | {"num_clients": num_clients}, 1)
    last = max(chain.max() for chain in shifts)
    if not np.isfinite(last):
        return (
            "The approximation became proper only in the last rounds, so that it is not known "
            "whether it still moves: continue with sample(..., state=samples.state) or "
            "until=fedmcmc.at_rest()."
        )
    if last > RESTLESS:
        return (
            f"The approximation still moves by {last:.2g} of its sds per round at the end of the "
            f"run: continue with sample(..., state=samples.state) or until=fedmcmc.at_rest(). If "
            f"it oscillates, damp changes more, or make the clients' inference less random."
        )
    remaining = max(_remaining(chain) for chain in shift)
    if remaining > DRIFT:
        return (
            f"The approximation still drifts slowly: at the rate of the last rounds it has about "
            f"{remaining:.2g} of its sds to go. Continue with sample(..., state=samples.state), or "
            f"damp changes less."
        )
    return _lost_at_rest(samples.info | {"num_clients": num_clients})


def _lost_at_rest(info: dict[str, Any]) -> str | None:
    """Return a warning if an approximation that does not move at all is without some clients."""
    shifts, complete = last_passes(info, NUM_PASSES)
    for shift, lost in zip(shifts, info.get("num_lost", ()), strict=False):
        num = lost[-len(shift) :].sum()
        if complete and shift.max() < STILL and num >= NUM_PASSES:
            return (
                f"The approximation is at rest, but {num} fits of clients in the last "
                f"{len(shift)} rounds were not proper and changed nothing, so that the rows of "
                f"these clients do not count: see samples.info['num_lost']. Is the posterior "
                f"proper? Otherwise start at the mode (fedmcmc.surrogates.mode), give a positive "
                f"initial_precision=, or use fedmcmc.fit."
            )
    return None


def _remaining(shift: np.ndarray) -> float:
    """Return how far a chain has still to move, by the shifts ``[num_rounds]`` of its rounds.

    The shifts of a drift that slows down have a constant ratio, so what remains is the sum of a
    geometric series. If the last ratios differ, the shifts are noise, and nothing is known.
    """
    last = shift[-NUM_RATIOS - 1 :]
    if len(last) <= NUM_RATIOS or not np.all(np.isfinite(last)) or not np.all(last > 0):
        return 0.0
    ratios = last[1:] / last[:-1]
    if np.ptp(ratios) > STEADY or not 0.5 < ratios[-1] < 1 or ratios.max() >= 1:
        return 0.0
    return float(last[-1] * ratios[-1] / (1 - ratios[-1]))


def counted_again(samples: Samples) -> str | None:
    """Return a warning if a filter (`fedmcmc.adf`) took in rows more than once."""
    rounds = fields(samples.state.server, "num_filtered")
    active = np.asarray(samples.info.get("num_active", ()))
    if not rounds or not active.size:
        return None
    num_clients, mean_active = fields(samples.state.server, "num_clients")[0].max(), active.mean()
    visits = rounds[0].max() * mean_active / num_clients
    if visits <= 1 + 1e-4:  # a sum of dampings is rounded
        return None
    num_rounds = int(num_clients / mean_active)
    return (
        f"Assumed density filtering counts a client's rows each time that the client takes part, "
        f"on average {visits:.3g} times in this run, so the approximation is too narrow: run one "
        f"pass over the {num_clients} clients ({num_rounds} round{'s' * (num_rounds != 1)}), or "
        f"use fedmcmc.fed_ep, in which a client's new site replaces its earlier one."
    )


def fields(tree: ArrayTree, name: str) -> list[np.ndarray]:
    """Return the leaves of a tree that are a field of this name."""
    return [
        np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if path and getattr(path[-1], "name", None) == name
    ]
