"""Gibbs sampling with latents: clients draw their own, the server what they share.

Given all latents, population parameters (the mean and the spread of effects, say) depend on sums of
the latents' sufficient statistics alone. The server keeps these sums, and clients send by how much
their own have changed (`_gibbs_sums`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
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
from fedmcmc.compression import Identity
from fedmcmc.data import max_groups
from fedmcmc.dynamics import slice_sweeps
from fedmcmc.hierarchy import Groups, Locals, Refresh, groups_of, refuse_two_levels
from fedmcmc.kernels._gibbs_interweaving import (
    GoingAlong,
    Recentering,
    Rescaling,
    gone_along,
    nothing_proposed,
    proposed,
    slopes_of,
)
from fedmcmc.kernels._gibbs_judging import Judgement
from fedmcmc.kernels._gibbs_rows import first_moves, propose
from fedmcmc.kernels._gibbs_sums import (
    Changes,
    Origins,
    Sums,
    changes_of,
    check_population,
    first_sums,
    origin_of,
    sums_like,
    sums_of,
)
from fedmcmc.kernels._gibbs_walks import first_walk
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._shared import report
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, schedules, trees


class Statistics(NamedTuple):
    """A client's message.

    Attributes
    ----------
    changes
        By how much the sums of its latents' statistics have changed.
    gradient
        ``[l]``, of the log likelihood with respect to the parameters of rows, or ``()``.
    one
        ``[]``, one: the sum says how many clients there are; ``()`` without parameters of rows.
    """

    changes: Changes
    gradient: Any = ()
    one: Any = ()


class _Extra(NamedTuple):
    origins: Origins
    proposal: ArrayTree  # of the parameters of rows, [l], or ()
    walks: ArrayTree = ()  # `Proposed` by the kind of walk that takes latents along, or ()


class _Server(NamedTuple):
    sums: Sums
    num_clients: Array
    moves: ArrayTree  # `RowMoves`, or () where no shared parameter is one of rows
    walks: ArrayTree  # `Walk` by its kind, or ()


class _Own(NamedTuple):
    """What a client keeps beside its latents."""

    recount: Array  # [] int32, in which its sums were counted last
    slopes: ArrayTree = ()  # [G, k, l], how latents make up for the parameters of rows, or ()


class _First(NamedTuple):
    sums: ArrayTree
    num_groups: Any
    information: ArrayTree  # of rows about their parameters, [l, l], or ()
    along: ArrayTree  # what is known of parameters that latents go along with, by kind of walk


@compiled  # a start computes it outside of any program, which takes longer operation by operation
def _first_sums(kernel: Any, position: ArrayTree, client: Client) -> _First:
    """Return what a client says of its groups' first latents."""
    groups = groups_of(kernel.local, client)
    position = trees.as_floats(position, "position")
    first, population = kernel.first_locals(groups, position), kernel.population
    sums = sums_of(population, groups, first.latents, origin_of(population, position))
    num = jnp.sum(groups.present).astype(jnp.result_type(float))
    information: ArrayTree = ()
    if kernel.moves_rows:
        information = kernel.information_of_rows(groups, position, first.latents)
    along = {
        way.kind: way.information(groups, position, first.latents) for way in kernel.ways_along
    }
    return _First(sums, num, information, along)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _FirstSums(SetupPhase):
    """Sums the statistics of all groups' first latents, and counts the groups."""

    kernel: Any  # the `FederatedGibbs` that asks

    sums_rows = False

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[_First, ArrayTree, StepInfo]:
        message = _first_sums(self.kernel, broadcast.position, client)
        return message, (), report(message, trees.squared_norm(message.sums))

    def message_like(self, like: Broadcast) -> _First:
        dtype = jnp.result_type(float)
        size = self.kernel.row_places(like.position).size
        information = jax.ShapeDtypeStruct((size, size), dtype) if size else ()
        sums = self.kernel.sums_like(like)
        along = {
            way.kind: jax.ShapeDtypeStruct((way.places(like.position).size,) * 2, dtype)
            for way in self.kernel.ways_along
        }
        return _First(sums, jax.ShapeDtypeStruct((), dtype), information, along)


