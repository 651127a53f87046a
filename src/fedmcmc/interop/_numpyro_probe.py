"""Evaluation of a NumPyro model on a few rows: independent terms, and possible parameters."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist
from numpyro import handlers

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._numpyro_batches import BATCH, Batch, batches_of
from fedmcmc.interop._numpyro_checks import place_of
from fedmcmc.interop._numpyro_inputs import position_shapes, row_shapes
from fedmcmc.interop._numpyro_structure import NO_RISK_SETS, Structure
from fedmcmc.interop._rows import ROW_TOLERANCE

SCALES = (0.3, 1.0, 0.5)
"""Standard deviation of the positions at which terms are compared."""
NUM_POSITIONS = 40
"""Positions, and draws of the prior, at which parameters are looked at."""
MANY = 0.05
"""Share of draws with an impossible parameter above which there is a warning."""

Impossible = dict[tuple[str, str, str, str], Array]
"""Whether a parameter lies outside its bounds, by site, parameter, distribution and bounds."""


class Evaluated(NamedTuple):
    """A model on a batch at a position.

    Attributes
    ----------
    together, alone
        ``[BATCH]``, terms of the rows, of the batch and of each row as a batch of its own.
    impossible
        Parameters outside their bounds.
    prior_sds
        Standard deviations of the latent sites on the real line.
    """

    together: Array
    alone: Array
    impossible: Impossible
    prior_sds: dict[str, Array]


_Evaluate = Callable[[ArrayTree, ArrayTree, ArrayTree], Evaluated]


def check_terms(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    data: FederatedData | None,
    is_real: bool,
    compiled: dict[str, Callable[..., Any]],
) -> None:
    """Raise if a row's term depends on the others of its batch; warn of impossible parameters.

    Parameters
    ----------
    model, structure
        The model and its structure.
    rows, data
        All rows, and the data whose rows these are.
    is_real
        Whether `rows` are rows, not merely of their shapes.
    compiled
        Compiled programs of the model's checks; the one made here is added.

    Raises
    ------
    ValueError
        Naming the row, its term alone and its term among others.
    """

    @jax.jit
    def evaluate(position: ArrayTree, latent: ArrayTree, batch: ArrayTree) -> Evaluated:
        def trace(rows: ArrayTree) -> tracing.Trace:
            return tracing.trace_at(model, rows, {**position, **latent})

        def alone(row: ArrayTree) -> Array:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            return tracing.row_terms(trace(single), structure.likelihood)[0]

        sites = trace(batch)
        together = tracing.row_terms(sites, structure.likelihood)
        sds = _prior_sds(sites, structure)
        return Evaluated(together, jax.vmap(alone)(batch), impossible_parameters(sites), sds)

    evaluate_once: _Evaluate = compiled.setdefault("terms", evaluate)
    batches = batches_of(rows, data, is_real)
    rng = np.random.default_rng(0)
    first = _draw_position(structure, rng, SCALES[0])
    try:
        sds = evaluate_once(*first, batches[0].rows).prior_sds
    except Exception as error:
        _check_one_row(model, structure, rows, error)
        raise
    positions = [first, *(_draw_position(structure, rng, scale) for scale in SCALES[1:])]
    for position in positions:
        for batch in batches:
            _check_independent(evaluate_once, position, batch, data, structure)
    # A coefficient of an outcome in the thousands may only matter at the scale of its prior.
    wide, wide_latent = (
        {name: _scaled(x, sds.get(name)) for name, x in tree.items()}
        for tree in _draw_position(structure, rng, 1.0)
    )
    for batch in batches:
        _check_independent(
            evaluate_once, (wide, wide_latent), batch, data, structure, only_finite=True
        )
    if is_real:
        # Made-up rows may have values that a column cannot have.
        real = batches[0].numbers >= 0
        few = jax.tree.map(lambda leaf: np.resize(leaf[real], leaf.shape), batches[0].rows)
        found = [evaluate_once(*_draw_position(structure, rng, 1.0), few).impossible]
        if found[0]:
            for _ in range(NUM_POSITIONS):
                found.append(evaluate_once(*_draw_position(structure, rng, 1.0), few).impossible)
            _warn_of_parameters(model, found, few)


def _draw_position(
    structure: Structure, rng: np.random.Generator, scale: float
) -> tuple[ArrayTree, ArrayTree]:
    """Return a random position and random local latents."""
    dtype = jnp.result_type(float)
    position, latent = (
        {name: rng.normal(0, scale, shape).astype(dtype) for name, shape in shapes.items()}
        for shapes in (structure.shapes, structure.local)
    )
    return position, latent


def _prior_sds(sites: tracing.Trace, structure: Structure) -> dict[str, Array]:
    """Return the standard deviations of the latent sites on the real line, where NumPyro has them.

    A site whose prior is wider than the standard normal's has one above one.
    """
    found = {}
    for name in structure.every:
        fn = sites[name]["fn"]
        if getattr(fn.support, "base_constraint", fn.support) is dist.constraints.real:
            try:
                found[name] = jnp.sqrt(jnp.asarray(fn.variance))
            except Exception:  # of a distribution without a variance
                continue
    return found


def _scaled(values: np.ndarray, sds: Any) -> np.ndarray:
    """Return values times standard deviations above one, where these are known and finite."""
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
        one = row_shapes(rows, 1)
        jax.eval_shape(
            lambda position, rows: tracing.row_terms(
                tracing.trace_at(model, rows, position), structure.likelihood
            ),
            position_shapes(structure.every),
            one,
        )
    except Exception:
        raise ValueError(
            f"The model does not run on one row: {type(error).__name__}. It must run on any number "
            f"of rows, for clients and minibatches of one row, too: take sizes from the rows' "
            f"shapes, and let no operation combine rows (a decomposition, a solution)."
        ) from error


def _check_independent(
    evaluate: _Evaluate,
    position: tuple[ArrayTree, ArrayTree],
    batch: Batch,
    data: FederatedData | None,
    structure: Structure,
    only_finite: bool = False,
) -> None:
    """Raise if a term differs; with `only_finite`, if one differs that is finite both times."""
    together, alone, *_ = evaluate(*position, batch.rows)
    apart = _apart(together, alone, only_finite)
    if not apart.any():
        return
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        # Large values lose digits in single precision, differently in differently fused programs.
        try:
            with jax.enable_x64(True):
                wide_position = [jax.tree.map(_widened, tree) for tree in position]
                wide_rows = jax.tree.map(_widened, batch.rows)
                together, alone, *_ = evaluate(wide_position[0], wide_position[1], wide_rows)
                apart = _apart(together, alone, only_finite)
        except Exception:  # of a model that is written for single precision
            pass
    if not apart.any():
        return
    i = int(np.argmax(apart))
    number = int(batch.numbers[i])
    where = "a made-up row" if number < 0 else place_of(number, data)
    raise ValueError(
        f"A row's log likelihood depends on the other rows of its batch: {where} has "
        f"{float(alone[i]):.6g} alone and {float(together[i]):.6g} among {BATCH} rows. "
        f"Minibatches and clients would then disagree about it. Center, scale and rank columns "
        f"before, with numbers that all clients share, not in the model; and do not divide by the "
        f"number of rows (check_rows=False turns this off)."
        + (NO_RISK_SETS if set(structure.factors) & set(structure.likelihood) else "")
    )


def _widened(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _apart(together: Any, alone: Any, only_finite: bool = False) -> np.ndarray:
    """Return where terms differ; a term that is not finite differs from all but itself."""
    together, alone = np.asarray(together, np.float64), np.asarray(alone, np.float64)
    same = (together == alone) | (np.isnan(together) & np.isnan(alone))
    with np.errstate(invalid="ignore"):
        far = np.abs(together - alone) > ROW_TOLERANCE * (1 + np.abs(alone))
    finite = np.isfinite(together) & np.isfinite(alone)
    return finite & far if only_finite else np.where(finite, far, ~same)


def impossible_parameters(sites: tracing.Trace) -> Impossible:
    """Return whether a distribution's parameter lies outside of its bounds, by site and parameter.

    Bounds themselves count as inside, as floats reach them where a model does not. Sites with a
    mask are left out.
    """
    found: Impossible = {}
    for name, site in sites.items():
        if site["type"] != "sample" or tracing.is_factor(site) or tracing.is_masked(site["fn"]):
            continue
        for part in tracing.parts(site["fn"]):
            for parameter, constraint in part.arg_constraints.items():
                value = vars(part).get(parameter)
                bounds = [getattr(constraint, f"{end}_bound", None) for end in ("lower", "upper")]
                known = [bound for bound in bounds if isinstance(bound, int | float)]
                if not known or constraint.is_discrete or not _is_computed_float(value):
                    continue
                value = jnp.asarray(value)
                outside = jnp.zeros((), bool)
                if bounds[0] is not None:
                    outside |= jnp.any(value < bounds[0] - 1e-4)
                if bounds[1] is not None:
                    outside |= jnp.any(value > bounds[1] + 1e-4)
                span = f"above {bounds[0]:g}" if bounds[1] is None else f"in {list(known)}"
                key = (name, parameter, tracing.name_of(part), span)
                found[key] = found.get(key, jnp.zeros((), bool)) | outside
    return found


def _is_computed_float(value: Any) -> bool:
    """Return whether a value is a float that is computed; a number of the model's is what it is."""
    return isinstance(value, jax.core.Tracer) and jnp.issubdtype(value.dtype, jnp.floating)


