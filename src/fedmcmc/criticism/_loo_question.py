"""Question of leave-one-out cross-validation, answered by sums over a client's rows.

Source: Vehtari et al. (2017); Vehtari et al. (2024) for the smoothed weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from fedmcmc.criticism._draws import position_shapes
from fedmcmc.criticism._pareto import psis, smooth_tail, tail_length
from fedmcmc.criticism._rows import exact_sum, sum_over_rows
from fedmcmc.data import Grouped, max_groups, own_groups, row_values
from fedmcmc.exact import khat_threshold
from fedmcmc.gradients import row_terms
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees
from fedmcmc.types import (
    ArrayTree,
    Client,
    ClientTerms,
    Disclosure,
    Federation,
    Posterior,
    Uncompressed,
    register_dataclass,
)

BATCH_SIZE = 16
"""Number of draws per batch when a client's latents are integrated out."""

Terms = Callable[[ArrayTree], Array]
"""Function from positions, leaves ``[num, *event]``, to a client's terms ``[num_terms, num]``."""


class WidenedDraws(NamedTuple):
    """Draws of a model, and weighted points around them with wider tails.

    Attributes
    ----------
    draws
        Leaves ``[num_draws, *event]``.
    points
        Leaves ``[num_points, *event]``.
    log_weights
        ``[num_points]``, log of the posterior over the density of the points, up to a constant.
    """

    draws: ArrayTree
    points: ArrayTree
    log_weights: Array


class LooSums(NamedTuple):
    """Sums over a client's rows for ``m`` models; see `exact_sum` for the axis of length 3.

    Attributes
    ----------
    elpd, squared, p_loo
        ``[m, 3]``, sums of log predictive densities, of their squares, and of the decreases when
        the row is left out.
    differences
        ``[m, m, 3]``, sums of squared differences of two models' log predictive densities.
    bad, very_bad
        ``[m]``, numbers of rows with k-hat above the limit, and above one.
    refined
        ``[m]``, numbers of rows with k-hat above the limit for draws but not for weighted points.
    judged, not_judged, not_finite
        ``[]``, numbers of rows in the sums, of rows of a client that has too few rows, and of rows
        with a log likelihood that is not finite at a draw.
    """

    elpd: Array
    squared: Array
    p_loo: Array
    differences: Array
    bad: Array
    very_bad: Array
    refined: Array
    judged: Array
    not_judged: Array
    not_finite: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut(Question):
    """Leave-one-out predictive densities of rows, summed over a client's rows.

    The content is a tuple with an entry per model: positions with leaves ``[num_draws, *event]``,
    or `WidenedDraws`, whose points are used for rows with a bad k-hat.
    """

    disclosure = Disclosure(
        "how well each row is predicted by the others, summed over the rows of this site",
        reason="the server chooses how many rows a site must have for its rows to count",
    )

    alternatives: tuple[Posterior, ...]
    minimum_rows: int | Array  # smallest number of rows of a client that sends sums
    khat_limits: Array  # [m], k-hats above are bad
    tails: tuple[int, ...] = field(metadata={"static": True})  # tail length per model

    @property
    def models(self) -> tuple[Posterior, ...]:
        """All models."""
        return (self.posterior, *self.alternatives)

    def answer(self, content: ArrayTree, client: Client) -> Uncompressed:
        size, sums = self.client_sums(content, client)
        empty = trees.zeros_like(sums)._replace(not_judged=size.astype(sums.judged.dtype))
        return Uncompressed(trees.select(size >= self.minimum_rows, sums, empty))

    def client_sums(self, content: ArrayTree, client: Client) -> tuple[Array, LooSums]:
        """Return the number of the client's rows, and the sums over them."""

        def block_sums(rows: ArrayTree, mask: Array, number: Array) -> LooSums:
            def row_terms_of(model: Posterior) -> Terms:
                return lambda positions: _terms_at(model, positions, rows)

            return self.sum_terms(content, [row_terms_of(model) for model in self.models], mask)

        return client.size, sum_over_rows(block_sums, client, sum(map(_num_positions, content)))

    def sum_terms(self, content: ArrayTree, terms_fns: list[Terms], mask: Array) -> LooSums:
        """Return the sums over the terms where `mask` ``[num]`` is true."""
        per_model = [
            _leave_out(terms_fn, draws, tail, khat_limit)
            for terms_fn, draws, tail, khat_limit in zip(
                terms_fns, content, self.tails, self.khat_limits, strict=True
            )
        ]
        elpd, p_loo, k_hat, refined, finite = (jnp.stack(x) for x in zip(*per_model, strict=True))
        judged = mask & finite.all(0)
        differences = elpd[:, None] - elpd[None]

        def count(condition: Array) -> Array:
            return jnp.sum(condition & mask, axis=-1, dtype=elpd.dtype)

        return LooSums(
            exact_sum(elpd, judged),
            exact_sum(elpd**2, judged),
            exact_sum(p_loo, judged),
            exact_sum(differences**2, judged),
            count(judged & ~refined & (k_hat > self.khat_limits[:, None])),
            count(judged & ~refined & (k_hat > 1)),
            count(judged & refined),
            count(judged),
            jnp.zeros((), elpd.dtype),
            count(~finite.all(0)),
        )

    def answer_like(self, content: ArrayTree) -> Uncompressed:
        num, dtype = len(self.tails), jnp.result_type(float)
        shapes = [(num, 3)] * 3 + [(num, num, 3)] + [(num,)] * 3 + [()] * 3
        sums: Any = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return Uncompressed(LooSums(*sums))

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        for model, entry in zip(self.models, content, strict=True):
            draws = entry.draws if isinstance(entry, WidenedDraws) else entry
            check_model(model, position_shapes(draws), federation)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveGroupsOut(LeaveOneOut):
    """Leave-one-out predictive densities of groups of rows.

    A group's term is the log likelihood of all its rows, with latents integrated out. With
    `whole_clients`, all groups of a client are left out together.
    """

    disclosure = Disclosure(
        "how well each group of rows is predicted by the other groups, summed over the groups of "
        "this site",
        reason="the server chooses how many groups a site must have for them to count",
    )

    whole_clients: bool = field(default=False, metadata={"static": True})

    def client_sums(self, content: ArrayTree, client: Client) -> tuple[Array, LooSums]:
        """Return the number of the client's groups, and the sums over them."""

        def group_terms_of(model: Posterior) -> Terms:
            def terms(positions: ArrayTree) -> Array:
                by_group = _group_terms(model, positions, client)
                return by_group.sum(0, keepdims=True) if self.whole_clients else by_group

            return terms

        present = jnp.ones(1, bool) if self.whole_clients else _groups_present(client)
        sums = self.sum_terms(content, [group_terms_of(model) for model in self.models], present)
        return jnp.sum(present), sums


