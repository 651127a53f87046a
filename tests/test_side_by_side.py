"""Functions that sample, side by side: the same results, in fewer programs, and none lost."""

import collections
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc._points_run import PointsRun
from fedmcmc._run import Run

TRACED = collections.Counter()


def loglikelihood_fn(theta, x):
    TRACED["loglikelihood"] += 1
    return -0.5 * jnp.sum((x - theta) ** 2, axis=-1)


POSTERIOR = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum(theta**2), loglikelihood_fn)


def federation(seed, sizes=(5, 9, 7)):
    rng = np.random.default_rng(seed)
    return fedmcmc.FederatedData.from_clients(
        [rng.normal(i, 1, size=(n, 2)).astype(np.float32) for i, n in enumerate(sizes)]
    )


def program(seed, step_size, *, data=None, kernel_fn=fedmcmc.lsd, **settings):
    """Sample twice, from where the first run ended, with a number between that both give."""
    data = federation(seed) if data is None else data
    common = dict(num_chains=2, progress=False) | settings
    key = jax.random.key(seed)
    first = fedmcmc.sample(
        key, kernel_fn(POSTERIOR, step_size=step_size), data, jnp.zeros(2), num_rounds=30, **common
    )
    half = kernel_fn(POSTERIOR, step_size=step_size * (0.5 + 0.01 * first.draws.var()))
    state = first.state
    return first, fedmcmc.sample(
        jax.random.fold_in(key, 1),
        half,
        data,
        state=state,
        num_rounds=40,
        num_burnin=8,
        thinning=3,
        **common,
    )


def programs(settings, **given):
    return [lambda a=a: program(*a, **given) for a in settings]


GRID = [(seed, step_size) for seed in (0, 1) for step_size in (0.01, 0.02, 0.04)]


def check_equal(found, wanted, rtol):
    for name in ("draws", "info", "totals"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("max_bytes", "num_programs"), [(2**30, 1), (2**12, 2), (1, 0)])
def test_results_are_those_of_functions_by_themselves(max_bytes, num_programs, monkeypatch):
    together = []
    advance = PointsRun.advance
    monkeypatch.setattr(
        PointsRun, "advance", lambda run, *given: together.append(run) or advance(run, *given)
    )
    functions = programs(GRID)
    found = fedmcmc.side_by_side(functions, mode="vmapped", max_bytes=max_bytes)
    assert len(together) == 2 * num_programs  # each function samples twice
    for ours, fn in zip(found, functions, strict=True):
        for mine, wanted in zip(ours, fn(), strict=True):
            check_equal(mine, wanted, rtol=1e-5)


def test_one_after_another_they_are_the_same_to_the_last_bit():
    found = fedmcmc.side_by_side(programs(GRID[:2]), mode="sequential")
    for ours, fn in zip(found, programs(GRID[:2]), strict=True):
        for mine, wanted in zip(ours, fn(), strict=True):
            check_equal(mine, wanted, rtol=0)


def test_six_programs_are_traced_as_often_as_two():
    counts = []
    for settings, dim in ((GRID[::3], 3), (GRID, 4)):
        data = fedmcmc.FederatedData.from_clients([np.ones((4, dim)), np.zeros((3, dim))])

        def one(seed, step_size, data=data, dim=dim):
            return fedmcmc.sample(
                jax.random.key(seed),
                fedmcmc.lsd(POSTERIOR, step_size=step_size),
                data,
                jnp.zeros(dim),
                num_rounds=10,
                progress=False,
            )

        TRACED.clear()
        fedmcmc.side_by_side([lambda a=a: one(*a) for a in settings], mode="vmapped")
        counts.append(TRACED["loglikelihood"])
    assert counts[0] == counts[1]


def test_what_differs_by_more_than_numbers_runs_by_itself():
    def one(kernel):
        return fedmcmc.sample(
            jax.random.key(0), kernel, federation(0), jnp.zeros(2), num_rounds=12, progress=False
        )

    kernels = [
        fedmcmc.lsd(POSTERIOR, step_size=0.01),
        fedmcmc.fa_ld(POSTERIOR, step_size=0.01, num_local_steps=2),
        fedmcmc.fa_ld(POSTERIOR, step_size=0.01, num_local_steps=3),
    ]
    found = fedmcmc.side_by_side([lambda k=k: one(k) for k in kernels], mode="vmapped")
    for ours, kernel in zip(found, kernels, strict=True):
        check_equal(ours, one(kernel), rtol=0)


