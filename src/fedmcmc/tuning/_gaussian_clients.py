"""Gaussian clients: a kernel, finished as it is, on surrogates in place of the model and its rows.

A client has one row, its number, and the log likelihood of that row is the client's surrogate.
Minibatches, which one row cannot have, become normal noise of the covariance that they have at the
mode. All latents of a client become one, of the position's size, which takes as much information
about the position with it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc._types import (
    ArrayTree,
    Client,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Local,
    LogDensity,
    PerClient,
    Posterior,
    Shapes,
    as_functions,
    compiled,
    local_model,
    register_dataclass,
)
from fedmcmc.data import FederatedData
from fedmcmc.dynamics import Training
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import (
    Epochs,
    FixedPoint,
    Minibatch,
    Scaffold,
    Svrg,
    as_surrogates,
    client_gradient,
    full_gradient,
    has_augmented_data,
)
from fedmcmc.hierarchy import Refresh, conjugate, missing_information
from fedmcmc.kernels import JointLangevin
from fedmcmc.pytrees import trees
from fedmcmc.random import normals, realize_normals

MAX_DIMENSION = 512
NEWTON_STEPS = 20


class GaussianClients(NamedTuple):
    """A kernel on Gaussian clients, and what it is meant to sample.

    Attributes
    ----------
    kernel, data
        On one row per client.
    mode
        A position.
    target_mean, target_covariance
        ``[d]`` and ``[d, d]`` float64, of the product of surrogates and prior.
    gradients
        In words, what is taken for the clients' gradients.
    """

    kernel: FederatedKernel
    data: FederatedData
    mode: ArrayTree
    target_mean: np.ndarray
    target_covariance: np.ndarray
    gradients: str


def on_gaussian_clients(
    kernel: FederatedKernel,
    data: Any,
    surrogates: Gaussian,
    scores: Array | None,
) -> GaussianClients:
    """Put surrogates in place of the model within `kernel`, and noise in place of minibatches.

    `data` are the clients' rows, of which those of kernels that move latents are read, or a
    consortium.

    Raises
    ------
    ValueError
        If surrogates, scores, kernel and federation do not fit together.
    """
    surrogates, federation = as_surrogates(surrogates), data.federation
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    size = trees.num_elements(position)
    if size > MAX_DIMENSION:
        raise ValueError(
            f"A prediction needs dense matrices: at most {MAX_DIMENSION} dimensions, got {size}."
        )
    surrogates.check_clients(position, federation.num_clients)
    kernel = as_functions(kernel)
    if kernel.participation.pooled:
        raise ValueError("predict_bias needs a federated kernel, not one on pooled rows.")
    if kernel.traits.approximates or nodes_of(kernel, Training):
        raise ValueError(
            "predict_bias is for chains: this kernel refines an approximation, or trains models."
        )
    if has_augmented_data(kernel):
        raise ValueError(
            "predict_bias knows rows as they are, and this kernel transforms those of its "
            "minibatches at random (augment), which changes the posterior: predict it without."
        )
    posteriors = nodes_of(kernel, Posterior)
    if not posteriors:
        raise ValueError("This kernel holds no posterior whose clients could be approximated.")
    eta, precision = dense(surrogates)
    mode, prior = _mode(posteriors[0], eta.sum(0), precision.sum(0), position)
    model = Posterior(
        Partial(_log_quadratic, prior[0], prior[1]), Partial(_log_surrogate, eta, precision)
    )
    latents = ""
    local = local_model(kernel)
    if local is not None:
        model = _with_latents(model, _missing(kernel, data, mode), mode)
        latents = ", latents drawn anew in every move"
        if not all(node.exact for node in nodes_of(kernel, Refresh)):
            latents = ", latents that are normal given the rest"
        kernel = with_nodes(kernel, Refresh, lambda node: conjugate() if node.exact else node)
    kernel = with_nodes(kernel, Posterior, lambda _: model)
    kernel, gradients = without_minibatches(kernel, federation, scores, size)
    gradients += latents
    total = np.asarray(prior[1] + precision.sum(0), np.float64)
    target_mean = np.linalg.solve(total, np.asarray(prior[0] + eta.sum(0), np.float64))
    return GaussianClients(
        kernel, _one_row_each(federation), mode, target_mean, np.linalg.inv(total), gradients
    )


def _missing(kernel: FederatedKernel, data: Any, mode: ArrayTree) -> Array:
    """Return what latents take of each client's information, as factors ``[num_clients, d, d]``.

    Raises
    ------
    ValueError
        Where that cannot be told, or need not.
    """
    local = local_model(kernel)
    assert local is not None
    if not nodes_of(kernel, JointLangevin):
        raise ValueError("There is no bias to predict: fed_gibbs is exact at every setting.")
    if not isinstance(data, FederatedData):
        raise ValueError(
            "predict_bias of a kernel that moves latents looks at the rows that they belong to, "
            "and needs them in one place: give it a FederatedData."
        )
    found = data.map_clients(lambda client: missing_information(local, client, mode))
    values, vectors = jnp.linalg.eigh(found)
    return jnp.sqrt(jnp.maximum(values, 0))[:, None, :] * vectors


def _with_latents(model: Posterior, factors: Array, mode: ArrayTree) -> Posterior:
    """Return Gaussian clients with a latent each, which gradients are taken at.

    It is normal given the position, of unit precision, and such that without it a client has its
    surrogate. A move relative to the curvature (`hierarchy.ula`) does to it what it does to all
    latents in whose place it is.
    """
    size = factors.shape[-1]
    like = Shapes(jax.ShapeDtypeStruct((size,), factors.dtype))
    terms = Partial(_log_with_latent, model.loglikelihood_fn, factors, mode)
    local = Local(Partial(_no_log_density), terms, like)
    return model._replace(loglikelihood_fn=None, local=local)


def _no_log_density(position: ArrayTree, latent: Array) -> Array:
    return jnp.zeros((), latent.dtype)


def _log_with_latent(
    surrogate_fn: Any,
    factors: Array,
    mode: ArrayTree,
    position: ArrayTree,
    latents: Array,
    rows: Array,
) -> Array:
    away = trees.ravel(trees.subtract(position, mode))

    def of_latent(c: Array, latent: Array) -> Array:
        return -0.5 * jnp.sum((latent + factors[c].T @ away) ** 2)

    terms: Array = surrogate_fn(position, rows) + jax.vmap(of_latent)(rows, latents)
    return terms


def largest_curvature(posterior: Posterior, surrogates: Gaussian) -> float:
    """Return the largest eigenvalue of the precision that surrogates and prior have together."""
    surrogates = as_surrogates(surrogates)
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    eta, precision = dense(surrogates)
    _, prior = _mode(as_functions(posterior), eta.sum(0), precision.sum(0), position)
    return float(np.linalg.eigvalsh(np.asarray(precision.sum(0) + prior[1], np.float64))[-1])


def nodes_of(tree: ArrayTree, kind: Any) -> list[Any]:
    """Return the nodes of a kind, the outermost."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in leaves if isinstance(node, kind)]


