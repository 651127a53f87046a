"""Draws of groups' latents given draws of the shared parameters."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, missing_extra_error
from fedmcmc._types import ArrayTree, Client, Posterior, as_functions, compiled
from fedmcmc.data import FederatedData, GroupLabels, group_name
from fedmcmc.hierarchy._latents import Groups, groups_of
from fedmcmc.hierarchy._refresh import Here, Refresh, independence
from fedmcmc.pytrees import in_single_precision, named_leaves, trees, variables
from fedmcmc.random import as_key

TRIES = 20
"""Proposals per draw, from a latent of zero on."""
TOGETHER = 64
"""Draws computed at a time."""
MIN_ACCEPTED = 0.2
"""Share of proposals below which draws are too few."""


class LocalDraws(NamedTuple):
    """Draws of the groups' latents, as simulated clients keep them.

    Attributes
    ----------
    draws
        Site to values in the user's space, ``[chains, draws, num_clients, max_groups, *event]``;
        unconstrained latents if the model has no site names. NaN for groups that do not exist.
    mask
        ``[num_clients, max_groups]`` bool, true for groups that exist.
    acceptance
        ``[num_clients, max_groups]``, the share of proposals that were accepted; NaN for groups
        that do not exist.
    labels
        Labels of the clients.
    group_labels
        Labels of each client's groups, in the order of their numbers; ``None`` if every client is
        one group.
    """

    draws: ArrayTree
    mask: np.ndarray
    acceptance: np.ndarray
    labels: Sequence[Any]
    group_labels: GroupLabels | None = None

    def summary(self) -> list[dict[str, Any]]:
        """Return one entry per group and number of its latent; ``pandas.DataFrame`` takes the list.

        An entry has the labels of ``client`` and ``group`` (``None`` if every client is one group),
        the ``name`` of the number, and its ``mean`` and ``sd`` over all draws.
        """
        found = []
        for client, group in np.argwhere(self.mask):
            own = jax.tree.map(lambda x, at=(client, group): np.asarray(x)[:, :, *at], self.draws)
            means = jax.tree.map(lambda x: x.mean((0, 1), np.float64), own)
            sds = jax.tree.map(lambda x: x.std((0, 1), np.float64), own)
            numbers = (
                np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (means, sds)
            )
            label = None if self.group_labels is None else self.group_labels[client][group]
            for name, mean, sd in zip(trees.element_names(means), *numbers, strict=True):
                found.append(
                    {
                        "client": self.labels[client],
                        "group": label,
                        "name": name,
                        "mean": float(mean),
                        "sd": float(sd),
                    }
                )
        return found

    def to_datatree(self) -> Any:
        """Return the draws as an ArviZ ``DataTree`` with dimensions ``chain``, ``draw``, ``group``.

        The coordinate of a group is its client's label, followed by the group's own label if the
        data have groups. Names of variables are those of `fedmcmc.Samples.to_datatree`.

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
) -> LocalDraws:
    """Draw every group's latent given each draw of the shared parameters.

    After `fedmcmc.marginal` these are draws of the joint posterior. A client computes its own from
    its rows alone; here all clients of a simulation do.

    Parameters
    ----------
    posterior
        With ``local``: the one that was given to `fedmcmc.marginal`, or that `from_numpyro` made
        of the model that was given to `fedmcmc.fit`.
    data
        The clients' rows.
    draws
        Of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``: ``.draws`` of a
        run's samples.
    rng_key
        Of all that is random.
    refresh
        How a latent is moved from zero, by default 20 tries of `independence`.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups.

    Warns
    -----
    UserWarning
        If in some group fewer than a fifth of the proposals were accepted.

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
    >>> found = local_draws(
    ...     posterior, data, {"mu": np.zeros((1, 500))}, rng_key=jax.random.key(0)
    ... )
    >>> found.draws["effect"].shape
    (1, 500, 2, 1)

    Given ``mu = 0`` the means are ``4.5 / 4`` and ``9 / 3``:

    >>> found.draws["effect"].mean((0, 1)).ravel().round(1)
    array([1.1, 3. ], dtype=float32)
    """
    found = drawn_of_all(posterior, data, draws, rng_key, refresh)
    warn_of_few_accepted(found, found.mask, data)
    return found


