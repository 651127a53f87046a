"""Ground truths on all rows together: Metropolis-adjusted Langevin and Hamiltonian Monte Carlo.

All take a potential ``U``, minus the log density up to a constant, and many chains at once, and
return draws with diagnostics; `require_converged` refuses what did not converge.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.step_size import dual_averaging_adaptation
from blackjax.mcmc import mala as blackjax_mala
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from numpyro.infer import HMC, MCMC, NUTS

from experiments.qlsd.reference import (
    NotConverged,
    Reference,
    check_run,
    diagnosed,
    require_converged,
)

__all__ = [
    "NotConverged",
    "Reference",
    "hmc",
    "laplace_scale",
    "mala",
    "nuts",
    "require_converged",
]

MALA_ACCEPTANCE = 0.574
"""The best acceptance rate in high dimensions (Roberts and Rosenthal 1998)."""


def mala(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    step_size: float,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    scale: Array | None = None,
    collect: Callable[[Any], Any] | None = None,
) -> Reference:
    """Run BlackJAX's Metropolis-adjusted Langevin algorithm, all chains with one step size.

    During the warm-up dual averaging moves the step size to an acceptance rate of 0.574, the mean
    over chains.

    Parameters
    ----------
    rng_key
        A JAX key.
    potential_fn
        ``position -> []``.
    positions
        Where the chains start, leaves ``[num_chains, ...]``, two or more.
    step_size
        ``gamma`` of ``theta - gamma grad U + sqrt(2 gamma) Z``: where the warm-up starts, or what
        is used where ``num_warmup=0``.
    num_warmup, num_draws, thinning
        Steps dropped; draws kept per chain; steps per draw.
    scale
        ``[d, d]`` or ``[d]``: the chain runs in ``z`` with ``theta = scale @ z`` (or
        ``scale * z``) on raveled positions, which preconditions by ``scale @ scale'``.
    collect
        Applied to each kept position; by default the position itself.
    """
    check_run(positions, num_warmup, num_draws, thinning)
    scale = None if scale is None else jnp.asarray(scale)
    collect = Partial(_identity) if collect is None else Partial(collect)
    with jax.default_matmul_precision("highest"):
        found = _run_mala(
            Partial(potential_fn),
            collect,
            scale,
            rng_key,
            positions,
            jnp.asarray(step_size, float),
            (num_warmup, num_draws, thinning),
        )
    draws, potential, acceptance, step = jax.tree.map(np.asarray, found)
    return diagnosed(draws, potential, acceptance, step)


@jax.jit(static_argnames="counts")
def _run_mala(
    potential_fn: Any,
    collect: Any,
    scale: Array | None,
    rng_key: Array,
    positions: Any,
    step_size: Array,
    counts: tuple[int, int, int],
) -> tuple[Any, Array, Array, Array]:
    num_warmup, num_draws, thinning = counts
    start, unravel = _ravel(positions)
    step_size = step_size.astype(start.dtype)
    kernel = blackjax_mala.build_kernel()

    def position_of(z: Array) -> Any:
        return unravel(z if scale is None else scale @ z if scale.ndim == 2 else scale * z)

    def log_density(z: Array) -> Array:
        return -potential_fn(position_of(z))

    def step(state: Any, key: Array, size: Array) -> tuple[Any, Array]:
        keys = jax.random.split(key, start.shape[0])
        move = jax.vmap(lambda k, s: kernel(k, s, log_density, size))
        state, info = move(keys, state)
        return state, jnp.mean(info.acceptance_rate)

    adapt_init, adapt, adapted = dual_averaging_adaptation(MALA_ACCEPTANCE)

    def warm(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], None]:
        state, adaptation = carry
        state, acceptance = step(state, key, jnp.exp(adaptation.log_step_size))
        return (state, adapt(adaptation, acceptance)), None

    def draw(carry: tuple[Any, Array], key: Array) -> tuple[tuple[Any, Array], Any]:
        def once(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, total = carry
            state, acceptance = step(state, jax.random.fold_in(key, i), step_size)
            return state, total + acceptance

        state, total = jax.lax.fori_loop(0, thinning, once, carry)
        kept = jax.vmap(lambda z: collect(position_of(z)))(state.position)
        return (state, total), (kept, -state.logdensity)

    warm_key, draw_key = jax.random.split(rng_key)
    state = jax.vmap(lambda z: blackjax_mala.init(z, log_density))(_to_z(start, scale))
    if num_warmup:
        keys = jax.random.split(warm_key, num_warmup)
        begin = jax.tree.map(jnp.asarray, adapt_init(step_size))
        (state, adaptation), _ = jax.lax.scan(warm, (state, begin), keys)
        step_size = adapted(adaptation)
    keys = jax.random.split(draw_key, num_draws)
    (_, total), (kept, potential) = jax.lax.scan(draw, (state, jnp.zeros_like(step_size)), keys)
    chains_first = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (kept, potential))
    return *chains_first, total / (num_draws * thinning), step_size


def nuts(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    target_acceptance: float = 0.8,
    dense_mass: bool = False,
) -> Reference:
    """Run NumPyro's No-U-Turn sampler; arguments as of `mala`."""
    kernel = NUTS(
        potential_fn=potential_fn, target_accept_prob=target_acceptance, dense_mass=dense_mass
    )
    return _numpyro(rng_key, kernel, positions, num_warmup, num_draws, thinning)


def hmc(
    rng_key: Array,
    potential_fn: Callable[[Any], Array],
    positions: Any,
    *,
    num_steps: int,
    num_warmup: int,
    num_draws: int,
    thinning: int = 1,
    target_acceptance: float = 0.8,
) -> Reference:
    """Run NumPyro's Hamiltonian Monte Carlo with `num_steps` leapfrog steps; else as `nuts`."""
    kernel = HMC(
        potential_fn=potential_fn,
        num_steps=num_steps,
        trajectory_length=None,
        target_accept_prob=target_acceptance,
    )
    return _numpyro(rng_key, kernel, positions, num_warmup, num_draws, thinning)


def _numpyro(
    rng_key: Array, kernel: Any, positions: Any, num_warmup: int, num_draws: int, thinning: int
) -> Reference:
    check_run(positions, num_warmup, num_draws, thinning)
    run = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_draws * thinning,
        thinning=thinning,
        num_chains=jax.tree.leaves(positions)[0].shape[0],
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("potential_energy", "accept_prob", "diverging")
    with jax.default_matmul_precision("highest"):
        run.run(rng_key, init_params=positions, extra_fields=fields)
    extra = {name: np.asarray(x) for name, x in run.get_extra_fields(group_by_chain=True).items()}
    draws = jax.tree.map(np.asarray, run.get_samples(group_by_chain=True))
    step_size = np.mean(run.last_state.adapt_state.step_size)
    reference = diagnosed(draws, extra["potential_energy"], extra["accept_prob"].mean(), step_size)
    return reference._replace(num_divergent=int(extra["diverging"].sum()))


def laplace_scale(potential_fn: Callable[[Any], Array], position: Any) -> Array:
    """Return ``S [d, d]`` with ``S S'`` the inverse Hessian at `position`, raveled: for `mala`.

    Raises `ValueError` where the Hessian is not positive definite.
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


def _identity(position: Any) -> Any:
    return position


def _ravel(positions: Any) -> tuple[Array, Callable[[Array], Any]]:
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], positions))
    return jax.vmap(lambda position: ravel_pytree(position)[0])(positions), unravel


def _to_z(start: Array, scale: Array | None) -> Array:
    if scale is None:
        return start
    return jnp.linalg.solve(scale, start.T).T if scale.ndim == 2 else start / scale
