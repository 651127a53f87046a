"""Importance correction: one round of summed log likelihoods makes an approximation exact.

Sources: Hesterberg (1995), defensive mixtures; Vehtari et al. (2024), Pareto smoothing; Cornuet
et al. (2012), weights of all rounds; Paananen et al. (2021), moment matching.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc._checks import expect, positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import (
    MonteCarloErrors,
    SamplingWarning,
    Verdict,
    VerdictKind,
    errors_of_weighted,
    khat_threshold,
    mixing,
    psis,
)
from fedmcmc.exact._corrected import Corrected, Round, ravel_draws
from fedmcmc.gaussian import Gaussian, Mixture, defensive, moments_of
from fedmcmc.kernels import (
    LOG_ZERO_THRESHOLD,
    Dithered,
    Evaluated,
    PointRecipe,
    Points,
    dither_of,
    evaluations,
)
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key, folded_key
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, SimulatedConsortium, as_consortium
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled

MIN_DRAWS = 100
GOOD_KHAT = 0.5
MIN_ESS = 400
"""Smallest number of effective draws to pass; at most a tenth of the draws."""
RECIPE_BYTES = 2**20
"""Size of a message of points above which clients draw the points themselves, from a recipe."""
MAX_POINTS = 2**15
"""Largest number of points per message."""
MAX_INVALID_SHARE = 0.01
"""Largest tolerated share of draws whose log density is NaN or infinite."""
ESS_PER_DIMENSION = 10
"""Number of effective draws per dimension from which a covariance is trusted."""
MAX_SQUARED_SHIFT = 36
"""Largest number of dimensions per effective draw with which a proposal is adapted. It is about the
squared error of the weighted mean, in sds; a proposal so far from the posterior gets no weights."""


@in_single_precision
def correct(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData | Consortium,
    approximation: Gaussian | Mixture | Samples,
    *,
    num_draws: int = 4000,
    max_rounds: int = 5,
    tail: float = 0.2,
    degrees: float = 5.0,
    adapt: bool = True,
    centre: ArrayTree | None = None,
    dither: float | None = None,
) -> Corrected:
    """Draw from an approximation of the posterior and weight the draws so that they are exact.

    One exchange with all clients sums their log likelihoods at all draws. The mean of the weights,
    ratios of posterior to proposal, is the evidence; k-hat, the shape of their tail, decides if
    they can be trusted (docs/explanation/exactness.md), and a `SamplingWarning` follows if it is
    not low at first.

    Parameters
    ----------
    rng_key, posterior, data
        Random key, model, and `FederatedData` or a consortium of remote clients.
    approximation
        Approximation of the posterior, prior included: `Gaussian`, `fedmcmc.Mixture` or `Samples`.
    num_draws, max_rounds
        Number of draws per round, at least 100, and largest number of rounds.
    tail, degrees
        Settings of the first proposal, ``(1 - tail) N(m, C) + tail t_degrees(m, 1.2 C)``, unless it
        is a mixture.
    adapt
        If true, proposals move to the weighted moments until a round passes, unless the effective
        draws are too few for moments.
    centre
        Position whose log likelihood clients subtract; by default the approximation's mean.
    dither
        Resolution, in nats, to which clients round log likelihoods to save bits; by default none.

    Raises
    ------
    ValueError
        If the approximation is improper or of the wrong dimension, or log densities are not finite.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> rough = fedmcmc.Gaussian.from_moments(jnp.array(0.2), variance=jnp.array(0.15))
    >>> corrected = correct(jax.random.key(0), posterior, data, rough)
    >>> print(corrected.verdict.kind, round(float(corrected.mean()), 1))
    passed 0.3
    """
    expect(posterior, Posterior, "posterior")
    num_draws = positive_integer(num_draws, "num_draws")
    if num_draws < MIN_DRAWS:
        raise ValueError(f"num_draws must be at least {MIN_DRAWS}, got {num_draws}.")
    max_rounds = positive_integer(max_rounds, "max_rounds")
    if not 0 <= tail < 1 or not degrees > 0:
        raise ValueError(f"tail must lie in [0, 1) and degrees be positive, got {tail}, {degrees}.")
    proposal, centre = make_proposal(approximation, centre, tail, degrees)
    if dither is not None and not 0 < dither < np.inf:
        raise ValueError(f"dither must be a positive number of nats, got {dither!r}.")
    target = CorrectionTarget(as_functions(posterior), as_consortium(data), centre, dither)
    rounds: list[Round] = []
    batches: list[_Weighted] = []
    key, min_ess = as_key(rng_key), min(MIN_ESS, num_draws / 10)
    for number in range(max_rounds if adapt else 1):
        batch = target.weigh(folded_key(key, number), proposal, num_draws)
        batches.append(batch)
        log_weights, k_hat = psis(batch.log_ratios)
        ess = _effective_draws(log_weights)
        rounds.append(Round(k_hat, ess, *batch.cost))
        passed = k_hat < khat_threshold(num_draws) and ess >= min_ess
        can_adapt = batch.points.shape[1] <= MAX_SQUARED_SHIFT * ess
        if passed or number + 1 == max_rounds or not (adapt and can_adapt):
            break
        proposal = _adapt_proposal(batches, proposal)
    errors = errors_of_weighted(batch.points, np.exp(log_weights))
    verdict = _judge(rounds, num_draws, passed, min_ess, errors)
    if verdict.kind == VerdictKind.FAILED or len(rounds) > 1:
        warnings.warn(f"correct: {verdict}", SamplingWarning, stacklevel=3)
    log_evidence = log_evidence_sd = np.nan
    if not posterior.improper:
        log_evidence = float(
            logsumexp(batch.log_ratios)
            - np.log(num_draws)
            + batch.log_density_at_centre
            - target.log_mean_error
        )
        unsmoothed_ess = _effective_draws(batch.log_ratios - logsumexp(batch.log_ratios))
        log_evidence_sd = float(np.sqrt(max(1 / unsmoothed_ess - 1 / num_draws, 0.0)))
    return Corrected(
        draws=target.in_users_coordinates(batch.points),
        log_weights=log_weights,
        k_hat=k_hat,
        ess=ess,
        log_evidence=log_evidence,
        log_evidence_sd=log_evidence_sd,
        proposal=proposal,
        rounds=tuple(rounds),
        totals=dict(zip(("rounds", "bits_up", "bits_down"), _sum_costs(batches), strict=True)),
        verdict=verdict,
        constrain_fn=posterior.constrain_fn,
        log_ratios=batch.log_ratios,
    )


@dataclass(frozen=True)
class _Weighted:
    """Draws of one proposal, ``[num, d]`` float64, with log targets and log ratios, ``[num]``.

    Log targets are relative to `log_density_at_centre`.
    """

    points: np.ndarray
    log_target: np.ndarray
    log_ratios: np.ndarray
    log_density_at_centre: float
    proposal: Mixture
    cost: tuple[int, float, float]


class CorrectionTarget:
    """Posterior whose log density is a sum over the clients of a consortium."""

    def __init__(
        self,
        posterior: Posterior,
        consortium: Consortium,
        centre: ArrayTree,
        dither: float | None = None,
    ) -> None:
        self.posterior, self.consortium, self.centre = posterior, consortium, centre
        self.question, self.dither = evaluations(posterior), dither

    @property
    def log_mean_error(self) -> float:
        """Log of the mean factor that dithering multiplies into every weight."""
        if self.dither is None:
            return 0.0
        half = self.dither / 2
        return float(self.consortium.federation.num_clients * np.log(np.sinh(half) / half))

    def weigh(self, rng_key: Array, proposal: Mixture, num_draws: int) -> _Weighted:
        """Draw from `proposal` and weight the draws."""
        parts = [
            self._weigh(folded_key(rng_key, start), proposal, size)
            for start in range(0, num_draws, MAX_POINTS)
            for size in [min(MAX_POINTS, num_draws - start)]
        ]
        return _Weighted(
            np.concatenate([x.points for x in parts]),
            np.concatenate([x.log_target for x in parts]),
            np.concatenate([x.log_ratios for x in parts]),
            parts[0].log_density_at_centre,
            proposal,
            _sum_costs(parts),
        )

    def _weigh(self, rng_key: Array, proposal: Mixture, num: int) -> _Weighted:
        drawn = _draw_points(self.posterior, rng_key, proposal, self.centre, num=num)
        content, recipe = self._content(drawn, proposal), None
        if isinstance(content, PointRecipe):
            recipe = content
        if self.dither is not None:
            dither_words = jax.random.bits(folded_key(rng_key, num), (2,), jnp.uint32)
            step = jnp.asarray(self.dither, jnp.result_type(float))
            content = Dithered(content, dither_words, step)
        reply = self.consortium.ask(self.question, content)
        answer: Evaluated = reply.value
        if recipe is not None:
            expected = self.consortium.federation.num_clients * np.asarray(recipe.checksum())
            if not np.array_equal(np.asarray(answer.checksum.value), expected):
                raise RuntimeError(
                    "The clients drew different points from the server because their random "
                    "generators differ. Use the same version of JAX everywhere."
                )
        value = np.array(answer.value, np.float64)
        if isinstance(content, Dithered):
            num_clients = self.consortium.federation.num_clients
            added = np.asarray(_sum_dithers(content, jnp.arange(num_clients), num=num), np.float64)
            value -= float(content.step) * added
        value[value < LOG_ZERO_THRESHOLD] = -np.inf
        log_target = value + np.asarray(drawn.prior, np.float64)
        points64 = np.asarray(drawn.flat, np.float64)
        at_centre = self.log_density_at_centre(answer, drawn.prior_at_centre)
        self._exclude_invalid(int(answer.invalid.value), log_target, points64)
        log_ratios = log_target - proposal.in_strata(num).log_density(points64)
        cost = (reply.rounds, reply.bits_up, reply.bits_down)
        return _Weighted(points64, log_target, log_ratios, at_centre, proposal, cost)

    def _content(self, drawn: "_DrawnPoints", proposal: Mixture) -> ArrayTree:
        """Return the content of the question: a recipe of the points if it has fewer bits."""
        num, size = drawn.flat.shape
        if num * size * drawn.flat.dtype.itemsize > RECIPE_BYTES:
            return PointRecipe(drawn.words, proposal, self.centre, num)
        return Points(drawn.points, self.centre)

    def compile_ahead(self, rng_key: Array, proposal: Mixture, num_draws: int) -> None:
        """Start to compile the programs that `weigh` calls for such a proposal."""
        num = min(num_draws, MAX_POINTS)
        drawn = _draw_points.compile_ahead(self.posterior, rng_key, proposal, self.centre, num=num)
        if isinstance(self.consortium, SimulatedConsortium):
            self.consortium.compile_ahead(self.question, self._content(drawn, proposal))

    def log_density_at_centre(self, answer: Evaluated, prior_at_centre: Array) -> float:
        """Return the log density at the center, or raise `ValueError` if it is not finite."""
        at_centre = np.asarray(answer.at_centre.value, np.float64).sum() + float(prior_at_centre)
        if not np.isfinite(at_centre):
            raise ValueError(
                f"The log density at the center of the approximation is not finite: "
                f"{jax.tree.map(np.asarray, self.centre)}. Pass centre=, a position where the log "
                f"density is finite."
            )
        return float(at_centre)

    def _exclude_invalid(
        self, num_client_invalid: int, log_target: np.ndarray, points: np.ndarray
    ) -> None:
        """Exclude draws whose log density is NaN or plus infinity, or raise if there are many."""
        not_finite = np.flatnonzero(~np.isfinite(log_target))
        invalid = np.isnan(log_target) | np.isposinf(log_target)
        num = max(num_client_invalid, int(invalid.sum()))
        if len(not_finite) == len(points):
            raise ValueError(
                f"The posterior's density is zero or not a number at all {len(points)} draws of "
                f"the approximation (first draw: {points[0]}). Pass an approximation of the same "
                f"model that overlaps the posterior."
            )
        if num > MAX_INVALID_SHARE * len(points):
            raise ValueError(
                f"The log density is NaN or infinite at {num} of {len(points)} draws of the "
                f"approximation (first such draw: {points[not_finite[0]]}): the model overflows "
                f"there."
            )
        if num:
            warnings.warn(
                f"correct: the log density is NaN or infinite at {num} of {len(points)} draws, "
                f"which get no weight.",
                SamplingWarning,
                stacklevel=6,
            )
        log_target[invalid] = -np.inf

    def in_users_coordinates(self, flat: np.ndarray) -> ArrayTree:
        """Return points ``[num, d]`` as positions in the user's coordinates."""
        positions = trees.unravel(flat.astype(trees.ravel(self.centre).dtype), self.centre)
        if self.posterior.position_fn is not None:
            positions = jax.vmap(self.posterior.position_fn)(positions)
        return jax.tree.map(np.asarray, positions)


