"""Figure S3 of Vono et al. (2022): what the memory does, on Synthetic(1, 1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, spreading
from experiments.checks import require
from experiments.qlsd import federations, logistic, truth
from experiments.qlsd.synthetic_figures import draw
from fedmcmc import Placement

__all__ = ["TITLE", "Config", "draw", "run"]

TITLE = "Figure S3: memory on Synthetic(1, 1), error of the variances"


@dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's, or its released notebook's, where it has them.

    Attributes
    ----------
    alpha, beta, num_clients, dim, shared_seed
        The federation, see `federations.synthetic`. The notebook shares the seed between clients.
    prior_precision
        Of the Gaussian prior, of mean zero.
    step_size_factor
        The step size is this over ``M = lambda_max(X'X) / 4 + prior_precision``.
    batch_size, refresh_every
        Rows a gradient, drawn with replacement; rounds between snapshots.
    levels
        ``s`` of the compressors.
    num_rounds, num_burnin
        Rounds, and those of them that are not used.
    num_chains
        Repetitions, vmapped, also of MALA. All start at the mode.
    mala_warmup, mala_draws, mala_thinning
        Of the truth, preconditioned by the curvature at the mode and tuned; the paper's has a
        fixed step size of ``1 / (10 M)``.
    """

    seed: int = 0
    alpha: float = 1.0
    beta: float = 1.0
    num_clients: int = 20
    dim: int = 10
    shared_seed: bool = True
    prior_precision: float = 1000.0
    step_size_factor: float = 1.0
    batch_size: int = 1
    refresh_every: int = 100
    levels: tuple[int, ...] = (2, 4, 16)
    num_rounds: int = 100_000
    num_burnin: int = 0
    num_chains: int = 20
    mala_warmup: int = 1000
    mala_draws: int = 5000
    mala_thinning: int = 5

    def __post_init__(self) -> None:
        counts = ("num_clients", "dim", "batch_size", "refresh_every")
        checks.at_least(1, self, *counts, "mala_warmup", "mala_thinning")
        checks.chains(self)
        checks.at_least(4, self, "mala_draws")
        checks.positive(self, "alpha", "beta", "prior_precision")
        checks.between(0, 2, self, "step_size_factor", why=", where the chains are stable")
        require(
            0 <= self.num_burnin <= self.num_rounds - 2,
            "num_burnin must leave at least two of num_rounds",
            self.num_burnin,
        )
        require(
            len(self.levels) > 0 and min(self.levels) >= 1 and max(self.levels) <= 2**23,
            "levels must lie between 1 and 2**23",
            self.levels,
        )


class Problem(NamedTuple):
    """The posterior, what to run on, and where from."""

    posterior: fedmcmc.Posterior
    data: fedmcmc.FederatedData
    centre: jax.Array  # the mode
    step_size: float
    heterogeneity: float  # sum over clients of |grad U_i|^2 at the mode


def problem(config: Config) -> Problem:
    """Draw the federation and find the mode."""
    data = federations.synthetic(
        config.alpha,
        config.beta,
        num_clients=config.num_clients,
        dim=config.dim,
        shared_seed=config.shared_seed,
    ).data
    posterior = logistic.binary(config.dim, config.prior_precision)
    centre = fedmcmc.surrogates.mode(posterior, data, jnp.zeros(config.dim)).position
    smoothness = logistic.smoothness(np.asarray(data.rows.features), config.prior_precision)

    pulls = client_gradients(data, centre)
    squares = float((pulls**2).sum())
    return Problem(posterior, data, centre, config.step_size_factor / smoothness, squares)


def client_gradients(data: fedmcmc.FederatedData, theta: jax.Array) -> np.ndarray:
    """Return the gradient of each client's log likelihood, ``[num_clients, dim]``."""
    features = np.asarray(data.rows.features, np.float64)
    chance = 1 / (1 + np.exp(-features @ np.asarray(theta, np.float64)))
    terms = (np.asarray(data.rows.label) - chance)[:, None] * features
    return np.add.reduceat(terms, np.asarray(data.start))