def _terms_at(model: Posterior, positions: ArrayTree, rows: ArrayTree) -> Array:
    """Return the terms of rows at each position, ``[num_rows, num]``."""
    return jax.vmap(lambda position: row_terms(model.loglikelihood_fn, position, rows))(positions).T


def _group_terms(model: Posterior, positions: ArrayTree, client: Client) -> Array:
    """Return the terms of a client's groups at each position, ``[max_groups, num]``."""
    loglikelihood_fn = model.loglikelihood_fn
    if isinstance(loglikelihood_fn, ClientTerms):
        return trees.map_in_batches(
            lambda position: loglikelihood_fn.terms(position, client), positions, BATCH_SIZE
        ).T
    grouped = isinstance(client.rows, Grouped)
    # Gather group indices like another column of the rows.
    rows = (row_values(client.rows), client.rows.group if grouped else ())

    def block_sums(rows: ArrayTree, mask: Array, number: Array) -> Array:
        values, group = rows
        terms = jnp.where(mask[:, None], _terms_at(model, positions, values), 0)
        group = group if grouped else jnp.zeros(mask.shape, jnp.int32)
        return jax.ops.segment_sum(terms, group, num_segments=max_groups(client))

    return sum_over_rows(block_sums, replace(client, rows=rows), _num_positions(positions))


def _groups_present(client: Client) -> Array:
    """Return true for the groups that the client has, ``[max_groups]``."""
    offsets = jnp.arange(client.max_size, dtype=jnp.int32)
    group = own_groups(client, jnp.where(offsets < client.size, offsets, 0))
    return jnp.zeros(max_groups(client), bool).at[group].set(True)


def _num_positions(entry: ArrayTree) -> int:
    parts = (entry.draws, entry.points) if isinstance(entry, WidenedDraws) else (entry,)
    return sum(jax.tree.leaves(part)[0].shape[0] for part in parts)


def _leave_out(
    terms_fn: Terms, entry: ArrayTree, num_tail: int, khat_limit: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Return ``elpd, p_loo, k_hat, refined, finite`` of each term, ``[num]``."""
    if not isinstance(entry, WidenedDraws):
        elpd, p_loo, k_hat, finite = _leave_out_by_draws(terms_fn(entry), num_tail)
        return elpd, p_loo, k_hat, jnp.zeros_like(finite), finite
    elpd, p_loo, k_hat, finite = _leave_out_by_draws(terms_fn(entry.draws), num_tail)
    wide, wide_khat = _leave_out_by_points(terms_fn(entry.points), entry.log_weights)
    refined = (k_hat > khat_limit) & (wide_khat <= khat_threshold(len(entry.log_weights)))
    elpd, p_loo = jnp.where(refined, wide, elpd), jnp.where(refined, p_loo + elpd - wide, p_loo)
    return elpd, p_loo, k_hat, refined, finite


def _leave_out_by_points(terms: Array, log_weights: Array) -> tuple[Array, Array]:
    """Return log predictive densities and k-hats from weighted points, ``[num]``."""
    num_tail = tail_length(len(log_weights))

    def leave_out_row(log_density: Array) -> tuple[Array, Array]:
        finite = jnp.isfinite(log_density)
        ratios = jnp.where(finite, log_weights - log_density, -jnp.inf)
        smoothed, k_hat = psis(ratios, num_tail)
        density = logsumexp(jnp.where(finite, smoothed + log_density, -jnp.inf))
        # If only this row excludes a point, the posterior without the row is unknown there.
        return density, jnp.where(finite.all(), k_hat, jnp.inf)

    return jax.vmap(leave_out_row)(terms)


def _leave_out_by_draws(terms: Array, num_tail: int) -> tuple[Array, Array, Array, Array]:
    """Return ``elpd, p_loo, k_hat, finite`` of each term from terms ``[num, num_draws]``."""

    def leave_out_row(log_density: Array) -> tuple[Array, Array, Array]:
        num = log_density.shape[0]
        largest, _ = jax.lax.top_k(-log_density, num_tail + 1)
        tail, k_hat = smooth_tail(largest)
        before = largest[:-1] - largest[0]
        # Below the tail, weight times density is one, up to a factor common to all weights.
        weights = jnp.sum(jnp.exp(-log_density - largest[0])) + jnp.sum(
            jnp.exp(tail) - jnp.exp(before)
        )
        products = num - num_tail + jnp.sum(jnp.exp(tail - before))
        elpd = jnp.log(products) - jnp.log(weights) - largest[0]
        return elpd, logsumexp(log_density) - np.log(num) - elpd, k_hat

    finite = jnp.isfinite(terms).all(1)
    return *jax.vmap(leave_out_row)(jnp.where(finite[:, None], terms, 0)), finite