def test_schedules_are_those_of_each():
    def one(rate):
        kernel = fedmcmc.lsd(POSTERIOR, step_size=lambda r: 0.02 / (1 + rate * r))
        return fedmcmc.sample(
            jax.random.key(0), kernel, federation(0), jnp.zeros(2), num_rounds=25, progress=False
        )

    rates = (0.1, 1.0, 10.0)
    found = fedmcmc.side_by_side([lambda r=r: one(r) for r in rates], mode="vmapped")
    for ours, rate in zip(found, rates, strict=True):
        check_equal(ours, one(rate), rtol=1e-5)
    assert not np.allclose(found[0].draws, found[2].draws)


def test_a_chain_that_diverges_stops_no_other():
    functions = programs([(0, 0.01), (0, 50.0), (0, 0.02)])
    found = fedmcmc.side_by_side(functions, mode="vmapped", return_exceptions=True)
    with pytest.raises(fedmcmc.NonFiniteError) as alone:
        functions[1]()
    assert isinstance(found[1], fedmcmc.NonFiniteError)
    assert str(found[1]) == str(alone.value)
    check_equal(found[1].samples, alone.value.samples, rtol=0)
    for i in (0, 2):
        for mine, wanted in zip(found[i], functions[i](), strict=True):
            check_equal(mine, wanted, rtol=1e-5)


def test_errors_come_together_after_all_have_ended():
    ended = []

    def fails(text):
        raise ValueError(text)

    def goes_on():
        ended.append(program(0, 0.01))

    functions = [lambda: fails("one"), goes_on, lambda: fails("two")]
    with pytest.raises(ExceptionGroup, match="2 of 3 functions failed") as caught:
        fedmcmc.side_by_side(functions)
    assert [str(error) for error in caught.value.exceptions] == ["one", "two"]
    assert len(ended) == 1


