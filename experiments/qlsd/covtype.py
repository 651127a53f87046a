"""Table S1 of Vono et al. (2022): logistic regression on covertype, error of HPD regions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, spreading
from experiments import data as tables
from experiments.checks import require
from experiments.qlsd import baselines, federations, logistic, truth
from experiments.qlsd.hpd import Run, curves, row, run_kernel
from experiments.qlsd.hpd_figures import draw, table
from fedmcmc import Placement

__all__ = ["TITLE", "Config", "draw", "run", "table"]

TITLE = "Table S1: logistic regression on covertype, HPD error"


@dataclass(frozen=True)
class Config:
    """Settings; the paper's text has none, so these are ours, those of its digits where they fit.

    Attributes
    ----------
    split, num_clients, num_rows
        As in `federations.covertype`; the label is whether the cover is lodgepole pine.
    prior_precision
        Of the Gaussian prior, of mean zero.
    step_size_factor
        The step size is this over ``M = lambda_max(X'X) / 4 + prior_precision``.
    batch_fraction, refresh_every
        Minibatches, as a fraction of a client's rows; rounds between snapshots.
    bits
        ``p``: compressors have ``2**p`` levels.
    num_rounds, num_burnin, thinning
        Rounds, those dropped, and rounds between two kept.
    num_chains
        Chains of every algorithm and of MALA. All start from the Gaussian at the mode. Together
        they keep more rounds than the paper's single chain of the digits.
    dg_local_steps, dg_tolerance_factor
        Of DG-SGLD, see `baselines.dg_settings`.
    mala_warmup, mala_draws, mala_thinning
        Of the truth, preconditioned by the curvature at the mode.
    """

    seed: int = 0
    split: str = "wilderness"
    num_clients: int = 4
    num_rows: int = 10_000
    prior_precision: float = 100.0
    step_size_factor: float = 0.2
    batch_fraction: float = 0.2
    refresh_every: int = 100
    bits: tuple[int, ...] = (4, 8, 16)
    num_rounds: int = 100_000
    num_burnin: int = 10_000
    thinning: int = 50
    num_chains: int = 8
    dg_local_steps: int = 1
    dg_tolerance_factor: float = 1.0
    mala_warmup: int = 1000
    mala_draws: int = 5000
    mala_thinning: int = 5

    def __post_init__(self) -> None:
        require(
            self.split in ("wilderness", "labels"),
            "split must be 'wilderness' or 'labels'",
            self.split,
        )
        counts = ("num_clients", "num_rows", "thinning", "refresh_every", "dg_local_steps")
        checks.at_least(1, self, *counts, "mala_warmup", "mala_thinning")
        require(
            self.split == "labels" or self.num_clients == 4,
            "num_clients must be 4 for the split by wilderness",
            self.num_clients,
        )
        checks.chains(self)
        checks.at_least(4, self, "mala_draws")
        checks.positive(self, "prior_precision", "dg_tolerance_factor")
        checks.rounds(self)
        checks.between(0, 1, self, "step_size_factor", "batch_fraction")
        checks.bits(self.bits)


class Problem(NamedTuple):
    """The posterior, what to run on, and the Gaussian to start from."""

    posterior: fedmcmc.Posterior
    data: fedmcmc.FederatedData
    centre: jax.Array  # the mode
    scale: jax.Array  # of the Gaussian at the mode
    step_size: float


def problem(config: Config) -> Problem:
    """Take rows of the table, split them, and find the mode."""
    data = federations.covertype(
        jax.random.key(config.seed),
        tables.covtype(),
        split=config.split,
        num_clients=config.num_clients,
        num_rows=config.num_rows,
        num_test=1,
    ).data
    features = np.asarray(data.rows.features)
    posterior = logistic.binary(features.shape[1], config.prior_precision)
    zeros = jnp.zeros(features.shape[1])
    # In single precision the last steps to the mode of so many rows gain nothing.
    centre = fedmcmc.surrogates.mode(posterior, data, zeros, tolerance=1e-4).position
    scale = truth.laplace_scale(logistic.potential_fn(posterior, data), centre)
    smoothness = logistic.smoothness(features, config.prior_precision)
    return Problem(posterior, data, centre, scale, config.step_size_factor / smoothness)


def kernels(
    config: Config, given: Problem
) -> list[tuple[str, int | None, fedmcmc.FederatedKernel]]:
    """Return the algorithms of Table S1 and LSD++: name, bits, kernel."""
    tied = baselines.dg_settings(
        given.data, config.prior_precision, 0.25, config.dg_tolerance_factor
    )
    consensus = fedmcmc.dg_sgld(
        given.posterior,
        num_local_steps=config.dg_local_steps,
        batch_size=config.batch_fraction,
        **tied,
    )
    reduced: dict[str, Any] = dict(
        step_size=given.step_size,
        batch_size=config.batch_fraction,
        refresh_every=config.refresh_every,
    )
    found: list[tuple[str, int | None, fedmcmc.FederatedKernel]] = [
        ("LSD++", None, fedmcmc.lsd_pp(given.posterior, **reduced)),
        ("DG-SGLD", None, consensus),
    ]
    for p in config.bits:
        compressor = fedmcmc.quantize(2**p)
        kernel = fedmcmc.qlsd_pp(given.posterior, compressor=compressor, **reduced)
        found.append((f"QLSD++, {p} bits", p, kernel))
    return found


def sample(config: Config, given: Problem, placement: Placement) -> list[Run]:
    """Run every algorithm and keep the potentials."""
    potential_fn = logistic.potential_fn(given.posterior, given.data)

    def collect(state: fedmcmc.FederatedState, info: Any) -> jax.Array:
        del info
        return potential_fn(state.broadcast.position)

    def start(rng_key: jax.Array) -> jax.Array:
        return given.centre + given.scale @ jax.random.normal(rng_key, given.centre.shape)

    return [
        run_kernel(
            name,
            p,
            kernel,
            jax.random.key(config.seed),
            given.data,
            start,
            collect,
            placement,
            num_rounds=config.num_rounds,
            num_burnin=config.num_burnin,
            thinning=config.thinning,
            num_chains=config.num_chains,
        )
        for name, p, kernel in kernels(config, given)
    ]


def ground_truth(config: Config, given: Problem) -> truth.Reference:
    """Run MALA; raises where it did not converge."""
    start_key, run_key = jax.random.split(jax.random.key(config.seed + 1))
    dim = given.centre.shape[0]
    noise = jax.random.normal(start_key, (config.num_chains, dim))
    found = truth.mala(
        run_key,
        logistic.potential_fn(given.posterior, given.data),
        given.centre + noise @ given.scale.T,
        # Roberts and Rosenthal's order in the dimension; the warm-up tunes it.
        step_size=dim ** (-1 / 3),
        num_warmup=config.mala_warmup,
        num_draws=config.mala_draws,
        thinning=config.mala_thinning,
        scale=given.scale,
    )
    return truth.require_converged(found)


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run MALA and every algorithm; write the figure."""
    given = problem(config)
    exact = ground_truth(config, given)
    potential = exact.potential.astype(np.float64)
    runs = sample(config, given, placement)
    dim, plain_bits = given.centre.size, runs[0].bits_up
    lines = [row(each, potential, plain_bits, dim) for each in runs]
    mala = Run("MALA", None, potential, plain_bits)
    beside_plain = [row(each, runs[0].potential, plain_bits, dim) for each in runs[1:]]
    curve = {each.name: curves(each.potential, potential) for each in runs}
    found = {
        "table": lines,
        "curves": curve,
        "compared_with": "MALA",
        "another_key": None,
        "against_lsd_pp": beside_plain,
        "num_draws": runs[0].potential.size,
        "truth": exact.summary() | mala.summary(),
        "dimension": dim,
        "num_rows": given.data.num_rows,
        "sizes": given.data.sizes,
        "step_size": given.step_size,
        "slow_rounds": 1 / (given.step_size * config.prior_precision),
        "kept_rounds": config.num_rounds - config.num_burnin,
    }
    return found | {"figures": draw(found, out)}
