"""What a client makes of its local training: a pseudo-gradient for the server's optimizer."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Number
from fedmcmc.dynamics import Visitor
from fedmcmc.pytrees import schedules, trees

__all__ = ["Delta", "displacement", "posterior_delta"]


class Delta:
    """A pseudo-gradient, from where a client's training went.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def visitor(self, num_samples: int, position: ArrayTree, round_: Array) -> Visitor:
        """Return what is kept of a training that starts at `position`.

        It sees the windows after the burn-in, `num_samples` of them.
        """
        return Visitor()

    def finish(self, summary: ArrayTree, position: ArrayTree, last: ArrayTree) -> ArrayTree:
        """Return the pseudo-gradient, shaped as a position, of a training that ended at `last`."""
        raise NotImplementedError


@register_dataclass
@dataclass(frozen=True, eq=False)
class Displacement(Delta):
    """How far a client came; see `displacement`."""

    def finish(self, summary: ArrayTree, position: ArrayTree, last: ArrayTree) -> ArrayTree:
        """Return the start minus the end."""
        return trees.subtract(position, last)


def displacement() -> Delta:
    """Return where training began minus where it ended: federated averaging."""
    return Displacement()


class _Fit(NamedTuple):
    """The solve so far: with `t` samples, ``(I + rho * scatter) @ delta = theta - mean``."""

    mean: Array  # [d]
    delta: Array  # [d]
    moves: Array  # [l, d], u_t: how far sample t lies from the mean before it
    solved: Array  # [l, d], v_t: the same, solved with the matrix before it
    rho: Array


def _add_sample(fit: _Fit, index: Array, sample: Array, theta: Array) -> _Fit:
    """Take sample ``t = index + 1`` in: a Sherman-Morrison step with all earlier ones."""
    rho, moves, solved = fit.rho, fit.moves, fit.solved
    t = (index + 1).astype(sample.dtype)
    move = sample - fit.mean
    # Of samples 2 .. t - 1; rows of others are zero.
    k = jnp.arange(1, moves.shape[0] + 1, dtype=sample.dtype)
    gains = rho * (k - 1) / k
    inner = jnp.sum(moves * solved, axis=1)
    weights = gains * (solved @ move) / (1 + gains * inner)
    solution = move - weights @ solved
    gain = rho * (t - 1) / t
    along = move @ solution
    step = gain * (t * (move @ fit.delta) - along) / (1 + gain * along)
    first = index == 0
    # The first sample is the mean, and the matrix the identity.
    delta = jnp.where(first, theta - sample, fit.delta - (1 + step) * solution / t)
    keep = jnp.where(first, jnp.zeros((), sample.dtype), jnp.ones((), sample.dtype))
    return _Fit(
        jnp.where(first, sample, fit.mean + move / t),
        delta,
        moves.at[index].set(keep * move),
        solved.at[index].set(keep * solution),
        rho,
    )


@dataclass(frozen=True, eq=False)
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
    """The gradient of a Gaussian fitted to samples; see `posterior_delta`."""

    shrinkage: Any

    def visitor(self, num_samples: int, position: ArrayTree, round_: Array) -> Visitor:
        """Fit the Gaussian as averages of windows come in."""
        rho = schedules.value(self.shrinkage, round_)
        return _Samples(num_samples, trees.ravel(position), rho)

    def finish(self, summary: _Fit, position: ArrayTree, last: ArrayTree) -> ArrayTree:
        """Return the Gaussian's gradient where training started."""
        num = summary.moves.shape[0]
        scale = 1 + (num - 1) * summary.rho
        return trees.cast_like(trees.unravel(scale * summary.delta, position), position)


def posterior_delta(shrinkage: Number) -> Delta:
    """Return the gradient of a Gaussian fitted to approximate samples of the local posterior.

    The windows' averages ``x_1 .. x_l`` (iterate-averaged SGD) are taken as samples, with mean
    ``m`` and covariance ``S``; the pseudo-gradient is ``C^{-1} (theta - m)`` with
    ``C = r I + (1 - r) S`` and ``r = 1 / (1 + (l - 1) * shrinkage)``. It is found as samples come
    in, in ``O(l^2 d)`` operations and ``O(l d)`` memory, without a matrix ``[d, d]``.

    Parameters
    ----------
    shrinkage
        The papers' ``rho``, at least zero: a number or a schedule of the round. With zero the
        covariance is the identity: federated averaging of averaged iterates.

    References
    ----------
    Al-Shedivat et al. (2021), Federated learning via posterior averaging, section 4 and appendix.
    """
    return PosteriorDelta(schedules.number(shrinkage, "shrinkage", minimum=0.0))
