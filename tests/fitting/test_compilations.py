"""Programs of a fit are compiled ahead, in other threads, once each."""

import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc.types import _compiled as programs
from fedmcmc.types import cancel_compilations, compiled


def rows(num):
    rng = np.random.default_rng(num)
    x = rng.normal(size=num)
    return {"x": x, "y": 0.7 * x + 0.5 * rng.normal(size=num)}


DATA = fedmcmc.FederatedData.from_clients([rows(num) for num in (12, 7)])


def regression(thread_ids):
    """Return a NumPyro model that records the threads in which it is traced."""

    def model(x, y=None):
        thread_ids.add(threading.get_ident())
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, noise), obs=y)

    return model


def fit(model):
    return fedmcmc.fit(model, DATA, rng_key=jax.random.key(1), num_draws=1000, progress=False)


@pytest.fixture
def names_of_programs(monkeypatch):
    """Clear the programs, and return a function for the names of those that exist."""
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    return lambda: sorted(fn.__name__ for fn, *_ in programs._PROGRAMS)


def test_a_fit_compiles_only_programs_that_it_calls(names_of_programs, monkeypatch):
    fit(regression(set()))
    ahead = names_of_programs()
    assert len([x for x in programs._PROGRAMS.values() if getattr(x, "ahead", None)]) >= 9
    monkeypatch.setattr(fedmcmc.fitting._compilations, "_start", lambda *_: None)
    programs._PROGRAMS.clear()
    fit(regression(set()))
    assert names_of_programs() == ahead


def test_the_model_runs_in_the_thread_of_the_call():
    thread_ids = set()
    fit(regression(thread_ids))
    assert thread_ids == {threading.get_ident()}


def test_a_program_that_was_compiled_ahead_is_not_compiled_again():
    compilations = []

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compilations.append(seconds)

    @compiled(static_argnames=("power",))
    def raise_all(tree, *, power):
        return jax.tree.map(lambda leaf: leaf**power, tree)

    like = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    shapes = raise_all.compile_ahead(like, power=3)
    assert shapes["x"].shape == (3,)
    for program in programs._PROGRAMS.values():
        for ahead in getattr(program, "ahead", {}).values():
            assert ahead.future.cancelled() or ahead.future.exception() is None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        result = raise_all({"x": np.arange(3, dtype=np.float32)}, power=3)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations
    np.testing.assert_array_equal(result["x"], [0, 1, 8])


def test_a_cancelled_compilation_happens_in_the_call(monkeypatch):
    @compiled
    def add_one(x):
        return x + 1

    blocked = threading.Event()
    for _ in range(2):  # both threads are busy
        programs._COMPILERS.submit(blocked.wait)
    try:
        add_one.compile_ahead(jax.ShapeDtypeStruct((2,), jnp.float32))
        assert add_one(jnp.zeros(2)).tolist() == [1, 1]
        add_one.compile_ahead(jax.ShapeDtypeStruct((4,), jnp.float32))
        cancel_compilations()
    finally:
        blocked.set()
    assert add_one(jnp.zeros(4)).tolist() == [1] * 4


def test_an_error_of_a_fit_cancels_compilations():
    with pytest.raises(ValueError, match="starts"):
        posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: jnp.log(x["x"] * 0 - 1))
        fedmcmc.fit(posterior, DATA, rng_key=jax.random.key(0), position=0.0, progress=False)
    assert all(
        ahead.future.done() or ahead.future.running()
        for program in programs._PROGRAMS.values()
        for ahead in getattr(program, "ahead", {}).values()
    )


def test_a_position_that_does_not_fit_the_model_is_explained():
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * t["a"] ** 2, lambda t, x: -0.5 * (x["y"] - t["a"]) ** 2
    )
    settings = dict(rng_key=jax.random.key(0), progress=False)
    with pytest.raises(ValueError, match="logprior_fn does not take a position of shapes"):
        fedmcmc.fit(posterior, DATA, position={"b": 0.0}, **settings)
