"""Joint Langevin dynamics: clients move latents of their groups, the server shared parameters.

A message is the gradient of the log density of a client's groups by the shared position, at latents
that are drawn given the position. Its mean over the latents is the gradient of the client's log
likelihood with the latents integrated out (Fisher's identity). The kernel is therefore stochastic
gradient Langevin dynamics on the marginal posterior, with draws of latents instead of minibatches.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.compression import Memory
from fedmcmc.data import max_groups
from fedmcmc.dynamics import Metric, overdamped_langevin
from fedmcmc.hierarchy import LatentState, Refresh, groups_of
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._shared import name_of, report
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, schedules, trees
from fedmcmc.random import realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    Number,
    Participation,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)

Order = Literal["refresh_first", "gradient_first"]


def _check_memory(kernel: Any, compressor: Any) -> None:
    partial = kernel.participation.may_drop or kernel.participation.cohort_size is not None
    if isinstance(compressor, Memory) and compressor.of != "active" and partial:
        raise ValueError(
            "With latents, the server does not add memories of absent clients, because their "
            'latents do not move: use memory(..., of="active").'
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class JointLangevin(LatentKernel):
    """Langevin dynamics whose clients refresh latents and send gradients; see `joint`."""

    step_size: Any
    metric: Metric
    num_draws: int = field(metadata={"static": True})
    gradient_first: bool = field(metadata={"static": True})

    traits = replace(LatentKernel.traits, gradients_at_latents=True, check_compressor=_check_memory)
    disclosure = Disclosure(
        "the gradient of the log likelihood of the rows together with the random effects of this "
        "site, which the site draws itself"
    )

    @property
    def name(self) -> str:
        return name_of(self, lambda kernel: "lsd")

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        position = self.checked_start(position, federation)
        self.metric.check(position)
        return Broadcast(jnp.zeros((), jnp.int32), position), ()

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        keys, num = jax.random.split(rng_key, self.num_draws), max_groups(client)
        size = trees.num_elements(self.local.like.tree)
        return jax.vmap(lambda key: self.refresh.prepare(key, num, size))(keys)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: LatentState, client: Client
    ) -> tuple[ArrayTree, LatentState, StepInfo]:
        groups, position = groups_of(self.local, client), broadcast.position
        slope_fn = jax.grad(groups.total)

        def body(carry: tuple[Array, ArrayTree, ArrayTree], draw: ArrayTree) -> Any:
            flat, refresh_state, total = carry
            moved = self.moved(groups, draw, broadcast, flat, refresh_state)
            slope = slope_fn(position, flat if self.gradient_first else moved.flat)
            return (moved.flat, moved.kept, trees.add(total, slope)), moved.acceptance

        flat = groups.as_flat(client_state.latents)
        start = (flat, client_state.refresh, trees.zeros_like(position))
        (flat, refresh_state, total), accepted = jax.lax.scan(body, start, draws)
        message = trees.scale(1 / self.num_draws, total)
        share = jnp.mean(accepted, axis=0)
        info = report(
            message,
            trees.squared_norm(message),
            bits_down=jnp.asarray(trees.num_bits(position), jnp.int32),
            extra=share,
        )
        acceptance = client_state.accepted.update(share, groups.present)
        return message, LatentState(groups.as_latents(flat), refresh_state, acceptance), info

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return realize_normals(rng_key, like.position)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        position = broadcast.position
        gradient = trees.add(total, jax.grad(self.posterior.logprior_fn)(position))
        step_size = schedules.value(self.step_size, broadcast.round)
        noise = realize_normals(rng_key, position)
        position = overdamped_langevin(position, gradient, noise, step_size, 1.0, self.metric)
        return broadcast._replace(round=broadcast.round + 1, position=position), (), ()


def joint(
    posterior: Posterior,
    refresh: Refresh,
    *,
    step_size: Number,
    order: Order = "refresh_first",
    num_draws: int = 1,
    participation: Participation | None = None,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build Langevin dynamics on shared parameters and latents of groups together.

    Each client moves the latents of its groups by `refresh` at the broadcast position, and sends
    the gradient of its groups' log density by this position. The server adds the prior's gradient
    and the noise. Latents of absent clients do not move.

    Parameters
    ----------
    posterior
        Posterior with ``local``, such as `fedmcmc.from_numpyro` of a model with local sites.
    refresh
        Move of the latents, such as `fedmcmc.hierarchy.independence`.
    step_size
        Step size of the shared parameters, a number or a schedule of the round.
    order
        ``"refresh_first"`` for gradients at the latents after their move, ``"gradient_first"`` for
        gradients at the latents before it.
    num_draws
        Number of moves per round, whose gradients are averaged.
    participation, metric
        See `fedmcmc.langevin`.

    Raises
    ------
    TypeError, ValueError
        If the posterior has no latents or a setting is out of range. `init` raises if the model
        does not fit the refresh.
    """
    participation = full() if participation is None else participation
    expect_latents(posterior, refresh, participation, "lsd(refresh=...)")
    if order not in ("refresh_first", "gradient_first"):
        raise ValueError(f'order must be "refresh_first" or "gradient_first", got {order!r}.')
    return as_functions(
        JointLangevin(
            posterior,
            refresh,
            participation,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            Metric.of(metric),
            positive_integer(num_draws, "num_draws"),
            order == "gradient_first",
        )
    )
