"""The second call of a function, with other data of the same shapes, compiles nothing."""

import functools
import gc
import warnings
import weakref

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from benchmarks.call_list import CALLS, draw_cases
from benchmarks.timing import count_programs
from fedmcmc.fitting import find_modes
from fedmcmc.fitting._chains import run_chains
from fedmcmc.runs import as_consortium
from fedmcmc.runs._growth import _constrained_growth
from fedmcmc.types import _compiled, as_functions, remembered
from tests.support.lanes import fast_and_slow

FAST = (
    "fit, NumPyro model",
    "correct",
    "whiten",
    "sample, lsd",
    "tune",
    "criticism.loo",
    "criticism.predictive_check",
    "criticism.leave_out",
    "criticism.conflict",
    "local_draws",
    "hierarchy.unpooled",
    "hierarchy.new_group",
    "hierarchy.few_groups_warning",
    "tuning.noise_at_mode",
    "tuning.relay_constants",
    "real sites, lsd",
)


def indexed(x, k, y=None):
    level = numpyro.sample("level", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(level[k], 1.0), obs=y)


def check_indices(case):
    columns = {"x": case.data.rows["x"], "k": case.data.rows["y"], "y": case.data.rows["x"][:, 0]}
    return fedmcmc.from_numpyro(indexed, example=columns)


def constrain_latents(case):
    posterior = fedmcmc.from_numpyro(case.effects, example=case.groups)
    kernel = fedmcmc.lsd(posterior, step_size=1e-3, refresh=fedmcmc.hierarchy.ula())
    position = {name: leaf[0, 0] for name, leaf in case.shared.items()}
    record = fedmcmc.Record(local=True)
    settings = dict(num_rounds=5, record=record, progress=False)
    samples = fedmcmc.sample(case.key, kernel, case.groups, position, **settings)
    return samples.constrained_local


def tune_by_seconds(case):
    posterior = case.posterior
    return fedmcmc.tune(
        lambda step_size: fedmcmc.lsd(posterior, step_size=step_size),
        posterior,
        case.data,
        case.surrogates,
        scores=case.scores,
        objective="seconds",
        latency=0.1,
        seconds_per_gradient=1e-6,
    )


def describe_divergence(case):
    start = {name: leaf[0, :2] for name, leaf in case.shared.items()}
    end = {**start, "spread": start["spread"] + 20}
    text = _constrained_growth(case.effects_posterior.constrain_fn, start, end)
    assert text.startswith("spread grew to")


def run_some_chains(case):
    posterior, consortium = as_functions(case.posterior), as_consortium(case.data)
    search = find_modes(case.key, posterior, consortium, position=case.origin)
    return run_chains(case.key, posterior, consortium, search, None, max_rounds=160).samples.draws


def fit_whitened(case):
    white = fedmcmc.whiten(case.posterior, case.data, case.origin)
    return case.fit(white.posterior, case.data, position=white.position).samples.draws


CALLS_OF_TESTS = {
    "check_indices": check_indices,
    "constrain_latents": constrain_latents,
    "tune_by_seconds": tune_by_seconds,
    "describe_divergence": describe_divergence,
    "run_chains": run_some_chains,
    "fit_whitened": fit_whitened,
}
FAST_OF_TESTS = (
    "check_indices",
    "constrain_latents",
    "tune_by_seconds",
    "describe_divergence",
)


@pytest.mark.parametrize("name", fast_and_slow(CALLS, FAST))
def test_second_call_compiles_nothing(name):
    check_compiles_once(CALLS[name])


@pytest.mark.parametrize("name", fast_and_slow(CALLS_OF_TESTS, FAST_OF_TESTS))
def test_second_call_of_an_internal_step_compiles_nothing(name):
    check_compiles_once(CALLS_OF_TESTS[name])


def check_compiles_once(call):
    first, second = draw_cases()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(first)
        with count_programs() as programs:
            call(second)
    assert not programs


ROWS = {"x": np.ones(8, np.float32), "y": np.arange(8, dtype=np.float32)}
SCALE = 1.0


def scaled(x, y=None, scale=1.0):
    a = numpyro.sample("a", dist.Normal(0, 2.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(a * x, scale), obs=y)


def scaled_by_global(x, y=None):
    scaled(x, y, SCALE)


def precision(model):
    """Return the precision of the likelihood at its surrogate."""
    data = fedmcmc.FederatedData.from_clients([ROWS])
    posterior = fedmcmc.from_numpyro(model, example=data)
    surrogate = fedmcmc.surrogates.taylor(posterior, data, {"a": np.float32(0.5)})
    return float(np.squeeze(surrogate.precision))


def test_programs_follow_a_change_of_the_model(monkeypatch):
    scale = 1.0

    def closed(x, y=None):
        scaled(x, y, scale)

    assert precision(closed) == pytest.approx(8)
    scale = 2.0
    assert precision(closed) == pytest.approx(2)

    assert precision(scaled_by_global) == pytest.approx(8)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert precision(scaled_by_global) == pytest.approx(2)

    assert precision(scaled) == pytest.approx(8)
    monkeypatch.setattr(scaled, "__defaults__", (None, 2.0))
    assert precision(scaled) == pytest.approx(2)

    for value in (1.0, 2.0, 1.0):
        partial = functools.partial(scaled, scale=value)
        assert precision(partial) == pytest.approx(8 / value**2)


def test_models_and_programs_are_freed(monkeypatch):
    monkeypatch.setattr(_compiled, "MAX_PROGRAMS", 4)

    def run_new_model():
        def local(x, y=None):
            scaled(x, y, 1.0)

        precision(local)
        return weakref.ref(local)

    references = [run_new_model() for _ in range(4)]
    gc.unfreeze()
    gc.collect()
    assert references[0]() is None
    assert len(_compiled._PROGRAMS) <= 4


def test_results_that_depend_on_shapes_are_remembered():
    calls = []

    @remembered
    def count(tree):
        calls.append(tree)
        return len(jax.tree.leaves(tree))

    assert count((np.zeros(2), 1.0)) == count((np.ones(2), 2.0)) == 2
    assert len(calls) == 1
    count((np.zeros(3), 1.0))
    count((jax.ShapeDtypeStruct((3,), np.float32), 1.0))  # as an array that JAX converts to float32
    count((np.zeros(2), 1))
    count([np.zeros(2), 1.0])
    assert len(calls) == 4
