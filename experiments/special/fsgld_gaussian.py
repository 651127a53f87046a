"""El Mekkaoui et al. (2021), 5.1: exact distributions beside runs on Gaussian shards.

Rows have unit covariance, so a local step at shard ``s`` is ``factor * theta + shift[s]`` plus
noise with the same factor at every shard, and means and covariances follow linear recursions
(``docs/laws.md``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import problems
from experiments.study import JobRows
from experiments.tidy import Row
from experiments.tidy import from_numbers as numbers_of

__all__ = ["RelayLaw", "bound_constants", "coin_gradients", "relay_law", "rows"]


class RelayLaw(NamedTuple):
    """Stationary distribution of a relay between shards that are visited equally often.

    Attributes
    ----------
    factor, shift, noise
        One local step: a number, ``[num_clients, d]``, and the mean covariance ``[d, d]``.
    num_local_steps
        Local steps per visit.
    """

    factor: float
    shift: np.ndarray
    noise: np.ndarray
    num_local_steps: int

    @property
    def mean(self) -> np.ndarray:
        """Mean ``[d]`` of every state."""
        return self.shift.mean(axis=0) / (1 - self.factor)

    def pull(self, steps: int) -> float:
        """Return what a shift has become after some local steps."""
        return (1 - self.factor**steps) / (1 - self.factor)

    def covariance(self, one: int, other: int) -> np.ndarray:
        """Return the covariance of the states of a visit after `one` and `other` >= `one` steps."""
        e, num = self.factor, self.num_local_steps
        between = np.cov(self.shift.T, bias=True)

        def noise(steps: int) -> np.ndarray:
            return (1 - e ** (2 * steps)) / (1 - e**2) * self.noise

        handed_on = (self.pull(num) ** 2 * between + noise(num)) / (1 - e ** (2 * num))
        from_start = e ** (one + other) * handed_on + e ** (other - one) * noise(one)
        found: np.ndarray = from_start + self.pull(one) * self.pull(other) * between
        return found

    def variance(self, times: Sequence[int]) -> float:
        """Return the mean variance per coordinate of the states after these local steps."""
        each = [np.trace(self.covariance(t, t)) / len(self.noise) for t in times]
        return float(np.mean(each))

    def average(self, times: Sequence[int], rounds_apart: int, num_rounds: int) -> np.ndarray:
        """Return the covariances of averages over ``1 .. num_rounds`` kept rounds.

        Parameters
        ----------
        times
            Local steps after which the states of a kept round count.
        rounds_apart
            Rounds from a kept one to the next.
        num_rounds
            Largest number of kept rounds.
        """
        last, e = self.num_local_steps, self.factor
        within = np.mean(
            [[self.covariance(min(s, t), max(s, t)) for s in times] for t in times], (0, 1)
        )
        onward = np.mean([self.covariance(t, last) for t in times], axis=0)
        lag, length = np.arange(1, num_rounds), np.arange(1, num_rounds + 1)
        weight = np.mean([e**t for t in times]) * e ** (last * (rounds_apart * lag - 1))
        pairs = length * np.append(0, np.cumsum(weight)) - np.append(0, np.cumsum(lag * weight))
        total = length[:, None, None] * within + 2 * pairs[:, None, None] * onward
        found: np.ndarray = total / (length**2)[:, None, None]
        return found


def relay_law(
    shards: np.ndarray,
    *,
    step_size: float,
    batch_size: int,
    num_local_steps: int,
    alpha: float,
    surrogate_means: np.ndarray | None = None,
) -> RelayLaw:
    """Return the distribution of FSGLD, or with `alpha` zero DSGLD, for rows ``N(theta, I)``.

    Parameters
    ----------
    shards
        ``[num_clients, rows, d]``; the prior is ``N(0, I)``.
    step_size, batch_size, num_local_steps, alpha
        As in `fedmcmc.fsgld`.
    surrogate_means
        ``[num_clients, d]``, by default the means of the shards.
    """
    num_clients, num_rows, dim = shards.shape
    means = shards.mean(axis=1)
    centers = means if surrogate_means is None else surrogate_means
    pull = num_rows * (num_clients * means + alpha * (centers.sum(axis=0) - num_clients * centers))
    centered = shards - means[:, None]
    scatter = np.einsum("sni,snj->ij", centered, centered) / num_clients
    gradient_noise = num_rows / batch_size * (step_size * num_clients) ** 2 * scatter
    factor = 1 - step_size * (1 + num_rows * num_clients)
    noise = 2 * step_size * np.eye(dim) + gradient_noise
    return RelayLaw(factor, step_size * pull, noise, num_local_steps)


def rows(jobs: Sequence[JobRows], grid_points: int) -> list[Row]:
    """Return exact moments beside every job's measured ones, and what depends on no job.

    Parameters
    ----------
    jobs
        Runs of DSGLD and FSGLD, whose rows have the metrics ``variance`` and ``mse_of_average``.
    grid_points
        Points per side of the grid over the square of the shards' means, for the bounds.
    """
    data = problems.load(jobs[0].config).data
    num_rows = data.num_rows // data.num_clients
    shards = np.asarray(data.rows["y"], np.float64).reshape(data.num_clients, num_rows, -1)
    mean, between = shards.sum(axis=(0, 1)) / (1 + data.num_rows), shards.mean(1).var(0).mean()
    found = [row for job in jobs for row in _exact(job, shards, mean, float(between))]
    found += numbers_of("exact posterior", {}, {"posterior_variance": 1 / (1 + data.num_rows)})
    for i, coordinate in enumerate(mean):
        found += numbers_of("exact posterior", {"coordinate": i}, {"posterior_mean": coordinate})
    found += numbers_of("shards", {}, {"shard_means_variance": between})
    found += _bounds(shards, jobs[0].config["data"]["spread"], grid_points)
    return found + _exact_widths(shards, jobs) + _coin()


def _law(shards: np.ndarray, kernel: Mapping[str, Any], alpha: float, **changed: Any) -> RelayLaw:
    names = ("step_size", "batch_size", "num_local_steps")
    return relay_law(shards, alpha=alpha, **{name: kernel[name] for name in names} | changed)


def _exact(
    job: JobRows, shards: np.ndarray, posterior_mean: np.ndarray, between: float
) -> list[Row]:
    measured = {row.metric: row for row in job.rows}
    method, settings = measured["variance"].method, measured["variance"].settings
    config, num = job.config, job.config["kernel"]["num_local_steps"]
    law = _law(shards, config["kernel"], float(method == "FSGLD"))
    every = (config["collect"] or {}).get("every", num)
    times = range(every, num + 1, every)
    kept = (config["num_rounds"] - config["num_burnin"]) // config["thinning"]
    variance, bias = law.variance(times), law.mean - posterior_mean
    of_average = law.average(times, config["thinning"], kept)
    error = bias @ bias + np.trace(of_average, axis1=1, axis2=2)
    # The average of many draws is close to Gaussian, which gives the error of a squared length.
    last = of_average[-1]
    spread = (2 * np.trace(last @ last) + 4 * bias @ last @ bias) / config["num_chains"]
    numbers = {
        "exact_variance": variance,
        "variance_z": (measured["variance"].value - variance) / measured["variance s.e."].value,
        "variance_ratio": variance * (1 + shards.shape[0] * shards.shape[1]),
        "exact_bias": np.linalg.norm(bias),
        "exact_mse": error[-1],
        "mse_z": (measured["mse_of_average"].value - error[-1]) / math.sqrt(spread),
        "variance_over_shard_means": variance / between,
        "bias_share_of_mse": bias @ bias / error[-1],
    }
    if num == 100:
        half = len(error) // 2
        slope = np.log(error[-1] / error[half - 1]) / np.log(len(error) / half)
        numbers["error_slope"] = slope
    return numbers_of(method, settings, numbers)


def bound_constants(
    shards: np.ndarray, spread: float, grid_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``gamma_s**2`` and ``eps_s**2`` of Theorems 1 and 2 on a grid over the square."""
    side = np.linspace(-spread, spread, grid_points)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    gamma, eps = [], []
    for own in shards:
        gradients = own[None] - grid[:, None]  # of log p(x_i | theta), [points, rows, 2]
        surrogate = own.mean(axis=0) - grid  # of log q_s(theta) / N_s
        gamma.append((gradients**2).sum(axis=-1).max())
        eps.append(((gradients - surrogate[:, None]) ** 2).sum(axis=-1).mean(axis=1).max())
    return np.array(gamma), np.array(eps)


