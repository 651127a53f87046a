"""The methods that both experiments with networks run; the others are in their own modules.

The algorithms are those of the papers, without the released code's double quantisation, its
shared memory or its stale control variates; a vector is quantised as a whole.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fedmcmc
from experiments.qlsd.networks import Run, Settings, rounds
from fedmcmc.data import fold
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import convolutions, trees

__all__ = ["fed_be_kernel", "fed_be_run", "fsgld_run", "qlsd_runs", "surrogates"]


def surrogates(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, centre: Any
) -> fedmcmc.Gaussian:
    """Return FSGLD's surrogates: gradient and diagonal empirical Fisher information at `centre`.

    The paper does not say which it used. These are positive and cost one pass over the rows, when
    a Hessian's diagonal costs one pass per parameter.
    """

    def row(position: Any, one: Any) -> Array:
        return posterior.loglikelihood_fn(position, jax.tree.map(lambda leaf: leaf[None], one))[0]

    def chunk(position: Any, rows: Any, mask: Array) -> tuple[Any, Any]:
        def of_row(total: tuple[Any, Any], both: tuple[Any, Array]) -> tuple[tuple[Any, Any], None]:
            gradient = jax.grad(row)(position, both[0])
            gradient = trees.scale(both[1].astype(jnp.float32), gradient)
            new = gradient, jax.tree.map(jnp.square, gradient)
            return jax.tree.map(jnp.add, total, new), None

        zeros = jax.tree.map(jnp.zeros_like, (position, position))
        return jax.lax.scan(of_row, zeros, (rows, mask))[0]

    def all_clients(data_: fedmcmc.FederatedData, position: Any) -> Gaussian:
        def one(index: Array) -> Gaussian:
            gradient, fisher = fold(partial(chunk, position), data_.client(index))
            shift = jax.tree.map(lambda g, f, x: g + f * x, gradient, fisher, position)
            return Gaussian(shift, fisher, "diagonal")

        return jax.lax.map(one, jnp.arange(data_.num_clients))

    return jax.jit(convolutions.canonical(all_clients))(data, centre)


def qlsd_runs(settings: Settings, posterior: fedmcmc.Posterior) -> dict[str, Run]:
    """Return QLSD and QLSD++, with all clients and with some (PP)."""
    shared: dict[str, Any] = dict(
        step_size=settings.step_size,
        batch_size=settings.batch_size,
        compressor=fedmcmc.quantize(settings.num_levels),
    )
    runs = {}
    for suffix, participation in (("", None), (" PP", fedmcmc.uniform(settings.num_active))):
        given = shared | dict(participation=participation)
        runs[f"QLSD{suffix}"] = Run(fedmcmc.qlsd(posterior, **given), rounds(settings, 1))
        plus = fedmcmc.qlsd_pp(posterior, refresh_every=settings.refresh_every, **given)
        runs[f"QLSD++{suffix}"] = Run(plus, rounds(settings, 1))
    return runs


def fed_be_run(settings: Settings, posterior: fedmcmc.Posterior, ensemble: Any) -> Run:
    """Return FedBE with the settings of an experiment."""
    kernel = fed_be_kernel(
        posterior,
        learning_rate=settings.fed_be_learning_rate,
        num_local_steps=settings.fed_be_local_steps,
        ensemble=ensemble,
        batch_size=settings.batch_size,
        concentration=settings.concentration,
        num_models=settings.fed_be_models,
    )
    return Run(kernel, rounds(settings, settings.fed_be_local_steps))


def fed_be_kernel(
    posterior: fedmcmc.Posterior, *, learning_rate: float, **kwargs: Any
) -> fedmcmc.FederatedKernel:
    """Return FedBE with a flat prior and plain SGD, whose next round starts at the weighted mean.

    Keyword arguments are those of `fedmcmc.fed_be`.
    """
    flat = posterior._replace(logprior_fn=_flat)
    return fedmcmc.fed_be(flat, client_optimizer=optax.sgd(learning_rate), **kwargs)


def _flat(position: Any) -> Array:
    del position
    return jnp.zeros(())


def fsgld_run(
    settings: Settings, posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, centre: Any
) -> Run:
    """Return FSGLD, whose draws are the last local states of its rounds."""
    kernel = fedmcmc.fsgld(
        posterior,
        surrogates(posterior, data, centre),
        step_size=settings.step_size,
        num_local_steps=settings.fsgld_local_steps,
        batch_size=settings.batch_size,
    )
    return Run(kernel, rounds(settings, settings.fsgld_local_steps))
