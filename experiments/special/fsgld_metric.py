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
from experiments.tidy import Row, from_numbers

__all__ = ["rows", "taylor_at_mode"]

GAIN, RATIO = "FSGLD minus DSGLD", "FSGLD / DSGLD"
PAIRS = ("learning", "held_out")


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

    `surrogates` makes them from a key, the posterior, data and a start. NUTS has as many warm-up
    steps as draws; with zero it is left out. Curves include burn-in.
    """
    pair_key, fit_key, run_key, reference_key = jax.random.split(jax.random.key(seed), 4)
    table, sizes = tables.isolet(), dict(data)
    projected = shards.project(table.features, sizes.pop("num_components"))
    drawn = [
        shards.letter_pairs(key, projected, table.labels, **sizes)
        for key in jax.random.split(pair_key, num_repetitions)
    ]
    federation = repetitions.stack([clients for clients, _ in drawn])
    posterior = models.pair_metric(drawn[0][0], prior_scale)
    start = jax.tree.map(jnp.zeros_like, posterior.init_fn(fit_key))
    fitted = [
        surrogates(rng_key=key, posterior=posterior, data=clients, position=start)
        for key, (clients, _) in zip(jax.random.split(fit_key, len(drawn)), drawn, strict=True)
    ]
    draws = {}
    for method, chosen in (("DSGLD", None), ("FSGLD", repetitions.stack(fitted))):
        draws[method], _ = repetitions.run(
            *(posterior, chosen, federation, jax.random.split(run_key, len(drawn))),
            repetitions.stack([start] * len(drawn)),
            **dict(kernel, num_rounds=num_rounds, thinning=thinning),
        )
    if num_reference_draws:
        draws["NUTS"] = _nuts(
            reference_key, posterior, prior_scale, federation.rows, num_reference_draws
        )
    burnin = num_burnin // thinning
    pairs = {"learning": federation.rows, "held_out": repetitions.stack([p for _, p in drawn])}
    curves = {m: _curves(posterior, d, pairs, burnin * (m != "NUTS")) for m, d in draws.items()}
    samples = thinning * kernel["num_local_steps"] * (1 + np.arange(num_rounds // thinning))
    found = _finals(draws, curves, burnin)
    found += [row for pairs in PAIRS for row in _by_sample(pairs, curves, samples, burnin)]
    if thinning == 1 and not num_burnin:
        found += [row for pairs in PAIRS for row in _climbing(pairs, curves, samples)]
    return found


def taylor_at_mode(posterior: Any, data: Any, position: Any, **_: Any) -> fedmcmc.Gaussian:
    """Return second-order expansions of the clients' likelihoods at the posterior's mode."""
    mode = fedmcmc.surrogates.mode(posterior, data, position).position
    return fedmcmc.surrogates.taylor(posterior, data, mode)


def _nuts(
    rng_key: Array, posterior: Any, prior_scale: float, pairs: Any, num_draws: int
) -> dict[str, Array]:
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
    """Return scores of each draw, and of the average of predictions since the end of burn-in."""

    def of_repetition(both: Any) -> dict[str, Array]:
        found = {}
        for name in PAIRS:
            terms = jax.vmap(posterior.loglikelihood_fn, (0, None))(both[0], both[1][name])
            sums = jax.lax.cumlogsumexp(terms[burnin:], axis=0)
            running = sums - jnp.log(jnp.arange(1, len(sums) + 1))[:, None]
            found[f"{name}_log_likelihood"] = terms.mean(axis=1)
            found[f"{name}_predictive_log_likelihood"] = running.mean(axis=1)
            found[f"{name}_accuracy"] = (running > jnp.log(0.5)).mean(axis=1)
        return found

    return jax.tree.map(np.asarray, jax.lax.map(of_repetition, (draws, pairs)))


def _finals(draws: Any, curves: Mapping[str, Any], burnin: int) -> list[Row]:
    """Return the rows of one number per repetition and metric, which is NaN for lost chains."""
    values: dict[str, dict[str, np.ndarray]] = {}
    plain = [f"{pairs}_log_likelihood" for pairs in PAIRS]
    found: list[Row] = []
    for method, own in curves.items():
        first = 0 if method == "NUTS" else burnin
        last = {metric: curve[:, -1] for metric, curve in own.items()}
        last |= {metric: own[metric][:, first:].mean(axis=1) for metric in plain}
        if "NUTS" in draws and method != "NUTS":
            exact, chain = _flat(draws["NUTS"]), _flat(draws[method])[:, burnin:]
            gaps = np.abs(chain.mean(axis=1) - exact.mean(axis=1)) / exact.std(axis=1)
            last["worst_error_of_mean"] = gaps.max(axis=1)
        lost = ~np.isfinite([last[metric] for metric in plain]).all(axis=0)
        values[method] = {m: np.where(lost, np.nan, each) for m, each in last.items()}
        found += repetitions.summaries(method, {}, values[method])
        found += from_numbers(method, {}, {"diverged": lost.sum()})
    one, other = values["FSGLD"], values["DSGLD"]
    gains = {metric: one[metric] - other[metric] for metric in one}
    found += repetitions.summaries(GAIN, {}, gains, by_seed=False)
    for pairs, metric in zip(PAIRS, plain if "NUTS" in draws else (), strict=False):
        reference = values["NUTS"][metric] + 0 * gains[metric]  # of what neither method lost
        gaps = [values[method][metric] - reference for method in ("FSGLD", "DSGLD")]
        for method, gap in zip(("FSGLD", "DSGLD"), gaps, strict=True):
            summary = {f"{pairs}_gap_to_nuts": gap}
            found += repetitions.summaries(method, {}, summary, by_seed=False)
        found += repetitions.sd_ratio(f"{pairs}_gap_sd_ratio", {}, *gaps)
    return found


def _flat(draws: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([draws["gamma"], np.asarray(draws["mu"])[..., None]], axis=-1)


def _finite(curves: np.ndarray) -> np.ndarray:
    return curves[np.isfinite(curves).all(axis=1)]


def _by_sample(
    pairs: str, curves: Mapping[str, Any], samples: np.ndarray, burnin: int
) -> list[Row]:
    """Return means and deviations over repetitions by sample, of each draw and of averages."""
    found: list[Row] = []
    for metric in (f"{pairs}_log_likelihood", f"{pairs}_predictive_log_likelihood"):
        name, both = f"{metric}_by_sample", [curves[m][metric] for m in ("DSGLD", "FSGLD")]
        chosen = repetitions.points(both[0].shape[1])
        x = samples[len(samples) - both[0].shape[1] + chosen]  # averages begin after burn-in
        sds = []
        for method, each in zip(("DSGLD", "FSGLD", GAIN), [*both, both[1] - both[0]], strict=True):
            left = _finite(each[:, chosen])
            if len(left):
                sd = left.std(axis=0, ddof=1) if len(left) > 1 else np.zeros(len(x))
                sds += [sd] if len(left) == len(each) else []
                end, divisor = (" s.e.", len(left) ** 0.5) if method == GAIN else ("_sd", 1)
                for place, center, spread in zip(x, left.mean(axis=0), sd / divisor, strict=True):
                    numbers = {name: center, f"{name}{end}": spread}
                    found += from_numbers(method, {}, numbers, x=float(place))
        if "NUTS" in curves:
            level = curves["NUTS"][metric][:, -1 if "predictive" in metric else slice(None)].mean()
            found += from_numbers("NUTS", {}, {f"{name}_level": level})
        if len(sds) == 3 and "predictive" not in metric:
            share = (sds[1] < sds[0])[chosen >= burnin].mean()
            found += from_numbers(RATIO, {}, {f"{pairs}_smaller_bars_share": share})
    return found


def _climbing(pairs: str, curves: Mapping[str, Any], samples: np.ndarray) -> list[Row]:
    """Return when mean curves reach DSGLD's mean of its second half, and the lead until then."""
    both = {method: curves[method][f"{pairs}_log_likelihood"] for method in ("DSGLD", "FSGLD")}
    level = _finite(both["DSGLD"]).mean(axis=0)[len(samples) // 2 :].mean()
    latest, found = 0.0, []
    for method, own in both.items():
        above = _finite(own).mean(axis=0) > level
        reached = float(samples[above.argmax()]) if above.any() else math.inf
        found += from_numbers(method, {}, {f"{pairs}_samples_to_level_of_dsgld": reached})
        latest = max(latest, reached)
    lead = _finite(both["FSGLD"] - both["DSGLD"]).mean(axis=0)[samples <= latest].mean()
    return found + from_numbers(GAIN, {}, {f"{pairs}_mean_lead_while_climbing": lead})
