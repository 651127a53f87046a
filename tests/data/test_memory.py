"""Memory of the constructors: the device's rows are the only copy."""

import tracemalloc
import weakref

import jax
import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import ClientLoader, FederatedData

SIZES = [100_000, 60_000, 140_000]
NUM, ENDS = sum(SIZES), np.cumsum(SIZES)
ON_CPU = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other devices have their own memory"
)


def of_client(rows, client):
    return {name: x[ENDS[client] - SIZES[client] : ENDS[client]] for name, x in rows.items()}


def by_client(rows):
    return FederatedData.from_clients([of_client(rows, i) for i in range(3)])


def by_sorted_ids(rows):
    return FederatedData.from_arrays(rows, np.repeat(np.arange(3, dtype=np.int8), SIZES))


def by_unsorted_ids(rows):
    return FederatedData.from_arrays(rows, np.tile(np.arange(3, dtype=np.int8), NUM // 3))


def by_loader(rows):
    return ClientLoader(SIZES, lambda client: of_client(rows, client)).load()


def by_pandas(rows):
    tables = [pd.DataFrame(of_client(rows, i), copy=False) for i in range(3)]
    return FederatedData.from_clients(tables)


def by_polars(rows):
    tables = [polars.DataFrame(of_client(rows, i)) for i in range(3)]
    return FederatedData.from_clients(tables)


@ON_CPU
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
@pytest.mark.parametrize("build", [by_client, by_sorted_ids, by_unsorted_ids, by_loader])
def test_mapped_arrays_are_copied_once(build, dtype, tmp_path):
    expected = {}
    for name, shape in (("x", (NUM, 16)), ("y", (NUM,))):
        expected[name] = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
        np.save(tmp_path / f"{name}.npy", expected[name])
    rows = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in expected}
    data, kept, peak = traced(build, rows)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data.rows))
    assert num_bytes == 4 * 17 * NUM
    # The device uses the memory that NumPy has allocated.
    assert num_bytes < kept < 1.02 * num_bytes
    # Sorting takes eight bytes per row.
    assert peak < (1.35 if build is by_unsorted_ids else 1.2) * num_bytes
    order = np.argsort(np.tile(np.arange(3), NUM // 3), kind="stable")
    for name, leaf in expected.items():
        leaf = leaf[order] if build is by_unsorted_ids else leaf
        np.testing.assert_array_equal(data.rows[name], leaf)


@ON_CPU
@pytest.mark.parametrize("build", [by_pandas, by_polars])
def test_tables_are_copied_once(build):
    rows = {f"x{i}": np.random.default_rng(i).normal(size=NUM) for i in range(12)}
    data, kept, peak = traced(build, rows)
    num_bytes = 4 * 12 * NUM
    assert num_bytes < kept < 1.02 * num_bytes and peak < 1.3 * num_bytes
    np.testing.assert_array_equal(data.rows["x3"], rows["x3"].astype(np.float32))


def test_a_loader_reads_clients_one_by_one():
    """Clients that have been read are not in memory any more."""
    alive = []

    def load(client):
        assert not alive
        column = np.full((SIZES[client], 2), float(client))
        alive.append(client)
        weakref.finalize(column, alive.remove, client)
        return {"y": column}

    data = ClientLoader(SIZES, load).load()
    assert not alive
    np.testing.assert_array_equal(data.rows["y"][:, 0], np.repeat(np.arange(3), SIZES))


def traced(build, rows):
    """Return data, and NumPy's memory afterwards and at its peak."""
    build({name: leaf[:NUM] for name, leaf in rows.items()})  # imports
    tracemalloc.start()
    try:
        data = build(rows)
        return (data, *tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
