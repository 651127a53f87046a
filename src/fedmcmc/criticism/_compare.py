"""Comparison of models by leave-one-out cross-validation.

Source: Vehtari et al. (2017); Sivula et al. (2020) for the reliability
of the standard error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array

from fedmcmc.criticism._draws import MAX_DRAWS, equal_draws
from fedmcmc.criticism._loo import Loo, collect_sums, make_loo, warn_if_unreliable
from fedmcmc.criticism._units import UNITS, choose_unit, describe_unjudged, warn_if_weighted
from fedmcmc.data import FederatedData
from fedmcmc.runs import Consortium
from fedmcmc.types import Posterior

SMALL_DIFFERENCE, FEW_ROWS = 4, 100
"""Nats and rows below which the normal approximation of a difference is unreliable."""


@dataclass(frozen=True)
class Comparison:
    """Leave-one-out comparison of models, in descending order of `elpd`.

    Attributes
    ----------
    models
        `Loo` of each model by name.
    difference
        ``[num_models]``, `elpd` of the best model minus each model's `elpd`.
    se
        ``[num_models]``, standard errors of the differences, from differences per row.
    notes
        Limits of the result, one sentence each.
    """

    models: dict[str, Loo]
    difference: np.ndarray
    se: np.ndarray
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Return a table and the notes."""
        width = max(map(len, ["model", *self.models]))
        lines = [
            f"{'model':<{width}}  {'elpd':>9}  {'difference':>10}  {'se':>6}  {'p_loo':>6}  bad"
        ]
        for (name, model), gap, se in zip(
            self.models.items(), self.difference, self.se, strict=True
        ):
            lines.append(
                f"{name:<{width}}  {model.elpd:>9.1f}  {gap:>10.1f}  {se:>6.1f}  "
                f"{model.p_loo:>6.1f}  {model.num_bad:>3}"
            )
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each model by its name."""
        return {
            name: {**model.to_dict(), "difference": float(gap), "difference_se": float(se)}
            for (name, model), gap, se in zip(
                self.models.items(), self.difference, self.se, strict=True
            )
        }


def compare(
    models: Mapping[str, tuple[Posterior, Any]],
    data: FederatedData | Consortium,
    *,
    unit: str | None = None,
    num_draws: int = MAX_DRAWS,
    minimum_rows: int = 10,
    efficiency: float | None = None,
    secure_sum: bool = False,
    refine: bool = False,
    rng_key: Array | None = None,
) -> Comparison:
    """Compare models by leave-one-out cross-validation, in one exchange of sums.

    Clients compute and square the difference of two models for each row, for the standard error of
    the sum of differences. Below about 4 nats or 100 rows this error is unreliable (Sivula
    et al. 2020), and the result notes it. Models are in descending order of `elpd`.

    Parameters
    ----------
    models
        Mapping of names to ``(posterior, draws)``, see `loo`. All posteriors use the same rows, and
        their likelihoods are normalized densities of the same outcomes.
    data, unit, num_draws, minimum_rows, efficiency, secure_sum, refine, rng_key
        See `loo`; `refine` takes one exchange per model and one for all models. All models have the
        same unit.

    Raises
    ------
    ValueError
        If there are fewer than two models, or for a reason listed in `loo`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> def normal(sd):
    ...     logdensity = lambda t, x: -0.5 * ((x - t) / sd) ** 2 - jnp.log(sd) - 0.919
    ...     return fedmcmc.Posterior(lambda t: -0.5 * t**2, logdensity)
    >>> x = jax.random.normal(jax.random.key(0), (200,))
    >>> data = fedmcmc.FederatedData.from_clients([x[:50], x[50:]])
    >>> z = jax.random.normal(jax.random.key(1), (1000,)) / jnp.sqrt(200)
    >>> models = {f"sd {sd}": (normal(sd), x.mean() + sd * z) for sd in (2.0, 1.0)}
    >>> print(compare(models, data))
    model        elpd  difference      se   p_loo  bad
    sd 1.0     -279.5         0.0     0.0     1.0    0
    sd 2.0     -346.7        67.3     6.8     0.2    0
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError(
            "compare needs at least two models, {name: (posterior, draws), ...}, got "
            f"{len(models) if isinstance(models, Mapping) else type(models).__name__}."
        )
    posteriors = tuple(posterior for posterior, _ in models.values())
    chosen = tuple(
        equal_draws(draws, model, num_draws, rng_key) for model, draws in models.values()
    )
    unit = choose_unit(posteriors, data, unit)
    sums, totals = collect_sums(
        posteriors, data, chosen, unit, minimum_rows, efficiency, secure_sum, refine, rng_key
    )
    units = UNITS[unit]
    results = [make_loo(sums, i, x, totals, units, minimum_rows) for i, x in enumerate(chosen)]
    elpd = np.array([x.elpd for x in results])
    order = np.argsort(-elpd, kind="stable")
    best, num = order[0], results[0].num_rows
    difference = elpd[best] - elpd
    squares = np.asarray(sums.differences, np.float64).sum(-1)[best]
    se = np.sqrt(np.maximum(squares - difference**2 / num, 0))
    for name, x in zip(models, results, strict=True):
        warn_if_unreliable(x, f"compare: {name}")
    notes = warn_if_weighted(dict(zip(models, posteriors, strict=True)), "compare", stacklevel=3)
    if (difference[order[1:]] < SMALL_DIFFERENCE).any():
        notes.append(
            f"A difference below {SMALL_DIFFERENCE} nats is small, and its standard error is "
            "unreliable."
        )
    if num < FEW_ROWS:
        notes.append(f"With {num} {units} (fewer than {FEW_ROWS}) standard errors are too small.")
    if results[0].num_not_judged:
        notes.append(describe_unjudged(results[0].num_not_judged, units, minimum_rows))
    names = list(models)
    return Comparison(
        {names[i]: results[i] for i in order}, difference[order], se[order], tuple(notes)
    )
