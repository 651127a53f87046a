"""Errors of highest-posterior-density regions of a run against references.

``references`` of a config maps names to functions that return a `Reference`. What they leave out
they receive from the problem (`experiments.wiring.Supplies`) or from the run: ``num_rounds``,
``num_burnin``, ``thinning``, ``num_chains`` and ``start``.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial

import fedmcmc
from experiments import confidence, metrics, problems, setup, spreading, wiring
from experiments.qlsd import hpd
from experiments.tidy import Row, from_numbers

__all__ = ["Reference", "chains", "check", "mala", "rows"]

OF_RUN = ("num_rounds", "num_burnin", "thinning", "num_chains", "start")
DRAWS_AT_A_TIME = 64
COLUMNS = {
    "HPD error": "hpd_error",
    "s.e.": "hpd_error s.e.",
    "at published level": "hpd_error_at_published_level",
    "s.e. there": "hpd_error_at_published_level s.e.",
    "efficiency": "efficiency",
    "by bound, log2": "efficiency_by_bound_log2",
    "by bound, ln": "efficiency_by_bound_ln",
    "bits per round": "bits_per_round",
}


class Reference(NamedTuple):
    """Potentials ``[num_chains, num_draws]`` to compare with, the seed, and numbers for rows."""

    potential: np.ndarray
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
    experiments.qlsd.truth.NotConverged
        If R-hat or the effective sample size is insufficient.
    """
    from experiments.qlsd import truth  # imports BlackJAX, which starts JAX

    start_key, run_key = jax.random.split(jax.random.key(seed))
    mode, unravel = ravel_pytree(centre)
    noise = jax.random.normal(start_key, (num_chains, mode.size))
    exact = truth.mala(
        run_key,
        Partial(setup.potential, posterior, data.rows),
        jax.vmap(unravel)(mode + noise @ laplace_scale.T),
        step_size=mode.size ** (-1 / 3),  # Roberts and Rosenthal's order; the warm-up tunes it
        num_warmup=num_warmup,
        num_draws=num_draws,
        thinning=steps_per_draw,
        scale=laplace_scale,
    )
    summary = truth.require_converged(exact).summary()
    potential = exact.potential.astype(np.float64)
    return Reference(potential, seed, summary | _summary(potential))


def _summary(potential: np.ndarray) -> dict[str, float]:
    levels = {"threshold": 0.01, "threshold_at_published_level": hpd.PUBLISHED_ALPHA}
    thresholds = {
        name: float(fedmcmc.metrics.hpd_threshold(potential.ravel(), alpha))
        for name, alpha in levels.items()
    }
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
        spreading.key_of(seed),
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
    return Reference(potential, seed, counts | _summary(potential))


def potentials(posterior: Any, data: Any, draws: Any) -> np.ndarray:
    """Return minus the log density at draws, ``[num_chains, num_draws]``."""
    shape = np.shape(jax.tree.leaves(draws)[0])[:2]
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf).reshape(-1, *np.shape(leaf)[2:]), draws)
    at = Partial(setup.potential, posterior, data.rows)
    found = jax.jit(lambda at, x: jax.lax.map(at, x, batch_size=DRAWS_AT_A_TIME))(at, flat)
    return np.asarray(found, np.float64).reshape(shape)


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


def _reference(config: dict[str, Any], name: str, node: Any) -> Any:
    where = f"references.{name}"
    parts = (config["data"], config["model"], _node(config, node, where))
    return _load(*map(json.dumps, parts), where)


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
    found = [
        Row(name, metric, float(value), place, number, x)
        for name, place, number, x, metric, value in _measured(
            samples, problem, config, method, settings, seed
        )
        if value is not None
    ]
    return found + _predicted(samples, problem, config, method, settings, seed)


def _predicted(
    samples: Any,
    problem: Any,
    config: dict[str, Any],
    method: str,
    settings: Mapping[str, Any],
    seed: int,
) -> list[Row]:
    """Return what references report about their predictions, and distances to those of chains."""
    nodes = config.get("references") or {}
    loaded = {name: _reference(config, name, node) for name, node in nodes.items()}
    predictions = {k: v for k, v in loaded.items() if isinstance(v, confidence.Predictions)}
    found = [
        row
        for name, reference in predictions.items()
        for place, metric, value in reference.numbers
        for row in metrics.rows_at(name, {}, place, {metric: value}, seed)
    ]
    compares = any(each.compares for each in predictions.values())
    own = metrics.probabilities(samples, problem) if compares else None
    runs = [(k, {}, v.probabilities) for k, v in predictions.items() if not v.compares]
    for reference in predictions.values():
        for name, place, probabilities in [(method, settings, own), *runs]:
            if reference.compares and probabilities is not None:
                numbers = confidence.comparison(probabilities, reference.probabilities)
                found += from_numbers(name, place, numbers, seed)
    return found


def _measured(
    samples: Any,
    problem: Any,
    config: dict[str, Any],
    method: str,
    settings: Mapping[str, Any],
    seed: int,
) -> Iterator[tuple[str, Mapping[str, Any], int, float | None, str, float | None]]:
    nodes = config.get("references") or {}
    if not nodes:
        return
    run = None
    sizes = [leaf[0, 0].size for leaf in jax.tree.leaves(samples.draws)]
    plain_bits = 32.0 * sum(sizes) * problem.data.num_clients
    compressor = config["kernel"].get("compressor") or {}
    dimension = sizes[0] if compressor.get("per_leaf") else sum(sizes)
    for name, node in nodes.items():
        reference = _reference(config, name, node)
        if isinstance(reference, confidence.Predictions):
            continue
        run = run or _run(samples, problem, config, method)
        for metric, value in reference.summary.items():
            yield name, {}, reference.seed, None, metric, value
        if (name, reference.seed) == (method, seed):
            continue
        about = (method, {**settings, "reference": name}, seed)
        found = hpd.row(run, reference.potential, plain_bits, dimension)
        for column, metric in COLUMNS.items():
            yield *about, None, metric, found[column]
        yield *about, None, "sign_at_published_level", 1.0 if found["sign"] == "+" else -1.0
        curve = hpd.curves(run.potential, reference.potential)
        for probability, error in zip(curve["probability"], curve["error"], strict=True):
            yield *about, float(probability), "hpd_error_by_probability", error


def _run(samples: Any, problem: Any, config: dict[str, Any], method: str) -> hpd.Run:
    compressor = config["kernel"].get("compressor") or {}
    levels = compressor.get("num_levels")
    bits = None if levels is None else math.log2(levels)
    potential = potentials(problem.posterior, problem.data, samples.draws)
    per_round = np.mean(np.asarray(samples.totals["bits_up"]) / samples.totals["rounds"])
    return hpd.Run(method, bits, potential, float(per_round))
