"""What an owner is shown before it approves, and what is refused afterwards."""

import json

import numpy as np
import pytest

import fedmcmc.site
from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._account import ANSWERS, _families
from tests.contracts.model import POSITIONS, Given
from tests.contracts.tables import KERNELS
from tests.support import studies
from tests.support.commands import Consortium, rows_of


@pytest.fixture
def kit(tmp_path):
    """A site's folder, with a settings file that names an approval."""
    Consortium(tmp_path, asks=deploy.FIT)
    path = tmp_path / "bern.toml"
    lines = path.read_text().splitlines()
    lines = ['approval = "approval.json"' if "approved" in line else line for line in lines]
    lines = [line.replace("min_rows = 1", "most_numbers = 1000, min_rows = 1") for line in lines]
    path.write_text("\n".join(lines))
    return tmp_path


def approve(kit, *more):
    return main(["deploy", "approve", "--settings", str(kit / "bern.toml"), *more])


def test_an_owner_is_shown_what_it_approves(kit, capsys):
    assert approve(kit, "--yes") == 0
    told = " ".join(capsys.readouterr().out.split())
    study = deploy.Study.read(kit / "study.toml")
    for text in (
        study.digest,
        study.to_dict()["files"]["model.py"],
        "step_size = 0.01",
        "5 rows of bern",
        "bern 5, basel 1, chur 4",
        "The server at localhost:",
        "sends the gradient of its log likelihood",
        "a code (Quantized) of 2 numbers",
        "At most 1,000 rounds",
        "The server sees each message of this site by itself",
        "Expansions: its log likelihood, the gradient and the curvature",
    ):
        assert text in told, text
    approval = json.loads((kit / "approval.json").read_text())
    assert approval["digest"] == study.digest and approval["site"] == "bern"


def test_sizes_are_told_in_numbers_and_bytes():
    study = studies.study_of("lsd_star")
    told = " ".join(deploy.messages_told(study, "bern", server="hub:1").split())
    assert "Sizes are known once the server says where chains start" in told
    given = dict(server="hub:1", position=POSITIONS["nested"])
    told = " ".join(deploy.messages_told(study, "bern", **given).split())
    code = " Once per run and chain, before the first round (1 of 1): "
    assert code in told and "12 bytes" in told, told
    assert "As many rounds as the server asks for" in told
    given["server"] = None
    assert "over the connections that NVFlare secures" in deploy.messages_told(
        study, "bern", **given
    )
    hidden = studies.study_of("secure_sum: lsd_star")
    told = " ".join(deploy.messages_told(hidden, "bern", **given).split())
    assert "Messages are integers" in told


def test_nothing_of_a_study_runs_before_its_owner_says_so(kit, monkeypatch, capsys):
    (kit / "model.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.setattr("builtins.input", lambda question: "no")
    assert approve(kit) == 1
    assert "Nothing was done" in capsys.readouterr().out
    assert not (kit / "approval.json").exists()
    answers = iter(["yes"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    with pytest.raises(RuntimeError, match="it ran"):
        approve(kit)


def test_an_owner_may_read_it_all_and_not_approve(kit, monkeypatch):
    answers = iter(["yes", "no"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert approve(kit) == 1
    assert not (kit / "approval.json").exists()


def site_of(kit):
    approval = deploy.Approval.read(kit / "approval.json")
    study = deploy.Study.read(kit / "study.toml")
    given = dict(folder=kit / "bern", approved=approval, min_rows=1, min_batch=1)
    return deploy.Site(study, "bern", rows_of("bern"), **given)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("study.toml", "step_size = 0.01", "step_size = 0.1", "settings.step_size: 0.01 when"),
        ("study.toml", "step_size = 0.01", "", "settings.step_size is gone: it was 0.01"),
        ("study.toml", "step_size = 0.01", "step_size = 0.01\nmore = 1", "settings.more is new: 1"),
        ("study.toml", "chur = 4", "chur = 5", "rows of chur: 4 when it was approved, now 5"),
        ("study.toml", "bern = 5\nbasel = 1", "basel = 1\nbern = 5", "order of the sites"),
        ("study.toml", "shape = [2]", "shape = [3]", "column : .*2.* now .*3"),
        ("study.toml", '"Expansions", ', "", "asks: .*Expansions.* when"),
        ("study.toml", "main = ", "other = ", "kernels.main is gone.*kernels.other is new"),
        ("model.py", "start = jnp.zeros(2)", "start = jnp.ones(2)", "file model.py: [0-9a-f]{16}…"),
    ],
    ids=str,
)
def test_a_site_says_what_is_another_since_it_was_approved(file, old, new, message, kit):
    assert approve(kit, "--yes") == 0
    assert site_of(kit).name == "bern"
    text = (kit / file).read_text()
    assert old in text
    (kit / file).write_text(text.replace(old, new))
    with pytest.raises(deploy.Refused, match=f"bern has approved the study.*{message}"):
        site_of(kit)


def test_an_approval_is_one_sites_and_of_one_version(kit, monkeypatch):
    assert approve(kit, "--yes") == 0
    approval = deploy.Approval.read(kit / "approval.json")
    study = deploy.Study.read(kit / "study.toml")
    with pytest.raises(deploy.Refused, match="The approval is of bern, and this is chur"):
        approval.check(study, "chur")
    newer = {name: "9.9" if name == "fedmcmc" else v for name, v in approval.software.items()}
    monkeypatch.setattr("fedmcmc.deploy._approval.software", lambda: newer)
    with pytest.raises(deploy.Refused, match=r"fedmcmc: .* when it was approved, now 9\.9"):
        approval.check(study, "bern")


def test_a_later_approval_says_what_is_another_first(kit, capsys):
    approve(kit, "--yes")
    text = (kit / "study.toml").read_text().replace("0.01", "0.02")
    (kit / "study.toml").write_text(text)
    capsys.readouterr()
    assert approve(kit, "--yes") == 0
    told = capsys.readouterr().out
    assert "settings.step_size: 0.01 when it was approved, now 0.02" in told


def test_a_site_without_an_approval_does_not_start(kit, capsys):
    assert fedmcmc.site.main([str(kit / "bern.toml")]) == 1
    assert "There is no approval" in capsys.readouterr().err
    (kit / "approval.json").write_text("{}")
    assert fedmcmc.site.main([str(kit / "bern.toml")]) == 1
    assert "is no approval as" in capsys.readouterr().err
    path = kit / "bern.toml"
    path.write_text(path.read_text().replace('approval = "approval.json"\n', ""))
    assert fedmcmc.site.main([str(path)]) == 1
    assert "give one of approval (a file) and approved (a digest)" in capsys.readouterr().err


def test_every_family_of_kernels_says_what_it_sends():
    families = {
        family
        for row, build in KERNELS.items()
        for family in _families(build(POSITIONS["vector"], Given()))
    }
    assert families <= set(ANSWERS) and len(families) >= 8
    assert set(deploy.FIT) <= set(ANSWERS)
    assert np.array_equal(sorted(ANSWERS), list(ANSWERS))
