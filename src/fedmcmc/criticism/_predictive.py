"""Posterior predictive checks by sums over observed and replicated rows.

Source: Gelman et al. (1996).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.criticism._draws import PosteriorDraws, equal_draws, position_shapes
from fedmcmc.criticism._histogram import Histogram, merge_cells, merge_targets
from fedmcmc.criticism._rows import BUDGET, check_resample, sum_over_rows
from fedmcmc.criticism._units import describe_unjudged, has_groups
from fedmcmc.data import FederatedData
from fedmcmc.gradients import row_size
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import (
    ArrayTree,
    Client,
    Disclosure,
    Federation,
    Posterior,
    Uncompressed,
    register_dataclass,
)

GROUPED_NOTE = (
    "Sums over rows do not show whether rows of a group are more similar than the model predicts: "
    "use criticism.loo, which leaves out complete groups."
)
Statistic = Callable[[ArrayTree], Array]
"""Function ``rows -> [num_rows]`` or ``[num_rows, num_values]``, summed over rows."""


class Replicates(NamedTuple):
    """Positions with leaves ``[num_draws, *event]``, and a public key ``[2]`` uint32 for outcomes.

    The words are a Threefry key, into which each client folds its index.
    """

    words: Array
    positions: ArrayTree


class Replicated(NamedTuple):
    """Sums over a client's rows.

    Attributes
    ----------
    observed
        ``[num_values]``, sums over observed rows.
    gaps
        ``[num_draws, num_values]``, sums of replicated minus observed values per row.
    merged
        ``[num_values]``, one for each cell that is merged into another cell.
    judged, not_judged
        ``[]``, numbers of rows in the sums, and of rows of a client that has too few rows.
    """

    observed: ArrayTree
    gaps: ArrayTree
    merged: ArrayTree
    judged: Array
    not_judged: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Replication(Question):
    """Sums of statistics of observed rows, and of rows with replicated outcomes."""

    disclosure = Disclosure(
        "summaries of the rows of this site, and of outcomes drawn from the model in their place",
        reason="the server chooses how many rows a site must have for its rows to count",
    )

    statistics: tuple[Statistic, ...]
    minimum_rows: int | Array  # smallest number of rows of a client that sends sums
    minimum_count: int | Array  # smallest cell of a histogram
    sizes: tuple[int, ...] = field(metadata={"static": True})  # number of values per statistic
    are_histograms: tuple[bool, ...] = field(metadata={"static": True})

    def answer(self, content: Replicates, client: Client) -> Uncompressed:
        words = jax.random.wrap_key_data(content.words, impl="threefry2x32")
        client_key = jax.random.fold_in(words, client.index)
        num = jax.tree.leaves(content.positions)[0].shape[0]
        dtype = jnp.result_type(float)

        def block_sums(rows: ArrayTree, mask: Array, number: Array) -> tuple[Array, Array]:
            observed = self._terms(rows)

            def gap(numbered: tuple[Array, ArrayTree]) -> Array:
                index, position = numbered
                key = jax.random.fold_in(jax.random.fold_in(client_key, number), index)
                assert self.posterior.resample_fn is not None
                replicated = self._terms(self.posterior.resample_fn(key, position, rows))
                return jnp.sum(jnp.where(mask[:, None], replicated - observed, 0), axis=0)

            numbers = max(row_size(client.rows), sum(self.sizes)) * mask.shape[0]
            gaps = jax.lax.map(
                gap, (jnp.arange(num), content.positions), batch_size=max(1, BUDGET // numbers)
            )
            return jnp.sum(jnp.where(mask[:, None], observed, 0), axis=0), gaps

        observed, gaps = sum_over_rows(block_sums, client, 1)
        observed, gaps, is_merged = self.merge_small_cells(observed, gaps)
        size = client.size.astype(dtype)
        sums = Replicated(observed, gaps, is_merged, size, jnp.zeros((), dtype))
        empty = trees.zeros_like(sums)._replace(not_judged=size)
        return Uncompressed(trees.select(client.size >= self.minimum_rows, sums, empty))

    def answer_like(self, content: Replicates) -> Uncompressed:
        num, size = jax.tree.leaves(content.positions)[0].shape[0], sum(self.sizes)
        shapes = [(size,), (num, size), (size,), (), ()]
        dtype = jnp.result_type(float)
        sums: Any = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return Uncompressed(Replicated(*sums))

    def check_content(self, content: Replicates, federation: Federation) -> None:
        check_model(self.posterior, position_shapes(content.positions), federation)
        check_resample(self.posterior, position_shapes(content.positions), federation)

    def _terms(self, rows: ArrayTree) -> Array:
        """Return all statistics of each row, ``[num_rows, num_values]``."""
        values = [fn(rows).astype(jnp.result_type(float)) for fn in self.statistics]
        return jnp.concatenate([x if x.ndim == 2 else x[:, None] for x in values], axis=1)

    def merge_small_cells(self, observed: Array, gaps: Array) -> tuple[Array, Array, Array]:
        """Merge small cells of observed histograms, and the same cells of replicated histograms."""
        parts, start = [], 0
        for size, is_histogram in zip(self.sizes, self.are_histograms, strict=True):
            sums, sum_gaps = observed[start : start + size], gaps[:, start : start + size]
            start += size
            if not is_histogram:
                parts.append((sums, sum_gaps, jnp.zeros_like(sums)))
                continue
            targets = merge_targets(sums, self.minimum_count)
            moved = (targets != jnp.arange(size)).astype(observed.dtype)
            parts.append((merge_cells(sums, targets), merge_cells(sum_gaps, targets), moved))
        a, b, c = zip(*parts, strict=True)
        return jnp.concatenate(a), jnp.concatenate(b, axis=1), jnp.concatenate(c)


@dataclass(frozen=True)
class PredictiveCheck:
    """Sums over rows, with the distribution of the same sums under the model.

    Attributes
    ----------
    names
        Names of the values.
    observed
        ``[num_values]``, sums over the observed rows.
    replicated
        ``[num_draws, num_values]``, sums over replicated rows, per draw.
    merged
        ``[num_values]``, number of clients that merged this cell with a neighbor.
    num_rows, num_not_judged
        Number of rows in the sums, and of rows of clients with fewer than `minimum_rows`.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of the exchange.
    notes
        Limits of the result, one sentence each.
    """

    names: tuple[str, ...]
    observed: np.ndarray
    replicated: np.ndarray
    merged: np.ndarray
    num_rows: int
    num_not_judged: int
    totals: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def p_values(self) -> np.ndarray:
        """Share of replicated values above the observed value, ties by half, ``[num_values]``."""
        return ((self.replicated > self.observed) + 0.5 * (self.replicated == self.observed)).mean(
            0
        )

    def interval(self, share: float = 0.9) -> np.ndarray:
        """Return the central interval of a `share` of replicated values, ``[2, num_values]``."""
        if not 0 < share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {share!r}.")
        return np.quantile(self.replicated, [(1 - share) / 2, (1 + share) / 2], axis=0)

    def of(self, fn: Callable[[np.ndarray], Any], name: str) -> "PredictiveCheck":
        """Return the check of a function of the sums, ``[num_values] -> []``, such as a mean."""
        observed = np.atleast_1d(np.asarray(fn(self.observed), np.float64))
        if observed.shape != (1,):
            raise ValueError(f"fn must return one number, got shape {observed.shape}.")
        replicated = np.array([float(fn(sums)) for sums in self.replicated])[:, None]
        return replace(
            self, names=(name,), observed=observed, replicated=replicated, merged=np.zeros(1)
        )

    def __repr__(self) -> str:
        """Return a table of observed sums, replicated sums and p-values."""
        low, high = self.interval()
        width = max(map(len, ["", *self.names]))
        lines = [
            f"{self.num_rows:,} rows, {len(self.replicated):,} draws",
            f"{'':<{width}}  {'observed':>10}  {'mean':>10}  {'5 %':>10}  {'95 %':>10}      p",
        ]
        for j, name in enumerate(self.names):
            figures = [self.observed[j], self.replicated[:, j].mean(), low[j], high[j]]
            numbers = "  ".join(f"{x:>10.4g}" for x in figures)
            lines.append(f"{name:<{width}}  {numbers}  {self.p_values[j]:>5.3f}")
        if self.merged.any():
            lines.append(f"small cells were merged at {int(self.merged.max())} client(s) or more")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the observed sum, the mean and sd of replicated sums, and the p-value by name."""
        return {
            name: {
                "observed": float(self.observed[j]),
                "mean": float(self.replicated[:, j].mean()),
                "sd": float(self.replicated[:, j].std()),
                "p_value": float(self.p_values[j]),
            }
            for j, name in enumerate(self.names)
        }


