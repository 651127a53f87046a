"""Gibbs sampling with latents: clients draw their latents, the server draws shared parameters.

Given all latents, population parameters (such as the mean and the spread of effects) depend only on
sums of the latents' sufficient statistics. The server stores these sums, and clients send changes
of their sums (`_gibbs_sums`).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.compression import Identity
from fedmcmc.data import max_groups
from fedmcmc.dynamics import slice_sweeps
from fedmcmc.hierarchy import Groups, LatentState, Refresh, groups_of
from fedmcmc.kernels._gibbs_recentering import (
    Candidates,
    RecenteringPhase,
    Walk,
    compute_information,
    compute_slopes,
    draw_candidates,
    init_walk,
    transport_latents,
)
from fedmcmc.kernels._gibbs_rows import RowMoves, RowPhase, init_moves, propose
from fedmcmc.kernels._gibbs_sums import (
    Changes,
    Origins,
    Sums,
    check_population,
    compute_changes,
    compute_origin,
    init_sums,
    sum_statistics,
)
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._shared import as_constant, report
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    LatentSums,
    Local,
    MetropolisReport,
    Participation,
    Phase,
    Population,
    Posterior,
    SetupPhase,
    Static,
    StepInfo,
    Traits,
    Uncompressed,
    as_functions,
    compiled,
    register_dataclass,
)


class SumsMessage(NamedTuple):
    """Message of a client."""

    changes: Changes
    gradient: ArrayTree = ()  # [l], of the log likelihood by the row parameters, if there are any
    num_answers: ArrayTree = ()  # one, if there are row parameters


class _BroadcastExtra(NamedTuple):
    origins: Origins
    proposal: ArrayTree  # of the row parameters, [l], or ()
    candidates: Candidates | tuple[()] = ()


class _ServerState(NamedTuple):
    sums: Sums
    num_clients: Array
    moves: RowMoves | tuple[()]
    walk: Walk | tuple[()]


class _ClientExtra(NamedTuple):
    """State of a client in addition to its latents."""

    recount: Array  # [] int32, last recount that the client took part in
    slopes: ArrayTree = ()  # [G, k, l], compensation for the row parameters, or ()


class _SetupSums(NamedTuple):
    sums: ArrayTree
    num_groups: ArrayTree
    row_information: ArrayTree  # [l, l], or ()
    recentering_information: ArrayTree  # [d, d], or ()


@compiled  # outside of a program, a start would run it operation by operation, which is slower
def _setup_sums(kernel: Any, position: ArrayTree, client: Client) -> _SetupSums:
    """Return sums over the initial latents of a client's groups."""
    groups = groups_of(kernel.local, client)
    position = trees.as_floats(position, "position")
    population, latents = kernel.population, kernel.initial_latent_state(groups, position).latents
    sums = sum_statistics(population, groups, latents, compute_origin(population, position))
    num = jnp.sum(groups.present).astype(jnp.result_type(float))
    return _SetupSums(
        sums,
        num,
        kernel.row_information(groups, position, latents) if kernel.has_row_parameters else (),
        compute_information(kernel, groups, position, latents) if kernel.recenter else (),
    )


@register_dataclass
@dataclass(frozen=True, eq=False)
class _SumsPhase(SetupPhase):
    """Exchange that sums the initial latents' statistics and counts the groups."""

    kernel: Any  # the `FederatedGibbs` of the phase

    sums_rows = False

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[_SetupSums, ArrayTree, StepInfo]:
        message = _setup_sums(self.kernel, broadcast.position, client)
        return message, (), report(message, trees.squared_norm(message.sums))

    def message_like(self, like: Broadcast) -> _SetupSums:
        scalar = jax.ShapeDtypeStruct((), jnp.result_type(float))

        def information(size: int) -> ArrayTree:
            return jax.ShapeDtypeStruct((size, size), scalar.dtype) if size else ()

        kernel = self.kernel
        num_rows = kernel.row_indices(like.position).size
        num_all = trees.num_elements(like.position) if kernel.recenter else 0
        return _SetupSums(
            kernel.sums_like(like), scalar, information(num_rows), information(num_all)
        )


