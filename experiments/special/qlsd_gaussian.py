"""Vono et al. (2022), Figures 1, S1 and S2: a Gaussian mean, errors against bits.

The draws of a run are too many to keep: each algorithm leaves errors of its running averages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import loaders, models
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
from experiments.special.qlsd_bias import centered_variance, stationary_variance
from experiments.tidy import Row, from_numbers
from fedmcmc.compression import bound_bits

__all__ = ["average_error", "rows", "square_error"]

RELEASED_STEP = 0.01
"""Step size of the released notebook, over one over the number of rows; its batches are rows."""
PILOT_ROUNDS = 100
"""Rounds over which the bits of a message are counted."""


class Clients(NamedTuple):
    """Clients of `experiments.loaders.gaussian`, with a flat prior."""

    data: fedmcmc.FederatedData
    posterior: fedmcmc.Posterior
    mean: np.ndarray  # of the posterior
    batch_size: float

    def kernel(self, build: Any, factor: float, num_levels: int | None) -> fedmcmc.FederatedKernel:
        """Return an algorithm with a step size of `factor` over the number of rows."""
        settings: dict[str, Any] = dict(
            step_size=factor / self.data.num_rows, batch_size=self.batch_size
        )
        if num_levels is not None:
            settings["compressor"] = fedmcmc.quantize(num_levels)
        if build is not fedmcmc.qlsd:
            settings["centre"] = jnp.asarray(self.mean, jnp.float32)
        return build(self.posterior, **settings)  # type: ignore[no-any-return]


class Curve(NamedTuple):
    """Squared errors of running averages, with the bits that a client has sent."""

    bits: np.ndarray
    error: np.ndarray
    error_sd: np.ndarray


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
    seed: int = 0,
) -> list[Row]:
    """Return errors of QLSD (with the fewest and most bits), QLSD* and LSD*, and of a budget.

    Parameters
    ----------
    num_clients, dim
        Clients of `experiments.loaders.gaussian`.
    step_size_factor, budget_factors
        Step sizes over one over the number of rows; below 2 the chains are stable.
    batch_fraction, num_rounds, num_burnin, thinning, num_chains, seed
        As in kernels and `fedmcmc.sample`.
    bits
        Numbers ``p``: compressors have ``2**p`` levels.
    budget, budget_levels
        Bits that a client sends in Figure S2, and how many numbers of levels from 1 to 10,000.
    """
    data, _ = loaders.gaussian(num_clients, dim)
    mean = np.asarray(data.rows["y"]).mean(axis=0, dtype=np.float64)
    clients = Clients(data, models.gaussian(data, 0.0), mean, batch_fraction)
    counts = dict(num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning)
    algorithms: list[tuple[str, Any, int | None]] = [
        *(("QLSD", fedmcmc.qlsd, p) for p in dict.fromkeys((bits[0], bits[-1]))),
        *(("QLSD*", fedmcmc.qlsd_star, p) for p in bits),
        ("LSD*", fedmcmc.lsd_star, None),
    ]
    found, curves = _data_rows(clients), []
    for i, (method, build, p) in enumerate(algorithms):
        levels = None if p is None else 2**p
        samples = fedmcmc.sample(
            jax.random.fold_in(jax.random.key(seed), i),
            clients.kernel(build, step_size_factor, levels),
            data,
            jnp.asarray(mean, jnp.float32),
            num_chains=num_chains,
            progress=False,
            **counts,
        )
        settings: dict[str, Any] = dict(step_size=step_size_factor / data.num_rows, seed=seed)
        if method == "QLSD":
            law = stationary_variance(
                data, batch_size=batch_fraction, num_levels=levels, **settings
            )
        else:
            law = centered_variance(data.sizes, dim, num_levels=levels, **settings)
        contraction = (1 - step_size_factor) ** thinning
        place = {} if p is None else {"bits": p}
        own, curve = _measured(clients, samples, method, place, law, contraction, thinning)
        found, curves = found + own, [*curves, (method, curve)]
    plain, star = ([c for name, c in curves if name == kind] for kind in ("QLSD", "QLSD*"))
    least = min((_least_ratio(one, other) for one in plain for other in star), key=float)
    found += from_numbers("QLSD", {}, {"least_error_over_qlsd_star_at_same_bits": least})
    return found + _budget(clients, budget, budget_levels, budget_factors, num_chains, seed)


def _data_rows(clients: Clients) -> list[Row]:
    """Return sizes of clients, the spread of their means and the posterior's variance."""
    own = [clients.data.client_rows(i)["y"] for i in range(clients.data.num_clients)]
    spread = np.std([x.mean(axis=0) for x in own], axis=0, ddof=1).mean()
    within = np.sqrt(np.mean([x.var(axis=0, ddof=1) for x in own]))
    found = from_numbers("data", {}, {"spread_of_means_over_spread_of_rows": spread / within})
    found += from_numbers("posterior", {}, {"variance": 1 / clients.data.num_rows})
    for i, x in enumerate(own, start=1):
        found += from_numbers("data", {"client": i}, {"rows": len(x)})
    return found