def kernels(
    config: Config, given: Problem
) -> list[tuple[int | None, bool, fedmcmc.FederatedKernel]]:
    """Return the algorithms of Figure S3 and LSD++: levels, whether with memory, kernel."""
    settings: dict[str, Any] = dict(
        step_size=given.step_size,
        batch_size=config.batch_size,
        refresh_every=config.refresh_every,
    )
    plain = fedmcmc.lsd_pp(given.posterior, **settings)
    found: list[tuple[int | None, bool, fedmcmc.FederatedKernel]] = [(None, False, plain)]
    for s in config.levels:
        compressor = fedmcmc.quantize(s)
        rate = 1 / (1 + float(compressor.omega(given.centre)))
        for memory in (False, True):
            kernel = fedmcmc.qlsd_pp(
                given.posterior,
                compressor=compressor,
                memory_rate=rate if memory else 0.0,  # a number: one compilation for all
                **settings,
            )
            found.append((s, memory, kernel))
    return found


def variances(
    config: Config, given: Problem, kernel: fedmcmc.FederatedKernel, placement: Placement
) -> tuple[np.ndarray, float]:
    """Return the variance of each coordinate in each repetition, and the bits of a message."""
    samples = spreading.sample(
        jax.random.key(config.seed),
        kernel,
        given.data,
        given.centre,
        num_rounds=config.num_rounds,
        num_burnin=config.num_burnin,
        num_chains=config.num_chains,
        placement=placement,
        progress=False,
    )
    messages = samples.totals["rounds"] * given.data.num_clients
    bits = float((samples.totals["bits_up"] / messages).mean())
    return np.asarray(samples.draws, np.float64).var(axis=1), bits


def ground_truth(config: Config, given: Problem) -> tuple[np.ndarray, truth.Reference]:
    """Return MALA's variance of each coordinate in each chain; raises if it did not converge."""
    potential_fn = logistic.potential_fn(given.posterior, given.data)
    scale = truth.laplace_scale(potential_fn, given.centre)
    start_key, run_key = jax.random.split(jax.random.key(config.seed + 1))
    noise = jax.random.normal(start_key, (config.num_chains, config.dim))
    found = truth.mala(
        run_key,
        potential_fn,
        given.centre + noise @ scale.T,
        step_size=config.dim ** (-1 / 3),
        num_warmup=config.mala_warmup,
        num_draws=config.mala_draws,
        thinning=config.mala_thinning,
        scale=scale,
    )
    found = truth.require_converged(found)
    draws = np.asarray(found.draws, np.float64)
    centred = draws - draws.mean(axis=(0, 1))
    return (centred**2).mean(axis=1), found


def row(
    given: Problem,
    levels: int | None,
    memory: bool,
    measured: np.ndarray,
    plain: np.ndarray,
    exact: np.ndarray,
    bits: float,
) -> dict[str, Any]:
    """Return one line of the table; `measured`, `plain` and `exact` are ``[num_chains, dim]``."""
    right = exact.mean(axis=0)
    error = np.linalg.norm(measured - right, axis=1)
    # Chains with the same number share all noise but the quantiser's.
    added = (measured - plain).mean(axis=1) / right.mean()
    root = np.sqrt(len(measured))
    dim = given.centre.size
    return {
        "algorithm": "LSD++" if levels is None else f"QLSD++, s = {levels}",
        "memory": "-" if levels is None else "yes" if memory else "no",
        "omega": 0.0 if levels is None else min(dim / levels**2, dim**0.5 / levels),
        "error of variances": float(error.mean()),
        "s.e.": float(error.std(ddof=1) / root),
        "error / |variances|": float(error.mean() / np.linalg.norm(right)),
        "variance over MALA": float(measured.mean() / right.mean()),
        "added by compression": float(added.mean()),
        "s.e. of that": float(added.std(ddof=1) / root),
        "bits per message": bits,
    }


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run MALA and every algorithm; write the figure."""
    given = problem(config)
    exact, found = ground_truth(config, given)
    runs = [
        (s, m, *variances(config, given, kernel, placement))
        for s, m, kernel in kernels(config, given)
    ]
    plain = runs[0][2]
    table = [row(given, s, m, measured, plain, exact, bits) for s, m, measured, bits in runs]
    right = exact.mean(axis=0)
    errors = [
        {"levels": s, "memory": m, "error": np.linalg.norm(measured - right, axis=1)}
        for s, m, measured, _ in runs
    ]
    floor = exact.std(axis=0, ddof=1) / np.sqrt(len(exact))
    metrics = {
        "table": table,
        "errors": errors,
        "truth": found.summary() | {"variances": right, "error": float(np.linalg.norm(floor))},
        "step_size": given.step_size,
        "heterogeneity": given.heterogeneity,
        "shared_seed": config.shared_seed,
        "num_rows": given.data.num_rows,
    }
    return metrics | {"figures": draw(metrics, out)}
