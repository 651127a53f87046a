"""FedEP's benchmarks from end to end on tiny federations, and the methods they run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from experiments import group_norm
from experiments.fed_ep import (
    cifar,
    emnist,
    federations,
    hyperparameters,
    image_figures,
    image_runs,
    linear,
    methods,
)
from experiments.fed_ep.methods import Federation
from experiments.models import SmallCnn
from experiments.qlsd.federations import Rows
from fedmcmc import inference

TINY = dict(
    num_seeds=1,
    cohort_size=3,
    num_burnin=2,
    num_rounds=5,
    num_epochs=3,
    pa_burnin=1,
    batch_size=4,
    laplace_passes=1,
    stateful_laplace_passes=1,
    ngvi_epochs=1,
    ngvi_samples=1,
    scale=1.0,
)
IMAGES = dict(checkpoints=(4, 5), best_window=2, window=2, thresholds=(1.0, 101.0))


def tiny(size=4, channels=1):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, size, size, channels)).astype(np.float32)
    label = rng.integers(0, 3, 40).astype(np.int32)
    data = fedmcmc.FederatedData.from_arrays(Rows(x, label), rng.integers(0, 5, 40))
    return Federation(data, Rows(x[:12], label[:12]), "made up")


@pytest.mark.slow
def test_all_methods_run_from_the_same_burn_in(tmp_path, monkeypatch):
    monkeypatch.setattr(federations, "cifar10", lambda *args, **kwargs: tiny())
    given = TINY | IMAGES | {"num_seeds": 2}
    found = cifar.run(cifar.Config(dataset="cifar10", model="small_cnn", **given), tmp_path)
    assert [row["method"] for row in found["table"]] == list(methods.METHODS)
    assert all(len(values) == 5 for values in found["by_round"].values())
    burnt_in = [values[:2] for values in found["by_round"].values()]
    assert burnt_in == [burnt_in[0]] * 10
    assert found["diverged"] == {} and set(found["lost_fits"].values()) == {0.0}
    row = found["table"][2]
    assert row["rounds to 1 %"] == 2.0 and row["rounds to 101 %"] is None
    assert row["sd in 5"] is not None and 0 <= row["ECE, marginal"] <= 100
    assert found["table"][0]["ECE, marginal"] is None  # FedAvg has no posterior
    spread = found["by_round_sd"]["FedEP (I)"]
    assert len(spread) == 4 and max(spread) > 0  # running means of two of five rounds
    spread = found["loss_by_round_sd"]["FedEP (I)"]
    assert len(spread) == 4 and max(spread) > 0
    assert (tmp_path / found["figures"][0]["file"]).is_file()
    for row in found["table"]:
        mean = np.array(found["by_round"][row["method"]])
        best = np.convolve(mean, [0.5, 0.5], mode="valid").max()
        assert row["accuracy in 5 rounds"] >= best - 1e-4  # each seed has its own best


@pytest.mark.slow
def test_expectation_propagation_is_that_of_the_released_code():
    """The kernels are those of the released code's settings, written out."""
    federation = tiny()
    settings = cifar.Config(dataset="cifar10", model="linear", **TINY, **IMAGES)
    module = image_runs._module(settings, 3)
    posterior = image_runs._posterior(module, settings, federation.data)
    position = posterior.init_fn(jax.random.key(0))
    decay = 1e-4 * 40
    np.testing.assert_allclose(
        jax.grad(posterior.logprior_fn)(position)["Dense_0"]["kernel"],
        -decay * position["Dense_0"]["kernel"],
        rtol=1e-5,
    )
    flat = fedmcmc.Gaussian.uniform(position)
    mean = inference.sgd_mean(
        optax.sgd(0.01, momentum=0.9), num_samples=3, batch_size=4, weight_decay=1e-4
    )
    outer = optax.sgd(0.5, momentum=0.9)
    common = dict(prior=flat, initial_precision=0.05, cohort_size=3)
    by_hand = {
        "FedEP (I)": fedmcmc.fed_ep(
            posterior,
            inference=inference.scaled_identity(mean, precision_per_row=0.05),
            damping=1 / 3,
            server_optimizer=outer,
            client_optimizer=outer,
            max_norm=100.0,
            **common,
        ),
        "FedSEP (M)": fedmcmc.fed_sep(
            posterior,
            inference=inference.mcmc(mean, shrinkage=1e-4, clip=2.0, match_precision_per_row=0.05),
            damping=1 / 3,
            server_optimizer=outer,
            cavity="power",
            **common,
        ),
    }
    for name, kernel in by_hand.items():
        built = methods.build(name, settings, posterior)
        runs = [
            fedmcmc.sample(
                jax.random.key(1), k, federation.data, position, num_rounds=3, progress=False
            )
            for k in (built, kernel)
        ]
        ours, theirs = (jax.tree.leaves(run.state.broadcast.position) for run in runs)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