def predictive_check(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData | Consortium,
    draws: PosteriorDraws,
    statistics: Statistic | Mapping[str, Statistic],
    *,
    num_draws: int = 1000,
    minimum_rows: int = 10,
    minimum_count: int = 5,
    secure_sum: bool = False,
) -> PredictiveCheck:
    """Compare sums over observed rows with sums over replicated rows, in one exchange.

    For each draw, a client draws outcomes for its rows and sends sums of statistics. The p-values
    are conservative, because the model was fitted to the same rows: 0.2 does not exclude a misfit.

    Parameters
    ----------
    rng_key, posterior
        Random key for the outcomes, and model with a ``resample_fn``.
    data, draws, num_draws, minimum_rows, secure_sum
        See `loo`.
    statistics
        Function ``rows -> [num_rows]`` or ``[num_rows, num_values]``, whose values are summed over
        rows, a `Histogram` (for quantiles and rare events), or several of these by name.
    minimum_count
        Number of rows below which a client merges a cell of a `Histogram` with a neighbor.

    Raises
    ------
    ValueError
        If there is no ``resample_fn``, a statistic does not have one term per row, or draws or rows
        are too few.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> redraw = lambda key, t, x: t + jax.random.normal(key, x.shape)
    >>> model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2, redraw)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.linspace(-3, 3, 20)] * 2)  # too wide
    >>> draws = jax.random.normal(jax.random.key(1), (500,)) / 41**0.5
    >>> statistics = {"x": lambda x: x, "square": jnp.square}
    >>> check = predictive_check(jax.random.key(2), model, data, draws, statistics)
    >>> check.p_values.round(1).tolist()
    [0.5, 0.0]
    """
    key = as_key(rng_key)
    chosen = equal_draws(draws, posterior, num_draws, key)
    by_name = statistics if isinstance(statistics, Mapping) else {"": statistics}
    for name, fn in by_name.items():
        if not callable(fn):
            raise TypeError(
                "statistics must be a function of rows, or functions by name, got "
                f"{name + ': ' if name else ''}{type(fn).__name__}."
            )
    if not by_name or minimum_rows < 1 or minimum_count < 0:
        raise ValueError(
            "predictive_check needs a statistic, minimum_rows of at least 1 and minimum_count of "
            f"at least 0; got {len(by_name)} statistics, {minimum_rows!r} and {minimum_count!r}."
        )
    consortium = as_consortium(data)
    sizes = tuple(_num_values(name, fn, consortium.federation) for name, fn in by_name.items())
    question = Replication(
        posterior,
        tuple(by_name.values()),
        1 if secure_sum else minimum_rows,
        0 if secure_sum else minimum_count,
        tuple(max(size, 1) for size in sizes),
        tuple(isinstance(fn, Histogram) for fn in by_name.values()),
    )
    words = jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)
    answer = consortium.ask(question, Replicates(words, chosen.positions))
    sums: Replicated = answer.value.value
    if sums.judged == 0:
        raise ValueError(
            f"No client has at least {minimum_rows} rows, so no client sends a sum. Lower "
            "minimum_rows, or use a secure sum."
        )
    results = sums.observed, sums.gaps, sums.merged
    if secure_sum:
        total_question = replace(question, minimum_count=minimum_count)
        results = total_question.merge_small_cells(sums.observed, sums.gaps)
    observed, gaps, moved = (np.asarray(x, np.float64) for x in results)
    num_not_judged, notes = int(sums.not_judged), [GROUPED_NOTE] if has_groups(data) else []
    if num_not_judged:
        notes.append(describe_unjudged(num_not_judged, "rows", minimum_rows))
    return PredictiveCheck(
        _names(by_name, sizes),
        observed,
        observed + gaps,
        moved,
        int(sums.judged),
        num_not_judged,
        {"rounds": answer.rounds, "bits_up": answer.bits_up, "bits_down": answer.bits_down},
        tuple(notes),
    )


