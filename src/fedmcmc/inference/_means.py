"""Means of tilted distributions from samples: an optimizer's iterates, or a Langevin chain's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Federation,
    GradientEstimator,
    Number,
    Posterior,
    register_dataclass,
)
from fedmcmc.dynamics import Training, Visitor, local_steps, plain_steps, train, training
from fedmcmc.gaussian import Gaussian, plus_precision
from fedmcmc.inference._types import Mean, Moments
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals

if TYPE_CHECKING:
    import optax

Descent = Callable[[ArrayTree, ArrayTree, ArrayTree], ArrayTree]
"""``(gradient of the tilted log density, noise, position) -> what the optimizer descends``."""


class _Randomness(NamedTuple):
    rows: ArrayTree  # of the gradients
    noise: ArrayTree  # of a chain's steps, else ()


@dataclass(frozen=True, eq=False, repr=False)
class SampleMean(Mean):
    """Moments of the iterates at the ends of a training's windows, which are the samples."""

    estimator: GradientEstimator
    training: Training

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        """Return what a subclass makes of gradients."""
        raise NotImplementedError

    def find(
        self,
        posterior: Posterior,
        draws: _Randomness,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> Moments:
        estimator, loglikelihood_fn = self.estimator, posterior.loglikelihood_fn
        # What a full gradient needs once: nothing that depends on the broadcast.
        context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]
        descent = self.descent(cavity, client, round_)

        def gradient_fn(drawn: _Randomness, at: ArrayTree) -> ArrayTree:
            estimate = estimator.estimate(loglikelihood_fn, drawn.rows, at, context, client)
            ascent = trees.add(estimate, cavity.grad_log(at))
            return descent(ascent, drawn.noise, at)

        trained = train(
            self.training, gradient_fn, draws, position, client, round_, _Welford(second)
        )
        divisor = max(self._num_samples - 1, 1)
        variance = jax.tree.map(lambda leaf: leaf / divisor, trained.summary.scatter)
        return Moments(trained.summary.mean, variance, jnp.sqrt(trained.mean_square))

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        if second is not None and self._num_samples < 2:
            raise ValueError("A variance of samples takes num_samples of at least 2, got 1.")

    @property
    def _num_samples(self) -> int:
        return self.training.length.num_samples


class _Scatter(NamedTuple):
    mean: ArrayTree
    scatter: ArrayTree  # (), shaped as the mean, or [d, d]


