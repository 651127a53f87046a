"""Whitening: coordinates in which the posterior is about standard normal, for any kernel."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import (
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
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import Terms, Through, fold_terms
from fedmcmc.kernels import Points, Question, check_model, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._ascents import expanded_prior
from fedmcmc.surrogates._asking import summing, symmetric
from fedmcmc.surrogates._expansions import UNSCALED, mode, taylor

MAX_DENSE = 256
"""Dimensions up to which a factor is dense by default."""
FLAT = 1e-7
"""Curvature below this share of the largest, each in units of its own diagonal, counts as none."""
NEAR = 1e-5
"""Of a draw of `init_fn`: a start near the origin."""
PROBE = 2.0
"""How many sds from the mode the log posterior is compared with a Gaussian's."""
MIN_FALL, MAX_FALL = 1.0, 6.0
"""Falls between which it is taken for about quadratic; a Gaussian's is ``PROBE**2 / 2 = 2``."""
MAX_CURVED, MIN_CURVATURE = 32, 0.2
"""Up to so many dimensions, the curvature there too, in all directions, in units of the mode's: a
fall along an axis does not show that another direction widens, as a mean's does with its scale."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Affine:
    """``position = center + factor @ z``, of raveled positions; a diagonal factor is a vector.

    `like` is a position, of which shapes and types count.
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


# A posterior's functions in other coordinates: classes, so that real sites can be told of them.


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
    """A posterior in whitened coordinates, and what kernels on it start from.

    Attributes
    ----------
    posterior
        To build a kernel with. ``samples.draws``, accumulators and ``samples.constrained`` are in
        the coordinates of the model; ``samples.state`` is whitened.
    position
        The mode, whitened: zeros. To start elsewhere: `whitened_position`.
    surrogates
        Each client's expansion at the mode, whitened, for `fedmcmc.fsgld` and
        `fedmcmc.predict_bias`; ``None`` where nobody was asked for his own.
    """

    posterior: Posterior
    position: ArrayTree
    surrogates: Gaussian | None

    def __repr__(self) -> str:
        """Say what it holds, without the numbers."""
        fitted = self.surrogates
        of = "no surrogates"
        if fitted is not None:
            num = jax.tree.leaves(fitted.precision_mean)[0].shape[0]
            of = f"{fitted.structure} surrogates of {num} clients"
        return f"Whitened({trees.num_elements(self.position)} coordinates; {of})"

    @property
    def metric(self) -> ArrayTree:
        """The posterior's covariance as the mode has it, for ``metric=`` of a kernel on the model.

        The alternative to whitened coordinates, for whom surrogates or a start are in the model's:
        ``[d, d]`` over the raveled position, or shaped as the position for a diagonal.
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
    data: Any,
    position: ArrayTree | None = None,
    *,
    structure: str | None = None,
    surrogates: bool = True,
) -> Whitened:
    """Change to coordinates in which the posterior is about standard normal.

    ``position = mode + C z``, where ``C C'`` is the inverse of the precision at the mode: the sum
    of the clients' (`fedmcmc.surrogates.taylor`) and the prior's. A step size then means the same
    for every model: in ``z`` the largest curvature is about one. A Langevin kernel on ``z`` is the
    same kernel on ``position`` with the metric ``C C'``.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients elsewhere. Finding the mode takes some
        exchanges with all clients, the expansion one, and looking beside the mode one or two.
    position
        Where the search for the mode starts; by default what ``posterior.init_fn`` draws, and
        a place near the origin where no mode is found from there.
    structure
        ``"dense"`` (the default up to 256 dimensions) or ``"diagonal"``.
    surrogates
        Whether each client is asked for its own expansion. Without, only their sum is asked for,
        which a secure sum can hide single clients in.

    Returns
    -------
    Whitened
        Posterior, start and surrogates.

    Raises
    ------
    ValueError
        Without a start, where no mode is found, or where the log posterior is flat at the mode.

    Warns
    -----
    UserWarning
        If two sds from the mode the log posterior falls by far more or less than a Gaussian's, or,
        up to 32 dimensions and whitened densely, is a fifth as curved in some direction or less:
        the curvature at the mode is then no guide to its scale.

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
    center = _mode(posterior, data, position)
    flat, unravel = ravel_pytree(center)
    size = flat.shape[0]
    if structure is None:
        structure = "dense" if size <= MAX_DENSE else "diagonal"
    densities, consortium = checks.densities(posterior), summing(data)
    fitted = taylor(posterior, data, center, structure=structure) if surrogates else None
    of_rows: Any = (
        _precision_of_rows(densities, consortium, center, structure)
        if fitted is None
        else _flat(fitted, structure).sum(0)
    )
    prior = _prior_precision(as_functions(posterior.logprior_fn), flat, unravel, structure)
    names = trees.element_names(center)
    precision = np.asarray(of_rows + prior, np.float64)
    like = jax.tree.map(jnp.zeros_like, center)
    affine = _Affine(flat, jnp.asarray(_factor(precision, names), flat.dtype), like)
    _warn_where_not_quadratic(densities, consortium, affine, names)
    return Whitened(
        _in_coordinates(posterior, affine),
        like,
        None if fitted is None else _whitened(fitted, affine, structure),
    )


