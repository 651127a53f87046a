"""Models on the same rows, compared by how well they predict each from all others.

Source: Vehtari, Gelman and Gabry (2017); Sivula, Magnusson and Vehtari (2020) for what the standard
error is worth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from fedmcmc._types import Posterior
from fedmcmc.criticism._draws import MOST_DRAWS, equal_draws
from fedmcmc.criticism._loo import Loo, ask, result_of, warn_of_rows
from fedmcmc.criticism._units import UNITS, few_units, unit_of, weight_notes
from fedmcmc.random import as_key

SMALL_DIFFERENCE, FEW_ROWS = 4, 100
"""Below so many nats or rows, the normal approximation of a difference is unreliable."""


@dataclass(frozen=True)
class Comparison:
    """How much better models predict each row from all others than another model does.

    Models stand in the order of `elpd`, the best first.

    Attributes
    ----------
    models
        One `Loo` by name.
    difference
        ``[num_models]``, `elpd` of the best model minus each model's.
    se
        ``[num_models]``, standard errors of the differences, from the rows' own differences.
    notes
        What to mind, one sentence each.
    """

    models: dict[str, Loo]
    difference: np.ndarray
    se: np.ndarray
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        """Return a table, and what to mind."""
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
    data: Any,
    *,
    unit: str | None = None,
    num_draws: int = MOST_DRAWS,
    minimum_rows: int = 10,
    efficiency: float | None = None,
    secure_sum: bool = False,
    mend: bool = False,
    rng_key: Array | None = None,
) -> Comparison:
    """Compare models by how well they predict each row from all others, in one exchange of sums.

    Differences are taken and squared row by row, at the clients: their standard error is that of
    the sum of differences, and not of a difference of sums.

    Parameters
    ----------
    models
        Name to ``(posterior, draws)``, see `loo`. All posteriors take the same rows, and their
        likelihoods are densities of the same outcomes, normalized.
    data, unit, num_draws, minimum_rows, efficiency, secure_sum, mend, rng_key
        As for `loo`; `mend` takes an exchange per model, and one for all. The unit is the same for
        all models: groups if the data have them, or one model's latents are integrated out.

    Returns
    -------
    Comparison
        The models, the best first.

    Raises
    ------
    ValueError
        As `loo`, or with fewer than two models.

    Warns
    -----
    SamplingWarning, UserWarning
        As `loo`.

    Notes
    -----
    Below about 4 nats, or 100 rows, the normal approximation of a difference is unreliable (Sivula,
    Magnusson and Vehtari 2020): the result then says so.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> def normal(sd):
    ...     return fedmcmc.Posterior(
    ...         lambda theta: -0.5 * theta**2,
    ...         lambda theta, x: -0.5 * ((x - theta) / sd) ** 2 - jnp.log(sd) - 0.919,
    ...     )
    >>> x = jax.random.normal(jax.random.key(0), (200,))
    >>> data = fedmcmc.FederatedData.from_clients([x[:50], x[50:]])
    >>> z = jax.random.normal(jax.random.key(1), (1000,))
    >>> models = {
    ...     name: (normal(sd), x.mean() + z * sd / jnp.sqrt(200))
    ...     for name, sd in (("wide", 2.0), ("right", 1.0))
    ... }
    >>> print(compare(models, data))
    model       elpd  difference      se   p_loo  bad
    right     -279.5         0.0     0.0     1.0    0
    wide      -346.7        67.3     6.8     0.2    0
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
    efficiencies = [x.efficiency if efficiency is None else efficiency for x in chosen]
    key = jax.random.key(0) if rng_key is None else as_key(rng_key)
    unit = unit_of(posteriors, data, unit)
    sums, totals = ask(
        posteriors,
        data,
        chosen,
        efficiencies,
        minimum_rows,
        secure_sum,
        unit=unit,
        mend=jax.random.fold_in(key, 1) if mend else None,
    )
    units = UNITS[unit]
    found = [result_of(sums, i, chosen[i], totals, units, minimum_rows) for i in range(len(models))]
    elpd = np.array([x.elpd for x in found])
    order = np.argsort(-elpd, kind="stable")
    best, num = order[0], found[0].num_rows
    difference = elpd[best] - elpd
    # Of the rows' differences: the mean of squares minus the square of the mean.
    squares = np.asarray(sums.differences, np.float64).sum(-1)[best]
    se = np.sqrt(np.maximum(squares - difference**2 / num, 0))
    for name, x in zip(models, found, strict=True):
        warn_of_rows(x, f"compare: {name}")
    notes = weight_notes(dict(zip(models, posteriors, strict=True)), "compare", stacklevel=3)
    if (difference[order[1:]] < SMALL_DIFFERENCE).any():
        notes.append(
            f"A difference below {SMALL_DIFFERENCE} nats is small, and its standard error "
            "unreliable."
        )
    if num < FEW_ROWS:
        notes.append(f"With {num} {units} (fewer than {FEW_ROWS}) standard errors are too small.")
    if found[0].num_not_judged:
        notes.append(few_units(found[0].num_not_judged, units, minimum_rows))
    names = list(models)
    return Comparison(
        {names[i]: found[i] for i in order}, difference[order], se[order], tuple(notes)
    )
