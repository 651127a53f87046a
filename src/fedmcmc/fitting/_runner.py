"""The stages of a fit: modes, correction, FedEP, chains, evidence, tempering."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.algorithms import fed_ep
from fedmcmc.diagnostics import MonteCarloErrors, VerdictKind, at_rest, errors_of_groups
from fedmcmc.exact import GOOD_KHAT, Corrected, Tempered, correct, draws_needed, tempered
from fedmcmc.fitting._chains import Chains, run_chains
from fedmcmc.fitting._flat import flat_coordinate, refuse_flat_directions
from fedmcmc.fitting._modes import Search, find_modes
from fedmcmc.fitting._precision import check_precision
from fedmcmc.fitting._predicted import HOPELESS, predicted_tail, tail_index
from fedmcmc.fitting._progress import ticking
from fedmcmc.fitting._report import Stage
from fedmcmc.fitting._stages import COSTS, cost_of, forecast, row_of
from fedmcmc.gaussian import moments_of
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import Ledger

EP_ROUNDS, EP_ROWS, EP_DIMENSIONS = 50, 5, 256
"""Largest number of rounds of FedEP; rows per parameter that most clients need for it; largest
number of parameters."""
MODES, CORRECTION, PROPAGATION, RECORRECTION, CHAINS, EVIDENCE, DRAW, TEMPERING = range(8)
PREDICTION, MORE_DRAWS, AGAIN = 8, 9, 10
"""Numbers of the stages, folded into the key."""
WIDER = 4.0
"""Factor by which the first Gaussians of tempering are wider than those at the modes, in variances.
"""
ISLANDS, SEEDS, MOST_SEEDS = 8, 100, 1600
"""Groups of chains by which tempering's Monte Carlo error is estimated, and chains of a group."""
LENGTH = 20
"""States of a chain of tempering."""
MOST_DRAWS = 10
"""Largest number of weighted draws, in multiples of `num_draws`, taken to reduce their error."""


