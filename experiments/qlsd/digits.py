"""Table 3 of Vono et al. (2022): logistic regression on digits, error of HPD regions and bits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

import fedmcmc
from experiments import checks, images, spreading
from experiments.checks import require
from experiments.qlsd import baselines, image_federations, logistic
from experiments.qlsd.federations import Rows
from experiments.qlsd.hpd import STRETCHES, Run, curves, row, run_kernel
from experiments.qlsd.hpd_figures import draw, table
from fedmcmc import Placement

__all__ = ["TITLE", "Config", "draw", "run", "table"]

TITLE = "Table 3: logistic regression on digits, HPD error against bits"
FLOOR = "LSD++, another key"
NUM_CLASSES = 10
SOURCES = {"mnist": images.mnist, "emnist": images.emnist_digits}


@dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's, or its released notebook's, where it has them.

    Attributes
    ----------
    source
        ``"emnist"``, as in the paper, or ``"mnist"``, which stands in for it.
    num_clients, scaling
        The federation of the released notebook (`image_federations.digits`).
    prior_precision
        Of the Gaussian prior, of mean zero.
    smoothness_factor
        ``M = factor * lambda_max(X'X) + prior_precision``; the notebook's factor, although 1/2
        would bound the curvature for more than two classes.
    step_size_factor
        The step size is this over ``M``. FSGLD takes the same.
    batch_fraction, refresh_every
        Minibatches, as a fraction of a client's rows; rounds between snapshots.
    bits
        ``p``: compressors have ``2**p`` levels. A client's message is ten vectors, one a class,
        each with a norm of its own, as in the notebook (the paper counts bits for d = 784).
    num_rounds, num_burnin, thinning
        Rounds, those dropped, and rounds between two kept.
    num_chains
        Independent chains; a single one must leave ten draws. They start at the mode plus a draw
        of the prior's scale (the notebook: standard normal, ten times as wide, which takes a long
        burn-in).
    fsgld_local_steps
        Of FSGLD, a visit (not released). Its surrogates are diagonal expansions at the mode.
    dg_local_steps, dg_tolerance_factor
        Of DG-SGLD (not released), whose tolerance is the factor over ``M_i``, the bound on the
        curvature of client i, and whose step size is Plassier et al.'s for it.
    """

    seed: int = 0
    source: str = "mnist"
    num_clients: int = 10
    scaling: str = "standard"
    prior_precision: float = 100.0
    smoothness_factor: float = 0.25
    step_size_factor: float = 0.2
    batch_fraction: float = 0.2
    refresh_every: int = 100
    bits: tuple[int, ...] = (2, 4, 8, 16)
    num_rounds: int = 500_000
    num_burnin: int = 50_000
    thinning: int = 100
    num_chains: int = 1
    fsgld_local_steps: int = 10
    dg_local_steps: int = 1
    dg_tolerance_factor: float = 10.0

    def __post_init__(self) -> None:
        require(self.source in SOURCES, f"source must be one of {', '.join(SOURCES)}", self.source)
        require(
            self.scaling in ("standard", "unit"),
            "scaling must be 'standard' or 'unit'",
            self.scaling,
        )
        counts = ("num_clients", "thinning", "refresh_every", "num_chains")
        checks.at_least(1, self, *counts, "fsgld_local_steps", "dg_local_steps")
        checks.positive(self, "prior_precision", "smoothness_factor", "dg_tolerance_factor")
        checks.rounds(self)
        draws = (self.num_rounds - self.num_burnin) // self.thinning
        require(
            self.num_chains > 1 or draws >= STRETCHES,
            f"num_chains must be two or more where fewer than {STRETCHES} draws are kept",
            self.num_chains,
        )
        checks.between(0, 1, self, "step_size_factor", "batch_fraction")
        checks.bits(self.bits)


Columns = tuple[jax.Array, ...]
"""A position: one vector ``[num_features]`` a class."""


def by_class(posterior: fedmcmc.Posterior) -> fedmcmc.Posterior:
    """Return a model of `logistic.multinomial` over one vector a class."""
    return fedmcmc.Posterior(
        logprior_fn=Partial(_columns_logprior, posterior.logprior_fn),
        loglikelihood_fn=Partial(_columns_terms, posterior.loglikelihood_fn),
    )


def _columns_logprior(logprior_fn: Callable[..., jax.Array], theta: Columns) -> jax.Array:
    return logprior_fn(jnp.stack(theta, axis=1))


def _columns_terms(
    loglikelihood_fn: Callable[..., jax.Array], theta: Columns, rows: Rows
) -> jax.Array:
    return loglikelihood_fn(jnp.stack(theta, axis=1), rows)


