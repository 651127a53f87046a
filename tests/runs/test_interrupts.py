"""Ctrl-C at the worst time: while a segment's draws and states are being recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.records import MemoryRecorder, ZarrRecorder
from fedmcmc.records import _recorders as recorders
from fedmcmc.runs import _executors as executors
from tests.storage.small_run import numbers, run
from tests.support import killed_run
from tests.support.killed_run import assert_same


def once(call, number):
    """Return `call` followed by an interrupt at its `number`-th time."""
    times = []

    def interrupted(*args, **kwargs):
        result = call(*args, **kwargs)
        times.append(None)
        if len(times) == number:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("recorder", [MemoryRecorder, ZarrRecorder])
def test_between_the_draws_and_the_state(recorder, tmp_path, monkeypatch):
    """Draws that were recorded without their state are none: not returned, saved or run twice."""
    monkeypatch.setattr(recorders, "CHUNK_BYTES", 1000)  # of a few segments
    on_disk = recorder is ZarrRecorder
    given = dict(
        draws_to=tmp_path / "draws.zarr" if on_disk else None,
        checkpoint=fedmcmc.Checkpoint(tmp_path / "c", every_rounds=10),
    )
    whole = run(None, 60)
    for method, number in (("add", 3), *([("_write", 1)] * on_disk)):
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="Interrupted"):
            patch.setattr(recorder, method, once(getattr(recorder, method), number))
            cut = run(None, 60, **given)
        num = int(cut.state.broadcast.round[0])
        assert 0 < num < 60 and cut.num_draws == cut.totals["rounds"][0] == num
        np.testing.assert_array_equal(np.asarray(cut.draws), whole.draws[:, :num])
        np.testing.assert_array_equal(np.asarray(cut.info["round"])[0], np.arange(num))
    assert_same(numbers(run(None, 60, **given)), numbers(whole))


@pytest.mark.slow
def test_while_clients_states_are_written_to_a_store(tmp_path, monkeypatch):
    """The states that a run returns, and those that it saves, are of its round."""
    kernel = fedmcmc.fed_ep(
        killed_run.posterior(), inference=fedmcmc.inference.exact_gaussian(), cohort_size=2
    )

    def run_stored(num_rounds, checkpoint=None):
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            killed_run.data(),
            jnp.zeros(3),
            num_rounds=num_rounds,
            progress=False,
            checkpoint=checkpoint,
            placement=fedmcmc.Placement(client_store=fedmcmc.HostStore(device_bytes=1)),
        )

    def half(clients, ids, table):
        real(clients, ids[:1], jax.tree.map(lambda leaf: leaf[:, :1], table))

    real, whole = executors.write, run_stored(21)
    for number in range(1, 9):
        checkpoint = fedmcmc.Checkpoint(tmp_path / str(number), every_rounds=3)
        writes = iter([real] * (number - 1) + [once(half, 1)])
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="Interrupted"):
            patch.setattr(executors, "write", lambda *given, w=writes: next(w, real)(*given))
            cut = run_stored(21, checkpoint)
        num = int(cut.state.broadcast.round[0])
        assert 0 < num < 21
        for got, expected in ((cut, run_stored(num)), (run_stored(21, checkpoint), whole)):
            assert_same(numbers(got), numbers(expected))
            jax.tree.map(np.testing.assert_array_equal, got.state.clients, expected.state.clients)