@compiled(static_argnames=("num",))
def _sum_dithers(content: Dithered, clients: Array, *, num: int) -> Array:
    """Return the sum of the noise that the clients added, in units of the step, ``[num]``."""

    def add(total: Array, client: Array) -> tuple[Array, None]:
        return total + dither_of(content, client, num), None

    return jax.lax.scan(add, jnp.zeros(num, jnp.result_type(float)), clients)[0]


class _DrawnPoints(NamedTuple):
    """Draws of a proposal with the log prior.

    Attributes
    ----------
    words
        Words of the `PointRecipe`, ``[2]`` uint32.
    points, flat
        Draws as positions, leaves ``[num, *event]``, and raveled, ``[num, d]``.
    prior, prior_at_centre
        Log prior minus the log prior at the center, ``[num]``; log prior at the center, ``[]``.
    """

    words: Array
    points: ArrayTree
    flat: Array
    prior: Array
    prior_at_centre: Array


@compiled(static_argnames=("num",), optimize=False)
def _draw_points(
    posterior: Posterior, rng_key: Array, proposal: Mixture, centre: ArrayTree, *, num: int
) -> _DrawnPoints:
    """Draw `num` points of a proposal, as clients draw them from its `PointRecipe`."""
    words = jax.random.bits(rng_key, (2,), jnp.uint32)
    points = PointRecipe(words, proposal, centre, num).draw()
    at_centre = posterior.logprior_fn(centre)
    prior = jax.vmap(lambda point: posterior.logprior_fn(point) - at_centre)(points)
    return _DrawnPoints(words, points, jax.vmap(trees.ravel)(points), prior, at_centre)


