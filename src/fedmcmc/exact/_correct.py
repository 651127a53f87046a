"""Importance correction: one round of summed log likelihoods makes an approximation exact.

Source: Hesterberg (1995), defensive mixtures; Vehtari et al. (2024), Pareto smoothing; Cornuet,
Marin, Mira and Robert (2012), weights of all rounds; Paananen et al. (2021), moment matching.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import logsumexp

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.diagnostics import (
    MonteCarloErrors,
    SamplingWarning,
    Verdict,
    VerdictKind,
    errors_of_weighted,
    mixing,
    psis,
    threshold,
)
from fedmcmc.exact._corrected import Corrected, Round
from fedmcmc.gaussian import Gaussian, Mixture, defensive, moments_of
from fedmcmc.kernels import (
    BELOW,
    Dithered,
    Evaluated,
    Points,
    Recipe,
    dither_of,
    evaluations,
)
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium, as_consortium

LEAST_DRAWS = 100
GOOD_KHAT = 0.5
ENOUGH = 400
"""Effective draws; of fewer than 4,000 draws a tenth."""
RECIPE_BYTES = 2**20
"""Points of more bytes are drawn by the clients themselves, from a recipe."""
MOST_POINTS = 2**15
"""Per message; more draws take several."""
MOST_INVALID = 0.01
PER_DIMENSION = 10
"""Effective draws per dimension from which on moments are believed."""


@in_single_precision
def correct(
    rng_key: Array,
    posterior: Posterior,
    data: Any,
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

    One exchange with all clients sums their log likelihoods at all draws. Weights are posterior
    over proposal, smoothed; the shape of their tail, k-hat, says whether they can be trusted, and
    their mean is the evidence. Where they cannot, the proposal moves to the weighted moments and
    another round follows: its draws are new, so that the result is that of a proposal that was
    fixed before they were drawn.

    Parameters
    ----------
    rng_key
        Of the draws.
    posterior
        The model. Of `fedmcmc.whiten` that in whitened coordinates, with the approximation there.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    approximation
        Of the whole posterior, prior included: a `Gaussian` (``surrogates.sum()`` times the prior's
        expansion; FedEP's ``samples.state.server``'s approximation), a `fedmcmc.Mixture`,
        or `Samples`, whose mean and covariance are taken (their draws have no known density and
        cannot be weighted).
    num_draws
        Draws of each round, at least 100.
    max_rounds
        Proposals at most.
    tail, degrees
        Share and degrees of freedom of the part with heavy tails of the first proposal,
        ``(1 - tail) N(m, C) + tail t(m, 1.2 C)``; not for a mixture, which is taken as it is.
    adapt
        Whether to go on where the first round does not pass.
    centre
        A position near the posterior's middle: clients send differences to their log likelihood
        there. By default the approximation's mean; of a mixture, which knows no names, the mean of
        its first part as a vector.
    dither
        Clients send log likelihoods as multiples of so many nats, rounded with uniform numbers that
        are subtracted from the sum again: the error is uniform and does not depend on the draw, so
        that weights stay right at any `dither`. It costs effective draws, a share of about
        ``num_clients * dither**2 / 12``, and less than half of the bits up where that is a tenth.
        By default nothing is rounded.

    Returns
    -------
    Corrected
        The verdict's kind is ``"passed"`` if the first round gave ``khat < 0.5`` and estimated
        Monte Carlo errors of at most 0.05 sd for means and 5 % for sds; ``"doubtful"`` if errors
        are larger, if k-hat is only below ``min(1 - 1 / log10(num_draws), 0.7)``, or if it took
        more rounds, since a tail that adaptation stops visiting does not show; ``"failed"``
        otherwise. Errors are those of the unconstrained coordinates. If the prior is improper,
        ``log_evidence`` is NaN.

    Raises
    ------
    ValueError
        If the approximation is not proper, or of another shape than the model's; if the log density
        is NaN or plus infinity at more than one point in a hundred, or zero at all.

    Warns
    -----
    SamplingWarning
        Unless the first round passed.

    Notes
    -----
    A mode that no draw reaches cannot be seen by any figure: an approximation that covers one of
    two modes has constant weights. Works for up to about a tenth as many parameters as rows.

    Values at many chosen points determine the likelihood of a client with few rows: without a
    secure sum the server can learn about its rows.

    Of a consortium whose messages `fedmcmc.compress` rounds by itself the evidence is too large, by
    half of the variance of the sum's errors, which is not known here. `dither` has no such error.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2 - 0.919, lambda theta, x: -0.5 * (x - theta) ** 2 - 0.919
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> rough = fedmcmc.Gaussian.from_moments(jnp.array(0.2), variance=jnp.array(0.15))
    >>> corrected = correct(jax.random.key(0), posterior, data, rough)
    >>> print(corrected.verdict.kind, corrected.totals["rounds"], corrected.verdict.error < 0.05)
    passed 1 True
    >>> print(round(float(corrected.mean()), 1), round(float(corrected.sd()), 1))  # 1/3, 1/3
    0.3 0.3
    """
    expect(posterior, Posterior, "posterior")
    num_draws = positive_integer(num_draws, "num_draws")
    if num_draws < LEAST_DRAWS:
        raise ValueError(f"num_draws must be at least {LEAST_DRAWS}, got {num_draws}.")
    max_rounds = positive_integer(max_rounds, "max_rounds")
    if not 0 <= tail < 1 or not degrees > 0:
        raise ValueError(f"tail must lie in [0, 1) and degrees be positive, got {tail}, {degrees}.")
    proposal, middle = first_proposal(approximation, tail, degrees)
    centre = middle if centre is None else trees.as_floats(centre, "centre")
    if trees.num_elements(centre) != proposal.means.shape[1]:
        raise ValueError(
            f"The approximation has {proposal.means.shape[1]} dimensions, and centre "
            f"{trees.num_elements(centre)}."
        )
    if dither is not None and not 0 < dither < np.inf:
        raise ValueError(f"dither must be a positive number of nats, got {dither!r}.")
    target = Target(as_functions(posterior), as_consortium(data), centre, dither)
    rounds: list[Round] = []
    found: list[_Weighted] = []
    key, enough = as_key(rng_key), min(ENOUGH, num_draws / 10)
    for number in range(max_rounds if adapt else 1):
        found.append(target.weigh(jax.random.fold_in(key, number), proposal, num_draws))
        log_weights, khat = psis(found[-1].log_ratios)
        ess = _ess(log_weights)
        rounds.append(Round(khat, ess, *found[-1].cost))
        passed = khat < threshold(num_draws) and ess >= enough
        if passed or number + 1 == max_rounds or not adapt:
            break
        proposal = _moved(found, proposal)
    last = found[-1]
    errors = errors_of_weighted(last.points, np.exp(log_weights))
    verdict = _verdict(rounds, num_draws, passed, enough, errors)
    if verdict.kind == VerdictKind.FAILED or len(rounds) > 1:
        warnings.warn(f"correct: {verdict}", SamplingWarning, stacklevel=3)
    unsmoothed = last.log_ratios - logsumexp(last.log_ratios)
    draws = target.in_users_coordinates(last.points)
    exchanges, up, down = np.array([x.cost for x in found]).sum(0)
    has_evidence = not posterior.improper
    return Corrected(
        draws=draws,
        log_weights=log_weights,
        khat=khat,
        ess=ess,
        log_evidence=float(
            logsumexp(last.log_ratios)
            - np.log(num_draws)
            + last.log_density_at_centre
            - target.log_mean_error
        )
        if has_evidence
        else np.nan,
        log_evidence_sd=float(np.sqrt(max(1 / _ess(unsmoothed) - 1 / num_draws, 0.0)))
        if has_evidence
        else np.nan,
        proposal=proposal,
        rounds=tuple(rounds),
        totals={"rounds": int(exchanges), "bits_up": float(up), "bits_down": float(down)},
        verdict=verdict,
        constrain_fn=posterior.constrain_fn,
        log_ratios=last.log_ratios,
    )


