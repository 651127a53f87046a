"""DG-SGLD, and DG-LMC with exact gradients.

Source: Plassier et al. (2021), DG-LMC: a turn-key and scalable synchronous distributed
MCMC algorithm via Langevin Monte Carlo within Gibbs. Their ``gamma_i`` is `step_size`, ``N_i`` is
`num_local_steps`, ``rho_i`` is `tolerance`, and ``A_i`` is the identity.
"""

from fedmcmc.gradients import for_batch_size
from fedmcmc.kernels import consensus
from fedmcmc.types import FederatedKernel, Number, Posterior


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
    """Build DG-SGLD, Langevin within Gibbs: clients move copies of the position in every round.

    The server draws the next position given the average of the copies. The stationary distribution
    differs from the posterior even for small steps (docs/explanation/exact_distributions.md), less
    so for a small tolerance.

    Parameters
    ----------
    posterior
        Model. The prior is split over the clients in proportion to their numbers of rows.
    step_size
        Size of the clients' Langevin steps: a number, a schedule of the round, or
        ``[num_clients]``. Steps are stable if ``step_size * (smoothness + 1 / tolerance) < 2``,
        where the smoothness is the largest curvature of the client's log density. The paper uses
        ``tolerance / (2 * (tolerance * smoothness + 1))``.
    num_local_steps
        Number of steps per round.
    tolerance
        Variance of a client's copy around the server's position, like `step_size`.
    batch_size, temperature, replace
        See `fedmcmc.lsd`. With ``batch_size=None`` this is DG-LMC.

    References
    ----------
    Plassier et al. (2021), Algorithm 1; the baseline DG-SGLD of Vono et al. (2022).

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = dg_sgld(posterior, step_size=0.02, num_local_steps=4, tolerance=0.05)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=9, progress=False)
    >>> samples.draws.shape, samples.state.clients.position.shape
    ((1, 9), (1, 2))
    """
    return consensus(
        posterior,
        for_batch_size(batch_size, replace=replace),
        step_size=step_size,
        num_local_steps=num_local_steps,
        tolerance=tolerance,
        temperature=temperature,
    )
