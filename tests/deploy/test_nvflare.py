"""Sites over NVFlare, for ``make test-nvflare``, which has its own environment."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.collab import CollabCallError
from nvflare.fuel.flare_api.flare_api import new_secure_session

from fedmcmc.deploy import nvflare as flare
from tests.support.commands import NAMES, SETTINGS, Consortium, free_port

LEAD = "lead@consortium.org"

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
    """Run a job in NVFlare's simulator: a process for the server and for each site."""
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


def settings_without_links(folder):
    """Take out of the settings what NVFlare provides, and return the server's."""
    text = (folder / "server.toml").read_text()
    text = 'study = "study.toml"\n' + text[text.index("[run]") :]
    for name in NAMES:
        path = folder / f"{name}.toml"
        lines = path.read_text().splitlines()
        keys = ("server =", "key =", "certificate =", "authority =")
        path.write_text("\n".join(line for line in lines if not line.startswith(keys)))
    return text


def test_sites_over_nvflare_draw_what_those_in_threads_do(tmp_path, monkeypatch):
    """A second job continues from the states that the first saved."""
    clinics = Consortium(tmp_path)
    text = settings_without_links(tmp_path)
    job = flare.write_job(tmp_path / "jobs", "clinics", len(NAMES))
    draws = {}
    for num_rounds in (30, 60):
        (tmp_path / "server.toml").write_text(text.replace("400", str(num_rounds)))
        draws[num_rounds] = run_job(tmp_path, job, num_rounds)
    monkeypatch.setitem(SETTINGS, "num_rounds", 60)
    np.testing.assert_array_equal(draws[60], clinics.undisturbed().draws)
    np.testing.assert_array_equal(draws[30], draws[60][:, :15])
    # The second job has not computed the first rounds again.
    entries = map(json.loads, (tmp_path / "bern.audit.log").read_text().splitlines())
    rounds = [entry["round"] for entry in entries if entry["what"] == "answer"]
    assert rounds == sorted(set(rounds)) and rounds[-1] > 50


PARTIES = [
    {"name": "localhost", "type": "server", "org": "consortium"},
    *({"name": name, "type": "client", "org": name} for name in NAMES),
    {"name": LEAD, "type": "admin", "org": "consortium", "role": "project_admin"},
]
BUILDERS = {
    "workspace.WorkspaceBuilder": {"template_file": ["master_template.yml"]},
    "static_file.StaticFileBuilder": {"config_folder": "config"},
    "cert.CertBuilder": {},
    "signature.SignatureBuilder": {},
}


class Provisioned:
    """Kits of `nvflare provision` for the clinics, and the processes that they start.

    Each party allows only this package's classes in its ``resources.json``; all files of NVFlare
    are below `folder`.
    """

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        server = PARTIES[0] | {"fed_learn_port": free_port(), "admin_port": free_port()}
        project = {
            "api_version": 3,
            "name": "clinics",
            "description": "three clinics",
            "participants": [server, *PARTIES[1:]],
            "builders": [
                {"path": f"nvflare.lighter.impl.{name}", "args": args}
                for name, args in BUILDERS.items()
            ],
        }
        (folder / "project.yml").write_text(json.dumps(project))  # which YAML takes
        command = [Path(sys.executable).with_name("nvflare"), "provision", "-p", "project.yml"]
        subprocess.run([*command, "-w", "kits"], cwd=folder, check=True, capture_output=True)
        self.kits = folder / "kits" / "clinics" / "prod_00"
        for name in ("localhost", *NAMES):
            local = self.kits / name / "local"
            resources = json.loads((local / "resources.json.default").read_text())
            resources["class_allow_list"] = list(flare.ALLOWED)
            resources["allow_log_streaming"] = False
            text = json.dumps(resources).replace("/tmp/nvflare", str(folder / "kept"))
            (local / "resources.json").write_text(text)

    def start(self, name):
        """Start a party as ``start.sh`` does, without its loop that starts it again."""
        which = "server" if name == "localhost" else "client"
        kit = self.kits / name
        command = [sys.executable, "-m", f"nvflare.private.fed.app.{which}.{which}_train"]
        command += ["-m", str(kit), "-s", f"fed_{which}.json", "--set", "secure_train=true"]
        if which == "client":
            command += [f"uid={name}", f"org={name}"]
        settings = str(self.folder / ("{site}.toml" if which == "server" else f"{name}.toml"))
        env = os.environ | {flare.SETTINGS: settings, "JAX_PLATFORMS": "cpu"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "config_folder=config"],
                cwd=kit,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    def session(self):
        """Return the lead's session, once the server takes it."""
        return new_secure_session(LEAD, str(self.kits / LEAD), timeout=60.0)

    def end(self):
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning")
def test_provisioned_parties_draw_what_sites_in_threads_do(tmp_path, monkeypatch):
    """Each party is a process from its kit, with its certificate and its refusals."""
    clinics = Consortium(tmp_path)
    text = settings_without_links(tmp_path)
    (tmp_path / "server.toml").write_text(text.replace("400", "60"))
    job = flare.write_job(tmp_path / "jobs", "clinics", len(NAMES))
    parties = Provisioned(tmp_path)
    try:
        for name in ("localhost", *NAMES):
            parties.start(name)
        session = parties.session()
        end = time.monotonic() + 120
        while len(session.get_connected_client_list()) < len(NAMES):
            assert time.monotonic() < end, "a site has not joined"
            time.sleep(1)
        status = session.wait_for_job(session.submit_job(str(job)), timeout=400.0)
        session.close()
    finally:
        parties.end()
    assert status["status"] == "FINISHED:COMPLETED", status
    with np.load(tmp_path / "draws.npz") as stored:
        draws = stored["theta"]
    monkeypatch.setitem(SETTINGS, "num_rounds", 60)
    np.testing.assert_array_equal(draws, clinics.undisturbed().draws)
    # No site's log has come to the server.
    kept = {path.name for path in (tmp_path / "kept").rglob("*")}
    assert "meta" in kept and not [name for name in kept if "LOG" in name]


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


def test_what_goes_wrong_at_a_site_is_in_its_own_log_alone(monkeypatch, tmp_path, caplog):
    """NVFlare's log of a site may be sent to the server."""
    Consortium(tmp_path)
    settings_without_links(tmp_path)
    rows = tmp_path / "bern.npz"
    np.savez(rows, rows=np.ones((3, 2), np.float32))
    monkeypatch.setenv(flare.SETTINGS, f"{tmp_path}/{{site}}.toml")
    monkeypatch.setattr(flare, "collab", SimpleNamespace(site_name="bern"))
    with pytest.raises(RuntimeError, match="could not be opened") as raised:
        flare.FlareSite().open()
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
    assert "has 3 rows" in (tmp_path / "bern" / flare.ERRORS).read_text()
    assert not caplog.text
    assert flare.LOG.propagate and not flare.LOG.handlers


def test_a_party_says_by_itself_where_its_settings_lie(monkeypatch, tmp_path):
    monkeypatch.delenv(flare.SETTINGS, raising=False)
    with pytest.raises(ValueError, match="FEDMCMC_SETTINGS"):
        flare.settings_of("bern")
    monkeypatch.setenv(flare.SETTINGS, f"{tmp_path}/{{site}}/site.toml")
    assert flare.settings_of("bern") == tmp_path / "bern" / "site.toml"
