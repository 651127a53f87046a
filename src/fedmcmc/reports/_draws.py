"""Which parameters a page shows, and what draws say of each."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics import Mixing, mixing
from fedmcmc.pytrees import trees

MOST_SHOWN = 40
"""Parameters that a page shows, in its table and in its forest plot."""
AT_ONCE = 8
"""Parameters that are judged together, as many as `mixing` never leaves out."""


class Shown(NamedTuple):
    """Parameters that are shown, with their draws.

    Attributes
    ----------
    names
        One for each.
    values
        ``[num_chains, num_draws, num_shown]`` float64.
    num_parameters
        How many there are in all.
    """

    names: tuple[str, ...]
    values: np.ndarray
    num_parameters: int

    @property
    def finite(self) -> np.ndarray:
        """``[num_shown]`` bool, whether all draws of a parameter are finite."""
        return np.isfinite(self.values).all((0, 1))


def shares(sizes: list[int], most: int) -> list[np.ndarray]:
    """Return which numbers of each site to show, at most `most` in all.

    Small sites are shown whole, larger ones in equal shares, evenly spaced: so that shared
    parameters are not lost among thousands of weights.

    Examples
    --------
    >>> [places.tolist() for places in shares([1, 100, 2], 6)]
    [[0], [0, 50, 99], [0, 1]]
    """
    places = [np.zeros(0, int)] * len(sizes)
    left = most
    for rank, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        share = min(sizes[i], left // (len(sizes) - rank))
        places[i] = np.linspace(0, sizes[i] - 1, share).round().astype(int)
        left -= share
    return places


def shown(draws: ArrayTree, most: int = MOST_SHOWN) -> Shown:
    """Return some numbers of draws with leaves ``[num_chains, num_draws, *event]``."""
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
    for (site, leaf), size, own in zip(leaves, sizes, shares(sizes, most), strict=True):
        event = np.broadcast_to(0.0, leaf.shape[2:])
        names += trees.element_names({site: event} if site else event, [own])
        flat = np.asarray(leaf).reshape(*leaf.shape[:2], size)
        columns.append(flat[..., own].astype(np.float64))
    return Shown(tuple(names), np.concatenate(columns, -1), sum(sizes))


def judged(values: np.ndarray) -> Mixing | None:
    """Return R-hat and effective draws of every number; ``None`` where draws are too few.

    `values` is ``[num_chains, num_draws, n]``. Where a draw is not finite, all of them are NaN.
    """
    if values.shape[1] < AT_ONCE or not values.shape[-1]:
        return None
    finite = np.isfinite(values).all((0, 1))
    clean = np.where(finite, values, 0.0)
    parts = [mixing(clean[..., i : i + AT_ONCE]) for i in range(0, values.shape[-1], AT_ONCE)]
    joined = {
        name: np.where(finite, np.concatenate([getattr(part, name) for part in parts]), np.nan)
        for name in ("rhat", "ess_bulk", "ess_tail", "reach")
    }
    num = values.shape[-1]
    return Mixing(
        **joined,
        coordinates=np.arange(num),
        num_coordinates=num,
        num_parts=parts[0].num_parts,
    )


def summarized(draws: ArrayTree, most: int = 200) -> dict[str, dict[str, float]]:
    """Return moments and quantiles of draws with leaves ``[num_chains, num_draws, *event]``.

    Of `most` parameters, chosen as `shares` does.

    Examples
    --------
    >>> row = summarized({"a": np.arange(5.0)[None]})["a"]
    >>> row["mean"], row["50 %"]
    (2.0, 2.0)
    """
    return rows_of(shown(draws, most))


def rows_of(found: Shown) -> dict[str, dict[str, float]]:
    """Return moments and quantiles of each parameter that is shown, by name."""
    values = found.values.reshape(-1, found.values.shape[-1])
    if not values.size:
        return {}
    with np.errstate(all="ignore"):  # of chains that ran away
        low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
        columns = dict(mean=values.mean(0), sd=values.std(0))
    columns |= {"5 %": low, "50 %": middle, "95 %": high}
    return {
        name: {key: float(column[i]) for key, column in columns.items()}
        for i, name in enumerate(found.names)
    }


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A header and rows, for `Page.table`."""
MOMENTS = ("mean", "sd", "5 %", "50 %", "95 %")


def table_of_rows(rows: dict[str, dict[str, float]]) -> Table:
    """Return the table of what `summarized` returns."""
    cells = [(name, *(f"{row[key]:.4g}" for key in MOMENTS)) for name, row in rows.items()]
    return ("parameter", *MOMENTS), cells


def table_of(draws: ArrayTree, most: int) -> Table:
    """Return the table of at most `most` parameters, and a last line on how many there are."""
    found = shown(draws, most)
    header, cells = table_of_rows(rows_of(found))
    if len(found.names) < found.num_parameters:
        left = found.num_parameters - len(found.names)
        cells.append((f"and {left:,} more", *("" for _ in MOMENTS)))
    return header, cells
