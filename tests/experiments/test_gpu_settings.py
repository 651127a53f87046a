"""Settings for a GPU, none of which is at hand in the tests: they start and end at tiny sizes."""

import jax
import numpy as np
import pytest

pytest.importorskip("hydra")

import fedmcmc
from experiments import images, output, schemas
from experiments import settings_run as run
from experiments.fa_hmc import image_data
from experiments.fed_ep import federations
from experiments.fed_ep.methods import Federation
from experiments.images import Images
from experiments.models import Mlp
from experiments.qlsd import mnist
from experiments.qlsd.federations import Rows
from tests.support.tiny_experiments import compose

NAMES = [name for name in run.available() if "_gpu" in name]
TINY = {
    "fa_hmc": (
        *("num_clients=3", "num_rows=60", "num_test=30", "batch_size=5"),
        *("num_rounds=4", "thinning=2", "step_sizes=[0.1,0.4]"),
    ),
    "qlsd": (
        *("num_clients=6", "num_rows=60", "num_test=40", "batch_size=4", "step_size=1e-4"),
        *("num_rounds=16", "num_burnin=8", "thinning=4", "refresh_every=3", "sgld_rounds=12"),
        *("sgld_burnin=4", "sgld_thinning=4", "fed_be_local_steps=2", "fed_be_models=2"),
        *("fsgld_local_steps=4", "convolution=banded", "psgld_step_size=1e-5"),
    ),
    "fed_ep": (
        *("num_seeds=2", "cohort_size=3", "num_burnin=2", "num_rounds=4", "num_epochs=3"),
        *("batch_size=4", "pa_burnin=1", "checkpoints=[3,4]", "best_window=2", "window=2"),
        *("laplace_passes=1", "stateful_laplace_passes=1", "ngvi_epochs=1", "ngvi_samples=1"),
        "model=linear",
    ),
}


def pictures(num_classes, channels=()):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (90, 6, 6, *channels), dtype=np.uint8)
    labels = rng.permutation(np.arange(90) % num_classes).astype(np.int32)
    return Images(x[:60], labels[:60], x[50:], labels[50:])


def federation(*_, **__):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4, 4, 1)).astype(np.float32)
    label = rng.integers(0, 3, 40).astype(np.int32)
    data = fedmcmc.FederatedData.from_arrays(Rows(x, label), rng.integers(0, 5, 40))
    return Federation(data, Rows(x[:12], label[:12]), "made up")


def test_there_are_settings_for_a_gpu_of_every_paper_that_needs_one():
    assert {name.split("/")[0] for name in NAMES} == set(TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_settings_for_a_gpu_start(name, monkeypatch, tmp_path):
    paper = name.split("/")[0]
    for dataset in ("fashion_mnist", "kmnist", "cifar2"):
        made = pictures(2 if dataset == "cifar2" else 3)
        monkeypatch.setitem(image_data.DATASETS, dataset, lambda made=made: (made, "made up"))
    for dataset in ("mnist", "fashion_mnist"):
        monkeypatch.setattr(images, dataset, lambda: pictures(10))
    monkeypatch.setattr(mnist, "LeNet5", lambda method: Mlp((), 10))
    for dataset in ("cifar10", "mnist"):
        monkeypatch.setattr(federations, dataset, federation)
    modules = schemas.register()
    cfg = compose(f"experiment={name}", *TINY[paper])
    module = modules[schemas.name_of(cfg)]
    found = module.run(schemas.build(cfg, module), tmp_path)
    record = output.write_metrics(tmp_path, {"metrics": found})["metrics"]
    assert record["table"]
    jax.clear_caches()
