"""The two commands, as settings files say."""

import re

import jax
import numpy as np
import pytest

import fedmcmc.server
import fedmcmc.site
from fedmcmc import deploy
from fedmcmc.deploy._config import _initial_position
from fedmcmc.deploy._disk import Disk
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
def test_a_server_reports_a_run_and_says_early_where_it_cannot(tmp_path, monkeypatch):
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
def test_a_command_says_what_is_wrong(command, old, new, message, tmp_path, capsys):
    Consortium(tmp_path)
    path = tmp_path / ("bern.toml" if command == "site" else "server.toml")
    text = path.read_text().replace('name = "bern"', "name = 'bern'", 1)
    assert old in text
    path.write_text(text.replace(old, new))
    main = fedmcmc.site.main if command == "site" else fedmcmc.server.main
    assert main([str(path)]) == 1
    told = capsys.readouterr().err
    assert re.search(message, told), told


def test_chains_start_at_numbers_or_where_the_study_says(tmp_path):
    study = Consortium(tmp_path).study
    found = _initial_position(study, {"position": {"a": [0.1, 2], "b": 3}})
    assert found["a"].tolist() == [0.1, 2.0] and found["b"].dtype == float
    assert _initial_position(study, {"position": "model.py:start"}).tolist() == [0, 0]
    assert _initial_position(study, {}) is study.model.init_fn


def test_what_a_site_keeps_is_checked_when_it_is_read(tmp_path):
    disk = Disk(tmp_path)
    disk.write("run", {"a": 1}, b"state", b"pending")
    assert disk.read("run", 2) == ({"a": 1}, [b"state", b"pending"])
    assert disk.read("other", 2) is None and disk.marked("run", 3) is None
    disk.mark("run", [3, 4], b"three", keep=[])
    disk.mark("run", [7], b"seven", keep=[4])
    assert disk.marked("run", 7) == b"seven"
    for path in list(tmp_path.glob("run-*/*")):  # of a process that was killed while it wrote
        path.with_name(path.name + ".partial").write_bytes(b"")
    disk.mark("run", [8], b"eight", keep=[4])
    assert disk.marked("run", 8) == b"eight" and disk.marked("run", 4) == b"three"
    assert disk.marked("run", 8) is None  # of rounds that are run again
    assert disk.marked("run", 3) is None and disk.marked("run", 7) is None
    disk.count_numbers(12)
    assert Disk(tmp_path).num_numbers == 12
    (path,) = tmp_path.glob("run-*/state")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="damaged"):
        disk.read("run", 2)


def test_a_state_that_was_not_written_to_its_end_leaves_the_one_before(tmp_path):
    """Nothing was answered then, so that the one before is the site's state."""
    disk = Disk(tmp_path)
    for number in range(5):
        disk.write("run", {"a": number}, bytes([number]) * 5000, b"pending")
        assert Disk(tmp_path).read("run", 2)[0] == {"a": number}
    (path,) = tmp_path.glob("run-*/state")
    whole = path.read_bytes()
    places = [whole.index(bytes([number]) * 5000) for number in (4, 3)]
    for number, place in zip((3, None), places, strict=True):
        torn = bytearray(path.read_bytes())
        torn[place + 4000 : place + 5000] = bytes([2]) * 1000
        path.write_bytes(torn)
        if number is not None:
            found = disk.read("run", 2)
            assert found == ({"a": number}, [bytes([number]) * 5000, b"pending"])
    with pytest.raises(OSError, match="damaged"):
        disk.read("run", 2)
    path.write_bytes(whole)
    again = Disk(tmp_path)  # of a site that was started again
    for number, size in ((5, 5000), (6, 50_000), (7, 10)):  # more than there is room for, and less
        again.write("run", {"a": number}, bytes([number]) * size, b"")
        assert Disk(tmp_path).read("run", 2) == ({"a": number}, [bytes([number]) * size, b""])


def test_only_some_runs_are_kept(tmp_path):
    disk = Disk(tmp_path)
    for number in range(20):
        disk.begin(str(number))
        disk.write(str(number), {}, b"")
    assert disk.read("19", 1) is not None and len(list(tmp_path.glob("run-*"))) <= 17
