"""Whitening: coordinates in which the posterior is approximately standard normal."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Terms, TransformedTerms, fold_terms
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._ascents import IMPOSSIBLE, Ledger, Objective, expanded_prior
from fedmcmc.surrogates._clients import as_summing_consortium
from fedmcmc.surrogates._expansions import taylor
from fedmcmc.surrogates._mode import SCALING_HINT, mode
from fedmcmc.types import (
    ArrayTree,
    Client,
    ClientTerms,
    Disclosure,
    Federation,
    Posterior,
    as_functions,
    compiled,
    register_dataclass,
)

MAX_DENSE = 256
"""Number of dimensions up to which a factor is dense by default."""
MIN_EIGENVALUE_RATIO = 1e-7
"""Smallest ratio of the eigenvalues of a scaled precision that has no flat direction."""
ORIGIN_SCALE = 1e-5
"""Factor that turns a draw of `init_fn` into a start near the origin."""
PROBE_SDS = 2.0
"""Distance from the mode, in sds, at which the log posterior is compared with a Gaussian's."""
MIN_FALL, MAX_FALL = 1.0, 6.0
"""Smallest and largest fall, in nats, of a log posterior that is approximately quadratic; a
Gaussian's is ``PROBE_SDS**2 / 2 = 2``."""
MAX_CURVED, MIN_CURVATURE = 32, 0.2
"""Number of dimensions up to which curvatures are compared, and their smallest ratio to the mode's.
Falls along axes do not show that the posterior widens in a direction that is no axis."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Affine:
    """Affine map ``position = center + factor @ z`` of raveled positions.

    A vector `factor` is a diagonal; `like` is a position with the shapes and types of the result.
    """

    center: Array
    factor: Array
    like: ArrayTree

    def unravel(self, flat: Array) -> ArrayTree:
        return trees.cast_like(trees.unravel(flat, self.like), self.like)

    def __call__(self, z: ArrayTree) -> ArrayTree:
        flat = trees.ravel(z)
        if self.factor.ndim == 1:
            return self.unravel(self.center + self.factor * flat)
        return self.unravel(self.center + jnp.matmul(self.factor, flat, precision="highest"))

    def inverse(self, position: ArrayTree) -> ArrayTree:
        flat = trees.ravel(position) - self.center
        if self.factor.ndim == 1:
            return self.unravel(flat / self.factor)
        return self.unravel(jax.scipy.linalg.solve_triangular(self.factor, flat))


# The functions of a posterior in other coordinates are classes, so that a server can send them to
# real sites.


@dataclass(frozen=True, eq=False)
class _InCoordinates:
    fn: Any
    affine: _Affine


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Prior(_InCoordinates):
    def __call__(self, z: ArrayTree) -> Array:
        factor = self.affine.factor
        diagonal = factor if factor.ndim == 1 else jnp.diagonal(factor)
        log_density: Array = self.fn(self.affine(z))
        return log_density + jnp.sum(jnp.log(jnp.abs(diagonal)))


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Rows(_InCoordinates):
    def __call__(self, z: ArrayTree, batch: ArrayTree) -> Array:
        terms: Array = self.fn(self.affine(z), batch)
        return terms


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Outcomes(_InCoordinates):
    def __call__(self, rng_key: Array, z: ArrayTree, batch: ArrayTree) -> ArrayTree:
        return self.fn(rng_key, self.affine(z), batch)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Start(_InCoordinates):
    def __call__(self, rng_key: Array) -> ArrayTree:
        return self.affine.inverse(self.fn(rng_key))


class Whitened(NamedTuple):
    """Posterior in whitened coordinates, with a start and surrogates.

    Attributes
    ----------
    posterior
        Posterior for kernels. ``samples.draws``, accumulators and ``samples.constrained`` are in
        the coordinates of the model; ``samples.state`` is whitened.
    position
        Mode in whitened coordinates: zeros. `whitened_position` returns other starts.
    surrogates
        Each client's expansion at the mode in whitened coordinates, for `fedmcmc.fsgld` and
        `fedmcmc.predict_bias`; ``None`` if `whiten` was called without surrogates.
    """

    posterior: Posterior
    position: ArrayTree
    surrogates: Gaussian | None

    def __repr__(self) -> str:
        """Return a description without the arrays."""
        fitted = self.surrogates
        description = "no surrogates"
        if fitted is not None:
            num = jax.tree.leaves(fitted.precision_mean)[0].shape[0]
            description = f"{fitted.structure} surrogates of {num} clients"
        return f"Whitened({trees.num_elements(self.position)} coordinates; {description})"

    @property
    def metric(self) -> ArrayTree:
        """Covariance at the mode, for ``metric=`` of a kernel in the coordinates of the model.

        It has shape ``[d, d]`` over the raveled position; a diagonal is a pytree like the position.
        """
        affine: Any = self.posterior.position_fn
        if affine.factor.ndim == 1:
            return affine.unravel(affine.factor**2)
        return jnp.matmul(affine.factor, affine.factor.T, precision="highest")

    def whitened_position(self, position: ArrayTree) -> ArrayTree:
        """Return a position of the model in whitened coordinates."""
        affine: Any = self.posterior.position_fn
        return affine.inverse(position)


def whiten(
    posterior: Posterior,
    data: object,
    position: ArrayTree | None = None,
    *,
    structure: str | None = None,
    surrogates: bool = True,
) -> Whitened:
    """Change to coordinates in which the posterior is approximately standard normal.

    ``position = mode + C z``, where ``C C'`` is the inverse of the precision at the mode: the
    clients' precisions (`fedmcmc.surrogates.taylor`) plus the prior's. The largest curvature in
    ``z`` is about one, so a step size means the same for every model. A Langevin kernel on ``z``
    equals the same kernel on ``position`` with the metric ``C C'``.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients. The search for the mode takes some exchanges
        with all clients, the expansion one, and the comparison with a Gaussian one or two.
    position
        Start of the search for the mode; by default a draw of ``posterior.init_fn``, and if this
        search fails, a point near the origin.
    structure
        ``"dense"`` (the default up to 256 dimensions) or ``"diagonal"``.
    surrogates
        If true, each client sends its expansion; otherwise only their sum is needed, which
        a secure sum can compute.

    Returns
    -------
    Whitened
        Posterior, start and surrogates.

    Raises
    ------
    ValueError
        Without a start or a mode, or if the log posterior is flat at the mode.

    Warns
    -----
    UserWarning
        If the curvature at the mode does not show the posterior's scale: two sds from the mode the
        log posterior falls by far more or less than a Gaussian's, or (dense, up to 32 dimensions)
        the curvature in a direction is less than a fifth of that at the mode.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * jnp.sum(theta**2),
    ...     lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2 / jnp.array([1e-4, 1.0]), axis=-1),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((5, 2))])
    >>> white = whiten(posterior, data, jnp.zeros(2))
    >>> kernel = fedmcmc.lsd(white.posterior, step_size=0.1)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, white.position, num_rounds=20_000, progress=False
    ... )
    >>> samples.draws.std((0, 1)).round(3)
    array([0.004, 0.336], dtype=float32)
    """
    center = _find_mode(posterior, data, position)
    flat = trees.ravel(center)
    if structure is None:
        structure = "dense" if flat.shape[0] <= MAX_DENSE else "diagonal"
    densities, consortium = checks.densities_of(posterior), as_summing_consortium(data)
    fitted: Gaussian | None = None
    if surrogates:
        fitted = taylor(posterior, data, center, structure=structure)
        point = jax.tree.map(lambda leaf: leaf[None], center)
        prior_precision = expanded_prior(densities, point, center, structure=structure)[2][0]
        precision = _raveled_precisions(fitted, structure).sum(0) + prior_precision
    else:
        expand = Objective(
            densities, Ledger(consortium), center, "dense" if structure == "dense" else "diagonal"
        )
        with jax.default_matmul_precision("highest"):
            (expansion,) = expand(np.asarray(flat)[None])
        if not expansion.value < IMPOSSIBLE:
            raise ValueError("whiten: the log posterior's Hessian at the mode is not finite.")
        precision = expansion.hessian
    names = trees.element_names(center)
    factor = _factor(np.asarray(precision, np.float64), names)
    like = jax.tree.map(jnp.zeros_like, center)
    affine = _Affine(flat, jnp.asarray(factor, flat.dtype), like)
    _warn_if_not_quadratic(densities, consortium, affine, names)
    return Whitened(
        _in_coordinates(posterior, affine),
        like,
        None if fitted is None else _whiten_surrogates(fitted, affine, structure),
    )


def _find_mode(posterior: Posterior, data: object, position: ArrayTree | None) -> ArrayTree:
    if position is not None:
        return mode(posterior, data, position).position
    if posterior.init_fn is None:
        raise ValueError(
            "whiten needs position=, a start such as zeros: this posterior has no init_fn."
        )
    draw = posterior.init_fn(jax.random.key(0))
    try:
        return mode(posterior, data, draw).position
    except ValueError:
        # Near the origin a log link of covariates in the hundreds does not overflow. At the origin
        # itself NumPyro's Bernoulli(logits=0) has a gradient of 0 or 1 instead of a half.
        near_origin = jax.tree.map(lambda x: ORIGIN_SCALE * x, draw)
        return mode(posterior, data, near_origin).position


def _in_coordinates(posterior: Posterior, affine: _Affine) -> Posterior:
    """Return the density of ``z``."""
    original = as_functions(posterior)
    return Posterior(
        _Prior(original.logprior_fn, affine),
        (TransformedTerms if isinstance(original.loglikelihood_fn, ClientTerms) else _Rows)(
            original.loglikelihood_fn, affine
        ),
        original.resample_fn and _Outcomes(original.resample_fn, affine),
        original.constrain_fn,
        original.init_fn and _Start(original.init_fn, affine),
        affine,
    )


def _raveled_precisions(fitted: Gaussian, structure: str) -> Array:
    """Return the clients' precisions, ``[num_clients, d, d]`` or ``[num_clients, d]``."""
    return fitted.precision if structure == "dense" else jax.vmap(trees.ravel)(fitted.precision)


