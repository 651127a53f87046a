"""Stages of a fit: functions ``(problem, results so far) -> StageResult``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.algorithms import fed_ep
from fedmcmc.diagnostics import MonteCarloErrors, VerdictKind, at_rest, group_errors
from fedmcmc.exact import (
    GOOD_KHAT,
    Corrected,
    Tempered,
    correct,
    draws_needed,
    ravel_draws,
    tempered,
)
from fedmcmc.fitting._chains import Chains, run_chains
from fedmcmc.fitting._flat import find_flat_coordinate, refuse_flat_directions
from fedmcmc.fitting._modes import ModeSearch, find_modes
from fedmcmc.fitting._precision import check_precision
from fedmcmc.fitting._predicted import MAX_KHAT, predict_tail, tail_index
from fedmcmc.fitting._progress import ticking
from fedmcmc.fitting._report import StageReport, cost_of
from fedmcmc.gaussian import Gaussian, Mixture, moments_of
from fedmcmc.pytrees import trees
from fedmcmc.random import folded_key
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import Ledger
from fedmcmc.types import ArrayTree, Posterior

EP_MAX_ROUNDS, EP_ROWS_PER_PARAMETER, EP_MAX_DIMENSIONS = 50, 5, 256
"""Limits of FedEP: number of rounds, rows per parameter at most clients, number of parameters."""
MODES_KEY, CORRECTION_KEY, PROPAGATION_KEY, RECORRECTION_KEY, CHAINS_KEY, EVIDENCE_KEY = range(6)
DRAW_KEY, TEMPERING_KEY, PREDICTION_KEY, MORE_DRAWS_KEY, MORE_SEEDS_KEY = range(6, 11)
"""Numbers of the stages, folded into the random key."""
WIDENING = 4.0
"""Factor of the variances at the modes for the start of tempering."""
NUM_ISLANDS, NUM_SEEDS, MAX_SEEDS, CHAIN_LENGTH = 8, 100, 1600, 20
"""Groups of chains of tempering, initial and largest number of chains per group, their length."""
MAX_DRAWS_FACTOR = 10
"""Largest number of weighted draws, in multiples of `num_draws`, that reduce the error."""


@dataclass(frozen=True)
class Problem:
    """Model, clients and settings of a fit; see `fedmcmc.fit`."""

    posterior: Posterior
    consortium: Consortium
    rng_key: Array
    num_draws: int
    effort: str
    max_rounds: int
    latency: float
    position: ArrayTree | None
    progress: bool

    def key(self, stage: int) -> Array:
        return folded_key(self.rng_key, stage)


@dataclass(frozen=True)
class StageResults:
    """Results of the stages so far; ``None`` for a stage that did not run or failed.

    `rows` are rows of the report, `propagated` is a run of FedEP that came to rest, and `evidence`
    is the correction that estimates the evidence. `chains` and `tempered` are ``None`` also if
    their draws are not used. The posterior does not fall along `flat_coordinate`, unless this is
    "". Because of a caveat the verdict cannot be ``passed``.
    """

    search: ModeSearch
    rows: tuple[StageReport, ...] = ()
    predicted_khat: float = 0.0
    propagated: Samples | None = None
    corrected: Corrected | None = None
    evidence: Corrected | None = None
    chains: Chains | None = None
    tempered: Tempered | None = None
    flat_coordinate: str = ""
    caveats: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of parameters."""
        return trees.num_elements(self.search.centre)

    def correction_is(self, kind: VerdictKind) -> bool:
        """Return true if there are weighted draws with this kind of verdict."""
        return self.corrected is not None and self.corrected.verdict.kind == kind


class StageResult(NamedTuple):
    """Row of the report, and the results after the stage."""

    row: StageReport
    results: StageResults


class Step(NamedTuple):
    """Stage with a name for its progress bar and the condition under which it runs."""

    name: str
    stage: Callable[[Problem, Any], StageResult]
    is_needed: Callable[[Problem, StageResults], bool] = lambda problem, results: True


def run_step(problem: Problem, step: Step, results: StageResults | None = None) -> StageResults:
    """Run a stage under a progress bar, and add its row to the report."""
    start = time.perf_counter()
    with ticking(step.name, problem.progress) as bar:
        row, results = step.stage(problem, results)
        bar.set_postfix_str(row.verdict)
    row = replace(row, seconds=time.perf_counter() - start)
    return replace(results, rows=(*results.rows, row))


def run_steps(problem: Problem, steps: Sequence[Step], results: StageResults) -> StageResults:
    """Run the stages that are needed, in order."""
    for step in steps:
        if step.is_needed(problem, results):
            results = run_step(problem, step, results)
    return results


