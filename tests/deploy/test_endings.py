"""The server's command: its files and exit status at its end, and settings that it refuses."""

import logging
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._commands import _exit_status
from fedmcmc.deploy._config import _shows_progress, run_over
from fedmcmc.diagnostics import DiagnosisWarning
from tests.contracts.model import KEY
from tests.deploy.test_lying_sites import meddling
from tests.support import studies
from tests.support.commands import NAMES, SETTINGS, Consortium

NUM_ROUNDS, LAST_ROUND = 16, 9
RUN = dict(kernel="main", seed=3, draws="draws.npz", position="model.py:start", progress=False)
RUN |= dict(checkpoint="checkpoint", every_rounds=5000, num_rounds=NUM_ROUNDS, num_chains=2)


def run_server(clinics, then=None):
    """Run the server's command with sites in threads; return its exit status.

    In one round `then` maps their answers.
    """
    local = deploy.LocalTransport()

    def change(request, frame):
        is_due = request.kind == "step" and request.tag.round == LAST_ROUND
        return then(frame) if is_due else frame

    for name in NAMES:
        site = clinics._site(name, clinics.folder / name)
        local.join(site if then is None else meddling(site, change))
    return _exit_status(lambda: run_over(clinics.folder / "server.toml", lambda: local))


def stored(path):
    with np.load(path) as arrays:
        return arrays["theta"]


def interrupt_by(*numbers):
    def answer(frame):
        for number in numbers:
            signal.raise_signal(number)

    return answer


def decline(frame):
    header = {**frame.header, "reason": "its owner allows no more"}
    return frame._replace(kind="declined", header=header)


