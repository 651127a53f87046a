"""Draws of groups' latents given draws of the shared parameters."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, missing_extra_error
from fedmcmc.data import FederatedData, GroupLabels, group_name
from fedmcmc.hierarchy._latents import Groups, groups_of
from fedmcmc.hierarchy._refresh import Refresh, RefreshInput, RefreshResult, independence
from fedmcmc.pytrees import in_single_precision, named_leaves, trees, variables
from fedmcmc.random import as_key
from fedmcmc.types import ArrayTree, Client, Local, Posterior, as_functions, compiled

NUM_TRIES = 20
"""Default number of proposals per draw, starting from a latent of zero."""
BATCH_SIZE = 64
"""Number of draws that are computed together."""
MIN_ACCEPTANCE = 0.2
"""Share of accepted proposals below which `local_draws` warns."""


class LatentDraws(NamedTuple):
    """Draws of the latents of all groups of clients whose rows are in this process.

    Attributes
    ----------
    draws
        Site to values in the user's space, ``[chains, draws, num_clients, max_groups, *event]``;
        unconstrained latents if the model has no site names. NaN for groups that do not exist.
    mask
        ``[num_clients, max_groups]`` bool, true for groups that exist.
    acceptance
        ``[num_clients, max_groups]``, share of accepted proposals; NaN for groups that do not
        exist.
    labels
        Labels of the clients.
    group_labels
        Labels of each client's groups, in the order of their numbers; ``None`` if each client is a
        single group.
    """

    draws: ArrayTree
    mask: np.ndarray
    acceptance: np.ndarray
    labels: Sequence[Any]
    group_labels: GroupLabels | None = None

    def summary(self) -> list[dict[str, Any]]:
        """Return mean and sd of each element of each group's latent, for `pandas.DataFrame`.

        An entry has the keys ``client``, ``group`` (``None`` if each client is a single group),
        ``name``, ``mean`` and ``sd``.
        """
        entries = []
        for client, group in np.argwhere(self.mask):
            latents = jax.tree.map(
                lambda x, place=(client, group): np.asarray(x)[:, :, *place], self.draws
            )
            means = jax.tree.map(lambda x: x.mean((0, 1), np.float64), latents)
            sds = jax.tree.map(lambda x: x.std((0, 1), np.float64), latents)
            numbers = (
                np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
                for tree in (means, sds)
            )
            labels = {
                "client": self.labels[client],
                "group": None if self.group_labels is None else self.group_labels[client][group],
            }
            for name, mean, sd in zip(trees.element_names(means), *numbers, strict=True):
                entries.append({**labels, "name": name, "mean": float(mean), "sd": float(sd)})
        return entries

    def to_datatree(self) -> Any:
        """Return the draws as an ArviZ `DataTree` with dimensions ``chain``, ``draw``, ``group``.

        The coordinate of a group is its client's label, followed by the group's label if the data
        have groups. Variables have the names of `fedmcmc.Samples.to_datatree`.

        Raises
        ------
        ImportError
            If arviz-base is not installed (the extra ``arviz``).
        """
        try:
            from arviz_base import from_dict
        except ImportError as error:
            raise missing_extra_error("to_datatree needs arviz-base", "arviz") from error
        names = [
            str(self.labels[client])
            + ("" if self.group_labels is None else f", group {self.group_labels[client][group]}")
            for client, group in np.argwhere(self.mask)
        ]
        draws = variables(named_leaves(self.draws))
        leaves = {name: leaf[:, :, self.mask] for name, leaf in draws.items()}
        dims = {name: ["group"] for name in leaves}
        return from_dict({"posterior": leaves}, dims=dims, coords={"group": names})


def local_draws(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    *,
    rng_key: Array,
    refresh: Refresh | None = None,
) -> LatentDraws:
    """Draw the latent of each group given each draw of the shared parameters.

    If the shared draws come from a posterior made by `fedmcmc.marginal`, the result approximates
    draws from the joint posterior. The latents of a client depend only on its own rows.

    Parameters
    ----------
    posterior
        Posterior with latents (``local``).
    data
        Rows of the clients.
    draws
        Draws of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``, such as
        ``samples.draws``.
    rng_key
        Key of all random numbers.
    refresh
        Update of a latent that starts at zero, for each draw; by default `independence` with 20
        proposals.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups.

    Warns
    -----
    UserWarning
        If fewer than a fifth of the proposals of a group were accepted.

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
    >>> latents = local_draws(posterior, data, draws, rng_key=jax.random.key(0))

    Given ``mu = 0`` the means are ``4.5 / 4`` and ``9 / 3``:

    >>> latents.draws["effect"].mean((0, 1)).ravel().round(1)
    array([1.1, 3. ], dtype=float32)
    """
    latents = draw_latents(posterior, data, draws, rng_key, refresh)
    warn_of_few_accepted(latents, latents.mask, data)
    return latents


def draw_latents(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    rng_key: Array,
    refresh: Refresh | None,
) -> LatentDraws:
    """Return draws of all groups' latents without a warning; see `local_draws`."""
    check_latents(posterior)
    refresh = independence(num_tries=NUM_TRIES) if refresh is None else refresh
    shape, flat = merge_chains(draws)
    latents, acceptance = _draw(as_functions(posterior), data, flat, as_key(rng_key), refresh)
    mask = data.group_mask
    return LatentDraws(
        fill_with_nan(split_chains(latents, shape), mask),
        mask,
        np.where(mask, np.asarray(acceptance), np.nan),
        data.labels,
        data.group_labels,
    )