def _factor(precision: np.ndarray, names: list[str]) -> np.ndarray:
    """Return an upper triangular ``C`` with ``C C' = inv(precision)``; a diagonal as a vector.

    Raises
    ------
    ValueError
        If the precision is not positive definite.
    """
    diagonal = precision if precision.ndim == 1 else np.diagonal(precision)
    flat = int(np.argmin(diagonal))
    if diagonal[flat] > 0 and precision.ndim == 1:
        return 1 / np.sqrt(diagonal)
    if diagonal[flat] > 0:
        scale = np.sqrt(diagonal)
        values, vectors = np.linalg.eigh(precision / np.outer(scale, scale))
        if values[0] > MIN_EIGENVALUE_RATIO * values[-1]:
            return np.linalg.inv(np.linalg.cholesky(precision)).T
        flat = int(np.argmax(np.abs(vectors[:, 0])))
    raise ValueError(
        f"The log posterior is flat or rises at its mode, in a direction of {names[flat]}, which "
        f"therefore has no scale to whiten by. Use a proper prior, or remove one of two parameters "
        f"or columns that the data cannot distinguish."
    )


@partial(jax.jit, static_argnames="structure")
def _whiten_surrogates(fitted: Gaussian, affine: _Affine, structure: str) -> Gaussian:
    """Return the clients' Gaussians as functions of ``z``."""
    factor, precision = affine.factor, _raveled_precisions(fitted, structure)
    eta = jax.vmap(trees.ravel)(fitted.precision_mean)
    if structure == "dense":
        eta = (eta - precision @ affine.center) @ factor
        shaped: Any = factor.T @ precision @ factor
    else:
        eta = (eta - precision * affine.center) * factor
        shaped = jax.vmap(affine.unravel)(precision * factor**2)
    return Gaussian(jax.vmap(affine.unravel)(eta), shaped, structure)


