"""Conversion of the results of a fit's stages to what the user receives."""

from dataclasses import replace

import jax
import numpy as np

from fedmcmc.diagnostics import Verdict, VerdictKind
from fedmcmc.fitting._fitted import Fitted, make_report
from fedmcmc.fitting._report import StageReport
from fedmcmc.fitting._stages import DRAW_KEY, Problem, StageResults
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples
from fedmcmc.storage import versions
from fedmcmc.types import ArrayTree, Broadcast, FederatedState, Posterior

MAX_STATES = 2000
"""Largest number of draws per group of tempering that is kept."""
RUN_SETTINGS = ("method", "kernel", "data", "chains", "where")
"""Settings that all segments of chains share."""


def make_fitted(
    problem: Problem, results: StageResults, posterior: Posterior, verdict: Verdict
) -> Fitted:
    """Return the fit: draws in the user's coordinates, with evidence and report."""
    samples = replace(
        _make_samples(problem, results),
        constrain_fn=posterior.constrain_fn,
        stopped={"verdict": verdict},
    )
    if posterior.position_fn is not None:
        position_fn = jax.jit(jax.vmap(jax.vmap(posterior.position_fn)))
        samples = replace(samples, draws=jax.tree.map(np.asarray, position_fn(samples.draws)))
    is_weighted = results.chains is None and results.tempered is None
    corrected = results.evidence if is_weighted else None
    evidence, evidence_sd = _get_evidence(results)
    report = make_report(
        results.rows,
        verdict,
        samples,
        problem.consortium.federation,
        results.size,
        evidence=(evidence, evidence_sd),
        weighted=corrected,
        improper=posterior.improper,
    )
    gaussian = _make_gaussian(results)
    return Fitted(samples, verdict, evidence, evidence_sd, report, posterior, corrected, gaussian)


def _get_evidence(results: StageResults) -> tuple[float, float]:
    """Return the log evidence and its standard error, NaN if no stage with evidence passed."""
    if results.tempered is not None:
        return results.tempered.log_evidence, results.tempered.log_evidence_sd
    corrected = results.evidence
    if corrected is None or corrected.verdict.kind == VerdictKind.FAILED:
        return np.nan, np.nan
    return corrected.log_evidence, corrected.log_evidence_sd


def _make_gaussian(results: StageResults) -> Gaussian | None:
    search = results.search
    if not search.has_mode:
        return None
    covariance = search.modes[0].covariance
    if covariance.ndim == 2:
        return Gaussian.from_moments(search.centre, covariance)
    variance = trees.unravel(covariance, search.centre)
    return Gaussian.from_moments(search.centre, variance=variance)


def _make_samples(problem: Problem, results: StageResults) -> Samples:
    if results.tempered is not None:
        num = jax.tree.leaves(results.tempered.islands)[0].shape[1]
        states = np.linspace(0, num - 1, min(num, MAX_STATES)).astype(int)
        draws = jax.tree.map(lambda leaf: leaf[:, states], results.tempered.islands)
        return _as_samples(draws, results.rows)
    if results.chains is not None:
        samples = results.chains.samples
        settings = {name: x for name, x in samples.settings.items() if name in RUN_SETTINGS}
        return replace(samples, settings=_describe_stages(results.rows) | settings)
    if results.evidence is not None:
        draws = results.evidence.resample(problem.key(DRAW_KEY), problem.num_draws)
    else:
        centre = results.search.centre
        flat = results.search.mixture(tail=0.0).draw(problem.key(DRAW_KEY), problem.num_draws)
        draws = trees.unravel(np.asarray(flat), centre)
    return _as_samples(jax.tree.map(lambda leaf: np.asarray(leaf)[None], draws), results.rows)


def _as_samples(draws: ArrayTree, rows: tuple[StageReport, ...]) -> Samples:
    """Return draws of equal weight, leaves ``[num_chains, num, *event]``, as samples."""
    num_chains, num = jax.tree.leaves(draws)[0].shape[:2]
    # `device_put` compiles nothing, but may share memory with an array of the host.
    position = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf[:, 0])), draws)
    round = jax.device_put(np.zeros(num_chains, np.int32))
    state = FederatedState(Broadcast(round, position), (), ())
    info = {"draw": np.tile(np.arange(num), (num_chains, 1))}
    totals = {
        name: np.full(num_chains, sum(getattr(row, name) for row in rows) / num_chains)
        for name in ("rounds", "bits_up", "bits_down")
    }
    return Samples(draws, info, state, totals, settings=_describe_stages(rows), versions=versions())


def _describe_stages(rows: tuple[StageReport, ...]) -> dict[str, str]:
    """Return a description of each stage, for the page of the draws."""
    return {
        f"stage {number}: {row.stage}": f"{row.method}; {row.rounds:,} "
        f"round{'s' * (row.rounds != 1)}" + f"; {row.verdict}" * bool(row.verdict)
        for number, row in enumerate(rows, 1)
    }
