"""Models, rows and helpers that the tests of the NumPyro front door share."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan

SIZES = (5, 1, 9)  # a client of one row among them


def clients(seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(n, 2)),
            "y": rng.normal(size=n),
            "g": rng.integers(0, 3, n),
            "w": rng.normal(size=(n, 4)),
        }
        for n in SIZES
    ]


def observe(name, fn, value):
    with numpyro.plate("rows", value.shape[0]):
        return numpyro.sample(name, fn, obs=value)


def slope():
    return numpyro.sample("slope", dist.Normal(0, 1))


def constrained(x, y, g, w):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 1.5))
    shift = numpyro.sample("shift", dist.Uniform(-1, tau))  # its support is another site's
    slope = numpyro.sample("slope", dist.LogNormal(0, 1).expand([2]).to_event(1))
    both = numpyro.sample("both", dist.MultivariateNormal(jnp.zeros(2), scale_tril=cholesky))
    numpyro.deterministic("ratio", effect / tau)
    mean = numpyro.deterministic("mean", effect[g] + x @ (both * slope) + shift)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, tau), obs=y)
        numpyro.sample("g", dist.Categorical(weights), obs=g)
        numpyro.sample("w", dist.Normal(shift, tau).expand([4]).to_event(1), obs=w)


def scaled_and_masked(x, y, g, w):
    with handlers.scale(scale=0.3):
        tau = numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    with handlers.mask(mask=np.array([True, False, True, True])):
        mu = numpyro.sample("mu", dist.Beta(2.0, 3.0).expand([4]))
    numpyro.factor("pull", -jnp.sum(mu) * tau)
    numpyro.factor("tilt", 0.1 * x[:, 0] * tau)
    columns, rows = numpyro.plate("columns", 4, dim=-1), numpyro.plate("rows", x.shape[0], dim=-2)
    with columns, rows, handlers.scale(scale=2.0), handlers.mask(mask=w > -0.5):
        numpyro.sample("w", dist.StudentT(4.0, mu, tau), obs=w)


def conditioned(x, y, g, w):
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(scale))
    observe("y", dist.Normal(x @ jnp.ones(2), spread), y)


def rows_last(x, y, g, w):
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", x.shape[0], dim=-1), numpyro.plate("columns", 4, dim=-2):
        numpyro.sample("w", dist.Normal(loc[:, None], 1.0), obs=w.T)


def walk(x, y, g, w):
    def step(carry, _):
        carry = numpyro.sample("level", dist.LogNormal(jnp.log(carry), 0.5))
        return carry, carry

    _, levels = scan(step, jnp.ones(()), jnp.arange(3))
    observe("y", dist.Normal(levels[g], 1.0), y)


MODELS = {
    "constrained": constrained,
    "scaled and masked": scaled_and_masked,
    "conditioned": handlers.condition(conditioned, {"spread": np.array(0.7)}),
    "rows last": rows_last,
    "scan": walk,
}
