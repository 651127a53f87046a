"""FA-HMC on images: the compiled sweep against `fedmcmc.sample`, tuning, data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from experiments import data as tables
from experiments import images, output
from experiments.fa_hmc import (
    cifar2,
    fashion_mnist,
    image_data,
    image_sweep,
    image_sweeps,
    image_tuning,
    kmnist,
    network,
)
from experiments.images import Images
from experiments.models import Mlp
from experiments.qlsd import networks
from fedmcmc import metrics

TINY = dict(
    num_clients=3,
    num_rows=60,
    num_test=40,
    batch_size=5,
    gradients="reuse",
    leapfrog_steps=(1, 3),
    at_local_steps=2,
    local_steps=(1, 2),
    at_leapfrog_steps=3,
    step_sizes=(0.05, 0.3),
    num_rounds=6,
    thinning=2,
    num_chains=2,
)
MODULES = {
    "fashion_mnist": fashion_mnist,
    "network": network,
    "kmnist": kmnist,
    "cifar2": cifar2,
}


def pictures(num_classes=3, num=90, size=4, seed=0, channels=()):
    """Return images whose brightest columns tell the class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num) % num_classes).astype(np.int32)
    x = rng.integers(0, 128, (num, size, size, *channels))
    x[np.arange(num), :, labels] += 100
    return Images(x[:60].astype(np.uint8), labels[:60], x[60:].astype(np.uint8), labels[60:])


@pytest.fixture(scope="module")
def small():
    """Return a task, its model, and keys and starts (all the same) of three chains."""
    task = image_data.federate(jax.random.key(0), pictures(), 3)
    posterior, predict_fn = networks.make(Mlp((), task.num_classes), task.data, 0.5)
    keys = jax.vmap(lambda c: jax.random.fold_in(jax.random.key(5), c))(jnp.arange(3))
    start = posterior.init_fn(jax.random.key(6))
    starts = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), start)
    return task, posterior, predict_fn, keys, starts


PLAN = image_sweep.Plan(3, 2, 6, 2, 5, "reuse", 20)


@pytest.fixture(scope="module")
def swept(small):
    task, posterior, predict_fn, keys, starts = small
    steps = jnp.array([0.01, 0.05, 1e30])
    return image_sweep.sweep(PLAN, posterior, predict_fn, task.data, task.test, keys, starts, steps)


