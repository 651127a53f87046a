"""Metropolis kernels that propose from an approximation of the posterior; exact.

The weight of a point is the density of the posterior over the density of the approximation. Clients
send their log likelihoods at one or many proposals per chain, and no gradients.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.compression import Identity
from fedmcmc.gaussian import WHOLE, Gaussian, Mixture, StandardDraws, defensive, moments_of
from fedmcmc.kernels._adjusted import AdjustedKernel, Proposed, probability, repeat
from fedmcmc.kernels._evaluations import Points
from fedmcmc.kernels._shared import as_constant
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Disclosure,
    FederatedKernel,
    Federation,
    MetropolisReport,
    Posterior,
    as_functions,
    register_dataclass,
)


class _WeightedDraws(NamedTuple):
    proposals: StandardDraws
    uniforms: Array  # [num + 1], for the choice among the proposals


class _WeightedServer(NamedTuple):
    started: Array  # [] bool, false before the start is evaluated
    log_weight: Array  # of the chain's position
    acceptance: Array  # probability with which the chain moved
    num_clients: Array


def _refuse_compression(kernel: object, compressor: object) -> None:
    if not isinstance(compressor, Identity):
        raise ValueError(
            "Clients of this kernel send log likelihoods only, which must be exact, so there is "
            "nothing to compress. Gradients can be compressed: use fedmcmc.hmc with "
            "top_k(..., error_feedback=False)."
        )


@dataclass(frozen=True, eq=False, repr=False)
class WeightedKernel(AdjustedKernel):
    """Kernel whose proposals are draws from a mixture over raveled positions."""

    proposal: Mixture

    traits = replace(AdjustedKernel.traits, check_compressor=_refuse_compression)
    disclosure = Disclosure(
        "log likelihoods at positions that the server proposes", hidden_in_sums=True
    )

    @property
    def num_proposals(self) -> int:
        """Number of proposals per chain and round."""
        return 1

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _WeightedServer]:
        size, dim = trees.num_elements(position), self.proposal.means.shape[1]
        if size != dim:
            raise ValueError(
                f"The approximation has dimension {dim}, but a position has {size} numbers. {WHOLE}"
            )
        largest = int(np.argmax(self.proposal.weights))
        centre = trees.unravel(self.proposal.means[largest], position)
        position, centre = self.check_start(position, centre, federation)
        dtype = jnp.result_type(float)
        server = _WeightedServer(
            started=jnp.zeros((), bool),
            log_weight=jnp.zeros((), dtype),
            acceptance=jnp.ones((), dtype),
            num_clients=jnp.asarray(federation.num_clients, dtype),
        )
        points = Points(repeat(position, self.num_proposals), centre)
        return Broadcast(jnp.zeros((), jnp.int32), position, points), server

    @in_single_precision
    def prepare_server(self, rng_key: Array, like: Broadcast) -> _WeightedDraws:
        proposal_key, uniform_key = jax.random.split(rng_key)
        num, dtype = self.num_proposals, jnp.result_type(float)
        return _WeightedDraws(
            self.proposal.standard_draws(proposal_key, num),
            jax.random.uniform(uniform_key, (num + 1,), dtype),
        )

    def choose(self, log_weights: Array, uniforms: Array) -> tuple[Array, Array]:
        """Return the index of the next position, ``[]`` int32, and the probability of a move.

        `log_weights` is ``[num + 1]``; entry 0 belongs to the chain's position.
        """
        raise NotImplementedError

    def propose(self, draws: StandardDraws, position: Array) -> Array:
        """Return the proposals of a chain at a raveled position, ``[num, d]``."""
        return self.proposal.placed(draws)

    @in_single_precision
    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _WeightedServer,
        total: Proposed,
    ) -> tuple[Broadcast, _WeightedServer, MetropolisReport]:
        draws, old, points = rng_key, server_state, broadcast.extra.points
        if trees.is_key(draws):
            draws = self.prepare_server(draws, trees.shapes_of(broadcast))
        densities = self.read_sum(points, total, old.num_clients)
        flat = jax.vmap(trees.ravel)(points)
        log_density = densities.log_density
        proposal_density = jax.vmap(self.proposal.log_density_of)(flat).astype(log_density.dtype)
        # The first round evaluates the start and chooses it.
        log_weight = jnp.where(old.started, old.log_weight, log_density[0] - proposal_density[0])
        log_weights = jnp.concatenate([log_weight[None], log_density - proposal_density])
        chosen, moves = self.choose(log_weights, draws.uniforms)
        chosen = jnp.where(old.started, chosen, 0)
        candidates = jax.tree.map(
            lambda x, y: jnp.concatenate([x[None], y]), broadcast.position, points
        )
        position = jax.tree.map(lambda leaf: leaf[chosen], candidates)
        flat_next = self.propose(draws.proposals, trees.ravel(position))
        next_points = trees.cast_like(
            jax.vmap(lambda x: trees.unravel(x, position))(flat_next), points
        )
        server = _WeightedServer(
            jnp.ones((), bool),
            log_weights[chosen],
            jnp.where(old.started, moves, old.acceptance),
            old.num_clients,
        )
        server, position, next_points = trees.select(
            densities.is_complete,
            (server, position, next_points),
            (old, broadcast.position, points),
        )
        moved = broadcast._replace(
            round=broadcast.round + 1,
            position=position,
            extra=broadcast.extra._replace(points=next_points),
        )
        return (
            moved,
            server,
            MetropolisReport(server.acceptance, densities.is_complete, jnp.zeros((), bool)),
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class GaussianMetropolis(WeightedKernel):
    """Metropolis kernel with one proposal per round; see `gaussian_mh`."""

    correlation: ArrayTree  # [], or () for independent proposals

    @property
    def name(self) -> str:
        return "gaussian_mh"

    def choose(self, log_weights: Array, uniforms: Array) -> tuple[Array, Array]:
        accepted = probability(log_weights[1] - log_weights[0])
        return (uniforms[0] < accepted).astype(jnp.int32), accepted

    def propose(self, draws: StandardDraws, position: Array) -> Array:
        fresh = super().propose(draws, position)
        if trees.is_empty(self.correlation):
            return fresh
        correlation = trees.cast(self.correlation, fresh)
        mean = self.proposal.means[0]
        share = jnp.sqrt(1 - jnp.square(correlation))
        correlated_mean = mean + correlation * (position.astype(mean.dtype) - mean)
        return correlated_mean[None] + share * (fresh - mean[None])


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class MultipleTry(WeightedKernel):
    """Kernel that chooses among many proposals by their weights; see `multiple_try`."""

    num_tries: int = field(metadata={"static": True})

    @property
    def name(self) -> str:
        return "multiple_try"

    @property
    def num_proposals(self) -> int:
        return self.num_tries - 1

    def choose(self, log_weights: Array, uniforms: Array) -> tuple[Array, Array]:
        tiny = jnp.finfo(uniforms.dtype).tiny
        gumbel = -jnp.log(-jnp.log(jnp.maximum(uniforms, tiny)))
        # If all weights are minus infinity, the chain does not move.
        shares = jax.nn.softmax(log_weights)
        moves = jnp.where(jnp.isnan(shares[0]), 0, 1 - shares[0])
        return jnp.argmax(log_weights + gumbel).astype(jnp.int32), moves


def gaussian_mh(
    posterior: Posterior,
    approximation: Gaussian | Mixture,
    *,
    correlation: float | Array = 0.0,
    tail: float = 0.2,
) -> FederatedKernel:
    """Build a Metropolis sampler that proposes from an approximation of the posterior; exact.

    In a round all clients send their log likelihoods at one proposal per chain. The kernel accepts
    it with the ratio of its weight (posterior over approximation) to the weight of the chain's
    position; ``samples.info["acceptance"]`` holds the probabilities. If the variance of the weights
    is infinite (k-hat above 0.7), chains get stuck: use `fedmcmc.hmc`. If a message is missing, the
    next round repeats the round.

    Parameters
    ----------
    posterior, approximation
        Model, and approximation of the whole posterior: a `Gaussian`, such as ``surrogates.sum()``
        times the prior's Gaussian, or a `fedmcmc.Mixture` over raveled positions.
    correlation
        Correlation in [0, 1) of a proposal ``y = m + correlation * (x - m) + sqrt(1 -
        correlation**2) * C normal`` with the position ``x`` (preconditioned Crank-Nicolson; Cotter
        et al. 2013). Zero draws proposals independently.
    tail
        Share of independent proposals from a t distribution with 5 degrees of freedom instead of
        the Gaussian, which bound the weights if the tails of the posterior are lighter.

    Raises
    ------
    TypeError, ValueError
        If the approximation is not proper or a setting is out of range; from `init` if the
        approximation does not fit the position.

    Examples
    --------
    >>> import jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array(0.3), variance=jnp.array(0.15))
    >>> gaussian_mh(posterior, q).name
    'gaussian_mh'
    """
    expect(posterior, Posterior, "posterior")
    number = _correlation(correlation)
    independent = trees.is_empty(number)
    if (
        not independent
        and isinstance(approximation, Mixture)
        and (len(approximation.weights) > 1 or not np.isinf(approximation.degrees[0]))
    ):
        raise ValueError(
            "Correlated proposals need a Gaussian approximation: with a mixture use correlation=0."
        )
    proposal = as_proposal(approximation, tail if independent else 0.0)
    return as_functions(GaussianMetropolis(posterior, proposal, number))


def multiple_try(
    posterior: Posterior,
    approximation: Gaussian | Mixture,
    *,
    num_tries: int = 64,
    tail: float = 0.2,
) -> FederatedKernel:
    """Build a sampler that chooses among many draws of an approximation by their weights; exact.

    In a round all clients send their log likelihoods at ``num_tries - 1`` proposals per chain, all
    in one message. The next position is one of the proposals or the present position, with
    probabilities proportional to the weights (iterated sampling importance resampling). If weights
    of mean one are bounded by ``w``, each round multiplies the total variation distance from the
    posterior by at most ``1 - (num_tries - 1) / (2 w + num_tries - 2)``.

    Parameters
    ----------
    posterior, approximation, tail
        See `gaussian_mh`.
    num_tries
        Number of candidates, at least 2, including the present position.

    Raises
    ------
    TypeError, ValueError
        The same as from `gaussian_mh`.

    References
    ----------
    Andrieu et al. (2018), Uniform ergodicity of the iterated conditional SMC and geometric
    ergodicity of particle Gibbs samplers.

    Examples
    --------
    >>> import jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array(0.0), variance=jnp.array(1.0))
    >>> multiple_try(posterior, q, num_tries=16).name
    'multiple_try'
    """
    expect(posterior, Posterior, "posterior")
    num_tries = positive_integer(num_tries, "num_tries")
    if num_tries < 2:
        raise ValueError(f"num_tries must be at least 2, got {num_tries}.")
    return as_functions(MultipleTry(posterior, as_proposal(approximation, tail), num_tries))


def as_proposal(approximation: Gaussian | Mixture, tail: float) -> Mixture:
    """Return the proposal distribution: a mixture, or a Gaussian with a share of t tails.

    Raises
    ------
    TypeError, ValueError
        If the approximation is neither, is not proper, or holds one Gaussian per client.
    """
    if isinstance(approximation, Mixture):
        return approximation
    if not isinstance(approximation, Gaussian):
        raise TypeError(
            f"approximation must be a fedmcmc.Gaussian or a fedmcmc.Mixture, got "
            f"{type(approximation).__name__}."
        )
    if not 0 <= tail < 1:
        raise ValueError(f"tail must be in [0, 1), got {tail!r}.")
    return defensive(*moments_of(approximation), tail=tail)


def _correlation(correlation: ArrayTree) -> Any:
    """Return a correlation as a leaf, or ``()`` for zero."""
    number = as_constant(correlation, "correlation", strict=False)
    if not isinstance(number, jax.core.Tracer):
        if number >= 1:
            raise ValueError(f"correlation must be in [0, 1), got {correlation!r}.")
        if number == 0:
            return ()
    return number
