"""Ctrl-C at the worst time: while draws and states are recorded, and after the last round."""

import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.diagnostics import StopDecision
from fedmcmc.records import MemoryRecorder, ZarrRecorder
from fedmcmc.records import _recorders as recorders
from fedmcmc.runs import _executors as executors
from fedmcmc.runs import _run as run_module
from fedmcmc.runs import _sample as sample_module
from fedmcmc.runs import _watch as watch
from fedmcmc.runs._pace import Pace
from fedmcmc.runs._run import Run
from fedmcmc.storage import Saver
from tests.storage.small_run import kernel, numbers, run
from tests.support import killed_run
from tests.support.killed_run import assert_same
from tests.support.lanes import fast_and_slow


def interrupt_once(call, number):
    """Return `call`, followed by an interrupt after its call with this number."""
    times = []

    def interrupted(*args, **kwargs):
        result = call(*args, **kwargs)
        times.append(None)
        if len(times) == number:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("recorder", fast_and_slow([MemoryRecorder, ZarrRecorder], [ZarrRecorder]))
def test_draws_without_their_state_are_dropped(recorder, tmp_path, monkeypatch):
    """Draws that were recorded without their state are not returned, saved or run twice."""
    monkeypatch.setattr(recorders, "CHUNK_BYTES", 1000)  # of a few segments
    on_disk = recorder is ZarrRecorder
    settings = dict(
        draws_to=tmp_path / "draws.zarr" if on_disk else None,
        checkpoint=fedmcmc.Checkpoint(tmp_path / "c", every_rounds=10),
    )
    expected = run(None, 60)
    for method, number in (("add", 3), *([("_write", 1)] * on_disk)):
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="Interrupted"):
            patch.setattr(recorder, method, interrupt_once(getattr(recorder, method), number))
            cut = run(None, 60, **settings)
        num = int(cut.state.broadcast.round[0])
        assert 0 < num < 60 and cut.num_draws == cut.totals["rounds"][0] == num
        np.testing.assert_array_equal(np.asarray(cut.draws), expected.draws[:, :num])
        np.testing.assert_array_equal(np.asarray(cut.info["round"])[0], np.arange(num))
    assert_same(numbers(run(None, 60, **settings)), numbers(expected))


def test_an_interrupt_during_the_first_chunk_leaves_no_draw(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "CHUNK_BYTES", 100)
    with pytest.warns(RuntimeWarning, match="Interrupted"), monkeypatch.context() as patch:
        patch.setattr(ZarrRecorder, "_write", interrupt_once(ZarrRecorder._write, 1))
        cut = run(None, 60, draws_to=tmp_path / "draws.zarr")
    assert cut.num_draws == cut.totals["rounds"][0] == 0
    assert {len(leaf[0]) for leaf in jax.tree.leaves((cut.draws, cut.info))} == {0}


def test_an_interrupt_during_the_last_checkpoint_keeps_the_draws(tmp_path, monkeypatch):
    """The draws are returned, and the next run waits for the writer of this one."""
    checkpoint = fedmcmc.Checkpoint(tmp_path, every_rounds=10)

    def interrupted(saver, progress, *, wait, **settings):
        save(saver, progress, wait=False, **settings)
        if wait:
            raise KeyboardInterrupt

    save, expected = Saver.save, run(None, 60)
    with pytest.warns(RuntimeWarning, match="Interrupted"), monkeypatch.context() as patch:
        patch.setattr(Saver, "save", interrupted)
        cut = run(None, 30, checkpoint=checkpoint)
    np.testing.assert_array_equal(cut.draws, expected.draws[:, :30])
    assert_same(numbers(run(None, 60, checkpoint=checkpoint)), numbers(expected))


@pytest.mark.parametrize("max_rounds", [60, 30])
def test_an_interrupt_during_a_stopping_rule_does_not_change_the_stop(max_rounds, tmp_path):
    """A resumed run repeats the check that was interrupted."""

    def run_until_stopped(checkpoint=None, interrupt=None):
        def check(draws):
            if draws.shape[1] == interrupt:
                raise KeyboardInterrupt
            return StopDecision(draws.shape[1] >= 30, {"mean": jnp.mean(draws)})

        rule = fedmcmc.diagnostics.StoppingRule(lambda num: num + 15, check, "30 draws")
        return run(None, None, max_rounds=max_rounds, until=rule, checkpoint=checkpoint)

    checkpoint = fedmcmc.Checkpoint(tmp_path, every_rounds=10)
    with pytest.warns(RuntimeWarning, match=r"Interrupted|without 30 draws"):
        run_until_stopped(checkpoint, interrupt=30)
    resumed, expected = run_until_stopped(checkpoint), run_until_stopped()
    assert resumed.num_draws == expected.num_draws == 30
    assert resumed.stopped == expected.stopped


