"""Results of a fit can be pickled and copied."""

import copy
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_equal

import fedmcmc
from tests.fitting import models

POSITION = {"b": np.array([0.2, -0.1], np.float32)}
REMEDY = "top level of a module"


@pytest.fixture(scope="module")
def local_fit():
    def local(x, y=None):
        return models.poisson(x, y)

    data, key = models.count_data(), jax.random.key(0)
    return fedmcmc.fit(local, data, rng_key=key, num_draws=1000, progress=False)


def check_results(result, fitted):
    assert_trees_all_equal(result.samples.draws, fitted.samples.draws)
    assert_trees_all_equal(result.samples.constrained, fitted.samples.constrained)
    assert_trees_all_equal(result.corrected.constrained, fitted.corrected.constrained)
    assert_trees_all_equal(result.corrected.mean(), fitted.corrected.mean())
    assert_trees_all_equal(result.gaussian.mean(), fitted.gaussian.mean())
    assert result.verdict == fitted.verdict and str(result) == str(fitted)
    assert result.log_evidence == fitted.log_evidence
    assert result.report.to_dict() == fitted.report.to_dict()
    assert str(result.samples) == str(fitted.samples)


def test_a_fit_and_its_parts_come_back(poisson_fit):
    result = pickle.loads(pickle.dumps(poisson_fit))
    check_results(result, poisson_fit)
    # The functions are the same as in the original, so that nothing compiles again.
    posterior = poisson_fit.posterior
    assert result.posterior == posterior and str(result.posterior) == str(posterior)
    key = jax.random.key(3)
    assert_trees_all_equal(result.posterior.init_fn(key), posterior.init_fn(key))
    samples = pickle.loads(pickle.dumps(poisson_fit.samples))
    assert_trees_all_equal(samples.constrained, poisson_fit.samples.constrained)
    report = pickle.loads(pickle.dumps(poisson_fit.report))
    assert len(report.draw_figures()) == len(poisson_fit.report.draw_figures())
    data = models.count_data()
    assert_trees_all_equal(pickle.loads(pickle.dumps(data)).rows, data.rows)


def test_copies_share_functions_and_no_arrays(poisson_fit, local_fit):
    for original in (poisson_fit, local_fit):
        result = copy.deepcopy(original)
        check_results(result, original)
        assert result.posterior is original.posterior
        assert result.samples.draws["b"] is not original.samples.draws["b"]
        assert copy.copy(original).posterior is original.posterior


IN_ANOTHER_PROCESS = """
import pickle, sys
import jax, numpy as np
fitted, rates, position, density = pickle.load(sys.stdin.buffer)
np.testing.assert_array_equal(fitted.samples.constrained["rate"], rates)
np.testing.assert_allclose(fitted.posterior.logprior_fn(position), density, rtol=1e-6)
assert fitted.posterior.init_fn(jax.random.key(0))["b"].shape == (2,)
print("done")
"""


def test_a_fit_comes_back_in_another_process(poisson_fit):
    density = float(poisson_fit.posterior.logprior_fn(POSITION))
    rates = poisson_fit.samples.constrained["rate"]
    run = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((poisson_fit, rates, POSITION, density)),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])},
        timeout=300,
    )
    assert run.stdout.strip().endswith(b"done"), run.stderr.decode()


def test_a_fit_of_a_local_model_keeps_what_was_computed(local_fit):
    result = pickle.loads(pickle.dumps(local_fit))
    check_results(result, local_fit)
    check_results(pickle.loads(pickle.dumps(result)), local_fit)
    assert isinstance(result.posterior, fedmcmc.Posterior)
    assert str(result.posterior) == str(local_fit.posterior)
    with pytest.raises(RuntimeError, match=REMEDY):
        result.posterior.logprior_fn(POSITION)
    with pytest.raises(pickle.PicklingError, match=rf"local.*{REMEDY}"):
        pickle.dumps(local_fit.posterior)
    by_hand = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    with pytest.raises(pickle.PicklingError, match=r"logprior_fn.*<lambda>"):
        pickle.dumps(by_hand)


def test_a_fit_of_a_removed_module_keeps_its_draws(poisson_fit, monkeypatch):
    content = pickle.dumps(poisson_fit)
    monkeypatch.delattr(models, "poisson")
    result = pickle.loads(content)
    assert_trees_all_equal(result.samples.draws, poisson_fit.samples.draws)
    assert result.verdict == poisson_fit.verdict and str(result) == str(poisson_fit)
    with pytest.raises(RuntimeError, match="could not be loaded: it cannot be imported"):
        result.posterior.logprior_fn(POSITION)


def test_random_keys_in_a_state_come_back():
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 2)}
    samples = fedmcmc.Samples({"a": np.zeros((1, 2))}, {"round": np.zeros((1, 2))}, state, {})
    result = pickle.loads(pickle.dumps(samples)).state
    for name, key in state.items():
        assert result[name].dtype == key.dtype
        assert_trees_all_equal(jax.random.key_data(result[name]), jax.random.key_data(key))


def test_a_whitened_posterior_comes_back(poisson_fit):
    whitened = fedmcmc.whiten(poisson_fit.posterior, models.count_data())
    result = pickle.loads(pickle.dumps(whitened)).posterior
    position = {"b": jnp.array([0.3, 0.1])}
    for name in ("logprior_fn", "position_fn"):
        expected = getattr(whitened.posterior, name)(position)
        assert_trees_all_equal(getattr(result, name)(position), expected)