GRID = ("FedSEP (I): covariance=0.1", "FedSEP (I): covariance=0.001", "FedEP (V): ngvi_epochs=1")


@pytest.mark.slow
def test_a_line_of_the_grid_is_the_method_with_that_setting(monkeypatch, tmp_path):
    monkeypatch.setattr(federations, "cifar10", lambda *args, **kwargs: tiny())
    given = dict(dataset="cifar10", model="linear", **TINY, **IMAGES)
    found = hyperparameters.run(hyperparameters.Config(grid=GRID, **given), tmp_path)
    assert (tmp_path / "settings.png").is_file()
    alone = cifar.run(
        cifar.Config(methods=("FedAvg", "FedSEP (I)"), covariance=0.1, **given), tmp_path
    )
    assert found["by_round"]["FedAvg"] == alone["by_round"]["FedAvg"]
    for part in ("early", "best", "end"):
        kept = found[f"{part}_by_seed"]
        assert kept[GRID[0]] == alone[f"{part}_by_seed"]["FedSEP (I)"]
    assert found["by_round"][GRID[0]] == alone["by_round"]["FedSEP (I)"]
    assert found["end_by_seed"][GRID[0]] == pytest.approx(
        [np.mean(found["by_round"][GRID[0]][-2:])]
    )
    of = hyperparameters.groups(found)["FedSEP (I), covariance"]
    assert list(of) == ["0.1", "0.001"]


def test_losses_are_finite_where_a_probability_rounds_to_zero():
    """Of logits 200 apart, whose softmax is zero in single precision."""
    rows = Rows(np.array([[0.0, 200.0], [200.0, 0.0]], np.float32), np.array([0, 0]))
    found = image_runs._scores(lambda scale, batch: scale * batch[0], 1.0, rows, 0)
    assert float(found["accuracy"]) == 0.5
    assert float(found["loss"]) == pytest.approx(100.0)


def test_rounds_of_seeds_are_kept():
    settings = cifar.Config(**(TINY | IMAGES))
    accuracy = np.array([[1.0, 1.0, 5.0, 5.0, 5.0], [1.0] * 5])
    assert image_runs._rounds_of_seeds(accuracy, 5.0, settings) == [4.0, None]


def test_axes_leave_out_what_collapsed(tmp_path):
    names = {"FedAvg": 50.0, "FedPA": 51.0, "FedSEP (L)": 10.0}
    curves = {n: [40.0, 48.0, 49.0, v, v, v] for n, v in names.items()}
    metrics = {
        "by_round": curves,
        "by_round_sd": {n: 5 * [0.5] for n in names},
        "settings": dict(window=2, num_burnin=3, num_seeds=2),
    }
    (found,) = image_figures.draw(metrics, tmp_path)
    assert (tmp_path / found["file"]).is_file()
    assert image_figures._collapsed(metrics) == {"FedSEP (L)"}


def test_a_grid_shows_the_unmodified_method_where_a_line_has_it():
    names = {"FedAvg": 1.0, "FedSEP (V): ngvi_epochs=5": 2.0, "FedSEP (V): row_curvature=10": 3.0}
    settings = dict(ngvi_epochs=5, row_curvature=0.0, window=2)
    metrics = {
        "table": [{"method": n} for n in names],
        "settings": settings,
        "by_round": {n: 3 * [v] for n, v in names.items()},
    }
    assert hyperparameters.unmodified(metrics, "FedSEP (V)") == 3 * [2.0]
    assert hyperparameters.unmodified(metrics, "FedSEP (L)") is None


