"""Means of tilted distributions by an optimizer's iterates."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Broadcast, Client, Number, Posterior
from fedmcmc.dynamics import local_steps, training
from fedmcmc.gaussian import Gaussian, plus_precision
from fedmcmc.inference._samples import SampleMean
from fedmcmc.inference._types import Found, Mean
from fedmcmc.pytrees import schedules, trees

__all__ = ["sgd_mean"]


def sgd_mean(
    optimizer: optax.GradientTransformation,
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
    Guo et al. (2023), section 4.2 and Algorithm 2.
    """
    epochs_ = None if num_local_steps is not None else num_burnin + num_samples
    length, estimator = local_steps(epochs_, num_local_steps, batch_size, num_samples, num_burnin)
    curvature: Any = ()
    if row_curvature is not None:
        curvature = schedules.number(row_curvature, "row_curvature", minimum=0.0, strict=True)
    decay = schedules.number(weight_decay, "weight_decay", minimum=0.0)
    return SgdMean(estimator, training(optimizer, length, learning_rate), curvature, decay)


@register_dataclass
@dataclass(frozen=True, eq=False)
class SgdMean(SampleMean):
    """Iterates of an optimizer; see `sgd_mean`."""

    row_curvature: Any  # () for none
    weight_decay: Any

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        """Return the cavity times ``N(0, I / (n_k * weight_decay))``."""
        decay = schedules.value(self.weight_decay, round_)
        return plus_precision(cavity, client.size.astype(client.share.dtype) * decay)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Draw the minibatches."""
        return self.estimator.prepare(rng_key, like, client, self.num_calls(client))

    def find(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> Found:
        """Descend from the server's mean."""
        estimator, loglikelihood_fn = self.estimator, posterior.loglikelihood_fn
        per_row = -1 / client.size.astype(client.share.dtype)
        # What a full gradient needs once: nothing that depends on the broadcast.
        context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]

        metric: Any = None
        if not trees.is_empty(self.row_curvature):
            metric = _metric(cavity, per_row, schedules.value(self.row_curvature, round_))

        def gradient_fn(drawn: ArrayTree, at: ArrayTree) -> ArrayTree:
            estimate = estimator.estimate(loglikelihood_fn, drawn, at, context, client)
            gradient = trees.scale(per_row, trees.add(estimate, cavity.grad_log(at)))
            return gradient if metric is None else replace(metric, precision_mean=gradient).mean()

        return self.moments(gradient_fn, draws, position, client, round_, second)


def _metric(cavity: Gaussian, per_row: Array, curvature: Array) -> Gaussian:
    """Return the Gaussian with precision ``1 + cavity precision / (n_k * curvature)``."""
    scaled = cavity ** (-per_row / curvature)
    if cavity.structure != "dense":
        # A cavity may have negative entries, which need no shorter steps.
        scaled = replace(scaled, precision=jax.tree.map(jax.nn.relu, scaled.precision))
    return plus_precision(scaled, jnp.ones_like(per_row))
