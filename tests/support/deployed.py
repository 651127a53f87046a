"""A run in which every client is by itself: it has its own rows only, and bytes are all it sends.

What a client is sent (rounds' broadcasts) and what it sends (codes, of the set-up too) crosses as
`fedmcmc.wire` writes it. The server keeps copies of memories where decoding needs them.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc import FederatedState, Placement, random, rounds, simulate, wire
from fedmcmc.pytrees import trees
from fedmcmc.types import Broadcast, Client, RecomputableState
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS


class Site:
    """One client: its rows, of which a server knows the number alone, and its state."""

    def __init__(self, kernel, data, index):
        self.kernel, self.state = kernel, ()
        # Rows that are not there are NaN, so that a step which read them would tell.
        own = jax.tree.map(np.asarray, data.client_rows(index))
        rows = jax.tree.map(lambda leaf: _padded(leaf, data.max_size), own)
        size = data.size[index]
        zero = jnp.zeros((), jnp.int32)
        share = data.share[index]
        self.client = Client(rows, zero, size, jnp.int32(index), share, share, data.max_size)

    def begin(self, downlink, like):
        broadcast = _read(downlink, like)
        self.state = _client_init(self.kernel, broadcast, self.client)

    def answer(self, phase, key, downlink, like, weight, *, setup=False):
        """Return the code as bytes, and the state that the client would keep."""
        weight = jnp.asarray(weight, self.client.share.dtype)
        client = _with_weight(self.client, weight)
        step = partial(_client_step, number=phase, setup=setup)
        code, kept, info = step(self.kernel, key, _read(downlink, like), self.state, client)
        return wire.encode(code), kept, info


class Deployed(NamedTuple):
    state: FederatedState  # what the server has, and of the clients what each has, stacked
    bits: np.ndarray  # [2], up and down, of the last round


def _padded(leaf, size):
    rest = np.full((size - len(leaf), *leaf.shape[1:]), np.nan).astype(leaf.dtype)
    return jnp.asarray(np.concatenate([leaf, rest]))


def _with_weight(client, weight):
    fields = (client.rows, client.start, client.size, client.index, client.share, weight)
    return Client(*fields, client.max_size)


def _read(data, like):
    return jax.tree.map(jnp.asarray, wire.decode(data, like))


def _phase(kernel, number, setup):
    return kernel.setup[number] if setup else kernel.phases[number]


@jax.jit
def _client_init(kernel, broadcast, client):
    return kernel.client_init(broadcast, client)


@partial(jax.jit, static_argnames=("number", "setup"))
def _client_step(kernel, key, broadcast, state, client, *, number, setup):
    return rounds.client_step(kernel, _phase(kernel, number, setup), key, broadcast, state, client)


@partial(jax.jit, static_argnames=("number", "setup"))
def _receive(kernel, received, code, index, weight, late, *, number, setup):
    late = {} if trees.is_empty(late) else {"late": late}
    phase = _phase(kernel, number, setup)
    return rounds.receive(kernel, phase, received, code, index, weight, **late)


@partial(jax.jit, static_argnames=("number",))
def _server_step(kernel, key, broadcast, server, received, *, number):
    return rounds.server_step(kernel, number, key, broadcast, server, received)


@jax.jit
def _server_init(kernel, key, position, totals, data):
    return kernel.server_init(key, position, data.federation, totals)


@jax.jit
def _simulated_round(kernel, data, key, state):
    # The kernel is an argument, as in a run and here: of constants a compiler makes others.
    return simulate(kernel, data, placement=Placement(clients_at_a_time=1)).step(key, state)


class Server:
    """A server of sites, round after round with the key of one chain."""

    def __init__(self, kernel, data, key, position):
        self.kernel, self.key = kernel, key
        self.num_clients = data.num_clients
        self.sites = [Site(kernel, data, i) for i in range(data.num_clients)]
        first = Broadcast(jnp.zeros((), jnp.int32), jax.tree.map(trees.as_float, position))
        totals = [self._set_up(i, first) for i in range(len(kernel.setup))]
        init_key = random.init_key(key)
        self.broadcast, self.server = _server_init(kernel, init_key, position, tuple(totals), data)
        like = trees.shapes_of(self.broadcast)
        for site in self.sites:
            site.begin(wire.encode(self.broadcast), like)
        self.memories = [
            rounds.first_memories(kernel, n, self.broadcast, data.num_clients)
            for n in range(len(kernel.phases))
        ]

    def _set_up(self, number, broadcast):
        phase = self.kernel.setup[number]
        received = rounds.initialize_received(self.kernel, phase, broadcast)
        downlink, like = wire.encode(broadcast), trees.shapes_of(broadcast)
        code_like = rounds.code_like(self.kernel, phase, broadcast)
        for index, site in enumerate(self.sites):
            uplink, _, _ = site.answer(number, self.key, downlink, like, 1.0, setup=True)
            code = _read(uplink, code_like)
            given = (self.kernel, received, code, index, 1.0, ())
            received = _receive(*given, number=number, setup=True)
        return received.total

    def round(self) -> Deployed:
        """Run a round with those who take part in it."""
        kernel, between = self.kernel, self.broadcast
        cohort = rounds.cohort_of(kernel, self.key, between.round, self.num_clients)
        active = np.array(cohort.active)
        late, garbage = np.array(cohort.late), np.array(cohort.garbage)
        bits = np.zeros(2, int)
        broadcast = between
        for number in range(len(kernel.phases)):
            last = number == len(kernel.phases) - 1
            waits = bool(late.size) and last
            received = rounds.initialize_received(
                kernel, number, broadcast, self.memories[number], waits=waits
            )
            downlink, like = wire.encode(broadcast), trees.shapes_of(broadcast)
            code_like = rounds.code_like(kernel, number, broadcast)
            states = {}  # replaced after the phase: a client that is drawn twice answers once
            for slot, index in enumerate(np.asarray(cohort.ids)):
                if not active[slot]:
                    continue
                site, weight = self.sites[index], cohort.weight[slot]
                uplink, kept, info = site.answer(number, self.key, downlink, like, weight)
                code = _read(uplink, code_like)
                if garbage.size and garbage[slot] != 0:
                    code = jax.tree.map(lambda x: _broken(x, garbage[slot]), code)  # noqa: B023
                before = received.num_excluded
                given = (kernel, received, code, index, weight, late[slot] if waits else ())
                received = _receive(*given, number=number, setup=False)
                if int(received.num_excluded) > int(before):
                    active[slot] = False  # the site is told, and keeps what it had
                else:
                    states[site] = kept
                down = info.bits_down
                whole = trees.num_bits(broadcast)
                bits += np.array([info.bits, whole if trees.is_empty(down) else down])
            for site, kept in states.items():
                site.state = kept
            self.memories[number] = received.memories
            self.broadcast, self.server, _ = _server_step(
                kernel, self.key, broadcast, self.server, received, number=number
            )
            broadcast = self.broadcast
        clients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s.state for s in self.sites])
        silent = kernel.participation.silent
        return Deployed(FederatedState(broadcast, self.server, clients), bits * (not silent))


def _broken(leaf: Any, garbage: Any) -> Any:
    """Return numbers as they arrive broken; integers of a code cannot be."""
    return jnp.full_like(leaf, garbage) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def hold_against_the_simulation(kernel, data, key, position, compare, num_rounds=4):
    """Compare states and bits after every round by ``compare(simulated leaf, deployed leaf)``."""
    init, _ = simulate(kernel, data, placement=Placement(clients_at_a_time=1))
    state = init(position, random.init_key(key))
    server = Server(kernel, data, key, position)
    for round_ in range(num_rounds):
        state, info = _simulated_round(kernel, data, key, state)
        deployed, bits = server.round()
        jax.tree.map(compare, without_caches(state), without_caches(deployed))
        assert int(deployed.broadcast.round) == round_ + 1
        np.testing.assert_array_equal([info.bits_up, info.bits_down], bits)


def without_caches(tree):
    """Drop what follows from broadcasts: a simulation computes it for silent clients too."""
    is_cached = lambda leaf: isinstance(leaf, RecomputableState)  # noqa: E731
    return jax.tree.map(lambda leaf: () if is_cached(leaf) else leaf, tree, is_leaf=is_cached)


def main(names):
    for name in names:
        kernel = KERNELS[name](POSITIONS["nested"], Given())
        try:
            hold_against_the_simulation(
                kernel, DATA, KEY, POSITIONS["nested"], np.testing.assert_array_equal
            )
        except AssertionError as error:
            raise AssertionError(name) from error
    print("same")


if __name__ == "__main__":
    main(sys.argv[1:])
