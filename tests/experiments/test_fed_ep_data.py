"""The federations of FedEP's experiments: loaders on made-up files, splits, made-up tags."""

import json
import pickle

import h5py
import jax
import numpy as np
import pytest

from experiments import loaders, tff
from experiments.data import DataNotFound
from experiments.fed_ep import tag_data, tag_model

RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    return tmp_path


def write(path, clients):
    with h5py.File(path, "w") as file:
        for name, columns in clients.items():
            for column, values in columns.items():
                file.create_dataset(f"examples/{name}/{column}", data=values)


def pictures(num):
    return RNG.integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)


def unreachable(name, version):
    raise OSError("no route to host")


def test_cifar100_as_tensorflow_federated_splits_it(folder):
    x = {name: pictures(num) for name, num in (("b", 2), ("a", 3))}
    for part in ("train", "test"):
        columns = {n: {"image": v, "label": np.arange(len(v))} for n, v in x.items()}
        write(folder / f"fed_cifar100_{part}.h5", columns)
    train, _, _ = tff.cifar100(jax.random.key(0))
    np.testing.assert_array_equal(train.x, np.concatenate([x["a"], x["b"]]))
    assert train.client.tolist() == [0, 0, 0, 1, 1] and train.label.tolist() == [0, 1, 2, 0, 1]
    rows, test = loaders.cifar100(seed=1)
    assert rows.sizes.tolist() == [3, 2]
    assert rows.rows["features"].shape == (5, 24, 24, 3)
    mean, deviation = (np.array(m) for m in loaders.CIFAR100_MOMENTS)
    back = np.asarray(rows.rows["features"]) * deviation + mean
    # A crop of the picture, mirrored or not.
    first = x["a"][0] / 255
    crops = [first[i : i + 24, j : j + 24] for i in range(9) for j in range(9)]
    crops += [crop[:, ::-1] for crop in crops]
    assert min(np.abs(back[0] - crop).max() for crop in crops) < 1e-5
    held_out = test["features"][0] * deviation + mean
    np.testing.assert_allclose(held_out, first[4:28, 4:28], atol=1e-5)


def test_cifar100_is_split_by_us_where_only_the_images_are_there(folder):
    (folder / "cifar-100-python").mkdir()
    labels = np.repeat(np.arange(100), 4)
    planes = RNG.integers(0, 256, (400, 3072), dtype=np.uint8)
    for part in ("train", "test"):
        names = (b"data", b"fine_labels", b"coarse_labels")
        found = zip(
            names, (planes, labels.tolist(), tff.SUPERCLASSES[labels].tolist()), strict=True
        )
        (folder / "cifar-100-python" / part).write_bytes(pickle.dumps(dict(found)))
    train, test, text = tff.cifar100(jax.random.key(0))
    assert np.bincount(train.client).tolist() == [100] * 4 and "our own" in text
    np.testing.assert_array_equal(np.bincount(train.label), 4)
    np.testing.assert_array_equal(test.x[7, :, :, 1].reshape(-1), planes[7, 1024:2048])
    assert np.bincount(tff.SUPERCLASSES).tolist() == [5] * 20


def test_writers_of_emnist(folder):
    with pytest.raises(DataNotFound, match=r"fed_emnist_train\.h5.*mnist_small"):
        tff.emnist62()
    for part in ("train", "test"):
        columns = {"pixels": RNG.random((2, 28, 28), np.float32), "label": np.array([61, 3])}
        write(folder / f"fed_emnist_{part}.h5", {"f0": columns, "f1": columns})
    rows, test = loaders.emnist62()
    assert rows.rows["features"].shape == (4, 28, 28, 1)
    assert rows.sizes.tolist() == [2, 2]
    assert test["label"].tolist() == [61, 3, 61, 3]


@pytest.mark.parametrize("name", ["cifar100"])
def test_without_data_there_is_one_line_of_advice(folder, name):
    with pytest.raises(DataNotFound, match="fed_cifar100_"):
        tff.cifar100(jax.random.key(0), unreachable)


