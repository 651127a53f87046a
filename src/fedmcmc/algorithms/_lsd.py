"""LSD, LSD*, LSD++ and preconditioned SGLD: one step per round along the sum of gradients.

Source: Vono et al. (2022), QLSD: Quantised Langevin stochastic dynamics for Bayesian federated
learning. Their ``gamma`` is `step_size`, and their potentials are
minus our log densities. `fedmcmc.algorithms.qlsd` compresses the messages.
"""

from typing import Literal

from jax import Array

from fedmcmc.dynamics import rms
from fedmcmc.gradients import fixed_point, for_batch_size, svrg
from fedmcmc.hierarchy import Refresh
from fedmcmc.kernels import joint, langevin
from fedmcmc.participation import pooled
from fedmcmc.types import ArrayTree, FederatedKernel, Number, Participation, Posterior

Prior = Literal["server", "split"]
Order = Literal["refresh_first", "gradient_first"]


def lsd(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
    metric: ArrayTree | None = None,
    noise: Literal["server", "clients"] = "server",
    refresh: Refresh | None = None,
    order: Order = "refresh_first",
    num_draws: int = 1,
) -> FederatedKernel:
    """Build Langevin stochastic dynamics: one step per round along the clients' summed gradients.

    Parameters
    ----------
    posterior, step_size, temperature, prior, metric, noise
        See `fedmcmc.langevin`.
    batch_size, replace
        Number of rows per gradient, or a fraction of a client's rows if below one (``None`` for
        all), and flag for draws with replacement.
    participation
        Rule for the clients that send a gradient, such as `bernoulli` or `uniform`; all by default.
    refresh
        Move of a client's latents in each round, such as `fedmcmc.hierarchy.independence`, if the
        posterior has latents of groups (docs/explanation/random_effect_kernels.md).
        docs/explanation/exact_distributions.md computes the price, a larger covariance.
    order, num_draws
        Order of move and gradient, and number of moves per round, whose gradients are averaged.

    Raises
    ------
    ValueError
        If a setting is out of range, latents lack a `refresh` or the reverse, or `refresh` meets
        `batch_size`, `temperature`, `noise` or ``prior="split"``.

    References
    ----------
    Vono et al. (2022), eqs. 2-3.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> lsd(posterior, step_size=0.01, participation=fedmcmc.bernoulli(0.5)).name
    'lsd'
    """
    if refresh is not None:
        is_plain = batch_size is None and temperature == 1.0
        if not is_plain or prior != "server" or noise != "server":
            raise ValueError(
                "With refresh= a client uses all rows of its groups at temperature one, and the "
                "server adds prior and noise: leave out batch_size, temperature, prior, noise."
            )
        return joint(
            posterior,
            refresh,
            step_size=step_size,
            order=order,
            num_draws=num_draws,
            participation=participation,
            metric=metric,
        )
    if order != "refresh_first" or num_draws != 1:
        raise ValueError("order and num_draws are settings for latents, which need refresh=.")
    return langevin(
        posterior,
        for_batch_size(batch_size, replace=replace),
        step_size=step_size,
        temperature=temperature,
        participation=participation,
        prior=prior,
        metric=metric,
        noise=noise,
    )


def lsd_star(
    posterior: Posterior,
    centre: ArrayTree,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build `lsd` with each gradient relative to the gradient of the same rows at `centre`.

    Parameters
    ----------
    posterior
        Model.
    centre
        Position, best the mode ``theta*`` (`fedmcmc.surrogates.mode`): messages are zero there, and
        only the Langevin noise remains. Any other center gives the correct drift with more noise.
        The server adds the sum of the clients' gradients at the center, which takes one pass over
        all rows before the first round.
    step_size, batch_size, participation, temperature, prior, replace, metric
        See `lsd`.

    References
    ----------
    Vono et al. (2022), Algorithm S2.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = lsd_star(posterior, 0.375, step_size=0.01, batch_size=1)
    """
    return langevin(
        posterior,
        fixed_point(for_batch_size(batch_size, replace=replace), centre, centred=True),
        step_size=step_size,
        temperature=temperature,
        participation=participation,
        prior=prior,
        metric=metric,
        centre=centre,
    )


def lsd_pp(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None,
    refresh_every: int,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build `lsd` with variance-reduced minibatches (SVRG).

    Parameters
    ----------
    posterior
        Model.
    refresh_every
        Number of rounds between snapshots, ``l``. A client reads all its rows only in the first
        round after a snapshot in which it takes part.
    step_size, batch_size, participation, temperature, prior, replace, metric
        See `lsd`.

    References
    ----------
    Vono et al. (2022), Algorithm S3.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = lsd_pp(posterior, step_size=0.01, batch_size=1, refresh_every=100)
    """
    return langevin(
        posterior,
        svrg(for_batch_size(batch_size, replace=replace), refresh_every),
        step_size=step_size,
        temperature=temperature,
        participation=participation,
        prior=prior,
        metric=metric,
    )


def psgld(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    decay: float | Array = 0.95,
    damping: float | Array = 1e-8,
    num_noiseless: int = 0,
    temperature: Number = 1.0,
    replace: bool = True,
) -> FederatedKernel:
    """Build preconditioned SGLD on all rows, pooled as the rows of one client.

    This is a centralized reference.

    Parameters
    ----------
    posterior
        Model.
    step_size
        Number or schedule of the round: the authors' learning rate ``lr`` for a gradient that is a
        sum over rows.
    decay, damping, num_noiseless
        See `fedmcmc.dynamics.preconditioners.rms`.
    batch_size, temperature, replace
        See `lsd`.

    Notes
    -----
    The curvature term in Li et al. (2016) is omitted, which follows the baseline in Vono et al.
    (2022). The stationary distribution differs from the posterior even as the step size goes to
    zero, unless `decay` goes to one.

    References
    ----------
    Li et al. (2016), Preconditioned stochastic gradient Langevin dynamics.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = psgld(posterior, step_size=0.01, batch_size=5)
    """
    return langevin(
        posterior,
        for_batch_size(batch_size, replace=replace),
        step_size=step_size,
        temperature=temperature,
        participation=pooled(),
        preconditioner=rms(decay, damping, num_noiseless=num_noiseless),
    )
