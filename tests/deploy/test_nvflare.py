"""Sites over NVFlare: ``make test-nvflare``, which has an environment of its own."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.collab import CollabCallError

from fedmcmc.deploy import nvflare as flare
from tests.support.commands import NAMES, SETTINGS, Consortium

RUN = """
import sys
from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

job, workspace, names = sys.argv[1:]
runner = SimulatorRunner(
    job_folder=job, workspace=workspace, clients=names, threads=3, log_config="WARNING"
)
sys.exit(runner.run())
"""


def run_job(folder, job, number):
    """Run a job in NVFlare's simulator: the server in a process of its own, and so is each site."""
    local = folder / f"workspace{number}" / "local"
    local.mkdir(parents=True)
    allowed = {"format_version": 2, "class_allow_list": list(flare.ALLOWED)}
    (local / "resources.json").write_text(json.dumps(allowed))
    env = os.environ | {flare.SETTINGS: str(folder / "{site}.toml"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(job), str(local.parent), ",".join(NAMES)],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with np.load(folder / "draws.npz") as stored:
        return stored["theta"]


def test_sites_over_nvflare_draw_what_those_in_threads_do(tmp_path, monkeypatch):
    """Also where a job goes on from what another one saved."""
    clinics = Consortium(tmp_path)
    text = (tmp_path / "server.toml").read_text()
    text = 'study = "study.toml"\n' + text[text.index("[run]") :]  # NVFlare has the rest
    for name in NAMES:
        path = tmp_path / f"{name}.toml"
        lines = path.read_text().splitlines()
        keys = ("server =", "key =", "certificate =", "authority =")
        path.write_text("\n".join(line for line in lines if not line.startswith(keys)))
    job = flare.write_job(tmp_path / "jobs", "clinics", len(NAMES))
    draws = {}
    for num_rounds in (30, 60):
        (tmp_path / "server.toml").write_text(text.replace("400", str(num_rounds)))
        draws[num_rounds] = run_job(tmp_path, job, num_rounds)
    monkeypatch.setitem(SETTINGS, "num_rounds", 60)
    np.testing.assert_array_equal(draws[60], clinics.undisturbed().draws)
    np.testing.assert_array_equal(draws[30], draws[60][:, :15])
    # The second job has not computed the first rounds again.
    entries = map(json.loads, (tmp_path / "bern" / "audit.log").read_text().splitlines())
    rounds = [entry["round"] for entry in entries if entry["what"] == "answer"]
    assert rounds == sorted(set(rounds)) and rounds[-1] > 50


class Unsteady:
    """A site of which every third call fails after it was answered."""

    def __init__(self):
        self.calls = 0

    def __call__(self, timeout):
        return self

    def hello(self):
        return b"hello"

    def answer(self, data):
        self.calls += 1
        if self.calls % 3 == 0:
            raise CollabCallError("bern", "answer", TimeoutError())
        return b"to " + data


def test_a_site_that_could_not_be_called_has_left_and_joins_again(monkeypatch):
    monkeypatch.setattr(flare, "WAIT_SECONDS", 0.01)
    calls = flare.Calls({"bern": Unsteady()})
    heard = []

    def hear():
        heard.append(calls.receive(timeout=10.0))
        return heard[-1]

    assert hear() == ("bern", b"hello")
    for number in range(4):
        calls.send("bern", b"%d" % number)
        if hear() == ("bern", None):
            assert hear() == ("bern", b"hello")
    assert [data for _, data in heard] == [b"hello", b"to 0", b"to 1", None, b"hello", b"to 3"]
    assert calls.receive(timeout=0.0) is None
    calls.close()
    end = time.monotonic() + 10
    while any(thread.is_alive() for thread in calls._threads):
        assert time.monotonic() < end


def test_a_party_says_by_itself_where_its_settings_lie(monkeypatch, tmp_path):
    monkeypatch.delenv(flare.SETTINGS, raising=False)
    with pytest.raises(ValueError, match="FEDMCMC_SETTINGS"):
        flare.settings_of("bern")
    monkeypatch.setenv(flare.SETTINGS, f"{tmp_path}/{{site}}/site.toml")
    assert flare.settings_of("bern") == tmp_path / "bern" / "site.toml"
