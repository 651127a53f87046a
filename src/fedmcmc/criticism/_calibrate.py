"""Simulation-based calibration: whether what fits a model fits it right, on outcomes of its own.

Source: Talts, Betancourt, Simpson, Vehtari and Gelman (2018).
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

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Posterior, as_functions, compiled
from fedmcmc.criticism._draws import equal_draws, one_of
from fedmcmc.criticism._others import Outcomes, redrawn
from fedmcmc.criticism._rows import check_resample
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.kernels import check_model
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.runs import as_consortium


@dataclass(frozen=True)
class Calibration:
    """Ranks of true parameters among draws of what was fitted to their outcomes.

    Attributes
    ----------
    ranks
        ``[num_repetitions, d]`` int, how many of the draws lie below the true value; uniform on
        ``0 .. num_ranks - 1`` where the fit is right.
    num_ranks
        One more than the draws.
    num_bins
        Of the histograms that `p_values` are of; it divides `num_ranks`.
    coordinates
        Names of the ``d`` coordinates.
    num_warned
        How many fits warned of their own draws (`fedmcmc.SamplingWarning`); they count as all.
    """

    ranks: np.ndarray
    num_ranks: int
    num_bins: int
    coordinates: tuple[str, ...]
    num_warned: int = 0

    @property
    def counts(self) -> np.ndarray:
        """Ranks in each bin, ``[num_bins, d]``."""
        place = self.ranks * self.num_bins // self.num_ranks
        counts: np.ndarray = (place[None] == np.arange(self.num_bins)[:, None, None]).sum(1)
        return counts

    @property
    def p_values(self) -> np.ndarray:
        """Of the chi-squared test of uniform ranks, ``[d]``."""
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
            lines.append(f"{self.num_warned:,} of {num:,} fits warned of their draws")
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
    data: Any,
    fit: Callable[[Array, Any], Any],
    prior_fn: Callable[[Array], ArrayTree],
    *,
    num_repetitions: int = 200,
    num_draws: int = 99,
    num_bins: int = 10,
) -> Calibration:
    """Test a fit on outcomes that the model draws for the clients' own covariates.

    Parameters are drawn from the prior, outcomes from the model, the fit is asked for draws, and
    the true parameters are ranked among them. Where draws are the posterior's, ranks are uniform; a
    histogram shaped as a U says that draws are too narrow, a heap that they are too wide.

    Parameters
    ----------
    rng_key
        For everything.
    posterior
        The model, in its own coordinates, with a ``resample_fn``.
    data
        Clients with their covariates, a `FederatedData`; outcomes are drawn anew. Or a consortium
        of clients elsewhere, who draw outcomes themselves: then `fit` is given a consortium that
        answers questions about these, and runs no kernels (study: ``asks`` with ``"Redrawn"``).
    fit
        ``(rng_key, data) -> draws`` in the model's own coordinates: what `fedmcmc.correct` or
        `fedmcmc.sample` returns, or a pytree of independent positions ``[num, *event]``. Data of
        all repetitions have the same shapes, so that compiled programs are used again.
    prior_fn
        ``rng_key -> position``, a draw of the prior. (``init_fn`` of a posterior is a place to
        start from, and no draw of the prior.)
    num_repetitions
        Fits.
    num_draws
        Draws of each fit that are used, one less than the number of ranks. Of correlated draws take
        few, at long distances.
    num_bins
        Divides ``num_draws + 1``.

    Returns
    -------
    Calibration
        Ranks and p-values.

    Raises
    ------
    ValueError
        Without a ``resample_fn``, if bins do not divide the ranks, or a fit gives too few draws.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2,
    ...     lambda theta, x: -0.5 * (x - theta) ** 2,
    ...     lambda key, theta, x: theta + jax.random.normal(key, x.shape),
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.zeros(3), jnp.zeros(5)])
    >>> def fit(rng_key, data):  # exact
    ...     return data.rows.sum() / 9 + jax.random.normal(rng_key, (99,)) / 3
    >>> found = calibrate(jax.random.key(0), posterior, data, fit, jax.random.normal)
    >>> bool(found.p_values[0] > 0.01)
    True
    """
    expect(posterior, Posterior, "posterior")
    consortium = as_consortium(data)
    num_repetitions = positive_integer(num_repetitions, "num_repetitions")
    num_draws = positive_integer(num_draws, "num_draws")
    num_bins = positive_integer(num_bins, "num_bins")
    if num_bins < 2 or (num_draws + 1) % num_bins:
        raise ValueError(
            f"num_bins must be at least 2 and divide num_draws + 1 = {num_draws + 1}, got "
            f"{num_bins}."
        )
    if posterior.position_fn is not None:
        raise ValueError(
            "Draws are compared in the model's own coordinates, and posterior is in whitened ones: "
            "pass the posterior that was given to whiten."
        )
    if not callable(fit) or not callable(prior_fn):
        raise TypeError(
            "fit must be a function (rng_key, data) -> draws and prior_fn one rng_key -> position, "
            f"got {type(fit).__name__} and {type(prior_fn).__name__}."
        )
    like = jax.eval_shape(prior_fn, jax.eval_shape(lambda: jax.random.key(0)))
    check_model(posterior, like, consortium.federation)
    check_resample(posterior, like, consortium.federation)
    model = as_functions(posterior)
    ranks, num_warned = [], 0
    for key in jax.random.split(as_key(rng_key), num_repetitions):
        prior_key, outcome_key, fit_key, draw_key = jax.random.split(key, 4)
        truth = jax.tree.map(trees.as_float, prior_fn(prior_key))
        here = isinstance(data, FederatedData)
        drawn: Any = Outcomes(consortium, model, outcome_key, truth)
        if here:
            drawn = _with_outcomes(model, data, outcome_key, truth)
        with _counted() as said:
            found = fit(fit_key, drawn)
            chosen = equal_draws(found, posterior, num_draws, draw_key, least=num_draws)
        num_warned += bool(said)
        if not trees.same_shapes(one_of(chosen.positions), truth):
            raise ValueError(
                "fit must return draws of positions as those of prior_fn, shapes "
                f"{jax.tree.map(jnp.shape, truth)}, got "
                f"{jax.tree.map(lambda x: x.shape, one_of(chosen.positions))}."
            )
        flat = np.asarray(jax.vmap(trees.ravel)(chosen.positions))
        ranks.append((flat < np.asarray(trees.ravel(truth))).sum(0))
    names = tuple(trees.element_names(like))
    return Calibration(np.array(ranks), num_draws + 1, num_bins, names, num_warned)


@contextmanager
def _counted() -> Iterator[list[Any]]:
    """Keep warnings of draws in a list, and pass others on.

    Of some hundred fits a few warn, which is their business; how many is ours.
    """
    counted: list[Any] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", SamplingWarning)
        yield counted
    counted += [x for x in said if issubclass(x.category, SamplingWarning)]
    for x in said:
        if not issubclass(x.category, SamplingWarning):
            warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)


@compiled
def _with_outcomes(
    posterior: Posterior, data: FederatedData, rng_key: Array, position: ArrayTree
) -> FederatedData:
    """Return `data` with outcomes drawn at `position`, each client's with a key of its own."""
    by_client = data.map_clients(lambda client: redrawn(posterior, rng_key, position, client))
    places = jnp.arange(data.num_rows, dtype=jnp.int32)
    owner = jnp.searchsorted(data.start, places, side="right") - 1
    rows = jax.tree.map(lambda new: new[owner, places - data.start[owner]], by_client)
    return replace(data, rows=rows)
