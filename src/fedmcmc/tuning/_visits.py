"""How far a visit throws a chain: what a relay's surrogates leave out away from the mode.

A relay multiplies the visited client's gradient by one over its probability, and thus what its
surrogate gets wrong. At the mode that is nothing, and the law on Gaussian clients knows of nothing
else; some sds away a visit of many steps may throw the chain far out, where it is worse.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import Cohort, FederatedKernel, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.kernels import Relay
from fedmcmc.pytrees import trees
from fedmcmc.tuning._gaussian_clients import (
    dense,
    nodes_of,
    on_gaussian_clients,
    without_minibatches,
)
from fedmcmc.tuning._linearized import Alone, Begun, begin, normals_of, run_from

FAR = 4.0
"""Posterior sds from the mean: a chain gets there about once in ten thousand rounds."""
MOST_GROWTH = 1.5
"""Times that distance, beyond which no visit is to end."""
MOST_AXES, MOST_NUMBERS = 32, 2**23


class Visits(NamedTuple):
    """Where the visit ends that throws a chain farthest.

    Attributes
    ----------
    growth
        Its distance from the posterior's mean, over that of where it began; both in posterior sds.
    client
        Whose visit it is.
    """

    growth: float
    client: int

    @property
    def safe(self) -> bool:
        """Whether it ends near enough."""
        return self.growth <= MOST_GROWTH


def worst_visit(kernel: FederatedKernel, data: Any, surrogates: Gaussian) -> Visits | None:
    """Return the worst of all clients' visits that begin 4 posterior sds from the mean.

    Visits are of the model and its rows, all of them, and without noise: where chains are on
    average. They begin on both sides along the axes of the whitened posterior (up to 32), and along
    the direction in which the client's own surrogate is stiffest. In a real federation that is one
    visit to each client, with some dozen positions.

    Returns
    -------
    Visits or None
        ``None`` for a kernel that is no relay, where no law of who is visited is known, or where
        `data` are not here but at clients elsewhere, which are not asked.
    """
    relays = nodes_of(as_functions(kernel), Relay)
    if not relays or not isinstance(data, FederatedData):
        return None
    counts = relays[0].participation.counts(data.num_clients)
    if counts is None:
        return None
    target = on_gaussian_clients(relays[0], data, surrogates, None)
    size, num = len(target.target_mean), data.num_clients
    whole: Any = without_minibatches(relays[0], data.federation, None, size)[0]
    alone = replace(whole, participation=Alone(weighted=whole.participation.weighted))
    root = np.linalg.cholesky(target.target_covariance)
    _, precision = dense(as_surrogates(surrogates))
    stiffest = np.linalg.eigh(root.T @ np.asarray(precision, np.float64) @ root)[1][..., -1:]
    num_axes = min(size, MOST_AXES, MOST_NUMBERS // (num * size))
    axes = np.eye(size)[np.linspace(0, size - 1, num_axes).astype(int)]
    lines = np.concatenate(
        [np.broadcast_to(axes, (num, *axes.shape)), np.swapaxes(stiffest, 1, 2)], 1
    )
    away = FAR * np.concatenate([lines, -lines], 1) @ root.T  # [num_clients, points, d]
    begun = begin(alone, data, target.mode, 0)
    ends = _ends(
        begun,
        jnp.arange(num),
        jnp.asarray(counts.weight, jnp.result_type(float)),
        jnp.asarray(target.target_mean + away, jnp.result_type(float)),
    )
    gaps = np.asarray(ends, np.float64) - target.target_mean
    distances = np.linalg.norm(gaps @ np.linalg.inv(root).T, axis=-1)
    worst = np.where(np.isfinite(distances), distances, np.inf).max(1)
    return Visits(float(worst.max()) / FAR, int(worst.argmax()))


def not_looked_at(kernel: FederatedKernel, data: Any) -> bool:
    """Return whether a relay's visits are those of clients elsewhere."""
    return bool(nodes_of(kernel, Relay)) and not isinstance(data, FederatedData)


@jax.jit
def _ends(begun: Begun, clients: Array, weights: Array, points: Array) -> Array:
    """Return where visits of each client that begin at its points end, ``[num, points, d]``."""
    still = trees.zeros_like(normals_of(begun.draws))

    def visits(args: tuple[Array, Array, Array]) -> Array:
        client, weight, own = args
        cohort = Cohort(client[None], weight[None], jnp.ones(1, bool))
        return jax.vmap(lambda x: run_from(x, still, *begun._replace(cohort=cohort))[0])(own)

    ends: Array = jax.lax.map(visits, (clients, weights, points))
    return ends
