"""One transform of gradient estimates: what is added to each client's sums to a known total.

A client's estimate ``H_c(theta)`` becomes ``H_c(theta) + share_c grad log q(theta) - grad log
q_c(theta)`` with ``q`` the product of the ``q_c`` and shares that sum to one, so the sum over
clients is left alone. The ``q_c`` are Gaussian (conducive gradients), or log-linear with the slope
that the estimate itself has at an anchor, with the same draws: a snapshot (SVRG), the position
broadcast (SCAFFOLD), or a fixed point, where ``log q`` may be left to the server (QLSD*).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Broadcast, Client, GradientEstimator, Reference
from fedmcmc.pytrees import trees

__all__ = ["Correction", "zero_sum"]


class Correction(NamedTuple):
    """What a round adds to a client's estimates; a part that is ``()`` is left out.

    Attributes
    ----------
    slope
        Shaped as the position: a gradient that is added as it is.
    log_q
        A `Gaussian` the gradient of whose logarithm is added.
    anchor
        A position; the estimate there, with the same draws, is subtracted.
    """

    slope: ArrayTree = ()
    log_q: Any = ()
    anchor: ArrayTree = ()


class _Context(NamedTuple):
    inner: ArrayTree
    correction: Correction


def zero_sum(
    estimator: GradientEstimator,
    correction_fn: Callable[..., tuple[Correction, ArrayTree]],
    *,
    init: Callable[..., ArrayTree] | None = None,
    check: Callable[..., None] | None = None,
    reference: Reference | None = None,
    summed: Callable[..., ArrayTree] | None = None,
) -> GradientEstimator:
    """Add a correction to the estimates of `estimator`.

    Parameters
    ----------
    estimator
        What is corrected.
    correction_fn
        ``(loglikelihood_fn, broadcast, own, client) -> (Correction, own)``, once a round.
    init
        ``(loglikelihood_fn, position, client) -> own``, what a client keeps for its corrections;
        without it, `own` is ``()`` and the clients keep what `estimator` keeps.
    check, reference, summed
        As in `GradientEstimator`; those of `estimator` are kept where none is given.

    Raises
    ------
    ValueError
        If both need a reference, or both need a sum.
    """
    for name, given in (("reference", reference), ("summed", summed)):
        if given is not None and getattr(estimator, name) is not None:
            raise ValueError(
                "This correction goes around an estimator that is not itself relative to a "
                "snapshot or to the broadcast position."
            )
    keeps = init is not None
    return GradientEstimator(
        init=Partial(_init, estimator, init) if keeps else estimator.init,
        prepare=estimator.prepare,
        start=Partial(_start_own if keeps else _start, estimator, correction_fn),
        estimate=Partial(_estimate, estimator),
        check=estimator.check if check is None else Partial(_check_both, estimator.check, check),
        reference=reference or estimator.reference,
        summed=summed or estimator.summed,
    )


def _init(
    estimator: GradientEstimator,
    init: Callable[..., ArrayTree],
    loglikelihood_fn: Any,
    position: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree]:
    own = init(loglikelihood_fn, position, client)
    return own, estimator.init(loglikelihood_fn, position, client)


def _start(
    estimator: GradientEstimator,
    correction_fn: Callable[..., tuple[Correction, ArrayTree]],
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    state: ArrayTree,
    client: Client,
) -> tuple[_Context, ArrayTree]:
    inner, state = estimator.start(loglikelihood_fn, broadcast, state, client)
    correction, _ = correction_fn(loglikelihood_fn, broadcast, (), client)
    return _Context(inner, correction), state


def _start_own(
    estimator: GradientEstimator,
    correction_fn: Callable[..., tuple[Correction, ArrayTree]],
    loglikelihood_fn: Any,
    broadcast: Broadcast,
    state: tuple[ArrayTree, ArrayTree],
    client: Client,
) -> tuple[_Context, tuple[ArrayTree, ArrayTree]]:
    inner, inner_state = estimator.start(loglikelihood_fn, broadcast, state[1], client)
    correction, own = correction_fn(loglikelihood_fn, broadcast, state[0], client)
    return _Context(inner, correction), (own, inner_state)


def _estimate(
    estimator: GradientEstimator,
    loglikelihood_fn: Any,
    draws: ArrayTree,
    position: ArrayTree,
    context: _Context,
    client: Client,
) -> ArrayTree:
    slope, log_q, anchor = context.correction

    def at(place: ArrayTree) -> ArrayTree:
        return estimator.estimate(loglikelihood_fn, draws, place, context.inner, client)

    if trees.is_empty(anchor):
        gradient = at(position)
    else:
        # Both places in one call: linear algebra on the rows is done once, on twice the columns.
        other = trees.cast_like(anchor, position)
        both = jax.vmap(at)(jax.tree.map(lambda a, b: jnp.stack([a, b]), position, other))
        gradient = jax.tree.map(lambda g: g[0] - g[1], both)
    if not trees.is_empty(slope):
        gradient = trees.add(gradient, trees.cast_like(slope, gradient))
    if not trees.is_empty(log_q):
        gradient = trees.add(gradient, log_q.grad_log(position))
    return gradient


def _check_both(
    inner: Callable[..., None], own: Callable[..., None], position: ArrayTree, data: Any
) -> None:
    inner(position, data)
    own(position, data)