def _refuse_compression(kernel: Any, compressor: Any) -> None:
    if not isinstance(compressor, Identity):
        raise ValueError(
            "The server of this kernel draws given sums of statistics, on which its draws do "
            "not depend linearly: they must be exact, and cannot be compressed."
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FederatedGibbs(LatentKernel):
    """Clients draw latents, the server population parameters; see `fed_gibbs`."""

    server_moves: int = field(metadata={"static": True})
    step_size: ArrayTree  # of the parameters of rows, or () for that of an acceptance
    num_adapt: Array
    interweave: bool = field(metadata={"static": True})
    recenter: bool = field(metadata={"static": True})

    disclosure = Disclosure(
        "sums over the random effects of this site, their changes, and the log likelihood and its "
        "gradient at positions that the server proposes"
    )

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # an attribute elsewhere
        return Traits(
            keeps_latents=True,
            phases_independent=not self.ways_along,
            accepts_late_messages=False,  # totals and latents would be from different rounds
            check_compressor=_refuse_compression,
        )

    @property
    def name(self) -> str:
        return "fed_gibbs"

    @property
    def population(self) -> Population:
        """What the server needs to know of latents."""
        population = self.local.population
        assert population is not None
        return population

    @property
    def moves_rows(self) -> bool:
        """Whether some shared parameters are those of rows (static)."""
        return any(self._of_rows)

    @property
    def _of_rows(self) -> tuple[bool, ...]:
        flags = self.population.of_rows
        assert isinstance(flags, Static)  # `fed_gibbs` has made it one
        return flags.value

    def row_places(self, position: ArrayTree) -> np.ndarray:
        """Return where the parameters of rows lie in a raveled position (static)."""
        leaves = jax.tree.leaves(position)
        flags = self._of_rows or (False,) * len(leaves)
        if len(flags) != len(leaves):
            raise ValueError(
                f"The population's of_rows must have one entry per leaf of the position, "
                f"{len(leaves)}, got {len(flags)}."
            )
        whose = [np.full(leaf.size, flag) for leaf, flag in zip(leaves, flags, strict=True)]
        return np.flatnonzero(np.concatenate(whose))

    def placed(self, position: ArrayTree, place: Array) -> ArrayTree:
        """Return a position with other parameters of rows, ``[l]``."""
        flat = trees.ravel(position)
        flat = flat.at[self.row_places(position)].set(place.astype(flat.dtype))
        return trees.cast_like(trees.unravel(flat, position), position)

    def other_places(self, position: ArrayTree) -> np.ndarray:
        """Return where the other parameters lie, those of the population alone (static)."""
        every = np.arange(trees.num_elements(position))
        return np.setdiff1d(every, self.row_places(position))

    def server_density(self, position: ArrayTree, known: LatentSums) -> Array:
        """Return the log density of the shared parameters given the latents, without rows."""
        prior = self.posterior.logprior_fn(position)
        return prior + self.population.logdensity_fn(position, known)

    def information_of_rows(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        """Return the sum over rows of outer products of gradients, ``[l, l]``."""
        place = trees.ravel(position)[self.row_places(position)]

        def terms_fn(at: Array, own: ArrayTree, rows: ArrayTree) -> Array:
            return self.local.loglikelihood_fn(self.placed(position, at), own, rows)

        return self.information(groups, latents, place, terms_fn)

    def information(
        self, groups: Groups, latents: ArrayTree, place: Array, terms_fn: Callable[..., Array]
    ) -> Array:
        """Return the same of other terms ``(place, latents, rows) -> [num]``."""
        flat = groups.as_flat(latents)

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            own = jax.vmap(groups.unravel)(flat[group])
            gradients = jax.jacfwd(lambda at: terms_fn(at, own, rows))(place)
            gradients = jnp.where(mask[:, None] & jnp.isfinite(gradients), gradients, 0)
            return gradients.T @ gradients

        return groups.fold(of_rows).astype(jnp.result_type(float))

    @property
    def ways_along(self) -> tuple[GoingAlong, ...]:
        """Walks that take latents along, in a round's order (static)."""
        # Recentering first: what comes after it does not ask for sums, which it outdates.
        ways = (Recentering(self),) if self.recenter else ()
        return (*ways, Rescaling(self)) if self.interweave else ways

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        of_rows = (Judgement(self),) if self.moves_rows else ()
        return (*of_rows, *self.ways_along, self)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        return (_FirstSums(self),)

    def sums_like(self, like: Broadcast) -> ArrayTree:
        """Return the shapes of sums of statistics."""
        return sums_like(self.population, self.local.like.tree, like.position)

    def first_locals(self, groups: Groups, position: ArrayTree) -> Locals:
        first = super().first_locals(groups, position)
        own = _Own(jnp.full((), -1, jnp.int32))  # counted in no recount yet
        if self.recenter:
            own = own._replace(slopes=slopes_of(self, groups, position, first.latents))
        return first._replace(kernel=own)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        position = self.checked_start(position, federation)
        check_population(self.posterior, position, federation, self.row_places(position))
        (first,) = totals
        num = jnp.asarray(federation.num_clients, first.num_groups.dtype)
        proposal: ArrayTree = ()
        moves: ArrayTree = ()
        if self.moves_rows:
            moves = first_moves(first.information, self.step_size)
            proposal = trees.ravel(position)[self.row_places(position)].astype(num.dtype)
        zero, origin = jnp.zeros((), jnp.int32), origin_of(self.population, position)
        extra = _Extra(Origins(origin, origin, zero), proposal)
        walks = {kind: first_walk(known) for kind, known in first.along.items()}
        extra = extra._replace(walks=nothing_proposed(walks, position))
        server = _Server(first_sums(first.sums, first.num_groups), num, moves, walks)
        return Broadcast(zero, position, extra), server

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        size = trees.num_elements(self.local.like.tree)
        return self.refresh.prepare(rng_key, max_groups(client), size)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Uncompressed, Locals, StepInfo]:
        groups, before = groups_of(self.local, client), client_state.latents
        begin = groups.as_flat(before)
        if self.ways_along:
            begin = groups.as_flat(gone_along(self, client_state, broadcast))
        moved = self.moved(groups, draws, broadcast, begin, client_state.refresh)
        latents, origins = groups.as_latents(moved.flat), broadcast.extra.origins
        own: _Own = client_state.kernel
        changes = changes_of(self.population, groups, before, latents, origins, own.recount)
        down = trees.num_bits(broadcast.position) + trees.num_bits(origins)
        info = report(
            changes,
            trees.squared_norm(changes.now),
            bits_down=jnp.asarray(down, jnp.int32),
            extra=moved.acceptance,
        )
        message = Statistics(changes)
        if self.moves_rows:
            position, flat = broadcast.position, groups.as_flat(latents)
            place = trees.ravel(position)[self.row_places(position)]
            gradient = jax.grad(
                lambda at: groups.rows_difference(self.placed(position, at), position, flat)
            )(place)
            dtype = jnp.result_type(float)
            message = Statistics(changes, gradient.astype(dtype), jnp.ones((), dtype))
        accepted = client_state.accepted.with_round(moved.acceptance, groups.present)
        own = own._replace(recount=origins.recount)
        state = Locals(latents, moved.kept, accepted, own)
        return Uncompressed(message), state, info._replace(bits=_bits(message))

    def message_like(self, like: Broadcast) -> Uncompressed:
        sums, number = self.sums_like(like), jax.ShapeDtypeStruct((), jnp.result_type(float))
        changes = Changes(sums, sums, number)
        size = self.row_places(like.position).size
        if not size:
            return Uncompressed(Statistics(changes))
        return Uncompressed(
            Statistics(changes, jax.ShapeDtypeStruct((size,), number.dtype), number)
        )

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        # How many numbers slices take is not known ahead.
        return rng_key

    @in_single_precision
    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Uncompressed
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        said: Statistics = total.value
        num_clients, extra = server_state.num_clients, broadcast.extra
        sums, origins, ends = server_state.sums.after(said.changes, extra.origins, num_clients)
        known, population = sums.known(origins.now), self.population
        position, rows = broadcast.position, self.row_places(broadcast.position)
        draw_key, rows_key = jax.random.split(rng_key)
        if population.draw_fn is not None:
            position = trees.cast_like(
                population.draw_fn(draw_key, position, known), broadcast.position
            )
        elif rows.size < trees.num_elements(position):
            every = trees.ravel(position)
            own = np.setdiff1d(np.arange(every.size), rows)

            def at(some: Array) -> ArrayTree:
                flat = every.at[own].set(some)
                return trees.cast_like(trees.unravel(flat, position), position)

            drawn = slice_sweeps(
                draw_key,
                lambda some: self.server_density(at(some), known),
                every[own],
                self.server_moves,
            )
            position = at(drawn)
        here = trees.cast_like(origin_of(population, position), origins.next)
        origins = origins._replace(next=trees.select(ends, here, origins.next))
        server, extra = server_state._replace(sums=sums), extra._replace(origins=origins)
        if self.ways_along:
            key = jax.random.fold_in(rng_key, 2)  # beside the two that it was split into
            server, extra = proposed(self, key, position, server, extra)
        moved = Broadcast(broadcast.round + 1, position, extra)
        if not self.moves_rows:
            return moved, server, ()
        whole = said.one == num_clients
        slope = trees.ravel(jax.grad(self.server_density)(position, known))[rows]
        place = trees.ravel(position)[rows].astype(slope.dtype)
        normal_key, step_key = jax.random.split(rows_key)
        normals = jax.random.normal(normal_key, place.shape, place.dtype)
        uniform = jax.random.uniform(step_key, (), place.dtype)
        moves = propose(server.moves, said.gradient + slope, whole, normals, uniform)
        proposal = (place + moves.factor @ moves.shift).astype(extra.proposal.dtype)
        info = MetropolisReport(moves.acceptance, moves.whole, broadcast.round < self.num_adapt)
        moved = moved._replace(extra=extra._replace(proposal=proposal))
        return moved, server._replace(moves=moves), info


def _number(step_size: Any) -> Array:
    number: Array = schedules.number(step_size, "step_size", minimum=0.0, strict=True)
    if isinstance(number, schedules.Scheduled):
        raise TypeError("step_size must be a number: draws are exact at any.")
    return number


def _bits(message: ArrayTree) -> Array:
    return jnp.asarray(trees.num_bits(message), jnp.int32)


def _no_population(local: Local) -> str:
    """Return what is wrong where latents have no sums of statistics that the server can draw by."""
    sites = list(local.like.tree) if isinstance(local.like.tree, dict) else []
    shifted = [name for name in sites if name.endswith("_decentered")]
    if shifted:
        return (
            f"fed_gibbs draws given sums of statistics of the latents, and site "
            f"{shifted[0].removesuffix('_decentered')!r} is written as a standard variable that is "
            f"shifted and scaled, of which shared parameters have none: give it the posterior of "
            f"from_numpyro(model, centered=1.0)."
        )
    kinds = getattr(local.logprior_fn, "distributions", {})
    listed = [f"{name!r} ({kinds[name]})" if name in kinds else repr(name) for name in sites]
    named = f" {', '.join(listed)}" if sites else ""
    return (
        f"fed_gibbs needs the population of the latents{named}, their distribution given shared "
        f"parameters by sums of statistics: local sites that are Normal or MultivariateNormal "
        f"given shared sites, in from_numpyro(model, centered=1.0), or fedmcmc.Population by hand."
    )


def fed_gibbs(
    posterior: Posterior,
    *,
    refresh: Refresh,
    server_moves: int = 4,
    step_size: float | Array | None = None,
    num_adapt: int = 0,
    interweave: bool = False,
    recenter: bool = False,
    participation: Participation | None = None,
) -> FederatedKernel:
    """Build a Gibbs sampler: clients draw their latents, the server population parameters; exact.

    In each round clients move the latents of their groups at the population parameters that were
    broadcast, and send by how much the sums of their statistics have changed (of normal effects the
    sums of distances from an origin and of their squares). The server adds these to its totals, and
    draws the population parameters given them by itself: any prior of these will do.

    Draws are exact at every setting, also where only some clients take part, as long as who does
    depends on no draw: the latents of those that do not are where they were, and the totals still
    hold them.

    Shared parameters of rows (a slope, a residual sd) have a second exchange per round: all
    clients are asked for the log likelihood of their rows at a proposal, given their latents, and
    the server accepts or rejects (Metropolis-adjusted Langevin). If a client's answer is missing,
    these parameters stay where they are.

    Parameters
    ----------
    posterior
        With ``local`` and its ``population``, as `fedmcmc.from_numpyro` makes it with
        ``centered=1.0`` of a model whose local sites are normal given the shared ones.
    refresh
        How latents move, as `fedmcmc.hierarchy.independence`; only such that are exact.
    server_moves
        Sweeps of slice sampling over the shared parameters per round, where the population has no
        ``draw_fn``.
    step_size
        Of the parameters of rows, as that of `fedmcmc.mala`; its metric is the inverse of the rows'
        information about them at the start. Half of the proposals have it, the others a fourth, a
        sixteenth or a 64th. By default that of an acceptance of 0.57 where the metric is the
        parameters' covariance.
    num_adapt
        In the first rounds of a chain, so many, that step size adapts to this acceptance; draws are
        exact from then on: give `sample` a ``num_burnin`` that is as large at least.
    interweave
        Whether a further exchange per round moves the population's parameters and takes all latents
        along, each as far from the population's mean, in units of its spread, as it was (Yu and
        Meng 2011): for groups of which rows say little, where `tau` else moves slowly. It asks
        everyone, how likely rows are at sixteen candidates around where the chain is, of which one
        is taken (Tjelmeland 2004); their scale is that which rows know at the start.
    recenter
        Whether a further exchange per round moves the parameters of rows and the population's means
        together, with latents that make up for the former, so that predictions stay (Gelfand, Sahu
        and Carlin 1995): for slopes of what varies between groups, which latents else hold back.
        Candidates as for `interweave`. By how much latents make up is regressed on each client's
        own rows at the start, and draws are exact whatever it is.
    participation
        Everyone by default, as is needed where shared parameters are those of rows. Messages are
        never weighted.

    Returns
    -------
    FederatedKernel
        Messages are of the size of the statistics. One client's message is the change of one draw,
        if it has one group: see `docs/hierarchies.md` on what that tells.

    Raises
    ------
    TypeError, ValueError
        If the posterior has no latents or no population, the refresh is not exact, on settings out
        of range, and where shared parameters are those of rows and not all clients take part; from
        `init` where the population's functions do not fit.

    Notes
    -----
    Where rows say little about a group's latent, the population's spread moves slowly without
    ``interweave=True``. Where a covariate is alike for all rows of a group, its slope and the
    population's mean do without ``recenter=True``.

    Statistics are taken around an origin that follows the latents' mean, so that sums of squares
    keep their digits however far from zero an outcome lies. Beside by how much its sums have
    changed a client therefore sends its sums around the newest origin, in the first round in which
    it knows that origin, and by how much these have changed thereafter. Once every client has, they
    take the old sums' place. That happens in every round in which all take part.

    References
    ----------
    Gelfand, Sahu and Carlin (1995), Efficient parametrisations for normal linear mixed models,
    Biometrika 82.

    Tjelmeland (2004), Using all Metropolis-Hastings proposals to estimate mean values, Technical
    Report 4/2004, Norwegian University of Science and Technology.

    Yu and Meng (2011), To center or not to center: that is not the question, Journal of
    Computational and Graphical Statistics 20.

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
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, {"mu": 0.0, "tau": 0.0}, num_rounds=300,
    ...     progress=False,
    ... )
    >>> samples.draws["tau"].shape
    (1, 300)
    """
    participation = full() if participation is None else participation
    expect_latents(posterior, refresh, participation, "fed_gibbs")
    local: Any = posterior.local
    refuse_two_levels(local)
    if local.population is None:
        raise ValueError(_no_population(local))
    if not refresh.exact:
        raise ValueError(
            "fed_gibbs needs a refresh that is exact, as fedmcmc.hierarchy.independence(): the "
            "error of the latents' spread would be that of the population's."
        )
    flags = local.population.of_rows
    if not isinstance(flags, Static):
        flags = Static(tuple(bool(flag) for flag in flags))
        population = local.population._replace(of_rows=flags)
        posterior = posterior._replace(local=local._replace(population=population))
    some_answer = participation.may_drop or participation.cohort_size is not None
    if any(flags.value) and some_answer:
        raise ValueError(
            "Some shared parameters are those of rows, which move if all clients answer: use full "
            "participation."
        )
    if interweave:
        if local.population.transport_fn is None:
            raise ValueError("interweave=True needs the population's transport_fn.")
        if all(flags.value) and flags.value:
            raise ValueError("All shared parameters are those of rows: nothing to interweave.")
        if some_answer:
            raise ValueError("interweave=True asks all clients in a round: use full participation.")
    if recenter:
        if local.population.origin_fn is None:
            raise ValueError("recenter=True needs the population's origin_fn.")
        if not any(flags.value):
            raise ValueError(
                "recenter=True moves parameters of rows (slopes), and this model has none beside "
                "the population's: interweave=True moves these."
            )
    if num_adapt != 0:
        num_adapt = positive_integer(num_adapt, "num_adapt")
    if not (any(flags.value) or interweave or recenter):
        num_adapt = 0  # nothing adapts: every draw is exact
    if participation.weighted:
        participation = replace(participation, weighted=False)
    return as_functions(
        FederatedGibbs(
            posterior,
            refresh,
            participation,
            positive_integer(server_moves, "server_moves"),
            () if step_size is None else _number(step_size),
            jnp.asarray(num_adapt, jnp.int32),
            bool(interweave),
            bool(recenter),
        )
    )
