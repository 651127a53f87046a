"""What the posterior would be without a client, by the weights that its own values give the draws.

Source: Peruggia (1997), case-deletion weights, for a client's rows together; Vehtari et al. (2024)
for smoothing.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, in_quotes
from fedmcmc._types import (
    ArrayTree,
    Client,
    Exact,
    Federation,
    Posterior,
    register_dataclass,
)
from fedmcmc.criticism._draws import LEAST_DRAWS, one_of, refuse_whitened, weighted_draws
from fedmcmc.criticism._others import Others
from fedmcmc.criticism._pareto import psis, tail_length
from fedmcmc.criticism._priors import expanded_prior
from fedmcmc.data import labels_of
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact import correct, threshold
from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.kernels import Question, Separate, check_model, differences
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import as_consortium

UNBOUNDED = 1e30
"""What a client sends in place of an infinite number, which would be taken for a broken message."""


class WeightedPoints(NamedTuple):
    """Points ``[num, *event]`` with the logarithms of their weights, ``[num]``, and a center.

    Moments are said of ``(point - centre) / scale``, scale ``[d]``, so that no digit is lost.
    """

    points: ArrayTree
    log_ratios: Array
    centre: ArrayTree
    scale: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class WithoutClient(Question):
    """The moments of the posterior without each client, ``[num_clients, 2 d + 2]``.

    A client fills its own row and leaves the others zero: mean ``[d]``, sd ``[d]``, k-hat and
    effective draws. So the sum holds them all.
    """

    disclosure = replace(
        Separate.disclosure,
        content="the values of the parameters without the rows of this site, and how certain "
        "they are. "
        "One answer per site, no sum over the sites",
    )

    num_clients: int = field(metadata={"static": True})

    def answer(self, content: WeightedPoints, client: Client) -> Exact:
        value, _, _ = differences(
            self.posterior, content.points, content.centre, client, gradients=False
        )
        # Where the client has no density the posterior has none either: the point has no weight.
        ratios = jnp.where(jnp.isfinite(value), content.log_ratios - value, -jnp.inf)
        log_weights, khat = psis(ratios, tail_length(ratios.shape[0]))
        weights = jnp.exp(log_weights)
        flat = jax.vmap(trees.ravel)(content.points)
        flat = (flat - trees.ravel(content.centre)) / content.scale
        mean = weights @ flat
        sd = jnp.sqrt(weights @ (flat - mean) ** 2)
        own = jnp.concatenate([mean, sd, jnp.stack([khat, 1 / jnp.sum(weights**2)])])
        own = jnp.where(jnp.isfinite(own), own, jnp.sign(own) * UNBOUNDED)
        table = jnp.zeros((self.num_clients, own.shape[0]), own.dtype)
        return Exact(table.at[client.index].set(own))

    def answer_like(self, content: WeightedPoints) -> Exact:
        size = content.scale.shape[0]
        shape = (self.num_clients, 2 * size + 2)
        return Exact(jax.ShapeDtypeStruct(shape, jnp.result_type(float)))

    def check_content(self, content: WeightedPoints, federation: Federation) -> None:
        check_model(self.posterior, one_of(content.points), federation)


@dataclass(frozen=True)
class LeftOut:
    """The posterior without each client.

    Attributes
    ----------
    mean, sd
        ``[num_clients, d]``, of the posterior without the client.
    shift
        ``[num_clients, d]``, the mean with the client minus that without it, in sds of the
        posterior with all clients.
    khat
        ``[num_clients]``, of the weights; minus infinity where they are equal.
    ess
        ``[num_clients]``, effective draws.
    reliable
        ``[num_clients]`` bool, where k-hat is below `good_k`.
    refitted
        ``[num_clients]`` bool, whose figures come of a correction without the client.
    good_k
        ``min(1 - 1 / log10(num_draws), 0.7)``.
    coordinates
        Names of the ``d`` coordinates.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of all exchanges.
    labels
        Labels of the clients, in the order of the first axes above.
    """

    mean: np.ndarray
    sd: np.ndarray
    shift: np.ndarray
    khat: np.ndarray
    ess: np.ndarray
    reliable: np.ndarray
    refitted: np.ndarray
    good_k: float
    coordinates: tuple[str, ...]
    totals: dict[str, float]
    labels: tuple[Any, ...]

    def __repr__(self) -> str:
        """Return the clients with the largest shifts, and which figures cannot be trusted."""
        largest = np.abs(self.shift).argmax(1)
        size = np.take_along_axis(self.shift, largest[:, None], 1)[:, 0]
        order = np.argsort(-np.abs(size))[:10]
        width = max(len("client"), *(len(str(self.labels[i])) for i in order))
        lines = [f"{'client':>{width}}  largest shift (posterior sds)  k-hat"]
        for i in order:
            told = f"{size[i]:+.2f} in {self.coordinates[largest[i]]}"
            trust = " unreliable" * (not self.reliable[i]) + " refitted" * bool(self.refitted[i])
            lines.append(f"{self.labels[i]!s:>{width}}  {told:<29}  {self.khat[i]:>5.2f}{trust}")
        if len(size) > len(order):
            lines.append(f"... and {len(size) - len(order)} more with smaller shifts")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, vectors as lists."""
        names = ("mean", "sd", "shift", "khat", "ess", "reliable", "refitted")
        figures = {name: getattr(self, name).tolist() for name in names}
        return {"labels": list(self.labels), **figures}


