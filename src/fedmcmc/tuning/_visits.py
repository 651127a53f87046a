"""Displacement of a chain by one visit of a relay that starts far from the posterior's mean.

A relay divides the visited client's gradient by the probability of the visit, and with it the error
of the client's surrogate. Gaussian clients have no such error. A few sds away from the mode, a
visit of many steps may throw the chain farther out, where the error is larger.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import in_quotes
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates
from fedmcmc.pytrees import trees
from fedmcmc.tuning._gaussian_clients import (
    as_natural_parameters,
    bare_kernels,
    build_gaussian_clients,
    replace_minibatches,
)
from fedmcmc.tuning._linearized import (
    PreparedRound,
    normals_of,
    prepare,
    run_from,
    with_single_client,
)
from fedmcmc.types import Cohort, FederatedKernel, as_functions, compiled

RADII = (4.0, 8.0, 12.0)
"""Distances from the mean at which visits start, in posterior sds. A chain reaches the first about
once in ten thousand rounds, and the others after a visit that threw it out."""
MAX_GROWTH = 1.5
"""Limit on the distance after a visit, in units of the distance before it."""
MAX_AXES, MAX_STIFF_CLIENTS, MAX_ELEMENTS = 32, 16, 2**23


class WorstVisits(NamedTuple):
    """Visits that throw a chain farthest; see `find_worst_visits`.

    `growth` is the largest ratio of the distance after a visit to the distance before it, for
    visits that start at the first of `RADII`. `drift` is the root mean square of the ratio over the
    random choice of the client, at the starting point where it is largest. If `drift` exceeds
    one, a chain at this point moves farther out on average.
    """

    growth: float
    client: int  # index of the client with the largest growth
    drift: float
    radius: float  # distance of the starting point of `drift` from the mean, in posterior sds
    drift_client: int  # index of the client that contributes most to `drift`
    labels: Sequence[Any]

    @property
    def are_safe(self) -> bool:
        """True if no visit ends too far out, and chains return on average."""
        return self.growth <= MAX_GROWTH and self.drift <= 1

    def __str__(self) -> str:
        """Return the displacement that is too large, as a clause."""
        start = RADII[0]
        if self.growth > MAX_GROWTH:
            return (
                f"a visit to client {in_quotes(self.labels[self.client])} takes a chain from "
                f"{start:g} posterior sds to {start * self.growth:.3g} sds (the limit is "
                f"{start * MAX_GROWTH:g})"
            )
        return (
            f"a round takes a chain from {self.radius:g} posterior sds to "
            f"{self.radius * self.drift:.3g} sds (root mean square over the visited client, most "
            f"of it by client {in_quotes(self.labels[self.drift_client])}) instead of nearer to "
            f"the mean"
        )


def find_worst_visits(
    kernel: FederatedKernel, data: object, surrogates: Gaussian
) -> WorstVisits | None:
    """Return the visits that throw a chain farthest, from 4, 8 and 12 posterior sds off the mean.

    Visits use the model, all rows, and no noise, so they move a chain by its mean displacement.
    They start in both directions along up to 32 axes of the whitened posterior, and along the
    stiffest directions of 16 surrogates and of the visited client's surrogate. In a real federation
    they would be three visits to each client, with a few dozen positions each.

    If the mean square distance shrinks from every point far out, the chain satisfies the drift
    condition of Foster and Lyapunov and has a stationary distribution with finite variances.

    Returns
    -------
    WorstVisits or None
        ``None`` if the kernel is no relay, if the distribution of visits is unknown, or if the rows
        are not in `data`.
    """
    relay = _relay_in(kernel)
    if relay is None or not isinstance(data, FederatedData):
        return None
    counts = relay.participation.counts(data.num_clients)
    if counts is None:
        return None
    target = build_gaussian_clients(relay, data, surrogates, None)
    size, num = len(target.target_mean), data.num_clients
    alone = with_single_client(replace_minibatches(relay, data.federation, None, size)[0])
    root = np.linalg.cholesky(target.target_covariance)
    weight = np.asarray(counts.weight, np.float64)
    directions = _directions(root, surrogates, weight)
    prepared = prepare(alone, data, target.mode, 0)
    ratios = []  # [radius, client, point]
    for radius in RADII:
        away = radius * directions @ root.T
        ends = _ends(
            prepared,
            jnp.arange(num),
            jnp.asarray(weight, jnp.result_type(float)),
            jnp.asarray(target.target_mean + away, jnp.result_type(float)),
        )
        gaps = np.asarray(ends, np.float64) - target.target_mean
        distances = np.linalg.norm(gaps @ np.linalg.inv(root).T, axis=-1)
        ratios.append(np.where(np.isfinite(distances), distances, np.inf) / radius)
    nearest = ratios[0].max(1)
    # The last two points differ between clients, so they have no mean over clients.
    shares = (1 / weight / (1 / weight).sum())[:, None] * np.square(ratios)[..., :-2]
    squares = shares.sum(1)
    radius, point = np.unravel_index(squares.argmax(), squares.shape)
    return WorstVisits(
        float(nearest.max()),
        int(nearest.argmax()),
        float(np.sqrt(squares[radius, point])),
        RADII[radius],
        int(shares[radius, :, point].argmax()),
        data.labels,
    )


def _relay_in(kernel: FederatedKernel) -> FederatedKernel | None:
    """Return the first kernel inside all transforms that visits clients, if there is one."""
    bare = bare_kernels(as_functions(kernel))
    return next((node for node in bare if node.traits.visits_clients), None)


def has_unchecked_visits(kernel: FederatedKernel, data: object) -> bool:
    """Return true if the kernel is a relay whose visits are not simulated, for lack of rows."""
    return _relay_in(kernel) is not None and not isinstance(data, FederatedData)


def _directions(root: np.ndarray, surrogates: Gaussian, weight: np.ndarray) -> np.ndarray:
    """Return unit vectors of the whitened posterior, both ways, ``[num_clients, points, d]``.

    All clients share them except for the last two, which are the client's stiffest direction.
    """
    size, num = len(root), len(weight)
    _, precision = as_natural_parameters(as_surrogates(surrogates))
    curvatures, vectors = np.linalg.eigh(root.T @ np.asarray(precision, np.float64) @ root)
    stiffest, affordable = vectors[..., -1], MAX_ELEMENTS // (num * size)
    num_axes = min(size, MAX_AXES, affordable)
    axes = np.eye(size)[np.linspace(0, size - 1, num_axes).astype(int)]
    order = np.argsort(-curvatures[:, -1] * weight, kind="stable")
    common = np.concatenate([axes, stiffest[order[:MAX_STIFF_CLIENTS]]])
    both_ways = np.concatenate([common, -common])
    shared = np.broadcast_to(both_ways, (num, *both_ways.shape))
    return np.concatenate([shared, stiffest[:, None], -stiffest[:, None]], 1)


@compiled
def _ends(prepared: PreparedRound, clients: Array, weights: Array, points: Array) -> Array:
    """Return the ends of each client's visits from its points, ``[num_clients, points, d]``."""
    zero = trees.zeros_like(normals_of(prepared.draws))

    def visit(args: tuple[Array, Array, Array]) -> Array:
        client, weight, starts = args
        cohort = Cohort(client[None], weight[None], jnp.ones(1, bool))
        visited = prepared._replace(cohort=cohort)
        return jax.vmap(lambda x: run_from(x, zero, *visited)[0])(starts)

    ends: Array = jax.lax.map(visit, (clients, weights, points))
    return ends
