"""Repetitions of DSGLD and FSGLD with other data each time, in one program, and their rows."""

import functools
from collections.abc import Mapping, Sequence
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

__all__ = ["points", "run", "sd_ratio", "stack", "summaries"]


def stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of equal structure, leaves ``[len(trees), ...]``."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@functools.partial(
    jax.jit, static_argnames=("num_local_steps", "batch_size", "num_rounds", "thinning", "collect")
)
def run(
    posterior: fedmcmc.Posterior,
    surrogates: fedmcmc.Gaussian | None,
    data: fedmcmc.FederatedData,
    rng_keys: Array,
    positions: Any,
    *,
    num_rounds: int,
    thinning: int,
    collect: Any = None,
    **kernel: Any,
) -> tuple[Any, Array]:
    """Return draws of FSGLD, or without surrogates of DSGLD, and the clients of their rounds.

    `surrogates`, `data`, `rng_keys` and `positions` have a leading axis of repetitions, draws
    ``[num_repetitions, num_draws]``. Other arguments are those of `fedmcmc.fsgld` and
    `fedmcmc.sample`.
    """
    memory = rounds.PREPARED_BYTES // rng_keys.shape[0]

    def one(surrogates: Any, data: Any, rng_key: Array, position: Any) -> tuple[Any, Array]:
        relay = fedmcmc.dsgld(posterior, **kernel)
        if surrogates is not None:
            relay = fedmcmc.fsgld(posterior, surrogates, **kernel)
        state = relay.init(fedmcmc.random.init_key(rng_key), position, data)
        settings: Any = dict(thinning=thinning, collect=collect, ahead_bytes=memory)
        _, records = rounds.run_rounds(relay, data, rng_key, state, num_rounds, **settings)

        def client_of(num: Array) -> Array:
            key = fedmcmc.random.cohort_key(rng_key, num)
            return relay.participation.prepare(key, data.num_clients).ids[0]

        return records.draws, jax.vmap(client_of)(jnp.arange(thinning - 1, num_rounds, thinning))

    return jax.vmap(one)(surrogates, data, rng_keys, positions)


def points(num: int) -> np.ndarray:
    """Return at most 100 of `num` indices, evenly spaced, the last one among them."""
    return np.unique(np.linspace(0, num - 1, min(num, 100)).astype(int))


def summaries(
    method: str,
    settings: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    by_seed: bool = True,
) -> list[Row]:
    """Return mean and deviation over the repetitions that are finite, and each, by metric."""
    found: list[Row] = []
    for metric, each in values.items():
        finite = each[np.isfinite(each)].astype(float)
        if finite.size:
            numbers = {f"mean_{metric}": mean_with_error(list(finite))}
            if finite.size > 1:
                numbers[f"{metric}_sd"] = Number(float(finite.std(ddof=1)))
            found += from_numbers(method, settings, numbers)
        for seed, value in enumerate(each if by_seed else ()):
            found += from_numbers(method, settings, {metric: value}, seed=seed)
    return found


def sd_ratio(metric: str, settings: Mapping[str, Any], one: Any, other: Any) -> list[Row]:
    """Return the ratio of the standard deviations of two methods on the same repetitions.

    The 95% interval inverts the test of Pitman (1939) and Morgan (1939): variances are equal if
    sums and differences of pairs are uncorrelated. With fewer than three pairs there are no rows.
    """
    both = np.isfinite(one) & np.isfinite(other)
    x, y, freedom = one[both].astype(float), other[both].astype(float), both.sum() - 2
    if freedom < 1:
        return []
    ratio = x.var(ddof=1) / y.var(ddof=1)
    width = 2 * (1 - np.corrcoef(x, y)[0, 1] ** 2) * stats.t.ppf(0.975, freedom) ** 2 / freedom
    factor = 1 + width + np.sqrt((1 + width) ** 2 - 1)
    squares = {"": ratio, "_low": ratio / factor, "_high": ratio * factor}
    numbers = {f"{metric}{end}": value**0.5 for end, value in squares.items()}
    return from_numbers("FSGLD / DSGLD", settings, numbers)