def make_proposal(
    approximation: Gaussian | Mixture | Samples,
    centre: ArrayTree | None,
    tail: float = 0.2,
    degrees: float = 5.0,
) -> tuple[Mixture, ArrayTree]:
    """Return the first proposal and the center of differences, by default the proposal's mean."""
    proposal, mean = _as_mixture(approximation, tail, degrees)
    centre = trees.as_floats(mean if centre is None else centre, "centre")
    centre = jax.tree.map(np.asarray, centre)  # operations on the host compile nothing
    if trees.num_elements(centre) != proposal.means.shape[1]:
        raise ValueError(
            f"The approximation has {proposal.means.shape[1]} dimensions, but centre has "
            f"{trees.num_elements(centre)}."
        )
    return proposal, centre


def _as_mixture(
    approximation: Gaussian | Mixture | Samples, tail: float, degrees: float
) -> tuple[Mixture, ArrayTree]:
    """Return an approximation as a mixture with heavy tails, and its mean as a position."""
    if isinstance(approximation, Mixture):
        return approximation, np.asarray(approximation.means)[0]
    if isinstance(approximation, Samples):
        draws = approximation.final_draws
        draws = approximation.draws if draws is None else draws
        ess_bulk = mixing(draws).ess_bulk
        flat = ravel_draws(draws)
        min_ess = np.nanmin(ess_bulk) if np.isfinite(ess_bulk).any() else 0.0
        if not min_ess >= ESS_PER_DIMENSION * flat.shape[1]:
            raise ValueError(
                f"These samples have {min_ess:.0f} effective draws, too few for the covariance of "
                f"{flat.shape[1]} parameters. At least {ESS_PER_DIMENSION} per parameter are "
                f"needed: sample more rounds."
            )
        like = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), draws)
        mean, covariance = flat.mean(0), np.atleast_2d(np.cov(flat.T))
    elif isinstance(approximation, Gaussian):
        like = jax.tree.map(jnp.zeros_like, approximation.precision_mean)
        mean, covariance = moments_of(approximation)
    else:
        raise TypeError(
            "approximation must be a fedmcmc.Gaussian, a Mixture or Samples, got "
            f"{type(approximation).__name__}."
        )
    proposal = defensive(mean, covariance, tail=tail, degrees=degrees)
    return proposal, trees.cast_like(trees.unravel(jnp.asarray(mean), like), like)


