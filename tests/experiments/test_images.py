"""Image loaders of the experiments: the folder first, then a fetch, then one line of advice."""

import gzip
import hashlib
import struct

import numpy as np
import pytest

from experiments import data, images
from experiments.images import Images

RNG = np.random.default_rng(0)


def unreachable(name, version):
    raise OSError("no route\nto host")


def never(name, version):
    raise AssertionError("must not fetch what is in the folder")


def some(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def residuals(pictures):
    """Code pictures as the folder does: planes G, R-G, B-G, differences along both axes."""
    red, green, blue = np.moveaxis(pictures, -1, 0)
    planes = np.stack([green, red - green, blue - green])
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.zeros_like(planes.take([0], axis)))
    return planes


def store(folder, name, **arrays):
    np.savez(folder / f"{name}.npz", **arrays)


def same(found, *expected):
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)
    assert found.x_train.dtype == found.x_test.dtype == np.uint8
    assert found.y_train.dtype == found.y_test.dtype == np.int32


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    return tmp_path


def test_the_folder_comes_first(folder):
    x, y, x_test, y_test = some(6, 28, 28), some(6) % 10, some(2, 28, 28), some(2) % 10
    both = dict(x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    store(folder, "mnist", **both)
    store(folder, "emnist_digits", **both)
    store(folder, "fashion_mnist_train_0", x_train=x[:4], y_train=y[:4])
    store(folder, "fashion_mnist_train_1", x_train=x[4:], y_train=y[4:])
    store(folder, "fashion_mnist_test", x_test=x_test, y_test=y_test)
    for found in (images.mnist(never), images.fashion_mnist(never), images.emnist_digits()):
        same(found, x, y, x_test, y_test)


def test_residuals_and_jpeg_are_decoded(folder):
    pictures, labels = some(7, 32, 32, 3), np.arange(7, dtype=np.uint8)
    for shard, part in enumerate((slice(0, 2), slice(2, 3), slice(3, 6))):
        coded = residuals(pictures[part])
        store(folder, f"cifar10_train_{shard}", x_resid=coded, y=labels[part])
    store(folder, "cifar10_test1000", x_resid=residuals(pictures[6:]), y=labels[6:])
    exact = images.cifar10(never, jpeg_test=False)
    same(exact, pictures[:6], labels[:6], pictures[6:], labels[6:])

    pillow = pytest.importorskip("PIL.Image")
    files = []
    for level in (10, 200):
        path = folder / f"{level}.jpg"
        pillow.fromarray(np.full((32, 32, 3), level, np.uint8)).save(path, quality=75)
        files.append(path.read_bytes())
    offset = np.cumsum([0, *(len(file) for file in files)])
    code = np.frombuffer(b"".join(files), np.uint8)
    store(folder, "cifar10_test_jpeg", jpeg=code, offset=offset, y=np.array([3, 4]))
    lossy = images.cifar10(never)
    assert lossy.x_test.shape == (2, 32, 32, 3) and lossy.y_test.tolist() == [3, 4]
    np.testing.assert_allclose(lossy.x_test.mean(axis=(1, 2, 3)), [10, 200], atol=1)


def test_then_it_is_fetched(folder):
    wide = np.broadcast_to(np.arange(784.0), (70_000, 784))
    labels = np.array([str(i % 10) for i in range(70_000)])
    for load, name in ((images.mnist, "mnist_784"), (images.fashion_mnist, "Fashion-MNIST")):
        asked = []

        def fetch(name, version, asked=asked):
            asked.append((name, version))
            return wide, labels

        found = load(fetch)
        assert asked == [(name, 1)]
        assert found.x_train.shape == (60_000, 28, 28) and found.x_test.shape == (10_000, 28, 28)
        assert found.x_train[5, 1, 2] == 30 and found.y_test[:3].tolist() == [0, 1, 2]


def test_a_fetch_of_another_size_is_no_data(folder):
    with pytest.raises(data.DataNotFound, match="it gave 3 images"):
        images.cifar10(lambda name, version: (np.zeros((3, 3072)), np.zeros(3)))


def test_openml_keeps_the_channels_apart():
    planes = np.arange(2 * 3072).reshape(2, 3072) % 251
    picture = images._planes(planes)
    assert picture.shape == (2, 32, 32, 3)
    np.testing.assert_array_equal(picture[1, 2, 5], planes[1, [69, 1024 + 69, 2048 + 69]])


@pytest.mark.parametrize("load", [images.mnist, images.fashion_mnist, images.cifar10])
def test_else_one_line_says_how_to_get_it(folder, load):
    with pytest.raises(data.DataNotFound) as caught:
        load(unreachable)
    message = str(caught.value)
    assert "\n" not in message and ".npz" in message
    assert "FEDMCMC_DATA" in message and str(folder) in message and "no route to host" in message


def test_emnist_of_the_original_files(folder):
    with pytest.raises(data.DataNotFound, match=r"put emnist_digits\.npz, or emnist-digits-train"):
        images.emnist_digits()
    x, y = some(5, 28, 28), some(5) % 10
    for part, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        num = len(y[rows])
        head = struct.pack(">IIII", 0x803, num, 28, 28), struct.pack(">II", 0x801, num)
        # NIST stores columns where MNIST stores rows.
        body = x[rows].transpose(0, 2, 1).tobytes(), y[rows].tobytes()
        for kind, i in (("images-idx3", 0), ("labels-idx1", 1)):
            with gzip.open(folder / f"emnist-digits-{part}-{kind}-ubyte.gz", "wb") as file:
                file.write(head[i] + body[i])
    same(images.emnist_digits(), x[:3], y[:3], x[3:], y[3:])
    with gzip.open(folder / "emnist-digits-test-labels-idx1-ubyte.gz", "wb") as file:
        file.write(b"text")
    with pytest.raises(ValueError, match="must be an IDX file of bytes"):
        images.emnist_digits()


def test_pixels_are_scaled():
    pixels = np.array([[0, 51], [255, 102]], np.uint8)
    np.testing.assert_allclose(images.scale_pixels(pixels, "unit"), [[0, 0.2], [1, 0.4]])
    standard = images.scale_pixels(pixels, "standard")
    np.testing.assert_allclose(standard, (pixels / 255 - 0.1307) / 0.3081, rtol=1e-6)
    assert standard.dtype == np.float32 and images.scale_pixels(pixels, "raw") is pixels
    channels = images.scale_pixels(
        np.full((1, 1, 3), 255, np.uint8), "standard", images.CIFAR10_MOMENTS
    )
    means, deviations = np.array(images.CIFAR10_MOMENTS)
    np.testing.assert_allclose(channels[0, 0], (1 - means) / deviations, rtol=1e-6)
    with pytest.raises(ValueError, match="scaling must be"):
        images.scale_pixels(pixels, "zscore")


def real(load) -> Images:
    try:
        return load()
    except data.DataNotFound as error:
        pytest.skip(str(error))


@pytest.mark.data
def test_the_real_mnist_is_that_of_its_authors():
    found = real(lambda: images.mnist(unreachable))
    sums = []
    for x, y in ((found.x_train, found.y_train), (found.x_test, found.y_test)):
        heads = struct.pack(">IIII", 0x803, *x.shape), struct.pack(">II", 0x801, len(y))
        files = heads[0] + x.tobytes(), heads[1] + y.astype(np.uint8).tobytes()
        sums += [hashlib.md5(file).hexdigest() for file in files]
    # The MD5 sums of the four uncompressed files.
    assert sums == [
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ]
    unit = images.scale_pixels(found.x_train, "unit").astype(np.float64)
    np.testing.assert_allclose((unit.mean(), unit.std()), images.MNIST_MOMENTS, atol=5e-5)


@pytest.mark.data
def test_the_real_fashion_mnist():
    found = real(lambda: images.fashion_mnist(unreachable))
    assert np.bincount(found.y_train).tolist() == [6000] * 10
    assert np.bincount(found.y_test).tolist() == [1000] * 10
    heads = [struct.pack(">IIII", 0x803, *x.shape) for x in (found.x_train, found.x_test)]
    sums = [
        hashlib.md5(head + x.tobytes()).hexdigest()
        for head, x in zip(heads, (found.x_train, found.x_test), strict=True)
    ]
    assert sums == ["f4a8712d7a061bf5bd6d2ca38dc4d50a", "8181f5470baa50b63fa0f6fddb340f0a"]


@pytest.mark.data
def test_the_real_cifar10():
    exact = real(lambda: images.cifar10(unreachable, jpeg_test=False))
    lossy = real(lambda: images.cifar10(unreachable))
    assert exact.x_train.shape == (30_000, 32, 32, 3) and lossy.x_test.shape[0] == 10_000
    assert np.bincount(lossy.y_test).tolist() == [1000] * 10
    # The first batch of the original has these numbers of each class.
    assert np.bincount(exact.y_train[:10_000]).tolist() == [
        1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981,
    ]  # fmt: skip
    unit = exact.x_train.reshape(-1, 3) / 255
    np.testing.assert_allclose(unit.mean(axis=0), images.CIFAR10_MOMENTS[0], atol=2e-3)
    np.testing.assert_allclose(unit.std(axis=0), images.CIFAR10_MOMENTS[1], atol=2e-3)
    # The lossy test set is sorted by class and keeps the order within: its first ones are those
    # of the exact thousand, which are told from the next ones by far.
    for label in range(10):
        ours = exact.x_test[exact.y_test == label].astype(float)
        theirs = lossy.x_test[lossy.y_test == label][: len(ours)].astype(float)
        error = np.sqrt(((ours - theirs) ** 2).mean(axis=(1, 2, 3)))
        shifted = np.sqrt(((ours[1:] - theirs[:-1]) ** 2).mean(axis=(1, 2, 3)))
        assert error.max() < 25 < np.median(shifted)