def _mode(posterior: Posterior, data: Any, position: ArrayTree | None) -> ArrayTree:
    if position is not None:
        return mode(posterior, data, position).position
    if posterior.init_fn is None:
        raise ValueError(
            "whiten needs position= to start from, zeros say: this posterior has no init_fn."
        )
    drawn = posterior.init_fn(jax.random.key(0))
    try:
        return mode(posterior, data, drawn).position
    except ValueError:
        # There a log link of covariates in the hundreds does not overflow, as it does at a draw.
        # Not at zeros themselves, where NumPyro's Bernoulli(logits=0) has a gradient of 0 or 1 in
        # place of a half.
        return mode(posterior, data, jax.tree.map(lambda x: NEAR * x, drawn)).position


def _in_coordinates(posterior: Posterior, affine: _Affine) -> Posterior:
    """Return the density of ``z``."""
    own = as_functions(posterior)
    return Posterior(
        _Prior(own.logprior_fn, affine),
        (Through if isinstance(own.loglikelihood_fn, ClientTerms) else _Rows)(
            own.loglikelihood_fn, affine
        ),
        own.resample_fn and _Outcomes(own.resample_fn, affine),
        own.constrain_fn,
        own.init_fn and _Start(own.init_fn, affine),
        affine,
    )


def _flat(fitted: Gaussian, structure: str) -> Array:
    """Return the clients' precisions, ``[num_clients, d, d]`` or ``[num_clients, d]``."""
    return fitted.precision if structure == "dense" else jax.vmap(trees.ravel)(fitted.precision)


def _precision_of_rows(
    posterior: Posterior, consortium: Consortium, center: ArrayTree, structure: str
) -> np.ndarray:
    """Return minus the log likelihood's Hessian at a position, ``[d, d]`` or its diagonal."""
    question = expansions(posterior, curvature="dense" if structure == "dense" else "diagonal")
    point = jax.tree.map(lambda leaf: leaf[None], center)
    with jax.default_matmul_precision("highest"):
        found = consortium.ask(question, Points(point, center)).value
    curvature = np.asarray(found.curvature, np.float64)[0]
    if not (np.isfinite(found.value).all() and np.isfinite(curvature).all()):
        raise ValueError("whiten: the log likelihood's Hessian at the mode is not finite.")
    if structure == "diagonal":
        return curvature
    return np.asarray(symmetric(curvature, trees.num_elements(center)))


def _prior_precision(logprior_fn: Any, flat: Array, unravel: Any, structure: str) -> Array:
    gradient = jax.grad(lambda x: logprior_fn(unravel(x)))

    # Compiled, as operations one by one would each be a program of their own.
    @jax.jit
    def of(x: Array) -> Array:
        if structure == "dense":
            return -jax.jacfwd(gradient)(x)
        # One direction at a time: a matrix of all might not fit.
        unit = jnp.zeros_like(x)
        return -jax.lax.map(
            lambda i: jax.jvp(gradient, (x,), (unit.at[i].set(1),))[1][i], jnp.arange(x.shape[0])
        )

    return of(flat)