@dataclass(frozen=True)
class _Weighted:
    """Draws of one proposal, ``[num, d]`` float64, with log target and ratio, ``[num]``.

    The log target is relative to that at the center.
    """

    points: np.ndarray
    log_target: np.ndarray
    log_ratios: np.ndarray
    log_density_at_centre: float
    proposal: Mixture
    cost: tuple[int, float, float]


class Target:
    """The posterior, whose log density a consortium's clients sum."""

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
        """Log of the mean factor that dithered errors put into weights, the same for all draws."""
        if self.dither is None:
            return 0.0
        half = self.dither / 2
        return float(self.consortium.federation.num_clients * np.log(np.sinh(half) / half))

    def weigh(self, rng_key: Array, proposal: Mixture, num_draws: int) -> _Weighted:
        """Draw from `proposal` and weigh the draws."""
        parts = [
            self._weigh(jax.random.fold_in(rng_key, first), proposal, size)
            for first in range(0, num_draws, MOST_POINTS)
            for size in [min(MOST_POINTS, num_draws - first)]
        ]
        points, log_target, log_ratios, at_centre, cost = zip(*parts, strict=True)
        exchanges, up, down = np.array(cost).sum(0)
        return _Weighted(
            np.concatenate(points),
            np.concatenate(log_target),
            np.concatenate(log_ratios),
            at_centre[0],
            proposal,
            (int(exchanges), float(up), float(down)),
        )

    def _weigh(
        self, rng_key: Array, proposal: Mixture, num: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, tuple[int, float, float]]:
        words = jax.random.bits(rng_key, (2,), jnp.uint32)
        recipe = Recipe(words, proposal, self.centre, num)
        points, flat, prior, prior_at_centre = _drawn(recipe, self.posterior)
        by_recipe = num * flat.shape[1] * flat.dtype.itemsize > RECIPE_BYTES
        content: Any = recipe if by_recipe else Points(points, self.centre)
        if self.dither is not None:
            own_words = jax.random.bits(jax.random.fold_in(rng_key, num), (2,), jnp.uint32)
            step = jnp.asarray(self.dither, jnp.result_type(float))
            content = Dithered(content, own_words, step)
        asked = self.consortium.ask(self.question, content)
        answer: Evaluated = asked.value
        if by_recipe:
            wanted = self.consortium.federation.num_clients * np.asarray(recipe.checksum())
            if not np.array_equal(np.asarray(answer.checksum.value), wanted):
                raise RuntimeError(
                    "The clients drew other points than the server: their random generators "
                    "differ. Use the same version of JAX everywhere."
                )
        value = np.array(answer.value, np.float64)
        if isinstance(content, Dithered):
            num_clients = self.consortium.federation.num_clients
            added = np.asarray(_dithers(content, jnp.arange(num_clients), num=num), np.float64)
            value -= float(content.step) * added
        value[value < BELOW] = -np.inf
        log_target = value + np.asarray(prior, np.float64)
        points64 = np.asarray(flat, np.float64)
        at_centre = np.asarray(answer.at_centre.value, np.float64).sum() + float(prior_at_centre)
        if not np.isfinite(at_centre):
            raise ValueError(
                f"The log density at the center of the approximation is not finite: "
                f"{jax.tree.map(np.asarray, self.centre)}. Pass centre=, a position where it is."
            )
        self._check(int(answer.invalid.value), log_target, points64)
        log_ratios = log_target - proposal.in_strata(num).log_density(points64)
        cost = (asked.rounds, asked.bits_up, asked.bits_down)
        return points64, log_target, log_ratios, float(at_centre), cost

    def _check(self, invalid: int, log_target: np.ndarray, points: np.ndarray) -> None:
        bad = np.flatnonzero(~np.isfinite(log_target))
        wrong = np.isnan(log_target) | np.isposinf(log_target)
        num = max(invalid, int(wrong.sum()))
        if len(bad) == len(points):
            raise ValueError(
                "The posterior's density is zero or not a number at all draws of the approximation "
                f"(first of them: {points[0]}): it is that of another model, or far off."
            )
        if num > MOST_INVALID * len(points):
            raise ValueError(
                f"The log density is NaN or infinite at {num} of {len(points)} draws of the "
                f"approximation (first bad draw: {points[bad[0]]}): the model overflows there."
            )
        if num:
            warnings.warn(
                f"correct: the log density is NaN or infinite at {num} of {len(points)} draws, "
                f"which get no weight.",
                SamplingWarning,
                stacklevel=6,
            )
        log_target[wrong] = -np.inf

    def in_users_coordinates(self, flat: np.ndarray) -> ArrayTree:
        """Return points ``[num, d]`` as positions in the user's coordinates."""
        positions = jax.vmap(lambda x: trees.unravel(x, self.centre))(
            jnp.asarray(flat, trees.ravel(self.centre).dtype)
        )
        if self.posterior.position_fn is not None:
            positions = jax.vmap(self.posterior.position_fn)(positions)
        return jax.tree.map(np.asarray, positions)