def test_an_interrupt_returns_what_all_have(monkeypatch):
    take = PointsRun._take

    def cut(self, segment, at, stop):
        take(self, segment, at, stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(PointsRun, "_take", cut)
    with pytest.warns(RuntimeWarning, match="Interrupted in or after round") as warned:
        found = fedmcmc.side_by_side(programs(GRID[:2]), mode="vmapped")
    assert len(warned) == 4
    assert all(0 < first.num_draws <= 30 for first, _ in found)
    assert all((first.totals["rounds"] == first.num_draws).all() for first, _ in found)


def test_a_warning_made_an_error_computes_nothing_twice(monkeypatch):
    take, alone = PointsRun._take, []

    def cut(self, segment, at, stop):
        take(self, segment, at, stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(PointsRun, "_take", cut)
    monkeypatch.setattr(Run, "go", lambda self, *_: alone.append(self))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = fedmcmc.side_by_side(programs(GRID[:2]), mode="vmapped", return_exceptions=True)
    assert ["Interrupted" in str(error) for error in found] == [True, True]
    assert not alone


def test_runs_that_cannot_be_computed_together_are_computed_by_themselves(monkeypatch):
    def fail(*_):
        raise MemoryError("too large together")

    monkeypatch.setattr(PointsRun, "advance", fail)
    with pytest.warns(RuntimeWarning, match=r"2 runs could not .* \(MemoryError: too large"):
        found = fedmcmc.side_by_side(programs(GRID[:2]), mode="vmapped")
    for ours, fn in zip(found, programs(GRID[:2]), strict=True):
        for mine, wanted in zip(ours, fn(), strict=True):
            check_equal(mine, wanted, rtol=0)


def one(kernel, data=None, key=None, num_rounds=20, **settings):
    return fedmcmc.sample(
        jax.random.key(0) if key is None else key,
        kernel,
        federation(0) if data is None else data,
        jnp.zeros(2),
        num_rounds=num_rounds,
        progress=False,
        **settings,
    )


def test_a_schedule_out_of_range_is_the_error_of_its_function_alone():
    def steps(bad):
        return lambda r: jnp.where(r == 12, bad, 0.01)

    functions = [
        lambda b=b: one(fedmcmc.lsd(POSTERIOR, step_size=steps(b))) for b in (0.02, -1.0, 0.03)
    ]
    with pytest.warns(RuntimeWarning, match="3 runs could not be computed together"):
        found = fedmcmc.side_by_side(functions, mode="vmapped", return_exceptions=True)
    assert "got -1" in str(found[1])
    for i in (0, 2):
        check_equal(found[i], functions[i](), rtol=0)


def test_what_no_program_takes_is_the_error_of_its_function_alone():
    class Collect:
        __hash__ = None

        def __call__(self, state, info):
            return state.broadcast.position

    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    functions = [lambda: one(kernel), lambda: one(kernel, collect=Collect()), lambda: one(kernel)]
    found = fedmcmc.side_by_side(functions, mode="vmapped", return_exceptions=True)
    assert isinstance(found[1], TypeError | ValueError)
    check_equal(found[0], found[2], rtol=0)


def test_a_run_on_a_mesh_is_computed_by_itself():
    mesh = jax.make_mesh((1,), ("clients",))
    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    functions = [lambda: one(kernel, mesh=mesh), lambda: one(kernel), lambda: one(kernel)]
    for ours, fn in zip(fedmcmc.side_by_side(functions, mode="vmapped"), functions, strict=True):
        check_equal(ours, fn(), rtol=1e-5)


def test_settings_of_jax_are_those_around_and_within():
    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    rows = [np.random.default_rng(i).normal(size=(4, 2)) for i in range(3)]

    def wide():
        with jax.enable_x64(True):
            return one(kernel, fedmcmc.FederatedData.from_clients(rows))

    def plain():
        return one(kernel, fedmcmc.FederatedData.from_clients(rows))

    found = fedmcmc.side_by_side([wide, plain, wide], mode="vmapped")
    assert [r.info["gradient_norm"].dtype for r in found] == [
        r.info["gradient_norm"].dtype for r in (wide(), plain(), wide())
    ]
    with jax.enable_x64(True):
        around = fedmcmc.side_by_side([plain, plain], mode="vmapped")
        check_equal(around[0], plain(), rtol=1e-12)


def test_keys_that_draw_otherwise_when_mapped_are_not_mapped():
    kernel = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    functions = [lambda s=s: one(kernel, key=jax.random.key(s, impl="rbg")) for s in (0, 1)]
    for ours, fn in zip(fedmcmc.side_by_side(functions, mode="vmapped"), functions, strict=True):
        check_equal(ours, fn(), rtol=0)


@pytest.mark.parametrize("mode", ["vmapped", "auto"])
def test_an_interrupt_that_ends_programs_ends_all(mode, tmp_path, monkeypatch):
    begun = []

    def function(i):
        begun.append(i)
        with fedmcmc.resumable(tmp_path / str(i), every_rounds=5):
            return one(fedmcmc.lsd(POSTERIOR, step_size=0.01))

    def cut(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "advance", cut)
    with pytest.raises(KeyboardInterrupt):
        fedmcmc.side_by_side([lambda i=i: function(i) for i in range(3)], mode=mode)
    assert begun == [0, 1, 2]
    saved = [(tmp_path / str(i) / "0001").exists() for i in range(3)]
    assert saved == [True, False, False]


def test_an_interrupt_between_runs_ends_every_function(monkeypatch):
    ended = []

    def function(i):
        try:
            return one(fedmcmc.lsd(POSTERIOR, step_size=0.01))
        finally:
            ended.append(i)

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmcmc._calls._at_once", cut)
    with pytest.raises(KeyboardInterrupt):
        fedmcmc.side_by_side([lambda i=i: function(i) for i in range(3)], mode="vmapped")
    assert ended == [0, 1, 2]


def test_an_interrupt_in_a_functions_own_code_is_heard():
    script = """
import os, signal, time
import fedmcmc
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start us without
called = []
def slow(i):
    called.append(i)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
try:
    fedmcmc.side_by_side([lambda i=i: slow(i) for i in range(3)], mode="vmapped")
except KeyboardInterrupt:
    print("ended", called)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ended [0]\n", done.stdout + done.stderr


def test_runs_with_more_to_keep_run_by_themselves(tmp_path):
    moments = fedmcmc.streaming.moments()

    def one(step_size):
        with fedmcmc.resumable(tmp_path / str(step_size), every_rounds=10):
            return program(0, step_size, streams={"moments": moments})

    found = fedmcmc.side_by_side([lambda: one(0.01), lambda: one(0.02)], mode="vmapped")
    for (first, second), step_size in zip(found, (0.01, 0.02), strict=True):
        np.testing.assert_allclose(
            first.streams["moments"].mean, first.draws.mean(axis=1), rtol=1e-4, atol=1e-5
        )
        assert len(list((tmp_path / str(step_size)).iterdir())) == 2
        assert second.num_draws == 10


def test_settings_that_do_not_fit():
    with pytest.raises(ValueError, match="mode must be one of auto, sequential, vmapped, got 'x'"):
        fedmcmc.side_by_side([], mode="x")
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        fedmcmc.side_by_side([], max_bytes=0)
    assert fedmcmc.side_by_side([]) == []
