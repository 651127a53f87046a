"""Shapes of all messages of a run, which sites and server compute independently."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

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
    initialize_received,
    server_step,
)
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederationArgument,
    StepInfo,
    remembered,
)


class StepReport(NamedTuple):
    """`StepInfo` fields that a site sends to the server with the code."""

    bits: ArrayTree
    gradient_norm: ArrayTree
    bits_down: ArrayTree
    usable: ArrayTree

    @classmethod
    def of(cls, info: StepInfo) -> "StepReport":
        """Return the report of a step."""
        return cls(info.bits, info.gradient_norm, info.bits_down, info.usable)


class PhaseShapes(NamedTuple):
    """Shapes of the messages of one chain in one phase."""

    broadcast: Broadcast
    code: ArrayTree
    report: StepReport
    private: ArrayTree  # numbers that the client draws from its own keys


class RunShapes(NamedTuple):
    """Shapes of the messages and states of one chain."""

    setup_broadcast: Broadcast
    setup: tuple[ArrayTree, ...]  # codes
    phases: tuple[PhaseShapes, ...]
    client: ArrayTree  # state of a client
    memories: tuple[ArrayTree, ...]  # the server's copies, one entry per phase
    waits: bool  # messages of the last phase may be late
    shared: ArrayTree  # numbers that all clients draw from shared keys in a round


def max_num_bytes(tree: ArrayTree) -> int:
    """Return an upper bound of the bytes of an encoded code, report or broadcast.

    In the worst case a compressed number takes almost twice the bits of an uncompressed one.
    """
    return 2 * trees.num_bytes(tree) + 64


def as_sent(leaf: ArrayLike) -> Array:
    """Return numbers of a position, or of a question's content, as floats, which messages hold.

    Words of random keys, the only unsigned integers, do not change.
    """
    if jnp.issubdtype(jnp.result_type(leaf), jnp.unsignedinteger):
        return jnp.asarray(leaf)
    return trees.as_float(leaf)


def shapes_of_run(kernel: FederatedKernel, study: Study, position: ArrayTree) -> RunShapes:
    """Return the shapes of a run that starts at positions like `position`.

    Raise `ValueError` if model, kernel and sites do not fit together, and `Refused` if the kernel
    pools the rows of all clients.
    """
    if kernel.participation.pooled:
        raise Refused(
            f"{type(kernel).__name__} treats all rows as rows of one client (sgld, psgld): it "
            "cannot run if rows stay at their sites."
        )
    federation = study.federation
    kernel.participation.check(federation.num_clients)
    shapes = _follow_round(
        kernel, FederationArgument.of(federation), study.client_like, trees.shapes_of(position)
    )
    if study.secure:
        codes = (*shapes.setup, *(phase.code for phase in shapes.phases))
        check_kernel(kernel, codes, waits=shapes.waits)
    return shapes


@remembered
def _follow_round(
    kernel: FederatedKernel, facts: FederationArgument, client: Client, position: ArrayTree
) -> RunShapes:
    """Return the shapes of a run, from traces of all its steps."""
    federation, key = facts.federation, jax.eval_shape(lambda: jax.random.key(0))
    position = jax.tree.map(lambda s: jax.eval_shape(as_sent, s), position)
    setup_broadcast = jax.eval_shape(lambda p: Broadcast(jnp.zeros((), jnp.int32), p), position)
    messages = tuple(phase.message_like(setup_broadcast) for phase in kernel.setup)
    broadcast, server = jax.eval_shape(
        lambda key, p, totals: kernel.server_init(key, p, federation, totals),
        key,
        position,
        messages,
    )
    state = client_state = jax.eval_shape(kernel.client_init, broadcast, client)
    first_round = jnp.zeros((), jnp.int32)
    cohort = jax.eval_shape(
        lambda k: cohort_of(kernel, k, first_round, federation.num_clients), key
    )
    waits = not trees.is_empty(cohort.late)
    setup = tuple(code_like(kernel, phase, setup_broadcast) for phase in kernel.setup)
    phases, memories, last_phase = [], [], len(kernel.phases) - 1
    for number in range(len(kernel.phases)):
        code, state, info = jax.eval_shape(
            lambda key, b, s, c, number=number: client_step(kernel, number, key, b, s, c),
            key,
            broadcast,
            state,
            client,
        )
        private, shared = client_draws_like(kernel, number, broadcast, client)
        phases.append(PhaseShapes(broadcast, code, StepReport.of(info), private))
        memories.append(
            jax.eval_shape(
                lambda b, number=number: first_memories(kernel, number, b, federation.num_clients),
                broadcast,
            )
        )

        def step(key: Array, b: Broadcast, server: ArrayTree, number: int = number) -> ArrayTree:
            received = initialize_received(kernel, number, b, waits=waits and number == last_phase)
            return server_step(kernel, number, key, b, server, received)

        broadcast, server, _ = jax.eval_shape(step, key, broadcast, server)
    return RunShapes(
        setup_broadcast, setup, tuple(phases), client_state, tuple(memories), waits, shared
    )
