"""Where latents begin that go on from another kernel's run.

A refresh says where latents begin, and all that a kernel makes of its first latents, the sums of a
Gibbs sampler's server included, follows from that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Local, register_dataclass
from fedmcmc.hierarchy._latents import Groups
from fedmcmc.hierarchy._local_draws import TRIES, late_round
from fedmcmc.hierarchy._refresh import Here, Moved, Refresh, independence
from fedmcmc.hierarchy._trajectories import Steps
from fedmcmc.hierarchy._two_levels import TwoLevels
from fedmcmc.pytrees import named_leaves, trees


@dataclass(frozen=True, eq=False)
class _GoingOn(Refresh):
    """Moves latents as another refresh does; a subclass says where they begin."""

    refresh: Refresh

    @property
    def exact(self) -> bool:
        return self.refresh.exact

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        self.refresh.check(local, position, rows)

    def init(self, groups: Any, position: ArrayTree) -> ArrayTree:
        return self.refresh.init(groups, position)

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> ArrayTree:
        return self.refresh.prepare(rng_key, num_groups, size)

    def randomness(self, rng_key: Array, local: Local, num_groups: int) -> ArrayTree:
        return self.refresh.randomness(rng_key, local, num_groups)

    def move(self, groups: Any, draws: ArrayTree, here: Here) -> Moved:
        return self.refresh.move(groups, draws, here)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Carried(_GoingOn):
    """Latents begin where they were, leaves ``[num_clients, max_groups, *event]``."""

    latents: ArrayTree

    def begin(self, groups: Any, position: ArrayTree) -> Any:
        index = groups.client.index
        return groups.as_flat(jax.tree.map(lambda leaf: leaf[index], self.latents))


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Drawn(_GoingOn):
    """Latents begin at a draw given position and rows."""

    rng_key: Array

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        block = independence(num_tries=TRIES)
        own = jax.random.fold_in(self.rng_key, groups.client.index)
        drawn = block.prepare(own, groups.num, groups.size)
        like = jax.eval_shape(trees.ravel, groups.local.like.tree)
        begin = jnp.zeros((groups.num, groups.size), like.dtype)
        return block.move(groups, drawn, late_round(groups, block, position, begin)).flat


def with_latents(kernel: Any, latents: ArrayTree) -> Any:
    """Return a kernel whose clients begin with these latents; its states are as ever.

    Parameters
    ----------
    kernel
        Any pytree in which there are refreshes.
    latents
        Unconstrained, leaves ``[num_clients, max_groups, *event]``.
    """
    return _begun(kernel, lambda refresh: _Carried(refresh, latents))


def with_drawn_latents(kernel: Any, rng_key: Array) -> Any:
    """Return a kernel whose clients begin with draws given the first position and their rows.

    As `local_draws` draws them, 20 tries of `independence` each. Those of two levels begin at their
    modes.
    """

    def begun(refresh: Refresh) -> Refresh:
        return refresh if isinstance(refresh, TwoLevels) else _Drawn(refresh, rng_key)

    return _begun(kernel, begun)


def begins_latents(kernel: Any) -> bool:
    """Return whether there is a refresh in a kernel."""
    return any(_is_refresh(node) for node in jax.tree.leaves(kernel, is_leaf=_is_refresh))


def _begun(kernel: Any, begun: Callable[[Refresh], Refresh]) -> Any:
    return jax.tree.map(
        lambda node: begun(node) if _is_refresh(node) else node, kernel, is_leaf=_is_refresh
    )


def _is_refresh(node: Any) -> bool:
    return isinstance(node, Refresh)


def expect_same_latents(wanted: ArrayTree, found: ArrayTree) -> None:
    """Raise `ValueError` unless latents in a state can be those of a kernel's clients.

    Both may be shapes, ``[num_clients, max_groups, *event]``.
    """
    new, old = (
        {name: list(leaf.shape) for name, leaf in named_leaves(latents).items()}
        for latents in (wanted, found)
    )
    if new == old:
        return
    told = [", ".join(f"{name} {shape}" for name, shape in x.items()) for x in (old, new)]
    sites = [{name.removesuffix("_decentered") for name in x} for x in (old, new)]
    remedy = "Go on with the same data and with a kernel of the same latents"
    if sites[0] == sites[1] and set(old) != set(new):
        remedy = (
            "Make the posteriors of both kernels with the same from_numpyro(model, centered=...), "
            "centered=1.0 for fed_gibbs"
        )
    raise ValueError(
        f"Latents of clients in this state are {told[0]}, those that the kernel moves {told[1]} "
        f"(clients, groups and what one has). {remedy}; or let them begin anew: "
        f"switch(..., carry_latents=False)."
    )


def with_learned_steps(fresh: ArrayTree, old: ArrayTree) -> ArrayTree:
    """Return what a refresh keeps at first, with the step sizes that an equal one has learned.

    Of another kind of refresh nothing is taken.
    """
    structure: Any = jax.tree.structure(fresh)
    if jax.tree.structure(old) != structure:
        return fresh

    def is_steps(node: Any) -> bool:
        return isinstance(node, Steps)

    return jax.tree.map(
        lambda new, known: known if is_steps(new) else new, fresh, old, is_leaf=is_steps
    )