class Losses(NamedTuple):
    """Differences of log likelihoods at the mode and at points around it, ``[2, d]``."""

    values: Any

    def to_range(self, limit: float) -> "Losses":
        """Return the answer for a secure sum of numbers up to `limit`; see `Ranged`."""
        values = jnp.where(jnp.isnan(self.values), limit, jnp.clip(self.values, -limit, limit))
        return Losses(values)

    def from_range(self, limit: float) -> "Losses":
        """Return the sum of such answers, with infinity for a value that is out of range."""
        return Losses(jnp.where(self.values > limit / 2, jnp.inf, self.values))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Falls(Question):
    """Question for falls of the log likelihood two sds from the mode, both ways along each axis.

    The content is the mode, a position, and a factor as in `_Affine`; the answer is `Losses`.
    """

    disclosure = Disclosure(
        "by how much the log likelihood falls between the best fit and positions around it",
        hidden_in_sums=True,
    )

    def answer(self, content: tuple[ArrayTree, Array], client: Client) -> Losses:
        centre, factor = content
        flat = trees.ravel(centre)
        affine = _Affine(flat, factor, centre)

        def loss(z: Array) -> Array:
            position = affine(affine.unravel(z))

            def sum_changes(terms_fn: Terms, mask: Array) -> Array:
                # Differences of terms are small, so that their sum loses few digits.
                change = terms_fn(centre) - terms_fn(position)
                return jnp.sum(jnp.where(mask, change, 0))

            return fold_terms(self.posterior.loglikelihood_fn, sum_changes, client)

        return Losses(_probe_axes(loss, flat))

    def answer_like(self, content: tuple[ArrayTree, Array]) -> Any:
        size = trees.num_elements(content[0])
        return Losses(jax.ShapeDtypeStruct((2, size), jnp.result_type(float)))

    def check_content(self, content: tuple[ArrayTree, Array], federation: Federation) -> None:
        check_model(self.posterior, content[0], federation)


