"""Gaussian clients: a kernel whose model and rows are replaced by surrogates.

Each client has one row, its number, and the log likelihood of this row is the client's surrogate.
Minibatches become normal noise with the covariance of their gradients at the mode. One latent of
the position's size replaces all latents of a client and hides as much information about the
position.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

from fedmcmc.data import FederatedData
from fedmcmc.dynamics import Training
from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.gradients import (
    Conducive,
    Epochs,
    FixedPoint,
    FullGradient,
    Minibatch,
    Noisy,
    Scaffold,
    Svrg,
    as_surrogates,
    client_gradient,
    full_gradient,
    has_augmented_data,
)
from fedmcmc.hierarchy import Refresh, conjugate, missing_information
from fedmcmc.pytrees import trees
from fedmcmc.random import normals, realize_normals
from fedmcmc.types import (
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

MAX_DIMENSIONS = 512
NUM_NEWTON_STEPS = 20
KNOWN_ESTIMATORS = (
    *(FullGradient, Minibatch, Epochs, Noisy),
    *(Conducive, FixedPoint, Scaffold, Svrg),
)
"""Classes of estimators whose noise predictions include or name."""

T = TypeVar("T")


class GaussianClients(NamedTuple):
    """Kernel on Gaussian clients, and its target: the product of surrogates and prior."""

    kernel: FederatedKernel
    data: FederatedData  # one row per client
    mode: ArrayTree  # of the target, a position
    target_mean: np.ndarray  # [d] float64
    target_covariance: np.ndarray  # [d, d] float64
    gradients: str  # description of the clients' gradients, in words


def build_gaussian_clients(
    kernel: FederatedKernel, data: Any, surrogates: Gaussian, scores: Array | None
) -> GaussianClients:
    """Replace the model in `kernel` by surrogates, and its minibatches by noise.

    `data` is a `FederatedData` or a consortium. Rows are read only if the kernel moves latents.
    """
    surrogates, federation = as_surrogates(surrogates), data.federation
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    size = trees.num_elements(position)
    if size > MAX_DIMENSIONS:
        raise ValueError(
            f"predict_bias uses dense matrices, of at most {MAX_DIMENSIONS} dimensions, got {size}."
        )
    surrogates.check_clients(position, federation.num_clients)
    kernel = as_functions(kernel)
    if kernel.participation.pooled:
        raise ValueError("predict_bias needs a federated kernel, not one on pooled rows.")
    if kernel.traits.approximates or nodes_of(kernel, Training):
        raise ValueError(
            "predict_bias is for chains, but this kernel refines an approximation or trains models."
        )
    if has_augmented_data(kernel):
        raise ValueError(
            "predict_bias supports no augmentation: this kernel transforms the rows of its "
            "minibatches at random (augment), which changes the posterior. Predict the kernel "
            "without augment."
        )
    posteriors = nodes_of(kernel, Posterior)
    if not posteriors:
        raise ValueError(
            "This kernel has no Posterior whose likelihoods predict_bias could replace."
        )
    eta, precision = as_natural_parameters(surrogates)
    mode, prior = _find_mode(posteriors[0], eta.sum(0), precision.sum(0), position)
    model = Posterior(Partial(_log_quadratic, *prior), Partial(_log_surrogate, eta, precision))
    latents = ""
    local = local_model(kernel)
    if local is not None:
        model = _add_latents(model, _missing_factors(kernel, local, data, mode), mode)
        latents = ", new latents in every move"
        if not all(node.exact for node in nodes_of(kernel, Refresh)):
            latents = ", latents that are normal given the position"
        kernel = replace_nodes(kernel, Refresh, lambda node: conjugate() if node.exact else node)
    kernel = replace_nodes(kernel, Posterior, lambda _: model)
    kernel, gradients = replace_minibatches(kernel, federation, scores, size)
    total = np.asarray(prior[1] + precision.sum(0), np.float64)
    target_mean = np.linalg.solve(total, np.asarray(prior[0] + eta.sum(0), np.float64))
    return GaussianClients(
        kernel,
        _numbers_as_rows(federation),
        mode,
        target_mean,
        np.linalg.inv(total),
        gradients + latents,
    )


def _missing_factors(kernel: FederatedKernel, local: Local, data: object, mode: ArrayTree) -> Array:
    """Return factors ``[num_clients, d, d]`` of each client's information hidden by latents."""
    if not any(bare.traits.gradients_at_latents for bare in bare_kernels(kernel)):
        raise ValueError("There is no bias to predict: fed_gibbs is exact at every setting.")
    if not isinstance(data, FederatedData):
        raise ValueError(
            "For a kernel that moves latents, predict_bias reads the rows of the latents' groups "
            "and needs them in one place: give it a FederatedData."
        )
    missing = data.map_clients(lambda client: missing_information(local, client, mode))
    values, vectors = jnp.linalg.eigh(missing)
    return jnp.sqrt(jnp.maximum(values, 0))[:, None, :] * vectors


