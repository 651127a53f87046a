"""DG-SGLD, and DG-LMC where gradients are exact.

Source: Plassier, Vono, Durmus and Moulines (2021), DG-LMC: a turn-key and scalable synchronous
distributed MCMC algorithm via Langevin Monte Carlo within Gibbs. Their ``gamma_i`` is `step_size`,
``N_i`` is `num_local_steps`, ``rho_i`` is `tolerance`, and ``A_i`` is the identity.
"""

from fedmcmc._types import FederatedKernel, Number, Posterior
from fedmcmc.gradients import for_batch_size
from fedmcmc.kernels import consensus


def dg_sgld(
    posterior: Posterior,
    *,
    step_size: Number,
    num_local_steps: int,
    tolerance: Number,
    batch_size: int | float | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
) -> FederatedKernel:
    """Langevin within Gibbs: clients move copies of the position, the server averages and draws.

    Every client takes part in every round.

    Parameters
    ----------
    posterior
        The model. The prior is split over the clients by their shares of the rows.
    step_size
        Of the clients' Langevin steps: a number or schedule of the round, or ``[num_clients]``.
        Steps are stable where ``step_size * (smoothness + 1 / tolerance) < 2``, with the
        smoothness (largest curvature) of the client's own log density; the paper takes
        ``tolerance / (2 * (tolerance * smoothness + 1))``.
    num_local_steps
        Steps per round.
    tolerance
        Variance by which a client's copy may differ from the server's position: a number or
        schedule of the round, or ``[num_clients]``.
    batch_size
        Rows per gradient, or below one the fraction of a client's rows; ``None`` for all of them,
        which is DG-LMC.
    temperature
        Multiplies the variance of all noise.
    replace
        Whether minibatches are drawn with replacement.

    Notes
    -----
    The law is not the posterior's even as the step size goes to zero: where the client's log
    densities are quadratic with curvatures ``A_i``, the precision is then
    ``sum_i inverse(inverse(A_i) + tolerance_i)`` instead of ``sum_i A_i``. A small tolerance needs
    a small step size.

    References
    ----------
    Plassier et al. (2021), Algorithm 1; the baseline DG-SGLD of Vono et al. (2022).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = dg_sgld(posterior, step_size=0.02, num_local_steps=4, tolerance=0.05)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=100, num_chains=2, progress=False
    ... )
    >>> samples.draws.shape, samples.state.clients.position.shape
    ((2, 100), (2, 2))
    """
    return consensus(
        posterior,
        for_batch_size(batch_size, replace=replace),
        step_size=step_size,
        num_local_steps=num_local_steps,
        tolerance=tolerance,
        temperature=temperature,
    )