def test_the_sweep_draws_what_sample_draws(small, swept):
    task, posterior, predict_fn, _, starts = small
    kernel = fedmcmc.fa_hmc(
        posterior,
        step_size=0.05,
        num_integration_steps=3,
        num_local_steps=2,
        batch_size=5,
        gradients="reuse",
    )
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    samples = fedmcmc.sample(
        jax.random.key(5),
        kernel,
        task.data,
        start,
        num_rounds=6,
        thinning=2,
        num_chains=2,
        progress=False,
    )
    for ours, theirs in zip(
        jax.tree.leaves(swept.position), jax.tree.leaves(samples.draws), strict=True
    ):
        np.testing.assert_allclose(ours[1, :2], theirs[:, -1], rtol=2e-4, atol=2e-5)
    labels = task.test.label
    for chain, num in ((0, 1), (0, 3), (1, 3)):
        for scores, first in ((swept.scores, 0), (swept.later, num // 2)):
            part = jax.tree.map(lambda leaf, c=chain, a=first, n=num: leaf[c, a:n], samples.draws)
            probabilities = metrics.predictive(predict_fn, part, (task.test.features,))
            expected = {
                "accuracy": metrics.accuracy(probabilities, labels),
                "brier": metrics.brier_score(probabilities, labels),
                "ece": metrics.expected_calibration_error(probabilities, labels, PLAN.num_bins),
                "nnll": metrics.negative_log_likelihood(probabilities, labels),
            }
            for name, value in expected.items():
                found = scores[name][1, chain, num - 1]
                np.testing.assert_allclose(found, value, rtol=1e-3, err_msg=name)


def test_later_samples_are_the_last_half_to_three_quarters():
    values = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)

    def add(sums, given):
        sums = sums.add(*given)
        return sums, sums.mean

    none = image_sweep.Later.of_none(values[0])
    _, means = jax.lax.scan(add, none, (values, jnp.arange(40)))
    for num in range(1, 41):
        left_out = max(m for m in (0, 1, 2, 4, 8, 16) if 2 * m <= num)
        np.testing.assert_allclose(means[num - 1], values[left_out:num].mean(axis=0), atol=1e-6)
        assert num == 1 or num / 4 <= left_out <= num / 2


def test_chains_differ_and_a_diverged_step_never_wins(swept):
    assert swept.finite.shape == (3, 3, 3)
    assert np.asarray(swept.finite).all(axis=(1, 2)).tolist() == [True, True, False]
    scores = {name: np.asarray(score) for name, score in swept.scores.items()}
    assert len(np.unique(scores["nnll"][1, :, -1])) == 3
    assert image_tuning.num_diverged(np.asarray(swept.finite)) == 1
    for name, found in image_tuning.tuned(scores, (0.1, 0.2, 0.3)).items():
        assert np.isnan(scores[name][2]).any()
        assert found["step"] in (0.1, 0.2)
        assert found["sd"] is not None and len(found["curve"]) == 3


def test_other_step_sizes_run_the_same_program(small, swept):
    task, posterior, predict_fn, keys, starts = small
    before = image_sweep.sweep._cache_size()
    steps = jnp.array([0.02, 0.03, 0.04])
    image_sweep.sweep(PLAN, posterior, predict_fn, task.data, task.test, keys, starts, steps)
    assert image_sweep.sweep._cache_size() == before


def test_gradients_are_counted():
    assert PLAN.num_gradients == 3 * 2 * 6
    assert PLAN._replace(gradients="fresh").num_gradients == 5 * 2 * 6
    assert PLAN._replace(num_rounds=7).num_gradients == 3 * 2 * 6  # the last round makes no sample


def grid(*last):
    """Return scores ``[num_step_sizes, num_chains, 2]`` that end with `last`."""
    return np.stack([np.zeros_like(last, dtype=float), np.asarray(last, float)], axis=-1)


def test_the_best_step_is_that_of_the_mean_over_chains():
    last = ([0.5, 0.7], [0.4, 0.9], [0.99, np.nan])
    assert image_tuning.best_step("accuracy", grid(*last)) == 1
    assert image_tuning.best_step("nnll", grid(*last)) == 0
    assert image_tuning.best_step("nnll", grid([0.3, np.inf], [0.4, 9.0])) == 1
    assert image_tuning.best_step("ece", grid([np.nan, 0.1])) is None
    same = {name: grid(*last) for name in image_sweep.SCORES}
    found = image_tuning.tuned(same, (0.1, 0.2, 0.4))
    assert (found["accuracy"]["step"], found["accuracy"]["edge"]) == (0.2, "")
    assert (found["brier"]["step"], found["brier"]["edge"]) == (0.1, "smallest")
    assert found["accuracy"]["mean"] == pytest.approx(0.65)
    assert found["brier"]["accuracy"] == pytest.approx(0.6)
    assert found["accuracy"]["sd"] == pytest.approx(0.5 / 2**0.5)
    lost = image_tuning.tuned({n: grid([np.nan]) for n in image_sweep.SCORES}, (0.1,))
    assert lost["ece"]["mean"] is None and lost["ece"]["edge"] == ""


@pytest.mark.parametrize(
    "given",
    [
        {"dataset": "mnist"},
        {"model": "lenet"},
        {"gradients": "old"},
        {"prior_scale": 0.0},
        {"leapfrog_steps": (10, 50)},
        {"leapfrog_steps": (1,)},
        {"local_steps": (1, 10, 10)},
        {"step_sizes": ()},
        {"step_sizes": (0.2, 0.1)},
        {"step_sizes": (-0.1, 0.1)},
        {"thinning": 2000},
        {"num_rows": 5},
        {"num_chains": 0},
        {"batch_size": -1},
    ],
)
def test_settings_out_of_range_are_named(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        fashion_mnist.Config(**given)


def test_a_setting_of_both_sweeps_runs_once():
    found = image_sweeps.plans(fashion_mnist.Config())
    assert list(found)[:2] == [(1, 10), (10, 10)] and len(found) == 8
    assert found[10, 10][1] == ["L", "T"] and found[10, 100][1] == ["T"]


def test_images_are_spread_equally_and_standardised():
    given = pictures(2, channels=(3,))
    task = image_data.federate(jax.random.key(0), given, 4, num_rows=50, num_test=20)
    assert sorted(task.data.sizes.tolist()) == [12, 12, 13, 13]
    assert task.test.features.shape == (20, 48) and task.num_classes == 2
    whole = image_data.federate(jax.random.key(0), given, 4)
    rows = np.asarray(whole.data.rows.features).reshape(-1, 3)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(rows.std(axis=0), 1, rtol=1e-5)


def test_test_images_are_split_by_class():
    labels = np.repeat(np.arange(5), 10)
    x = np.arange(50, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8)
    found = image_data.split_test_images(x, labels, 10)
    assert np.bincount(found.y_test).tolist() == [2] * 5
    assert np.bincount(found.y_train).tolist() == [8] * 5
    both = np.concatenate([found.x_train, found.x_test])[:, 0, 0]
    assert sorted(both.tolist()) == list(range(50))
    np.testing.assert_array_equal(found.x_test[:, 0, 0] // 10, found.y_test)
    again = image_data.split_test_images(x, labels, 10)
    np.testing.assert_array_equal(found.x_test, again.x_test)


def unreachable(name, version):
    raise OSError("no route to host")


def test_kmnist_is_all_of_it_else_its_test_images(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDMCMC_DATA", str(tmp_path))
    with pytest.raises(tables.DataNotFound, match=r"kmnist\.npz.*kmnist_test\.npz"):
        image_data.kmnist(unreachable)
    x, y = np.zeros((10_000, 28, 28), np.uint8), (np.arange(10_000) % 10).astype(np.uint8)
    np.savez(tmp_path / "kmnist_test.npz", x_test=x, y_test=y)
    found, text = image_data.kmnist(unreachable)
    assert len(found.y_train) == 8000 and np.bincount(found.y_test).tolist() == [200] * 10
    assert "test images alone" in text and "8,000 for training and 2,000 for testing" in text
    asked = []

    def fetch(name, version):
        asked.append((name, version))
        return np.zeros((70_000, 784), np.uint8), np.arange(70_000) % 10

    found, text = image_data.kmnist(fetch)
    assert asked == [("Kuzushiji-MNIST", 1)] and "60,000 for training" in text
    np.savez(tmp_path / "kmnist.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    found, text = image_data.kmnist(unreachable)
    assert text == "KMNIST, 10,000 for training and 20 for testing"


def test_cifar2_has_two_classes(monkeypatch):
    monkeypatch.setattr(images, "cifar10", lambda: pictures(5, size=5, channels=(3,)))
    found, text = image_data.cifar2()
    assert set(found.y_train) == set(found.y_test) == {0, 1}
    assert len(found.x_train) == len(found.y_train) == 36 - len(found.x_test)
    assert "airplanes" in text.lower() and "60 training images at hand" in text


def check(module, config, out):
    """Run an experiment and return its record as JSON, after looks at all of its parts."""
    found = output.write_metrics(out, {"metrics": module.run(config, out)})["metrics"]
    pairs = {(1, 2), (3, 2), (3, 1)}
    assert {(row["L"], row["T"]) for row in found["table"]} == pairs
    for figure in found["figures"]:
        assert (out / figure["file"]).stat().st_size > 1000
    stored = np.load(out / "curves.npz")
    assert stored["nnll_L3_T1"].shape == (2, config.num_chains, 3)
    assert stored["nnll_later_L3_T1"].shape == (2, config.num_chains, 3)
    for result_ in found["results"]:
        assert result_["scores"]["nnll"]["later"]["step"] in config.step_sizes
    assert [
        result["gradients"] for result in found["results"] if result["T"] == 2 and result["L"] == 3
    ] == [36]
    return found


@pytest.mark.slow
def test_an_experiment_from_end_to_end(monkeypatch, tmp_path):
    monkeypatch.setitem(image_data.DATASETS, "fashion_mnist", lambda: (pictures(), "Made up"))
    config = network.Config(**TINY | {"num_chains": 1, "num_test": 30, "width": 4})
    found = check(network, config, tmp_path)
    assert found["num_parameters"] == 16 * 4 + 4 + 4 * 3 + 3
    assert found["source"] == "Made up"
    for row in found["table"]:
        assert 0 <= row["accuracy %"] <= 100 and row["sd ECE"] is None


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", MODULES)
def test_real_images(name, tmp_path):
    given = TINY | ({"num_chains": 1, "width": 8} if name == "network" else {})
    config = MODULES[name].Config(**given)
    try:
        image_data.DATASETS[config.dataset]()
    except tables.DataNotFound as error:
        pytest.skip(str(error))
    found = check(MODULES[name], config, tmp_path)
    assert found["num_rows"] == 60 and found["num_test"] == 40
