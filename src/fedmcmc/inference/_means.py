"""Means of tilted distributions: by an optimiser's iterates, or exactly for quadratics."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Broadcast, Client, GradientEstimator, Number, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.dynamics import Trained, Training, Visitor, local_steps, train, training
from fedmcmc.gaussian import Gaussian, as_dense, plus_precision
from fedmcmc.inference._types import Found, Mean
from fedmcmc.pytrees import schedules, trees
from fedmcmc.surrogates import Target, as_gaussian, expand

__all__ = [
    "check_quadratic",
    "check_samples",
    "exact_mean",
    "exact_tilted",
    "found",
    "moments",
    "sgd_mean",
]


class _Sgd(NamedTuple):
    estimator: GradientEstimator
    training: Training
    row_curvature: Any  # () for none


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
    """Average the iterates that an optimiser reaches at the ends of epochs (SG-MCMC).

    The client descends ``(-log p(rows | theta) - log cavity(theta)) / n_k`` from the server's mean,
    on minibatches; the iterates at the ends of epochs are its samples. The optimiser's state is
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
        Rows a step; ``None`` for all of a client's.
    num_burnin
        Epochs (or windows) before the first sample; none in the paper.
    learning_rate
        Multiplies the optimiser's updates: a number, or a schedule of the round.
    weight_decay
        A factor ``N(0, I / (n_k * weight_decay))`` of every client's likelihood, as in the released
        code; in all, a prior of precision ``num_rows * weight_decay`` besides the posterior's own.
    row_curvature
        Second derivatives of a row's log likelihood that the optimiser's steps are made for. The
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
    settings = _Sgd(estimator, training(optimizer, length, learning_rate), curvature)
    return Mean(
        prepare=Partial(_prepare_sgd, settings),
        find=Partial(_find_sgd, settings),
        check=Partial(check_samples, settings.training),
        weight_decay=schedules.number(weight_decay, "weight_decay", minimum=0.0),
    )


def check_samples(
    settings: Training, posterior: Posterior, position: ArrayTree, data: FederatedData, second: Any
) -> None:
    """Raise `ValueError` where a variance is asked for of a single sample."""
    del posterior, position, data
    length = settings.length
    if second is not None and length.num_windows - length.num_burnin < 2:
        raise ValueError("A variance of samples takes num_samples of at least 2, got 1.")


