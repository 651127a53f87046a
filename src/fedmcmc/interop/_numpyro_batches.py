"""Small batches of rows that reveal whether a row's term depends on the other rows of its batch.

Random rows may all be similar: of one treatment arm, of one patient each, from one end of a sorted
table. Batches of several kinds are therefore chosen from all clients' rows, and three are made up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from fedmcmc.data import FederatedData, host_view
from fedmcmc.types import ArrayTree

BATCH_SIZE = 16
MAX_COLUMNS = 8
"""Maximal number of columns by whose values rows are chosen."""
MAX_ROWS = 100_000
"""Maximal number of rows that are searched for equal values of a column."""


class Batch(NamedTuple):
    """Rows, ``[BATCH_SIZE, ...]``, and the number of each among all rows, -1 if it is made up."""

    rows: ArrayTree
    numbers: np.ndarray


def batches_of(rows: ArrayTree, data: FederatedData | None, is_real: bool = True) -> list[Batch]:
    """Return batches of rows, then made-up batches.

    If `data` are given, some batches hold consecutive rows of a client. If not `is_real`, all
    batches are made up from the shapes of `rows`.
    """
    rng = np.random.default_rng(0)
    no_numbers = np.full(BATCH_SIZE, -1)
    made_up = [
        Batch(_made_up(rows, rng, kind), no_numbers) for kind in ("codes", "fractions", "wide")
    ]
    if not is_real:
        return made_up
    chosen = [numbers for numbers in _choices(rows, data, rng) if len(numbers)]
    # One gather for all batches, because the rows may be many and on another device.
    distinct, places = np.unique(np.concatenate(chosen), return_inverse=True)
    # The number of gathered rows does not depend on their values, so the gather compiles once.
    padded = np.resize(distinct, BATCH_SIZE * len(chosen))
    gathered = jax.tree.map(lambda leaf: _gather(leaf, padded), rows)
    ends = np.cumsum([len(numbers) for numbers in chosen])[:-1]
    batches = []
    for numbers, batch_places in zip(chosen, np.split(places, ends), strict=True):

        def fill(real: np.ndarray, filler: np.ndarray, places: np.ndarray = batch_places) -> Any:
            return np.concatenate([real[places], filler[len(places) :]])

        batches.append(
            Batch(
                jax.tree.map(fill, gathered, made_up[0].rows),
                np.concatenate([numbers, no_numbers[len(numbers) :]]),
            )
        )
    return batches + made_up


def _choices(
    rows: ArrayTree, data: FederatedData | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Return the numbers of the rows of each batch, without repetition within a batch."""
    num = jax.tree.leaves(rows)[0].shape[0]
    order = rng.permutation(num) if num <= MAX_ROWS else rng.choice(num, 2 * BATCH_SIZE, False)
    chosen = [order[:BATCH_SIZE], order[BATCH_SIZE : 2 * BATCH_SIZE]]
    starts, sizes = np.zeros(1, int), np.array([num])
    if data is not None:
        starts, sizes = np.asarray(data.start), np.asarray(data.size)
    for client in rng.permutation(len(sizes))[:2]:
        begin = int(rng.integers(0, max(int(sizes[client]) - BATCH_SIZE, 0) + 1))
        end = min(begin + BATCH_SIZE, int(sizes[client]))
        chosen.append(int(starts[client]) + np.arange(begin, end))
    columns = _columns(rows)
    ends = [find(column) for column in columns for find in (np.argmin, np.argmax)]
    extremes = rng.permutation(np.unique(np.array(ends, int)))
    chosen += [extremes[i : i + BATCH_SIZE] for i in range(0, len(extremes), BATCH_SIZE)]
    searched = np.arange(num) if num <= MAX_ROWS else rng.choice(num, MAX_ROWS, False)
    return chosen + [searched[_equal_rows(column[searched], rng)] for column in columns]


def _equal_rows(column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return rows of which several have the same value, with rare values as often as common ones.

    If no two rows have the same value, return the rows with the smallest and the largest values.
    """
    levels, counts = np.unique(column, return_counts=True, equal_nan=False)
    levels = levels[counts > 1]
    levels = rng.permutation(levels)[: BATCH_SIZE // 2]
    if not len(levels):
        order = np.argsort(column)
        return np.unique(np.concatenate([order[: BATCH_SIZE // 2], order[-(BATCH_SIZE // 2) :]]))
    per_level = BATCH_SIZE // len(levels)
    by_level = [rng.permutation(np.flatnonzero(column == level))[:per_level] for level in levels]
    return rng.permutation(np.concatenate(by_level))


def _columns(rows: ArrayTree) -> list[np.ndarray]:
    """Return up to `MAX_COLUMNS` columns of numbers, ``[num_rows]``, leaves of one axis first."""
    numeric = [leaf for leaf in jax.tree.leaves(rows) if _is_numeric(leaf.dtype)]
    columns: list[np.ndarray] = []
    for leaf in sorted(numeric, key=lambda leaf: leaf.ndim):
        num_missing = MAX_COLUMNS - len(columns)
        if num_missing <= 0:
            break
        table = host_view(leaf).reshape(leaf.shape[0], -1)[:, :num_missing]
        columns += list(np.asarray(table).T)
    return columns


def _is_numeric(dtype: DTypeLike) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def _gather(leaf: Array, numbers: np.ndarray) -> np.ndarray:
    """Return rows of a leaf; on an accelerator, similar numbers of rows share one program."""
    view = host_view(leaf)
    if isinstance(view, np.ndarray):
        return np.asarray(view[numbers])
    padded = np.resize(numbers, 1 << (len(numbers) - 1).bit_length())
    return np.asarray(leaf[padded])[: len(numbers)]


def _made_up(rows: ArrayTree, rng: np.random.Generator, kind: str) -> ArrayTree:
    """Return rows with values that most distributions and tables accept.

    Kinds are small integers in all columns ("codes"), fractions in columns of floats with zeros and
    ones in the others ("fractions"), and values over a wider range ("wide").
    """
    num_codes = {"codes": 4, "fractions": 2, "wide": 10}[kind]

    def column(leaf: Array) -> np.ndarray:
        shape = (BATCH_SIZE, *leaf.shape[1:])
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = {
                "codes": lambda: rng.integers(0, 3, shape),
                "fractions": lambda: rng.uniform(0.1, 0.9, shape),
                "wide": lambda: rng.normal(0, 3, shape),
            }[kind]()
        elif _is_numeric(leaf.dtype):
            is_bool = jnp.issubdtype(leaf.dtype, jnp.bool_)
            values = rng.integers(0, 2 if is_bool else num_codes, shape)
        else:
            return np.resize(np.asarray(leaf[:1]), shape)
        return np.asarray(values).astype(leaf.dtype)

    return jax.tree.map(column, rows)
