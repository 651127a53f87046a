"""Posterior without each client, by case-deletion weights.

Source: Peruggia (1997), here for all rows of a client; Vehtari et al. (2024) for smoothing.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, in_quotes
from fedmcmc.criticism._draws import (
    MIN_DRAWS,
    PosteriorDraws,
    position_shapes,
    refuse_whitened,
    weighted_draws,
)
from fedmcmc.criticism._pareto import psis, tail_length
from fedmcmc.criticism._priors import expanded_prior
from fedmcmc.criticism._wrapped import LeaveOneOutConsortium
from fedmcmc.data import FederatedData, labels_of
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact import correct, khat_threshold
from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.kernels import PerClientQuestion, Question, check_model, differences
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import (
    ArrayTree,
    Client,
    Federation,
    Posterior,
    Uncompressed,
    register_dataclass,
)

UNBOUNDED = 1e30
"""Number that a client sends instead of infinity, since messages must be finite."""


class WeightedPoints(NamedTuple):
    """Points ``[num, *event]`` with log weights ``[num]``.

    Moments refer to ``(point - center) / scale``, with scale ``[d]``, to keep digits.
    """

    points: ArrayTree
    log_ratios: Array
    center: ArrayTree
    scale: Array


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class WithoutClient(Question):
    """Moments of the posterior without each client, ``[num_clients, 2 d + 2]``.

    A client fills its row with mean ``[d]``, sd ``[d]``, k-hat and effective draws, and sends zeros
    in all other rows, so that the sum has all rows.
    """

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="the values of the parameters without the rows of this site, and how certain "
        "they are. One answer per site, no sum over the sites",
    )

    num_clients: int = field(metadata={"static": True})

    def answer(self, content: WeightedPoints, client: Client) -> Uncompressed:
        value, _, _ = differences(
            self.posterior, content.points, content.center, client, gradients=False
        )
        # If a client has no density at a point, neither has the posterior: the weight is zero.
        ratios = jnp.where(jnp.isfinite(value), content.log_ratios - value, -jnp.inf)
        log_weights, k_hat = psis(ratios, tail_length(ratios.shape[0]))
        weights = jnp.exp(log_weights)
        flat = jax.vmap(trees.ravel)(content.points)
        flat = (flat - trees.ravel(content.center)) / content.scale
        mean = weights @ flat
        sd = jnp.sqrt(weights @ (flat - mean) ** 2)
        row = jnp.concatenate([mean, sd, jnp.stack([k_hat, 1 / jnp.sum(weights**2)])])
        row = jnp.where(jnp.isfinite(row), row, jnp.sign(row) * UNBOUNDED)
        table = jnp.zeros((self.num_clients, row.shape[0]), row.dtype)
        return Uncompressed(table.at[client.index].set(row))

    def answer_like(self, content: WeightedPoints) -> Uncompressed:
        size = content.scale.shape[0]
        shape = (self.num_clients, 2 * size + 2)
        return Uncompressed(jax.ShapeDtypeStruct(shape, jnp.result_type(float)))

    def check_content(self, content: WeightedPoints, federation: Federation) -> None:
        check_model(self.posterior, position_shapes(content.points), federation)


@dataclass(frozen=True)
class LeftOut:
    """Posterior without each client.

    Attributes
    ----------
    mean, sd
        ``[num_clients, d]``, moments of the posterior without the client.
    shift
        ``[num_clients, d]``, mean with the client minus mean without it, in sds of the posterior
        with all clients.
    k_hat
        ``[num_clients]``, tail shape of the weights; minus infinity if the weights are equal.
    ess
        ``[num_clients]``, effective draws.
    reliable
        ``[num_clients]`` bool, true if k-hat is below `good_k`.
    refitted
        ``[num_clients]`` bool, true if the figures come from a correction without the client.
    good_k
        Limit of k-hat, ``min(1 - 1 / log10(num_draws), 0.7)``.
    coordinates
        Names of the ``d`` coordinates.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of all exchanges.
    labels
        Labels of the clients, in the order of axis 0.
    """

    mean: np.ndarray
    sd: np.ndarray
    shift: np.ndarray
    k_hat: np.ndarray
    ess: np.ndarray
    reliable: np.ndarray
    refitted: np.ndarray
    good_k: float
    coordinates: tuple[str, ...]
    totals: dict[str, float]
    labels: tuple[Any, ...]

    def __repr__(self) -> str:
        """Return a table of the clients with the largest shifts."""
        largest = np.abs(self.shift).argmax(1)
        size = np.take_along_axis(self.shift, largest[:, None], 1)[:, 0]
        order = np.argsort(-np.abs(size))[:10]
        width = max(len("client"), *(len(str(self.labels[i])) for i in order))
        lines = [f"{'client':>{width}}  largest shift (posterior sds)  k-hat"]
        for i in order:
            shift = f"{size[i]:+.2f} in {self.coordinates[largest[i]]}"
            trust = " unreliable" * (not self.reliable[i]) + " refitted" * bool(self.refitted[i])
            lines.append(f"{self.labels[i]!s:>{width}}  {shift:<29}  {self.k_hat[i]:>5.2f}{trust}")
        if len(size) > len(order):
            lines.append(f"... and {len(size) - len(order)} more with smaller shifts")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, vectors as lists."""
        names = ("mean", "sd", "shift", "k_hat", "ess", "reliable", "refitted")
        figures = {name: getattr(self, name).tolist() for name in names}
        return {"labels": list(self.labels), **figures}


