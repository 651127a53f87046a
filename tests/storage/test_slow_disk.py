"""Checkpoints that are due while the one before is still being written."""

import json
import threading

import jax
import numpy as np

import fedmcmc
from fedmcmc.records import Draws, MemoryRecorder
from fedmcmc.rounds import RoundRecord
from fedmcmc.storage import _saving
from tests.storage.small_run import numbers, run
from tests.support.killed_run import assert_same


def test_checkpoints_are_skipped_and_counted(tmp_path, monkeypatch):
    disk, write = threading.Event(), _saving.write_part

    def write_slowly(*args):
        disk.wait(60)
        return write(*args)

    save = _saving.Saver.save

    def save_at_end(saver, progress, *, wait, **settings):
        if wait:  # at the end of the run
            disk.set()
        save(saver, progress, wait=wait)

    monkeypatch.setattr(_saving, "write_part", write_slowly)
    monkeypatch.setattr(_saving.Saver, "save", save_at_end)
    checkpoint = fedmcmc.Checkpoint(tmp_path, every_rounds=10)
    samples = run(None, 60, checkpoint=checkpoint)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["round"] == 60 and record["num_skipped"] == 5
    assert json.loads((tmp_path / "run-before.json").read_text())["round"] == 10
    monkeypatch.undo()
    assert_same(numbers(run(tmp_path, 60)), numbers(samples))
    assert_same(numbers(samples), numbers(run(None, 60)))


def test_unsaved_draws_start_after_the_saved_ones():
    """In pieces of any length, and after they were joined."""
    shapes = RoundRecord(
        jax.ShapeDtypeStruct((), np.int32), {"round": jax.ShapeDtypeStruct((), np.int32)}
    )
    recorder, draws = MemoryRecorder(shapes, 1), Draws()
    for start, stop in ((0, 3), (3, 4), (4, 9)):
        rounds = np.arange(start, stop, dtype=np.int32)[None]
        draws = recorder.add(draws, RoundRecord(rounds, {"round": rounds}))
    joined = Draws(0, (recorder.all(draws),))
    for pieces in (draws, joined):
        for num_saved in (0, 2, 3, 4, 8):
            unsaved = pieces.after(num_saved)
            assert unsaved.draw[0].tolist() == list(range(num_saved, 9))
        assert pieces.num_draws == 9 and recorder.all(pieces).draw.shape == (1, 9)
