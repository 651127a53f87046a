"""Runs without compilation, where a user can print and stop."""

import chex
import jax
import pytest

import fedmcmc
from tests.contracts.kernels import build_lsd
from tests.contracts.model import DATA, KEY, POSITIONS, Given, loglikelihood, logprior


@pytest.mark.slow
def test_a_run_without_compilation_has_the_same_draws():
    calls_while_traced = []

    def watched(position, rows):
        calls_while_traced.append(isinstance(jax.tree.leaves(position)[0], jax.core.Tracer))
        return loglikelihood(position, rows)

    kernel = build_lsd(None, Given(fedmcmc.Posterior(logprior, watched)))

    def run():
        return fedmcmc.sample(KEY, kernel, DATA, POSITIONS["nested"], num_rounds=5, progress=False)

    compiled = run().draws
    calls_while_traced.clear()
    with jax.disable_jit():
        stepwise = run().draws
    assert len(calls_while_traced) >= 5
    chex.assert_trees_all_close(stepwise, compiled, rtol=1e-4, atol=1e-5)
