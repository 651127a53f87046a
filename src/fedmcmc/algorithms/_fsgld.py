"""SGLD, DSGLD and FSGLD.

Sources: Welling and Teh (2011); Ahn et al. (2014); El Mekkaoui et al. (2021), Algorithm 1. Their
step size ``h`` is ``2 * step_size``.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import integers_per_client
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_surrogates, conducive, for_batch_size
from fedmcmc.kernels import refreshed_relay, relay
from fedmcmc.participation import categorical, pooled
from fedmcmc.types import ArrayTree, FederatedKernel, Number, Posterior


def sgld(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build stochastic gradient Langevin dynamics on all rows, pooled as the rows of one client.

    This is the centralized reference: one round is one step.

    Parameters
    ----------
    posterior
        Model.
    step_size
        Number or schedule of the round; ``h / 2`` in the papers.
    batch_size
        Number of rows per gradient; ``None`` for all.
    temperature, replace, metric
        See `fedmcmc.lsd`.

    References
    ----------
    Welling and Teh (2011), eq. 4; El Mekkaoui et al. (2021), eqs. 1 and 2.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = sgld(posterior, step_size=0.05)
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
    """Build distributed SGLD: a chain visits random clients and takes local steps at each.

    Parameters
    ----------
    posterior
        Model.
    step_size
        Number or schedule of the round; ``h / 2`` in the papers.
    num_local_steps
        Number of local steps per visit, ``T``: one number, or one per client if clients differ in
        speed. With growing ``T``, the stationary distribution moves from the posterior to a mixture
        of the clients' tempered posteriors, ``prior * likelihood_s ** (1 / probabilities[s])``. If
        the numbers differ, the client's share of all steps replaces its probability:
        ``probabilities[s] * T[s]`` divided by the sum over clients.
    probabilities
        ``[num_clients]``, probability of visiting each client; uniform by default.
    batch_size, temperature, replace, metric
        See `fedmcmc.lsd`.

    References
    ----------
    Ahn et al. (2014), Distributed stochastic gradient MCMC; El Mekkaoui et al. (2021), eqs. 3 and
    4. The prior is not divided by the probability.
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
    """Build federated SGLD: `dsgld` with conducive gradients.

    With exact surrogates and full gradients, draws have the distribution of plain Langevin dynamics
    for any `num_local_steps`.

    Parameters
    ----------
    posterior
        Model.
    surrogates
        One `Gaussian` per client that approximates its likelihood (`fedmcmc.surrogates`).
    step_size, num_local_steps, batch_size, probabilities, temperature, replace, metric
        See `dsgld`.
    alpha
        Factor of the conducive gradients (Remark 1), a number or schedule of the round.
    refresh_every
        Number of rounds between refreshes of the surrogates; by default they stay fixed. A client's
        first visit after each multiple replaces its surrogate by a second-order expansion at the
        start of the visit, from the next round on. Each message grows by the natural parameters.
    refresh_until
        First round without refreshes, such as the number of burn-in rounds.

    References
    ----------
    El Mekkaoui et al. (2021), eqs. 5 to 7 and Algorithm 1. Refreshes are not in the paper.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array([1.0, 0.0]), variance=jnp.array([1 / 3, 1 / 5]))
    >>> kernel = fsgld(posterior, q, step_size=0.01, num_local_steps=10)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=9, progress=False)
    >>> samples.draws.shape, int(samples.info["bits_up"][0, 0])
    ((1, 9), 32)
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
        raise ValueError("refresh_until needs refresh_every.")
    return relay(
        posterior,
        conducive(for_batch_size(batch_size, replace=replace), surrogates, alpha, shares=shares),
        participation=categorical(probabilities),
        step_size=step_size,
        num_local_steps=num_local_steps,
        temperature=temperature,
        metric=metric,
    )


def _shares(
    surrogates: Gaussian, probabilities: Array | None, num_local_steps: int | Sequence[int]
) -> Array:
    """Return each client's share of visits, or of all steps if visits differ in length."""
    num = surrogates.num_clients
    shares = jnp.full(num, 1 / num) if probabilities is None else probabilities
    if not np.ndim(num_local_steps):
        return shares
    steps = integers_per_client(num_local_steps, "num_local_steps")
    if len(steps) != num:
        raise ValueError(
            f"num_local_steps must have one number for each of {num} clients, got {len(steps)}."
        )
    num_steps = jnp.asarray(shares) * jnp.asarray(steps)
    return num_steps / jnp.sum(num_steps)
