"""Evaluation of a NumPyro model on a few rows: independence of terms, and valid parameters."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import distributions as dist
from numpyro import handlers

from fedmcmc.data import FederatedData, warn_caller
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._numpyro_batches import BATCH_SIZE, Batch, batches_of
from fedmcmc.interop._numpyro_structure import SURVIVAL_ADVICE, Structure
from fedmcmc.interop._rows import ROW_TOLERANCE, describe_row
from fedmcmc.types import ArrayTree

SCALES = (0.3, 1.0, 0.5)
"""Standard deviations of the positions at which terms are compared."""
NUM_POSITIONS = 40
"""Number of positions, and a tenth of the prior draws, at which parameters are checked."""
MAX_INVALID_SHARE = 0.05
"""Share of draws with a parameter outside its bounds above which a warning is given."""

Invalid = dict[tuple[str, str, str, str], Array]
"""Flag of a parameter outside its bounds, by site, parameter, distribution and bounds."""


class ProbedModel(NamedTuple):
    """Values of a model on a batch at a position.

    Attributes
    ----------
    together, alone
        ``[BATCH_SIZE]``, terms of the rows in the batch, and of each row in a batch of one.
    invalid
        Parameters outside their bounds.
    prior_sds
        Standard deviations of the latent sites on the real line.
    """

    together: Array
    alone: Array
    invalid: Invalid
    prior_sds: dict[str, Array]


_Evaluate = Callable[[ArrayTree, ArrayTree, ArrayTree], ProbedModel]


def check_terms(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    data: FederatedData | None,
    is_real: bool,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Raise if a row's term depends on other rows of its batch; warn of invalid parameters.

    If not `is_real`, `rows` only have the shapes of rows. Programs in `compiled` are reused.
    """

    @jax.jit
    def evaluate(position: ArrayTree, latent: ArrayTree, batch: ArrayTree) -> ProbedModel:
        def trace(rows: ArrayTree) -> tracing.Trace:
            return tracing.trace_at(model, rows, {**position, **latent})

        def term_alone(row: ArrayTree) -> Array:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            return tracing.row_terms(trace(single), structure.likelihood)[0]

        sites = trace(batch)
        together = tracing.row_terms(sites, structure.likelihood)
        sds = _prior_sds(sites, structure)
        return ProbedModel(together, jax.vmap(term_alone)(batch), invalid_parameters(sites), sds)

    evaluate_once: _Evaluate = compiled.setdefault("terms", evaluate)
    batches = batches_of(rows, data, is_real)
    rng = np.random.default_rng(0)
    initial = _draw_position(structure, rng, SCALES[0])
    try:
        sds = evaluate_once(*initial, batches[0].rows).prior_sds
    except Exception as error:
        _check_one_row(model, structure, rows, error)
        raise
    points = [initial, *(_draw_position(structure, rng, scale) for scale in SCALES[1:])]
    # The coefficient of an outcome in the thousands may only matter at the scale of its prior.
    wide_position, wide_latent = (
        {name: _scaled(x, sds.get(name)) for name, x in tree.items()}
        for tree in _draw_position(structure, rng, 1.0)
    )
    checks = [(point, False) for point in points] + [((wide_position, wide_latent), True)]
    for (point, only_finite), batch in product(checks, batches):
        _check_independent(evaluate_once, point, batch, data, structure, only_finite)
    if is_real:
        # Made-up rows may have values that a column cannot have.
        is_row = batches[0].numbers >= 0
        real_rows = jax.tree.map(lambda leaf: np.resize(leaf[is_row], leaf.shape), batches[0].rows)
        invalid = [evaluate_once(*_draw_position(structure, rng, 1.0), real_rows).invalid]
        if invalid[0]:
            for _ in range(NUM_POSITIONS):
                position, latent = _draw_position(structure, rng, 1.0)
                invalid.append(evaluate_once(position, latent, real_rows).invalid)
            _warn_of_parameters(model, invalid, real_rows)


def _draw_position(
    structure: Structure, rng: np.random.Generator, scale: float
) -> tuple[ArrayTree, ArrayTree]:
    """Return a random position and random local latents."""
    dtype = jnp.result_type(float)
    position, latent = (
        {name: rng.normal(0, scale, shape).astype(dtype) for name, shape in shapes.items()}
        for shapes in (structure.shared_shapes, structure.local_shapes)
    )
    return position, latent


def _prior_sds(sites: tracing.Trace, structure: Structure) -> dict[str, Array]:
    """Return the prior standard deviations of the real latent sites, if NumPyro has them."""
    sds = {}
    for name in structure.latent_shapes:
        fn = sites[name]["fn"]
        if getattr(fn.support, "base_constraint", fn.support) is dist.constraints.real:
            try:
                sds[name] = jnp.sqrt(jnp.asarray(fn.variance))
            except Exception:  # the distribution has no variance
                continue
    return sds


def _scaled(values: np.ndarray, sds: ArrayTree) -> np.ndarray:
    """Return values times the standard deviations above one, if these are known and finite."""
    if sds is None:
        return values
    sds = np.asarray(sds)
    if sds.shape not in ((), values.shape) or not np.isfinite(sds).all():
        return values
    return (values * np.clip(sds, 1, 1e6)).astype(values.dtype)