def _warn_of_parameters(
    model: Callable[..., Any], found: list[Impossible], rows: ArrayTree
) -> None:
    """Warn of parameters that are impossible at many positions, and at many draws of the prior."""
    shares = {key: float(np.mean([bool(at[key]) for at in found])) for key in found[0]}
    if not any(share > MANY for share in shares.values()):
        return

    def of_prior(rng_key: Array) -> Impossible:
        with handlers.trace() as sites:
            tracing.call_model(handlers.seed(model, rng_key), rows)
        return impossible_parameters(sites)

    try:
        keys = jax.random.split(jax.random.key(0), 10 * NUM_POSITIONS)
        drawn = jax.jit(jax.vmap(of_prior))(keys)
        shares = {key: float(np.mean(drawn[key])) for key in shares if key in drawn}
    except Exception:  # of a prior that cannot be drawn from; the positions decide
        pass
    for (name, parameter, distribution, span), share in shares.items():
        if share > MANY:
            warnings.warn(
                f"Site {name!r}: the parameter {parameter} of its distribution ({distribution}) "
                f"must lie {span}, and does not at {100 * share:.0f} % of the prior's draws. "
                f"NumPyro evaluates the density there all the same. Use a link function: logits= "
                f"in place of probs=, jnp.exp or jax.nn.softplus for a positive parameter.",
                stacklevel=4,  # who calls `from_numpyro`
            )
