"""QLSD, QLSD* and QLSD++: `lsd`, `lsd_star` and `lsd_pp` with compressed messages.

Source: Vono et al. (2022), QLSD: Quantised Langevin stochastic dynamics for Bayesian federated
learning. A message is a client's gradient, one per round.
"""

from typing import Literal

from jax import Array

from fedmcmc.algorithms._lsd import Prior, lsd, lsd_pp, lsd_star
from fedmcmc.compression import Compressor, memory
from fedmcmc.transforms import compress
from fedmcmc.types import ArrayTree, FederatedKernel, Number, Participation, Posterior


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
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build quantized Langevin stochastic dynamics: `lsd` with compressed gradients.

    With minibatches this is QLSD# in the paper. At the mode, the noise of compression and of
    partial participation is proportional to the clients' gradients, so it grows with their
    heterogeneity; `qlsd_star` and `qlsd_pp` reduce it.

    Parameters
    ----------
    posterior
        Model.
    compressor
        Compressor of the clients' gradients; see `quantize`.
    step_size, batch_size, participation, temperature, prior, replace, metric
        See `lsd`. A prior on the server is not compressed.

    References
    ----------
    Vono et al. (2022), eqs. 1 to 4 and Algorithm 1.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
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
        metric=metric,
    )
    return compress(kernel, compressor)


def qlsd_star(
    posterior: Posterior,
    centre: ArrayTree,
    *,
    step_size: Number,
    compressor: Compressor,
    batch_size: int | float | None = None,
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build `lsd_star` with compressed messages.

    Parameters
    ----------
    posterior, centre
        See `lsd_star`.
    compressor
        Compressor of the clients' messages. Messages vanish at the center, and so does the noise of
        compression.
    step_size, batch_size, participation, temperature, prior, replace, metric
        See `lsd`.

    References
    ----------
    Vono et al. (2022), eq. 5 and Algorithm S1.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> kernel = qlsd_star(posterior, 0.375, step_size=0.01, compressor=fedmcmc.quantize(4))
    """
    kernel = lsd_star(
        posterior,
        centre,
        step_size=step_size,
        batch_size=batch_size,
        participation=participation,
        temperature=temperature,
        prior=prior,
        replace=replace,
        metric=metric,
    )
    return compress(kernel, compressor)


def qlsd_pp(
    posterior: Posterior,
    *,
    step_size: Number,
    batch_size: int | float | None,
    refresh_every: int,
    compressor: Compressor,
    memory_rate: float | Array | None = None,
    memory_of: Literal["all", "active"] = "all",
    participation: Participation | None = None,
    temperature: Number = 1.0,
    prior: Prior = "server",
    replace: bool = True,
    metric: ArrayTree | None = None,
) -> FederatedKernel:
    """Build `lsd_pp` with compressed messages and memories.

    Parameters
    ----------
    posterior
        Model.
    compressor
        Compressor of the difference between a client's gradient and its memory.
    memory_rate
        ``alpha``, ``[]`` or ``[num_clients]``; ``None`` for ``1 / (1 + omega)``, zero for no
        memory.
    memory_of
        Clients whose memories the server adds: ``"all"`` (PP2) or the ``"active"`` ones (PP1, as in
        the authors' code). PP1 keeps the noise of heterogeneity under partial participation.
    step_size, batch_size, refresh_every, participation, temperature, prior, replace, metric
        See `lsd_pp`.

    References
    ----------
    Vono et al. (2022), Algorithm 2.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2)
    >>> code = fedmcmc.quantize(16)
    >>> kernel = qlsd_pp(
    ...     posterior, compressor=code, step_size=0.01, batch_size=1, refresh_every=10
    ... )
    """
    kernel = lsd_pp(
        posterior,
        step_size=step_size,
        batch_size=batch_size,
        refresh_every=refresh_every,
        participation=participation,
        temperature=temperature,
        prior=prior,
        replace=replace,
        metric=metric,
    )
    return compress(kernel, memory(compressor, memory_rate, of=memory_of))
