"""The experiments with networks: their pieces against numpy, and tiny runs from end to end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc

pytest.importorskip("blackjax")

from experiments import data as tables
from experiments import images, output
from experiments.images import Images
from experiments.models import Mlp
from experiments.qlsd import (
    cifar10,
    fed_be,
    label_split,
    mnist,
    network_hmc,
    network_methods,
    network_scores,
    networks,
)
from experiments.qlsd.federations import Rows
from experiments.qlsd.image_federations import dominant_digits

TINY = dict(
    num_clients=3,
    num_rows=60,
    num_test=40,
    batch_size=4,
    step_size=1e-4,
    num_active=2,
    num_rounds=16,
    num_burnin=8,
    thinning=4,
    refresh_every=3,
    sgld_rounds=12,
    sgld_burnin=4,
    sgld_thinning=4,
    fed_be_local_steps=2,
    fed_be_models=2,
    fsgld_local_steps=4,
    num_warm_steps=5,
    convolution="banded",
)
TINY_HMC = dict(dg_step_size=1e-4, dg_tolerance=1e-3, hmc_steps=2, hmc_warmup=2, hmc_draws=4)


def linear(num=(5, 7), num_features=3, seed=0):
    """Return multinomial logistic regression, its prediction, the data, the rows, a position."""
    rng = np.random.default_rng(seed)
    clients = [
        Rows(
            rng.normal(size=(n, num_features)).astype(np.float32),
            rng.integers(0, 4, n).astype(np.int32),
        )
        for n in num
    ]
    data = fedmcmc.FederatedData.from_clients(clients)
    posterior, predict_fn = networks.make(Mlp((), 4), data, 0.5)
    position = posterior.init_fn(jax.random.key(1))
    position = jax.tree.map(lambda leaf: leaf + jnp.linspace(0, 0.3, leaf.shape[-1]), position)
    return posterior, predict_fn, data, clients, position


def softmax(position, x):
    layer = jax.tree.map(np.asarray, position)["Dense_0"]
    logits = x.astype(np.float64) @ layer["kernel"] + layer["bias"]
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_surrogates_have_each_clients_gradient_and_fisher_information():
    posterior, _, data, clients, position = linear()
    found = network_methods.surrogates(posterior, data, position)
    for i, rows in enumerate(clients):
        away = np.eye(4)[rows.label] - softmax(position, rows.features)  # [n, classes]
        each = {"kernel": rows.features[:, :, None] * away[:, None], "bias": away}
        for name, gradients in each.items():
            at = np.asarray(position["Dense_0"][name])
            fisher = found.precision["Dense_0"][name][i]
            np.testing.assert_allclose(fisher, (gradients**2).sum(axis=0), rtol=1e-4, atol=1e-6)
            slope = found.precision_mean["Dense_0"][name][i] - fisher * at
            np.testing.assert_allclose(slope, gradients.sum(axis=0), rtol=1e-4, atol=1e-4)


def test_potential_is_minus_the_log_posterior_whatever_the_blocks(monkeypatch):
    monkeypatch.setattr(network_hmc, "ROWS_AT_A_TIME", 5)
    posterior, _, data, clients, position = linear()
    fn = jax.jit(network_hmc.potential(posterior, data.pooled().rows))
    x, y = (np.concatenate([rows[i] for rows in clients]) for i in range(2))
    terms = np.log(softmax(position, x)[np.arange(len(y)), y])
    leaves = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(position)])
    prior = -0.5 * np.sum((leaves / 0.5) ** 2) - leaves.size * np.log(0.5 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(fn(position), -terms.sum() - prior, rtol=1e-5)


def test_predictions_average_probabilities_over_draws_and_blocks(monkeypatch):
    monkeypatch.setattr(networks, "ROWS_AT_A_TIME", 4)
    _, predict_fn, _, clients, position = linear()
    draws = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf, -leaf])[None], position)
    x = np.concatenate([rows.features for rows in clients])[:10]
    exact = np.mean(
        [softmax(jax.tree.map(lambda a, c=c: c * a, position), x) for c in (1, 2, -1)], 0
    )
    found = networks.predict(predict_fn, draws, x)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-6)
    chains = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), draws)
    each = network_hmc.by_chain(chains, predict_fn, x)
    np.testing.assert_allclose(each.mean(axis=0), exact, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(each[0], softmax(position, x), rtol=1e-4, atol=1e-6)


def test_warm_start_finds_the_maximum_of_the_posterior():
    posterior, _, data, _, _ = linear((40, 30))
    settings = networks.Settings(batch_size=70, num_warm_steps=400, warm_learning_rate=0.05)
    found = networks.warm_start(jax.random.key(0), settings, posterior, data)
    rows = data.pooled().rows
    slope = jax.jit(jax.grad(network_hmc.potential(posterior, rows)))
    start = posterior.init_fn(jax.random.split(jax.random.key(0))[0])

    def size(position):
        return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slope(position)))

    # Minibatches of all rows, but with replacement: the gradient's noise is what is left.
    assert size(found) < 0.2 * size(start)
    unmoved = networks.Settings(num_warm_steps=0)
    same = networks.warm_start(jax.random.key(0), unmoved, posterior, data)
    jax.tree.map(np.testing.assert_array_equal, same, start)


def test_the_mean_network_is_that_of_the_mean_weights():
    posterior, predict_fn, data, _, position = linear()
    run = networks.Run(fedmcmc.lsd(posterior, step_size=0.05), (6, 2, 2))
    x = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    key = jax.random.key(4)
    result = networks.execute(key, run, data, position, predict_fn, [x])
    samples = fedmcmc.sample(
        key, run.kernel, data, position, num_rounds=6, num_burnin=2, thinning=2, progress=False
    )
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=(0, 1)), samples.draws)
    np.testing.assert_allclose(result.at_mean, softmax(mean, x), rtol=1e-4, atol=1e-6)
    assert np.abs(result.at_mean - result.probabilities[0]).max() > 1e-3
    labels = result.at_mean.argmax(axis=1)
    assert network_scores.of_mean(result, labels) == {"accuracy_of_mean": 1.0}


def test_a_run_counts_draws_and_bits():
    posterior, predict_fn, data, clients, position = linear()
    settings = networks.Settings(
        num_clients=2, num_active=1, num_rounds=20, num_burnin=4, thinning=4, batch_size=2,
        step_size=1e-3, fed_be_local_steps=2, fsgld_local_steps=2,
    )  # fmt: skip
    x = clients[0].features
    run = networks.Run(fedmcmc.lsd(posterior, step_size=1e-3), networks.rounds(settings, 1))
    found = networks.execute(jax.random.key(0), run, data, position, predict_fn, [x, x[:2]])
    assert (found.num_draws, found.relative_bits, found.diverged) == (4, 1.0, None)
    assert [p.shape for p in found.probabilities] == [(5, 4), (2, 4)]
    np.testing.assert_array_equal(found.probabilities[0][:2], found.probabilities[1])
    wild = networks.Run(fedmcmc.lsd(posterior, step_size=1e30), (9, 0, 1))
    lost = networks.execute(jax.random.key(0), wild, data, position, predict_fn, [x])
    assert lost.diverged is not None and lost.probabilities == []


def test_methods_count_rounds_by_local_steps():
    settings = networks.Settings()
    assert networks.rounds(settings, 1) == (100_000, 10_000, 500)
    assert networks.rounds(settings, 250) == (400, 40, 2)
    assert networks.rounds(settings, 16) == (6250, 625, 31)
    assert settings.pooled_rounds == (937_500, 93_750, 937)


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (mnist.Config, {"proportion": 1.5}),
        (mnist.Config, {"proportion": 0.0}),
        (mnist.Config, {"num_rounds": 1000}),
        (mnist.Config, {"num_active": 21}),
        (mnist.Config, {"convolution": "fft"}),
        (mnist.Config, {"num_rows": -1}),
        (mnist.Config, {"sgld_rounds": 10}),
        (cifar10.Config, {"step_size": -1.0}),
        (cifar10.Config, {"pool": 3}),
        (cifar10.Config, {"hmc_chains": 1}),
        (cifar10.Config, {"source": "letters"}),
        (cifar10.Config, {"proportion": 1.5}),
        (cifar10.Config, {"reference": "x.npy", "num_test": 5}),
        (cifar10.Config, {"reference": "x.npy", "source": "digits"}),
    ],
)
def test_settings_out_of_range_are_named(config, given):
    with pytest.raises(ValueError, match=next(iter(given))):
        config(**given)


def test_reference_is_read_and_checked(tmp_path):
    rng = np.random.default_rng(0)
    exact = rng.dirichlet(np.ones(10), 6)
    np.savetxt(tmp_path / "probs.csv", exact, delimiter=",")
    np.save(tmp_path / "probs.npy", exact)
    labels = np.array([3, 8, 8, 0, 6, 6])
    for name in ("probs.csv", "probs.npy"):
        found = network_hmc.read(str(tmp_path / name), labels)
        np.testing.assert_allclose(found, exact, rtol=1e-5)
        with pytest.raises(ValueError, match=r"\[7, 10\].*\(6, 10\)"):
            network_hmc.read(str(tmp_path / name), np.arange(7))
        with pytest.raises(ValueError, match="original order"):
            network_hmc.read(str(tmp_path / name), np.sort(labels))
    with pytest.raises(ValueError, match="reference"):
        network_hmc.read(str(tmp_path / "none.npy"), labels)


def test_predictions_of_chains_apart_have_a_large_rhat():
    _, predict_fn, _, _, position = linear()
    rng = np.random.default_rng(3)

    def chains(shift):
        """Return two chains of independent draws, the second one's biases moved apart."""

        def draws(leaf):
            noise = rng.normal(size=(2, 100, *leaf.shape)).astype(np.float32)
            noise[1, ..., 0] += shift
            return np.asarray(leaf) + 0.3 * noise

        return jax.tree.map(draws, position)

    inputs = rng.normal(size=(6, 3)).astype(np.float32)
    mixed, apart = (
        network_hmc.rhat_of_predictions(chains(shift), predict_fn, inputs) for shift in (0.0, 5.0)
    )
    assert mixed < 1.05 < 1.5 < apart