def _measured(
    clients: Clients,
    samples: fedmcmc.Samples,
    method: str,
    place: dict[str, Any],
    law: float,
    contraction: float,
    thinning: int,
) -> tuple[list[Row], Curve]:
    """Return errors of running averages beside those of the stationary variance `law`."""
    away = np.asarray(samples.draws, np.float64) - clients.mean
    num, dim, precision = away.shape[1], away.shape[2], clients.data.num_rows
    points = np.unique(np.geomspace(1, num, 40).astype(int))
    squares = ((np.cumsum(away, axis=1)[:, points - 1] / points[:, None]) ** 2).sum(axis=-1)
    lengths = np.cumsum((away**2).sum(axis=-1), axis=1)[:, points - 1] / points
    error, square = ([mean_with_error(list(x)) for x in values.T] for values in (squares, lengths))
    expected = average_error(law, contraction, points) * dim
    counted = np.asarray(samples.info["bits_up"], np.float64).mean() / clients.data.num_clients
    levels = 2 ** place["bits"] if place else None
    bounds = {"log2": 32.0 * dim, "ln": 32.0 * dim}
    if levels is not None:
        bounds = {
            "log2": float(bound_bits(dim, levels)),
            "ln": float(bound_bits(dim, levels, base="natural")),
        }
    numbers = {
        "variance_over_posterior": square[-1] * (precision / dim),
        "squared_error": error[-1],
        "squared_error_by_law": expected[-1],
        "z_of_squared_error": (error[-1].value - expected[-1]) / error[-1].error,
        "times_fewer_bits": 32 * dim / counted,
        **{f"times_fewer_bits_by_bound_{k}": 32 * dim / bound for k, bound in bounds.items()},
        "bits_per_message": counted,
        **{f"bound_on_bits_{k}": bound for k, bound in bounds.items()},
        "variance": (away**2).mean(),
        "variance_by_law": law,
        "squared_distance_from_mean": square[-1],
    }
    if method == "QLSD":
        released = dict(step_size=RELEASED_STEP / precision, batch_size=1, num_levels=levels)
        variance = stationary_variance(clients.data, **released)
        numbers["variance_over_posterior_at_released_settings"] = variance * precision
    found = from_numbers(method, place, numbers)
    rounds = points * thinning
    for i, x in enumerate(rounds):
        curves = {
            "squared_error_by_round": error[i],
            "squared_error_by_round_by_law": expected[i],
            "squared_distance_by_round": square[i],
            "bits_by_round": x * counted,
        }
        found += from_numbers(method, place, curves, x=float(x))
    values, errors = (np.array([getattr(e, k) for e in error]) for k in ("value", "error"))
    return found, Curve(rounds * counted, values, errors)