def _bounds(shards: np.ndarray, spread: float, grid_points: int) -> list[Row]:
    """Return constants of the bounds, and their ratios also where both are of the average row."""
    gamma, eps = bound_constants(shards, spread, grid_points)
    within = ((shards - shards.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2))
    average = ((shards - shards.mean(axis=(0, 1))) ** 2).sum(axis=(1, 2)) / within
    found: list[Row] = []
    for i in range(len(shards)):
        ratios = {
            "constants_ratio": gamma[i] / eps[i],
            "constants_ratio_of_average_rows": average[i],
        }
        found += numbers_of("DSGLD", {"shard": i}, {"gamma_squared": gamma[i]})
        found += numbers_of("FSGLD", {"shard": i}, {"eps_squared": eps[i]})
        found += numbers_of("DSGLD / FSGLD", {"shard": i}, ratios)
    return found


def _exact_widths(shards: np.ndarray, jobs: Sequence[JobRows]) -> list[Row]:
    """Return exact variances over the posterior's, of one machine and of FSGLD elsewhere."""
    kernel = jobs[0].config["kernel"]
    size, step = kernel["batch_size"], kernel["step_size"]
    longest = max(job.config["kernel"]["num_local_steps"] for job in jobs)
    pooled = shards.reshape(1, -1, shards.shape[-1])
    quiet = np.broadcast_to(pooled.mean(axis=1, keepdims=True), pooled.shape)

    def ratio(rows_: np.ndarray, alpha: float, num: int, **changed: Any) -> dict[str, float]:
        law = _law(rows_, kernel, alpha, num_local_steps=num, **changed)
        return {"exact_variance_ratio": law.variance([num]) * (1 + pooled.shape[1])}

    method = "SGLD on one machine"
    of_all = ratio(quiet, 0.0, 1)["exact_variance_ratio"]
    found = numbers_of(method, {"batch_size": size}, ratio(pooled, 0.0, 1))
    found += numbers_of(method, {}, {"exact_variance_ratio_of_all_rows": of_all})
    found += numbers_of(method, {}, {"row_variance": pooled.var(axis=1).mean()})
    found += numbers_of("FSGLD", {}, {"row_variance": shards.var(axis=1).mean()})
    smaller = [{"step_size": step / factor} for factor in (10, 100)]
    for changed in [*smaller, *({"batch_size": factor * size} for factor in (5, 10, 20))]:
        found += numbers_of("FSGLD", changed, ratio(shards, 1.0, longest, **changed))
    return found


