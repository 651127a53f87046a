"""Whoever writes a study's files wants code to run at sites that no owner has read and approved.

More attacks of this kind are in `tests.deploy.test_sources`, and names that hide lines of the text
that an owner reads are in `tests.deploy.test_names`.
"""

import sys

import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._account import describe_files
from tests.deploy.attacks.support import MODEL, PERMISSIVE, make_study, rows_of, write_study


@pytest.fixture
def marker(tmp_path):
    """Return the path of a file that exists once hostile code has run."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


@pytest.fixture
def hostile_model(marker):
    return f"open({str(marker)!r}, 'w').close()\n" + MODEL


def write_settings(folder):
    """Write a site's settings and rows; return their path."""
    np.savez(folder / "rows.npz", **rows_of("bern"))
    path = folder / "site.toml"
    names = ("key", "certificate", "authority", "folder")
    files = "\n".join(f'{name} = "bern.{name}"' for name in names)
    path.write_text(f"""
name = "bern"
study = "study.toml"
approval = "approval.json"
rows = "rows.npz"
server = "localhost:1"
limits = {{ min_rows = 1 }}
{files}
""")
    return path


def open_approved(study, folder, approval):
    return deploy.Site(
        study, "bern", rows_of("bern"), folder=folder / "bern", approved=approval, **PERMISSIVE
    )


def test_a_model_is_exchanged_between_digest_and_run(tmp_path, hostile_model):
    """An attacker who can write to the folder waits until the site has compared digests."""
    path = write_study(tmp_path / "study")
    approval = deploy.Approval.of(deploy.Study.read(path), "bern")
    study = deploy.Study.read(path)
    approval.check(study, "bern")
    path.with_name("model.py").write_text(hostile_model)
    site = open_approved(study, tmp_path, approval)
    try:
        _ = site.study.model
    except (deploy.Refused, ValueError) as error:
        assert "model.py" in str(error)


def test_a_model_is_exchanged_after_it_was_approved(tmp_path, hostile_model, monkeypatch):
    """The model changes when the owner answers yes, or before the site starts."""
    path = write_study(tmp_path)

    def exchange_and_agree(question):
        (tmp_path / "model.py").write_text(hostile_model)
        return "yes"

    monkeypatch.setattr("builtins.input", exchange_and_agree)
    status = main(["deploy", "approve", "--settings", str(write_settings(tmp_path))])
    study = deploy.Study.read(path)
    if status == 0:  # the owner approved the text that it read
        approval = deploy.Approval.read(tmp_path / "approval.json")
        with pytest.raises(deploy.Refused, match=r"model\.py"):
            open_approved(study, tmp_path, approval)


def test_a_package_is_not_imported_to_find_it(tmp_path, marker, hostile_model, monkeypatch):
    """The digest of a module in a package, and the text for owners, run no `__init__.py`."""
    package = tmp_path / "packages" / "clinic_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(hostile_model)
    (package / "targets.py").write_text(MODEL)
    monkeypatch.syspath_prepend(package.parent)
    study = make_study(posterior="clinic_models.targets:posterior", kernels={})
    digest = study.digest
    assert describe_files(study, "bern").count(digest) == 1
    assert "clinic_models" not in sys.modules


def test_no_bytecode_is_left_beside_a_study(tmp_path, monkeypatch):
    """The next owner that receives the folder would receive the bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    path = write_study(tmp_path / "study")
    _ = deploy.Study.read(path).model
    assert not (path.parent / "__pycache__").exists()
