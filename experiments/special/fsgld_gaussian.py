"""El Mekkaoui et al. (2021), 5.1: exact distributions for runs on Gaussian shards.

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

__all__ = ["RelayLaw", "relay_law", "rows"]


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

    def covariance(self, s: int, t: int) -> np.ndarray:
        """Return the covariance of the states of a visit after `s` and `t` >= `s` steps."""
        e, num = self.factor, self.num_local_steps
        between = np.cov(self.shift.T, bias=True)

        def noise(steps: int) -> np.ndarray:
            return (1 - e ** (2 * steps)) / (1 - e**2) * self.noise

        handed_on = (self.pull(num) ** 2 * between + noise(num)) / (1 - e ** (2 * num))
        from_start = e ** (s + t) * handed_on + e ** (t - s) * noise(s)
        result: np.ndarray = from_start + self.pull(s) * self.pull(t) * between
        return result

    def variance(self, times: Sequence[int]) -> float:
        """Return the mean variance per coordinate of the states after these local steps."""
        each = [np.trace(self.covariance(t, t)) / len(self.noise) for t in times]
        return float(np.mean(each))

    def average(self, times: Sequence[int], rounds_apart: int, num_rounds: int) -> np.ndarray:
        """Return the covariances of averages over ``1 .. num_rounds`` kept rounds.

        Kept rounds are `rounds_apart` from each other; their states after `times` steps count.
        """
        num, e = self.num_local_steps, self.factor
        within = np.mean(
            [[self.covariance(min(s, t), max(s, t)) for s in times] for t in times], (0, 1)
        )
        onward = np.mean([self.covariance(t, num) for t in times], axis=0)
        lag, length = np.arange(1, num_rounds), np.arange(1, num_rounds + 1)
        weight = np.mean([e**t for t in times]) * e ** (num * (rounds_apart * lag - 1))
        pairs = length * np.append(0, np.cumsum(weight)) - np.append(0, np.cumsum(lag * weight))
        total = length[:, None, None] * within + 2 * pairs[:, None, None] * onward
        result: np.ndarray = total / (length**2)[:, None, None]
        return result


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

    The prior is ``N(0, I)``; `shards` are ``[num_clients, rows, d]``, `surrogate_means`
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
    """Return exact moments for the measured ones of every job, and what depends on no job.

    Jobs have the metrics ``variance`` and ``mse_of_average``. The bounds are evaluated on a grid
    over the square of the shards' means with `grid_points` per side.
    """
    data = problems.load(jobs[0].config).data
    num_rows = data.num_rows // data.num_clients
    shards = np.asarray(data.rows["y"], np.float64).reshape(data.num_clients, num_rows, -1)
    mean, between = shards.sum(axis=(0, 1)) / (1 + data.num_rows), shards.mean(1).var(0).mean()
    result = [row for job in jobs for row in _exact(job, shards, mean, float(between))]
    result += numbers_of("exact posterior", {}, {"posterior_variance": 1 / (1 + data.num_rows)})
    for i, coordinate in enumerate(mean):
        result += numbers_of("exact posterior", {"coordinate": i}, {"posterior_mean": coordinate})
    result += numbers_of("shards", {}, {"shard_means_variance": between})
    result += _bounds(shards, jobs[0].config["data"]["spread"], grid_points)
    return result + _exact_widths(shards, jobs) + _coin()


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
    step = (config["collect"] or {}).get("every", num)
    times = range(step, num + 1, step)
    num_kept = (config["num_rounds"] - config["num_burnin"]) // config["thinning"]
    variance, bias = law.variance(times), law.mean - posterior_mean
    of_average = law.average(times, config["thinning"], num_kept)
    error = bias @ bias + np.trace(of_average, axis1=1, axis2=2)
    # The average of many draws is close to Gaussian, which gives the error of a squared length.
    final = of_average[-1]
    spread = (2 * np.trace(final @ final) + 4 * bias @ final @ bias) / config["num_chains"]
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


def _bound_constants(
    shards: np.ndarray, spread: float, grid_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``gamma_s**2`` and ``eps_s**2`` of Theorems 1 and 2 on a grid over the square."""
    side = np.linspace(-spread, spread, grid_points)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    gamma, eps = [], []
    for rows_ in shards:
        gradients = rows_[None] - grid[:, None]  # of log p(x_i | theta), [points, rows, 2]
        surrogate = rows_.mean(axis=0) - grid  # of log q_s(theta) / N_s
        gamma.append((gradients**2).sum(axis=-1).max())
        eps.append(((gradients - surrogate[:, None]) ** 2).sum(axis=-1).mean(axis=1).max())
    return np.array(gamma), np.array(eps)


def _bounds(shards: np.ndarray, spread: float, grid_points: int) -> list[Row]:
    """Return constants of the bounds, and their ratios also where both are of the average row."""
    gamma, eps = _bound_constants(shards, spread, grid_points)
    within = ((shards - shards.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2))
    average = ((shards - shards.mean(axis=(0, 1))) ** 2).sum(axis=(1, 2)) / within
    result: list[Row] = []
    for i in range(len(shards)):
        ratios = {
            "constants_ratio": gamma[i] / eps[i],
            "constants_ratio_of_average_rows": average[i],
        }
        result += numbers_of("DSGLD", {"shard": i}, {"gamma_squared": gamma[i]})
        result += numbers_of("FSGLD", {"shard": i}, {"eps_squared": eps[i]})
        result += numbers_of("DSGLD / FSGLD", {"shard": i}, ratios)
    return result


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
    result = numbers_of(method, {"batch_size": size}, ratio(pooled, 0.0, 1))
    result += numbers_of(method, {}, {"exact_variance_ratio_of_all_rows": of_all})
    result += numbers_of(method, {}, {"row_variance": pooled.var(axis=1).mean()})
    result += numbers_of("FSGLD", {}, {"row_variance": shards.var(axis=1).mean()})
    smaller = [{"step_size": step / factor} for factor in (10, 100)]
    for changed in [*smaller, *({"batch_size": factor * size} for factor in (5, 10, 20))]:
        result += numbers_of("FSGLD", changed, ratio(shards, 1.0, longest, **changed))
    return result


def _coin() -> list[Row]:
    """Return exact mean and deviation of both gradient estimators for coin tosses, by ``theta``.

    A minibatch has 5 of 30 tosses; the shards of 10 have 1, 5 and 9 heads. The gradients of a toss
    are ``1 / theta`` and ``-1 / (1 - theta)``.
    """
    theta = np.linspace(0.1, 0.9, 17)
    up, down = 1 / theta[:, None], -1 / (1 - theta[:, None])
    shares = np.array([0.1, 0.5, 0.9])

    def moments(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = 30 * (share * up + (1 - share) * down)
        return mean, 30**2 / 5 * share * (1 - share) * (up - down) ** 2

    result: list[Row] = []
    deviations = {}
    for method, share in (("DSGLD", shares), ("SGLD", shares[1:2])):
        means, variances = moments(share)
        deviations[method] = np.sqrt(variances.mean(1) + means.var(1))
        for x, mean, deviation in zip(theta, means.mean(1), deviations[method], strict=True):
            numbers = {"coin_gradient_mean": mean, "coin_gradient_sd": deviation}
            result += numbers_of(method, {}, numbers, x=float(x))
    ratios = deviations["DSGLD"] / deviations["SGLD"]
    for x, ratio in zip(theta, ratios, strict=True):
        result += numbers_of("DSGLD / SGLD", {}, {"coin_gradient_sd_ratio": ratio}, x=float(x))
    return result
