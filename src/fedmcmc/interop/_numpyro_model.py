"""From a NumPyro model over one client's rows to a `Posterior`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to

from fedmcmc._types import ArrayTree, ClientLatent, Local, Posterior, Shapes
from fedmcmc.data import FederatedData, values_of
from fedmcmc.interop import _numpyro_trace as tracing
from fedmcmc.interop._numpyro_cache import Built, built, recipe_of, with_starts
from fedmcmc.interop._numpyro_checks import (
    check_arguments,
    check_support,
    warn_of_group_effects,
    warn_of_large_outcomes,
)
from fedmcmc.interop._numpyro_columns import (
    refuse_columns_as_clients,
    warn_of_unordered_outcomes,
)
from fedmcmc.interop._numpyro_indices import check_indices, place_of
from fedmcmc.interop._numpyro_inputs import position_shapes
from fedmcmc.interop._numpyro_locals import (
    DECENTERED,
    local_sites_of_levels,
    prior_spread,
    reparametrized,
)
from fedmcmc.interop._numpyro_outcomes import as_recorded, draw_site
from fedmcmc.interop._numpyro_population import population_of
from fedmcmc.interop._numpyro_probe import check_terms
from fedmcmc.interop._numpyro_structure import Structure, find_structure
from fedmcmc.interop._numpyro_weights import find_weighted
from fedmcmc.interop._rows import checked_rows, client_rows, is_shapes
from fedmcmc.interop._traced import traced_once
from fedmcmc.pytrees import trees

START_ROWS = 256
"""Rows of the example with which a start is checked to be finite."""
MAX_STARTS = 100

Position = dict[str, Any]


def from_numpyro(
    model: Callable[..., Any],
    *,
    example: ArrayTree | FederatedData,
    local: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    centered: float | Mapping[str, float] = 0.0,
    init_radius: float = 2.0,
    check_rows: bool = True,
) -> Posterior:
    """Turn a NumPyro model, written for one client's rows, into a `Posterior`.

    Parameters
    ----------
    model
        A NumPyro model. Rows that are a dict are passed as keyword arguments, a tuple or list as
        positional arguments, anything else as the only argument. Bind other arguments with
        `functools.partial`. It must run on any number of rows.
    example
        One client's rows, leaves ``[n, ...]``; of a `FederatedData` those of client 0. Shapes and
        dtypes (`jax.ShapeDtypeStruct`) of rows do, where the rows stay with their owners.
    local
        Latent sites of which each group of rows has its own (a hospital, a patient): an effect that
        stays with its owner. A group is a client, or what the data's ``groups=`` say; the model is
        then written for the rows of one group. By default the sites with ``infer={"local": True}``
        and those in a plate of size one named `client`, `clients` or `group`.
        ``{"client": [...], "group": [...]}`` for two levels: sites that a client has one of, and
        those that each of its groups has; the latter's priors may depend on the former. The marks
        ``infer={"local": "client"}`` and ``infer={"local": "group"}`` mean the same.
    centered
        How local sites of a location and a scale are parametrized, from 0 (standard normals, say,
        that are shifted and scaled) to 1 (as written); a number for all, or by site.
    init_radius
        `init_fn` draws uniformly from ``(-init_radius, init_radius)`` in unconstrained space, as
        NumPyro does, again (at most 100 times) where the log density of the example or its
        gradient is not finite.
    check_rows
        Whether to compare the log likelihood of rows in a batch with that of each row alone,
        which compiles a small program. It finds models that center their covariates, rescale by
        the number of rows, or otherwise let one row's term depend on the others. Batches hold
        rows of all clients of a `FederatedData`, and made-up rows. And whether observed values
        can be those of their distribution, and columns that index an axis of the model lie within
        its length.

    Returns
    -------
    Posterior
        With all five functions; with ``local`` in place of `loglikelihood_fn` and `resample_fn`
        if the model has local sites. A position is a dict, latent site to unconstrained float
        array. Each site that is not local has one value for all clients, though the model is
        written for the rows of one; printed, the posterior says which these are.

        - `logprior_fn` has the log densities of the latent sites and the log Jacobians of their
          transformations, and of observed sites and factors that do not depend on the rows
          (globals fixed by `numpyro.handlers.condition`): what counts once for the federation.
        - `loglikelihood_fn` has the observed sites and factors with one term per row, summed over
          all axes but that of the rows.
        - `constrain_fn` returns the latent sites in their own space and the deterministic sites
          that do not depend on the rows or on their number; others need rows
          (`numpyro.infer.Predictive`).
        - `resample_fn` draws observed sites, each after those that its distribution looks at,
          and puts them where the rows hold them; a masked entry stays as it is. It is ``None``
          if a draw would not be what was observed, and `why_no_resample` holds the reason: an
          observed value that is not a leaf of the rows (up to its dtype), two sites with one
          value, a factor, a scale, censoring, a distribution that looks at its own outcome, and
          one that cannot be drawn from.

    Raises
    ------
    ValueError
        Naming the site, before anything compiles: a latent site in a plate over rows or of a
        shape that grows with them, a discrete latent site, a prior that depends on the rows, an
        observed site or factor that depends on the rows without one term per row, a plate that
        subsamples, a `numpyro.param` that the density depends on; a model that runs on no other
        number of rows than the example's; or, with `check_rows`, a value outside of the support of
        its distribution, such as a Bernoulli coded 1 and 2, a code outside of the axis that it
        indexes, or a row whose term depends on the other rows. Of local sites: a name that is no
        latent site, a mark with another meaning, a model in which nothing is shared, a shared
        site's prior that depends on a local one, and a local site's prior that depends on rows.
    TypeError
        If the rows are a dict and hold what the model does not take, or lack what it needs, or if
        the clients of a `FederatedData` are called as the model's arguments.

    Warns
    -----
    UserWarning
        If the outcome of an ordinal distribution is a text column in alphabetical order.
        With `check_rows`, if a model without `local` has a scalar site whose scale is another
        latent site, as an effect per client would have it; if a parameter of a distribution lies
        outside its bounds at more than 5 % of the prior's draws; and if a model of groups has
        outcomes in single precision above ten thousand.

    Notes
    -----
    Scales (`numpyro.handlers.scale`) and masks count as in `numpyro.infer.util.potential_energy`:
    the log prior plus the sum of all rows' log likelihoods is minus the potential energy on the
    pooled rows.

    Examples
    --------
    >>> import jax, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpy as np
    >>> def model(x, y):
    ...     slope = numpyro.sample("slope", dist.Normal(0, 1))
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1))
    ...     with numpyro.plate("rows", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)
    >>> rows = {"x": np.array([1.0, 2.0, 3.0]), "y": np.array([0.9, 2.1, 2.8])}
    >>> posterior = from_numpyro(model, example=rows)
    >>> position = {"slope": np.float32(1.0), "scale": np.float32(-1.0)}
    >>> posterior.loglikelihood_fn(position, rows).shape
    (3,)
    >>> round(float(posterior.constrain_fn(position)["scale"]), 3)
    0.368
    >>> sorted(posterior.init_fn(jax.random.key(0)))
    ['scale', 'slope']
    >>> print(str(posterior)[:52])
    Posterior(shared by all clients: slope, scale; logpr
    """
    if isinstance(example, FederatedData):
        refuse_columns_as_clients(model, example)
    is_real = not is_shapes(example)
    rows = checked_rows(client_rows(example), "one client's rows")
    data = example if isinstance(example, FederatedData) else None
    has_groups = None if data is None else data.rows is not values_of(data.rows)
    recipe = recipe_of(model, rows, local, centered, init_radius)
    absent = check_arguments(model, rows)
    try:
        sites, num_own = local_sites_of_levels(model, rows, local, has_groups)
        # As it is written first: what does not fit is said of the user's own sites.
        structure, inner = _structures(model, rows, sites, num_own)
        spread_fns = _spreads(model, structure, inner, jax.tree.map(lambda leaf: leaf[:1], rows))
        shifted, sites = reparametrized(model, rows, sites, centered)
        if shifted is not model:
            model = shifted
            structure, inner = _structures(model, rows, sites, num_own)
    except (TypeError, jax.errors.JAXTypeError) as error:
        error.add_note(f"from_numpyro called the model with {_call(rows)}, traced by JAX.")
        raise
    except ValueError as error:
        for name in absent:
            if f"site {name!r}" in str(error):
                raise ValueError(f"{error} The rows hold no {name!r}: was it forgotten?") from error
        raise

    def build() -> Built:
        posterior, start_fn = _build(model, structure, inner, rows, float(init_radius))
        if posterior.local is not None:
            own, of_groups = spread_fns
            told = posterior.local._replace(prior_spread_fn=of_groups)
            if told.client is not None:
                told = told._replace(client=told.client._replace(prior_spread_fn=own))
            posterior = posterior._replace(local=told)
        return Built(posterior, start_fn, {})

    found = built(recipe, model, structure, inner, rows, build)
    posterior = with_starts(found, jax.tree.map(lambda leaf: leaf[:START_ROWS], rows))
    if isinstance(example, FederatedData):
        warn_of_unordered_outcomes(model, structure, example)
    if check_rows:
        every = rows if data is None else values_of(data.rows)
        if is_real:
            check_support(model, structure, every, data, found.compiled)
        if structure.local and is_real:
            warn_of_large_outcomes(model, structure, every, found.compiled)
        if local is None:
            unmarked = warn_of_group_effects(model, structure, rows)
            posterior.logprior_fn.unmarked_local = unmarked  # type: ignore[attr-defined]
        check_terms(model, structure, every, data, is_real, found.compiled)
        if is_real:
            check_indices(posterior, every, place_of(data), position_shapes(structure.shapes))
    return posterior


def _structures(
    model: Callable[..., Any], rows: ArrayTree, sites: tuple[str, ...], num_own: int
) -> tuple[Structure, Structure | None]:
    """Return the structure, and of two levels that with the client's own sites for shared ones."""
    structure = find_structure(model, rows, sites)
    return structure, find_structure(model, rows, sites[num_own:]) if num_own else None


def _call(rows: ArrayTree) -> str:
    if isinstance(rows, dict):
        return f"keyword arguments {list(rows)}"
    if isinstance(rows, (tuple, list)):
        return f"{len(rows)} positional arguments"
    return "one positional argument"


def _build(
    model: Callable[..., Any],
    structure: Structure,
    inner: Structure | None,
    rows: ArrayTree,
    radius: float,
) -> tuple[Posterior, Callable[..., Position]]:
    """Return the posterior without `init_fn`, and starts.

    `inner` is the structure with sites of clients for shared ones, of a model of two levels.
    """
    # The prior and the transformations do not depend on rows, yet the model wants some.
    any_row = jax.tree.map(lambda leaf: leaf[:1], rows)

    treedef: Any = jax.tree.structure(rows)
    dtype = jnp.result_type(float)

    # What does not depend on local sites is read with these.
    anywhere: Position = {name: np.zeros(shape, dtype) for name, shape in structure.local.items()}

    def trace(
        position: Position, batch: ArrayTree, latent: Position | None = None
    ) -> dict[str, dict[str, Any]]:
        if jax.tree.structure(batch) != treedef:
            raise ValueError(
                f"The posterior is of rows like those of example, {treedef}, got "
                f"{jax.tree.structure(batch)}."
            )
        if position.keys() != structure.shapes.keys():
            raise ValueError(
                f"A position of this model has the sites {sorted(structure.shapes)}, got "
                f"{sorted(position)}."
            )
        return tracing.trace_at(
            model, batch, {**position, **(anywhere if latent is None else latent)}
        )

    def total(sites: tracing.Trace, names: tuple[str, ...]) -> Array:
        terms = [jnp.sum(tracing.log_prob(sites[name])) for name in names]
        return sum(terms[1:], terms[0])

    @traced_once
    def logprior_fn(position: Position) -> Array:
        return total(trace(position, any_row), structure.prior)

    logprior_fn.sites = _listed(structure.shapes)  # type: ignore[attr-defined]
    logprior_fn.observed = ", ".join(structure.likelihood)  # type: ignore[attr-defined]
    logprior_fn.improper = structure.improper  # type: ignore[attr-defined]
    logprior_fn.why_no_resample = structure.why_not_drawn  # type: ignore[attr-defined]

    @traced_once
    def row_terms(position: Position, latent: Position, batch: ArrayTree) -> Array:
        return tracing.row_terms(trace(position, batch, latent), structure.likelihood)

    def loglikelihood_fn(position: Position, batch: ArrayTree) -> Array:
        return row_terms(position, {}, batch)

    def weighted_fn() -> tuple[str, ...]:
        shared = position_shapes(structure.shapes)
        return find_weighted(trace, tuple(structure.likelihood), shared, any_row)

    loglikelihood_fn.weighted_fn = weighted_fn  # type: ignore[attr-defined]

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
        names = (*structure.shapes, *structure.deterministic)
        return {name: sites[name]["value"] for name in names}

    def unconstrain(position: Position, values: dict[str, Any]) -> Position:
        """Return the position at which parameters are `values`, with supports as at `position`."""
        sites = trace(position, any_row)
        return {
            name: biject_to(sites[name]["fn"].support).inv(values[name])
            for name in structure.shapes
        }

    constrain_fn.unconstrain = unconstrain  # type: ignore[attr-defined]

    def log_density(position: Position, start_rows: ArrayTree) -> Array:
        return logprior_fn(position) + jnp.sum(row_terms(position, anywhere, start_rows))

    def local_of(
        local: Structure, split: Callable[[ArrayTree], tuple[Position, Position]]
    ) -> Local:
        """Return what belongs to a group; `split` makes shared sites and others of a position."""

        def local_trace(position: ArrayTree, latent: Position) -> tracing.Trace:
            shared, own = split(position)
            return trace(shared, any_row, {**own, **latent})

        @traced_once
        def local_logprior_fn(position: ArrayTree, latent: Position) -> Array:
            return total(local_trace(position, latent), local.local_prior)

        local_logprior_fn.sites = _listed(local.local)  # type: ignore[attr-defined]
        local_logprior_fn.distributions = local.distributions  # type: ignore[attr-defined]

        def local_loglikelihood_fn(
            position: ArrayTree, latents: Position, batch: ArrayTree
        ) -> Array:
            shared, own = split(position)

            def one(latent: Position, row: ArrayTree) -> Array:
                alone = jax.tree.map(lambda leaf: leaf[None], row)
                return row_terms(shared, {**own, **latent}, alone)[0]

            return jax.vmap(one)(latents, batch)

        local_loglikelihood_fn.weighted_fn = weighted_fn  # type: ignore[attr-defined]

        @traced_once
        def local_constrain_fn(position: ArrayTree, latent: Position) -> dict[str, Any]:
            sites = local_trace(position, latent)
            return {name: sites[name]["value"] for name in _own_sites(local)}

        like = Shapes(position_shapes(local.local))
        return Local(local_logprior_fn, local_loglikelihood_fn, like, local_constrain_fn)

    def client_of(inner: Structure) -> ClientLatent:
        """Return what belongs to a client itself: the local sites that are no group's."""
        shapes = {name: x for name, x in structure.local.items() if name not in inner.local}
        of_groups = {name: anywhere[name] for name in inner.local}
        names = tuple(name for name in structure.local_prior if name not in inner.local_prior)
        shown = tuple(name for name in _own_sites(structure) if name not in _own_sites(inner))

        @traced_once
        def client_logprior_fn(position: Position, own: Position) -> Array:
            return total(trace(position, any_row, {**of_groups, **own}), names)

        client_logprior_fn.sites = _listed(shapes)  # type: ignore[attr-defined]

        @traced_once
        def client_constrain_fn(position: Position, own: Position) -> dict[str, Any]:
            sites = trace(position, any_row, {**of_groups, **own})
            return {name: sites[name]["value"] for name in shown}

        return ClientLatent(
            client_logprior_fn, Shapes(position_shapes(shapes)), client_constrain_fn
        )

    local = None
    if inner is not None:
        local = local_of(inner, lambda pair: pair)._replace(client=client_of(inner))
    elif structure.local:
        population = population_of(
            lambda position, latent: trace(position, any_row, latent), row_terms, any_row, structure
        )
        local = local_of(structure, lambda position: (position, {}))
        local = local._replace(population=population)
    posterior = Posterior(
        logprior_fn,
        loglikelihood_fn if local is None else None,
        None if structure.outcomes is None else resample_fn,
        constrain_fn,
        local=local,
    )
    return posterior, _starts(log_density, structure.shapes, radius)


def _spreads(
    model: Callable[..., Any], structure: Structure, inner: Structure | None, row: ArrayTree
) -> list[Callable[[Array], dict[str, Array]]]:
    """Return draws of what the spread of clients' own sites depends on, and of those of groups."""
    of_groups = structure.local if inner is None else inner.local
    own = [name for name in structure.local if name not in of_groups]
    return [prior_spread(model, structure, row, names) for names in (own, of_groups)]


def _own_sites(structure: Structure) -> tuple[str, ...]:
    """Return names of the local sites as the user knows them, deterministic ones among them."""
    own = [name for name in structure.local if not name.endswith(DECENTERED)]
    return (*own, *structure.local_deterministic)


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(name + (str(list(x)) if x else "") for name, x in shapes.items())


def _starts(
    log_density: Callable[[Position, ArrayTree], Array],
    shapes: dict[str, tuple[int, ...]],
    radius: float,
) -> Callable[[Array, ArrayTree], Position]:
    origin = {name: np.zeros(shape, jnp.result_type(float)) for name, shape in shapes.items()}

    @jax.jit
    def init_fn(rng_key: Array, rows: ArrayTree) -> Position:
        def is_poor(state: tuple[Array, Array, Position]) -> Array:
            attempt, finite, _ = state
            return ~finite & (attempt < MAX_STARTS)

        def again(state: tuple[Array, Array, Position]) -> tuple[Array, Array, Position]:
            key = jax.random.fold_in(rng_key, state[0])
            flat, unravel = ravel_pytree(origin)
            position = unravel(jax.random.uniform(key, flat.shape, flat.dtype, -radius, radius))
            finite = trees.all_finite(jax.value_and_grad(log_density)(position, rows))
            return state[0] + 1, finite, position

        start = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), jax.tree.map(jnp.asarray, origin))
        return jax.lax.while_loop(is_poor, again, start)[2]

    return init_fn
