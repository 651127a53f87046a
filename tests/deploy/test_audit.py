"""The audit log of a site has all bytes that left, and any change of it is noticed."""

import errno
import hashlib
import json
import os

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


def replace_hash(line):
    """Return an edited line with a hash that fits it."""
    body = line[: line.index(b', "hash"')].replace(b'"round": 2', b'"round": 9') + b"}"
    digest = hashlib.sha256(body).hexdigest().encode()
    return body[:-1] + b', "hash": "' + digest + b'"}\n'


CHANGES = {
    "edited": (lambda x: [*x[:2], x[2].replace(b'"round": 2', b'"round": 9'), *x[3:]], 3),
    "edited, with a new hash": (lambda x: [*x[:2], replace_hash(x[2]), *x[3:]], 4),
    "deleted": (lambda x: x[:2] + x[3:], 3),
    "swapped": (lambda x: [*x[:2], x[3], x[2], *x[4:]], 3),
    "twice": (lambda x: [*x[:2], x[1], *x[2:]], 3),
    "cut short": (lambda x: [*x[:2], x[2][:30] + b"\n", *x[3:]], 3),
    "the first removed": (lambda x: x[1:], 1),
    "joined": (lambda x: [*x[:2], x[2][:-1], *x[3:]], 3),
    "cut off": (lambda x: [*x[:-1], x[-1][:-4]], 6),
}
"""Changes of a log's lines, and the first line that does not fit."""


@pytest.mark.parametrize("how", CHANGES)
def test_the_first_line_that_was_changed_is_named(how, log, capsys):
    change, line = CHANGES[how]
    assert deploy.verify_log(log)[::2] == (6, 6)
    log.write_bytes(b"".join(change(log.read_bytes().splitlines(True))))
    with pytest.raises(LogError, match=f"^Line {line} of"):
        deploy.verify_log(log)
    assert main(["deploy", "verify-log", str(log)]) == 1
    assert f"Line {line} of" in capsys.readouterr().err


def test_lines_cut_off_the_end_are_missed_by_who_knows_a_hash(log, capsys):
    final_hash = deploy.verify_log(log).last
    assert main(["deploy", "verify-log", str(log), "--holds", final_hash]) == 0
    assert final_hash in capsys.readouterr().out
    log.write_bytes(b"".join(log.read_bytes().splitlines(True)[:-2]))
    assert deploy.verify_log(log).num_lines == 4
    with pytest.raises(LogError, match="cut off its end"):
        deploy.verify_log(log, holds=final_hash)


@pytest.mark.parametrize("size", [1, 37, -1])
def test_a_log_continues_after_a_last_line_that_was_cut_short(size, log):
    """A process that is killed while it writes leaves such a line."""
    content = log.read_bytes()
    torn = content.splitlines(True)[-1][:size]
    log.write_bytes(content + torn)
    reopened = deploy.AuditLog(log)
    reopened.write("answer", bytes=1, digest="e")
    # The line is in the file before the site answers, so that a kill loses nothing.
    assert deploy.verify_log(log)[::2] == (8, 7)
    reopened.close()
    repair = json.loads(log.read_bytes().splitlines()[6])
    assert repair["what"] == "repaired" and repair["removed"] == len(torn)
    assert repair["digest"] == hashlib.sha256(torn).hexdigest()


def test_a_log_whose_last_line_was_changed_does_not_open(log):
    log.write_bytes(log.read_bytes().replace(b'"round": 5', b'"round": 6'))
    with pytest.raises(LogError, match=r"The last line of .* was not written by a site"):
        deploy.AuditLog(log)


def test_answers_are_in_the_log_before_they_leave(tmp_path):
    study, local, exchanges = studies.study_of("lsd"), deploy.LocalTransport(), []
    path, hello = tmp_path / "bern.log", b""
    log = deploy.AuditLog(path)

    def record(request, answer):
        if answer:
            entry = json.loads(path.read_bytes().splitlines()[-1])
            exchanges.append((entry, answer, deploy.verify_log(path).num_bytes))

    for name in study.sites:
        site = studies.site_of(study, name, tmp_path, log=log if name == "bern" else None)
        hello = site.hello() if name == "bern" else hello
        local.join(site, heard=record if name == "bern" else None)
    deploy.run(study, KEY, "main", POSITION, transport=local, num_rounds=4, progress=False)
    log.close()
    num_bytes = len(hello)
    for entry, answer, num_logged in exchanges:
        frame = Frame.parse(answer)
        assert entry["what"] == frame.kind and entry.get("bytes") == len(answer)
        assert entry["asked"] in ("begin", "start", "step")
        assert entry["digest"] == hashlib.sha256(answer).hexdigest()
        assert [entry[name] for name in Tag._fields] == list(frame.tag)
        num_bytes += len(answer)
        assert num_logged == num_bytes
    rounds = [entry["round"] for entry, *_ in exchanges if entry["what"] == "answer"]
    assert rounds and rounds == sorted(rounds)
    assert deploy.verify_log(path).num_bytes == num_bytes
    started, greeting, *_ = map(json.loads, path.read_bytes().splitlines())
    assert started["what"] == "started" and started["study"] == study.digest
    assert greeting["what"] == "hello" and greeting["bytes"] == len(
        hello
    )  # a repeated hello has no line


def test_a_site_sends_nothing_that_it_cannot_log(tmp_path):
    log = deploy.AuditLog(tmp_path / "audit.log")
    study = studies.study_of("lsd")
    site = studies.site_of(study, "bern", tmp_path, log=log)
    log.close()
    with pytest.raises(OSError):
        site.answer(b"anything")


def test_a_log_continues_after_the_disk_was_full(tmp_path, monkeypatch):
    """Part of a line may have been written; the lines before and after it are complete."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    log, write = deploy.AuditLog(tmp_path / "audit.log"), os.write
    log.write("answer", bytes=1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write(file, data[:30]))
        with pytest.raises(OSError, match="the disk may be full"):
            log.write("answer", bytes=2)
        full.setattr(os, "write", fail)
        with pytest.raises(OSError, match=r"audit\.log"):
            log.write("answer", bytes=2)
    log.write("answer", bytes=3)
    log.close()
    assert deploy.verify_log(tmp_path / "audit.log")[2:] == (2, 4)
