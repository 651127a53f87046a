"""FedEP's toy against its equations, written out, and the rows and scores of its tags."""

import h5py
import jax
import numpy as np
import pytest
from sklearn import metrics

from experiments import tags
from experiments.special import fed_ep_runs, fed_ep_toy


@pytest.mark.parametrize("method", ["FedEP", "FedEP, scaled identity"])
def test_expectation_propagation_of_two_gaussians(method):
    pairs = fed_ep_toy.draw_pairs(0, 3, degrees=7, scale=0.2)
    precisions = np.linalg.inv(pairs.covariances)
    eta = np.einsum("nkij,nkj->nki", precisions, pairs.means)
    site_eta, site = np.zeros_like(pairs.means), np.zeros_like(pairs.means)
    expected = []
    for _ in range(4):
        cavity, cavity_eta = site[:, ::-1], site_eta[:, ::-1]  # the other client's site
        tilted = precisions + cavity[..., None] * np.eye(2)
        mean = np.linalg.solve(tilted, (eta + cavity_eta)[..., None])[..., 0]
        variances = np.diagonal(np.linalg.inv(tilted), axis1=-2, axis2=-1)
        product = 1 / variances if method == "FedEP" else cavity + 1.0
        site_eta, site = product * mean - cavity_eta, product - cavity
        expected.append(site_eta.sum(axis=1) / site.sum(axis=1))
    means = fed_ep_toy.means_by_round(fed_ep_toy.kernels()[method], pairs, 4)
    np.testing.assert_allclose(means, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)


def test_sentences_of_stack_overflow(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    sentences = np.array([b"how to jax in jax", b"who knows", b"to be or not to be"])
    marks = np.array([b"jax|python", b"", b"literature|python"])
    for part in ("train", "test"):
        with h5py.File(tmp_path / f"stackoverflow_{part}.h5", "w") as file:
            for name, num in (("u1", 3), ("u0", 1)):
                file.create_dataset(f"examples/{name}/tokens", data=sentences[:num])
                file.create_dataset(f"examples/{name}/tags", data=marks[:num])
    (tmp_path / "stackoverflow.word_count").write_text("rare 1\nto 9\njax 8\nbe 7\n")
    (tmp_path / "stackoverflow.tag_count").write_text('{"python": 5, "jax": 4, "x": 1}')
    data, _ = tags.stack_overflow(num_words=3, num_tags=2, max_rows=2, num_test=2)
    assert data.sizes.tolist() == [1, 2]  # two of the three sentences of the second user
    assert np.asarray(data.rows["words"])[0, :4].tolist() == [0, 1, 1, -1]  # to jax jax
    np.testing.assert_allclose(data.rows["weight"], [1 / 5, 1 / 5, 1 / 2])
    assert tags.unpack(data.rows, 2).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_rates_of_tags_are_those_of_scikit_learn():
    data, test = tags.synthetic(num_clients=9, num_words=9, num_tags=4, num_test=200)
    kernel = np.sin(np.arange(36, dtype=np.float32)).reshape(9, 4)
    position = {"kernel": 3 * kernel, "bias": np.float32([-1, 0, 1, -9])}
    bag = np.stack([np.bincount(words, minlength=9) / 10 for words in test["words"]])
    logits, true = position["bias"] + bag @ position["kernel"], np.asarray(tags.unpack(test, 4))
    terms = (true * logits - np.logaddexp(0, logits)).sum(axis=1)
    found = tags.regressions(data, 9, 4).loglikelihood_fn(position, test)
    np.testing.assert_allclose(found, terms, rtol=1e-4)
    counts = fed_ep_runs.count_outcomes(jax.random.key(0), test, 999, position, 0)["counts"]
    for average in ("micro", "macro"):
        expected = metrics.f1_score(true, logits > 0, average=average, zero_division=0.0)
        assert fed_ep_runs.rates(np.asarray(counts))[f"{average}_f1"] == pytest.approx(
            100 * expected
        )
