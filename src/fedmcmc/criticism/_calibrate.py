"""Simulation-based calibration of a fit.

Source: Talts et al. (2018).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import gammaincc

from fedmcmc._checks import positive_integer
from fedmcmc.criticism._draws import equal_draws, position_shapes, refuse_whitened
from fedmcmc.criticism._rows import check_resample
from fedmcmc.criticism._wrapped import ReplicatedConsortium, redraw_rows
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.kernels import check_model
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import ArrayTree, Posterior, as_functions, compiled


@dataclass(frozen=True)
class RankCalibration:
    """Ranks of true parameters among the draws of fits to simulated outcomes.

    Attributes
    ----------
    ranks
        ``[num_repetitions, d]`` int, number of draws below the true value; uniform on
        ``0 .. num_ranks - 1`` if the fit is right.
    num_ranks
        Number of draws plus one.
    num_bins
        Number of histogram bins for `p_values`, a divisor of `num_ranks`.
    coordinates
        Names of the ``d`` coordinates.
    num_warned
        Number of fits that raised a `fedmcmc.SamplingWarning`; they are included.
    """

    ranks: np.ndarray
    num_ranks: int
    num_bins: int
    coordinates: tuple[str, ...]
    num_warned: int = 0

    @property
    def counts(self) -> np.ndarray:
        """Number of ranks in each bin, ``[num_bins, d]``."""
        bins = self.ranks * self.num_bins // self.num_ranks
        counts: np.ndarray = (bins[None] == np.arange(self.num_bins)[:, None, None]).sum(1)
        return counts

    @property
    def p_values(self) -> np.ndarray:
        """p-values of the chi-squared test for uniform ranks, ``[d]``."""
        expected = len(self.ranks) / self.num_bins
        statistic = ((self.counts - expected) ** 2 / expected).sum(0)
        p_values: np.ndarray = gammaincc((self.num_bins - 1) / 2, statistic / 2)
        return p_values

    def __repr__(self) -> str:
        """Return the p-value and the histogram of each coordinate."""
        num, counts, p_values = len(self.ranks), self.counts, self.p_values
        smallest = min(1.0, float(p_values.min()) * len(p_values))
        lines = [
            f"{num:,} repetitions, {self.num_bins} bins with {num / self.num_bins:.0f} expected; "
            f"smallest p times {len(p_values)} coordinates: {smallest:.2g}"
        ]
        width = max(map(len, self.coordinates))
        for j in np.argsort(p_values)[:10]:
            bars = " ".join(f"{count:>3}" for count in counts[:, j])
            lines.append(f"{self.coordinates[j]:<{width}}  p {p_values[j]:<8.2g} {bars}")
        if self.num_warned:
            lines.append(f"{self.num_warned:,} of {num:,} fits warned about their draws")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return p-values and histograms by coordinate."""
        return {
            name: {"p_value": float(self.p_values[j]), "counts": self.counts[:, j].tolist()}
            for j, name in enumerate(self.coordinates)
        }


