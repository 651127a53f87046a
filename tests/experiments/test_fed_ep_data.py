"""The federations of FedEP's experiments: loaders on made-up files, splits, made-up tags."""

import pickle

import h5py
import numpy as np
import pytest

from experiments import tff
from experiments.data import DataNotFound

RNG = np.random.default_rng(0)


def unreachable(**_):
    raise OSError("no route to host")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    return tmp_path


def write(path, clients):
    with h5py.File(path, "w") as file:
        for name, columns in clients.items():
            for column, values in columns.items():
                file.create_dataset(f"examples/{name}/{column}", data=values)


def pictures(num):
    return RNG.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)


def test_cifar100_as_tensorflow_federated_splits_it(folder):
    x = {name: pictures(num) for name, num in (("b", 2), ("a", 3))}
    for part in ("train", "test"):
        columns = {n: {"image": v, "label": np.arange(len(v))} for n, v in x.items()}
        write(folder / f"fed_cifar100_{part}.h5", columns)
    rows, test = tff.cifar100(seed=1)
    assert rows.sizes.tolist() == [3, 2] and rows.rows["label"].tolist() == [0, 1, 2, 0, 1]
    assert rows.rows["features"].shape == (5, 24, 24, 3)
    mean, deviation = (np.array(m) for m in tff.CIFAR100_MOMENTS)
    back = np.asarray(rows.rows["features"]) * deviation + mean
    # A crop of the picture, mirrored or not.
    first = x["a"][0] / 255
    crops = [first[i : i + 24, j : j + 24] for i in range(9) for j in range(9)]
    crops += [crop[:, ::-1] for crop in crops]
    assert min(np.abs(back[0] - crop).max() for crop in crops) < 1e-5
    held_out = test["features"][0] * deviation + mean
    np.testing.assert_allclose(held_out, first[4:28, 4:28], atol=1e-5)


def test_cifar100_is_split_by_us_where_only_the_images_are_there(folder):
    with pytest.raises(DataNotFound, match="fed_cifar100_"):
        tff.cifar100()
    (folder / "cifar-100-python").mkdir()
    labels = np.repeat(np.arange(100), 4)
    planes = RNG.integers(0, 256, (400, 3072), dtype=np.uint8)
    content = pickle.dumps({b"data": planes, b"fine_labels": labels.tolist()})
    for part in ("train", "test"):
        (folder / "cifar-100-python" / part).write_bytes(content)
    rows, test = tff.cifar100()
    assert rows.sizes.tolist() == [100] * 4
    np.testing.assert_array_equal(np.bincount(rows.rows["label"]), 4)
    mean, deviation = (np.array(moment)[1] for moment in tff.CIFAR100_MOMENTS)
    green = planes[7, 1024:2048].reshape(32, 32)[4:28, 4:28] / 255
    np.testing.assert_allclose(test["features"][7, ..., 1], (green - mean) / deviation, atol=1e-5)
    assert np.bincount(tff.SUPERCLASSES).tolist() == [5] * 20


def test_writers_of_emnist(folder):
    with pytest.raises(DataNotFound, match=r"fed_emnist_train\.h5.*mnist_small"):
        tff.emnist62()
    for part in ("train", "test"):
        columns = {"pixels": RNG.random((2, 28, 28), np.float32), "label": np.array([61, 3])}
        write(folder / f"fed_emnist_{part}.h5", {"f0": columns, "f1": columns})
    rows, test = tff.emnist62()
    assert rows.rows["features"].shape == (4, 28, 28, 1)
    assert rows.sizes.tolist() == [2, 2]
    assert test["label"].tolist() == [61, 3, 61, 3]