def fill_with_nan(draws: ArrayTree, mask: np.ndarray) -> ArrayTree:
    """Return draws ``[chains, draws, num_clients, max_groups, *event]``, NaN outside of `mask`."""
    if mask.all():
        return draws

    def fill(leaf: np.ndarray) -> np.ndarray:
        return np.where(mask.reshape(1, 1, *mask.shape, *(1,) * (leaf.ndim - 4)), leaf, np.nan)

    return jax.tree.map(fill, draws)


def warn_of_few_accepted(latents: LatentDraws, mask: np.ndarray, data: FederatedData) -> None:
    """Warn if a group in `mask` accepted few proposals."""
    if not mask.any() or (lowest := latents.acceptance[mask].min()) >= MIN_ACCEPTANCE:
        return
    client, group = np.argwhere(mask & (latents.acceptance == lowest))[0]
    warnings.warn(
        f"Only {lowest:.0%} of the proposals for "
        f"{group_name(data.labels, data.group_labels, client, group)} were accepted, so some "
        f"of its draws may still be at their start, a latent of zero. Pass "
        f"refresh=independence(num_tries=...) with more than {NUM_TRIES} tries.",
        stacklevel=3,
    )


def check_latents(posterior: Posterior) -> None:
    """Raise `ValueError` unless the posterior has latents of groups to draw."""
    expect(posterior, Posterior, "posterior")
    if posterior.local is None:
        raise ValueError(
            "This posterior has no latents of groups to draw. Pass the argument of marginal(), not "
            "its result."
        )


def merge_chains(draws: ArrayTree) -> tuple[tuple[int, ...], ArrayTree]:
    """Return the numbers of chains and draws, and all draws, leaves ``[num, ...]``."""
    shape = np.shape(jax.tree.leaves(draws)[0])[:2]
    return shape, jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *np.shape(leaf)[2:])), draws)


def split_chains(values: ArrayTree, shape: tuple[int, ...]) -> ArrayTree:
    """Return values per draw of `merge_chains`, leaves ``[chains, draws, ...]``."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(*shape, *leaf.shape[1:]), values)


def move_from_zero(
    refresh: Refresh, groups: Groups, position: ArrayTree, rng_key: Array
) -> RefreshResult:
    """Return latents after a refresh that starts at zero, in a round that adapts no setting."""
    draws = refresh.prepare(rng_key, groups.num, groups.size)
    state = refresh.init(groups, position)
    inputs = RefreshInput(position, groups.zeros, state, jnp.int32(2**31 - 1))
    return refresh.move(groups, draws, inputs)


def constrain(local: Local, position: ArrayTree, latent: ArrayTree) -> ArrayTree:
    """Return a group's latent in the user's space."""
    return latent if local.constrain_fn is None else local.constrain_fn(position, latent)


@compiled
@in_single_precision
def _draw(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, rng_key: Array, refresh: Refresh
) -> tuple[ArrayTree, Array]:
    """Return draws, leaves ``[num, num_clients, G, ...]``, and mean acceptance."""
    local: Any = posterior.local

    def of_client(client: Client, position: ArrayTree, key: Array) -> tuple[ArrayTree, Array]:
        groups = groups_of(local, client)
        client_key = jax.random.fold_in(key, client.index)
        moved = move_from_zero(refresh, groups, position, client_key)
        latents = jax.vmap(lambda x: constrain(local, position, groups.unravel(x)))(moved.flat)
        return latents, moved.acceptance

    clients, axes = data.everyone(), (data.client_axes(), None, None)

    def of_draw(item: tuple[ArrayTree, Array]) -> tuple[ArrayTree, Array]:
        position, number = item
        key = jax.random.fold_in(rng_key, number)
        return jax.vmap(of_client, in_axes=axes)(clients, position, key)

    numbers = jnp.arange(jax.tree.leaves(draws)[0].shape[0])
    latents, acceptance = trees.map_in_batches(of_draw, (draws, numbers), BATCH_SIZE)
    return latents, jnp.mean(acceptance, 0)
