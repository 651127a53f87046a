"""How far a visit throws a chain: what a relay's surrogates leave out away from the mode.

A relay multiplies the visited client's gradient by one over its probability, and thus what its
surrogate gets wrong. At the mode that is nothing, and the law on Gaussian clients knows of nothing
else; some sds away a visit of many steps may throw the chain far out, where it is worse.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import in_quotes
from fedmcmc._types import Cohort, FederatedKernel, as_functions, compiled
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

RADII = (4.0, 8.0, 12.0)
"""Posterior sds from the mean where visits begin: a chain gets to the first about once in ten
thousand rounds, and to the others where a visit has thrown it."""
MAX_GROWTH = 1.5
"""Times the first of these distances, beyond which no visit is to end."""
MAX_AXES, MAX_STIFF, MAX_NUMBERS = 32, 16, 2**23


class Visits(NamedTuple):
    """Where visits end that begin far from the posterior's mean.

    Attributes
    ----------
    growth
        Of the visit that throws a chain farthest from `RADII`'s first: its distance from the mean
        over that of where it began, both in posterior sds.
    client
        Whose visit it is.
    drift
        The root mean square of that ratio over who is visited, at the worst place of all `RADII`.
        Above one, chains that are out there go out farther on average.
    radius, thrower
        How far that place is away, and which client has most part in it.
    labels
        Labels of the clients.
    """

    growth: float
    client: int
    drift: float
    radius: float
    thrower: int
    labels: Sequence[Any]

    @property
    def safe(self) -> bool:
        """Whether no visit ends too far, and chains come back from everywhere on average."""
        return self.growth <= MAX_GROWTH and self.drift <= 1

    def __str__(self) -> str:
        """Say how far a chain is thrown."""
        far = RADII[0]
        if self.growth > MAX_GROWTH:
            return (
                f"a visit to client {in_quotes(self.labels[self.client])} takes a chain that is "
                f"{far:g} posterior sds away to {far * self.growth:.3g} sds (at most "
                f"{far * MAX_GROWTH:g} are accepted)"
            )
        return (
            f"a round takes a chain that is {self.radius:g} posterior sds away to "
            f"{self.radius * self.drift:.3g} sds (root mean square over who is visited, most of it "
            f"by client {in_quotes(self.labels[self.thrower])}), where it has to come nearer"
        )


def worst_visit(kernel: FederatedKernel, data: Any, surrogates: Gaussian) -> Visits | None:
    """Return how visits end that begin 4, 8 and 12 posterior sds from the mean, at their worst.

    Visits are of the model and its rows, all of them, and without noise: where chains are on
    average. They begin on both sides along the axes of the whitened posterior (up to 32), and along
    the directions in which clients' surrogates are stiffest (those of 16 clients, and the visited
    one's own). In a real federation that is three visits to each client, with some dozen positions.

    Returns
    -------
    Visits or None
        ``None`` for a kernel that is no relay, where no law of who is visited is known, or where
        `data` are not here but at clients elsewhere, which are not asked.

    Notes
    -----
    That the mean square distance shrinks from everywhere far out is the drift condition of Foster
    and Lyapunov, by which a chain has a stationary law with finite variances.
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
    weight = np.asarray(counts.weight, np.float64)
    lines = _lines(root, surrogates, weight)
    begun = begin(alone, data, target.mode, 0)
    ratios = []  # [radius, client, place]
    for radius in RADII:
        away = radius * lines @ root.T
        ends = _ends(
            begun,
            jnp.arange(num),
            jnp.asarray(weight, jnp.result_type(float)),
            jnp.asarray(target.target_mean + away, jnp.result_type(float)),
        )
        gaps = np.asarray(ends, np.float64) - target.target_mean
        distances = np.linalg.norm(gaps @ np.linalg.inv(root).T, axis=-1)
        ratios.append(np.where(np.isfinite(distances), distances, np.inf) / radius)
    nearest = ratios[0].max(1)
    # The last two places are along each client's own direction: no mean over clients is there.
    shares = (1 / weight / (1 / weight).sum())[:, None] * np.square(ratios)[..., :-2]
    squares = shares.sum(1)
    radius, place = np.unravel_index(squares.argmax(), squares.shape)
    return Visits(
        float(nearest.max()),
        int(nearest.argmax()),
        float(np.sqrt(squares[radius, place])),
        RADII[radius],
        int(shares[radius, :, place].argmax()),
        data.labels,
    )


def _lines(root: np.ndarray, surrogates: Gaussian, weight: np.ndarray) -> np.ndarray:
    """Return unit vectors of the whitened posterior, both ways, ``[num_clients, places, d]``.

    They are the same for all clients but for the last two, along each client's own direction.
    """
    size, num = len(root), len(weight)
    _, precision = dense(as_surrogates(surrogates))
    curvatures, vectors = np.linalg.eigh(root.T @ np.asarray(precision, np.float64) @ root)
    own, affordable = vectors[..., -1], MAX_NUMBERS // (num * size)
    num_axes = min(size, MAX_AXES, affordable)
    axes = np.eye(size)[np.linspace(0, size - 1, num_axes).astype(int)]
    stiffest = np.argsort(-curvatures[:, -1] * weight, kind="stable")[:MAX_STIFF]
    common = np.concatenate([axes, own[stiffest]])
    every = np.broadcast_to(np.concatenate([common, -common]), (num, 2 * len(common), size))
    return np.concatenate([every, own[:, None], -own[:, None]], 1)


def not_looked_at(kernel: FederatedKernel, data: Any) -> bool:
    """Return whether a relay's visits are those of clients elsewhere."""
    return bool(nodes_of(kernel, Relay)) and not isinstance(data, FederatedData)


@compiled
def _ends(begun: Begun, clients: Array, weights: Array, points: Array) -> Array:
    """Return where visits of each client that begin at its points end, ``[num, points, d]``."""
    still = trees.zeros_like(normals_of(begun.draws))

    def visits(args: tuple[Array, Array, Array]) -> Array:
        client, weight, own = args
        cohort = Cohort(client[None], weight[None], jnp.ones(1, bool))
        return jax.vmap(lambda x: run_from(x, still, *begun._replace(cohort=cohort))[0])(own)

    ends: Array = jax.lax.map(visits, (clients, weights, points))
    return ends
