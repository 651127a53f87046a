"""Latents of a new group, given draws of the shared parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.hierarchy._latents import groups_of, made_up_rows
from fedmcmc.hierarchy._local_draws import (
    BATCH_SIZE,
    NUM_TRIES,
    check_latents,
    constrain,
    merge_chains,
    move_from_zero,
    split_chains,
)
from fedmcmc.hierarchy._refresh import Refresh, independence
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.types import ArrayTree, Client, Posterior, as_functions, compiled


def new_group(
    posterior: Posterior,
    data: Any,
    draws: ArrayTree,
    *,
    rng_key: Array,
    refresh: Refresh | None = None,
) -> ArrayTree:
    """Draw the latent of a new group, such as a new hospital, given each draw of the parameters.

    No client takes part: the latent of a group without rows has the distribution of the population.
    To predict for a new group, average predictions over these draws. The prediction at their mean
    differs from this average if the link is not linear.

    Parameters
    ----------
    posterior, draws, rng_key, refresh
        See `fedmcmc.local_draws`.
    data
        A `FederatedData` or a consortium; only the shapes of its rows are used.

    Returns
    -------
    ArrayTree
        Site to values in the user's space, ``[chains, draws, *event]``; unconstrained latents if
        the model has no site names.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups.

    Examples
    --------
    >>> import fedmcmc, jax, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> data = fedmcmc.FederatedData.from_clients([{"y": np.array([1.0, 2.0, 1.5])}])
    >>> posterior = fedmcmc.from_numpyro(model, example=data)
    >>> draws = {"mu": np.full((1, 2000), 3.0)}
    >>> new = new_group(posterior, data, draws, rng_key=jax.random.key(0))
    >>> new["effect"].shape, bool(abs(new["effect"].mean() - 3) < 0.1)
    ((1, 2000), True)
    """
    check_latents(posterior)
    refresh = independence(num_tries=NUM_TRIES) if refresh is None else refresh
    rows = made_up_rows(data.federation.rows, 1, np.random.default_rng(0))
    shape, flat = merge_chains(draws)
    return split_chains(_draw(as_functions(posterior), rows, flat, as_key(rng_key), refresh), shape)


@compiled
@in_single_precision
def _draw(
    posterior: Posterior, rows: ArrayTree, draws: ArrayTree, rng_key: Array, refresh: Refresh
) -> ArrayTree:
    local: Any = posterior.local
    # The client's size is zero, so the one made-up row is not part of the client.
    zero, weight = jnp.zeros((), jnp.int32), jnp.ones(())
    groups = groups_of(local, Client(rows, zero, zero, zero, weight, weight, 1))

    def of_draw(item: tuple[ArrayTree, Array]) -> ArrayTree:
        position, number = item
        key = jax.random.fold_in(rng_key, number)
        moved = move_from_zero(refresh, groups, position, key)
        return constrain(local, position, groups.unravel(moved.flat[0]))

    numbers = jnp.arange(jax.tree.leaves(draws)[0].shape[0])
    return trees.map_in_batches(of_draw, (draws, numbers), BATCH_SIZE)
