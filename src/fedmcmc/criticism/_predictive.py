"""Posterior predictive checks: sums over rows, beside those of outcomes drawn from the model.

Source: Gelman, Meng and Stern (1996).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Client,
    Disclosure,
    Exact,
    Federation,
    Posterior,
    register_dataclass,
)
from fedmcmc.criticism._draws import equal_draws, one_of
from fedmcmc.criticism._histogram import Histogram, merged, receivers
from fedmcmc.criticism._rows import BUDGET, check_resample, over_rows
from fedmcmc.criticism._units import few_units, has_groups
from fedmcmc.gradients import row_size
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import as_consortium

GROUPED = (
    "Sums over rows do not show whether rows of a group are more alike than the model has them: "
    "criticism.loo leaves out whole groups."
)
Statistic = Callable[[ArrayTree], Array]
"""``rows -> [num_rows]`` or ``[num_rows, num_values]``, which is summed over rows."""


class Replicates(NamedTuple):
    """Positions, leaves ``[num_draws, *event]``, and a public key, ``[2]`` uint32, for outcomes.

    The words are those of the Threefry generator; a client's key is that with its id folded in.
    """

    words: Array
    positions: ArrayTree


class Replicated(NamedTuple):
    """A client's sums over its rows.

    Attributes
    ----------
    observed
        ``[num_values]``, of the outcomes.
    gaps
        ``[num_draws, num_values]``, of replicated outcomes minus observed ones, row by row.
    merged
        ``[num_values]``, one for each cell that is merged into another.
    judged, others
        ``[]``, rows in the sums, and rows of a client that has too few to send any.
    """

    observed: Any
    gaps: Any
    merged: Any
    judged: Any
    others: Any


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Replication(Question):
    """Sums of statistics of rows, and of rows whose outcomes are drawn from the model."""

    disclosure = Disclosure(
        "summaries of the rows of this site, and of outcomes drawn from the model in their place",
        reason="the server chooses how many rows a site must have for its rows to count",
    )

    statistics: tuple[Statistic, ...]
    least: Any  # rows of a client that may send sums
    least_count: Any  # in a cell of a histogram
    sizes: tuple[int, ...] = field(metadata={"static": True})  # values of each statistic
    cells: tuple[bool, ...] = field(metadata={"static": True})  # which are histograms

    def answer(self, content: Replicates, client: Client) -> Exact:
        words = jax.random.wrap_key_data(content.words, impl="threefry2x32")
        own_key = jax.random.fold_in(words, client.index)
        num = jax.tree.leaves(content.positions)[0].shape[0]
        dtype = jnp.result_type(float)

        def of_rows(rows: ArrayTree, mask: Array, number: Array) -> tuple[Array, Array]:
            observed = self._terms(rows)

            def gap(numbered: tuple[Array, ArrayTree]) -> Array:
                index, position = numbered
                key = jax.random.fold_in(jax.random.fold_in(own_key, number), index)
                assert self.posterior.resample_fn is not None
                replicated = self._terms(self.posterior.resample_fn(key, position, rows))
                return jnp.sum(jnp.where(mask[:, None], replicated - observed, 0), axis=0)

            numbers = max(row_size(client.rows), sum(self.sizes)) * mask.shape[0]
            gaps = jax.lax.map(
                gap, (jnp.arange(num), content.positions), batch_size=max(1, BUDGET // numbers)
            )
            return jnp.sum(jnp.where(mask[:, None], observed, 0), axis=0), gaps

        observed, gaps = over_rows(of_rows, client, 1)
        observed, gaps, is_merged = self.suppressed(observed, gaps)
        size = client.size.astype(dtype)
        zero = jnp.zeros((), dtype)
        sums = Replicated(observed, gaps, is_merged, size, zero)
        nothing = trees.zeros_like(sums)._replace(others=size)
        return Exact(trees.select(client.size >= self.least, sums, nothing))

    def answer_like(self, content: Replicates) -> Exact:
        num, size = jax.tree.leaves(content.positions)[0].shape[0], sum(self.sizes)
        shapes = [(size,), (num, size), (size,), (), ()]
        dtype = jnp.result_type(float)
        return Exact(Replicated(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))

    def check_content(self, content: Replicates, federation: Federation) -> None:
        check_model(self.posterior, one_of(content.positions), federation)
        check_resample(self.posterior, one_of(content.positions), federation)

    def _terms(self, rows: ArrayTree) -> Array:
        """Return all statistics of each row, ``[num_rows, num_values]``."""
        found = [fn(rows).astype(jnp.result_type(float)) for fn in self.statistics]
        return jnp.concatenate([x if x.ndim == 2 else x[:, None] for x in found], axis=1)

    def suppressed(self, observed: Array, gaps: Array) -> tuple[Array, Array, Array]:
        """Merge the small cells of observed histograms, and the same cells of replicated ones."""
        parts, first = [], 0
        for size, are_cells in zip(self.sizes, self.cells, strict=True):
            own = slice(first, first + size)
            first += size
            if not are_cells:
                parts.append((observed[own], gaps[:, own], jnp.zeros_like(observed[own])))
                continue
            receiver = receivers(observed[own], self.least_count)
            moved = (receiver != jnp.arange(size)).astype(observed.dtype)
            parts.append((merged(observed[own], receiver), merged(gaps[:, own], receiver), moved))
        a, b, c = zip(*parts, strict=True)
        return jnp.concatenate(a), jnp.concatenate(b, axis=1), jnp.concatenate(c)


@dataclass(frozen=True)
class PredictiveCheck:
    """Sums over rows, and where they lie among those of outcomes drawn from the model.

    Attributes
    ----------
    names
        One per value.
    observed
        ``[num_values]``, sums over the rows.
    replicated
        ``[num_draws, num_values]``, the same of outcomes drawn at each draw.
    merged
        ``[num_values]``, how many clients merged this cell with a neighbor, as it was small.
    num_rows, num_not_judged
        Rows in the sums, and rows of clients with fewer than `minimum_rows`, which are not.
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
        """Shares of replicated values above the observed ones, ties by half, ``[num_values]``."""
        return ((self.replicated > self.observed) + 0.5 * (self.replicated == self.observed)).mean(
            0
        )

    def interval(self, share: float = 0.9) -> np.ndarray:
        """Return the middle `share` of replicated values, ``[2, num_values]``."""
        if not 0 < share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {share!r}.")
        return np.quantile(self.replicated, [(1 - share) / 2, (1 + share) / 2], axis=0)

    def of(self, fn: Callable[[np.ndarray], Any], name: str) -> "PredictiveCheck":
        """Return the check of a function of the sums, ``[num_values] -> []``: a mean, an sd."""
        observed = np.atleast_1d(np.asarray(fn(self.observed), np.float64))
        if observed.shape != (1,):
            raise ValueError(f"fn must return one number, got shape {observed.shape}.")
        replicated = np.array([float(fn(sums)) for sums in self.replicated])[:, None]
        return replace(
            self, names=(name,), observed=observed, replicated=replicated, merged=np.zeros(1)
        )

    def __repr__(self) -> str:
        """Return a table of observed sums, replicated ones and p-values."""
        low, high = self.interval()
        width = max(map(len, ["", *self.names]))
        lines = [
            f"{self.num_rows:,} rows, {len(self.replicated):,} draws",
            f"{'':<{width}}  {'observed':>10}  {'mean':>10}  {'5 %':>10}  {'95 %':>10}      p",
        ]
        for j, name in enumerate(self.names):
            told = [self.observed[j], self.replicated[:, j].mean(), low[j], high[j]]
            numbers = "  ".join(f"{x:>10.4g}" for x in told)
            lines.append(f"{name:<{width}}  {numbers}  {self.p_values[j]:>5.3f}")
        if self.merged.any():
            lines.append(f"small cells were merged at {int(self.merged.max())} client(s) or more")
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return observed sum, mean and sd of replicated ones and p-value by name."""
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
    data: Any,
    draws: Any,
    statistics: Statistic | Mapping[str, Statistic],
    *,
    num_draws: int = 1000,
    minimum_rows: int = 10,
    minimum_count: int = 5,
    secure_sum: bool = False,
) -> PredictiveCheck:
    """Compare sums over rows with those of outcomes drawn from the model, in one exchange.

    At each draw every client draws outcomes for its own rows, and sends sums of a statistic: of the
    observed rows, and of the replicated ones. Rows and replicated rows stay where they are.

    Parameters
    ----------
    rng_key
        For the outcomes; for weighted draws also for resampling.
    posterior
        The model, in its own coordinates, with a ``resample_fn``.
    data, draws, num_draws
        As of `loo`.
    statistics
        ``rows -> [num_rows]`` or ``[num_rows, num_values]``, or such functions by name. They are
        summed over the rows: counts, sums of an outcome, its square, its product with a covariate.
        Maxima and quantiles are no sums: take a `Histogram`. Means and sds are functions of sums,
        see `PredictiveCheck.of`.
    minimum_rows
        A client with fewer rows sends no sum; its rows are counted.
    minimum_count
        A client merges a cell of its observed `Histogram` that holds fewer rows with the next, and
        the same cells of its replicated ones, so that the comparison stays one of like with like.
        A sum of zeros and ones is no histogram: count rare events by one.
    secure_sum
        Whether sums are added where nobody sees a single client's: both rules then hold for the
        total alone.

    Returns
    -------
    PredictiveCheck
        With p-values. They are conservative, not uniform: outcomes are drawn from what was fitted
        to these rows, so a p-value of 0.2 may be a misfit, and one of 0.001 is.

    Raises
    ------
    ValueError
        Without a ``resample_fn``, if a statistic has not one term per row, if draws are too few, or
        no client has enough rows.

    Notes
    -----
    The differences of replicated and observed sums are taken row by row, and no digit is lost where
    the sums are large. Replicated sums of a client with few rows tell of its covariates: use a
    secure sum, or raise `minimum_rows`. A thousand draws give a p-value with a standard error below
    0.016. Sums over rows do not show whether rows of one group (``groups=``) are more alike than
    the model has them.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2,
    ...     lambda theta, x: -0.5 * (x - theta) ** 2,
    ...     lambda key, theta, x: theta + jax.random.normal(key, x.shape),
    ... )
    >>> x = 1.5 * jax.random.normal(jax.random.key(0), (60,))  # wider than the model has it
    >>> data = fedmcmc.FederatedData.from_clients([x[:20], x[20:]])
    >>> draws = x.sum() / 61 + jax.random.normal(jax.random.key(1), (500,)) / jnp.sqrt(61)
    >>> check = predictive_check(
    ...     jax.random.key(2), posterior, data, draws, {"x": lambda x: x, "square": jnp.square}
    ... )
    >>> check.p_values.round(1).tolist()
    [0.5, 0.0]
    """
    key = as_key(rng_key)
    chosen = equal_draws(draws, posterior, num_draws, key)
    named = statistics if isinstance(statistics, Mapping) else {"": statistics}
    for name, fn in named.items():
        if not callable(fn):
            raise TypeError(
                "statistics must be a function of rows, or functions by name, got "
                f"{name + ': ' if name else ''}{type(fn).__name__}."
            )
    if not named or minimum_rows < 1 or minimum_count < 0:
        raise ValueError(
            "predictive_check needs a statistic, minimum_rows of at least 1 and minimum_count of "
            f"at least 0; got {len(named)} statistics, {minimum_rows!r} and {minimum_count!r}."
        )
    consortium = as_consortium(data)
    sizes = tuple(_num_values(name, fn, consortium.federation) for name, fn in named.items())
    cells = tuple(isinstance(fn, Histogram) for fn in named.values())
    question = Replication(
        posterior,
        tuple(named.values()),
        1 if secure_sum else minimum_rows,
        0 if secure_sum else minimum_count,
        tuple(max(size, 1) for size in sizes),
        cells,
    )
    words = jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)
    asked = consortium.ask(question, Replicates(words, chosen.positions))
    sums: Replicated = asked.value.value
    if sums.judged == 0:
        raise ValueError(
            f"No client has at least {minimum_rows} rows, so none sends a sum. Lower minimum_rows, "
            "or use a secure sum."
        )
    found = sums.observed, sums.gaps, sums.merged
    if secure_sum:
        found = replace(question, least_count=minimum_count).suppressed(*found[:2])
    observed, gaps, moved = (np.asarray(x, np.float64) for x in found)
    others, notes = int(sums.others), [GROUPED] if has_groups(data) else []
    if others:
        notes.append(few_units(others, "rows", minimum_rows))
    return PredictiveCheck(
        _names(named, sizes),
        observed,
        observed + gaps,
        moved,
        int(sums.judged),
        others,
        {"rounds": asked.rounds, "bits_up": asked.bits_up, "bits_down": asked.bits_down},
        tuple(notes),
    )


def prior_predictive(
    rng_key: Array,
    posterior: Posterior,
    data: Any,
    prior_fn: Callable[[Array], ArrayTree],
    statistics: Statistic | Mapping[str, Statistic],
    *,
    num_draws: int = 1000,
    minimum_rows: int = 10,
    minimum_count: int = 5,
    secure_sum: bool = False,
) -> PredictiveCheck:
    """Compare sums over rows with those of outcomes that the prior expects, in one exchange.

    Parameters
    ----------
    rng_key
        For the prior's draws and the outcomes.
    posterior, data, statistics, num_draws, minimum_rows, minimum_count, secure_sum
        As of `predictive_check`.
    prior_fn
        ``rng_key -> position``, a draw of the prior. (``init_fn`` of a posterior is a place to
        start from, and no draw of the prior.)

    Returns
    -------
    PredictiveCheck
        A small p-value, or one near one, says that the prior hardly expects such rows. Before a
        fit it is uniform, where the prior is right.

    Raises
    ------
    ValueError
        As `predictive_check`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2,
    ...     lambda theta, x: -0.5 * (x - theta) ** 2,
    ...     lambda key, theta, x: theta + jax.random.normal(key, x.shape),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([9 + jnp.zeros(20), 9 + jnp.zeros(40)])
    >>> prior_predictive(
    ...     jax.random.key(0), posterior, data, jax.random.normal, {"x": lambda x: x}
    ... ).p_values.tolist()
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
    """Return how many values a statistic has, zero for ``[num_rows]``."""
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


def _names(named: Mapping[str, Statistic], sizes: tuple[int, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for name, size in zip(named, sizes, strict=True):
        stem = name or "sum"
        names += [f"{stem}[{j}]" for j in range(size)] if size else [stem]
    return tuple(names)
