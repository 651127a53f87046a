"""Two levels: a client has a latent of its own, and its groups have theirs (patients of hospitals).

Given the client's latent its groups are independent, so that they move as ever, at a position that
is the pair of the shared one and the client's; and given those of its groups the client's latent
moves as that of one group does. Both in turn leave their joint distribution as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, Client, ClientLatent, Local, as_functions, register_dataclass
from fedmcmc.hierarchy._latents import Groups, groups_of
from fedmcmc.hierarchy._moments import WithMoments
from fedmcmc.hierarchy._refresh import Here, Moved, Refresh
from fedmcmc.pytrees import trees


class ClientAndGroups(NamedTuple):
    """One client's latent and its groups; takes the place of `Groups`.

    Raveled latents are ``{"client": [1, m], "group": [G, k]}``.
    """

    upper: ClientLatent
    groups: Groups

    @property
    def client(self) -> Client:
        """Whose groups they are."""
        return self.groups.client

    @property
    def present(self) -> Array:
        """``[G]`` bool, which groups the client has."""
        return self.groups.present

    def own(self, flat: Array) -> ArrayTree:
        """Return the client's latent, from ``[1, m]``."""
        return trees.unravel(flat[0], self.upper.like.tree)

    def as_flat(self, latents: ArrayTree) -> ArrayTree:
        """Return latents raveled."""
        own = trees.ravel(latents["client"])[None]
        return {"client": own, "group": self.groups.as_flat(latents["group"])}

    def as_latents(self, flat: ArrayTree) -> ArrayTree:
        """Return latents of the client and of all groups, of the latter ``[G, *event]``."""
        return {"client": self.own(flat["client"]), "group": self.groups.as_latents(flat["group"])}

    def total(self, position: ArrayTree, flat: ArrayTree) -> Array:
        """Return the log density of the client's latents and rows, ``[]``."""
        own = self.own(flat["client"])
        of_groups = self.groups.total((position, own), flat["group"])
        return self.upper.logprior_fn(position, own) + of_groups

    def of_client(self, flat: Array) -> Groups:
        """Return the client as if it were one group, given its groups' latents ``[G, k]``."""
        groups, upper = self.groups, self.upper

        def logprior_fn(position: ArrayTree, own: ArrayTree) -> Array:
            fn = groups.local.logprior_fn
            each = jax.vmap(lambda one: fn((position, own), groups.unravel(one)))(flat)
            of_groups = jnp.sum(jnp.where(groups.present, each, 0))
            return upper.logprior_fn(position, own) + of_groups

        def loglikelihood_fn(position: ArrayTree, owns: ArrayTree, rows: ArrayTree) -> Array:
            rows, group = rows
            own = jax.tree.map(lambda leaf: leaf[0], owns)  # the same for every row
            latents = jax.vmap(groups.unravel)(flat[group])
            return groups.local.loglikelihood_fn((position, own), latents, rows)

        local = Local(logprior_fn, loglikelihood_fn, upper.like)
        return Groups(local, groups.client, groups.kept, jnp.ones(1, bool), together=True)


def latents_of(local: Local, client: Client) -> Any:
    """Return the groups of a client, or the client and its groups."""
    if local.client is None:
        return groups_of(local, client)
    return ClientAndGroups(local.client, groups_of(local._replace(client=None), client))


def constrain_client(local: Local) -> Callable[[ArrayTree, ArrayTree], ArrayTree] | None:
    """Return a function of position and one client's latents to the user's parameters.

    Values of groups are ``[G, *event]``.
    """
    upper, fn = local.client, local.constrain_fn
    if fn is None:
        return None
    if upper is None:
        return jax.vmap(fn, in_axes=(None, 0))

    def both(position: ArrayTree, latents: ArrayTree) -> ArrayTree:
        pair = (position, latents["client"])
        own = {} if upper.constrain_fn is None else upper.constrain_fn(*pair)
        return {**own, **jax.vmap(lambda latent: fn(pair, latent))(latents["group"])}

    return both


