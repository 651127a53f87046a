"""Everything that a fit returns can be pickled and copied."""

import copy
import os
import pickle
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc

POSITION = {"rate": np.float32(0.2)}


def model(y=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def data():
    counts = np.random.default_rng(0).poisson(3.0, 40)
    return fedmcmc.FederatedData.from_clients([{"y": counts[:25]}, {"y": counts[25:]}])


def fit(model):
    return fedmcmc.fit(model, data(), rng_key=jax.random.key(0), num_draws=1000, progress=False)


@pytest.fixture(scope="module")
def fitted():
    return fit(model)


@pytest.fixture(scope="module")
def fitted_local():
    def local(y=None):
        return model(y)

    return fit(local)


def same(one, two):
    chex.assert_trees_all_equal(one, two)


def check_results(found, fitted):
    same(found.samples.draws, fitted.samples.draws)
    same(found.samples.constrained, fitted.samples.constrained)
    same(found.corrected.constrained, fitted.corrected.constrained)
    same(found.corrected.mean(), fitted.corrected.mean())
    same(found.gaussian.mean(), fitted.gaussian.mean())
    assert found.verdict == fitted.verdict and str(found) == str(fitted)
    assert found.log_evidence == fitted.log_evidence
    assert found.report.to_dict() == fitted.report.to_dict()
    assert str(found.samples) == str(fitted.samples)


def test_fit_comes_back_in_the_same_process(fitted):
    found = pickle.loads(pickle.dumps(fitted))
    check_results(found, fitted)
    # The functions are those of the original, so that nothing compiles again.
    assert found.posterior == fitted.posterior
    key = jax.random.key(3)
    same(found.posterior.init_fn(key), fitted.posterior.init_fn(key))


def test_parts_of_a_fit_come_back(fitted):
    samples = pickle.loads(pickle.dumps(fitted.samples))
    same(samples.constrained, fitted.samples.constrained)
    report = pickle.loads(pickle.dumps(fitted.report))
    assert len(report.draw_figures()) == len(fitted.report.draw_figures())
    posterior = pickle.loads(pickle.dumps(fitted.posterior))
    assert posterior == fitted.posterior and str(posterior) == str(fitted.posterior)
    same(pickle.loads(pickle.dumps(data())).rows, data().rows)


def test_copies_share_functions_and_no_arrays(fitted, fitted_local):
    for original in (fitted, fitted_local):
        found = copy.deepcopy(original)
        check_results(found, original)
        assert found.posterior is original.posterior
        assert found.samples.draws["rate"] is not original.samples.draws["rate"]
        assert copy.copy(original).posterior is original.posterior


IN_ANOTHER_PROCESS = """
import pickle, sys
import jax, numpy as np
fitted, wanted, density = pickle.load(sys.stdin.buffer)
np.testing.assert_array_equal(fitted.samples.constrained["rate"], wanted)
position = {"rate": np.float32(0.2)}
np.testing.assert_allclose(fitted.posterior.logprior_fn(position), density, rtol=1e-6)
assert fitted.posterior.init_fn(jax.random.key(0))["rate"].shape == ()
print("done")
"""


def test_fit_comes_back_in_another_process(fitted):
    density = float(fitted.posterior.logprior_fn(POSITION))
    content = pickle.dumps((fitted, fitted.samples.constrained["rate"], density))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=content,
        capture_output=True,
        env=environment,
        timeout=300,
    )
    assert run.stdout.strip().endswith(b"done"), run.stderr.decode()


def test_fit_of_a_local_model_keeps_what_was_computed(fitted_local):
    found = pickle.loads(pickle.dumps(fitted_local))
    check_results(found, fitted_local)
    check_results(pickle.loads(pickle.dumps(found)), fitted_local)
    assert isinstance(found.posterior, fedmcmc.Posterior)
    assert str(found.posterior) == str(fitted_local.posterior)
    with pytest.raises(RuntimeError, match="top level of a module"):
        found.posterior.logprior_fn(POSITION)


def test_a_fit_of_a_removed_module_keeps_its_draws(fitted, monkeypatch):
    content = pickle.dumps(fitted)
    monkeypatch.delattr(sys.modules[__name__], "model")
    found = pickle.loads(content)
    same(found.samples.draws, fitted.samples.draws)
    assert found.verdict == fitted.verdict and str(found) == str(fitted)
    with pytest.raises(RuntimeError, match="could not be loaded: it cannot be imported"):
        found.posterior.logprior_fn(POSITION)


def test_posterior_of_a_local_model_names_it(fitted_local):
    with pytest.raises(pickle.PicklingError, match=r"local.*top level of a module"):
        pickle.dumps(fitted_local.posterior)
    by_hand = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    with pytest.raises(pickle.PicklingError, match=r"logprior_fn.*<lambda>"):
        pickle.dumps(by_hand)


def test_random_keys_in_a_state_come_back(fitted):
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 2)}
    kept = fitted.samples.__class__({"a": np.zeros((1, 2))}, {"round": np.zeros((1, 2))}, state, {})
    found = pickle.loads(pickle.dumps(kept)).state
    for name, key in state.items():
        assert found[name].dtype == key.dtype
        same(jax.random.key_data(found[name]), jax.random.key_data(key))


def test_whitened_posterior_comes_back(fitted):
    posterior = fedmcmc.from_numpyro(model, example=data())
    whitened = fedmcmc.whiten(posterior, data())
    found = pickle.loads(pickle.dumps(whitened))
    at = {"rate": jnp.float32(0.3)}
    same(found.posterior.logprior_fn(at), whitened.posterior.logprior_fn(at))
    same(found.posterior.position_fn(at), whitened.posterior.position_fn(at))
