"""The server of a study: a consortium of real sites, for `sample`, `fit` and `correct`."""

import json
import time
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    Federation,
    as_functions,
)
from fedmcmc.deploy._frames import digest_of
from fedmcmc.deploy._guard import Guard
from fedmcmc.deploy._links import Links, SiteError
from fedmcmc.deploy._rounds import AtServer, Drawn, Figures, Rounds
from fedmcmc.deploy._shapes import as_sent, shapes_of_run
from fedmcmc.deploy._study import Study
from fedmcmc.deploy._transport import Transport
from fedmcmc.deploy._words import to_words
from fedmcmc.kernels import Question
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, init_key
from fedmcmc.records import Samples
from fedmcmc.rounds import Arrangement, Program, RoundRecord, Segment, take_in
from fedmcmc.runs import Sum, Work, check_fits_sum, sample, start_positions
from fedmcmc.transforms import faults, is_secured, with_counts

MOST_TRIES = 20
"""Rounds in which a question is asked again because a site was missing."""
SHORT_SEGMENT = 8
"""Rounds of a segment at most, where a run that ends in a round goes back to its segment's first:
each segment costs every site one more file that is written to its disk."""


class Sites:
    """The sites of a study, as its server reaches them.

    It stands for data in `fedmcmc.sample`, `fedmcmc.fit`, `fedmcmc.correct`, `fedmcmc.whiten`,
    `fedmcmc.surrogates` and `fedmcmc.criticism`: rows stay where they are, and the server sees
    messages.

    Parameters
    ----------
    study
        What the parties agreed on.
    transport
        The server's end of the network: `Local`, or `GrpcServer`.
    on_missing
        What a round does where a site does not answer within `timeout` seconds. ``"wait"`` waits
        for it, so that draws are those of the kernel. ``"leave_out"`` goes on without its message,
        as with ``fedmcmc.faults(kernel, drop=..., rescale=False)``; for sites that are not
        connected it does not wait. It also leaves out a site that declines, or whose message
        cannot be added, and warns once per site. Before the first round all sites are needed.
    timeout
        Seconds.
    most_norm
        Largest norm of a message, by default no limit. With ``"wait"`` a run ends at a larger one,
        with ``"leave_out"`` it goes on without that message. Messages with numbers that are not
        finite are never added. If a site's messages grow a thousandfold and no other site's do, the
        run warns. Under masks none of this can be checked.

    Attributes
    ----------
    federation
        What is known of the sites' rows: numbers, sizes, shapes.
    num_missed
        Rounds of the last run in which each site was left out, by name.
    """

    def __init__(
        self,
        study: Study,
        transport: Transport,
        *,
        on_missing: Literal["wait", "leave_out"] = "wait",
        timeout: float = 60.0,
        most_norm: float | None = None,
    ) -> None:
        if on_missing not in ("wait", "leave_out"):
            raise ValueError(f"on_missing must be 'wait' or 'leave_out', got {on_missing!r}.")
        if not _is_above_zero(timeout):
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}.")
        if most_norm is not None and not _is_above_zero(most_norm):
            raise ValueError(f"most_norm must be a number above 0, got {most_norm!r}.")
        if study.secure:
            if most_norm is not None:
                raise ValueError(
                    f"most_norm limits the message of a single site, which nobody can read under "
                    f"masks: remove most_norm = {most_norm!r}."
                )
            if on_missing != "wait":
                raise ValueError(
                    "Under masks a round without one site is void: its message and the others' "
                    "masks are in no sum. on_missing must be 'wait'."
                )
            study.consortium  # noqa: B018  # raises where sums over these sites hide nothing
        self.study, self.on_missing, self.most_norm = study, on_missing, most_norm
        self._links = Links(study, transport, timeout)
        self._asked = 0
        self.num_missed: dict[str, int] = {}

    def __repr__(self) -> str:
        """Name the study and its sites."""
        return f"Sites({self.study!r}, on_missing={self.on_missing!r})"

    @property
    def federation(self) -> Federation:
        """What is known of the sites' rows before the first round."""
        return self.study.federation

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the sites, in the order of the clients' numbers."""
        return tuple(self.study.sites)

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
            If answers do not fit the sum of a study under masks.
        """
        kernel: FederatedKernel = self.own(as_functions(question))
        content = jax.tree.map(as_sent, content)
        keys, like = jax.random.key(0)[None], trees.shapes_of(content)
        rounds = self._rounds(kernel, keys, like, f"question {self._asked}", is_question=True)
        self._asked += 1
        rounds.begin()
        positions = jax.tree.map(lambda leaf: leaf[None], content)
        state = rounds.set_up(positions, jax.vmap(init_key)(keys))
        rounds.start(state)
        up = down = 0.0
        for tries in range(1, MOST_TRIES + 1):
            state, figures, drawn = rounds.round(state, tries - 1)
            answered = jax.tree.map(lambda leaf: leaf[0], drawn.draw)
            up, down = up + float(figures.bits_up[0]), down + float(figures.bits_down[0])
            check_fits_sum(question, state.server)
            if answered.whole:
                return Sum(answered.value, tries, up, down)
        missed = ", ".join(f"{site} {num}" for site, num in rounds.num_missed.items() if num)
        raise SiteError(
            f"In none of {MOST_TRIES} rounds did all {len(self.study.sites)} sites answer; a sum "
            f"without one of them would be that of another posterior. Rounds missed: {missed}."
        )

    def own(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return the kernel as these sites run it.

        The study's own with the same numbers; under masks a secure sum of any other.
        """
        return self.study.own(kernel)

    def sample(self, rng_key: Array, kernel: FederatedKernel, *args: Any, **kwargs: Any) -> Samples:
        """Run a kernel on the sites: `fedmcmc.sample` with these in place of data."""
        return sample(rng_key, kernel, self, *args, **kwargs)

    def begin(
        self, kernel: FederatedKernel, keys: Array, position: ArrayTree, state: Any
    ) -> tuple["OverSites", FederatedState, str]:
        """Return where a run is computed, its first state, and a digest that stands for rows.

        `fedmcmc.sample` calls it. Sites are told of the run, and what it needs summed before its
        first round is summed.
        """
        kernel = self.own(kernel)
        if self.most_norm is not None and is_secured(kernel):
            raise ValueError(
                "most_norm limits numbers, and the messages of a secure sum are words: remove "
                f"most_norm = {self.most_norm!r}."
            )
        if state is not None:
            state = with_counts(kernel, state)
        if self.on_missing == "leave_out":
            # Raises where a kernel does not go on without a client.
            faults(kernel, drop=0.5, rescale=False)
            if not kernel.traits.phases_independent:
                raise ValueError(
                    "Sites of this kernel carry out in one exchange of a round what was agreed in "
                    "another (interweave=True), and one that is lost in between would stay behind: "
                    "on_missing must be 'wait'."
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
        first = rounds.set_up(positions, init_keys)
        if state is not None:
            keeps = bool(jax.tree.leaves((rounds.shapes.client, rounds.shapes.memories)))
            if keeps and not isinstance(state.clients, AtServer):
                raise ValueError(
                    "The clients of this kernel keep a state of their own, which must be at the "
                    "sites: state= goes on from a run at these sites, and this is none."
                )
            clients = state.clients if keeps else first.clients
            state = state._replace(clients=clients)
            difference = trees.first_difference(trees.shapes_of(first), trees.shapes_of(state))
            if difference:
                raise ValueError(f"state does not fit this kernel and these sites: {difference}.")
            first = state
        first = jax.tree.map(trees.strong, first)
        program = Program(kernel, self.study.hollow, Arrangement(clients_at_a_time=1))
        return OverSites(rounds, program, first, state is not None), first, self.study.digest

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
        position, _ = to_words(shapes.first.position, self.study.functions)
        name = digest_of(
            self.study.digest.encode(),
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
            guard=Guard(self.labels, None if is_question else self.most_norm),
            may_miss=self.on_missing == "leave_out",
            answers_may_be_infinite=is_question,
        )


class OverSites:
    """Where `fedmcmc.sample` computes a run at real sites; see its executor of one device."""

    shared = False
    # A checkpoint is written before the run goes on, so that sites keep their states of its round.
    in_place = True
    finished_rounds: tuple[int, Segment] | None = None

    def __init__(
        self, rounds: Rounds, program: Program, first: FederatedState, goes_on: bool
    ) -> None:
        self.rounds, self.keys = rounds, rounds.keys
        self.plain = self.program = program
        self.shapes = trees.shapes_but_keys(first)
        like = rounds.shapes.client
        num, sites = len(rounds.keys), len(rounds.names)
        # Sites go back to the beginning of a segment where they have lost that of a round.
        self.longest = None if rounds.can_always_resume else SHORT_SEGMENT
        clients = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((num, sites, *s.shape), s.dtype), like
        )
        self.simulated_shapes = self.table_shapes = self.shapes._replace(clients=clients)
        # Sites begin with what they make of the first broadcast, unless a run goes on.
        self._first = None if goes_on else int(np.asarray(first.broadcast.round)[0])
        self._at: int | None = None
        self._saved: list[int] = []
        self._good: tuple[tuple[int, int], Segment] | None = None
        self._records: RoundRecord = program.record_shapes(rounds.keys, self.table_shapes)

    def lay_out(self, state: FederatedState) -> FederatedState:
        """Return the state; where it is another than the last, sites go back to its round."""
        self._at = None
        return jax.tree.map(jnp.asarray, state)

    def gather(self, state: FederatedState) -> FederatedState:
        """Return the state, and have the sites keep theirs of this round.

        It is that of a checkpoint, of which a run has the last two.
        """
        round_ = int(np.asarray(state.broadcast.round)[0])
        if round_ not in self._saved:
            self._saved = [*self._saved[-1:], round_]
        self.rounds.mark(round_, self._saved)
        return state

    def lay_out_chains(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis."""
        return jax.tree.map(jnp.asarray, tree)

    def to_host(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis as NumPy arrays, typed keys as they are."""
        return jax.tree.map(lambda leaf: leaf if trees.is_key(leaf) else np.asarray(leaf), tree)

    def run(self, segment: Work, state: FederatedState, at: int, stop: int) -> Segment:
        """Run rounds ``[at, stop)``, or up to the first after which a chain is not finite."""
        if self._good is not None and self._good[0] == (at, stop):
            return self._good[1]  # the rounds before a bad one, asked for again
        if self._at != at:
            self.rounds.start(state) if at == self._first else self.rounds.resume(state)
        self._at = None  # until all of them are done
        # A run that is interrupted goes on from the beginning of a segment.
        self.rounds.mark(at, [*self._saved, at])
        num = len(self.keys)
        done = _Done(at, state, np.zeros((2, num)), (), segment.accumulator_states)
        self.finished_rounds = None
        segment = replace(segment, plan=jax.tree.map(np.asarray, segment.plan))  # read per round
        try:
            for number in range(at, stop):
                state, figures, drawn = self.rounds.round(done.state, number)
                if not drawn.finite.all():
                    self._good = (at, number), done.to_segment(np.full(num, -1))
                    first_bad = np.where(drawn.finite, -1, number)
                    return done._replace(state=state).to_segment(first_bad)
                done = self._after(done, segment, state, figures, drawn)
        except (SiteError, KeyboardInterrupt):
            if self.rounds.can_resume(done.round):
                self.finished_rounds = done.round, done.to_segment(np.full(num, -1))
            raise
        self._at = stop
        return done.to_segment(np.full(num, -1))

    def _after(
        self, done: "_Done", work: Work, state: FederatedState, figures: Figures, drawn: Drawn
    ) -> "_Done":
        """Return what the rounds of a segment gave, with one more of them."""
        number, plan = done.round, work.plan
        bits = done.bits + np.stack([figures.bits_up, figures.bits_down])
        done = done._replace(round=number + 1, state=state, bits=bits)
        ahead, thinning = number - int(plan.keep_from), int(plan.thinning)
        if ahead < 0 or (ahead + 1) % thinning:
            return done
        record = self._record(drawn.draw, figures, number)
        if work.capacity:
            done = done._replace(records=(*done.records, record))
        if done.accumulator_states:
            given = (work.accumulators, self.keys, number, ahead // thinning, record)
            done = done._replace(accumulator_states=_taken_in(*given, done.accumulator_states))
        return done

    def _record(self, draw: ArrayTree, figures: Figures, number: int) -> RoundRecord:
        like = self._records
        info = figures.named(like.info, number)
        cast: Any = {name: info[name].astype(like.info[name].dtype) for name in like.info}
        return RoundRecord(jax.tree.map(np.asarray, draw), cast)


class _Done(NamedTuple):
    """What the finished rounds of a segment gave."""

    round: int  # the next one
    state: FederatedState
    bits: np.ndarray  # [2, num_chains], up and down
    records: tuple[RoundRecord, ...]
    accumulator_states: dict[str, ArrayTree]

    def to_segment(self, first_bad: Any) -> Segment:
        """Return them as `fedmcmc.rounds.run_segment` does."""
        records = RoundRecord((), {})
        if self.records:
            records = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *self.records)
        words = np.stack([self.bits // 2**32, self.bits % 2**32]).astype(np.uint32)
        of_chains: Any = np.moveaxis(words, -1, 0)  # [num_chains, 2, 2]
        state = jax.tree.map(jnp.asarray, self.state)
        return Segment(state, records, of_chains, first_bad, self.accumulator_states)


@jax.jit
def _taken_in(
    accumulators: Any, keys: Array, number: int, index: int, record: RoundRecord, states: Any
) -> Any:
    def one(key: Array, record: RoundRecord, states: Any) -> Any:
        round_, place = (jnp.asarray(x, jnp.int32) for x in (number, index))
        return take_in(accumulators, key, round_, place, record, states)

    return jax.vmap(one)(keys, record, states)


def _is_above_zero(number: Any) -> bool:
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
    most_norm: float | None = None,
    **settings: Any,
) -> Samples:
    """Run a kernel of a study at its sites, and end their connections.

    Parameters
    ----------
    study
        What the parties agreed on.
    rng_key
        Key of the run, which stays at the server unless the study is `reproducible`. Who knows it
        knows the server's noise, so it should be a `random.secret_key`.
    kernel
        One of the study's kernels, or its name.
    position
        Where chains start, as in `fedmcmc.sample`.
    transport, on_missing, timeout, most_norm
        As of `Sites`.
    **settings
        The arguments of `fedmcmc.sample`: `num_rounds`, `num_burnin`, `thinning`, `num_chains`,
        `until`, `max_rounds`, `record`, `checkpoint`, `progress`.

    Returns
    -------
    Samples
        As `fedmcmc.sample` returns them; ``state.clients`` is what the server keeps of its sites.

    Raises
    ------
    Refused
        If the kernel is none that the study allows.
    SiteError
        If a site declines or its message cannot be added; the draws before are in its `samples`.
    """
    sites = Sites(study, transport, on_missing=on_missing, timeout=timeout, most_norm=most_norm)
    try:
        own = study.kernel(kernel) if isinstance(kernel, str) else kernel
        return sample(as_key(rng_key), own, sites, position, **settings)
    finally:
        sites.close()
