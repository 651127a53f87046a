"""Momenta of clients that move on their own: private, shared, or correlated to any degree.

Client ``c`` with weight ``w_c`` starts a trajectory with
``p_c = sqrt(rho) xi + sqrt((1 - rho) / w_c) xi_c``, where ``xi`` is the same for all clients and
``xi_c`` is its own. The weighted mean ``sum_c w_c p_c`` is then standard normal for every ``rho``:
the mean of the clients moves as one chain would.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Number, Static
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realise_normals

__all__ = ["Momentum", "independent_momentum", "shared_momentum"]


class Momentum(NamedTuple):
    """How clients draw their momenta.

    Attributes
    ----------
    prepare
        ``(rng_key, like, num) -> draws``, leaves ``[num, ...]``: the client's own part.
    prepare_shared
        ``(rng_key, like, num) -> draws``, leaves ``[num, ...]``: the part of all clients.
    combine
        ``(own, shared, weight, correlation, like) -> normals`` of one trajectory, from one entry
        of each.
    correlation
        ``round -> []`` that is handed to `combine`.
    """

    prepare: Any
    prepare_shared: Any
    combine: Any
    correlation: Any


def shared_momentum(rho: Number = 1.0) -> Momentum:
    """Momenta with correlation: covariance ``rho + (1 - rho) / w_c``, cross-covariance ``rho``.

    Parameters
    ----------
    rho
        In [0, 1], a number or a schedule of the round (whose values are not checked). For the
        Python numbers 0 and 1 only what is needed is drawn, so these are part of a kernel's
        structure.

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
        kind = "shared" if rho == 1 else "private"
        return _momentum(kind, jnp.asarray(rho, jnp.result_type(float)))
    return _momentum("both", schedules.number(rho, "rho", minimum=0.0, maximum=1.0))


def independent_momentum() -> Momentum:
    """Each client draws its own momenta, of variance one over its weight."""
    return shared_momentum(0.0)


def _momentum(kind: str, rho: Any) -> Momentum:
    static = Static(kind)
    return Momentum(
        Partial(_prepare_unless, static, Static("shared")),
        Partial(_prepare_unless, static, Static("private")),
        Partial(_combine, static),
        Partial(schedules.value, rho),
    )


def _prepare_unless(
    kind: Static[str], unless: Static[str], rng_key: Array, like: ArrayTree, num: int
) -> ArrayTree:
    return () if kind == unless else normals(rng_key, like, num)


def _combine(
    kind: Static[str],
    own: ArrayTree,
    shared: ArrayTree,
    weight: Array,
    correlation: Array,
    like: ArrayTree,
) -> ArrayTree:
    if kind.value == "shared":
        return realise_normals(shared, like)
    private = trees.scale(jnp.sqrt((1 - correlation) / weight), realise_normals(own, like))
    if kind.value == "private":
        return private
    return trees.add_scaled(private, jnp.sqrt(correlation), realise_normals(shared, like))
