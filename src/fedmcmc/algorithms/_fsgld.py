"""SGLD, DSGLD and FSGLD.

Sources: Welling and Teh (2011); Ahn, Shahbaba and Welling (2014); El Mekkaoui, Mesquita,
Blomstedt and Kaski (2021), Algorithm 1. Their step size ``h`` is ``2 * step_size``.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import integers_per_client
from fedmcmc._types import ArrayTree, FederatedKernel, Number, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates, conducive, for_batch_size
from fedmcmc.kernels import refreshed_relay, relay
from fedmcmc.participation import categorical, pooled


def sgld(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Stochastic gradient Langevin dynamics on all rows, pooled as one client's.

    The centralized reference: one round is one step.

    Parameters
    ----------
    posterior
        The model.
    step_size
        Number or schedule of the round; ``h / 2`` of Welling and Teh (2011), eq. 4.
    batch_size
        Rows per gradient, ``None`` for all.
    temperature
        Multiplies the variance of the noise.
    replace
        Whether minibatches are drawn with replacement.
    metric
        As in `fedmcmc.lsd`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = sgld(posterior, step_size=0.05)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=10, progress=False
    ... )
    >>> samples.draws.shape
    (1, 10)
    """
    return relay(
        posterior,
        for_batch_size(batch_size, replace=replace),
        participation=pooled(),
        step_size=step_size,
        temperature=temperature,
        metric=metric,
    )


def dsgld(
    posterior: Posterior,
    *,
    step_size: Number,
    num_local_steps: int | Sequence[int],
    batch_size: int | float | None = None,
    probabilities: Array | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Distributed SGLD: a chain visits clients at random and takes local steps at each.

    Parameters
    ----------
    posterior
        The model.
    step_size
        Number or schedule of the round; ``h / 2`` of the papers.
    num_local_steps
        Local updates per visit, ``T``: one number, or one per client, for clients that are not
        equally fast. As ``T`` grows, the law moves away from the posterior, towards a mixture of
        the clients' tempered posteriors, which are proportional to ``prior * likelihood_s ** (1 /
        probabilities[s])``. Where numbers differ, the client's share of all steps stands for its
        probability, ``probabilities[s] * T[s]`` over their sum.
    batch_size
        Rows per gradient, or below one the fraction of a client's rows; ``None`` for all of them.
    probabilities
        ``[num_clients]``, how often each client is visited; uniform by default.
    temperature
        Multiplies the variance of the noise.
    replace
        Whether minibatches are drawn with replacement.
    metric
        As in `fedmcmc.lsd`.

    References
    ----------
    Ahn, Shahbaba and Welling (2014), Distributed stochastic gradient MCMC; eqs. 3 and 4 of
    El Mekkaoui et al. (2021). The prior is not divided by the probability.
    """
    return relay(
        posterior,
        for_batch_size(batch_size, replace=replace),
        participation=categorical(probabilities),
        step_size=step_size,
        num_local_steps=num_local_steps,
        temperature=temperature,
        metric=metric,
    )


def fsgld(
    posterior: Posterior,
    surrogates: Gaussian,
    *,
    step_size: Number,
    num_local_steps: int | Sequence[int],
    batch_size: int | float | None = None,
    probabilities: Array | None = None,
    alpha: Number = 1.0,
    temperature: Number = 1.0,
    replace: bool = True,
    metric: ArrayTree | None = None,
    refresh_every: int | None = None,
    refresh_until: int | Array | None = None,
) -> FederatedKernel:
    """Federated SGLD: `dsgld` with conducive gradients.

    Parameters
    ----------
    posterior
        The model.
    surrogates
        One `Gaussian` per client for its likelihood, leaves ``[num_clients, ...]``; see
        `fedmcmc.surrogates`.
    step_size, num_local_steps, batch_size, probabilities, temperature, replace, metric
        As in `dsgld`.
    alpha
        Strength of the conducive gradients (Remark 1), number or schedule of the round.
    refresh_every
        Rounds between refreshes of the surrogates at the chain's present place, an integer; by
        default they stay as given. In its first visit after each round that is a multiple, a
        client replaces its surrogate by the expansion of its log likelihood to second order at the
        position at which the visit begins, dense or diagonal as the first ones, and sends the
        change; where it is not finite the old one stays. From the next round on it is in use.
    refresh_until
        The round from which on nobody refits; by default everyone always does.

    Notes
    -----
    With exact surrogates and full gradients every client has the same drift, that of the
    posterior. The law is then that of plain Langevin dynamics for any `num_local_steps`.
    Minibatches add noise to every local step, which surrogates do not remove: they correct the
    mean of an estimate, not its variance. The stationary mean and covariance on Gaussian targets,
    minibatch noise included, are in ``docs/laws.md``.

    With `refresh_every`, a round has the law of FSGLD with the surrogates that are in use when it
    begins: corrections sum to zero over the clients in every round, so that small steps sample the
    posterior as without. What is lost: surrogates follow from where the chain has been, so the
    positions alone are no Markov chain, and the stationary law at a finite step is known only where
    expansions are the same everywhere (Gaussian likelihoods). Set `refresh_until` to the number of
    rounds of burn-in, and all that is kept is FSGLD with surrogates that stay. A refresh takes a
    Hessian of the visited client's rows, ``d`` products with a vector, and every message is longer
    by the natural parameters, which are zero where nothing is due; broadcasts hold the product of
    the surrogates.

    References
    ----------
    El Mekkaoui et al. (2021), Federated stochastic gradient Langevin dynamics, Algorithm 1,
    eqs. 5-7.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array([1.0, 0.0]), variance=jnp.array([1 / 3, 1 / 5]))
    >>> kernel = fsgld(posterior, q, step_size=0.01, num_local_steps=10)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=100, num_chains=2, progress=False
    ... )
    >>> samples.draws.shape, int(samples.info["bits_up"][0, 0])
    ((2, 100), 32)
    """
    surrogates = as_surrogates(surrogates)
    shares = _shares(surrogates, probabilities, num_local_steps)
    if refresh_every is not None:
        return refreshed_relay(
            posterior,
            for_batch_size(batch_size, replace=replace),
            surrogates,
            refresh_every=refresh_every,
            refresh_until=refresh_until,
            alpha=alpha,
            participation=categorical(probabilities),
            step_size=step_size,
            num_local_steps=num_local_steps,
            temperature=temperature,
            metric=metric,
        )
    if refresh_until is not None:
        raise ValueError("refresh_until goes with refresh_every.")
    return relay(
        posterior,
        conducive(for_batch_size(batch_size, replace=replace), surrogates, alpha, shares=shares),
        participation=categorical(probabilities),
        step_size=step_size,
        num_local_steps=num_local_steps,
        temperature=temperature,
        metric=metric,
    )


def _shares(surrogates: Gaussian, probabilities: Any, num_local_steps: Any) -> Array:
    """Return each client's share of visits, or of all steps where visits differ in length."""
    num = surrogates.num_clients
    shares = jnp.full(num, 1 / num) if probabilities is None else probabilities
    if not np.ndim(num_local_steps):
        return shares
    steps = integers_per_client(num_local_steps, "num_local_steps")
    if len(steps) != num:
        raise ValueError(f"num_local_steps must be one number per client, {num}, got {len(steps)}.")
    own = jnp.asarray(shares) * jnp.asarray(steps)
    return own / jnp.sum(own)
