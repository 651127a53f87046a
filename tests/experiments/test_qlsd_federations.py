"""The federations of the QLSD experiments: the notebooks' numbers, sizes, shares, repetitions."""

import jax
import numpy as np
import pytest

from experiments import data, images
from experiments.data import Table
from experiments.images import Images
from experiments.qlsd import federations, image_federations
from experiments.qlsd.federations import Rows

KEY = jax.random.key(5)
TOY_SIZES = [192, 109, 44, 90, 86, 40, 162, 14, 94, 15, 49, 166, 190, 141, 156, 47, 116, 77, 135]
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


def test_the_toy_is_that_of_the_notebook():
    toy = federations.gaussian()
    assert toy.data.sizes.tolist() == [*TOY_SIZES, 119] and toy.precision == 2042
    # The notebook's calls, on the global generator.
    np.random.seed(1994)  # noqa: NPY002
    rows = []
    for size in [*TOY_SIZES, 119]:
        centre = np.random.normal(np.zeros(50), 5)  # noqa: NPY002
        rows.append(np.random.normal(centre, 1, size=(size, 50)))  # noqa: NPY002
    np.testing.assert_array_equal(toy.data.rows, np.concatenate(rows).astype(np.float32))
    np.testing.assert_allclose(toy.mean, np.concatenate(rows).mean(axis=0), atol=1e-6)
    # Between clients the variance is 25, within them 1.
    means = np.array([r.mean(axis=0) for r in rows])
    assert abs(means.var(ddof=1) / 25 - 1) < 5 * np.sqrt(2 / 1000)
    within = np.concatenate([r - r.mean(axis=0) for r in rows])
    assert abs((within**2).sum() / (2042 - 20) / 50 - 1) < 5 * np.sqrt(2 / 2022 / 50)


def test_another_toy_has_other_rows():
    small = federations.gaussian(3, 4, spread=1.0, seed=2)
    assert small.data.num_clients == 3 and small.mean.shape == (4,)
    assert not np.array_equal(small.mean, federations.gaussian(3, 4, spread=1.0).mean)


def notebook_synthetic(alpha, beta, b=20, d=10, num_classes=2):
    """Write the notebooks' law again, from standard normals of the one seed."""

    def noise(*shape):
        return np.random.RandomState(1994).standard_normal(shape)

    sizes = np.random.RandomState(1994).randint(10, 50, b)
    model_means, row_means = alpha * noise(b), beta * noise(b)
    deviations = np.arange(1, d + 1) ** -0.6
    parts = []
    for size, u, v in zip(sizes, model_means, row_means, strict=True):
        x = v + noise(d) + noise(size, d) * deviations
        parts.append((x, (x @ (u + noise(d, num_classes)) + u + noise(num_classes)).argmax(1)))
    after = np.random.RandomState(1994)
    after.standard_normal((sizes[-1], d))
    return parts, [after.permutation(size) for size in sizes]


def test_synthetic_with_the_shared_seed_is_that_of_the_notebooks():
    found = federations.synthetic(shared_seed=True)
    parts, orders = notebook_synthetic(1, 1)
    assert found.data.num_rows == 555 and len(found.test.label) == 72
    test_x, test_y = [], []
    for rows, (x, y), order in zip(clients(found), parts, orders, strict=True):
        num = int(0.9 * len(y))
        np.testing.assert_allclose(rows.features, x[order[:num]], atol=2e-6)
        np.testing.assert_array_equal(rows.label, y[order[:num]])
        test_x.append(x[order[num:]])
        test_y.append(y[order[num:]])
    np.testing.assert_allclose(found.test.features, np.concatenate(test_x), atol=2e-6)
    np.testing.assert_array_equal(found.test.label, np.concatenate(test_y))


def test_synthetic_by_default_draws_independently():
    found = federations.synthetic(num_clients=400, dim=3, seed=1)
    assert found.data.sizes.min() >= 9 and found.data.sizes.max() <= 44
    means = np.array([r.features.mean(axis=0) for r in clients(found)])
    # A client's mean has variance beta^2 + 1 + j^-1.2 / n_i, and covariance beta^2.
    expected = 1 + np.eye(3) * (1 + np.arange(1.0, 4) ** -1.2 / 20)
    np.testing.assert_allclose(np.cov(means.T), expected, atol=5 * 2.1 * np.sqrt(2 / 400))
    # With a shared seed only the constant B_i would tell clients apart.
    shared = federations.synthetic(num_clients=30, dim=3, shared_seed=True, train_share=1.0)
    gaps = np.diff([r.features.mean(axis=0) for r in clients(shared)], axis=0)
    assert gaps.std(axis=1).max() < 0.5 < np.diff(means, axis=0).std(axis=1).mean()


