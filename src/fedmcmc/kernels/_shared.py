"""What several kernel families do in the same way."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Exchange,
    FederatedState,
    GradientEstimator,
    Participation,
    PerClient,
    Posterior,
    Reference,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.gradients import first_reference, next_broadcast, prior_share
from fedmcmc.pytrees import trees
from fedmcmc.random import normals, realise_normals

__all__ = [
    "LocalDraws",
    "bits_down",
    "chain_position",
    "check_model",
    "client_weights",
    "expect_blocks",
    "first_sums",
    "mean_loss",
    "move_by_total",
    "prepare_local_steps",
    "prepare_server_noise",
    "refuse_partial_sums",
    "start",
]


PROBE_ROWS = 11
"""Rows of which a model is asked for the shapes: a size that a position hardly has."""


class LocalDraws(NamedTuple):
    """All that is random in a client's local Langevin steps."""

    noise: ArrayTree  # leaves [num_local_steps, *event], or keys [num_local_steps]
    gradient: ArrayTree  # leaves [num_local_steps, ...]


def prepare_local_steps(
    estimator: GradientEstimator,
    num_local_steps: Static[int],
    rng_key: Array,
    like: Broadcast,
    client: Client,
) -> LocalDraws:
    """Draw the noise and the minibatches of a round's local Langevin steps."""
    noise_key, gradient_key = jax.random.split(rng_key)
    num = num_local_steps.value
    return LocalDraws(
        normals(noise_key, like.position, num),
        estimator.prepare(gradient_key, like.position, client, num),
    )


def prepare_server_noise(rng_key: Array, like: Broadcast) -> ArrayTree:
    """Draw one standard normal, shaped as the position, for the server."""
    return realise_normals(rng_key, like.position)


def chain_position(rng_key: Array, state: FederatedState) -> ArrayTree:
    """Return the chain's position: the draw of every kernel that moves one."""
    del rng_key
    return state.broadcast.position


def move_by_total(
    reference: Reference | None,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: ArrayTree,
    total: ArrayTree,
) -> tuple[Broadcast, ArrayTree, ArrayTree]:
    """Aggregate displacements: move the chain by their sum."""
    del rng_key
    position = trees.add(broadcast.position, total)
    return next_broadcast(reference, broadcast, position), server_state, ()


def expect_blocks(
    posterior: Posterior, estimator: GradientEstimator, participation: Participation
) -> None:
    """Raise `TypeError` unless each is what a kernel family is built of."""
    expect(posterior, Posterior, "posterior")
    expect(estimator, GradientEstimator, "estimator")
    expect(participation, Participation, "participation")


def start(
    posterior: Posterior,
    estimator: GradientEstimator,
    participation: Participation,
    position: ArrayTree,
    data: FederatedData,
    *,
    sums: bool = False,
) -> tuple[Broadcast, ArrayTree]:
    """Return the first broadcast and what the clients' estimators keep, after all checks.

    `sums` tells that the kernel's rounds begin with the exchange of `first_sums`.

    Raises
    ------
    ValueError
        If blocks, model, position and data do not fit together.
    """
    if estimator.summed is not None and not sums:
        raise ValueError(
            "This estimator needs the sum of all clients' gradients before each round (scaffold), "
            "which only kernels give whose clients move by themselves and are averaged."
        )
    participation.check(data.num_clients)
    position = jax.tree.map(trees.as_float, position)
    check_model(posterior, position, data)
    estimator.check(position, data)
    clients = _first_estimator_states(posterior, estimator, position, data)
    reference = first_reference(estimator, position)
    return Broadcast(jnp.zeros((), jnp.int32), position, reference), clients


def check_model(posterior: Posterior, position: ArrayTree, data: FederatedData) -> None:
    """Raise `ValueError` unless the log densities take this position and these rows."""
    like = trees.shapes_of(position)
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape[1:]), leaf.dtype), data.rows
    )
    shape = _shape_of("logprior_fn", posterior.logprior_fn, like)
    if shape != ():
        raise ValueError(f"logprior_fn must return a scalar, got shape {shape}.")
    shape = _shape_of("loglikelihood_fn", posterior.loglikelihood_fn, like, rows)
    if shape != (PROBE_ROWS,):
        raise ValueError(
            f"loglikelihood_fn must return one term a row, shape ({PROBE_ROWS},) for "
            f"{PROBE_ROWS} rows, got {shape}."
        )


@jax.jit
def _called(fn: Any, *arguments: ArrayTree) -> Any:
    return fn(*arguments)