def with_nodes(kernel: FederatedKernel, kind: Any, other: Any) -> FederatedKernel:
    """Return `kernel` with ``other(node)`` in place of every node of a kind."""
    changed: FederatedKernel = jax.tree.map(
        lambda node: other(node) if isinstance(node, kind) else node,
        kernel,
        is_leaf=lambda node: isinstance(node, kind),
    )
    return changed


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _NoisyAsMinibatches(GradientEstimator):
    """The gradient of all rows, plus normal noise with the covariance of a minibatch's."""

    roots: PerClient  # [num_clients, d, d], whose outer squares are the covariances

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client, num_calls: int) -> ArrayTree:
        return normals(rng_key, like, num_calls)

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: ArrayTree,
        position: ArrayTree,
        context: ArrayTree,
        client: Client,
    ) -> ArrayTree:
        gradient = client_gradient(loglikelihood_fn, position, client)
        normal = trees.ravel(realize_normals(draws, position))
        noise = trees.cast(self.roots.of(client), normal) @ normal
        return trees.add(gradient, trees.cast_like(trees.unravel(noise, position), position))


def without_minibatches(
    kernel: FederatedKernel, federation: Federation, scores: Array | None, size: int
) -> tuple[FederatedKernel, str]:
    """Return the kernel with other estimates for minibatches, and what they are in words."""
    if scores is not None and jnp.shape(scores) != (federation.num_clients, size, size):
        raise ValueError(
            f"scores must be what surrogates.score_covariance returns, of shape "
            f"({federation.num_clients}, {size}, {size}), got {jnp.shape(scores)}."
        )
    epochs = bool(nodes_of(kernel, Epochs))
    kernel = with_nodes(kernel, Epochs, lambda _: full_gradient())
    if not nodes_of(kernel, Minibatch):
        return kernel, "gradients without the noise of epochs" if epochs else "exact gradients"
    if scores is None:
        left_out = "gradients without the noise of minibatches (give scores=)"
        return with_nodes(kernel, Minibatch, lambda _: full_gradient()), left_out
    sizes = np.asarray(federation.sizes)
    # By eigenvalues, since covariances of few rows are singular.
    values, vectors = np.linalg.eigh(np.asarray(scores, np.float64))
    roots = np.sqrt(np.maximum(values, 0))[:, None, :] * vectors

    def noisy(node: Minibatch) -> GradientEstimator:
        factor = np.sqrt(np.asarray(node.variance_factor(sizes), np.float64))
        scaled = factor[:, None, None] * roots
        return _NoisyAsMinibatches(PerClient(jnp.asarray(scaled, jnp.result_type(float))))

    words = "minibatch noise as at the mode"
    if nodes_of(kernel, (Svrg, FixedPoint, Scaffold)):
        words += " (none in differences of gradients)"
    return with_nodes(kernel, Minibatch, noisy), words


