"""Pseudo-gradients: clients train, and the server's optimizer descends their weighted mean.

Source: Reddi et al. (2021), Adaptive federated optimization, Algorithm 1, for the loop, and
Al-Shedivat et al. (2021), Federated learning via posterior averaging, Algorithm 1, for
pseudo-gradients that are gradients of a Gaussian fitted to the local posterior.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, expect_optimizer
from fedmcmc.dynamics import Training, Visitor, plain_steps
from fedmcmc.gradients import Epochs
from fedmcmc.kernels._shared import LocalTraining, expect_blocks, is_plain, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    StepInfo,
    Uncompressed,
    as_functions,
    register_dataclass,
)

if TYPE_CHECKING:
    import optax


class Delta:
    """Pseudo-gradient computed from a client's training.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def visitor(self, num_samples: int, position: ArrayTree, round_: Array) -> Visitor:
        """Return the visitor that summarizes a training that starts at `position`.

        It visits the `num_samples` windows after the burn-in.
        """
        return Visitor()

    def finish(self, summary: ArrayTree, position: ArrayTree, end: ArrayTree) -> ArrayTree:
        """Return the pseudo-gradient of a training from `position` to `end`."""
        raise NotImplementedError


@register_dataclass
@dataclass(frozen=True, eq=False)
class Displacement(Delta):
    """Minus the displacement of a client's training; see `displacement`."""

    def finish(self, summary: ArrayTree, position: ArrayTree, end: ArrayTree) -> ArrayTree:
        return trees.subtract(position, end)


def displacement() -> Delta:
    """Return the pseudo-gradient of federated averaging: the start of training minus its end."""
    return Displacement()


class _Fit(NamedTuple):
    """Solution ``delta`` of ``(I + rho * scatter) @ delta = theta - mean`` for `t` samples."""

    mean: Array  # [d]
    delta: Array  # [d]
    moves: Array  # [l, d], u_t: sample t minus the mean of the samples before it
    solved: Array  # [l, d], v_t: solution of the system before sample t for u_t
    rho: Array


def _add_sample(fit: _Fit, index: Array, sample: Array, theta: Array) -> _Fit:
    """Add sample ``t = index + 1`` by a Sherman-Morrison step."""
    rho, moves, solved = fit.rho, fit.moves, fit.solved
    t = (index + 1).astype(sample.dtype)
    move = sample - fit.mean
    # Only rows of the samples 2 to t - 1 are not zero.
    k = jnp.arange(1, moves.shape[0] + 1, dtype=sample.dtype)
    gains = rho * (k - 1) / k
    inner = jnp.sum(moves * solved, axis=1)
    weights = gains * (solved @ move) / (1 + gains * inner)
    solution = move - weights @ solved
    gain = rho * (t - 1) / t
    along = move @ solution
    step = gain * (t * (move @ fit.delta) - along) / (1 + gain * along)
    is_first = index == 0
    # The first sample is the mean, and the matrix is the identity.
    delta = jnp.where(is_first, theta - sample, fit.delta - (1 + step) * solution / t)
    keep = jnp.where(is_first, jnp.zeros((), sample.dtype), jnp.ones((), sample.dtype))
    return _Fit(
        jnp.where(is_first, sample, fit.mean + move / t),
        delta,
        moves.at[index].set(keep * move),
        solved.at[index].set(keep * solution),
        rho,
    )


@dataclass(frozen=True, eq=False, repr=False)
class _Samples(Visitor):
    num_samples: int
    theta: Array  # [d], where training starts
    rho: Array

    averages: ClassVar[bool] = True

    def init(self, position: ArrayTree) -> _Fit:
        flat = jnp.zeros_like(trees.ravel(position))
        rows = jnp.zeros((self.num_samples, *flat.shape), flat.dtype)
        return _Fit(flat, flat, rows, rows, trees.cast(self.rho, flat))

    def visit(self, summary: _Fit, index: Array, last: ArrayTree, average: ArrayTree) -> _Fit:
        return _add_sample(summary, index, trees.ravel(average), self.theta)


@register_dataclass
@dataclass(frozen=True, eq=False)
class PosteriorDelta(Delta):
    """Gradient of a Gaussian fitted to samples; see `posterior_delta`."""

    shrinkage: Number

    def visitor(self, num_samples: int, position: ArrayTree, round_: Array) -> Visitor:
        """Return the visitor that fits the Gaussian to averages of windows."""
        rho = schedules.value(self.shrinkage, round_)
        return _Samples(num_samples, trees.ravel(position), rho)

    def finish(self, summary: _Fit, position: ArrayTree, end: ArrayTree) -> ArrayTree:
        num = summary.moves.shape[0]
        scale = 1 + (num - 1) * summary.rho
        return trees.cast_like(trees.unravel(scale * summary.delta, position), position)


