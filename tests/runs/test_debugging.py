"""Runs without compilation, in which a user can print and stop: the same numbers."""

import jax
import numpy as np
import pytest

import fedmcmc
from tests.contracts.kernels import build_lsd
from tests.contracts.model import DATA, KEY, POSITIONS, Given, loglikelihood, logprior


@pytest.mark.slow
def test_a_run_that_is_not_compiled_is_the_same():
    seen = []

    def watched(position, rows):
        seen.append(isinstance(jax.tree.leaves(position)[0], jax.core.Tracer))
        return loglikelihood(position, rows)

    kernel = build_lsd(None, Given(fedmcmc.Posterior(logprior, watched)))

    def run():
        return fedmcmc.sample(KEY, kernel, DATA, POSITIONS["nested"], num_rounds=5, progress=False)

    compiled = run().draws
    seen.clear()
    with jax.disable_jit():
        stepwise = run().draws
    assert len(seen) >= 5  # called in every round, and not once for all
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), stepwise, compiled
    )