class StageRunner:
    """Runs the stages of a fit, and stores their results.

    Attributes
    ----------
    stages
        Rows of the report so far.
    search, corrected, chains, tempered
        Results of the stages; ``None`` for a stage that has not run or that failed. `chains` is
        also ``None`` where their draws are not used.
    evidence
        Correction that has the evidence.
    predicted
        Predicted k-hat of the Gaussians at the modes.
    caveats
        Reasons why no verdict on this fit is ``passed``.
    """

    def __init__(
        self,
        posterior: Posterior,
        consortium: Consortium,
        rng_key: Array,
        num_draws: int,
        progress: bool,
    ) -> None:
        self.posterior, self.consortium, self.rng_key = posterior, consortium, rng_key
        self.num_draws, self.progress = num_draws, progress
        self.stages: list[Stage] = []
        self.search: Search
        self.predicted = 0.0
        self.corrected: Corrected | None = None
        self.evidence: Corrected | None = None
        self.chains: Chains | None = None
        self.tempered: Tempered | None = None
        self.caveats: tuple[str, ...] = ()

    @contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[Stage], None]]:
        """Show that a stage runs, and append the row that the caller passes on."""
        begun = time.perf_counter()
        with ticking(name, self.progress) as bar:

            def done(stage: Stage) -> None:
                seconds = time.perf_counter() - begun
                self.stages.append(replace(stage, seconds=seconds))
                bar.set_postfix_str(stage.verdict)

            yield done

    def key(self, number: int) -> Array:
        return jax.random.fold_in(self.rng_key, number)

    @property
    def size(self) -> int:
        return trees.num_elements(self.search.centre)

    def correction_is(self, kind: str) -> bool:
        return self.corrected is not None and self.corrected.verdict.kind == kind

    def find_modes(self, position: ArrayTree | None) -> None:
        """Search for modes; all other stages start from what this one finds."""
        with self._bar("modes") as done:
            self.search = search = find_modes(
                self.key(MODES),
                self.posterior,
                self.consortium,
                position=position,
                num_draws=self.num_draws,
            )
            ledger = Ledger(self.consortium)
            refuse_flat_directions(self.posterior, ledger, search)
            if search.found:
                self._check_precision(ledger, search.centre, search.modes[0].covariance)
            num, highest = len(search.modes), search.modes[0]
            if search.found:
                verdict, why = (
                    f"{num} mode{'s' * (num > 1)}",
                    (
                        f"from {search.num_starts} starts; curvature there is positive in all "
                        f"{len(highest.flat)} directions"
                    ),
                )
            else:
                verdict, why = (
                    "no maximum",
                    (
                        f"{highest.clipped} of {len(highest.flat)} directions are flat or rise at "
                        f"the best place found"
                    ),
                )
            cost = (
                search.rounds + ledger.rounds,
                search.bits_up + ledger.up,
                search.bits_down + ledger.down,
                0.0,
            )
            done(Stage("modes", f"{search.num_starts} starts", *cost, verdict=verdict, why=why))

    def _check_precision(self, ledger: Ledger, position: ArrayTree, covariance: np.ndarray) -> None:
        """Note if rounding errors of the log likelihood are too large near `position`."""
        found = check_precision(self.posterior, self.consortium, position, covariance)
        ledger.add(found.rounds, found.bits_up, found.bits_down)
        if not found.ok:
            self.caveats = (*self.caveats, found.message)

    def _check_precision_of(self, chains: Chains) -> None:
        """Note if rounding errors are too large near a draw of chains that had no mode."""
        with self._bar("precision") as done:
            last = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, -1]), chains.samples.draws)
            ledger = Ledger(self.consortium)
            self._check_precision(ledger, last, chains.covariance)
            cost = (ledger.rounds, ledger.up, ledger.down, 0.0)
            done(Stage("precision", "rounding near a draw", *cost, verdict="measured"))

    def correct_by_modes(self) -> None:
        """Weight draws of Gaussians at the modes, more of them if their error is too large."""
        mixture = self.search.mixture()
        self._correct(CORRECTION, mixture, "mixture at the modes")
        found = self.corrected
        if found is None or found.verdict.kind != VerdictKind.DOUBTFUL:
            return
        if len(found.rounds) > 1 or not found.khat < GOOD_KHAT:
            return
        errors = MonteCarloErrors(found.verdict.error, found.verdict.sd_error)
        needed = draws_needed(found.num_draws, errors)
        if not errors.are_small and needed <= MOST_DRAWS * self.num_draws:
            self._correct(MORE_DRAWS, mixture, "the same mixture, more draws", needed)

    def _correct(
        self, number: int, approximation: Any, method: str, num_draws: int | None = None
    ) -> None:
        with self._bar("correction") as done:
            try:
                self.corrected = found = correct(
                    self.key(number),
                    self.posterior,
                    self.consortium,
                    approximation,
                    num_draws=self.num_draws if num_draws is None else num_draws,
                    centre=self.search.centre,
                )
            except ValueError as error:
                # The search's own exchanges were finite: draws of its Gaussians need not be.
                done(
                    Stage("correction", method, 1, 0.0, 0.0, 0.0, verdict="failed", why=str(error))
                )
                return
            done(row_of("correction", f"{method}, {len(found.rounds)} proposal(s)", found))

    def weights_may_do(self) -> bool:
        """Predict k-hat of the Gaussians at the modes, and return whether it is worth a round."""
        with self._bar("prediction") as done:
            if self.search.modes[0].covariance.ndim == 2:
                rows = self.consortium.federation.num_rows / self.size
                why = (
                    "the Gaussians have the posterior's own curvature, so that k-hat is what the "
                    f"posterior is not Gaussian; {rows:,.1f} rows per parameter, of which ten are "
                    "usually enough"
                )
                done(forecast("curvature at the modes", 0.0, why))
                return True
            tail = predicted_tail(
                self.key(PREDICTION), self.posterior, self.consortium, self.search
            )
            self.predicted = tail.khat
            why = (
                f"variances without correlations, against the posterior's curvature: k-hat is at "
                f"least that (Lanczos, {tail.products} products with the Hessian)"
            )
            done(
                replace(
                    forecast("curvature along some directions", tail.khat, why),
                    rounds=tail.rounds,
                    bits_up=tail.bits_up,
                    bits_down=tail.bits_down,
                )
            )
        return tail.khat <= HOPELESS

    @property
    def ep_fits(self) -> bool:
        enough = np.asarray(self.consortium.federation.sizes) >= EP_ROWS * self.size
        return self.size <= EP_DIMENSIONS and float(enough.mean()) > 0.5

    def propagate(self) -> None:
        with self._bar("FedEP") as done:
            samples = self.consortium.sample(
                self.key(PROPAGATION),
                fed_ep(self.posterior),
                position=self.search.centre,
                until=at_rest(),
                max_rounds=EP_ROUNDS,
                progress=False,
            )
            reached = bool(samples.stopped["reached"])
            verdict = "at rest" if reached else "still moves"
            done(Stage("approximation", "FedEP", *cost_of(samples), 0.0, verdict=verdict))
        if reached:
            with self._bar("prediction") as done:
                of_chain = jax.tree.map(lambda x: x[0], samples.state.server)
                _, covariance = moments_of(of_chain.approximation.gaussian)
                khat = tail_index(covariance, np.linalg.inv(self.search.modes[0].covariance))
                why = "FedEP's covariance against the curvature at the mode"
                done(forecast("FedEP's Gaussian", khat, why))
            self._correct(RECORRECTION, samples, "FedEP's Gaussian")

    def run_chains(self, max_rounds: int) -> None:
        """Run chains, and measure the evidence if they agree."""
        with self._bar("chains") as done:
            self.chains = chains = run_chains(
                self.key(CHAINS),
                self.posterior,
                self.consortium,
                self.search,
                self.corrected,
                max_rounds=max_rounds,
            )
            agreed = chains.agree
            done(
                Stage(
                    "chains",
                    chains.method,
                    *cost_of(chains.samples, chains.num_rounds),
                    0.0,
                    rhat=chains.rhat,
                    ess=chains.ess,
                    verdict="agree" if agreed else "disagree",
                    why=chains.why + self._beside_weights(chains.samples),
                )
            )
        if agreed:
            if not self.search.found:
                self._check_precision_of(chains)
            self._measure_evidence(chains)

    def _beside_weights(self, samples: Samples) -> str:
        """Return how far the weighted draws are from draws of chains, if there are such."""
        if self.corrected is None:
            return ""
        weights = self.corrected.weights
        draws = (self.corrected.draws, samples.draws)
        shifts, ratios = [], []
        for weighted, leaf in zip(*map(jax.tree.leaves, draws), strict=True):
            weighted, leaf = np.asarray(weighted, np.float64), np.asarray(leaf, np.float64)
            mean, sd = np.tensordot(weights, weighted, 1), leaf.std((0, 1))
            shifts.append(np.max(np.abs(leaf.mean((0, 1)) - mean) / sd))
            ratio = np.sqrt(np.tensordot(weights, (weighted - mean) ** 2, 1)) / sd
            ratios += [np.min(ratio), np.max(ratio)]
        return (
            f"; the weighted draws' means were up to {max(shifts):.2f} sd away, their sds "
            f"{min(ratios):.2f} to {max(ratios):.2f} of these"
        )

    def temper(self) -> MonteCarloErrors:
        """Temper, with more chains if errors are large, and return the errors."""
        start = self.search.mixture(tail=0.5, widen=WIDER)
        num_seeds, number = SEEDS, TEMPERING
        while True:
            with self._bar("tempering") as done:
                self.tempered = found = tempered(
                    self.key(number),
                    self.posterior,
                    self.consortium,
                    start,
                    num_seeds=num_seeds,
                    length=LENGTH,
                    num_islands=ISLANDS,
                    centre=self.search.centre,
                )
                values = np.concatenate(
                    [
                        np.asarray(leaf, np.float64).reshape(*leaf.shape[:2], -1)
                        for leaf in jax.tree.leaves(found.islands)
                    ],
                    axis=2,
                )
                errors = errors_of_groups(values)
                why = (
                    f"Monte Carlo errors up to {errors.mean:.2g} sd (means) and "
                    f"{100 * errors.sd:.2g} % (sds), by {ISLANDS} groups of {num_seeds} chains"
                )
                rounds, up, down = (found.totals[name] for name in COSTS)
                method = f"{ISLANDS} groups, {len(found.acceptance)} temperatures"
                agreed = "agree" if errors.are_small else "disagree"
                done(
                    Stage("tempering", method, int(rounds), up, down, 0.0, verdict=agreed, why=why)
                )
            if errors.are_small or num_seeds >= MOST_SEEDS:
                break
            factor = min(max(2, int(np.ceil(1.5 * min(errors.excess, 100)))), 16)
            num_seeds, number = min(num_seeds * factor, MOST_SEEDS), AGAIN
        self.chains = None
        return errors

    def flat_coordinate(self) -> str:
        """Return a coordinate along which a posterior that may be improper is flat, else "".

        Of a NumPyro model improper priors are known, and were tried after the search.
        """
        if self.posterior.is_traced:
            return ""
        draws: Any = None
        if self.tempered is not None:
            draws = self.tempered.islands
        elif self.chains is not None:
            draws = self.chains.samples.draws
        flat = np.concatenate(
            [
                np.asarray(leaf, np.float64).reshape(leaf.shape[0] * leaf.shape[1], -1)
                for leaf in jax.tree.leaves(draws)
            ],
            axis=1,
        )
        with self._bar("far out") as done:
            ledger = Ledger(self.consortium)
            name = flat_coordinate(self.posterior, ledger, self.search.centre, flat)
            cost = (ledger.rounds, ledger.up, ledger.down, 0.0)
            found = f"flat along {name}" if name else "falls"
            done(Stage("far out", "along each coordinate", *cost, verdict=found))
        return name

    def _measure_evidence(self, chains: Chains) -> None:
        with self._bar("evidence") as done:
            self.evidence = found = correct(
                self.key(EVIDENCE),
                self.posterior,
                self.consortium,
                chains.proposal(),
                num_draws=self.num_draws,
                centre=self.search.centre,
                adapt=False,
            )
            done(row_of("evidence", "weights of a Gaussian with the chains' moments", found))
