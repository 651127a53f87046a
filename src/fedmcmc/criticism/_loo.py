"""Leave-one-out cross-validation of rows, groups or clients.

Source: see `_loo_question`; Paananen et al. (2021) for proposals with wider tails.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.criticism._draws import MAX_DRAWS, EqualDraws, PosteriorDraws, equal_draws
from fedmcmc.criticism._loo_question import LeaveGroupsOut, LeaveOneOut, LooSums, WidenedDraws
from fedmcmc.criticism._pareto import tail_length
from fedmcmc.criticism._units import UNITS, choose_unit, describe_unjudged, warn_if_weighted
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact import CorrectionTarget, khat_threshold
from fedmcmc.gaussian import Mixture
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import ArrayTree, ClientTerms, Posterior, as_functions

WIDER = ((0.4, np.inf, 1.0), (0.3, 5.0, 2.0), (0.3, 5.0, 8.0))
"""Components of the weighted points: share, degrees of freedom, factor of the covariance. Without
an influential row the posterior is wider."""
NUM_POINTS = 4000


@dataclass(frozen=True)
class Loo:
    """Leave-one-out predictive densities of a model, summed over rows.

    If `unit` is ``"groups"`` or ``"clients"``, all figures refer to these instead of rows.

    Attributes
    ----------
    elpd, se
        Sum of the rows' log predictive densities, and its standard error,
        ``sqrt(num_rows * variance)``.
    p_loo
        Effective number of parameters: decrease of the sum, in nats, when rows are left out.
    num_rows
        Number of rows in the sums.
    num_not_judged
        Number of rows of clients with fewer rows than `minimum_rows`, which are in no sum.
    num_bad, num_very_bad
        Number of rows with k-hat above `good_k`, and above one: their densities are unreliable.
    num_refined
        Number of rows whose densities come from weighted points; see `loo`.
    good_k
        Limit of k-hat, ``min(1 - 1 / log10(num_draws), 0.7)``.
    num_draws
        Number of draws used.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of the exchange.
    unit
        Unit that was left out: ``"rows"``, ``"groups"`` or ``"clients"``.
    num_available
        Number of draws before thinning.
    notes
        Limits of the result, one sentence each.
    """

    elpd: float
    se: float
    p_loo: float
    num_rows: int
    num_not_judged: int
    num_bad: int
    num_very_bad: int
    num_refined: int
    good_k: float
    num_draws: int
    totals: dict[str, float]
    unit: str = "rows"
    num_available: int = 0
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``"good"``, ``"doubtful"`` (a k-hat above `good_k`) or ``"failed"`` (above one)."""
        return "failed" if self.num_very_bad else "doubtful" if self.num_bad else "good"

    def __repr__(self) -> str:
        """Return the figures and the verdict."""
        thinned = f" of {self.num_available:,}" * (self.num_available > self.num_draws)
        lines = [
            f"elpd_loo {self.elpd:.1f} (se {self.se:.1f}), p_loo {self.p_loo:.1f}; "
            f"{self.num_rows:,} {self.unit}, {self.num_draws:,}{thinned} draws",
            f"{self.verdict}: {_describe_khat(self)}",
        ]
        if self.num_refined:
            lines.append(f"{self.num_refined:,} {self.unit} by weighted points")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the verdict."""
        return {**self.__dict__, "verdict": self.verdict}


def loo(
    posterior: Posterior,
    data: FederatedData | Consortium,
    draws: PosteriorDraws,
    *,
    unit: str | None = None,
    num_draws: int = MAX_DRAWS,
    minimum_rows: int = 10,
    efficiency: float | None = None,
    secure_sum: bool = False,
    refine: bool = False,
    rng_key: Array | None = None,
) -> Loo:
    """Estimate leave-one-out predictive densities, in one exchange of sums.

    A row's density is ``e_j = log sum_s w_s p(y_j | theta_s)`` with weights ``w_s`` smoothed from
    ``1 / p(y_j | theta_s)``; clients send sums over rows. If the data have ``groups=`` or latents
    are integrated out, groups of rows are left out (docs/guides/criticism.md): read "group" for
    "row". Warnings count rows with a k-hat above ``min(1 - 1 / log10(num_draws), 0.7)``, and name
    weighted terms.

    Parameters
    ----------
    posterior, data
        Model in its original coordinates, and `FederatedData` or a consortium of remote clients.
    draws
        Result of `fedmcmc.fit`, `fedmcmc.correct` or an unbiased sampler, or a pytree of draws with
        leaves ``[num, *event]``.
    unit
        Left-out unit: ``"row"``, ``"group"`` (the default if there are groups) or ``"client"``.
    num_draws, rng_key
        Number of draws that are sent, at least 100, and key for resampling weighted draws.
    minimum_rows, secure_sum
        Smallest number of rows for which a client sends sums; unused in a secure sum.
    efficiency
        Effective draws per draw, at most one; by default that of `Samples`, or one.
    refine
        If true, two more exchanges compute rows with a bad k-hat again, from 4,000 weighted points.

    Raises
    ------
    ValueError
        If draws or rows are too few, a log likelihood is not finite, or `unit` does not fit.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2 - 0.919)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.zeros(20), jnp.ones(40)])
    >>> draws = 2 / 3 + jax.random.normal(jax.random.key(0), (4000,)) / 60**0.5
    >>> print(loo(posterior, data, draws))
    elpd_loo -62.4 (se 0.6), p_loo 0.2; 60 rows, 4,000 draws
    good: k-hat of all rows below 0.70
    """
    chosen = equal_draws(draws, posterior, num_draws, rng_key)
    unit = choose_unit((posterior,), data, unit)
    sums, totals = collect_sums(
        (posterior,), data, (chosen,), unit, minimum_rows, efficiency, secure_sum, refine, rng_key
    )
    notes = warn_if_weighted({"": posterior}, "loo", stacklevel=3)
    result = make_loo(sums, 0, chosen, totals, UNITS[unit], minimum_rows, notes)
    warn_if_unreliable(result, "loo")
    return result


def collect_sums(
    models: tuple[Posterior, ...],
    data: FederatedData | Consortium,
    draws: tuple[EqualDraws, ...],
    unit: str,
    minimum_rows: int,
    efficiency: float | None,
    secure_sum: bool,
    refine: bool,
    rng_key: Array | None,
) -> tuple[LooSums, dict[str, float]]:
    """Return the sums over all clients, and the cost of the exchanges; see `loo`."""
    if efficiency is not None and not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must lie in (0, 1], got {efficiency!r}.")
    if minimum_rows < 1:
        raise ValueError(f"minimum_rows must be at least 1, got {minimum_rows!r}.")
    key = jax.random.fold_in(jax.random.key(0) if rng_key is None else as_key(rng_key), 1)
    consortium = as_consortium(data)
    tails = tuple(
        tail_length(x.num, x.efficiency if efficiency is None else efficiency) for x in draws
    )
    khat_limits = jnp.array([khat_threshold(x.num) for x in draws])
    minimum = 1 if secure_sum else minimum_rows
    question = LeaveOneOut(models[0], models[1:], minimum, khat_limits, tails)
    if unit != "row":
        question = LeaveGroupsOut(
            models[0], models[1:], minimum, khat_limits, tails, unit == "client"
        )
    units = UNITS[unit]
    answer = consortium.ask(question, tuple(x.positions for x in draws))
    sums: LooSums = answer.value.value
    costs = [(answer.rounds, answer.bits_up, answer.bits_down)]
    if refine and np.any(np.asarray(sums.bad) > 0) and not sums.not_finite > 0:
        content = []
        for i, (model, x) in enumerate(zip(models, draws, strict=True)):
            entry, cost = _add_points(jax.random.fold_in(key, i), model, consortium, x.positions)
            content.append(entry)
            costs.append(cost)
        answer = consortium.ask(question, tuple(content))
        sums = answer.value.value
        costs.append((answer.rounds, answer.bits_up, answer.bits_down))
    names = ("rounds", "bits_up", "bits_down")
    totals: dict[str, float] = dict(zip(names, map(sum, zip(*costs, strict=True)), strict=True))
    if sums.not_finite > 0:
        raise ValueError(
            f"The log likelihood is not finite for {int(sums.not_finite)} {units} at some of the "
            f"draws: the model overflows there, or gives these {units} no probability."
        )
    if sums.judged == 0:
        reason = f"No client has at least {minimum_rows} {units}: smaller sums reveal single values"
        if unit == "client":
            reason = "With unit='client' the sum of a client is its own density"
        integrates = any(isinstance(model.loglikelihood_fn, ClientTerms) for model in models)
        raise ValueError(
            f"{reason}, so no client sends a sum. Pass secure_sum=True if sums are added securely, "
            f"or minimum_rows=1 if the server may see such sums"
            + ", or unit='row' to leave out rows" * (unit == "group" and not integrates)
            + "."
        )
    return sums, totals


def _add_points(
    rng_key: Array, posterior: Posterior, consortium: Consortium, draws: ArrayTree
) -> tuple[WidenedDraws, tuple[int, float, float]]:
    """Return draws with weighted points around them, and the exchange's rounds and bits."""
    flat = np.asarray(jax.vmap(trees.ravel)(draws), np.float64)
    mean, covariance = flat.mean(0), np.atleast_2d(np.cov(flat.T))
    proposal = Mixture.of([(share, nu, mean, scale * covariance) for share, nu, scale in WIDER])
    like = jax.tree.map(lambda leaf: leaf[0], draws)

    def position(x: ArrayTree) -> ArrayTree:
        return trees.cast_like(trees.unravel(jnp.asarray(x), like), like)

    target = CorrectionTarget(as_functions(posterior), consortium, position(mean))
    weighed = target.weigh(rng_key, proposal, NUM_POINTS)
    log_weights = jnp.asarray(weighed.log_ratios - weighed.log_ratios.max(), jnp.result_type(float))
    points = jax.vmap(position)(jnp.asarray(weighed.points, jnp.result_type(float)))
    rounds, bits_up, bits_down = weighed.cost
    return WidenedDraws(draws, points, log_weights), (rounds, bits_up, bits_down)


