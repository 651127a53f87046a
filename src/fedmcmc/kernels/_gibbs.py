"""Gibbs sampling with latents: clients draw their own, the server what they share.

Given all latents, population parameters (the mean and the spread of effects, say) depend on sums of
the latents' sufficient statistics alone. The server keeps these sums, and clients send by how much
their own have changed.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    Adjusted,
    ArrayTree,
    Broadcast,
    Client,
    Exact,
    FederatedKernel,
    Federation,
    Participation,
    Phase,
    Population,
    Posterior,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.compression import Identity
from fedmcmc.data import max_groups
from fedmcmc.dynamics import slice_sweeps
from fedmcmc.hierarchy import Groups, Locals, Refresh, groups_of, made_up_rows
from fedmcmc.kernels._gibbs_rows import first_moves, judge, propose
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._questions import BELOW, IMPOSSIBLE, below_range, impossible_in_sum
from fedmcmc.kernels._shared import report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees


class Statistics(NamedTuple):
    """A client's message: sums of its latents' statistics, or by how much they have changed.

    Attributes
    ----------
    sums
        Of the population's statistics over the client's groups.
    one
        ``[]``, one: the sum says how many clients there are.
    gradient
        ``[l]``, of the log likelihood with respect to the parameters of rows, or ``()``.
    """

    sums: ArrayTree
    one: Any
    gradient: Any = ()


class _Server(NamedTuple):
    total: ArrayTree  # of all groups' statistics
    num_groups: Array
    num_clients: Array
    moves: ArrayTree  # `RowMoves`, or () where no shared parameter is one of rows


class _First(NamedTuple):
    sums: ArrayTree
    num_groups: Any
    information: ArrayTree  # of rows about their parameters, [l, l], or ()


class _Judged(NamedTuple):
    difference: Any
    gradient: Any
    one: Any


@register_dataclass
@dataclass(frozen=True, eq=False)
class _FirstSums(Phase):
    """Sums the statistics of all groups' first latents, and counts the groups."""

    kernel: Any  # the `FederatedGibbs` that asks

    @property
    def sums_rows(self) -> bool:
        return False

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[_First, ArrayTree, StepInfo]:
        groups = groups_of(self.kernel.local, client)
        position = jax.tree.map(trees.as_float, broadcast.position)
        first = self.kernel.first_locals(groups, position)
        sums = self.kernel.sums(groups, first.latents)
        num = jnp.sum(groups.present).astype(jnp.result_type(float))
        information: ArrayTree = ()
        if self.kernel.moves_rows:
            information = self.kernel.information(groups, position, first.latents)
        message = _First(sums, num, information)
        return message, (), report(message, trees.squared_norm(sums))

    def message_like(self, like: Broadcast) -> _First:
        dtype = jnp.result_type(float)
        size = self.kernel.row_places(like.position).size
        information = jax.ShapeDtypeStruct((size, size), dtype) if size else ()
        return _First(self.kernel.sums_like(), jax.ShapeDtypeStruct((), dtype), information)


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Judgement(Phase):
    """Asks for log likelihoods at a proposal of the parameters of rows, which the server judges."""

    kernel: Any  # the `FederatedGibbs` that asks

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Exact, ArrayTree, StepInfo]:
        kernel, position = self.kernel, broadcast.position
        groups = groups_of(kernel.local, client)
        flat = groups.as_flat(client_state.latents)

        def difference(place: Array) -> Array:
            return groups.rows_difference(kernel.placed(position, place), position, flat)

        value, slope = jax.value_and_grad(difference)(broadcast.extra)
        possible = jnp.isfinite(value) & jnp.all(jnp.isfinite(slope))
        dtype = jnp.result_type(float)
        message = _Judged(
            jnp.where(possible, value, IMPOSSIBLE).astype(dtype),
            jnp.where(possible, slope, 0).astype(dtype),
            jnp.ones((), dtype),
        )
        down = trees.num_bits(position) + trees.num_bits(broadcast.extra)
        square = trees.squared_norm(message.gradient)
        info = report(message, square, bits_down=jnp.asarray(down, jnp.int32))
        return Exact(message), client_state, info

    def message_like(self, like: Broadcast) -> Exact:
        dtype = jnp.result_type(float)
        one = jax.ShapeDtypeStruct((), dtype)
        return Exact(_Judged(one, jax.ShapeDtypeStruct(like.extra.shape, dtype), one))

    def in_range(self, message: Exact, most: float) -> Exact:
        said: _Judged = message.value
        far = jnp.any(jnp.abs(said.gradient) > trees.cast(most, said.gradient))
        impossible = below_range(said.difference, most) | far
        lowest = -trees.cast(most, said.difference)
        return Exact(
            said._replace(
                difference=jnp.where(impossible, lowest, said.difference),
                gradient=jnp.where(impossible, 0, said.gradient),
            )
        )

    def from_range(self, total: Exact, most: float) -> Exact:
        said: _Judged = total.value
        impossible = impossible_in_sum(said.difference, most)
        lowest = trees.cast(IMPOSSIBLE, said.difference)
        return Exact(said._replace(difference=jnp.where(impossible, lowest, said.difference)))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        return jax.random.uniform(rng_key, (), jnp.result_type(float))

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Exact
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        kernel, position, said = self.kernel, broadcast.position, total.value
        uniform = self.prepare_server(rng_key, broadcast) if trees.is_key(rng_key) else rng_key
        proposal = kernel.placed(position, broadcast.extra)
        here = kernel.server_density(position, server_state)
        there, gradient = jax.value_and_grad(kernel.server_density)(proposal, server_state)
        of_rows = trees.ravel(gradient)[kernel.row_places(position)]
        possible = (said.difference > BELOW) & jnp.isfinite(there) & trees.all_finite(gradient)
        accepted, moves = judge(
            server_state.moves,
            jnp.where(possible, said.difference + there - here, -jnp.inf),
            said.gradient + jnp.where(possible, of_rows, 0),
            said.one == server_state.num_clients,
            uniform,
            broadcast.round < kernel.num_adapt,
        )
        position = trees.select(accepted, proposal, position)
        return broadcast._replace(position=position), server_state._replace(moves=moves), ()


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FederatedGibbs(LatentKernel):
    """Clients draw latents, the server population parameters; see `fed_gibbs`."""

    server_moves: int = field(metadata={"static": True})
    resum_every: Array
    step_size: ArrayTree  # of the parameters of rows, or () for that of an acceptance
    num_adapt: Array

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

    def server_density(self, position: ArrayTree, server_state: _Server) -> Array:
        """Return the log density of the shared parameters given the latents, without rows."""
        prior = self.posterior.logprior_fn(position)
        num, total = server_state.num_groups, server_state.total
        return prior + self.population.logdensity_fn(position, num, total)

    def information(self, groups: Groups, position: ArrayTree, latents: ArrayTree) -> Array:
        """Return the sum over rows of outer products of gradients, ``[l, l]``."""
        flat, local = groups.as_flat(latents), groups.local
        place = trees.ravel(position)[self.row_places(position)]

        def of_rows(rows: ArrayTree, mask: Array, group: Array) -> Array:
            own = jax.vmap(groups.unravel)(flat[group])
            gradients = jax.jacfwd(
                lambda at: local.loglikelihood_fn(self.placed(position, at), own, rows)
            )(place)
            gradients = jnp.where(mask[:, None] & jnp.isfinite(gradients), gradients, 0)
            return gradients.T @ gradients

        return groups.fold(of_rows).astype(jnp.result_type(float))

    @property
    def before(self) -> tuple[Phase, ...]:
        return (_Judgement(self),) if self.moves_rows else ()

    @property
    def takes_late(self) -> bool:
        # Then total and latents would be of different rounds.
        return False

    def check_compressor(self, compressor: Any) -> None:
        if not isinstance(compressor, Identity):
            raise ValueError(
                "The server of this kernel draws given sums of statistics, on which its draws do "
                "not depend linearly: they must be exact, and cannot be compressed."
            )

    @cached_property
    def setup(self) -> tuple[Phase, ...]:
        return (_FirstSums(self),)

    def sums_like(self) -> ArrayTree:
        """Return the shapes of sums of statistics."""
        return jax.eval_shape(self.population.statistics_fn, self.local.like.tree)

    def sums(self, groups: Groups, latents: ArrayTree) -> ArrayTree:
        """Return the sums of the statistics over a client's groups."""
        each = jax.vmap(self.population.statistics_fn)(latents)

        def total(leaf: Array) -> Array:
            present = groups.present.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.sum(jnp.where(present, leaf, 0), axis=0)

        return jax.tree.map(total, each)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _Server]:
        position = self.checked_start(position, federation)
        _check_population(self.posterior, position, federation, self.row_places(position))
        (first,) = totals
        num = jnp.asarray(federation.num_clients, first.num_groups.dtype)
        extra: ArrayTree = ()
        moves: ArrayTree = ()
        if self.moves_rows:
            moves = first_moves(first.information, self.step_size)
            extra = trees.ravel(position)[self.row_places(position)].astype(num.dtype)
        broadcast = Broadcast(jnp.zeros((), jnp.int32), position, extra)
        return broadcast, _Server(first.sums, first.num_groups, num, moves)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        size = trees.num_elements(self.local.like.tree)
        return self.refresh.prepare(rng_key, max_groups(client), size)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[Exact, Locals, StepInfo]:
        groups, before = groups_of(self.local, client), client_state.latents
        moved = self.moved(groups, draws, broadcast, groups.as_flat(before), client_state.refresh)
        # Differences would pile up roundings: now and then latents stand still, and all is said.
        resums = self._resums(broadcast)
        state = trees.select(
            resums, client_state, Locals(groups.as_latents(moved.flat), moved.kept)
        )
        old = self.sums(groups, before)
        sums = trees.subtract(
            self.sums(groups, state.latents), trees.select(resums, trees.zeros_like(old), old)
        )
        info = report(
            sums,
            trees.squared_norm(sums),
            bits_down=jnp.asarray(trees.num_bits(broadcast.position), jnp.int32),
            extra=moved.acceptance,
        )
        dtype = jnp.result_type(float)
        gradient: ArrayTree = ()
        if self.moves_rows:
            position, flat = broadcast.position, groups.as_flat(state.latents)
            place = trees.ravel(position)[self.row_places(position)]
            gradient = jax.grad(
                lambda at: groups.rows_difference(self.placed(position, at), position, flat)
            )(place).astype(dtype)
        message = Statistics(sums, jnp.ones((), dtype), gradient)
        return Exact(message), state, info._replace(bits=_bits(message))

    def message_like(self, like: Broadcast) -> Exact:
        dtype = jnp.result_type(float)
        size = self.row_places(like.position).size
        gradient = jax.ShapeDtypeStruct((size,), dtype) if size else ()
        return Exact(Statistics(self.sums_like(), jax.ShapeDtypeStruct((), dtype), gradient))

    def prepare_server(self, rng_key: Array, like: Broadcast) -> Array:
        # How many numbers slices take is not known ahead.
        return rng_key

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: _Server, total: Exact
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        said: Statistics = total.value
        whole = said.one == server_state.num_clients
        old = server_state.total
        sums = trees.select(
            self._resums(broadcast),
            trees.select(whole, said.sums, old),
            trees.add(old, said.sums),
        )
        server = server_state._replace(total=sums)
        num, population = server_state.num_groups, self.population
        position, rows = broadcast.position, self.row_places(broadcast.position)
        draw_key, rows_key = jax.random.split(rng_key)
        if population.draw_fn is not None:
            position = trees.cast_like(
                population.draw_fn(draw_key, position, num, sums), broadcast.position
            )
        elif rows.size < trees.num_elements(position):
            every = trees.ravel(position)
            own = np.setdiff1d(np.arange(every.size), rows)

            def at(some: Array) -> ArrayTree:
                flat = every.at[own].set(some)
                return trees.cast_like(trees.unravel(flat, position), position)

            drawn = slice_sweeps(
                draw_key,
                lambda some: self.server_density(at(some), server),
                every[own],
                self.server_moves,
            )
            position = at(drawn)
        moved = broadcast._replace(round=broadcast.round + 1, position=position)
        if not self.moves_rows:
            return moved, server, ()
        slope = trees.ravel(jax.grad(self.server_density)(position, server))[rows]
        place = trees.ravel(position)[rows].astype(slope.dtype)
        normal_key, step_key = jax.random.split(rows_key)
        normals = jax.random.normal(normal_key, place.shape, place.dtype)
        uniform = jax.random.uniform(step_key, (), place.dtype)
        moves = propose(server.moves, said.gradient + slope, whole, normals, uniform)
        extra = (place + moves.factor @ moves.shift).astype(broadcast.extra.dtype)
        info = Adjusted(moves.acceptance, moves.whole, broadcast.round < self.num_adapt)
        return moved._replace(extra=extra), server._replace(moves=moves), info

    def _resums(self, broadcast: Broadcast) -> Array:
        return (broadcast.round + 1) % self.resum_every == 0


