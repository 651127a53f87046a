"""Conversion of a NumPyro model over one client's rows to a `Posterior`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to

from fedmcmc.data import FederatedData, row_values
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._numpyro_cache import Built, cached_build, recipe_of, with_starts
from fedmcmc.interop._numpyro_checks import (
    check_arguments,
    check_support,
    refuse_columns_as_clients,
    warn_of_group_effects,
    warn_of_large_outcomes,
    warn_of_unordered_outcomes,
)
from fedmcmc.interop._numpyro_indices import check_indices
from fedmcmc.interop._numpyro_locals import local_sites, prior_spread, reparametrized
from fedmcmc.interop._numpyro_outcomes import as_recorded, draw_site
from fedmcmc.interop._numpyro_population import population_of
from fedmcmc.interop._numpyro_probe import check_terms
from fedmcmc.interop._numpyro_structure import DECENTERED, Structure, facts_of, find_structure
from fedmcmc.interop._rows import checked_rows, client_rows, describe_row, is_shapes
from fedmcmc.interop._traced import traced_once
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Local, Posterior, Shapes

MAX_START_ROWS = 256
"""Number of rows of the example with which a start is checked to be finite."""
MAX_STARTS = 100

Position = dict[str, Any]
SpreadFn = Callable[[Array], dict[str, Array]]


def from_numpyro(
    model: Callable[..., Any],
    *,
    example: ArrayTree | FederatedData,
    local: Sequence[str] | None = None,
    centered: float | Mapping[str, float] = 0.0,
    init_radius: float = 2.0,
    check_rows: bool = True,
) -> Posterior:
    """Convert a NumPyro model, written for one client's rows, to a `Posterior`.

    Positions are dicts from latent site to unconstrained float array. A model with local sites has
    `local` in place of `loglikelihood_fn`. `no_resample_reason` explains a missing `resample_fn`.

    Parameters
    ----------
    model
        NumPyro model of any number of rows, which are keyword arguments if they are a dict,
        positional arguments if they are a tuple or list, and otherwise one argument.
    example
        Rows of one client, leaves ``[n, ...]``, or their shapes; or a `FederatedData`.
    local
        Latent sites with one value per group of rows (docs/tutorials/random_effects.md), by default
        the sites that the model marks.
    centered
        Parametrization of local location-scale sites, a number or numbers by site: 0 for a standard
        variable that is shifted and scaled, 1 for the site as written.
    init_radius
        Half width of the interval from which `init_fn` draws unconstrained starts.
    check_rows
        If true, check that rows are independent and that values lie in their support.

    Raises
    ------
    ValueError, TypeError
        If model and rows do not fit; the message names the site, the client and the row.

    Examples
    --------
    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> def model(x, y):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     with numpyro.plate("rows", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)
    >>> rows = {"x": np.array([1.0, 2.0, 3.0]), "y": np.array([0.9, 2.1, 2.8])}
    >>> posterior = from_numpyro(model, example=rows)
    >>> posterior.loglikelihood_fn({"slope": np.float32(1.0)}, rows).shape
    (3,)
    """
    if isinstance(example, FederatedData):
        refuse_columns_as_clients(model, example)
    is_real = not is_shapes(example)
    rows = checked_rows(client_rows(example), "one client's rows")
    data = example if isinstance(example, FederatedData) else None
    has_groups = None if data is None else data.rows is not row_values(data.rows)
    recipe = recipe_of(from_numpyro, model, rows, local, centered, init_radius)
    absent = check_arguments(model, rows)
    try:
        facts = facts_of(model, rows)
        sites = local_sites(facts, local, has_groups)
        # Check the model before it is reparametrized, so that errors name the user's sites.
        structure = find_structure(model, rows, facts, sites)
        row = jax.tree.map(lambda leaf: leaf[:1], rows)
        spread_fn = prior_spread(model, structure, row, structure.local_shapes)
        shifted, sites = reparametrized(model, facts, sites, centered)
        if shifted is not model:
            model, facts = shifted, facts_of(shifted, rows)
            structure = find_structure(model, rows, facts, sites)
    except (TypeError, jax.errors.JAXTypeError) as error:
        error.add_note(f"from_numpyro called the model with {_describe_call(rows)}, traced by JAX.")
        raise
    except ValueError as error:
        for name in absent:
            if f"site {name!r}" in str(error):
                raise ValueError(f"{error} The rows hold no {name!r}: was it forgotten?") from error
        raise

    def build() -> Built:
        posterior, start_fn = _build(model, structure, rows, float(init_radius), spread_fn)
        return Built(posterior, start_fn, {})

    built = cached_build(recipe, model, structure, rows, build)
    posterior = with_starts(built, jax.tree.map(lambda leaf: leaf[:MAX_START_ROWS], rows))
    if data is not None:
        warn_of_unordered_outcomes(model, structure, data)
    if check_rows:
        all_rows = rows if data is None else row_values(data.rows)
        if is_real:
            check_support(model, structure, all_rows, data, built.compiled)
        if structure.local_shapes and is_real:
            warn_of_large_outcomes(model, structure, all_rows, built.compiled)
        if local is None:
            unmarked = warn_of_group_effects(model, structure, rows)
            posterior.logprior_fn.unmarked_local = unmarked  # type: ignore[attr-defined]
        check_terms(model, structure, all_rows, data, is_real, built.compiled)
        if is_real:
            shapes = tracing.position_shapes(structure.shared_shapes)
            check_indices(posterior, all_rows, partial(describe_row, data=data), shapes)
    return posterior


def _describe_call(rows: ArrayTree) -> str:
    if isinstance(rows, dict):
        return f"keyword arguments {list(rows)}"
    if isinstance(rows, (tuple, list)):
        return f"{len(rows)} positional arguments"
    return "one positional argument"


def _path_of(model: Any) -> str:
    """Return module and name of the function or class of a model: ``"study.models:two_arms"``."""
    while hasattr(model, "func") or hasattr(model, "fn"):  # partial functions, handlers
        model = getattr(model, "func", None) or model.fn
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{named.__module__}:{named.__qualname__}"


def _build(
    model: Callable[..., Any],
    structure: Structure,
    rows: ArrayTree,
    radius: float,
    spread_fn: SpreadFn,
) -> tuple[Posterior, Callable[..., Position]]:
    """Return the posterior without `init_fn`, and the function that draws starts."""
    # The prior and the transformations do not depend on rows, but the model needs at least one.
    any_row = jax.tree.map(lambda leaf: leaf[:1], rows)
    treedef: Any = jax.tree.structure(rows)
    # Arbitrary latents, for values that do not depend on local sites.
    zeros = _zeros(structure.local_shapes)

    def trace(
        position: Position, batch: ArrayTree, latent: Position | None = None
    ) -> dict[str, dict[str, Any]]:
        if jax.tree.structure(batch) != treedef:
            raise ValueError(
                f"The posterior needs rows with the structure of example, {treedef}, got "
                f"{jax.tree.structure(batch)}."
            )
        if position.keys() != structure.shared_shapes.keys():
            raise ValueError(
                f"A position of this model has the sites {sorted(structure.shared_shapes)}, got "
                f"{sorted(position)}."
            )
        return tracing.trace_at(model, batch, {**position, **(zeros if latent is None else latent)})

    def total(sites: tracing.Trace, names: tuple[str, ...]) -> Array:
        terms = [jnp.sum(tracing.log_prob(sites[name])) for name in names]
        return sum(terms[1:], terms[0])

    @traced_once
    def logprior_fn(position: Position) -> Array:
        return total(trace(position, any_row), structure.prior)

    vars(logprior_fn).update(
        sites=_listed(structure.shared_shapes),
        observed=", ".join(structure.likelihood),
        improper=structure.improper,
        no_resample_reason=structure.why_not_drawn,
        model_path=_path_of(model),
    )

    @traced_once
    def row_terms(position: Position, latent: Position, batch: ArrayTree) -> Array:
        return tracing.row_terms(trace(position, batch, latent), structure.likelihood)

    def loglikelihood_fn(position: Position, batch: ArrayTree) -> Array:
        return row_terms(position, {}, batch)

    def weighted_fn() -> tuple[str, ...]:
        """Return the sites of the likelihood whose scale is not a constant one."""
        weighted: list[str] = []

        def run(position: Position, batch: ArrayTree) -> None:
            sites = trace(position, batch)
            weighted.extend(x for x in structure.likelihood if not tracing.has_unit_scale(sites[x]))

        jax.eval_shape(run, tracing.position_shapes(structure.shared_shapes), any_row)
        return tuple(weighted)

    vars(loglikelihood_fn)["weighted_fn"] = weighted_fn

    def resample_fn(rng_key: Array, position: Position, batch: ArrayTree) -> ArrayTree:
        leaves, treedef = jax.tree.flatten(batch)
        for i, (name, leaf) in enumerate(structure.outcomes or ()):
            site = trace(position, jax.tree.unflatten(treedef, leaves))[name]
            draw = draw_site(jax.random.fold_in(rng_key, i), site)
            leaves[leaf] = as_recorded(draw, leaves[leaf].dtype)
        return jax.tree.unflatten(treedef, leaves)

    @traced_once
    def constrain_fn(position: Position) -> dict[str, Any]:
        sites = trace(position, any_row)
        names = (*structure.shared_shapes, *structure.deterministic)
        return {name: sites[name]["value"] for name in names}

    def unconstrain(position: Position, values: dict[str, Any]) -> Position:
        """Return the position of parameters `values`, given the supports at `position`."""
        sites = trace(position, any_row)
        return {
            name: biject_to(sites[name]["fn"].support).inv(values[name])
            for name in structure.shared_shapes
        }

    vars(constrain_fn)["unconstrain"] = unconstrain

    def log_density(position: Position, start_rows: ArrayTree) -> Array:
        return logprior_fn(position) + jnp.sum(row_terms(position, zeros, start_rows))

    def local_of(structure: Structure) -> Local:
        """Return the functions of a group."""

        def local_trace(position: ArrayTree, latent: Position) -> tracing.Trace:
            return trace(position, any_row, latent)

        @traced_once
        def local_logprior_fn(position: ArrayTree, latent: Position) -> Array:
            return total(local_trace(position, latent), structure.local_prior)

        @traced_once
        def local_constrain_fn(position: ArrayTree, latent: Position) -> dict[str, Any]:
            sites = local_trace(position, latent)
            return {name: sites[name]["value"] for name in _constrained_names(structure)}

        def local_loglikelihood_fn(
            position: ArrayTree, latents: Position, batch: ArrayTree
        ) -> Array:
            def term(latent: Position, row: ArrayTree) -> Array:
                single = jax.tree.map(lambda leaf: leaf[None], row)
                return row_terms(position, latent, single)[0]

            return jax.vmap(term)(latents, batch)

        vars(local_logprior_fn).update(
            sites=_listed(structure.local_shapes), distributions=structure.distributions
        )
        vars(local_loglikelihood_fn)["weighted_fn"] = weighted_fn
        return Local(
            local_logprior_fn,
            local_loglikelihood_fn,
            Shapes(tracing.position_shapes(structure.local_shapes)),
            local_constrain_fn,
            population=population_of(local_trace, row_terms, any_row, structure),
            prior_spread_fn=spread_fn,
        )

    local = local_of(structure) if structure.local_shapes else None
    posterior = Posterior(
        logprior_fn,
        loglikelihood_fn if local is None else None,
        None if structure.outcomes is None else resample_fn,
        constrain_fn,
        local=local,
    )
    return posterior, _starts(log_density, structure.shared_shapes, radius)


def _zeros(shapes: dict[str, tuple[int, ...]]) -> Position:
    return {name: np.zeros(shape, jnp.result_type(float)) for name, shape in shapes.items()}


def _constrained_names(structure: Structure) -> tuple[str, ...]:
    """Return names of the local sites in the user's model, deterministic sites included."""
    latent = [name for name in structure.local_shapes if not name.endswith(DECENTERED)]
    return (*latent, *structure.local_deterministic)


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(name + (str(list(x)) if x else "") for name, x in shapes.items())


def _starts(
    log_density: Callable[[Position, ArrayTree], Array],
    shapes: dict[str, tuple[int, ...]],
    radius: float,
) -> Callable[[Array, ArrayTree], Position]:
    origin = _zeros(shapes)

    @jax.jit
    def init_fn(rng_key: Array, rows: ArrayTree) -> Position:
        def is_rejected(state: tuple[Array, Array, Position]) -> Array:
            attempt, finite, _ = state
            return ~finite & (attempt < MAX_STARTS)

        def draw_again(state: tuple[Array, Array, Position]) -> tuple[Array, Array, Position]:
            key = jax.random.fold_in(rng_key, state[0])
            flat, unravel = ravel_pytree(origin)
            position = unravel(jax.random.uniform(key, flat.shape, flat.dtype, -radius, radius))
            finite = trees.all_finite(jax.value_and_grad(log_density)(position, rows))
            return state[0] + 1, finite, position

        start = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), jax.tree.map(jnp.asarray, origin))
        return jax.lax.while_loop(is_rejected, draw_again, start)[2]

    return init_fn