def test_small_digits_are_whole_and_held_out_once():
    pytest.importorskip("sklearn")
    found = images.small_digits(num_test=100)
    assert found.x_train.shape == (1697, 8, 8) and found.x_test.shape == (100, 8, 8)
    both = np.concatenate([found.x_train, found.x_test]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    own = np.round(both.astype(float) * 16 / 255)
    order = np.lexsort(own.T), np.lexsort(pixels.T)
    np.testing.assert_array_equal(own[order[0]], pixels[order[1]])
    given = np.concatenate([found.y_train, found.y_test])
    np.testing.assert_array_equal(np.bincount(given), np.bincount(labels))


def test_labels_of_clients_are_counted(monkeypatch, tmp_path):
    labels = np.repeat(np.arange(10), 40).astype(np.int32)
    made = Images(
        np.zeros((400, 2, 2), np.uint8), labels, np.zeros((1, 2, 2), np.uint8), labels[:1]
    )
    monkeypatch.setattr(images, "mnist", lambda: made)
    found = label_split.run(label_split.Config(num_clients=10, proportion=0.5), tmp_path)
    counts = np.array(found["counts"])
    assert counts.sum(axis=0).tolist() == [40] * 10
    np.testing.assert_array_equal(label_split.shares(found), counts.max(axis=1) / 40)
    assert 0.5 <= label_split.shares(found).min() < label_split.shares(found).max() < 0.75
    assert (tmp_path / "labels.png").is_file()


def test_shrinking_averages_squares():
    x = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    given = Images(x, np.zeros(2), x, np.zeros(2))
    small = cifar10.shrink(given, 2).x_train
    assert small.shape == (2, 2, 2, 3)
    np.testing.assert_allclose(small[1, 0, 1], x[1, :2, 2:].reshape(4, 3).mean(axis=0))
    assert cifar10.shrink(given, 1) is given


def pictures(size, channels, seed=0):
    rng = np.random.default_rng(seed)
    shape = (size, size, 3)[: 2 if channels == 1 else 3]
    labels = np.repeat(np.arange(10), 12).astype(np.int32)
    x = rng.integers(0, 256, (120, *shape), dtype=np.uint8)
    return Images(x, rng.permutation(labels), x[:80], labels[:80])


def check(metrics, out, names):
    record = output.write_metrics(out, {"metrics": metrics})["metrics"]
    assert [row["method"] for row in record["table"]] == names
    for row in record["table"]:
        assert 0 <= row["accuracy %"] <= 100
        assert row["ECE"] >= 0
        one = row["accuracy %, mean network"]
        assert one is None if row["method"] in ("start", "HMC") else 0 <= one <= 100
    for figure in record["figures"]:
        assert (out / figure["file"]).stat().st_size > 1000
    return {row["method"]: row for row in record["table"]}


MNIST_METHODS = ["start", "SGLD", "pSGLD", "QLSD", "QLSD PP", "QLSD++", "QLSD++ PP"]
MNIST_METHODS += ["FedBE-Gauss", "FedBE-Dirichlet", "FSGLD"]
CIFAR_METHODS = ["HMC", "start", "SGLD", "QLSD++", "QLSD++ PP", "FedBE-Dirichlet", "FedBE-Gauss"]
CIFAR_METHODS += ["DG-SGLD", "FSGLD"]


@pytest.mark.slow
def test_mnist_from_end_to_end_with_a_linear_model(monkeypatch, tmp_path):
    monkeypatch.setattr(mnist.images, "mnist", lambda: pictures(6, 1))
    monkeypatch.setattr(mnist.images, "fashion_mnist", lambda: pictures(6, 1, seed=1))
    monkeypatch.setattr(mnist, "LeNet5", lambda method: Mlp((), 10))
    metrics = mnist.run(mnist.Config(**TINY, psgld_step_size=1e-5), tmp_path)
    rows = check(metrics, tmp_path, MNIST_METHODS)
    assert rows["QLSD"]["bits / 32 d"] < 0.5
    assert rows["FedBE-Gauss"]["bits / 32 d"] == pytest.approx(2, abs=0.01)
    assert rows["FSGLD"]["draws"] == 2
    stored = np.load(tmp_path / "predictions.npz")
    assert stored["QLSD++ out"].shape == (40, 10)


@pytest.mark.slow
def test_cifar10_from_end_to_end_with_a_linear_model(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar10.images, "cifar10", lambda jpeg_test: pictures(8, 3))
    monkeypatch.setattr(cifar10, "ResNet", lambda *args, **kwargs: Mlp((), 10))
    metrics = cifar10.run(cifar10.Config(**TINY, **TINY_HMC, pool=2), tmp_path)
    rows = check(metrics, tmp_path, CIFAR_METHODS)
    for row in rows.values():
        assert 0 <= row["TV"] <= 1
        assert 0 <= row["agreement"] <= 1
    stored = np.load(tmp_path / "predictions.npz")
    # Total variation with the reference, by hand.
    exact = 0.5 * np.abs(stored["SGLD"] - stored["HMC"]).sum(axis=1).mean()
    assert rows["SGLD"]["TV"] == pytest.approx(exact, rel=1e-4)


@pytest.mark.slow
def test_digits_beside_an_hmc_whose_chains_start_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(cifar10.images, "small_digits", lambda: pictures(4, 1))
    config = cifar10.Config(
        **TINY | {"num_rows": 0}, **TINY_HMC, source="digits", hidden=3, hmc_random_start=True
    )
    metrics = cifar10.run(config, tmp_path)
    check(metrics, tmp_path, CIFAR_METHODS)
    assert metrics["num_parameters"] == 16 * 3 + 3 + 3 * 10 + 10
    assert "rhat of predictions" in metrics["hmc"]


def skip_without(*files):
    missing = [name for name in files if not (tables.folder() / f"{name}.npz").is_file()]
    if missing:
        pytest.skip(f"needs {missing} in FEDMCMC_DATA ({tables.folder()})")


@pytest.mark.slow
@pytest.mark.data
def test_digits_and_lenet(tmp_path):
    skip_without("mnist", "fashion_mnist_train_0", "fashion_mnist_train_1", "fashion_mnist_test")
    metrics = mnist.run(mnist.Config(**TINY, psgld_step_size=1e-5), tmp_path)
    check(metrics, tmp_path, MNIST_METHODS)
    assert metrics["num_parameters"] == 61_706


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.filterwarnings("ignore:The position grew to")  # FSGLD's, at a tiny size
def test_photographs_and_a_residual_network(tmp_path):
    skip_without("cifar10_train_0", "cifar10_train_1", "cifar10_train_2", "cifar10_test1000")
    config = cifar10.Config(
        **TINY, **TINY_HMC, pool=8, num_blocks=1, width=2, jpeg_test=False, warm_learning_rate=1e-2
    )
    metrics = cifar10.run(config, tmp_path)
    check(metrics, tmp_path, CIFAR_METHODS)
    assert metrics["num_rows"] == 60


def test_fed_be_is_scored_after_so_many_rounds_by_the_share_of_a_label(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(120) % 10).astype(np.int32)
    pictures = rng.integers(0, 40, (120, 6, 6), dtype=np.uint8)
    pictures[np.arange(120), labels // 5, labels % 5] = 255  # where the label is
    made = Images(pictures[:80], labels[:80], pictures[80:], labels[80:])
    monkeypatch.setattr(images, "mnist", lambda: made)
    monkeypatch.setattr(fed_be, "LeNet5", lambda method: Mlp((), 10))
    split = []

    def dominant(key, given, num_clients, share, **kwargs):
        split.append(share)
        return dominant_digits(key, given, num_clients, share, **kwargs)

    monkeypatch.setattr(fed_be, "dominant_digits", dominant)
    tiny = dict(num_clients=2, shares=(0.2, 0.9), rounds=(2, 20), num_local_steps=3, num_models=2)
    found = fed_be.run(fed_be.Config(**tiny, batch_size=10, learning_rate=0.02), tmp_path)
    rates = {(r["ensemble"], r["share"], r["rounds"]): r["accuracy %"] for r in found["table"]}
    assert len(rates) == len(found["table"]) == 8
    assert all(rates[e, 0.9, 20] > rates[e, 0.9, 2] for e in fed_be.ENSEMBLES)
    assert split == [0.2, 0.9]
    assert (found["num_rows"], found["num_test"]) == (80, 40)


@pytest.mark.parametrize("wrong", [{"shares": (1.0,)}, {"rounds": (1, 4)}, {"rounds": (4, 4)}])
def test_settings_of_fed_be_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fed_be.Config(**wrong)


def test_no_distance_is_shown_to_chains_that_have_not_mixed():
    row = {"method": "SGLD", "accuracy %": 90.0, "agreement": 0.9, "TV": 0.1}
    shown = [
        cifar10.table({"table": [row], "hmc": {"rhat of predictions": rhat}})[0].keys()
        for rhat in (1.01, 3.0, None)
    ]
    assert "TV" in shown[0] and "agreement" in shown[0]
    assert list(shown[1]) == list(shown[2]) == ["method", "accuracy %"]