def leave_out(
    posterior: Posterior,
    data: Any,
    corrected: Any,
    *,
    surrogates: Gaussian | None = None,
    prior: Gaussian | None = None,
    rng_key: Array | None = None,
) -> LeftOut:
    """Return the posterior without each client, from one exchange.

    Each client divides the weights of the draws by its own likelihood, smooths them, and sends the
    moments that they give. If a client carries much of the information, or differs much, the k-hat
    of these weights is high and its figures are not `LeftOut.reliable`. With surrogates such
    clients are left out again, by a correction of the others' posterior.

    Parameters
    ----------
    posterior
        The model, in its own coordinates.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    corrected
        Draws of the posterior of all clients: the result of `fedmcmc.fit`, of `fedmcmc.correct` or
        of `fedmcmc.sample`, or a pytree of positions, leaves ``[num, *event]``, of equal weight.
        Weighted draws are used with their weights.
    surrogates, prior
        One Gaussian per client, and the prior's (by default its expansion at the mean of the
        draws), as for `conflict`. With them `fedmcmc.correct` asks all others about each client
        whose k-hat is too high, from the product of prior and others: an exchange or a few each.
    rng_key
        Of these corrections, by default ``jax.random.key(0)``.

    Returns
    -------
    LeftOut
        Means, sds and shifts without each client.

    Raises
    ------
    TypeError
        If `posterior` or a Gaussian is something else.
    ValueError
        If draws are too few or no draws, posterior is in whitened coordinates, or a prior comes
        without surrogates or does not fit.

    Warns
    -----
    SamplingWarning
        If the k-hat of some client is above ``min(1 - 1 / log10(num_draws), 0.7)``.

    Notes
    -----
    The weights are ``W_m / p(rows_i | theta_m)`` at draws of weight ``W_m``. Whoever sees the
    result learns how each client moves the posterior, under a secure sum too. `conflict` gives the
    answer of Gaussians.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.005 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.zeros(20), jnp.zeros(20), jnp.ones(3)])
    >>> rough = fedmcmc.Gaussian.from_moments(jnp.array(0.07), variance=jnp.array(1 / 43))
    >>> corrected = fedmcmc.correct(jax.random.key(0), posterior, data, rough)
    >>> leave_out(posterior, data, corrected).mean[2].round(2)  # without the ones
    array([0.])
    """
    refuse_whitened(posterior)
    if surrogates is None and prior is not None:
        raise ValueError("prior= is used with surrogates= alone: give both, or neither.")
    draws = weighted_draws(corrected, posterior)
    points, weights, num = draws.positions, draws.weights, len(draws.weights)
    flat = np.asarray(jax.vmap(trees.ravel)(points), np.float64)
    mean = weights @ flat
    sd = np.sqrt(weights @ (flat - mean) ** 2)
    if num < LEAST_DRAWS or not (sd > 0).all():
        raise ValueError(f"The {num} weighted draws are too few, or do not differ.")
    like = jax.tree.map(lambda leaf: leaf[0], points)
    centre = trees.cast_like(trees.unravel(jnp.asarray(mean), like), like)
    middle = np.asarray(trees.ravel(centre), np.float64)
    scale = jnp.asarray(sd, jnp.result_type(float))
    # Not smoothed: the weights without a client are, as a whole.
    ratios = jnp.asarray(draws.log_ratios - draws.log_ratios.max(), scale.dtype)
    consortium = as_consortium(data)
    num_clients, labels = consortium.federation.num_clients, labels_of(consortium)
    if surrogates is not None:
        expect(surrogates, Gaussian, "surrogates")
        prior = expanded_prior(posterior, centre) if prior is None else prior
        expect(prior, Gaussian, "prior")
        surrogates.check_clients(like, num_clients)
    asked = consortium.ask(
        WithoutClient(posterior, num_clients), WeightedPoints(points, ratios, centre, scale)
    )
    table = np.asarray(asked.value.value, np.float64)
    table = np.where(np.abs(table) >= UNBOUNDED / 2, np.sign(table) * np.inf, table)
    size, units = len(mean), np.asarray(scale, np.float64)
    means, sds = middle + table[:, :size] * units, table[:, size : 2 * size] * units
    khat, ess, good_k = table[:, -2], table[:, -1], threshold(num)
    refitted = np.zeros(num_clients, bool)
    totals = np.array([asked.rounds, asked.bits_up, asked.bits_down], float)
    for i in np.flatnonzero(~(khat < good_k)) if surrogates is not None else ():
        key = jax.random.fold_in(jax.random.key(0) if rng_key is None else as_key(rng_key), i)
        others = _others(surrogates, prior, int(i))
        again = correct(key, posterior, Others(consortium, int(i)), others, num_draws=num)
        means[i], sds[i] = (_ravel(x) for x in (again.mean(lambda x: x), again.sd(lambda x: x)))
        khat[i], ess[i], refitted[i] = again.khat, again.ess, True
        totals += [again.totals[name] for name in ("rounds", "bits_up", "bits_down")]
    found = LeftOut(
        mean=means,
        sd=sds,
        shift=(mean - means) / sd,
        khat=khat,
        ess=ess,
        reliable=khat < good_k,
        refitted=refitted,
        good_k=good_k,
        coordinates=tuple(trees.element_names(like)),
        totals=dict(zip(("rounds", "bits_up", "bits_down"), totals.tolist(), strict=True)),
        labels=labels,
    )
    bad = np.flatnonzero(~found.reliable)
    if bad.size:
        warnings.warn(
            f"leave_out: k-hat above {good_k:.2f} for {bad.size} of {num_clients} clients (first "
            f"client {in_quotes(labels[bad[0]])}: {khat[bad[0]]:.2f}): without them the posterior "
            "is so far away that the draws hardly reach it. Give surrogates= (for example from "
            "fedmcmc.surrogates.taylor): each such client is then left out by a correction.",
            SamplingWarning,
            stacklevel=2,
        )
    return found


def _others(surrogates: Any, prior: Any, index: int) -> Gaussian:
    """Return the product of the prior and all surrogates but one, dense."""
    clients = jax.vmap(as_dense)(surrogates)
    rest: Gaussian = jax.tree.map(lambda leaf: jnp.delete(leaf, index, 0).sum(0), clients)
    return rest * as_dense(prior)


def _ravel(tree: ArrayTree) -> np.ndarray:
    return np.asarray(trees.ravel(jax.tree.map(jnp.asarray, tree)), np.float64)
