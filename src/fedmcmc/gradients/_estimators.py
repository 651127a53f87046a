"""Exact gradients of a client's log likelihood, and estimators derived from other estimators."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.data import own_rows, single_chunk
from fedmcmc.gradients._terms import Terms, fold_terms, row_terms
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    ClientTerms,
    Disclosure,
    Federation,
    GradientEstimator,
    LogDensity,
    Number,
    PerClient,
    Reference,
    register_dataclass,
)


def client_gradient(loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
    """Return the gradient of the client's log likelihood, summed over all its rows."""

    def chunk_gradient(terms_fn: Terms, mask: Array) -> ArrayTree:
        return jax.grad(lambda theta: jnp.sum(jnp.where(mask, terms_fn(theta), 0)))(position)

    return fold_terms(loglikelihood_fn, chunk_gradient, client)


def sum_gradient(
    loglikelihood_fn: LogDensity,
    position: ArrayTree,
    rows: ArrayTree,
    mask: Array | None = None,
) -> ArrayTree:
    """Return the gradient of the log likelihood, summed over the `rows` under `mask`."""

    def total(position_: ArrayTree) -> Array:
        terms = row_terms(loglikelihood_fn, position_, rows)
        return jnp.sum(terms if mask is None else jnp.where(mask, terms, 0))

    return jax.grad(total)(position)


def check_prepared(is_prepared: bool, estimator: str) -> None:
    """Raise `ValueError` unless an estimator received the result of its `prepare`."""
    if not is_prepared:
        raise ValueError(
            f"{estimator} received no draws: the kernel's prepare must return the result of "
            "estimator.prepare, as in fedmcmc.kernels.EstimatorKernel (docs/guides/extend.md)."
        )


def contains(tree: ArrayTree, kind: type) -> bool:
    """Return whether a kernel or estimator is, or contains, an instance of `kind`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def as_weights(values: Array | None) -> PerClient | None:
    """Return clients' weights ``[num_clients]``; ``None`` means shares of rows."""
    return None if values is None else PerClient(jnp.asarray(values, jnp.result_type(float)))


def weight_of(client: Client, weights: PerClient | None) -> Array:
    """Return the client's weight ``[]``."""
    return client.share if weights is None else weights.of(client)


def check_weights(name: str, weights: PerClient | None, federation: Federation) -> None:
    """Raise `ValueError` unless there is one weight per client."""
    if weights is not None and weights.values.shape != (federation.num_clients,):
        raise ValueError(
            f"{name} must have shape ({federation.num_clients},), one per client, got "
            f"{weights.values.shape}."
        )


def first_reference(estimator: GradientEstimator, position: ArrayTree) -> ArrayTree:
    """Return the reference that the first round broadcasts, ``()`` if there is none."""
    reference = estimator.reference
    return () if reference is None else reference.update(jnp.zeros((), jnp.int32), position, None)


def next_broadcast(
    reference: Reference | None, broadcast: Broadcast, position: ArrayTree
) -> Broadcast:
    """Return the next round's broadcast, with the server's new position."""
    round_ = broadcast.round + 1
    if reference is None:
        return broadcast._replace(round=round_, position=position)
    return Broadcast(round_, position, reference.update(round_, position, broadcast.extra))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FullGradient(GradientEstimator):
    """Exact gradient over all rows of the client; see `full_gradient`."""

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        # If all rows fit into one chunk, gather them once per round.
        gathers = single_chunk(client) and not isinstance(loglikelihood_fn, ClientTerms)
        return (own_rows(client) if gathers else ()), state

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: ArrayTree,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        if trees.is_empty(context):
            return client_gradient(loglikelihood_fn, position, client)
        return sum_gradient(loglikelihood_fn, position, *context)


def full_gradient() -> GradientEstimator:
    """Return the exact gradient over all of the client's rows."""
    return FullGradient()


class Derived(GradientEstimator):
    """Base of estimators around an inner `estimator`, to which methods delegate by default."""

    estimator: GradientEstimator  # a field of every subclass

    @property
    def reference(self) -> Reference | None:
        return self.estimator.reference

    @property
    def needs_sum(self) -> bool:
        return self.estimator.needs_sum

    def init(self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
        return self.estimator.init(loglikelihood_fn, position, client)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> ArrayTree:
        return self.estimator.prepare(rng_key, like, client, num_calls)

    def summed(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, client: Client
    ) -> ArrayTree:
        return self.estimator.summed(loglikelihood_fn, broadcast, client)

    def check(self, position: ArrayTree, federation: Federation) -> None:
        self.estimator.check(position, federation)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Noisy(Derived):
    """Estimator with added Gaussian noise; see `noisy`."""

    disclosure = Disclosure("no separate question: allows gradients to which the site adds noise")

    estimator: GradientEstimator
    scale: Number
    weights: PerClient | None  # None for shares of rows
    weighted: bool = field(metadata={"static": True})

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int
    ) -> tuple[ArrayTree, ArrayTree]:
        inner_key, noise_key = jax.random.split(rng_key)
        inner = self.estimator.prepare(inner_key, like, client, num_calls)
        return inner, normals(noise_key, like, num_calls)

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
        """Add the round's standard deviation to the estimator's context."""
        context, state = self.estimator.start(loglikelihood_fn, broadcast, state, client)
        sd = schedules.value(self.scale, broadcast.round)
        if self.weighted:
            sd = sd * weight_of(client, self.weights)
        return (context, sd), state

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: tuple[ArrayTree, ArrayTree],
        position: ArrayTree,
        context: tuple[ArrayTree, Array],
        client: Client,
    ) -> ArrayTree:
        check_prepared(isinstance(draws, tuple) and len(draws) == 2, "noisy")
        inner, sd = context
        gradient = self.estimator.estimate(loglikelihood_fn, draws[0], position, inner, client)
        return trees.add_scaled(gradient, sd, realize_normals(draws[1], position))

    def check(self, position: ArrayTree, federation: Federation) -> None:
        super().check(position, federation)
        check_weights("weights", self.weights, federation)


def noisy(
    estimator: GradientEstimator,
    scale: Number,
    *,
    weighted: bool = False,
    weights: Array | None = None,
) -> GradientEstimator:
    """Add Gaussian noise of standard deviation `scale` to each coordinate of an estimate.

    The noise does not depend on the position, so samplers on Gaussian targets still have an exact
    stationary distribution. Inside `svrg`, `fixed_point` or `scaffold` the noise cancels: put
    `noisy` around them instead.

    Parameters
    ----------
    estimator
        Estimator to which noise is added.
    scale
        Standard deviation, a number or schedule of the round.
    weighted
        If true, `scale` refers to the gradient of the client's weighted loss (minus its log
        likelihood over its weight), so it is multiplied by the client's weight.
    weights
        Weights ``[num_clients]`` if `weighted`; by default a client's share of rows.

    Raises
    ------
    ValueError
        If a number is out of range, or weights are passed for noise that is not weighted.
    """
    expect(estimator, GradientEstimator, "estimator")
    if weights is not None and not weighted:
        raise ValueError("noisy takes weights only with weighted=True.")
    sd = schedules.number(scale, "scale", minimum=0.0)
    return Noisy(estimator, sd, as_weights(weights), bool(weighted))
