# %% [markdown]
# # Compose a sampler and test it against its exact distribution
#
# You compose a sampler from blocks: a gradient estimator, a participation rule and a rule by which
# the chain moves. On Gaussian data the chain is a linear recursion, so its mean and variance at the
# step size are known exactly. A test against these finds errors that a comparison with the
# posterior would have to tolerate.
#
# A slower introduction is [the tutorial](../docs/tutorials/composed_sampler.md).

# %%
import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc

# %% [markdown]
# ## The sampler
#
# The sampler is Langevin dynamics. In each round, two clients are drawn at random. They add noise
# to their gradients, so that a message reveals less about single rows.


# %%
def noisy_cohorts(posterior, *, step_size, cohort_size, noise):
    """Return Langevin dynamics on noisy gradients of a random cohort."""
    return fedmcmc.langevin(
        posterior,
        fedmcmc.noisy(fedmcmc.full_gradient(), noise),
        step_size=step_size,
        participation=fedmcmc.uniform(cohort_size),
    )


# %% [markdown]
# ## Its exact distribution
#
# Client $s$ has $n_s$ numbers with mean $m_s$. Their likelihood is normal with variance one, and
# the prior is normal with precision $p$. With $n = \sum_s n_s$, the gradient of the log posterior
# is $\sum_s n_s m_s - (p + n) \theta$. A round adds the step size times an unbiased estimate of
# this gradient, and noise with variance twice the step size. If $b$ of $S$ clients take part, the
# estimate is $S / b$ times the sum over these clients, and its variance depends on the position. So
# the stationary mean is the posterior mean, and the stationary variance solves a linear equation,
# which this function solves in NumPy.

# %%
sizes, means = np.array([30, 20, 10, 25]), np.array([0.5, -0.3, 0.8, 0.0])
PRIOR, STEP, COHORT, NOISE = 20.0, 4e-3, 2, 8.0
rng = np.random.default_rng(0)
clients = []
for size, mean in zip(sizes, means, strict=True):
    rows = rng.normal(size=size)
    clients.append(rows - rows.mean() + mean)
data = fedmcmc.FederatedData.from_clients(clients)
posterior = fedmcmc.Posterior(lambda t: -0.5 * PRIOR * t**2, lambda t, x: -0.5 * (x - t) ** 2)


def exact_moments():
    """Return the stationary mean and variance of the chain."""
    num = len(sizes)
    precision = PRIOR + sizes.sum()
    center = (sizes * means).sum() / precision
    # A client's gradient at theta is a_s - n_s * (theta - center).
    a = sizes * (means - center)
    # The variance of num / COHORT times a sum over a cohort that is drawn without replacement.
    scale = num**2 * (1 - COHORT / num) / COHORT

    def covariance(u, v):
        return scale * np.cov(u, v, ddof=1)[0, 1]

    constant = covariance(a, a)
    # The variance is quadratic in theta - center, and the mean of its linear term is zero.
    quadratic = covariance(sizes, sizes)
    added = num / COHORT * num * NOISE**2  # noise of the clients, weighted
    shrink = (1 - STEP * precision) ** 2 + STEP**2 * quadratic
    return center, (2 * STEP + STEP**2 * (constant + added)) / (1 - shrink)


center, variance = exact_moments()
print(f"posterior: mean {center:.4f}, sd {(PRIOR + sizes.sum()) ** -0.5:.4f}")
print(f"exact distribution of the sampler: mean {center:.4f}, sd {variance**0.5:.4f}")

# %% [markdown]
# ## The test
#
# Run many independent chains, keep one draw of each, and compute z-scores: the differences of mean
# and variance from their exact values, in standard errors.


# %%
def z_scores(kernel, num_chains=4_000, num_rounds=60):
    """Return the z-scores of mean and variance of the last draws."""
    samples = fedmcmc.sample(
        jax.random.key(0),
        kernel,
        data,
        jnp.asarray(center, jnp.float32),
        num_rounds=num_rounds,
        num_burnin=num_rounds - 1,
        num_chains=num_chains,
        progress=False,
    )
    draws = samples.draws[:, 0].astype(float)
    squares = (draws - center) ** 2
    return (
        (draws.mean() - center) / (draws.std() / num_chains**0.5),
        (squares.mean() - variance) / (squares.std() / num_chains**0.5),
    )


settings = dict(step_size=STEP, cohort_size=COHORT, noise=NOISE)
z_mean, z_variance = z_scores(noisy_cohorts(posterior, **settings))
print(f"z-score of the mean {z_mean:+.1f}, of the variance {z_variance:+.1f}")
assert max(abs(z_mean), abs(z_variance)) < 4.5

# %% [markdown]
# A test that cannot fail proves nothing. It finds these three common errors:


# %%
def z_of(**changes):
    """Return the z-scores of the sampler with other settings."""
    return z_scores(noisy_cohorts(posterior, **{**settings, **changes}))


doubled = fedmcmc.Posterior(lambda t: -0.5 * 2 * PRIOR * t**2, posterior.loglikelihood_fn)
errors = {
    "noise too large by the root of two": z_of(noise=NOISE * 2**0.5),
    "one client too few in each round": z_of(cohort_size=1),
    "the prior counted twice": z_scores(noisy_cohorts(doubled, **settings)),
}
for name, (z_mean, z_variance) in errors.items():
    print(f"{name}: z-score of the mean {z_mean:+.1f}, of the variance {z_variance:+.1f}")
    assert max(abs(z_mean), abs(z_variance)) > 4.5

# %% [markdown]
# The package tests its kernels in this way, in more dimensions. The equations are in [Exact
# distributions of kernels](../docs/explanation/exact_distributions.md), and
# [CONTRIBUTING](../CONTRIBUTING.md) lists the tests that a new kernel needs.
