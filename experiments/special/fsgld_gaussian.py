"""El Mekkaoui et al. (2021), 5.1 and Remark 1: exact distributions on Gaussian shards.

Rows have unit covariance, so a local step at shard ``s`` is ``factor * theta + shift[s]`` plus
noise with the same factor at every shard, and means and covariances follow linear recursions
(``docs/explanation/exact_distributions.md``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import claims, loaders, models, problems
from experiments import shards as makers
from experiments.special.fsgld_repetitions import by_x
from experiments.study import JobRows
from experiments.tidy import Row, from_numbers


class RelayLaw(NamedTuple):
    """Stationary distribution of a relay between shards that are visited equally often.

    A local step has a `factor`, a `shift` ``[num_clients, d]`` and noise of variance `noise`; a
    visit has `num_local_steps`. Variances and covariances are averages over coordinates.
    """

    factor: float
    shift: np.ndarray
    noise: float
    num_local_steps: int

    @property
    def mean(self) -> np.ndarray:
        """Mean ``[d]`` of every state."""
        return self.shift.mean(axis=0) / (1 - self.factor)

    def pull(self, steps: Any) -> Any:
        """Return what a shift has become after some local steps."""
        return (1 - self.factor**steps) / (1 - self.factor)

    def covariance(self, s: Any, t: Any) -> Any:
        """Return the covariance of the states of a visit after `s` and `t` >= `s` steps."""
        e, num, between = self.factor, self.num_local_steps, self.shift.var(axis=0).mean()

        def noise(steps: Any) -> Any:
            return (1 - e ** (2 * steps)) / (1 - e**2) * self.noise

        handed_on = (self.pull(num) ** 2 * between + noise(num)) / (1 - e ** (2 * num))
        from_start = e ** (s + t) * handed_on + e ** (t - s) * noise(s)
        return from_start + self.pull(s) * self.pull(t) * between

    def variance(self, times: Sequence[int] = ()) -> float:
        """Return the variance of the states after these local steps, by default after a visit."""
        t = np.array(times or [self.num_local_steps])
        return float(self.covariance(t, t).mean())

    def average(self, times: Sequence[int], rounds_apart: int, num_rounds: int) -> np.ndarray:
        """Return the variances of averages over ``1 .. num_rounds`` kept rounds.

        Kept rounds are `rounds_apart` from each other; their states after `times` steps count.
        """
        t, visit = np.array(times), self.factor**self.num_local_steps
        onward = self.covariance(t, self.num_local_steps).mean() * (self.factor**t).mean()
        covariances = onward * visit ** (rounds_apart * np.arange(num_rounds) - 1.0)
        covariances[0] = self.covariance(np.minimum.outer(t, t), np.maximum.outer(t, t)).mean()
        return average_variances(covariances)


def average_variances(autocovariances: np.ndarray) -> np.ndarray:
    """Return the variances of averages of ``1 .. n`` states; autocovariances are by lag."""
    num = np.arange(1, 1 + len(autocovariances))
    # The inner sums are over lags k, of (num - k) times the autocovariance.
    return (2 * autocovariances.cumsum().cumsum() - num * autocovariances[0]) / num**2


def relay_law(
    shards: np.ndarray,
    *,
    step_size: float,
    batch_size: float,
    num_local_steps: int,
    alpha: float,
    surrogate_means: np.ndarray | None = None,
) -> RelayLaw:
    """Return the distribution of FSGLD, or with `alpha` zero DSGLD, for rows ``N(theta, I)``.

    The prior is ``N(0, I)``; `shards` are ``[num_clients, rows, d]``, `surrogate_means`
    ``[num_clients, d]``, by default the means of the shards. Full gradients are minibatches of
    infinite size.
    """
    num_clients, num_rows, _ = shards.shape
    means = shards.mean(axis=1)
    centers = means if surrogate_means is None else surrogate_means
    pull = num_rows * (num_clients * means + alpha * (centers.sum(axis=0) - num_clients * centers))
    total = num_rows * num_clients
    noise = 2 * step_size + (step_size * total) ** 2 * shards.var(axis=1).mean() / batch_size
    return RelayLaw(1 - step_size * (1 + total), step_size * pull, noise, num_local_steps)


def rows(jobs: Sequence[JobRows], grid_points: int) -> list[Row]:
    """Return exact moments for the measured ones of every job, and what depends on no job.

    The constants of the bounds are evaluated on a grid over the square of the shards' means with
    `grid_points` per side.
    """
    data = problems.load(jobs[0].config).data
    shape = (data.num_clients, data.num_rows // data.num_clients, -1)
    shards = np.asarray(data.rows["y"], np.float64).reshape(shape)
    result = [row for job in jobs for row in _exact(job, shards)]
    result += _bounds(shards, jobs[0].config["data"]["spread"], grid_points)
    return result + _widths(shards, _kernel(jobs[0])) + _coin()


def _kernel(job: JobRows) -> dict[str, Any]:
    names = ("step_size", "batch_size", "num_local_steps")
    return {name: job.config["kernel"][name] for name in names}


def _exact(job: JobRows, shards: np.ndarray) -> list[Row]:
    method, settings, config = job.rows[0].method, job.rows[0].settings, job.config
    law = relay_law(shards, alpha=float(method == "FSGLD"), **_kernel(job))
    step = (config["collect"] or {}).get("every", law.num_local_steps)
    times = range(step, law.num_local_steps + 1, step)
    num_kept = (config["num_rounds"] - config["num_burnin"]) // config["thinning"]
    precision = 1 + shards.shape[0] * shards.shape[1]
    variance, bias = law.variance(times), law.mean - shards.sum(axis=(0, 1)) / precision
    error = bias @ bias + len(bias) * law.average(times, config["thinning"], num_kept)
    numbers = {
        "variance_ratio": variance * precision,
        "variance_over_shard_means": variance / shards.mean(axis=1).var(axis=0).mean(),
        "exact_bias": np.linalg.norm(bias),
        "exact_mse": error[-1],
        "bias_share_of_mse": bias @ bias / error[-1],
    }
    if law.num_local_steps == 100:
        half = len(error) // 2
        numbers["error_slope"] = np.log(error[-1] / error[half - 1]) / np.log(len(error) / half)
    return from_numbers(method, settings, numbers)


def _bounds(shards: np.ndarray, spread: float, grid_points: int) -> list[Row]:
    """Return ``gamma_s**2`` and ``eps_s**2`` of Theorems 1 and 2, and their ratios.

    ``gamma_s**2`` is the largest squared gradient of a row, ``eps_s**2`` the average over rows of
    the squared difference to the surrogate's, which is the same everywhere.
    """
    side = np.linspace(-spread, spread, grid_points)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 1, 2)
    center = shards.mean(axis=(0, 1))
    result: list[Row] = []
    for i, shard in enumerate(shards):
        gamma, eps = ((shard - grid) ** 2).sum(axis=-1).max(), shard.var(axis=0).sum()
        average = ((shard - center) ** 2).sum(axis=-1).mean() / eps
        ratios = {"constants_ratio": gamma / eps, "constants_ratio_of_average_rows": average}
        result += from_numbers("DSGLD", {"shard": i}, {"gamma_squared": gamma})
        result += from_numbers("FSGLD", {"shard": i}, {"eps_squared": eps})
        result += from_numbers("DSGLD / FSGLD", {"shard": i}, ratios)
    return result


def _widths(shards: np.ndarray, kernel: dict[str, Any]) -> list[Row]:
    """Return exact variances over the posterior's, of one machine and of FSGLD elsewhere."""
    pooled = shards.reshape(1, -1, shards.shape[-1])

    def ratio(shards: np.ndarray, alpha: float, **changed: Any) -> float:
        law = relay_law(shards, alpha=alpha, **kernel | changed)
        return law.variance() * (1 + pooled.shape[1])

    size = kernel["batch_size"]
    of_one = {"exact_variance_ratio": ratio(pooled, 0.0)}
    of_all = {"exact_variance_ratio_of_all_rows": ratio(pooled, 0.0, batch_size=math.inf)}
    result = from_numbers("SGLD on one machine", {"batch_size": size}, of_one)
    result += from_numbers("SGLD on one machine", {}, of_all)
    for changed in ({"step_size": kernel["step_size"] / 100}, {"batch_size": 20 * size}):
        number = {"exact_variance_ratio": ratio(shards, 1.0, **changed)}
        result += from_numbers("FSGLD", changed, number)
    return result


