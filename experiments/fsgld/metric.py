"""Bayesian metric learning on spoken letters: El Mekkaoui et al. (2021), section 5.2, figure 5."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import data
from experiments.fsgld import metric_scores, repetitions
from experiments.fsgld.metric_data import make_pairs, project
from experiments.fsgld.metric_model import make_posterior
from experiments.fsgld.metric_scores import draw
from fedmcmc import surrogates

__all__ = ["TITLE", "Config", "draw", "run"]

TITLE = "Section 5.2: metric learning"
SURROGATES = ("sampled", "laplace", "taylor")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's where it states them.

    It does not state `num_components`, `prior_scale`, `num_local_steps`, `num_rounds`,
    `num_burnin` and how the surrogates' samples were drawn. Its step size ``h = 1e-3`` is twice
    our `step_size`. A client's own likelihood is `num_shards` times flatter than the likelihood to
    the power ``1 / f_s`` that a visit of the relay sees; `surrogate_step_size` is larger by as
    much (``fsgld/metric_plain`` tries the relay's own, without thinning).
    `prior_fraction` of the prior, divided out again, keeps such shards from walking off.
    """

    seed: int = 0
    num_repetitions: int = 10
    num_shards: int = 10
    pairs_per_shard: int = 1000
    test_pairs: int = 1000
    num_components: int = 10
    prior_scale: float = 10.0
    step_size: float = 5e-4
    batch_size: int = 256
    num_local_steps: int = 10
    num_rounds: int = 5000
    num_burnin: int = 1000
    keep_every: int = 10
    surrogate: str = "sampled"
    num_surrogate_samples: int = 3000
    surrogate_step_size: float = 5e-3
    surrogate_thinning: int = 10
    prior_fraction: float = 0.1
    num_reference_draws: int = 500

    def __post_init__(self) -> None:
        least = {"seed": 0, "num_burnin": 0, "num_reference_draws": 0, "num_surrogate_samples": 2}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type is int and value < least.get(item.name, 1):
                raise ValueError(f"{item.name} must be at least {least.get(item.name, 1)}: {value}")
            if item.type is float and not value > 0:
                raise ValueError(f"{item.name} must be positive: {value}")
        if self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate must be one of {SURROGATES}: {self.surrogate!r}")
        if self.prior_fraction > 1:
            raise ValueError(f"prior_fraction must be at most 1: {self.prior_fraction}")
        if not 2 <= self.num_shards <= 13:
            raise ValueError(
                f"num_shards must lie in [2, 13], two of 26 letters each: {self.num_shards}"
            )
        if self.num_components > 617:
            raise ValueError(f"num_components must be at most 617: {self.num_components}")
        if self.pairs_per_shard % 2 or self.test_pairs % 2:
            raise ValueError("pairs_per_shard and test_pairs must be even, half of them similar")
        if self.num_burnin >= self.num_rounds:
            raise ValueError(f"num_burnin must be below num_rounds: {self.num_burnin}")
        if self.num_rounds % self.keep_every or self.num_burnin % self.keep_every:
            raise ValueError(f"keep_every must divide num_rounds and num_burnin: {self.keep_every}")


def run(config: Config, out: pathlib.Path) -> dict[str, Any]:
    """Run DSGLD and FSGLD on the same pairs; write figures and draws into `out`."""
    table = data.isolet()
    key = jax.random.key(config.seed)
    pair_key, fit_key, run_key, reference_key = jax.random.split(key, 4)
    keys = jax.random.split(pair_key, config.num_repetitions)
    projected = project(table, config.num_components)
    drawn = [
        make_pairs(
            k,
            projected,
            table.labels,
            num_shards=config.num_shards,
            pairs_per_shard=config.pairs_per_shard,
            test_pairs=config.test_pairs,
        )
        for k in keys
    ]
    federations = [fedmcmc.FederatedData.from_clients(shards) for shards, _ in drawn]
    test = repetitions.stack([pairs for _, pairs in drawn])
    draws = sample_both(config, federations, fit_key, run_key)
    learn = repetitions.stack([f.rows for f in federations])
    if config.num_reference_draws:
        draws["NUTS"] = metric_scores.reference_draws(
            reference_key, learn, config.num_reference_draws, config.prior_scale
        )
    burnin = dict.fromkeys(draws, config.num_burnin // config.keep_every) | {"NUTS": 0}
    scores = {name: metric_scores.score(d, learn, test, burnin[name]) for name, d in draws.items()}
    metrics = metric_scores.summarise(draws, scores, burnin)
    metrics["samples_a_chain"] = config.num_rounds * config.num_local_steps
    np.savez_compressed(
        out / "draws.npz",
        **{f"{name}_{site}": d[site] for name, d in draws.items() for site in d},
    )
    metrics["curves"] = metric_scores.curves(scores)
    metrics["burnin"] = burnin["FSGLD"]
    metrics["samples_a_draw"] = config.num_local_steps * config.keep_every
    return metrics | {"figures": draw(metrics, out)}


def fit(config: Config, data_: fedmcmc.FederatedData, rng_key: Array) -> fedmcmc.Gaussian:
    """Fit every client's dense surrogate as `config` says.

    The checks for improper likelihoods are off: the letters of some shards are nearly separable,
    and in their flat directions the paper's 3000 samples are few.
    """
    posterior = make_posterior(config.prior_scale)
    start = {"gamma": jnp.zeros(config.num_components), "mu": jnp.zeros(())}
    if config.surrogate == "taylor":
        centre = surrogates.mode(posterior, data_, start).position
        return surrogates.taylor(posterior, data_, centre)
    if config.surrogate == "laplace":
        return surrogates.laplace(
            rng_key,
            posterior,
            data_,
            position=start,
            prior_fraction=config.prior_fraction,
            check="ignore",
        )
    return surrogates.sampled(
        rng_key,
        posterior,
        data_,
        config.surrogate_step_size,
        config.num_surrogate_samples,
        structure="dense",
        position=start,
        batch_size=config.batch_size,
        thinning=config.surrogate_thinning,
        prior_fraction=config.prior_fraction,
        check="ignore",
    )


def sample_both(
    config: Config, federations: list[fedmcmc.FederatedData], fit_key: Array, run_key: Array
) -> dict[str, dict[str, np.ndarray]]:
    """Return draws ``[num_repetitions, num_kept, ...]`` of each method."""
    posterior = make_posterior(config.prior_scale)
    fit_keys = jax.random.split(fit_key, len(federations))
    fitted = repetitions.stack(
        [fit(config, f, k) for f, k in zip(federations, fit_keys, strict=True)]
    )
    lengths = (config.num_local_steps, config.batch_size)
    kernels = {
        "DSGLD": repetitions.Relay(False, *lengths),
        "FSGLD": repetitions.Relay(True, *lengths),
    }
    zeros = {
        "gamma": jnp.zeros((len(federations), config.num_components)),
        "mu": jnp.zeros(len(federations)),
    }
    return {
        name: repetitions.run(
            kernel_fn,
            (posterior, jnp.asarray(config.step_size)),
            fitted,
            repetitions.stack(federations),
            jax.random.split(run_key, len(federations)),
            zeros,
            num_kept=config.num_rounds // config.keep_every,
            keep_every=config.keep_every,
            collect=position_of,
        )
        for name, kernel_fn in kernels.items()
    }


def position_of(state: fedmcmc.FederatedState, info: fedmcmc.RoundInfo) -> Any:
    """Keep the position at the end of a round."""
    del info
    return state.broadcast.position
