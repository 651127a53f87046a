"""El Mekkaoui et al. (2021), Remark 1: a multiple of the conducive gradient, exactly."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import loaders, models
from experiments import shards as makers
from experiments.claims import Number
from experiments.claims import mean as mean_with_error
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
    if min(*alphas, *errors) < 0 or num_draws_of_errors < 2 or num_rounds < 10:
        raise ValueError(
            "alphas and errors must not be negative, num_draws_of_errors must be at least 2 and "
            "num_rounds at least 10."
        )
    shards = makers.gaussian(**data)
    precision = 1 + shards.shape[0] * shards.shape[1]
    means = shards.mean(axis=1)
    noise = np.random.default_rng(seed + 1).standard_normal((num_draws_of_errors, *means.shape))
    # With ``n - 1``, because a visit does not see the mean of the errors.
    offsets = noise * means.std(axis=0, ddof=1)

    def variances(alpha: float, error: float) -> np.ndarray:
        laws = [
            relay_law(shards, alpha=alpha, surrogate_means=means + error * offset, **kernel)
            for offset in offsets
        ]
        return np.array([precision * law.variance([law.num_local_steps]) for law in laws])

    best, ratios = [], []
    for error in errors:
        for alpha in alphas:
            each = variances(alpha, error)
            numbers = {
                "variance_ratio": mean_with_error(list(each)) if error else each.mean(),
                "variance_ratio_of_first_draw": each[0],
            }
            if error == max(errors):
                numbers["variance_ratio_measured"] = _measured(
                    data,
                    {**kernel, "alpha": alpha},
                    means + error * offsets[0],
                    seed,
                    **dict(num_rounds=num_rounds, num_chains=num_chains),
                )
            settings = {"surrogate_error": error, "alpha": alpha}
            ratios += from_numbers("FSGLD", settings, numbers)
        probes = np.stack([variances(alpha, error) for alpha in (0.0, 0.5, 1.0)])
        best += from_numbers("FSGLD", {"surrogate_error": error}, _least(probes, error))
    for alpha in alphas:
        # A visit ends this share of the way from the mean of all shards to the visited shard's.
        law = relay_law(shards, alpha=alpha, **kernel)
        way = means - law.mean
        moved = law.pull(law.num_local_steps) * (law.shift - law.shift.mean(axis=0))
        end = {"visit_end": (way * moved).sum() / (way**2).sum()}
        best += from_numbers("FSGLD", {"alpha": alpha}, end)
    return best + ratios


def _least(variances: np.ndarray, error: float) -> dict[str, Any]:
    """Return where the average of the parabolas through 0, 1/2 and 1 is least, with its error.

    `variances` is ``[3, num_draws]``; for every draw the variance is a parabola in `alpha`.
    """
    start, middle, end = variances
    curvature = 2 * (start - 2 * middle + end)
    slope = 4 * middle - 3 * start - end  # at zero
    best = -slope.mean() / (2 * curvature.mean())
    gap = slope + 2 * best * curvature  # of each draw, at the best of all
    single = -slope / (2 * curvature)
    deviation = gap.std(ddof=1) / len(gap) ** 0.5 / (2 * curvature.mean())
    return {
        "best_alpha": Number(float(best), float(deviation)),
        "best_alpha_in_theory": 1 / (1 + error**2),
        "lowest_best_alpha_of_a_draw": single.min(),
        "highest_best_alpha_of_a_draw": single.max(),
    }


def _measured(
    data: Mapping[str, Any],
    kernel: Mapping[str, Any],
    surrogate_means: np.ndarray,
    seed: int,
    **sizes: int,
) -> Number:
    """Return the variance of a run over the posterior's."""
    federated, _ = loaders.gaussian_shards(**data)
    num_clients = federated.num_clients
    surrogates = fedmcmc.Gaussian.from_moments(
        jnp.asarray(surrogate_means, jnp.float32),
        variance=jnp.full(num_clients, num_clients / federated.num_rows),
    )
    samples = fedmcmc.sample(
        jax.random.key(seed),
        fedmcmc.fsgld(models.gaussian(federated), surrogates, **kernel),
        federated,
        jnp.zeros(2),
        num_burnin=sizes["num_rounds"] // 10,
        progress=False,
        **sizes,
    )
    mean = np.asarray(federated.rows["y"], np.float64).sum(axis=0) / (1 + federated.num_rows)
    squares = (np.asarray(samples.draws, np.float64) - mean) ** 2
    return mean_with_error(list((1 + federated.num_rows) * squares.mean(axis=(1, 2))))
