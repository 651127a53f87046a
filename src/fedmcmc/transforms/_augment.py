"""Random transformations of the rows of all minibatches of a kernel."""

from fedmcmc._checks import expect
from fedmcmc.gradients import (
    Augmentation,
    Epochs,
    FixedPoint,
    Minibatch,
    Scaffold,
    Svrg,
    augmented,
    has_augmented_data,
    refuse_augmented,
)
from fedmcmc.transforms._wrapping import nodes_of, replace_nodes
from fedmcmc.types import FederatedKernel, GradientEstimator


def augment(kernel: FederatedKernel, augment_fn: Augmentation) -> FederatedKernel:
    """Transform the rows of each minibatch of `kernel` at random, independently per local step.

    All other draws of the kernel stay the same. Only minibatches contain transformed rows:
    surrogates and Fisher matrices use the original rows.

    Parameters
    ----------
    kernel
        Any kernel with minibatches or epochs of minibatches (``batch_size=``).
    augment_fn
        ``(rng_key, rows) -> rows``. `fedmcmc.augmented` documents it and the posterior that
        results. To transform each row separately, ``jax.vmap`` over
        ``jax.random.split(rng_key, batch_size)``.

    Raises
    ------
    ValueError
        If the kernel has no minibatches, has a transformation already, or also uses full passes
        over the original rows (`fedmcmc.svrg`, `fixed_point`, `scaffold`).

    Examples
    --------
    >>> import jax, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> def jitter(rng_key, rows):
    ...     return rows + 0.1 * jax.random.normal(rng_key, rows.shape)
    >>> kernel = augment(fedmcmc.lsd(posterior, step_size=0.01, batch_size=2), jitter)
    """
    expect(kernel, FederatedKernel, "kernel")
    if has_augmented_data(kernel):
        raise ValueError(
            "The rows of this kernel's minibatches are transformed already: write one function "
            "that makes both transformations."
        )
    if not nodes_of(kernel, Minibatch | Epochs):
        estimators = [str(node) for node in nodes_of(kernel, GradientEstimator)]
        using = f", which uses {' and '.join(estimators)}," if estimators else ""
        raise ValueError(
            f"This kernel{using} has no minibatches whose rows could be transformed. Only kernels "
            "with batch_size=, or with the estimators fedmcmc.minibatch or fedmcmc.epochs, can be "
            "augmented."
        )
    changed = replace_nodes(kernel, Minibatch | Epochs, lambda node: augmented(node, augment_fn))
    for kind, name in ((Svrg, "svrg"), (FixedPoint, "fixed_point"), (Scaffold, "scaffold")):
        for node in nodes_of(changed, kind):
            refuse_augmented(node, f"{name}, which this kernel uses,")
    return changed
