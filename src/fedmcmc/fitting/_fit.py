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
from tqdm import tqdm

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.algorithms import fed_ep
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning, at_rest
from fedmcmc.exact import Corrected, Tempered, correct, tempered
from fedmcmc.fitting._chains import Chains, run_chains
from fedmcmc.fitting._findings import warn_early, warned
from fedmcmc.fitting._fitted import Fitted, reported, with_names
from fedmcmc.fitting._gibbs import check_many, fit_by_gibbs
from fedmcmc.fitting._modes import Search, find_modes
from fedmcmc.fitting._predicted import HOPELESS, predicted_tail, tail_index
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

EFFORTS = ("auto", "exact", "approximate")
USUAL_ROUNDS, PATIENCE = 1050, 3600.0
"""Rounds that chains may take, and seconds that ``effort="auto"`` spends on them at most."""
MANY_PARAMETERS = 2000
"""Above, chains are left to ``effort="exact"``."""
EP_ROUNDS, EP_ROWS, EP_DIMENSIONS = 50, 5, 256
"""Rounds of FedEP at most; rows per parameter that most clients need for it, and parameters."""
MODES, CORRECTION, PROPAGATION, RECORRECTION, CHAINS, EVIDENCE, DRAW, TEMPERING = range(8)
PREDICTION = 8
"""Folded into the key, one per stage."""
TEMPERED_DIMENSIONS, WIDER, MOST_SHIFT = 50, 4.0, 0.2
"""Where tempering is tried; how wide it begins, in variances; posterior sds between repetitions."""


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
    """Sample a posterior without pooling rows, and say whether the draws are exact.

    First the modes are found, from several starts, with the curvature there (about ten rounds).
    One more round weights draws of the Gaussians that these make, which for regressions with more
    than ten rows per parameter is usually exact; how well that will go is predicted from curvature
    first, and where it is hopeless no draw is weighted. Where it is not exact, the proposal adapts,
    expectation propagation gives another, and at last chains of Hamiltonian Monte Carlo run until
    they agree; between several modes, or where chains do not agree, tempering leads from the
    Gaussians to the posterior.

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
        ``.samples``, ``.verdict``, ``.log_evidence``, ``.report``. The verdict begins with:

        - ``exact (importance)``: k-hat below 0.5 and 400 effective draws at the first correction;
        - ``exact (MCMC)``: R-hat of all chains below 1.01 and 400 effective draws, of the shared
          parameters;
        - ``exact (SMC)``: two repetitions of `fedmcmc.tempered` that agree;
        - ``doubtful``: a correction that passed only after its proposal was adapted, or with k-hat
          above 0.5;
        - ``approximate``: draws of Gaussians;
        - ``failed``: chains that do not agree, nor repetitions of tempering.

    Raises
    ------
    TypeError, ValueError
        If model and data do not fit together, before anything is sampled.

    Warns
    -----
    SamplingWarning
        If the verdict is not exact and `effort` asked for more than an approximation; if no row
        depends on a parameter, as soon as that is known; if fewer than five groups have effects, so
        that the prior of their spread matters.

    Notes
    -----
    Exact means: up to Monte Carlo error, if the search found all modes that matter. A mode that no
    start leads to and no draw reaches cannot be seen.

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
    >>> fitted.verdict[:18], fitted.report.rounds < 20
    ('exact (importance)', True)
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
        self.tempered: list[Tempered] = []

    def go(self, effort: str, max_rounds: int, latency: float) -> str:
        """Run what is needed after the search for modes, and return the verdict."""
        if effort == "approximate":
            return self._approximate("as asked for")
        if self.search.found and self._weights_may_do():
            self._correct(CORRECTION, self.search.mixture(), "mixture at the modes")
            if self.corrected is not None and self.corrected.verdict == "failed" and self._ep_fits:
                self._propagate()
            if self.corrected is not None and self.corrected.verdict == "exact":
                return self._by_importance("exact (importance)")
        size, cost = trees.num_elements(self.search.centre), ""
        if effort == "auto" and size > MANY_PARAMETERS:
            cost = (
                f'{size:,} parameters: effort="exact" would run up to {max_rounds:,} rounds of '
                f"chains; judge predictions (fedmcmc.metrics)"
            )
        if effort == "auto" and latency * USUAL_ROUNDS > PATIENCE:
            hours = latency * USUAL_ROUNDS / 3600
            cost = f'effort="exact" would take up to {USUAL_ROUNDS:,} rounds, {hours:.1f} hours'
        if cost:
            if self.corrected is not None and self.corrected.verdict == "doubtful":
                return self._by_importance("doubtful (importance)", cost)
            return self._approximate(cost)
        if len(self.search.modes) > 1:  # no chain comes across between them
            return self._temper()
        figures = self._run_chains(max_rounds)
        assert self.chains is not None
        if self.chains.agree:
            return f"exact (MCMC): {figures} (R-hat below 1.01), {self._so_far}."
        can_temper = trees.num_elements(self.search.centre) <= TEMPERED_DIMENSIONS
        if self.search.found and can_temper:
            return self._temper(f"{figures} (wanted: R-hat below 1.01, 400 effective draws)")
        longer = " Raise max_rounds, or" if self.chains.num_rounds >= max_rounds else " Try to"
        return (
            f"failed: {figures} (wanted: R-hat below 1.01, 400 effective draws), {self._so_far}."
            f"{longer} reparametrize the model."
        )

    @contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[Stage], None]]:
        """Show that a stage runs, and take its row."""
        begun = time.perf_counter()
        layout = "{desc} [{elapsed}] {postfix}"
        with tqdm(desc=name, bar_format=layout, disable=not self.progress) as bar:

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
            cost = (search.rounds, search.bits_up, search.bits_down, 0.0)
            done(Stage("modes", f"{search.num_starts} starts", *cost, verdict=verdict, why=why))

    def _correct(self, number: int, approximation: Any, method: str) -> None:
        with self._bar("correction") as done:
            try:
                self.corrected = found = correct(
                    self._key(number),
                    self.posterior,
                    self.consortium,
                    approximation,
                    num_draws=self.num_draws,
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
        size = trees.num_elements(self.search.centre)
        with self._bar("prediction") as done:
            if self.search.modes[0].covariance.ndim == 2:
                rows = self.consortium.federation.num_rows / size
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
        size = trees.num_elements(self.search.centre)
        enough = np.asarray(self.consortium.federation.sizes) >= EP_ROWS * size
        return size <= EP_DIMENSIONS and float(enough.mean()) > 0.5

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

    def _run_chains(self, max_rounds: int) -> str:
        """Run chains and return their figures in words."""
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
        figures = (
            f"R-hat {chains.rhat:.3f}, {chains.ess:,.0f} effective draws of "
            f"{chains.samples.num_chains} chains"
        )
        if agreed:
            self._measure_evidence(chains)
        return f"{figures} after {chains.num_rounds:,} rounds of chains"

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

    def _temper(self, before: str = "") -> str:
        """Temper twice, and return a verdict; `before` says what failed before that."""
        with self._bar("tempering") as done:
            start = self.search.mixture(tail=0.5, widen=WIDER)
            keys = jax.random.split(self._key(TEMPERING))
            found = [
                tempered(key, self.posterior, self.consortium, start, centre=self.search.centre)
                for key in keys
            ]
            one, two = found
            sd = max(float(np.hypot(one.log_evidence_sd, two.log_evidence_sd)), 1e-6)
            gap = abs(one.log_evidence - two.log_evidence) / sd
            shift = _largest_shift(one.draws, two.draws)
            agree = gap < 4 and shift < MOST_SHIFT
            why = (
                f"log evidence {one.log_evidence:.3f} and {two.log_evidence:.3f}, {gap:.1f} sds "
                f"apart (wanted: below 4), means up to {shift:.2f} sd apart (wanted: below "
                f"{MOST_SHIFT:g})"
            )
            rounds, up, down = (sum(each.totals[name] for each in found) for name in COSTS)
            method = f"2 repetitions, {len(one.acceptance)} temperatures"
            verdict = "agree" if agree else "disagree"
            done(Stage("tempering", method, int(rounds), up, down, 0.0, verdict=verdict, why=why))
        if not agree:
            told = f"{before}; " * bool(before)
            return (
                f"failed: {told}two repetitions of tempering disagree, {why}; {self._so_far}. "
                f"Reparametrize the model."
            )
        self.chains, self.tempered = None, found
        return f"exact (SMC): {why}, {self._so_far}."

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

    def _by_importance(self, kind: str, more: str = "") -> str:
        found = self.corrected
        assert found is not None
        self.evidence = found
        return f"{kind}: {found.reason.rstrip('.')}, {self._so_far}{'; ' * bool(more)}{more}."

    def _approximate(self, why: str) -> str:
        num = len(self.search.modes)
        what = f"Gaussian{'s' * (num > 1)} at {num} mode{'s' * (num > 1)}"
        if not self.search.found:
            what = "a Gaussian at a place that is no mode"
        said = "not compared with the posterior"
        if self.corrected is not None:
            said = f"importance weights say: {self.corrected.reason.rstrip('.')}"
        elif self.predicted > HOPELESS:
            said = (
                f"not weighted, as a k-hat of at least {self.predicted:.2f} is predicted (wanted: "
                f"at most {HOPELESS:g})"
            )
        return f"approximate: {what}, {said}; {why}; {self._so_far}."

    @property
    def _so_far(self) -> str:
        rounds = sum(stage.rounds for stage in self.stages)
        bits = sum(stage.bits_up + stage.bits_down for stage in self.stages)
        starts = f"modes searched from {self.search.num_starts} starts"
        return f"{rounds:,} rounds, {bits / 1e6:,.1f} Mbit; {starts}"

    def fitted(self, posterior: Posterior, verdict: str) -> Fitted:
        """Return draws in the user's coordinates, with the report."""
        samples = replace(
            self._samples(), constrain_fn=posterior.constrain_fn, stopped={"verdict": verdict}
        )
        if posterior.position_fn is not None:
            in_users = jax.jit(jax.vmap(jax.vmap(posterior.position_fn)))
            samples = replace(samples, draws=jax.tree.map(np.asarray, in_users(samples.draws)))
        weighted = None if self.chains is not None or self.tempered else self.evidence
        evidence, evidence_sd = self._evidence()
        report = reported(
            tuple(self.stages),
            verdict,
            samples,
            self.consortium.federation,
            trees.num_elements(self.search.centre),
            evidence=(evidence, evidence_sd),
            weighted=weighted,
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
        if self.tempered:
            one, two = self.tempered
            sd = float(np.hypot(one.log_evidence_sd, two.log_evidence_sd)) / 2
            return (one.log_evidence + two.log_evidence) / 2, sd
        if self.evidence is None or self.evidence.verdict == "failed":
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
        if self.tempered:
            draws = [each.draws for each in self.tempered]
            return as_samples(jax.tree.map(lambda *leaves: np.stack(leaves), *draws), self.stages)
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


def _largest_shift(one: ArrayTree, two: ArrayTree) -> float:
    """Return the largest difference of two means, in pooled sds."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    shifts = [np.abs(a.mean(0) - b.mean(0)) / np.concatenate([a, b]).std(0) for a, b in pairs]
    return max(float(np.max(shift)) for shift in shifts)