def posterior_delta(shrinkage: Number) -> Delta:
    """Return the gradient of a Gaussian fitted to approximate samples of the local posterior.

    The samples ``x_1 .. x_l`` are averages over windows of SGD iterates, with mean ``m`` and
    covariance ``S``. The pseudo-gradient is ``C^{-1} (theta - m)`` with ``C = r I + (1 - r) S`` and
    ``r = 1 / (1 + (l - 1) * shrinkage)``. It needs ``O(l^2 d)`` operations and ``O(l d)`` memory.

    Parameters
    ----------
    shrinkage
        ``rho`` of the paper, at least zero: a number or a schedule of the round. With zero the
        covariance is the identity: federated averaging of averaged iterates.

    References
    ----------
    Al-Shedivat et al. (2021), Federated learning via posterior averaging, section 4 and appendix.
    """
    return PosteriorDelta(schedules.number(shrinkage, "shrinkage", minimum=0.0))


class _PseudoGradientMessage(NamedTuple):
    """Client's weight and weighted pseudo-gradient; the server divides their sums."""

    weight: Uncompressed  # [], the client's share of rows; zero if training did not stay finite
    delta: ArrayTree  # weight times the pseudo-gradient


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PseudoGradients(LocalTraining):
    """Kernel whose server descends the clients' mean; see `pseudo_gradients`."""

    delta: Delta
    training: Training
    optimizer: ArrayTree
    learning_rate: Number

    disclosure = Disclosure(
        "how far the model moved when it was trained on the rows of this site, and the share of "
        "this site in all rows"
    )

    @property
    def base_name(self) -> str:
        estimator = self.estimator
        if is_plain(estimator) or isinstance(estimator, Epochs):
            if isinstance(self.delta, Displacement):
                return "fed_avg"
            if isinstance(self.delta, PosteriorDelta):
                return "fed_pa"
        return "pseudo_gradients"

    @property
    def averages_local_moves(self) -> bool:
        return True

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        return self.optimizer.init(position)

    def message_like(self, like: Broadcast) -> ArrayTree:
        weight: ArrayTree = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return _PseudoGradientMessage(Uncompressed(weight), trees.shapes_of(like.position))

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        position, length = broadcast.position, self.training.length
        num_samples = length.num_samples
        visitor = self.delta.visitor(num_samples, position, broadcast.round)
        trained, client_state, down = self.train(draws, broadcast, client_state, client, visitor)
        delta = self.delta.finish(trained.summary, position, trained.position)
        finite = trees.all_finite(delta)
        weight = jnp.where(finite, client.share, 0)
        message = _PseudoGradientMessage(
            Uncompressed(weight),
            trees.scale(weight, trees.select(finite, delta, trees.zeros_like(delta))),
        )
        info = report(message, trained.square, usable=finite, bits_down=down)
        return message, client_state, info

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: ArrayTree,
        total: _PseudoGradientMessage,
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Descend the weighted mean; do not move if the total weight is zero."""
        position, weight = broadcast.position, total.weight.value
        has_weight = weight > 0
        mean = trees.scale(1 / jnp.where(has_weight, weight, 1), total.delta)
        updates, moved_state = trees.descend(self.optimizer, mean, server_state, position)
        rate = schedules.value(self.learning_rate, broadcast.round)
        moved = trees.add_scaled(position, rate, updates)
        position, server_state = trees.select(
            has_weight, (moved, moved_state), (position, server_state)
        )
        return self.next_broadcast(broadcast, position), server_state, ()


def pseudo_gradients(
    posterior: Posterior,
    estimator: GradientEstimator,
    delta: Delta,
    *,
    training: Training,
    server_optimizer: "optax.GradientTransformation | None" = None,
    learning_rate: Number = 1.0,
    participation: Participation | None = None,
) -> FederatedKernel:
    """Build a kernel whose server descends the weighted mean of the clients' pseudo-gradients.

    Each client of the cohort trains from the broadcast position and sends a pseudo-gradient,
    weighted by its share of the rows. Draws are a point estimate. The mean excludes a client whose
    training did not stay finite (``StepInfo.usable``).

    Parameters
    ----------
    posterior
        Model. A client minimizes minus the mean over its rows of the log likelihood and of its
        share of the log prior (``log prior / num_rows``, the same for all).
    estimator
        Gradient estimator for a client's log likelihood, one call per step of `training`.
    delta
        `displacement` or `posterior_delta`.
    training
        Optimizer of the clients and its number of steps, from `fedmcmc.dynamics.training`.
    server_optimizer
        Optax optimizer, whose state is kept between rounds. By default plain steps of size one;
        with `displacement` this is federated averaging.
    learning_rate
        Factor of the server's updates: a number or a schedule of the round.
    participation
        Rule that chooses who takes part; everyone by default. Means are over those who take part;
        if nobody does, the position does not change.

    Raises
    ------
    TypeError, ValueError
        If a block has the wrong type or a number is out of range; from `init` if the data does not
        fit.
    """
    expect_optimizer(server_optimizer, "server_optimizer", or_none=True)
    server = plain_steps() if server_optimizer is None else server_optimizer
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    expect(delta, Delta, "delta")
    expect(training, Training, "training")
    rate = schedules.number(learning_rate, "learning_rate", minimum=0.0, strict=True)
    return as_functions(
        PseudoGradients(posterior, estimator, participation, delta, training, server, rate)
    )
