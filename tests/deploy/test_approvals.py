"""The text that an owner reads before it approves, and the changes that a site refuses later."""

import json

import numpy as np
import pytest

import fedmcmc.site
from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._account import describe_files, messages_told
from fedmcmc.deploy._risks import inner_class_names
from fedmcmc.deploy._words import disclosures
from tests.contracts.model import POSITIONS, SIZES, Given
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
    lines = [line.replace("min_rows = 1", "max_numbers = 1000, min_rows = 1") for line in lines]
    path.write_text("\n".join(lines))
    return tmp_path


def approve(kit, *more):
    return main(["deploy", "approve", "--settings", str(kit / "bern.toml"), *more])


def test_an_owner_is_shown_what_it_approves(kit, capsys):
    assert approve(kit, "--yes") == 0
    shown = " ".join(capsys.readouterr().out.split())
    study = deploy.Study.read(kit / "study.toml")
    for text in (
        study.digest,
        study.to_dict()["files"]["model.py"],
        "step_size = 0.01",
        "5 rows of bern. A row holds 2 numbers",
        "bern.npz fit the study.",
        "bern 5, basel 1, chur 4",
        "The server at localhost:",
        "Langevin: the gradient of the log likelihood at the position of the chain.",
        "minibatches of 2 of the 5 rows, at random. The site draws them secretly",
        "2 numbers as a code (Quantized)",
        "At most 1,000 numbers leave this site",
        "The server reads each message of this site",
        "Expansions: the log likelihood, its gradient and its curvature",
        "The 5 rows of this site hold 5 x 2 = 10 numbers.",
        "This site has 5 rows, and the model 2 parameters. With fewer than 20 rows",
        "limits.min_batch",
        "Natural: the messages add up to the estimates",
    ):
        assert text in shown, text
    approval = json.loads((kit / "approval.json").read_text())
    (kit / "bern.npz").unlink()
    assert approve(kit, "--yes") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "bern.npz is missing: the site does not start" in shown
    np.savez(kit / "bern.npz", rows=rows_of("chur"))
    assert approve(kit, "--yes") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "do not fit the study: bern has 4 rows" in shown
    assert approval["digest"] == study.digest and approval["site"] == "bern"


def text_of(study, **changes):
    settings = dict(server="hub:1", position=POSITIONS["nested"]) | changes
    return " ".join(messages_told(study, "bern", **settings).split())


def test_sizes_are_told_in_numbers_and_bytes():
    study = studies.study_of("lsd_star")
    assert "Sizes depend on where the server starts" in text_of(study, position=None)
    text = text_of(study)
    assert " Before the first round, once per run and chain: 3 numbers (" in text
    assert "3 numbers (12 bytes)" in text and "No limit is set" in text, text
    assert "over the connections of NVFlare" in text_of(study, server=None)
    hidden = studies.study_of("secure_sum: lsd_star")
    assert "The messages are whole numbers" in text_of(hidden)


ROWS = SIZES[0]
"""Rows of bern, each of three numbers, as many as a message of `lsd` holds."""


@pytest.mark.parametrize(
    ("max_numbers", "answer"),
    [
        (6 * ROWS, f"allow {ROWS} messages: yes, this is possible."),
        (6 * ROWS - 1, f"allow {ROWS - 1} messages: no, too few for all of them."),
        (None, "Your settings allow any number of messages: yes"),
    ],
)
def test_an_owner_reads_whether_its_limit_lets_all_rows_be_computed(max_numbers, answer):
    """Three of the six numbers per message describe it: bits, size and use."""
    text = text_of(studies.study_of("lsd"), max_numbers=max_numbers)
    assert f"From about {ROWS} messages of the kernel 'main' on" in text
    assert answer in text and "tens of messages for one row" in text, text


def test_masks_let_the_rows_of_all_sites_together_be_computed():
    study = studies.masked_study("lsd")
    text, num = text_of(study, max_numbers=1000), sum(SIZES)
    assert f"all {num} rows of all sites together, though not whose they are" in text
    assert "only totals over all 3 sites" in text and "100 rounds per run" in text
    assert "only 2 sites are hidden among each other" in text
    secure = dict(study.secure) | {"operator": "basel"}
    operated = object.__new__(deploy.Study)
    operated.__dict__.update(study.__dict__ | {"secure": secure})
    text = text_of(operated)
    assert "The owner of 'basel' runs the server, so the messages of the other 2 sites" in text


def test_an_owner_is_warned():
    study = studies.study_of("lsd", asks=("LeaveOneOutQuestion", "Minibatch", "OwnExpansions"))
    text = text_of(study, min_batch=1, refused_columns=["x", "postcode"])
    for warning in (
        "limits.max_numbers is not set",
        "limits.min_batch = 1 is below the default of 20",
        "'postcode', which is no column of this study, so the site does not decline.",
        "Check the spelling: the columns are 'x'.",
        "LeaveOneOutQuestion: the server can subtract two sums",
        "Minibatch: the server chooses the size of minibatches",
        "OwnExpansions: the server reads the answer of each site.",
    ):
        assert warning in text.partition("Before you approve")[2], warning
    assert "names 'x'" not in text
    many = studies.study_of("hmc", sites=dict.fromkeys(studies.NAMES, 100))
    text = text_of(many, max_numbers=1000, min_batch=20)
    assert "Before you approve" not in text, text


def test_public_draws_let_the_rows_of_a_minibatch_be_computed():
    study = studies.study_of("lsd_pp", sites=dict.fromkeys(studies.NAMES, 100))
    object.__setattr__(study, "reproducible", True)
    text = text_of(study, max_numbers=1000)
    assert "all parties know which rows are in each message" in text
    assert "messages are enough for the 2 rows of a minibatch" in text, text
    assert "noise and minibatches hide nothing" in text


