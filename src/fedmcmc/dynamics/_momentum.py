"""Momenta of clients that move on their own: private, shared, or correlated to any degree.

Client ``c`` with weight ``w_c`` starts a trajectory with
``p_c = sqrt(rho) xi + sqrt((1 - rho) / w_c) xi_c``, where ``xi`` is the same for all clients and
``xi_c`` is its own. The weighted mean ``sum_c w_c p_c`` is then standard normal for every ``rho``:
the mean of the clients moves as one chain would.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Described, Number, register_dataclass
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Momentum(Described):
    """How clients draw their momenta; see `shared_momentum`."""

    rho: Any
    parts: Literal["both", "shared", "private"] = field(metadata={"static": True})

    def prepare(self, rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
        """Return the client's own part of `num` momenta, leaves ``[num, ...]``."""
        return () if self.parts == "shared" else normals(rng_key, like, num)

    def prepare_shared(self, rng_key: Array, like: ArrayTree, num: int) -> ArrayTree:
        """Return the part of all clients, leaves ``[num, ...]``."""
        return () if self.parts == "private" else normals(rng_key, like, num)

    def correlation(self, round_: Array) -> Array:
        """Return what `combine` is given in a round, ``[]``."""
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
    """Momenta with correlation: covariance ``rho + (1 - rho) / w_c``, cross-covariance ``rho``.

    Parameters
    ----------
    rho
        In [0, 1], a number or a schedule of the round. Values of a schedule are checked where they
        are tabulated (`fedmcmc.sample`, `fedmcmc.sweep`). For the Python numbers 0 and 1 only what
        is needed is drawn, so these are part of a kernel's structure.

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
    >>> own, shared = jnp.ones(2), jnp.zeros(2)
    >>> momentum.combine(own, shared, jnp.array(0.25), momentum.correlation(0), own).round(4)
    Array([1.4142, 1.4142], dtype=float32)
    """
    if isinstance(rho, (int, float)) and rho in (0, 1):
        return Momentum(
            jnp.asarray(rho, jnp.result_type(float)), "shared" if rho == 1 else "private"
        )
    return Momentum(schedules.number(rho, "rho", minimum=0.0, maximum=1.0), "both")


def independent_momentum() -> Momentum:
    """Each client draws its own momenta, of variance one over its weight."""
    return shared_momentum(0.0)
