"""Runs on the host, which call one compiled program in segments and move draws off the device."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial
from tqdm import tqdm

from fedmcmc.diagnostics import StoppingRule
from fedmcmc.placement import Placement, all_equal, broadcast_from_first, is_first
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
from fedmcmc.rounds import Plan, RoundRecord, Segment, first_accumulator_states
from fedmcmc.runs._executors import Executor, RunHalted, SegmentWork
from fedmcmc.runs._growth import initial_scale
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._pace import pace_of
from fedmcmc.runs._watch import (
    NonFiniteError,
    non_finite_error,
    warn,
    warn_excluded,
    warn_lost,
    warn_rejected,
    warn_unreached,
)
from fedmcmc.storage import Checkpoint, Progress, Saver, fingerprint, versions
from fedmcmc.types import ArrayTree, FederatedState, as_functions, constrain_fn_of, local_model

MIN_CAPACITY = 64
"""Minimum number of draws per chain for which a program has memory."""
BUFFER_BYTES = 2**26
"""Memory on the device for the draws of a segment."""


class Settings(NamedTuple):
    """Settings of a run; see `fedmcmc.sample`."""

    num_clients: int
    num_rounds: int  # at most
    num_burnin: int
    thinning: int
    record: Record
    until: StoppingRule | None
    placement: Placement
    checkpoint: Checkpoint | None
    replaces_files: bool  # files of an attempt that died
    reraises_interrupts: bool  # otherwise an interrupted run returns its draws
    description: dict[str, Any]  # settings in words, for a report
    warnings: tuple[str, ...]  # from before the run


class Run:
    """Loop over segments that moves draws to the host and checks for errors.

    An executor runs segments, a recorder stores draws, and a saver writes checkpoints. `progress`
    is replaced as a whole after each segment. So an interrupt at any time leaves a state, draws and
    totals that belong to the same round. `rows` is the digest of the rows, for checkpoints.
    """

    def __init__(
        self, executor: Executor, state: FederatedState, rows: str, keys: Array, settings: Settings
    ) -> None:
        self.executor, self.rows, self.keys, self.settings = executor, rows, keys, settings
        self.start_time = time.perf_counter()
        self.kernel = executor.plain.kernel
        self.accumulators = dict(settings.record.streams)
        # With tables in place of schedules, kernels with different schedules share one trace. Only
        # shapes matter here. The table is empty, because the schedule of a resumed run may be
        # undefined in round 0.
        tabulated = schedules.tabulate(self.kernel, 0, 1, 0)
        plain, like = replace(executor.plain, kernel=tabulated), executor.table_shapes
        shapes = plain.record_shapes(keys, like)
        self.canonical = plain.needs_canonical(keys, like)
        self.pace = pace_of(plain.block_length(keys, like))
        if executor.longest is not None:
            self.pace = self.pace._replace(longest=min(self.pace.longest, executor.longest))
        self.recorder = self._create_recorder(shapes)
        self.saver: Saver | None = None
        self.messages = settings.warnings
        broadcast = executor.to_host(state.broadcast)
        self.start_round = int(broadcast.round[0])
        self.initial_scale = initial_scale(self.kernel, broadcast)
        self.keep_from = self.start_round + settings.num_burnin
        zero = np.zeros(len(keys), np.int64)
        self.progress = Progress(
            self.start_round,
            state,
            executor.lay_out_chains(first_accumulator_states(shapes, len(keys), self.accumulators)),
            {"bits_up": zero, "bits_down": zero, "rounds": zero},
            Draws(),
            {},
        )

    def _create_recorder(self, shapes: RoundRecord) -> Recorder:
        path, checkpoint = self.settings.record.draws_to, self.settings.checkpoint
        if path is None:
            return MemoryRecorder(shapes, len(self.keys))
        if self.executor.shared and not is_first():
            return ZarrReader(Path(path), shapes)
        replace_files = self.settings.replaces_files
        resume = replace_files and checkpoint is not None and checkpoint.exists
        return ZarrRecorder(
            Path(path), shapes, len(self.keys), resume=resume, replace=replace_files
        )

    def execute(self, bar: tqdm, interrupts: Interrupts) -> Samples:
        """Run all rounds and return the samples."""
        shared, end = self.executor.shared, self.start_round + self.settings.num_rounds
        reraises = shared or self.settings.reraises_interrupts
        self._resume(end)
        bar.update(self.progress.round - self.start_round)
        interrupted = False
        # After an error other processes may not reach this point: do not wait for them.
        is_synchronized = not shared
        try:
            with interrupts.allowed():
                self._run_until(end, bar, interrupts)
            is_synchronized = True
        except NonFiniteError:
            is_synchronized = True
            raise
        except RunHalted as error:
            reason = f"not judged: the run ended in round {self.progress.round}"
            error.samples = replace(
                self.samples(), reason_not_judged=reason, warnings=(str(error),)
            )
            raise
        except KeyboardInterrupt:
            if reraises:
                raise
            interrupted = True
        finally:
            if self.saver is not None:
                try:
                    if is_synchronized:
                        self._save(at_end=True)
                except KeyboardInterrupt:
                    if reraises:
                        raise
                    interrupted = True
                finally:
                    self.saver.close()
                if shared and is_synchronized:
                    broadcast_from_first(
                        0.0
                    )  # all processes wait until the last checkpoint is on disk
        return self._finish(interrupted=interrupted)

    def _finish(self, *, interrupted: bool) -> Samples:
        """Return the samples, and warn about problems that draws do not show."""
        until, progress = self.settings.until, self.progress
        messages = self.messages
        if interrupted:
            messages += warn(
                f"Interrupted in or after round {progress.round}; returning the draws kept before. "
                "Continue with sample(..., state=samples.state).",
                depth=5,
            )
        if until is not None and not progress.stopped.get("reached"):
            rounds = progress.round - self.start_round
            stopped = {"rule": until.name, "reached": False, "rounds": rounds} | progress.stopped
            self.progress = progress._replace(stopped=stopped)
            messages += warn_unreached(stopped)
        samples = self.samples()
        if self.settings.record.draws_to is None:
            for warn_fn in (warn_lost, warn_excluded, warn_rejected):
                messages += warn_fn(samples.info)
        return replace(samples, warnings=messages)

    def _resume(self, end: int) -> None:
        """Load the checkpoint, if there is one."""
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
        self.saver = Saver(checkpoint, identity, self.start_round, writes=writes)
        saved = self.saver.load(self.recorder, (executor.shapes, progress.accumulator_states))
        if executor.shared and not all_equal(-1 if saved is None else saved.round):
            raise ValueError(
                f"The processes of this run find different checkpoints in {checkpoint.directory}: "
                f"use a folder that is shared by all of them."
            )
        if saved is None:
            return
        if saved.round > end:
            raise ValueError(
                f"The checkpoint in {checkpoint.directory} is at round {saved.round}, beyond the "
                f"requested {end} rounds. {checkpoint.advice}"
            )
        self._warn_of_resuming(self.saver, saved.round, end)
        self.progress = saved._replace(
            state=executor.lay_out(saved.state),
            accumulator_states=executor.lay_out_chains(saved.accumulator_states),
        )

    def _warn_of_resuming(self, saver: Saver, round_: int, end: int) -> None:
        """Warn if the samples may differ from the samples of an uninterrupted run."""
        if round_ < end and (changed := saver.changed_versions):
            self.messages += warn(
                f"The checkpoint in {saver.directory} was written with {changed}: draws from round "
                f"{round_} on may differ from those of an uninterrupted run.",
                depth=6,
            )
        for lost in saver.lost:
            start, stop = self._round_of(lost.start), self._round_of(lost.stop)
            self.messages += warn(
                f"{lost.damage} The draws of rounds {start} to {stop - 1} are lost, and the run "
                f"continues without them: restore a copy of that file, or delete "
                f"{saver.directory} to run all rounds again.",
                depth=6,
            )

    def _save(self, *, at_end: bool) -> None:
        """Write a checkpoint; except at the end, the run continues during writing."""
        assert self.saver is not None
        gathered = self.progress._replace(
            state=self.executor.gather(self.progress.state),
            accumulator_states=self.executor.to_host(self.progress.accumulator_states),
        )
        # Warnings point to the user's line, which is one frame nearer at the end of a run.
        self.saver.save(gathered, wait=at_end or self.executor.in_place, depth=6 - at_end)

    def _agreed(self, number: float) -> float:
        """Return the value of `number` that all processes of the run use."""
        return broadcast_from_first(number) if self.executor.shared else number

    def _num_kept(self, round_: int) -> int:
        """Return the number of draws per chain that are kept before round `round_`."""
        return max(round_ - self.keep_from, 0) // self.settings.thinning

    def _round_of(self, num_draws: int) -> int:
        return self.keep_from + num_draws * self.settings.thinning

    def _run_until(self, end: int, bar: tqdm, interrupts: Interrupts) -> None:
        """Run rounds up to `end`."""
        until, saver = self.settings.until, self.saver
        budget = BUFFER_BYTES // max(num_bytes(self.recorder.shapes) * len(self.keys), 1)
        # With powers of two and a minimum, runs with similar numbers of draws share a program.
        capacity = max(2 ** max(self._num_kept(end) - 1, 0).bit_length(), MIN_CAPACITY)
        capacity = min(capacity, max(budget, 1), self.pace.longest)
        if not self.settings.record.keep_draws:
            capacity = 0
        length = self.pace.block
        next_check = 0 if until is None else self._next_check(until, end)
        while self.progress.round < end and not self.progress.stopped.get("reached"):
            interrupts.check()
            start = self.progress.round
            stop = min(self.pace.end_of(start, length), end)
            if capacity:
                stop = min(stop, self._round_of(self._num_kept(start) + capacity))
            if until is not None:
                stop = min(stop, self._round_of(next_check))
            if saver is not None:
                stop = min(stop, saver.stop_before(start) or stop)
            start_time = time.perf_counter()
            segment = self._run_segment(start, stop, capacity)
            seconds = self._agreed(time.perf_counter() - start_time)
            self._record_segment(segment, start, stop)
            bar.update(stop - start)
            length = self.pace.next_length(length, stop - start, seconds)
            if until is not None and stop in (self._round_of(next_check), end):
                self._check_stopping(until)
                next_check = until.next_check(next_check)
            if saver is not None and self._agreed(saver.due(stop)):
                self._save(at_end=False)

    def _next_check(self, until: StoppingRule, end: int) -> int:
        """Return the number of draws at the next check; check now if an interrupt skipped it."""
        round_, num_draws = self.progress.round, until.next_check(0)
        while round_ > self._round_of(num_draws):
            num_draws = until.next_check(num_draws)
        is_checked = self.progress.stopped.get("rounds") == round_ - self.start_round
        if round_ in (self._round_of(num_draws), end) and not is_checked:
            self._check_stopping(until)
        is_due = round_ == self._round_of(num_draws)
        return until.next_check(num_draws) if is_due else num_draws

    def _check_stopping(self, until: StoppingRule) -> None:
        """Apply the stopping rule to the draws and store its verdict."""
        if self._num_kept(self.progress.round) < until.next_check(0):
            return  # too few for the rule
        record = self.recorder.all(self.progress.draws)
        # Concatenate the draws only once; the rule gets a copy, which it may change.
        self.progress = self.progress._replace(draws=Draws(0, (record,)))
        values = record.draw
        if until.reads == "info":
            values = record.info | {"num_clients": np.int32(self.settings.num_clients)}
        verdict = until.check(jax.tree.map(np.copy, values))
        stopped = {
            "rule": until.name,
            "reached": bool(self._agreed(verdict.stop)),
            "rounds": self.progress.round - self.start_round,
            **{name: float(x) for name, x in verdict.figures.items()},
        }
        self.progress = self.progress._replace(stopped=stopped)

    def _run_segment(self, start: int, stop: int, capacity: int) -> Segment:
        """Run rounds ``[start, stop)``; raise `NonFiniteError` if a chain turns non-finite."""
        numbers = (start, stop, self.keep_from, self.settings.thinning, self._num_kept(start))
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in numbers))
        kernel = schedules.tabulate(self.kernel, start, self.pace.longest, stop - start)
        work = SegmentWork(
            kernel,
            plan,
            self.accumulators,
            self.progress.accumulator_states,
            self.pace.block,
            capacity,
            self.canonical,
        )
        try:
            segment = self.executor.run(work, self.progress.state, start, stop)
        except BaseException:
            if self.executor.finished_rounds is not None:
                round_, segment = self.executor.finished_rounds
                self._record_segment(segment, start, round_)
            raise
        first_bad = self.executor.to_host(segment.first_bad)
        if (first_bad >= 0).any():
            round_ = int(first_bad[first_bad >= 0].min())
            if round_ > start:
                # Run again up to the last finite round, so that draws, state and totals agree.
                self._record_segment(self._run_segment(start, round_, capacity), start, round_)
            server = self.executor.to_host(segment.state.server)
            reason = f"not judged: round {round_} is not finite"
            samples = replace(self.samples(), reason_not_judged=reason)
            hint = self.kernel.traits.divergence_hint
            raise non_finite_error(samples, first_bad, round_, hint, server)
        return segment

    def _record_segment(self, segment: Segment, start: int, stop: int) -> None:
        """Record the draws of a segment and update the progress."""
        progress, to_host = self.progress, self.executor.to_host
        high, low = np.moveaxis(to_host(segment.bits).astype(np.int64), 1, 0)
        up, down = (high * 2**32 + low).T
        new = {"bits_up": up, "bits_down": down, "rounds": stop - start}
        draws, num = progress.draws, self._num_kept(stop) - self._num_kept(start)
        if segment.records.info and num:
            # Slicing on the device would compile a program for each number of draws. The copy
            # releases the memory of unused slots.
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
        """Return the placement of the run, with the number of clients chosen by `sample`."""
        # Programs with rewritten convolutions run clients one after the other.
        at_a_time = 1 if self.canonical else self.executor.program.layout.clients_at_a_time
        return replace(self.settings.placement, clients_at_a_time=at_a_time)

    def samples(self) -> Samples:
        """Return the samples of the rounds so far."""
        progress, executor = self.progress, self.executor
        record = self.recorder.all(progress.draws)
        state = executor.gather(progress.state)
        if not executor.in_place:
            state = jax.tree.map(jnp.asarray, state)
        host = executor.to_host(progress.accumulator_states)
        results = {
            name: accumulator.result(host[name], self._num_kept(progress.round))
            for name, accumulator in self.accumulators.items()
        }
        local, placement = local_model(self.kernel), self.chosen_placement()
        seconds = f"{time.perf_counter() - self.start_time:.1f}"
        return Samples(
            record.draw,
            dict[str, Any](record.info),
            state,
            progress.totals,
            constrain_fn_of(self.kernel),
            progress.stopped,
            results,
            placement,
            settings=self.settings.description | {"where": str(placement), "seconds": seconds},
            versions=versions(),
            local=record.latents if self.settings.record.local else None,
            constrain_local_fn=(
                None
                if local is None or local.constrain_fn is None
                else Partial(_constrain_groups, as_functions(local.constrain_fn))
            ),
        )


def _constrain_groups(
    constrain_fn: Callable[..., ArrayTree], position: ArrayTree, latents: ArrayTree
) -> ArrayTree:
    """Return the latents of a client's groups in the user's parameters."""
    return jax.vmap(constrain_fn, in_axes=(None, 0))(position, latents)
