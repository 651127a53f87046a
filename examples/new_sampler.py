# %% [markdown]
# # A new sampler in twenty lines, and its law
#
# A sampler is composed of blocks: how a client estimates its gradient, who takes part in a round,
# how the chain moves. On Gaussian data the chain is a linear recursion, so that its mean and its
# covariance at the step size used are known exactly. A test against these finds errors that a
# comparison with the posterior would have to tolerate.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc

# %% [markdown]
# ## The sampler
#
# Langevin dynamics in which two clients of a round answer, drawn at random, each with gradients
# that have noise added on purpose, so that a message tells less of a row.


# %%
def noisy_cohorts(posterior, *, step_size, cohort_size, noise):
    """Langevin dynamics on noisy gradients of a random cohort."""
    return fedmcmc.langevin(
        posterior,
        fedmcmc.noisy(fedmcmc.full_gradient(), noise),
        step_size=step_size,
        participation=fedmcmc.uniform(cohort_size),
    )


# %% [markdown]
# ## Its law
#
# Client `s` has `n_s` numbers with mean `m_s`; their likelihood is normal with variance one, the
# prior is normal with precision `p`. The gradient of the log posterior is `sum_s n_s m_s - (p +
# n) theta`. A round adds `step_size` times an unbiased estimate of it and noise of variance `2 *
# step_size`. With `b` of `S` clients the estimate is `S / b` times the sum over the cohort, whose
# variance depends on where the chain is. So the mean is that of the posterior, and the variance
# solves a linear equation, which is written out here in NumPy.

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


def exact_law():
    """Return mean and variance of the chain at this step size."""
    num = len(sizes)
    precision = PRIOR + sizes.sum()
    center = (sizes * means).sum() / precision
    # A client's gradient at theta is a_s - n_s * (theta - center).
    a = sizes * (means - center)
    # The variance of num / COHORT times the sum over a cohort drawn without replacement.
    scale = num**2 * (1 - COHORT / num) / COHORT

    def covariance(u, v):
        return scale * np.cov(u, v, ddof=1)[0, 1]

    constant = covariance(a, a)
    # E[estimate^2] is quadratic in theta - center; the mean of the linear term is zero.
    quadratic = covariance(sizes, sizes)
    added = num / COHORT * num * NOISE**2  # each client's own noise, weighted
    shrink = (1 - STEP * precision) ** 2 + STEP**2 * quadratic
    return center, (2 * STEP + STEP**2 * (constant + added)) / (1 - shrink)


center, variance = exact_law()
print(f"posterior: mean {center:.4f}, sd {(PRIOR + sizes.sum()) ** -0.5:.4f}")
print(f"the sampler's law: mean {center:.4f}, sd {variance**0.5:.4f}")

# %% [markdown]
# ## The test
#
# Many independent chains, one number of each, and z-scores: mean and variance of so many draws
# differ from the exact ones by no more than chance.


# %%
def z_scores(kernel, num_chains=4_000, num_rounds=60):
    """Return how many standard errors mean and variance of the last draws are off."""
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
    last = samples.draws[:, 0].astype(float)
    squares = (last - center) ** 2
    return (
        (last.mean() - center) / (last.std() / num_chains**0.5),
        (squares.mean() - variance) / (squares.std() / num_chains**0.5),
    )


settings = dict(step_size=STEP, cohort_size=COHORT, noise=NOISE)
found = z_scores(noisy_cohorts(posterior, **settings))
print(f"z of the mean {found[0]:+.1f}, of the variance {found[1]:+.1f}")
assert max(np.abs(found)) < 4.5

# %% [markdown]
# A test that cannot fail proves nothing. Three mistakes that one makes:


# %%
def z_of(**changes):
    return z_scores(noisy_cohorts(posterior, **{**settings, **changes}))


doubled = fedmcmc.Posterior(lambda t: -0.5 * 2 * PRIOR * t**2, posterior.loglikelihood_fn)
mistakes = {
    "noise too large by the root of two": z_of(noise=NOISE * 2**0.5),
    "one client too few in each round": z_of(cohort_size=1),
    "the prior counted twice": z_scores(noisy_cohorts(doubled, **settings)),
}
for name, (mean_off, variance_off) in mistakes.items():
    print(f"{name}: z of the mean {mean_off:+.1f}, of the variance {variance_off:+.1f}")
    assert max(abs(mean_off), abs(variance_off)) > 4.5

# %% [markdown]
# A kernel of the package is tested like this for every block, in more dimensions:
# [laws](../docs/explanation/exact_distributions.md) has the equations, [CONTRIBUTING](../CONTRIBUTING.md) says what a new
# one needs.