class _Kept(NamedTuple):
    client: ArrayTree
    group: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False)
class TwoLevels(Refresh):
    """Moves of both levels in turn; see `two_levels`."""

    client: Refresh
    group: Refresh

    @property
    def exact(self) -> bool:
        return self.client.exact and self.group.exact

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        assert local.client is not None
        upper, inner = local.client, local._replace(client=None)
        # By NumPy: numbers that are made in a trace are none that a check could look at.
        own, one = (
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like.tree)
            for like in (upper.like, inner.like)
        )
        self.group.check(inner, (position, own), rows)

        def logprior_fn(position: ArrayTree, own: ArrayTree) -> Array:
            of_group = inner.logprior_fn((position, own), one)
            return upper.logprior_fn(position, own) + of_group

        def loglikelihood_fn(position: ArrayTree, owns: ArrayTree, rows: ArrayTree) -> Array:
            own = jax.tree.map(lambda leaf: leaf[0], owns)
            num = jax.tree.leaves(rows)[0].shape[0]
            several = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), one)
            return inner.loglikelihood_fn((position, own), several, rows)

        of_client = as_functions(Local(logprior_fn, loglikelihood_fn, upper.like))
        self.client.check(of_client, position, rows)

    def begin(self, groups: Any, position: ArrayTree) -> Any:
        own = trees.zeros_like(groups.upper.like.tree)
        flat = self.group.begin(groups.groups, (position, own))
        return {"client": self.client.begin(groups.of_client(flat), position), "group": flat}

    def init(self, groups: Any, position: ArrayTree) -> _Kept:
        flat = self.begin(groups, position)
        own = groups.own(flat["client"])
        return _Kept(
            self.client.init(groups.of_client(flat["group"]), position),
            self.group.init(groups.groups, (position, own)),
        )

    def randomness(self, rng_key: Array, local: Local, num_groups: int) -> _Kept:
        assert local.client is not None
        client_key, group_key = jax.random.split(rng_key)
        sizes = [trees.num_elements(like.tree) for like in (local.client.like, local.like)]
        return _Kept(
            self.client.prepare(client_key, 1, sizes[0]),
            self.group.prepare(group_key, num_groups, sizes[1]),
        )

    def move(self, groups: Any, draws: ArrayTree, here: Here) -> Moved:
        kept: Any = here.kept
        flat: Any = here.flat
        pair = (here.position, groups.own(flat["client"]))
        there = here._replace(position=pair, flat=flat["group"], kept=kept.group)
        low = self.group.move(groups.groups, draws.group, there)
        there = here._replace(flat=flat["client"], kept=kept.client)
        high = self.client.move(groups.of_client(low.flat), draws.client, there)
        both: Any = {"client": high.flat, "group": low.flat}
        share = jnp.minimum(low.acceptance, high.acceptance)
        return Moved(both, share, _Kept(high.kept, low.kept))


def two_levels(client: Refresh, group: Refresh) -> Refresh:
    """Move latents of groups given their client's, and the client's given those of its groups.

    For models with latents of both, of which `fedmcmc.from_numpyro` is told by
    ``local={"client": [...], "group": [...]}``, in `fedmcmc.lsd`.

    Parameters
    ----------
    client, group
        How the latent of a client moves, and how those of its groups do, as `independence`.

    Raises
    ------
    ValueError
        If moments are to be kept of the client's latent: `with_moments` is for those of groups.

    Examples
    --------
    >>> from fedmcmc.hierarchy import conjugate, independence
    >>> both = two_levels(client=conjugate(), group=independence(num_tries=2))
    """
    expect(client, Refresh, "client")
    expect(group, Refresh, "group")
    if isinstance(client, WithMoments):
        raise ValueError("with_moments is for latents of groups: two_levels(client, group=...).")
    return TwoLevels(client, group)