def _search_modes(problem: Problem, results: None) -> StageResult:
    """Search for modes; all stages that follow start from them."""
    search = find_modes(
        problem.key(MODES_KEY),
        problem.posterior,
        problem.consortium,
        position=problem.position,
        num_draws=problem.num_draws,
    )
    ledger = Ledger(problem.consortium)
    refuse_flat_directions(problem.posterior, ledger, search)
    mode, num = search.modes[0], len(search.modes)
    caveats: tuple[str, ...] = ()
    if search.has_mode:
        caveats = _find_precision_caveats(problem, ledger, search.centre, mode.covariance)
        verdict = f"{num} mode{'s' * (num > 1)}"
        why = (
            f"from {search.num_starts} starts; positive curvature in all {len(mode.flat)} "
            f"directions"
        )
    else:
        verdict = "no maximum"
        why = (
            f"{mode.clipped} of {len(mode.flat)} directions are flat or rise at the highest point "
            f"of the search"
        )
    ledger.add(search.rounds, search.bits_up, search.bits_down)
    cost = (ledger.rounds, ledger.up, ledger.down)
    row = StageReport("modes", f"{search.num_starts} starts", *cost, verdict=verdict, why=why)
    return StageResult(row, StageResults(search, caveats=caveats))


def _find_precision_caveats(
    problem: Problem, ledger: Ledger, position: ArrayTree, covariance: np.ndarray
) -> tuple[str, ...]:
    """Return a caveat if rounding errors of the log likelihood are too large near a position."""
    check = check_precision(problem.posterior, problem.consortium, position, covariance)
    ledger.add(check.rounds, check.bits_up, check.bits_down)
    return () if check.ok else (check.message,)


def _predict_khat(problem: Problem, results: StageResults) -> StageResult:
    """Predict k-hat of the Gaussians at the modes."""
    if results.search.modes[0].covariance.ndim == 2:
        rows = problem.consortium.federation.num_rows / results.size
        why = (
            "the Gaussians have the posterior's curvature, so k-hat depends only on the "
            f"posterior's deviation from a Gaussian; {rows:,.1f} rows per parameter (ten usually "
            "suffice)"
        )
        return StageResult(_prediction_row("curvature at the modes", 0.0, why), results)
    key = problem.key(PREDICTION_KEY)
    tail = predict_tail(key, problem.posterior, problem.consortium, results.search)
    why = (
        f"variances without correlations, compared with the posterior's curvature: lower bound of "
        f"k-hat (Lanczos, {tail.products} products with the Hessian)"
    )
    row = replace(
        _prediction_row("curvature along some directions", tail.k_hat, why),
        rounds=tail.rounds,
        bits_up=tail.bits_up,
        bits_down=tail.bits_down,
    )
    return StageResult(row, replace(results, predicted_khat=tail.k_hat))


def _prediction_row(method: str, k_hat: float, why: str) -> StageReport:
    verdict = f"k-hat above {MAX_KHAT:g}" if k_hat > MAX_KHAT else "worth a round"
    return StageReport("prediction", method, 0, 0.0, 0.0, k_hat=k_hat, verdict=verdict, why=why)


def _is_promising(problem: Problem, results: StageResults) -> bool:
    return results.search.has_mode and results.predicted_khat <= MAX_KHAT


def _weight_draws(problem: Problem, results: StageResults) -> StageResult:
    mixture = results.search.mixture()
    return _correct(problem, results, CORRECTION_KEY, mixture, "mixture at the modes")


def _needs_more_draws(problem: Problem, results: StageResults) -> bool:
    """Return true if more draws of the same proposal would reduce the error sufficiently."""
    corrected = results.corrected
    if corrected is None or corrected.verdict.kind != VerdictKind.DOUBTFUL:
        return False
    if len(corrected.rounds) > 1 or not corrected.k_hat < GOOD_KHAT:
        return False
    errors = _errors_of(corrected)
    num_draws = draws_needed(corrected.num_draws, errors)
    return not errors.are_small and num_draws <= MAX_DRAWS_FACTOR * problem.num_draws


def _weight_more_draws(problem: Problem, results: StageResults) -> StageResult:
    assert results.corrected is not None
    num_draws = draws_needed(results.corrected.num_draws, _errors_of(results.corrected))
    mixture, method = results.search.mixture(), "the same mixture, more draws"
    return _correct(problem, results, MORE_DRAWS_KEY, mixture, method, num_draws)


def _errors_of(corrected: Corrected) -> MonteCarloErrors:
    return MonteCarloErrors(corrected.verdict.error, corrected.verdict.sd_error)