def test_sentences_of_stack_overflow(folder):
    with pytest.raises(DataNotFound, match="stackoverflow_train"):
        tag_data.stack_overflow(3, 2, 5, 5)
    sentences = np.array([b"how to jax in jax", b"who knows", b"to be or not to be"])
    marks = np.array([b"jax|python", b"", b"literature|python"])
    clients = {
        "u1": {"tokens": sentences, "tags": marks},
        "u0": {"tokens": sentences[:1], "tags": marks[:1]},
    }
    for part in ("train", "test"):
        write(folder / f"stackoverflow_{part}.h5", clients)
    (folder / "stackoverflow.word_count").write_text("rare 1\nto 9\njax 8\nbe 7\n")
    (folder / "stackoverflow.tag_count").write_text(json.dumps({"python": 5, "jax": 4, "x": 1}))
    found = tag_data.stack_overflow(3, 2, 2, 3)
    rows = found.data.rows
    assert found.data.sizes.tolist() == [1, 2]  # two of the second user's three
    assert np.asarray(rows.words[0][:4]).tolist() == [0, 1, 1, -1]  # to jax jax
    np.testing.assert_allclose(rows.weight, [1 / 5, 1 / 5, 1 / 2])
    assert np.unpackbits(np.asarray(rows.tags, np.uint8), axis=1, count=2).tolist() == [
        [1, 1],
        [1, 1],
        [0, 0],
    ]
    assert len(found.test.weight) == 3


def test_the_tag_model_is_logistic_regression_on_the_mean_word():
    position = {"kernel": RNG.normal(size=(5, 3)).astype(np.float32), "bias": np.ones(3, "f4")}
    words = np.array([[0, 2, 2, -1], [4, -1, -1, -1]], np.int16)
    tags = np.array([[1, 0, 1], [0, 0, 1]])
    rows = tag_data.Rows(words, np.array([0.25, 0.5], "f4"), np.packbits(tags, axis=1))
    bag = np.array([[1, 0, 2, 0, 0], [0, 0, 0, 0, 1]]) * np.array([[0.25], [0.5]])
    logits = 1 + bag @ position["kernel"]
    expected = (tags * logits - np.logaddexp(0, logits)).sum(axis=1)
    posterior = tag_model.posterior(5, 3)
    found = posterior.loglikelihood_fn(position, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    keys = jax.random.split(jax.random.key(0), 4096)
    drawn = jax.vmap(lambda key: posterior.resample_fn(key, position, rows).tags)(keys)
    share = np.unpackbits(np.asarray(drawn), axis=-1, count=3).mean(axis=0)
    assert np.abs(share - 1 / (1 + np.exp(-logits))).max() < 5 * 0.5 / 64
    counts = tag_model.score(jax.random.key(0), 9, position, rows, 0)["counts"]
    said = logits > 0
    expected = np.stack([said & (tags == 1), said & (tags == 0), ~said & (tags == 1)], -1).sum(0)
    np.testing.assert_array_equal(counts, expected)


def test_rates_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    true, said = RNG.random((2, 50, 4)) < 0.3
    said[:, 3] = False
    counts = np.stack([said & true, said & ~true, ~said & true], axis=-1).sum(axis=0)
    found = tag_model.rates(counts)
    options = dict(zero_division=0.0)
    assert found["precision"] == pytest.approx(
        100 * metrics.precision_score(true, said, average="micro", **options)
    )
    assert found["recall"] == pytest.approx(
        100 * metrics.recall_score(true, said, average="micro", **options)
    )
    for kind in ("micro", "macro"):
        assert found[f"{kind} F1"] == pytest.approx(
            100 * metrics.f1_score(true, said, average=kind, **options)
        )


def test_made_up_users_write_about_few_topics():
    found = tag_data.synthetic(0, num_clients=300, num_words=60, num_tags=9, mean_rows=8.0)
    rows, sizes = found.data.rows, found.data.sizes
    assert sizes.min() >= 1 and abs(sizes.mean() - 8) < 5 * 8 / 300**0.5
    assert rows.words.min() >= 0 and rows.words.max() < 60
    tags = np.unpackbits(np.asarray(rows.tags, np.uint8), axis=1, count=9)
    assert 0.01 < tags.mean() < 0.4
    again = tag_data.synthetic(0, num_clients=300, num_words=60, num_tags=9, mean_rows=8.0)
    np.testing.assert_array_equal(rows.words, again.data.rows.words)
