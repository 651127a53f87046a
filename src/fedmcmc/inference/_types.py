"""What a client's inference is: a Gaussian for its likelihood times its cavity."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from fedmcmc._types import ArrayTree, Client
from fedmcmc.gaussian import Gaussian, plus_precision
from fedmcmc.pytrees import schedules

__all__ = ["Found", "Inference", "Mean", "Tilted", "with_decay"]


class Tilted(NamedTuple):
    """A Gaussian for the tilted distribution, and the gradients' root mean square ``[]``."""

    gaussian: Gaussian
    gradient_norm: Array


class Inference(NamedTuple):
    """A client's approximation of its likelihood times its cavity.

    Attributes
    ----------
    prepare
        ``(rng_key, like, client) -> draws``: all that is random in a fit. `like` is the position's
        shapes.
    fit
        ``(posterior, draws, position, cavity, client, round) -> Tilted``, of the cavity's
        structure; deterministic. `position` is where the server's mean is.
    check
        ``(posterior, position, data, structure) -> None``, raises `ValueError` where it does not
        fit.
    """

    prepare: Callable[..., ArrayTree]
    fit: Callable[..., Tilted]
    check: Callable[..., None]


class Found(NamedTuple):
    """Moments of the tilted distribution.

    `mean` is shaped as a position; `variance` is ``()``, a tree of variances, or a covariance
    ``[d, d]``, as was asked for; `gradient_norm` ``[]``.
    """

    mean: ArrayTree
    variance: ArrayTree
    gradient_norm: Array


class Mean(NamedTuple):
    """A way to the tilted distribution's mean, and to what it sees of its covariance on that way.

    Attributes
    ----------
    prepare
        As that of `Inference`.
    find
        ``(posterior, draws, position, cavity, client, round, second) -> Found``; `second` is
        ``None``, ``"diagonal"`` or ``"dense"``. The cavity contains the factor of `weight_decay`.
    check
        ``(posterior, position, data, second) -> None``.
    weight_decay
        ``[]``: each client's likelihood has a factor ``N(0, I / (num_rows * weight_decay))``.
    """

    prepare: Callable[..., ArrayTree]
    find: Callable[..., Found]
    check: Callable[..., None]
    weight_decay: Any


def with_decay(mean: Mean, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
    """Return the cavity times the factor of the client's likelihood that is a weight decay."""
    decay = schedules.value(mean.weight_decay, round_)
    return plus_precision(cavity, client.size.astype(client.share.dtype) * decay)
