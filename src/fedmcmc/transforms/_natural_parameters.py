"""Transform of updates of natural parameters, for kernels of expectation propagation."""

from typing import TYPE_CHECKING

from fedmcmc._checks import expect
from fedmcmc.kernels import Natural, NaturalUpdate
from fedmcmc.transforms._wrapping import nodes_of, replace_nodes
from fedmcmc.types import FederatedKernel, Number, as_functions

if TYPE_CHECKING:
    import optax


def natural_parameters(
    kernel: FederatedKernel,
    *,
    damping: Number = 1.0,
    server_optimizer: "optax.GradientTransformation | None" = None,
    client_optimizer: "optax.GradientTransformation | None" = None,
    max_norm: Number | None = None,
) -> FederatedKernel:
    """Change how the messages of `kernel` update natural parameters.

    A client's message is a change of natural parameters, scaled down to `max_norm`. The server adds
    the sum of the messages, and a client with a site adds its own message. Both multiply it by
    `damping` or pass it to an optimizer (Guo et al. 2023).

    Parameters
    ----------
    kernel
        Kernel that refines a Gaussian approximation: `fedmcmc.fed_ep`, `fedmcmc.fed_sep`,
        `fedmcmc.adf`, `fedmcmc.natural`, or a transform of one of them.
    damping
        Factor of the changes, positive: a number or a schedule of the round.
    server_optimizer, client_optimizer
        Optimizers of optax in place of plain steps. Only clients with a site have an optimizer.
    max_norm
        Largest Euclidean norm of a client's change, a number or a schedule of the round.

    Raises
    ------
    TypeError
        If `kernel` is not a `FederatedKernel`, or an optimizer is not from optax.
    ValueError
        If the messages of `kernel` are not changes of natural parameters, its clients have no sites
        for an optimizer, or a number is out of range.

    Examples
    --------
    >>> import fedmcmc, optax
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> kernel = fedmcmc.fed_ep(posterior, inference=fedmcmc.inference.exact_gaussian())
    >>> faster = natural_parameters(kernel, server_optimizer=optax.sgd(0.5, momentum=0.5))
    >>> faster.name
    'fed_ep'
    """
    expect(kernel, FederatedKernel, "kernel")
    update = as_functions(NaturalUpdate.of(damping, server_optimizer, client_optimizer, max_norm))
    naturals = nodes_of(kernel, Natural)
    if not naturals:
        raise ValueError(
            f"The messages of {kernel.name} are not changes of natural parameters: "
            "natural_parameters is for fed_ep, fed_sep, adf and natural."
        )
    for node in naturals:
        if client_optimizer is not None and not node.stateful:
            raise ValueError(
                f"client_optimizer acts on sites, and clients of {node.name} keep no sites."
            )
    return replace_nodes(kernel, NaturalUpdate, lambda _: update)
