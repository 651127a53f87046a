"""Secret of a site, and the random keys of its clients.

The secret never leaves the site. A key depends on the secret and on everything that a step depends
on. So the same question gets the same numbers, also after a crash, and another question gets
independent numbers.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmcmc.deploy._frames import Refused, digest_of
from fedmcmc.random import secret_words
from fedmcmc.storage import write_atomically

SECRET = "secret"
"""Name of the file in a site's folder."""
SECRET_BYTES = 32
DOMAIN = b"fedmcmc/client-key/1"
"""Start of all transcripts from which keys are made."""


class SiteSecret:
    """Secret of a site that makes its clients' random keys.

    Parameters
    ----------
    folder
        Folder of the site's state. The secret is a file in it that only its user can read, made
        when a key is needed for the first time.
    context
        Inputs of all keys: the study's digest, the site's name and a digest of its rows.
    """

    def __init__(self, folder: Path, *context: bytes) -> None:
        self._path, self._context = folder / SECRET, context
        self._secret = b""

    def keys(self, question: bytes, chains: Sequence[tuple[bytes, ...]]) -> np.ndarray:
        """Return a key per chain for one question, words ``[num_chains, 8]`` of `random.CHACHA`.

        `question` is a digest of the parts that all chains share: run, round and phase, the
        message, and the origin of the client's state. `chains` contains the remaining parts of the
        question per chain. Raise `Refused` if the secret's file is damaged.
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
    """Return the secret in a file; make the file if it does not exist."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = os.urandom(SECRET_BYTES)
        write_atomically(path, lambda file: file.write(secret), private=True)
    if len(secret) != SECRET_BYTES:
        raise Refused(
            f"The file {path.name!r} in the site's folder has {len(secret)} bytes, a site's secret "
            f"has {SECRET_BYTES}: its owner must bring it back from a backup, or delete it. The "
            "site then makes a new one, and draws other numbers if a question is repeated."
        )
    return secret
