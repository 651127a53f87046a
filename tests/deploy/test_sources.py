"""Sources of studies: a study runs the bytes that were hashed, and runs nothing before."""

import os
import py_compile
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fedmcmc.__main__
import fedmcmc.server
import fedmcmc.site
from fedmcmc import deploy
from fedmcmc.deploy._sources import search_path
from tests.support.commands import Consortium

ROOT = Path(__file__).parents[2]
HONEST, OTHER = "WHICH = 'honest'\n", "WHICH = 'others'\n"
PACKAGE = "fedmcmc_test_hospital"


def study_of(folder, posterior="model.py:WHICH"):
    rows = jax.ShapeDtypeStruct((), jnp.float32)
    return deploy.Study("heights", posterior, {"bern": 5}, rows, folder=folder)


def which(study):
    return study.found(study.posterior)


def run_installed(tmp_path, *command):
    """Run Python in the folder `received`, with this package as if it was installed."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path / "received",
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def modules():
    """Forget what a test imports."""
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.fixture(params=["file", "module"])
def source(request, tmp_path, monkeypatch, modules):
    """Return a source in a file or in a package, and a function that makes its study."""
    study, library = tmp_path / "study", tmp_path / "library"
    study.mkdir()
    if request.param == "file":
        path = study / "model.py"
        path.write_text(HONEST)
        return path, lambda: study_of(study)
    path = library / PACKAGE / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(HONEST)
    (path.parent / "__init__.py").write_text("from . import model\n")
    monkeypatch.syspath_prepend(library)
    return path, lambda: study_of(study, f"{PACKAGE}.model:WHICH")


def test_bytecode_beside_a_source_does_not_run(source):
    path, make_study = source
    hostile = path.with_suffix(".txt")
    hostile.write_text(OTHER)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(hostile), cache_from_source(path), str(path), invalidation_mode=mode)
    names = {}
    exec(SourceFileLoader("x", str(path)).get_code("x"), names)
    assert names["WHICH"] == "others"  # what an import would run
    assert which(make_study()) == "honest"


def test_a_source_replaced_by_one_of_equal_size_and_time_runs_as_it_is_now(source):
    path, make_study = source
    py_compile.compile(str(path), cache_from_source(path))
    before, times = make_study().digest, path.stat()
    path.write_text(OTHER)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    study = make_study()
    assert study.digest != before and which(study) == "others"


def test_a_source_swapped_after_it_was_hashed_does_not_run(source):
    path, make_study = source
    study = make_study()
    digest = study.digest
    path.write_text(OTHER)
    assert which(study) == "honest"
    path.unlink()
    assert which(study) == "honest" and study.digest == digest
    assert study.to_dict()["files"] == study.to_dict()["files"]


@pytest.fixture
def library(tmp_path):
    """Return the path of an honest module in a folder that Python does not search."""
    path = tmp_path / "library" / f"{PACKAGE}.py"
    path.parent.mkdir()
    path.write_text(HONEST)
    return path


def test_a_module_that_changed_after_its_import_does_not_run_again(
    library, tmp_path, monkeypatch, modules
):
    monkeypatch.syspath_prepend(library.parent)
    study = study_of(tmp_path, f"{PACKAGE}:WHICH")
    assert which(study) == "honest"
    library.write_text(OTHER)
    changed_study = study_of(tmp_path, f"{PACKAGE}:WHICH")
    assert changed_study.digest != study.digest
    with pytest.raises(ValueError, match="has changed since this process loaded it"):
        which(changed_study)


def test_a_module_from_another_file_does_not_run(library, tmp_path, monkeypatch, modules):
    with monkeypatch.context() as patch:
        patch.syspath_prepend(library.parent)
        study = study_of(tmp_path, f"{PACKAGE}:WHICH")
        assert study.digest
    (tmp_path / library.name).write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    __import__(PACKAGE)
    with pytest.raises(ValueError, match=f"has the module {PACKAGE} from"):
        which(study)
    # The program's own import decides: the user has run that code.
    assert which(study_of(tmp_path, f"{PACKAGE}:WHICH")) == "others"


def test_a_digest_has_the_code_of_the_packages_that_a_module_is_in(source):
    path, make_study = source
    if path.parent.name != PACKAGE:
        assert set(make_study().to_dict()["files"]) == {"model.py"}
        return
    study = make_study()
    assert set(study.to_dict()["files"]) == {PACKAGE, f"{PACKAGE}.model"}
    assert study.path(PACKAGE).name == "__init__.py"
    (path.parent / "__init__.py").write_text("")
    assert make_study().digest != study.digest


@pytest.mark.parametrize("entry", ["", ".", "absolute"])
@pytest.mark.parametrize("received", ["the kit", "the study's folder"])
def test_a_package_in_a_received_folder_does_not_run(
    entry, received, tmp_path, monkeypatch, capsys, modules
):
    """Python adds the working directory to its path, where ``-m`` starts a module."""
    Consortium(tmp_path)
    marker, folder = tmp_path / "ran", tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    shutil.copy(tmp_path / "model.py", folder / "m.py")
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace("model.py:posterior", f"{PACKAGE}.m:posterior"))
    settings = tmp_path / "bern.toml"
    settings.write_text(settings.read_text().replace("approved =", "approval = 'a.json' #"))
    if received == "the kit":
        monkeypatch.chdir(tmp_path)
    entry = str(tmp_path) if entry == "absolute" else entry
    monkeypatch.setattr(sys, "path", [entry, *sys.path])
    monkeypatch.setattr("builtins.input", lambda question: "no")
    for _ in range(2):  # also after Python has cached the folder
        assert fedmcmc.__main__.main(["deploy", "approve", "--settings", str(settings)]) == 1
    errors = capsys.readouterr().err
    assert f"needs {PACKAGE}, which is not installed" in errors
    assert ("not taken from the working directory" in errors) or received != "the kit"
    assert not marker.exists()


def test_a_folder_in_pythonpath_is_searched_wherever_a_program_starts(
    tmp_path, monkeypatch, modules
):
    (tmp_path / f"{PACKAGE}.py").write_text(HONEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for value in ("", ".", os.pathsep, f"{tmp_path}-other"):
        monkeypatch.setenv("PYTHONPATH", value)  # Python makes absolute paths of it
        assert str(tmp_path) not in search_path()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/nowhere", str(tmp_path)]))
    assert which(study_of(tmp_path, f"{PACKAGE}:WHICH")) == "honest"


@pytest.mark.parametrize(
    "place", ["subprocess:run", "os:system", "sys:exit", "builtins:exec", "__main__:main"]
)
def test_a_part_of_python_is_no_model(place, tmp_path):
    with pytest.raises(ValueError, match="is a part of Python and not a model"):
        _ = study_of(tmp_path, place).digest


def test_what_is_no_python_file_is_refused(tmp_path, monkeypatch, modules):
    library, folder = tmp_path / "library", tmp_path / "study"
    folder.mkdir()
    (library / PACKAGE).mkdir(parents=True)  # a namespace package
    (library / PACKAGE / "model.py").write_text(HONEST)
    (library / f"{PACKAGE}_file.py").write_text(HONEST)
    archive = library / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(f"{PACKAGE}_zipped.py", HONEST)
    py_compile.compile(
        str(library / PACKAGE / "model.py"), str(library / f"{PACKAGE}_compiled.pyc")
    )
    monkeypatch.syspath_prepend(library)
    monkeypatch.syspath_prepend(archive)
    for name in (f"{PACKAGE}.model", f"{PACKAGE}_zipped", f"{PACKAGE}_compiled", "numpy.nothing"):
        message = "which is not a Python file" if name.startswith(PACKAGE) else "not installed"
        with pytest.raises(ValueError, match=message):
            _ = study_of(folder, f"{name}:WHICH").digest
    with pytest.raises(ValueError, match="is not a package"):
        _ = study_of(folder, f"{PACKAGE}_file.inner:WHICH").digest
    with pytest.raises(ValueError, match="not the name of a module"):
        _ = study_of(folder, ".model:WHICH").digest


def test_files_lie_within_the_studys_folder(tmp_path):
    folder = tmp_path / "study"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "model.py").write_text(HONEST)
    (folder / "inner" / "model.py").write_text(HONEST)
    (folder / "linked.py").symlink_to(folder / "inner" / "model.py")
    (folder / "escaped.py").symlink_to(tmp_path / "model.py")
    (folder / "folder.py").mkdir()
    assert which(study_of(folder, "linked.py:WHICH")) == "honest"
    for source in ("../model.py", "escaped.py", str(tmp_path / "model.py"), "inner/../linked.py"):
        with pytest.raises(ValueError, match="is outside of its folder"):
            _ = study_of(folder, f"{source}:WHICH").digest
    with pytest.raises(ValueError, match="is not a file"):
        _ = study_of(folder, "folder.py:WHICH").digest


def test_a_source_that_fails_leaves_no_module(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("raise RuntimeError('it ran')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="it ran"):
            which(study_of(tmp_path))
    assert not [finder for finder in sys.meta_path if "fedmcmc" in type(finder).__module__]


@pytest.mark.parametrize(
    ("module", "arguments", "script"),
    [
        (fedmcmc.site, ["site.toml"], "fedmcmc-site"),
        (fedmcmc.server, ["server.toml"], "fedmcmc-server"),
        (fedmcmc.__main__, ["deploy", "verify-log", "audit.log"], "fedmcmc deploy"),
    ],
    ids=["site", "server", "deploy"],
)
def test_modules_that_python_started_without_its_safe_path_are_refused(
    module, arguments, script, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["python", *arguments])
    with pytest.raises(SystemExit, match=f"run {script}, or start Python with -P"):
        runpy.run_path(module.__file__, run_name="__main__")


def test_a_command_leaves_the_working_directory_out_and_keeps_files_to_itself(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), str(tmp_path / "scripts")])
    mask = os.umask(0o022)
    try:
        deploy.isolate_process("fedmcmc-site", is_module=False)
        assert sys.path == [str(tmp_path / "scripts")]
        (tmp_path / "file").touch()
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(mask)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("script", "is not the one approved"),
        pytest.param("-P -m", "is not the one approved", marks=pytest.mark.slow),
        pytest.param("-m", "run fedmcmc-site, or start Python with -P", marks=pytest.mark.slow),
    ],
)
def test_a_site_that_starts_in_a_received_folder_runs_nothing_from_it(how, message, tmp_path):
    """The folder has a module for each that the package may import first."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["fedmcmc-site"].partition(":")
    received, marker, script = tmp_path / "received", tmp_path / "ran", tmp_path / "fedmcmc-site"
    received.mkdir()
    Consortium(received)
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    # Without -P, Python itself imports the folder's modules before the package can refuse it.
    names = () if how == "-m" else ("tomllib", "jax", "grpc", "argparse")
    for name in names:
        (received / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    settings = received / "bern.toml"
    settings.write_text(settings.read_text().replace('approved = "', 'approved = "0'))
    command = [str(script)] if how == "script" else [*how.split(), "fedmcmc.site"]
    process = run_installed(tmp_path, *command, settings.name)
    assert process.returncode == 1 and message in process.stderr, process.stderr
    assert "Traceback" not in process.stderr
    assert not marker.exists()
