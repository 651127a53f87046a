"""What several kernel families do in the same way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Participation,
    PerClient,
    Phase,
    Posterior,
    Reference,
    StepInfo,
    as_functions,
)
from fedmcmc.gradients import first_reference, next_broadcast, prior_share
from fedmcmc.pytrees import trees
from fedmcmc.random import normals

__all__ = [
    "EstimatorKernel",
    "LocalDraws",
    "SumOverClients",
    "bits_down",
    "check_model",
    "client_weights",
    "expect_blocks",
    "first_sums",
    "mean_loss",
    "move_by_total",
    "prepare_local_steps",
    "refuse_partial_sums",
    "sent_info",
]


PROBE_ROWS = 11
"""Rows of which a model is asked for the shapes: a size that a position hardly has."""


class LocalDraws(NamedTuple):
    """All that is random in a client's local Langevin steps."""

    noise: ArrayTree  # leaves [num_local_steps, *event], or keys [num_local_steps]
    gradient: ArrayTree  # leaves [num_local_steps, ...]


class EstimatorKernel(FederatedKernel):
    """A kernel whose clients estimate gradients of their log likelihoods.

    Attributes
    ----------
    posterior, estimator
        The model, and the estimator; fields of every subclass.
    """

    posterior: Posterior
    estimator: GradientEstimator

    @property
    def constrain_fn(self) -> Callable[[ArrayTree], ArrayTree] | None:
        """The posterior's."""
        return self.posterior.constrain_fn

    def first_broadcast(
        self, position: ArrayTree, federation: Federation, *, sums: bool = False
    ) -> Broadcast:
        """Return the first broadcast, after all checks.

        `sums` tells that the kernel's rounds begin with the phase of `first_sums`.

        Raises
        ------
        ValueError
            If blocks, model, position and data do not fit together.
        """
        estimator = self.estimator
        if estimator.needs_sum and not sums:
            raise ValueError(
                "This estimator needs the sum of all clients' gradients before each round "
                "(scaffold), which only kernels give whose clients move by themselves and are "
                "averaged."
            )
        self.participation.check(federation.num_clients)
        position = jax.tree.map(trees.as_float, position)
        check_model(self.posterior, position, federation)
        estimator.check(position, federation)
        return Broadcast(jnp.zeros((), jnp.int32), position, first_reference(estimator, position))

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        """Return what the client's estimator keeps."""
        return self.estimator.init(self.posterior.loglikelihood_fn, broadcast.position, client)


def prepare_local_steps(
    estimator: GradientEstimator,
    num_local_steps: int,
    rng_key: Array,
    like: Broadcast,
    client: Client,
) -> LocalDraws:
    """Draw the noise and the minibatches of a round's local Langevin steps."""
    noise_key, gradient_key = jax.random.split(rng_key)
    return LocalDraws(
        normals(noise_key, like.position, num_local_steps),
        estimator.prepare(gradient_key, like.position, client, num_local_steps),
    )


def move_by_total(reference: Reference | None, broadcast: Broadcast, total: ArrayTree) -> Broadcast:
    """Move the chain by the sum of displacements."""
    return next_broadcast(reference, broadcast, trees.add(broadcast.position, total))


def expect_blocks(
    posterior: Posterior, estimator: GradientEstimator, participation: Participation
) -> None:
    """Raise `TypeError` unless each is what a kernel family is built of."""
    expect(posterior, Posterior, "posterior")
    expect(estimator, GradientEstimator, "estimator")
    expect(participation, Participation, "participation")


def check_model(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the log densities take this position and these rows."""
    like = trees.shapes_of(position)
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape[1:]), leaf.dtype),
        federation.rows,
    )
    shape = _shape_of("logprior_fn", posterior.logprior_fn, like)
    if shape != ():
        raise ValueError(f"logprior_fn must return a scalar, got shape {shape}.")
    shape = _shape_of("loglikelihood_fn", posterior.loglikelihood_fn, like, rows)
    if shape != (PROBE_ROWS,):
        raise ValueError(
            f"loglikelihood_fn must return one term per row, shape ({PROBE_ROWS},) for "
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
        description = f"a position of shapes {jax.tree.map(lambda x: x.shape, position)}"
        for leaves in rows:
            description += f" and rows of shapes {jax.tree.map(lambda x: x.shape, leaves)}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} does not take {description}: {reason}") from error


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
    reference = estimator.reference
    if reference is None:
        return down
    missing = reference.missing(broadcast, client_state)
    return (down + jnp.where(missing, trees.num_bits(broadcast.extra), 0)).astype(jnp.int32)


@register_dataclass
@dataclass(frozen=True, eq=False)
class SumOverClients(Phase):
    """A phase that sums over clients what an estimator needs summed, into `Broadcast.summed`."""

    posterior: Posterior
    estimator: GradientEstimator

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        """Return the client's term."""
        message = self.estimator.summed(self.posterior.loglikelihood_fn, broadcast, client)
        # No bits down: the position, which the kernel's own phase counts.
        return message, client_state, sent_info(message, bits_down=jnp.zeros((), jnp.int32))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        """Broadcast the sum."""
        return broadcast._replace(summed=total), server_state, ()


def sent_info(message: ArrayTree, **fields: Any) -> StepInfo:
    """Return the report of a step whose message is a gradient."""
    return StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(trees.squared_norm(message)),
        **fields,
    )


def first_sums(posterior: Posterior, estimator: GradientEstimator) -> tuple[Phase, ...]:
    """Return the phase that sums what the estimator needs summed, if it needs anything."""
    return (SumOverClients(posterior, estimator),) if estimator.needs_sum else ()


def refuse_partial_sums(estimator: GradientEstimator, participation: Participation) -> None:
    """Raise `ValueError` where a cohort's sum of gradients would stand for that of all clients.

    The cohort's sum, times the cohort's weights, is a product of two things that are random
    together, whose mean is not the product of their means.
    """
    if estimator.needs_sum and (participation.cohort_size or participation.drops):
        raise ValueError(
            "Control variates (scaffold) need the gradients of all clients, or they bias the mean: "
            "use full participation."
        )


def client_weights(weights: Any) -> PerClient | None:
    """Return weights of clients in a weighted average, ``None`` for their shares of rows.

    Raises
    ------
    ValueError
        If they are not one positive number per client, or do not sum to one.
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
