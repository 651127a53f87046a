"""Runs that turn non-finite: the error and the samples that it holds."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.runs.test_bad_input import POSTERIOR, fsgld, run


def test_a_diverged_run_keeps_consistent_samples_of_the_rounds_before():
    """Draws, infos, totals and state belong to the same rounds; a process can pickle the error."""
    kernel = fsgld(step_size=lambda r: jnp.where(r < 300, 0.01, 50.0))
    with pytest.raises(fedmcmc.NonFiniteError, match="step size is too large") as caught:
        run(kernel, position=jnp.ones(2), num_rounds=1000, num_chains=2)
    error, samples = caught.value, caught.value.samples
    assert "the error of that client's surrogate" in str(error)
    assert error.round > 300
    assert samples.num_draws == samples.totals["rounds"][0] == error.round
    assert samples.draws.shape == (2, error.round, 2) and np.isfinite(samples.draws).all()
    np.testing.assert_array_equal(samples.info["round"], [np.arange(error.round)] * 2)
    assert samples.state.broadcast.round.tolist() == [error.round] * 2
    np.testing.assert_array_equal(samples.state.broadcast.position, samples.draws[:, -1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.state))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.round, copy.chains) == (str(error), error.round, error.chains)
    assert copy.samples.num_draws == samples.num_draws


@pytest.mark.parametrize(
    "wrap",
    [
        lambda relay: fedmcmc.faults(relay, drop=0.1),
        lambda relay: fedmcmc.compress(relay, fedmcmc.quantize(16)),
        lambda relay: fedmcmc.sequence(relay, relay),
    ],
)
def test_a_wrapped_kernel_has_the_divergence_hint_of_the_inner_kernel(wrap):
    relay = fsgld(step_size=0.6)
    hint = relay.traits.divergence_hint
    assert hint and wrap(relay).traits.divergence_hint == hint
    assert not fedmcmc.lsd(POSTERIOR, step_size=0.6).traits.divergence_hint
