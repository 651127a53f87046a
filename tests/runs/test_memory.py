"""A process that makes new model functions for each run frees those of earlier runs."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.types import _compiled as compiled_functions

NUM_MODELS = 4


class Model:
    """Model with functions of its own, which counts how often one of them is traced."""

    def __init__(self):
        self.num_traces = 0

        def logprior(theta):
            self.num_traces += 1
            return -0.5 * jnp.sum(theta**2)

        def loglikelihood(theta, rows):
            return -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)

        self.posterior = fedmcmc.Posterior(logprior, loglikelihood)

    def references(self):
        return [
            weakref.ref(self.posterior.logprior_fn),
            weakref.ref(self.posterior.loglikelihood_fn),
        ]


def sampled(posterior, data):
    fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.lsd(posterior, step_size=0.01),
        data,
        jnp.zeros(2),
        num_rounds=500,
        num_chains=2,
        progress=False,
    )


def fitted(posterior, data):
    fedmcmc.fit(posterior, data, rng_key=jax.random.key(0), position=jnp.zeros(2), progress=False)


@pytest.mark.parametrize("run", [sampled, fitted])
def test_functions_of_earlier_models_are_freed(run, monkeypatch):
    monkeypatch.setattr(compiled_functions, "MAX_PROGRAMS", 10)
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=(n, 2)) for n in (20, 30)])
    references = []
    for _ in range(NUM_MODELS):
        model = Model()
        references += model.references()
        run(model.posterior, data)
        num_traces = model.num_traces
        run(model.posterior, data)
        assert model.num_traces == num_traces > 0  # the second run compiles nothing
        del model
    gc.collect()
    alive = [reference() is not None for reference in references]
    assert not any(alive[:-4])  # programs of the last two models may be kept
    assert len(compiled_functions._PROGRAMS) <= 10


def test_a_program_that_was_freed_is_compiled_again(monkeypatch):
    monkeypatch.setattr(compiled_functions, "MAX_PROGRAMS", 1)

    @compiled_functions.compiled(static_argnames=("power",))
    def raised(tree, *, power):
        return jax.tree.map(lambda leaf: leaf**power, tree)

    for power in (2, 3, 2):
        np.testing.assert_array_equal(
            raised({"x": jnp.arange(3.0)}, power=power)["x"][2], 2.0**power
        )
    assert raised.trace((jnp.ones(2),), power=2).out_info[0].shape == (2,)
    assert raised.__name__ == "raised"
