"""Reasons why the draws of a run were not judged."""

from dataclasses import replace

import jax

from fedmcmc.diagnostics import MIN_DRAWS, MIN_OF_A_CHAIN, DiagnosisWarning, warnings_are_ignored
from fedmcmc.pytrees import num_bytes
from fedmcmc.records import Samples
from fedmcmc.types import ArrayTree, FederatedKernel

MAX_BYTES = 2**31
"""Memory of the largest draws that are judged."""


def why_not_judged(draws: ArrayTree, kernel: FederatedKernel) -> str:
    """Return the reason why draws are not judged, ``""`` if they are."""
    if kernel.target is None:
        return f"not judged: {_why_no_target(kernel)}"
    return _too_few_or_many(draws) or (
        f"not judged: warnings of the category {DiagnosisWarning.__name__} are ignored"
        if warnings_are_ignored()
        else ""
    )


def _too_few_or_many(draws: ArrayTree) -> str:
    """Return the reason why there are too few or too many draws to judge, ``""`` if none."""
    size = num_bytes(draws)
    if not size:
        return "not judged: no draws were kept"
    if size >= MAX_BYTES:
        return f"not judged: the draws take {size / 2**30:.1f} GiB (judged: below 2 GiB)"
    num_chains, num = jax.tree.leaves(draws)[0].shape[:2]
    if num_chains * num < MIN_DRAWS:
        return f"too few to judge (fewer than {MIN_DRAWS})"
    if num < MIN_OF_A_CHAIN:
        return f"too few to judge (fewer than {MIN_OF_A_CHAIN} per chain)"
    return ""


def _why_no_target(kernel: FederatedKernel) -> str:
    name, reason = kernel.name, kernel.traits.no_target_reason
    if reason:
        return f"{name} has no posterior to compare draws with: {reason}"
    return f"{name} does not define `target`, the posterior that its draws are meant to follow"


def missing_target(draws: ArrayTree, kernel: FederatedKernel) -> str:
    """Return a warning if a missing `target` is the only reason not to judge draws, else ``""``.

    Kernels that give a reason for having no target cause no warning.
    """
    if kernel.target is not None or kernel.traits.no_target_reason:
        return ""
    if _too_few_or_many(draws) or warnings_are_ignored():
        return ""
    return (
        f"The draws were not judged: {_why_no_target(kernel)}. Their errors are unknown. "
        "Add to the kernel's class a property `target` that returns the fedmcmc.Posterior (for "
        "most samplers self.posterior). If the kernel does not sample, set `traits = "
        "fedmcmc.types.Traits(no_target_reason=...)` instead."
    )


def add_reason(samples: Samples, kernel: FederatedKernel, *, has_positions: bool) -> Samples:
    """Return samples with the reason why they were not judged, if any.

    `has_positions` is false if the draws are results of the user's `collect`.
    """
    if samples.diagnosis is not None or samples.reason_not_judged:
        return samples
    draws = samples.draws if samples.final_draws is None else samples.final_draws
    reason = why_not_judged(draws, kernel)
    if not has_positions and kernel.target is not None:
        reason = "not judged: collect= kept something other than positions"
    return replace(samples, reason_not_judged=reason)
