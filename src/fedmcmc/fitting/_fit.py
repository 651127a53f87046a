"""One call: modes, curvature, importance correction, and HMC where that does not do."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.algorithms import fed_ep
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import (
    MonteCarloErrors,
    SamplingWarning,
    Verdict,
    VerdictKind,
    at_rest,
    errors_of_groups,
)
from fedmcmc.exact import GOOD_KHAT, Corrected, Tempered, correct, draws_needed, tempered
from fedmcmc.fitting._chains import HOPELESS_RHAT, Chains, run_chains
from fedmcmc.fitting._findings import listed, warn_early, warned
from fedmcmc.fitting._fitted import Fitted, reported, with_names
from fedmcmc.fitting._flat import refuse_flat_directions
from fedmcmc.fitting._gibbs import check_many, fit_by_gibbs
from fedmcmc.fitting._modes import Search, find_modes
from fedmcmc.fitting._precision import check_precision
from fedmcmc.fitting._predicted import HOPELESS, predicted_tail, tail_index
from fedmcmc.fitting._progress import ticking
from fedmcmc.fitting._report import Stage
from fedmcmc.fitting._stages import (
    COSTS,
    as_samples,
    cost_of,
    forecast,
    one_chain,
    row_of,
    what_was_done,
)
from fedmcmc.gaussian import Gaussian, moments_of
from fedmcmc.hierarchy import MOST_DIMENSIONS, marginal, refuse_two_levels
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.surrogates import Ledger

EFFORTS = ("auto", "exact", "approximate")
USUAL_ROUNDS, PATIENCE = 1050, 3600.0
"""Rounds that chains may take, and seconds that ``effort="auto"`` spends on them at most."""
MANY_PARAMETERS = 2000
"""Above, chains are left to ``effort="exact"``."""
EP_ROUNDS, EP_ROWS, EP_DIMENSIONS = 50, 5, 256
"""Rounds of FedEP at most; rows per parameter that most clients need for it, and parameters."""
MODES, CORRECTION, PROPAGATION, RECORRECTION, CHAINS, EVIDENCE, DRAW, TEMPERING = range(8)
PREDICTION, MORE_DRAWS, AGAIN = 8, 9, 10
"""Folded into the key, one per stage."""
TEMPERED_DIMENSIONS, WIDER = 50, 4.0
"""Parameters up to which tempering is tried; how wide it begins, in variances."""
ISLANDS, SEEDS, MOST_SEEDS = 8, 100, 1600
"""Groups of chains by which tempering's Monte Carlo error is estimated, and chains of a group."""
LENGTH, KEPT_STATES = 20, 2000
"""States of a chain of tempering, and draws that are kept of a group."""
MOST_DRAWS = 10
"""Times `num_draws`: weighted draws at most, where fewer leave too large a Monte Carlo error."""


