"""The shapes of all that crosses in a run, which both sides work out by themselves."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._types import ArrayTree, Broadcast, FederatedKernel, StepInfo
from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._masks import check_kernel
from fedmcmc.deploy._study import Study
from fedmcmc.pytrees import trees
from fedmcmc.rounds import (
    client_draws_like,
    client_step,
    code_like,
    cohort_of,
    first_memories,
    nothing_received,
    server_step,
)


class Report(NamedTuple):
    """What of a client's `StepInfo` leaves its site, beside the code."""

    bits: ArrayTree
    gradient_norm: ArrayTree
    bits_down: ArrayTree
    usable: ArrayTree

    @classmethod
    def of(cls, info: StepInfo) -> "Report":
        """Return it of a step."""
        return cls(info.bits, info.gradient_norm, info.bits_down, info.usable)


class Exchange(NamedTuple):
    """What goes down and up in one phase, of one chain."""

    broadcast: Broadcast
    code: ArrayTree
    report: Report
    private: ArrayTree  # what the client draws alone


class Shapes(NamedTuple):
    """Shapes of one chain."""

    first: Broadcast  # of the phases of `setup`
    setup: tuple[ArrayTree, ...]  # codes
    phases: tuple[Exchange, ...]
    server: ArrayTree
    client: ArrayTree  # what a client keeps
    memories: tuple[ArrayTree, ...]  # the server's copies, one entry per phase
    waits: bool  # whether messages of the last phase may be late
    shared: ArrayTree  # what all clients draw alike in a round


def as_sent(leaf: Any) -> Array:
    """Return a number of a position, or of what a question is about, as it is sent: as a float.

    Words of random keys, the only ones without a sign, stay as they are.
    """
    if jnp.issubdtype(jnp.result_type(leaf), jnp.unsignedinteger):
        return jnp.asarray(leaf)
    return trees.as_float(leaf)


def shapes_of_run(kernel: FederatedKernel, study: Study, position: ArrayTree) -> Shapes:
    """Return the shapes of a run that starts at positions like `position`.

    Raises
    ------
    ValueError
        If model, kernel and sites do not fit together.
    Refused
        If the kernel wants rows in one place.
    """
    if kernel.participation.pooled:
        raise Refused(
            f"{type(kernel).__name__} treats all rows as those of one client (sgld, psgld): that "
            "cannot run where rows stay at their sites."
        )
    federation, key = study.federation, jax.eval_shape(lambda: jax.random.key(0))
    kernel.participation.check(federation.num_clients)
    position = jax.tree.map(lambda s: jax.eval_shape(as_sent, s), position)
    first = jax.eval_shape(lambda p: Broadcast(jnp.zeros((), jnp.int32), p), position)
    messages = tuple(phase.message_like(first) for phase in kernel.setup)
    broadcast, server = jax.eval_shape(
        lambda key, p, totals: kernel.server_init(key, p, federation, totals),
        key,
        position,
        messages,
    )
    client = study.client_like
    state = kept = jax.eval_shape(kernel.client_init, broadcast, client)
    first_round = jnp.zeros((), jnp.int32)
    cohort = jax.eval_shape(
        lambda k: cohort_of(kernel, k, first_round, federation.num_clients), key
    )
    waits = not trees.is_empty(cohort.late)
    setup = tuple(code_like(kernel, phase, first) for phase in kernel.setup)
    phases, memories, last = [], [], len(kernel.phases) - 1
    for number in range(len(kernel.phases)):
        code, state, info = jax.eval_shape(
            lambda key, b, s, c, number=number: client_step(kernel, number, key, b, s, c),
            key,
            broadcast,
            state,
            client,
        )
        private, shared = client_draws_like(kernel, number, broadcast, client)
        phases.append(Exchange(broadcast, code, Report.of(info), private))
        memories.append(
            jax.eval_shape(
                lambda b, number=number: first_memories(kernel, number, b, federation.num_clients),
                broadcast,
            )
        )

        def served(key: Any, b: Any, server: Any, number: int = number) -> Any:
            received = nothing_received(kernel, number, b, waits=waits and number == last)
            return server_step(kernel, number, key, b, server, received)

        broadcast, server, _ = jax.eval_shape(served, key, broadcast, server)
    if study.secure:
        codes = (*setup, *(phase.code for phase in phases))
        check_kernel(kernel, codes, waits=waits)
    return Shapes(first, setup, tuple(phases), server, kept, tuple(memories), waits, shared)