def _prepare_sgd(settings: _Sgd, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    num = settings.training.length.most(client)
    return settings.estimator.prepare(rng_key, like, client, num)


class _Welford(NamedTuple):
    mean: ArrayTree
    scatter: ArrayTree  # (), shaped as the mean, or [d, d]


@dataclass(frozen=True, eq=False)
class _Moments(Visitor):
    second: str | None

    def init(self, position: ArrayTree) -> _Welford:
        scatter: ArrayTree = ()
        if self.second == "diagonal":
            scatter = trees.zeros_like(position)
        elif self.second == "dense":
            flat = trees.ravel(position)
            scatter = jnp.zeros((flat.size, flat.size), flat.dtype)
        return _Welford(trees.zeros_like(position), scatter)

    def visit(self, kept: _Welford, index: Array, last: ArrayTree, average: Any) -> _Welford:
        moved = trees.subtract(last, kept.mean)
        mean = trees.add_scaled(kept.mean, 1 / (index + 1).astype(jnp.result_type(float)), moved)
        left = trees.subtract(last, mean)
        if self.second is None:
            return _Welford(mean, ())
        if self.second == "diagonal":
            products = jax.tree.map(jnp.multiply, moved, left)
            return _Welford(mean, trees.add(kept.scatter, products))
        return _Welford(mean, kept.scatter + jnp.outer(trees.ravel(moved), trees.ravel(left)))


def moments(second: str | None) -> Visitor:
    """Return what keeps mean and scatter of the windows' last iterates."""
    return _Moments(second)


def _find_sgd(
    settings: _Sgd,
    posterior: Posterior,
    draws: ArrayTree,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
    second: str | None,
) -> Found:
    estimator, loglikelihood_fn = settings.estimator, posterior.loglikelihood_fn
    per_row = -1 / client.size.astype(client.share.dtype)
    # What a full gradient needs once: nothing that depends on the broadcast.
    context = estimator.start(loglikelihood_fn, Broadcast(round_, position), (), client)[0]

    metric: Any = None
    if not trees.is_empty(settings.row_curvature):
        metric = _metric(cavity, per_row, schedules.value(settings.row_curvature, round_))

    def gradient_fn(drawn: ArrayTree, at: ArrayTree) -> ArrayTree:
        estimate = estimator.estimate(loglikelihood_fn, drawn, at, context, client)
        gradient = trees.scale(per_row, trees.add(estimate, cavity.grad_log(at)))
        return gradient if metric is None else replace(metric, precision_mean=gradient).mean()

    trained = train(
        settings.training, gradient_fn, draws, position, client, round_, moments(second)
    )
    return found(trained, settings.training)


def _metric(cavity: Gaussian, per_row: Array, curvature: Array) -> Gaussian:
    """Return the Gaussian with precision ``1 + cavity precision / (n_k * curvature)``."""
    scaled = cavity ** (-per_row / curvature)
    if cavity.structure != "dense":
        # A cavity may have negative entries, which need no shorter steps.
        scaled = replace(scaled, precision=jax.tree.map(jax.nn.relu, scaled.precision))
    return plus_precision(scaled, jnp.ones_like(per_row))


def found(trained: Trained, settings: Training) -> Found:
    """Return the moments that `moments` kept."""
    length = settings.length
    divisor = max(length.num_windows - length.num_burnin - 1, 1)
    variance = jax.tree.map(lambda leaf: leaf / divisor, trained.kept.scatter)
    return Found(trained.kept.mean, variance, jnp.sqrt(trained.mean_square))


def exact_mean() -> Mean:
    """Solve for the mean, for log likelihoods that are quadratic in the position.

    Takes a matrix ``[d, d]`` a client. `init` refuses a log likelihood whose second derivatives
    differ between two positions.
    """
    return Mean(
        prepare=Partial(_prepare_nothing),
        find=Partial(_find_exact),
        check=Partial(check_quadratic),
        weight_decay=jnp.zeros((), jnp.result_type(float)),
    )


def _prepare_nothing(rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    del rng_key, like, client
    return ()


def exact_tilted(
    posterior: Posterior, position: ArrayTree, cavity: Gaussian, client: Client
) -> tuple[Gaussian, Array]:
    """Return likelihood times cavity for a quadratic log likelihood, dense, and its gradient."""
    flat, unravel = ravel_pytree(position)
    gradient, precision = expand(Target(posterior, None, unravel), client, flat, dense=True)
    dense = as_dense(cavity)
    tilted = as_gaussian(gradient, precision, flat, unravel) * dense
    total = gradient + trees.ravel(dense.grad_log(position))
    return tilted, jnp.sqrt(trees.squared_norm(total))


def _find_exact(
    posterior: Posterior,
    draws: ArrayTree,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
    second: str | None,
) -> Found:
    del draws, round_
    tilted, gradient_norm = exact_tilted(posterior, position, cavity, client)
    mean = tilted.mean()
    if second is None:
        return Found(mean, (), gradient_norm)
    covariance = tilted.covariance()
    if second == "dense":
        return Found(mean, covariance, gradient_norm)
    unravel = ravel_pytree(mean)[1]
    return Found(mean, unravel(jnp.diagonal(covariance)), gradient_norm)


def check_quadratic(
    posterior: Posterior, position: ArrayTree, data: FederatedData, second: Any = None
) -> None:
    """Raise `ValueError` unless the clients' log likelihoods have constant second derivatives.

    Compares those of all clients together, with random weights, at two positions.
    """
    del second
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((posterior, data))):
        return
    # `sample` maps `init` over chains: of a position that is traced the shape suffices.
    flat, unravel = ravel_pytree(position)
    centre = np.zeros(flat.shape) if isinstance(flat, jax.core.Tracer) else np.asarray(flat)
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        places = [jnp.asarray(centre + rng.normal(size=flat.shape), flat.dtype) for _ in range(2)]
        target = Target(posterior, None, unravel)
        client = data.pooled().client(0)
        first, other = (np.asarray(expand(target, client, at, dense=True)[1]) for at in places)
    if not np.allclose(first, other, rtol=1e-3, atol=1e-3 * np.abs(first).max()):
        raise ValueError(
            "The log likelihood is not quadratic in the position: its second derivatives differ by "
            f"{np.abs(first - other).max():.3g} between two positions, with entries up to "
            f"{np.abs(first).max():.3g}. Use means of samples (sgd_mean) instead."
        )
