"""Terms of a client's log likelihood, one per row or per group, and sums over terms."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc.data import fold, max_groups
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, ClientTerms, LogDensity, Posterior, register_dataclass

Terms = Callable[[ArrayTree], Array]
"""Function from a position to a chunk of a client's terms, ``[num]``."""


def refuse_latents(posterior: Posterior) -> None:
    """Raise `ValueError` if a model has latents of groups, and so no log likelihood per row."""
    if posterior.local is not None:
        raise ValueError(
            "This posterior has latents of groups, which are not sampled here: "
            "fedmcmc.marginal(posterior) integrates them out at their clients, and the kernels "
            "fedmcmc.lsd(posterior, refresh=...), fedmcmc.fed_gibbs and fedmcmc.fed_ep sample them."
        )


def row_terms(loglikelihood_fn: LogDensity, position: ArrayTree, rows: ArrayTree) -> Array:
    """Return the log likelihood of each row, ``[num_rows]``; raise if it has another shape."""
    terms = loglikelihood_fn(position, rows)
    num = jax.tree.leaves(rows)[0].shape[0]
    if terms.shape != (num,):
        raise ValueError(
            f"loglikelihood_fn must return one term per row, shape ({num},), got {terms.shape}."
        )
    return terms


def fold_terms(
    loglikelihood_fn: LogDensity, fn: Callable[[Terms, Array], ArrayTree], client: Client
) -> ArrayTree:
    """Return the sum of ``fn(terms_fn, mask)`` over chunks of the client's terms.

    Parameters
    ----------
    loglikelihood_fn
        Log likelihood of rows, or a `ClientTerms`, whose terms are one chunk.
    fn
        Function ``(terms_fn, mask) -> pytree`` that returns a sum over the terms under the mask.
        `terms_fn` maps a position to a chunk's terms ``[num]``; `mask` is ``[num]`` bool.
    client
        Client with the terms.
    """
    if isinstance(loglikelihood_fn, ClientTerms):
        mask = jnp.ones(max_groups(client), bool)
        return fn(lambda position: loglikelihood_fn.terms(position, client), mask)

    def fold_rows(rows: ArrayTree, mask: Array) -> ArrayTree:
        return fn(lambda position: row_terms(loglikelihood_fn, position, rows), mask)

    return fold(fold_rows, client)


class WrappedTerms(ClientTerms):
    """Base of terms around `inner` terms; a subclass defines `terms`."""

    inner: ClientTerms  # a field of every subclass

    @property
    def passes(self) -> int:
        return self.inner.passes

    def present(self, client: Client) -> Array:
        return self.inner.present(client)


@register_dataclass
@dataclass(frozen=True, eq=False)
class TransformedTerms(WrappedTerms):
    """Terms in other coordinates."""

    inner: ClientTerms
    position_fn: Callable[[ArrayTree], ArrayTree]

    def terms(self, position: ArrayTree, client: Client) -> Array:
        return self.inner.terms(self.position_fn(position), client)


@register_dataclass
@dataclass(frozen=True, eq=False)
class TemperedTerms(WrappedTerms):
    """Terms divided by a temperature."""

    inner: ClientTerms
    temperature: Array

    def terms(self, position: ArrayTree, client: Client) -> Array:
        return _divide(self.inner.terms, self.temperature, position, client)


def over(log_density: LogDensity, temperature: Array) -> LogDensity:
    """Return a log density, or likelihood, divided by a temperature."""
    if isinstance(log_density, ClientTerms):
        return TemperedTerms(log_density, temperature)
    return Partial(_divide, log_density, temperature)


def _divide(fn: LogDensity, temperature: Array, *arguments: ArrayTree | Client) -> Array:
    log_density = fn(*arguments)
    return log_density / trees.cast(temperature, log_density)
