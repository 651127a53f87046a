"""Programs of several calls of `sample`, cut and started again under `fedmcmc.resumable`."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.kernels import Points, evaluations
from fedmcmc.runs import SimulatedConsortium
from fedmcmc.runs import _consortium as consortium_module
from fedmcmc.storage import _answers as answers_module
from tests.storage.small_run import kernel, rule_at
from tests.support import killed_run
from tests.support.killed_run import assert_same, numbers
from tests.support.kills import Cut


def call(step_size=1e-3, position=None, **settings):
    settings = dict(num_rounds=200, progress=False) | settings
    start = jnp.zeros(3) if position is None and "state" not in settings else position
    chosen = kernel(step_size=step_size)
    return fedmcmc.sample(jax.random.key(3), chosen, killed_run.data(), start, **settings)


def run_program(folder, stored):
    """Return the numbers of calls of several kinds, the second from where the first ended."""
    first = call(num_chains=2, num_burnin=50, thinning=2)
    results = [first, call(2e-3, state=first.state, num_rounds=150)]
    if stored:
        results.append(killed_run.run("store", folder, num_rounds=24))
    results.append(call(record=fedmcmc.Record(draws_to=folder / "draws.zarr")))
    results.append(call(num_rounds=None, until=rule_at(100, spacing=40), max_rounds=900))
    assert results[-1].num_draws == 120
    return [number for samples in results for number in numbers(samples)]


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_a_program_that_is_cut_often_is_one_program(stored, tmp_path, monkeypatch):
    expected = run_program(tmp_path / "expected", stored)
    cut, num_attempts, results = Cut(monkeypatch), 0, None
    folder = tmp_path / "checkpoints"

    def attempt():
        with fedmcmc.resumable(folder, every_rounds=30):
            return run_program(tmp_path / "cut", stored)

    while results is None:
        cut.left, num_attempts = 7, num_attempts + 1
        with contextlib.suppress(KeyboardInterrupt):
            results = attempt()
    assert num_attempts >= 4
    assert_same(results, expected)
    names = [f"{i:04d}" for i in range(1, 5 + stored)]
    assert sorted(path.name for path in folder.iterdir()) == names
    cut.rounds = 0
    assert_same(attempt(), expected)
    assert cut.rounds == 0


def test_calls_in_another_order_or_with_other_settings_are_refused(tmp_path):
    folder = tmp_path / "c"
    with fedmcmc.resumable(folder):
        call(num_rounds=20)
        call(2e-3, num_rounds=20)
    for number, settings, reason in (
        (1, dict(step_size=2e-3), "numbers of the kernel"),
        (2, dict(step_size=2e-3, thinning=2), "thinning .1, now 2"),
        (1, dict(num_rounds=10), "beyond the requested 10 rounds"),
    ):
        advice = f"this is call {number}:.*, or delete {folder} to start again"
        with fedmcmc.resumable(folder):
            for _ in range(number - 1):
                call(num_rounds=20)
            with pytest.raises(ValueError, match=f"{reason}.*{advice}"):
                call(**(dict(num_rounds=20) | settings))


def test_another_stopping_rule_is_refused(tmp_path):
    def call_until(name):
        rule = rule_at(10, spacing=10, name=name)
        checkpoint = fedmcmc.Checkpoint(tmp_path)
        return call(num_rounds=None, until=rule, max_rounds=90, checkpoint=checkpoint)

    assert call_until("R-hat below 1.1").num_draws == 10
    with pytest.raises(ValueError, match="the rule of until"):
        call_until("R-hat below 1.01")
    assert call_until("R-hat below 1.1").num_draws == 10


@pytest.mark.slow
def test_only_calls_of_the_program_without_a_checkpoint_are_counted(tmp_path):
    """No count of calls with a checkpoint, of calls within a call, or in another thread."""
    rule = rule_at(1000, lambda num: call(num_rounds=5), spacing=10, name="never")
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
        samples = call()
    assert cut.rounds == 200
    np.testing.assert_array_equal(samples.draws, call().draws)


@pytest.mark.slow
def test_a_call_that_turned_non_finite_does_so_again(tmp_path):
    """The program finds the same error, from the round in which the call was last finite."""
    errors = []
    for _ in range(3):
        with fedmcmc.resumable(tmp_path), pytest.raises(fedmcmc.NonFiniteError) as caught:
            call(lambda r: jnp.where(r < 120, 1e-3, 1e30), num_chains=2)
        errors.append(caught.value)
    first, *again = errors
    assert first.round > 100 and first.samples.draws.shape == (2, first.round, 3)
    for error in again:
        assert error.round == first.round
        np.testing.assert_array_equal(error.samples.draws, first.samples.draws)


def test_bad_settings_are_refused(tmp_path):
    for error, message, settings in (
        (ValueError, "not both", dict(every_rounds=3, every_seconds=1.0)),
        (TypeError, "every_round", dict(every_round=3)),
    ):
        with pytest.raises(error, match=message), fedmcmc.resumable(tmp_path, **settings):
            pass


class CountedRounds:
    """Rounds of questions, counted, and interrupted after `limit` of them."""

    def __init__(self, monkeypatch):
        self.call, self.trace = consortium_module._first_round, consortium_module._first_round.trace
        self.num, self.limit = 0, None
        self.compile_ahead = self.call.compile_ahead
        monkeypatch.setattr(consortium_module, "_first_round", self)

    def __call__(self, *args):
        if self.num == self.limit:
            raise KeyboardInterrupt
        self.num += 1
        return self.call(*args)


def test_an_interrupted_fit_repeats_no_question(tmp_path, monkeypatch):
    rounds, folder = CountedRounds(monkeypatch), tmp_path / "c"

    def fit(posterior):
        return fedmcmc.fit(
            posterior,
            killed_run.data(),
            rng_key=jax.random.key(0),
            position=jnp.zeros(3),
            num_draws=200,
            progress=False,
        )

    expected = fit(killed_run.posterior())
    num_rounds = rounds.num
    assert num_rounds > 4
    for num in (2, 2):
        rounds.num, rounds.limit = 0, num
        with pytest.raises(KeyboardInterrupt), fedmcmc.resumable(folder):
            fit(killed_run.posterior.__wrapped__())  # with new functions, as another process has
    rounds.num, rounds.limit = 0, None
    with fedmcmc.resumable(folder):
        resumed = fit(killed_run.posterior())
    assert rounds.num == num_rounds - 4
    np.testing.assert_array_equal(resumed.samples.draws, expected.samples.draws)
    assert resumed.report.rounds == expected.report.rounds
    assert resumed.log_evidence == expected.log_evidence


POINTS = Points(jnp.ones((1, 3)), jnp.zeros(3))


def ask(model=None, data=None, points=POINTS):
    """Return the log density that simulated clients answer."""
    question = evaluations(killed_run.posterior() if model is None else model)
    consortium = SimulatedConsortium(killed_run.data() if data is None else data)
    return float(consortium.ask(question, points).value.value[0])


def test_answers_are_read_only_for_the_same_model_rows_and_points(tmp_path, monkeypatch):
    rounds = CountedRounds(monkeypatch)
    model = killed_run.posterior()._replace(
        loglikelihood_fn=lambda theta, x: -0.3 * jnp.sum((x - theta) ** 2, axis=-1)
    )
    data = fedmcmc.FederatedData.from_clients([np.ones((n, 3), np.float32) for n in range(4, 10)])

    def ask_all():
        shifted = POINTS._replace(centre=jnp.ones(3))
        return [ask(), ask(model=model), ask(data=data), ask(points=shifted)]

    expected = ask_all()
    assert len(set(expected)) == 4
    for num in (4, 0):
        rounds.num = 0
        with fedmcmc.resumable(tmp_path / "c"):
            assert ask_all() == expected
        assert rounds.num == num


def test_a_question_with_a_damaged_answer_is_repeated(tmp_path, monkeypatch):
    rounds = CountedRounds(monkeypatch)

    def ask_resumably():
        with fedmcmc.resumable(tmp_path):
            return ask()

    expected = ask_resumably()
    for kind in ("npz", "json"):
        (path,) = (tmp_path / "answers").glob(f"*.{kind}")
        path.write_bytes(path.read_bytes()[:-9])
        rounds.num = 0
        for _ in range(2):
            assert (ask_resumably(), rounds.num) == (expected, 1)


def test_a_full_disk_loses_answers_and_ends_no_program(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers_module, "write_part", fail)
    message = "No space left.*must answer these questions again"
    with fedmcmc.resumable(tmp_path), pytest.warns(RuntimeWarning, match=message):
        ask()
