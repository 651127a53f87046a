"""Leave-one-out cross-validation of rows or of groups of rows, as sums.

Proposals that reach farther than the posterior, for rows that need them, are as in Paananen et al.
(2021); for the rest see `_left_one_out`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, ClientTerms, Posterior, as_functions
from fedmcmc.criticism._draws import MOST_DRAWS, EqualDraws, equal_draws
from fedmcmc.criticism._left_one_out import LeaveGroupsOut, LeaveOneOut, Left, Wide
from fedmcmc.criticism._pareto import tail_length
from fedmcmc.criticism._units import UNITS, few_units, unit_of, weight_notes
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact import Target, threshold
from fedmcmc.gaussian import Mixture
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium

WIDER = ((0.4, np.inf, 1.0), (0.3, 5.0, 2.0), (0.3, 5.0, 8.0))
"""Parts of what weighted points are drawn of: share, degrees of freedom, factor of the covariance.
Without an influential row the posterior is wider than with it."""
NUM_POINTS = 4000


@dataclass(frozen=True)
class Loo:
    """How well a model predicts each row from all others.

    If `unit` is ``"groups"`` or ``"clients"``, all figures are of these instead of rows.

    Attributes
    ----------
    elpd, se
        Sum of the rows' log predictive densities, and its standard error,
        ``sqrt(num_rows * variance)``.
    p_loo
        Effective number of parameters: what leaving each row out costs in nats.
    num_rows
        Rows in the sums.
    num_not_judged
        Rows of clients with fewer rows than `minimum_rows`, which are in no sum.
    num_bad, num_very_bad
        Rows whose k-hat is above `good_k`, and above one: their densities cannot be trusted.
    num_mended
        Rows whose densities are those of weighted points, as draws did not suffice; see `loo`.
    good_k
        ``min(1 - 1 / log10(num_draws), 0.7)``.
    num_draws
        Draws used.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of the exchange.
    unit
        What was left out: ``"rows"``, ``"groups"`` or ``"clients"``.
    num_available
        Draws that there are, of which `num_draws` were used.
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
    num_mended: int
    good_k: float
    num_draws: int
    totals: dict[str, float]
    unit: str = "rows"
    num_available: int = 0
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """``"good"``, ``"doubtful"`` (a k-hat above `good_k`) or ``"failed"`` (one above one)."""
        return "failed" if self.num_very_bad else "doubtful" if self.num_bad else "good"

    def __repr__(self) -> str:
        """Return the figures, and how many rows they can be trusted for."""
        thinned = f" of {self.num_available:,}" * (self.num_available > self.num_draws)
        lines = [
            f"elpd_loo {self.elpd:.1f} (se {self.se:.1f}), p_loo {self.p_loo:.1f}; "
            f"{self.num_rows:,} {self.unit}, {self.num_draws:,}{thinned} draws",
            f"{self.verdict}: {_told(self)}",
        ]
        if self.num_mended:
            lines.append(f"{self.num_mended:,} {self.unit} by weighted points")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the verdict."""
        return {**self.__dict__, "verdict": self.verdict}


def loo(
    posterior: Posterior,
    data: Any,
    draws: Any,
    *,
    unit: str | None = None,
    num_draws: int = MOST_DRAWS,
    minimum_rows: int = 10,
    efficiency: float | None = None,
    secure_sum: bool = False,
    mend: bool = False,
    rng_key: Array | None = None,
) -> Loo:
    """Estimate how well the model predicts each row from all others, in one exchange of sums.

    Every client weights the draws for each of its rows as if the row had been left out, smooths
    the weights, and sends sums over its rows. Rows and their densities stay where they are.

    Whole groups are left out if the data have ``groups=``, or if the model's latents are integrated
    out (`fedmcmc.marginal`, as in the `posterior` of a `fedmcmc.Fitted`): how well is a new patient
    or a new hospital predicted? What is said of rows here then holds of groups.

    Parameters
    ----------
    posterior
        The model, normalized if densities are to be compared; in its own coordinates.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    draws
        Of the posterior: a `fedmcmc.Fitted`, a `fedmcmc.Corrected` (resampled), `fedmcmc.Samples`
        (of a sampler without bias), or a pytree of positions, leaves ``[num, *event]``, of equal
        weight.
    unit
        What is left out: ``"row"``, ``"group"`` or ``"client"``. By default groups if there are
        any, else rows. A client at a real site is one group.
    num_draws
        Number of draws that are sent, at least 100; if there are more, they are thinned evenly.
    minimum_rows
        A client with fewer rows (groups) sends no sum, as that of one row is the row's own density;
        its rows are counted.
    efficiency
        Effective draws per draw, at most one: the fewer, the longer the tail of the weights. By
        default that of `draws`: of `Samples` the mean over coordinates, one of a pytree.
    secure_sum
        Whether sums are added where nobody sees a single client's: `minimum_rows` then does not
        hold.
    mend
        Whether rows with a bad k-hat are judged again, in two exchanges more, by 4,000 points that
        reach farther than the draws: weighted by the posterior, then for such a row as if it had
        been left out. The server learns how many there are, and sums.
    rng_key
        For resampling weighted draws, and for those points; by default ``jax.random.key(0)``.

    Returns
    -------
    Loo
        Without `mend` equal to ArviZ's ``loo`` on the pooled rows, up to rounding.

    Raises
    ------
    ValueError
        If draws are too few, no client has enough rows, a log likelihood is not finite, or single
        rows are to be left out of groups whose latents are integrated out.

    Warns
    -----
    SamplingWarning
        If the k-hat of some row is above ``min(1 - 1 / log10(num_draws), 0.7)``, with `mend` that
        by weighted points, too.
    UserWarning
        If terms of the likelihood are weighted (`numpyro.handlers.scale`), so that they are no log
        densities of outcomes.

    Notes
    -----
    With ``L[s, j] = log p(y_j | theta_s)`` and weights ``w_s`` smoothed from ``exp(-L[s, j])``, a
    row's density is ``e_j = log sum_s w_s exp(L[s, j])``. Clients send the number of rows, the sums
    of ``e_j``, of its square and of ``log mean_s exp(L[s, j]) - e_j``, and how many k-hats are
    above the threshold and above one.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2 - 0.919, lambda theta, x: -0.5 * (x - theta) ** 2 - 0.919
    ... )
    >>> x = jax.random.normal(jax.random.key(0), (60,))
    >>> data = fedmcmc.FederatedData.from_clients([x[:20], x[20:]])
    >>> exact = x.sum() / 61 + jax.random.normal(jax.random.key(1), (4000,)) / jnp.sqrt(61)
    >>> print(loo(posterior, data, exact))
    elpd_loo -83.7 (se 4.8), p_loo 0.9; 60 rows, 4,000 draws
    good: k-hat of all rows below 0.70
    """
    chosen = equal_draws(draws, posterior, num_draws, rng_key)
    efficiencies = [chosen.efficiency if efficiency is None else efficiency]
    key = jax.random.key(0) if rng_key is None else as_key(rng_key)
    unit = unit_of((posterior,), data, unit)
    sums, totals = ask(
        (posterior,),
        data,
        (chosen,),
        efficiencies,
        minimum_rows,
        secure_sum,
        unit=unit,
        mend=jax.random.fold_in(key, 1) if mend else None,
    )
    notes = weight_notes({"": posterior}, "loo", stacklevel=3)
    found = result_of(sums, 0, chosen, totals, UNITS[unit], minimum_rows, notes)
    warn_of_rows(found, "loo")
    return found


def ask(
    models: tuple[Posterior, ...],
    data: Any,
    draws: tuple[Any, ...],
    efficiencies: list[float],
    minimum_rows: int,
    secure_sum: bool,
    *,
    unit: str,
    mend: Array | None = None,
) -> tuple[Left, dict[str, float]]:
    """Return the sums of all clients over their rows, and what the exchanges cost.

    `mend` is a key for points by which rows with a bad k-hat are judged again.
    """
    for efficiency in efficiencies:
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency must lie in (0, 1], got {efficiency!r}.")
    if minimum_rows < 1:
        raise ValueError(f"minimum_rows must be at least 1, got {minimum_rows!r}.")
    consortium = as_consortium(data)
    tails = tuple(tail_length(x.num, e) for x, e in zip(draws, efficiencies, strict=True))
    worst = jnp.array([threshold(x.num) for x in draws])
    least = 1 if secure_sum else minimum_rows
    question = LeaveOneOut(models[0], models[1:], least, worst, tails)
    if unit != "row":
        question = LeaveGroupsOut(models[0], models[1:], least, worst, tails, unit == "client")
    units = UNITS[unit]
    asked = consortium.ask(question, tuple(x.positions for x in draws))
    sums: Left = asked.value.value
    totals = {"rounds": asked.rounds, "bits_up": asked.bits_up, "bits_down": asked.bits_down}
    if mend is not None and np.any(np.asarray(sums.bad) > 0) and not sums.not_finite > 0:
        content = []
        for number, (model, own) in enumerate(zip(models, draws, strict=True)):
            entry, cost = _wide(jax.random.fold_in(mend, number), model, consortium, own.positions)
            content.append(entry)
            totals = {name: totals[name] + cost[name] for name in totals}
        asked = consortium.ask(question, tuple(content))
        sums = asked.value.value
        cost = {"rounds": asked.rounds, "bits_up": asked.bits_up, "bits_down": asked.bits_down}
        totals = {name: totals[name] + cost[name] for name in totals}
    if sums.not_finite > 0:
        raise ValueError(
            f"The log likelihood is not finite for {int(sums.not_finite)} {units} at some of the "
            f"draws: the model overflows there, or gives these {units} no probability."
        )
    if sums.judged == 0:
        why = f"No client has at least {minimum_rows} {units}: a sum over so few shows single ones"
        if unit == "client":
            why = "With unit='client' the sum of a client is its own density"
        integrates = any(isinstance(model.loglikelihood_fn, ClientTerms) for model in models)
        raise ValueError(
            f"{why}, so none sends it. Pass secure_sum=True if sums are added securely, or "
            f"minimum_rows=1 if such sums may be seen"
            + ", or unit='row' to leave out rows" * (unit == "group" and not integrates)
            + "."
        )
    return sums, totals


def _wide(
    rng_key: Array, posterior: Posterior, consortium: Consortium, draws: ArrayTree
) -> tuple[Wide, dict[str, float]]:
    """Return draws with weighted points around them, and what the exchange for these cost."""
    flat = np.asarray(jax.vmap(trees.ravel)(draws), np.float64)
    mean, covariance = flat.mean(0), np.atleast_2d(np.cov(flat.T))
    proposal = Mixture.of([(share, nu, mean, scale * covariance) for share, nu, scale in WIDER])
    like = jax.tree.map(lambda leaf: leaf[0], draws)

    def position(x: Any) -> ArrayTree:
        return trees.cast_like(trees.unravel(jnp.asarray(x), like), like)

    target = Target(as_functions(posterior), consortium, position(mean))
    found = target.weigh(rng_key, proposal, NUM_POINTS)
    log_weights = jnp.asarray(found.log_ratios - found.log_ratios.max(), jnp.result_type(float))
    points = jax.vmap(position)(jnp.asarray(found.points, jnp.result_type(float)))
    rounds, up, down = found.cost
    cost = {"rounds": rounds, "bits_up": up, "bits_down": down}
    return Wide(draws, points, log_weights), cost


def result_of(
    sums: Left,
    model: int,
    draws: EqualDraws,
    totals: dict[str, float],
    unit: str,
    minimum_rows: int,
    notes: Sequence[str] = (),
) -> Loo:
    """Return what the sums say of one of the models."""
    elpd, squared, p_loo = (
        float(np.asarray(x, np.float64)[model].sum()) for x in (sums.elpd, sums.squared, sums.p_loo)
    )
    num, others = int(sums.judged), int(sums.others)
    if others:
        notes = (*notes, few_units(others, unit, minimum_rows))
    return Loo(
        elpd,
        float(np.sqrt(max(squared - elpd**2 / num, 0.0))),
        p_loo,
        num,
        others,
        int(sums.bad[model]),
        int(sums.very_bad[model]),
        int(sums.mended[model]),
        threshold(draws.num),
        draws.num,
        totals,
        unit,
        draws.num_available,
        tuple(notes),
    )


def _told(found: Loo) -> str:
    bad, unit = found.num_bad, found.unit
    if not bad:
        return f"k-hat of all {unit} below {found.good_k:.2f}"
    return (
        f"k-hat of {bad:,} of {found.num_rows:,} {unit} above {found.good_k:.2f}, of "
        f"{found.num_very_bad:,} above 1"
    )


def warn_of_rows(found: Loo, name: str) -> None:
    """Warn where the densities of some rows cannot be trusted."""
    if found.num_bad:
        warnings.warn(
            f"{name}: {_told(found)}: without such a {found.unit[:-1]} the posterior is another, "
            "and its density here is unreliable."
            + (" loo(mend=True) judges it by points that reach farther." * (name == "loo")),
            SamplingWarning,
            stacklevel=3,
        )
