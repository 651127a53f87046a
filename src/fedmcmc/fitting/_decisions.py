"""Choice of the stages of a fit, and the verdict on their results."""

from dataclasses import replace
from typing import Any

import numpy as np

from fedmcmc.diagnostics import Verdict, VerdictKind
from fedmcmc.fitting._chains import EARLY_ABORT_RHAT, REQUIREMENTS
from fedmcmc.fitting._findings import join_names
from fedmcmc.fitting._predicted import MAX_KHAT
from fedmcmc.fitting._stages import (
    CHAINS,
    FAR_OUT,
    WEIGHTING,
    Problem,
    StageResults,
    run_steps,
    run_tempering,
)

TYPICAL_ROUNDS, MAX_SECONDS = 1050, 3600.0
"""Typical number of rounds of chains, and the longest time of these with ``effort="auto"``."""
MAX_PARAMETERS = 2000
"""Number of parameters above which only ``effort="exact"`` runs chains."""
MAX_TEMPERED_PARAMETERS = 50
"""Number of parameters up to which chains that disagree are replaced by tempering."""


def decide(problem: Problem, results: StageResults) -> tuple[Verdict, StageResults]:
    """Run the stages that are needed after the search for modes, and return the verdict."""
    if problem.effort == "approximate":
        return _judge_approximation(results, "as requested"), results
    results = run_steps(problem, WEIGHTING, results)
    if results.correction_is(VerdictKind.PASSED):
        return _judge_weights(results)
    reason = _find_reason_to_stop(problem, results)
    if reason:
        if results.correction_is(VerdictKind.DOUBTFUL):
            return _judge_weights(results, reason)
        return _judge_approximation(results, reason), results
    if len(results.search.modes) > 1:  # chains do not move between modes
        return _temper(problem, results)
    results = run_steps(problem, CHAINS, results)
    chains = results.chains
    assert chains is not None
    details = f"{chains.num_rounds:,} rounds of {chains.samples.num_chains} chains"
    if chains.agree:
        return _judge_passed(problem, results, "MCMC", details=details, **chains.figures)
    failure = f"chains did not agree (R-hat {chains.rhat:.3f}, {chains.ess:,.0f} effective draws)"
    if results.search.has_mode and results.size <= MAX_TEMPERED_PARAMETERS:
        return _temper(problem, results, failure)
    if results.correction_is(VerdictKind.DOUBTFUL):
        return _judge_weights(replace(results, chains=None), failure)
    remedy = "raise max_rounds, or" if chains.num_rounds >= problem.max_rounds else "try to"
    reason = f"{failure} ({REQUIREMENTS}): {remedy} reparametrize the model"
    figures = chains.figures
    if results.search.has_mode and chains.rhat > EARLY_ABORT_RHAT:
        # The curvature at the mode describes the posterior better than chains that are far apart.
        results, figures = replace(results, chains=None), {}
        reason += "; the draws are from the Gaussian at the mode"
    verdict = _make_verdict(results, VerdictKind.FAILED, reason=reason, details=details, **figures)
    return verdict, results


def _find_reason_to_stop(problem: Problem, results: StageResults) -> str:
    """Return the reason to run no chains unless ``effort="exact"``, or ""."""
    if problem.effort != "auto":
        return ""
    if results.size > MAX_PARAMETERS:
        return (
            f'{results.size:,} parameters: effort="exact" would run up to '
            f"{problem.max_rounds:,} rounds of chains; judge predictions (fedmcmc.metrics)"
        )
    if problem.latency * TYPICAL_ROUNDS > MAX_SECONDS:
        hours = problem.latency * TYPICAL_ROUNDS / 3600
        return f'effort="exact" would take up to {TYPICAL_ROUNDS:,} rounds, {hours:.1f} hours'
    if results.caveats:
        return 'no draws can pass; effort="exact" still runs chains'
    if results.search.unidentified:
        return (
            f"no row depends on {join_names(results.search.unidentified)}: change the model, or "
            f'pass effort="exact" to run chains'
        )
    if problem.posterior.unmarked_local:
        return (
            f"{join_names(problem.posterior.unmarked_local)} may lack infer={{'local': True}} (see "
            f'the warning): mark local sites, or pass effort="exact" to run chains'
        )
    return ""


