"""Python sources of a study: each file is read once, and its bytes are hashed and run.

No bytecode cache is used. So the code that runs has the approved SHA-256, even if files change on
the disk afterwards.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from fedmcmc.deploy._frames import printable

PACKAGE_FILE = "__init__.py"
"""File with the code of a package itself."""
PART_OF_PYTHON = sys.stdlib_module_names | {*sys.builtin_module_names, "__main__"}
"""Modules that no study may name as its source."""


class Source(NamedTuple):
    """Source that was read.

    Attributes
    ----------
    module
        Name of the module that the source becomes.
    path
        File that was read.
    data
        Bytes of the file.
    """

    module: str
    path: Path
    data: bytes

    @property
    def text(self) -> str:
        """Bytes as UTF-8 text, the code that runs whatever encoding a comment names.

        A source with control or invisible characters raises `ValueError`, because an editor may
        show something else.
        """
        expected = "sources are UTF-8 text of printable characters, so that owners see all of it"
        try:
            text = self.data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path} is not UTF-8 text ({error}): {expected}.") from None
        for number, line in enumerate(text.split("\n"), 1):
            for char in line.replace("\t", ""):
                if not char.isprintable():
                    raise ValueError(
                        f"Line {number} of {self.path} has the character {printable(char)}: "
                        f"{expected}. Replace it, in strings by its escape."
                    )
        return text

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes, as ``sha256sum`` prints it."""
        return hashlib.sha256(self.data).hexdigest()


def list_sources(references: Iterable[str]) -> list[str]:
    """Return the sources of ``"file.py:name"`` and ``"package.module:name"``.

    The packages of a module are included, since their code runs before the module.
    """
    sources = set()
    for reference in references:
        source = reference.partition(":")[0]
        parts = source.split(".")
        dotted = {".".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
        sources |= {source} if is_file(source) else dotted
    return sorted(sources)


def is_file(source: str) -> bool:
    """Return true if a source is a file of the study, not a package."""
    return source.endswith(".py")


def read_source(study: str, folder: str | Path, source: str) -> Source:
    """Read a source without running it; raise `ValueError` if it cannot be read.

    Parameters
    ----------
    study
        Name of the study, for messages.
    folder
        Folder of the study's files.
    source
        ``"file.py"``, relative to `folder` and within it, also after symbolic links are followed;
        or ``"package.module"``, found as Python does, except in the working directory and in
        `folder` (see `search_path`). For a module that is already imported, its file is read.
    """
    find = _find_file if is_file(source) else _find_module
    path = find(study, Path(folder), source)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable_error(study, path, error) from error
    module = f"fedmcmc_study_{hashlib.sha256(data).hexdigest()}" if is_file(source) else source
    read = Source(module, path, data)
    _ = read.text  # raises before anybody approves what cannot be read
    return read


def search_path(*folders: str | Path) -> list[str]:
    """Return the entries of `sys.path` in which packages are searched.

    Relative entries, the working directory (which ``python -m`` and interactive sessions add) and
    `folders` are excluded, unless ``PYTHONPATH`` contains their absolute path.
    """
    python_path = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    excluded = {os.path.realpath(folder) for folder in (os.curdir, *folders)}
    excluded -= {os.path.realpath(entry) for entry in python_path}
    return [
        entry
        for entry in sys.path
        if os.path.isabs(entry) and os.path.realpath(entry) not in excluded
    ]


def load_source(sources: Mapping[str, Source], name: str) -> ModuleType:
    """Return the module of the study's source `name`; run its bytes at most once per process.

    Raise `ValueError` if the source is not valid Python, or if the process has a module of this
    name from other code.
    """
    source, finder = sources[name], _Finder(sources.values())
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(source.module)
    except SyntaxError as error:
        where = f"{error.filename or source.path}, line {error.lineno}"
        raise ValueError(f"The source {name} is not valid Python: {where}: {error.msg}.") from error
    finally:
        sys.meta_path.remove(finder)
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if isinstance(loader, _Loader):
        if loader.source.data == source.data:
            return module
        raise ValueError(
            f"{source.path} has changed since this process loaded it as {name}: start Python again."
        )
    origin = getattr(module, "__file__", None)
    if origin is None or not os.path.samefile(origin, source.path):
        raise ValueError(
            f"This process has the module {name} from {origin}, and the study's is "
            f"{source.path}: start Python again."
        )
    return module


class _Loader(InspectLoader):
    """Loader of a module from the bytes that were read."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def get_source(self, fullname: str) -> str:
        return self.source.text

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.source.text, self.source.path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    """Finder of the modules of a study's sources."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = {source.module: source for source in sources}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.sources.get(fullname)
        if source is None:
            return None
        folders = [str(source.path.parent)] if source.path.name == PACKAGE_FILE else None
        return spec_from_file_location(
            fullname, source.path, loader=_Loader(source), submodule_search_locations=folders
        )


def _find_file(study: str, folder: Path, source: str) -> Path:
    path, relative = folder / source, Path(source)
    try:
        within = path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # before Python 3.13, circular links: RuntimeError
        raise _unreadable_error(study, path, error) from error
    if relative.is_absolute() or ".." in relative.parts or not within:
        raise ValueError(f"{path} of the study {study!r} is outside of its folder.")
    if not path.is_file():
        raise ValueError(f"The study {study!r} needs {path}, which is not a file.")
    return path


def _unreadable_error(study: str, path: Path, error: Exception) -> ValueError:
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"The study {study!r} needs {path}, which cannot be read ({reason}).")


def _find_module(study: str, folder: Path, name: str) -> Path:
    """Return the file of a module without importing anything."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(f"The study {study!r} needs {name!r}, which is not the name of a module.")
    if parts[0] in PART_OF_PYTHON:
        raise ValueError(
            f"The study {study!r} names {name!r}, which is a part of Python and not a model: name "
            "a file of the study, or a module of an installed package."
        )
    importlib.invalidate_caches()  # a package may have been installed just now
    search = search_path(folder)
    for depth, part in enumerate(parts, 1):
        dotted = ".".join(parts[:depth])
        origin = _find_origin(dotted, search)
        if origin is None and depth == 1 and _find_origin(part, [os.getcwd(), str(folder)]):
            raise ValueError(
                f"The study {study!r} needs {dotted}, which is not installed; packages are not "
                "taken from the working directory or from the study's folder: install it, add its "
                "folder to PYTHONPATH (absolute), or name a file ('file.py:name')."
            )
        if origin is None:
            raise ValueError(f"The study {study!r} needs {dotted}, which is not installed.")
        path = Path(origin)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(
                f"The study {study!r} needs {dotted}, which is not a Python file: namespace "
                "packages, zip files, compiled modules and bytecode are not run."
            )
        if depth < len(parts) and path.name != PACKAGE_FILE:
            raise ValueError(f"The study {study!r} needs {name}, and {dotted} is not a package.")
        search = [str(path.parent)]
    return path


def _find_origin(dotted: str, search: Sequence[str]) -> str | None:
    """Return the file of a module, ``"-"`` if it has none, ``None`` if there is no module."""
    module = sys.modules.get(dotted)
    if module is not None:
        return getattr(module, "__file__", None) or "-"
    spec = PathFinder.find_spec(dotted.rpartition(".")[2], search)
    if spec is None:
        return None
    return spec.origin if isinstance(spec.loader, SourceFileLoader) and spec.origin else "-"
