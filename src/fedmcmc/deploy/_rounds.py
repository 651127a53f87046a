"""Rounds over sites: what the server computes, and the messages of each phase."""

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import wire
from fedmcmc._types import (
    Adjusted,
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    Refined,
)
from fedmcmc.compression import WORD_BITS, limbs_of_host
from fedmcmc.deploy._frames import (
    PART_BYTES,
    Frame,
    FrameError,
    Tag,
    checksum,
    digest_of,
    pack,
    unpack,
)
from fedmcmc.deploy._guard import Fault, Guard, count_faults
from fedmcmc.deploy._links import LOG, Links, SiteError
from fedmcmc.deploy._masked import MaskedSums
from fedmcmc.deploy._masks import num_words
from fedmcmc.deploy._programs import (
    Moved,
    chain_of,
    cohorts,
    moved,
    shared_words,
    stacked,
    summed,
    taken_in,
)
from fedmcmc.deploy._programs import first as first_of_server
from fedmcmc.deploy._shapes import Shapes, max_num_bytes
from fedmcmc.deploy._words import to_words
from fedmcmc.participation import full
from fedmcmc.pytrees import trees
from fedmcmc.rounds import Received


class AtServer(NamedTuple):
    """What the server keeps of its sites, in the place of the clients' states.

    Attributes
    ----------
    memories
        Copies of the clients' memories where decoding needs them, one entry per phase, leaves
        ``[num_chains, num_clients, ...]``.
    last
        ``[num_chains, num_clients, 2]`` int32, round and phase of each site's last answer that was
        taken, -1 before the first.
    counted
        ``[num_chains, num_clients]`` bool, in which chains it was.
    run
        ``[num_chains, 32]`` uint8, the name of the run under which sites have their states.
    """

    memories: tuple[ArrayTree, ...]
    last: ArrayTree
    counted: ArrayTree
    run: ArrayTree


class Figures(NamedTuple):
    """What is known of a round besides the draw, ``[num_chains]`` each, as `RoundInfo` has it."""

    num_active: np.ndarray
    bits_up: np.ndarray
    bits_down: np.ndarray
    gradient_norm: np.ndarray
    num_lost: np.ndarray
    num_excluded: np.ndarray
    server: ArrayTree

    def named(self, names: Any, round_: int) -> dict[str, np.ndarray]:
        """Return the figures that a run keeps."""
        found = self._asdict() | {"round": np.full(len(self.num_active), round_)}
        if isinstance(self.server, Refined):
            found["shift"] = self.server.shift
        if isinstance(self.server, Adjusted):
            found["acceptance"] = self.server.acceptance
        return {name: np.asarray(found[name]) for name in names}


class Drawn(NamedTuple):
    """One draw of every chain, and which chains are finite, ``[num_chains]``."""

    draw: ArrayTree
    finite: np.ndarray