def drawn_of_all(
    posterior: Posterior,
    data: FederatedData,
    draws: ArrayTree,
    rng_key: Array,
    refresh: Refresh | None,
) -> LocalDraws:
    """Return draws of all groups' latents; see `local_draws`."""
    check_latents(posterior)
    refresh = independence(num_tries=TRIES) if refresh is None else refresh
    lead, flat = in_one_row(draws)
    found, acceptance = _drawn(as_functions(posterior), data, flat, as_key(rng_key), refresh)
    found = in_chains(found, lead)
    mask = data.group_mask
    return LocalDraws(
        with_nan(found, mask),
        mask,
        np.where(mask, np.asarray(acceptance), np.nan),
        data.labels,
        data.group_labels,
    )


def with_nan(draws: ArrayTree, mask: np.ndarray) -> ArrayTree:
    """Return draws ``[chains, draws, num_clients, max_groups, *event]``, NaN outside of `mask`."""
    if mask.all():
        return draws

    def of_site(leaf: np.ndarray) -> np.ndarray:
        return np.where(mask.reshape(1, 1, *mask.shape, *(1,) * (leaf.ndim - 4)), leaf, np.nan)

    return jax.tree.map(of_site, draws)


def warn_of_few_accepted(found: LocalDraws, groups: np.ndarray, data: FederatedData) -> None:
    """Warn where draws of one of some `groups`, a mask, are of too few accepted proposals."""
    if not groups.any() or (least := found.acceptance[groups].min()) >= MIN_ACCEPTED:
        return
    client, group = np.argwhere(groups & (found.acceptance == least))[0]
    warnings.warn(
        f"Only {least:.0%} of the proposals for "
        f"{group_name(data.labels, data.group_labels, client, group)} were accepted: its draws "
        f"repeat too often to trust. Give refresh=independence(num_tries=...) more tries.",
        stacklevel=3,
    )


def check_latents(posterior: Posterior) -> None:
    """Raise `ValueError` unless the posterior has latents of groups to draw."""
    expect(posterior, Posterior, "posterior")
    if posterior.local is None:
        raise ValueError(
            "This posterior has no latents of groups to draw. Give the one that marginal() took, "
            "not the one that it returned."
        )


def in_one_row(draws: ArrayTree) -> tuple[tuple[int, ...], ArrayTree]:
    """Return numbers of chains and draws, and the draws of all chains, leaves ``[num, ...]``."""
    lead = np.shape(jax.tree.leaves(draws)[0])[:2]
    return lead, jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, *np.shape(leaf)[2:])), draws)


def in_chains(drawn: ArrayTree, lead: tuple[int, ...]) -> ArrayTree:
    """Return what was drawn per draw of `in_one_row`, leaves ``[chains, draws, ...]``."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(*lead, *leaf.shape[1:]), drawn)


def late_round(groups: Groups, refresh: Refresh, position: ArrayTree, begin: Array) -> Here:
    """Return a place to move latents from, far behind the rounds in which settings adapt."""
    return Here(position, begin, refresh.init(groups, position), jnp.int32(2**31 - 1))


@compiled
@in_single_precision
def _drawn(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, rng_key: Array, refresh: Refresh
) -> tuple[ArrayTree, Array]:
    """Return draws, leaves ``[num, num_clients, G, ...]``, and mean acceptance."""
    local: Any = posterior.local

    def of_client(client: Client, position: ArrayTree, key: Array) -> tuple[ArrayTree, Array]:
        groups: Groups = groups_of(local, client)
        own = jax.random.fold_in(key, client.index)
        drawn = refresh.prepare(own, groups.num, groups.size)
        like = jax.eval_shape(trees.ravel, local.like.tree)
        begin = jnp.zeros((groups.num, groups.size), like.dtype)
        moved = refresh.move(groups, drawn, late_round(groups, refresh, position, begin))
        latents = jax.vmap(groups.unravel)(moved.flat)
        if local.constrain_fn is not None:
            latents = jax.vmap(lambda latent: local.constrain_fn(position, latent))(latents)
        return latents, moved.acceptance

    every, axes = data.everyone(), (data.client_axes(), None, None)

    def one(item: tuple[ArrayTree, Array]) -> tuple[ArrayTree, Array]:
        position, number = item
        key = jax.random.fold_in(rng_key, number)
        return jax.vmap(of_client, in_axes=axes)(every, position, key)

    numbers = jnp.arange(jax.tree.leaves(draws)[0].shape[0])
    found, acceptance = trees.map_in_lots(one, (draws, numbers), TOGETHER)
    return found, jnp.mean(acceptance, 0)
