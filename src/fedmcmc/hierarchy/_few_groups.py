"""How much few groups tell of how much groups differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Local, Posterior
from fedmcmc.hierarchy._marginal import MarginalTerms
from fedmcmc.pytrees import trees

MIN_GROUPS = 5
"""With fewer, the prior of the spread between groups weighs as much as the data."""
NUM_DRAWS = 1000
"""Of the prior, and at most of the posterior."""


def few_groups_warning(posterior: Posterior, num_groups: int, draws: ArrayTree) -> str | None:
    """Return in words what fewer than five groups leave open, or ``None``.

    That is how much groups differ. Where the model says on which shared parameters this depends,
    their standard deviations before and after the data are told; ``None`` if it depends on none.

    Parameters
    ----------
    posterior
        With latents of groups, or from `marginal`.
    num_groups
        Of all clients.
    draws
        Of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    """
    terms = posterior.loglikelihood_fn
    local: Local | None = terms.local if isinstance(terms, MarginalTerms) else posterior.local
    if local is None:
        return None
    within = "" if local.client is None else " within their clients"
    spread_fn = local.prior_spread_fn
    return _of_few("group", num_groups, f"groups differ{within}", spread_fn, posterior, draws)


def of_few_clients(posterior: Posterior, num_clients: int, draws: ArrayTree) -> str | None:
    """Return what fewer than five clients leave open where clients have latents of their own.

    ``None`` where they have none; else as `of_few_groups`, of how much clients differ.
    """
    if posterior.local is None or posterior.local.client is None:
        return None
    spread_fn = posterior.local.client.prior_spread_fn
    return _of_few("client", num_clients, "clients differ", spread_fn, posterior, draws)


def _of_few(
    whose: str,
    num: int,
    differ: str,
    spread_fn: Callable[[Array], dict[str, Array]] | None,
    posterior: Posterior,
    draws: ArrayTree,
) -> str | None:
    if num >= MIN_GROUPS:
        return None
    said = f"{num} {whose}{'s' * (num > 1)} tell{'s' * (num == 1)} little of how much {differ}"
    advice = "Choose it on purpose, and see how results change with another."
    if spread_fn is None or posterior.constrain_fn is None:
        return f"{said}: the prior of their spread matters. {advice}"
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    before = jax.jit(jax.vmap(spread_fn))(keys)
    if not before:
        return None
    flat = [site for site in before if site in posterior.improper]
    if flat:
        return f"{said}: the prior of {flat[0]}, which is improper, matters. {advice}"
    after = jax.jit(jax.vmap(posterior.constrain_fn))(_some(draws))
    name, prior, left = max(
        _sds(before, {site: after[site] for site in before}), key=lambda item: item[2] / item[1]
    )
    return (
        f"{said}: the prior of {name} matters (its sd is {prior:.3g} before the data and "
        f"{left:.3g} after). {advice}"
    )


def _some(draws: ArrayTree) -> ArrayTree:
    num = int(np.prod(np.shape(jax.tree.leaves(draws)[0])[:2]))
    at = np.linspace(0, num - 1, min(NUM_DRAWS, num)).astype(int)
    return jax.tree.map(lambda x: jnp.asarray(np.reshape(x, (num, *np.shape(x)[2:]))[at]), draws)


def _sds(before: ArrayTree, after: ArrayTree) -> list[tuple[Any, float, float]]:
    """Return name, prior sd and posterior sd of each number."""
    names = trees.element_names(jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), before))
    sds = [
        np.concatenate([np.std(leaf, 0).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (before, after)
    ]
    return list(zip(names, *(sd.tolist() for sd in sds), strict=True))
