"""Latents of each group given its own rows alone, and a figure of the shrinkage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import missing_extra_error
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy._latents import Groups, groups_of, modes_and_factors, solve_upper
from fedmcmc.hierarchy._local_draws import (
    LatentDraws,
    check_latents,
    draw_latents,
    fill_with_nan,
    merge_chains,
    warn_of_few_accepted,
)
from fedmcmc.hierarchy._refresh import Refresh
from fedmcmc.types import ArrayTree, Client, Local, Posterior, as_functions, compiled

MIN_FALL, MAX_FALL = 0.1, 2.5
"""Bounds in nats on the fall of a peaked log likelihood within one sd (a half if normal)."""


def unpooled(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    *,
    rng_key: Array,
    refresh: Refresh | None = None,
) -> LatentDraws:
    """Draw the latent of each group from its rows alone, without the population.

    The latent's prior is flat over its unconstrained elements; all other parameters have the values
    of the draws. `forest` shows the result next to `fedmcmc.local_draws`.

    Parameters
    ----------
    posterior, data, draws, rng_key, refresh
        See `fedmcmc.local_draws`.

    Returns
    -------
    LatentDraws
        Draws; NaN for groups whose rows do not determine a latent, such as outcomes that are all
        equal.

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
    >>> clinics = [{"y": np.array([1.0, 2.0, 1.5])}, {"y": np.array([4.0, 5.0])}]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = fedmcmc.from_numpyro(model, example=data)
    >>> draws = {"mu": np.zeros((1, 500))}
    >>> latents = unpooled(posterior, data, draws, rng_key=jax.random.key(0))

    The means are the means of the rows for any ``mu``:

    >>> latents.draws["effect"].mean((0, 1)).ravel().round(1)
    array([1.5, 4.5], dtype=float32)
    """
    check_latents(posterior)
    local: Any = posterior.local
    flat_prior = posterior._replace(local=local._replace(logprior_fn=_Flat()))
    latents = draw_latents(flat_prior, data, draws, rng_key, refresh)
    _, flat = merge_chains(draws)
    center = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), flat)
    peaked = np.asarray(_peaked(as_functions(flat_prior.local), data, center)) & latents.mask
    warn_of_few_accepted(latents, peaked, data)
    return latents._replace(draws=fill_with_nan(latents.draws, peaked))


class _Flat:
    """Log density that is zero everywhere; all instances are equal, so that programs are shared."""

    def __call__(self, position: ArrayTree, latent: ArrayTree) -> Array:
        return jnp.zeros((), jnp.result_type(float))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, _Flat)

    def __hash__(self) -> int:
        return hash(_Flat)


@compiled
def _peaked(local: Local, data: FederatedData, position: ArrayTree) -> Array:
    """Return a mask of groups whose log likelihood has a peak, ``[num_clients, G]`` bool."""

    def of_client(client: Client) -> Array:
        groups: Groups = groups_of(local, client)
        mode, factor = modes_and_factors(groups, position)
        highest = groups.log_density(position, mode)
        falls = []
        for axis in np.eye(groups.size):
            sd = solve_upper(factor, jnp.broadcast_to(jnp.asarray(axis, mode.dtype), mode.shape))
            falls += [highest - groups.log_density(position, mode + x) for x in (sd, -sd)]
        fall = jnp.stack(falls)
        return jnp.all((fall > MIN_FALL) & (fall < MAX_FALL), 0)

    return jax.vmap(of_client, in_axes=(data.client_axes(),))(data.everyone())


def forest(
    partial_pooling: LatentDraws, no_pooling: LatentDraws | None = None, **kwargs: Any
) -> Any:
    """Plot the intervals of each group's latent, with and without the other groups.

    The distance between the two intervals of a group in ArviZ's forest plot is its shrinkage:
    ``forest(local_draws(...), unpooled(...)).savefig("effects.png")``.

    Parameters
    ----------
    partial_pooling
        Draws from `fedmcmc.local_draws`.
    no_pooling
        Draws from `unpooled`; a group without such draws has one interval.
    **kwargs
        Arguments of ``arviz_plots.plot_forest``, such as `var_names` or `ci_probs`.

    Returns
    -------
    arviz_plots.PlotCollection
        Plot, with a method ``savefig(path)``.

    Raises
    ------
    ImportError
        If arviz-plots is not installed (the extra ``plots``).
    """
    try:
        from arviz_plots import plot_forest
    except ImportError as error:
        raise missing_extra_error("forest needs arviz-plots", "plots") from error
    settings = {"backend": "matplotlib", "combined": True, **kwargs}
    if no_pooling is None:
        return plot_forest(partial_pooling.to_datatree(), **settings)
    trees_by_model = {
        "its rows alone": no_pooling.to_datatree(),
        "with all groups": partial_pooling.to_datatree(),
    }
    figure = plot_forest(trees_by_model, **settings)
    figure.add_legend("model")
    return figure
