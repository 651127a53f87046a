"""The federations of images of Vono et al. (2022): sizes, shares, repetitions."""

import jax
import numpy as np
import pytest

from experiments import data, images
from experiments.images import Images
from experiments.qlsd import image_federations
from experiments.qlsd.federations import Rows

KEY = jax.random.key(5)
DIGIT_SIZES = [74, 54, 95, 96, 50, 83, 44, 82, 24, 25]


def clients(federation):
    ends = np.cumsum(federation.data.sizes)[:-1]
    columns = [np.split(np.asarray(leaf), ends) for leaf in federation.data.rows]
    return [Rows(*parts) for parts in zip(*columns, strict=True)]


def numbered_images(num, num_test=30, side=2):
    """Images whose pixels tell their own number."""
    numbers = np.arange(num)
    pixels = np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255, 0 * numbers], axis=1)
    x = pixels.astype(np.uint8).reshape(-1, side, side)
    y = np.random.default_rng(3).integers(0, 10, num).astype(np.int32)
    return Images(x, y, x[:num_test], y[:num_test])


def numbers_of(features):
    flat = np.asarray(features).reshape(len(features), -1).astype(int)
    return flat[:, 0] * 65536 + flat[:, 1] * 256 + flat[:, 2]


def test_digits_come_from_the_pools_of_the_notebook():
    found = image_federations.digits(numbered_images(20_000), scaling="raw", shared_seed=True)
    assert found.data.sizes.tolist() == DIGIT_SIZES and found.data.num_rows == 627
    labels = numbered_images(20_000).y_train
    order = np.argsort(labels, kind="stable")
    size = 20_000 // 260
    rng = np.random.RandomState(1994)
    groups = [rng.choice(26, 20, replace=False) for _ in range(10)]
    more = [rng.choice(g, 6, replace=False) for g in groups]
    places = np.random.RandomState(1994).permutation(26 * size)
    for c, rows in enumerate(clients(found)):
        pool = []
        for group in [*groups[c], *more[c]]:
            begin = (group * 10 + rng.choice(10)) * size
            pool += order[begin : begin + size].tolist()
        expected = np.array(pool)[places[: DIGIT_SIZES[c]]]
        np.testing.assert_array_equal(numbers_of(rows.features), expected)
        np.testing.assert_array_equal(rows.label, labels[expected])


def test_digits_may_repeat_and_clients_draw_their_own():
    pictures = numbered_images(600)
    found = image_federations.digits(pictures, 3, scaling="raw")
    assert found.data.sizes.tolist() == DIGIT_SIZES[:3]
    for rows in clients(found):
        numbers = numbers_of(rows.features)
        # 20 of 26 groups of 7 of 3 chunks: at most two chunks of a group.
        assert np.bincount(numbers).max() <= 2
        np.testing.assert_array_equal(rows.label, pictures.y_train[numbers])
    again = image_federations.digits(pictures, 3, scaling="raw")
    np.testing.assert_array_equal(again.data.rows.features, found.data.rows.features)
    other = image_federations.digits(pictures, 3, scaling="raw", seed=7)
    assert other.data.sizes.tolist() != found.data.sizes.tolist()
    with pytest.raises(ValueError, match="a client needs 74 images and its pool has 52"):
        image_federations.digits(numbered_images(60), 1)


def test_digits_are_flat_and_scaled():
    found = image_federations.digits(numbered_images(2000), 4, scaling="unit")
    assert found.data.rows.features.shape[1] == 4 and found.test.features.shape == (30, 4)
    assert found.data.rows.features.max() <= 1 and found.test.label.dtype == np.int32
    standard = image_federations.digits(numbered_images(2000), 4)
    np.testing.assert_allclose(
        standard.data.rows.features, (found.data.rows.features - 0.1307) / 0.3081, atol=1e-5
    )


def test_dominant_digits_use_every_image_once():
    pictures = numbered_images(1000)
    found = image_federations.dominant_digits(KEY, pictures, 10, 0.6, scaling="raw")
    seen = np.concatenate([numbers_of(r.features) for r in clients(found)])
    assert sorted(seen) == list(range(1000))
    assert found.data.rows.features.shape == (1000, 2, 2)
    for c, rows in enumerate(clients(found)):
        np.testing.assert_array_equal(rows.label, pictures.y_train[numbers_of(rows.features)])
        assert np.mean(rows.label == c) >= 0.6
    few = image_federations.dominant_digits(KEY, pictures, 10, 0.6, num_rows=200)
    assert few.data.num_rows == 200
    with pytest.raises(ValueError, match="cannot take 1001 of 1000 rows"):
        image_federations.dominant_digits(KEY, pictures, 10, 0.6, num_rows=1001)


def test_blocks_are_contiguous():
    x = np.zeros((102, 2, 2, 3), np.uint8)
    x[:, 0, 0, 0] = np.arange(102)
    pictures = Images(x, np.arange(102) % 10, x[:5], np.arange(5))
    found = image_federations.contiguous_blocks(pictures, scaling="raw")
    parts = [r.features[:, 0, 0, 0].astype(int) for r in clients(found)]
    assert np.concatenate(parts).tolist() == list(range(102))
    assert {len(p) for p in parts} == {5, 6} and len(parts) == 20
    some = image_federations.contiguous_blocks(pictures, num_rows=40)
    assert some.data.sizes.tolist() == [2] * 20
    mean, deviation = np.array(images.CIFAR10_MOMENTS)
    np.testing.assert_allclose(some.data.rows.features[3, 1, 1], -mean / deviation, rtol=1e-5)
    with pytest.raises(ValueError, match="num_rows must lie between 20 clients and 102 images"):
        image_federations.contiguous_blocks(pictures, num_rows=10)


def real(load):
    try:
        return load()
    except data.DataNotFound as error:
        pytest.skip(str(error))


def no_fetch(name, version):
    raise OSError("not in this test")


@pytest.mark.data
def test_real_digits_are_split_as_in_the_paper():
    pictures = real(lambda: images.mnist(no_fetch))
    found = image_federations.digits(pictures)
    assert found.data.sizes.tolist() == DIGIT_SIZES and found.data.rows.features.shape == (627, 784)
    # 20 of 26 groups: no client lacks many digits, no client is balanced.
    shares = [np.bincount(r.label, minlength=10) / len(r.label) for r in clients(found)]
    assert 0.12 < np.max(shares, axis=1).mean() < 0.4