def prior_predictive(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData | Consortium,
    prior_fn: Callable[[Array], ArrayTree],
    statistics: Statistic | Mapping[str, Statistic],
    *,
    num_draws: int = 1000,
    minimum_rows: int = 10,
    minimum_count: int = 5,
    secure_sum: bool = False,
) -> PredictiveCheck:
    """Compare sums over rows with sums over outcomes from the prior, in one exchange.

    Parameters
    ----------
    rng_key
        Random key for the prior's draws and the outcomes.
    posterior, data, statistics, num_draws, minimum_rows, minimum_count, secure_sum
        See `predictive_check`.
    prior_fn
        Function ``rng_key -> position`` that draws from the prior. (``init_fn`` of a posterior
        returns starting points, not draws from the prior.)

    Returns
    -------
    PredictiveCheck
        Sums and p-values. A p-value near zero or one shows that the prior makes such rows unlikely.
        If prior and model are right, p-values are uniform.

    Raises
    ------
    ValueError
        For the reasons listed in `predictive_check`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> redraw = lambda key, t, x: t + jax.random.normal(key, x.shape)
    >>> model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2, redraw)
    >>> data = fedmcmc.FederatedData.from_clients([9 + jnp.zeros(20), 9 + jnp.zeros(40)])
    >>> key, statistics = jax.random.key(0), {"x": lambda x: x}
    >>> prior_predictive(key, model, data, jax.random.normal, statistics).p_values.tolist()
    [0.0]
    """
    prior_key, outcome_key = jax.random.split(as_key(rng_key))
    draws = jax.vmap(prior_fn)(jax.random.split(prior_key, num_draws))
    return predictive_check(
        outcome_key,
        posterior,
        data,
        draws,
        statistics,
        num_draws=num_draws,
        minimum_rows=minimum_rows,
        minimum_count=minimum_count,
        secure_sum=secure_sum,
    )


def _num_values(name: str, fn: Statistic, federation: Federation) -> int:
    """Return the number of values of a statistic, zero for shape ``[num_rows]``."""
    num = 11
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num, *leaf.shape[1:]), leaf.dtype), federation.rows
    )
    shape = jnp.shape(jax.eval_shape(fn, rows))
    if shape[:1] != (num,) or len(shape) > 2:
        raise ValueError(
            f"A statistic must return one term per row, shape ({num},) or ({num}, num_values) for "
            f"{num} rows: {name + ' ' if name else ''}returned {shape}. It is summed over the rows."
        )
    return shape[1] if len(shape) == 2 else 0


def _names(by_name: Mapping[str, Statistic], sizes: tuple[int, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for name, size in zip(by_name, sizes, strict=True):
        stem = name or "sum"
        names += [f"{stem}[{j}]" for j in range(size)] if size else [stem]
    return tuple(names)
