"""Rounds over sites: the computations of the server, and exchanges of messages."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.compression import WORD_BITS, limbs_of_host
from fedmcmc.deploy._frames import Tag
from fedmcmc.deploy._guard import Fault, Guard, count_faults
from fedmcmc.deploy._links import LOG, Links, SiteError
from fedmcmc.deploy._masked import MaskedSums
from fedmcmc.deploy._masks import num_words
from fedmcmc.deploy._messages import AtServer, RunMessages, SiteShare
from fedmcmc.deploy._programs import (
    Stepped,
    draw_cohort,
    init_server,
    receive_codes,
    stack_chains,
    step_server,
    sum_setup,
)
from fedmcmc.deploy._shapes import RunShapes
from fedmcmc.participation import full
from fedmcmc.pytrees import trees
from fedmcmc.rounds import Received
from fedmcmc.types import (
    ApproximationReport,
    ArrayTree,
    Broadcast,
    Cohort,
    FederatedKernel,
    FederatedState,
    FederationArgument,
    MetropolisReport,
)


class RoundFigures(NamedTuple):
    """Figures of a round, ``[num_chains]`` each, with the names of `RoundInfo`."""

    num_active: np.ndarray
    bits_up: np.ndarray
    bits_down: np.ndarray
    gradient_norm: np.ndarray
    num_lost: np.ndarray
    num_excluded: np.ndarray
    server: ArrayTree

    def select(self, names: Iterable[str], round_: int) -> dict[str, np.ndarray]:
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
    """Rounds of one run, for all of its chains together.

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
        shapes: RunShapes,
        name: str,
        attempt: int,
        *,
        guard: Guard,
        may_miss: bool = False,
        answers_may_be_infinite: bool = False,
    ) -> None:
        self.guard, self.answers_may_be_infinite = guard, answers_may_be_infinite
        self.links, self.kernel, self.keys, self.shapes = links, kernel, keys, shapes
        self.names, self.may_miss = list(links.study.sites), may_miss
        self.messages = RunMessages(links.study, kernel, keys, shapes, name, attempt)
        self._cohort: Any = None  # set if it is the same in all rounds
        self.num_missed = dict.fromkeys(self.names, 0)
        self._warned: set[str] = set()
        self._last_request = (-1, 0)  # round and phase
        self.masked = MaskedSums(links) if links.study.secure else None
        digest = np.frombuffer(bytes.fromhex(name), np.uint8)
        self._run = jnp.asarray(np.tile(digest, (len(keys), 1)))
        links.beginning = lambda site: [self.messages.begin]

    def begin(self) -> None:
        """Wait for all sites and start the run at each."""
        self.links.wait_for_all()
        requests = dict.fromkeys(self.names, self.messages.begin)
        self.links.exchange(requests, "ready", self.messages.tag(-1), lambda site, body: body)
        self.links.session = ""  # rounds never go back within a session, so each run needs its own

    def set_up(self, positions: ArrayTree, init_keys: Array) -> FederatedState:
        """Return the state before the first round; it may need sums over all sites."""
        num, num_sites = len(self.keys), len(self.names)
        broadcast = Broadcast(jnp.zeros(num, jnp.int32), positions)
        totals = []
        for number in range(len(self.shapes.setup)):
            tag = self.messages.tag(0, number)
            if self.masked is not None:
                totals.append(self._masked_setup(self.masked, tag, broadcast))
                continue

            def read(site: str, data: bytes, number: int = number) -> list[ArrayTree]:
                return self.messages.decode_setup(data, number)

            requests = self.messages.encode_setup(tag, broadcast)
            max_bytes = self.messages.max_setup_bytes[number]
            answers = self.links.exchange(requests, "answer", tag, read, max_bytes=max_bytes)
            codes = tuple(stack_chains(answers[site]) for site in self.names)
            self._check_setup(codes, number)
            cohort = _full_cohort(num_sites, num)
            totals.append(sum_setup(self.kernel, broadcast, codes, cohort, number=number))
        federation = FederationArgument.of(self.links.study.federation)
        broadcast, server, memories = init_server(
            self.kernel, federation, init_keys, positions, tuple(totals)
        )
        last_answers = jnp.full((num, num_sites, 2), -1, jnp.int32)
        counted = jnp.zeros((num, num_sites), bool)
        return FederatedState(
            broadcast, server, AtServer(memories, last_answers, counted, self._run)
        )

    def _masked_setup(self, sums: MaskedSums, tag: Tag, broadcast: Broadcast) -> ArrayTree:
        """Return a masked total of all chains before the first round."""
        num, phases = len(self.keys), self.kernel.setup
        requests = partial(self.messages.encode_setup, tag, broadcast)
        like = phases[tag.phase].message_like(self.shapes.setup_broadcast)
        size = num * num_words(self.shapes.setup[tag.phase])
        words = sums.total(tag, (tag.phase, len(phases), True), size, requests).reshape(num, -1)
        _check_counts(words, len(self.names))
        return limbs_of_host(words, like, num_lead=1)

    def start(self, state: FederatedState) -> None:
        """Let the sites compute their first states from the first broadcast."""
        tag = self.messages.tag(int(np.asarray(state.broadcast.round)[0]))
        self._place_sites(self.messages.encode_start(tag, state.broadcast), tag)

    def resume(self, state: FederatedState) -> None:
        """Let the sites return to their states of this round, from this run or the previous one."""
        tag = self.messages.tag(int(np.asarray(state.broadcast.round)[0]))
        self._place_sites(self.messages.encode_resume(tag, state.clients), tag)

    def _place_sites(self, requests: dict[str, bytes], tag: Tag) -> None:
        if not jax.tree.leaves(self.shapes.client):
            return  # sites have no state
        self.links.beginning = lambda site: [self.messages.begin, requests[site]]
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
                SiteShare(active[i], weight[i])
                if is_full
                else SiteShare.of_site(i, ids, weight, active)
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
                self.messages.clear_marks(site)
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
        participants: dict[str, SiteShare],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_PhaseResult":
        """Exchange the messages of a phase and run the server's step."""
        phase_shapes, ids, at_server = self.shapes.phases[phase], cohort.ids, state.clients
        active: Any = np.asarray(cohort.active)
        tag = self.messages.tag(number, phase)
        requests = self.messages.encode_step(tag, participants, state.broadcast, at_server)
        answers = self.links.exchange(
            requests,
            "answer",
            tag,
            lambda site, data: self.messages.decode_answer(data, participants[site].on, phase),
            max_bytes=self.messages.max_bytes[phase],
            may_miss=self.may_miss,
        )
        answered = set(answers)
        for site in requests.keys() - answered:
            self._miss(site, self.links.problems.get(site))
            active = active & (ids != self.names.index(site))
        if len(answers) < len(self.names):
            zeros = [self.messages.zeros[phase]] * len(self.keys)
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
            bits_down = trees.num_bits(phase_shapes.broadcast)
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
        participants: dict[str, SiteShare],
        state: FederatedState,
        cohort: Cohort,
        number: int,
        phase: int,
    ) -> "_PhaseResult":
        """Run a phase under masks; the server can read only the total."""
        phase_shapes, num = self.shapes.phases[phase], len(self.keys)
        tag, memories = self.messages.tag(number, phase), state.clients.memories[0]
        requests = partial(
            self.messages.encode_step, tag, participants, state.broadcast, state.clients
        )
        num_reported = len(jax.tree.leaves(phase_shapes.report.bits_down))
        num_numbers = num_words(phase_shapes.code)
        size = num * (num_numbers + num_reported)
        total = sums.total(tag, (phase, len(self.shapes.phases), False), size, requests)
        words, reported = np.split(total.reshape(num, -1), [num_numbers], axis=1)
        _check_counts(words, len(self.names))
        message = self.kernel.phases[phase].message_like(phase_shapes.broadcast)
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
        num_sent = num_sites * trees.num_bits(phase_shapes.broadcast)
        bits_down = reported[:, 0] if num_reported else num_sent
        bits = np.stack([bits_up, np.broadcast_to(bits_down, num)])
        num_lost = words[:, -1].astype(np.int64)
        norm = np.full(num, np.nan)  # unknown
        active = np.asarray(cohort.active)
        return _PhaseResult(stepped, memories, active, bits, norm, num_lost, participants.keys())


class _PhaseResult(NamedTuple):
    """Result of a phase for all chains."""

    stepped: Stepped
    memories: ArrayTree
    active: np.ndarray  # [cohort_size, num_chains] bool, messages in the sum
    bits: np.ndarray  # [2, num_chains], up and down
    gradient_norm: np.ndarray  # [num_chains]
    num_lost: np.ndarray  # [num_chains]
    sites: Collection[str]  # sites that answered


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


def _zero_chains(chains: np.ndarray, code: ArrayTree) -> ArrayTree:
    """Return a code with zeros in these chains."""

    def zero(leaf: np.ndarray) -> np.ndarray:
        return np.where(chains.reshape(-1, *(1,) * (leaf.ndim - 1)), np.zeros((), leaf.dtype), leaf)

    return jax.tree.map(zero, code)