@in_single_precision
def fit(
    model: Any,
    data: Any,
    *,
    rng_key: Array,
    num_draws: int = 4000,
    effort: Literal["auto", "exact", "approximate"] = "auto",
    max_rounds: int = 2000,
    latency: float | None = None,
    position: ArrayTree | None = None,
    progress: bool = True,
) -> Fitted:
    """Sample a posterior without pooling rows, and check the draws.

    First the modes are found, from several starts, with the curvature there (about ten rounds).
    One more round weights draws of the Gaussians that these make, which usually passes for
    regressions with more than ten rows per parameter; curvature predicts how well that will go, and
    if it is hopeless no draw is weighted. If the weights do not pass, the proposal adapts,
    expectation propagation gives another, and at last chains of Hamiltonian Monte Carlo run until
    they agree. Between several modes, or if chains do not agree, tempering leads from the Gaussians
    to the posterior.

    Parameters
    ----------
    model
        A NumPyro model of one client's rows, or a `Posterior`.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    rng_key
        Of all that is random: the same key gives the same draws.
    num_draws
        Weighted draws per correction, at least 100.
    effort
        ``"approximate"`` stops at the Gaussians; ``"exact"`` goes on to chains unless a correction
        passes; ``"auto"`` too, up to 2,000 parameters and if 1,050 rounds of `latency` seconds take
        less than an hour.
    max_rounds
        Rounds of chains at most.
    latency
        Seconds that a round takes, where clients are elsewhere; none by default.
    position
        A place to start from, for a `Posterior` without ``init_fn``.
    progress
        Whether to show a bar per stage.

    Returns
    -------
    Fitted
        ``.samples``, ``.verdict``, ``.log_evidence``, ``.report``. The verdict is a
        `fedmcmc.diagnostics.Verdict`, a sentence with ``.kind``, ``.k_hat`` and ``.error``. It
        begins with:

        - ``passed (importance)``: k-hat below 0.5 at the first correction;
        - ``passed (MCMC)``: R-hat of all chains below 1.01 and 400 effective draws, of the shared
          parameters;
        - ``passed (SMC)``: eight groups of chains of `fedmcmc.tempered` that agree;
        - ``doubtful``: a correction that passed only after its proposal was adapted or with k-hat
          above 0.5, a log likelihood too large for its floating-point type, or another check that
          left a question open;
        - ``approximate``: draws of Gaussians;
        - ``failed``: chains that do not agree, nor groups of tempering.

        Whatever passed has estimated Monte Carlo errors of at most 0.05 sd for means and 5 % for
        sds of all unconstrained coordinates; the verdict states them.

    Raises
    ------
    TypeError, ValueError
        If model and data do not fit together, before anything is sampled; if the posterior is
        improper along a direction that was tried, which the error names.

    Warns
    -----
    SamplingWarning
        If the verdict is not ``passed`` and `effort` asked for more than an approximation; if no
        row depends on a parameter, as soon as that is known; if fewer than five groups have
        effects, so that the prior of their spread matters.

    Notes
    -----
    No check proves that draws follow the posterior: a mode that no start leads to and no draw
    reaches cannot be seen.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import fedmcmc
    >>> def model(x, y=None):
    ...     b = numpyro.sample("b", dist.Normal(0, 2.5).expand([2]).to_event(1))
    ...     with numpyro.plate("rows", len(x)):
    ...         numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> clinics = []
    >>> for size in (80, 40, 6):
    ...     x = rng.normal(size=size)
    ...     clinics.append({"x": x, "y": (rng.random(size) < 1 / (1 + np.exp(-x))).astype(int)})
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> fitted = fit(model, data, rng_key=jax.random.key(0), progress=False)
    >>> print(fitted.verdict.kind, fitted.verdict.error < 0.05, fitted.report.rounds < 20)
    passed True True
    >>> fitted.samples.constrained["b"].shape
    (1, 4000, 2)
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {EFFORTS}, got {effort!r}.")
    positive_integer(num_draws, "num_draws")
    positive_integer(max_rounds, "max_rounds")
    if latency is not None and not latency >= 0:
        raise ValueError(f"latency must be a number of seconds per round, got {latency!r}.")
    posterior, consortium = _understood(model, data)
    asked = dict(effort=effort, num_draws=num_draws, max_rounds=max_rounds, latency=latency)
    if posterior.local is not None:  # of more numbers than are integrated out
        check_many(posterior, effort, max_rounds)
        fitted = fit_by_gibbs(
            posterior, consortium, as_key(rng_key), max_rounds, position, progress
        )
        return warned(with_names(fitted, consortium, asked), effort, consortium)
    sampled = as_functions(posterior._replace(position_fn=None))
    run = _Fit(sampled, consortium, as_key(rng_key), num_draws, progress)
    # What the stages find is in the report, and the verdict warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        run.find_modes(position)
    said = warn_early(run.search.untold, consortium)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        verdict = run.go(effort, max_rounds, latency or 0.0)
    fitted = with_names(run.fitted(posterior, verdict), consortium, asked)
    return warned(fitted, effort, consortium, said)


def _understood(model: Any, data: Any) -> tuple[Posterior, Consortium]:
    """Return whom to ask, and the posterior: without latents, where they can be integrated out."""
    consortium = as_consortium(data)
    if isinstance(model, Posterior):
        return _without_latents(model), consortium
    if not callable(model):
        raise TypeError(
            f"fit takes a NumPyro model or a fedmcmc.Posterior, got {type(model).__name__}."
        )
    from fedmcmc.interop.numpyro import from_numpyro

    given: dict[str, Any] = dict(example=data)
    if not isinstance(data, FederatedData):
        given = dict(
            example=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype),
                consortium.federation.rows,
            )
        )
    posterior = _without_latents(from_numpyro(model, **given))
    if posterior.local is not None:
        posterior = from_numpyro(model, **given, centered=1.0)  # as Gibbs sampling needs it
    return posterior, consortium


def _without_latents(posterior: Posterior) -> Posterior:
    local: Any = posterior.local
    refuse_two_levels(local)
    if local is None or trees.num_elements(local.like.tree) > MOST_DIMENSIONS:
        return posterior
    return marginal(posterior)


class _Fit:
    """The stages of a fit, which add what they find to one another's."""

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

    def go(self, effort: str, max_rounds: int, latency: float) -> Verdict:
        """Run what is needed after the search for modes, and return the verdict."""
        if effort == "approximate":
            return self._approximate("as asked for")
        if self.search.found and self._weights_may_do():
            self._correct_by_modes()
            if self._correction_is("failed") and self._ep_fits:
                self._propagate()
            if self._correction_is("passed"):
                return self._by_importance()
        reason = self._reason_to_stop(effort, max_rounds, latency)
        if reason:
            if self._correction_is("doubtful"):
                return self._by_importance(reason)
            return self._approximate(reason)
        if len(self.search.modes) > 1:  # no chain comes across between them
            return self._temper()
        self._run_chains(max_rounds)
        chains = self.chains
        assert chains is not None
        details = f"{chains.num_rounds:,} rounds of {chains.samples.num_chains} chains"
        if chains.agree:
            return self._verdict(VerdictKind.PASSED, "MCMC", details=details, **chains.figures)
        before = (
            f"chains did not agree (R-hat {chains.rhat:.3f}, {chains.ess:,.0f} effective draws)"
        )
        if self.search.found and self._size <= TEMPERED_DIMENSIONS:
            return self._temper(before)
        if self._correction_is("doubtful"):
            self.chains = None
            return self._by_importance(before)
        longer = "raise max_rounds, or" if chains.num_rounds >= max_rounds else "try to"
        reason = f"{before} ({chains.wanted}): {longer} reparametrize the model"
        if self.search.found and chains.rhat > HOPELESS_RHAT:
            # Chains that are far apart say less of the posterior than the curvature at its mode.
            self.chains = None
            reason += "; the draws are of the Gaussian at the mode"
            return self._verdict(VerdictKind.FAILED, reason=reason, details=details)
        return self._verdict(VerdictKind.FAILED, reason=reason, details=details, **chains.figures)

    def _reason_to_stop(self, effort: str, max_rounds: int, latency: float) -> str:
        """Return why chains are not run unless ``effort="exact"``, empty if they are."""
        if effort != "auto":
            return ""
        if self._size > MANY_PARAMETERS:
            return (
                f'{self._size:,} parameters: effort="exact" would run up to {max_rounds:,} rounds '
                f"of chains; judge predictions (fedmcmc.metrics)"
            )
        if latency * USUAL_ROUNDS > PATIENCE:
            hours = latency * USUAL_ROUNDS / 3600
            return f'effort="exact" would take up to {USUAL_ROUNDS:,} rounds, {hours:.1f} hours'
        if self.search.untold:
            return (
                f"no row depends on {listed(self.search.untold)}: change the model, or pass "
                f'effort="exact" to run chains'
            )
        if self.posterior.unmarked_local:
            return (
                f"{listed(self.posterior.unmarked_local)} may lack infer={{'local': True}} (see "
                f'the warning): mark what is local, or pass effort="exact" to run chains'
            )
        return ""

    @property
    def _size(self) -> int:
        return trees.num_elements(self.search.centre)

    def _correction_is(self, kind: str) -> bool:
        return self.corrected is not None and self.corrected.verdict.kind == kind

    def _verdict(self, kind: VerdictKind, method: str = "", **parts: Any) -> Verdict:
        """Return a verdict with what all have: modes, costs, and what is never passed."""
        details = "; ".join(x for x in (parts.pop("details", ""), self._so_far) if x)
        caveats = self.search.caveats + self.caveats
        if kind is VerdictKind.PASSED and caveats:
            kind = VerdictKind.DOUBTFUL
        reason = "; ".join(x for x in (*caveats, parts.pop("reason", "")) if x)
        return Verdict(kind, method, reason=reason, details=details, **parts)

    @contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[Stage], None]]:
        """Show that a stage runs, and take its row."""
        begun = time.perf_counter()
        with ticking(name, self.progress) as bar:

            def done(stage: Stage) -> None:
                seconds = time.perf_counter() - begun
                self.stages.append(replace(stage, seconds=seconds))
                bar.set_postfix_str(stage.verdict)

            yield done

    def _key(self, number: int) -> Array:
        return jax.random.fold_in(self.rng_key, number)

    def find_modes(self, position: ArrayTree | None) -> None:
        """Run the first stage, from which all others go on."""
        with self._bar("modes") as done:
            self.search = search = find_modes(
                self._key(MODES),
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

    def _correct_by_modes(self) -> None:
        """Weight draws of Gaussians at the modes, more of them if their error is too large."""
        mixture = self.search.mixture()
        self._correct(CORRECTION, mixture, "mixture at the modes")
        found = self.corrected
        if found is None or len(found.rounds) > 1 or not found.khat < GOOD_KHAT:
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
                    self._key(number),
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

    def _weights_may_do(self) -> bool:
        """Predict k-hat of the Gaussians at the modes, and return whether it is worth a round."""
        with self._bar("prediction") as done:
            if self.search.modes[0].covariance.ndim == 2:
                rows = self.consortium.federation.num_rows / self._size
                why = (
                    "the Gaussians have the posterior's own curvature, so that k-hat is what the "
                    f"posterior is not Gaussian; {rows:,.1f} rows per parameter, of which ten are "
                    "usually enough"
                )
                done(forecast("curvature at the modes", 0.0, why))
                return True
            tail = predicted_tail(
                self._key(PREDICTION), self.posterior, self.consortium, self.search
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
    def _ep_fits(self) -> bool:
        enough = np.asarray(self.consortium.federation.sizes) >= EP_ROWS * self._size
        return self._size <= EP_DIMENSIONS and float(enough.mean()) > 0.5

    def _propagate(self) -> None:
        with self._bar("FedEP") as done:
            samples = self.consortium.sample(
                self._key(PROPAGATION),
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

    def _run_chains(self, max_rounds: int) -> None:
        """Run chains, and measure the evidence if they agree."""
        with self._bar("chains") as done:
            self.chains = chains = run_chains(
                self._key(CHAINS),
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

    def _temper(self, before: str = "") -> Verdict:
        """Temper, with more chains if errors are large; `before` says what failed before that."""
        start = self.search.mixture(tail=0.5, widen=WIDER)
        num_seeds, number = SEEDS, TEMPERING
        while True:
            with self._bar("tempering") as done:
                self.tempered = found = tempered(
                    self._key(number),
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
        figures: dict[str, Any] = dict(error=errors.mean, sd_error=errors.sd)
        if not errors.are_small:
            reason = "; ".join(x for x in (before, "groups of tempering disagree") if x)
            return self._verdict(
                VerdictKind.FAILED, reason=f"{reason}: reparametrize the model", **figures
            )
        if self.posterior.improper:
            reason = (
                f"the prior of {listed(self.posterior.improper)} is improper, and tempering would "
                f"not notice a posterior that is improper, too: give it a proper prior"
            )
            return self._verdict(VerdictKind.DOUBTFUL, "SMC", reason=reason, **figures)
        return self._verdict(VerdictKind.PASSED, "SMC", **figures)

    def _measure_evidence(self, chains: Chains) -> None:
        with self._bar("evidence") as done:
            self.evidence = found = correct(
                self._key(EVIDENCE),
                self.posterior,
                self.consortium,
                chains.proposal(),
                num_draws=self.num_draws,
                centre=self.search.centre,
                adapt=False,
            )
            done(row_of("evidence", "weights of a Gaussian with the chains' moments", found))

    def _by_importance(self, reason: str = "") -> Verdict:
        found = self.corrected
        assert found is not None
        self.evidence, told = found, found.verdict
        return self._verdict(
            told.kind,
            "importance",
            reason="; ".join(x for x in (told.reason, reason) if x),
            k_hat=told.k_hat,
            ess=told.ess,
            error=told.error,
            sd_error=told.sd_error,
        )

    def _approximate(self, why: str) -> Verdict:
        num = len(self.search.modes)
        what = f"Gaussian{'s' * (num > 1)} at {num} mode{'s' * (num > 1)}"
        if not self.search.found:
            what = "a Gaussian at a place that is no mode"
        checked = "not compared with the posterior"
        if self.corrected is not None:
            checked = "importance weights did not pass"
        elif self.predicted > HOPELESS:
            checked = (
                f"not weighted, as a k-hat of at least {self.predicted:.2f} is predicted (wanted: "
                f"at most {HOPELESS:g})"
            )
        k_hat = np.nan if self.corrected is None else self.corrected.khat
        reason = f"{what}, {checked}; {why}"
        return self._verdict(VerdictKind.APPROXIMATE, reason=reason, k_hat=k_hat)

    @property
    def _so_far(self) -> str:
        rounds = sum(stage.rounds for stage in self.stages)
        bits = sum(stage.bits_up + stage.bits_down for stage in self.stages)
        parts = [f"{rounds:,} rounds, {bits / 1e6:,.1f} Mbit"]
        if self.search.num_symmetric > 1:
            parts.append(f"{self.search.num_symmetric} symmetric modes")
        return "; ".join([*parts, f"modes searched from {self.search.num_starts} starts"])

    def fitted(self, posterior: Posterior, verdict: Verdict) -> Fitted:
        """Return draws in the user's coordinates, with the report."""
        samples = replace(
            self._samples(), constrain_fn=posterior.constrain_fn, stopped={"verdict": verdict}
        )
        if posterior.position_fn is not None:
            in_users = jax.jit(jax.vmap(jax.vmap(posterior.position_fn)))
            samples = replace(samples, draws=jax.tree.map(np.asarray, in_users(samples.draws)))
        weighted = None if self.chains is not None or self.tempered is not None else self.evidence
        evidence, evidence_sd = self._evidence()
        report = reported(
            tuple(self.stages),
            verdict,
            samples,
            self.consortium.federation,
            trees.num_elements(self.search.centre),
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
            self._gaussian(),
        )

    def _evidence(self) -> tuple[float, float]:
        """Return the log evidence and its standard error, NaN if nothing that passed has it."""
        if self.tempered is not None:
            return self.tempered.log_evidence, self.tempered.log_evidence_sd
        if self.evidence is None or self.evidence.verdict.kind == VerdictKind.FAILED:
            return np.nan, np.nan
        return self.evidence.log_evidence, self.evidence.log_evidence_sd

    def _gaussian(self) -> Gaussian | None:
        if not self.search.found:
            return None
        covariance = self.search.modes[0].covariance
        if covariance.ndim == 2:
            return Gaussian.from_moments(self.search.centre, covariance)
        variance = trees.unravel(jnp.asarray(covariance), self.search.centre)
        return Gaussian.from_moments(self.search.centre, variance=variance)

    def _samples(self) -> Samples:
        if self.tempered is not None:
            num = jax.tree.leaves(self.tempered.islands)[0].shape[1]
            states = np.linspace(0, num - 1, min(num, KEPT_STATES)).astype(int)
            draws = jax.tree.map(lambda leaf: leaf[:, states], self.tempered.islands)
            return as_samples(draws, self.stages)
        if self.chains is not None:
            samples = self.chains.samples  # whose settings are those of the last segment
            of_all = ("method", "kernel", "data", "chains", "where")
            kept = {name: x for name, x in samples.settings.items() if name in of_all}
            return replace(samples, settings=what_was_done(self.stages) | kept)
        if self.evidence is not None:
            found, num = self.evidence, self.num_draws
            index_key = self._key(DRAW)
            return as_samples(one_chain(found.resample(index_key, num)), self.stages)
        flat = self.search.mixture(tail=0.0).draw(self._key(DRAW), self.num_draws)
        draws = jax.vmap(lambda x: trees.unravel(x, self.search.centre))(flat)
        return as_samples(one_chain(draws), self.stages)
