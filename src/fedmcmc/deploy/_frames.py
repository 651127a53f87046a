"""What crosses between a site and the server: a header in JSON and a body of bytes."""

import hashlib
import json
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"fmc2"
MOST_HEADER_BYTES = 2**24
"""A header holds words and few numbers; arrays are in the body."""
BLOCK = 512
"""Bytes that are added at a time for a checksum."""
_HEAD = struct.Struct(">4sIIQ")
"""Mark, bytes of the header, checksum, bytes of the body."""


class FrameError(ValueError):
    """Bytes that are no message, or not one that is expected."""


class Refused(RuntimeError):
    """A site or the server declines, with a reason; nothing is computed."""


class Tag(NamedTuple):
    """Which exchange of which run a message belongs to.

    `attempt` tells the processes of one run apart: a server that was started again repeats rounds
    that it has not saved.
    """

    run: str
    round: int
    phase: int
    attempt: int


class Frame(NamedTuple):
    """One message: what it is, its header, and its arrays as bytes."""

    kind: str
    header: dict[str, Any]
    body: bytes = b""

    def to_bytes(self, of_body: int | None = None) -> bytes:
        """Return the frame as it crosses; `of_body` is the body's checksum, where it is known."""
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        of_body = checksum(self.body) if of_body is None else of_body
        head = _HEAD.pack(MAGIC, len(header), zlib.crc32(header, of_body), len(self.body))
        return b"".join((head, header, self.body))

    @classmethod
    def parse(cls, data: bytes) -> "Frame":
        """Return the frame in some bytes.

        Raises
        ------
        FrameError
            If they are none.
        """
        if len(data) < _HEAD.size:
            raise FrameError(f"{len(data)} bytes are no message: they are too few.")
        magic, size, expected, rest = _HEAD.unpack_from(data)
        whole = _HEAD.size + size + rest == len(data)
        if magic != MAGIC or size > MOST_HEADER_BYTES or not whole:
            raise FrameError("The bytes received do not begin as a message does.")
        begin, end = _HEAD.size, _HEAD.size + size
        body = data[end:]
        if zlib.crc32(data[begin:end], checksum(body)) != expected:
            raise FrameError("A message was damaged on its way.")
        try:
            header = json.loads(data[begin:end])
            kind = header.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise FrameError("The header of a message is not readable.") from None
        if not isinstance(kind, str):
            raise FrameError("The header of a message does not say what it is.")
        return cls(kind, header, body)

    @property
    def tag(self) -> Tag:
        """The tag in the header.

        Raises
        ------
        FrameError
            If there is none.
        """
        found = self.header.get("tag")
        if (
            not isinstance(found, list)
            or len(found) != len(Tag._fields)
            or not isinstance(found[0], str)
            or not all(type(x) is int for x in found[1:])
        ):
            raise FrameError(f"A message of the kind {self.kind!r} has no tag.")
        return Tag(*found)


def printable(text: Any, most: int | None = 500) -> str:
    r"""Return text of another party as one line that a log or a terminal can show.

    Control characters, line breaks, terminal escapes and invisible characters (`str.isprintable`)
    are escaped, and text of more than `most` characters is cut.

    Examples
    --------
    >>> printable("row 3" + chr(27) + "[2K")
    'row 3\\x1b[2K'
    """
    text = str(text)
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in (text if most is None else text[: most + 1])
    )
    return shown if most is None or len(shown) <= most else f"{shown[:most]}…"


def checksum(body: bytes) -> int:
    """Return the checksum of a body: of its blocks added without carry, and of what is left.

    It finds damage, as `zlib.crc32` of the whole does, in a tenth of its time; who means to deceive
    is kept out by the transport.
    """
    size = len(body) // BLOCK * BLOCK
    blocks = np.frombuffer(body, np.uint64, size // 8).reshape(-1, BLOCK // 8)
    rest = memoryview(body)[size:]
    return zlib.crc32(rest, zlib.crc32(np.bitwise_xor.reduce(blocks, axis=0)))


def digest_of(*parts: bytes) -> str:
    """Return the SHA-256 of some bytes, each with its length, in hexadecimal."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(struct.pack(">Q", len(part)))
        whole.update(part)
    return whole.hexdigest()


def pack(*parts: bytes) -> bytes:
    """Return several parts as one body."""
    return b"".join(struct.pack(">Q", len(part)) + part for part in parts)


def unpack(body: bytes, num: int) -> list[bytes]:
    """Return the `num` parts of a body that `pack` made.

    Raises
    ------
    FrameError
        If it has not exactly so many.
    """
    parts, at = [], 0
    for _ in range(num):
        if at + 8 > len(body):
            raise FrameError("A message is cut short.")
        (size,) = struct.unpack_from(">Q", body, at)
        at += 8
        if size > len(body) - at:
            raise FrameError("A message is cut short.")
        parts.append(body[at : at + size])
        at += size
    if at != len(body):
        raise FrameError("A message is longer than what it holds.")
    return parts
