"""Proposals from an approximation of the posterior, which are judged by their weights; exact.

The weight of a point is the posterior's density over that of the approximation. Clients are asked
for their log likelihoods at proposals, one per chain or many, and send nothing but values.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
    Adjusted,
    ArrayTree,
    Broadcast,
    Disclosure,
    FederatedKernel,
    Federation,
    Posterior,
    as_functions,
    register_dataclass,
)
from fedmcmc.compression import Identity
from fedmcmc.gaussian import WHOLE, Gaussian, Mixture, StandardDraws, defensive, moments_of
from fedmcmc.kernels._adjusted import AdjustedKernel, Proposed, probability, repeated
from fedmcmc.kernels._evaluations import Points
from fedmcmc.pytrees import in_single_precision, schedules, trees


class _Draws(NamedTuple):
    proposals: StandardDraws
    uniforms: Array  # [num + 1], which choose


class _Server(NamedTuple):
    started: Array  # [] bool, whether the start was judged
    log_weight: Array  # of the chain's position
    acceptance: Array
    num_clients: Array


def _refuse_compression(kernel: Any, compressor: Any) -> None:
    if not isinstance(compressor, Identity):
        raise ValueError(
            "Clients of this kernel send log likelihoods alone, which decide and must be "
            "exact: nothing is left to compress. Gradients may be compressed: fedmcmc.hmc with "
            "top_k(..., error_feedback=False)."
        )


@dataclass(frozen=True, eq=False, repr=False)
class WeightedKernel(AdjustedKernel):
    """A kernel whose proposals come from a mixture over raveled positions."""

    proposal: Mixture

    traits = replace(AdjustedKernel.traits, check_compressor=_refuse_compression)
    disclosure = Disclosure(
        "log likelihoods at positions that the server proposes", hidden_in_sums=True
    )

    @property
    def num_proposals(self) -> int:
        """Of a chain and round."""
        return 1

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        size, known = trees.num_elements(position), self.proposal.means.shape[1]
        if size != known:
            raise ValueError(
                f"The approximation is one of {known} numbers, a position has {size}. {WHOLE}"
            )
        largest = int(np.argmax(self.proposal.weights))
        centre = trees.unravel(self.proposal.means[largest], position)
        position, centre = self.checked_start(position, centre, federation)
        dtype = jnp.result_type(float)
        server = _Server(
            started=jnp.zeros((), bool),
            log_weight=jnp.zeros((), dtype),
            acceptance=jnp.ones((), dtype),
            num_clients=jnp.asarray(federation.num_clients, dtype),
        )
        asked = Points(repeated(position, self.num_proposals), centre)
        return Broadcast(jnp.zeros((), jnp.int32), position, asked), server

    @in_single_precision
    def prepare_server(self, rng_key: Array, like: Broadcast) -> _Draws:
        proposal_key, uniform_key = jax.random.split(rng_key)
        num, dtype = self.num_proposals, jnp.result_type(float)
        return _Draws(
            self.proposal.standard_draws(proposal_key, num),
            jax.random.uniform(uniform_key, (num + 1,), dtype),
        )

    def choose(self, log_weights: Array, uniforms: Array) -> tuple[Array, Array]:
        """Return which is next, ``[]`` int32, and how likely the chain was to move.

        `log_weights` are ``[num + 1]``, that of the chain's position first.
        """
        raise NotImplementedError

    def proposed(self, draws: StandardDraws, position: Array) -> Array:
        """Return proposals, ``[num, d]``, where the chain is at a raveled position."""
        return self.proposal.placed(draws)

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Proposed
    ) -> tuple[Broadcast, _Server, Adjusted]:
        draws, old, points = rng_key, server_state, broadcast.extra.points
        if trees.is_key(draws):
            draws = self.prepare_server(draws, trees.shapes_of(broadcast))
        judged = self.judge(points, total, old.num_clients)
        flat = jax.vmap(trees.ravel)(points)
        log_density = judged.log_density
        of_proposal = jax.vmap(self.proposal.log_density_of)(flat).astype(log_density.dtype)
        # The first round judges the start, which is then all there is to choose.
        here = jnp.where(old.started, old.log_weight, log_density[0] - of_proposal[0])
        log_weights = jnp.concatenate([here[None], log_density - of_proposal])
        chosen, moves = self.choose(log_weights, draws.uniforms)
        chosen = jnp.where(old.started, chosen, 0)
        everything = jax.tree.map(
            lambda x, y: jnp.concatenate([x[None], y]), broadcast.position, points
        )
        position = jax.tree.map(lambda leaf: leaf[chosen], everything)
        flat_next = self.proposed(draws.proposals, trees.ravel(position))
        asked = trees.cast_like(jax.vmap(lambda x: trees.unravel(x, position))(flat_next), points)
        server = _Server(
            jnp.ones((), bool),
            log_weights[chosen],
            jnp.where(old.started, moves, old.acceptance),
            old.num_clients,
        )
        server, position, asked = trees.select(
            judged.whole, (server, position, asked), (old, broadcast.position, points)
        )
        moved = broadcast._replace(
            round=broadcast.round + 1,
            position=position,
            extra=broadcast.extra._replace(points=asked),
        )
        return moved, server, Adjusted(server.acceptance, judged.whole, jnp.zeros((), bool))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class GaussianMetropolis(WeightedKernel):
    """One proposal, accepted with the ratio of weights; see `gaussian_mh`."""

    correlation: Any  # [], or () for independent proposals

    @property
    def name(self) -> str:
        return "gaussian_mh"

    def choose(self, log_weights: Array, uniforms: Array) -> tuple[Array, Array]:
        accepted = probability(log_weights[1] - log_weights[0])
        return (uniforms[0] < accepted).astype(jnp.int32), accepted

    def proposed(self, draws: StandardDraws, position: Array) -> Array:
        fresh = super().proposed(draws, position)
        if trees.is_empty(self.correlation):
            return fresh
        correlation = trees.cast(self.correlation, fresh)
        mean = self.proposal.means[0]
        share = jnp.sqrt(1 - jnp.square(correlation))
        kept = mean + correlation * (position.astype(mean.dtype) - mean)
        return kept[None] + share * (fresh - mean[None])


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class MultipleTry(WeightedKernel):
    """Many proposals, of which and the old position one is chosen by weight; see `multiple_try`."""

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
        # Minus infinity for all leaves the chain where it is.
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

    A round asks all clients for their log likelihoods at one proposal per chain, and accepts it
    with the ratio of its weight (posterior over approximation) to that of where the chain is. Good
    where the approximation is; where importance weights have no variance (a k-hat above 0.7) chains
    get stuck, and `fedmcmc.hmc` is the alternative.

    Parameters
    ----------
    posterior
        The model.
    approximation
        A `Gaussian` for the whole posterior: ``surrogates.sum()`` times the prior's, or that of
        `fedmcmc.fed_ep`, ``samples.state.server.approximation.gaussian`` of one chain; or a
        `fedmcmc.Mixture` over raveled positions.
    correlation
        Of a proposal ``y = m + correlation * (x - m) + sqrt(1 - correlation**2) * C normal`` with
        where the chain is (preconditioned Crank-Nicolson), in [0, 1). Zero draws proposals
        independently. Above zero helps in many dimensions where the approximation has about the
        right shape.
    tail
        Share of independent proposals that come from a t distribution of 5 degrees of freedom in
        place of the Gaussian, so that weights are bounded where the posterior's tails are lighter
        than those.

    Returns
    -------
    FederatedKernel
        ``samples.info["acceptance"]`` holds acceptance probabilities. A round in which a client's
        message is missing changes nothing, and the next one asks the same again.

    Raises
    ------
    TypeError, ValueError
        If the approximation is not proper, on settings out of range; from `init` where it does not
        fit the position.

    Notes
    -----
    This is delayed acceptance with a Gaussian for the first stage: a chain on the approximation,
    however long, costs no round and would be exact, so that it is replaced by a draw.

    References
    ----------
    Cotter, Roberts, Stuart and White (2013), MCMC methods for functions, for the correlated
    proposals.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array(0.3), variance=jnp.array(0.15))
    >>> kernel = gaussian_mh(posterior, q)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.3, num_rounds=100, num_chains=64, progress=False
    ... )
    >>> round(float(samples.draws.mean()), 1), round(float(samples.draws.var()) * 9, 1)
    (0.3, 1.0)
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
            "A proposal that is correlated with where the chain is needs a Gaussian: a mixture is "
            "for independent ones (correlation=0)."
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

    A round asks all clients for their log likelihoods at ``num_tries - 1`` draws per chain, all in
    one message. The next position is one of them, or where the chain is, with probabilities
    proportional to weights (iterated sampling importance resampling). More tries repair a worse
    approximation in as many rounds.

    Parameters
    ----------
    posterior, approximation, tail
        As those of `gaussian_mh`.
    num_tries
        Candidates, two at least, the old position among them.

    Returns
    -------
    FederatedKernel
        ``samples.info["acceptance"]`` holds the probabilities with which chains left where they
        were.

    Raises
    ------
    TypeError, ValueError
        As `gaussian_mh`.

    Notes
    -----
    With weights bounded by ``w`` (their mean being one), the distance in total variation from the
    posterior shrinks in a round by ``1 - (num_tries - 1) / (2 w + num_tries - 2)`` at least.

    References
    ----------
    Andrieu, Lee and Vihola (2018), Uniform ergodicity of the iterated conditional SMC and geometric
    ergodicity of particle Gibbs samplers.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> far = fedmcmc.Gaussian.from_moments(jnp.array(0.0), variance=jnp.array(1.0))
    >>> kernel = multiple_try(posterior, far, num_tries=16)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.3, num_rounds=100, num_chains=64, progress=False
    ... )
    >>> round(float(samples.draws.mean()), 1), round(float(samples.draws.var()) * 9, 1)
    (0.3, 1.0)
    """
    expect(posterior, Posterior, "posterior")
    num_tries = positive_integer(num_tries, "num_tries")
    if num_tries < 2:
        raise ValueError(f"num_tries must be 2 at least, got {num_tries}.")
    return as_functions(MultipleTry(posterior, as_proposal(approximation, tail), num_tries))


def as_proposal(approximation: Any, tail: float) -> Mixture:
    """Return what proposals are drawn of: a Gaussian with a share of a t, or a mixture as it is.

    Raises
    ------
    TypeError, ValueError
        If it is neither, not proper, or one Gaussian per client.
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


def _correlation(correlation: Any) -> Any:
    """Return a correlation as a leaf, ``()`` where it is known to be zero."""
    number = schedules.number(correlation, "correlation", minimum=0.0)
    if isinstance(number, schedules.Scheduled):
        raise TypeError("correlation must be a number; a schedule of the round is not supported.")
    if not isinstance(number, jax.core.Tracer):
        if number >= 1:
            raise ValueError(f"correlation must be in [0, 1), got {correlation!r}.")
        if number == 0:
            return ()
    return number
