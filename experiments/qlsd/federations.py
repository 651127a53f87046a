"""Labelled rows by client, as the image data sets of the papers have them."""

from typing import NamedTuple

import jax
import numpy as np

import fedmcmc

__all__ = ["SEED", "Federation", "Rows", "labelled", "some_rows"]

SEED = 1994
"""The seed of the notebooks that Vono et al. (2022) released."""


class Rows(NamedTuple):
    """Labelled rows: `features` ``[num, ...]`` and `label` ``[num]`` int32."""

    features: np.ndarray
    label: np.ndarray


class Federation(NamedTuple):
    """Rows to learn from, by client, and rows held out."""

    data: fedmcmc.FederatedData
    test: Rows


def labelled(features: np.ndarray, labels: np.ndarray) -> Rows:
    """Return rows with labels of the type that they have everywhere."""
    return Rows(features, labels.astype(np.int32))


def some_rows(rng_key: jax.Array, total: int, num: int | None) -> np.ndarray:
    """Return `num` of `total` row numbers at random, in random order; all in order for ``None``."""
    if num is None:
        return np.arange(total)
    if not 0 < num <= total:
        raise ValueError(f"cannot take {num} of {total} rows.")
    return np.asarray(jax.random.permutation(rng_key, total)[:num])