def _adapt_proposal(batches: list[_Weighted], proposal: Mixture) -> Mixture:
    """Return the next proposal, from the weighted moments of all draws so far.

    Each weight is the ratio of the target to the mixture of all proposals.
    """
    points = np.concatenate([x.points for x in batches])
    log_target = np.concatenate([x.log_target for x in batches])
    densities = [x.proposal.in_strata(len(x.points)).log_density(points) for x in batches]
    log_weights, _ = psis(log_target - (logsumexp(densities, axis=0) - np.log(len(batches))))
    weights = np.exp(log_weights)
    mean = weights @ points
    factor = np.asarray(proposal.factors[0], np.float64)
    trust = min(1.0, _effective_draws(log_weights) / (ESS_PER_DIMENSION * points.shape[1]))
    gaps = points - mean
    if factor.ndim == 1:
        scale = trust * (weights @ gaps**2) + (1 - trust) * factor**2
    else:
        scale = trust * (gaps.T * weights) @ gaps + (1 - trust) * factor @ factor.T
    return Mixture.of(
        [
            (0.4, np.inf, mean, scale),
            (0.4, 5.0, mean, 1.5 * scale),
            (0.2, 5.0, mean, 4.0 * scale),
        ]
    )


def _sum_costs(batches: list[_Weighted]) -> tuple[int, float, float]:
    exchanges, up, down = np.array([x.cost for x in batches]).sum(0)
    return int(exchanges), float(up), float(down)


