"""A run on the host: one compiled program, called in segments so that draws leave the device."""

import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import StoppingRule
from fedmcmc.placement import Placement
from fedmcmc.pytrees import schedules, trees
from fedmcmc.records import Keeper, MemoryKeeper, Samples, ZarrKeeper
from fedmcmc.rounds import (
    TOGETHER,
    Arrangement,
    Collect,
    Kept,
    Plan,
    Program,
    Segment,
    Streams,
    first_found,
    run_segment,
)
from fedmcmc.runs._pace import pace_of
from fedmcmc.runs._watch import (
    largest,
    non_finite,
    warn_excluded,
    warn_grown,
    warn_lost,
    warn_unreached,
)
from fedmcmc.storage import Checkpoint, Saved, Saver, digest, digests_of_clients, fingerprint

__all__ = ["Keeping", "Run"]

ONE_DEVICE = Placement()
BUFFER_BYTES = 2**26
"""Memory for the draws that wait on the device for the end of a segment."""


class Keeping(NamedTuple):
    """What a run keeps, and where; see `fedmcmc.sample`."""

    collect: Collect | None = None
    accumulators: Streams = {}  # noqa: RUF012
    draws: bool = True
    draws_to: Path | None = None
    checkpoint: Checkpoint | None = None
    replaces_files: bool = False  # of an attempt that died
    by_client: bool = False  # rows are told apart client by client, as of a loader
    hands_on_interrupts: bool = False  # to the program, where others end at what was kept


