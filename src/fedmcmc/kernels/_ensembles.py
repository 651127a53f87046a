"""What a server fits to its clients' models, of which it only sees sums."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Static
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import integers_below, normals, realise_normals

__all__ = ["Ensemble", "dirichlet_ensemble", "gaussian_ensemble"]


class Ensemble(NamedTuple):
    """A distribution of models, fitted to sums over the clients' models.

    A client's model is told as `moved`, how far its training took it from the broadcast position;
    its weight is inside the message, so that whoever takes part, a mean is one of those who did.

    Attributes
    ----------
    init
        ``position -> fitted``, before the first round. What is fitted has a ``.mean``, the
        weighted mean of the clients' models.
    prepare
        ``rng_key -> draws``, all that is random in a client's message.
    message
        ``(draws, share, moved) -> message``, to be summed over clients.
    fit
        ``(position, total, previous) -> fitted``; `previous` again where the weights sum to zero.
    draw
        ``(rng_key, fitted) -> position``, one member.
    members
        ``(rng_key, fitted) -> positions``, leaves ``[num_models, *event]``.
    """

    init: Callable[..., Any]
    prepare: Callable[..., ArrayTree]
    message: Callable[..., ArrayTree]
    fit: Callable[..., Any]
    draw: Callable[..., ArrayTree]
    members: Callable[..., ArrayTree]


class _Moments(NamedTuple):
    weight: Array  # []
    first: ArrayTree  # weight times moved
    second: ArrayTree  # weight times moved squared


class _Gaussian(NamedTuple):
    mean: ArrayTree
    scale: ArrayTree  # standard deviations


def gaussian_ensemble(num_models: int = 10) -> Ensemble:
    """Fit a normal distribution with the mean and the diagonal covariance of the clients' models.

    Both are weighted by the clients' shares of the rows: ``mean = sum_i p_i w_i`` and
    ``variance = sum_i p_i (w_i - mean)^2``, where shares are rescaled to sum to one over those
    who take part. Members are drawn anew with every key.

    Parameters
    ----------
    num_models
        Members that a distiller is given.

    Notes
    -----
    The server sees sums of first and second moments about the round's start. In float32 the
    standard deviation of a coordinate is lost where it is below about 3e-4 of how far the mean
    moved in the round.

    Examples
    --------
    >>> family = gaussian_ensemble()
    >>> total = family.message((), 0.5, jnp.array([1.0])), family.message((), 0.5, jnp.array([3.0]))
    >>> fitted = family.fit(jnp.zeros(1), trees.add(*total), family.init(jnp.zeros(1)))
    >>> fitted.mean.tolist(), fitted.scale.tolist()
    ([2.0], [1.0])
    """
    num = Static(positive_integer(num_models, "num_models"))
    return Ensemble(
        init=Partial(_init_gaussian),
        prepare=Partial(_prepare_nothing),
        message=Partial(_say_moments),
        fit=Partial(_fit_gaussian),
        draw=Partial(_draw_gaussian),
        members=Partial(_gaussian_members, num),
    )


def _init_gaussian(position: ArrayTree) -> _Gaussian:
    return _Gaussian(position, trees.zeros_like(position))


def _prepare_nothing(rng_key: Array) -> ArrayTree:
    del rng_key
    return ()


def _say_moments(draws: ArrayTree, share: Array, moved: ArrayTree) -> _Moments:
    del draws
    squares = jax.tree.map(jnp.square, moved)
    return _Moments(jnp.asarray(share), trees.scale(share, moved), trees.scale(share, squares))


def _fit_gaussian(position: ArrayTree, total: _Moments, previous: _Gaussian) -> _Gaussian:
    known = total.weight > 0
    per_weight = 1 / jnp.where(known, total.weight, 1)
    mean = trees.scale(per_weight, total.first)
    # Rounding, or a compressor's noise, may leave a variance of zero below zero.
    scale = jax.tree.map(
        lambda square, m: jnp.sqrt(jnp.maximum(square - m * m, 0)),
        trees.scale(per_weight, total.second),
        mean,
    )
    return trees.select(known, _Gaussian(trees.add(position, mean), scale), previous)


def _draw_gaussian(rng_key: Array, fitted: _Gaussian) -> ArrayTree:
    return _member(fitted, realise_normals(rng_key, fitted.mean))


def _member(fitted: _Gaussian, noise: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda m, s, z: m + s * z, fitted.mean, fitted.scale, noise)


def _gaussian_members(num: Static[int], rng_key: Array, fitted: _Gaussian) -> ArrayTree:
    drawn = normals(rng_key, fitted.mean, num.value)
    return jax.vmap(lambda z: _member(fitted, realise_normals(z, fitted.mean)))(drawn)


class _Sums(NamedTuple):
    weight: Array  # [1 + num_models]
    moved: ArrayTree  # leaves [1 + num_models, *event], weight times moved


class _Members(NamedTuple):
    mean: ArrayTree
    models: ArrayTree  # leaves [num_models, *event]


def dirichlet_ensemble(concentration: float | Array = 0.5, num_models: int = 10) -> Ensemble:
    """Make members that are means of the clients' models with random weights.

    Member ``m`` is ``sum_i g_im p_i w_i / sum_i g_im p_i`` with shares ``p_i`` of the rows and
    ``g_im ~ Gamma(concentration)``, drawn by client ``i``: proportional to a Dirichlet vector.

    Parameters
    ----------
    concentration
        Of the symmetric Dirichlet distribution, ``alpha``. Small ones make members that are close
        to single clients' models, large ones members close to the mean.
    num_models
        Members a round. A client sends one weighted model for each, and one for the mean.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> family = dirichlet_ensemble(0.5, num_models=3)
    >>> draws = family.prepare(jax.random.key(0))
    >>> family.message(draws, 0.5, jnp.zeros(2)).moved.shape
    (4, 2)
    """
    alpha = schedules.number(concentration, "concentration", minimum=0.0, strict=True)
    if isinstance(alpha, schedules.Scheduled):
        raise TypeError("concentration must be a number; a schedule is not supported.")
    num = Static(positive_integer(num_models, "num_models"))
    return Ensemble(
        init=Partial(_init_members, num),
        prepare=Partial(_prepare_gammas, alpha, num),
        message=Partial(_say_sums),
        fit=Partial(_fit_members),
        draw=Partial(_draw_member, num),
        members=Partial(_all_members),
    )


def _init_members(num: Static[int], position: ArrayTree) -> _Members:
    return _Members(
        position, jax.tree.map(lambda x: jnp.broadcast_to(x, (num.value, *x.shape)), position)
    )


def _prepare_gammas(alpha: Array, num: Static[int], rng_key: Array) -> Array:
    return jax.random.gamma(rng_key, alpha, (num.value,))


def _column(vector: Array, leaf: Array) -> Array:
    return trees.cast(vector, leaf).reshape(vector.shape + (1,) * (leaf.ndim - 1))


def _say_sums(draws: Array, share: Array, moved: ArrayTree) -> _Sums:
    # The mean is the member whose weights are not random.
    weight = trees.cast(share, draws) * jnp.concatenate([jnp.ones_like(draws[:1]), draws])
    return _Sums(weight, jax.tree.map(lambda x: _column(weight, x[None]) * x[None], moved))


def _fit_members(position: ArrayTree, total: _Sums, previous: _Members) -> _Members:
    known = total.weight > 0
    per_weight = 1 / jnp.where(known, total.weight, 1)

    def leafwise(at: Array, moved: Array, mean: Array, models: Array) -> Array:
        old = jnp.concatenate([mean[None], models])
        return jnp.where(_column(known, old), at[None] + _column(per_weight, moved) * moved, old)

    new = jax.tree.map(leafwise, position, total.moved, previous.mean, previous.models)
    return _Members(jax.tree.map(lambda x: x[0], new), jax.tree.map(lambda x: x[1:], new))


def _draw_member(num: Static[int], rng_key: Array, fitted: _Members) -> ArrayTree:
    chosen = integers_below(rng_key, jnp.asarray(num.value), ())
    return jax.tree.map(lambda x: x[chosen], fitted.models)


def _all_members(rng_key: Array, fitted: _Members) -> ArrayTree:
    del rng_key
    return fitted.models
