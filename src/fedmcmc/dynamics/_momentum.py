"""Momenta of clients with their own trajectories: private, shared, or correlated.

Client ``c`` with weight ``w_c`` starts a trajectory with
``p_c = sqrt(rho) xi + sqrt((1 - rho) / w_c) xi_c``. All clients share ``xi``; ``xi_c`` is private.
The weighted mean ``sum_c w_c p_c`` is standard normal for every ``rho``, so the clients' mean moves
like a single chain.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
from jax import Array

from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals
from fedmcmc.types import ArrayTree, Described, Number, register_dataclass


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Momentum(Described):
    """Distribution of the clients' momenta; see `shared_momentum`."""

    rho: Number
    parts: Literal["both", "shared", "private"] = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
        """Return the private part of `num` momenta, leaves ``[num, ...]``."""
        return () if self.parts == "shared" else normals(rng_key, like, num)

    def prepare_shared(self, rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
        """Return the shared part of `num` momenta, leaves ``[num, ...]``."""
        return () if self.parts == "private" else normals(rng_key, like, num)

    def correlation(self, round_: Array) -> Array:
        """Return the correlation of a round, the argument of `combine`, ``[]``."""
        return schedules.value(self.rho, round_)

    def combine(
        self,
        own_normals: ArrayTree,
        shared: ArrayTree,
        weight: Array,
        correlation: Array,
        like: ArrayTree,
    ) -> ArrayTree:
        """Return the normals of one trajectory, from one entry of each part."""
        if self.parts == "shared":
            return realize_normals(shared, like)
        private = trees.scale(
            jnp.sqrt((1 - correlation) / weight), realize_normals(own_normals, like)
        )
        if self.parts == "private":
            return private
        return trees.add_scaled(private, jnp.sqrt(correlation), realize_normals(shared, like))


def shared_momentum(rho: Number = 1.0) -> Momentum:
    """Correlate the clients' momenta: variance ``rho + (1 - rho) / w_c``, covariance ``rho``.

    Parameters
    ----------
    rho
        Correlation in [0, 1], a number or a schedule of the round. `fedmcmc.sample` and
        `fedmcmc.sweep` check the values of a schedule. For the Python numbers 0 and 1 only the
        private or the shared part is drawn, so these are part of a kernel's structure.

    Raises
    ------
    ValueError
        If `rho` lies outside [0, 1].

    References
    ----------
    Liang et al. (2024), section 4.2. Deng et al. (2021) write ``rho ** 2`` for this `rho`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> momentum = shared_momentum(0.5)
    >>> private, shared = jnp.ones(2), jnp.zeros(2)
    >>> momentum.combine(private, shared, jnp.array(0.25), momentum.correlation(0), shared).round(4)
    Array([1.4142, 1.4142], dtype=float32)
    """
    if isinstance(rho, (int, float)) and rho in (0, 1):
        return Momentum(
            jnp.asarray(rho, jnp.result_type(float)), "shared" if rho == 1 else "private"
        )
    return Momentum(schedules.number(rho, "rho", minimum=0.0, maximum=1.0), "both")


def independent_momentum() -> Momentum:
    """Draw independent momenta per client, with a variance of one over the client's weight."""
    return shared_momentum(0.0)