def _factor(precision: np.ndarray, names: list[str]) -> np.ndarray:
    """Return an upper triangular ``C`` with ``C C'`` the inverse of `precision`, or its diagonal.

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
        lowest, vectors = np.linalg.eigh(precision / np.outer(scale, scale))
        if lowest[0] > FLAT * lowest[-1]:
            return np.linalg.inv(np.linalg.cholesky(precision)).T
        flat = int(np.argmax(np.abs(vectors[:, 0])))
    raise ValueError(
        f"The log posterior is flat or rises at its mode, in a direction of {names[flat]}: there "
        f"is no scale to whiten by. Give it a proper prior, or drop what duplicates it."
    )


@partial(jax.jit, static_argnames="structure")
def _whitened(fitted: Gaussian, affine: _Affine, structure: str) -> Gaussian:
    """Return the clients' Gaussians as functions of ``z``."""
    factor, precision = affine.factor, _flat(fitted, structure)
    eta = jax.vmap(trees.ravel)(fitted.precision_mean)
    if structure == "dense":
        eta = (eta - precision @ affine.center) @ factor
        shaped: Any = factor.T @ precision @ factor
    else:
        eta = (eta - precision * affine.center) * factor
        shaped = jax.vmap(affine.unravel)(precision * factor**2)
    return Gaussian(jax.vmap(affine.unravel)(eta), shaped, structure)


class Losses(NamedTuple):
    """By how much log likelihoods are lower than at the mode, ``[2, d]``."""

    values: Any

    def to_range(self, limit: float) -> "Losses":
        """Return the answer for a secure sum of numbers up to `limit`; see `Ranged`."""
        values = jnp.where(jnp.isnan(self.values), limit, jnp.clip(self.values, -limit, limit))
        return Losses(values)

    def from_range(self, limit: float) -> "Losses":
        """Return a sum of such answers as the server reads it."""
        return Losses(jnp.where(self.values > limit / 2, jnp.inf, self.values))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Falls(Question):
    """Losses of log likelihood some sds from the mode, along each axis and back.

    The content is the mode, a position, and a factor as of `_Affine`; the answer is `Losses`.
    """

    disclosure = Disclosure(
        "by how much the log likelihood falls between the best fit and positions around it",
        hidden_in_sums=True,
    )

    def answer(self, content: tuple[ArrayTree, Array], client: Client) -> Losses:
        centre, factor = content
        flat = trees.ravel(centre)
        affine, size = _Affine(flat, factor, centre), flat.shape[0]

        def loss(z: Array) -> Array:
            position = affine(affine.unravel(z))

            def of_terms(terms_fn: Terms, mask: Array) -> Array:
                change = terms_fn(centre) - terms_fn(position)
                return jnp.sum(jnp.where(mask, change, 0))  # small: few digits are lost

            return fold_terms(self.posterior.loglikelihood_fn, of_terms, client)

        def at(i: Array) -> Array:
            z = jnp.zeros_like(flat).at[i].set(PROBE)  # a matrix of all might not fit
            return jnp.stack([loss(-z), loss(z)])

        return Losses(jax.lax.map(at, jnp.arange(size)).T)

    def answer_like(self, content: tuple[ArrayTree, Array]) -> Any:
        size = trees.num_elements(content[0])
        return Losses(jax.ShapeDtypeStruct((2, size), jnp.result_type(float)))

    def check_content(self, content: tuple[ArrayTree, Array], federation: Federation) -> None:
        check_model(self.posterior, content[0], federation)