def _temper(
    problem: Problem, results: StageResults, failure: str = ""
) -> tuple[Verdict, StageResults]:
    """Temper, and return the verdict; `failure` describes the check that failed before."""
    chains = results.chains
    results, errors = run_tempering(problem, results)
    figures: dict[str, Any] = dict(error=errors.mean, sd_error=errors.sd)
    if not errors.are_small:
        gap = f"groups of tempering differ by {errors.mean:.2g} sd and {100 * errors.sd:.2g} %"
        reason = "; ".join(x for x in (failure, gap) if x) + ": reparametrize the model"
        if chains is not None and chains.errors.excess < errors.excess:
            results = replace(results, chains=chains, tempered=None)  # the smaller error
            figures = chains.figures
        return _make_verdict(results, VerdictKind.FAILED, reason=reason, **figures), results
    if problem.posterior.improper:
        reason = (
            f"the prior of {join_names(problem.posterior.improper)} is improper, and tempering "
            f"cannot detect an improper posterior: use a proper prior"
        )
        verdict = _make_verdict(results, VerdictKind.DOUBTFUL, "SMC", reason=reason, **figures)
        return verdict, results
    return _judge_passed(problem, results, "SMC", **figures)


def _judge_passed(
    problem: Problem, results: StageResults, method: str, **parts: Any
) -> tuple[Verdict, StageResults]:
    """Return the verdict on draws that passed, unless the posterior does not fall far out."""
    results = run_steps(problem, FAR_OUT, results)
    name = results.flat_coordinate
    if not name:
        return _make_verdict(results, VerdictKind.PASSED, method, **parts), results
    reason = f"the log posterior does not fall along {name}: use a proper prior"
    return _make_verdict(results, VerdictKind.DOUBTFUL, method, reason=reason, **parts), results


def _judge_weights(results: StageResults, reason: str = "") -> tuple[Verdict, StageResults]:
    corrected = results.corrected
    assert corrected is not None
    results, verdict = replace(results, evidence=corrected), corrected.verdict
    combined = _make_verdict(
        results,
        verdict.kind,
        "importance",
        reason="; ".join(x for x in (verdict.reason, reason) if x),
        k_hat=verdict.k_hat,
        ess=verdict.ess,
        error=verdict.error,
        sd_error=verdict.sd_error,
    )
    return combined, results


def _judge_approximation(results: StageResults, why: str) -> Verdict:
    num = len(results.search.modes)
    draws = f"Gaussian{'s' * (num > 1)} at {num} mode{'s' * (num > 1)}"
    if not results.search.has_mode:
        draws = "a Gaussian at a point that is not a mode"
    check, k_hat = "not compared with the posterior", np.nan
    if results.corrected is not None:
        check, k_hat = "importance weights did not pass", results.corrected.k_hat
    elif results.predicted_khat > MAX_KHAT:
        check = (
            f"not weighted, because a k-hat of at least {results.predicted_khat:.2f} is predicted "
            f"(required: at most {MAX_KHAT:g})"
        )
    reason = f"{draws}, {check}; {why}"
    return _make_verdict(results, VerdictKind.APPROXIMATE, reason=reason, k_hat=k_hat)


def _make_verdict(
    results: StageResults, kind: VerdictKind, method: str = "", **parts: Any
) -> Verdict:
    """Return a verdict with the costs so far; caveats turn ``passed`` into ``doubtful``."""
    details = "; ".join(x for x in (parts.pop("details", ""), _summarize(results)) if x)
    caveats = results.search.caveats + results.caveats
    if kind is VerdictKind.PASSED and caveats:
        kind = VerdictKind.DOUBTFUL
    reason = "; ".join(x for x in (*caveats, parts.pop("reason", "")) if x)
    return Verdict(kind, method, reason=reason, details=details, **parts)


def _summarize(results: StageResults) -> str:
    """Return the cost of the stages and the extent of the search."""
    search = results.search
    rounds = sum(row.rounds for row in results.rows)
    bits = sum(row.bits_up + row.bits_down for row in results.rows)
    parts = [f"{rounds:,} rounds, {bits / 1e6:,.1f} Mbit"]
    if search.num_symmetric > 1:
        parts.append(f"{search.num_symmetric} symmetric modes")
    return "; ".join([*parts, f"modes searched from {search.num_starts} starts"])
