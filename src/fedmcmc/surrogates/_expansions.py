"""Second-order expansions at a common point or at clients' own maxima; the posterior's mode."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Client, Federation, Posterior, register_dataclass
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import BLOCK, Target
from fedmcmc.kernels import PerClientQuestion, check_model
from fedmcmc.pytrees import trees
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._ascents import (
    IMPOSSIBLE,
    NEWTON_DIMENSIONS,
    ROUNDING,
    Ledger,
    Objective,
    lbfgs,
    newton,
    run_ascents,
)
from fedmcmc.surrogates._asking import (
    Natural,
    answers,
    federation_of,
    gaussians,
    natural,
    natural_like,
    summing,
    with_labels,
)
from fedmcmc.surrogates._maxima import DENSE_LIMIT, maximize
from fedmcmc.surrogates._nonfinite import explain_nonfinite, positions_around


def taylor(
    posterior: Posterior,
    data: Any,
    centre: ArrayTree,
    *,
    structure: str = "dense",
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at one common point.

    ``precision = -Hessian`` and ``precision_mean = gradient + precision @ centre``, both at
    `centre`, so ``grad log q_s`` is exact there and everywhere for a quadratic log likelihood. It
    is defined for every client, however small or separable; its surrogate may then be improper,
    which conducive gradients do not mind. A good center is the posterior's maximum, see `mode`.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients elsewhere, who answer in one exchange.
    centre
        A position.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do where an expansion is not finite.

    Raises
    ------
    ValueError
        Where a gradient or Hessian is not finite; never because a likelihood is improper.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(8)])
    >>> q = surrogates.taylor(posterior, data, jnp.array(0.5))
    >>> q.precision.ravel().tolist(), q.precision_mean.tolist()
    ([4.0, 8.0], [4.0, 0.0])
    """
    checks.choices(check, structure)
    centre = trees.as_floats(centre, "centre")
    federation = federation_of(data)
    question = CommonExpansions(
        checks.densities(posterior), structure, num_clients=federation.num_clients
    )
    fitted = gaussians(answers(question, data, centre), centre, structure)

    def describe(finite: bool) -> str | None:
        text = "the log likelihood's gradient or Hessian at the center is not finite"
        return None if finite else text

    if check != "ignore":
        finite = jax.vmap(trees.all_finite)(fitted)
        remedies = "Pass another center, or drop such rows."
        checks.complain(check, "taylor", describe, (finite,), data, remedies)
    return with_labels(fitted, data)


