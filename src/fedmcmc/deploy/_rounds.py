"""Rounds over sites: the server's computations and the messages of each phase."""

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
    ApproximationReport,
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    MetropolisReport,
)
from fedmcmc.compression import WORD_BITS, limbs_of_host
from fedmcmc.deploy._frames import (
    PART_BYTES,
    Frame,
    FrameError,
    Tag,
    checksum,
    decode,
    digest_of,
    pack,
    unpack,
)
from fedmcmc.deploy._guard import Fault, Guard, count_faults
from fedmcmc.deploy._links import LOG, Links, SiteError
from fedmcmc.deploy._masked import MaskedSums
from fedmcmc.deploy._masks import num_words
from fedmcmc.deploy._programs import (
    Stepped,
    draw_cohort,
    init_server,
    receive_codes,
    shared_words,
    stack_chains,
    step_server,
    sum_setup,
    take_chain,
)
from fedmcmc.deploy._shapes import Shapes, max_num_bytes
from fedmcmc.deploy._words import to_words
from fedmcmc.participation import full
from fedmcmc.pytrees import trees
from fedmcmc.rounds import Received


class AtServer(NamedTuple):
    """The server's record of its sites, in place of the clients' states.

    Attributes
    ----------
    memories
        Copies of the clients' memories if decoding needs them, one entry per phase, leaves
        ``[num_chains, num_clients, ...]``.
    last
        ``[num_chains, num_clients, 2]`` int32, round and phase of each site's last accepted answer,
        -1 before the first.
    counted
        ``[num_chains, num_clients]`` bool, true in the chains that counted this answer.
    run
        ``[num_chains, 32]`` uint8, name of the run under which sites store their states.
    """

    memories: tuple[ArrayTree, ...]
    last: ArrayTree
    counted: ArrayTree
    run: ArrayTree


class RoundFigures(NamedTuple):
    """Figures of a round, ``[num_chains]`` each, with the names of `RoundInfo`."""

    num_active: np.ndarray
    bits_up: np.ndarray
    bits_down: np.ndarray
    gradient_norm: np.ndarray
    num_lost: np.ndarray
    num_excluded: np.ndarray
    server: ArrayTree

    def select(self, names: Any, round_: int) -> dict[str, np.ndarray]:
        """Return the figures with these names."""
        figures = self._asdict() | {"round": np.full(len(self.num_active), round_)}
        if isinstance(self.server, ApproximationReport):
            figures["shift"] = self.server.shift
        if isinstance(self.server, MetropolisReport):
            figures["acceptance"] = self.server.acceptance
        return {name: np.asarray(figures[name]) for name in names}


class RoundDraw(NamedTuple):
    """One draw of every chain, and flags ``[num_chains]`` of finite chains."""

    draw: ArrayTree
    finite: np.ndarray


