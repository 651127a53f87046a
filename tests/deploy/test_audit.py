"""The log of what left a site: whatever is changed in it is found."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._audit import LogError
from fedmcmc.deploy._frames import Frame, Tag
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.site_runs import POSITION


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "audit.log"
    opened = deploy.AuditLog(path)
    for round_ in range(6):
        opened.write("answer", run="a", round=round_, phase=0, attempt=7, bytes=20, digest="d")
    opened.close()
    return path


def changed(lines, how):
    if how == "edited":
        lines[2] = lines[2].replace(b'"round": 2', b'"round": 9')
    elif how == "edited, with a hash of its own":
        body = lines[2][: lines[2].index(b', "hash"')].replace(b'"round": 2', b'"round": 9') + b"}"
        hash_ = hashlib.sha256(body).hexdigest().encode()
        lines[2] = body[:-1] + b', "hash": "' + hash_ + b'"}\n'
    elif how == "deleted":
        del lines[2]
    elif how == "swapped":
        lines[2], lines[3] = lines[3], lines[2]
    elif how == "twice":
        lines.insert(2, lines[1])
    elif how == "cut short":
        lines[2] = lines[2][:30] + b"\n"
    elif how == "the first removed":
        del lines[0]
    elif how == "joined":
        lines[2] = lines[2][:-1]
    elif how == "cut off":
        lines[-1] = lines[-1][:-4]
    return lines


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("edited", 3),
        ("edited, with a hash of its own", 4),
        ("deleted", 3),
        ("swapped", 3),
        ("twice", 3),
        ("cut short", 3),
        ("the first removed", 1),
        ("joined", 3),
        ("cut off", 6),
    ],
)
def test_the_first_line_that_was_changed_is_named(how, line, log, capsys):
    assert deploy.verify_log(log)[::2] == (6, 6)
    log.write_bytes(b"".join(changed(log.read_bytes().splitlines(True), how)))
    with pytest.raises(LogError, match=f"^Line {line} of"):
        deploy.verify_log(log)
    assert main(["deploy", "verify-log", str(log)]) == 1
    assert f"Line {line} of" in capsys.readouterr().err


def test_lines_cut_off_the_end_are_missed_by_who_knows_a_hash(log, capsys):
    last = deploy.verify_log(log).last
    assert main(["deploy", "verify-log", str(log), "--holds", last]) == 0
    assert last in capsys.readouterr().out
    log.write_bytes(b"".join(log.read_bytes().splitlines(True)[:-2]))
    assert deploy.verify_log(log).num_lines == 4
    with pytest.raises(LogError, match="cut off its end"):
        deploy.verify_log(log, holds=last)


def test_a_log_goes_on_after_a_last_line_that_was_cut_short(log):
    whole = log.read_bytes()
    torn = whole.splitlines(True)[-1][:37]
    log.write_bytes(whole + torn)
    again = deploy.AuditLog(log)
    again.write("answer", bytes=1, digest="e")
    again.close()
    assert deploy.verify_log(log)[::2] == (8, 7)
    noted = json.loads(log.read_bytes().splitlines()[6])
    assert noted["what"] == "repaired" and noted["removed"] == 37
    assert noted["digest"] == hashlib.sha256(torn).hexdigest()


def test_a_log_whose_last_line_was_changed_is_not_gone_on_with(log):
    log.write_bytes(log.read_bytes().replace(b'"round": 5', b'"round": 6'))
    with pytest.raises(LogError, match=r"The last line of .* was not written by a site"):
        deploy.AuditLog(log)


def test_a_killed_process_loses_no_line(tmp_path):
    path = tmp_path / "audit.log"
    code = f"""
from fedmcmc.deploy import AuditLog
log = AuditLog({str(path)!r})
for i in range(10**9):
    log.write("answer", round=i, bytes=1, digest="d")
    print(i, flush=True)
"""
    command = [sys.executable, "-c", code]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        told = [process.stdout.readline() for _ in range(100)]
        os.kill(process.pid, signal.SIGKILL)
        told += process.stdout.readlines()
    num = sum(line.endswith(b"\n") for line in told)
    deploy.AuditLog(path).close()  # mends what was cut short
    assert deploy.verify_log(path).num_answers >= num >= 100


def test_all_that_leaves_a_site_is_in_its_log_before(tmp_path):
    study, local, sent = studies.study_of("lsd"), deploy.LocalTransport(), []
    hello = b""
    logs = {name: deploy.AuditLog(tmp_path / f"{name}.log") for name in study.sites}

    def heard(asked, answer):
        if answer:
            entry = json.loads((tmp_path / "bern.log").read_bytes().splitlines()[-1])
            sent.append((entry, answer))

    for name, log in logs.items():
        site = studies.site_of(study, name, tmp_path, log=log)
        hello = site.hello() if name == "bern" else hello
        local.join(site, heard=heard if name == "bern" else None)
    deploy.run(study, KEY, "main", POSITION, transport=local, num_rounds=8, progress=False)
    for entry, answer in sent:
        frame = Frame.parse(answer)
        assert entry["what"] == frame.kind and entry["bytes"] == len(answer)
        assert entry["asked"] in ("begin", "start", "step")
        assert entry["digest"] == hashlib.sha256(answer).hexdigest()
        assert [entry[name] for name in Tag._fields] == list(frame.tag)
    rounds = [entry["round"] for entry, _ in sent if entry["what"] == "answer"]
    assert rounds and rounds == sorted(rounds)
    found = deploy.verify_log(tmp_path / "bern.log")
    assert found.num_bytes == len(hello) + sum(len(answer) for _, answer in sent)
    first, second, *_ = map(json.loads, (tmp_path / "bern.log").read_bytes().splitlines())
    assert first["what"] == "started" and first["study"] == study.digest
    assert second["what"] == "hello" and second["bytes"] == len(hello)  # once, as it is the same


def test_a_site_tells_nothing_that_it_cannot_log(tmp_path):
    log = deploy.AuditLog(tmp_path / "audit.log")
    study = studies.study_of("lsd")
    site = studies.site_of(study, "bern", tmp_path, log=log)
    log.close()
    with pytest.raises(OSError):
        site.answer(b"anything")


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_goes_on_after_the_disk_was_full(tmp_path, monkeypatch):
    """A part of a line may have been written, before which and after which lines are whole."""
    log, write = deploy.AuditLog(tmp_path / "audit.log"), os.write
    log.write("answer", bytes=1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:30]))
        with pytest.raises(OSError, match="the disk may be full"):
            log.write("answer", bytes=2)
        full.setattr(os, "write", no_space)
        with pytest.raises(OSError, match=r"audit\.log"):
            log.write("answer", bytes=2)
    log.write("answer", bytes=3)
    log.close()
    assert deploy.verify_log(tmp_path / "audit.log")[2:] == (2, 4)
