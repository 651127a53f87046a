"""What is taken and what is refused, as tables: a check that is gone is a figure that is off."""

import dataclasses
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._frames import Frame, Tag
from fedmcmc.deploy._links import Links
from fedmcmc.deploy._words import to_words
from fedmcmc.deploy.secure import SiteRules
from fedmcmc.types import PerClient
from tests.contracts.model import KEY
from tests.deploy.test_audit import changed
from tests.support import studies
from tests.support.commands import MODEL, Consortium, rows_of
from tests.support.site_runs import POSITION

MASKED = studies.masked_study("lsd", asks=deploy.SUMS, kernels={})


def taken(call, *given, **settings):
    """Return one where a call goes through, and zero where it is refused."""
    try:
        call(*given, **settings)
    except (deploy.Refused, ValueError):
        return 0
    return 1


def line_of(path, **given):
    """Return the line at which a log is said to be wrong, minus one for its end, zero for none."""
    try:
        deploy.verify_log(path, **given)
    except ValueError as error:
        found = re.match(r"Line (\d+) of", str(error))
        return int(found[1]) if found else -1
    return 0


CHANGES = {
    "nothing": 0,
    "edited": 3,
    "edited, with a hash of its own": 4,
    "deleted": 3,
    "swapped": 3,
    "twice": 3,
    "cut short": 3,
    "the first removed": 1,
    "joined": 3,
}


def test_a_log_is_wrong_from_the_line_that_was_changed(tmp_path):
    path = tmp_path / "audit.log"
    log = deploy.AuditLog(path)
    for round_ in range(6):
        log.write("answer", round=round_, bytes=20)
    log.close()
    whole, lines = path.read_bytes(), []
    for how in CHANGES:
        path.write_bytes(b"".join(changed(whole.splitlines(True), how)))
        lines.append(line_of(path))
    np.testing.assert_array_equal(lines, list(CHANGES.values()))
    path.write_bytes(whole)
    last = deploy.verify_log(path).last
    path.write_bytes(b"".join(whole.splitlines(True)[:-1]))
    np.testing.assert_array_equal([line_of(path), line_of(path, holds=last)], [0, -1])


def test_a_log_has_all_bytes_that_left_before_they_do(tmp_path):
    study, local, counts = studies.study_of("lsd"), deploy.LocalTransport(), [[], []]
    path, left = tmp_path / "bern.log", 0
    log = deploy.AuditLog(path)

    def heard(asked, answer):
        nonlocal left
        left += len(answer)
        counts[0].append(deploy.verify_log(path).num_bytes)
        counts[1].append(left)

    for name in study.sites:
        site = studies.site_of(study, name, tmp_path, log=log if name == "bern" else None)
        left += len(site.hello()) if name == "bern" else 0
        local.join(site, heard=heard if name == "bern" else None)
    settings = dict(transport=local, num_rounds=3, progress=False)
    deploy.run(study, KEY, "main", POSITION, **settings)
    np.testing.assert_array_equal(*counts)


@pytest.fixture
def kit(tmp_path):
    Consortium(tmp_path, asks=deploy.FIT)
    path = tmp_path / "bern.toml"
    text = re.sub(r"approved = .*", 'approval = "approval.json"', path.read_text())
    path.write_text(text)
    return tmp_path


def opened(kit, approved=None):
    approved = approved or deploy.Approval.read(kit / "approval.json")
    study = deploy.Study.read(kit / "study.toml")
    given = dict(folder=kit / "bern", approved=approved, min_rows=1, min_batch=1)
    deploy.Site(study, "bern", rows_of("bern"), **given)


def test_a_site_takes_the_study_that_was_approved_and_no_other(kit, monkeypatch):
    settings = ["--settings", str(kit / "bern.toml")]
    assert main(["deploy", "approve", "--yes", *settings]) == 0
    approval = deploy.Approval.read(kit / "approval.json")
    figures = [
        taken(opened, kit),
        taken(opened, kit, approval.digest),
        taken(opened, kit, dataclasses.replace(approval, site="chur")),
        taken(opened, kit, dataclasses.replace(approval, software={"jax": "0.1"})),
        taken(opened, kit, "0" * 64),
    ]
    for file, old, new in (
        ("study.toml", "step_size = 0.01", "step_size = 0.1"),
        ("study.toml", "chur = 4", "chur = 5"),
        ("model.py", "start = jnp.zeros(2)", "start = jnp.ones(2)"),
    ):
        text = (kit / file).read_text()
        (kit / file).write_text(text.replace(old, new))
        figures += [taken(opened, kit), taken(opened, kit, approval.digest)]
        (kit / file).write_text(text)
    np.testing.assert_array_equal(figures, [1, 1, 0, 0, 0] + 6 * [0])


