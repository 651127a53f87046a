"""The federations of images of Guo et al. (2023), and smaller ones from data at hand."""

import jax
import numpy as np

import fedmcmc
from experiments import images, tff
from experiments.fed_ep.methods import Federation
from experiments.images import Images, scale_pixels
from experiments.output import percent
from experiments.qlsd.federations import Rows, labelled, some_rows

__all__ = ["CROP", "cifar10", "cifar100", "emnist62", "mnist", "with_pca"]

CROP = 24
FOLDER_ROWS = 30_000
"""Training images of CIFAR-10 in the folder of data, whose test images are JPEG; else 50 000."""
CIFAR100_MOMENTS = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
"""Mean and standard deviation of CIFAR-100's training pixels on [0, 1], a channel."""


def cifar100(rng_key: jax.Array) -> Federation:
    """Return CIFAR-100 as 500 clients of 100 images: crops of 24 by 24, random for training.

    Each training image is cropped (and mirrored with probability a half) once; in the published
    experiments anew at every visit.
    """
    crop_key, split_key = jax.random.split(rng_key)
    train, test, text = tff.cifar100(split_key)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(crop_key)))
    x = _cropped(train.x, rng)
    middle = (test.x.shape[1] - CROP) // 2
    held_out = test.x[:, middle : middle + CROP, middle : middle + CROP]
    scaled = [scale_pixels(part, "standard", CIFAR100_MOMENTS) for part in (x, held_out)]
    data = fedmcmc.FederatedData.from_arrays(labelled(scaled[0], train.label), train.client)
    return Federation(data, labelled(scaled[1], test.label), f"CIFAR-100, {text}")


def _cropped(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    places = rng.integers(0, x.shape[1] - CROP + 1, (len(x), 2))
    rows, columns = (places[:, i, None] + np.arange(CROP) for i in range(2))
    flip = rng.random(len(x)) < 0.5
    columns[flip] = columns[flip, ::-1]
    return x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]


def emnist62() -> Federation:
    """Return EMNIST's digits and letters as 3400 clients, their writers."""
    train, test, text = tff.emnist62()
    data = fedmcmc.FederatedData.from_arrays(
        labelled(train.x[..., None], train.label), train.client
    )
    return Federation(data, labelled(test.x[..., None], test.label), f"EMNIST-62, {text}")


def cifar10(
    rng_key: jax.Array,
    num_clients: int,
    num_rows: int,
    num_test: int,
    *,
    concentration: float = 0.3,
    shrink: int = 2,
) -> Federation:
    """Return CIFAR-10 as clients by label skew, with images shrunk to means of squares.

    Each label's images are spread over the clients by Dirichlet proportions. Test images are those
    of `images.cifar10`: JPEG copies where the folder of data has the images, else exact.
    """
    row_key, test_key, split_key = jax.random.split(rng_key, 3)
    given = images.cifar10()
    train, test = _some(given, row_key, test_key, num_rows, num_test)
    ids = fedmcmc.partition.dirichlet(
        split_key, train.label, num_clients, concentration, min_rows=10
    )
    parts = [
        _shrunk(scale_pixels(part.features, "standard", images.CIFAR10_MOMENTS), shrink)
        for part in (train, test)
    ]
    data = fedmcmc.FederatedData.from_arrays(labelled(parts[0], train.label), ids)
    size = parts[0].shape[1]
    source = "exact" if len(given.y_train) > FOLDER_ROWS else "JPEG copies of quality 75"
    text = (
        f"CIFAR-10, {num_rows:,} training images of {size} by {size} over {num_clients} clients by "
        f"Dirichlet proportions ({concentration:g}) of each label, {num_test:,} test images "
        f"({source})"
    )
    return Federation(data, labelled(parts[1], test.label), text)


def mnist(
    rng_key: jax.Array,
    num_clients: int,
    num_rows: int,
    num_test: int,
    *,
    proportion: float = 0.5,
    shrink: int = 2,
) -> Federation:
    """Return MNIST as clients of equal size, each dominated by a label."""
    row_key, test_key, split_key = jax.random.split(rng_key, 3)
    train, test = _some(images.mnist(), row_key, test_key, num_rows, num_test)
    ids = fedmcmc.partition.dominant_label(split_key, train.label, num_clients, proportion)
    parts = [
        _shrunk(scale_pixels(part.features, "standard")[..., None], shrink)
        for part in (train, test)
    ]
    data = fedmcmc.FederatedData.from_arrays(labelled(parts[0], train.label), ids)
    size = parts[0].shape[1]
    text = (
        f"MNIST, {num_rows:,} training images of {size} by {size} over {num_clients} clients, "
        f"{percent(proportion)} of a client's of one label, {num_test:,} test images"
    )
    return Federation(data, labelled(parts[1], test.label), text)


def with_pca(given: Federation, num_components: int, *, scaled: bool = True) -> Federation:
    """Return the coordinates of each image along the first principal components.

    The components are those of all training rows together. With `scaled` each coordinate has
    variance one; without, the variance of its component.
    """
    x = np.asarray(given.data.rows.features).reshape(given.data.num_rows, -1)
    test = np.asarray(given.test.features).reshape(len(given.test.label), -1)
    if not 1 <= num_components <= min(x.shape):
        raise ValueError(
            f"num_components must lie between 1 and {min(x.shape)}, got {num_components}."
        )
    centre = x.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(x - centre, rowvar=False))
    chosen = np.argsort(values)[::-1][:num_components]
    basis = vectors[:, chosen] / np.sqrt(values[chosen] if scaled else 1.0)
    ids = np.repeat(np.arange(given.data.num_clients), given.data.sizes)
    rows = labelled(((x - centre) @ basis).astype(np.float32), np.asarray(given.data.rows.label))
    held_out = labelled(((test - centre) @ basis).astype(np.float32), given.test.label)
    data = fedmcmc.FederatedData.from_arrays(rows, ids)
    text = f"{num_components} principal components{'' if scaled else ', not scaled'}"
    return Federation(data, held_out, f"{given.text}; {text}")


def _some(
    given: Images, row_key: jax.Array, test_key: jax.Array, num_rows: int, num_test: int
) -> tuple[Rows, Rows]:
    rows = some_rows(row_key, len(given.y_train), num_rows)
    held_out = some_rows(test_key, len(given.y_test), num_test)
    return (
        Rows(given.x_train[rows], given.y_train[rows]),
        Rows(given.x_test[held_out], given.y_test[held_out]),
    )


def _shrunk(x: np.ndarray, factor: int) -> np.ndarray:
    num, height, width, channels = x.shape
    if height % factor or width % factor:
        raise ValueError(f"shrink must divide {height} and {width}, got {factor}.")
    squares = x.reshape(num, height // factor, factor, width // factor, factor, channels)
    return squares.mean(axis=(2, 4), dtype=np.float32)
