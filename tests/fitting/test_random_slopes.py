"""Correlated random intercepts and slopes of few subjects, on two cores."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import fedmcmc

AGES = np.array([8.0, 10.0, 12.0, 14.0], np.float32) - 11
SUBJECT = np.repeat(np.arange(27), 4)
SHARED = ("mu", "beta", "tau", "sigma")


def outcomes():
    rng = np.random.default_rng(0)
    covariance = np.array([[3.24, 0.135], [0.135, 0.0625]])
    effect = rng.multivariate_normal([24.0, 0.66], covariance, 27)
    noise = 1.3 * rng.standard_normal(108)
    return (effect[SUBJECT, 0] + effect[SUBJECT, 1] * np.tile(AGES, 27) + noise).astype(np.float32)


def shared_sites():
    mu = numpyro.sample("mu", dist.Normal(24, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([3.0, 1.0])).to_event(1))
    factor = numpyro.sample("L", dist.LKJCholesky(2, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(3.0))
    return jnp.stack([mu, beta]), tau[:, None] * factor, sigma


def model(age, y=None):
    mean, factor, sigma = shared_sites()
    effect = numpyro.sample(
        "effect", dist.MultivariateNormal(mean, scale_tril=factor), infer={"local": True}
    )
    with numpyro.plate("rows", len(age)):
        numpyro.sample("y", dist.Normal(effect[0] + effect[1] * age, sigma), obs=y)


def pooled(age, y):
    mean, factor, sigma = shared_sites()
    with numpyro.plate("subjects", 27):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    effect = mean + z @ factor.T
    numpyro.sample("y", dist.Normal(effect[SUBJECT, 0] + effect[SUBJECT, 1] * age, sigma), obs=y)


def means_by_fit():
    rows, groups, y = [], [], outcomes()
    for part in (slice(0, 64), slice(64, 108)):
        rows.append({"age": np.tile(AGES, 27)[part], "y": y[part]})
        groups.append(SUBJECT[part])
    data = fedmcmc.FederatedData.from_clients(rows, groups=groups)
    fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
    drawn = fitted.samples.constrained
    return {name: np.mean(drawn[name], axis=(0, 1)).tolist() for name in SHARED}


ON_TWO_CORES = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import json
from tests.fitting.test_random_slopes import means_by_fit
print(json.dumps(means_by_fit()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can be chosen on Linux")
def test_fit_ends_on_two_cores_with_the_means_of_nuts():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", ON_TWO_CORES],
        capture_output=True,
        text=True,
        timeout=600,  # of a busy machine; the fault is that it never ends
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    means = json.loads(run.stdout.splitlines()[-1])
    chains = MCMC(NUTS(pooled), num_warmup=500, num_samples=4000, progress_bar=False)
    chains.run(jax.random.key(1), np.tile(AGES, 27), outcomes())
    for name, draws in chains.get_samples().items():
        if name in SHARED:
            error = np.abs(draws.mean(0) - np.array(means[name])) / draws.std(0)
            assert (error < 0.15).all(), name
