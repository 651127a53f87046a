"""Files that only their owner may read: keys, states, masks, settings with a seed, draws."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NEW_STUDY_ADVICE = (
    "Bring back the file, or agree with the other owners on a new study, of another name, and give "
    "its site another folder."
)
"""Remedy for a site whose file of counts or masks is lost."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permissions of all users except the owner."""


def private_folder(path: str | Path) -> Path:
    """Make a folder with mode 0700 if it is missing; remove others' permissions from its contents.

    Symbolic links and files of other users are not changed.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    close_to_others(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            close_to_others(Path(parent, name))
    return folder


def close_to_others(path: Path) -> None:
    """Remove the permissions of group and others from a file or a folder of this user."""
    if os.name != "posix" or path.is_symlink():
        return
    try:
        status = path.stat()
        if status.st_mode & OTHERS and status.st_uid == os.getuid():
            path.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS)
    except FileNotFoundError:
        return  # another process has removed it


def open_private(path: Path) -> IO[bytes]:
    """Open a new file of mode 0600 for writing and reading, replacing one with this name."""
    path.unlink(missing_ok=True)
    return open(path, "w+b", opener=lambda name, flags: os.open(name, flags, 0o600))


def check_private(path: str | Path) -> None:
    """Raise `ValueError` if users other than its owner have permissions for a private key."""
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if os.name == "posix" and mode & OTHERS:
        raise ValueError(
            f"The private key {path} is open to other users of this machine (mode {mode:04o}, "
            f"expected 0600): run 'chmod 600 {path}', and make a new key if somebody may have "
            "copied it."
        )


@contextmanager
def private_files(*paths: Path) -> Iterator[None]:
    """Close files and folders to other users; within the context, close new ones as well.

    New files get mode 0600 and new folders 0700, in the whole process.
    """
    for path in paths:
        private_folder(path) if path.is_dir() else close_to_others(path)
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)
