"""Draws from a posterior to compare with: NumPyro's HMC and NUTS on all rows together.

Both take a potential, minus the log density up to a constant, and starts ``[num_chains, ...]``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMC, MCMC, NUTS

from fedmcmc.diagnostics import worst_mixing

MAX_RHAT, MIN_ESS = 1.01, 400.0
MAX_CHECKED = 256  # coordinates, evenly spaced, that diagnostics use


class Reference(NamedTuple):
    """Draws to compare with, and numbers for rows."""

    draws: Any  # leaves [num_chains, num_draws, ...]
    summary: dict[str, float]
    seed: int = 0  # chains share the noise of a run with this seed, chain by chain


def require_converged(reference: Reference) -> Reference:
    """Return the reference, or raise `RuntimeError` if its diagnostics are bad or not numbers."""
    summary = reference.summary
    converged = summary["rhat"] <= MAX_RHAT and summary["ess"] >= MIN_ESS
    if not converged or summary["num_divergent"]:
        raise RuntimeError(
            f"no reference: R-hat must be at most {MAX_RHAT}, the effective sample size at least "
            f"{MIN_ESS:g}, and no transition divergent, got {summary}: run longer, or start from "
            f"better positions."
        )
    return reference


def run(
    kernel: type[HMC] | type[NUTS],
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    **settings: Any,
) -> Reference:
    """Run a kernel of NumPyro from `positions`, leaves ``[num_chains, ...]``.

    `num_warmup` counts steps and `thinning` steps per draw; `settings` are arguments of the kernel.
    R-hat and the effective sample size in `summary` are the worst of the potential and of
    `num_checked` coordinates.
    """
    chains = MCMC(
        kernel(potential_fn=potential_fn, **settings),
        num_warmup=num_warmup,
        num_samples=num_draws * thinning,
        thinning=thinning,
        num_chains=len(jax.tree.leaves(positions)[0]),
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("potential_energy", "accept_prob", "diverging")
    with jax.default_matmul_precision("highest"):
        chains.run(rng_key, init_params=positions, extra_fields=fields)
    extra = chains.get_extra_fields(group_by_chain=True)
    potential, acceptance, diverging = (np.asarray(extra[name]) for name in fields)
    draws = jax.tree.map(np.asarray, chains.get_samples(group_by_chain=True))
    values = flat(draws, 2)
    chosen = np.unique(np.linspace(0, values.shape[-1] - 1, MAX_CHECKED).round().astype(int))
    rhat, ess = worst_mixing([potential, values[..., chosen]])
    summary = {
        "acceptance": float(acceptance.mean()),
        "step_size": float(np.mean(chains.last_state.adapt_state.step_size)),
        "rhat": rhat,
        "ess": ess,
        "num_checked": len(chosen),
        "num_divergent": int(diverging.sum()),
    }
    return Reference(draws, summary)


hmc = partial(run, HMC, trajectory_length=None)
nuts = partial(run, NUTS)


def flat(tree: Any, num_axes: int) -> np.ndarray:
    """Return the leaves of a tree side by side, flat after the first `num_axes` axes."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([a.reshape(*a.shape[:num_axes], -1) for a in leaves], axis=-1)


def laplace_scale(potential_fn: Callable[[Any], Array], position: Any) -> Array:
    """Return ``S [d, d]`` with ``S S'`` the inverse Hessian at `position`, raveled."""
    values, unravel = ravel_pytree(position)
    with jax.default_matmul_precision("highest"):
        hessian = jax.jit(jax.hessian(lambda x: potential_fn(unravel(x))))(values)
    matrix = np.asarray(hessian, np.float64)
    lower = np.linalg.cholesky((matrix + matrix.T) / 2)
    return jnp.asarray(np.linalg.inv(lower).T, values.dtype)
