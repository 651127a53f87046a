"""Few hospitals that hardly differ: Langevin dynamics with centered and with shifted effects."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

import fedmcmc
from experiments import loaders, models
from experiments.special.hierarchy_methods import verdict_rows
from experiments.tidy import Row, from_numbers
from fedmcmc import hierarchy, rounds

FURTHEST = 50.0
"""A chain whose ``log tau`` or `mu` went further has diverged."""
THINNING = 5


def rows(
    num_hospitals: int,
    rows_per_hospital: int,
    spread: float,
    step_sizes: Sequence[float],
    num_chains: int,
    num_rounds: int,
    num_burnin: int,
    seed: int,
) -> list[Row]:
    """Compare the moments of all methods with a grid's.

    Langevin dynamics has every step size in `step_sizes` and no metric; `spread` is the standard
    deviation of the hospitals' effects, and rounds include burn-in.
    """
    data, _ = loaders.funnel(num_hospitals, rows_per_hospital, spread, seed)
    centered, shifted = (
        fedmcmc.from_numpyro(models.means_of_groups, example=data, centered=c) for c in (1.0, 0.0)
    )
    draw = hierarchy.conjugate()  # exact draws of the effects, so that nothing else is off
    kernels: dict[tuple[str, float | None], Any] = {
        (name, step): fedmcmc.lsd(posterior, step_size=step, refresh=draw)
        for name, posterior in (("lsd, centered", centered), ("lsd", shifted))
        for step in step_sizes
    }
    half, last = fedmcmc.bernoulli(0.5), step_sizes[-1]
    halved = fedmcmc.fed_gibbs(centered, refresh=draw, participation=half)
    kernels["fed_gibbs", None] = fedmcmc.fed_gibbs(centered, refresh=draw)
    kernels["fed_gibbs, half absent", None] = halved
    kernels["lsd on marginal", last] = fedmcmc.lsd(fedmcmc.marginal(shifted), step_size=last)
    mean, sd = exact([np.asarray(data.client_rows(i)["y"]) for i in range(num_hospitals)])
    table: list[Row] = []
    for i, name in enumerate(("mu", "log_tau")):
        table += from_numbers("grid", {"parameter": name}, {"mean": mean[i], "sd": sd[i]})
    key = jax.random.key(seed)
    start = {"mu": jnp.zeros(()), "tau": jnp.log(jnp.asarray(0.5))}
    for (method, step), kernel in kernels.items():

        @jax.jit
        @jax.vmap
        def chain(chain_key: Any, kernel: Any = kernel) -> Any:  # one that diverges stops no other
            state = kernel.init(chain_key, start, data)
            lengths: dict[str, Any] = {"num_rounds": num_rounds, "thinning": THINNING}
            draws = rounds.run_rounds(kernel, data, chain_key, state, **lengths)[1].draws
            return jnp.stack([draws["mu"], draws["tau"]], -1)

        drawn = np.asarray(chain(jax.random.split(key, num_chains)), np.float64)
        settings = {} if step is None else {"step_size": step}
        errors = _errors(drawn[:, num_burnin // THINNING :], mean, sd)
        table += from_numbers(method, settings, errors)
    fitted = fedmcmc.fit(shifted, data, rng_key=key, progress=False)
    drawn = np.stack([np.asarray(fitted.samples.draws[name]) for name in ("mu", "tau")], -1)
    table += verdict_rows("fit", fitted.verdict)
    return table + from_numbers("fit", {}, _errors(drawn, mean, sd))


def exact(hospitals: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of `mu` and ``log tau`` on a grid, effects integrated out."""
    mu, log_tau = np.meshgrid(np.linspace(-3, 3, 801), np.linspace(-14, 3, 1701), indexing="ij")
    tau = np.exp(log_tau)
    log_p = -(mu**2) / 2 - tau**2 / 2 + log_tau
    for y in hospitals:
        log_p += norm.logpdf(y.astype(float).mean(), mu, np.sqrt(tau**2 + 1 / len(y)))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    values = np.stack([mu, log_tau])
    mean = (p * values).sum((1, 2))
    return mean, np.sqrt((p * values**2).sum((1, 2)) - mean**2)


def _errors(drawn: np.ndarray, mean: np.ndarray, sd: np.ndarray) -> dict[str, float]:
    """Return the share of chains that diverged, and errors of the moments of the other chains.

    Errors of means are in standard deviations; standard deviations are ratios. All are NaN if all
    chains diverged.
    """
    finite = (np.isfinite(drawn) & (np.abs(drawn) < FURTHEST)).all((1, 2))
    errors: dict[str, float] = {"diverged": 1 - finite.mean()}
    chains = drawn[finite] if finite.any() else np.full((1, 1, 2), np.nan)
    gaps, ratios = (chains.mean((0, 1)) - mean) / sd, chains.std((0, 1)) / sd
    for name, gap, ratio in zip(("mu", "log_tau"), gaps, ratios, strict=True):
        errors |= {f"error_of_mean_{name}": gap, f"sd_ratio_{name}": ratio}
    return errors