def _refuse_compression(kernel: object, compressor: object) -> None:
    if not isinstance(compressor, Identity):
        raise ValueError(
            "The messages of fed_gibbs cannot be compressed: the server draws parameters given "
            "sums of statistics, which must be exact because the draws are not linear in them."
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FederatedGibbs(LatentKernel):
    """Gibbs sampler whose clients draw latents and whose server draws the rest; see `fed_gibbs`."""

    server_moves: int = field(metadata={"static": True})
    step_size: ArrayTree  # of the row parameters, or () for the default
    num_adapt: Array
    recenter: bool = field(metadata={"static": True})

    disclosure = Disclosure(
        "sums over the random effects of this site, their changes, and the log likelihood and its "
        "gradient at positions that the server proposes"
    )

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        return Traits(
            keeps_latents=True,
            phases_independent=not self.recenter,
            accepts_late_messages=False,  # totals and latents would be from different rounds
            check_compressor=_refuse_compression,
        )

    @property
    def name(self) -> str:
        return "fed_gibbs"

    @property
    def population(self) -> Population:
        """Distribution of the latents given sums of statistics."""
        population = self.local.population
        assert population is not None
        return population

    @property
    def has_row_parameters(self) -> bool:
        """True if rows depend on some shared parameters given their latents (static)."""
        return any(self._row_flags)

    @property
    def _row_flags(self) -> tuple[bool, ...]:
        flags = self.population.row_parameters
        assert isinstance(flags, Static)  # `fed_gibbs` converts them
        return flags.value

    def row_indices(self, position: ArrayTree) -> np.ndarray:
        """Return the indices of the row parameters in a raveled position (static)."""
        leaves = jax.tree.leaves(position)
        flags = self._row_flags or (False,) * len(leaves)
        if len(flags) != len(leaves):
            raise ValueError(
                f"The population's row_parameters must have one entry per leaf of the position, "
                f"{len(leaves)}, got {len(flags)}."
            )
        masks = [np.full(leaf.size, flag) for leaf, flag in zip(leaves, flags, strict=True)]
        return np.flatnonzero(np.concatenate(masks))

    def with_row_parameters(self, position: ArrayTree, values: Array) -> ArrayTree:
        """Return the position with other values of the row parameters, ``[l]``."""
        return _with_values(position, self.row_indices(position), values)

    def server_density(self, position: ArrayTree, sums: LatentSums) -> Array:
        """Return the log density of the shared parameters given the latents, without the rows."""
        prior = self.posterior.logprior_fn(position)
        return prior + self.population.logdensity_fn(position, sums)

    def row_information(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        """Return the sum over rows of outer products of gradients, ``[l, l]``."""
        flat, values = groups.as_flat(latents), trees.ravel(position)[self.row_indices(position)]

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            row_latents = jax.vmap(groups.unravel)(flat[group])
            gradients = jax.jacfwd(
                lambda x: self.local.loglikelihood_fn(
                    self.with_row_parameters(position, x), row_latents, rows
                )
            )(values)
            gradients = jnp.where(mask[:, None] & jnp.isfinite(gradients), gradients, 0)
            return gradients.T @ gradients

        return groups.fold(of_rows).astype(jnp.result_type(float))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        phases: tuple[Phase, ...] = (RowPhase(self),) if self.has_row_parameters else ()
        # Recentering changes the latents, and so the sums, which the row moves need.
        return (*phases, RecenteringPhase(self), self) if self.recenter else (*phases, self)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        return (_SumsPhase(self),)

    def sums_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of sums of statistics."""

        def statistics(latent: ArrayTree, position: ArrayTree) -> ArrayTree:
            population = self.population
            return population.statistics_fn(latent, compute_origin(population, position))

        return jax.eval_shape(statistics, self.local.like.tree, like.position)

    def initial_latent_state(self, groups: Groups, position: ArrayTree) -> LatentState:
        first_state = super().initial_latent_state(groups, position)
        extra = _ClientExtra(jnp.full((), -1, jnp.int32))  # in no recount yet
        if self.recenter:
            slopes = compute_slopes(self, groups, position, first_state.latents)
            extra = extra._replace(slopes=slopes)
        return first_state._replace(kernel=extra)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _ServerState]:
        position = self.checked_start(position, federation)
        indices = self.row_indices(position)
        check_population(self.posterior, position, federation, indices)
        (total,) = totals
        num = jnp.asarray(federation.num_clients, total.num_groups.dtype)
        proposal: ArrayTree = ()
        moves: RowMoves | tuple[()] = ()
        if self.has_row_parameters:
            moves = init_moves(total.row_information, self.step_size)
            proposal = trees.ravel(position)[indices].astype(num.dtype)
        zero, origin = jnp.zeros((), jnp.int32), compute_origin(self.population, position)
        extra = _BroadcastExtra(Origins(origin, origin, zero), proposal)
        walk: Walk | tuple[()] = ()
        if self.recenter:
            walk, candidates = init_walk(total.recentering_information, position)
            extra = extra._replace(candidates=candidates)
        state = _ServerState(init_sums(total.sums, total.num_groups), num, moves, walk)
        return Broadcast(zero, position, extra), state

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        size = trees.num_elements(self.local.like.tree)
        return self.refresh.prepare(rng_key, max_groups(client), size)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: LatentState, client: Client
    ) -> tuple[Uncompressed, LatentState, StepInfo]:
        groups, before = groups_of(self.local, client), client_state.latents
        begin = groups.as_flat(before)
        if self.recenter:
            begin = groups.as_flat(transport_latents(self, client_state, broadcast))
        moved = self.moved(groups, draws, broadcast, begin, client_state.refresh)
        latents, origins = groups.as_latents(moved.flat), broadcast.extra.origins
        extra: _ClientExtra = client_state.kernel
        changes = compute_changes(self.population, groups, before, latents, origins, extra.recount)
        message = SumsMessage(changes)
        if self.has_row_parameters:
            position, flat = broadcast.position, groups.as_flat(latents)
            values = trees.ravel(position)[self.row_indices(position)]
            gradient = jax.grad(
                lambda x: groups.log_likelihood_change(
                    self.with_row_parameters(position, x), position, flat
                )
            )(values)
            dtype = jnp.result_type(float)
            message = SumsMessage(changes, gradient.astype(dtype), jnp.ones((), dtype))
        down = trees.num_bits(broadcast.position) + trees.num_bits(origins)
        info = report(
            message,
            trees.squared_norm(changes.now),
            bits_down=jnp.asarray(down, jnp.int32),
            extra=moved.acceptance,
        )
        accepted = client_state.accepted.update(moved.acceptance, groups.present)
        extra = extra._replace(recount=origins.recount)
        return Uncompressed(message), LatentState(latents, moved.kept, accepted, extra), info

    def message_like(self, like: Broadcast) -> Uncompressed:
        sums, scalar = self.sums_like(like), jax.ShapeDtypeStruct((), jnp.result_type(float))
        changes = Changes(sums, sums, scalar)
        size = self.row_indices(like.position).size
        if not size:
            return Uncompressed(SumsMessage(changes))
        return Uncompressed(
            SumsMessage(changes, jax.ShapeDtypeStruct((size,), scalar.dtype), scalar)
        )

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        # The number of random numbers of a slice sampler is not known in advance.
        return rng_key

    @in_single_precision
    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _ServerState,
        total: Uncompressed,
    ) -> tuple[Broadcast, _ServerState, ArrayTree]:
        message: SumsMessage = total.value
        num_clients, extra, population = server_state.num_clients, broadcast.extra, self.population
        sums, origins, ends = server_state.sums.updated(message.changes, extra.origins, num_clients)
        latent_sums = sums.latent_sums(origins.now)
        draw_key, rows_key = jax.random.split(rng_key)
        position = self._draw_population(draw_key, broadcast.position, latent_sums)
        next_origin = trees.cast_like(compute_origin(population, position), origins.next)
        origins = origins._replace(next=trees.select(ends, next_origin, origins.next))
        state, extra = server_state._replace(sums=sums), extra._replace(origins=origins)
        if isinstance(state.walk, Walk):
            walk_key = jax.random.fold_in(jax.random.fold_in(rng_key, 2), 0)
            walk, candidates = draw_candidates(state.walk, walk_key, position)
            state, extra = state._replace(walk=walk), extra._replace(candidates=candidates)
        moved = Broadcast(broadcast.round + 1, position, extra)
        if not isinstance(state.moves, RowMoves):
            return moved, state, ()
        is_complete = message.num_answers == num_clients
        indices = self.row_indices(position)
        gradient = trees.ravel(jax.grad(self.server_density)(position, latent_sums))[indices]
        values = trees.ravel(position)[indices].astype(gradient.dtype)
        normal_key, step_key = jax.random.split(rows_key)
        normals = jax.random.normal(normal_key, values.shape, values.dtype)
        uniform = jax.random.uniform(step_key, (), values.dtype)
        moves = propose(state.moves, message.gradient + gradient, is_complete, normals, uniform)
        proposal = (values + moves.factor @ moves.shift).astype(extra.proposal.dtype)
        info = MetropolisReport(moves.acceptance, moves.is_judged, broadcast.round < self.num_adapt)
        moved = moved._replace(extra=extra._replace(proposal=proposal))
        return moved, state._replace(moves=moves), info

    def _draw_population(
        self, rng_key: Array, position: ArrayTree, latent_sums: LatentSums
    ) -> ArrayTree:
        """Return the position with the population parameters drawn given all latents."""
        if self.population.draw_fn is not None:
            drawn = self.population.draw_fn(rng_key, position, latent_sums)
            return trees.cast_like(drawn, position)
        flat = trees.ravel(position)
        indices = np.setdiff1d(np.arange(flat.size), self.row_indices(position))
        if not indices.size:
            return position
        values = slice_sweeps(
            rng_key,
            lambda x: self.server_density(_with_values(position, indices, x), latent_sums),
            flat[indices],
            self.server_moves,
        )
        return _with_values(position, indices, values)


def _with_values(position: ArrayTree, indices: np.ndarray, values: Array) -> ArrayTree:
    """Return the position with other values at `indices` of the raveled position."""
    flat = trees.ravel(position)
    flat = flat.at[indices].set(values.astype(flat.dtype))
    return trees.cast_like(trees.unravel(flat, position), position)


def _describe_missing_population(local: Local) -> str:
    """Return the error for latents without sums of statistics that the server can draw from."""
    sites = list(local.like.tree) if isinstance(local.like.tree, dict) else []
    shifted = [name for name in sites if name.endswith("_decentered")]
    if shifted:
        return (
            f"fed_gibbs draws shared parameters given sums of statistics of the latents. Site "
            f"{shifted[0].removesuffix('_decentered')!r} is written as a standard variable that "
            f"is shifted and scaled, which has no such sums: pass the posterior of "
            f"from_numpyro(model, centered=1.0)."
        )
    kinds = getattr(local.logprior_fn, "distributions", {})
    labels = [f"{name!r} ({kinds[name]})" if name in kinds else repr(name) for name in sites]
    names = f" {', '.join(labels)}" if sites else ""
    return (
        f"fed_gibbs needs the population of the latents{names}, their distribution given shared "
        f"parameters as a function of sums of statistics. Use local sites that are Normal or "
        f"MultivariateNormal given shared sites in from_numpyro(model, centered=1.0), or define a "
        f"fedmcmc.types.Population."
    )


def fed_gibbs(
    posterior: Posterior,
    *,
    refresh: Refresh,
    server_moves: int = 4,
    step_size: float | Array | None = None,
    num_adapt: int = 0,
    recenter: bool = False,
    participation: Participation | None = None,
) -> FederatedKernel:
    """Build a Gibbs sampler: clients draw their latents, the server the population parameters.

    The draws are exact at every setting, also if only some clients take part, provided that the
    participation does not depend on draws. docs/explanation/random_effect_kernels.md describes
    the messages.

    Parameters
    ----------
    posterior
        Posterior with ``local`` and its ``population``, such as `fedmcmc.from_numpyro` with
        ``centered=1.0`` of a model whose local sites are normal given the shared sites.
    refresh
        Uncompressed move of the latents, such as `fedmcmc.hierarchy.independence`.
    server_moves
        Number of sweeps of slice sampling over the population parameters per round, if the
        population has no ``draw_fn``.
    step_size
        Largest step size of the row parameters (a slope, a residual sd), which move by
        Metropolis-adjusted Langevin in an exchange of all clients. Half of the proposals use it,
        the other proposals a fourth, a sixteenth or a 64th of it. The metric is the inverse of the
        rows' information at the start; the default is the step size of acceptance 0.57 if the
        metric is the parameters' covariance.
    num_adapt
        Number of initial rounds that adapt the step size to this acceptance. Draws are exact
        afterwards: pass `sample` a ``num_burnin`` of at least this size.
    recenter
        If true, an additional exchange of all clients moves row parameters and population means
        together, with latents that compensate so that predictions do not change. Use it for slopes
        of covariates that vary between groups, which otherwise move slowly.
    participation
        Full participation by default, which row parameters require. Messages are never weighted.

    Raises
    ------
    TypeError, ValueError
        If the posterior has no latents or no population, the refresh is not exact, a setting is out
        of range, or there are row parameters and not all clients take part. `init` raises if the
        population's functions do not fit the model.

    References
    ----------
    Gelfand et al. (1995), Efficient parametrisations for normal linear mixed models,
    Biometrika 82, doi:10.1093/biomet/82.3.479.

    Tjelmeland (2004), Using all Metropolis-Hastings proposals to estimate mean values, Technical
    Report 4/2004, Norwegian University of Science and Technology.

    Examples
    --------
    >>> import fedmcmc, jax, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(2))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> clinics = [{"y": rng.normal(rng.normal(2, 1), 1, size=n)} for n in (3, 5, 8, 2, 9)]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = fedmcmc.from_numpyro(model, example=data, centered=1.0)
    >>> kernel = fed_gibbs(posterior, refresh=fedmcmc.hierarchy.conjugate())
    >>> position = {"mu": 0.0, "tau": 0.0}
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, position, num_rounds=300, progress=False
    ... )
    >>> samples.draws["tau"].shape
    (1, 300)
    """
    participation = full() if participation is None else participation
    expect_latents(posterior, refresh, participation, "fed_gibbs")
    local: Any = posterior.local
    if local.population is None:
        raise ValueError(_describe_missing_population(local))
    if not refresh.exact:
        raise ValueError(
            "fed_gibbs needs a refresh that is exact, such as fedmcmc.hierarchy.independence(): an "
            "error in the latents' spread would become an error in the population's spread."
        )
    flags = local.population.row_parameters
    if not isinstance(flags, Static):
        flags = Static(tuple(bool(flag) for flag in flags))
        population = local.population._replace(row_parameters=flags)
        posterior = posterior._replace(local=local._replace(population=population))
    has_row_parameters = any(flags.value)
    if has_row_parameters and (participation.may_drop or participation.cohort_size is not None):
        raise ValueError(
            "Rows depend on some shared parameters (the population's row_parameters), which move "
            "only if all clients answer: use full participation."
        )
    if recenter:
        if local.population.origin_fn is None:
            raise ValueError("recenter=True needs the population's origin_fn.")
        if not has_row_parameters:
            raise ValueError(
                "recenter=True moves row parameters (slopes), and this model has only parameters "
                "of the population."
            )
    if num_adapt != 0:
        num_adapt = positive_integer(num_adapt, "num_adapt")
    if not has_row_parameters:
        num_adapt = 0  # nothing adapts, and every draw is exact
    if participation.weighted:
        participation = replace(participation, weighted=False)
    return as_functions(
        FederatedGibbs(
            posterior,
            refresh,
            participation,
            positive_integer(server_moves, "server_moves"),
            () if step_size is None else as_constant(step_size, "step_size"),
            jnp.asarray(num_adapt, jnp.int32),
            bool(recenter),
        )
    )
