"""LSD, QLSD, QLSD* and QLSD++, and preconditioned SGLD.

Source: Vono, Plassier, Durmus, Dieuleveut and Moulines (2022), QLSD: Quantised Langevin stochastic
dynamics for Bayesian federated learning. Their ``gamma`` is `step_size`, their potentials are
minus our log densities; a message is a client's gradient, one a round.
"""

from typing import Any, Literal

from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, Number, Participation, Posterior
from fedmcmc.compression import Compressor, memory
from fedmcmc.control_variates import fixed_point, svrg
from fedmcmc.gradients import for_batch_size
from fedmcmc.kernels.compressed import compress
from fedmcmc.kernels.langevin import langevin
from fedmcmc.participation import pooled
from fedmcmc.preconditioners import rms

__all__ = ["lsd", "lsd_pp", "lsd_star", "psgld", "qlsd", "qlsd_pp", "qlsd_star"]

Prior = Literal["server", "split"]


def lsd(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
) -> FederatedKernel:
    """Langevin stochastic dynamics: each round, one step along the sum of the clients' gradients.

    Parameters
    ----------
    posterior
        The model.
    step_size
        Number or schedule of the round.
    batch_size
        Rows a gradient, or below one the fraction of a client's rows; ``None`` for all of them.
    participation
        Who sends a gradient, everyone by default; see `bernoulli` (weights ``1 / p``, or
        ``b / |A|``) and `uniform` (weights ``b / a``).
    temperature
        Multiplies the variance of the noise.
    prior
        Whether the server adds the prior's gradient, or each client its share of it.
    replace
        Whether minibatches are drawn with replacement.

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
    return langevin(
        posterior,
        for_batch_size(batch_size, replace=replace),
        step_size=step_size,
        temperature=temperature,
        participation=participation,
        prior=prior,
    )


def qlsd(
    posterior: Posterior,
    *,
    step_size: Number,
    compressor: Compressor,
    batch_size: int | float | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
) -> FederatedKernel:
    """Quantised Langevin stochastic dynamics: `lsd` with compressed gradients.

    Parameters
    ----------
    posterior
        The model.
    compressor
        Of the clients' gradients; see `quantize`.
    step_size, batch_size, participation, temperature, prior, replace
        As in `lsd`. A prior on the server is not compressed.

    Notes
    -----
    With minibatches this is the paper's QLSD#. At the mode the noise of compression and of partial
    participation is proportional to the clients' gradients there, that is to their heterogeneity:
    see `qlsd_star` and `qlsd_pp`.

    References
    ----------
    Vono et al. (2022), Algorithm 1.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * jnp.sum(theta**2),
    ...     lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 50)), jnp.zeros((5, 50))])
    >>> kernel = qlsd(posterior, step_size=0.01, compressor=fedmcmc.quantize(16))
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, jnp.zeros(50), num_rounds=10, progress=False
    ... )
    >>> bool((samples.info["bits_up"] < 2 * 32 * 50).all())
    True
    """
    kernel = lsd(
        posterior,
        step_size=step_size,
        batch_size=batch_size,
        participation=participation,
        temperature=temperature,
        prior=prior,
        replace=replace,
    )
    return compress(kernel, compressor)


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
) -> FederatedKernel:
    """`lsd` with each gradient relative to the one at `centre`, with the same rows at both.

    Parameters
    ----------
    posterior
        The model.
    centre
        Shaped as the position: the mode, ``theta*``, as from `fedmcmc.surrogates.mode`. There,
        messages are zero and so is all noise but Langevin's own. Any other centre gives the right
        drift too (the server adds the gradient of the log posterior at the centre, known from one
        pass before the first round), only with more noise.
    step_size, batch_size, participation, temperature, prior, replace
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
        centre=centre,
    )


def qlsd_star(
    posterior: Posterior,
    centre: ArrayTree,
    *,
    compressor: Compressor,
    **arguments: Any,
) -> FederatedKernel:
    """`lsd_star` with compressed messages.

    Parameters
    ----------
    posterior, centre
        As in `lsd_star`.
    compressor
        Of the clients' messages, which vanish at the centre, and the noise of compression with
        them.
    **arguments
        `step_size`, `batch_size`, `participation`, `temperature`, `prior`, `replace`, as in `lsd`.

    References
    ----------
    Vono et al. (2022), Algorithm S1.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = qlsd_star(posterior, 0.375, step_size=0.01, compressor=fedmcmc.quantize(4))
    """
    return compress(lsd_star(posterior, centre, **arguments), compressor)


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
) -> FederatedKernel:
    """`lsd` with variance-reduced minibatches (SVRG).

    Parameters
    ----------
    posterior
        The model.
    refresh_every
        Rounds between snapshots, ``l``. In the first round after one in which it takes part, a
        client passes over all its rows.
    step_size, batch_size, participation, temperature, prior, replace
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
    )


def qlsd_pp(
    posterior: Posterior,
    *,
    compressor: Compressor,
    memory_rate: float | Array | None = None,
    memory_of: Literal["all", "active"] = "all",
    **arguments: Any,
) -> FederatedKernel:
    """`lsd_pp` with compressed messages and memory.

    Parameters
    ----------
    posterior
        The model.
    compressor
        Of the difference between a client's gradient and its memory.
    memory_rate
        ``alpha``, ``[]`` or ``[num_clients]``; ``None`` for ``1 / (1 + omega)``, zero for no
        memory.
    memory_of
        Whose memory the server adds, ``"all"`` clients' (PP2) or the ``"active"`` ones' (PP1, as in
        the authors' code, which keeps the noise of heterogeneity under partial participation).
    **arguments
        `step_size`, `batch_size`, `refresh_every`, `participation`, `temperature`, `prior`,
        `replace`, as in `lsd_pp`.

    References
    ----------
    Vono et al. (2022), Algorithm 2.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * jnp.sum(theta**2),
    ...     lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 50)), jnp.zeros((5, 50))])
    >>> kernel = qlsd_pp(
    ...     posterior,
    ...     compressor=fedmcmc.quantize(16),
    ...     step_size=0.01,
    ...     batch_size=1,
    ...     refresh_every=10,
    ...     participation=fedmcmc.uniform(1),
    ... )
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, jnp.zeros(50), num_rounds=20, progress=False
    ... )
    >>> samples.info["num_active"].tolist()[0][:3]
    [1, 1, 1]
    """
    return compress(lsd_pp(posterior, **arguments), memory(compressor, memory_rate, of=memory_of))


def psgld(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None = None,
    decay: Number = 0.95,
    damping: Number = 1e-8,
    num_noiseless: int = 0,
    temperature: Number = 1.0,
    replace: bool = True,
) -> FederatedKernel:
    """Preconditioned SGLD on all rows, pooled as one client's: a centralised reference.

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
