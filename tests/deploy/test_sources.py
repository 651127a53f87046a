"""Sources of studies: what was hashed is what runs, and nothing of a study runs before."""

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


@pytest.fixture
def modules():
    """Forget what a test imports."""
    yield
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]


@pytest.fixture(params=["file", "module"])
def written(request, tmp_path, monkeypatch, modules):
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


def test_bytecode_beside_a_source_does_not_run(written):
    path, study_of_it = written
    other = path.with_suffix(".txt")
    other.write_text(OTHER)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), cache_from_source(path), str(path), invalidation_mode=mode)
    names = {}
    exec(SourceFileLoader("x", str(path)).get_code("x"), names)
    assert names["WHICH"] == "others"  # what an import would run
    assert which(study_of_it()) == "honest"


def test_a_source_replaced_by_one_of_equal_size_and_time_runs_as_it_is_now(written):
    path, study_of_it = written
    py_compile.compile(str(path), cache_from_source(path))
    before, times = study_of_it().digest, path.stat()
    path.write_text(OTHER)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    study = study_of_it()
    assert study.digest != before and which(study) == "others"


def test_a_source_swapped_after_it_was_hashed_does_not_run(written):
    path, study_of_it = written
    study = study_of_it()
    digest = study.digest
    path.write_text(OTHER)
    assert which(study) == "honest"
    path.unlink()
    assert which(study) == "honest" and study.digest == digest
    assert study.to_dict()["files"] == study.to_dict()["files"]


def test_a_module_that_changed_since_it_was_loaded_is_not_run_again(tmp_path, monkeypatch, modules):
    path = tmp_path / "library" / f"{PACKAGE}.py"
    path.parent.mkdir()
    path.write_text(HONEST)
    monkeypatch.syspath_prepend(path.parent)
    (tmp_path / "study").mkdir()
    first = study_of(tmp_path / "study", f"{PACKAGE}:WHICH")
    assert which(first) == "honest"
    path.write_text(OTHER)
    second = study_of(tmp_path / "study", f"{PACKAGE}:WHICH")
    assert second.digest != first.digest
    with pytest.raises(ValueError, match="has changed since this process loaded it"):
        which(second)


def test_a_module_from_another_file_is_not_taken_for_the_one_that_was_hashed(
    tmp_path, monkeypatch, modules
):
    path = tmp_path / "library" / f"{PACKAGE}.py"
    path.parent.mkdir()
    path.write_text(HONEST)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(path.parent)
        study = study_of(tmp_path, f"{PACKAGE}:WHICH")
        assert study.digest
    (tmp_path / path.name).write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    __import__(PACKAGE)
    with pytest.raises(ValueError, match=f"has the module {PACKAGE} from"):
        which(study)
    # The program's own import decides: the user has run that code.
    assert which(study_of(tmp_path, f"{PACKAGE}:WHICH")) == "others"


def test_a_digest_has_the_code_of_the_packages_that_a_module_is_in(written):
    path, study_of_it = written
    if path.parent.name != PACKAGE:
        assert set(study_of_it().to_dict()["files"]) == {"model.py"}
        return
    study = study_of_it()
    assert set(study.to_dict()["files"]) == {PACKAGE, f"{PACKAGE}.model"}
    assert study.path(PACKAGE).name == "__init__.py"
    (path.parent / "__init__.py").write_text("")
    assert study_of_it().digest != study.digest


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
    for _ in range(2):  # also once its folder was seen
        assert fedmcmc.__main__.main(["deploy", "approve", "--settings", str(settings)]) == 1
    told = capsys.readouterr().err
    assert f"needs {PACKAGE}, which is not installed" in told
    assert ("not taken from the working directory" in told) or received != "the kit"
    assert not marker.exists()


def test_a_folder_in_pythonpath_is_searched_wherever_a_program_starts(
    tmp_path, monkeypatch, modules
):
    (tmp_path / f"{PACKAGE}.py").write_text(HONEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for named in ("", ".", os.pathsep, f"{tmp_path}-other"):
        monkeypatch.setenv("PYTHONPATH", named)  # of which Python makes absolute paths
        assert str(tmp_path) not in search_path()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/nowhere", str(tmp_path)]))
    assert which(study_of(tmp_path, f"{PACKAGE}:WHICH")) == "honest"


@pytest.mark.parametrize(
    "place", ["subprocess:run", "os.path:join", "sys:exit", "builtins:exec", "__main__:main"]
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


def test_a_site_that_is_started_in_a_received_folder_runs_nothing_from_it(tmp_path):
    """By its entry point, with a module of the folder for each that the package may import."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["fedmcmc-site"].partition(":")
    (tmp_path / "received").mkdir()
    Consortium(tmp_path / "received")
    script = tmp_path / "bin" / "fedmcmc-site"
    script.parent.mkdir()
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    marker = tmp_path / "ran"
    for name in ("tomllib", "jax", "grpc", "argparse"):
        path = tmp_path / "received" / f"{name}.py"
        path.write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    settings = tmp_path / "received" / "bern.toml"
    settings.write_text(settings.read_text().replace('approved = "', 'approved = "0'))
    done = subprocess.run(
        [sys.executable, str(script), "bern.toml"],
        cwd=tmp_path / "received",
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "is not the one approved" in done.stderr, done.stderr
    assert not marker.exists()
