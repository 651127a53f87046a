"""How much few groups tell of how much groups differ."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree, Local, Posterior
from fedmcmc.hierarchy._marginal import MarginalTerms
from fedmcmc.pytrees import trees

FEWEST_GROUPS = 5
"""With fewer, the prior of the spread between groups weighs as much as the data."""
NUM_DRAWS = 1000
"""Of the prior, and at most of the posterior."""


def of_few_groups(posterior: Posterior, num_groups: int, draws: ArrayTree) -> str | None:
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
    if local is None or num_groups >= FEWEST_GROUPS:
        return None
    said = f"{num_groups} group{'s' * (num_groups > 1)} tell{'s' * (num_groups == 1)} little"
    advice = "Choose it on purpose, and see how results change with another."
    if local.prior_spread_fn is None or posterior.constrain_fn is None:
        return f"{said} of how much groups differ: the prior of their spread matters. {advice}"
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    before = jax.jit(jax.vmap(local.prior_spread_fn))(keys)
    if not before:
        return None
    after = jax.jit(jax.vmap(posterior.constrain_fn))(_some(draws))
    name, prior, left = max(
        _sds(before, {site: after[site] for site in before}), key=lambda item: item[2] / item[1]
    )
    return (
        f"{said} of how much groups differ: the prior of {name} matters (its sd is {prior:.3g} "
        f"before the data and {left:.3g} after). {advice}"
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