def _coin() -> list[Row]:
    """Return exact mean and deviation of both gradient estimators for coin tosses, by ``theta``.

    A minibatch has 5 of 30 tosses; the shards of 10 have 1, 5 and 9 heads. The gradients of a toss
    are ``1 / theta`` and ``-1 / (1 - theta)``.
    """
    theta = np.linspace(0.1, 0.9, 17)
    up, down = 1 / theta[:, None], -1 / (1 - theta[:, None])
    result, deviations = [], []
    for method, shares in (("DSGLD", [0.1, 0.5, 0.9]), ("SGLD", [0.5])):
        share = np.array(shares)
        means = 30 * (share * up + (1 - share) * down)
        variances = 30**2 / 5 * share * (1 - share) * (up - down) ** 2
        deviations.append(np.sqrt(variances.mean(axis=1) + means.var(axis=1)))
        curves = {"coin_gradient_mean": means.mean(axis=1), "coin_gradient_sd": deviations[-1]}
        result += by_x(method, {}, theta, curves)
    ratios = {"coin_gradient_sd_ratio": deviations[0] / deviations[1]}
    return result + by_x("DSGLD / SGLD", {}, theta, ratios)


def vary_alpha(
    alphas: Sequence[float],
    errors: Sequence[float],
    num_draws_of_errors: int,
    data: Mapping[str, Any],
    kernel: Mapping[str, Any],
    num_rounds: int,
    num_chains: int,
    seed: int,
) -> list[Row]:
    """Return exact variances over the posterior's, and measured ones at the largest error.

    `alphas` are multiples of the conducive gradient; zero is DSGLD. `errors` are errors of the
    surrogates' means, over the standard deviation of the shards' means; exact variances are
    averages over `num_draws_of_errors` draws of these. The first tenth of a run is burn-in.
    """
    shards = makers.gaussian(**data)
    num_clients, num_rows, dim = shards.shape
    precision, means = 1 + num_clients * num_rows, shards.mean(axis=1)
    noise = np.random.default_rng(seed + 1).standard_normal((num_draws_of_errors, *means.shape))
    # With ``n - 1``, because a visit does not see the mean of the errors.
    offsets = noise * means.std(axis=0, ddof=1)

    def variances(alpha: float, error: float) -> Any:
        centers = means + error * (offsets if error else offsets[:1])
        laws = [relay_law(shards, alpha=alpha, surrogate_means=c, **kernel) for c in centers]
        return precision * np.array([law.variance() for law in laws])

    result: list[Row] = []
    for error in errors:
        for alpha in alphas:
            each = variances(alpha, error)
            numbers = {
                "variance_ratio": claims.mean(each),
                "variance_ratio_of_first_draw": each[0],
            }
            result += from_numbers("FSGLD", {"surrogate_error": error, "alpha": alpha}, numbers)
        # For every draw of errors the variance is a parabola in alpha.
        points = [0.0, 0.5, 1.0]
        curvature, slope, _ = np.polyfit(points, [variances(x, error) for x in points], 2)
        best = -slope.mean() / (2 * curvature.mean())
        remaining: Any = (slope + 2 * best * curvature) / (2 * curvature.mean())
        optimum = {
            "best_alpha": claims.Number(best, claims.mean(remaining).error),
            "best_alpha_in_theory": 1 / (1 + error**2),
        }
        result += from_numbers("FSGLD", {"surrogate_error": error}, optimum)
    federated, _ = loaders.gaussian_shards(**data)
    posterior = models.gaussian(federated)
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(means + max(errors) * offsets[0], jnp.float32),
        variance=jnp.full(num_clients, 1 / num_rows),
    )
    sizes = dict(num_rounds=num_rounds, num_burnin=num_rounds // 10, num_chains=num_chains)
    for alpha in alphas:
        # A visit ends this share of the way from the mean of all shards to the visited shard's.
        law = relay_law(shards, alpha=alpha, **kernel)
        way = means - law.mean
        moved = law.pull(law.num_local_steps) * (law.shift - law.shift.mean(axis=0))
        end = {"visit_end": (way * moved).sum() / (way**2).sum()}
        result += from_numbers("FSGLD", {"alpha": alpha}, end)
        chain = fedmcmc.fsgld(posterior, surrogates, alpha=alpha, **kernel)
        start, rng_key = jnp.zeros(dim), jax.random.key(seed)
        samples = fedmcmc.sample(rng_key, chain, federated, start, progress=False, **sizes)
        away = np.asarray(samples.draws, np.float64) - shards.sum(axis=(0, 1)) / precision
        measured = claims.mean(list(precision * (away**2).mean(axis=(1, 2))))
        place = {"surrogate_error": max(errors), "alpha": alpha}
        result += from_numbers("FSGLD", place, {"variance_ratio_measured": measured})
    return result
