"""El Mekkaoui et al. (2021), Remark 1: a multiple of the conducive gradient, exactly."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import claims, loaders, models
from experiments import shards as makers
from experiments.special.fsgld_gaussian import relay_law
from experiments.tidy import Row, from_numbers

__all__ = ["rows"]


def rows(
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

    def variances(alpha: float, error: float) -> np.ndarray:
        laws = [
            relay_law(shards, alpha=alpha, surrogate_means=means + error * offset, **kernel)
            for offset in offsets
        ]
        return np.array([precision * law.variance([law.num_local_steps]) for law in laws])

    federated, _ = loaders.gaussian_shards(**data)
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(means + max(errors) * offsets[0], jnp.float32),
        variance=jnp.full(num_clients, 1 / num_rows),
    )

    def measured(alpha: float) -> claims.Number:
        samples = fedmcmc.sample(
            jax.random.key(seed),
            fedmcmc.fsgld(models.gaussian(federated), surrogates, alpha=alpha, **kernel),
            federated,
            jnp.zeros(dim),
            num_rounds=num_rounds,
            num_burnin=num_rounds // 10,
            num_chains=num_chains,
            progress=False,
        )
        away = np.asarray(samples.draws, np.float64) - shards.sum(axis=(0, 1)) / precision
        return claims.mean(list(precision * (away**2).mean(axis=(1, 2))))

    result: list[Row] = []
    for error in errors:
        place = {"surrogate_error": error}
        for alpha in alphas:
            each = variances(alpha, error)
            numbers = {
                "variance_ratio": claims.mean(list(each)) if error else each[0],
                "variance_ratio_of_first_draw": each[0],
            }
            if error == max(errors):
                numbers["variance_ratio_measured"] = measured(alpha)
            result += from_numbers("FSGLD", {**place, "alpha": alpha}, numbers)
        # For every draw of errors the variance is a parabola in alpha.
        points = [0.0, 0.5, 1.0]
        curvature, slope, _ = np.polyfit(points, [variances(x, error) for x in points], 2)
        best = -slope.mean() / (2 * curvature.mean())
        remaining = claims.mean(list(slope + 2 * best * curvature)) / (2 * curvature.mean())
        least = {
            "best_alpha": claims.Number(best, remaining.error if error else 0.0),
            "best_alpha_in_theory": 1 / (1 + error**2),
        }
        result += from_numbers("FSGLD", place, least)
    for alpha in alphas:
        # A visit ends this share of the way from the mean of all shards to the visited shard's.
        law = relay_law(shards, alpha=alpha, **kernel)
        way = means - law.mean
        moved = law.pull(law.num_local_steps) * (law.shift - law.shift.mean(axis=0))
        end = {"visit_end": (way * moved).sum() / (way**2).sum()}
        result += from_numbers("FSGLD", {"alpha": alpha}, end)
    return result
