"""Section 5.1 of El Mekkaoui et al. (2021), for the tests of `settings_run`.

The study is ``study=fsgld/gaussian``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, output, spreading
from experiments.checks import require
from experiments.fsgld import gaussian_law
from experiments.fsgld.gaussian_law import RelayLaw, relay_law
from fedmcmc import Placement

__all__ = ["TITLE", "Config", "run"]

TITLE = "Section 5.1: a Gaussian mean, non-IID shards, delayed communication"
METHODS = ("dsgld", "fsgld")


@dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's (sizes that the paper leaves out are marked).

    Attributes
    ----------
    num_clients, rows_per_client
        Shards ``S`` and their rows.
    spread
        Shard means are uniform on ``[-spread, spread]`` squared.
    step_size
        ``h / 2`` of the paper.
    batch_size
        Rows a gradient, drawn with replacement.
    num_local_steps
        Local updates ``T`` before the chain moves on. The figure's list did not survive in our
        copy of the paper; its text names 100.
    num_burnin, thinning
        In local samples, as in the paper. Where ``T <= thinning``, ``thinning / T`` rounds lie
        between two draws; above, ``T / thinning`` draws are taken within a round. Hence one of
        the two must divide the other, and every ``T`` must divide `num_burnin`.
    num_draws
        Draws kept a chain (not stated in the paper).
    num_chains
        Repetitions, vmapped (not stated in the paper).
    grid_points
        Points a side of the grid over the square for Figure 4 (not stated in the paper).
    """

    seed: int = 0
    num_clients: int = 10
    rows_per_client: int = 200
    spread: float = 6.0
    step_size: float = 5e-5
    batch_size: int = 10
    num_local_steps: tuple[int, ...] = (1, 10, 100, 1000)
    num_burnin: int = 20_000
    thinning: int = 100
    num_draws: int = 2000
    num_chains: int = 30
    grid_points: int = 101

    def __post_init__(self) -> None:
        counts = ("num_clients", "rows_per_client", "batch_size", "thinning", "num_draws")
        checks.at_least(1, self, *counts)
        checks.chains(self)
        checks.at_least(2, self, "grid_points")
        checks.at_least(0, self, "num_burnin")
        checks.positive(self, "spread")
        # Each local chain contracts by 1 - step_size * K; beyond this it diverges.
        limit = 2 / (1 + self.num_clients * self.rows_per_client)
        require(
            0 < self.step_size < limit,
            f"step_size must lie between 0 and {limit:.3g} (2 / (1 + all rows)), where the local "
            f"chains stop being stable",
            self.step_size,
        )
        require(len(self.num_local_steps) > 0, "num_local_steps must not be empty", ())
        for num in self.num_local_steps:
            fits = num >= 1 and (num % self.thinning == 0 or self.thinning % num == 0)
            require(
                fits and self.num_burnin % num == 0,
                f"num_local_steps must be positive, divide num_burnin={self.num_burnin}, and "
                f"divide thinning={self.thinning} or be a multiple of it",
                num,
            )
            kept = max(num // self.thinning, 1)
            require(
                self.num_draws % kept == 0,
                f"num_draws must be a multiple of the {kept} draws per round of num_local_steps="
                f"{num}",
                self.num_draws,
            )


class Visit(NamedTuple):
    """Where the draws of one run lie: after these local steps of every `rounds_apart`-th round."""

    times: tuple[int, ...]
    rounds_apart: int
    num_rounds: int  # kept


class Result(NamedTuple):
    """One method at one number of local updates."""

    method: str
    num_local_steps: int
    draws: np.ndarray  # [num_chains, num_draws, 2]
    visit: Visit
    law: RelayLaw


def logprior_fn(theta: jax.Array) -> jax.Array:
    """``N(0, I)``, up to a constant."""
    return -0.5 * jnp.sum(theta**2)


def loglikelihood_fn(theta: jax.Array, rows: jax.Array) -> jax.Array:
    """``N(theta, I)``, one term a row, up to a constant."""
    return -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)


@cache
def collect_every(thinning: int) -> Callable[..., jax.Array]:
    """Return a `collect` that keeps every `thinning`-th local state of a round."""

    def collect(state: Any, info: Any) -> jax.Array:
        return fedmcmc.local_positions(state, info)[thinning - 1 :: thinning]

    return collect


def simulate_shards(config: Config) -> np.ndarray:
    """Return the rows of every shard, ``[num_clients, rows, 2]``."""
    return gaussian_law.simulate_shards(
        config.seed, config.spread, config.num_clients, config.rows_per_client
    )


