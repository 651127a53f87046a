"""A run on the host: one compiled program, called in segments so that draws leave the device."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import constrain_fn_of, local_model
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.hierarchy import constrain_client
from fedmcmc.placement import Placement, agreed, all_equal, is_first
from fedmcmc.pytrees import num_bytes, schedules
from fedmcmc.records import (
    Draws,
    MemoryRecorder,
    Record,
    Recorder,
    Samples,
    ZarrReader,
    ZarrRecorder,
)
from fedmcmc.rounds import (
    Plan,
    RoundRecord,
    Segment,
    first_accumulator_states,
)
from fedmcmc.runs._executors import Executor, RunHalted, Work
from fedmcmc.runs._growth import start_of
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._pace import pace_of
from fedmcmc.runs._watch import (
    NonFiniteError,
    non_finite,
    warn,
    warn_excluded,
    warn_lost,
    warn_rejected,
    warn_unreached,
)
from fedmcmc.storage import Checkpoint, Progress, Saver, fingerprint, versions

LEAST_CAPACITY = 64
"""Draws of a chain for which a compiled run has room, at least."""
BUFFER_BYTES = 2**26
"""Memory for the draws that wait on the device for the end of a segment."""


class Settings(NamedTuple):
    """What a run does with its rounds; see `fedmcmc.sample`."""

    num_clients: int
    num_rounds: int  # at most
    num_burnin: int
    thinning: int
    record: Record
    until: StoppingRule | None
    placement: Placement
    checkpoint: Checkpoint | None
    replaces_files: bool  # of an attempt that died
    hands_on_interrupts: bool  # to the program, where others end at what was kept
    description: dict[str, Any]  # of all that was asked for, in words, for a report
    warnings: tuple[str, ...]  # of what was seen before the run


class Run:
    """Calls segments, moves what they keep to the host, and watches for trouble.

    Its parts: an executor runs segments, a recorder takes draws, a saver writes checkpoints.
    `progress` is where the run is. It is replaced as a whole after each segment, so an interrupt at
    any time finds state, draws and totals of one round.

    Parameters
    ----------
    executor, state
        Where segments are computed, and the first state there.
    rows
        The digest of the rows, for checkpoints.
    keys
        ``[num_chains]``.
    """

    def __init__(
        self, executor: Executor, state: Any, rows: str, keys: Array, settings: Settings
    ) -> None:
        self.executor, self.rows, self.keys, self.settings = executor, rows, keys, settings
        self.begun = time.perf_counter()
        self.kernel, self.collect = executor.plain.kernel, executor.plain.collect
        self.accumulators = dict(settings.record.streams)
        # Tabulated, so that another schedule is not traced again for the same shapes; no value is
        # used, and a run that goes on need not have one for round 0.
        tabulated = schedules.tabulate(self.kernel, 0, 1, 0)
        plain, like = replace(executor.plain, kernel=tabulated), executor.table_shapes
        shapes = plain.record_shapes(keys, like)
        self.canonical = plain.needs_canonical(keys, like)
        self.pace = pace_of(plain.block_length(keys, like))
        if executor.longest is not None:
            self.pace = self.pace._replace(longest=min(self.pace.longest, executor.longest))
        self.recorder = self._recorder(shapes)
        self.saver: Saver | None = None
        self.messages = settings.warnings
        broadcast = executor.to_host(state.broadcast)
        self.first, self.start = int(broadcast.round[0]), start_of(self.kernel, broadcast)
        self.keep_from = self.first + settings.num_burnin
        zero = np.zeros(len(keys), np.int64)
        self.progress = Progress(
            self.first,
            state,
            executor.lay_out_chains(first_accumulator_states(shapes, len(keys), self.accumulators)),
            {"bits_up": zero, "bits_down": zero, "rounds": zero},
            Draws(),
            {},
        )

    def _recorder(self, shapes: RoundRecord) -> Recorder:
        path, checkpoint = self.settings.record.draws_to, self.settings.checkpoint
        if path is None:
            return MemoryRecorder(shapes, len(self.keys))
        if self.executor.shared and not is_first():
            return ZarrReader(Path(path), shapes)
        own = self.settings.replaces_files
        resume = own and checkpoint is not None and checkpoint.exists
        return ZarrRecorder(Path(path), shapes, len(self.keys), resume=resume, replace=own)

    def go(self, bar: Any, interrupts: Interrupts) -> Samples:
        """Run all rounds and return what was kept."""
        shared, end = self.executor.shared, self.first + self.settings.num_rounds
        self._resume(end)
        bar.update(self.progress.round - self.first)
        interrupted = False
        # Other processes may be elsewhere after an error, and would be waited for for ever.
        all_are_here = not shared
        try:
            with interrupts.allowed():
                self._advance(end, bar, interrupts)
            all_are_here = True
        except NonFiniteError:
            all_are_here = True
            raise
        except RunHalted as error:
            reason = f"not judged: the run ended in round {self.progress.round}"
            error.samples = replace(self.samples(), not_judged=reason, warnings=(str(error),))
            raise
        except KeyboardInterrupt:
            if shared or self.settings.hands_on_interrupts:
                raise
            interrupted = True
        finally:
            if self.saver is not None:
                try:
                    if all_are_here:
                        self._save(at_end=True)
                except KeyboardInterrupt:
                    if shared or self.settings.hands_on_interrupts:
                        raise
                    interrupted = True
                finally:
                    self.saver.close()
                if shared and all_are_here:
                    agreed(0.0)  # nobody goes on before the last checkpoint is on disk
        return self._finished(interrupted=interrupted)

    def _finished(self, *, interrupted: bool) -> Samples:
        """Return what was kept, and warn of what a user might not see in it."""
        until, progress = self.settings.until, self.progress
        messages = self.messages
        if interrupted:
            messages += warn(
                f"Interrupted in or after round {progress.round}; returning what was kept before. "
                "Go on with sample(..., state=samples.state).",
                depth=5,
            )
        if until is not None and not progress.stopped.get("reached"):
            rounds = progress.round - self.first
            stopped = {"rule": until.name, "reached": False, "rounds": rounds} | progress.stopped
            self.progress = progress._replace(stopped=stopped)
            messages += warn_unreached(stopped)
        samples = self.samples()
        if self.settings.record.draws_to is None:
            for warn_of in (warn_lost, warn_excluded, warn_rejected):
                messages += warn_of(samples.info)
        return replace(samples, warnings=messages)

    def _resume(self, end: int) -> None:
        """Go back to where the checkpoint is, if there is one."""
        settings, executor, progress = self.settings, self.executor, self.progress
        checkpoint = settings.checkpoint
        if checkpoint is None:
            return
        identity = fingerprint(
            executor.plain,
            self.rows,
            self.keys,
            executor.simulated_shapes._replace(
                broadcast=executor.to_host(progress.state.broadcast)
            ),
            self.accumulators,
            progress.accumulator_states,
        )
        identity |= {
            "num_chains": len(self.keys),
            "num_burnin": settings.num_burnin,
            "thinning": settings.thinning,
            "keep_draws": settings.record.keep_draws,
            "whether draws go to a file": settings.record.draws_to is not None,
            "the rule of until": None if settings.until is None else settings.until.name,
        }
        writes = is_first() or not executor.shared
        self.saver = Saver(checkpoint, identity, self.first, writes=writes)
        saved = self.saver.load(self.recorder, (executor.shapes, progress.accumulator_states))
        if executor.shared and not all_equal(-1 if saved is None else saved.round):
            raise ValueError(
                f"The processes of this run do not find the same checkpoint in "
                f"{checkpoint.directory}: it must be a folder that all of them see."
            )
        if saved is None:
            return
        if saved.round > end:
            raise ValueError(
                f"The checkpoint in {checkpoint.directory} is at round {saved.round}, behind the "
                f"{end} rounds that are asked for. {checkpoint.advice}"
            )
        self._warn_of_resuming(self.saver, saved.round, end)
        self.progress = saved._replace(
            state=executor.lay_out(saved.state),
            accumulator_states=executor.lay_out_chains(saved.accumulator_states),
        )

    def _warn_of_resuming(self, saver: Saver, round_: int, end: int) -> None:
        """Warn where what follows, or what is returned, is not that of an uninterrupted run."""
        if round_ < end and (changed := saver.changed_versions):
            self.messages += warn(
                f"The checkpoint in {saver.directory} was written with {changed}: draws from round "
                f"{round_} on may differ from those of an uninterrupted run.",
                depth=6,
            )
        for lost in saver.lost:
            first, last = self._round_of(lost.first), self._round_of(lost.last) - 1
            self.messages += warn(
                f"{lost.damage} The draws of rounds {first} to {last} are lost, and the run "
                f"continues without them: put back a copy of that file, or delete "
                f"{saver.directory} to run all rounds again.",
                depth=6,
            )

    def _save(self, *, at_end: bool) -> None:
        """Write a checkpoint of where the run is; before its end, while it goes on."""
        assert self.saver is not None
        whole = self.progress._replace(
            state=self.executor.gather(self.progress.state),
            accumulator_states=self.executor.to_host(self.progress.accumulator_states),
        )
        # A warning names the user's line: fewer calls lie between at the end of a run.
        self.saver.save(whole, wait=at_end or self.executor.in_place, depth=6 - at_end)

    def _agreed(self, number: float) -> float:
        """Return what all processes of the run take for `number`, which may differ between them."""
        return agreed(number) if self.executor.shared else number

    def _num_kept(self, round_: int) -> int:
        """Return how many draws of a chain are kept before round `round_`."""
        return max(round_ - self.keep_from, 0) // self.settings.thinning

    def _round_of(self, num_draws: int) -> int:
        return self.keep_from + num_draws * self.settings.thinning

    def _advance(self, end: int, bar: Any, interrupts: Interrupts) -> None:
        """Run rounds up to `end`."""
        until, saver = self.settings.until, self.saver
        budget = BUFFER_BYTES // max(num_bytes(self.recorder.shapes) * len(self.keys), 1)
        # A power of two, so that another number of draws runs the same program; one program serves
        # all short runs, such as those in which chains adapt.
        capacity = max(2 ** max(self._num_kept(end) - 1, 0).bit_length(), LEAST_CAPACITY)
        capacity = min(capacity, max(budget, 1), self.pace.longest)
        if not self.settings.record.keep_draws:
            capacity = 0
        length = self.pace.block
        asked = 0 if until is None else self._next_check(until, end)
        while self.progress.round < end and not self.progress.stopped.get("reached"):
            interrupts.check()
            at = self.progress.round
            stop = min(self.pace.end_of(at, length), end)
            if capacity:
                stop = min(stop, self._round_of(self._num_kept(at) + capacity))
            if until is not None:
                stop = min(stop, self._round_of(asked))
            if saver is not None:
                stop = min(stop, saver.stop_before(at) or stop)
            begun = time.perf_counter()
            segment = self._segment(at, stop, capacity)
            took = self._agreed(time.perf_counter() - begun)
            self._take(segment, at, stop)
            bar.update(stop - at)
            length = self.pace.next_length(length, stop - at, took)
            if until is not None and stop in (self._round_of(asked), end):
                self._ask(until)
                asked = until.next_check(asked)
            if saver is not None and self._agreed(saver.due(stop)):
                self._save(at_end=False)

    def _next_check(self, until: StoppingRule, end: int) -> int:
        """Return after how many draws to ask next; ask now if an interrupt came before that."""
        at = self.progress.round
        asked = until.next_check(0)
        while at > self._round_of(asked):
            asked = until.next_check(asked)
        answered = self.progress.stopped.get("rounds") == at - self.first
        if at in (self._round_of(asked), end) and not answered:
            self._ask(until)
        return until.next_check(asked) if at == self._round_of(asked) else asked

    def _ask(self, until: StoppingRule) -> None:
        """Ask the rule of `until` whether the draws suffice."""
        if self._num_kept(self.progress.round) < until.next_check(0):
            return  # fewer than the rule can judge
        kept = self.recorder.all(self.progress.draws)
        # Joined once, so that asking often does not join often; a rule gets a copy of its own.
        self.progress = self.progress._replace(draws=Draws(0, (kept,)))
        read = kept.draw
        if until.reads == "info":
            read = kept.info | {"num_clients": np.int32(self.settings.num_clients)}
        verdict = until.check(jax.tree.map(np.copy, read))
        stopped = {
            "rule": until.name,
            "reached": bool(self._agreed(verdict.stop)),
            "rounds": self.progress.round - self.first,
            **{name: float(x) for name, x in verdict.figures.items()},
        }
        self.progress = self.progress._replace(stopped=stopped)

    def _segment(self, at: int, stop: int, capacity: int) -> Segment:
        """Run rounds ``[at, stop)``; raise `NonFiniteError` if a chain turns non-finite."""
        numbers = (at, stop, self.keep_from, self.settings.thinning, self._num_kept(at))
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in numbers))
        kernel = schedules.tabulate(self.kernel, at, self.pace.longest, stop - at)

        work = Work(
            kernel,
            plan,
            self.accumulators,
            self.progress.accumulator_states,
            self.pace.block,
            capacity,
            self.canonical,
        )
        try:
            segment = self.executor.run(work, self.progress.state, at, stop)
        except BaseException:
            if self.executor.finished_rounds is not None:
                round_, segment = self.executor.finished_rounds
                self._take(segment, at, round_)
            raise
        first_bad = self.executor.to_host(segment.first_bad)
        if (first_bad >= 0).any():
            round_ = int(first_bad[first_bad >= 0].min())
            if round_ > at:
                # Once more up to the last good round: draws, state and totals then belong together.
                self._take(self._segment(at, round_, capacity), at, round_)
            server = self.executor.to_host(segment.state.server)
            kept = replace(self.samples(), not_judged=f"not judged: round {round_} is not finite")
            raise non_finite(kept, first_bad, round_, self.kernel.traits.divergence_hint, server)
        return segment

    def _take(self, segment: Segment, at: int, stop: int) -> None:
        """Go on to where a segment ended."""
        progress, to_host = self.progress, self.executor.to_host
        high, low = np.moveaxis(to_host(segment.bits).astype(np.int64), 1, 0)
        up, down = (high * 2**32 + low).T
        new = {"bits_up": up, "bits_down": down, "rounds": stop - at}
        draws, num = progress.draws, self._num_kept(stop) - self._num_kept(at)
        if segment.records.info and num:
            # Sliced on the host: on the device each number of draws would compile a program of its
            # own. Copied, so that slots without a draw are not kept alive.
            records = jax.tree.map(lambda leaf: leaf[:, :num].copy(), to_host(segment.records))
            draws = self.recorder.add(draws, records)
        self.progress = Progress(
            stop,
            segment.state,
            segment.accumulator_states,
            {name: total + new[name] for name, total in progress.totals.items()},
            draws,
            progress.stopped,
        )

    def chosen_placement(self) -> Placement:
        """Return where the run is, with what was chosen by itself."""
        # Where convolutions are rewritten, clients run one after the other.
        at_a_time = 1 if self.canonical else self.executor.program.arrangement.clients_at_a_time
        return replace(self.settings.placement, clients_at_a_time=at_a_time)

    def samples(self) -> Samples:
        """Return what was kept so far."""
        progress, executor = self.progress, self.executor
        kept = self.recorder.all(progress.draws)
        state = executor.gather(progress.state)
        if not executor.in_place:
            state = jax.tree.map(jnp.asarray, state)
        host = executor.to_host(progress.accumulator_states)
        results = {
            name: accumulator.result(host[name], self._num_kept(progress.round))
            for name, accumulator in self.accumulators.items()
        }
        own = local_model(self.kernel)
        return Samples(
            kept.draw,
            jax.tree.map(lambda leaf: leaf, kept.info),
            state,
            progress.totals,
            constrain_fn_of(self.kernel),
            progress.stopped,
            results,
            self.chosen_placement(),
            settings=self.settings.description
            | {
                "where": str(self.chosen_placement()),
                "seconds": f"{time.perf_counter() - self.begun:.1f}",
            },
            versions=versions(),
            local=kept.latents if self.settings.record.local else None,
            constrain_local_fn=None if own is None else constrain_client(own),
        )
