"""Sensitivity of the spread between groups to its prior when groups are few."""

import jax
import numpy as np

from fedmcmc.hierarchy._marginal import MarginalTerms, thin_draws
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Local, Posterior, as_functions, vmap_axes

MIN_GROUPS = 5
"""Number of groups below which the prior of the spread weighs as much as the data."""
NUM_DRAWS = 1000
"""Number of prior draws, and maximum number of posterior draws."""


def few_groups_warning(posterior: Posterior, num_groups: int, draws: ArrayTree) -> str | None:
    """Return a message on the spread between groups if there are fewer than five of them.

    The message names the parameter of the spread whose posterior sd is largest relative to its
    prior sd. There is no message if the spread does not depend on parameters.

    Parameters
    ----------
    posterior
        Posterior with latents of groups, or from `marginal`.
    num_groups
        Number of groups of all clients.
    draws
        Draws of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    """
    terms = posterior.loglikelihood_fn
    local: Local | None = terms.local if isinstance(terms, MarginalTerms) else posterior.local
    if local is None or num_groups >= MIN_GROUPS:
        return None
    are_few = "1 group is" if num_groups == 1 else f"{num_groups} groups are"
    problem = f"{are_few} too few to estimate how much groups differ"
    advice = "Choose this prior deliberately, and check how results change with another one."
    if local.prior_spread_fn is None or posterior.constrain_fn is None:
        return f"{problem}: the prior of their spread matters. {advice}"
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    before = vmap_axes(as_functions(local.prior_spread_fn), keys, num_axes=1)
    if not before:
        return None
    improper = [site for site in before if site in posterior.improper]
    if improper:
        return f"{problem}: the prior of {improper[0]}, which is improper, matters. {advice}"
    chosen = thin_draws(draws, NUM_DRAWS)
    values = vmap_axes(as_functions(posterior.constrain_fn), chosen, num_axes=1)
    after = {site: values[site] for site in before}
    names = trees.element_names(jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:]), before))
    sds = zip(names, _sds(before), _sds(after), strict=True)
    name, prior_sd, posterior_sd = max(sds, key=lambda item: item[2] / item[1])
    return (
        f"{problem}: the prior of {name} matters (prior sd {prior_sd:.3g}, posterior sd "
        f"{posterior_sd:.3g}). {advice}"
    )


def _sds(draws: ArrayTree) -> list[float]:
    """Return the sd of each number over draws with leaves ``[num, *event]``."""
    leaves = [np.std(leaf, 0).ravel() for leaf in jax.tree.leaves(draws)]
    sds: list[float] = np.concatenate(leaves).tolist()
    return sds
