"""What crosses between a site and the server: a header in JSON and a body of bytes."""

import hashlib
import json
import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"fmc2"
MOST_HEADER_BYTES = 2**20
"""A header holds words and about 60 bytes per chain; arrays are in the body."""
MOST_DEPTH = 64
"""Lists and tables within one another in a header; a kernel in words has about twenty."""
BLOCK = 512
"""Bytes that are added at a time for a checksum."""
JOIN_BYTES = 2**16
"""Largest message of a site that has not joined, and room for a header in every later one."""
STEP_ENTRIES = {"weights": float, "active": bool, "counted": bool, "marks": int, "keep": int}
"""Lists in the header of a step, and the type of what they hold."""
MOST_MARKS = 16
"""Rounds of which a server may have a site keep its states; a checkpoint has two."""
PART_BYTES = 8
"""Bytes that `pack` adds per part of a body."""
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
        """Return the frame as it crosses; `of_body` is the body's checksum, where it is known.

        Raises
        ------
        ValueError
            If the header is longer than who receives it accepts.
        """
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        if len(header) > MOST_HEADER_BYTES:
            raise ValueError(
                f"The header of a message of the kind {self.kind!r} has {len(header):,} bytes, at "
                f"most {MOST_HEADER_BYTES:,} are sent: use fewer chains."
            )
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
        # Most headers have fewer brackets than levels that are allowed.
        num_brackets = data.count(b"[", begin, end) + data.count(b"{", begin, end)
        if num_brackets > MOST_DEPTH and is_deeper(header, MOST_DEPTH):
            raise FrameError(f"The header of a message has more than {MOST_DEPTH} levels.")
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
            or not all(type(x) is int and -1 <= x < 2**63 for x in found[1:])
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


def check_step(header: dict[str, Any], num_chains: int) -> None:
    """Raise unless what the header of a step says of chains and rounds has the expected types.

    Raises
    ------
    FrameError
        Naming the entry.
    """
    for name, expected in STEP_ENTRIES.items():
        entries = header.get(name)
        if not isinstance(entries, list) or not set(map(type, entries)) <= {expected}:
            raise FrameError(
                f"The entry {name!r} of a message is not a list of {expected.__name__}."
            )
    if any(len(header[name]) != num_chains for name in ("weights", "active", "counted")):
        raise FrameError("A message does not say of every chain who takes part and what counts.")
    for name in ("marks", "keep"):
        rounds = header[name]
        if len(rounds) > MOST_MARKS or not all(0 <= x < 2**31 for x in rounds):
            raise FrameError(f"The entry {name!r} of a message does not hold a few rounds.")
    if not all(map(math.isfinite, header["weights"])):
        raise FrameError("A weight in a message is not finite.")
    last = header.get("last")
    if last is not None and (not isinstance(last, list) or list(map(type, last)) != [int, int]):
        raise FrameError("The entry 'last' of a message is not a round and a phase.")


def is_deeper(value: Any, most: int) -> bool:
    """Return whether lists and tables lie within one another more than `most` times."""
    level = [value]
    for _ in range(most + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


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


def num_bytes_of(begin: bytes) -> int:
    """Return how many bytes a message has that begins with `begin`, which holds all of its mark.

    Raises
    ------
    FrameError
        If no message begins so.
    """
    if len(begin) < _HEAD.size:
        raise FrameError(f"{len(begin)} bytes that do not begin a message")
    magic, size, _, rest = _HEAD.unpack_from(begin)
    if magic != MAGIC:
        raise FrameError(f"{len(begin)} bytes that do not begin a message")
    return int(_HEAD.size + size + rest)


def pack(*parts: bytes) -> bytes:
    """Return several parts as one body."""
    return b"".join(pieces_of(*parts))


def pieces_of(*parts: bytes) -> list[bytes]:
    """Return what `pack` puts together: before each part its length."""
    return [piece for part in parts for piece in (struct.pack(">Q", len(part)), part)]


def unpack(body: Any, num: int) -> list[Any]:
    """Return the `num` parts of a body that `pack` made; of a `memoryview` parts of the same.

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