def _shape_of(name: str, fn: Any, position: ArrayTree, *rows: ArrayTree) -> Any:
    try:
        # Partials: jit then remembers the trace, so that another kernel of the model needs none.
        return _called.trace(as_functions(fn), position, *rows).out_info.shape
    except Exception as error:
        given = f"a position of shapes {jax.tree.map(lambda x: x.shape, position)}"
        for leaves in rows:
            given += f" and rows of shapes {jax.tree.map(lambda x: x.shape, leaves)}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} does not take {given}: {reason}") from error


def _first_estimator_states(
    posterior: Posterior, estimator: GradientEstimator, position: ArrayTree, data: FederatedData
) -> ArrayTree:
    """Return what the clients' estimators keep at the start, leaves ``[num_clients, ...]``."""
    init = Partial(estimator.init, posterior.loglikelihood_fn, position)
    if data.at_a_time is None:
        return jax.vmap(init, in_axes=(data.client_axes(),))(data.everyone())

    def one(index: Array) -> ArrayTree:
        return init(data.client(index))

    # As many together as in a round: then a client's numbers are the same whoever else is there.
    ids = data.everyone().index
    return jax.lax.map(one, ids, batch_size=None if data.at_a_time == 1 else data.at_a_time)


def mean_loss(
    posterior: Posterior,
    estimator: GradientEstimator,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[Callable[[ArrayTree, ArrayTree], ArrayTree], ArrayTree]:
    """Return the gradient of a client's loss in a round, and its estimator's new state.

    The loss is minus the mean over the client's rows of the log likelihood and of its share of the
    log prior (``log prior / num_rows``, the same for all).
    """
    loglikelihood_fn = posterior.loglikelihood_fn
    context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)
    per_row = -1 / client.size.astype(client.share.dtype)

    def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
        estimate = estimator.estimate(loglikelihood_fn, drawn, position, context, client)
        prior = prior_share(client, jax.grad(posterior.logprior_fn)(position))
        return trees.scale(per_row, trees.add(estimate, prior))

    return gradient_fn, client_state


def bits_down(estimator: GradientEstimator, broadcast: Broadcast, client_state: ArrayTree) -> Array:
    """Return the bits sent to a client: the position, earlier sums, the reference it lacks."""
    sent = trees.num_bits(broadcast.position) + trees.num_bits(broadcast.summed)
    down = jnp.asarray(sent, jnp.int32)
    if estimator.reference is None:
        return down
    missing = estimator.reference.missing(broadcast, client_state)
    return (down + jnp.where(missing, trees.num_bits(broadcast.extra), 0)).astype(jnp.int32)


def first_sums(posterior: Posterior, estimator: GradientEstimator) -> tuple[Exchange, ...]:
    """Return the exchange that sums what the estimator needs summed, if it needs anything."""
    if estimator.summed is None:
        return ()
    step = Partial(_step_of_sum, as_functions(posterior), estimator.summed)
    return (Exchange(Partial(_prepare_nothing), step, Partial(_put_sum)),)


def refuse_partial_sums(estimator: GradientEstimator, participation: Participation) -> None:
    """Raise `ValueError` where a cohort's sum of gradients would stand for that of all clients.

    The cohort's sum, times the cohort's weights, is a product of two things that are random
    together, whose mean is not the product of their means.
    """
    if estimator.summed is not None and (participation.cohort_size or participation.drops):
        raise ValueError(
            "Control variates (scaffold) need the gradients of all clients, or they bias the mean: "
            "use full participation."
        )


def _prepare_nothing(rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
    del rng_key, like, client
    return ()


def _step_of_sum(
    posterior: Posterior,
    summed: Any,
    draws: ArrayTree,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[ArrayTree, ArrayTree, StepInfo]:
    del draws
    message = summed(posterior.loglikelihood_fn, broadcast, client)
    info = StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(trees.squared_norm(message)),
        bits_down=jnp.zeros((), jnp.int32),  # the position, which the kernel's own exchange counts
    )
    return message, client_state, info


def _put_sum(
    rng_key: Array, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
) -> tuple[Broadcast, ArrayTree, ArrayTree]:
    del rng_key
    return broadcast._replace(summed=total), server_state, ()


def client_weights(weights: Any) -> PerClient | None:
    """Return weights of clients in a weighted average, ``None`` for their shares of rows.

    Raises
    ------
    ValueError
        If they are not one positive number a client, or do not sum to one.
    """
    if weights is None:
        return None
    table = jnp.asarray(weights, jnp.result_type(float))
    if table.ndim != 1:
        raise ValueError(f"weights must have shape [num_clients], got shape {table.shape}.")
    if not isinstance(table, jax.core.Tracer):
        values = np.asarray(table, np.float64)
        if not (np.isfinite(values).all() and values.min() > 0 and abs(values.sum() - 1) < 1e-4):
            raise ValueError(
                f"weights must be positive and sum to one, got a sum of {values.sum():.6g} and a "
                f"smallest entry of {values.min():.6g}."
            )
    return PerClient(table)
