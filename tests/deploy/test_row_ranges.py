"""A study may give ranges of numbers of rows; sites report the numbers when they join."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy
from fedmcmc.deploy._account import describe_files
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._frames import Frame, FrameError
from fedmcmc.deploy._row_ranges import read_num_rows
from fedmcmc.kernels import Points, evaluations
from fedmcmc.runs import as_consortium

MODEL = """
import jax.numpy as jnp
import fedmcmc


def posterior(settings):
    return fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2),
        lambda t, rows: -0.5 * (rows["y"] - t) ** 2,
        init_fn=lambda key: jnp.zeros(()),
    )


def kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=0.01)
"""
STUDY = """
name = "heights"
posterior = "model.py:posterior"
reproducible = true
asks = ["Evaluations"]
kernels = { lsd = "model.py:kernel" }
[sites]
A = %s
B = 25
C = %s
[rows]
y = { dtype = "float32" }
"""
SIZES = {"A": 31, "B": 25, "C": 44}


def study_in(folder, a="[20, 40]", c="[40, 50]"):
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    (folder / "study.toml").write_text(STUDY % (a, c))
    return deploy.Study.read(folder / "study.toml")


def rows_of(name, num=None):
    rng = np.random.default_rng(ord(name))
    return {"y": rng.normal(size=num or SIZES[name]).astype(np.float32)}


def open_site(study, folder, name, num=None, **settings):
    return deploy.Site(study, name, rows_of(name, num), folder=folder / name, **settings)


def open_sites(study, folder, names="CAB"):
    local = deploy.LocalTransport()
    opened = {name: open_site(study, folder, name) for name in names}
    for site in opened.values():
        local.join(site)
    return deploy.Sites(study, local), opened


def run(sites):
    return sites.sample(
        jax.random.key(1), sites.study.kernel("lsd"), 0.0, num_rounds=30, progress=False
    )


def test_a_run_with_ranges_has_the_draws_of_the_exact_study(tmp_path):
    """The numbers of rows enter the padding and the shares of clients."""
    exact = study_in(tmp_path / "exact", 31, 44)
    sites, _ = open_sites(exact, tmp_path / "exact")
    expected = run(sites).draws
    study = study_in(tmp_path / "ranges")
    assert study.sites == {"A": 40, "B": 25, "C": 50} and study.digest != exact.digest
    sites, opened = open_sites(study, tmp_path / "ranges")
    assert "A 20 to 40, B 25, C 40 to 50" in repr(sites) and sites.labels == ("A", "B", "C")
    assert sites.federation.sizes.tolist() == [31, 25, 44]
    assert sites.study.sites == SIZES and sites.study.digest == study.digest
    np.testing.assert_array_equal(run(sites).draws, expected)
    for site in opened.values():
        assert site.study.sites == SIZES and site.client.max_size == 44
        assert float(site.client.share) == pytest.approx(SIZES[site.name] / 100)
    data = FederatedData.from_clients({name: rows_of(name) for name in SIZES})
    kernel = fedmcmc.lsd(study.model, step_size=0.01)
    simulated = fedmcmc.sample(
        jax.random.key(1), kernel, data, 0.0, num_rounds=30, progress=False
    ).draws
    np.testing.assert_allclose(expected, simulated, rtol=1e-4)
    run(sites)  # the numbers of rows are sent with each run


def test_ranges_work_under_masks(tmp_path):
    study_in(tmp_path)
    model = MODEL.replace(
        "return fedmcmc.lsd(posterior, step_size=0.01)",
        "return fedmcmc.secure_sum(fedmcmc.lsd(posterior, step_size=0.01), resolution=2**-20)",
    )
    (tmp_path / "model.py").write_text(model)
    keys = {name: deploy.make_identity(tmp_path, name) for name in SIZES}
    identities = ", ".join(f'{name} = "{key}"' for name, key in keys.items())
    text = (STUDY % ("[20, 40]", "[40, 50]")).replace("reproducible = true\n", "")
    text += f"[secure]\nrounds = 1000\nidentities = {{ {identities} }}\n"
    (tmp_path / "study.toml").write_text(text)
    study, local = deploy.Study.read(tmp_path / "study.toml"), deploy.LocalTransport()
    for name in SIZES:
        local.join(open_site(study, tmp_path, name, identity=tmp_path / f"{name}.identity"))
    draws = run(deploy.Sites(study, local)).draws
    data = FederatedData.from_clients({name: rows_of(name) for name in SIZES})
    simulated = fedmcmc.sample(
        jax.random.key(1), study.kernel("lsd"), data, 0.0, num_rounds=30, progress=False
    ).draws
    np.testing.assert_allclose(draws, simulated, rtol=1e-4)


def test_owners_approve_the_range(tmp_path):
    study, other = study_in(tmp_path / "a"), study_in(tmp_path / "b", "[20, 41]")
    approval = Approval.of(study, "A")
    open_site(study, tmp_path, "A", approved=approval)
    assert approval.differences(other) == ["rows of A: [20, 40] when it was approved, now [20, 41]"]
    assert study.to_dict()["sites"] == {"A": [20, 40], "B": 25, "C": [40, 50]}
    text = " ".join(describe_files(study, "A").split())
    assert "20 to 40 rows of A." in text and "A 20 to 40, B 25, C 40 to 50" in text
    exact = dataclasses.replace(study, sites=SIZES)
    assert exact.sites == SIZES and exact.digest == study.digest


@pytest.mark.parametrize("num", [19, 41])
def test_a_site_outside_of_its_range_does_not_start(tmp_path, num):
    with pytest.raises(ValueError, match=rf"A has {num} rows, the study 'heights' says 20 to 40"):
        open_site(study_in(tmp_path), tmp_path, "A", num)


def test_limits_hold_for_the_number_of_rows_of_the_site(tmp_path):
    study = study_in(tmp_path)
    open_site(study, tmp_path, "A", 30, min_rows=30)
    with pytest.raises(deploy.Refused, match="A has 29 rows but needs at least 30"):
        open_site(study, tmp_path, "A", 29, min_rows=30)


def test_a_server_cannot_choose_other_numbers(tmp_path):
    study = study_in(tmp_path)
    site = open_site(study, tmp_path, "A").study
    assert read_num_rows(site, [31, 25, 44], "A") == SIZES
    for numbers in (None, [], [31, 25], "31", {"A": 31}):
        with pytest.raises(FrameError, match="number of rows of each site"):
            read_num_rows(site, numbers, "A")
    for numbers, message in (
        ([30, 25, 44], "A has 31 rows, the server says 30"),
        ([31, 25, 51], "C has 51 rows, the study 'heights' says 40 to 50"),
        ([31, 26, 44], "B has 26 rows, the study 'heights' says 25"),
        ([31, 25, 44.0], "C has no number of rows, but 44.0"),
        ([31, 25, True], "C has no number of rows, but True"),
    ):
        with pytest.raises(deploy.Refused, match=message):
            read_num_rows(site, numbers, "A")


def test_a_server_refuses_numbers_outside_of_the_range_or_changed(tmp_path):
    study = study_in(tmp_path)
    sites, opened = open_sites(study, tmp_path)
    assert sites.federation.num_rows == 100
    hello = Frame.parse(opened["A"].hello())
    for num, message in (
        (41, "it has 41 rows, the study 'heights' says 20 to 40"),
        ("x", "it has no number of rows"),
        (None, "it has no number of rows"),
        (32, "it has 32 rows, and had 31 when it joined first"),
    ):
        objection = sites._links._find_objection("A", hello.header | {"rows": num})
        assert message in objection
    assert not sites._links._find_objection("A", hello.header)
    assert "rows" in hello.header and json.loads(json.dumps(hello.header))["rows"] == 31


def test_an_answer_of_all_sites_is_that_of_their_rows(tmp_path):
    sites, _ = open_sites(study_in(tmp_path), tmp_path)
    data = FederatedData.from_clients({name: rows_of(name) for name in SIZES})
    question = evaluations(sites.study.model)
    content = Points(np.array([0.3, -1.0], np.float32))
    actual, expected = (as_consortium(x).ask(question, content).value.value for x in (sites, data))
    y = np.concatenate([rows_of(name)["y"] for name in SIZES])
    exact = [-0.5 * ((y - t) ** 2).sum() for t in content.points]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(actual, exact, rtol=1e-5)


@pytest.mark.parametrize("value", ["[40, 20]", "[0, 20]", "[20]", "[20, 40, 60]", '"20"', "0"])
def test_a_range_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"number of at least 1, got .* for 'A'. A range is the"):
        study_in(tmp_path, value)
