"""Programs of several calls of `sample`, cut and started again under `fedmcmc.resumable`."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.diagnostics import StopDecision
from fedmcmc.kernels import Points, evaluations
from fedmcmc.runs import SimulatedConsortium
from fedmcmc.runs import _consortium as consortium_module
from fedmcmc.storage import _answers as answers_module
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
    rule = fedmcmc.diagnostics.StoppingRule(
        lambda n: n + 40, lambda d: StopDecision(len(d[0]) > 99, {}), "100"
    )
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
    delete = f"this is call %d:.*, or delete {tmp_path / 'c'} to start again"
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
        pytest.raises(ValueError, match=f"beyond the requested 10 rounds.*{delete % 1}"),
    ):
        call(num_rounds=10)


def test_another_rule_is_refused(tmp_path):
    def ruled(name):
        rule = fedmcmc.diagnostics.StoppingRule(
            lambda n: n + 10, lambda d: StopDecision(True, {}), name
        )
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

    rule = fedmcmc.diagnostics.StoppingRule(lambda n: n + 10, check, "never")
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


class Rounds:
    """Rounds in which clients answer: counted, and interrupted after some of them."""

    def __init__(self, monkeypatch):
        self.call, self.trace = consortium_module._round, consortium_module._round.trace
        self.num, self.most = 0, None
        monkeypatch.setattr(consortium_module, "_round", self)

    def __call__(self, *args):
        if self.num == self.most:
            raise KeyboardInterrupt
        self.num += 1
        return self.call(*args)


def fitted(posterior, data=None):
    return fedmcmc.fit(
        posterior,
        killed_run.data() if data is None else data,
        rng_key=jax.random.key(0),
        position=jnp.zeros(3),
        num_draws=200,
        progress=False,
    )


def test_a_fit_that_was_interrupted_asks_only_the_rest(tmp_path, monkeypatch):
    rounds, folder = Rounds(monkeypatch), tmp_path / "c"
    whole = fitted(killed_run.posterior())
    num_rounds = rounds.num
    assert num_rounds > 4
    for _ in range(2):
        rounds.num, rounds.most = 0, 2
        with pytest.raises(KeyboardInterrupt), fedmcmc.resumable(folder):
            fitted(killed_run.posterior())  # with functions of its own, as another process has
    rounds.num, rounds.most = 0, None
    with fedmcmc.resumable(folder):
        again = fitted(killed_run.posterior())
    assert rounds.num == num_rounds - 4
    np.testing.assert_array_equal(again.samples.draws, whole.samples.draws)
    assert again.report.rounds == whole.report.rounds
    assert again.log_evidence == whole.log_evidence


def test_answers_are_those_of_the_same_model_and_rows(tmp_path, monkeypatch):
    rounds = Rounds(monkeypatch)
    question = evaluations(killed_run.posterior())
    other = killed_run.posterior()._replace(
        loglikelihood_fn=lambda theta, x: -0.3 * jnp.sum((x - theta) ** 2, axis=-1)
    )
    moved = fedmcmc.FederatedData.from_clients([np.ones((n, 3), np.float32) for n in range(4, 10)])
    points = Points(jnp.ones((1, 3)), jnp.zeros(3))

    def asked(question, data, points=points):
        return SimulatedConsortium(data).ask(question, points)

    def all_asked():
        answers = [
            asked(question, killed_run.data()),
            asked(evaluations(other), killed_run.data()),
            asked(question, moved),
            asked(question, killed_run.data(), points._replace(centre=jnp.ones(3))),
        ]
        return [float(answer.value.value[0]) for answer in answers]

    expected = all_asked()
    assert len(set(expected)) == 4
    for num in (4, 0):
        rounds.num = 0
        with fedmcmc.resumable(tmp_path / "c"):
            assert all_asked() == expected
        assert rounds.num == num


def test_a_damaged_answer_is_asked_again(tmp_path, monkeypatch):
    rounds = Rounds(monkeypatch)
    points = Points(jnp.ones((1, 3)), jnp.zeros(3))

    def asked():
        with fedmcmc.resumable(tmp_path):
            consortium = SimulatedConsortium(killed_run.data())
            asked = consortium.ask(evaluations(killed_run.posterior()), points)
            return float(asked.value.value[0])

    expected = asked()
    for kind in ("npz", "json"):
        (path,) = (tmp_path / "answers").glob(f"*.{kind}")
        path.write_bytes(path.read_bytes()[:-9])
        rounds.num = 0
        assert (asked(), rounds.num) == (expected, 1)
        assert (asked(), rounds.num) == (expected, 1)


def test_answers_on_a_full_disk_cost_nothing_but_time(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers_module, "write_part", full)
    points = Points(jnp.ones((1, 3)), jnp.zeros(3))
    with (
        fedmcmc.resumable(tmp_path),
        pytest.warns(RuntimeWarning, match="No space left.*must answer these questions again"),
    ):
        consortium = SimulatedConsortium(killed_run.data())
        consortium.ask(evaluations(killed_run.posterior()), points)
