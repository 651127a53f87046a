"""What each group's own rows say of its latent, without the other groups, and how that shrinks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import missing_extra_error
from fedmcmc._types import ArrayTree, Client, Local, Posterior, as_functions, compiled
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy._latents import Groups, groups_of, modes_and_factors, solve_upper
from fedmcmc.hierarchy._local_draws import (
    LocalDraws,
    check_latents,
    drawn_of_all,
    in_one_row,
    warn_of_few_accepted,
    with_nan,
)
from fedmcmc.hierarchy._refresh import Refresh

MIN_FALL, MAX_FALL = 0.1, 2.5
"""Nats by which a log likelihood with a peak falls one standard deviation from it; a normal one
falls by a half."""


def unpooled(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    *,
    rng_key: Array,
    refresh: Refresh | None = None,
) -> LocalDraws:
    """Draw every group's latent from the likelihood of its own rows alone, without a population.

    Beside `fedmcmc.local_draws` they show how far each group is drawn to the others: little where
    it has many rows. See `forest` for a figure of both. Other parameters of rows (a slope, a
    residual sd) are those of the given draws.

    Parameters
    ----------
    posterior, data, draws, rng_key, refresh
        As for `fedmcmc.local_draws`.

    Returns
    -------
    LocalDraws
        NaN of groups whose rows leave a latent open: outcomes that are all alike, of which
        likelihoods rise without end, or fewer rows than a latent has numbers.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups.

    Warns
    -----
    UserWarning
        If in some group fewer than a fifth of the proposals were accepted.

    Notes
    -----
    The latent's prior is flat over its unconstrained numbers, given the shared parameters.

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
    >>> found = unpooled(posterior, data, {"mu": np.zeros((1, 500))}, rng_key=jax.random.key(0))

    Means of the rows, whatever ``mu`` is:

    >>> found.draws["effect"].mean((0, 1)).ravel().round(1)
    array([1.5, 4.5], dtype=float32)
    """
    check_latents(posterior)
    local: Any = posterior.local
    alone = posterior._replace(local=local._replace(logprior_fn=_Flat()))
    found = drawn_of_all(alone, data, draws, rng_key, refresh)
    _, flat = in_one_row(draws)
    center = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), flat)
    peaked = np.asarray(_peaked(as_functions(alone.local), data, center)) & found.mask
    warn_of_few_accepted(found, peaked, data)
    return found._replace(draws=with_nan(found.draws, peaked))


class _Flat:
    """A log density that is zero everywhere; equal to every other, so that programs are shared."""

    def __call__(self, position: ArrayTree, latent: ArrayTree) -> Array:
        return jnp.zeros((), jnp.result_type(float))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Flat)

    def __hash__(self) -> int:
        return hash(_Flat)


@compiled
def _peaked(local: Local, data: FederatedData, position: ArrayTree) -> Array:
    """Return for which groups the rows' log likelihood has a peak, ``[num_clients, G]`` bool."""

    def of_client(client: Client) -> Array:
        groups: Groups = groups_of(local, client)
        mode, factor = modes_and_factors(groups, position)
        highest = groups.log_density(position, mode)
        falls = []
        for axis in np.eye(groups.size):
            away = solve_upper(factor, jnp.broadcast_to(jnp.asarray(axis, mode.dtype), mode.shape))
            falls += [highest - groups.log_density(position, mode + x) for x in (away, -away)]
        fall = jnp.stack(falls)
        return jnp.all((fall > MIN_FALL) & (fall < MAX_FALL), 0)

    return jax.vmap(of_client, in_axes=(data.client_axes(),))(data.everyone())


def forest(own: LocalDraws, alone: LocalDraws | None = None, **kwargs: Any) -> Any:
    """Draw the intervals of every group's latent, and beside them those of its own rows alone.

    ArviZ's forest plot: how far an interval lies from the one of the group's rows alone, toward the
    others, is the shrinkage.

    Parameters
    ----------
    own
        From `fedmcmc.local_draws`.
    alone
        From `unpooled`; groups that it leaves open have one interval.
    **kwargs
        Passed to ``arviz_plots.plot_forest``, as `var_names` or `ci_probs`.

    Returns
    -------
    arviz_plots.PlotCollection
        ``.savefig(path)`` writes it.

    Raises
    ------
    ImportError
        If arviz-plots is not installed (the extra ``plots``).

    Examples
    --------
    ``forest(local_draws(...), unpooled(...)).savefig("effects.png")``
    """
    try:
        from arviz_plots import plot_forest
    except ImportError as error:
        raise missing_extra_error("forest needs arviz-plots", "plots") from error
    settings = {"backend": "matplotlib", "combined": True, **kwargs}
    if alone is None:
        return plot_forest(own.to_datatree(), **settings)
    both = {"its rows alone": alone.to_datatree(), "with all groups": own.to_datatree()}
    figure = plot_forest(both, **settings)
    figure.add_legend("model")
    return figure