def leave_out(
    posterior: Posterior,
    data: FederatedData | Consortium,
    corrected: PosteriorDraws,
    *,
    surrogates: Gaussian | None = None,
    prior: Gaussian | None = None,
    rng_key: Array | None = None,
) -> LeftOut:
    """Compute the posterior without each client, in one exchange.

    Client i divides the weights of the draws by its likelihood ``p(rows_i | theta_m)``, smooths the
    result, and sends the weighted moments. If its k-hat is high and there are surrogates,
    `fedmcmc.correct` samples the posterior without it.

    Parameters
    ----------
    posterior, data, corrected
        See `loo`: model, data and draws of the posterior of all clients. Weighted draws keep their
        weights.
    surrogates, prior, rng_key
        Gaussians as in `conflict` (`prior` is an expansion by default), and key for corrections.

    Raises
    ------
    TypeError, ValueError
        If an argument has the wrong type, draws are too few, `posterior` is whitened, or `prior`
        comes without surrogates or does not match.

    Warns
    -----
    SamplingWarning
        If the k-hat of a client is above ``min(1 - 1 / log10(num_draws), 0.7)``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.005 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.zeros(20), jnp.zeros(20), jnp.ones(3)])
    >>> rough = fedmcmc.Gaussian.from_moments(jnp.array(0.07), variance=jnp.array(1 / 43))
    >>> corrected = fedmcmc.correct(jax.random.key(0), posterior, data, rough)
    >>> leave_out(posterior, data, corrected).mean[2].round(2)  # without the ones
    array([0.])
    """
    refuse_whitened(posterior)
    if surrogates is None and prior is not None:
        raise ValueError("prior= needs surrogates=: pass both, or neither.")
    draws = weighted_draws(corrected, posterior)
    points, weights, num = draws.positions, draws.weights, len(draws.weights)
    flat = np.asarray(jax.vmap(trees.ravel)(points), np.float64)
    mean = weights @ flat
    sd = np.sqrt(weights @ (flat - mean) ** 2)
    if num < MIN_DRAWS or not (sd > 0).all():
        raise ValueError(
            f"leave_out needs at least {MIN_DRAWS} draws whose coordinates all vary, got {num} "
            f"draws with {int((sd > 0).sum())} of {len(sd)} coordinates that vary."
        )
    like = jax.tree.map(lambda leaf: leaf[0], points)
    center = trees.cast_like(trees.unravel(jnp.asarray(mean), like), like)
    middle = np.asarray(trees.ravel(center), np.float64)
    scale = jnp.asarray(sd, jnp.result_type(float))
    # Not smoothed here: clients smooth the weights without them.
    ratios = jnp.asarray(draws.log_ratios - draws.log_ratios.max(), scale.dtype)
    consortium = as_consortium(data)
    num_clients, labels = consortium.federation.num_clients, labels_of(consortium)
    if surrogates is not None:
        expect(surrogates, Gaussian, "surrogates")
        prior = expanded_prior(posterior, center) if prior is None else prior
        expect(prior, Gaussian, "prior")
        surrogates.check_clients(like, num_clients)
    answer = consortium.ask(
        WithoutClient(posterior, num_clients), WeightedPoints(points, ratios, center, scale)
    )
    table = np.asarray(answer.value.value, np.float64)
    table = np.where(np.abs(table) >= UNBOUNDED / 2, np.sign(table) * np.inf, table)
    size, units = len(mean), np.asarray(scale, np.float64)
    means, sds = middle + table[:, :size] * units, table[:, size : 2 * size] * units
    k_hat, ess, good_k = table[:, -2], table[:, -1], khat_threshold(num)
    refitted = np.zeros(num_clients, bool)
    totals = np.array([answer.rounds, answer.bits_up, answer.bits_down], float)
    for i in np.flatnonzero(~(k_hat < good_k)) if surrogates is not None else ():
        key = jax.random.fold_in(jax.random.key(0) if rng_key is None else as_key(rng_key), i)
        remaining = LeaveOneOutConsortium(consortium, int(i))
        cavity = _cavity(surrogates, prior, int(i))
        refit = correct(key, posterior, remaining, cavity, num_draws=num)
        unconstrained = replace(refit, constrain_fn=None)
        means[i], sds[i] = _ravel(unconstrained.mean()), _ravel(unconstrained.sd())
        k_hat[i], ess[i], refitted[i] = refit.k_hat, refit.ess, True
        totals += [refit.totals[name] for name in ("rounds", "bits_up", "bits_down")]
    result = LeftOut(
        mean=means,
        sd=sds,
        shift=(mean - means) / sd,
        k_hat=k_hat,
        ess=ess,
        reliable=k_hat < good_k,
        refitted=refitted,
        good_k=good_k,
        coordinates=tuple(trees.element_names(like)),
        totals=dict(zip(("rounds", "bits_up", "bits_down"), totals.tolist(), strict=True)),
        labels=labels,
    )
    bad = np.flatnonzero(~result.reliable)
    if bad.size:
        warnings.warn(
            f"leave_out: k-hat above {good_k:.2f} for {bad.size} of {num_clients} clients (first "
            f"client {in_quotes(labels[bad[0]])}: {k_hat[bad[0]]:.2f}): the draws hardly cover the "
            "posterior without such a client. Pass surrogates= (for example from "
            "fedmcmc.surrogates.taylor) to sample that posterior by a correction.",
            SamplingWarning,
            stacklevel=2,
        )
    return result


def _cavity(surrogates: Any, prior: Any, index: int) -> Gaussian:
    """Return the dense product of the prior and all surrogates but one."""
    clients = jax.vmap(as_dense)(surrogates)
    num_clients = jax.tree.leaves(clients)[0].shape[0]
    others = np.delete(np.arange(num_clients), index)
    product: Gaussian = jax.tree.map(lambda leaf: leaf[others].sum(0), clients)
    return product * as_dense(prior)


def _ravel(tree: ArrayTree) -> np.ndarray:
    return np.asarray(trees.ravel(jax.tree.map(jnp.asarray, tree)), np.float64)
