"""Random transformations of the rows of all minibatches of a kernel."""

from typing import Any

import jax

from fedmcmc._checks import expect
from fedmcmc._types import FederatedKernel
from fedmcmc.gradients import (
    Augmentation,
    Epochs,
    FixedPoint,
    Minibatch,
    Scaffold,
    Svrg,
    augmented,
    holds_augmented,
    refuse_augmented,
)


def augment(kernel: FederatedKernel, augment_fn: Augmentation) -> FederatedKernel:
    """Transform the rows of every minibatch of `kernel` at random, in each local step anew.

    Parameters
    ----------
    kernel
        Any kernel whose clients use minibatches or epochs of them (``batch_size=``), in whatever
        part of it.
    augment_fn
        ``(rng_key, rows) -> rows``, as of `fedmcmc.augmented`: that page says which posterior the
        kernel then has. For rows one by one, ``jax.vmap`` a function of one over
        ``jax.random.split(rng_key, batch_size)``.

    Raises
    ------
    ValueError
        If the kernel has no minibatches or has transformations already, or uses full passes over
        the rows as they are besides (`fedmcmc.svrg`, `fixed_point`, `scaffold`).

    Notes
    -----
    All else that the kernel draws stays as it is. Only minibatches see transformed rows: surrogates
    and Fisher matrices are of the rows as they are.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> def jitter(rng_key, rows):
    ...     return rows + 0.1 * jax.random.normal(rng_key, rows.shape)
    >>> kernel = augment(
    ...     fedmcmc.fed_avg(
    ...         posterior, client_optimizer=optax.sgd(0.1), num_local_epochs=2, batch_size=2
    ...     ),
    ...     jitter,
    ... )
    """
    expect(kernel, FederatedKernel, "kernel")
    if holds_augmented(kernel):
        raise ValueError(
            "The rows of this kernel's minibatches are transformed already: write one function "
            "that does both."
        )
    found = []

    def wrapped(node: Any) -> Any:
        if not _draws_rows(node):
            return node
        found.append(node)
        return augmented(node, augment_fn)

    changed: FederatedKernel = jax.tree.map(wrapped, kernel, is_leaf=_draws_rows)
    if not found:
        raise ValueError(
            "This kernel has no minibatches whose rows could be transformed: give it a batch_size."
        )
    for kind, name in ((Svrg, "svrg"), (FixedPoint, "fixed_point"), (Scaffold, "scaffold")):
        for node in _outermost(changed, kind):
            refuse_augmented(node, f"{name}, which this kernel uses,")
    return changed


def _outermost(kernel: FederatedKernel, kind: type) -> list[Any]:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(kernel, is_leaf=is_kind) if is_kind(node)]


def _draws_rows(node: Any) -> bool:
    return isinstance(node, Minibatch | Epochs)
