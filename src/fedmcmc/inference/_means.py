"""Means of tilted distributions from iterates of an optimizer or of a Langevin chain."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.dynamics import Training, Visitor, local_steps, plain_steps, train, training
from fedmcmc.gaussian import Gaussian, plus_precision
from fedmcmc.inference._types import Mean, TiltedMoments
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Federation,
    GradientEstimator,
    Number,
    Posterior,
    register_dataclass,
)

if TYPE_CHECKING:
    import optax

Descent = Callable[[ArrayTree, ArrayTree, ArrayTree], ArrayTree]
"""``(gradient of the tilted log density, noise, position) -> gradient for the optimizer``."""


class _StepDraws(NamedTuple):
    rows: ArrayTree  # draws of the gradient estimator
    noise: ArrayTree  # of a Langevin chain, or ()


@dataclass(frozen=True, eq=False, repr=False)
class SampleMean(Mean):
    """Moments of samples: the iterates at the ends of a training's windows."""

    estimator: GradientEstimator
    training: Training

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        """Return the map from gradients of the tilted log density to the optimizer's gradient."""
        raise NotImplementedError

    def find(
        self,
        posterior: Posterior,
        draws: _StepDraws,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> TiltedMoments:
        estimator, loglikelihood_fn = self.estimator, posterior.loglikelihood_fn
        context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]
        descent = self.descent(cavity, client, round_)

        def gradient_fn(drawn: _StepDraws, x: ArrayTree) -> ArrayTree:
            estimate = estimator.estimate(loglikelihood_fn, drawn.rows, x, context, client)
            ascent = trees.add(estimate, cavity.grad_log(x))
            return descent(ascent, drawn.noise, x)

        trained = train(
            self.training, gradient_fn, draws, position, client, round_, _Welford(second)
        )
        divisor = max(self._num_samples - 1, 1)
        variance = jax.tree.map(lambda leaf: leaf / divisor, trained.summary.scatter)
        return TiltedMoments(trained.summary.mean, variance, jnp.sqrt(trained.square))

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        if second is not None and self._num_samples < 2:
            raise ValueError("A variance of samples needs num_samples of at least 2, got 1.")

    @property
    def _num_samples(self) -> int:
        return self.training.length.num_samples


class _Scatter(NamedTuple):
    mean: ArrayTree
    scatter: ArrayTree  # (), shaped as the mean, or [d, d]


@dataclass(frozen=True, eq=False, repr=False)
class _Welford(Visitor):
    """Mean and scatter of the windows' last iterates, by Welford's recursion."""

    second: str | None

    def init(self, position: ArrayTree) -> _Scatter:
        scatter: ArrayTree = ()
        if self.second == "diagonal":
            scatter = trees.zeros_like(position)
        elif self.second == "dense":
            flat = trees.ravel(position)
            scatter = jnp.zeros((flat.size, flat.size), flat.dtype)
        return _Scatter(trees.zeros_like(position), scatter)

    def visit(
        self, summary: _Scatter, index: Array, iterate: ArrayTree, average: ArrayTree
    ) -> _Scatter:
        before = trees.subtract(iterate, summary.mean)
        weight = 1 / (index + 1).astype(jnp.result_type(float))
        mean = trees.add_scaled(summary.mean, weight, before)
        after = trees.subtract(iterate, mean)
        if self.second is None:
            return _Scatter(mean, ())
        if self.second == "diagonal":
            products = jax.tree.map(jnp.multiply, before, after)
            return _Scatter(mean, trees.add(summary.scatter, products))
        return _Scatter(mean, summary.scatter + jnp.outer(trees.ravel(before), trees.ravel(after)))


