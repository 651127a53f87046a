"""Whoever writes a study's files wants code to run at sites that no owner has read and approved."""

import importlib.util
import os
import py_compile
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._account import describe_files
from tests.deploy.attacks.support import (
    MODEL,
    PERMISSIVE,
    STUDY,
    make_study,
    rows_of,
    write_study,
)
from tests.support.processes import ROOT


def evil(marker):
    """Return code that leaves a file behind."""
    return f"open({str(marker)!r}, 'w').close()\n"


@pytest.fixture
def marker(tmp_path):
    """The file that is there once hostile code has run."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


def settings_of(folder, study="study.toml"):
    """Write a site's settings beside its rows; return their path."""
    np.savez(folder / "rows.npz", **rows_of("bern"))
    path = folder / "site.toml"
    path.write_text(f"""
name = "bern"
study = "{study}"
approval = "approval.json"
rows = "rows.npz"
folder = "state"
server = "localhost:1"
key = "bern.key"
certificate = "bern.crt"
authority = "ca.crt"
[limits]
min_rows = 1
""")
    return path


# Bytecode


@pytest.fixture
def with_bytecode(monkeypatch):
    """Python as it is usually started, so that it reads and writes bytecode beside files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)


def test_bytecode_beside_an_honest_model_does_not_run(tmp_path, marker, with_bytecode):
    """A file in `__pycache__` that Python does not check against the model's text."""
    path = write_study(tmp_path / "study")
    model, hostile = path.with_name("model.py"), tmp_path / "hostile.py"
    hostile.write_text(evil(marker) + MODEL)
    py_compile.compile(
        str(hostile),
        cfile=importlib.util.cache_from_source(str(model)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert deploy.Study.read(path).model is not None


def test_a_model_of_equal_size_and_time_is_not_the_old_one(tmp_path, with_bytecode):
    """As archives make them: the digest would be of the new text, and the old code would run."""
    path = write_study(tmp_path / "study")
    model = path.with_name("model.py")
    times = model.stat().st_atime_ns, model.stat().st_mtime_ns
    old = deploy.Study.read(path)
    digest = old.digest
    assert old.kernel("main").step_size == np.float32(0.01)
    text = MODEL.replace("step_size=0.01", "step_size=0.09")
    assert len(text) == len(MODEL)
    model.write_text(text)
    os.utime(model, ns=times)
    new = deploy.Study.read(path)
    assert new.digest != digest and new.kernel("main").step_size == np.float32(0.09)


def test_no_bytecode_is_left_beside_a_study(tmp_path, with_bytecode):
    """The next owner that gets the folder would be given it."""
    path = write_study(tmp_path / "study")
    _ = deploy.Study.read(path).model
    assert not (path.parent / "__pycache__").exists()


# Files that are exchanged


def test_a_model_is_exchanged_between_digest_and_run(tmp_path, marker):
    """Who can write to the folder waits until it was compared with the approval."""
    path = write_study(tmp_path / "study")
    study = deploy.Study.read(path)
    approval = deploy.Approval.of(study, "bern")
    again = deploy.Study.read(path)
    approval.check(again, "bern")
    path.with_name("model.py").write_text(evil(marker) + MODEL)
    with_model = deploy.Site(
        again, "bern", rows_of("bern"), folder=tmp_path / "bern", approved=approval, **PERMISSIVE
    )
    try:
        _ = with_model.study.model
    except (deploy.Refused, ValueError) as error:
        assert "model.py" in str(error)


def test_a_model_is_exchanged_after_it_was_approved(tmp_path, marker, monkeypatch):
    """It is another when the owner says yes, or when the site starts."""
    folder = tmp_path / "study"
    write_study(folder)
    arguments = ["deploy", "approve", "--settings", str(settings_of(folder))]
    answers = iter(["yes", "yes"])

    def agree(question):
        (folder / "model.py").write_text(evil(marker) + MODEL)
        return next(answers)

    monkeypatch.setattr("builtins.input", agree)
    status = main(arguments)
    study = deploy.Study.read(folder / "study.toml")
    if status == 0:  # of the text that the owner was shown
        approval = deploy.Approval.read(folder / "approval.json")
        with pytest.raises(deploy.Refused, match=r"model\.py"):
            deploy.Site(
                study, "bern", rows_of("bern"), folder=folder / "s", approved=approval, **PERMISSIVE
            )


# Modules


def test_a_package_is_not_imported_to_find_it(tmp_path, marker, monkeypatch):
    """The digest of a module in a package, and what an owner is shown, run its `__init__.py`."""
    package = tmp_path / "packages" / "clinic_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(evil(marker))
    (package / "targets.py").write_text(MODEL)
    monkeypatch.syspath_prepend(package.parent)
    study = make_study(posterior="clinic_models.targets:posterior", kernels={})
    digest = study.digest
    assert describe_files(study, "bern").count(digest) == 1
    assert "clinic_models" not in sys.modules


def test_a_package_of_the_working_directory_is_no_package(tmp_path, marker, monkeypatch):
    """An owner starts a command within the folder that was sent."""
    package = tmp_path / "sent" / "clinic_study"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(evil(marker))
    (package / "m.py").write_text(MODEL)
    monkeypatch.chdir(package.parent)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    study = make_study(posterior="clinic_study.m:posterior", kernels={})
    with pytest.raises((ValueError, deploy.Refused), match="clinic_study"):
        describe_files(study, "bern")


@pytest.mark.parametrize("name", ["subprocess:run", "os:system", "builtins:exec", "runpy:run_path"])
def test_a_function_of_the_standard_library_is_no_model(name):
    """It would be called with the study's settings."""
    with pytest.raises((ValueError, deploy.Refused), match=r"(?i)standard library|part of Python"):
        study = make_study(posterior=name, kernels={}, settings={"args": ["true"]})
        describe_files(study, "bern")


# Commands


def run_in(folder, *command, **environment):
    """Start Python in a folder, as its owner would; return what it said."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def console_script(folder, module):
    """Write what an installer makes of an entry point; return its path."""
    folder.mkdir()
    path = folder / f"fedmcmc-{module}"
    path.write_text(f"import sys\nfrom fedmcmc.{module} import main\nsys.exit(main())\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("how", ["the command", "python -P -m"])
def test_a_module_in_the_folder_that_was_sent_is_not_imported(how, tmp_path, marker):
    """It is called as one that the command imports."""
    folder = tmp_path / "study"
    write_study(folder)
    settings = settings_of(folder)
    for name in ("tomllib", "numpy", "jax", "grpc"):
        (folder / f"{name}.py").write_text(evil(marker))
    command = ["-P", "-m", "fedmcmc.site"]
    if how == "the command":
        command = [str(console_script(tmp_path / "bin", "site"))]
    done = run_in(folder, *command, settings.name)
    assert done.returncode == 1 and "There is no approval" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["site", "server"])
def test_a_module_is_not_started_where_the_folder_comes_first(module, tmp_path):
    """Without -P, Python imports from the working directory before anything else."""
    write_study(tmp_path / "study")
    settings = settings_of(tmp_path / "study")
    done = run_in(tmp_path / "study", "-m", f"fedmcmc.{module}", settings.name)
    assert done.returncode != 0 and f"fedmcmc-{module}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_does_not_look_in_the_working_directory(tmp_path, marker, monkeypatch):
    """Also where Python was started so that it would."""
    import fedmcmc.site

    folder = tmp_path / "sent"
    package = folder / "clinic_kit"
    write_study(folder, study=STUDY.replace("model.py:posterior", "clinic_kit.m:posterior"))
    package.mkdir()
    (package / "__init__.py").write_text(evil(marker))
    (package / "m.py").write_text(MODEL)
    settings = settings_of(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = os.umask(0o022)
    try:
        assert fedmcmc.site.main([settings.name]) == 1
        assert main(["deploy", "approve", "--yes", "--settings", settings.name]) == 1
    finally:
        os.umask(before)


# Names


ESCAPE = "\x1b[2J\x1b[8m"
NAMED = {
    "study": dict(name=f"targets{ESCAPE}"),
    "line": dict(name="targets\nThe study is harmless."),
    "right to left": dict(name="targets\u202e"),
    "site": dict(sites={f"bern{ESCAPE}": 6, "basel": 5, "chur": 4}),
    "column": dict(rows={f"x{ESCAPE}": jax.ShapeDtypeStruct((3,), jnp.float32)}),
    "kernel": dict(kernels={f"main{ESCAPE}": "tests.deploy.attacks.support:kernel"}),
    "setting": dict(settings={"kernel": "lsd", f"more{ESCAPE}": 1}),
    "place": dict(posterior=f"model{ESCAPE}.py:posterior"),
    "asked": dict(asks=(f"Langevin{ESCAPE}",)),
}


@pytest.mark.parametrize("what", NAMED)
def test_a_name_erases_what_an_owner_is_shown(what):
    """An author hides lines of the approval text on a terminal."""
    with pytest.raises(ValueError, match=r"printable|is unknown") as caught:
        make_study(**NAMED[what])
    assert str(caught.value).isprintable()


def test_a_value_of_a_setting_erases_what_an_owner_is_shown(tmp_path):
    """Values are shown, too."""
    study = STUDY + '[settings]\nlabel = "x\\u001b[2J"\n'
    try:
        text = describe_files(deploy.Study.read(write_study(tmp_path, study=study)), "bern")
    except ValueError as error:
        text = str(error)
    assert all(line.isprintable() for line in text.split("\n"))


def test_levels_erase_what_an_owner_is_shown(tmp_path):
    """And the levels of a text column."""
    column = 'arm = { dtype = "str", levels = ["a", "b\\u001b[2J"] }'
    study = STUDY.replace("[kernels]", f"{column}\n[kernels]")
    try:
        text = describe_files(deploy.Study.read(write_study(tmp_path, study=study)), "bern")
    except ValueError as error:
        text = str(error)
    assert all(line.isprintable() for line in text.split("\n"))
