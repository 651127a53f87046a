"""Terms of a client's log likelihood, of its rows or of its groups, and sums over them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, ClientTerms, LogDensity, Posterior, register_dataclass
from fedmcmc.data import fold, max_groups
from fedmcmc.pytrees import trees

Terms = Callable[[ArrayTree], Array]
"""A position to some of a client's terms, ``[num]``."""


def refuse_latents(posterior: Posterior) -> None:
    """Raise `ValueError` where a model has latents of groups: no log likelihood is known then."""
    if posterior.local is not None:
        raise ValueError(
            "This posterior has latents of its groups, which are not moved here: "
            "fedmcmc.marginal(posterior) integrates them out at their clients, and the kernels "
            "fedmcmc.lsd(posterior, refresh=...), fedmcmc.fed_gibbs and fedmcmc.fed_ep move them "
            "along."
        )


def row_terms(loglikelihood_fn: LogDensity, position: ArrayTree, rows: ArrayTree) -> Array:
    """Return the log likelihood of each row, ``[num_rows]``; any other shape is an error."""
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
        Of rows, or a `ClientTerms`, all of whose terms are one chunk.
    fn
        Takes a function from a position to terms ``[num]`` and a bool mask ``[num]``; must return
        a pytree that is a sum over the terms where the mask holds.
    client
        Whose terms.
    """
    if isinstance(loglikelihood_fn, ClientTerms):
        every = jnp.ones(max_groups(client), bool)
        return fn(lambda position: loglikelihood_fn.terms(position, client), every)

    def of_rows(rows: ArrayTree, mask: Array) -> ArrayTree:
        return fn(lambda position: row_terms(loglikelihood_fn, position, rows), mask)

    return fold(of_rows, client)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Through(ClientTerms):
    """Terms in other coordinates."""

    inner: ClientTerms
    position_fn: Any

    @property
    def passes(self) -> int:
        return self.inner.passes

    def present(self, client: Client) -> Array:
        return self.inner.present(client)

    def terms(self, position: ArrayTree, client: Client) -> Array:
        return self.inner.terms(self.position_fn(position), client)


@register_dataclass
@dataclass(frozen=True, eq=False)
class Over(ClientTerms):
    """Terms divided by a temperature."""

    inner: ClientTerms
    temperature: Array

    @property
    def passes(self) -> int:
        return self.inner.passes

    def present(self, client: Client) -> Array:
        return self.inner.present(client)

    def terms(self, position: ArrayTree, client: Client) -> Array:
        return _over(lambda at: self.inner.terms(at, client), self.temperature, position)


def over(log_density: LogDensity, temperature: Array) -> Any:
    """Return a log density, or likelihood, divided by a temperature."""
    if isinstance(log_density, ClientTerms):
        return Over(log_density, temperature)
    return Partial(_over, log_density, temperature)


def _over(fn: Any, temperature: Array, *arguments: ArrayTree) -> Array:
    log_density: Array = fn(*arguments)
    return log_density / trees.cast(temperature, log_density)
