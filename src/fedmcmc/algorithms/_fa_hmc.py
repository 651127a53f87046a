"""FA-LD and FA-HMC: clients run Langevin or Hamiltonian dynamics and are averaged.

Sources: Deng et al. (2021), On convergence of federated averaging Langevin dynamics; Liang et al.
(2024), Bayesian federated learning with Hamiltonian Monte Carlo: algorithm and theory, Algorithms 1
to 3 and B.2. Their ``eta`` is the leapfrog `step_size`, ``K`` or ``L`` is `num_integration_steps`,
and ``T`` is `num_local_steps`. Their loss
``f_c`` is minus the log likelihood of client ``c`` divided by its weight, minus the log prior.
"""

from typing import Literal

from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.dynamics import euler_maruyama, leapfrog, shared_momentum
from fedmcmc.gradients import for_batch_size, noisy, scaffold
from fedmcmc.kernels import averaging
from fedmcmc.pytrees import schedules
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
)


def fa_ld(
    posterior: Posterior,
    *,
    step_size: Number,
    num_local_steps: int,
    rho: Number = 1.0,
    batch_size: int | float | None = None,
    gradient_noise: Number = 0.0,
    control_variate: bool = False,
    weights: Array | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build FA-LD, federated averaging Langevin dynamics: local steps, then a weighted average.

    Parameters
    ----------
    posterior, weights, participation, temperature
        See `fedmcmc.averaging`.
    step_size
        Number or schedule of the round. A local step of client ``c`` is ``position + step_size *
        gradient + sqrt(2 * step_size) * normal``. Its gradient is the gradient of the log prior
        plus the gradient of the client's log likelihood divided by its weight.
    num_local_steps
        Number of steps between two communications, ``T``. With more than one, differences in
        curvature between clients bias the mean.
    rho
        Correlation of the clients' noise, in [0, 1]; see `fedmcmc.dynamics.shared_momentum`.
    batch_size, replace, metric
        See `fedmcmc.lsd`.
    gradient_noise
        Standard deviation of normal noise that is added to each coordinate of every gradient of a
        client's weighted loss, after any control variate. The Python number zero adds none.
    control_variate
        If true, clients correct their gradients by the mean gradient at the start of the round
        (`fedmcmc.scaffold`). The mean of a Gaussian target is then exact for any number of steps.
        Each round has one more phase, and all clients must take part.

    References
    ----------
    Deng et al. (2021), Algorithm 1, where ``rho ** 2`` is this `rho`.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = fa_ld(posterior, step_size=0.01, num_local_steps=5, rho=0.5)
    """
    return averaging(
        posterior,
        _estimator(batch_size, replace, gradient_noise, control_variate, weights),
        integrator=euler_maruyama(metric),
        momentum=shared_momentum(rho),
        step_size=step_size,
        num_local_steps=num_local_steps,
        weights=weights,
        participation=participation,
        temperature=temperature,
    )


def fa_hmc(
    posterior: Posterior,
    *,
    step_size: Number,
    num_integration_steps: int,
    num_local_steps: int,
    rho: Number = 1.0,
    batch_size: int | float | None = None,
    gradient_noise: Number = 0.0,
    gradients: Literal["fresh", "reuse"] = "fresh",
    control_variate: bool = False,
    inverse_mass_matrix: ArrayTree | None = None,
    weights: Array | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    replace: bool = True,
) -> FederatedKernel:
    """Build FA-HMC, federated averaging Hamiltonian Monte Carlo without a Metropolis correction.

    Parameters
    ----------
    posterior, rho, batch_size, replace, gradient_noise, control_variate, weights, participation
        See `fa_ld`.
    temperature
        Factor of the variance of the momenta.
    step_size
        Leapfrog step, ``eta``: a number or schedule of the round. It must be smaller than two
        divided by the square root of the largest curvature of any client's weighted loss ``f_c``
        (times the inverse mass matrix).
    num_integration_steps
        Number of leapfrog steps per trajectory, ``L``. One gives `fa_ld` at ``step_size ** 2 / 2``.
    num_local_steps
        Number of trajectories between two communications, ``T``, each with a new momentum. If
        clients differ in curvature, more than one leapfrog step or trajectory biases the mean;
        `fedmcmc.predict_bias` computes the bias.
    gradients, inverse_mass_matrix
        See `fedmcmc.dynamics.leapfrog`.

    References
    ----------
    Liang et al. (2024), Algorithms 1 to 3, section 4.2 and Algorithm B.2.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = fa_hmc(posterior, step_size=0.1, num_integration_steps=5, num_local_steps=2)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=9, progress=False)
    >>> samples.draws.shape, int(samples.info["bits_up"][0, 0])
    ((1, 9), 64)
    """
    positive_integer(num_integration_steps, "num_integration_steps")
    return averaging(
        posterior,
        _estimator(batch_size, replace, gradient_noise, control_variate, weights),
        integrator=leapfrog(
            num_integration_steps, gradients=gradients, inverse_mass_matrix=inverse_mass_matrix
        ),
        momentum=shared_momentum(rho),
        step_size=step_size,
        num_local_steps=num_local_steps,
        weights=weights,
        participation=participation,
        temperature=temperature,
    )


def _estimator(
    batch_size: int | float | None,
    replace: bool,
    gradient_noise: Number,
    control_variate: bool,
    weights: Array | None,
) -> GradientEstimator:
    if not isinstance(control_variate, bool):
        raise TypeError(f"control_variate must be True or False, got {control_variate!r}.")
    estimator = for_batch_size(batch_size, replace=replace)
    if control_variate:
        estimator = scaffold(estimator, shares=weights)
    if isinstance(gradient_noise, (int, float)) and gradient_noise == 0:
        return estimator
    schedules.number(gradient_noise, "gradient_noise", minimum=0.0)  # raises with this name
    return noisy(estimator, gradient_noise, weighted=True, weights=weights)
