"""Masks that cancel in a sum of all sites' words.

In every pair of sites the site with the lower number adds a stream of words and the other subtracts
it, modulo 2^64. A masked message is uniformly random to anyone who lacks one of its masks, and the
sum of all masked messages equals the sum of the words.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedmcmc.deploy._session import DIGEST_BYTES, Session

LAST_EXCHANGE = 2**16 - 1
"""Exchange of the last phase of a round; earlier phases have 0, 1, ..."""
SETUP_EXCHANGE = 2**15
"""Exchange of the first phase of the set-up; the set-up belongs to round 0."""
WORD_BYTES = 8
HEADER = struct.Struct("<32sQHHIQ")


class MaskTag(NamedTuple):
    """Number of a message within a session.

    Attributes
    ----------
    round
        Round, below ``2**64``.
    attempt
        Number of repetitions of a lost round, below ``2**16``.
    exchange
        Number of the phase in the round, below ``2**16``; see `of_phase`.
    """

    round: int
    attempt: int
    exchange: int

    @classmethod
    def of_phase(
        cls, round_: int, attempt: int, number: int, num_phases: int, *, setup: bool = False
    ) -> "MaskTag":
        """Return the tag of phase `number` of a round, or of the set-up before the first round."""
        if setup:
            return cls(0, attempt, SETUP_EXCHANGE + number)
        return cls(round_, attempt, LAST_EXCHANGE if number == num_phases - 1 else number)

    @property
    def place(self) -> tuple[int, int]:
        """Position of the message in the order of a session, without its attempt."""
        is_setup = SETUP_EXCHANGE <= self.exchange < LAST_EXCHANGE
        return (-1 if is_setup else self.round, self.exchange)


def stream(key: bytes, tag: MaskTag, num_words: int) -> np.ndarray:
    """Return the ChaCha20 key stream of a pair's key and a tag, ``[num_words]`` uint64."""
    nonce = bytes(4) + struct.pack("<QHH", tag.round, tag.attempt, tag.exchange)
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(WORD_BYTES * num_words)), "<u8").astype(np.uint64)


def mask(words: np.ndarray, session: Session, tag: MaskTag) -> np.ndarray:
    """Return a site's words under its masks of this tag.

    Never mask two different vectors with one session and tag: the difference of the masked vectors
    would be the difference of the vectors. `SiteRules` prevents this.

    Parameters
    ----------
    words
        Words ``[num_words]`` uint64 from `fedmcmc.compression.host_words`.
    session
        Session of the site.
    tag
        Tag of the message.

    Raises
    ------
    ValueError
        If `words` is not a vector of uint64.
    """
    _check(words)
    masked = words.copy()
    for peer, key in session.pair_keys.items():
        pad = stream(key, tag, words.size)
        if peer > session.index:
            masked += pad
        else:
            masked -= pad
    return masked


def unmask(masked: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of all sites' words from their masked words.

    `fedmcmc.compression.limbs_of_host` gives the sum the shapes that ``server_step`` needs. This
    function cannot detect that a site is missing: the sum is then uniformly random.

    Raises
    ------
    ValueError
        If the masked words are not vectors of uint64 with one length.
    """
    if not masked or len({words.shape for words in masked}) != 1:
        raise ValueError("A sum needs the masked words of all sites, of one length.")
    total = np.zeros_like(masked[0])
    for words in masked:
        _check(words)
        total += words
    return total


def masked_frame(session: Session, tag: MaskTag, masked: np.ndarray) -> bytes:
    """Return a site's message: session, tag, number of the site, number of words, and the words.

    The transport authenticates the message.
    """
    head = (session.identifier, tag.round, tag.attempt, tag.exchange, session.index, masked.size)
    return HEADER.pack(*head) + masked.astype("<u8").tobytes()


def masked_bytes(num_words: int) -> int:
    """Return the length of a frame with `num_words` words."""
    return HEADER.size + WORD_BYTES * num_words


def read_masked(data: bytes) -> tuple[bytes, MaskTag, int, np.ndarray]:
    """Return a frame's session, tag, site and masked words.

    Raises
    ------
    ValueError
        If `data` is not such a frame.
    """
    if len(data) < HEADER.size:
        raise ValueError(f"A frame of masked words has {HEADER.size} bytes or more.")
    identifier, round_, attempt, exchange, index, size = HEADER.unpack_from(data)
    if len(data) != masked_bytes(size):
        raise ValueError(f"A frame of {size} masked words does not have {len(data)} bytes.")
    words = np.frombuffer(data, "<u8", offset=HEADER.size).astype(np.uint64)
    assert len(identifier) == DIGEST_BYTES
    return identifier, MaskTag(round_, attempt, exchange), index, words


def _check(words: np.ndarray) -> None:
    if words.dtype != np.uint64 or words.ndim != 1:
        raise ValueError(
            f"Masks are for a vector of uint64, got {words.dtype} {list(words.shape)}."
        )
