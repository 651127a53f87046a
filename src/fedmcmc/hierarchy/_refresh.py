"""Refreshes: how a client moves the latents of its groups while the shared position stands still.

Each group is accepted or rejected by itself, as groups are independent given the position. What is
random belongs to a group by its number, so that it does not depend on how many others there are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Described, Local, register_dataclass
from fedmcmc.hierarchy._latents import (
    Accepted,
    Groups,
    Locals,
    find_modes,
    modes_and_factors,
    solve_upper,
)
from fedmcmc.pytrees import trees


class Here(NamedTuple):
    """Where a refresh begins.

    `position` is the shared one, `flat` are latents, ``[G, k]``, `kept` what the refresh has kept,
    and `round` counts from zero.
    """

    position: ArrayTree
    flat: Array
    kept: ArrayTree = ()
    round: Array | int = 0


class Moved(NamedTuple):
    """Latents after a refresh.

    `flat` is ``[G, k]``, `acceptance` ``[G]`` the share of proposals that were accepted, zero of
    groups that the client does not have; `kept` what the refresh keeps for the next round.
    """

    flat: Array
    acceptance: Array
    kept: ArrayTree = ()


class Refresh(Described):
    """A transition of the groups' latents at a fixed position.

    A subclass is a frozen dataclass registered as a pytree; its methods are pure.
    """

    @property
    def exact(self) -> bool:
        """Whether it leaves the latents' distribution given position and rows as it is."""
        return True

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        """Raise `ValueError` where the model is none for this refresh.

        `rows` are shapes of rows, leaves ``[anything, ...]``: a server, which checks, has no row.
        """

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        """Return where latents begin, ``[G, k]``: by default at their modes given the position."""
        return find_modes(groups, position).flat

    def init(self, groups: Groups, position: ArrayTree) -> ArrayTree:
        """Return what a client keeps for it between rounds, leaves ``[num_groups, ...]``."""
        return ()

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> ArrayTree:
        """Return all that is random in a move, leaves ``[num_groups, ...]``."""
        raise NotImplementedError

    def randomness(self, rng_key: Array, local: Local, num_groups: int) -> ArrayTree:
        """Return all that is random in a move of a model's latents."""
        return self.prepare(rng_key, num_groups, trees.num_elements(local.like.tree))

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        """Return latents moved; deterministic."""
        raise NotImplementedError


def first_locals(groups: Groups, refresh: Refresh, position: ArrayTree) -> Locals:
    """Return where latents begin that a refresh is to move, given the first position."""
    flat = refresh.begin(groups, position)
    latents, kept = groups.as_latents(flat), refresh.init(groups, position)
    all_ = jnp.ones(groups.present.shape, jnp.result_type(float))
    return Locals(latents, kept, Accepted(jnp.zeros((), jnp.int32), all_))


def per_group(rng_key: Array, num_groups: int, draw: Callable[[Array], ArrayTree]) -> ArrayTree:
    """Return what each group draws with a key of its own, leaves ``[num_groups, ...]``."""
    return jax.vmap(lambda group: draw(jax.random.fold_in(rng_key, group)))(jnp.arange(num_groups))


class _Proposals(NamedTuple):
    normals: Array  # [G, tries, k]
    squares: Array  # [G, tries], chi-squared over its degrees of freedom
    uniforms: Array  # [G, tries]


@register_dataclass
@dataclass(frozen=True, eq=False)
class Independence(Refresh):
    """Proposals of a Student t at the mode; see `independence`."""

    df: Array
    num_tries: int = field(metadata={"static": True})

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> _Proposals:
        dtype = jnp.result_type(float)

        def of_group(key: Array) -> _Proposals:
            normal, square, uniform = jax.random.split(key, 3)
            return _Proposals(
                jax.random.normal(normal, (self.num_tries, size), dtype),
                jax.random.chisquare(square, self.df, (self.num_tries,), dtype) / self.df,
                jax.random.uniform(uniform, (self.num_tries,), dtype),
            )

        return per_group(rng_key, num_groups, of_group)

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        flat, (mode, factor) = here.flat, modes_and_factors(groups, here.position)
        proposals: _Proposals = draws
        scaled = proposals.normals / jnp.sqrt(proposals.squares)[..., None]
        places = mode[:, None] + jax.vmap(solve_upper, (None, 1), 1)(factor, scaled)
        places = places.astype(flat.dtype)

        def log_weight(at: Array) -> Array:
            """Return target over proposal at ``[G, k]``, in logarithms."""
            away = jnp.einsum("gji,gj->gi", factor, at - mode)  # factor' (at - mode)
            square = jnp.sum(away**2, -1)
            log_proposal = -0.5 * (self.df + groups.size) * jnp.log1p(square / self.df)
            return groups.log_density(here.position, at) - log_proposal

        def one(carry: tuple[Array, Array, Array], proposal: tuple[Array, Array, Array]) -> tuple:
            now, weight, accepted = carry
            place, its_weight, uniform = proposal
            better = (jnp.log(uniform) < its_weight - weight) & groups.present
            moved = jnp.where(better[:, None], place, now)
            weight = jnp.where(better, its_weight, weight)
            return (moved, weight, accepted + better), None

        tries = (
            jnp.swapaxes(places, 0, 1),
            jax.lax.map(log_weight, jnp.swapaxes(places, 0, 1)),
            proposals.uniforms.T,
        )
        begin = (flat, log_weight(flat), jnp.zeros(groups.num, jnp.int32))
        (moved, _, accepted), _ = jax.lax.scan(one, begin, tries)
        return Moved(moved, accepted.astype(flat.dtype) / self.num_tries, here.kept)


def independence(df: float = 5.0, *, num_tries: int = 1) -> Refresh:
    """Propose latents from a Student t around their mode, whatever they are now.

    The proposal has the mode of the latent given position and rows, and the curvature there, which
    Newton's method finds anew in every round; Metropolis-Hastings corrects it per group. It needs
    no tuning, and suits up to about eight numbers per group.

    Parameters
    ----------
    df
        Degrees of freedom of the Student t, above zero.
    num_tries
        Proposals per round.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    if not df > 0:
        raise ValueError(f"df must be a positive number, got {df!r}.")
    degrees = jnp.asarray(df, jnp.result_type(float))
    return Independence(degrees, positive_integer(num_tries, "num_tries"))