def _least_ratio(plain: Curve, star: Curve) -> Number:
    """Return the least ratio of two curves' errors at the same bits."""
    x, own = np.log(star.bits), np.log(plain.bits)
    both = (own >= x[0]) & (own <= x[-1])
    log_ratio = np.log(plain.error[both]) - np.interp(own[both], x, np.log(star.error))
    relative = np.interp(own[both], x, star.error_sd / star.error)
    noise = np.hypot(plain.error_sd[both] / plain.error[both], relative)
    least = int(log_ratio.argmin())
    ratio = float(np.exp(log_ratio[least]))
    return Number(ratio, ratio * float(noise[least]))


def _budget(
    clients: Clients,
    budget: float,
    num_levels: int,
    factors: Sequence[float],
    num_chains: int,
    seed: int,
) -> list[Row]:
    """Return errors of averages of all rounds that a budget of bits pays for (Figure S2).

    The length of a message does not depend on the step size. Starts are a posterior standard
    deviation off in each coordinate.
    """
    data, mean = clients.data, clients.mean
    start = jnp.asarray(mean, jnp.float32) + data.num_rows**-0.5

    def sample(levels: int, factor: float, num_rounds: int, number: int) -> fedmcmc.Samples:
        return fedmcmc.sample(
            jax.random.fold_in(jax.random.key(seed + 1), number),
            clients.kernel(fedmcmc.qlsd_star, factor, levels),
            data,
            start,
            num_rounds=num_rounds,
            num_chains=num_chains,
            progress=False,
        )

    found: list[Row] = []
    all_levels = np.unique(np.round(np.geomspace(1, 1e4, num_levels)).astype(int)).tolist()
    for i, levels in enumerate(all_levels):
        pilot = sample(levels, factors[0], PILOT_ROUNDS, 1000 * i + 999)
        counted = float(np.asarray(pilot.info["bits_up"], np.float64).mean()) / data.num_clients
        num = max(int(budget / counted), 1)
        errors, by_law, place = [], [], {"levels": levels}
        for j, factor in enumerate(factors):
            draws = np.asarray(sample(levels, factor, num, 1000 * i + j).draws, np.float64)
            errors.append(mean_with_error(list(((draws.mean(1) - mean) ** 2).sum(-1))))
            step = factor / data.num_rows
            variance = centered_variance(data.sizes, len(mean), step_size=step, num_levels=levels)
            by_law.append(square_error(variance * data.num_rows, len(mean), 1 - factor, num))
            both = {
                "budget_squared_error": errors[-1],
                "budget_error_of_squares_by_law": by_law[-1],
            }
            found += from_numbers("QLSD*", place | {"step_factor": float(factor)}, both)
        small, large = int(np.argmin(factors)), int(np.argmax(factors))
        numbers = {
            "error_of_small_over_large_step": errors[small] / errors[large],
            "square_error_of_small_over_large_step": by_law[small] / by_law[large],
            "budget_rounds": num,
            "budget_bits_per_message": counted,
        }
        found += from_numbers("QLSD*", place, numbers)
    return found


def average_error(variance: float, contraction: float, num: np.ndarray) -> np.ndarray:
    """Return the variance of averages of `num` states of a stationary chain.

    Its autocorrelation at lag k is ``contraction**k``.
    """
    lags = np.arange(1, int(num.max()))
    powers = contraction**lags
    first, second = (np.append(0.0, np.cumsum(x)) for x in (powers, lags * powers))
    pairs = num * first[num - 1] - second[num - 1]
    return np.asarray(variance * (num + 2 * pairs) / num.astype(float) ** 2)


def square_error(ratio: float, dim: int, contraction: float, num: int) -> float:
    """Return the mean squared error of an average of squared lengths of `num` states, relative.

    States are Gaussian with `dim` coordinates of `ratio` times the posterior's variance, which is
    the bias; the autocorrelation of squares is the square of the states'.
    """
    noise = average_error(2 * ratio**2 / dim, contraction**2, np.array([num]))
    return float((ratio - 1) ** 2 + noise[0])
