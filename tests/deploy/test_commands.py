"""The commands of a site and of a server do what their settings files specify."""

import re

import jax
import numpy as np
import pytest

import fedmcmc.server
import fedmcmc.site
from fedmcmc import deploy
from fedmcmc.deploy._config import _initial_position
from tests.support.commands import NAMES, Consortium, rows_of

FIT = dict(kernel="fit", seed=0, draws="draws.npz", report="fit.html", progress=False)


@pytest.mark.slow
def test_a_server_fits_as_its_file_says(tmp_path):
    clinics = Consortium(tmp_path, asks=deploy.FIT, run=FIT)
    with clinics.in_threads(NAMES):
        samples = deploy.run_server(tmp_path / "server.toml")
    with np.load(tmp_path / "draws.npz") as stored:
        np.testing.assert_array_equal(stored["theta"], samples.draws)
    assert (tmp_path / "fit.html").read_text().startswith("<!")
    data = fedmcmc.FederatedData.from_clients([rows_of(name) for name in NAMES])
    fitted = fedmcmc.fit(clinics.study.model, data, rng_key=jax.random.key(0), progress=False)
    np.testing.assert_allclose(
        samples.draws.mean((0, 1)), fitted.samples.draws.mean((0, 1)), atol=1e-3
    )


RUN = dict(kernel="main", seed=3, draws="draws.npz", position="model.py:start", num_rounds=20)


@pytest.mark.slow
def test_a_server_reports_a_run_or_fails_early(tmp_path, monkeypatch):
    clinics = Consortium(tmp_path, run=RUN | dict(report="run.html", progress=False))
    with clinics.in_threads(NAMES):
        samples = deploy.run_server(tmp_path / "server.toml")
    page = (tmp_path / "run.html").read_text()
    assert "Report of a run" in page and "20 rounds" in page and str(samples.num_draws) in page
    assert clinics.study.name in page

    def missing():
        raise ImportError("fedmcmc[plots]")

    monkeypatch.setattr("fedmcmc.deploy._config.can_draw", missing)
    with pytest.raises(ImportError, match="plots"):  # before it waits for any site
        deploy.run_server(tmp_path / "server.toml")


@pytest.mark.slow
def test_a_server_may_call_functions_in_place_of_one_run(tmp_path):
    """With the settings of its file, and no table of a run."""
    clinics = Consortium(tmp_path, asks=deploy.FIT)
    path = tmp_path / "server.toml"
    path.write_text(path.read_text().partition("[run]")[0] + "[run]\ntimeout = 7.0\n")
    with clinics.in_threads(NAMES):
        sites = deploy.connect(path)
        start = np.zeros(2, np.float32)
        mode = fedmcmc.surrogates.mode(clinics.study.model, sites, start).position
        assert sites._links.timeout == 7.0
        sites.close()
    data = fedmcmc.FederatedData.from_clients([rows_of(name) for name in NAMES])
    expected = fedmcmc.surrogates.mode(clinics.study.model, data, start).position
    np.testing.assert_allclose(mode, expected, atol=1e-5)
    path.write_text(path.read_text().replace("chur = ", "zug = "))
    with pytest.raises(ValueError, match="a fingerprint for each"):
        deploy.connect(path)


@pytest.mark.parametrize(
    ("command", "old", "new", "message"),
    [
        ("site", "approved = ", "approved = 'x' #", "Refused: The study 'three clinics' is not"),
        (
            "site",
            "folder = ",
            "folders = ",
            "must hold .*folder.*folders, .* Is folder meant",
        ),
        ("site", "name = 'bern'", "name = 'zug'", "has no site 'zug'"),
        ("site", 'rows = "bern.npz"', 'rows = "chur.npz"', "bern has 4 rows"),
        (
            "server",
            "num_rounds",
            "num_round",
            "run must hold .*num_round, .* Is num_rounds meant",
        ),
        ("server", "chur = ", "zug = ", "sites must have a fingerprint for each of"),
        ("server", "seed = ", "seeds = ", "run must hold .*seed.*holds seeds, .* Is seed meant"),
    ],
    ids=str,
)
def test_a_command_names_a_wrong_setting(command, old, new, message, tmp_path, capsys):
    Consortium(tmp_path)
    path = tmp_path / ("bern.toml" if command == "site" else "server.toml")
    text = path.read_text().replace('name = "bern"', "name = 'bern'", 1)
    assert old in text
    path.write_text(text.replace(old, new))
    main = fedmcmc.site.main if command == "site" else fedmcmc.server.main
    assert main([str(path)]) == 1
    errors = capsys.readouterr().err
    assert re.search(message, errors), errors


def test_chains_start_at_numbers_or_where_the_study_says(tmp_path):
    study = Consortium(tmp_path).study
    position = _initial_position(study, {"position": {"a": [0.1, 2], "b": 3}})
    assert position["a"].tolist() == [0.1, 2.0] and position["b"].dtype == float
    assert _initial_position(study, {"position": "model.py:start"}).tolist() == [0, 0]
    assert _initial_position(study, {}) is study.model.init_fn
