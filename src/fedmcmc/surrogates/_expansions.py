"""Surrogates by second-order expansion, at a common point or at the maximum of each client."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import positive_integer
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import BLOCK, ClientDensity
from fedmcmc.kernels import PerClientQuestion, check_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import as_consortium
from fedmcmc.surrogates import _checks as checks
from fedmcmc.surrogates._clients import (
    NaturalParameters,
    answer_per_client,
    as_gaussians,
    natural_parameters_at,
    natural_parameters_like,
    with_labels,
)
from fedmcmc.surrogates._maxima import maximize
from fedmcmc.types import ArrayTree, Client, Federation, Posterior, register_dataclass


def taylor(
    posterior: Posterior,
    data: object,
    centre: ArrayTree,
    *,
    structure: str = "dense",
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at one common point.

    ``precision = -Hessian`` and ``precision_mean = gradient + precision @ centre``, both at
    `centre`, so ``grad log q_s`` is exact at the center, and everywhere for a quadratic log
    likelihood. If a client has few rows or separable classes, its surrogate may be improper;
    conducive gradients accept that. A good center is the posterior's mode (`mode`).

    Parameters
    ----------
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients, who answer in one exchange.
    centre
        Position of the expansion.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: action if an expansion is not finite.

    Raises
    ------
    ValueError
        If a gradient or Hessian is not finite; not if a likelihood is improper.

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
    checks.check_choices(check, structure)
    centre = trees.as_floats(centre, "centre")
    num_clients = as_consortium(data).federation.num_clients
    question = CommonExpansions(checks.densities_of(posterior), structure, num_clients=num_clients)
    fitted = as_gaussians(answer_per_client(question, data, centre), centre, structure)

    def describe(finite: bool) -> str | None:
        text = "the log likelihood's gradient or Hessian at the center is not finite"
        return None if finite else text

    if check != "ignore":
        finite = jax.vmap(trees.all_finite)(fitted)
        remedies = "Pass another centre, or drop such rows."
        checks.report_bad_clients(check, "taylor", describe, (finite,), data, remedies)
    return with_labels(fitted, data)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class CommonExpansions(PerClientQuestion):
    """Question for each client's expansion at a position, the content; see `taylor`."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="the values of the parameters that the rows of this site alone suggest, and "
        "how certain they are, near a position that the server chooses. One answer per site, no "
        "sum over the sites",
    )

    structure: str = field(metadata={"static": True})

    def own(self, content: ArrayTree, client: Client) -> NaturalParameters:
        flat, unravel = ravel_pytree(content)
        target = ClientDensity(self.posterior, None, unravel)
        gradient, precision = target.expand(client, flat, self.structure == "dense")
        return natural_parameters_at(gradient, precision, flat, unravel)

    def own_like(self, content: ArrayTree) -> ArrayTree:
        flat = jax.eval_shape(trees.ravel, content)
        return natural_parameters_like(flat.shape[0], self.structure, flat.dtype)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)


