"""El Mekkaoui et al. (2021), 5.2: metric learning on spoken letters, other pairs each time."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist

import fedmcmc
from experiments import data as tables
from experiments import models, shards
from experiments.special import fsgld_repetitions as repetitions
from experiments.special.fsgld_repetitions import GAIN
from experiments.tidy import Row, from_numbers

__all__ = ["rows", "taylor_at_mode"]

PAIRS = ("learning", "held_out")
SINGLE = [f"{pairs}_log_likelihood" for pairs in PAIRS]
"""Metrics of single draws; the others are of averages over draws since the end of burn-in."""


def rows(
    data: Mapping[str, int],
    prior_scale: float,
    kernel: Mapping[str, Any],
    surrogates: Callable[..., fedmcmc.Gaussian],
    num_repetitions: int,
    num_rounds: int,
    num_burnin: int,
    thinning: int,
    num_reference_draws: int,
    seed: int,
) -> list[Row]:
    """Return log likelihoods per pair under DSGLD, FSGLD and NUTS on pooled pairs.

    `surrogates` is as in `fsgld_repetitions.run`. NUTS has as many warm-up steps as draws; with
    zero it is left out. Curves include burn-in.
    """
    pair_key, fit_key, run_key, reference_key = jax.random.split(jax.random.key(seed), 4)
    table, sizes = tables.isolet(), dict(data)
    projected = shards.project(table.features, sizes.pop("num_components"))
    drawn = [
        shards.letter_pairs(key, projected, table.labels, **sizes)
        for key in jax.random.split(pair_key, num_repetitions)
    ]
    clients = [learning for learning, _ in drawn]
    posterior = models.pair_metric(clients[0], prior_scale)
    starts = [jax.tree.map(jnp.zeros_like, posterior.init_fn(fit_key))] * num_repetitions
    settings = dict(kernel, num_rounds=num_rounds, thinning=thinning)
    runs = repetitions.run(posterior, surrogates, clients, starts, fit_key, run_key, **settings)
    draws = {method: chains for method, (chains, _) in runs.items()}
    pairs = {
        "learning": repetitions.stack([client.rows for client in clients]),
        "held_out": repetitions.stack([test for _, test in drawn]),
    }
    if num_reference_draws:
        draws["NUTS"] = _nuts(
            reference_key, posterior, prior_scale, pairs["learning"], num_reference_draws
        )
    burnin = num_burnin // thinning
    curves = {m: _curves(posterior, d, pairs, burnin * (m != "NUTS")) for m, d in draws.items()}
    samples = thinning * kernel["num_local_steps"] * (1 + np.arange(num_rounds // thinning))
    result = _finals(draws, curves, burnin)
    for name in PAIRS:
        result += _by_sample(f"{name}_log_likelihood", curves, samples)
        result += _by_sample(f"{name}_predictive_log_likelihood", curves, samples)
        result += _spreads(name, curves, burnin)
        if thinning == 1 and not num_burnin:
            result += _climbing(name, curves, samples)
    return result


def taylor_at_mode(posterior: Any, data: Any, position: Any, **_: Any) -> fedmcmc.Gaussian:
    """Return second-order expansions of the clients' likelihoods at the posterior's mode."""
    mode = fedmcmc.surrogates.mode(posterior, data, position).position
    return fedmcmc.surrogates.taylor(posterior, data, mode)


def _nuts(rng_key: Array, posterior: Any, prior_scale: float, pairs: Any, num_draws: int) -> Any:
    """Draw from the posterior of all pairs by NUTS, a repetition at a time."""
    normal = dist.Normal(0.0, prior_scale)
    weights = normal.expand(pairs["features"].shape[-1:]).to_event(1)

    def model(pairs: Any) -> None:
        position = {"gamma": numpyro.sample("gamma", weights), "mu": numpyro.sample("mu", normal)}
        numpyro.factor("pairs", posterior.loglikelihood_fn(position, pairs).sum())

    kernel, sizes = numpyro.infer.NUTS(model), dict(num_warmup=num_draws, num_samples=num_draws)
    mcmc = numpyro.infer.MCMC(kernel, **sizes, progress_bar=False, jit_model_args=True)
    draws = []
    for i, key in enumerate(jax.random.split(rng_key, len(pairs["sign"]))):
        mcmc.run(key, jax.tree.map(lambda column, i=i: column[i], pairs))
        draws.append(mcmc.get_samples())
    return repetitions.stack(draws)


def _curves(posterior: Any, draws: Any, pairs: Any, burnin: int) -> dict[str, np.ndarray]:
    """Return scores ``[num_repetitions, num_draws]``; averages begin with the draw `burnin`."""

    def of_repetition(both: Any) -> dict[str, Array]:
        scores = {}
        for name, rows_ in both[1].items():
            terms = jax.vmap(posterior.loglikelihood_fn, (0, None))(both[0], rows_)
            sums = jax.lax.cumlogsumexp(terms[burnin:], axis=0)
            running = sums - jnp.log(jnp.arange(1, len(sums) + 1))[:, None]
            scores[f"{name}_log_likelihood"] = terms.mean(axis=1)
            scores[f"{name}_predictive_log_likelihood"] = running.mean(axis=1)
            scores[f"{name}_accuracy"] = (running > jnp.log(0.5)).mean(axis=1)
        return scores

    return jax.tree.map(np.asarray, jax.lax.map(of_repetition, (draws, pairs)))


def _finals(draws: Mapping[str, Any], curves: Mapping[str, Any], burnin: int) -> list[Row]:
    """Return a number per repetition and metric, NaN for lost chains, and what they differ by."""
    result: list[Row] = []
    values: dict[str, dict[str, np.ndarray]] = {}
    for method, scores in curves.items():
        start = burnin * (method != "NUTS")
        ends = {m: c[:, start:].mean(1) if m in SINGLE else c[:, -1] for m, c in scores.items()}
        if "NUTS" in draws and method != "NUTS":
            exact, chain = _flat(draws["NUTS"]), _flat(draws[method])[:, burnin:]
            error = np.abs(chain.mean(axis=1) - exact.mean(axis=1)) / exact.std(axis=1)
            ends["worst_error_of_mean"] = error.max(axis=1)
        lost = ~np.isfinite([ends[metric] for metric in SINGLE]).all(axis=0)
        values[method] = {m: np.where(lost, np.nan, each) for m, each in ends.items()}
        result += repetitions.summaries(method, {}, values[method])
        result += from_numbers(method, {}, {"diverged": lost.sum()})
    fsgld, dsgld = values["FSGLD"], values["DSGLD"]
    gains = {metric: fsgld[metric] - dsgld[metric] for metric in fsgld}
    result += repetitions.summaries(GAIN, {}, gains, by_seed=False)
    for pairs, metric in zip(PAIRS, SINGLE, strict=True):
        if "NUTS" in values:
            reference = values["NUTS"][metric] + 0 * gains[metric]  # where neither chain was lost
            gaps = {m: values[m][metric] - reference for m in ("FSGLD", "DSGLD")}
            for method, gap in gaps.items():
                gap_rows = {f"{pairs}_gap_to_nuts": gap}
                result += repetitions.summaries(method, {}, gap_rows, by_seed=False)
            result += repetitions.sd_ratio(f"{pairs}_gap_sd_ratio", {}, *gaps.values())
    return result


def _flat(draws: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([draws["gamma"], np.asarray(draws["mu"])[..., None]], axis=-1)


def _finite(metric: str, curves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the curves of both methods and of their difference, where chains were not lost."""
    both = {method: curves[method][metric] for method in ("DSGLD", "FSGLD")}
    both[GAIN] = both["FSGLD"] - both["DSGLD"]
    return {method: curve[np.isfinite(curve).all(axis=1)] for method, curve in both.items()}