class Problem(NamedTuple):
    """The posterior, what to run on, and where from."""

    posterior: fedmcmc.Posterior
    data: fedmcmc.FederatedData
    centre: Columns  # the mode
    step_size: float


def problem(config: Config) -> Problem:
    """Load and split the digits, and find the mode."""
    federation = image_federations.digits(
        SOURCES[config.source](), config.num_clients, scaling=config.scaling
    )
    data = federation.data
    dim = data.rows.features.shape[1]
    posterior = by_class(logistic.multinomial(dim, NUM_CLASSES, config.prior_precision))
    zeros = tuple(jnp.zeros(dim) for _ in range(NUM_CLASSES))
    centre = fedmcmc.surrogates.mode(posterior, data, zeros).position
    smoothness = logistic.smoothness(
        np.asarray(data.rows.features), config.prior_precision, config.smoothness_factor
    )
    return Problem(posterior, data, centre, config.step_size_factor / smoothness)


def tied_settings(config: Config, given: Problem) -> dict[str, jax.Array]:
    """Return tolerances and step sizes of DG-SGLD."""
    return baselines.dg_settings(
        given.data, config.prior_precision, config.smoothness_factor, config.dg_tolerance_factor
    )


def kernels(
    config: Config, given: Problem
) -> list[tuple[str, int | None, fedmcmc.FederatedKernel]]:
    """Return the algorithms of Table 3, the reference first: name, bits, kernel."""
    posterior, step_size = given.posterior, given.step_size
    common: dict[str, Any] = dict(batch_size=config.batch_fraction)
    reduced = common | dict(step_size=step_size, refresh_every=config.refresh_every)
    plain = fedmcmc.lsd_pp(posterior, **reduced)
    found: list[tuple[str, int | None, fedmcmc.FederatedKernel]] = [
        ("LSD++", None, plain),
        (FLOOR, None, plain),
    ]
    surrogates = baselines.diagonal_surrogates(given.data, given.centre)
    steps = config.fsgld_local_steps
    relay = fedmcmc.fsgld(
        posterior, surrogates, step_size=step_size, num_local_steps=steps, **common
    )
    tied = tied_settings(config, given)
    consensus = fedmcmc.dg_sgld(posterior, num_local_steps=config.dg_local_steps, **tied, **common)
    found += [("FSGLD", None, relay), ("DG-SGLD", None, consensus)]
    for p in config.bits:
        compressor = fedmcmc.quantize(2**p, per_leaf=True)
        kernel = fedmcmc.qlsd_pp(posterior, compressor=compressor, **reduced)
        found.append((f"QLSD++, {p} bits", p, kernel))
    return found


def sample(config: Config, given: Problem, placement: Placement) -> list[Run]:
    """Run every algorithm and keep the potentials."""
    potential_fn = logistic.potential_fn(given.posterior, given.data)
    scale = config.prior_precision**-0.5

    def collect(state: fedmcmc.FederatedState, info: Any) -> jax.Array:
        del info
        return potential_fn(state.broadcast.position)

    def start(rng_key: jax.Array) -> Columns:
        keys = jax.random.split(rng_key, NUM_CLASSES)
        return tuple(
            c + scale * jax.random.normal(key, c.shape)
            for key, c in zip(keys, given.centre, strict=True)
        )

    key = jax.random.key(config.seed)
    return [
        run_kernel(
            name,
            p,
            kernel,
            jax.random.fold_in(key, int(name == FLOOR)),
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


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run every algorithm; write the figure."""
    given = problem(config)
    reference, *others = sample(config, given, placement)
    dim = given.centre[0].size
    lines = [row(each, reference.potential, reference.bits_up, dim) for each in others]
    curve = {each.name: curves(each.potential, reference.potential) for each in others}
    found = {
        "table": lines,
        "curves": curve,
        "compared_with": "LSD++",
        "another_key": FLOOR,
        "reference": reference.summary(),
        "dimension": dim * NUM_CLASSES,
        "num_draws": reference.potential.size,
        "settings": {
            "source": config.source,
            "step_size": given.step_size,
            "fsgld_local_steps": config.fsgld_local_steps,
            "dg_local_steps": config.dg_local_steps,
            **baselines.dg_bias(given.data, config.prior_precision, tied_settings(config, given)),
            "slow_rounds": 1 / (given.step_size * config.prior_precision),
            "kept_rounds": config.num_rounds - config.num_burnin,
            "num_chains": config.num_chains,
        },
    }
    return found | {"figures": draw(found, out)}