def _add_latents(model: Posterior, factors: Array, mode: ArrayTree) -> Posterior:
    """Return Gaussian clients with one latent each.

    The latent is normal with unit precision given the position. Integrating the latent out gives
    the client's surrogate. A move in units of the curvature (`hierarchy.ula`) changes this latent
    as it changes the latents of the model.
    """
    size = factors.shape[-1]
    like = Shapes(jax.ShapeDtypeStruct((size,), factors.dtype))
    terms = Partial(_log_with_latent, model.loglikelihood_fn, factors, mode)
    local = Local(Partial(_no_log_density), terms, like)
    return model._replace(loglikelihood_fn=None, local=local)


def _no_log_density(position: ArrayTree, latent: Array) -> Array:
    return jnp.zeros((), latent.dtype)


def _log_with_latent(
    surrogate_fn: LogDensity,
    factors: Array,
    mode: ArrayTree,
    position: ArrayTree,
    latents: Array,
    rows: Array,
) -> Array:
    shift = trees.ravel(trees.subtract(position, mode))

    def log_latent(client: Array, latent: Array) -> Array:
        return -0.5 * jnp.sum((latent + factors[client].T @ shift) ** 2)

    return surrogate_fn(position, rows) + jax.vmap(log_latent)(rows, latents)


def largest_curvature(posterior: Posterior, surrogates: Gaussian) -> float:
    """Return the largest eigenvalue of the precision of surrogates times prior."""
    surrogates = as_surrogates(surrogates)
    position = jax.tree.map(lambda leaf: leaf[0], surrogates.precision_mean)
    eta, precision = as_natural_parameters(surrogates)
    _, prior = _find_mode(as_functions(posterior), eta.sum(0), precision.sum(0), position)
    return float(np.linalg.eigvalsh(np.asarray(precision.sum(0) + prior[1], np.float64))[-1])


def nodes_of(tree: ArrayTree, kind: type | UnionType) -> list[Any]:
    """Return the outermost nodes of a class (or union of classes) in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def replace_nodes(tree: T, kind: type | UnionType, fn: Callable[[Any], Any]) -> T:
    """Return a tree with ``fn(node)`` for each outermost node of a class (or union of classes)."""
    changed: T = jax.tree.map(
        lambda node: fn(node) if isinstance(node, kind) else node,
        tree,
        is_leaf=lambda node: isinstance(node, kind),
    )
    return changed


def unknown_estimators(tree: ArrayTree) -> list[str]:
    """Return the names of the classes of estimators in a tree that are not of this package."""
    nodes = jax.tree.leaves(
        tree, is_leaf=lambda node: node is not tree and isinstance(node, GradientEstimator)
    )
    estimators = [node for node in nodes if isinstance(node, GradientEstimator)]
    names = {type(node).__name__ for node in estimators if type(node) not in KNOWN_ESTIMATORS}
    return sorted(names.union(*map(unknown_estimators, estimators)))


def bare_kernels(kernel: FederatedKernel) -> list[FederatedKernel]:
    """Return the kernels inside all transforms: one, or several for a sequence."""
    nodes = jax.tree.leaves(
        kernel, is_leaf=lambda node: node is not kernel and isinstance(node, FederatedKernel)
    )
    inner = [node for node in nodes if isinstance(node, FederatedKernel)]
    return [bare for node in inner for bare in bare_kernels(node)] or [kernel]


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _NormalMinibatches(GradientEstimator):
    """Gradient of all rows, plus normal noise with the covariance of a minibatch's gradient."""

    roots: PerClient  # [num_clients, d, d], root @ root.T is the covariance

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


