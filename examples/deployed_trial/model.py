"""Model of the deployed demo, as each hospital approves it."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import fedmcmc


def model(treated, risk, pancreatitis=None):
    """Logistic regression, written for the rows of one hospital."""
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(treated)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


def posterior(settings):
    """Return the model's posterior."""
    # Two invented rows define the names and types of the columns.
    zeros_and_ones = np.arange(2)
    example = dict(
        treated=zeros_and_ones.astype(np.float32),
        risk=zeros_and_ones.astype(np.float32),
        pancreatitis=zeros_and_ones.astype(np.int32),
    )
    return fedmcmc.from_numpyro(model, example=example)