@pytest.mark.parametrize(
    "line", ["FedEP (I)", "FedEP (X): scale=1", "FedEP (I): speed=1", "FedEP (I): num_epochs=x"]
)
def test_lines_of_the_grid_that_say_nothing_are_refused(line):
    with pytest.raises(ValueError, match=r"grid (must have lines like|has a value out of range)"):
        hyperparameters.Config(grid=(line,))
    with pytest.raises(ValueError, match=r"grid has a value out of range.*scale must be positive"):
        hyperparameters.Config(grid=("FedEP (L): scale=0",))


@pytest.mark.slow
def test_sites_that_are_large_lie_on_the_host(monkeypatch, tmp_path):
    from experiments.fed_ep import runs

    monkeypatch.setattr(federations, "cifar10", lambda *args, **kwargs: tiny())
    settings = cifar.Config(
        dataset="cifar10", model="linear", **TINY, **IMAGES, methods=("FedEP (I)",)
    )
    kept = cifar.run(settings, tmp_path)
    monkeypatch.setattr(runs, "SITES_BYTES", 0)
    stored = cifar.run(settings, tmp_path)
    assert kept["by_round"] == stored["by_round"]
    assert kept["table"] == stored["table"]
    # Of several seeds, run one after the other, the first is what it is alone.
    alone = np.array(kept["by_round"]["FedEP (I)"])
    curves = []
    monkeypatch.setattr(runs, "trouble", lambda found: curves.append(found) or {})
    several = cifar.run(dataclasses.replace(settings, num_seeds=2), tmp_path)
    scores = curves[0]["FedEP (I)"].scores["accuracy"]
    assert several["table"][0]["sd in 4"] is not None and scores.shape == (2, len(alone))
    np.testing.assert_allclose(100 * scores[0], alone, rtol=1e-6)
    assert not np.array_equal(scores[0], scores[1])


@pytest.mark.slow
def test_a_residual_network_on_crops(monkeypatch, tmp_path):
    monkeypatch.setattr(federations, "cifar100", lambda *args, **kwargs: tiny(8, 3))
    wide = group_norm.ResNet18
    monkeypatch.setattr(group_norm, "ResNet18", lambda num_classes: wide(num_classes, width=4))
    settings = cifar.Config(**TINY, **IMAGES, methods=("FedAvg", "FedEP (I)", "FedSEP (V)"))
    found = cifar.run(settings, tmp_path)
    assert found["diverged"] == {}


def test_networks_have_the_published_sizes():
    def size(module, shape):
        position = jax.eval_shape(lambda k: module.init(k, jnp.zeros(shape)), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(position))

    assert size(group_norm.ResNet18(), (1, 24, 24, 3)) == pytest.approx(11.2e6, rel=5e-3)
    assert size(group_norm.EmnistCnn(), (1, 28, 28, 1)) == pytest.approx(1.2e6, rel=1e-2)
    assert size(SmallCnn(), (1, 16, 16, 3)) == 3 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 512 * 10 + 10


@pytest.mark.slow
def test_emnist_and_linear_models(monkeypatch, tmp_path):
    monkeypatch.setattr(federations, "mnist", lambda *args, **kwargs: tiny())
    monkeypatch.setattr(federations, "cifar10", lambda *args, **kwargs: tiny())
    settings = emnist.Config(
        dataset="mnist",
        **(TINY | {"scale": 1.0}),
        **IMAGES,
        methods=("FedPA", "FedSEP (I)"),
        model="small_cnn",
    )
    found = emnist.run(settings, tmp_path)
    assert [row["method"] for row in found["table"]] == ["FedPA", "FedSEP (I)"]
    settings = linear.Config(
        dataset="cifar10", num_components=4, **TINY, **IMAGES, methods=("FedAvg", "FedEP (V)")
    )
    found = linear.run(settings, tmp_path)
    assert "4 principal components" in found["data"] and found["information"] > 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(num_burnin=9, num_rounds=9), "num_burnin must be less than num_rounds"),
        (dict(methods=("FedProx",)), "methods must be some of FedAvg"),
        (dict(max_norms=(1.0,)), "max_norms must be four numbers"),
        (dict(server_optimizer="adam"), "server_optimizer must be 'sgd' or 'adagrad'"),
        (dict(dataset="cifar"), "dataset must be"),
        (dict(checkpoints=(2000,)), "checkpoints must be at most num_rounds"),
        (dict(pa_burnin=10), "pa_burnin must be less than num_epochs"),
    ],
)
def test_settings_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        cifar.Config(**wrong)
