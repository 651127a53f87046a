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


def test_they_are_skipped_and_counted(tmp_path, monkeypatch):
    disk, write = threading.Event(), _saving.write_part

    def slow(*given):
        disk.wait(60)
        return write(*given)

    save = _saving.Saver.save

    def saves(saver, progress, *, wait, **given):
        if wait:  # at the end of the run
            disk.set()
        save(saver, progress, wait=wait)

    monkeypatch.setattr(_saving, "write_part", slow)
    monkeypatch.setattr(_saving.Saver, "save", saves)
    checkpoint = fedmcmc.Checkpoint(tmp_path, every_rounds=10)
    found = run(None, 60, checkpoint=checkpoint)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["round"] == 60 and record["num_skipped"] == 5
    assert json.loads((tmp_path / "run-before.json").read_text())["round"] == 10
    monkeypatch.undo()
    assert_same(numbers(run(tmp_path, 60)), numbers(found))
    assert_same(numbers(found), numbers(run(None, 60)))


def test_draws_that_no_part_holds():
    """Whatever pieces they came in, and whether or not they were joined since."""
    shapes = RoundRecord(
        jax.ShapeDtypeStruct((), np.int32), {"round": jax.ShapeDtypeStruct((), np.int32)}
    )
    recorder, draws = MemoryRecorder(shapes, 1), Draws()
    for first, last in ((0, 3), (3, 4), (4, 9)):
        rounds = np.arange(first, last, dtype=np.int32)[None]
        draws = recorder.add(draws, RoundRecord(rounds, {"round": rounds}))
    joined = Draws(0, (recorder.all(draws),))
    for held in (draws, joined):
        for num_saved in (0, 2, 3, 4, 8):
            unsaved = held.after(num_saved)
            assert unsaved.draw[0].tolist() == list(range(num_saved, 9))
        assert held.num_draws == 9 and recorder.all(held).draw.shape == (1, 9)
