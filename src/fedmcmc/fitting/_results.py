"""From the results of a fit's stages to what the user gets."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import Posterior
from fedmcmc.diagnostics import Verdict, VerdictKind
from fedmcmc.fitting._fitted import Fitted, reported
from fedmcmc.fitting._runner import DRAW, StageRunner
from fedmcmc.fitting._stages import as_samples, one_chain, what_was_done
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples

KEPT_STATES = 2000
"""Number of draws that are kept per group of tempering."""


def result_of(run: StageRunner, posterior: Posterior, verdict: Verdict) -> Fitted:
    """Return the fit: draws in the user's coordinates, with evidence and report."""
    samples = replace(
        _samples(run), constrain_fn=posterior.constrain_fn, stopped={"verdict": verdict}
    )
    if posterior.position_fn is not None:
        in_users = jax.jit(jax.vmap(jax.vmap(posterior.position_fn)))
        samples = replace(samples, draws=jax.tree.map(np.asarray, in_users(samples.draws)))
    weighted = None if run.chains is not None or run.tempered is not None else run.evidence
    evidence, evidence_sd = _evidence(run)
    report = reported(
        tuple(run.stages),
        verdict,
        samples,
        run.consortium.federation,
        run.size,
        evidence=(evidence, evidence_sd),
        weighted=weighted,
        improper=posterior.improper,
    )
    return Fitted(
        samples,
        verdict,
        evidence,
        evidence_sd,
        report,
        posterior,
        weighted,
        _gaussian(run),
    )


def _evidence(run: StageRunner) -> tuple[float, float]:
    """Return the log evidence and its standard error, NaN if nothing that passed has it."""
    if run.tempered is not None:
        return run.tempered.log_evidence, run.tempered.log_evidence_sd
    if run.evidence is None or run.evidence.verdict.kind == VerdictKind.FAILED:
        return np.nan, np.nan
    return run.evidence.log_evidence, run.evidence.log_evidence_sd


def _gaussian(run: StageRunner) -> Gaussian | None:
    if not run.search.found:
        return None
    covariance = run.search.modes[0].covariance
    if covariance.ndim == 2:
        return Gaussian.from_moments(run.search.centre, covariance)
    variance = trees.unravel(jnp.asarray(covariance), run.search.centre)
    return Gaussian.from_moments(run.search.centre, variance=variance)


def _samples(run: StageRunner) -> Samples:
    if run.tempered is not None:
        num = jax.tree.leaves(run.tempered.islands)[0].shape[1]
        states = np.linspace(0, num - 1, min(num, KEPT_STATES)).astype(int)
        draws = jax.tree.map(lambda leaf: leaf[:, states], run.tempered.islands)
        return as_samples(draws, run.stages)
    if run.chains is not None:
        samples = run.chains.samples  # whose settings are those of the last segment
        of_all = ("method", "kernel", "data", "chains", "where")
        kept = {name: x for name, x in samples.settings.items() if name in of_all}
        return replace(samples, settings=what_was_done(run.stages) | kept)
    if run.evidence is not None:
        found, num = run.evidence, run.num_draws
        index_key = run.key(DRAW)
        return as_samples(one_chain(found.resample(index_key, num)), run.stages)
    flat = run.search.mixture(tail=0.0).draw(run.key(DRAW), run.num_draws)
    draws = jax.vmap(lambda x: trees.unravel(x, run.search.centre))(flat)
    return as_samples(one_chain(draws), run.stages)