def coin_gradients() -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return a grid of ``theta``, and exact mean and deviation there of both gradient estimators.

    Of 30 coin tosses with 15 heads, 5 are drawn; shards of 10 have 1, 5 and 9 heads. The gradients
    of one row are ``1 / theta`` and ``-1 / (1 - theta)``.
    """
    heads, rows, batch, total = np.array([1, 5, 9]), 10, 5, 30
    theta = np.linspace(0.1, 0.9, 17)[:, None]
    up, down = 1 / theta, -1 / (1 - theta)

    def moments(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centre = total * (share * up + (1 - share) * down)
        return centre, total**2 / batch * share * (1 - share) * (up - down) ** 2

    centre, noise = moments(np.array([heads.sum() / total]))
    by_shard, shard_noise = moments(heads / rows)
    return theta[:, 0], {
        "DSGLD": (by_shard.mean(1), np.sqrt(shard_noise.mean(1) + by_shard.var(1))),
        "SGLD": (centre[:, 0], np.sqrt(noise[:, 0])),
    }


def _coin() -> list[Row]:
    found: list[Row] = []
    grid, moments = coin_gradients()
    for method, (means, deviations) in moments.items():
        for x, center, deviation in zip(grid, means, deviations, strict=True):
            numbers = {"coin_gradient_mean": center, "coin_gradient_sd": deviation}
            found += numbers_of(method, {}, numbers, x=float(x))
    ratios = moments["DSGLD"][1] / moments["SGLD"][1]
    for x, ratio in zip(grid, ratios, strict=True):
        found += numbers_of("DSGLD / SGLD", {}, {"coin_gradient_sd_ratio": ratio}, x=float(x))
    return found
