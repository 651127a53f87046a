"""The question of leave-one-out cross-validation: what a client computes, and sums over its rows.

Source: Vehtari, Gelman and Gabry (2017); Vehtari et al. (2024) for the smoothed weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from fedmcmc._types import (
    ArrayTree,
    Client,
    ClientTerms,
    Disclosure,
    Exact,
    Federation,
    Posterior,
    register_dataclass,
)
from fedmcmc.criticism._draws import one_of
from fedmcmc.criticism._pareto import psis, smoothed_tail, tail_length
from fedmcmc.criticism._rows import exact_sum, over_rows
from fedmcmc.data import Grouped, max_groups, own_groups, values_of
from fedmcmc.exact import threshold
from fedmcmc.gradients import row_terms
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees

TOGETHER = 16
"""Draws at which a client's groups are integrated out together."""

Terms = Callable[[ArrayTree], Array]
"""Positions, leaves ``[num, *event]``, to a client's terms at these, ``[num_terms, num]``."""


class Wide(NamedTuple):
    """Draws of a model, and weighted points around them that reach farther.

    Attributes
    ----------
    draws
        Leaves ``[num_draws, *event]``.
    points
        Leaves ``[num_points, *event]``.
    log_weights
        ``[num_points]``, log of the posterior over the density that points were drawn from, up to a
        constant.
    """

    draws: ArrayTree
    points: ArrayTree
    log_weights: Array


