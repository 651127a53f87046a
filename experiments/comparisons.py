"""Errors of a run against references: HPD regions (`hpd_error`) and variances (`variance_error`).

``references`` of a config maps names to functions that return an `experiments.reference.Reference`.
What they leave out they receive from the problem (`experiments.wiring.Supplies`) or from the run:
``num_rounds``, ``num_burnin``, ``thinning``, ``num_chains`` and ``start``. If the config's metrics
have neither of the two errors, predictions of classes are compared instead.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import confidence, metrics, problems, reference, setup, wiring
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
from experiments.reference import Reference, flat
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits
from fedmcmc.metrics import hpd_error, potential

OF_RUN = ("num_rounds", "num_burnin", "thinning", "num_chains", "start")
MALA_SEED = 1  # other noise than in jobs
MALA_ACCEPTANCE = 0.574  # the best one in high dimensions (Roberts and Rosenthal 1998)
DRAWS_AT_A_TIME = 64
CURVE_ALPHAS = np.linspace(0.02, 0.98, 49)
STRETCHES = 10  # parts of a single chain, in place of chains


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
) -> Reference:
    """Run Metropolis-adjusted Langevin: Hamiltonian Monte Carlo with one leapfrog step.

    Chains are preconditioned by the curvature at the mode; the warm-up tunes the step size. The
    result reports Langevin's step size: half of the square of a leapfrog step.
    """
    start_key, run_key = jax.random.split(jax.random.key(MALA_SEED))
    mode, unravel = ravel_pytree(centre)
    noise = jax.random.normal(start_key, (num_chains, mode.size))
    positions = jax.vmap(unravel)(mode + noise @ laplace_scale.T)
    counts = dict(num_warmup=num_warmup, num_draws=num_draws, thinning=steps_per_draw, num_steps=1)
    exact = reference.hmc(
        run_key,
        Partial(setup.potential, posterior, data.rows),
        positions,
        **counts,
        target_accept_prob=MALA_ACCEPTANCE,
        inverse_mass_matrix=laplace_scale @ laplace_scale.T,
        dense_mass=True,
        adapt_mass_matrix=False,
    )
    summary = reference.require_converged(exact).summary
    step_size = {"step_size": summary["step_size"] ** 2 / 2}
    return Reference(exact.draws, summary | step_size, MALA_SEED)


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
) -> Reference:
    """Run another kernel; jobs with the seed 0 have the same starts and noise, by chain."""
    key = jax.random.fold_in(jax.random.key(0), 0)
    counts: Any = dict(num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
    counts |= dict(num_chains=num_chains, progress=False)
    samples = fedmcmc.sample(key, kernel, data, start, **counts)
    num_draws = num_chains * ((num_rounds - num_burnin) // thinning)
    return Reference(samples.draws, {"draws_beyond_threshold": 0.01 * num_draws})


def check(config: dict[str, Any]) -> None:
    """Check names and types in the references of a config."""
    for name, node in (config.get("references") or {}).items():
        wiring.check(_node(config, node, f"references.{name}"), f"references.{name}")


def _node(config: dict[str, Any], node: dict[str, Any], where: str) -> dict[str, Any]:
    target = wiring.locate(node["_target_"], where)
    return {name: config[name] for name in OF_RUN if wiring.takes(target, (name,))} | node


def _potentials(problem: Any, draws: Any) -> np.ndarray:
    """Return minus the log density at draws, ``[num_chains, num_draws]``."""
    counts = dict(sample_axes=2, batch_size=DRAWS_AT_A_TIME)
    return np.asarray(potential(problem.posterior, problem.data, draws, **counts), np.float64)


@lru_cache(maxsize=8)
def _load(data: str, model: str, node: str, where: str, *, predicts: bool) -> tuple[Reference, Any]:
    """Return a reference with its predictions or potentials; jobs of one process share them."""
    problem = problems.load({"data": json.loads(data), "model": json.loads(model)})
    exact = wiring.build(json.loads(node), where, problem)
    if predicts:
        return exact, confidence.predictions_of(problem, exact)
    return exact, _potentials(problem, exact.draws)


def rows(
    samples: Any, problem: Any, config: dict[str, Any], *, method: str, settings: Any, seed: int
) -> list[Row]:
    """Return errors against every reference in `config`, and the numbers of the references.

    A reference of the same method and seed is the run itself and gives no errors.
    """
    nodes, chosen = config.get("references") or {}, config.get("metrics") or ("hpd_error",)
    predicts = not {*chosen} & {*metrics.OF_REFERENCES}
    loaded: dict[str, tuple[Reference, Any]] = {}
    for name, node in nodes.items():
        where = f"references.{name}"
        parts = (config["data"], config["model"], _node(config, node, where))
        loaded[name] = _load(*map(json.dumps, parts), where, predicts=predicts)
    if not loaded:
        return []
    if predicts:
        predicted = metrics.predictions(samples, problem)
        return _compare_predictions(loaded, (method, settings, predicted), seed)
    table: list[Row] = []
    potentials = _potentials(problem, samples.draws) if "hpd_error" in chosen else None
    draws, scale = (flat(x, 2) for x in (samples.draws, next(iter(loaded.values()))[0].draws))
    for name, (exact, right) in loaded.items():
        table += from_numbers(name, {}, exact.summary | {"potential_sd": right.std()}, exact.seed)
        if (name, exact.seed) == (method, seed):
            continue
        place = {**settings, "reference": name}
        if "hpd_error" in chosen:
            numbers = {"hpd_error": abs(gap(potentials, right))} | _bits(samples, problem, config)
            table += from_numbers(method, place, numbers, seed)
            errors = hpd_error(potentials.ravel(), right.ravel(), CURVE_ALPHAS)
            for x, error in zip(1 - CURVE_ALPHAS, np.asarray(errors, np.float64), strict=True):
                table += from_numbers(method, place, {"hpd_error_by_probability": error}, seed, x)
        if "variance_error" in chosen:
            exact_draws = flat(exact.draws, 2)
            if exact.seed == seed:  # chains share all noise except compression's
                added = (draws.var(1) - exact_draws.var(1)).mean(1) / scale.var((0, 1)).mean()
                numbers = {"added_by_compression": mean_with_error(list(added))}
            else:
                variances = exact_draws.var((0, 1))
                lengths = np.linalg.norm(draws.var(1) - variances, axis=1)
                ratio = draws.var(1).mean() / variances.mean()
                numbers = {"variance_error": mean_with_error(list(lengths))}
                numbers |= {f"variance_over_{name.lower()}": ratio}
                for i, length in enumerate(lengths):
                    of_chain = {"variance_error_of_repetition": length}
                    table += from_numbers(method, place, of_chain, i)
            table += from_numbers(method, place, numbers, seed)
    return table


def _compare_predictions(
    loaded: Mapping[str, tuple[Reference, Any]], run: tuple[str, Any, np.ndarray], seed: int
) -> list[Row]:
    """Return numbers of references, and distances from those with several chains."""
    table: list[Row] = []
    compared, exact = [run], []
    for name, (draws, (probabilities, numbers)) in loaded.items():
        for place, metric, value in numbers:
            table += from_numbers(name, place, {metric: value}, seed)
        several = len(jax.tree.leaves(draws.draws)[0]) > 1
        (exact if several else compared).append((name, {}, probabilities))
    for *_, right in exact:
        for name, place, probabilities in compared:
            table += from_numbers(name, place, confidence.comparison(probabilities, right), seed)
    return table


def gap(potentials: np.ndarray, reference: np.ndarray, alpha: float = 0.01) -> Number:
    """Return the relative error of the threshold of the HPD region of ``1 - alpha``.

    The standard error is a jackknife over chains; those with the same number may depend on each
    other, and both have as many. A single chain is cut into `STRETCHES` of consecutive draws
    instead, which must be much longer than its autocorrelation.
    """
    threshold, right = (np.quantile(x, 1 - alpha) for x in (potentials, reference))
    without = []
    for x in (potentials, reference):
        num = x.shape[1] // STRETCHES * STRETCHES
        parts = x if len(x) > 1 else x[:, :num].reshape(STRETCHES, -1)
        deleted = [np.delete(parts, i, axis=0) for i in range(len(parts))]
        without.append(np.quantile(deleted, 1 - alpha, axis=(1, 2)))
    left_out = np.subtract(*without) / abs(right)
    error = math.sqrt((len(left_out) - 1) * left_out.var())
    return Number((threshold - right) / abs(right), error)


def _bits(samples: Any, problem: Any, config: dict[str, Any]) -> dict[str, float]:
    """Return how many times fewer than 32 per number bits are, counted and by Vono's bound."""
    per_round = np.mean(np.asarray(samples.totals["bits_up"]) / samples.totals["rounds"])
    sizes = [leaf[0, 0].size for leaf in jax.tree.leaves(samples.draws)]
    bits = {"efficiency": 32.0 * sum(sizes) * problem.data.num_clients / float(per_round)}
    compressor = config["kernel"].get("compressor") or {}
    if "num_levels" in compressor:
        dimension = sizes[0] if compressor.get("per_leaf") else sum(sizes)
        bound = bound_bits(dimension, compressor["num_levels"], base="natural")
        bits["efficiency_by_bound_ln"] = 32 * dimension / float(bound)
    return bits
