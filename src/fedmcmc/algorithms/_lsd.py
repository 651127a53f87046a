"""LSD, LSD* and LSD++, and preconditioned SGLD: one step per round along the sum of gradients.

Source: Vono, Plassier, Durmus, Dieuleveut and Moulines (2022), QLSD: Quantised Langevin stochastic
dynamics for Bayesian federated learning. Their ``gamma`` is `step_size`, their potentials are
minus our log densities. `fedmcmc.algorithms.qlsd` compresses the messages.
"""

from typing import Literal

from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, Number, Participation, Posterior
from fedmcmc.dynamics import rms
from fedmcmc.gradients import fixed_point, for_batch_size, svrg
from fedmcmc.hierarchy import Refresh
from fedmcmc.kernels import joint, langevin
from fedmcmc.participation import pooled

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
    """Langevin stochastic dynamics: each round, one step along the sum of the clients' gradients.

    Parameters
    ----------
    posterior
        The model.
    step_size
        Number or schedule of the round.
    batch_size
        Rows per gradient, or below one the fraction of a client's rows; ``None`` for all of them.
    participation
        Who sends a gradient, everyone by default; see `bernoulli` (weights ``1 / p``, or
        ``b / |A|``) and `uniform` (weights ``b / a``).
    temperature
        Multiplies the variance of the noise.
    prior
        Whether the server adds the prior's gradient, or each client its share of it.
    replace
        Whether minibatches are drawn with replacement.
    metric
        ``B = C C'``: a step is ``position + step_size * B gradient + sqrt(2 * step_size *
        temperature) * C normal``, the plain step in coordinates ``inverse(C) position``. Shaped as
        the position for a diagonal, or ``[d, d]`` over the raveled position; the identity by
        default. The posterior's covariance makes all directions alike (`fedmcmc.whiten`).
    noise
        Whether the server draws the noise of a step, or each client adds its share of the noise to
        its gradient; see `fedmcmc.langevin`.
    refresh
        Of a posterior with latents of groups (`docs/hierarchies.md`): how a client moves those of
        its own in each round, as `fedmcmc.hierarchy.independence`. Gradients are then those at the
        latents, which stay at their client. Of the marginal posterior, whose Langevin step is
        ``lsd(marginal(posterior))``, that is a noisy gradient: the covariance is larger by
        ``step_size * W / (2 * num_draws)`` times itself, about, ``W`` the precision that not
        knowing the latents takes from the position.
    order
        With `refresh`: whether the gradient is taken at the latents after their move
        (``"refresh_first"``) or before it (``"gradient_first"``).
    num_draws
        With `refresh`: moves per round, whose gradients are averaged.

    Raises
    ------
    ValueError
        On settings out of range; where the posterior has latents and there is no `refresh`, or the
        other way around; with `refresh` on `batch_size`, `temperature`, `noise` and
        ``prior="split"``.

    References
    ----------
    Vono et al. (2022), eqs. 2-3.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel = lsd(posterior, step_size=0.01, participation=fedmcmc.bernoulli(0.5))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=100, progress=False
    ... )
    >>> samples.draws.shape
    (1, 100)
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
        raise ValueError("order and num_draws are of latents: give refresh=, too.")
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
    """`lsd` with each gradient relative to the one at `centre`, with the same rows at both.

    Parameters
    ----------
    posterior
        The model.
    centre
        Shaped as the position: the mode, ``theta*``, as from `fedmcmc.surrogates.mode`. There,
        messages are zero and so is all noise but Langevin's own. Any other center gives the right
        drift too (the server adds the gradient of the log posterior at the center, known from one
        pass before the first round), only with more noise.
    step_size, batch_size, participation, temperature, prior, replace, metric
        As in `lsd`.

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
    """`lsd` with variance-reduced minibatches (SVRG).

    Parameters
    ----------
    posterior
        The model.
    refresh_every
        Rounds between snapshots, ``l``. A client passes over all its rows in the first round after
        a snapshot in which it takes part, and in no other.
    step_size, batch_size, participation, temperature, prior, replace, metric
        As in `lsd`.

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
    """Preconditioned SGLD on all rows, pooled as one client's: a centralized reference.

    Parameters
    ----------
    posterior
        The model.
    step_size
        Number or schedule of the round: the authors' learning rate ``lr``, for a gradient that is
        a sum over rows.
    decay, damping, num_noiseless
        As in `fedmcmc.preconditioners.rms`.
    batch_size, temperature, replace
        As in `lsd`.

    Notes
    -----
    The curvature term of Li et al. (2016) is omitted, as in the baseline of Vono et al. (2022):
    the law is not the posterior's even as the step size goes to zero, unless `decay` goes to one.

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