def laplace(
    rng_key: Array,
    posterior: Posterior,
    data: object,
    *,
    position: ArrayTree = None,
    structure: str = "dense",
    prior_fraction: float = 0.0,
    max_steps: int = 200,
    tolerance: float = 1e-7,
    check: str = "error",
) -> Gaussian:
    """Expand each client's log likelihood to second order at its maximum.

    The gradient at the search's final position enters the surrogate's mean (one Newton step), so
    ``grad log q_s`` is exact there, and everywhere for a quadratic log likelihood.

    Parameters
    ----------
    rng_key
        Random key for ``posterior.init_fn``.
    posterior
        The model.
    data
        A `FederatedData`, or a consortium of clients, who answer in one exchange.
    position
        Start of all searches; by default ``posterior.init_fn(rng_key)``.
    structure
        ``"dense"``, or ``"diagonal"`` for the diagonal of the Hessian.
    prior_fraction
        Power of the prior in the search for the maximum; the expansion is the likelihood's alone.
    max_steps, tolerance
        Largest number of steps, and predicted gain of a step, in nats, below which a search ends.
    check
        ``"error"``, ``"warn"`` or ``"ignore"``: action if the precision is not positive definite,
        the log likelihood hardly falls two sds from the maximum, or the maximum is more than 0.1
        sds away. The check costs about as much as the Hessian; networks need ``"ignore"``.

    Raises
    ------
    ValueError
        If an argument is out of range, without a position, or if a client's likelihood is improper.

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
    checks.check_choices(check, structure)
    max_steps = positive_integer(max_steps, "max_steps")
    position = checks.start_position(rng_key, posterior, position)
    num_clients = as_consortium(data).federation.num_clients
    question = OwnExpansions(
        checks.densities_of(posterior),
        checks.positive_or_none(prior_fraction),
        max_steps,
        tolerance,
        structure,
        check != "ignore",
        num_clients=num_clients,
    )
    fitted, measured = answer_per_client(question, data, position)
    if check != "ignore":
        checks.report_bad_clients(check, "laplace", checks.describe_maximum, measured, data)
    return with_labels(as_gaussians(fitted, position, structure), data)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class OwnExpansions(PerClientQuestion):
    """Question for each client's expansion at its maximum; the content is a start (`laplace`)."""

    disclosure = replace(
        PerClientQuestion.disclosure,
        content="the values of the parameters that the rows of this site alone suggest, and "
        "how certain they are. One answer per site, no sum over the sites",
    )

    prior_fraction: Any
    max_steps: Any
    tolerance: Any
    structure: str = field(metadata={"static": True})
    measure: bool = field(metadata={"static": True})

    def own(
        self, content: ArrayTree, client: Client
    ) -> tuple[NaturalParameters, checks.MaximumCheck | tuple[()]]:
        start, unravel = ravel_pytree(content)
        size, structure = start.shape[0], self.structure
        likelihood = ClientDensity(self.posterior, None, unravel)
        tilted = ClientDensity(self.posterior, self.prior_fraction, unravel)
        # A diagonal hides most flat directions, so the check of a small problem uses the Hessian.
        dense = structure == "dense" or (self.measure and size <= checks.MAX_DENSE_CHECK)
        maximum = maximize(
            lambda flat: tilted.value_and_gradient(client, flat),
            start,
            self.max_steps,
            self.tolerance,
        )
        gradient, precision = likelihood.expand(client, maximum.flat, dense)
        reported = precision if structure == "dense" or not dense else jnp.diagonal(precision)
        fitted = natural_parameters_at(gradient, reported, maximum.flat, unravel)
        if not self.measure:
            return fitted, ()
        if self.prior_fraction is not None:
            prior_gradient, prior_precision = tilted.expand_prior(maximum.flat, dense)
            gradient, precision = gradient + prior_gradient, precision + prior_precision
        measured = checks.check_maximum(
            lambda shift: tilted.change(client, maximum.flat, shift), gradient, precision, BLOCK
        )
        # Flags become numbers, because answers are sums.
        return fitted, jax.tree.map(lambda x: x.astype(start.dtype), measured)

    def own_like(self, content: ArrayTree) -> ArrayTree:
        flat = jax.eval_shape(trees.ravel, content)
        fitted = natural_parameters_like(flat.shape[0], self.structure, flat.dtype)
        number: Any = jax.ShapeDtypeStruct((), flat.dtype)
        return fitted, checks.MaximumCheck(*[number] * 5) if self.measure else ()

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_model(self.posterior, content, federation)


def setup_bits(surrogates: Gaussian, *, num_exchanges: int = 0) -> int:
    """Return the bits that conducive gradients need before the first round, over all clients.

    Each client sends its natural parameters and receives their sums. A dense precision is symmetric
    and counts ``d * (d + 1) / 2`` numbers. `num_exchanges` exchanges of log likelihoods and
    gradients add ``d`` numbers down and ``d + 1`` up, each. The cost of the common center of
    `taylor` is in `ModeResult.bits_up` and `ModeResult.bits_down`.

    Examples
    --------
    Two clients in two dimensions send and receive five numbers of 32 bits each.

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
