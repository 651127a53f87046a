"""Lanes in processes of their own, because each sets JAX's global configuration.

The key-reuse check traces programs anew, so it cannot share a process with tests that count traces.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import warnings
import jax, jax.numpy as jnp, numpy as np, optax
import fedmcmc

warnings.filterwarnings("ignore", category=fedmcmc.DiagnosisWarning)  # runs are far too short

def logprior(position):
    return -0.5 * jnp.sum(position["mean"] ** 2) - 0.5 * position["shift"] ** 2

def loglikelihood(position, rows):
    gap = rows["x"] - (position["mean"] + position["shift"])[None]
    return -0.5 * jnp.sum(gap**2, axis=-1)

def resample(rng_key, position, rows):
    mean = (position["mean"] + position["shift"])[None]
    return {"x": mean + jax.random.normal(rng_key, rows["x"].shape, rows["x"].dtype)}

rng = np.random.default_rng(0)
data = fedmcmc.FederatedData.from_clients([{"x": rng.normal(size=(n, 2))} for n in (5, 1, 8)])
posterior = fedmcmc.Posterior(logprior, loglikelihood)
position = {"mean": jnp.zeros(2), "shift": jnp.zeros(())}
means = jax.tree.map(lambda leaf: jnp.zeros((3, *leaf.shape)), position)
ones = jax.tree.map(jnp.ones_like, means)
f = jnp.array([0.5, 0.2, 0.3])
dense = fedmcmc.Gaussian.from_moments(means, jnp.stack([jnp.eye(3)] * 3))
diagonal = fedmcmc.Gaussian.from_moments(means, variance=ones)
scaled = fedmcmc.Gaussian.from_moments(means, variance=jnp.ones(3))
relay = dict(step_size=0.01, num_local_steps=2)
kernels = [
    fedmcmc.sgld(posterior, step_size=0.01),
    fedmcmc.fsgld(posterior, scaled, batch_size=2, replace=False, temperature=0.5, **relay),
    fedmcmc.fsgld(posterior, dense, alpha=lambda r: 1 / (1 + r), probabilities=f, **relay),
    fedmcmc.relay(
        posterior,
        fedmcmc.conducive(fedmcmc.noisy(fedmcmc.minibatch(2), 0.1), diagonal, 0.5),
        participation=fedmcmc.categorical(f),
        step_size=0.01,
    ),
]
for kernel, collect in zip(kernels, (None, fedmcmc.runs.local_positions, None, None)):
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, data, position, num_rounds=4, num_chains=2, thinning=2,
        collect=collect, progress=False,
    )
    for leaf in jax.tree.leaves(samples.draws):
        assert np.isfinite(leaf).all()
        assert leaf.dtype == jnp.result_type(float), leaf.dtype
samples = fedmcmc.sample(
    jax.random.key(0), fedmcmc.dsgld(posterior, batch_size=2, probabilities=f, **relay), data,
    lambda key: jax.tree.map(jnp.ones_like, position), num_rounds=2, progress=False,
)
assert np.isfinite(samples.draws["mean"]).all()
compressors = [
    fedmcmc.memory(fedmcmc.quantize(4)),
    fedmcmc.memory(fedmcmc.quantize(jnp.array([2, 3, 4])), jnp.array([0.1, 0.2, 0.3]), of="active"),
    fedmcmc.compression.chain(
        fedmcmc.compression.clip(5.0), fedmcmc.sparsify(0.5), fedmcmc.quantize(7, per_leaf=True)
    ),
    fedmcmc.top_k(0.5),
    fedmcmc.per_client((fedmcmc.quantize(4), fedmcmc.sparsify(0.5)), [0, 1, 1]),
]
langevin = [
    fedmcmc.lsd_pp(
        posterior, step_size=0.01, batch_size=2, refresh_every=2,
        participation=fedmcmc.bernoulli(f),
    ),
    fedmcmc.lsd_star(posterior, position, step_size=0.01, batch_size=0.5, prior="split"),
    fedmcmc.langevin(
        posterior, fedmcmc.noisy(fedmcmc.minibatch(2), 0.1), step_size=0.01,
        participation=fedmcmc.bernoulli(0.5, rescale="realised"),
        preconditioner=fedmcmc.dynamics.preconditioners.rms(0.9, num_noiseless=1),
    ),
    fedmcmc.fsgld(posterior, diagonal, batch_size=2, **relay),
    fedmcmc.lsd(posterior, step_size=0.01),
]
for kernel, compressor in zip(langevin, compressors):
    samples = fedmcmc.sample(
        jax.random.key(0), fedmcmc.compress(kernel, compressor), data, position, num_rounds=4,
        num_chains=2, progress=False,
    )
    for leaf in jax.tree.leaves(samples.draws):
        assert np.isfinite(leaf).all()
        assert leaf.dtype == jnp.result_type(float), leaf.dtype
samples = fedmcmc.sample(
    jax.random.key(0), fedmcmc.psgld(posterior, step_size=0.01, batch_size=2), data, position,
    num_rounds=2, progress=False,
)
for participation in (fedmcmc.full(), fedmcmc.bernoulli(0.5), fedmcmc.uniform(2)):
    cohort = jax.jit(lambda key: participation.prepare(key, 3))(jax.random.key(1))
    assert np.isfinite(cohort.weight).all()
from fedmcmc import inference
sgd, cohort = optax.sgd(0.05, momentum=0.5), fedmcmc.uniform(2)
chain = inference.langevin_mean(0.01, num_samples=3, batch_size=2)
mean = inference.sgd_mean(sgd, num_samples=3, batch_size=2, weight_decay=0.1)
modelled = posterior._replace(resample_fn=resample)
trained = dict(client_optimizer=sgd, batch_size=2, participation=cohort)
hmc = dict(step_size=0.05, num_integration_steps=2, num_local_steps=2, batch_size=2)
by_outcomes = [
    fedmcmc.fed_ep(
        modelled, inference=inference.ngvi(mean, num_steps=2, batch_size=2), damping=0.3
    ),
    fedmcmc.fed_sep(
        modelled, inference=inference.laplace(chain), structure="dense", damping=0.1,
        participation=fedmcmc.bernoulli(f), initial_precision=0.5,
    ),
]
families = [
    fedmcmc.fa_hmc(posterior, rho=0.4, gradient_noise=0.1, control_variate=True, **hmc),
    fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=3, batch_size=2),
    fedmcmc.dg_sgld(posterior, step_size=0.01, num_local_steps=2, tolerance=0.5),
    fedmcmc.fed_be(posterior, num_local_steps=2, **trained),
    fedmcmc.fed_avg(posterior, num_local_epochs=2, server_optimizer=optax.adam(0.1), **trained),
    fedmcmc.fed_pa(posterior, num_samples=3, shrinkage=0.1, **trained),
    fedmcmc.fed_ep(
        posterior, inference=inference.mcmc(mean, shrinkage=0.2, clip=2.0), cohort_size=2,
        client_optimizer=sgd, server_optimizer=sgd, initial_precision=0.5, max_norm=9.0,
    ),
    fedmcmc.fed_ep(posterior, inference=inference.exact_gaussian(), structure="dense"),
    # The checker of reused keys takes a batch of keys that is transposed for a loop for used.
    *(() if jax.config.jax_debug_key_reuse else by_outcomes),
    fedmcmc.adf(
        posterior, structure="scaled_identity", participation=cohort,
        inference=inference.scaled_identity(chain, precision_per_row=0.5),
    ),
    fedmcmc.hmc(posterior, position, max_integration_steps=3, num_adapt=2, metric=np.eye(3)),
    fedmcmc.faults(
        fedmcmc.compress(
            fedmcmc.mala(posterior, position, step_size=0.1),
            fedmcmc.top_k(0.5, error_feedback=False),
        ),
        drop=0.2,
    ),
    fedmcmc.gaussian_mh(posterior, dense.sum(), correlation=0.3),
    fedmcmc.gaussian_mh(posterior, diagonal.sum()),
    fedmcmc.multiple_try(posterior, dense.sum(), num_tries=3),
    fedmcmc.compress(
        fedmcmc.fed_ep(posterior, inference=inference.mcmc(chain, shrinkage=0.5), cohort_size=2),
        fedmcmc.quantize(8),
    ),
    fedmcmc.secure_sum(
        fedmcmc.lsd_star(posterior, position, step_size=0.01, participation=fedmcmc.bernoulli(f)),
        allow_differencing=True,
    ),
    fedmcmc.faults(
        fedmcmc.secure_sum(fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=2)), late=0.2
    ),
]
for kernel in families:
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, data, position, num_rounds=3, num_chains=2, progress=False
    )
    for leaf in jax.tree.leaves(samples.draws):
        assert np.isfinite(leaf).all()
        assert leaf.dtype == jnp.result_type(float), leaf.dtype
print("done", jnp.result_type(float))
"""
STRICT = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
LANES = {
    "strict": STRICT,
    "strict-x64": {"JAX_ENABLE_X64": "1", **STRICT},
    "key-reuse": {"JAX_DEBUG_KEY_REUSE": "1"},
}
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.slow
@pytest.mark.parametrize("lane", LANES)
def test_kernels_run_clean(lane):
    environment = {**os.environ, **LANES[lane], "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["done", "float64" if "x64" in lane else "float32"]


def test_the_key_reuse_lane_notices_a_reused_key():
    script = "import jax; k = jax.random.key(0); jax.random.normal(k); jax.random.normal(k)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **LANES["key-reuse"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "KeyReuseError" in done.stderr