@pytest.mark.slow
def test_an_interrupt_while_client_states_are_stored_keeps_their_round(tmp_path, monkeypatch):
    """The states that a run returns and saves belong to its last round."""
    chosen = fedmcmc.fed_ep(
        killed_run.posterior(), inference=fedmcmc.inference.exact_gaussian(), cohort_size=2
    )

    def run_stored(num_rounds, checkpoint=None):
        return fedmcmc.sample(
            jax.random.key(0),
            chosen,
            killed_run.data(),
            jnp.zeros(3),
            num_rounds=num_rounds,
            progress=False,
            checkpoint=checkpoint,
            placement=fedmcmc.Placement(client_store=fedmcmc.HostStore(device_bytes=1)),
        )

    def write_first_client(clients, ids, table):
        write(clients, ids[:1], jax.tree.map(lambda leaf: leaf[:, :1], table))

    write, expected = executors.write, run_stored(21)
    for number in range(1, 9):
        checkpoint = fedmcmc.Checkpoint(tmp_path / str(number), every_rounds=3)
        writes = iter([write] * (number - 1) + [interrupt_once(write_first_client, 1)])
        with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match="Interrupted"):
            patch.setattr(executors, "write", lambda *args, w=writes: next(w, write)(*args))
            cut = run_stored(21, checkpoint)
        num = int(cut.state.broadcast.round[0])
        assert 0 < num < 21
        for actual, exact in ((cut, run_stored(num)), (run_stored(21, checkpoint), expected)):
            assert_same(numbers(actual), numbers(exact))
            chex.assert_trees_all_equal(actual.state.clients, exact.state.clients)


@pytest.fixture(scope="module")
def compiled_kernel():
    """Return a kernel that is compiled once for all tests."""
    return kernel()


def interrupting(call, *, before, num_signals):
    """Return `call` with an interrupt of the operating system before or after its first call."""
    signaled = []

    def signal_once():
        if not signaled:
            signaled.append(None)
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGINT)

    def interrupted(*args, **kwargs):
        if before:
            signal_once()
        result = call(*args, **kwargs)
        signal_once()
        return result

    return interrupted


AFTER_THE_ROUNDS = [
    (Run, "_finish"),
    (Run, "samples"),
    (MemoryRecorder, "all"),
    (executors.Executor, "gather"),
    (Saver, "close"),
    (run_module, "warn_lost"),
    (sample_module, "finish"),
    (watch, "warn_stuck"),
    (watch, "check_at_rest"),
    (watch, "warn_divergence"),
    (watch, "judge"),
    (sample_module, "add_reason"),
    (sample_module, "missing_target"),
]


@pytest.mark.filterwarnings("ignore:.*draws:fedmcmc.SamplingWarning")
@pytest.mark.parametrize("num_signals", [1, 2])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("where", "name"), AFTER_THE_ROUNDS, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_signal_after_the_rounds_loses_no_draw(
    where, name, before, num_signals, compiled_kernel, tmp_path, monkeypatch
):
    call = interrupting(getattr(where, name), before=before, num_signals=num_signals)
    monkeypatch.setattr(where, name, call)
    with pytest.warns(RuntimeWarning, match="Interrupted|could not be judged"):
        cut = run(None, 60, chosen=compiled_kernel, checkpoint=fedmcmc.Checkpoint(tmp_path))
    assert cut.num_draws == cut.totals["rounds"][0] == 60
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("num_signals", [1, 2])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["_run_segment", "_record_segment"])
def test_a_signal_between_segments_keeps_the_rounds_before(
    name, before, num_signals, compiled_kernel, monkeypatch
):
    monkeypatch.setattr(run_module, "pace_of", lambda block: Pace(10, 10))
    expected, calls = run(None, 60, chosen=compiled_kernel), []
    method = getattr(Run, name)

    def interrupt_third_call(*args, **kwargs):
        calls.append(None)
        if len(calls) == 3:
            return interrupting(method, before=before, num_signals=num_signals)(*args, **kwargs)
        return method(*args, **kwargs)

    monkeypatch.setattr(Run, name, interrupt_third_call)
    with pytest.warns(RuntimeWarning, match="Interrupted"):
        cut = run(None, 60, chosen=compiled_kernel)
    assert cut.num_draws in (20, 30)
    np.testing.assert_array_equal(cut.draws, expected.draws[:, : cut.num_draws])


def test_a_signal_at_the_end_of_a_resumable_run_raises(compiled_kernel, tmp_path, monkeypatch):
    call = interrupting(Run._finish, before=True, num_signals=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "_finish", call)
        with fedmcmc.resumable(tmp_path):
            run(None, 60, chosen=compiled_kernel)
    assert fedmcmc.Checkpoint(tmp_path / "0001").exists


def test_a_third_signal_raises(compiled_kernel, monkeypatch):
    call = interrupting(Run._finish, before=True, num_signals=3)
    monkeypatch.setattr(Run, "_finish", call)
    with pytest.raises(KeyboardInterrupt):
        run(None, 60, chosen=compiled_kernel)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_user_stays(compiled_kernel, monkeypatch):
    calls = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        call = interrupting(Run._finish, before=True, num_signals=1)
        monkeypatch.setattr(Run, "_finish", call)
        assert run(None, 60, chosen=compiled_kernel).num_draws == 60 and calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)
