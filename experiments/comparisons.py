"""Errors of a run against references: HPD regions (`hpd_error`) and variances (`variance_error`).

``references`` of a config maps names to functions that return a `Reference`. What they leave out
they receive from the problem (`experiments.wiring.Supplies`) or from the run: ``num_rounds``,
``num_burnin``, ``thinning``, ``num_chains`` and ``start``.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import confidence, metrics, problems, reference, setup, wiring
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits
from fedmcmc.metrics import hpd_error, hpd_threshold

__all__ = ["Reference", "chains", "check", "gap", "mala", "rows"]

OF_RUN = ("num_rounds", "num_burnin", "thinning", "num_chains", "start")
DRAWS_AT_A_TIME = 64
PUBLISHED_ALPHA = 0.5025
"""Level that the notebook of Vono et al. (2022) takes for 99 %: number 99 of 200 from 0.01 on."""
CURVE_ALPHAS = np.linspace(0.02, 0.98, 49)
STRETCHES = 10
"""Number of stretches of a single chain that stand in for chains."""


class Reference(NamedTuple):
    """Chains to compare with, and numbers for rows.

    With the seed of a run, chains share its noise, chain by chain.
    """

    potential: np.ndarray  # of the draws, [num_chains, num_draws]
    variances: np.ndarray  # of each coordinate, [num_chains, d]
    seed: int
    summary: dict[str, float]


def mala(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    centre: Any,
    laplace_scale: jax.Array,
    *,
    num_chains: int,
    num_warmup: int = 1000,
    num_draws: int = 5000,
    steps_per_draw: int = 5,
    seed: int = 1,
) -> Reference:
    """Run Metropolis-adjusted Langevin, preconditioned by the curvature at the mode.

    Raises
    ------
    experiments.reference.NotConverged
        If R-hat or the effective sample size is insufficient.
    """
    start_key, run_key = jax.random.split(jax.random.key(seed))
    mode, unravel = ravel_pytree(centre)
    noise = jax.random.normal(start_key, (num_chains, mode.size))
    exact = reference.mala(
        run_key,
        Partial(setup.potential, posterior, data.rows),
        jax.vmap(unravel)(mode + noise @ laplace_scale.T),
        laplace_scale,
        num_warmup=num_warmup,
        num_draws=num_draws,
        thinning=steps_per_draw,
    )
    summary = reference.require_converged(exact).summary()
    potential, draws = exact.potential.astype(np.float64), metrics.flat(exact.draws, 2)
    variances = ((draws - draws.mean((0, 1))) ** 2).mean(1)
    return Reference(potential, variances, seed, summary | _summary(potential))


def _summary(potential: np.ndarray) -> dict[str, float]:
    levels = {"threshold": 0.01, "threshold_at_published_level": PUBLISHED_ALPHA}
    thresholds = {name: _threshold(potential, alpha) for name, alpha in levels.items()}
    return {"potential": potential.mean(), "potential_sd": potential.std(), **thresholds}


def chains(
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    kernel: fedmcmc.FederatedKernel,
    start: Callable[[jax.Array], Any],
    *,
    num_rounds: int,
    num_burnin: int,
    thinning: int,
    num_chains: int,
    seed: int = 0,
) -> Reference:
    """Run another kernel; with the seed of a job it has the same starts and noise, by chain."""
    samples = fedmcmc.sample(
        jax.random.fold_in(jax.random.key(0), seed),
        kernel,
        data,
        start,
        num_rounds=num_rounds,
        num_burnin=num_burnin,
        thinning=thinning,
        num_chains=num_chains,
        progress=False,
    )
    potential = potentials(posterior, data, samples.draws)
    counts = {
        "kept_rounds": num_rounds - num_burnin,
        "num_draws": potential.size,
        "draws_beyond_threshold": 0.01 * potential.size,
    }
    variances = metrics.flat(samples.draws, 2).var(1)
    return Reference(potential, variances, seed, counts | _summary(potential))


def potentials(posterior: Any, data: Any, draws: Any) -> np.ndarray:
    """Return minus the log density at draws, ``[num_chains, num_draws]``."""
    shape = np.shape(jax.tree.leaves(draws)[0])[:2]
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1, *np.shape(leaf)[2:]), draws)
    potential_fn = Partial(setup.potential, posterior, data.rows)
    batched = jax.jit(lambda fn, x: jax.lax.map(fn, x, batch_size=DRAWS_AT_A_TIME))
    return np.asarray(batched(potential_fn, flat), np.float64).reshape(shape)


def check(config: dict[str, Any]) -> None:
    """Check names and types in the references of a config."""
    for name, node in (config.get("references") or {}).items():
        wiring.check(_node(config, node, f"references.{name}"), f"references.{name}")


def _node(config: dict[str, Any], node: dict[str, Any], where: str) -> dict[str, Any]:
    target = wiring.locate(node["_target_"], where)
    return {name: config[name] for name in OF_RUN if wiring.takes(target, (name,))} | node


@functools.lru_cache(maxsize=8)
def _load(data: str, model: str, node: str, where: str) -> Reference | confidence.Predictions:
    problem = problems.load({"data": json.loads(data), "model": json.loads(model)})
    reference: Any = wiring.build(json.loads(node), where, problem.supplies)
    return reference.predictions(problem) if hasattr(reference, "predictions") else reference


def rows(
    samples: Any,
    problem: Any,
    config: dict[str, Any],
    *,
    method: str,
    settings: Mapping[str, Any],
    seed: int,
) -> list[Row]:
    """Return errors against every reference in `config`, and what the references report.

    A reference of the same method and seed is the run itself and gives no errors.
    """
    table: list[Row] = []
    exact: Reference | None = None
    chosen, nodes = config.get("metrics") or ("hpd_error",), config.get("references") or {}
    loaded: dict[str, Any] = {}
    for name, node in nodes.items():
        where = f"references.{name}"
        parts = (config["data"], config["model"], _node(config, node, where))
        loaded[name] = _load(*map(json.dumps, parts), where)
    predictions = {k: v for k, v in loaded.items() if isinstance(v, confidence.Predictions)}
    if predictions:
        table += _predicted(predictions, samples, problem, (method, settings, seed))
    others = {k: v for k, v in loaded.items() if k not in predictions}
    if others and "hpd_error" in chosen:
        potential = potentials(problem.posterior, problem.data, samples.draws)
    for name, compared in others.items():
        exact = exact or compared
        table += from_numbers(name, {}, compared.summary, compared.seed)
        if (name, compared.seed) == (method, seed):
            continue
        place = {**settings, "reference": name}
        if "hpd_error" in chosen:
            numbers = _hpd_errors(potential, compared.potential) | _bits(samples, problem, config)
            table += from_numbers(method, place, numbers, seed)
            errors = hpd_error(potential.ravel(), compared.potential.ravel(), CURVE_ALPHAS)
            for alpha, error in zip(CURVE_ALPHAS, np.asarray(errors, np.float64), strict=True):
                curve = {"hpd_error_by_probability": error}
                table += from_numbers(method, place, curve, seed, 1 - alpha)
        if "variance_error" in chosen:
            variances, right = metrics.flat(samples.draws, 2).var(1), compared.variances.mean(0)
            if compared.seed == seed:  # chains share all noise except compression's
                added = (variances - compared.variances).mean(1) / exact.variances.mean()
                numbers = {"added_by_compression": mean_with_error(list(added))}
            else:
                lengths = np.linalg.norm(variances - right, axis=1)
                numbers = {
                    "variance_error": mean_with_error(list(lengths)),
                    f"variance_over_{name.lower()}": float(variances.mean() / right.mean()),
                }
                for i, length in enumerate(lengths):
                    repetition = {"variance_error_of_repetition": length}
                    table += from_numbers(method, place, repetition, i)
            table += from_numbers(method, place, numbers, seed)
    return table


def _predicted(
    predictions: Mapping[str, confidence.Predictions],
    samples: Any,
    problem: Any,
    about: tuple[str, Mapping[str, Any], int],
) -> list[Row]:
    """Return what references report about their predictions, and distances from those of chains."""
    method, settings, seed = about
    table = [
        row
        for name, each in predictions.items()
        for place, metric, value in each.numbers
        for row in metrics.rows_at(name, {}, place, {metric: value}, seed)
    ]
    compared = [(k, {}, v.probabilities) for k, v in predictions.items() if not v.compares]
    for right in [each for each in predictions.values() if each.compares]:
        run = (method, settings, metrics.probabilities(samples, problem))
        for name, place, probabilities in [run, *compared]:
            numbers = confidence.comparison(probabilities, right.probabilities)
            table += from_numbers(name, place, numbers, seed)
    return table


def _hpd_errors(potential: np.ndarray, reference: np.ndarray) -> dict[str, float | Number]:
    published = gap(potential, reference, PUBLISHED_ALPHA)
    return {
        "hpd_error": abs(gap(potential, reference)),
        "hpd_error_at_published_level": abs(published),
        "sign_at_published_level": 1.0 if published > 0 else -1.0,
    }


def gap(potential: np.ndarray, reference: np.ndarray, alpha: float = 0.01) -> Number:
    """Return the relative error of the threshold of the HPD region of ``1 - alpha``.

    The standard error is a jackknife over chains; those with the same number may depend on each
    other, and both have as many. A single chain is cut into `STRETCHES` of consecutive draws
    instead, which must be much longer than its autocorrelation.
    """
    apart = [x if len(x) > 1 else _stretches(x) for x in (potential, reference)]
    threshold, right = _threshold(potential, alpha), _threshold(reference, alpha)
    num = len(apart[0])
    left_out = np.empty(num)
    for chain in range(num):
        pair = (_threshold(np.delete(x, chain, axis=0), alpha) for x in apart)
        left_out[chain] = np.subtract(*pair) / abs(right)
    error = math.sqrt((num - 1) * left_out.var())
    return Number((threshold - right) / abs(right), error)


def _stretches(potential: np.ndarray) -> np.ndarray:
    """Return ``[STRETCHES, n]`` of a chain ``[1, num_draws]``, without what is left over."""
    length = potential.shape[1] // STRETCHES
    return potential[0, : STRETCHES * length].reshape(STRETCHES, length)


def _threshold(potential: np.ndarray, alpha: float) -> float:
    return float(hpd_threshold(potential.ravel(), alpha))


def _bits(samples: Any, problem: Any, config: dict[str, Any]) -> dict[str, float]:
    """Return bits of a round, counted, and how many times fewer than 32 per number they are."""
    per_round = float(np.mean(np.asarray(samples.totals["bits_up"]) / samples.totals["rounds"]))
    sizes = [leaf[0, 0].size for leaf in jax.tree.leaves(samples.draws)]
    bits = {
        "efficiency": 32.0 * sum(sizes) * problem.data.num_clients / per_round,
        "bits_per_round": per_round,
    }
    compressor = config["kernel"].get("compressor") or {}
    if "num_levels" in compressor:
        dimension = sizes[0] if compressor.get("per_leaf") else sum(sizes)
        for name, base in (("log2", "log2"), ("ln", "natural")):
            bound = float(bound_bits(dimension, compressor["num_levels"], base=base))
            bits[f"efficiency_by_bound_{name}"] = 32 * dimension / bound
    return bits