def _by_sample(metric: str, curves: Mapping[str, Any], samples: np.ndarray) -> list[Row]:
    """Return means and deviations of curves over repetitions, by number of samples."""
    name, result = f"{metric}_by_sample", []
    for method, curve in _finite(metric, curves).items():
        if len(curve):
            chosen = repetitions.points(curve.shape[1])
            mean, sd = curve.mean(axis=0), curve.std(axis=0, ddof=min(1, len(curve) - 1))
            spread = {f"{name}_sd": sd}
            if method == GAIN:
                spread = {f"{name} s.e.": sd / math.sqrt(len(curve))}
            each = {key: values[chosen] for key, values in {name: mean, **spread}.items()}
            # Averages have no points before the end of burn-in.
            result += repetitions.by_x(method, {}, samples[chosen - curve.shape[1]], each)
    if "NUTS" in curves:
        curve = curves["NUTS"][metric]
        level = (curve if metric in SINGLE else curve[:, -1]).mean()
        result += from_numbers("NUTS", {}, {f"{name}_level": level})
    return result


def _spreads(pairs: str, curves: Mapping[str, Any], burnin: int) -> list[Row]:
    """Return at which share of points after burn-in FSGLD has the smaller deviation."""
    left = _finite(f"{pairs}_log_likelihood", curves)
    if len(left[GAIN]) < len(curves["DSGLD"][f"{pairs}_log_likelihood"]):
        return []
    chosen = repetitions.points(left[GAIN].shape[1])
    smaller = left["FSGLD"].std(axis=0) < left["DSGLD"].std(axis=0)
    share = {f"{pairs}_smaller_bars_share": smaller[chosen[chosen >= burnin]].mean()}
    return from_numbers("FSGLD / DSGLD", {}, share)


def _climbing(pairs: str, curves: Mapping[str, Any], samples: np.ndarray) -> list[Row]:
    """Return when mean curves reach DSGLD's mean of its second half, and the lead until then."""
    left = _finite(f"{pairs}_log_likelihood", curves)
    means = {method: curve.mean(axis=0) for method, curve in left.items()}
    level = means["DSGLD"][len(samples) // 2 :].mean()
    above = {method: samples[means[method] > level] for method in ("DSGLD", "FSGLD")}
    reached = {method: np.append(x, math.inf)[0] for method, x in above.items()}
    lead = means[GAIN][samples <= max(reached.values())].mean()
    result = from_numbers(GAIN, {}, {f"{pairs}_mean_lead_while_climbing": lead})
    for method, place in reached.items():
        result += from_numbers(method, {}, {f"{pairs}_samples_to_level_of_dsgld": place})
    return result
