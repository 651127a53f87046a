"""Loaders of the experiments: the folder first, then a fetch, then one line of advice."""

import numpy as np
import pytest

from experiments import data


def unreachable(name, version):
    raise OSError("no route\nto host")


def never(name, version):
    raise AssertionError("must not fetch what is in the folder")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    return tmp_path


def test_the_folder_comes_first(folder):
    x = np.arange(10).reshape(5, 2)
    np.savez(folder / "isolet.npz", x_e4=x * 10_000, y=np.arange(5))
    np.savez(folder / "covtype_93k.npz", x=x, y=np.arange(5) + 1)
    np.savez(folder / "susy.npz", x=x, y=np.arange(5) % 2)
    for load, first in ((data.isolet, 0), (data.covtype, 1), (data.susy, 0)):
        table = load(fetch=never)
        np.testing.assert_array_equal(table.features, x)
        assert table.features.dtype == np.float32
        assert table.labels.dtype == np.int32 and table.labels[0] == first


@pytest.mark.parametrize(
    ("load", "name"), [(data.isolet, "isolet"), (data.covtype, "covertype"), (data.susy, "SUSY")]
)
def test_then_it_is_fetched(folder, load, name):
    asked = []

    def fetch(name, version):
        asked.append(name)
        return np.eye(3), np.array(["1", "2", "3.0"])

    table = load(fetch=fetch)
    assert asked == [name]
    assert table.features.shape == (3, 3)
    assert np.ptp(table.labels) == 2 and table.labels[0] == (0 if name == "isolet" else 1)


def test_classes_are_counted_as_their_authors_do(folder):
    for name, load, key in (("isolet", data.isolet, "x_e4"), ("covtype_93k", data.covtype, "x")):
        for first in (0, 1):
            np.savez(folder / f"{name}.npz", **{key: np.eye(3), "y": np.arange(3) + first})
            assert load(fetch=never).labels.min() == (0 if name == "isolet" else 1)


@pytest.mark.parametrize("load", [data.isolet, data.covtype, data.susy])
def test_else_one_line_says_how_to_get_it(folder, load):
    with pytest.raises(data.DataNotFound) as caught:
        load(fetch=unreachable)
    message = str(caught.value)
    assert "\n" not in message
    assert "FEDMCMC_DATA" in message and str(folder) in message and "no route to host" in message


@pytest.mark.data
def test_the_real_isolet():
    try:
        table = data.isolet(fetch=unreachable)
    except data.DataNotFound:
        pytest.skip("isolet is not in FEDMCMC_DATA")
    assert table.features.shape == (7797, 617) and np.abs(table.features).max() <= 1
    counts = np.bincount(table.labels)
    assert counts.shape == (26,) and counts.sum() == 7797 and counts[5] == 298


@pytest.mark.data
def test_the_real_covtype():
    try:
        table = data.covtype(fetch=unreachable)
    except data.DataNotFound:
        pytest.skip("covtype is not in FEDMCMC_DATA")
    assert table.features.shape[1] == 54
    assert np.unique(table.labels).tolist() == list(range(1, 8))
    assert abs(np.mean(table.labels == 2) - 0.4876) < 0.001  # lodgepole pine
    np.testing.assert_array_equal(table.features[:, 10:14].sum(axis=1), 1)
