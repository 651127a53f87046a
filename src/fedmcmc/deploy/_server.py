"""Server of a study: real sites in place of data for `sample`, `fit` and `correct`."""

import json
import time
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.deploy._frames import digest_of
from fedmcmc.deploy._guard import Guard
from fedmcmc.deploy._links import Links, SiteError
from fedmcmc.deploy._messages import AtServer
from fedmcmc.deploy._rounds import RoundDraw, RoundFigures, Rounds
from fedmcmc.deploy._row_ranges import with_num_rows
from fedmcmc.deploy._shapes import as_sent, shapes_of_run
from fedmcmc.deploy._study import Study
from fedmcmc.deploy._transport import Transport
from fedmcmc.deploy._words import to_words
from fedmcmc.kernels import Question
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, init_key
from fedmcmc.records import Samples
from fedmcmc.rounds import Layout, Program, RoundRecord, Segment, update_accumulators
from fedmcmc.runs import Executor, SegmentWork, Sum, check_fits_sum, sample, start_positions
from fedmcmc.transforms import faults, is_secured, with_counts
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    Federation,
    as_functions,
)

MAX_TRIES = 20
"""Rounds of a question until all sites have answered."""
MAX_SEGMENT_ROUNDS = 8
"""Largest length of a segment if an interrupted run returns to the segment's beginning. In each
segment every site writes one more file to its disk."""