@pytest.mark.parametrize(
    ("then", "status", "text"),
    [
        # The second one must not end what brings the draws to safety.
        (interrupt_by(signal.SIGINT, signal.SIGTERM), 130, "Interrupted. The 9 draws per chain"),
        pytest.param(
            interrupt_by(signal.SIGTERM), 143, "Interrupted. The 9 draws", marks=pytest.mark.slow
        ),
        pytest.param(
            decline,
            1,
            r"SiteError: (bern|basel|chur): its owner allows no more \(in round 9\) The 9 draws",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Interrupted in or after:fedmcmc.SamplingWarning")
def test_a_stopped_server_keeps_its_rounds_and_continues(then, status, text, tmp_path, capsys):
    clinics, draws = Consortium(tmp_path, run=RUN), tmp_path / "draws.npz"
    assert run_server(clinics, then) == status
    output = capsys.readouterr().err
    assert re.search(text, output), output
    assert f"are in {draws}" in output and "is of round 9: start again" in output
    partial = stored(draws)
    assert partial.shape == (2, LAST_ROUND, 2)
    assert run_server(clinics) == 0
    resumed = stored(draws)
    np.testing.assert_array_equal(resumed[:, :LAST_ROUND], partial)
    shutil.rmtree(tmp_path / "checkpoint")
    assert run_server(clinics) == 0  # the same run without an interrupt
    np.testing.assert_array_equal(resumed, stored(draws))


class Waiting(deploy.LocalTransport):
    """A transport whose program is interrupted while it waits for a site."""

    def receive(self, timeout):
        news = super().receive(0.01)
        if news is None:
            signal.raise_signal(signal.SIGINT)
        return news


def test_a_server_that_kept_no_draw_writes_no_file(tmp_path, capsys):
    clinics, draws = Consortium(tmp_path, run=RUN), tmp_path / "draws.npz"
    before = signal.getsignal(signal.SIGINT)
    assert _exit_status(lambda: run_over(tmp_path / "server.toml", Waiting)) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert f"No draw was kept, and {draws} was not written" in capsys.readouterr().err
    draws.write_bytes(b"notes")
    assert _exit_status(lambda: run_over(tmp_path / "server.toml", Waiting)) == 130
    assert draws.read_bytes() == b"notes" and clinics.round == 0


class Signalled(deploy.LocalTransport):
    """A transport whose program is interrupted while it is opened or closed."""

    def __init__(self, moment):
        super().__init__()
        self.moment, self.is_closed = moment, False
        if moment == "opened":
            signal.raise_signal(signal.SIGINT)

    def close(self):
        if self.moment == "closed":
            signal.raise_signal(signal.SIGINT)
        super().close()
        self.is_closed = True


@pytest.mark.parametrize(("moment", "num"), [("opened", 0), ("closed", NUM_ROUNDS)])
def test_a_server_that_is_interrupted_as_it_starts_or_ends_closes_its_port(
    moment, num, tmp_path, capsys
):
    """Its process would wait for the threads of its port for ever, or lose the draws."""
    clinics, opened = Consortium(tmp_path, run=RUN), []

    def transport():
        opened.append(Signalled(moment))
        for name in NAMES:
            opened[0].join(clinics._site(name, tmp_path / name))
        return opened[0]

    if not num:
        (tmp_path / "checkpoint").mkdir()
        (tmp_path / "checkpoint" / "run.json").touch()
    status = _exit_status(lambda: run_over(tmp_path / "server.toml", transport))
    assert ("before is in the checkpoint" in capsys.readouterr().err) == (not num)
    assert opened[0].is_closed and status == (0 if num else 130)
    assert not num or stored(tmp_path / "draws.npz").shape == (2, num, 2)


def test_a_server_whose_settings_do_not_fit_closes_its_port(tmp_path, capsys):
    clinics, opened = Consortium(tmp_path, run=RUN | dict(on_missing="leave_out"), masked=True), []

    def transport():
        opened.append(Signalled("never"))
        return opened[0]

    assert _exit_status(lambda: run_over(clinics.folder / "server.toml", transport)) == 1
    assert "on_missing must be 'wait'" in capsys.readouterr().err and opened[0].is_closed


def test_draws_of_a_longer_run_stay_where_a_run_ends_early(tmp_path, capsys, caplog):
    run = {name: value for name, value in RUN.items() if "checkpoint" not in name}
    del run["every_rounds"]
    clinics, draws = Consortium(tmp_path, run=run), tmp_path / "draws.npz"
    np.savez(draws, theta=np.ones((2, 50, 2)))
    assert run_server(clinics, decline) == 1
    partial = tmp_path / "draws.partial.npz"
    output = capsys.readouterr().err
    assert f"are in {partial}. {draws} stays as it was, with 50 draws per chain" in output
    assert stored(draws).shape == (2, 50, 2) and stored(partial).shape == (2, LAST_ROUND, 2)
    assert run_server(clinics) == 0
    assert "held 50 draws per chain of an earlier run, and holds 16 now" in caplog.text
    assert stored(draws).shape == (2, NUM_ROUNDS, 2)


def test_a_server_that_is_started_with_more_rounds_continues(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = RUN | dict(every_rounds=100, num_rounds=200)
    clinics, path, sizes = Consortium(tmp_path, run=run), tmp_path / "server.toml", []
    for num_rounds in (200, 300):
        path.write_text(path.read_text().replace("num_rounds = 200", f"num_rounds = {num_rounds}"))
        caplog.clear()
        with pytest.warns(DiagnosisWarning, match="too short"):
            assert run_server(clinics) == 0
        sizes.append(stored(tmp_path / "draws.npz"))
        assert f"{num_rounds} rounds are done; draws are in {tmp_path}" in caplog.text
        assert f"raise run.num_rounds in {path}, now {num_rounds}," in caplog.text
        assert "start the server again, which continues from the checkpoint" in caplog.text
    np.testing.assert_array_equal(sizes[1][:, :200], sizes[0])
    assert sizes[1].shape == (2, 300, 2)


def test_progress_is_shown_at_a_terminal_only(monkeypatch):
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda value=is_terminal: value)
        assert _shows_progress({}) == is_terminal
    assert _shows_progress({"progress": True})


@pytest.mark.slow
def test_a_server_whose_chain_is_not_finite_keeps_the_draws_before(tmp_path, capsys):
    clinics = Consortium(tmp_path, run=RUN | dict(num_chains=1))
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace("step_size = 0.01", "step_size = 1e30"))
    clinics.study = deploy.Study.read(path)
    assert run_server(clinics) == 1
    output = capsys.readouterr().err
    assert "NonFiniteError: Chain 0 turned non-finite in round" in output
    num = int(re.search(r"The (\d+) draws per chain that were kept", output)[1])
    assert stored(tmp_path / "draws.npz").shape == (1, num, 2) and num > 0


@pytest.mark.slow
def test_the_process_of_a_server_is_interrupted_and_started_again(tmp_path):
    run = RUN | SETTINGS | dict(num_rounds=10_000, thinning=50)
    clinics, draws = Consortium(tmp_path, run=run), tmp_path / "draws.npz"
    try:
        with clinics.in_threads(NAMES):
            for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                clinics.start("server")
                process = clinics.processes["server"]
                wait_for("bern has joined", clinics, 1 + (number == signal.SIGTERM))
                wait_for_rounds(process)
                process.send_signal(number)
                assert process.wait(timeout=120) == status, clinics.log("server")[-3000:]
                assert clinics.round > 0 and stored(draws).shape[1] == clinics.round // 50
            clinics.start("server")
            assert clinics.processes["server"].wait(timeout=300) == 0
    finally:
        clinics.end()
    assert stored(draws).shape == (2, 200, 2)


def wait_for(text, clinics, times):
    for _ in range(1200):
        if clinics.log("server").count(text) >= times:
            return
        time.sleep(0.1)
    raise AssertionError(clinics.log("server")[-3000:])


def wait_for_rounds(process):
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=12)


WRONG = [
    ("num_rounds", "20", "run.num_rounds must be a whole number of at least 1, got '20'"),
    ("num_rounds", 0, "run.num_rounds must be a whole number of at least 1, got 0"),
    ("num_rounds", True, "run.num_rounds must be a whole number of at least 1, got True"),
    ("num_chains", -1, "run.num_chains must be a whole number of at least 1, got -1"),
    ("num_chains", 2.0, "run.num_chains must be a whole number of at least 1, got 2.0"),
    ("num_burnin", -1, "run.num_burnin must be a whole number of at least 0, got -1"),
    ("thinning", 0, "run.thinning must be a whole number of at least 1, got 0"),
    ("every_rounds", 0, "run.every_rounds must be a whole number of at least 1, got 0"),
    ("timeout", "60", "run.timeout must be a number above 0, got '60'"),
    ("timeout", True, "run.timeout must be a number above 0, got True"),
    ("max_norm", 0, "run.max_norm must be a number above 0, got 0"),
    ("on_missing", "leave", "run.on_missing must be 'wait' or 'leave_out', got 'leave'"),
    ("progress", "no", "run.progress must be true or false, got 'no'"),
    ("kernel", 3, "run.kernel must be a text, got 3"),
    ("kernel", "other", "has no kernel 'other', only ['main']"),
    ("draws", 3, "run.draws must be a text, got 3"),
    ("draws", "none/draws.npz", "run.draws must be a file in a folder that exists ("),
    ("draws", "keys", "run.draws must be a file, and no folder, got 'keys'"),
    ("report", True, "run.report must be a text, got True"),
    ("report", "none/run.html", "run.report must be a file in a folder that exists ("),
    ("checkpoint", 3, "run.checkpoint must be a text, got 3"),
    ("position", "zero", "have no zero"),
    ("position", "model.py:nowhere", "have no model.py:nowhere"),
    ("position", ["a", 1], "run.position must be a number or a list of numbers, got ['a', 1]"),
    ("position", {"a": {"b": "c"}}, "run.position.a.b must be a number or a list of numbers"),
]


def test_the_server_checks_settings_before_it_waits_for_sites(tmp_path):
    clinics = Consortium(tmp_path)
    text = (tmp_path / "server.toml").read_text().partition("[run]")[0]

    def transport():
        raise AssertionError("waits for sites")

    def refused(given):
        def line(name, value):
            if isinstance(value, dict):
                return f"{name} = {{ a = {{ b = 'c' }} }}"
            return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"

        lines = "\n".join(line(name, value) for name, value in given.items())
        (tmp_path / "server.toml").write_text(f"{text}[run]\n{lines}\n")
        with pytest.raises(ValueError) as caught:
            run_over(tmp_path / "server.toml", transport)
        return str(caught.value)

    for name, value, message in WRONG:
        assert message in refused(RUN | {name: value}), (name, value)
    run = {name: value for name, value in RUN.items() if name != "checkpoint"}
    assert "run.every_rounds is the number of rounds between checkpoints" in refused(run)
    assert clinics.round == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"study = .*", "study = 3", "server.toml: study must be a text in quotes, got 3"),
        (r"key = .*", "key = ['a']", r"server.toml: key must be a text in quotes, got \['a'\]"),
        (r"\[sites\](.|\n)*\[run\]", "sites = ['bern']\n[run]", "sites must be a table of finger"),
        (r"bern = .*", "bern = 3", "sites must be a table of fingerprints"),
    ],
    ids=["study", "key", "sites", "fingerprint"],
)
def test_settings_of_a_server_are_checked(old, new, message, tmp_path):
    Consortium(tmp_path)
    path = tmp_path / "server.toml"
    path.write_text(re.sub(old, new, path.read_text(), count=1))
    with pytest.raises(ValueError, match=message):
        deploy.run_server(path)


