"""Figures 1 and S2 of Vono et al. (2022): error of the posterior mean against bits sent."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, spreading
from experiments.checks import require
from experiments.qlsd import federations
from experiments.qlsd.gaussian_figures import draw
from experiments.qlsd.gaussian_law import average_error, stationary_variance
from fedmcmc import Placement
from fedmcmc.compression import bound_bits

__all__ = ["TITLE", "Config", "draw", "run"]

TITLE = "Figures 1, S1 and S2: a Gaussian mean, error against bits"


@dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's where it, or its code, states them.

    Attributes
    ----------
    num_clients, dim
        The federation of the released notebook (`federations.gaussian`).
    step_size_factor
        The step size is this over ``L``, the number of all rows. One in the paper; the released
        notebook uses 0.01.
    batch_fraction
        Of each client's rows, rounded down; drawn with replacement.
    bits
        ``p``: compressors have ``2**p`` levels. QLSD is run with the first and the last.
    num_rounds, num_burnin, thinning
        Rounds, those not averaged, and rounds between two that are.
    num_chains
        Repetitions, vmapped.
    budget
        Bits that each client sends in Figure S2, counted in real messages. The released notebook
        divides as many, by the published bound, among all clients.
    budget_levels
        Numbers of levels in Figure S2: 20 from 1 to ``10**4``, evenly on a logarithmic scale,
        rounded to integers.
    budget_factors
        Step sizes of Figure S2, times ``L``.
    """

    seed: int = 0
    num_clients: int = 20
    dim: int = 50
    step_size_factor: float = 1.0
    batch_fraction: float = 0.1
    bits: tuple[int, ...] = (4, 8, 16)
    num_rounds: int = 500_000
    num_burnin: int = 450_000
    thinning: int = 1
    num_chains: int = 30
    budget: float = 1e6
    budget_levels: int = 20
    budget_factors: tuple[float, ...] = (1.0, 0.8, 0.6, 0.5, 0.4, 0.2, 0.1, 0.09)

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_clients", "dim", "thinning", "budget_levels")
        checks.chains(self)
        checks.rounds(self)
        checks.between(0, 1, self, "batch_fraction")
        checks.between(0, 2, self, "step_size_factor", why=", where the chains are stable")
        checks.bits(self.bits)
        factors = self.budget_factors
        require(
            len(factors) > 0 and 0 < min(factors) <= max(factors) < 2,
            "budget_factors must lie in (0, 2)",
            factors,
        )


class Result(NamedTuple):
    """One algorithm's run."""

    name: str
    bits: int | None  # p, None for no compression
    rounds: np.ndarray  # [num_points], how many draws the running averages took, in rounds
    error: np.ndarray  # [num_points], E |average - mean|^2 over chains
    error_sd: np.ndarray  # [num_points], standard error of that
    expected: np.ndarray  # [num_points], by the law
    square: np.ndarray  # [num_points], average of |theta - mean|^2 over chains
    square_sd: np.ndarray  # [num_points], standard error of that
    variance: float  # a coordinate, measured
    variance_law: float
    message_bits: float  # a client and round, counted
    bound_log2: float
    bound_natural: float


def posterior() -> fedmcmc.Posterior:
    """Rows ``N(theta, I)``, flat prior."""
    return fedmcmc.Posterior(_flat, _loglikelihood)


def _flat(theta: jax.Array) -> jax.Array:
    return jnp.zeros((), theta.dtype)