def make_loo(
    sums: LooSums,
    model: int,
    draws: EqualDraws,
    totals: dict[str, float],
    unit: str,
    minimum_rows: int,
    notes: Sequence[str] = (),
) -> Loo:
    """Return the `Loo` of the model with index `model`."""
    elpd, squared, p_loo = (
        float(np.asarray(x, np.float64)[model].sum()) for x in (sums.elpd, sums.squared, sums.p_loo)
    )
    num, num_not_judged = int(sums.judged), int(sums.not_judged)
    if num_not_judged:
        notes = (*notes, describe_unjudged(num_not_judged, unit, minimum_rows))
    return Loo(
        elpd,
        float(np.sqrt(max(squared - elpd**2 / num, 0.0))),
        p_loo,
        num,
        num_not_judged,
        int(sums.bad[model]),
        int(sums.very_bad[model]),
        int(sums.refined[model]),
        khat_threshold(draws.num),
        draws.num,
        totals,
        unit,
        draws.num_available,
        tuple(notes),
    )


def _describe_khat(result: Loo) -> str:
    bad, unit = result.num_bad, result.unit
    if not bad:
        return f"k-hat of all {unit} below {result.good_k:.2f}"
    return (
        f"k-hat of {bad:,} of {result.num_rows:,} {unit} above {result.good_k:.2f}, of "
        f"{result.num_very_bad:,} above 1"
    )


def warn_if_unreliable(result: Loo, name: str) -> None:
    """Warn if the densities of some rows are unreliable."""
    if result.num_bad:
        warnings.warn(
            f"{name}: {_describe_khat(result)}. Such a {result.unit[:-1]} changes the posterior "
            "so much that the density computed without it is unreliable."
            + (" loo(refine=True) uses points with wider tails for it." * (name == "loo")),
            SamplingWarning,
            stacklevel=3,
        )
