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
    StepInfo,
    as_functions,
)
from fedmcmc.compression import Identity
from fedmcmc.data import max_groups
from fedmcmc.dynamics import slice_sweeps
from fedmcmc.hierarchy import Groups, Locals, Refresh, groups_of, made_up_rows
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._shared import report
from fedmcmc.participation import full
from fedmcmc.pytrees import trees


class Statistics(NamedTuple):
    """A client's message: sums of its latents' statistics, or by how much they have changed.

    Attributes
    ----------
    sums
        Of the population's statistics over the client's groups.
    one
        ``[]``, one: the sum says how many clients there are.
    """

    sums: ArrayTree
    one: Any


class _Server(NamedTuple):
    total: ArrayTree  # of all groups' statistics
    num_groups: Array
    num_clients: Array


class _First(NamedTuple):
    sums: ArrayTree
    num_groups: Any


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
        return _First(sums, num), (), report(sums, trees.squared_norm(sums))

    def message_like(self, like: Broadcast) -> _First:
        return _First(self.kernel.sums_like(), jax.ShapeDtypeStruct((), jnp.result_type(float)))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FederatedGibbs(LatentKernel):
    """Clients draw latents, the server population parameters; see `fed_gibbs`."""

    server_moves: int = field(metadata={"static": True})
    resum_every: Array

    @property
    def population(self) -> Population:
        """What the server needs to know of latents."""
        population = self.local.population
        assert population is not None
        return population

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
        _check_population(self.posterior, position, federation)
        (first,) = totals
        num = jnp.asarray(federation.num_clients, first.num_groups.dtype)
        return Broadcast(jnp.zeros((), jnp.int32), position), _Server(
            first.sums, first.num_groups, num
        )

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
        return Exact(Statistics(sums, jnp.ones((), jnp.result_type(float)))), state, info

    def message_like(self, like: Broadcast) -> Exact:
        one = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return Exact(Statistics(self.sums_like(), one))

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
        num, population = server_state.num_groups, self.population
        position = broadcast.position
        if population.draw_fn is not None:
            position = trees.cast_like(
                population.draw_fn(rng_key, position, num, sums), broadcast.position
            )
        else:

            def log_density(flat: Array) -> Array:
                at = trees.cast_like(trees.unravel(flat, position), position)
                return self.posterior.logprior_fn(at) + population.logdensity_fn(at, num, sums)

            flat = slice_sweeps(rng_key, log_density, trees.ravel(position), self.server_moves)
            position = trees.cast_like(trees.unravel(flat, position), position)
        moved = broadcast._replace(round=broadcast.round + 1, position=position)
        return moved, server_state._replace(total=sums), ()

    def _resums(self, broadcast: Broadcast) -> Array:
        return (broadcast.round + 1) % self.resum_every == 0


def _check_population(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
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
        rows = made_up_rows(federation.rows, num, rng)
        latents = jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(size=(num, *leaf.shape)), leaf.dtype),
            local.like.tree,
        )
        first, other = (jax.tree.map(near, position) for _ in range(2))
        slope = jax.grad(lambda at: jnp.sum(local.loglikelihood_fn(at, latents, rows)))(first)
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
    names = trees.element_names(position)
    flat = np.asarray(trees.ravel(slope))
    seen = [name for name, x in zip(names, flat, strict=True) if np.isfinite(x) and x != 0]
    if seen:
        raise ValueError(
            f"fed_gibbs draws shared parameters given the latents alone, and {seen[0]} is a "
            f"parameter of the rows, too: fedmcmc.marginal(posterior) and "
            f"fedmcmc.lsd(posterior, refresh=...) take any model."
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

    Parameters
    ----------
    posterior
        With ``local`` and its ``population``, as `fedmcmc.from_numpyro` makes it with
        ``centered=1.0`` of a model whose local sites are normal given the shared ones. Shared
        parameters of rows (a slope, a residual sd) are refused by name.
    refresh
        How latents move, as `fedmcmc.hierarchy.independence`; only such that are exact.
    server_moves
        Sweeps of slice sampling over the shared parameters per round, where the population has no
        ``draw_fn``.
    resum_every
        Every so many rounds latents stand still and clients send their sums themselves, as
        differences pile up roundings. It takes effect if all clients take part in that round.
    participation
        Everyone by default. Messages are never weighted.

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
    if participation.weighted:
        participation = replace(participation, weighted=False)
    return as_functions(
        FederatedGibbs(
            posterior,
            refresh,
            participation,
            positive_integer(server_moves, "server_moves"),
            jnp.asarray(positive_integer(resum_every, "resum_every"), jnp.int32),
        )
    )