class Run:
    """A run on the host: calls segments, moves what they keep to the host, watches for trouble."""

    def __init__(
        self,
        kernel: FederatedKernel,
        data: FederatedData,
        keys: Array,
        keeping: Keeping,
        state: FederatedState,
        until: StoppingRule | None = None,
        *,
        like: FederatedState | None = None,
        arrangement: Arrangement = TOGETHER,
        placement: Placement = ONE_DEVICE,
    ) -> None:
        # `like` has the shapes of the state in the program of one device, which tell the length
        # of blocks, and with it what a round's numbers are made of.
        # Types of Python numbers are weak, and those that a segment returns are not: one program
        # for the first and the later segments.
        state = jax.tree.map(trees.strong, state)
        self.kernel, self.data, self.keys, self.keeping = kernel, data, keys, keeping
        self.state, self.until, self.plain = state, until, (data, arrangement, keys)
        self.arrangement, self.placement = arrangement, placement
        self.start = largest(state)
        like = trees.shapes_but_keys(state) if like is None else like
        self.buffer_bytes = BUFFER_BYTES
        self.stopped: dict[str, Any] = {}
        # Tabulated, so that another schedule is not traced again for the same shapes; no value is
        # used, and a run that goes on need not have one for round 0.
        tabulated = schedules.tabulate(kernel, 0, 1, 0)
        program = Program(tabulated, data, arrangement, keeping.collect)
        shapes = program.kept_shapes(keys, like)
        self.canonical = program.needs_canonical(keys, like)
        self.pace = pace_of(program.block_length(keys, like))
        self.found = first_found(shapes, len(keys), keeping.accumulators)
        self.keeper = self._keeper(shapes)
        zero = np.zeros(len(keys), np.int64)
        self.totals = {"bits_up": zero, "bits_down": zero, "rounds": zero}
        self.first = self.at = int(np.asarray(state.broadcast.round)[0])
        self.keep_from, self.thinning = self.first, 1
        self.saver: Saver | None = None

    def _keeper(self, shapes: Kept) -> Keeper:
        keeping, num_chains = self.keeping, len(self.keys)
        if keeping.draws_to is None:
            return MemoryKeeper(shapes, num_chains)
        own = keeping.replaces_files
        resume = own and keeping.checkpoint is not None and keeping.checkpoint.exists
        return ZarrKeeper(keeping.draws_to, shapes, num_chains, resume=resume, replace=own)

    def go(self, num_burnin: int, num_rounds: int, thinning: int, bar: Any) -> Samples:
        """Run all rounds and return what was kept."""
        first, end = self.first, self.first + num_rounds
        self.keep(num_burnin, thinning)
        self._resume(end)
        bar.update(self.at - first)
        outside = sys.exception()  # which the caller handles, and which is none of this run's
        interrupted = False
        try:
            self.advance(end, bar)
        except KeyboardInterrupt:
            self._interrupted()
            if self.keeping.hands_on_interrupts:
                raise
            interrupted = True
        finally:
            if self.saver is not None:
                error = sys.exception()
                if self._can_save(None if error is outside else error):
                    self._save(wait=True)
                self.saver.close()
        return self.finished(interrupted=interrupted)

    def finished(self, *, interrupted: bool) -> Samples:
        """Return what was kept, and warn of what a user might not see in it."""
        if interrupted:
            warnings.warn(
                f"Interrupted in or after round {self.at}; returning what was kept before. Go on "
                f"with sample(..., state=samples.state).",
                RuntimeWarning,
                stacklevel=5,
            )
        if self.until is not None and not self.stopped.get("reached"):
            rounds = self.at - self.first
            self.stopped = {"rule": self.until.name, "reached": False, "rounds": rounds} | (
                self.stopped
            )
            warn_unreached(self.stopped)
        samples = self.samples()
        if self.keeping.draws_to is None:
            warn_lost(samples.info)
            warn_excluded(samples.info)
        warn_grown(self.start, largest(samples.state))
        return samples

    def _interrupted(self) -> None:
        """Raise where a run cannot return what it has after an interrupt."""

    def _can_save(self, error: BaseException | None) -> bool:
        """Return whether to write a checkpoint at the end of a run, or at an `error`."""
        return True

    def _resume(self, end: int) -> None:
        """Go back to where the checkpoint is, if there is one."""
        checkpoint = self.keeping.checkpoint
        if checkpoint is None:
            return
        data, arrangement, keys = self.plain
        like = self._whole_shapes()
        identity: dict[str, Any] = fingerprint(
            self.kernel,
            data,
            arrangement,
            self._rows_digest(),
            keys,
            like._replace(broadcast=self._host(self.state.broadcast)),
            self.keeping.collect,
            self.keeping.accumulators,
            self.found,
        )
        identity |= {
            "num_chains": len(self.keys),
            "num_burnin": self.keep_from - self.first,
            "thinning": self.thinning,
            "keep_draws": self.keeping.draws,
            "whether draws go to a file": self.keeping.draws_to is not None,
            "the rule of until": None if self.until is None else self.until.name,
        }
        self.saver = Saver(checkpoint, identity, writes=self._writes())
        saved = self.saver.load(self.keeper, like, self.found)
        self._check_loaded(checkpoint, saved)
        if saved is None:
            return
        if saved.round > end:
            raise ValueError(
                f"The checkpoint in {checkpoint.directory} is at round {saved.round}, behind the "
                f"{end} rounds that are asked for. {checkpoint.advice}"
            )
        self.at = saved.round
        self.totals, self.stopped = saved.totals, saved.stopped
        self._restore(saved.state)
        self._restore_found(saved.found)

    def _rows_digest(self) -> str:
        data, *_ = self.plain
        if self.keeping.by_client:
            words = digests_of_clients(data, np.arange(data.num_clients))
            return digest((words, np.asarray(data.size)))
        return digest((data.rows, data.start, data.size))

    def _writes(self) -> bool:
        """Return whether this process writes what the run keeps on disk."""
        return True

    def _check_loaded(self, checkpoint: Checkpoint, saved: Saved | None) -> None:
        """Raise if what was read here does not do for the run."""

    def _whole_state(self) -> FederatedState:
        """Return the state, clients in their own order."""
        return self.state

    def _whole_shapes(self) -> FederatedState:
        """Return the shapes of the whole state, typed keys as they are."""
        shapes: FederatedState = trees.shapes_but_keys(self._whole_state())
        return shapes

    def _restore(self, state: FederatedState) -> None:
        self.state = jax.tree.map(jnp.asarray, state)

    def _restore_found(self, found: dict[str, ArrayTree]) -> None:
        self.found = jax.tree.map(jnp.asarray, found)

    def _whole_found(self) -> dict[str, ArrayTree]:
        """Return the accumulators' states of all chains."""
        return self.found

    def _host(self, tree: ArrayTree) -> ArrayTree:
        """Return arrays with a leading chain axis on the host."""
        return jax.tree.map(np.asarray, tree)

    def _agreed(self, number: float) -> float:
        """Return what all processes of the run take for `number`, which may differ between them."""
        return number

    def _save(self, *, wait: bool) -> None:
        assert self.saver is not None
        whole = (self._whole_state(), self._whole_found())
        saved = Saved(self.first, self.at, *whole, self.totals, self.stopped)
        try:
            self.saver.save(saved, self.keeper, wait=wait)
        except OSError as error:  # a full disk must not cost the draws
            self.saver.give_up()
            warnings.warn(
                f"No checkpoint could be written up to round {self.at} ({error}); the run goes on "
                "without. The last one before is still good.",
                RuntimeWarning,
                stacklevel=6,
            )

    def _num_kept(self, round_: int) -> int:
        """Return how many draws of a chain are kept before round `round_`."""
        return max(round_ - self.keep_from, 0) // self.thinning

    def _round_of(self, num_draws: int) -> int:
        return self.keep_from + num_draws * self.thinning

    def keep(self, num_burnin: int, thinning: int) -> None:
        """Say which rounds are kept."""
        self.keep_from, self.thinning = self.first + num_burnin, thinning

    def advance(self, end: int, bar: Any) -> None:
        """Run rounds up to `end`; what was kept so far is safe from an interrupt."""
        bytes_per_draw = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.keeper.shapes)
        )
        budget = max(self.buffer_bytes // max(bytes_per_draw * len(self.keys), 1), 1)
        # A power of two, so that another number of draws runs the same program.
        capacity = 2 ** max(self._num_kept(end) - 1, 0).bit_length()
        capacity = int(min(capacity, budget, self.pace.longest)) * self.keeping.draws
        length = self.pace.block
        asked = 0 if self.until is None else self.until.next_check(0)
        while self.until is not None and self.at >= self._round_of(asked):
            asked = self.until.next_check(asked)
        while self.at < end and not self.stopped.get("reached"):
            at = self.at
            stop = min(self.pace.end_of(at, length), end)
            if capacity:
                stop = min(stop, self._round_of(self._num_kept(at) + capacity))
            if self.until is not None:
                stop = min(stop, self._round_of(asked))
            if self.saver is not None:
                stop = min(stop, self.saver.stop_before(at, self.first) or stop)
            begun = time.perf_counter()
            segment = self._segment(at, stop, capacity)
            took = self._agreed(time.perf_counter() - begun)
            self._take(segment, at, stop)
            bar.update(stop - at)
            length = self.pace.next_length(length, stop - at, took)
            if self.until is not None and stop in (self._round_of(asked), end):
                self._ask(self._num_kept(stop), stop - self.first)
                asked = self.until.next_check(asked)
            if self.saver is not None and self._agreed(self.saver.due(stop, self.first)):
                self._save(wait=False)

    def _ask(self, num_draws: int, num_rounds: int) -> None:
        assert self.until is not None
        if num_draws < self.until.next_check(0):
            return  # fewer than the rule can judge
        verdict = self.until.check(self.samples().draws)
        self.stopped = {
            "rule": self.until.name,
            "reached": bool(self._agreed(verdict.stop)),
            "rounds": num_rounds,
            **verdict.figures,
        }

    def _segment(self, at: int, stop: int, capacity: int) -> Segment:
        given = (at, stop, self.keep_from, self.thinning, self._num_kept(at))
        plan = Plan(*(jnp.asarray(x, jnp.int32) for x in given))
        segment = self._compute(at, stop, plan, capacity)
        first_bad = self._host(segment.first_bad)
        if (first_bad >= 0).any():
            self._stop(first_bad, at, capacity)
        return segment

    def _compute(self, at: int, stop: int, plan: Plan, capacity: int) -> Segment:
        return self._call(self.arrangement, self.state, at, stop, plan, capacity)

    def _call(
        self,
        arrangement: Arrangement,
        state: FederatedState,
        at: int,
        stop: int,
        plan: Plan,
        capacity: int,
    ) -> Segment:
        kernel = schedules.tabulate(self.kernel, at, self.pace.longest, stop - at)
        return run_segment(
            Program(kernel, self.data, arrangement, self.keeping.collect),
            self.keys,
            state,
            plan,
            self.keeping.accumulators,
            self.found,
            block=self.pace.block,
            capacity=capacity,
            canonical=self.canonical,
        )

    def _take(self, segment: Segment, at: int, stop: int) -> None:
        high, low = np.moveaxis(self._host(segment.bits).astype(np.int64), 1, 0)
        up, down = (high * 2**32 + low).T
        new = {"bits_up": up, "bits_down": down, "rounds": stop - at}
        totals = {name: total + new[name] for name, total in self.totals.items()}
        if segment.kept.info:
            # Sliced on the host: on the device each number of draws would compile a program of its
            # own. Copied, so that slots without a draw are not kept alive.
            num = self._num_kept(stop) - self._num_kept(at)
            self.keeper.append(
                jax.tree.map(lambda leaf: leaf[:, :num].copy(), self._host(segment.kept))
            )
        self.state, self.totals, self.at = segment.state, totals, stop
        self.found = segment.found

    def _stop(self, first_bad: np.ndarray, at: int, capacity: int) -> None:
        round_ = int(first_bad[first_bad >= 0].min())
        if round_ > at:
            # Once more up to the last good round: draws, state and totals then belong together.
            self._take(self._segment(at, round_, capacity), at, round_)
        raise non_finite(self.samples(), first_bad, round_)

    def chosen_placement(self) -> Placement:
        """Return where the run is, with what was chosen by itself."""
        # Where convolutions are rewritten, clients run one after the other.
        at_a_time = 1 if self.canonical else self.arrangement.clients_at_a_time
        return replace(self.placement, clients_at_a_time=at_a_time)

    def samples(self) -> Samples:
        """Return what was kept so far."""
        kept = self.keeper.all()
        host = self._host(self.found)
        results = {
            name: accumulator.result(host[name], self._num_kept(self.at))
            for name, accumulator in self.keeping.accumulators.items()
        }
        return Samples(
            kept.draw,
            jax.tree.map(lambda leaf: leaf, kept.info),
            self.state,
            self.totals,
            self.kernel.constrain_fn,
            self.stopped,
            results,
            self.chosen_placement(),
        )
