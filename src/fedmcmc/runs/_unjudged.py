"""Why the draws of a run were not judged, in words."""

from dataclasses import replace

import jax

from fedmcmc._types import ArrayTree, FederatedKernel
from fedmcmc.diagnostics import FEWEST_DRAWS, FEWEST_OF_A_CHAIN, DiagnosisWarning, silenced
from fedmcmc.pytrees import num_bytes
from fedmcmc.records import Samples

MOST_BYTES = 2**31
"""Memory of draws above which they are not judged."""


def why_not_judged(draws: ArrayTree, kernel: FederatedKernel) -> str:
    """Return why these draws of a kernel are not judged; empty if they are."""
    if kernel.target is None:
        return f"not judged: {_without_target(kernel)}"
    return _too_few_or_many(draws) or (
        f"not judged: warnings of the category {DiagnosisWarning.__name__} are ignored"
        if silenced()
        else ""
    )


def _too_few_or_many(draws: ArrayTree) -> str:
    """Return why draws of any kernel are too few or too many to judge; empty if they are not."""
    size = num_bytes(draws)
    if not size:
        return "not judged: no draws were kept"
    if size >= MOST_BYTES:
        return f"not judged: the draws take {size / 2**30:.1f} GiB (judged: below 2 GiB)"
    num_chains, num = jax.tree.leaves(draws)[0].shape[:2]
    if num_chains * num < FEWEST_DRAWS:
        return f"too few to judge (fewer than {FEWEST_DRAWS})"
    if num < FEWEST_OF_A_CHAIN:
        return f"too few to judge (fewer than {FEWEST_OF_A_CHAIN} per chain)"
    return ""


def _without_target(kernel: FederatedKernel) -> str:
    name = kernel.name
    if kernel.traits.no_target_reason:
        reason = kernel.traits.no_target_reason
        return f"{name} has no posterior to compare draws with: {reason}"
    return f"{name} does not define `target`, the posterior that its draws are meant to follow"


def missing_target(draws: ArrayTree, kernel: FederatedKernel) -> str:
    """Return a warning for draws that would be judged if their kernel defined `target`, or ``""``.

    Empty if the kernel gives a reason for having none, or if these warnings are ignored.
    """
    if kernel.target is not None or kernel.traits.no_target_reason:
        return ""
    if _too_few_or_many(draws) or silenced():
        return ""
    return (
        f"The draws were not judged: {_without_target(kernel)}. Nothing is known of their errors. "
        "Add to the class a property `target` that returns the fedmcmc.Posterior (for most "
        "samplers self.posterior), or, if it does not sample, `traits = "
        "fedmcmc.Traits(no_target_reason=...)` with the reason."
    )


def with_reason(samples: Samples, kernel: FederatedKernel, *, positions: bool) -> Samples:
    """Return samples that say why they were not judged, if they were not.

    `positions` is whether positions were kept, and not what the user's `collect` returns.
    """
    if samples.diagnosis is not None or samples.not_judged:
        return samples
    draws = samples.draws if samples.final_draws is None else samples.final_draws
    reason = why_not_judged(draws, kernel)
    if not positions and kernel.target is not None:
        reason = "not judged: collect= kept something other than positions"
    return replace(samples, not_judged=reason)
