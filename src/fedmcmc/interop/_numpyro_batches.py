"""Small batches of rows that show whether a model's terms depend on the other rows of a batch.

Random rows may all be alike: of one arm, of one patient each, from one end of a sorted table. So
batches of several kinds are taken from all clients' rows, and some are made up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.data import FederatedData

BATCH = 16
"""Rows of a batch."""
MOST_COLUMNS = 8
"""Columns of the rows, at most, by whose values rows are chosen."""
MOST_SORTED = 100_000
"""Rows, at most, among which rows with the same value of a column are sought."""


class Batch(NamedTuple):
    """Rows that are evaluated together.

    Attributes
    ----------
    rows
        Leaves ``[BATCH, ...]``.
    numbers
        ``[BATCH]`` int, the number of each among all rows, -1 for a row that is made up.
    """

    rows: ArrayTree
    numbers: np.ndarray


def batches_of(rows: ArrayTree, data: FederatedData | None, is_real: bool = True) -> list[Batch]:
    """Return batches of `rows` (those of `data`, if there are several clients), and made-up ones.

    Parameters
    ----------
    rows
        Leaves ``[num_rows, ...]``.
    data
        Whose rows these are, so that some batches hold consecutive rows of a client.
    is_real
        Whether to take rows; otherwise all batches are made up from their shapes.
    """
    rng = np.random.default_rng(0)
    nobody = np.full(BATCH, -1)
    made_up = [Batch(_made_up(rows, rng, kind), nobody) for kind in ("codes", "fractions", "wide")]
    if not is_real:
        return made_up
    chosen = [c for c in _choices(rows, data, rng) if len(c)]
    # One gather of all, as the rows may be many and on another device.
    every, places = np.unique(np.concatenate(chosen), return_inverse=True)
    # Of one size for all data of a structure, so that the gather is compiled once.
    padded = np.resize(every, BATCH * len(chosen))
    few = jax.tree.map(lambda leaf: _gather(leaf, padded), rows)
    batches, first = [], 0
    for numbers in chosen:
        own = places[first : first + len(numbers)]
        first += len(numbers)

        def filled(real: np.ndarray, other: np.ndarray, own: np.ndarray = own) -> np.ndarray:
            return np.concatenate([real[own], other[len(own) :]])

        batches.append(
            Batch(
                jax.tree.map(filled, few, made_up[0].rows),
                np.concatenate([numbers, nobody[len(numbers) :]]),
            )
        )
    return batches + made_up


def _choices(
    rows: ArrayTree, data: FederatedData | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the rows of each batch by their numbers, each at most once."""
    num = jax.tree.leaves(rows)[0].shape[0]
    order = rng.permutation(num) if num <= MOST_SORTED else rng.choice(num, 2 * BATCH, False)
    chosen = [order[:BATCH], order[BATCH : 2 * BATCH]]
    starts, sizes = np.zeros(1, int), np.array([num])
    if data is not None:
        starts, sizes = np.asarray(data.start), np.asarray(data.size)
    for client in rng.permutation(len(sizes))[:2]:
        first = int(rng.integers(0, max(int(sizes[client]) - BATCH, 0) + 1))
        last = min(first + BATCH, int(sizes[client]))
        chosen.append(int(starts[client]) + np.arange(first, last))
    columns = _columns(rows)
    ends = [end(column) for column in columns for end in (np.argmin, np.argmax)]
    extremes = rng.permutation(np.unique(np.array(ends, int)))
    chosen += [extremes[i : i + BATCH] for i in range(0, len(extremes), BATCH)]
    some = np.arange(num) if num <= MOST_SORTED else rng.choice(num, MOST_SORTED, False)
    return chosen + [some[_alike(column[some], rng)] for column in columns]


def _alike(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rows of which several have the same value: of a rare arm as of a frequent one.

    Where no two rows have the same value, return those with the smallest and largest ones.
    """
    levels, counts = np.unique(column, return_counts=True, equal_nan=False)
    levels = levels[counts > 1]
    levels = rng.permutation(levels)[: BATCH // 2]
    if not len(levels):
        order = np.argsort(column)
        return np.unique(np.concatenate([order[: BATCH // 2], order[-(BATCH // 2) :]]))
    each = BATCH // len(levels)
    found = [rng.permutation(np.flatnonzero(column == level))[:each] for level in levels]
    return rng.permutation(np.concatenate(found))


def _columns(rows: ArrayTree) -> list[np.ndarray]:
    """Return some columns of numbers, ``[num_rows]``: at first those that are a leaf."""
    numeric = [leaf for leaf in jax.tree.leaves(rows) if _is_numeric(leaf.dtype)]
    columns: list[np.ndarray] = []
    for leaf in sorted(numeric, key=lambda leaf: leaf.ndim):
        left = MOST_COLUMNS - len(columns)
        if left <= 0:
            break
        table = leaf.reshape(leaf.shape[0], -1)[:, :left]
        columns += list(np.asarray(table).T)
    return columns


def _is_numeric(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def _gather(leaf: Any, numbers: np.ndarray) -> np.ndarray:
    """Return rows of a leaf; of an array on an accelerator, with one program for similar counts."""
    if not isinstance(leaf, jax.Array) or all(x.platform == "cpu" for x in leaf.devices()):
        return np.asarray(leaf)[numbers]
    padded = np.resize(numbers, 1 << (len(numbers) - 1).bit_length())
    return np.asarray(leaf[padded])[: len(numbers)]


def _made_up(rows: ArrayTree, rng: np.random.Generator, kind: str) -> ArrayTree:
    """Return rows with values that most distributions and tables take.

    Small integers for all columns ("codes"), fractions for floats beside zeros and ones
    ("fractions"), or values further apart ("wide").
    """
    top = {"codes": 4, "fractions": 2, "wide": 10}[kind]

    def column(leaf: Any) -> np.ndarray:
        shape = (BATCH, *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = {
                "codes": lambda: rng.integers(0, 3, shape),
                "fractions": lambda: rng.uniform(0.1, 0.9, shape),
                "wide": lambda: rng.normal(0, 3, shape),
            }[kind]()
        elif _is_numeric(leaf.dtype):
            is_bool = jnp.issubdtype(leaf.dtype, jnp.bool_)
            values = rng.integers(0, 2 if is_bool else top, shape)
        else:
            return np.resize(np.asarray(leaf[:1]), shape)
        return np.asarray(values).astype(leaf.dtype)

    return jax.tree.map(column, rows)
