"""The runs with images of FedEP: kernels of all studies, states on the host, components."""

import numpy as np
import pytest

import fedmcmc
from experiments import loaders, models, study, wiring
from experiments.special import fed_ep_runs
from experiments.study import CONFIGS

RNG = np.random.default_rng(0)
STUDIES = [path.stem for path in (CONFIGS / "study" / "fed_ep").glob("*.yaml")]


def special(name):
    found = study.load(f"fed_ep/{name}")["special"]
    return {key: value for key, value in found.items() if key not in wiring.HYDRA_KEYS}


IMAGES = sorted(name for name in STUDIES if {"methods", "module"} <= special(name).keys())


def tiny():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 40).astype(np.int32)
    rows = {"features": rng.normal(size=(40, 4, 4, 1)).astype(np.float32), "label": label}
    test = {name: column[:12] for name, column in rows.items()}
    return fedmcmc.FederatedData.from_arrays(rows, rng.integers(0, 5, 40)), test


@pytest.mark.parametrize("name", IMAGES)
def test_a_study_builds_all_its_kernels(name):
    data, own = tiny()[0], special(name)
    supplies = wiring.Supplies(data, models.mlp(data, ()))
    methods, settings = own["methods"], own["settings"]
    for method, changed in fed_ep_runs._variants(own["runs"], methods, settings):
        node = fed_ep_runs._filled(methods[method], settings | changed)
        assert isinstance(wiring.build(node, method, supplies), fedmcmc.FederatedKernel)
    with pytest.raises(ValueError, match=r"runs has .*speed"):
        list(fed_ep_runs._variants([{"method": "FedPA", "speed": 1}], methods, settings))


@pytest.mark.slow
def test_the_first_seed_is_the_same_with_sites_on_the_host(monkeypatch):
    counts = dict(num_seeds=2, num_burnin=2, num_rounds=5, checkpoints=[5], window=2, best_window=2)
    own = special("linear_pixels") | counts | {"runs": [{"method": "FedEP (I)"}]}
    own["data"] = {"_target_": f"{__name__}.tiny"}
    own["settings"] |= dict(cohort_size=3, batch_size=4, num_epochs=3)
    found = []
    for limit in (fed_ep_runs.CLIENT_BYTES, 0):
        monkeypatch.setattr(fed_ep_runs, "CLIENT_BYTES", limit)
        rows = fed_ep_runs.images(**own)
        found.append([row.value for row in rows if row.seed == 0])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_losses_are_finite_where_a_probability_rounds_to_zero():
    rows = {
        "features": np.array([[0.0, 200.0], [200.0, 0.0]], np.float32),
        "label": np.zeros(2, int),
    }
    scores = fed_ep_runs._scores(lambda scale, batch: scale * batch["features"], rows, 1.0, 0)
    assert float(scores["accuracy"]) == 0.5 and float(scores["loss"]) == pytest.approx(100.0)


def test_principal_components_are_white():
    x = RNG.normal(size=(60, 2, 3, 1)).astype(np.float32) * np.arange(1, 4)[:, None]
    rows = {"features": x, "label": RNG.integers(0, 3, 60).astype(np.int32)}
    of = fedmcmc.FederatedData.from_arrays(rows, RNG.integers(0, 4, 60)), rows
    scaled, raw = (loaders.principal_components(of, 4, is_scaled) for is_scaled in (True, False))
    np.testing.assert_allclose(np.cov(scaled[1]["features"], rowvar=False), np.eye(4), atol=1e-4)
    variances = np.sort(np.linalg.eigvalsh(np.cov(x.reshape(60, -1), rowvar=False)))[:1:-1]
    np.testing.assert_allclose(
        scaled[1]["features"] * np.sqrt(variances), raw[1]["features"], atol=1e-4
    )