@compiled(static_argnames=("num",))
def _dithers(asked: Dithered, clients: Array, *, num: int) -> Array:
    """Return what all clients together added to their values, in units of the step, ``[num]``."""

    def plus(total: Array, client: Array) -> tuple[Array, None]:
        return total + dither_of(asked, client, num), None

    nothing = jnp.zeros(num, jnp.result_type(float))
    return jax.lax.scan(plus, nothing, clients)[0]


@compiled
def _drawn(recipe: Recipe, posterior: Posterior) -> tuple[ArrayTree, Array, Array, Array]:
    """Return points as positions and raveled, the prior's log density relative to the center."""
    points = recipe.draw()
    at_centre = posterior.logprior_fn(recipe.centre)
    prior = jax.vmap(lambda point: posterior.logprior_fn(point) - at_centre)(points)
    return points, jax.vmap(trees.ravel)(points), prior, at_centre


def first_proposal(approximation: Any, tail: float, degrees: float) -> tuple[Mixture, ArrayTree]:
    """Return what the first round draws from, and the center of differences, a position."""
    if isinstance(approximation, Mixture):
        return approximation, approximation.means[0]
    if isinstance(approximation, Samples):
        draws = approximation.final_draws
        draws = approximation.draws if draws is None else draws
        found = mixing(draws)
        flat = np.concatenate(
            [
                np.asarray(leaf, np.float64).reshape(leaf.shape[0] * leaf.shape[1], -1)
                for leaf in jax.tree.leaves(draws)
            ],
            axis=1,
        )
        least = np.nanmin(found.ess_bulk) if np.isfinite(found.ess_bulk).any() else 0.0
        if not least >= PER_DIMENSION * flat.shape[1]:
            raise ValueError(
                f"These samples have {least:.0f} effective draws, too few for the covariance of "
                f"{flat.shape[1]} parameters: at least {PER_DIMENSION} per parameter are needed."
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


def _moved(found: list[_Weighted], proposal: Mixture) -> Mixture:
    """Return the next proposal, from the weighted moments of all draws so far.

    Each draw is weighted by the target over the mixture of all proposals.
    """
    points = np.concatenate([x.points for x in found])
    log_target = np.concatenate([x.log_target for x in found])
    densities = [x.proposal.in_strata(len(x.points)).log_density(points) for x in found]
    log_weights, _ = psis(log_target - (logsumexp(densities, axis=0) - np.log(len(found))))
    weights = np.exp(log_weights)
    mean = weights @ points
    factor = np.asarray(proposal.factors[0], np.float64)
    trust = min(1.0, _ess(log_weights) / (PER_DIMENSION * points.shape[1]))
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


def _ess(log_weights: np.ndarray) -> float:
    return float(np.exp(-logsumexp(2 * log_weights)))


def _verdict(
    rounds: list[Round],
    num_draws: int,
    passed: bool,
    enough: float,
    errors: MonteCarloErrors,
) -> Verdict:
    last, most = rounds[-1], threshold(num_draws)
    kind, reason = VerdictKind.DOUBTFUL, ""
    if not passed:
        kind = VerdictKind.FAILED
        reason = (
            f"after {len(rounds)} proposal(s) the approximation is too far from the posterior "
            f"(wanted: k-hat below {most:.2f} and {enough:.0f} effective draws of {num_draws:,}); "
            f"sample by fedmcmc.hmc"
        )
    elif len(rounds) > 1:
        reason = (
            f"the proposal was adapted {len(rounds) - 1} time(s), and a tail that adaptation does "
            f"not visit does not show (compare with fedmcmc.hmc)"
        )
    elif last.khat >= GOOD_KHAT:
        reason = f"k-hat is above {GOOD_KHAT:g}"
    elif not errors.are_small:
        reason = f"too few draws (take num_draws={draws_needed(num_draws, errors):,})"
    else:
        kind = VerdictKind.PASSED
    return Verdict(
        kind,
        "importance" if kind is VerdictKind.PASSED else "",
        reason=reason,
        k_hat=last.khat,
        ess=last.ess,
        error=errors.mean,
        sd_error=errors.sd,
    )


def draws_needed(num_draws: int, errors: MonteCarloErrors) -> int:
    """Return how many draws would have small errors, to two digits, with a tenth to spare."""
    needed = 1.1 * num_draws * errors.excess
    if not np.isfinite(needed):
        return 10 * num_draws
    digits = 10 ** max(int(np.log10(needed)) - 1, 0)
    return int(np.ceil(needed / digits)) * digits
