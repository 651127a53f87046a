"""Transform that correlates the momenta or the noise of clients."""

from fedmcmc._checks import expect
from fedmcmc.dynamics import Momentum, shared_momentum
from fedmcmc.transforms._wrapping import nodes_of, replace_nodes
from fedmcmc.types import FederatedKernel, Number, as_functions


def share_momentum(kernel: FederatedKernel, rho: Number) -> FederatedKernel:
    """Correlate the momenta, or the noise, that the clients of `kernel` draw.

    A client with weight ``w`` replaces its standard normals by ``sqrt(rho) * shared + sqrt((1 -
    rho) / w) * own``. All clients compute `shared` from a key in the broadcast. The weighted mean
    over clients has the same distribution for every `rho` (Liang et al. 2024, section 4.2; Deng et
    al. 2021, Algorithm 1, with ``rho ** 2`` for `rho`). In `fedmcmc.dg_sgld`, all weights are one:
    the noise of each client has the same distribution for every `rho`.

    Parameters
    ----------
    kernel
        Kernel whose clients draw momenta or noise: `fedmcmc.fa_hmc`, `fedmcmc.fa_ld`,
        `fedmcmc.dg_sgld`, or `fedmcmc.lsd` or `fedmcmc.langevin` with ``noise="clients"``, or a
        transform of such a kernel.
    rho
        Correlation in [0, 1], a number or a schedule of the round; it replaces the kernel's own.

    Raises
    ------
    TypeError
        If `kernel` is not a `FederatedKernel`.
    ValueError
        If the clients draw no momenta or noise, or `rho` lies outside [0, 1].

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> kernel = fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=5)
    >>> share_momentum(kernel, 0.25).momentum
    Momentum(rho=0.25, parts='both')
    """
    expect(kernel, FederatedKernel, "kernel")
    momentum = as_functions(shared_momentum(rho))
    if not nodes_of(kernel, Momentum):
        raise ValueError(
            f"The clients of {kernel.name} draw no momenta and no noise that they could share: its "
            "server draws the noise, or one client alone moves the chain in a round. Use fa_hmc, "
            'fa_ld, dg_sgld, or lsd or langevin with noise="clients".'
        )
    return replace_nodes(kernel, Momentum, lambda _: momentum)
