"""Draws from a posterior to compare with: NumPyro's MALA, HMC and NUTS on all rows together.

All take a potential, minus the log density up to a constant, and starts ``[num_chains, ...]``, and
return draws with diagnostics; `require_converged` refuses draws of chains that did not mix.
"""

from collections.abc import Callable
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
    "diagnosed",
    "hmc",
    "laplace_scale",
    "mala",
    "nuts",
    "require_converged",
]

MALA_ACCEPTANCE = 0.574
"""The best acceptance rate in high dimensions (Roberts and Rosenthal 1998)."""
MAX_CHECKED = 256
"""Number of coordinates, evenly spaced, that diagnostics use."""


class NotConverged(RuntimeError):
    """Draws of chains that did not mix."""


class ReferenceDraws(NamedTuple):
    """Draws with their diagnostics.

    Attributes
    ----------
    draws
        Leaves ``[num_chains, num_draws, ...]``.
    potential
        Potentials of the draws, ``[num_chains, num_draws]``.
    acceptance, step_size
        Means over chains, after the warm-up.
    rhat, ess
        Largest rank-normalized split R-hat and smallest bulk effective sample size (Vehtari et al.
        2021) of the potential and of `num_checked` coordinates.
    num_divergent
        Number of divergent transitions.
    """

    draws: Any
    potential: np.ndarray
    acceptance: float
    step_size: float
    rhat: float
    ess: float
    num_checked: int
    num_divergent: int = 0

    def summary(self) -> dict[str, float]:
        """Return the diagnostics without the draws."""
        names = ("acceptance", "step_size", "rhat", "ess", "num_checked", "num_divergent")
        return {name: getattr(self, name) for name in names}


def require_converged(
    reference: ReferenceDraws, *, max_rhat: float = 1.01, min_ess: float = 400.0
) -> ReferenceDraws:
    """Return `reference` if its diagnostics are good.

    Raises
    ------
    NotConverged
        If R-hat is above `max_rhat`, the effective sample size below `min_ess`, either is not a
        number, or transitions diverged.
    """
    converged = reference.rhat <= max_rhat and reference.ess >= min_ess
    if not converged or reference.num_divergent:
        raise NotConverged(
            f"no reference: R-hat {reference.rhat:.4g} (at most {max_rhat}), effective sample "
            f"size {reference.ess:.4g} (at least {min_ess}), {reference.num_divergent} divergent "
            f"transitions (none), acceptance {reference.acceptance:.3g}: run longer, or start "
            f"from better positions."
        )
    return reference


def diagnosed(draws: Any, potential: np.ndarray, acceptance: Any, step_size: Any) -> ReferenceDraws:
    """Return draws with R-hat and effective sample size."""
    columns = [leaf.reshape(*potential.shape, -1) for leaf in jax.tree.leaves(draws)]
    flat = np.concatenate(columns, axis=-1)
    chosen = np.unique(np.linspace(0, flat.shape[-1] - 1, MAX_CHECKED).round().astype(int))
    checked = np.concatenate([potential[..., None], flat[..., chosen]], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # chains that do not move: R-hat is NaN
        rhat, ess = (
            np.asarray(diagnose(checked.astype(np.float64), chain_axis=0, draw_axis=1))
            for diagnose in (array_stats.rhat, array_stats.ess)
        )
    numbers = (float(acceptance), float(step_size), float(rhat.max()), float(ess.min()))
    return ReferenceDraws(draws, potential, *numbers, len(chosen))


def mala(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    scale: Array,
    **counts: int,
) -> ReferenceDraws:
    """Run Metropolis-adjusted Langevin, which is Hamiltonian Monte Carlo with one leapfrog step.

    The warm-up tunes the step size to an acceptance rate of 0.574. The result reports Langevin's
    step size: half of the square of a leapfrog step.

    Parameters
    ----------
    rng_key, potential_fn, positions
        A JAX key; ``position -> []``; starts.
    scale
        Matrix ``S`` of `laplace_scale`: chains are preconditioned by ``S S'``.
    **counts
        `num_warmup` and `num_draws` per chain, and `thinning`, the number of steps per draw.
    """
    of_langevin: dict[str, Any] = dict(
        num_steps=1,
        target_accept_prob=MALA_ACCEPTANCE,
        inverse_mass_matrix=scale @ scale.T,
        dense_mass=True,
        adapt_mass_matrix=False,
    )
    found = hmc(rng_key, potential_fn, positions, **of_langevin, **counts)
    return found._replace(step_size=found.step_size**2 / 2)


def hmc(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    **settings: Any,
) -> ReferenceDraws:
    """Run Hamiltonian Monte Carlo, with `num_steps` and other arguments of NumPyro's ``HMC``."""
    kernel = HMC(potential_fn=potential_fn, trajectory_length=None, **settings)
    return _run(rng_key, kernel, positions, num_warmup, num_draws, thinning)


def nuts(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    **settings: Any,
) -> ReferenceDraws:
    """Run the No-U-Turn sampler, with other arguments of NumPyro's ``NUTS``."""
    kernel = NUTS(potential_fn=potential_fn, **settings)
    return _run(rng_key, kernel, positions, num_warmup, num_draws, thinning)


def _run(
    rng_key: Array, kernel: Any, positions: Any, num_warmup: int, num_draws: int, thinning: int
) -> ReferenceDraws:
    run = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_draws * thinning,
        thinning=thinning,
        num_chains=len(jax.tree.leaves(positions)[0]),
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("potential_energy", "accept_prob", "diverging")
    with jax.default_matmul_precision("highest"):
        run.run(rng_key, init_params=positions, extra_fields=fields)
    extra = {name: np.asarray(x) for name, x in run.get_extra_fields(group_by_chain=True).items()}
    draws = jax.tree.map(np.asarray, run.get_samples(group_by_chain=True))
    step_size = np.mean(run.last_state.adapt_state.step_size)
    found = diagnosed(draws, extra["potential_energy"], extra["accept_prob"].mean(), step_size)
    return found._replace(num_divergent=int(extra["diverging"].sum()))


def laplace_scale(potential_fn: Callable[[Any], Array], position: Any) -> Array:
    """Return ``S [d, d]`` with ``S S'`` the inverse Hessian at `position`, raveled.

    Raises
    ------
    ValueError
        If the Hessian is not positive definite.
    """
    flat, unravel = ravel_pytree(position)
    with jax.default_matmul_precision("highest"):
        hessian = jax.jit(jax.hessian(lambda x: potential_fn(unravel(x))))(flat)
    matrix = np.asarray(hessian, np.float64)
    try:
        lower = np.linalg.cholesky((matrix + matrix.T) / 2)
    except np.linalg.LinAlgError as error:
        raise ValueError("the Hessian of the potential is not positive definite here.") from error
    return jnp.asarray(np.linalg.inv(lower).T, flat.dtype)