def test_a_study_runs_once_its_owner_has_said_so(kit, monkeypatch):
    """How often it has run, after no, and after yes and no."""
    ran = kit / "ran"
    (kit / "model.py").write_text(
        f"with open({str(ran)!r}, 'a') as file:\n    file.write('x')\n{MODEL}"
    )
    settings, counts = ["--settings", str(kit / "bern.toml")], []
    for said in (["no"], ["yes", "no"]):
        answers = iter(said)
        monkeypatch.setattr("builtins.input", lambda question, a=answers: next(a, "no"))
        status = main(["deploy", "approve", *settings])
        counts += [status, len(ran.read_text()) if ran.exists() else 0]
        counts.append((kit / "approval.json").exists())
    np.testing.assert_array_equal(counts, [1, 0, 0, 1, 1, 0])


def test_a_source_runs_as_it_was_hashed(tmp_path):
    (tmp_path / "model.py").write_text("NUMBER = 1")
    study = studies.study_of(posterior="model.py:NUMBER", kernels={}, folder=tmp_path)
    digests = [study.digest]
    (tmp_path / "model.py").write_text("NUMBER = 2")
    again = dataclasses.replace(study)
    digests.append(again.digest)
    found = [study.found("model.py:NUMBER"), again.found("model.py:NUMBER"), len({*digests})]
    np.testing.assert_array_equal(found, [1, 2, 2])


def test_a_package_is_not_taken_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "fedmcmc_test_received.py").write_text("NUMBER = 1")
    monkeypatch.chdir(tmp_path)
    found = []
    for place in ("fedmcmc_test_received:NUMBER", "fedmcmc:lsd", "subprocess:run"):
        study = studies.study_of(posterior=place, kernels={})
        for entry in ("", str(tmp_path)):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "path", [entry, *sys.path])
                found.append(taken(study.to_dict))
    np.testing.assert_array_equal(found, [0, 0, 1, 1, 0, 0])


def shown(reason):
    """Return what a server raises where a site declines with a reason."""
    tag, transport = Tag("run", 0, 0, 0), deploy.LocalTransport()
    news = [("bern", Frame("declined", {"tag": list(tag), "reason": reason}).to_bytes())]
    transport.send = lambda site, data: None
    transport.receive = lambda timeout: news.pop() if timeout and news else None
    links = Links(MASKED, transport, 1.0)
    links.joined.add("bern")
    with pytest.raises(deploy.SiteError) as caught:
        links.exchange({"bern": b""}, "answer", tag, lambda site, body: body)
    return str(caught.value)


def test_a_reason_has_printable_characters_alone():
    """How many others each message has."""
    messages = [shown(reason) for reason in ("no", "\x1b[2K", "\u202e", "\n")]
    counts = [sum(not char.isprintable() for char in message) for message in messages]
    np.testing.assert_array_equal(counts, [0, 0, 0, 0])


SINGLES = (
    *(
        "LeaveOneOutQuestion",
        "CommonExpansions",
        "LeaveOneOut",
        "OwnExpansions",
        "Relay",
        "Replication",
    ),
    *("ScoreCovariances", "WithoutClient"),
)


def test_a_study_under_masks_may_ask_for_sums_alone():
    found = [taken(dataclasses.replace, MASKED, asks=(name,)) for name in (*deploy.SUMS, *SINGLES)]
    np.testing.assert_array_equal(found, len(deploy.SUMS) * [1] + len(SINGLES) * [0])


def test_a_site_under_masks_takes_kernels_that_treat_sites_alike():
    kernel = fedmcmc.lsd(MASKED.model, step_size=0.1)
    found = []
    for step_size in (0.2, [0.2, 0.0], PerClient(jnp.array([1.0, 0.0, 0.0]))):
        changed = dataclasses.replace(kernel, step_size=step_size)
        told = to_words(fedmcmc.types.as_functions(changed), MASKED.functions)
        found.append(taken(MASKED.kernel_of, *told))
    np.testing.assert_array_equal(found, [1, 1, 0])


def test_a_site_answers_as_long_as_it_knows_what_it_answered(tmp_path):
    """And has not left."""
    path, found = tmp_path / "masks", []
    given = dict(num_rounds=10)
    rules = SiteRules(path, MASKED.consortium, **given)
    found.append(taken(SiteRules, path, MASKED.consortium, **given))  # it has answered nothing
    rules.leave()
    found.append(SiteRules(path, MASKED.consortium, **given).has_left)
    path.unlink()
    found.append(taken(SiteRules, path, MASKED.consortium, **given))
    found.append(taken(studies.site_of, MASKED, "bern", tmp_path / "other"))
    np.testing.assert_array_equal(found, [1, 1, 0, 1])
