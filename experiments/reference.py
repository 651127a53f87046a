"""Draws from a posterior to compare with: NumPyro's MALA, HMC and NUTS on all rows together.

All take a potential, minus the log density up to a constant, and starts ``[num_chains, ...]``, and
return draws with diagnostics; `require_converged` refuses draws of chains that did not mix.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro.infer import HMC, MCMC, NUTS

__all__ = [
    "NotConverged",
    "ReferenceDraws",
    "hmc",
    "laplace_scale",
    "mala",
    "nuts",
    "require_converged",
    "run",
]

MALA_ACCEPTANCE = 0.574
"""The best acceptance rate in high dimensions (Roberts and Rosenthal 1998)."""
MAX_RHAT, MIN_ESS = 1.01, 400.0
MAX_CHECKED = 256
"""Number of coordinates, evenly spaced, that diagnostics use."""


class NotConverged(RuntimeError):
    """Draws of chains that did not mix."""


class ReferenceDraws(NamedTuple):
    """Draws with diagnostics of the potential and of `num_checked` coordinates.

    `rhat` is the largest rank-normalized split R-hat and `ess` the smallest bulk effective sample
    size (Vehtari et al. 2021); `acceptance` and `step_size` are means after the warm-up.
    """

    draws: Any  # leaves [num_chains, num_draws, ...]
    potential: np.ndarray  # [num_chains, num_draws]
    acceptance: float
    step_size: float
    rhat: float
    ess: float
    num_checked: int
    num_divergent: int

    def summary(self) -> dict[str, float]:
        """Return the diagnostics without the draws."""
        return {k: x for k, x in self._asdict().items() if k not in ("draws", "potential")}


def require_converged(reference: ReferenceDraws) -> ReferenceDraws:
    """Return `reference`, or raise `NotConverged` if its diagnostics are bad or not numbers."""
    converged = reference.rhat <= MAX_RHAT and reference.ess >= MIN_ESS
    if not converged or reference.num_divergent:
        raise NotConverged(
            f"no reference: R-hat {reference.rhat:.4g} (at most {MAX_RHAT}), effective sample size "
            f"{reference.ess:.4g} (at least {MIN_ESS:g}), {reference.num_divergent} divergent "
            f"transitions, acceptance {reference.acceptance:.3g}: run longer, or start from better "
            f"positions."
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
) -> ReferenceDraws:
    """Run a kernel of NumPyro from `positions`, leaves ``[num_chains, ...]``.

    Parameters
    ----------
    kernel, **settings
        Class, and its arguments, such as `num_steps`.
    rng_key, potential_fn, positions
        A JAX key; ``position -> []``; starts.
    num_warmup, num_draws, thinning
        Steps in the warm-up and draws, per chain; steps per draw.
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
    columns = [leaf.reshape(*potential.shape, -1) for leaf in jax.tree.leaves(draws)]
    flat = np.concatenate(columns, axis=-1)
    chosen = np.unique(np.linspace(0, flat.shape[-1] - 1, MAX_CHECKED).round().astype(int))
    checked = np.concatenate([potential[..., None], flat[..., chosen]], axis=-1, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):  # chains that do not move: R-hat is NaN
        rhat = np.max(array_stats.rhat(checked, chain_axis=0, draw_axis=1))
        ess = np.min(array_stats.ess(checked, chain_axis=0, draw_axis=1))
    step_size = np.mean(chains.last_state.adapt_state.step_size)
    numbers = map(float, (acceptance.mean(), step_size, rhat, ess))
    return ReferenceDraws(draws, potential, *numbers, len(chosen), int(diverging.sum()))


hmc = partial(run, HMC, trajectory_length=None)
nuts = partial(run, NUTS)


def mala(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    scale: Array,
    **counts: int,
) -> ReferenceDraws:
    """Run Metropolis-adjusted Langevin, which is Hamiltonian Monte Carlo with one leapfrog step.

    Chains are preconditioned by ``S S'`` for the matrix ``S`` in `scale`; the warm-up tunes the
    step size. The result reports Langevin's step size: half of the square of a leapfrog step.
    """
    settings: dict[str, Any] = dict(
        num_steps=1,
        target_accept_prob=MALA_ACCEPTANCE,
        inverse_mass_matrix=scale @ scale.T,
        dense_mass=True,
        adapt_mass_matrix=False,
    )
    draws = hmc(rng_key, potential_fn, positions, **settings, **counts)
    return draws._replace(step_size=draws.step_size**2 / 2)


def laplace_scale(potential_fn: Callable[[Any], Array], position: Any) -> Array:
    """Return ``S [d, d]`` with ``S S'`` the inverse Hessian at `position`, raveled."""
    flat, unravel = ravel_pytree(position)
    with jax.default_matmul_precision("highest"):
        hessian = jax.jit(jax.hessian(lambda x: potential_fn(unravel(x))))(flat)
    matrix = np.asarray(hessian, np.float64)
    lower = np.linalg.cholesky((matrix + matrix.T) / 2)
    return jnp.asarray(np.linalg.inv(lower).T, flat.dtype)