class Rounds:
    """The rounds of one run, for all of its chains together.

    Parameters
    ----------
    links
        To the sites.
    kernel, keys, shapes
        Of the run.
    name
        Of the run: the same for the same call, so that sites know their states again.
    attempt
        Another one in each process of the server.
    may_miss
        Whether a round goes on without sites that do not answer.
    guard
        Checks of single messages.
    answers_may_be_infinite
        Whether what the guard finds is logged and no fault, as for questions about places where a
        log likelihood is minus infinity.
    """

    def __init__(
        self,
        links: Links,
        kernel: FederatedKernel,
        keys: Array,
        shapes: Shapes,
        name: str,
        attempt: int,
        *,
        guard: Guard,
        may_miss: bool = False,
        answers_may_be_infinite: bool = False,
    ) -> None:
        self.guard, self.answers_may_be_infinite = guard, answers_may_be_infinite
        self.links, self.kernel, self.keys, self.shapes = links, kernel, keys, shapes
        self.name, self.attempt, self.may_miss = name, attempt, may_miss
        self.names = list(links.study.sites)
        self.marks: dict[str, list[int]] = {site: [] for site in self.names}
        self._cohort: Any = None  # where it is the same in all rounds
        self.kept: list[int] = []
        self.num_missed = dict.fromkeys(self.names, 0)
        self._warned: set[str] = set()
        self._reached = (-1, 0)  # round and phase of the last request
        self.masked = MaskedSums(links) if links.study.secure else None
        digest = np.frombuffer(bytes.fromhex(name), np.uint8)
        self._run = jnp.asarray(np.tile(digest, (len(keys), 1)))
        # What else sites draw is from their own secrets, or from the keys that `begin` sends.
        self._sends_shared = bool(jax.tree.leaves(shapes.shared)) and not links.study.reproducible
        # Of each phase: what reads code and report of one chain, and both of who says nothing.
        self._readers = [
            ((wire.reader(x.code), wire.reader(x.report)), _zeros((x.code, x.report)))
            for x in shapes.phases
        ]
        self._most_bytes = [
            len(keys) * (2 * PART_BYTES + max_num_bytes(x.code) + max_num_bytes(x.report))
            for x in shapes.phases
        ]
        self._begin = self._beginning()
        links.beginning = lambda site: [self._begin]

    def _tag(self, round_: int, phase: int = -1) -> Tag:
        return Tag(self.name, round_, phase, self.attempt)

    def _beginning(self) -> bytes:
        study = self.links.study
        words, numbers = study.words_of(self.kernel)
        position, _ = to_words(self.shapes.first.position, study.functions)
        words_of_keys = wire.encode(jax.random.key_data(self.keys))
        header = {
            "tag": list(self._tag(-1)),
            "kernel": words,
            "position": position,
            "chains": len(self.keys),
            "generator": str(jax.random.key_impl(self.keys)),
            # Runs with other keys are other questions, so that sites draw independently in them.
            "keys": digest_of(words_of_keys),
        }
        parts = [numbers]
        if study.reproducible:
            parts.append(words_of_keys)
        return Frame("begin", header, pack(*parts)).to_bytes()

    def begin(self) -> None:
        """Tell all sites which run this is, and wait for them."""
        self.links.wait_for_all()
        self._ask_all(self._begin, "ready", self._tag(-1))
        self.links.session = ""  # in which rounds never go back

    def _ask_all(
        self, request: bytes, kind: str, tag: Tag, read: Any = None, most_bytes: int = 0
    ) -> dict[str, Any]:
        read = read or (lambda site, body: body)
        requests = dict.fromkeys(self.names, request)
        return self.links.exchange(requests, kind, tag, read, most_bytes=most_bytes)

    def set_up(self, positions: ArrayTree, init_keys: Array) -> FederatedState:
        """Return the state before the first round, from sums over all sites where it needs some."""
        num = len(self.keys)
        first = Broadcast(jnp.zeros(num, jnp.int32), positions)
        body = pack(*(wire.encode(chain_of(first, c)) for c in range(num)))
        totals = []
        for number, like in enumerate(self.shapes.setup):
            tag = self._tag(0, number)
            if self.masked is not None:
                totals.append(self._masked_setup(self.masked, tag, body))
                continue
            request = Frame("setup", {"tag": list(tag)}, body).to_bytes()

            def read(site: str, data: bytes, like: ArrayTree = like) -> list[ArrayTree]:
                return [_decoded(part, like) for part in unpack(data, num)]

            most = num * (PART_BYTES + max_num_bytes(like))
            answers = self._ask_all(request, "answer", tag, read, most)
            codes = tuple(stacked(answers[site]) for site in self.names)
            self._check_setup(codes, number)
            everyone = _everyone(len(self.names), num)
            totals.append(summed(self.kernel, first, codes, everyone, number=number))
        study = self.links.study
        broadcast, server, memories = first_of_server(
            self.kernel, study, init_keys, positions, tuple(totals)
        )
        sites = len(self.names)
        last = jnp.full((num, sites, 2), -1, jnp.int32)
        at_server = AtServer(memories, last, jnp.zeros((num, sites), bool), self._run)
        return FederatedState(broadcast, server, at_server)

    def _masked_setup(self, sums: MaskedSums, tag: Tag, body: bytes) -> ArrayTree:
        """Return a total that is needed before the first round, of all chains."""
        num, phases = len(self.keys), self.kernel.setup

        def requests(masks: dict[str, Any]) -> dict[str, bytes]:
            header = {"tag": list(tag), "masks": masks}
            return dict.fromkeys(self.names, Frame("setup", header, body).to_bytes())

        like = phases[tag.phase].message_like(self.shapes.first)
        size = num * num_words(self.shapes.setup[tag.phase])
        words = sums.total(tag, (tag.phase, len(phases), True), size, requests).reshape(num, -1)
        _check_counts(words, len(self.names))
        return limbs_of_host(words, like, num_lead=1)

    def mark(self, round_: int, keep: list[int]) -> None:
        """Have the sites keep their states of a round, and of those before the ones in `keep`."""
        self.kept = keep
        for marks in self.marks.values():
            marks[:] = sorted({*marks, round_} & {round_, *keep})

    def start(self, state: FederatedState) -> None:
        """Have the sites make what they keep from the first broadcast."""
        round_ = int(np.asarray(state.broadcast.round)[0])
        num, tag = len(self.keys), self._tag(round_)
        body = pack(*(wire.encode(chain_of(state.broadcast, c)) for c in range(num)))
        request = Frame("start", {"tag": list(tag)}, body).to_bytes()
        self._go(dict.fromkeys(self.names, request), tag)

    def resume(self, state: FederatedState) -> None:
        """Have the sites go back to their states of this round, of this run or the one before."""
        tag = self._tag(int(np.asarray(state.broadcast.round)[0]))
        header = {
            "tag": list(tag),
            "run": bytes(np.asarray(state.clients.run)[0]).hex(),
        }
        requests = {
            site: Frame("resume", header | _verdict(state.clients, i)).to_bytes()
            for i, site in enumerate(self.names)
        }
        self._go(requests, tag)

    def _go(self, requests: dict[str, bytes], tag: Tag) -> None:
        if not jax.tree.leaves(self.shapes.client):
            return  # sites keep nothing
        self.links.beginning = lambda site: [self._begin, requests[site]]
        self.links.exchange(requests, "ready", tag, lambda site, body: None)

    def can_resume(self, round_: int) -> bool:
        """Return whether sites have their states of a round that was not finished.

        They keep the state before their last answer.
        """
        keeps = bool(jax.tree.leaves(self.shapes.client))
        return not keeps or self._reached <= (round_, 0)

    @property
    def can_always_resume(self) -> bool:
        """Whether sites have their states of any round that was not finished."""
        return len(self.shapes.phases) == 1 or not jax.tree.leaves(self.shapes.client)

    def round(self, state: FederatedState, number: int) -> tuple[FederatedState, Figures, Drawn]:
        """Run a round of all chains, and draw once of each."""
        kernel, num_sites = self.kernel, len(self.names)
        # Slots first: the server takes messages in the order of the cohort.
        cohort = self._cohort or jax.tree.map(
            np.asarray, cohorts(kernel, self.keys, number, num_sites)
        )
        if type(kernel.participation) is type(full()):
            self._cohort = cohort  # that of all rounds
        ids, weight, active = cohort.ids, cohort.weight, cohort.active
        broadcast, server = state.broadcast, state.server
        memories = list(state.clients.memories)
        last, counted = np.array(state.clients.last), np.array(state.clients.counted)
        bits = np.zeros((2, len(self.keys)))
        for phase in range(len(self.shapes.phases)):
            self._reached = number, phase
            everyone = kernel.participation.cohort_size is None
            places = [
                _Place(active[i], weight[i]) if everyone else _Place.of(i, ids, weight, active)
                for i in range(num_sites)
            ]
            asked = {self.names[i]: place for i, place in enumerate(places) if place.on.any()}
            at_server = AtServer((memories[phase],), last, counted, self._run)
            hear = self._hear if self.masked is None else partial(self._hear_sum, self.masked)
            now = FederatedState(broadcast, server, at_server)
            heard = hear(asked, now, cohort._replace(active=active), number, phase)
            memories[phase], active, bits = heard.memories, heard.active, bits + heard.bits
            broadcast, server = heard.moved.broadcast, heard.moved.server
            for site in heard.sites:
                self.marks[site] = []
                i = self.names.index(site)
                last[:, i] = (number, phase)
                counted[:, i] = (active & (ids == i)).any(axis=0)
        figures = Figures(
            active.sum(axis=0),
            bits[0],
            bits[1],
            heard.gradient_norm,
            heard.num_lost,
            (cohort.active & ~active).sum(axis=0),
            heard.moved.info,
        )
        drawn = Drawn(heard.moved.draw, np.asarray(heard.moved.finite))
        clients = AtServer(tuple(memories), last, counted, self._run)
        return FederatedState(broadcast, server, clients), figures, drawn

    def _hear(
        self,
        asked: dict[str, "_Place"],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_Heard":
        """Return what the server has after the messages of a phase."""
        exchange, ids, at_server = self.shapes.phases[phase], cohort.ids, state.clients
        active: Any = np.asarray(cohort.active)
        tag = self._tag(number, phase)
        requests = self._requests(tag, asked, state.broadcast, at_server)
        answers = self.links.exchange(
            requests,
            "answer",
            tag,
            lambda site, data: _answers(data, asked[site].on, *self._readers[phase]),
            most_bytes=self._most_bytes[phase],
            may_miss=self.may_miss,
        )
        heard = set(answers)
        for site in requests.keys() - heard:
            self._miss(site, self.links.problems.get(site))
            active = active & (ids != self.names.index(site))
        if len(answers) < len(self.names):
            silent = [self._readers[phase][1]] * len(self.keys)
            answers |= {site: silent for site in self.names if site not in answers}
        both = [stacked(answers[site]) for site in self.names]
        codes, told = [code for code, _ in both], [report for _, report in both]
        sent = np.stack(
            [asked[s].on if s in heard else np.zeros(len(self.keys), bool) for s in self.names]
        )
        for fault in self._faults(codes, sent, number, phase):
            self._miss(self.names[fault.site], fault.text)
            active = active & ~((ids == fault.site) & fault.chains)
            codes[fault.site] = _without(fault.chains, codes[fault.site])
        moved, (memories, counted) = taken_in(
            self.kernel,
            self.keys,
            state.broadcast,
            state.server,
            at_server.memories[0],
            tuple(codes),
            cohort._replace(active=active),
            number=phase,
            waits=self.shapes.waits and phase == len(self.shapes.phases) - 1,
        )
        chains = np.arange(len(self.keys))
        report = jax.tree.map(lambda *leaves: np.stack(leaves)[ids, chains], *told)
        below = report.bits_down
        if trees.is_empty(below):
            below = trees.num_bits(exchange.broadcast)
        bits = np.stack([np.where(active, sent, 0).sum(0) for sent in (report.bits, below)])
        taken = np.asarray(counted)
        square = np.where(taken, np.asarray(report.gradient_norm) ** 2, 0).sum(axis=0)
        norm = np.sqrt(square / np.maximum(taken.sum(axis=0), 1))
        lost = np.zeros(len(self.keys), np.int64)
        if not trees.is_empty(report.usable):
            lost = (taken & ~report.usable).sum(axis=0)
        return _Heard(moved, memories, taken, bits, norm, lost, heard)

    def _check_setup(self, codes: Sequence[ArrayTree], number: int) -> None:
        """Raise if a site's term of a sum before the first round cannot be added."""
        sent = np.ones((len(self.names), len(self.keys)), bool)
        for fault in self._faults(codes, sent, 0, number):
            raise SiteError(f"{self.names[fault.site]}, before the first round: {fault.text}")

    def _faults(
        self, codes: Sequence[ArrayTree], sent: np.ndarray, number: int, phase: int
    ) -> list[Fault]:
        faults = self.guard.check(codes, sent, number, phase)
        if not self.answers_may_be_infinite:
            return faults
        for fault in faults:
            LOG.info("%s: %s", self.names[fault.site], fault.text)
        return count_faults(codes, sent)

    def _miss(self, site: str, problem: str | None) -> None:
        """Count a site that is left out of a round; raise if none may be.

        A site that is not connected has no `problem`.
        """
        if problem is not None and not self.may_miss:
            raise SiteError(f"{site}: {problem}")
        self.num_missed[site] += 1
        if problem is not None and site not in self._warned:
            self._warned.add(site)
            warnings.warn(
                f"{site} is left out, now and wherever this happens again: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _hear_sum(
        self,
        sums: MaskedSums,
        asked: dict[str, "_Place"],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_Heard":
        """Return what the server has of a phase under masks: a total, and nothing of any site."""
        exchange, num = self.shapes.phases[phase], len(self.keys)
        tag, memories = self._tag(number, phase), state.clients.memories[0]
        requests = partial(self._requests, tag, asked, state.broadcast, state.clients)
        below = jax.tree.leaves(exchange.report.bits_down)
        num_numbers = num_words(exchange.code)
        size = num * (num_numbers + len(below))
        total = sums.total(tag, (phase, len(self.shapes.phases), False), size, requests)
        words, down = np.split(total.reshape(num, -1), [num_numbers], axis=1)
        _check_counts(words, len(self.names))
        message = self.kernel.phases[phase].message_like(exchange.broadcast)
        received = Received(
            limbs_of_host(words, message, num_lead=1),
            (),
            memories,
            memories,
            jnp.zeros(num, jnp.int32),
        )
        found = moved(self.kernel, self.keys, state.broadcast, state.server, received, number=phase)
        up = np.full(num, float(len(asked) * WORD_BITS * num_numbers))
        sent = down[:, 0] if below else len(asked) * trees.num_bits(exchange.broadcast)
        bits = np.stack([up, np.broadcast_to(sent, num)])
        lost = words[:, -1].astype(np.int64)
        unknown = np.full(num, np.nan)
        active = np.asarray(cohort.active)
        return _Heard(found, memories, active, bits, unknown, lost, asked.keys())

    def _requests(
        self,
        tag: Tag,
        asked: dict[str, "_Place"],
        broadcast: Broadcast,
        at_server: AtServer,
        masks: dict[str, Any] | None = None,
    ) -> dict[str, bytes]:
        bodies: dict[bytes, tuple[bytes, int]] = {}  # with checksums, by the chains of a site
        before, request = None, b""  # most sites get the same message
        shared: Any = np.asarray(shared_words(self.keys, tag.round)) if self._sends_shared else None
        requests = {}
        for site, place in asked.items():
            header = {
                "tag": list(tag),
                "weights": place.weight.tolist(),
                "active": place.on.tolist(),
                "marks": self.marks[site],
                "keep": self.kept,
                **_verdict(at_server, self.names.index(site)),
            }
            if masks is not None:
                header["masks"] = masks
            if header == before:
                requests[site] = request
                continue
            chains = place.on.tobytes()
            if chains not in bodies:
                on = np.flatnonzero(place.on).tolist()
                parts = [wire.encode(chain_of(broadcast, c)) for c in on]
                if shared is not None:
                    parts.append(wire.encode(shared[on]))
                body = pack(*parts)
                bodies[chains] = body, checksum(body)
            request = Frame("step", header, bodies[chains][0]).to_bytes(bodies[chains][1])
            requests[site], before = request, header
        return requests


class _Heard(NamedTuple):
    """What the server has after the messages of a phase, of each chain."""

    moved: Moved
    memories: ArrayTree
    active: np.ndarray  # [cohort_size, num_chains] bool, whose messages were taken
    bits: np.ndarray  # [2, num_chains], up and down
    gradient_norm: np.ndarray  # [num_chains]
    num_lost: np.ndarray  # [num_chains]
    sites: Collection[str]  # that answered


class _Place(NamedTuple):
    """In which chains a site is asked, and with which weights."""

    on: np.ndarray  # [num_chains] bool
    weight: np.ndarray  # [num_chains]

    @classmethod
    def of(cls, index: int, ids: np.ndarray, weight: np.ndarray, active: np.ndarray) -> "_Place":
        here = (ids == index) & active
        slot = here.argmax(axis=0)  # a client that a cohort holds twice answers once
        return cls(here.any(axis=0), weight[slot, np.arange(ids.shape[1])])


def _check_counts(words: np.ndarray, num_sites: int) -> None:
    """Raise unless the counts of a secure sum, which end its words, can be those of all sites."""
    if (words[:, -2:] > num_sites).any():
        raise SiteError(
            "The masks of this sum do not cancel: sites were not asked the same, or one of them "
            "answered something else."
        )


def _everyone(num_sites: int, num_chains: int) -> Cohort:
    ids = np.broadcast_to(np.arange(num_sites, dtype=np.int32)[:, None], (num_sites, num_chains))
    weight = jnp.ones(ids.shape, jnp.result_type(float))
    return Cohort(jnp.asarray(ids), weight, jnp.ones(ids.shape, bool))


def _verdict(at_server: AtServer, index: int) -> dict[str, Any]:
    """Return what a site is told of its last answer."""
    last = np.asarray(at_server.last)[0, index].tolist()
    counted = np.asarray(at_server.counted)[:, index].tolist()
    return {"last": None if last[0] < 0 else last, "counted": counted}


def _answers(data: bytes, on: np.ndarray, readers: Any, silent: ArrayTree) -> list[ArrayTree]:
    """Return code and report of every chain, zeros where the site takes no part."""
    num = int(on.sum())
    parts = unpack(memoryview(data), 2 * num)
    try:
        code, report = (
            [read(part) for part in some]
            for read, some in zip(readers, (parts[:num], parts[num:]), strict=True)
        )
    except ValueError as error:
        raise FrameError(str(error)) from None
    heard = zip(code, report, strict=True)
    return [next(heard) if here else silent for here in on]


def _decoded(data: bytes, like: ArrayTree) -> ArrayTree:
    try:
        return wire.decode(data, like)
    except ValueError as error:
        raise FrameError(str(error)) from None


def _without(chains: np.ndarray, code: ArrayTree) -> ArrayTree:
    """Return a code with zeros in some chains."""

    def zeroed(leaf: Any) -> np.ndarray:
        return np.where(chains.reshape(-1, *(1,) * (leaf.ndim - 1)), np.zeros((), leaf.dtype), leaf)

    return jax.tree.map(zeroed, code)


def _zeros(like: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)