class Sites:
    """Sites of a study, connected to its server.

    `Sites` replaces data in `fedmcmc.sample`, `fedmcmc.fit`, `fedmcmc.correct`, `fedmcmc.whiten`,
    `fedmcmc.surrogates` and `fedmcmc.criticism`: rows stay at the sites, and the server receives
    messages.

    Parameters
    ----------
    study
        Study that the parties agreed on.
    transport
        The server's end of the network: `LocalTransport` or `GrpcServer`.
    on_missing
        Action if a site does not answer within `timeout` seconds. ``"wait"`` waits for the site,
        so that the kernel's distribution does not change. ``"leave_out"`` continues without its
        message, like ``fedmcmc.faults(kernel, drop=..., rescale=False)``, and does not wait for
        sites that are not connected. It also leaves out a site that declines or whose message
        cannot be added, and warns once per site. Before the first round all sites are needed.
    timeout
        Seconds to wait for an answer.
    max_norm
        Largest norm of a message, by default no limit. After a larger message a run ends with
        ``"wait"`` and continues without the message with ``"leave_out"``. Messages with numbers
        that are not finite are never added. If the messages of a single site grow by a factor of
        1,000, the run warns. Under masks none of these checks is possible.

    Attributes
    ----------
    federation
        Numbers, sizes and shapes of the sites' rows.
    num_missed
        Number of rounds of the last run without each site, by name.
    """

    def __init__(
        self,
        study: Study,
        transport: Transport,
        *,
        on_missing: Literal["wait", "leave_out"] = "wait",
        timeout: float = 60.0,
        max_norm: float | None = None,
    ) -> None:
        if on_missing not in ("wait", "leave_out"):
            raise ValueError(f"on_missing must be 'wait' or 'leave_out', got {on_missing!r}.")
        if not _is_above_zero(timeout):
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}.")
        if max_norm is not None and not _is_above_zero(max_norm):
            raise ValueError(f"max_norm must be a number above 0, got {max_norm!r}.")
        if study.secure:
            if max_norm is not None:
                raise ValueError(
                    f"max_norm limits the message of a single site, which nobody can read under "
                    f"masks: remove max_norm = {max_norm!r}."
                )
            if on_missing != "wait":
                raise ValueError(
                    "Under masks a round without one site is void, because the masks of the other "
                    "sites do not cancel: on_missing must be 'wait'."
                )
            study.consortium  # noqa: B018  # raises if sums over these sites hide nothing
        self._study, self.on_missing, self.max_norm = study, on_missing, max_norm
        self._links = Links(study, transport, timeout)
        self._waits_for_num_rows = bool(study.row_ranges)
        self._num_questions = 0
        self.num_missed: dict[str, int] = {}

    def __repr__(self) -> str:
        """Name the study and its sites."""
        return f"Sites({self._study!r}, on_missing={self.on_missing!r})"

    @property
    def study(self) -> Study:
        """Study with the number of rows of each site.

        If the study has ranges of numbers, the first access waits for all sites.
        """
        if self._waits_for_num_rows:
            self._links.wait_for_all()
            self._study = with_num_rows(self._study, self._links.num_rows)
            self._links.study, self._waits_for_num_rows = self._study, False
        return self._study

    @property
    def federation(self) -> Federation:
        """Numbers, sizes and shapes of the sites' rows."""
        return self.study.federation

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the sites, in the order of the clients' numbers."""
        return tuple(self._study.sites)

    def close(self) -> None:
        """End the connections to all sites."""
        self._links.transport.close()

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all sites' answers to `question` about `content`.

        Raises
        ------
        Refused
            If the study does not allow this question.
        SiteError
            If a site declines, or its answer cannot be added.
        ValueError
            If answers are out of the range of a study's masked sums.
        """
        kernel: FederatedKernel = self.adapt_kernel(as_functions(question))
        content = jax.tree.map(as_sent, content)
        keys, like = jax.random.key(0)[None], trees.shapes_of(content)
        rounds = self._rounds(
            kernel, keys, like, f"question {self._num_questions}", is_question=True
        )
        self._num_questions += 1
        rounds.begin()
        positions = jax.tree.map(lambda leaf: leaf[None], content)
        state = rounds.set_up(positions, jax.vmap(init_key)(keys))
        rounds.start(state)
        bits_up = bits_down = 0.0
        for num_rounds in range(1, MAX_TRIES + 1):
            state, figures, round_draw = rounds.round(state, num_rounds - 1)
            answer = jax.tree.map(lambda leaf: leaf[0], round_draw.draw)
            bits_up += float(figures.bits_up[0])
            bits_down += float(figures.bits_down[0])
            check_fits_sum(question, state.server)
            if answer.whole:
                return Sum(answer.value, num_rounds, bits_up, bits_down)
        missed = ", ".join(f"{site} {num}" for site, num in rounds.num_missed.items() if num)
        raise SiteError(
            f"In none of {MAX_TRIES} rounds did all {len(self.study.sites)} sites answer; a sum "
            f"without one of them would belong to another posterior. Rounds missed: {missed}."
        )

    def adapt_kernel(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return the kernel that these sites run in place of `kernel`.

        This is the study's kernel if it has the same numbers; under masks, the secure sum of any
        other kernel.
        """
        return self.study.adapt_kernel(kernel)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Call `fedmcmc.sample` with these sites in place of data."""
        return sample(rng_key, kernel, self, *args, **kwargs)

    def start_run(
        self, kernel: FederatedKernel, keys: Array, position: ArrayTree, state: Any
    ) -> tuple["SitesExecutor", FederatedState, str]:
        """Start a run at the sites; return its executor, first state, and a digest of the study.

        `fedmcmc.sample` calls this method. It also computes the sums that the run needs before its
        first round.
        """
        kernel = self.adapt_kernel(kernel)
        if self.max_norm is not None and is_secured(kernel):
            raise ValueError(
                "max_norm limits numbers, and the messages of a secure sum are words: remove "
                f"max_norm = {self.max_norm!r}."
            )
        if state is not None:
            state = with_counts(kernel, state)
        if self.on_missing == "leave_out":
            # Raises if the kernel cannot continue without a client.
            faults(kernel, drop=0.5, rescale=False)
            if not kernel.traits.phases_independent:
                raise ValueError(
                    "With this kernel (recenter=True) one exchange of a round completes another, "
                    "and a site that is lost in between would have an outdated state: on_missing "
                    "must be 'wait'."
                )
        init_keys: ArrayTree = jax.vmap(init_key)(keys)
        if state is None:
            init_keys, positions = start_positions(keys, position)
        else:
            positions = state.broadcast.position
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
        start = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(positions))
        rounds = self._rounds(kernel, keys, like, digest_of(start))
        self.num_missed = rounds.num_missed
        rounds.begin()
        first_state = rounds.set_up(positions, init_keys)
        if state is not None:
            has_states = bool(jax.tree.leaves((rounds.shapes.client, rounds.shapes.memories)))
            if has_states and not isinstance(state.clients, AtServer):
                raise ValueError(
                    "The clients of this kernel have a state, which must be at the sites: state= "
                    "must come from a run at these sites, and this one does not."
                )
            clients = state.clients if has_states else first_state.clients
            state = state._replace(clients=clients)
            shapes = trees.shapes_of(first_state)
            difference = trees.first_difference(shapes, trees.shapes_of(state))
            if difference:
                raise ValueError(f"state does not fit this kernel and these sites: {difference}.")
            first_state = state
        first_state = jax.tree.map(trees.strip_weak_type, first_state)
        program = Program(kernel, self.study.data_like, Layout(clients_at_a_time=1))
        executor = SitesExecutor(rounds, program, first_state, state is not None)
        return executor, first_state, self.study.digest

    def _rounds(
        self,
        kernel: FederatedKernel,
        keys: Array,
        like: ArrayTree,
        start: str,
        *,
        is_question: bool = False,
    ) -> Rounds:
        shapes = shapes_of_run(kernel, self.study, like)
        words, numbers = self.study.words_of(kernel)
        position, _ = to_words(shapes.setup_broadcast.position, self.study.functions)
        name = digest_of(
            self.study.digest.encode(),
            *([json.dumps(self.study.sites).encode()] if self.study.row_ranges else []),
            json.dumps([words, position]).encode(),
            numbers,
            np.asarray(jax.random.key_data(keys)).tobytes(),
            start.encode(),
        )
        return Rounds(
            self._links,
            kernel,
            keys,
            shapes,
            name,
            time.time_ns(),
            guard=Guard(self.labels, None if is_question else self.max_norm),
            may_miss=self.on_missing == "leave_out",
            answers_may_be_infinite=is_question,
        )


class SitesExecutor(Executor):
    """Executor of `fedmcmc.sample` for real sites."""

    # A checkpoint is written before the run continues, while sites have the states of its round.
    in_place = True

    def __init__(
        self, rounds: Rounds, program: Program, first_state: FederatedState, continues: bool
    ) -> None:
        super().__init__(program, rounds.keys, first_state)
        self.rounds = rounds
        num, num_sites = len(rounds.keys), len(rounds.names)
        # Sites that no longer have the state of a round return to the beginning of its segment.
        self.longest = None if rounds.can_always_resume else MAX_SEGMENT_ROUNDS
        clients = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((num, num_sites, *s.shape), s.dtype),
            rounds.shapes.client,
        )
        self.simulated_shapes = self.table_shapes = self.shapes._replace(clients=clients)
        # Round in which sites compute their first states; `None` if they continue a run.
        first_round = int(np.asarray(first_state.broadcast.round)[0])
        self._first_round = None if continues else first_round
        self._next_round: int | None = None  # of the sites' states; `None` if unknown
        self._checkpoints: list[int] = []
        self._finite_segment: tuple[tuple[int, int], Segment] | None = None
        self._records: RoundRecord = program.record_shapes(rounds.keys, self.table_shapes)

    def lay_out(self, state: FederatedState) -> FederatedState:
        """Return the state; before the next round the sites return to theirs of the same round."""
        self._next_round = None
        return jax.tree.map(jnp.asarray, state)

    def gather(self, state: FederatedState) -> FederatedState:
        """Return the state for a checkpoint; sites store their states of the last two."""
        round_ = int(np.asarray(state.broadcast.round)[0])
        if round_ not in self._checkpoints:
            self._checkpoints = [*self._checkpoints[-1:], round_]
        self.rounds.messages.mark(round_, self._checkpoints)
        return state

    def run(self, segment: SegmentWork, state: FederatedState, start: int, stop: int) -> Segment:
        """Run rounds ``[start, stop)``, or up to the first after which a chain is not finite."""
        if self._finite_segment is not None and self._finite_segment[0] == (start, stop):
            return self._finite_segment[1]  # the run requests the rounds before a bad one again
        if self._next_round != start:
            is_first = start == self._first_round
            self.rounds.start(state) if is_first else self.rounds.resume(state)
        self._next_round = None  # until all rounds are finished
        # An interrupted run continues from the beginning of a segment.
        self.rounds.messages.mark(start, [*self._checkpoints, start])
        num = len(self.keys)
        progress = _Progress(start, state, np.zeros((2, num)), (), segment.accumulator_states)
        self.finished_rounds = None
        segment = replace(segment, plan=jax.tree.map(np.asarray, segment.plan))  # read per round
        try:
            for number in range(start, stop):
                state, figures, round_draw = self.rounds.round(progress.state, number)
                if not round_draw.finite.all():
                    self._finite_segment = (start, number), progress.to_segment(np.full(num, -1))
                    first_bad = np.where(round_draw.finite, -1, number)
                    return progress._replace(state=state).to_segment(first_bad)
                progress = self._add_round(progress, segment, state, figures, round_draw)
        except (SiteError, KeyboardInterrupt):
            if self.rounds.can_resume(progress.round):
                self.finished_rounds = progress.round, progress.to_segment(np.full(num, -1))
            raise
        self._next_round = stop
        return progress.to_segment(np.full(num, -1))

    def _add_round(
        self,
        progress: "_Progress",
        work: SegmentWork,
        state: FederatedState,
        figures: RoundFigures,
        round_draw: RoundDraw,
    ) -> "_Progress":
        """Return the results of a segment after one more round."""
        number, plan = progress.round, work.plan
        bits = progress.bits + np.stack([figures.bits_up, figures.bits_down])
        progress = progress._replace(round=number + 1, state=state, bits=bits)
        num_after, thinning = number - int(plan.keep_from), int(plan.thinning)
        if num_after < 0 or (num_after + 1) % thinning:
            return progress
        like = self._records.info
        info = figures.select(like, number)
        cast: Any = {name: info[name].astype(like[name].dtype) for name in like}
        record = RoundRecord(jax.tree.map(np.asarray, round_draw.draw), cast)
        if work.capacity:
            progress = progress._replace(records=(*progress.records, record))
        if progress.accumulator_states:
            index, states = num_after // thinning, progress.accumulator_states
            states = _accumulate(work.accumulators, self.keys, number, index, record, states)
            progress = progress._replace(accumulator_states=states)
        return progress


class _Progress(NamedTuple):
    """Results of the finished rounds of a segment."""

    round: int  # next round
    state: FederatedState
    bits: np.ndarray  # [2, num_chains], up and down
    records: tuple[RoundRecord, ...]
    accumulator_states: dict[str, ArrayTree]

    def to_segment(self, first_bad: Any) -> Segment:
        """Return the results in the form of `fedmcmc.rounds.run_segment`."""
        records = RoundRecord((), {})
        if self.records:
            records = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *self.records)
        words = np.stack([self.bits // 2**32, self.bits % 2**32]).astype(np.uint32)
        of_chains: Any = np.moveaxis(words, -1, 0)  # [num_chains, 2, 2]
        state = jax.tree.map(jnp.asarray, self.state)
        return Segment(state, records, of_chains, first_bad, self.accumulator_states)


@jax.jit
def _accumulate(
    accumulators: Any, keys: Array, number: int, index: int, record: RoundRecord, states: Any
) -> Any:
    def accumulate_chain(key: Array, record: RoundRecord, states: Any) -> Any:
        round_, position = (jnp.asarray(x, jnp.int32) for x in (number, index))
        return update_accumulators(accumulators, key, round_, position, record, states)

    return jax.vmap(accumulate_chain)(keys, record, states)


def _is_above_zero(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def run(
    study: Study,
    rng_key: Array,
    kernel: FederatedKernel | str,
    position: ArrayTree = None,
    *,
    transport: Transport,
    on_missing: Literal["wait", "leave_out"] = "wait",
    timeout: float = 60.0,
    max_norm: float | None = None,
    **settings: Any,
) -> Samples:
    """Run a kernel of a study at its sites, and end their connections.

    Parameters
    ----------
    study
        Study that the parties agreed on.
    rng_key
        Key of the run, which stays at the server unless the study is `reproducible`. Anyone who has
        the key can compute the server's noise, so use a `random.secret_key`.
    kernel
        One of the study's kernels, or its name.
    position
        Start of the chains, see `fedmcmc.sample`.
    transport, on_missing, timeout, max_norm
        Arguments of `Sites`.
    **settings
        Arguments of `fedmcmc.sample`: `num_rounds`, `num_burnin`, `thinning`, `num_chains`,
        `until`, `max_rounds`, `record`, `checkpoint`, `progress`.

    Returns
    -------
    Samples
        Result of `fedmcmc.sample`; ``state.clients`` is the server's record of its sites.

    Raises
    ------
    Refused
        If the study does not allow the kernel.
    SiteError
        If a site declines or its message cannot be added; `samples` has the draws before it.
    """
    sites = Sites(study, transport, on_missing=on_missing, timeout=timeout, max_norm=max_norm)
    try:
        if isinstance(kernel, str):
            kernel = study.kernel(kernel)
        return sample(as_key(rng_key), kernel, sites, position, **settings)
    finally:
        sites.close()