def _effective_draws(log_weights: np.ndarray) -> float:
    return float(np.exp(-logsumexp(2 * log_weights)))


def _judge(
    rounds: list[Round],
    num_draws: int,
    passed: bool,
    min_ess: float,
    errors: MonteCarloErrors,
) -> Verdict:
    k_hat, ess = rounds[-1].k_hat, rounds[-1].ess
    kind, reason = VerdictKind.DOUBTFUL, ""
    if not passed:
        kind = VerdictKind.FAILED
        reason = (
            f"after {len(rounds)} proposal(s) the approximation is too far from the posterior "
            f"(required: k-hat below {khat_threshold(num_draws):.2f} and {min_ess:.0f} effective "
            f"draws of {num_draws:,}); sample with fedmcmc.hmc"
        )
    elif len(rounds) > 1:
        reason = (
            f"the proposal was adapted {len(rounds) - 1} time(s), and draws cannot reveal a tail "
            f"that an adapted proposal misses (compare with fedmcmc.hmc)"
        )
    elif k_hat >= GOOD_KHAT:
        reason = f"k-hat is above {GOOD_KHAT:g}"
    elif not errors.are_small:
        reason = f"too few draws (take num_draws={draws_needed(num_draws, errors):,})"
    else:
        kind = VerdictKind.PASSED
    return Verdict(
        kind,
        "importance" if kind is VerdictKind.PASSED else "",
        reason=reason,
        k_hat=k_hat,
        ess=ess,
        error=errors.mean,
        sd_error=errors.sd,
    )


def draws_needed(num_draws: int, errors: MonteCarloErrors) -> int:
    """Return the number of draws that makes errors small, with a margin of 10 %, to two digits."""
    needed = 1.1 * num_draws * errors.excess
    if not np.isfinite(needed):
        return 10 * num_draws
    digits = 10 ** max(int(np.log10(needed)) - 1, 0)
    return int(np.ceil(needed / digits)) * digits