def test_synthetic_labels_do_not_depend_on_alpha():
    for shared_seed in (False, True):
        some = [
            federations.synthetic(alpha, 0.5, num_classes=4, shared_seed=shared_seed)
            for alpha in (0.0, 3.0)
        ]
        for one, other in zip(*map(clients, some), strict=True):
            np.testing.assert_array_equal(one.features, other.features)
            np.testing.assert_array_equal(one.label, other.label)


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


def test_each_label_is_dealt_in_proportions_of_its_own():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 4, 7], [300, 500, 20]))
    ids = federations.label_dirichlet(KEY, labels, 8)
    table = np.array([np.bincount(ids[labels == y], minlength=8) for y in (0, 4, 7)])
    assert table.sum() == 820 and (table[:, :7] >= 1).all()
    for y in (0, 4, 7):  # consecutive rows of a label
        assert (np.diff(ids[labels == y]) >= 0).all()
    shares = table / table.sum(axis=1, keepdims=True)
    assert shares.max() > 0.25 and np.abs(shares[0] - shares[1]).max() > 0.05
    np.testing.assert_array_equal(ids, federations.label_dirichlet(KEY, labels, 8))
    with pytest.raises(ValueError, match="label 7 has 20 rows"):
        federations.label_dirichlet(KEY, labels, 21)


def test_rounding_never_deals_more_than_there_is():
    labels = np.zeros(30, int)
    for seed in range(200):
        ids = federations.label_dirichlet(jax.random.key(seed), labels, 25)
        assert np.bincount(ids).sum() == 30 and ids.min() == 0 and ids.max() <= 24


def covertype_like(num):
    rng = np.random.default_rng(0)
    numeric = rng.normal(50, 9, (num, 10))
    areas, soils = (np.eye(k)[rng.integers(0, k, num)] for k in (4, 40))
    features = np.concatenate([numeric, areas, soils], axis=1).astype(np.float32)
    return Table(features, rng.integers(1, 8, num).astype(np.int32))


@pytest.mark.parametrize("split", ["wilderness", "labels"])
def test_covertype_of_natural_clients_and_of_labels(split):
    table = covertype_like(900)
    arguments = dict(split=split, num_clients=4, num_rows=600, num_test=200)
    found = federations.covertype(KEY, table, **arguments)
    assert found.data.num_rows == 600 and found.test.features.shape == (200, 55)
    together = np.concatenate([found.data.rows.features, found.test.features])
    np.testing.assert_allclose(together[:, :10].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(together[:, :10].std(axis=0), 1, rtol=1e-4)
    assert (together[:, -1] == 1).all() and set(np.unique(together[:, 10:])) == {0, 1}
    areas = [np.unique(r.features[:, 10:14].argmax(axis=1)).tolist() for r in clients(found)]
    assert (areas == [[0], [1], [2], [3]]) == (split == "wilderness")
    seven = federations.covertype(KEY, table, binary=False, **arguments)
    assert np.unique(seven.test.label).tolist() == list(range(7))
    np.testing.assert_array_equal(found.test.label, seven.test.label == 1)


def test_covertype_says_what_does_not_fit():
    table = covertype_like(50)
    with pytest.raises(ValueError, match="cannot take 12000 of 50 rows"):
        federations.covertype(KEY, table)
    with pytest.raises(ValueError, match="split must be"):
        federations.covertype(KEY, table, split="soil", num_rows=30, num_test=5)
    with pytest.raises(ValueError, match="must indicate the wilderness area"):
        wrong = table._replace(features=table.features * 2)
        federations.covertype(KEY, wrong, num_rows=30, num_test=5)


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


@pytest.mark.data
def test_real_covertype_by_wilderness():
    table = real(lambda: data.covtype(no_fetch))
    found = federations.covertype(KEY, table, num_rows=20_000, num_test=1000)
    share = np.asarray(found.data.share)
    # Rawah, Neota, Comanche Peak and Cache la Poudre have 44.8, 5.1, 43.6 and 6.4 % of all.
    np.testing.assert_allclose(share, [0.448, 0.051, 0.436, 0.064], atol=0.02)
    assert abs(np.mean(found.data.rows.label) - 0.4876) < 0.02