def plan(config: Config, num_local_steps: int) -> Visit:
    """Return which states are the draws, counted in local samples as the paper does."""
    if num_local_steps <= config.thinning:
        apart = config.thinning // num_local_steps
        return Visit((num_local_steps,), apart, config.num_draws)
    times = tuple(range(config.thinning, num_local_steps + 1, config.thinning))
    return Visit(times, 1, config.num_draws // len(times))


def sample(
    config: Config, shards: np.ndarray, method: str, num: int, out: Path, placement: Placement
) -> Result:
    """Run one method with `num` local updates and write its draws."""
    posterior = fedmcmc.Posterior(logprior_fn, loglikelihood_fn)
    data = fedmcmc.FederatedData.from_clients(list(shards.astype(np.float32)))
    settings: dict[str, Any] = dict(
        step_size=config.step_size, num_local_steps=num, batch_size=config.batch_size
    )
    if method == "fsgld":
        surrogates = fedmcmc.Gaussian.from_moments(
            jnp.asarray(shards.mean(axis=1), jnp.float32),
            variance=jnp.full(config.num_clients, 1 / config.rows_per_client),
        )
        kernel = fedmcmc.fsgld(posterior, surrogates, **settings)
    else:
        kernel = fedmcmc.dsgld(posterior, **settings)
    visit = plan(config, num)
    num_burnin = config.num_burnin // num
    key = jax.random.fold_in(jax.random.key(config.seed), 10_000 * METHODS.index(method) + num)
    samples = spreading.sample(
        key,
        kernel,
        data,
        jnp.zeros(2),
        num_rounds=num_burnin + visit.num_rounds * visit.rounds_apart,
        num_burnin=num_burnin,
        thinning=visit.rounds_apart,
        num_chains=config.num_chains,
        collect=collect_every(config.thinning) if len(visit.times) > 1 else None,
        placement=placement,
        progress=False,
    )
    output.save_draws(samples, out / f"draws_{method}_{num}.nc")
    draws = np.asarray(samples.draws, np.float64).reshape(config.num_chains, config.num_draws, 2)
    law = relay_law(
        shards,
        step_size=config.step_size,
        batch_size=config.batch_size,
        num_local_steps=num,
        alpha=1.0 if method == "fsgld" else 0.0,
    )
    return Result(method, num, draws, visit, law)


def exact_posterior(shards: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the posterior's mean ``[2]`` and its variance per coordinate."""
    precision = 1 + shards.shape[0] * shards.shape[1]
    return shards.sum(axis=(0, 1)) / precision, 1 / precision


def compare(result: Result, posterior_mean: np.ndarray, posterior_variance: float) -> dict:
    """Set what was measured beside the exact law of the same recursion."""
    visit, draws = result.visit, result.draws
    mean, covariance = result.law.moments(visit.times)
    per_chain = ((draws - mean) ** 2).mean(axis=(1, 2))
    variance = float(np.trace(covariance) / 2)
    error = per_chain.std(ddof=1) / np.sqrt(len(draws))
    _, of_average = result.law.average(visit.times, visit.rounds_apart, visit.num_rounds)
    bias, last = mean - posterior_mean, of_average[-1]
    mse = float(bias @ bias + np.trace(last))
    # The average of many draws is close to Gaussian, which gives the error of a squared length.
    mse_error = np.sqrt((2 * np.trace(last @ last) + 4 * bias @ last @ bias) / len(draws))
    measured = float(((draws.mean(axis=1) - posterior_mean) ** 2).sum(axis=-1).mean())
    return {
        "method": result.method.upper(),
        "T": result.num_local_steps,
        "variance": float(per_chain.mean()),
        "exact variance": variance,
        "z (variance)": float((per_chain.mean() - variance) / error),
        "variance / posterior's": variance / posterior_variance,
        "exact bias": float(np.linalg.norm(bias)),
        "MSE of average": measured,
        "exact MSE": mse,
        "z (MSE)": float((measured - mse) / mse_error),
    }


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run both methods at every number of local updates; write draws."""
    shards = simulate_shards(config)
    mean, variance = exact_posterior(shards)
    results = [
        sample(config, shards, method, num, out, placement)
        for method in METHODS
        for num in config.num_local_steps
    ]
    return {
        "table": [compare(result, mean, variance) for result in results],
        "posterior": {"mean": mean, "variance": variance},
    }
