"""Conversion of Flax modules (linen or nnx) to posteriors of Bayesian neural networks.

Flax is an optional dependency (the extra ``flax``) that is imported on first use.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial
from jax.typing import ArrayLike

from fedmcmc.data import FederatedData
from fedmcmc.interop._flax_densities import (
    LIKELIHOODS,
    check_name,
    check_rows,
    check_terms,
    logprior,
    positive,
    prior_scales,
)
from fedmcmc.interop._flax_module import (
    Column,
    Columns,
    Network,
    Setup,
    Shapes,
    check_call,
    read_module,
)
from fedmcmc.types import ArrayTree, Posterior, Static, as_functions, compiled

__all__ = ["from_flax", "predictive"]

Name = Literal["categorical", "bernoulli", "gaussian"]


def from_flax(
    module: object,
    *,
    example: ArrayTree | FederatedData,
    prior_scale: ArrayTree,
    likelihood: Name | Callable[[ArrayTree, ArrayTree], Array],
    noise_scale: ArrayLike | None = None,
    inputs: Column | Sequence[Column] = "x",
    outcome: Column = "y",
    options: Mapping[str, Hashable] | None = None,
    check: bool = True,
) -> Posterior:
    """Convert a Flax module to a `Posterior` over its parameters.

    The prior is normal and normalized. `init_fn` draws the module's initialization. Positions are
    nested dicts (for nnx, `flax.nnx.to_pure_dict`).

    Parameters
    ----------
    module
        `flax.linen` module, or the class of a `flax.nnx` module, also as a `functools.partial`.
    example
        Some rows, a dict or a tuple with leaves ``[n, ...]``, or a `FederatedData`.
    prior_scale
        Standard deviations of the priors: a number, a tree prefix of the position with numbers or
        arrays, or a function of a path such as ``"Dense_0.kernel"`` and a leaf's shape.
    likelihood, noise_scale
        ``"categorical"`` (outputs are logits ``[n, num_classes]``, outcomes integers ``[n]``),
        ``"bernoulli"`` (outputs are logits, outcomes 0 or 1), ``"gaussian"`` (outputs are means,
        `noise_scale` is the standard deviation), or a function ``(outputs, batch) -> [n]``; then
        `resample_fn` is ``None``.
    inputs, outcome
        Keys of the rows for the module's arguments and for the outcomes; 0 and 1 for tuples.
    options, check
        Constant keyword arguments of the module's call, such as ``{"train": False}``, and a flag
        for a compiled check that rows are independent.

    Raises
    ------
    ImportError, TypeError, ValueError
        If flax is missing, the module has state or random numbers, or arguments do not fit.

    Examples
    --------
    >>> import jax, numpy as np
    >>> from flax import linen as nn
    >>> network = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(3)])
    >>> rows = {"x": np.ones((5, 4), np.float32), "y": np.array([0, 2, 1, 1, 0])}
    >>> posterior = from_flax(network, example=rows, prior_scale=1.0, likelihood="categorical")
    >>> posterior.loglikelihood_fn(posterior.init_fn(jax.random.key(0)), rows).shape
    (5,)
    """
    network = read_module(module, options)
    columns = Columns.from_keys(inputs, outcome)
    rows = columns.read(example)
    shapes = columns.input_shapes(rows)
    position, outputs = check_call(network, shapes, columns.arguments(rows))
    if not callable(likelihood):
        check_name(likelihood)
    scales: tuple[Array, ...] = ()
    if likelihood == "gaussian":
        if noise_scale is None:
            raise ValueError("likelihood='gaussian' needs a noise_scale.")
        scales = (positive(noise_scale, rows[outcome].shape[1:], "noise_scale"),)
    elif noise_scale is not None:
        raise ValueError(f"noise_scale belongs to likelihood='gaussian', not {likelihood!r}.")
    setup = Static(Setup(network, columns))
    if callable(likelihood):
        terms, draw = Partial(_custom_terms, setup, as_functions(likelihood)), None
    else:
        LIKELIHOODS[likelihood].check(outputs, rows[outcome])
        terms = Partial(_terms, setup, Static(likelihood), scales)
        draw = Partial(_resample, setup, Static(likelihood), scales)
    posterior = Posterior(
        logprior_fn=Partial(logprior, prior_scales(prior_scale, position)),
        loglikelihood_fn=terms,
        resample_fn=draw,
        init_fn=Partial(_init, Static((network, shapes))),
    )
    check_terms(posterior, position, rows)
    if check:
        check_rows(posterior, rows)
    return posterior


def predictive(
    module: object,
    *,
    likelihood: Name | None = None,
    inputs: Column | Sequence[Column] = "x",
    options: Mapping[str, Hashable] | None = None,
) -> Callable[[ArrayTree, ArrayTree], ArrayTree]:
    """Return a function ``(position, batch) -> mean`` of the outcomes given one position.

    The average over draws is the posterior predictive mean.

    Parameters
    ----------
    module, inputs, options
        Arguments of `from_flax`.
    likelihood
        Kind of mean, in the shape of the module's outputs: ``"categorical"`` for probabilities of
        the classes ``[n, num_classes]``, ``"bernoulli"`` for the probability of outcome 1,
        ``"gaussian"`` for means, ``None`` for the outputs themselves.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> predict = predictive(nn.Dense(3), likelihood="categorical")
    >>> draws = {"kernel": jnp.ones((10, 4, 3)), "bias": jnp.zeros((10, 3))}
    >>> means = jax.vmap(predict, (0, None))(draws, {"x": jnp.ones((2, 4))})
    >>> print(means.mean(axis=0).round(3))
    [[0.333 0.333 0.333]
     [0.333 0.333 0.333]]
    """
    if likelihood is not None:
        check_name(likelihood)
    setup = Setup(read_module(module, options), Columns.from_keys(inputs, None))
    return Partial(_predict, Static(setup), Static(likelihood))


def _terms(
    setup: Static[Setup],
    name: Static[Name],
    scales: tuple[Array, ...],
    position: ArrayTree,
    batch: ArrayTree,
) -> Array:
    outputs = setup.value.real_outputs(position, batch)
    outcome = batch[setup.value.columns.outcome]
    terms = LIKELIHOODS[name.value].term(outputs, outcome, *scales)
    return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def _custom_terms(
    setup: Static[Setup], likelihood: Callable[..., Array], position: ArrayTree, batch: ArrayTree
) -> Array:
    return likelihood(setup.value.outputs(position, batch), batch)


def _resample(
    setup: Static[Setup],
    name: Static[Name],
    scales: tuple[Array, ...],
    rng_key: Array,
    position: ArrayTree,
    batch: ArrayTree,
) -> ArrayTree:
    columns = setup.value.columns
    outputs = setup.value.real_outputs(position, batch)
    shape = batch[columns.outcome].shape
    outcome = LIKELIHOODS[name.value].draw(rng_key, outputs, shape, *scales)
    return columns.replace_outcome(batch, outcome)


def _predict(
    setup: Static[Setup], name: Static[Name | None], position: ArrayTree, batch: ArrayTree
) -> ArrayTree:
    if name.value is None:
        return setup.value.outputs(position, batch)
    return LIKELIHOODS[name.value].mean(setup.value.real_outputs(position, batch))


@compiled
def _init(setup: Static[tuple[Network, Shapes]], rng_key: Array) -> ArrayTree:
    network, shapes = setup.value
    return network.init(rng_key, shapes)
