"""El Mekkaoui et al. (2021), 5.2: metric learning on spoken letters, other pairs each time."""

import math
from collections.abc import Callable, Mapping
from operator import itemgetter
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

PAIRS = ("learning", "held_out")
METHODS = ("FSGLD", "DSGLD")


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

    NUTS has as many warm-up steps as draws; with zero it is left out. Curves include burn-in.
    """
    pair_key, fit_key, run_key, reference_key = jax.random.split(jax.random.key(seed), 4)
    table, sizes = tables.isolet(), dict(data)
    projected = shards.project(table.features, sizes.pop("num_components"))
    keys = jax.random.split(pair_key, num_repetitions)
    drawn = [shards.letter_pairs(key, projected, table.labels, **sizes) for key in keys]
    clients, tests = zip(*drawn, strict=True)
    posterior = models.pair_metric(clients[0], prior_scale)
    starts = jax.tree.map(jnp.zeros_like, jax.vmap(posterior.init_fn)(keys))
    settings = dict(kernel, num_rounds=num_rounds, thinning=thinning)
    runs = repetitions.run(posterior, surrogates, clients, starts, fit_key, run_key, **settings)
    draws = {method: chains for method, (chains, _) in runs.items()}
    learning = repetitions.stack([client.rows for client in clients])
    pairs = dict(zip(PAIRS, (learning, repetitions.stack(tests)), strict=True))
    burnin = num_burnin // thinning
    curves = {method: _curves(posterior, x, pairs, burnin) for method, x in draws.items()}
    if num_reference_draws:
        sizes = dict(num_warmup=num_reference_draws, num_samples=num_reference_draws)
        draws["NUTS"] = _nuts(reference_key, posterior, prior_scale, learning, sizes)
        curves["NUTS"] = _curves(posterior, draws["NUTS"], pairs, 0)
    samples = thinning * kernel["num_local_steps"] * (1 + np.arange(num_rounds // thinning))
    return _finals(draws, curves, burnin) + _over_samples(curves, samples, burnin)


def taylor_at_mode(posterior: Any, data: Any, position: Any, **_: Any) -> fedmcmc.Gaussian:
    """Return second-order expansions of the clients' likelihoods at the posterior's mode."""
    mode = fedmcmc.surrogates.mode(posterior, data, position).position
    return fedmcmc.surrogates.taylor(posterior, data, mode)


def _nuts(rng_key: Array, posterior: Any, prior_scale: float, pairs: Any, sizes: Any) -> Any:
    """Draw from the posterior of all pairs by NUTS, a repetition at a time."""
    normal = dist.Normal(0.0, prior_scale)
    weights = normal.expand(pairs["features"].shape[-1:]).to_event(1)

    def model(pairs: Any) -> None:
        position = {"gamma": numpyro.sample("gamma", weights), "mu": numpyro.sample("mu", normal)}
        numpyro.factor("pairs", posterior.loglikelihood_fn(position, pairs).sum())

    kernel = numpyro.infer.NUTS(model)
    mcmc = numpyro.infer.MCMC(kernel, **sizes, progress_bar=False, jit_model_args=True)
    draws = []
    for i, key in enumerate(jax.random.split(rng_key, len(pairs["sign"]))):
        mcmc.run(key, jax.tree.map(itemgetter(i), pairs))
        draws.append(mcmc.get_samples())
    return repetitions.stack(draws)


def _curves(posterior: Any, draws: Any, pairs: Any, burnin: int) -> dict[str, np.ndarray]:
    """Return scores ``[num_repetitions, num_draws]`` of draws, and of averages over draws.

    Averages, called predictive, begin with the draw `burnin`.
    """

    def of_repetition(both: Any) -> dict[str, Array]:
        scores = {}
        for name, rows_ in both[1].items():
            terms = jax.vmap(posterior.loglikelihood_fn, (0, None))(both[0], rows_)
            sums = jax.lax.cumlogsumexp(terms[burnin:], axis=0).mean(axis=1)
            scores[f"{name}_log_likelihood"] = terms.mean(axis=1)
            number = jnp.arange(1, len(sums) + 1)
            scores[f"{name}_predictive_log_likelihood"] = sums - jnp.log(number)
        return scores

    curves = jax.lax.map(of_repetition, (draws, pairs))
    return {metric: np.asarray(curve, float) for metric, curve in curves.items()}


def _finals(draws: Mapping[str, Any], curves: Mapping[str, Any], burnin: int) -> list[Row]:
    """Return a number per repetition and metric, and how the methods differ."""
    numbers: dict[str, dict[str, np.ndarray]] = {}
    for method, scores in curves.items():
        start = burnin * (method != "NUTS")
        numbers[method] = {
            metric: curve[:, -1] if "predictive" in metric else curve[:, start:].mean(axis=1)
            for metric, curve in scores.items()
        }
    if "NUTS" not in draws:
        return repetitions.finals({}, numbers)[0]
    flat = {method: np.dstack([each["gamma"], each["mu"]]) for method, each in draws.items()}
    exact, sd = flat["NUTS"].mean(axis=1), flat["NUTS"].std(axis=1)
    metrics = {f"{pairs}_gap": f"{pairs}_log_likelihood" for pairs in PAIRS}
    for method in METHODS:
        error = np.abs(flat[method][:, burnin:].mean(axis=1) - exact) / sd
        numbers[method]["worst_error_of_mean"] = error.max(axis=1)
        for gap, metric in metrics.items():
            numbers[method][f"{gap}_to_nuts"] = numbers[method][metric] - numbers["NUTS"][metric]
    result, values = repetitions.finals({}, numbers)
    for gap in metrics:
        both = (values[method][f"{gap}_to_nuts"] for method in METHODS)
        result += repetitions.sd_ratio(f"{gap}_sd_ratio", {}, *both)
    return result


def _over_samples(curves: Mapping[str, Any], samples: np.ndarray, burnin: int) -> list[Row]:
    """Return means and deviations of curves over repetitions, and how they differ."""
    fsgld, dsgld = (curves[method] for method in METHODS)
    gain = {metric: curve - dsgld[metric] for metric, curve in fsgld.items()}
    result, means = list[Row](), dict[tuple[str, str], np.ndarray]()
    for method, scores in {"FSGLD": fsgld, "DSGLD": dsgld, GAIN: gain}.items():
        for metric, curve in scores.items():
            left = curve[np.isfinite(curve).all(axis=1)]
            if not len(left):
                continue
            mean, sd = left.mean(axis=0), left.std(axis=0, ddof=min(1, len(left) - 1))
            name = f"{metric}_by_sample"
            error = {f"{name} s.e.": sd / math.sqrt(len(left))}
            spread = error if method == GAIN else {f"{name}_sd": sd}
            # Averages have no points before the end of burn-in.
            x = samples[-left.shape[1] :]
            result += repetitions.by_x(method, {}, x, {name: mean, **spread})
            means[method, metric] = mean
    chosen = repetitions.points(len(samples))
    for pairs in PAIRS:
        metric = f"{pairs}_log_likelihood"
        if np.isfinite(gain[metric]).all():
            smaller = fsgld[metric].std(axis=0) < dsgld[metric].std(axis=0)
            share = {f"{pairs}_smaller_bars_share": smaller[chosen[chosen >= burnin]].mean()}
            result += from_numbers("FSGLD / DSGLD", {}, share)
        if burnin or (GAIN, metric) not in means:
            continue
        # Samples until mean curves reach the mean of DSGLD's second half, and the lead until then.
        level = means["DSGLD", metric][len(samples) // 2 :].mean()
        reached = [min(samples[means[m, metric] > level], default=math.inf) for m in METHODS]
        lead = means[GAIN, metric][samples <= max(reached)].mean()
        result += from_numbers(GAIN, {}, {f"{pairs}_mean_lead_while_climbing": lead})
        for method, place in zip(METHODS, reached, strict=True):
            result += from_numbers(method, {}, {f"{pairs}_samples_to_level_of_dsgld": place})
    return result
