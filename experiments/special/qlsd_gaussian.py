"""Vono et al. (2022), Figures 1, S1 and S2: a Gaussian mean, errors against bits.

The draws of a run are too many to keep: each algorithm leaves errors of its running averages.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import claims, loaders, models
from experiments.special.fsgld_repetitions import by_x
from experiments.special.qlsd_bias import Law, centered_variance, stationary_variance
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits

__all__ = ["average_error", "rows"]

RELEASED_STEP = 0.01
"""Step size of the released notebook, in units of ours; its minibatches are single rows."""


def rows(
    num_clients: int,
    dim: int,
    step_size_factor: float,
    batch_fraction: float,
    bits: Sequence[int],
    num_rounds: int,
    num_burnin: int,
    thinning: int,
    num_chains: int,
    budget: float,
    budget_levels: int,
    budget_factors: Sequence[float],
    seed: int,
) -> list[Row]:
    """Return errors of QLSD (with the fewest and most bits), QLSD* and LSD*, and of a budget.

    Clients are those of `experiments.loaders.gaussian`. Step sizes are in units of one over the
    number of rows, below 2 for stable chains; compressors have ``2**p`` levels for `p` in `bits`.
    In Figure S2 a client sends `budget` bits, with `budget_levels` numbers of levels from 1 to
    10,000 and step sizes from the largest to the smallest.
    """
    data, _ = loaders.gaussian(num_clients, dim)
    posterior = models.gaussian(data, 0.0)
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    center, unit = jnp.asarray(mean, jnp.float32), 1 / data.num_rows

    kernels: dict[str, Any] = {
        "QLSD": partial(fedmcmc.qlsd, posterior),
        "QLSD*": partial(fedmcmc.qlsd_star, posterior, center),
        "LSD*": partial(fedmcmc.lsd_star, posterior, center),
    }

    def run(key: Any, method: str, factor: float, levels: int, start: Any, **lengths: int) -> Any:
        """Return distances of draws from the mean, and the bits of a message."""
        compressor = {"compressor": fedmcmc.quantize(levels)} if levels else {}
        kernel = kernels[method](step_size=factor * unit, batch_size=batch_fraction, **compressor)
        lengths |= dict(num_chains=num_chains)
        samples = fedmcmc.sample(key, kernel, data, start, progress=False, **lengths)
        counted = np.asarray(samples.info["bits_up"], np.float64).mean() / num_clients
        return np.asarray(samples.draws, np.float64) - mean, float(counted)

    # Figure S1
    client_rows = [data.client_rows(i)["y"] for i in range(num_clients)]
    spread = np.std([x.mean(axis=0) for x in client_rows], axis=0, ddof=1).mean()
    within = np.sqrt(np.mean([x.var(axis=0, ddof=1) for x in client_rows]))
    table = from_numbers("data", {}, {"spread_of_means_over_spread_of_rows": spread / within})
    for i, x in enumerate(client_rows, start=1):
        table += from_numbers("data", {"client": i}, {"rows": len(x)})
    table += from_numbers("posterior", {}, {"variance": unit})
    table += from_numbers("all", {}, {"dim": dim})

    # Figure 1
    algorithms = [("QLSD", p) for p in dict.fromkeys((bits[0], bits[-1]))]
    algorithms += [("QLSD*", p) for p in bits]
    curves: dict[str, list[Any]] = {"QLSD": [], "QLSD*": [], "LSD*": []}
    lengths = dict(num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
    for number, (method, p) in enumerate([*algorithms, ("LSD*", 0)]):
        levels, place = (2**p, {"bits": p}) if p else (0, {})
        key = jax.random.fold_in(jax.random.key(seed), number)
        away, counted = run(key, method, step_size_factor, levels, center, **lengths)
        points = np.unique(np.geomspace(1, away.shape[1], 40).astype(int))
        averages = np.cumsum(away, axis=1)[:, points - 1] / points[:, None]
        squares = np.cumsum((away**2).sum(-1), axis=1)[:, points - 1] / points
        error = [claims.mean(list(x)) for x in (averages**2).sum(-1).T]
        square = [claims.mean(list(x)) for x in squares.T]
        bound = float(bound_bits(dim, levels, base="natural")) if levels else 32 * dim
        numbers = {
            "variance_over_posterior": square[-1] / (dim * unit),
            "squared_error": error[-1],
            "bits_per_message": counted,
            "times_fewer_bits": 32 * dim / counted,
            "times_fewer_bits_by_bound_ln": 32 * dim / bound,
        }
        if method == "QLSD":
            released = stationary_variance(data, 1, Law(RELEASED_STEP * unit, levels))
            numbers["variance_over_posterior_at_released_settings"] = released / unit
        table += from_numbers(method, place, numbers)
        at_rounds = {
            "squared_error_by_round": error,
            "squared_distance_by_round": square,
            "bits_by_round": points * thinning * counted,
        }
        table += by_x(method, place, points * thinning, at_rounds)
        curves[method].append((at_rounds["bits_by_round"], error))
    ratios = (_least_ratio(a, b) for a in curves["QLSD"] for b in curves["QLSD*"])
    least = min(ratios, key=float)
    table += from_numbers("QLSD", {}, {"least_error_over_qlsd_star_at_same_bits": least})

    # Figure S2. A hundred rounds count the bits of a message, which no step size changes.
    start, key = center + unit**0.5, jax.random.key(seed + 1)
    all_levels = np.unique(np.round(np.geomspace(1, 1e4, budget_levels)).astype(int)).tolist()
    for i, levels in enumerate(all_levels):
        pilot_key = jax.random.fold_in(key, 1000 * i + 999)
        _, counted = run(pilot_key, "QLSD*", budget_factors[0], levels, start, num_rounds=100)
        num, errors, squares = max(int(budget / counted), 1), [], []
        for j, factor in enumerate(budget_factors):
            point_key = jax.random.fold_in(key, 1000 * i + j)
            away, _ = run(point_key, "QLSD*", factor, levels, start, num_rounds=num)
            errors.append(claims.mean(list((away.mean(axis=1) ** 2).sum(-1))))
            # Squared lengths of Gaussian states, relative to the posterior's
            ratio = centered_variance(data.sizes, dim, Law(factor * unit, levels)) / unit
            noise = average_error(2 * ratio**2 / dim, (1 - factor) ** 2, num)
            squares.append((ratio - 1) ** 2 + noise)
            place = {"levels": levels, "step_factor": float(factor)}
            table += from_numbers("QLSD*", place, {"budget_squared_error": errors[-1]})
        numbers = {
            "error_of_small_over_large_step": errors[-1] / errors[0],
            "square_error_of_small_over_large_step": squares[-1] / squares[0],
        }
        table += from_numbers("QLSD*", {"levels": levels}, numbers)
    return table


def _least_ratio(plain: Any, star: Any) -> claims.Number:
    """Return the least ratio of errors at the same bits; a curve has bits and errors."""
    (x, error, relative), (star_x, star_error, star_relative) = (
        (np.log(bits), *np.array([[np.log(e.value), e.error / e.value] for e in curve]).T)
        for bits, curve in (plain, star)
    )
    both = (x >= star_x[0]) & (x <= star_x[-1])
    log_ratio = error[both] - np.interp(x[both], star_x, star_error)
    index = log_ratio.argmin()
    star_relative = np.interp(x[both], star_x, star_relative)
    ratio = float(np.exp(log_ratio[index]))
    return claims.Number(ratio, ratio * float(np.hypot(relative[both], star_relative)[index]))


def average_error(variance: float, contraction: float, num: int) -> float:
    """Return the variance of the average of `num` states of a stationary chain.

    Its autocorrelation at lag k is ``contraction**k``.
    """
    c = contraction
    pairs = c * (num * (1 - c) - (1 - c**num)) / (1 - c) ** 2  # sum of (num - k) c^k over k
    return variance * (num + 2 * pairs) / num**2
