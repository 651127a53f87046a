"""Repetitions of DSGLD and FSGLD with other data each time, in one program, and their rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import fedmcmc
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
from experiments.tidy import Row, from_numbers
from fedmcmc import rounds

__all__ = ["GAIN", "by_x", "points", "run", "sd_ratio", "stack", "summaries"]

GAIN = "FSGLD minus DSGLD"


def stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of equal structure, leaves ``[len(trees), ...]``."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def run(
    posterior: fedmcmc.Posterior,
    surrogates: Callable[..., fedmcmc.Gaussian],
    clients: Sequence[fedmcmc.FederatedData],
    starts: Sequence[Any],
    fit_key: Array,
    run_key: Array,
    pooled: bool = False,
    **settings: Any,
) -> dict[str, tuple[Any, Array]]:
    """Return draws ``[num_repetitions, num_draws, ...]`` and the clients visited, by method.

    `surrogates` makes them of a key, the posterior, data and a start. `settings` are arguments of
    `fedmcmc.dsgld` and `fedmcmc.sample`. With `pooled` there is SGLD on all rows too.
    """
    fit_keys, keys = (jax.random.split(key, len(clients)) for key in (fit_key, run_key))
    fitted = [
        surrogates(rng_key=key, posterior=posterior, data=client, position=start)
        for key, client, start in zip(fit_keys, clients, starts, strict=True)
    ]
    data, positions = stack(clients), stack(starts)
    relay = functools.partial(_relay, posterior, keys, positions, **settings)
    result = {"DSGLD": relay(data, None), "FSGLD": relay(data, stack(fitted))}
    if pooled:
        result["pooled SGLD"] = relay(stack([client.pooled() for client in clients]), None)
    return result


@functools.partial(
    jax.jit, static_argnames=("num_local_steps", "batch_size", "num_rounds", "thinning", "collect")
)
def _relay(
    posterior: fedmcmc.Posterior,
    rng_keys: Array,
    positions: Any,
    data: fedmcmc.FederatedData,
    surrogates: fedmcmc.Gaussian | None,
    *,
    num_rounds: int,
    thinning: int,
    collect: Any = None,
    **kernel: Any,
) -> tuple[Any, Array]:
    options: Any = dict(thinning=thinning, collect=collect)
    options["ahead_bytes"] = rounds.PREPARED_BYTES // len(rng_keys)

    def sample(rng_key: Array, position: Any, data: Any, surrogates: Any) -> tuple[Any, Array]:
        relay = fedmcmc.dsgld(posterior, **kernel)
        if surrogates is not None:
            relay = fedmcmc.fsgld(posterior, surrogates, **kernel)
        state = relay.init(fedmcmc.random.init_key(rng_key), position, data)
        _, records = rounds.run_rounds(relay, data, rng_key, state, num_rounds, **options)

        def client_of(num: Array) -> Array:
            key = fedmcmc.random.cohort_key(rng_key, num)
            return relay.participation.prepare(key, data.num_clients).ids[0]

        return records.draws, jax.vmap(client_of)(jnp.arange(thinning - 1, num_rounds, thinning))

    return jax.vmap(sample)(rng_keys, positions, data, surrogates)


def points(num: int) -> np.ndarray:
    """Return at most 100 of `num` indices, evenly spaced, the last one among them."""
    return np.unique(np.linspace(0, num - 1, min(num, 100)).astype(int))


def by_x(method: str, settings: Any, x: np.ndarray, curves: Mapping[str, np.ndarray]) -> list[Row]:
    """Return the rows of curves, by name of the metric, at `x`."""
    result: list[Row] = []
    for i, place in enumerate(x):
        numbers = {metric: curve[i] for metric, curve in curves.items()}
        result += from_numbers(method, settings, numbers, x=float(place))
    return result


def summaries(
    method: str, settings: Any, values: Mapping[str, np.ndarray], by_seed: bool = True
) -> list[Row]:
    """Return mean and deviation over the repetitions that are finite, and each, by metric."""
    result: list[Row] = []
    for metric, each in values.items():
        finite = each[np.isfinite(each)].astype(float)
        numbers = {f"mean_{metric}": mean_with_error(list(finite))} if finite.size else {}
        if finite.size > 1:
            numbers[f"{metric}_sd"] = Number(float(finite.std(ddof=1)))
        result += from_numbers(method, settings, numbers)
        for seed, value in enumerate(each if by_seed else ()):
            result += from_numbers(method, settings, {metric: value}, seed=seed)
    return result


def sd_ratio(metric: str, settings: Mapping[str, Any], x: Any, y: Any) -> list[Row]:
    """Return the ratio of two standard deviations over repetitions with its 95% interval.

    The interval inverts the test of Pitman (1939) and Morgan (1939): variances are equal if sums
    and differences of pairs are uncorrelated. With fewer than three pairs there are no rows.
    """
    both = np.isfinite(x) & np.isfinite(y)
    x, y, freedom = x[both].astype(float), y[both].astype(float), both.sum() - 2
    if freedom < 1:
        return []
    ratio = x.var(ddof=1) / y.var(ddof=1)
    width = 2 * (1 - np.corrcoef(x, y)[0, 1] ** 2) * stats.t.ppf(0.975, freedom) ** 2 / freedom
    factor = 1 + width + np.sqrt((1 + width) ** 2 - 1)
    squares = {"": ratio, "_low": ratio / factor, "_high": ratio * factor}
    numbers = {f"{metric}{end}": value**0.5 for end, value in squares.items()}
    return from_numbers("FSGLD / DSGLD", settings, numbers)