class Left(NamedTuple):
    """A client's sums over its rows, of ``m`` models; three parts each, see `exact_sum`.

    Attributes
    ----------
    elpd, squared, p_loo
        ``[m, 3]``: of the log predictive densities, their squares, and what leaving the row out
        costs.
    differences
        ``[m, m, 3]``, of the squared differences of two models' densities, row by row.
    bad, very_bad
        ``[m]``, rows whose k-hat is above the threshold, and above one.
    mended
        ``[m]``, rows whose k-hat is above the threshold by the draws, and not by weighted points.
    judged, others, not_finite
        ``[]``, rows in the sums, rows of a client that has too few to send any, and rows whose log
        likelihood is not finite at some draw.
    """

    elpd: Any
    squared: Any
    p_loo: Any
    differences: Any
    bad: Any
    very_bad: Any
    mended: Any
    judged: Any
    others: Any
    not_finite: Any


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut(Question):
    """How well models predict each row from all others; what is asked about are their draws.

    The content is a tuple with an entry per model: positions, leaves ``[num_draws, *event]``, or
    `Wide`, whose points are taken for rows that the draws are too narrow for.
    """

    disclosure = Disclosure(
        "how well each row is predicted by the others, summed over the rows of this site",
        reason="the server chooses how many rows a site must have for its rows to count",
    )

    others: tuple[Posterior, ...]
    least: Any  # rows of a client that may send sums
    worst: Array  # [m], k-hats above are bad
    tails: tuple[int, ...] = field(metadata={"static": True})  # lengths, one per model

    @property
    def models(self) -> tuple[Posterior, ...]:
        """All models."""
        return (self.posterior, *self.others)

    def answer(self, content: ArrayTree, client: Client) -> Exact:
        size, sums = self.left(content, client)
        nothing = trees.zeros_like(sums)._replace(others=size.astype(sums.judged.dtype))
        return Exact(trees.select(size >= self.least, sums, nothing))

    def left(self, content: ArrayTree, client: Client) -> tuple[Array, Left]:
        """Return how many rows the client has, and the sums over them."""

        def of_rows(rows: ArrayTree, mask: Array, number: Array) -> Left:
            def terms_of(model: Posterior) -> Terms:
                return lambda positions: _terms_at(model, positions, rows)

            return self.summed(content, [terms_of(model) for model in self.models], mask)

        return client.size, over_rows(of_rows, client, sum(map(_num_positions, content)))

    def summed(self, content: ArrayTree, terms_fns: list[Terms], mask: Array) -> Left:
        """Return the sums over some of a client's terms, where `mask` ``[num]`` holds."""
        found = [
            _left_out(terms_fn, draws, tail, worst)
            for terms_fn, draws, tail, worst in zip(
                terms_fns, content, self.tails, self.worst, strict=True
            )
        ]
        elpd, p_loo, khat, mended, finite = (jnp.stack(x) for x in zip(*found, strict=True))
        judged = mask & finite.all(0)
        differences = elpd[:, None] - elpd[None]

        def count(condition: Array) -> Array:
            return jnp.sum(condition & mask, axis=-1, dtype=elpd.dtype)

        return Left(
            exact_sum(elpd, judged),
            exact_sum(elpd**2, judged),
            exact_sum(p_loo, judged),
            exact_sum(differences**2, judged),
            count(judged & ~mended & (khat > self.worst[:, None])),
            count(judged & ~mended & (khat > 1)),
            count(judged & mended),
            count(judged),
            jnp.zeros((), elpd.dtype),
            count(~finite.all(0)),
        )

    def answer_like(self, content: ArrayTree) -> Exact:
        num, dtype = len(self.tails), jnp.result_type(float)
        shapes = [(num, 3)] * 3 + [(num, num, 3)] + [(num,)] * 3 + [()] * 3
        return Exact(Left(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        for model, entry in zip(self.models, content, strict=True):
            draws = entry.draws if isinstance(entry, Wide) else entry
            check_model(model, one_of(draws), federation)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveGroupsOut(LeaveOneOut):
    """How well models predict each group of rows from all others.

    A group's term is that of its rows together, its latents integrated out if it has any. With
    `whole_clients` the groups of a client are left out together.
    """

    disclosure = Disclosure(
        "how well each group of rows is predicted by the other groups, summed over the groups of "
        "this site",
        reason="the server chooses how many groups a site must have for them to count",
    )

    whole_clients: bool = field(default=False, metadata={"static": True})

    def left(self, content: ArrayTree, client: Client) -> tuple[Array, Left]:
        """Return how many groups the client has, and the sums over them."""

        def terms_of(model: Posterior) -> Terms:
            def terms(positions: ArrayTree) -> Array:
                of_groups = _group_terms(model, positions, client)
                return of_groups.sum(0, keepdims=True) if self.whole_clients else of_groups

            return terms

        present = jnp.ones(1, bool) if self.whole_clients else _groups_present(client)
        sums = self.summed(content, [terms_of(model) for model in self.models], present)
        return jnp.sum(present), sums


def _terms_at(model: Posterior, positions: ArrayTree, rows: ArrayTree) -> Array:
    """Return the terms of rows at each position, ``[num_rows, num]``."""
    return jax.vmap(lambda at: row_terms(model.loglikelihood_fn, at, rows))(positions).T


def _group_terms(model: Posterior, positions: ArrayTree, client: Client) -> Array:
    """Return the terms of a client's groups at each position, ``[max_groups, num]``."""
    of_groups = model.loglikelihood_fn
    if isinstance(of_groups, ClientTerms):
        return trees.map_in_lots(
            lambda position: of_groups.terms(position, client), positions, TOGETHER
        ).T
    grouped = isinstance(client.rows, Grouped)
    # The groups go along with the rows as another column.
    rows = (values_of(client.rows), client.rows.group if grouped else ())

    def summed(rows: ArrayTree, mask: Array, number: Array) -> Array:
        values, group = rows
        terms = jnp.where(mask[:, None], _terms_at(model, positions, values), 0)
        group = group if grouped else jnp.zeros(mask.shape, jnp.int32)
        return jax.ops.segment_sum(terms, group, num_segments=max_groups(client))

    return over_rows(summed, replace(client, rows=rows), _num_positions(positions))


def _groups_present(client: Client) -> Array:
    """Return which groups the client has, ``[max_groups]`` bool."""
    offsets = jnp.arange(client.max_size, dtype=jnp.int32)
    group = own_groups(client, jnp.where(offsets < client.size, offsets, 0))
    return jnp.zeros(max_groups(client), bool).at[group].set(True)


def _num_positions(entry: ArrayTree) -> int:
    parts = (entry.draws, entry.points) if isinstance(entry, Wide) else (entry,)
    return sum(jax.tree.leaves(part)[0].shape[0] for part in parts)


def _left_out(
    terms_fn: Terms, entry: ArrayTree, num_tail: int, worst: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the same as `_by_draws`, and before the last whether a term was mended, ``[num]``."""
    if not isinstance(entry, Wide):
        elpd, p_loo, khat, finite = _by_draws(terms_fn(entry), num_tail)
        return elpd, p_loo, khat, jnp.zeros_like(finite), finite
    elpd, p_loo, khat, finite = _by_draws(terms_fn(entry.draws), num_tail)
    wide, wide_khat = _by_points(terms_fn(entry.points), entry.log_weights)
    mended = (khat > worst) & (wide_khat <= threshold(len(entry.log_weights)))
    return (
        jnp.where(mended, wide, elpd),
        jnp.where(mended, p_loo + elpd - wide, p_loo),
        khat,
        mended,
        finite,
    )


def _by_points(terms: Array, log_weights: Array) -> tuple[Array, Array]:
    """Return log predictive densities by weighted points and their k-hats, ``[num]``."""
    num_tail = tail_length(len(log_weights))

    def of_row(log_density: Array) -> tuple[Array, Array]:
        known = jnp.isfinite(log_density)
        ratios = jnp.where(known, log_weights - log_density, -jnp.inf)
        smoothed, khat = psis(ratios, num_tail)
        density = logsumexp(jnp.where(known, smoothed + log_density, -jnp.inf))
        # What the posterior is without a row is unknown where only that row excludes a point.
        return density, jnp.where(known.all(), khat, jnp.inf)

    return jax.vmap(of_row)(terms)


def _by_draws(terms: Array, num_tail: int) -> tuple[Array, Array, Array, Array]:
    """Return log predictive density, its optimism, k-hat, and whether all is finite, ``[num]``.

    Of terms ``[num, num_draws]``.
    """

    def of_row(log_density: Array) -> tuple[Array, Array, Array]:
        num = log_density.shape[0]
        largest, _ = jax.lax.top_k(-log_density, num_tail + 1)
        tail, khat = smoothed_tail(largest)
        before = largest[:-1] - largest[0]
        # Below the tail, weight times density is one, up to a factor that weights share.
        weights = jnp.sum(jnp.exp(-log_density - largest[0])) + jnp.sum(
            jnp.exp(tail) - jnp.exp(before)
        )
        products = num - num_tail + jnp.sum(jnp.exp(tail - before))
        elpd = jnp.log(products) - jnp.log(weights) - largest[0]
        return elpd, logsumexp(log_density) - np.log(num) - elpd, khat

    finite = jnp.isfinite(terms).all(1)
    return *jax.vmap(of_row)(jnp.where(finite[:, None], terms, 0)), finite
