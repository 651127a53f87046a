"""Repetitions of DSGLD and FSGLD with other data each time, in one program, and their rows."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import fedmcmc
from experiments import claims
from experiments.tidy import Row, from_numbers
from fedmcmc import rounds

GAIN = "FSGLD minus DSGLD"


def stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of equal structure, leaves ``[len(trees), ...]``."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def run(
    posterior: fedmcmc.Posterior,
    surrogates: Callable[..., fedmcmc.Gaussian],
    clients: Sequence[fedmcmc.FederatedData],
    starts: Any,
    fit_key: Array,
    run_key: Array,
    num_rounds: int,
    thinning: int,
    collect: Any = None,
    pooled: bool = False,
    **kernel: Any,
) -> dict[str, tuple[Any, Array]]:
    """Return draws ``[num_repetitions, num_draws, ...]`` and the clients visited, by method.

    `surrogates` makes them of a key, the posterior, data and a start; `starts` has leaves
    ``[num_repetitions, ...]``. `kernel` are arguments of `fedmcmc.dsgld`. With `pooled` there is
    SGLD on all rows too.
    """
    fit_keys, keys = (jax.random.split(key, len(clients)) for key in (fit_key, run_key))
    fitted = [
        surrogates(rng_key=fit_keys[i], posterior=posterior, data=data, position=start)
        for i, data in enumerate(clients)
        for start in [jax.tree.map(itemgetter(i), starts)]
    ]

    def relay(posterior: Any, rng_key: Array, position: Any, data: Any, surrogates: Any) -> Any:
        chain = fedmcmc.dsgld(posterior, **kernel)
        if surrogates is not None:
            chain = fedmcmc.fsgld(posterior, surrogates, **kernel)
        state = chain.init(fedmcmc.random.init_key(rng_key), position, data)
        options = dict(thinning=thinning, collect=collect)
        _, records = rounds.run_rounds(chain, data, rng_key, state, num_rounds, **options)

        def client_of(num: Array) -> Array:
            key = fedmcmc.random.cohort_key(rng_key, num)
            return chain.participation.prepare(key, data.num_clients).ids[0]

        return records.draws, jax.vmap(client_of)(jnp.arange(thinning - 1, num_rounds, thinning))

    relays = jax.jit(jax.vmap(relay, in_axes=(None, 0, 0, 0, 0)))
    federated = stack(clients)
    methods = {"DSGLD": (federated, None), "FSGLD": (federated, stack(fitted))}
    if pooled:
        methods["pooled SGLD"] = (stack([data.pooled() for data in clients]), None)
    return {name: relays(posterior, keys, starts, *both) for name, both in methods.items()}


def points(num: int) -> np.ndarray:
    """Return at most 100 of `num` indices, evenly spaced, the last one among them."""
    return np.linspace(0, num - 1, min(num, 100)).astype(int)


def by_x(method: str, settings: Any, x: np.ndarray, curves: Mapping[str, Any]) -> list[Row]:
    """Return the rows of curves, by name of the metric, at some `points` of `x`."""
    result: list[Row] = []
    for i in points(len(x)):
        numbers = {metric: curve[i] for metric, curve in curves.items()}
        result += from_numbers(method, settings, numbers, x=float(x[i]))
    return result


def finals(
    settings: Mapping[str, Any], numbers: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[list[Row], dict[str, dict[str, np.ndarray]]]:
    """Return rows of numbers of each repetition, by method and metric, and the numbers.

    All numbers of a chain are NaN if one is not finite. Rows have means over the other repetitions,
    also of the differences between FSGLD and DSGLD.
    """
    rows: list[Row] = []
    values: dict[str, dict[str, np.ndarray]] = {}
    for method, scores in numbers.items():
        lost = ~np.isfinite(sum(scores.values()))
        values[method] = {metric: np.where(lost, np.nan, each) for metric, each in scores.items()}
        rows += from_numbers(method, settings, {"diverged": lost.sum()})
        for seed in range(len(lost)):
            of_seed = {metric: each[seed] for metric, each in values[method].items()}
            rows += from_numbers(method, settings, of_seed, seed)
    values[GAIN] = {m: each - values["DSGLD"][m] for m, each in values["FSGLD"].items()}
    for method, scores in values.items():
        means = {f"mean_{metric}": claims.mean(list(each)) for metric, each in scores.items()}
        rows += from_numbers(method, settings, means)
    return rows, values


def sd_ratio(metric: str, settings: Mapping[str, Any], x: Any, y: Any) -> list[Row]:
    """Return the ratio of two standard deviations over repetitions with its 95% interval.

    The interval inverts the test of Pitman (1939) and Morgan (1939): variances are equal if sums
    and differences of pairs are uncorrelated. With fewer than three pairs there are no rows.
    """
    both = np.isfinite(x) & np.isfinite(y)
    x, y, freedom = x[both], y[both], both.sum() - 2
    if freedom < 1:
        return []
    ratio = x.std(ddof=1) / y.std(ddof=1)
    width = 2 * (1 - np.corrcoef(x, y)[0, 1] ** 2) * stats.t.ppf(0.975, freedom) ** 2 / freedom
    factor = np.exp(np.arccosh(1 + width) / 2)
    numbers = {metric: ratio, f"{metric}_low": ratio / factor, f"{metric}_high": ratio * factor}
    return from_numbers("FSGLD / DSGLD", settings, numbers)