class Rounds:
    """The rounds of one run, for all of its chains together.

    Equal calls have the same `name`, so that sites find their states again; `attempt` differs
    between processes of the server. With `may_miss` a round continues without sites that do not
    answer. With `answers_may_be_infinite` faults that the guard reports are only logged: questions
    need this at points where a log likelihood is minus infinity.
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
        self._cohort: Any = None  # set if it is the same in all rounds
        self.rounds_to_keep: list[int] = []
        self.num_missed = dict.fromkeys(self.names, 0)
        self._warned: set[str] = set()
        self._last_request = (-1, 0)  # round and phase
        self.masked = MaskedSums(links) if links.study.secure else None
        digest = np.frombuffer(bytes.fromhex(name), np.uint8)
        self._run = jnp.asarray(np.tile(digest, (len(keys), 1)))
        # Sites draw all other numbers from their own secrets, or from the keys that `begin` sends.
        self._sends_shared = bool(jax.tree.leaves(shapes.shared)) and not links.study.reproducible
        # One entry per phase: decoders of code and report of a chain, and zeros in place of both.
        self._readers = [
            ((wire.make_decoder(x.code), wire.make_decoder(x.report)), _zeros((x.code, x.report)))
            for x in shapes.phases
        ]
        self._max_bytes = [
            len(keys) * (2 * PART_BYTES + max_num_bytes(x.code) + max_num_bytes(x.report))
            for x in shapes.phases
        ]
        self._begin = self._make_begin()
        links.beginning = lambda site: [self._begin]

    def _tag(self, round_: int, phase: int = -1) -> Tag:
        return Tag(self.name, round_, phase, self.attempt)

    def _make_begin(self) -> bytes:
        """Return the message that starts the run at a site."""
        study = self.links.study
        words, numbers = study.words_of(self.kernel)
        position, _ = to_words(self.shapes.setup_broadcast.position, study.functions)
        words_of_keys = wire.encode(jax.random.key_data(self.keys))
        header = {
            "tag": list(self._tag(-1)),
            "kernel": words,
            "position": position,
            "chains": len(self.keys),
            "generator": str(jax.random.key_impl(self.keys)),
            # Sites derive their keys from this digest too, so runs with other keys are independent.
            "keys": digest_of(words_of_keys),
        }
        parts = [numbers]
        if study.reproducible:
            parts.append(words_of_keys)
        return Frame("begin", header, pack(*parts)).to_bytes()

    def begin(self) -> None:
        """Wait for all sites and start the run at each."""
        self.links.wait_for_all()
        requests = dict.fromkeys(self.names, self._begin)
        self.links.exchange(requests, "ready", self._tag(-1), lambda site, body: body)
        self.links.session = ""  # rounds never go back within a session, so each run needs its own

    def set_up(self, positions: ArrayTree, init_keys: Array) -> FederatedState:
        """Return the state before the first round; it may need sums over all sites."""
        num = len(self.keys)
        broadcast = Broadcast(jnp.zeros(num, jnp.int32), positions)
        body = pack(*(wire.encode(take_chain(broadcast, c)) for c in range(num)))
        totals = []
        for number, like in enumerate(self.shapes.setup):
            tag = self._tag(0, number)
            if self.masked is not None:
                totals.append(self._masked_setup(self.masked, tag, body))
                continue
            request = Frame("setup", {"tag": list(tag)}, body).to_bytes()

            def read(site: str, data: bytes, like: ArrayTree = like) -> list[ArrayTree]:
                return [decode(part, like) for part in unpack(data, num)]

            max_bytes = num * (PART_BYTES + max_num_bytes(like))
            requests = dict.fromkeys(self.names, request)
            answers = self.links.exchange(requests, "answer", tag, read, most_bytes=max_bytes)
            codes = tuple(stack_chains(answers[site]) for site in self.names)
            self._check_setup(codes, number)
            cohort = _full_cohort(len(self.names), num)
            totals.append(sum_setup(self.kernel, broadcast, codes, cohort, number=number))
        study = self.links.study
        broadcast, server, memories = init_server(
            self.kernel, study, init_keys, positions, tuple(totals)
        )
        num_sites = len(self.names)
        last_answers = jnp.full((num, num_sites, 2), -1, jnp.int32)
        counted = jnp.zeros((num, num_sites), bool)
        return FederatedState(
            broadcast, server, AtServer(memories, last_answers, counted, self._run)
        )

    def _masked_setup(self, sums: MaskedSums, tag: Tag, body: bytes) -> ArrayTree:
        """Return a masked total of all chains before the first round."""
        num, phases = len(self.keys), self.kernel.setup

        def requests(masks: dict[str, Any]) -> dict[str, bytes]:
            header = {"tag": list(tag), "masks": masks}
            return dict.fromkeys(self.names, Frame("setup", header, body).to_bytes())

        like = phases[tag.phase].message_like(self.shapes.setup_broadcast)
        size = num * num_words(self.shapes.setup[tag.phase])
        words = sums.total(tag, (tag.phase, len(phases), True), size, requests).reshape(num, -1)
        _check_counts(words, len(self.names))
        return limbs_of_host(words, like, num_lead=1)

    def mark(self, round_: int, keep: list[int]) -> None:
        """Request that sites store their states of a round, and keep stored states of `keep`."""
        self.rounds_to_keep = keep
        for marks in self.marks.values():
            marks[:] = sorted({*marks, round_} & {round_, *keep})

    def start(self, state: FederatedState) -> None:
        """Let the sites compute their first states from the first broadcast."""
        round_ = int(np.asarray(state.broadcast.round)[0])
        num, tag = len(self.keys), self._tag(round_)
        body = pack(*(wire.encode(take_chain(state.broadcast, c)) for c in range(num)))
        request = Frame("start", {"tag": list(tag)}, body).to_bytes()
        self._place_sites(dict.fromkeys(self.names, request), tag)

    def resume(self, state: FederatedState) -> None:
        """Let the sites return to their states of this round, from this run or the previous one."""
        tag = self._tag(int(np.asarray(state.broadcast.round)[0]))
        header = {
            "tag": list(tag),
            "run": bytes(np.asarray(state.clients.run)[0]).hex(),
        }
        requests = {
            site: Frame("resume", header | _verdict(state.clients, i)).to_bytes()
            for i, site in enumerate(self.names)
        }
        self._place_sites(requests, tag)

    def _place_sites(self, requests: dict[str, bytes], tag: Tag) -> None:
        if not jax.tree.leaves(self.shapes.client):
            return  # sites have no state
        self.links.beginning = lambda site: [self._begin, requests[site]]
        self.links.exchange(requests, "ready", tag, lambda site, body: None)

    def can_resume(self, round_: int) -> bool:
        """Return true if sites have their states of a round that did not finish.

        A site stores the state before its last answer.
        """
        has_state = bool(jax.tree.leaves(self.shapes.client))
        return not has_state or self._last_request <= (round_, 0)

    @property
    def can_always_resume(self) -> bool:
        """If true, sites have their states of every round that did not finish."""
        return len(self.shapes.phases) == 1 or not jax.tree.leaves(self.shapes.client)

    def round(
        self, state: FederatedState, number: int
    ) -> tuple[FederatedState, RoundFigures, RoundDraw]:
        """Run a round of all chains; return the new state, its figures and one draw per chain."""
        kernel, num_sites = self.kernel, len(self.names)
        # The server adds messages in the order of the cohort.
        cohort = self._cohort or jax.tree.map(
            np.asarray, draw_cohort(kernel, self.keys, number, num_sites)
        )
        if type(kernel.participation) is type(full()):
            self._cohort = cohort
        ids, weight, active = cohort.ids, cohort.weight, cohort.active
        broadcast, server = state.broadcast, state.server
        memories = list(state.clients.memories)
        last_answers, counted = np.array(state.clients.last), np.array(state.clients.counted)
        bits = np.zeros((2, len(self.keys)))
        for phase in range(len(self.shapes.phases)):
            self._last_request = number, phase
            is_full = kernel.participation.cohort_size is None
            shares = [
                _SiteShare(active[i], weight[i])
                if is_full
                else _SiteShare.of_site(i, ids, weight, active)
                for i in range(num_sites)
            ]
            participants = {
                self.names[i]: share for i, share in enumerate(shares) if share.on.any()
            }
            at_server = AtServer((memories[phase],), last_answers, counted, self._run)
            run_phase = self._run_phase
            if self.masked is not None:
                run_phase = partial(self._run_masked_phase, self.masked)
            phase_state = FederatedState(broadcast, server, at_server)
            result = run_phase(
                participants, phase_state, cohort._replace(active=active), number, phase
            )
            memories[phase], active, bits = result.memories, result.active, bits + result.bits
            broadcast, server = result.stepped.broadcast, result.stepped.server
            for site in result.sites:
                self.marks[site] = []
                i = self.names.index(site)
                last_answers[:, i] = (number, phase)
                counted[:, i] = (active & (ids == i)).any(axis=0)
        figures = RoundFigures(
            active.sum(axis=0),
            bits[0],
            bits[1],
            result.gradient_norm,
            result.num_lost,
            (cohort.active & ~active).sum(axis=0),
            result.stepped.info,
        )
        round_draw = RoundDraw(result.stepped.draw, np.asarray(result.stepped.finite))
        clients = AtServer(tuple(memories), last_answers, counted, self._run)
        return FederatedState(broadcast, server, clients), figures, round_draw

    def _run_phase(
        self,
        participants: dict[str, "_SiteShare"],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_PhaseResult":
        """Exchange the messages of a phase and run the server's step."""
        exchange, ids, at_server = self.shapes.phases[phase], cohort.ids, state.clients
        active: Any = np.asarray(cohort.active)
        tag = self._tag(number, phase)
        requests = self._requests(tag, participants, state.broadcast, at_server)
        answers = self.links.exchange(
            requests,
            "answer",
            tag,
            lambda site, data: _read_answer(data, participants[site].on, *self._readers[phase]),
            most_bytes=self._max_bytes[phase],
            may_miss=self.may_miss,
        )
        answered = set(answers)
        for site in requests.keys() - answered:
            self._miss(site, self.links.problems.get(site))
            active = active & (ids != self.names.index(site))
        if len(answers) < len(self.names):
            zeros = [self._readers[phase][1]] * len(self.keys)
            answers |= {site: zeros for site in self.names if site not in answers}
        pairs = [stack_chains(answers[site]) for site in self.names]
        codes, reports = [code for code, _ in pairs], [report for _, report in pairs]
        no_chains = np.zeros(len(self.keys), bool)
        sent = np.stack([participants[s].on if s in answered else no_chains for s in self.names])
        for fault in self._faults(codes, sent, number, phase):
            self._miss(self.names[fault.site], fault.text)
            active = active & ~((ids == fault.site) & fault.chains)
            codes[fault.site] = _zero_chains(fault.chains, codes[fault.site])
        stepped, memories, is_added = receive_codes(
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
        report = jax.tree.map(lambda *leaves: np.stack(leaves)[ids, chains], *reports)
        bits_down = report.bits_down
        if trees.is_empty(bits_down):
            bits_down = trees.num_bits(exchange.broadcast)
        bits = np.stack([np.where(active, num, 0).sum(0) for num in (report.bits, bits_down)])
        added = np.asarray(is_added)
        square = np.where(added, np.asarray(report.gradient_norm) ** 2, 0).sum(axis=0)
        norm = np.sqrt(square / np.maximum(added.sum(axis=0), 1))
        num_lost = np.zeros(len(self.keys), np.int64)
        if not trees.is_empty(report.usable):
            num_lost = (added & ~report.usable).sum(axis=0)
        return _PhaseResult(stepped, memories, added, bits, norm, num_lost, answered)

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
        """Count a site that is left out of a round; raise if no site may be missing.

        The `problem` of a site that is not connected is ``None``.
        """
        if problem is not None and not self.may_miss:
            raise SiteError(f"{site}: {problem}")
        self.num_missed[site] += 1
        if problem is not None and site not in self._warned:
            self._warned.add(site)
            warnings.warn(
                f"{site} is left out of this round, and of later rounds in which it has a problem "
                f"(without another warning): {problem}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run_masked_phase(
        self,
        sums: MaskedSums,
        participants: dict[str, "_SiteShare"],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_PhaseResult":
        """Run a phase under masks; the server can read only the total."""
        exchange, num = self.shapes.phases[phase], len(self.keys)
        tag, memories = self._tag(number, phase), state.clients.memories[0]
        requests = partial(self._requests, tag, participants, state.broadcast, state.clients)
        num_reported = len(jax.tree.leaves(exchange.report.bits_down))
        num_numbers = num_words(exchange.code)
        size = num * (num_numbers + num_reported)
        total = sums.total(tag, (phase, len(self.shapes.phases), False), size, requests)
        words, reported = np.split(total.reshape(num, -1), [num_numbers], axis=1)
        _check_counts(words, len(self.names))
        message = self.kernel.phases[phase].message_like(exchange.broadcast)
        received = Received(
            limbs_of_host(words, message, num_lead=1),
            (),
            memories,
            memories,
            jnp.zeros(num, jnp.int32),
        )
        stepped = step_server(
            self.kernel, self.keys, state.broadcast, state.server, received, number=phase
        )
        num_sites = len(participants)
        bits_up = np.full(num, float(num_sites * WORD_BITS * num_numbers))
        num_sent = num_sites * trees.num_bits(exchange.broadcast)
        bits_down = reported[:, 0] if num_reported else num_sent
        bits = np.stack([bits_up, np.broadcast_to(bits_down, num)])
        num_lost = words[:, -1].astype(np.int64)
        norm = np.full(num, np.nan)  # unknown
        active = np.asarray(cohort.active)
        return _PhaseResult(stepped, memories, active, bits, norm, num_lost, participants.keys())

    def _requests(
        self,
        tag: Tag,
        participants: dict[str, "_SiteShare"],
        broadcast: Broadcast,
        at_server: AtServer,
        masks: dict[str, Any] | None = None,
    ) -> dict[str, bytes]:
        """Return the message of a step for each participant."""
        bodies: dict[bytes, tuple[bytes, int]] = {}  # body and checksum by the chains of a site
        previous_header, request = None, b""  # most sites receive the same message
        shared: Any = np.asarray(shared_words(self.keys, tag.round)) if self._sends_shared else None
        requests = {}
        for site, share in participants.items():
            header = {
                "tag": list(tag),
                "weights": share.weight.tolist(),
                "active": share.on.tolist(),
                "marks": self.marks[site],
                "keep": self.rounds_to_keep,
                **_verdict(at_server, self.names.index(site)),
            }
            if masks is not None:
                header["masks"] = masks
            if header == previous_header:
                requests[site] = request
                continue
            chains = share.on.tobytes()
            if chains not in bodies:
                on = np.flatnonzero(share.on).tolist()
                parts = [wire.encode(take_chain(broadcast, c)) for c in on]
                if shared is not None:
                    parts.append(wire.encode(shared[on]))
                body = pack(*parts)
                bodies[chains] = body, checksum(body)
            request = Frame("step", header, bodies[chains][0]).to_bytes(bodies[chains][1])
            requests[site], previous_header = request, header
        return requests


class _PhaseResult(NamedTuple):
    """Result of a phase for all chains."""

    stepped: Stepped
    memories: ArrayTree
    active: np.ndarray  # [cohort_size, num_chains] bool, messages in the sum
    bits: np.ndarray  # [2, num_chains], up and down
    gradient_norm: np.ndarray  # [num_chains]
    num_lost: np.ndarray  # [num_chains]
    sites: Collection[str]  # sites that answered


class _SiteShare(NamedTuple):
    """A site's chains in a round, and its weights in them."""

    on: np.ndarray  # [num_chains] bool
    weight: np.ndarray  # [num_chains]

    @classmethod
    def of_site(
        cls, index: int, ids: np.ndarray, weight: np.ndarray, active: np.ndarray
    ) -> "_SiteShare":
        is_site = (ids == index) & active
        slot = is_site.argmax(axis=0)  # a client that a cohort holds twice answers once
        return cls(is_site.any(axis=0), weight[slot, np.arange(ids.shape[1])])


def _check_counts(words: np.ndarray, num_sites: int) -> None:
    """Raise if a count at the end of a secure sum's words exceeds the number of sites."""
    if (words[:, -2:] > num_sites).any():
        raise SiteError(
            "The masks of this sum do not cancel: the sites received different requests, or a site "
            "answered another one."
        )


def _full_cohort(num_sites: int, num_chains: int) -> Cohort:
    ids = np.broadcast_to(np.arange(num_sites, dtype=np.int32)[:, None], (num_sites, num_chains))
    weight = jnp.ones(ids.shape, jnp.result_type(float))
    return Cohort(jnp.asarray(ids), weight, jnp.ones(ids.shape, bool))


def _verdict(at_server: AtServer, index: int) -> dict[str, Any]:
    """Return the server's verdict on a site's last answer, for the header of a message."""
    last_answer = np.asarray(at_server.last)[0, index].tolist()
    counted = np.asarray(at_server.counted)[:, index].tolist()
    return {"last": None if last_answer[0] < 0 else last_answer, "counted": counted}


def _read_answer(data: bytes, on: np.ndarray, readers: Any, zeros: ArrayTree) -> list[ArrayTree]:
    """Return code and report of every chain, zeros in chains without the site."""
    num = int(on.sum())
    parts = unpack(memoryview(data), 2 * num)
    try:
        read_code, read_report = readers
        codes = [read_code(part) for part in parts[:num]]
        reports = [read_report(part) for part in parts[num:]]
    except ValueError as error:
        raise FrameError(str(error)) from None
    pairs = zip(codes, reports, strict=True)
    return [next(pairs) if is_on else zeros for is_on in on]


def _zero_chains(chains: np.ndarray, code: ArrayTree) -> ArrayTree:
    """Return a code with zeros in these chains."""

    def zero(leaf: Any) -> np.ndarray:
        return np.where(chains.reshape(-1, *(1,) * (leaf.ndim - 1)), np.zeros((), leaf.dtype), leaf)

    return jax.tree.map(zero, code)


def _zeros(like: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)