@compiled
def _falls_of_prior(posterior: Posterior, affine: _Affine) -> Array:
    @jax.jit
    def falls(affine: _Affine) -> Array:
        at_mode = posterior.logprior_fn(affine.unravel(affine.center))
        unit = jnp.zeros_like(affine.center)

        def loss(z: Array) -> Array:
            return at_mode - posterior.logprior_fn(affine(affine.unravel(z)))

        def at(i: Array) -> Array:
            z = unit.at[i].set(PROBE)
            return jnp.stack([loss(-z), loss(z)])

        return jax.lax.map(at, jnp.arange(len(unit))).T

    return falls(affine)


@jax.jit
def _probes(affine: _Affine) -> ArrayTree:
    """Return the positions `PROBE` sds from the mode, first down and then up each axis."""
    axes = PROBE * jnp.eye(len(affine.center), dtype=affine.center.dtype)
    return jax.vmap(lambda z: affine(affine.unravel(z)))(jnp.concatenate([-axes, axes]))


def _least_curvatures(
    posterior: Posterior, consortium: Consortium, affine: _Affine, size: int
) -> np.ndarray:
    """Return the least curvature of any direction `PROBE` sds from the mode, ``[2, d]``."""
    points, centre = _probes(affine), affine.unravel(affine.center)
    asked = consortium.ask(expansions(posterior), Points(points, centre)).value
    of_prior = expanded_prior(posterior, points, centre, structure="dense")[2]
    precision = symmetric(np.asarray(asked.curvature, np.float64), size)
    factor = np.asarray(affine.factor, np.float64)
    whitened = factor.T @ (precision + np.asarray(of_prior, np.float64)) @ factor
    if not np.isfinite(whitened).all():
        return np.full((2, size), np.nan)
    return np.asarray(np.linalg.eigvalsh(whitened)[:, 0].reshape(2, size))


def _warn_where_not_quadratic(
    posterior: Posterior, consortium: Consortium, affine: _Affine, names: list[str]
) -> None:
    content = affine.unravel(affine.center), affine.factor
    with jax.default_matmul_precision("highest"):
        of_rows = consortium.ask(Falls(posterior), content).value.values
        falls = np.asarray(of_rows) + np.asarray(_falls_of_prior(posterior, affine))
    factor = np.asarray(affine.factor)

    def name_of(axis: int) -> str:
        if factor.ndim == 1:
            return names[axis]
        return names[int(np.argmax(np.abs(factor[:, axis]) / np.linalg.norm(factor, axis=1)))]

    cure = (
        "Kernels on these coordinates may be biased or diverge. What helps: a prior that bounds it "
        "from both sides, another parametrization (non-centered effects, the logarithm of a "
        "scale), and checking with draws of smaller steps."
    )
    if (falls >= MIN_FALL).all() and (falls <= MAX_FALL).all():
        if factor.ndim == 1 or len(names) > MAX_CURVED:
            return
        curvatures = _least_curvatures(posterior, consortium, affine, len(names)).min(0)
        if not (curvatures >= MIN_CURVATURE).all():
            axis = int(np.argmin(curvatures))
            warnings.warn(
                f"The curvature at the mode is no guide {PROBE:g} sds along {name_of(axis)}: in "
                f"some direction it is {curvatures[axis]:.2g} of the mode's there, as where few "
                f"rows tell a scale. {cure}",
                stacklevel=3,
            )
        return
    away = np.where(np.isfinite(falls), np.abs(np.log(np.maximum(falls, 1e-3) / 2)), np.inf)
    worst = int((falls.min(0) if falls.min() < 0 else -away.max(0)).argmin())
    name = name_of(worst)
    low, high = falls[:, worst]
    if falls.min() < 0:
        raise ValueError(
            f"No mode was found: {PROBE:g} sds away along {name} the log posterior is higher, by "
            f"{-min(low, high):.3g} nats. {UNSCALED} Else give "
            f"another position=."
        )
    warnings.warn(
        f"The curvature at the mode is no guide to the scale of {name}: {PROBE:g} sds to either "
        f"side the log posterior falls by {low:.3g} and {high:.3g}, a Gaussian's by "
        f"{PROBE**2 / 2:g}. {cure}",
        stacklevel=3,
    )