def _loglikelihood(theta: jax.Array, rows: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum((rows - theta) ** 2, axis=-1)


def kernels(
    config: Config, federation: federations.GaussianFederation
) -> list[tuple[str, int | None, fedmcmc.FederatedKernel]]:
    """Return the algorithms of Figure 1: name, bits, kernel."""
    centre = jnp.asarray(federation.mean, jnp.float32)
    settings: dict[str, Any] = dict(
        step_size=config.step_size_factor / federation.precision, batch_size=config.batch_fraction
    )
    found: list[tuple[str, int | None, fedmcmc.FederatedKernel]] = []
    for p in dict.fromkeys((config.bits[0], config.bits[-1])):
        compressor = fedmcmc.quantize(2**p)
        found.append(
            (f"QLSD, {p} bits", p, fedmcmc.qlsd(posterior(), compressor=compressor, **settings))
        )
    for p in config.bits:
        compressor = fedmcmc.quantize(2**p)
        kernel = fedmcmc.qlsd_star(posterior(), centre, compressor=compressor, **settings)
        found.append((f"QLSD*, {p} bits", p, kernel))
    found.append(("LSD*", None, fedmcmc.lsd_star(posterior(), centre, **settings)))
    return found


def measure(
    config: Config,
    federation: federations.GaussianFederation,
    name: str,
    p: int | None,
    kernel: fedmcmc.FederatedKernel,
    key: jax.Array,
    placement: Placement,
) -> Result:
    """Run one algorithm and compare the error of its running averages with the law."""
    samples = spreading.sample(
        key,
        kernel,
        federation.data,
        jnp.asarray(federation.mean, jnp.float32),
        num_rounds=config.num_rounds,
        num_burnin=config.num_burnin,
        thinning=config.thinning,
        num_chains=config.num_chains,
        placement=placement,
        progress=False,
    )
    away = np.asarray(samples.draws, np.float64) - federation.mean
    num = away.shape[1]
    points = np.unique(np.geomspace(1, num, 40).astype(int))
    running = np.cumsum(away, axis=1)[:, points - 1] / points[None, :, None]
    squared = (running**2).sum(axis=-1)
    lengths = np.cumsum((away**2).sum(axis=-1), axis=1)[:, points - 1] / points
    size = config.dim
    law = stationary_variance(
        federation,
        step_size=config.step_size_factor / federation.precision,
        batch_fraction=config.batch_fraction,
        num_levels=None if p is None else 2**p,
        centred="*" in name,
        seed=config.seed,
    )
    contraction = (1 - config.step_size_factor) ** config.thinning
    return Result(
        name=name,
        bits=p,
        rounds=points * config.thinning,
        error=squared.mean(axis=0),
        error_sd=squared.std(axis=0, ddof=1) / np.sqrt(config.num_chains),
        expected=average_error(law, contraction, points) * size,
        square=lengths.mean(axis=0),
        square_sd=lengths.std(axis=0, ddof=1) / np.sqrt(config.num_chains),
        variance=float((away**2).mean()),
        variance_law=law,
        message_bits=float(np.asarray(samples.info["bits_up"], np.float64).mean())
        / config.num_clients,
        bound_log2=32.0 * size if p is None else float(bound_bits(size, 2**p)),
        bound_natural=32.0 * size if p is None else float(bound_bits(size, 2**p, base="natural")),
    )


PILOT = 100  # rounds, over which the bits of a message are counted


def budget_grid(
    config: Config, federation: federations.GaussianFederation, placement: Placement
) -> dict[str, np.ndarray]:
    """Return Figure S2: error of the average of all rounds that a budget of bits pays for.

    Messages are as long at every step size: they are quantised relative to their own norm.
    """
    levels = np.unique(np.round(np.geomspace(1, 1e4, config.budget_levels)).astype(int))
    centre = jnp.asarray(federation.mean, jnp.float32)
    # From a place a posterior standard deviation off in each coordinate.
    start = centre + federation.precision**-0.5

    def samples(s: int, factor: float, num_rounds: int, number: int) -> fedmcmc.Samples:
        return spreading.sample(
            jax.random.fold_in(jax.random.key(config.seed + 1), number),
            fedmcmc.qlsd_star(
                posterior(),
                centre,
                compressor=fedmcmc.quantize(s),
                step_size=factor / federation.precision,
                batch_size=config.batch_fraction,
            ),
            federation.data,
            start,
            num_rounds=num_rounds,
            num_chains=config.num_chains,
            placement=placement,
            progress=False,
        )

    shape = len(levels), len(config.budget_factors)
    error, error_sd, bits = np.zeros(shape), np.zeros(shape), np.zeros(len(levels))
    rounds = np.zeros(len(levels), int)
    for i, s in enumerate(levels.tolist()):
        pilot = samples(s, config.budget_factors[0], PILOT, 1000 * i + 999)
        bits[i] = np.asarray(pilot.info["bits_up"], np.float64).mean() / config.num_clients
        rounds[i] = max(int(config.budget / bits[i]), 1)
        for j, factor in enumerate(config.budget_factors):
            draws = np.asarray(samples(s, factor, int(rounds[i]), 1000 * i + j).draws, np.float64)
            squared = ((draws.mean(axis=1) - federation.mean) ** 2).sum(axis=-1)
            error[i, j] = squared.mean()
            error_sd[i, j] = squared.std(ddof=1) / np.sqrt(config.num_chains)
    factors = np.array(config.budget_factors)
    return {
        "levels": levels,
        "rounds": rounds,
        "error": error,
        "error_sd": error_sd,
        "bits": bits,
        "factors": factors,
        "budget": config.budget,
    }


def row(result: Result, mean_bits: float) -> dict[str, Any]:
    """Return one line of the table."""
    return {
        "algorithm": result.name,
        "variance": result.variance,
        "variance, law": result.variance_law,
        "MSE of average": float(result.error[-1]),
        "MSE, law": float(result.expected[-1]),
        "z (MSE)": float((result.error[-1] - result.expected[-1]) / result.error_sd[-1]),
        "E |theta - mean|^2": float(result.square[-1]),
        "its s.e.": float(result.square_sd[-1]),
        "bits per message": result.message_bits,
        "bound, log2": result.bound_log2,
        "bound, ln (paper)": result.bound_natural,
        "fewer bits than LSD*": mean_bits / result.message_bits,
        "by bound, log2": mean_bits / result.bound_log2,
        "by bound, ln": mean_bits / result.bound_natural,
    }


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run every algorithm; write figures."""
    federation = federations.gaussian(config.num_clients, config.dim)
    key = jax.random.key(config.seed)
    results = [
        measure(config, federation, name, p, kernel, jax.random.fold_in(key, i), placement)
        for i, (name, p, kernel) in enumerate(kernels(config, federation))
    ]
    grid = budget_grid(config, federation, placement)
    found = {
        "table": [row(result, 32.0 * config.dim) for result in results],
        "posterior_variance": 1 / federation.precision,
        "dim": config.dim,
        "num_chains": config.num_chains,
        "curves": {each.name: curve(each) for each in results},
        "budget": grid,
        "sizes": federation.data.sizes,
    }
    return found | {"figures": draw(found, out)}


def curve(result: Result) -> dict[str, Any]:
    """Return what the figures show of one algorithm."""
    return {
        "rounds": result.rounds,
        "bits": result.rounds * result.message_bits,
        "error": result.error,
        "error_sd": result.error_sd,
        "expected": result.expected,
        "square": result.square,
        "square_sd": result.square_sd,
    }