def _number(step_size: Any) -> Array:
    number: Array = schedules.number(step_size, "step_size", minimum=0.0, strict=True)
    if isinstance(number, schedules.Scheduled):
        raise TypeError("step_size must be a number: draws are exact at any.")
    return number


def _bits(message: ArrayTree) -> Array:
    return jnp.asarray(trees.num_bits(message), jnp.int32)


def _check_population(
    posterior: Posterior, position: ArrayTree, federation: Federation, rows_at: np.ndarray
) -> None:
    """Raise `ValueError` unless statistics say all that shared parameters do to latents and rows.

    Looks at made-up latents and rows: a server, which checks, has no others. What is not finite
    there tells nothing.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(posterior)):
        return
    local: Any = posterior.local
    population: Population = local.population
    rng, num = np.random.default_rng(0), 8

    def near(leaf: Any) -> Array:
        center = 0.0 if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)
        return jnp.asarray(center + 0.3 * rng.normal(size=leaf.shape), leaf.dtype)

    with jax.ensure_compile_time_eval():
        made_up = made_up_rows(federation.rows, num, rng)
        latents = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=(num, *leaf.shape)), leaf.dtype),
            local.like.tree,
        )
        first, other = (jax.tree.map(near, position) for _ in range(2))
        slope = jax.grad(lambda at: jnp.sum(local.loglikelihood_fn(at, latents, made_up)))(first)
        each = jax.vmap(population.statistics_fn)(latents)
        sums = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each)
        count = jnp.asarray(float(num))
        priors, densities = (
            np.array([float(fn(at)) for at in (first, other)])
            for fn in (
                lambda at: jnp.sum(jax.vmap(lambda one: local.logprior_fn(at, one))(latents)),
                lambda at: population.logdensity_fn(at, count, sums),
            )
        )
        flat = np.array(trees.ravel(slope))
    names = trees.element_names(position)
    flat[rows_at] = 0
    seen = [name for name, x in zip(names, flat, strict=True) if np.isfinite(x) and x != 0]
    if seen:
        raise ValueError(
            f"The log likelihood of rows depends on {seen[0]}, of which the population's of_rows "
            f"says that it does not."
        )
    wanted, found = np.diff(priors)[0], np.diff(densities)[0]
    if np.isfinite([wanted, found]).all() and abs(wanted - found) > 1e-2 * (1 + abs(wanted)):
        raise ValueError(
            f"The population's logdensity_fn is not the sum of the latents' log priors: between "
            f"two positions that changes by {wanted:.4g}, and by its statistics by {found:.4g} (of "
            f"made-up latents)."
        )


def fed_gibbs(
    posterior: Posterior,
    *,
    refresh: Refresh,
    server_moves: int = 4,
    resum_every: int = 1000,
    step_size: float | Array | None = None,
    num_adapt: int = 0,
    participation: Participation | None = None,
) -> FederatedKernel:
    """Build a Gibbs sampler: clients draw their latents, the server population parameters; exact.

    In each round clients move the latents of their groups at the population parameters that were
    broadcast, and send by how much the sums of their statistics have changed (of normal effects the
    sums of effects and of their squares). The server adds these to its totals, and draws the
    population parameters given them by itself: any prior of these will do.

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
    resum_every
        Every so many rounds latents stand still and clients send their sums themselves, as
        differences pile up roundings. It takes effect if all clients take part in that round.
    step_size
        Of the parameters of rows, as that of `fedmcmc.mala`; its metric is the inverse of the rows'
        information about them at the start. Half of the proposals have it, the others a fourth, a
        sixteenth or a 64th. By default that of an acceptance of 0.57 where the metric is the
        parameters' covariance.
    num_adapt
        In the first rounds of a chain, so many, that step size adapts to this acceptance; draws are
        exact from then on: give `sample` a ``num_burnin`` that is as large at least.
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
        of range; from `init` where shared parameters are those of rows.

    Notes
    -----
    Where rows say little about a group's latent, the population's spread moves slowly.

    Sums of squares lose digits of float32 where latents lie hundreds of their sds from zero: center
    such an outcome. The run's end warns where that has happened.

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
    if local.population is None:
        raise ValueError(
            "fed_gibbs needs the population of the latents, the distribution of latents given "
            "shared parameters by sums of statistics: local sites that are Normal or "
            "MultivariateNormal given shared sites, in from_numpyro(model, centered=1.0) (of "
            "standard normals that are shifted and scaled, shared parameters are those of rows), "
            "or fedmcmc.Population by hand."
        )
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
    if any(flags.value) and (participation.drops or participation.cohort_size is not None):
        raise ValueError(
            "Some shared parameters are those of rows, which move if all clients answer: use full "
            "participation."
        )
    if num_adapt != 0:
        num_adapt = positive_integer(num_adapt, "num_adapt")
    if participation.weighted:
        participation = replace(participation, weighted=False)
    return as_functions(
        FederatedGibbs(
            posterior,
            refresh,
            participation,
            positive_integer(server_moves, "server_moves"),
            jnp.asarray(positive_integer(resum_every, "resum_every"), jnp.int32),
            () if step_size is None else _number(step_size),
            jnp.asarray(num_adapt, jnp.int32),
        )
    )
