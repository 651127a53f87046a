"""El Mekkaoui et al. (2021), 5.1: exact distributions beside runs on Gaussian shards."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import problems
from experiments.fsgld.gaussian_law import constants_of_means, fsgld_width, one_machine, relay_law
from experiments.study import JobRows
from experiments.tidy import Row
from experiments.tidy import from_numbers as numbers_of

__all__ = ["bound_constants", "coin_gradients", "rows"]


def rows(jobs: Sequence[JobRows], grid_points: int) -> list[Row]:
    """Return exact moments beside every job's measured ones, and what depends on no job.

    Parameters
    ----------
    jobs
        Runs of DSGLD and FSGLD, whose rows have the metrics ``variance`` and ``mse_of_average``.
    grid_points
        Points per side of the grid over the square of the shards' means, for the bounds.
    """
    config = jobs[0].config
    data = problems.load(config).data
    num = data.num_rows // data.num_clients
    shards = np.asarray(data.rows["y"], np.float64).reshape(data.num_clients, num, -1)
    precision = 1 + data.num_rows
    mean, between = shards.sum(axis=(0, 1)) / precision, float(shards.mean(1).var(0).mean())
    found = [row for job in jobs for row in _exact(job, shards, mean, precision, between)]
    found += numbers_of("exact posterior", {}, {"posterior_variance": 1 / precision})
    for i, coordinate in enumerate(mean):
        found += numbers_of("exact posterior", {"coordinate": i}, {"posterior_mean": coordinate})
    found += numbers_of("shards", {}, {"shard_means_variance": between})
    return found + _bounds(config, shards, grid_points) + _exact_widths(jobs) + _coin()


def _exact(
    job: JobRows, shards: np.ndarray, posterior_mean: np.ndarray, precision: int, between: float
) -> list[Row]:
    measured = {row.metric: row for row in job.rows}
    method, settings = measured["variance"].method, measured["variance"].settings
    kernel, config = job.config["kernel"], job.config
    num = kernel["num_local_steps"]
    law = _law(shards, kernel, num, float(method == "FSGLD"))
    every = (config["collect"] or {}).get("every", num)
    times = tuple(range(every, num + 1, every))
    kept = (config["num_rounds"] - config["num_burnin"]) // config["thinning"]
    mean, covariance = law.moments(times)
    variance, bias = float(np.trace(covariance) / 2), mean - posterior_mean
    _, of_average = law.average(times, config["thinning"], kept)
    last = of_average[-1]
    mse = float(bias @ bias + np.trace(last))
    # The average of many draws is close to Gaussian, which gives the error of a squared length.
    spread = 2 * np.trace(last @ last) + 4 * bias @ last @ bias
    numbers = {
        "exact_variance": variance,
        "variance_z": (measured["variance"].value - variance) / measured["variance s.e."].value,
        "variance_ratio": variance * precision,
        "exact_bias": float(np.linalg.norm(bias)),
        "exact_mse": mse,
        "mse_z": (measured["mse_of_average"].value - mse)
        / math.sqrt(spread / config["num_chains"]),
        "variance_over_shard_means": variance / between,
        "bias_share_of_mse": float(bias @ bias) / mse,
    }
    if num == 100:
        error = bias @ bias + np.trace(of_average, axis1=1, axis2=2)
        half = len(error) // 2
        slope = np.log(error[-1] / error[half - 1]) / np.log(len(error) / half)
        numbers["error_slope"] = float(slope)
    return numbers_of(method, settings, numbers)


def _law(shards: np.ndarray, kernel: Mapping[str, Any], num_local_steps: int, alpha: float) -> Any:
    sizes = {name: kernel[name] for name in ("step_size", "batch_size")}
    return relay_law(shards, num_local_steps=num_local_steps, alpha=alpha, **sizes)


def bound_constants(
    shards: np.ndarray, spread: float, grid_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``gamma_s**2`` and ``eps_s**2`` of Theorems 1 and 2 on a grid over the square."""
    side = np.linspace(-spread, spread, grid_points)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    gamma, eps = [], []
    for rows in shards:
        gradients = rows[None] - grid[:, None]  # of log p(x_i | theta), [points, rows, 2]
        surrogate = rows.mean(axis=0) - grid  # of log q_s(theta) / N_s
        gamma.append((gradients**2).sum(axis=-1).max())
        eps.append(((gradients - surrogate[:, None]) ** 2).sum(axis=-1).mean(axis=1).max())
    return np.array(gamma), np.array(eps)


def _bounds(config: Mapping[str, Any], shards: np.ndarray, grid_points: int) -> list[Row]:
    gamma, eps = bound_constants(shards, config["data"]["spread"], grid_points)
    average = constants_of_means(config["data"])
    found: list[Row] = []
    for i in range(len(shards)):
        place = {"shard": i}
        found += numbers_of("DSGLD", place, {"gamma_squared": gamma[i]})
        found += numbers_of("FSGLD", place, {"eps_squared": eps[i]})
        ratios = {
            "constants_ratio": gamma[i] / eps[i],
            "constants_ratio_of_average_rows": average[i],
        }
        found += numbers_of("DSGLD / FSGLD", place, ratios)
    return found


def _exact_widths(jobs: Sequence[JobRows]) -> list[Row]:
    """Return exact variances over the posterior's, of one machine and of FSGLD elsewhere."""
    kernel, data = jobs[0].config["kernel"], jobs[0].config["data"]
    steps = [job.config["kernel"]["num_local_steps"] for job in jobs]
    size, step = kernel["batch_size"], kernel["step_size"]
    config = {**data, "batch_size": size, "step_size": step, "num_local_steps": steps}
    pooled = one_machine(config)
    method, metric = "SGLD on one machine", "exact_variance_ratio"
    found = numbers_of(method, {"batch_size": size}, {metric: pooled["minibatches"]})
    of_all = {f"{metric}_of_all_rows": pooled["all rows"], "row_variance": pooled["scatter"]}
    found += numbers_of(method, {}, of_all)
    found += numbers_of("FSGLD", {}, {"row_variance": pooled["within"]})
    for factor in (10, 100):
        width = fsgld_width(config, step=1 / factor)
        found += numbers_of("FSGLD", {"step_size": step / factor}, {metric: width})
    for factor in (5, 10, 20):
        width = fsgld_width(config, batch_size=factor * size)
        found += numbers_of("FSGLD", {"batch_size": factor * size}, {metric: width})
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