def test_text_is_no_position():
    study = studies.study_of()
    with pytest.raises(TypeError, match=r"position must be a number or an array .* got 'zero'"):
        deploy.run(study, KEY, "main", "zero", transport=deploy.LocalTransport(), num_rounds=2)


def study_of_four(**secure):
    names = (*NAMES, "zug")
    identities = {name: studies.public_key(name) for name in names}
    return studies.masked_study(
        "lsd",
        secure=dict(identities=identities) | secure,
        sites=dict(zip(names, (5, 1, 4, 2), strict=True)),
    )


def test_an_operator_counts_as_one_more_that_colludes():
    settings = ({}, dict(operator="zug"), dict(operator="bern"), dict(colluding=1))
    counts = [study_of_four(**secure).consortium.colluding for secure in settings]
    np.testing.assert_array_equal(counts, [0, 1, 1, 1])


def test_a_study_names_an_operator_only_among_enough_sites():
    message = "bern runs the server .* of 3 sites 2 are left .* and 3 are needed"
    with pytest.raises(ValueError, match=message):
        studies.masked_study("lsd", secure=dict(operator="bern"))
    assert studies.masked_study("lsd").consortium.colluding == 0
    with pytest.raises(ValueError, match="of 4 sites 2 are left"):
        study_of_four(operator="bern", colluding=1)
    for wrong in ("genf", 3, ["bern"]):
        with pytest.raises(ValueError, match=r"secure.operator must be the site .*; got "):
            study_of_four(operator=wrong)
    digests = {
        study_of_four().digest,
        study_of_four(operator="bern").digest,
        study_of_four(operator="zug").digest,
    }
    assert len(digests) == 3
