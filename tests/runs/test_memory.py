"""A process that creates new model functions for each run frees the functions of earlier runs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.types import _compiled as compiled_functions


def sample(posterior, data):
    fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.lsd(posterior, step_size=0.01),
        data,
        jnp.zeros(2),
        num_rounds=500,
        num_chains=2,
        progress=False,
    )


def fit(posterior, data):
    fedmcmc.fit(posterior, data, rng_key=jax.random.key(0), position=jnp.zeros(2), progress=False)


def run_new_model_twice(run, data):
    """Run a model with new functions; return weak references to the functions."""
    traces = []

    def logprior(theta):
        traces.append(None)
        return -0.5 * jnp.sum(theta**2)

    def loglikelihood(theta, rows):
        return -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)

    posterior = fedmcmc.Posterior(logprior, loglikelihood)
    run(posterior, data)
    num_traces = len(traces)
    run(posterior, data)
    assert len(traces) == num_traces > 0  # the second run compiles nothing
    return weakref.ref(logprior), weakref.ref(loglikelihood)


@pytest.mark.parametrize(("run", "max_programs"), [(sample, 10), (fit, 16)])
def test_functions_of_earlier_models_are_freed(run, max_programs, monkeypatch):
    """Three runs have more programs than the maximum and free the functions of the first model."""
    monkeypatch.setattr(compiled_functions, "MAX_PROGRAMS", max_programs)
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=(n, 2)) for n in (20, 30)])
    references, *_ = [run_new_model_twice(run, data) for _ in range(3)]
    gc.collect()
    assert all(reference() is None for reference in references)
    assert len(compiled_functions._PROGRAMS) <= max_programs


def test_a_program_that_was_freed_is_compiled_again(monkeypatch):
    monkeypatch.setattr(compiled_functions, "MAX_PROGRAMS", 1)

    @compiled_functions.compiled(static_argnames=("power",))
    def raise_to_power(tree, *, power):
        return jax.tree.map(lambda leaf: leaf**power, tree)

    for power in (2, 3, 2):
        powers = raise_to_power({"x": jnp.arange(3.0)}, power=power)
        np.testing.assert_array_equal(powers["x"][2], 2.0**power)
    assert raise_to_power.trace((jnp.ones(2),), power=2).out_info[0].shape == (2,)
    assert raise_to_power.__name__ == "raise_to_power"