def _correct(
    problem: Problem,
    results: StageResults,
    key: int,
    approximation: Gaussian | Mixture | Samples,
    method: str,
    num_draws: int | None = None,
) -> StageResult:
    try:
        corrected = correct(
            problem.key(key),
            problem.posterior,
            problem.consortium,
            approximation,
            num_draws=problem.num_draws if num_draws is None else num_draws,
            centre=results.search.centre,
        )
    except ValueError as error:
        # Log densities at draws of the Gaussians may overflow even if the search was finite.
        row = StageReport("correction", method, 1, 0.0, 0.0, verdict="failed", why=str(error))
        return StageResult(row, results)
    method = f"{method}, {len(corrected.rounds)} proposal(s)"
    row = _correction_row("correction", method, corrected)
    return StageResult(row, replace(results, corrected=corrected))


def _correction_row(stage: str, method: str, corrected: Corrected) -> StageReport:
    return StageReport(
        stage,
        method,
        *_cost_of_totals(corrected.totals),
        k_hat=corrected.k_hat,
        ess=corrected.ess,
        verdict=str(corrected.verdict.kind),
        why=str(corrected.verdict),
    )


def _cost_of_totals(totals: dict[str, float]) -> tuple[int, float, float]:
    return int(totals["rounds"]), totals["bits_up"], totals["bits_down"]


def _needs_propagation(problem: Problem, results: StageResults) -> bool:
    """Return true if the weights failed and clients have enough rows for FedEP."""
    if not results.correction_is(VerdictKind.FAILED) or results.size > EP_MAX_DIMENSIONS:
        return False
    sizes = np.asarray(problem.consortium.federation.sizes)
    return float((sizes >= EP_ROWS_PER_PARAMETER * results.size).mean()) > 0.5


def _propagate(problem: Problem, results: StageResults) -> StageResult:
    samples = problem.consortium.sample(
        problem.key(PROPAGATION_KEY),
        fed_ep(problem.posterior),
        position=results.search.centre,
        until=at_rest(),
        max_rounds=EP_MAX_ROUNDS,
        progress=False,
    )
    is_at_rest = bool(samples.stopped["reached"])
    verdict = "at rest" if is_at_rest else "still moves"
    row = StageReport("approximation", "FedEP", *cost_of(samples), verdict=verdict)
    return StageResult(row, replace(results, propagated=samples if is_at_rest else None))


def _has_propagated(problem: Problem, results: StageResults) -> bool:
    return results.propagated is not None


def _predict_propagated(problem: Problem, results: StageResults) -> StageResult:
    assert results.propagated is not None
    server = jax.tree.map(lambda x: x[0], results.propagated.state.server)
    _, covariance = moments_of(server.approximation.gaussian)
    k_hat = tail_index(covariance, np.linalg.inv(results.search.modes[0].covariance))
    why = "FedEP's covariance, compared with the curvature at the mode"
    return StageResult(_prediction_row("FedEP's Gaussian", k_hat, why), results)


def _weight_propagated(problem: Problem, results: StageResults) -> StageResult:
    assert results.propagated is not None
    return _correct(problem, results, RECORRECTION_KEY, results.propagated, "FedEP's Gaussian")


def _sample_chains(problem: Problem, results: StageResults) -> StageResult:
    chains = run_chains(
        problem.key(CHAINS_KEY),
        problem.posterior,
        problem.consortium,
        results.search,
        results.corrected,
        max_rounds=problem.max_rounds,
    )
    why = chains.why
    if results.corrected is not None:
        why += _compare_with_weights(chains.samples, results.corrected)
    row = StageReport(
        "chains",
        chains.method,
        *cost_of(chains.samples, chains.num_rounds),
        rhat=chains.rhat,
        ess=chains.ess,
        verdict="agree" if chains.agree else "disagree",
        why=why,
    )
    return StageResult(row, replace(results, chains=chains))


def _compare_with_weights(samples: Samples, corrected: Corrected) -> str:
    """Describe the difference between the moments of weighted draws and of chains."""
    weights = corrected.weights
    shifts, ratios = [], []
    leaves = map(jax.tree.leaves, (corrected.draws, samples.draws))
    for weighted, leaf in zip(*leaves, strict=True):
        weighted, leaf = np.asarray(weighted, np.float64), np.asarray(leaf, np.float64)
        mean, sd = np.tensordot(weights, weighted, 1), leaf.std((0, 1))
        shifts.append(np.max(np.abs(leaf.mean((0, 1)) - mean) / sd))
        ratio = np.sqrt(np.tensordot(weights, (weighted - mean) ** 2, 1)) / sd
        ratios += [np.min(ratio), np.max(ratio)]
    return (
        f"; the weighted draws' means were up to {max(shifts):.2f} sd away, their sds "
        f"{min(ratios):.2f} to {max(ratios):.2f} of the chains' sds"
    )


def _has_converged_chains(problem: Problem, results: StageResults) -> bool:
    return results.chains is not None and results.chains.agree


def _needs_precision_check(problem: Problem, results: StageResults) -> bool:
    return _has_converged_chains(problem, results) and not results.search.has_mode


