"""Selection of the parameters that a page shows, and their summaries."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.diagnostics import Mixing, mixing
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree

MAX_SHOWN = 40
"""Number of parameters in a page's table and forest plot."""
BATCH_SIZE = 8
"""Number of parameters per call of `mixing`, which never leaves any of 8 out."""
MIN_DRAWS = 8
"""Smallest number of draws per chain for R-hat and effective sample sizes."""


class Shown(NamedTuple):
    """Parameters that a page shows, with their draws.

    Attributes
    ----------
    names
        Names of the shown parameters.
    values
        ``[num_chains, num_draws, num_shown]`` float64.
    num_parameters
        Number of all parameters.
    """

    names: tuple[str, ...]
    values: np.ndarray
    num_parameters: int

    @property
    def finite(self) -> np.ndarray:
        """``[num_shown]`` bool, true if all draws of a parameter are finite."""
        return np.isfinite(self.values).all((0, 1))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return moments and quantiles of each shown parameter, by name."""
        values = self.values.reshape(-1, self.values.shape[-1])
        if not values.size:
            return {}
        with np.errstate(all="ignore"):  # chains that ran away
            low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
            columns = dict(mean=values.mean(0), sd=values.std(0))
        columns |= {"5 %": low, "50 %": middle, "95 %": high}
        return {
            name: {key: float(column[i]) for key, column in columns.items()}
            for i, name in enumerate(self.names)
        }


def _select_indices(sizes: list[int], limit: int) -> list[np.ndarray]:
    """Return the indices to show from each site, at most `limit` in total.

    Small sites are shown completely. Larger sites get equal shares of evenly spaced indices, so
    that thousands of weights do not hide shared parameters.

    Examples
    --------
    >>> [indices.tolist() for indices in _select_indices([1, 100, 2], 6)]
    [[0], [0, 50, 99], [0, 1]]
    """
    indices = [np.zeros(0, int)] * len(sizes)
    remaining = limit
    for rank, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        share = min(sizes[i], remaining // (len(sizes) - rank))
        indices[i] = np.linspace(0, sizes[i] - 1, share).round().astype(int)
        remaining -= share
    return indices


def select_parameters(draws: ArrayTree, limit: int = MAX_SHOWN) -> Shown:
    """Select parameters of draws with leaves ``[num_chains, num_draws, *event]``."""
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(draws)
        if jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
    ]
    if not leaves:
        return Shown((), np.zeros((1, 0, 0)), 0)
    sizes = [math.prod(leaf.shape[2:]) for _, leaf in leaves]
    names: list[str] = []
    columns = []
    for (site, leaf), size, chosen in zip(
        leaves, sizes, _select_indices(sizes, limit), strict=True
    ):
        event = np.broadcast_to(0.0, leaf.shape[2:])
        names += trees.element_names({site: event} if site else event, [chosen])
        flat = np.asarray(leaf).reshape(*leaf.shape[:2], size)
        columns.append(flat[..., chosen].astype(np.float64))
    return Shown(tuple(names), np.concatenate(columns, -1), sum(sizes))


def compute_mixing(values: np.ndarray) -> Mixing | None:
    """Return the `Mixing` of values ``[num_chains, num_draws, n]``; ``None`` with too few draws.

    The figures of a parameter are NaN if one of its draws is not finite.
    """
    num = values.shape[-1]
    if values.shape[1] < MIN_DRAWS or not num:
        return None
    finite = np.isfinite(values).all((0, 1))
    clean = np.where(finite, values, 0.0)
    parts = [mixing(clean[..., i : i + BATCH_SIZE]) for i in range(0, num, BATCH_SIZE)]
    joined = {
        name: np.where(finite, np.concatenate([getattr(part, name) for part in parts]), np.nan)
        for name in ("rhat", "ess_bulk", "ess_tail", "reach")
    }
    return Mixing(
        **joined, coordinates=np.arange(num), num_coordinates=num, num_parts=parts[0].num_parts
    )


def summarize(draws: ArrayTree, limit: int = 200) -> dict[str, dict[str, float]]:
    """Return moments and quantiles of draws with leaves ``[num_chains, num_draws, *event]``.

    At most `limit` parameters are summarized.

    Examples
    --------
    >>> row = summarize({"a": np.arange(5.0)[None]})["a"]
    >>> row["mean"], row["50 %"]
    (2.0, 2.0)
    """
    return select_parameters(draws, limit).summary()


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Header and rows for `Page.table`."""
MOMENTS = ("mean", "sd", "5 %", "50 %", "95 %")


def table_of_rows(rows: dict[str, dict[str, float]]) -> Table:
    """Return the table of a result of `summarize`."""
    cells = [(name, *(f"{row[key]:.4g}" for key in MOMENTS)) for name, row in rows.items()]
    return ("parameter", *MOMENTS), cells


def table_of(draws: ArrayTree, limit: int) -> Table:
    """Return the table of at most `limit` parameters, and a row with the number left out."""
    shown = select_parameters(draws, limit)
    header, cells = table_of_rows(shown.summary())
    num_hidden = shown.num_parameters - len(shown.names)
    if num_hidden:
        cells.append((f"and {num_hidden:,} more", *("" for _ in MOMENTS)))
    return header, cells