@jax.jit
def dense(surrogates: Gaussian) -> tuple[Array, Array]:
    """Return natural parameters ``[num_clients, d]`` and ``[num_clients, d, d]``."""

    def one(q: Gaussian) -> tuple[Array, Array]:
        eta, unravel = ravel_pytree(q.precision_mean)
        precision = jax.vmap(lambda e: ravel_pytree(q.apply_precision(unravel(e)))[0])
        return eta, precision(jnp.eye(eta.size, dtype=eta.dtype))

    return jax.vmap(one)(surrogates)


def _mode(
    posterior: Posterior, eta: Array, precision: Array, like: ArrayTree
) -> tuple[ArrayTree, tuple[Array, Array]]:
    """Return the mode with the prior, and the prior's natural parameters around it."""
    flat, unravel = ravel_pytree(like)
    x = jnp.zeros_like(flat)
    for _ in range(NEWTON_STEPS):
        prior = _expand(posterior, like, x)
        x = jnp.linalg.solve(precision + prior[1], eta + prior[0])
    prior = _expand(posterior, like, x)
    total = np.asarray(precision + prior[1], np.float64)
    if not np.isfinite(total).all() or np.linalg.eigvalsh(total).min() <= 0:
        raise ValueError(
            "The surrogates and the prior together make no proper Gaussian: the sum of their "
            "precisions is not positive definite."
        )
    return unravel(x), prior


@compiled
def _expand(posterior: Posterior, like: ArrayTree, x: Array) -> tuple[Array, Array]:
    """Return the natural parameters of the prior's expansion to second order at `x`."""

    def logprior(place: Array) -> Array:
        return posterior.logprior_fn(trees.cast_like(trees.unravel(place, like), like))

    curvature = -jax.hessian(logprior)(x)
    return jax.grad(logprior)(x) + curvature @ x, curvature


def _log_quadratic(eta: Array, precision: Array, position: ArrayTree) -> Array:
    x, _ = ravel_pytree(position)
    return x @ eta - x @ (precision @ x) / 2


def _log_surrogate(eta: Array, precision: Array, position: ArrayTree, rows: Array) -> Array:
    return jax.vmap(lambda c: _log_quadratic(eta[c], precision[c], position))(rows)


def _one_row_each(federation: Federation) -> FederatedData:
    """Return clients of one row, their number, with the shares of the federation's."""
    ids, sizes = np.arange(federation.num_clients, dtype=np.int32), np.asarray(federation.sizes)
    share = jnp.asarray(sizes / sizes.sum(), jnp.result_type(float))
    return replace(FederatedData.from_arrays(ids, ids), share=share)
