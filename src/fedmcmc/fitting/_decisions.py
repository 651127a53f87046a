"""Which stages a fit runs, and the verdict on their results."""

from typing import Any

import numpy as np

from fedmcmc.diagnostics import Verdict, VerdictKind
from fedmcmc.fitting._chains import HOPELESS_RHAT
from fedmcmc.fitting._findings import listed
from fedmcmc.fitting._predicted import HOPELESS
from fedmcmc.fitting._runner import StageRunner

USUAL_ROUNDS, PATIENCE = 1050, 3600.0
"""Rounds that chains may take, and seconds that ``effort="auto"`` spends on them at most."""
MANY_PARAMETERS = 2000
"""Number of parameters above which only ``effort="exact"`` runs chains."""
TEMPERED_DIMENSIONS = 50
"""Number of parameters up to which tempering is tried."""


def decide(run: StageRunner, effort: str, max_rounds: int, latency: float) -> Verdict:
    """Run the stages that are needed after the search for modes, and return the verdict."""
    if effort == "approximate":
        return _approximate(run, "as asked for")
    if run.search.found and run.weights_may_do():
        run.correct_by_modes()
        if run.correction_is("failed") and run.ep_fits:
            run.propagate()
        if run.correction_is("passed"):
            return _by_importance(run)
    reason = _reason_to_stop(run, effort, max_rounds, latency)
    if reason:
        if run.correction_is("doubtful"):
            return _by_importance(run, reason)
        return _approximate(run, reason)
    if len(run.search.modes) > 1:  # no chain comes across between them
        return _temper(run)
    run.run_chains(max_rounds)
    chains = run.chains
    assert chains is not None
    details = f"{chains.num_rounds:,} rounds of {chains.samples.num_chains} chains"
    if chains.agree:
        return _passed(run, "MCMC", details=details, **chains.figures)
    before = f"chains did not agree (R-hat {chains.rhat:.3f}, {chains.ess:,.0f} effective draws)"
    if run.search.found and run.size <= TEMPERED_DIMENSIONS:
        return _temper(run, before)
    if run.correction_is("doubtful"):
        run.chains = None
        return _by_importance(run, before)
    longer = "raise max_rounds, or" if chains.num_rounds >= max_rounds else "try to"
    reason = f"{before} ({chains.wanted}): {longer} reparametrize the model"
    if run.search.found and chains.rhat > HOPELESS_RHAT:
        # Chains that are far apart say less of the posterior than the curvature at its mode.
        run.chains = None
        reason += "; the draws are of the Gaussian at the mode"
        return _verdict(run, VerdictKind.FAILED, reason=reason, details=details)
    return _verdict(run, VerdictKind.FAILED, reason=reason, details=details, **chains.figures)


def _reason_to_stop(run: StageRunner, effort: str, max_rounds: int, latency: float) -> str:
    """Return why chains are not run unless ``effort="exact"``, empty if they are."""
    if effort != "auto":
        return ""
    if run.size > MANY_PARAMETERS:
        return (
            f'{run.size:,} parameters: effort="exact" would run up to {max_rounds:,} rounds '
            f"of chains; judge predictions (fedmcmc.metrics)"
        )
    if latency * USUAL_ROUNDS > PATIENCE:
        hours = latency * USUAL_ROUNDS / 3600
        return f'effort="exact" would take up to {USUAL_ROUNDS:,} rounds, {hours:.1f} hours'
    if run.caveats:
        return 'no draws can pass; effort="exact" runs chains all the same'
    if run.search.untold:
        return (
            f"no row depends on {listed(run.search.untold)}: change the model, or pass "
            f'effort="exact" to run chains'
        )
    if run.posterior.unmarked_local:
        return (
            f"{listed(run.posterior.unmarked_local)} may lack infer={{'local': True}} (see "
            f'the warning): mark what is local, or pass effort="exact" to run chains'
        )
    return ""


def _temper(run: StageRunner, before: str = "") -> Verdict:
    """Temper, and return the verdict; `before` names the check that failed before."""
    chains, errors = run.chains, run.temper()
    figures: dict[str, Any] = dict(error=errors.mean, sd_error=errors.sd)
    if not errors.are_small:
        told = f"groups of tempering differ by {errors.mean:.2g} sd and {100 * errors.sd:.2g} %"
        reason = "; ".join(x for x in (before, told) if x) + ": reparametrize the model"
        if chains is not None and chains.errors.excess < errors.excess:
            run.chains, run.tempered = chains, None  # the better of the two
            figures = chains.figures
        return _verdict(run, VerdictKind.FAILED, reason=reason, **figures)
    if run.posterior.improper:
        reason = (
            f"the prior of {listed(run.posterior.improper)} is improper, and tempering would not "
            f"notice a posterior that is improper, too: give it a proper prior"
        )
        return _verdict(run, VerdictKind.DOUBTFUL, "SMC", reason=reason, **figures)
    return _passed(run, "SMC", **figures)


def _passed(run: StageRunner, method: str, **parts: Any) -> Verdict:
    """Return the verdict on draws that passed, unless the posterior does not fall far out."""
    name = run.flat_coordinate()
    if not name:
        return _verdict(run, VerdictKind.PASSED, method, **parts)
    reason = f"the log posterior does not fall along {name}: give it a proper prior"
    return _verdict(run, VerdictKind.DOUBTFUL, method, reason=reason, **parts)


def _by_importance(run: StageRunner, reason: str = "") -> Verdict:
    found = run.corrected
    assert found is not None
    run.evidence, told = found, found.verdict
    return _verdict(
        run,
        told.kind,
        "importance",
        reason="; ".join(x for x in (told.reason, reason) if x),
        k_hat=told.k_hat,
        ess=told.ess,
        error=told.error,
        sd_error=told.sd_error,
    )


def _approximate(run: StageRunner, why: str) -> Verdict:
    num = len(run.search.modes)
    what = f"Gaussian{'s' * (num > 1)} at {num} mode{'s' * (num > 1)}"
    if not run.search.found:
        what = "a Gaussian at a place that is no mode"
    checked = "not compared with the posterior"
    if run.corrected is not None:
        checked = "importance weights did not pass"
    elif run.predicted > HOPELESS:
        checked = (
            f"not weighted, as a k-hat of at least {run.predicted:.2f} is predicted (wanted: "
            f"at most {HOPELESS:g})"
        )
    k_hat = np.nan if run.corrected is None else run.corrected.khat
    reason = f"{what}, {checked}; {why}"
    return _verdict(run, VerdictKind.APPROXIMATE, reason=reason, k_hat=k_hat)


def _so_far(run: StageRunner) -> str:
    rounds = sum(stage.rounds for stage in run.stages)
    bits = sum(stage.bits_up + stage.bits_down for stage in run.stages)
    parts = [f"{rounds:,} rounds, {bits / 1e6:,.1f} Mbit"]
    if run.search.num_symmetric > 1:
        parts.append(f"{run.search.num_symmetric} symmetric modes")
    return "; ".join([*parts, f"modes searched from {run.search.num_starts} starts"])


def _verdict(run: StageRunner, kind: VerdictKind, method: str = "", **parts: Any) -> Verdict:
    """Return a verdict with what all have: modes, costs, and what is never passed."""
    details = "; ".join(x for x in (parts.pop("details", ""), _so_far(run)) if x)
    caveats = run.search.caveats + run.caveats
    if kind is VerdictKind.PASSED and caveats:
        kind = VerdictKind.DOUBTFUL
    reason = "; ".join(x for x in (*caveats, parts.pop("reason", "")) if x)
    return Verdict(kind, method, reason=reason, details=details, **parts)
