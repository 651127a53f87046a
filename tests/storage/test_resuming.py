"""Programs of several calls of `sample`, cut and started again under `fedmcmc.resumable`."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.diagnostics import StopDecision
from tests.support import killed_run
from tests.support.killed_run import assert_same
from tests.support.kills import Cut

CHAINED = dict(num_burnin=50, thinning=2)


def call(step_size=1e-3, position=None, **given):
    kernel = fedmcmc.lsd(killed_run.posterior(), step_size=step_size, batch_size=2)
    given = dict(num_rounds=200, progress=False) | given
    start = jnp.zeros(3) if position is None and "state" not in given else position
    return fedmcmc.sample(jax.random.key(3), kernel, killed_run.data(), start, **given)


def program(folder, stored=False):
    """Calls of several kinds, the second from where the first ended."""
    first = call(num_chains=2, **CHAINED)
    second = call(2e-3, state=first.state, num_rounds=150)
    more = [killed_run.run("store", folder, num_rounds=24)] if stored else []
    on_disk = call(record=fedmcmc.Record(draws_to=folder / "draws.zarr"))
    rule = fedmcmc.StoppingRule(lambda n: n + 40, lambda d: StopDecision(len(d[0]) > 99, {}), "100")
    ruled = call(num_rounds=None, until=rule, max_rounds=900)
    assert ruled.num_draws == 120
    return [first, second, *more, on_disk, ruled]


def all_numbers(results):
    return [number for samples in results for number in killed_run.numbers(samples)]


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_a_program_cut_again_and_again_is_one_program(stored, tmp_path, monkeypatch):
    whole = all_numbers(program(tmp_path / "whole", stored))
    cut, attempts = Cut(monkeypatch), 0
    folder = tmp_path / "checkpoints"

    def attempt():
        with fedmcmc.resumable(folder, every_rounds=30):
            return all_numbers(program(tmp_path / "cut", stored))

    found = None
    while found is None:
        cut.left, attempts = 7, attempts + 1
        with contextlib.suppress(KeyboardInterrupt):
            found = attempt()
    assert attempts >= 4
    assert_same(found, whole)
    names = [f"{i:04d}" for i in range(1, 5 + stored)]
    assert sorted(path.name for path in folder.iterdir()) == names
    cut.rounds = 0
    assert_same(attempt(), whole)
    assert cut.rounds == 0


def test_another_order_or_other_settings_are_refused(tmp_path):
    with fedmcmc.resumable(tmp_path / "c"):
        call(num_rounds=20)
        call(2e-3, num_rounds=20)
    delete = f"This is call %d .*, or delete {tmp_path / 'c'} to start anew"
    with (
        fedmcmc.resumable(tmp_path / "c"),
        pytest.raises(ValueError, match=f"numbers of the kernel.*{delete % 1}"),
    ):
        call(2e-3, num_rounds=20)
    with fedmcmc.resumable(tmp_path / "c"):
        call(num_rounds=20)
        with pytest.raises(ValueError, match=f"thinning .1, now 2.*{delete % 2}"):
            call(2e-3, num_rounds=20, thinning=2)
    with (
        fedmcmc.resumable(tmp_path / "c"),
        pytest.raises(ValueError, match=f"behind the 10 rounds.*{delete % 1}"),
    ):
        call(num_rounds=10)


def test_another_rule_is_refused(tmp_path):
    def ruled(name):
        rule = fedmcmc.StoppingRule(lambda n: n + 10, lambda d: StopDecision(True, {}), name)
        checkpoint = fedmcmc.Checkpoint(tmp_path)
        return call(num_rounds=None, until=rule, max_rounds=90, checkpoint=checkpoint)

    assert ruled("R-hat below 1.1").num_draws == 10
    with pytest.raises(ValueError, match="the rule of until"):
        ruled("R-hat below 1.01")
    assert ruled("R-hat below 1.1").num_draws == 10


@pytest.mark.slow
def test_which_calls_are_counted(tmp_path):
    """Not those with a checkpoint of their own, those within a call, those of other threads."""

    def check(draws):
        call(num_rounds=5)
        return StopDecision(False, {})

    rule = fedmcmc.StoppingRule(lambda n: n + 10, check, "never")
    with fedmcmc.resumable(tmp_path / "c"):
        call(num_rounds=20, checkpoint=fedmcmc.Checkpoint(tmp_path / "own"))
        with pytest.warns(RuntimeWarning, match="without never"):
            call(num_rounds=None, until=rule, max_rounds=20)
        thread = threading.Thread(target=call, kwargs=dict(num_rounds=20))
        thread.start()
        thread.join()
        call(num_rounds=20)
        with fedmcmc.resumable(tmp_path / "inner"):
            call(num_rounds=20)
        call(num_rounds=20)
    call(num_rounds=20)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["0001", "0002", "0003"]
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["0001"]


def test_an_interrupt_ends_the_program_and_not_a_call(tmp_path, monkeypatch):
    cut = Cut(monkeypatch)
    cut.left = 1
    with pytest.raises(KeyboardInterrupt), fedmcmc.resumable(tmp_path, every_rounds=30):
        call()
    assert cut.rounds == 30
    with fedmcmc.resumable(tmp_path):
        found = call()
    assert cut.rounds == 200
    np.testing.assert_array_equal(found.draws, call().draws)


@pytest.mark.slow
def test_a_call_that_turned_non_finite_does_so_again(tmp_path):
    """A program that goes on after it finds the same error, from where that call was last good."""
    found = []
    for _ in range(3):
        with fedmcmc.resumable(tmp_path), pytest.raises(fedmcmc.NonFiniteError) as caught:
            call(lambda r: jnp.where(r < 120, 1e-3, 1e30), num_chains=2)
        found.append((caught.value.round, caught.value.samples.draws))
    first, draws = found[0]
    assert first > 100 and draws.shape == (2, first, 3)
    for round_, again in found[1:]:
        assert round_ == first
        np.testing.assert_array_equal(again, draws)


def test_bad_settings(tmp_path):
    with (
        pytest.raises(ValueError, match="not both"),
        fedmcmc.resumable(tmp_path, every_rounds=3, every_seconds=1.0),
    ):
        pass
    with pytest.raises(TypeError, match="every_round"), fedmcmc.resumable(tmp_path, every_round=3):
        pass
