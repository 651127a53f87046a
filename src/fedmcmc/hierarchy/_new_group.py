"""Latents of a group that nobody has seen, given draws of the shared parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, Posterior, as_functions, compiled
from fedmcmc.hierarchy._latents import groups_of, made_up_rows
from fedmcmc.hierarchy._local_draws import (
    TOGETHER,
    TRIES,
    check_latents,
    in_chains,
    in_one_row,
    late_round,
)
from fedmcmc.hierarchy._refresh import Refresh, independence
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key


def new_group(
    posterior: Posterior,
    data: Any,
    draws: ArrayTree,
    *,
    rng_key: Array,
    refresh: Refresh | None = None,
) -> ArrayTree:
    """Draw the latent of a new group given each draw of the shared parameters.

    It says what a new hospital may be like. Nobody is asked: a group without rows has its latent
    from the population alone. Averages of predictions over these draws are those for a new group; a
    prediction at the mean latent is another number where the link is not linear.

    Parameters
    ----------
    posterior
        With ``local``, as for `fedmcmc.local_draws`.
    data
        A `FederatedData`, or a consortium of clients elsewhere, of which shapes of rows are read
        alone.
    draws
        Of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``: ``.draws`` of a
        run's samples.
    rng_key
        Of all that is random.
    refresh
        How a latent is moved from zero, by default 20 tries of `independence`.

    Returns
    -------
    ArrayTree
        Site to values in the user's space, ``[chains, draws, *event]``; the latent as it is where
        the model has no names.

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
    >>> shared = {"mu": np.full((1, 2000), 3.0)}
    >>> new = new_group(posterior, data, shared, rng_key=jax.random.key(0))
    >>> new["effect"].shape, bool(abs(new["effect"].mean() - 3) < 0.1)
    ((1, 2000), True)
    """
    check_latents(posterior)
    refresh = independence(num_tries=TRIES) if refresh is None else refresh
    rows = made_up_rows(data.federation.rows, 1, np.random.default_rng(0))
    lead, flat = in_one_row(draws)
    return in_chains(_drawn(as_functions(posterior), rows, flat, as_key(rng_key), refresh), lead)


@compiled
@in_single_precision
def _drawn(
    posterior: Posterior, rows: ArrayTree, draws: ArrayTree, rng_key: Array, refresh: Refresh
) -> ArrayTree:
    local: Any = posterior.local
    # Its one row is none of its own: without any, the latent is that of the population.
    zero, one = jnp.zeros((), jnp.int32), jnp.ones(())
    nobody = groups_of(local, Client(rows, zero, zero, zero, one, one, 1))

    def drawn(item: tuple[ArrayTree, Array]) -> ArrayTree:
        position, number = item
        key = jax.random.fold_in(rng_key, number)
        begin = jnp.zeros((1, nobody.size), jax.eval_shape(trees.ravel, local.like.tree).dtype)
        randomness = refresh.prepare(key, 1, nobody.size)
        moved = refresh.move(nobody, randomness, late_round(nobody, refresh, position, begin))
        latent = nobody.unravel(moved.flat[0])
        return latent if local.constrain_fn is None else local.constrain_fn(position, latent)

    numbers = jnp.arange(jax.tree.leaves(draws)[0].shape[0])
    return trees.map_in_lots(drawn, (draws, numbers), TOGETHER)