UNSCALED = (
    "The usual reason is covariates far from zero for what they vary by (a year near 2000): center "
    "and scale them."
)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class CommonExpansions(PerClientQuestion):
    """Each client's expansion at one position, the content; see `taylor`."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="the values of the parameters that the rows of this site alone suggest, and "
        "how certain "
        "they are, near a position that the server chooses. One answer per site, no sum over the "
        "sites",
    )

    structure: str = field(metadata={"static": True})

    def own(self, content: ArrayTree, client: Client) -> Natural:
        flat, unravel = ravel_pytree(content)
        target = Target(self.posterior, None, unravel)
        gradient, precision = target.expand(client, flat, self.structure == "dense")
        return natural(gradient, precision, flat, unravel)

    def own_like(self, content: ArrayTree) -> ArrayTree:
        flat = jax.eval_shape(trees.ravel, content)
        return natural_like(flat.shape[0], self.structure, flat.dtype)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)


def laplace(
    rng_key: Array,
    posterior: Posterior,
    data: Any,
    *,
    position: ArrayTree = None,
    structure: str = "dense",
    prior_fraction: float = 0.0,
    max_steps: int = 200,
    tolerance: float = 1e-7,
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at its own maximum.

    The maximum is found by the L-BFGS of optax. The gradient that is left where it stops enters the
    surrogate's mean (one Newton step), so ``grad log q_s`` is exact there whatever the optimizer
    did, and everywhere for a quadratic log likelihood.

    Parameters
    ----------
    rng_key
        Used only by ``posterior.init_fn``.
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients elsewhere, who search by themselves and answer
        in one exchange.
    position
        Where every optimization starts; by default ``posterior.init_fn(rng_key)``.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    prior_fraction
        Maximize ``likelihood * prior**prior_fraction``; the expansion, made there, is that of the
        likelihood alone.
    max_steps, tolerance
        Stop after so many steps, or when one promises to gain less than `tolerance` nats.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: what to do where a client's likelihood is improper
        or its maximum not found: a precision that is singular or indefinite at the maximum, a log
        likelihood that hardly falls two standard deviations away from it in some direction (the
        optimizer ran off), or more than 0.1 standard deviations left to go. Looking costs about
        as much again as the Hessian. Above 256 dimensions a diagonal structure looks at coordinates
        only; networks want ``"ignore"``.

    Raises
    ------
    ValueError
        On arguments out of range, without a position, and where a client's likelihood is improper.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(8)])
    >>> q = surrogates.laplace(jax.random.key(0), posterior, data, position=jnp.array(0.0))
    >>> q.precision.ravel().tolist(), q.precision_mean.tolist()
    ([4.0, 8.0], [4.0, 0.0])
    """
    checks.choices(check, structure)
    max_steps = checks.integer("max_steps", max_steps, 1)
    position = checks.start_position(rng_key, posterior, position)
    federation = federation_of(data)
    question = OwnExpansions(
        checks.densities(posterior),
        checks.fraction(prior_fraction),
        max_steps,
        tolerance,
        structure,
        check != "ignore",
        num_clients=federation.num_clients,
    )
    fitted, measured = answers(question, data, position)
    if check != "ignore":
        checks.complain(check, "laplace", checks.describe_maximum, measured, data)
    return with_labels(gaussians(fitted, position, structure), data)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class OwnExpansions(PerClientQuestion):
    """Each client's expansion at its own maximum, searched for from the content; see `laplace`."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="the values of the parameters that the rows of this site alone suggest, and "
        "how certain "
        "they are. One answer per site, no sum over the sites",
    )

    prior_fraction: Any
    max_steps: Any
    tolerance: Any
    structure: str = field(metadata={"static": True})
    measure: bool = field(metadata={"static": True})

    def own(
        self, content: ArrayTree, client: Client
    ) -> tuple[Natural, checks.AtMaximum | tuple[()]]:
        start, unravel = ravel_pytree(content)
        size, structure = start.shape[0], self.structure
        likelihood = Target(self.posterior, None, unravel)
        tilted = Target(self.posterior, self.prior_fraction, unravel)
        # A diagonal hides most flat directions, so small problems are measured by the whole
        # Hessian.
        dense = structure == "dense" or (self.measure and size <= DENSE_LIMIT)
        maximum = maximize(
            lambda flat: tilted.value_and_gradient(client, flat),
            start,
            self.max_steps,
            self.tolerance,
        )
        gradient, precision = likelihood.expand(client, maximum.flat, dense)
        thinned = precision if structure == "dense" or not dense else jnp.diagonal(precision)
        fitted = natural(gradient, thinned, maximum.flat, unravel)
        if not self.measure:
            return fitted, ()
        if self.prior_fraction is not None:
            prior_gradient, prior_precision = tilted.expand_prior(maximum.flat, dense)
            gradient, precision = gradient + prior_gradient, precision + prior_precision
        measured = checks.at_maximum(
            lambda shift: tilted.change(client, maximum.flat, shift),
            gradient,
            precision,
            BLOCK,
        )
        # Yes and no as numbers, which sums take.
        return fitted, jax.tree.map(lambda x: x.astype(start.dtype), measured)

    def own_like(self, content: ArrayTree) -> ArrayTree:
        flat = jax.eval_shape(trees.ravel, content)
        fitted = natural_like(flat.shape[0], self.structure, flat.dtype)
        number: Any = jax.ShapeDtypeStruct((), flat.dtype)
        return fitted, checks.AtMaximum(*[number] * 5) if self.measure else ()

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)


class Mode(NamedTuple):
    """The maximum of a posterior, and what finding it cost.

    Attributes
    ----------
    position
        A pytree.
    num_exchanges
        How often a position went down to every client and its log likelihood and derivatives came
        up.
    gradient_norm
        Of the log posterior where it was asked for last; of Newton's method `position` is a step
        ahead.
    bits_up, bits_down
        What all clients together sent and received.
    """

    position: ArrayTree
    num_exchanges: int
    gradient_norm: float
    bits_up: float
    bits_down: float


def mode(
    posterior: Posterior,
    data: Any,
    position: ArrayTree,
    *,
    max_steps: int = 200,
    tolerance: float = 1e-7,
) -> Mode:
    """Find the maximum of the posterior of all rows, a common center for `taylor`.

    Up to 256 dimensions by SciPy's trust-region Newton method, which takes few exchanges, above by
    L-BFGS. Each evaluation is one exchange: ``d`` numbers down for every client, and its log
    likelihood, gradient and (of Newton's method) half of its Hessian up.

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    position
        Where to start.
    max_steps, tolerance
        Stop after so many steps, or when one promises to gain less than `tolerance` nats.

    Raises
    ------
    ValueError
        Where the ascent ends at a position that is not finite, or is unfinished after `max_steps`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from fedmcmc import FederatedData, Posterior, surrogates
    >>> posterior = Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = FederatedData.from_clients([jnp.ones(4), jnp.zeros(3)])
    >>> round(float(surrogates.mode(posterior, data, jnp.array(3.0)).position), 4)
    0.5
    """
    max_steps = checks.integer("max_steps", max_steps, 1)
    position = trees.as_floats(position, "position")
    flat = trees.ravel(position)
    by_newton = flat.shape[0] <= NEWTON_DIMENSIONS
    ledger = Ledger(summing(data))
    expand = Objective(
        checks.densities(posterior), ledger, position, "dense" if by_newton else "none"
    )
    # A step of Newton's is one evaluation, one of L-BFGS's sometimes two.
    max_evaluations = (1 if by_newton else 2) * max_steps + 1

    ascend = partial(newton, accept_flat=True) if by_newton else lbfgs
    ascent = ascend(np.asarray(flat, np.float64), min_gain=tolerance)
    with jax.default_matmul_precision("highest"):
        (best,) = run_ascents(expand, [ascent], max_evaluations)
    norm = float(np.linalg.norm(best.gradient))
    if not best.value < IMPOSSIBLE or not np.isfinite(norm):
        explain_nonfinite(expand.posterior, ledger.consortium, positions_around(position))
        raise ValueError(
            "mode: the log posterior or its gradient turned infinite or not-a-number. Give another "
            "position=: zeros where a log link overflows elsewhere, as with covariates in the "
            "hundreds; or scale these."
        )
    if not best.gain <= tolerance or best.falls:
        again = expand(np.asarray(best.point, flat.dtype)[None])[0]
        gap = float(np.linalg.norm(again.gradient - best.gradient))
        if gap > ROUNDING * norm:
            raise ValueError(
                f"mode: the same question has two answers, gradients of length {norm:.2g} that are "
                f"{gap:.2g} apart, so that no step promises less than {tolerance:g} nats: messages "
                "are rounded. Ask without compress, or with more levels, or raise tolerance."
            )
        raise ValueError(
            f"mode: not finished after {max_steps} steps, of which the last promised "
            f"{best.gain:.2g} nats: raise max_steps, or tolerance if that little does "
            f"not matter (0.01 is about a tenth of a standard deviation from the maximum). "
            f"{UNSCALED}"
        )
    # Where curvature is known a last step costs nothing.
    point = best.point if best.clipped else best.point + best.step
    found = trees.unravel(jnp.asarray(point, flat.dtype), position)
    return Mode(trees.cast_like(found, position), ledger.rounds, norm, ledger.up, ledger.down)


def setup_bits(surrogates: Gaussian, *, num_exchanges: int = 0) -> int:
    """Return the bits that setting up conducive gradients costs all clients together.

    Up: each client's natural parameters. Down: their sums, to each client. A dense precision is
    symmetric and counts ``d * (d + 1) / 2`` numbers. With `num_exchanges` also so many sums of log
    likelihoods and gradients: per exchange and client ``d`` numbers down, ``d + 1`` up. What the
    common center of `taylor` cost is in `Mode.bits_up` and `Mode.bits_down`.

    Examples
    --------
    Two clients, two dimensions, dense: five numbers up and five down, each 32 bits.

    >>> import jax.numpy as jnp
    >>> from fedmcmc import Gaussian, surrogates
    >>> q = Gaussian.from_moments(jnp.zeros((2, 2)), jnp.stack([jnp.eye(2)] * 2))
    >>> surrogates.setup_bits(q)
    640
    """
    num_clients = jax.tree.leaves(surrogates.precision_mean)[0].shape[0]
    down = trees.num_bits(surrogates.precision_mean)
    precision = trees.num_bits(surrogates.precision)
    if surrogates.structure == "dense":
        size = surrogates.precision.shape[-1]
        precision = precision // (size * size) * (size * (size + 1) // 2)
    value = down // trees.num_elements(surrogates.precision_mean) * num_clients
    return 2 * (down + precision) + num_exchanges * (2 * down + value)