def _check_precision_of_chains(problem: Problem, results: StageResults) -> StageResult:
    assert results.chains is not None
    position = jax.tree.map(lambda x: jnp.asarray(x[0, -1]), results.chains.samples.draws)
    ledger = Ledger(problem.consortium)
    caveats = _find_precision_caveats(problem, ledger, position, results.chains.covariance)
    cost = (ledger.rounds, ledger.up, ledger.down)
    row = StageReport("precision", "rounding near a draw", *cost, verdict="measured")
    return StageResult(row, replace(results, caveats=(*results.caveats, *caveats)))


def _measure_evidence(problem: Problem, results: StageResults) -> StageResult:
    """Weight draws of a Gaussian with the moments of the chains."""
    assert results.chains is not None
    corrected = correct(
        problem.key(EVIDENCE_KEY),
        problem.posterior,
        problem.consortium,
        results.chains.proposal(),
        num_draws=problem.num_draws,
        centre=results.search.centre,
        adapt=False,
    )
    row = _correction_row("evidence", "weights of a Gaussian with the chains' moments", corrected)
    return StageResult(row, replace(results, evidence=corrected))


def run_tempering(problem: Problem, results: StageResults) -> tuple[StageResults, MonteCarloErrors]:
    """Temper, with more chains if errors are large, and return the errors of the groups."""
    num_seeds, key = NUM_SEEDS, TEMPERING_KEY
    while True:
        stage = partial(_temper, num_seeds=num_seeds, key=key)
        results = run_step(problem, Step("tempering", stage), results)
        errors = _estimate_island_errors(results.tempered)
        if errors.are_small or num_seeds >= MAX_SEEDS:
            return replace(results, chains=None), errors
        factor = min(max(2, int(np.ceil(1.5 * min(errors.excess, 100)))), 16)
        num_seeds, key = min(num_seeds * factor, MAX_SEEDS), MORE_SEEDS_KEY


def _temper(problem: Problem, results: StageResults, *, num_seeds: int, key: int) -> StageResult:
    draws = tempered(
        problem.key(key),
        problem.posterior,
        problem.consortium,
        results.search.mixture(tail=0.5, widen=WIDENING),
        num_seeds=num_seeds,
        length=CHAIN_LENGTH,
        num_islands=NUM_ISLANDS,
        centre=results.search.centre,
    )
    errors = _estimate_island_errors(draws)
    row = StageReport(
        "tempering",
        f"{NUM_ISLANDS} groups, {len(draws.acceptance)} temperatures",
        *_cost_of_totals(draws.totals),
        verdict="agree" if errors.are_small else "disagree",
        why=(
            f"Monte Carlo errors up to {errors.mean:.2g} sd (means) and {100 * errors.sd:.2g} % "
            f"(sds), by {NUM_ISLANDS} groups of {num_seeds} chains"
        ),
    )
    return StageResult(row, replace(results, tempered=draws))


def _estimate_island_errors(draws: Tempered | None) -> MonteCarloErrors:
    assert draws is not None
    flat = ravel_draws(draws.islands)
    return group_errors(flat.reshape(NUM_ISLANDS, -1, flat.shape[1]))


def _may_be_improper(problem: Problem, results: StageResults) -> bool:
    # A NumPyro model lists its improper priors, and the search has already tried them.
    return not problem.posterior.is_traced


def _probe_far_out(problem: Problem, results: StageResults) -> StageResult:
    """Look for a coordinate along which the log posterior does not fall beyond the draws."""
    draws: ArrayTree = None
    if results.tempered is not None:
        draws = results.tempered.islands
    elif results.chains is not None:
        draws = results.chains.samples.draws
    ledger = Ledger(problem.consortium)
    name = find_flat_coordinate(
        problem.posterior, ledger, results.search.centre, ravel_draws(draws)
    )
    verdict = f"flat along {name}" if name else "falls"
    cost = (ledger.rounds, ledger.up, ledger.down)
    row = StageReport("far out", "along each coordinate", *cost, verdict=verdict)
    return StageResult(row, replace(results, flat_coordinate=name))


SEARCH = Step("modes", _search_modes)
WEIGHTING = (
    Step("prediction", _predict_khat, lambda problem, results: results.search.has_mode),
    Step("correction", _weight_draws, _is_promising),
    Step("correction", _weight_more_draws, _needs_more_draws),
    Step("FedEP", _propagate, _needs_propagation),
    Step("prediction", _predict_propagated, _has_propagated),
    Step("correction", _weight_propagated, _has_propagated),
)
CHAINS = (
    Step("chains", _sample_chains),
    Step("precision", _check_precision_of_chains, _needs_precision_check),
    Step("evidence", _measure_evidence, _has_converged_chains),
)
FAR_OUT = (Step("far out", _probe_far_out, _may_be_improper),)