def _check_one_row(
    model: Callable[..., Any], structure: Structure, rows: ArrayTree, error: Exception
) -> None:
    """Raise a `ValueError` if the model does not run on a single row."""
    try:
        jax.eval_shape(
            lambda position, rows: tracing.row_terms(
                tracing.trace_at(model, rows, position), structure.likelihood
            ),
            tracing.position_shapes(structure.latent_shapes),
            tracing.row_shapes(rows, 1),
        )
    except Exception:
        raise ValueError(
            f"The model does not run on one row: {type(error).__name__}. It must run on any number "
            f"of rows, since clients and minibatches may have one row: take sizes from the rows' "
            f"shapes, and let no operation combine rows (a decomposition, a linear solve)."
        ) from error


def _check_independent(
    evaluate: _Evaluate,
    position: tuple[ArrayTree, ArrayTree],
    batch: Batch,
    data: FederatedData | None,
    structure: Structure,
    only_finite: bool,
) -> None:
    """Raise if a row's term alone differs from its term in the batch.

    If `only_finite`, pairs of terms of which one is not finite do not count.
    """
    together, alone, *_ = evaluate(*position, batch.rows)
    differs = _differs(together, alone, only_finite)
    if differs.any() and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        # Programs that are fused differently round large values differently in single precision.
        try:
            with jax.enable_x64(True):
                arguments = jax.tree.map(_widened, (*position, batch.rows))
                together, alone, *_ = evaluate(*arguments)
                differs = _differs(together, alone, only_finite)
        except Exception:  # the model only runs in single precision
            pass
    if not differs.any():
        return
    i = int(np.argmax(differs))
    number = int(batch.numbers[i])
    row = "a made-up row" if number < 0 else describe_row(number, data)
    raise ValueError(
        f"A row's log likelihood depends on the other rows of its batch: {row} has "
        f"{float(alone[i]):.6g} alone and {float(together[i]):.6g} among {BATCH_SIZE} rows. "
        f"Minibatches and clients would then disagree about it. Center, scale and rank columns "
        f"before you create the data, with numbers that all clients share, not in the model; and "
        f"do not divide by the number of rows (check_rows=False turns this check off)."
        + (SURVIVAL_ADVICE if set(structure.factors) & set(structure.likelihood) else "")
    )


def _widened(leaf: Array) -> np.ndarray:
    values = np.asarray(leaf)
    return values.astype(np.float64) if jnp.issubdtype(values.dtype, jnp.floating) else values


def _differs(together: ArrayLike, alone: ArrayLike, only_finite: bool) -> np.ndarray:
    """Return a mask of terms that differ; a non-finite term differs from all but its equal."""
    together, alone = np.asarray(together, np.float64), np.asarray(alone, np.float64)
    is_equal = (together == alone) | (np.isnan(together) & np.isnan(alone))
    with np.errstate(invalid="ignore"):
        is_far = np.abs(together - alone) > ROW_TOLERANCE * (1 + np.abs(alone))
    is_finite = np.isfinite(together) & np.isfinite(alone)
    return is_finite & is_far if only_finite else np.where(is_finite, is_far, ~is_equal)


def invalid_parameters(sites: tracing.Trace) -> Invalid:
    """Return flags of the computed parameters of distributions that lie outside their bounds.

    A parameter may equal its bound, because floats round to it. Masked sites are left out.
    """
    invalid: Invalid = {}
    for name, site in sites.items():
        if site["type"] != "sample" or tracing.is_factor(site) or tracing.is_masked(site["fn"]):
            continue
        for part in tracing.parts(site["fn"]):
            for parameter, constraint in part.arg_constraints.items():
                value = vars(part).get(parameter)
                lower = getattr(constraint, "lower_bound", None)
                upper = getattr(constraint, "upper_bound", None)
                bounds = [bound for bound in (lower, upper) if isinstance(bound, int | float)]
                if not bounds or constraint.is_discrete or not _is_computed_float(value):
                    continue
                value = jnp.asarray(value)
                outside = jnp.zeros((), bool)
                if lower is not None:
                    outside |= jnp.any(value < lower - 1e-4)
                if upper is not None:
                    outside |= jnp.any(value > upper + 1e-4)
                span = f"above {lower:g}" if upper is None else f"in {bounds}"
                key = (name, parameter, tracing.name_of(part), span)
                invalid[key] = invalid.get(key, jnp.zeros((), bool)) | outside
    return invalid


def _is_computed_float(value: object) -> bool:
    """Return whether a value is a traced float, as opposed to a constant of the model."""
    return isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.floating)


def _warn_of_parameters(model: Callable[..., Any], invalid: list[Invalid], rows: ArrayTree) -> None:
    """Warn of parameters that are often invalid, both at positions and at draws of the prior."""
    shares = {key: float(np.mean([bool(flags[key]) for flags in invalid])) for key in invalid[0]}
    if not any(share > MAX_INVALID_SHARE for share in shares.values()):
        return

    def invalid_at_draw(rng_key: Array) -> Invalid:
        with handlers.trace() as sites:
            tracing.call_model(handlers.seed(model, rng_key), rows)
        return invalid_parameters(sites)

    try:
        keys = jax.random.split(jax.random.key(0), 10 * NUM_POSITIONS)
        at_draws = jax.jit(jax.vmap(invalid_at_draw))(keys)
        shares = {key: float(np.mean(at_draws[key])) for key in shares if key in at_draws}
    except Exception:  # the prior cannot be drawn from; the shares at positions remain
        pass
    for (name, parameter, distribution, span), share in shares.items():
        if share > MAX_INVALID_SHARE:
            warn_caller(
                f"Site {name!r}: the parameter {parameter} of its distribution ({distribution}) "
                f"must lie {span}, but does not at {100 * share:.0f} % of the prior's draws. "
                f"NumPyro evaluates the density there nevertheless. Use a link function: logits= "
                f"in place of probs=, jnp.exp or jax.nn.softplus for a positive parameter."
            )