def _probe_axes(loss: Callable[[Array], Array], like: Array) -> Array:
    """Return losses at ``-PROBE_SDS`` and ``PROBE_SDS`` along each axis of ``z``, ``[2, d]``."""

    def probe(i: Array) -> Array:
        # One axis at a time, because a matrix of all may not fit into the memory.
        z = jnp.zeros_like(like).at[i].set(PROBE_SDS)
        return jnp.stack([loss(-z), loss(z)])

    return jax.lax.map(probe, jnp.arange(like.shape[0])).T


@compiled
def _falls_of_prior(posterior: Posterior, affine: _Affine) -> Array:
    at_mode = posterior.logprior_fn(affine.unravel(affine.center))

    def loss(z: Array) -> Array:
        return at_mode - posterior.logprior_fn(affine(affine.unravel(z)))

    return _probe_axes(loss, affine.center)


def _smallest_curvatures(
    posterior: Posterior, consortium: Consortium, affine: _Affine
) -> np.ndarray:
    """Return the smallest curvature of any direction two sds down and up each axis, ``[2, d]``."""
    center, factor = (np.asarray(x, np.float64) for x in (affine.center, affine.factor))
    steps = PROBE_SDS * factor.T
    expand = Objective(posterior, Ledger(consortium), affine.unravel(affine.center), "dense")
    results = expand(center + np.concatenate([-steps, steps]))
    if any(result.value >= IMPOSSIBLE for result in results):
        return np.full((2, len(center)), np.nan)
    whitened = factor.T @ np.stack([np.asarray(result.hessian) for result in results]) @ factor
    return np.asarray(np.linalg.eigvalsh(whitened)[:, 0].reshape(2, len(center)))


def _warn_if_not_quadratic(
    posterior: Posterior, consortium: Consortium, affine: _Affine, names: list[str]
) -> None:
    content = affine.unravel(affine.center), affine.factor
    with jax.default_matmul_precision("highest"):
        falls = np.asarray(consortium.ask(Falls(posterior), content).value.values)
        falls = falls + np.asarray(_falls_of_prior(posterior, affine))
    factor = np.asarray(affine.factor)

    def name_of(axis: int) -> str:
        if factor.ndim == 1:
            return names[axis]
        return names[int(np.argmax(np.abs(factor[:, axis]) / np.linalg.norm(factor, axis=1)))]

    remedy = (
        "Kernels in these coordinates may be biased or diverge. Possible remedies: a prior that "
        "bounds the parameter from both sides, another parametrization (non-centered effects, the "
        "logarithm of a scale), and a comparison with draws of smaller steps."
    )
    if (falls >= MIN_FALL).all() and (falls <= MAX_FALL).all():
        if factor.ndim == 1 or len(names) > MAX_CURVED:
            return
        curvatures = _smallest_curvatures(posterior, consortium, affine).min(0)
        if not (curvatures >= MIN_CURVATURE).all():
            axis = int(np.argmin(curvatures))
            warnings.warn(
                f"The curvature at the mode is no guide {PROBE_SDS:g} sds along {name_of(axis)}: "
                f"the smallest curvature there is {curvatures[axis]:.2g} times that at the mode, "
                f"for example because few rows inform a scale. {remedy}",
                stacklevel=3,
            )
        return
    deviations = np.where(np.isfinite(falls), np.abs(np.log(np.maximum(falls, 1e-3) / 2)), np.inf)
    worst = int((falls.min(0) if falls.min() < 0 else -deviations.max(0)).argmin())
    name = name_of(worst)
    low, high = falls[:, worst]
    if falls.min() < 0:
        raise ValueError(
            f"No mode was found: {PROBE_SDS:g} sds away along {name} the log posterior is higher "
            f"by {-min(low, high):.3g} nats. {SCALING_HINT} Otherwise pass another position=."
        )
    warnings.warn(
        f"The curvature at the mode is no guide to the scale of {name}: {PROBE_SDS:g} sds to both "
        f"sides the log posterior falls by {low:.3g} and {high:.3g}, a Gaussian's by "
        f"{PROBE_SDS**2 / 2:g}. {remedy}",
        stacklevel=3,
    )
