"""Data sets: from the folder, else from OpenML, else one line that tells how to get them."""

import gzip
import hashlib
import io
import json
import pickle
import struct
import zipfile

import h5py
import jax
import numpy as np
import pytest

from experiments import data, loaders, shards, tags, tff

RNG = np.random.default_rng(0)
MEAN, DEVIATION = map(np.array, tff.CIFAR100_MOMENTS)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    return tmp_path


def unreachable(**_):
    raise OSError("no route\nto host")


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def residuals(pictures):
    """Code pictures as the folder does: planes G, R-G, B-G, differences along both axes."""
    red, green, blue = np.moveaxis(pictures, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.zeros_like(planes.take([0], axis)))
    return planes


def same(loaded, *expected):
    for array, wanted in zip(loaded, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert loaded.x_train.dtype == np.uint8 and loaded.y_test.dtype == np.int32


def write(path, clients):
    with h5py.File(path, "w") as file:
        for name, columns in clients.items():
            for column, values in columns.items():
                file.create_dataset(f"examples/{name}/{column}", data=values)


def or_skip(load):
    try:
        return load()
    except data.DataNotFound as error:
        pytest.skip(str(error))


def test_tables_in_the_folder(folder):
    x = np.arange(10).reshape(5, 2)
    for first in (0, 1):
        np.savez(folder / "isolet.npz", x_e4=x * 10_000, y=np.arange(5) + first)
        np.savez(folder / "covtype_93k.npz", x=x, y=np.arange(5) + first)
        np.savez(folder / "susy.npz", x=x, y=np.arange(5) % 2)
        for load, smallest in ((data.isolet, 0), (data.covtype, 1), (data.susy, 0)):
            table = load()
            np.testing.assert_array_equal(table.features, x)
            assert table.features.dtype == np.float32 and table.labels.dtype == np.int32
            assert table.labels.min() == smallest


def test_heart_disease_and_radon_from_the_files_of_their_sources(folder):
    for i, name in enumerate(data.HEART_HOSPITALS):
        line = f"63,1,1,145,233,1,2,150,0,2.3,3,?,6,{i}\n"
        (folder / f"processed.{name}.data").write_text(line * (i + 1))
    heart = data.heart_disease()
    assert heart["x"].shape == (10, 13) and np.isnan(heart["x"]).sum(0).tolist() == [0] * 11 + [
        10,
        0,
    ]
    assert heart["y"].tolist() == heart["site"].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    columns = {
        "county_idx": [1, 2],
        "floor_measure": [0, 1],
        "log_uppm": [0.5, 1],
        "log_radon": [1, 2],
    }
    with zipfile.ZipFile(folder / "radon_all.json.zip", "w") as archive:
        archive.writestr("radon_all.json", json.dumps(columns))
    radon = data.radon()
    assert radon["county"].tolist() == [1, 2] and radon["log_radon"].dtype == np.float32


def test_images_in_the_folder(folder):
    arrays = x, y, x_test, y_test = pixels(6, 28, 28), pixels(6), pixels(2, 28, 28), pixels(2)
    np.savez(folder / "mnist.npz", **dict(zip(data.Images._fields, arrays, strict=True)))
    for i, part in enumerate((slice(0, 4), slice(4, 6))):
        np.savez(folder / f"fashion_mnist_train_{i}.npz", x_train=x[part], y_train=y[part])
    np.savez(folder / "fashion_mnist_test.npz", x_test=x_test, y_test=y_test)
    for load in (data.mnist, data.fashion_mnist):
        same(load(), *arrays)


def test_residuals_and_jpeg_are_decoded(folder):
    pictures, labels = pixels(7, 32, 32, 3), np.arange(7, dtype=np.uint8)
    parts = (slice(0, 2), slice(2, 3), slice(3, 6), slice(6, 7))
    names = (*(f"cifar10_train_{shard}" for shard in range(3)), "cifar10_test1000")
    for name, part in zip(names, parts, strict=True):
        np.savez(folder / f"{name}.npz", x_resid=residuals(pictures[part]), y=labels[part])
    same(data.cifar10(jpeg_test=False), pictures[:6], labels[:6], pictures[6:], labels[6:])
    pillow = pytest.importorskip("PIL.Image")
    file, offset = io.BytesIO(), [0]
    for level in (10, 200):
        pillow.fromarray(np.full((32, 32, 3), level, np.uint8)).save(file, "jpeg", quality=75)
        offset.append(file.tell())
    code = np.frombuffer(file.getvalue(), np.uint8)
    np.savez(folder / "cifar10_test_jpeg.npz", jpeg=code, offset=offset, y=np.array([3, 4]))
    lossy = data.cifar10()
    assert lossy.y_test.tolist() == [3, 4]
    np.testing.assert_allclose(lossy.x_test.mean(axis=(1, 2, 3)), [10, 200], atol=1)


def test_emnist_of_the_original_files(folder):
    with pytest.raises(data.DataNotFound, match=r"put emnist-digits-train.*use MNIST"):
        data.emnist_digits()
    x, y = pixels(5, 28, 28), pixels(5) % 10
    for part, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        num = len(y[rows])
        heads = struct.pack(">IIII", 0x803, num, 28, 28), struct.pack(">II", 0x801, num)
        # NIST stores columns where MNIST stores rows.
        bodies = x[rows].transpose(0, 2, 1).tobytes(), y[rows].tobytes()
        for kind, head, body in zip(("images-idx3", "labels-idx1"), heads, bodies, strict=True):
            with gzip.open(folder / f"emnist-digits-{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(head + body)
    same(data.emnist_digits(), x[:3], y[:3], x[3:], y[3:])


def test_openml(folder, monkeypatch):
    def fetch(name, version, **_):
        if name == "covertype":
            return np.eye(3), np.array(["1", "2", "3.0"])
        labels = np.array([str(i % 10) for i in range(70_000)])
        return np.broadcast_to(np.arange(784.0), (70_000, 784)), labels

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    table, digits = data.covtype(), data.mnist()
    assert table.features.shape == (3, 3) and table.labels.tolist() == [1, 2, 3]
    assert digits.x_train.shape == (60_000, 28, 28) and digits.x_test.shape == (10_000, 28, 28)
    assert digits.x_train[5, 1, 2] == 30 and digits.y_test[:3].tolist() == [0, 1, 2]
    with pytest.raises(data.DataNotFound, match="it gave 70000 rows"):
        data.cifar10()
    flat = np.arange(2 * 3072).reshape(2, 3072) % 251
    np.testing.assert_array_equal(data.planes(flat)[1, 2, 5], flat[1, [69, 1093, 2117]])


@pytest.mark.parametrize("load", [data.isolet, data.fashion_mnist, data.cifar10])
def test_one_line_tells_how_to_get_a_missing_data_set(folder, load):
    with pytest.raises(data.DataNotFound) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message and ".npz" in message
    assert "FEDMCMC_DATA" in message and str(folder) in message and "no route to host" in message


def test_digits_of_clients_are_those_of_the_notebook():
    labels = np.random.default_rng(3).integers(0, 10, 20_000)
    clients = shards.femnist_star(labels, 10, 1994, shared_seed=True)
    assert [len(rows) for rows in clients] == [74, 54, 95, 96, 50, 83, 44, 82, 24, 25]
    assert clients[0][:3].tolist() == [13000, 2341, 1327]
    assert clients[9][:3].tolist() == [1033, 8098, 914]
    with pytest.raises(ValueError, match="a client needs 74 images and its pool has 52"):
        shards.femnist_star(labels[:60], 1, 1994)


def test_clients_are_those_of_the_notebooks():
    data, _ = loaders.gaussian()
    assert data.sizes.tolist()[:4] == [192, 109, 44, 90] and data.num_rows == 2042
    data, test = loaders.synthetic(shared_seed=True)
    assert data.num_rows == 555 and len(test["label"]) == 72


def test_shards_share_no_letter_and_no_row():
    key, labels = jax.random.key(2), np.repeat(np.arange(26), 20)
    codes = np.stack([labels, np.arange(520) / 1e6], axis=1).astype(float)
    sizes = dict(num_clients=10, pairs_per_client=40, num_test=60)
    data, test = shards.letter_pairs(key, codes, labels, **sizes)
    for pairs in (data.rows, test):
        np.testing.assert_array_equal(pairs["features"][:, 0] == 0, pairs["sign"] == 1)
    sizes = dict(num_clients=10, rows_per_client=20, num_test=30, concentration=0.5)
    data, test = shards.skewed_labels(key, labels % 2, **sizes)
    assert len({*np.asarray(data.rows), *test}) == 230 and (labels[test] % 2).mean() == 0.5


def test_cifar100_as_tensorflow_federated_splits_it(folder):
    x = {name: pixels(num, 32, 32, 3) for name, num in (("b", 2), ("a", 3))}
    for part in ("train", "test"):
        columns = {n: {"image": v, "label": np.arange(len(v))} for n, v in x.items()}
        write(folder / f"fed_cifar100_{part}.h5", columns)
    rows, test = tff.cifar100(seed=1)
    assert rows.sizes.tolist() == [3, 2] and rows.rows["label"].tolist() == [0, 1, 2, 0, 1]
    assert rows.rows["features"].shape == (5, 24, 24, 3)
    first, found = x["a"][0] / 255, np.asarray(rows.rows["features"])[0] * DEVIATION + MEAN
    crops = [first[i : i + 24, j : j + 24] for i in range(9) for j in range(9)]
    crops += [crop[:, ::-1] for crop in crops]  # mirrored
    assert min(np.abs(found - crop).max() for crop in crops) < 1e-5
    np.testing.assert_allclose(test["features"][0] * DEVIATION + MEAN, first[4:28, 4:28], atol=1e-5)


def test_cifar100_is_split_by_us_where_only_the_images_are_there(folder):
    with pytest.raises(data.DataNotFound, match="fed_cifar100_"):
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
    green = planes[7, 1024:2048].reshape(32, 32)[4:28, 4:28] / 255
    found = test["features"][7, ..., 1] * DEVIATION[1] + MEAN[1]
    np.testing.assert_allclose(found, green, atol=1e-5)
    assert np.bincount(tff.SUPERCLASSES).tolist() == [5] * 20


def test_writers_of_emnist(folder):
    with pytest.raises(data.DataNotFound, match=r"fed_emnist_train\.h5.*mnist_small"):
        tff.emnist62()
    for part in ("train", "test"):
        columns = {"pixels": RNG.random((2, 28, 28), np.float32), "label": np.array([61, 3])}
        write(folder / f"fed_emnist_{part}.h5", {"f0": columns, "f1": columns})
    rows, test = tff.emnist62()
    assert rows.rows["features"].shape == (4, 28, 28, 1)
    assert rows.sizes.tolist() == [2, 2]
    assert test["label"].tolist() == [61, 3, 61, 3]


def test_sentences_of_stack_overflow(folder):
    sentences = np.array([b"how to jax in jax", b"who knows", b"to be or not to be"])
    marks = np.array([b"jax|python", b"", b"literature|python"])
    columns = {"tokens": sentences, "tags": marks}
    clients = {"u1": columns, "u0": {name: column[:1] for name, column in columns.items()}}
    for part in ("train", "test"):
        write(folder / f"stackoverflow_{part}.h5", clients)
    (folder / "stackoverflow.word_count").write_text("rare 1\nto 9\njax 8\nbe 7\n")
    (folder / "stackoverflow.tag_count").write_text('{"python": 5, "jax": 4, "x": 1}')
    loaded, _ = tags.stack_overflow(num_words=3, num_tags=2, max_rows=2, num_test=2)
    rows = loaded.rows
    assert loaded.sizes.tolist() == [1, 2]  # two of the three sentences of the second user
    assert np.asarray(rows["words"])[0, :4].tolist() == [0, 1, 1, -1]  # to jax jax
    np.testing.assert_allclose(rows["weight"], [1 / 5, 1 / 5, 1 / 2])
    assert tags.unpack(rows, 2).tolist() == [[1, 1], [1, 1], [0, 0]]


MD5_OF_IDX = {
    data.mnist: ("6bbc9ace898e44ae57da46a324031adb", "2646ac647ad5339dbf082846283269ea"),
    data.fashion_mnist: ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8181f5470baa50b63fa0f6fddb340f0a"),
}


@pytest.mark.data
@pytest.mark.parametrize("load", MD5_OF_IDX)
def test_real_images_are_those_of_their_authors(load):
    loaded = or_skip(load)
    for x, md5 in zip((loaded.x_train, loaded.x_test), MD5_OF_IDX[load], strict=True):
        head = struct.pack(">IIII", 0x803, *x.shape)
        assert hashlib.md5(head + x.tobytes()).hexdigest() == md5
    assert np.bincount(loaded.y_test).sum() == 10_000


@pytest.mark.data
def test_real_photographs_are_those_of_their_authors():
    exact = or_skip(lambda: data.cifar10(jpeg_test=False))
    # The first batch of the original has these numbers of each class.
    first = [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert np.bincount(exact.y_train[:10_000]).tolist() == first


@pytest.mark.data
def test_real_tables_are_those_of_their_authors():
    isolet, covtype = or_skip(data.isolet), or_skip(data.covtype)
    assert isolet.features.shape == (7797, 617) and np.abs(isolet.features).max() <= 1
    assert np.bincount(isolet.labels)[5] == 298 and isolet.labels.max() == 25
    assert abs(np.mean(covtype.labels == 2) - 0.4876) < 0.001  # lodgepole pine
    np.testing.assert_array_equal(covtype.features[:, 10:14].sum(axis=1), 1)