def sgd_mean(
    optimizer: "optax.GradientTransformation",
    *,
    num_samples: int,
    num_local_steps: int | None = None,
    batch_size: int | None = None,
    num_burnin: int = 0,
    learning_rate: Number = 1.0,
    weight_decay: Number = 0.0,
    row_curvature: Number | None = None,
) -> Mean:
    """Average the iterates of an optimizer at the ends of epochs (SG-MCMC).

    Starting at the server's mean, the client descends ``(-log p(rows | theta) - log cavity(theta))
    / n_k`` on minibatches. The optimizer's state is kept from epoch to epoch.

    Parameters
    ----------
    optimizer
        Optimizer from optax; SGD with momentum in the paper.
    num_samples
        Number of epochs, with one sample each.
    num_local_steps
        Number of steps per sample, on rows drawn with replacement, in place of an epoch.
    batch_size
        Number of rows per step; ``None`` for all rows of the client.
    num_burnin
        Number of epochs (or windows) before the first sample; none in the paper.
    learning_rate
        Factor of the optimizer's updates: a number, or a schedule of the round.
    weight_decay
        Precision per row of a factor ``N(0, I / (n_k * weight_decay))`` of every client's
        likelihood, as in the released code. The factors add up to a prior of precision
        ``num_rows * weight_decay``, in addition to the posterior's prior.
    row_curvature
        Second derivative of a row's log likelihood for which the step size is chosen. The gradient
        is multiplied by the inverse of ``1 + cavity precision / (n_k * row_curvature)``, which does
        not move the minimum, so the step size suits every cavity. No factor by default, as in the
        paper.

    Notes
    -----
    With momentum ``m`` and largest curvature ``h`` of the tilted distribution, steps are stable
    below ``2 * (1 + m) * n_k / h``, so clients with few rows limit the step size. Unstable steps
    may stay finite and give wrong sites. With `row_curvature`, the limit is ``2 * (1 + m) / h`` for
    all clients, and ``h`` is the larger of `row_curvature` and a row's curvature.

    References
    ----------
    Guo et al. (2023), section 2.2.2 and Algorithm 2.
    """
    num_epochs = None if num_local_steps is not None else num_burnin + num_samples
    length, estimator = local_steps(
        num_epochs, num_local_steps, batch_size, num_samples, num_burnin
    )
    curvature: ArrayTree = ()
    if row_curvature is not None:
        curvature = schedules.number(row_curvature, "row_curvature", minimum=0.0, strict=True)
    decay = schedules.number(weight_decay, "weight_decay", minimum=0.0)
    return SgdMean(estimator, training(optimizer, length, learning_rate), curvature, decay)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class SgdMean(SampleMean):
    """Iterates of an optimizer; see `sgd_mean`."""

    row_curvature: ArrayTree  # () for none
    weight_decay: ArrayTree

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        decay = schedules.value(self.weight_decay, round_)
        return plus_precision(cavity, client.size.astype(client.share.dtype) * decay)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _StepDraws:
        num = self.training.length.max_steps(client)
        return _StepDraws(self.estimator.prepare(rng_key, like, client, num), ())

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        per_row = -1 / client.size.astype(client.share.dtype)
        metric = None
        if not trees.is_empty(self.row_curvature):
            metric = _metric(cavity, per_row, schedules.value(self.row_curvature, round_))

        def descent(ascent: ArrayTree, noise: ArrayTree, x: ArrayTree) -> ArrayTree:
            gradient = trees.scale(per_row, ascent)
            return gradient if metric is None else replace(metric, precision_mean=gradient).mean()

        return descent


def _metric(cavity: Gaussian, per_row: Array, curvature: Array) -> Gaussian:
    """Return the Gaussian with precision ``1 + cavity precision / (n_k * curvature)``."""
    scaled = cavity ** (-per_row / curvature)
    if cavity.structure != "dense":
        # Negative entries of a cavity need no shorter steps.
        scaled = replace(scaled, precision=jax.tree.map(jax.nn.relu, scaled.precision))
    return plus_precision(scaled, jnp.ones_like(per_row))


def langevin_mean(
    step_size: Number,
    *,
    num_samples: int,
    num_burnin: int = 0,
    thinning: int = 1,
    batch_size: int | None = None,
) -> Mean:
    """Use the moments of a Langevin chain on the tilted distribution.

    The chain starts at the server's mean and moves to ``theta + step_size * grad log tilted(theta)
    + sqrt(2 * step_size) * normal``. Its samples follow likelihood times cavity, up to the bias of
    the step size, while the iterates of `sgd_mean` only vary by the noise of minibatches. With
    `fedmcmc.inference.mcmc`, this is expectation propagation by sampling.

    Parameters
    ----------
    step_size
        Number, or schedule of the round.
    num_samples, num_burnin
        Number of samples, and number of discarded samples before them.
    thinning
        Number of steps per sample.
    batch_size
        Number of rows per step, drawn with replacement; ``None`` for all rows of the client.

    References
    ----------
    Welling and Teh (2011), Bayesian learning via stochastic gradient Langevin dynamics; Xu et al.
    (2014), Distributed Bayesian posterior sampling via moment sharing, for the combination.
    """
    length, estimator = local_steps(None, thinning, batch_size, num_samples, num_burnin)
    number = schedules.number(step_size, "step_size", minimum=0.0, strict=True)
    return LangevinMean(estimator, training(plain_steps(), length, step_size), number)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LangevinMean(SampleMean):
    """Samples of a Langevin chain; see `langevin_mean`."""

    step_size: ArrayTree

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _StepDraws:
        gradient_key, noise_key = jax.random.split(rng_key)
        num = self.training.length.max_steps(client)
        rows = self.estimator.prepare(gradient_key, like, client, num)
        return _StepDraws(rows, normals(noise_key, like, num))

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        # The optimizer multiplies the noise by the step size h, which gives sqrt(2 h) normals.
        scale = jnp.sqrt(2 / schedules.value(self.step_size, round_))

        def descent(ascent: ArrayTree, noise: ArrayTree, x: ArrayTree) -> ArrayTree:
            noise = realize_normals(noise, x)
            return trees.scale(-1, trees.add_scaled(ascent, scale, noise))

        return descent