@dataclass(frozen=True, eq=False, repr=False)
class _Welford(Visitor):
    """Keeps mean and scatter of the windows' last iterates (Welford's recursion)."""

    second: str | None

    def init(self, position: ArrayTree) -> _Scatter:
        scatter: ArrayTree = ()
        if self.second == "diagonal":
            scatter = trees.zeros_like(position)
        elif self.second == "dense":
            flat = trees.ravel(position)
            scatter = jnp.zeros((flat.size, flat.size), flat.dtype)
        return _Scatter(trees.zeros_like(position), scatter)

    def visit(self, summary: _Scatter, index: Array, last: ArrayTree, average: Any) -> _Scatter:
        moved = trees.subtract(last, summary.mean)
        mean = trees.add_scaled(summary.mean, 1 / (index + 1).astype(jnp.result_type(float)), moved)
        left = trees.subtract(last, mean)
        if self.second is None:
            return _Scatter(mean, ())
        if self.second == "diagonal":
            products = jax.tree.map(jnp.multiply, moved, left)
            return _Scatter(mean, trees.add(summary.scatter, products))
        return _Scatter(mean, summary.scatter + jnp.outer(trees.ravel(moved), trees.ravel(left)))


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
    """Average the iterates that an optimizer reaches at the ends of epochs (SG-MCMC).

    The client descends ``(-log p(rows | theta) - log cavity(theta)) / n_k`` from the server's mean,
    on minibatches; the iterates at the ends of epochs are its samples. The optimizer's state is
    kept from epoch to epoch.

    Parameters
    ----------
    optimizer
        As from optax; the paper's is SGD with momentum.
    num_samples
        Epochs, each of which gives a sample.
    num_local_steps
        In place of epochs, steps from sample to sample, on rows drawn with replacement.
    batch_size
        Rows per step; ``None`` for all of a client's.
    num_burnin
        Epochs (or windows) before the first sample; none in the paper.
    learning_rate
        Multiplies the optimizer's updates: a number, or a schedule of the round.
    weight_decay
        A factor ``N(0, I / (n_k * weight_decay))`` of every client's likelihood, as in the released
        code; in all, a prior of precision ``num_rows * weight_decay`` besides the posterior's own.
    row_curvature
        Second derivatives of a row's log likelihood that the optimizer's steps are made for. The
        gradient is then multiplied by the inverse of ``1 + cavity precision / (n_k *
        row_curvature)``, so that steps which suit a client's rows suit them with any cavity, and
        the minimum stays where it is. By default the gradient is taken as it is, as in the paper.

    Notes
    -----
    The loss is a mean over the client's own rows, and the cavity in it, which grows with all rows,
    is divided by their number. Plain steps are stable below ``2 * n_k / h``, with momentum ``m``
    below ``2 * (1 + m) * n_k / h``, for the largest curvature ``h`` of the tilted distribution,
    about that of the whole posterior: a client with few rows bounds the step size. A step that is
    too large for it need not show as a number that is not finite: its site is wrong, and the mean
    moves from round to round. With `row_curvature` steps are stable below ``2 * (1 + m) / h`` for
    the larger ``h`` of `row_curvature` and a row's own curvature, whatever the client's size.

    References
    ----------
    Guo et al. (2023), section 2.2.2 and Algorithm 2.
    """
    epochs_ = None if num_local_steps is not None else num_burnin + num_samples
    length, estimator = local_steps(epochs_, num_local_steps, batch_size, num_samples, num_burnin)
    curvature: Any = ()
    if row_curvature is not None:
        curvature = schedules.number(row_curvature, "row_curvature", minimum=0.0, strict=True)
    decay = schedules.number(weight_decay, "weight_decay", minimum=0.0)
    return SgdMean(estimator, training(optimizer, length, learning_rate), curvature, decay)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class SgdMean(SampleMean):
    """Iterates of an optimizer; see `sgd_mean`."""

    row_curvature: Any  # () for none
    weight_decay: Any

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        decay = schedules.value(self.weight_decay, round_)
        return plus_precision(cavity, client.size.astype(client.share.dtype) * decay)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _Randomness:
        num = self.training.length.most(client)
        return _Randomness(self.estimator.prepare(rng_key, like, client, num), ())

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        per_row = -1 / client.size.astype(client.share.dtype)
        metric: Any = None
        if not trees.is_empty(self.row_curvature):
            metric = _metric(cavity, per_row, schedules.value(self.row_curvature, round_))

        def descent(ascent: ArrayTree, noise: ArrayTree, at: ArrayTree) -> ArrayTree:
            gradient = trees.scale(per_row, ascent)
            return gradient if metric is None else replace(metric, precision_mean=gradient).mean()

        return descent


def _metric(cavity: Gaussian, per_row: Array, curvature: Array) -> Gaussian:
    """Return the Gaussian with precision ``1 + cavity precision / (n_k * curvature)``."""
    scaled = cavity ** (-per_row / curvature)
    if cavity.structure != "dense":
        # A cavity may have negative entries, which need no shorter steps.
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
    """Take the moments of a Langevin chain on the tilted distribution itself.

    ``theta + step_size * grad log tilted(theta) + sqrt(2 * step_size) * normal``, from the server's
    mean on: samples of likelihood times cavity, up to the step size, where the iterates of
    `sgd_mean` scatter by the noise of minibatches alone. With `fedmcmc.inference.mcmc` the sites
    are those of expectation propagation by sampling.

    Parameters
    ----------
    step_size
        A number, or a schedule of the round.
    num_samples, num_burnin
        Samples, and the number of them that are thrown away before.
    thinning
        Steps from sample to sample.
    batch_size
        Rows per step, drawn with replacement; ``None`` for all of a client's.

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

    step_size: Any

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> _Randomness:
        gradient_key, noise_key = jax.random.split(rng_key)
        num = self.training.length.most(client)
        rows = self.estimator.prepare(gradient_key, like, client, num)
        return _Randomness(rows, normals(noise_key, like, num))

    def descent(self, cavity: Gaussian, client: Client, round_: Array) -> Descent:
        # A step of size h along minus the gradient and sqrt(2 / h) normals moves by sqrt(2 h)
        # normals.
        scale = jnp.sqrt(2 / schedules.value(self.step_size, round_))

        def descent(ascent: ArrayTree, noise: ArrayTree, at: ArrayTree) -> ArrayTree:
            noise = realize_normals(noise, at)
            return trees.scale(-1, trees.add_scaled(ascent, scale, noise))

        return descent