def calibrate(
    rng_key: Array,
    posterior: Posterior,
    data: FederatedData | Consortium,
    fit: Callable[[Array, Any], Any],
    prior_fn: Callable[[Array], ArrayTree],
    *,
    num_repetitions: int = 200,
    num_draws: int = 99,
    num_bins: int = 10,
) -> RankCalibration:
    """Test a fit on outcomes that the model simulates for the clients' covariates.

    In each repetition, parameters are drawn from the prior and outcomes from the model, the model
    is fitted, and the parameters are ranked among the fit's draws. Ranks of exact draws are
    uniform; a U-shaped histogram shows draws that are too narrow.

    Parameters
    ----------
    rng_key, posterior, data
        Random key, model with a ``resample_fn``, and `FederatedData` with the clients' covariates
        or a consortium of remote clients (docs/guides/criticism.md).
    fit
        Function ``(rng_key, data) -> draws`` in the model's original coordinates: a result of
        `fedmcmc.correct` or `fedmcmc.sample`, or independent positions ``[num, *event]``.
    prior_fn
        Function ``rng_key -> position`` that draws from the prior (not ``posterior.init_fn``).
    num_repetitions, num_draws, num_bins
        Numbers of fits, draws used per fit, and histogram bins (a divisor of ``num_draws + 1``).

    Raises
    ------
    ValueError
        If there is no ``resample_fn``, `num_bins` is no divisor, or a fit has too few draws.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> redraw = lambda key, t, x: t + jax.random.normal(key, x.shape)
    >>> model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2, redraw)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.zeros(3), jnp.zeros(5)])
    >>> def fit(rng_key, data):  # exact
    ...     return data.rows.sum() / 9 + jax.random.normal(rng_key, (99,)) / 3
    >>> bool(calibrate(jax.random.key(0), model, data, fit, jax.random.normal).p_values[0] > 0.01)
    True
    """
    refuse_whitened(posterior)
    consortium = as_consortium(data)
    num_repetitions = positive_integer(num_repetitions, "num_repetitions")
    num_draws = positive_integer(num_draws, "num_draws")
    num_bins = positive_integer(num_bins, "num_bins")
    if num_bins < 2 or (num_draws + 1) % num_bins:
        raise ValueError(
            f"num_bins must be at least 2 and divide num_draws + 1 = {num_draws + 1}, got "
            f"{num_bins}."
        )
    if not callable(fit) or not callable(prior_fn):
        raise TypeError(
            "fit must be a function (rng_key, data) -> draws, and prior_fn a function rng_key -> "
            f"position, got {type(fit).__name__} and {type(prior_fn).__name__}."
        )
    like = jax.eval_shape(prior_fn, jax.eval_shape(lambda: jax.random.key(0)))
    check_model(posterior, like, consortium.federation)
    check_resample(posterior, like, consortium.federation)
    model = as_functions(posterior)
    ranks, num_warned = [], 0
    for key in jax.random.split(as_key(rng_key), num_repetitions):
        prior_key, outcome_key, fit_key, draw_key = jax.random.split(key, 4)
        truth = jax.tree.map(trees.as_float, prior_fn(prior_key))
        simulated: FederatedData | Consortium = ReplicatedConsortium(
            consortium, model, outcome_key, truth
        )
        if isinstance(data, FederatedData):
            simulated = _with_outcomes(model, data, outcome_key, truth)
        with _collect_sampling_warnings() as collected:
            draws = fit(fit_key, simulated)
            chosen = equal_draws(draws, posterior, num_draws, draw_key, minimum=num_draws)
        num_warned += bool(collected)
        shapes = position_shapes(chosen.positions)
        if not trees.same_shapes(shapes, truth):
            raise ValueError(
                "fit must return draws with the same shapes as those of prior_fn, shapes "
                f"{jax.tree.map(jnp.shape, truth)}, got {jax.tree.map(lambda x: x.shape, shapes)}."
            )
        flat = np.asarray(jax.vmap(trees.ravel)(chosen.positions))
        ranks.append((flat < np.asarray(trees.ravel(truth))).sum(0))
    names = tuple(trees.element_names(like))
    return RankCalibration(np.array(ranks), num_draws + 1, num_bins, names, num_warned)


@contextmanager
def _collect_sampling_warnings() -> Iterator[list[Any]]:
    """Collect sampling warnings in the list, and raise all other warnings again."""
    collected: list[Any] = []
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always", SamplingWarning)
        yield collected
    for x in recorded:
        if issubclass(x.category, SamplingWarning):
            collected.append(x)
        else:
            warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)


@compiled
def _with_outcomes(
    posterior: Posterior, data: FederatedData, rng_key: Array, position: ArrayTree
) -> FederatedData:
    """Return `data` with outcomes drawn at `position`, with a separate key per client."""
    by_client = data.map_clients(lambda client: redraw_rows(posterior, rng_key, position, client))
    indices = jnp.arange(data.num_rows, dtype=jnp.int32)
    owner = jnp.searchsorted(data.start, indices, side="right") - 1
    rows = jax.tree.map(lambda new: new[owner, indices - data.start[owner]], by_client)
    return replace(data, rows=rows)