def replace_minibatches(
    kernel: FederatedKernel, federation: Federation, scores: Array | None, size: int
) -> tuple[FederatedKernel, str]:
    """Return the kernel with gradients of all rows plus noise, and a description in words."""
    if scores is not None and jnp.shape(scores) != (federation.num_clients, size, size):
        raise ValueError(
            f"scores must be the result of surrogates.score_covariance, of shape "
            f"({federation.num_clients}, {size}, {size}), got {jnp.shape(scores)}."
        )
    exact, unknown = "exact gradients", ""
    if names := unknown_estimators(kernel):
        exact = (
            f"estimates of {' and '.join(names)} on one row per client (noise from the choice of "
            "rows is unknown and left out)"
        )
        unknown = f", {exact}"
    epochs = bool(nodes_of(kernel, Epochs))
    kernel = replace_nodes(kernel, Epochs, lambda _: full_gradient())
    if not nodes_of(kernel, Minibatch):
        return kernel, "gradients without the noise of epochs" + unknown if epochs else exact
    if scores is None:
        description = "gradients without the noise of minibatches (give scores=)" + unknown
        return replace_nodes(kernel, Minibatch, lambda _: full_gradient()), description
    sizes = np.asarray(federation.sizes)
    # Covariances of few rows are singular, so they have no Cholesky factor.
    values, vectors = np.linalg.eigh(np.asarray(scores, np.float64))
    roots = np.sqrt(np.maximum(values, 0))[:, None, :] * vectors

    def add_noise(node: Minibatch) -> GradientEstimator:
        factor = np.sqrt(np.asarray(node.variance_factor(sizes), np.float64))
        scaled = factor[:, None, None] * roots
        return _NormalMinibatches(PerClient(jnp.asarray(scaled, jnp.result_type(float))))

    description = "minibatch noise as at the mode"
    if nodes_of(kernel, Svrg | FixedPoint | Scaffold):
        description += " (none in differences of gradients)"
    return replace_nodes(kernel, Minibatch, add_noise), description + unknown


@jax.jit
def as_natural_parameters(surrogates: Gaussian) -> tuple[Array, Array]:
    """Return dense natural parameters ``[num_clients, d]`` and ``[num_clients, d, d]``."""
    return jax.vmap(lambda q: (trees.ravel(q.precision_mean), as_dense(q).precision))(surrogates)


def _find_mode(
    posterior: Posterior, eta: Array, precision: Array, like: ArrayTree
) -> tuple[ArrayTree, tuple[Array, Array]]:
    """Return the mode of Gaussian times prior, and the prior's natural parameters there."""
    flat, unravel = ravel_pytree(like)
    x = jnp.zeros_like(flat)
    for _ in range(NUM_NEWTON_STEPS):
        prior = _expand_prior(posterior, like, x)
        x = jnp.linalg.solve(precision + prior[1], eta + prior[0])
    prior = _expand_prior(posterior, like, x)
    total = np.asarray(precision + prior[1], np.float64)
    if not np.isfinite(total).all() or np.linalg.eigvalsh(total).min() <= 0:
        raise ValueError(
            "The product of surrogates and prior is no proper Gaussian, because the sum of their "
            "precisions is not positive definite."
        )
    return unravel(x), prior


@compiled
def _expand_prior(posterior: Posterior, like: ArrayTree, x: Array) -> tuple[Array, Array]:
    """Return the natural parameters of the prior's second-order expansion at `x`."""

    def logprior(flat: Array) -> Array:
        return posterior.logprior_fn(trees.cast_like(trees.unravel(flat, like), like))

    curvature = -jax.hessian(logprior)(x)
    return jax.grad(logprior)(x) + curvature @ x, curvature


def _log_quadratic(eta: Array, precision: Array, position: ArrayTree) -> Array:
    x = trees.ravel(position)
    return x @ eta - x @ (precision @ x) / 2


def _log_surrogate(eta: Array, precision: Array, position: ArrayTree, rows: Array) -> Array:
    return jax.vmap(lambda client: _log_quadratic(eta[client], precision[client], position))(rows)


def _numbers_as_rows(federation: Federation) -> FederatedData:
    """Return data with one row per client, its number, and the shares of the federation."""
    ids, sizes = np.arange(federation.num_clients, dtype=np.int32), np.asarray(federation.sizes)
    share = jnp.asarray(sizes / sizes.sum(), jnp.result_type(float))
    return replace(FederatedData.from_arrays(ids, ids), share=share)