def test_names_cannot_hide_lines_of_the_text():
    """Escape sequences, line breaks and marks that turn the direction of text appear escaped."""
    study = studies.study_of("lsd")
    settings = {"row": "lsd", "a\x1b[2K\nb\u202e": 1, "label": "x\u001b[2J"}
    object.__setattr__(study, "settings", settings)  # a study refuses such a name
    text = describe_files(study, "bern")
    assert all(line.isprintable() for line in text.splitlines())
    assert "    a\\x1b[2K\\nb\\u202e = 1" in text.splitlines()
    settings["k"] = "x" + " " * 200 + "No code runs here."  # beyond the width of a terminal
    assert max(map(len, describe_files(study, "bern").splitlines()[:20])) <= 120


def test_a_model_runs_once_and_after_its_owner_has_read_the_files(kit, monkeypatch, capsys):
    runs = kit / "runs"
    model = (kit / "model.py").read_text()
    (kit / "model.py").write_text(f"with open({str(runs)!r}, 'a') as f:\n    f.write('x')\n{model}")
    for answers, num_runs in ((["no"], 0), (["yes", "no"], 1)):
        remaining = iter(answers)
        monkeypatch.setattr("builtins.input", lambda question, x=remaining: next(x))
        assert approve(kit) == 1
        assert (len(runs.read_text()) if runs.exists() else 0) == num_runs
        assert not (kit / "approval.json").exists()
        assert ("Nothing was done" in capsys.readouterr().out) or num_runs


def site_of(kit, name="bern", **changes):
    approval = deploy.Approval.read(kit / "approval.json")
    study = deploy.Study.read(kit / "study.toml")
    settings = dict(folder=kit / name, approved=approval, min_rows=1, min_batch=1) | changes
    return deploy.Site(study, name, rows_of(name), **settings)


CHANGES = [
    ("study.toml", "step_size = 0.01", "step_size = 0.1", "settings.step_size: 0.01 when"),
    ("study.toml", "step_size = 0.01", "", "settings.step_size is gone: it was 0.01"),
    ("study.toml", "step_size = 0.01", "step_size = 0.01\nmore = 1", "settings.more is new: 1"),
    ("study.toml", "chur = 4", "chur = 5", "rows of chur: 4 when it was approved, now 5"),
    ("study.toml", "bern = 5\nbasel = 1", "basel = 1\nbern = 5", "order of the sites"),
    ("study.toml", "shape = [2]", "shape = [3]", "column : .*2.* now .*3"),
    ("study.toml", '"Expansions", ', "", "asks: .*Expansions.* when"),
    ("study.toml", "main = ", "other = ", "kernels.main is gone.*kernels.other is new"),
    ("model.py", "start = jnp.zeros(2)", "start = jnp.ones(2)", "file model.py: [0-9a-f]{16}…"),
]


def test_a_site_refuses_a_study_that_changed_after_its_approval(kit, monkeypatch, capsys):
    assert approve(kit, "--yes") == 0
    approval = deploy.Approval.read(kit / "approval.json")
    assert site_of(kit).name == site_of(kit, approved=approval.digest).name == "bern"
    for file, old, new, message in CHANGES:
        text = (kit / file).read_text()
        assert old in text
        (kit / file).write_text(text.replace(old, new))
        with pytest.raises(deploy.Refused, match=f"bern has approved the study.*{message}"):
            site_of(kit)
        with pytest.raises(deploy.Refused, match="is not the one approved"):
            site_of(kit, approved=approval.digest)
        (kit / file).write_text(text)
    with pytest.raises(deploy.Refused, match="for the site bern, and this site is chur"):
        site_of(kit, "chur")
    newer = {name: "9.9" if name == "fedmcmc" else v for name, v in approval.software.items()}
    with monkeypatch.context() as patch:
        patch.setattr("fedmcmc.deploy._approval.software", lambda: newer)
        with pytest.raises(deploy.Refused, match=r"fedmcmc: .* when it was approved, now 9\.9"):
            site_of(kit)
    # A later approval shows what changed first.
    text = (kit / "study.toml").read_text().replace("0.01", "0.02")
    (kit / "study.toml").write_text(text)
    capsys.readouterr()
    assert approve(kit, "--yes") == 0
    shown = capsys.readouterr().out
    assert "settings.step_size: 0.01 when it was approved, now 0.02" in shown


def test_a_site_without_an_approval_does_not_start(kit, capsys):
    assert fedmcmc.site.main([str(kit / "bern.toml")]) == 1
    assert "There is no approval" in capsys.readouterr().err
    (kit / "approval.json").write_text("{}")
    assert fedmcmc.site.main([str(kit / "bern.toml")]) == 1
    assert "is not an approval that" in capsys.readouterr().err
    path = kit / "bern.toml"
    path.write_text(path.read_text().replace('approval = "approval.json"\n', ""))
    assert fedmcmc.site.main([str(path)]) == 1
    assert "give one of approval (a file) and approved (a digest)" in capsys.readouterr().err


def test_every_family_of_kernels_says_what_it_sends():
    families = {
        family
        for row, build in KERNELS.items()
        for family in inner_class_names(build(POSITIONS["vector"], Given()))
    }
    unknown = fedmcmc.FederatedKernel.disclosure.content
    contents = {name: each.content for name, each in disclosures().items()}
    missing = [name for name, content in contents.items() if content == unknown]
    # Transforms: the text is about the kernels within.
    np.testing.assert_array_equal(missing, ["Compressed", "Faulty", "Secured", "Sequence"])
    assert families <= contents.keys() and len(families) >= 8
    assert {*deploy.FIT, *deploy.SETUP} <= contents.keys()
