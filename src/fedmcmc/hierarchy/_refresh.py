"""Refreshes: Markov chain updates of the latents of a client's groups at a fixed shared position.

Groups are independent given the position, so each group is accepted or rejected by itself. Each
group has its own random key, from its index, so its random numbers do not change if groups are
added.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.hierarchy._latents import (
    Accepted,
    Groups,
    LatentState,
    find_modes,
    modes_and_factors,
    solve_upper,
)
from fedmcmc.types import ArrayTree, Described, Local, register_dataclass


class RefreshInput(NamedTuple):
    """Input of a refresh."""

    position: ArrayTree
    flat: Array  # latents, [G, k]
    state: ArrayTree = ()  # of the refresh
    round: Array | int = 0


class RefreshResult(NamedTuple):
    """Result of a refresh."""

    flat: Array  # latents, [G, k]
    acceptance: Array  # [G], share of accepted proposals; zero for absent groups
    kept: ArrayTree = ()  # state of the refresh for the next round


class Refresh(Described):
    """Move of the groups' latents at a fixed position.

    A subclass is a frozen dataclass registered as a pytree; its methods are pure.
    """

    @property
    def exact(self) -> bool:
        """True if the update leaves the conditional distribution of the latents unchanged."""
        return True

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        """Raise `ValueError` if the model does not suit the refresh.

        The server calls this method and has no rows, so `rows` has only shapes, leaves
        ``[num_rows, ...]`` with any number of rows.
        """

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        """Return the initial latents, ``[G, k]``: by default their modes given the position."""
        return find_modes(groups, position).flat

    def init(self, groups: Groups, position: ArrayTree) -> ArrayTree:
        """Return the initial state of the refresh, leaves ``[num_groups, ...]``."""
        return ()

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> ArrayTree:
        """Return the random numbers of a move, leaves ``[num_groups, ...]``."""
        raise NotImplementedError

    def move(self, groups: Groups, draws: ArrayTree, inputs: RefreshInput) -> RefreshResult:
        """Return the moved latents; deterministic given the random numbers."""
        raise NotImplementedError


def initial_latent_state(groups: Groups, refresh: Refresh, position: ArrayTree) -> LatentState:
    """Return a client's initial state, given the initial position."""
    flat = refresh.begin(groups, position)
    latents, state = groups.as_latents(flat), refresh.init(groups, position)
    ones = jnp.ones(groups.present.shape, jnp.result_type(float))
    return LatentState(latents, state, Accepted(jnp.zeros((), jnp.int32), ones))


def draw_per_group(
    rng_key: Array, num_groups: int, draw: Callable[[Array], ArrayTree]
) -> ArrayTree:
    """Return ``draw(key)`` for each group with its own key, leaves ``[num_groups, ...]``."""
    return jax.vmap(lambda group: draw(jax.random.fold_in(rng_key, group)))(jnp.arange(num_groups))


def draw_normals(rng_key: Array, num_groups: int, shape: tuple[int, ...]) -> Array:
    """Return standard normal numbers, ``[num_groups, *shape]``."""
    dtype = jnp.result_type(float)
    normals: Array = draw_per_group(
        rng_key, num_groups, lambda key: jax.random.normal(key, shape, dtype)
    )
    return normals


class _Proposals(NamedTuple):
    normals: Array  # [G, tries, k]
    squares: Array  # [G, tries], chi-squared over its degrees of freedom
    uniforms: Array  # [G, tries]


@register_dataclass
@dataclass(frozen=True, eq=False)
class Independence(Refresh):
    """Metropolis-Hastings with Student t proposals around the mode; see `independence`."""

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

        return draw_per_group(rng_key, num_groups, of_group)

    def move(self, groups: Groups, draws: ArrayTree, inputs: RefreshInput) -> RefreshResult:
        flat, (mode, factor) = inputs.flat, modes_and_factors(groups, inputs.position)
        proposals: _Proposals = draws
        scaled = proposals.normals / jnp.sqrt(proposals.squares)[..., None]
        places = mode[:, None] + jax.vmap(solve_upper, (None, 1), 1)(factor, scaled)
        places = places.astype(flat.dtype)

        def log_weight(place: Array) -> Array:
            """Return log target minus log proposal at ``[G, k]``."""
            distance = jnp.einsum("gji,gj->gi", factor, place - mode)  # factor' (place - mode)
            square = jnp.sum(distance**2, -1)
            log_proposal = -0.5 * (self.df + groups.size) * jnp.log1p(square / self.df)
            return groups.log_density(inputs.position, place) - log_proposal

        def step(carry: tuple[Array, Array, Array], proposal: tuple[Array, Array, Array]) -> tuple:
            latents, weight, num_accepted = carry
            place, new_weight, uniform = proposal
            accepted = (jnp.log(uniform) < new_weight - weight) & groups.present
            latents = jnp.where(accepted[:, None], place, latents)
            weight = jnp.where(accepted, new_weight, weight)
            return (latents, weight, num_accepted + accepted), None

        tries = (
            jnp.swapaxes(places, 0, 1),
            jax.lax.map(log_weight, jnp.swapaxes(places, 0, 1)),
            proposals.uniforms.T,
        )
        start = (flat, log_weight(flat), jnp.zeros(groups.num, jnp.int32))
        (latents, _, num_accepted), _ = jax.lax.scan(step, start, tries)
        return RefreshResult(
            latents, num_accepted.astype(flat.dtype) / self.num_tries, inputs.state
        )


def independence(df: float = 5.0, *, num_tries: int = 1) -> Refresh:
    """Propose latents from a Student t around their mode, independently of their current values.

    The center of the Student t is the mode of the latent given position and rows. Its scale matrix
    is the inverse of minus the Hessian there. Newton's method computes both in each round.
    Metropolis-Hastings corrects the proposal per group. It needs no tuning, and suits latents with
    up to about eight elements.

    Parameters
    ----------
    df
        Degrees of freedom of the Student t, above zero.
    num_tries
        Number of proposals per round, one after the other.

    Raises
    ------
    ValueError
        If `df` or `num_tries` is out of range.
    """
    if not df > 0:
        raise ValueError(f"df must be a positive number, got {df!r}.")
    degrees = jnp.asarray(df, jnp.result_type(float))
    return Independence(degrees, positive_integer(num_tries, "num_tries"))
