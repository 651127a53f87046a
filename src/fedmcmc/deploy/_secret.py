"""A site's secret, and the keys that its clients draw from.

The secret never leaves the site. A key depends on it and on all that a step depends on, so the same
question gets the same numbers, also after a crash, and another question gets independent ones.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmcmc.deploy._frames import Refused, digest_of
from fedmcmc.random import secret_words

SECRET = "secret"
"""Name of the file in a site's folder."""
SECRET_BYTES = 32
DOMAIN = b"fedmcmc/client-key/1"


class SiteSecret:
    """Secret of a site, from which its clients' random keys are made.

    Parameters
    ----------
    folder
        Folder of the site's state, in which the secret is a file that only its user can read. The
        file is made when a key is needed for the first time.
    context
        What all keys depend on: the study, the site and a digest of its rows.
    """

    def __init__(self, folder: Path, *context: bytes) -> None:
        self._path, self._context = folder / SECRET, context
        self._secret = b""

    def keys(self, question: bytes, chains: Sequence[tuple[bytes, ...]]) -> np.ndarray:
        """Return a key per chain for one question, words ``[num_chains, 8]`` of `random.CHACHA`.

        Parameters
        ----------
        question
            What is the same in all chains: the run, the round and the phase.
        chains
            What is asked of each chain, and what its client has kept.

        Raises
        ------
        Refused
            If the secret's file is damaged.
        """
        if not self._secret:
            self._secret = _read_or_make(self._path)
        return secret_words(
            [self._digest(question, index, parts) for index, parts in enumerate(chains)]
        )

    def _digest(self, question: bytes, chain: int, parts: tuple[bytes, ...]) -> bytes:
        transcript = digest_of(DOMAIN, *self._context, question, str(chain).encode(), *parts)
        return hmac.digest(self._secret, bytes.fromhex(transcript), hashlib.sha256)


def _read_or_make(path: Path) -> bytes:
    """Return the secret in a file, which is made, and on the disk, if it does not exist."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = os.urandom(SECRET_BYTES)
        _write_new(path, secret)
    if len(secret) != SECRET_BYTES:
        raise Refused(
            f"The file {path.name!r} in the site's folder has {len(secret)} bytes, a site's secret "
            f"has {SECRET_BYTES}: its owner must bring it back from a backup, or delete it. The "
            "site then makes a new one, and draws other numbers if a question is repeated."
        )
    return secret


def _write_new(path: Path, secret: bytes) -> None:
    """Write a file that only its user can read, with its bytes on the disk before its name."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)  # of a process that was killed here
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, secret)
        os.fsync(file)
    finally:
        os.close(file)
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
