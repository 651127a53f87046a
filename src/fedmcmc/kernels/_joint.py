"""Joint Langevin dynamics: clients move latents of their groups, the server what they share.

A message is the gradient of the log density of a client's groups with respect to the shared
position, at latents that are drawn given it. Its mean over the latents is the gradient of the
client's log likelihood with the latents integrated out (Fisher's identity), so that this is
stochastic gradient Langevin dynamics on the marginal posterior, the latents' draws for a minibatch.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
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
from fedmcmc.compression import Memory
from fedmcmc.data import max_groups
from fedmcmc.dynamics import Metric, overdamped_langevin
from fedmcmc.hierarchy import Locals, Refresh, TwoLevels, latents_of
from fedmcmc.kernels._latents import LatentKernel, expect_latents
from fedmcmc.kernels._shared import name_of, report
from fedmcmc.participation import full
from fedmcmc.pytrees import in_single_precision, schedules, trees
from fedmcmc.random import realize_normals

Order = Literal["refresh_first", "gradient_first"]


def _check_memory(kernel: Any, compressor: Any) -> None:
    partial = kernel.participation.may_drop or kernel.participation.cohort_size is not None
    if isinstance(compressor, Memory) and compressor.of != "active" and partial:
        raise ValueError(
            "With latents the server does not add memories of absent clients, whose latents "
            'stand still: use memory(..., of="active").'
        )


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class JointLangevin(LatentKernel):
    """Clients refresh latents and send gradients, the server moves the chain; see `joint`."""

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
        return jax.vmap(lambda key: self.refresh.randomness(key, self.local, num))(keys)

    @in_single_precision
    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: Locals, client: Client
    ) -> tuple[ArrayTree, Locals, StepInfo]:
        groups, position = latents_of(self.local, client), broadcast.position
        slope_fn = jax.grad(groups.total)

        def one(carry: tuple[Array, ArrayTree, ArrayTree], drawn: ArrayTree) -> Any:
            flat, kept, total = carry
            moved = self.moved(groups, drawn, broadcast, flat, kept)
            slope = slope_fn(position, flat if self.gradient_first else moved.flat)
            return (moved.flat, moved.kept, trees.add(total, slope)), moved.acceptance

        begin = (groups.as_flat(client_state.latents), client_state.refresh)
        (flat, kept, total), accepted = jax.lax.scan(
            one, (*begin, trees.zeros_like(position)), draws
        )
        message = trees.scale(1 / self.num_draws, total)
        share = jnp.mean(accepted, axis=0)
        info = report(
            message,
            trees.squared_norm(message),
            bits_down=jnp.asarray(trees.num_bits(position), jnp.int32),
            extra=share,
        )
        lately = client_state.accepted.with_round(share, groups.present)
        return message, Locals(groups.as_latents(flat), kept, lately), info

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

    Each client moves the latents of its groups by `refresh`, at the position that was broadcast,
    and sends the gradient of its groups' log density with respect to that position. The server
    adds the prior's gradient and the noise. Latents stay at their client, in its state; those of a
    client that is absent stand still.

    Parameters
    ----------
    posterior
        With ``local``, as `fedmcmc.from_numpyro` makes it of a model with local sites.
    refresh
        How latents move, as `fedmcmc.hierarchy.independence`.
    step_size
        Of the shared parameters, a number or a schedule of the round.
    order
        Whether the gradient is taken at the latents after their move or before it.
    num_draws
        Moves per round, whose gradients are averaged.
    participation, metric
        As in `fedmcmc.langevin`.

    Raises
    ------
    TypeError, ValueError
        If the posterior has no latents, on settings out of range, and from `init` where the model
        does not fit the refresh.
    """
    participation = full() if participation is None else participation
    expect_latents(posterior, refresh, participation, "lsd(refresh=...)")
    local = posterior.local
    if (local is not None and local.client is not None) != isinstance(refresh, TwoLevels):
        raise ValueError(
            "A model with latents of clients and of their groups takes "
            "refresh=hierarchy.two_levels(client=..., group=...), and no other model does."
        )
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
