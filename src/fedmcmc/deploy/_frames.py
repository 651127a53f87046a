"""Messages between a site and the server: a header in JSON and a body of bytes."""

import hashlib
import json
import math
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from fedmcmc import wire
from fedmcmc.types import ArrayTree

MAGIC = b"fmc2"
MAX_HEADER_BYTES = 2**20
"""Largest header. It holds words and about 60 bytes per chain; arrays are in the body."""
MAX_DEPTH = 64
"""Largest nesting of lists and tables in a header; a kernel in words has about twenty levels."""
BLOCK = 512
"""Bytes per block of a checksum."""
JOIN_BYTES = 2**16
"""Largest message of a site that has not joined, and allowance for the header of later ones."""
STEP_ENTRIES = {"weights": float, "active": bool, "counted": bool, "marks": int, "keep": int}
"""Lists in the header of a step, and the type of their entries."""
MAX_MARKS = 16
"""Largest number of rounds whose states a site stores for a server; a checkpoint has two."""
PART_BYTES = 8
"""Bytes that `pack` adds per part of a body."""
MAX_REASON_LENGTH = 2000
"""Characters of the other party's reason that are sent, logged or shown."""
_HEAD = struct.Struct(">4sIIQ")
"""Magic bytes, length of the header, checksum, length of the body."""


class FrameError(ValueError):
    """Bytes that are not the expected message."""


class Refused(RuntimeError):
    """Request that a site or the server declines with a reason; nothing is computed."""


class Tag(NamedTuple):
    """Exchange of a run to which a message belongs.

    `attempt` identifies the server's process: after a restart a server repeats rounds that it has
    not saved.
    """

    run: str
    round: int
    phase: int
    attempt: int


class Frame(NamedTuple):
    """One message: its kind, its header, and its arrays as bytes."""

    kind: str
    header: dict[str, Any]
    body: bytes = b""

    def to_bytes(self, body_checksum: int | None = None) -> bytes:
        """Return the encoded message; `body_checksum` saves computing the body's checksum.

        Raises
        ------
        ValueError
            If the header is longer than a receiver accepts.
        """
        header = json.dumps({"kind": self.kind, **self.header}).encode()
        if len(header) > MAX_HEADER_BYTES:
            raise ValueError(
                f"The header of a message of the kind {self.kind!r} has {len(header):,} bytes, "
                f"more than the {MAX_HEADER_BYTES:,} that are allowed: use fewer chains."
            )
        body_checksum = checksum(self.body) if body_checksum is None else body_checksum
        head = _HEAD.pack(MAGIC, len(header), zlib.crc32(header, body_checksum), len(self.body))
        return b"".join((head, header, self.body))

    @classmethod
    def parse(cls, data: bytes) -> "Frame":
        """Decode a message.

        Raises
        ------
        FrameError
            If the bytes are not a message.
        """
        if len(data) < _HEAD.size:
            raise FrameError(f"{len(data)} bytes are too few for a message.")
        magic, size, expected, body_size = _HEAD.unpack_from(data)
        is_complete = _HEAD.size + size + body_size == len(data)
        if magic != MAGIC or size > MAX_HEADER_BYTES or not is_complete:
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
        # Most headers have fewer brackets than allowed levels, which is faster to count.
        num_brackets = data.count(b"[", begin, end) + data.count(b"{", begin, end)
        if num_brackets > MAX_DEPTH and is_deeper(header, MAX_DEPTH):
            raise FrameError(f"The header of a message has more than {MAX_DEPTH} levels.")
        if not isinstance(kind, str):
            raise FrameError("The header of a message has no kind.")
        return cls(kind, header, body)

    @property
    def tag(self) -> Tag:
        """The tag in the header; a header without a tag raises `FrameError`."""
        entry = self.header.get("tag")
        if (
            not isinstance(entry, list)
            or len(entry) != len(Tag._fields)
            or not isinstance(entry[0], str)
            or not all(type(x) is int and -1 <= x < 2**63 for x in entry[1:])
        ):
            raise FrameError(f"A message of the kind {self.kind!r} has no tag.")
        return Tag(*entry)


def printable(text: object, max_length: int | None = 500) -> str:
    r"""Return another party's text as one line that is safe in a log or a terminal.

    Control characters, line breaks, terminal escapes and invisible characters (`str.isprintable`)
    are escaped, and text of more than `max_length` characters is cut.

    Examples
    --------
    >>> printable("row 3" + chr(27) + "[2K")
    'row 3\\x1b[2K'
    """
    text = str(text)
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in (text if max_length is None else text[: max_length + 1])
    )
    return shown if max_length is None or len(shown) <= max_length else f"{shown[:max_length]}…"


def check_step(header: dict[str, Any], num_chains: int) -> None:
    """Raise `FrameError` unless the entries of a step's header have the expected types."""
    for name, expected in STEP_ENTRIES.items():
        entries = header.get(name)
        if not isinstance(entries, list) or not set(map(type, entries)) <= {expected}:
            raise FrameError(
                f"The entry {name!r} of a message is not a list of {expected.__name__}."
            )
    if any(len(header[name]) != num_chains for name in ("weights", "active", "counted")):
        raise FrameError("A message does not state for every chain who takes part and what counts.")
    for name in ("marks", "keep"):
        rounds = header[name]
        if len(rounds) > MAX_MARKS or not all(0 <= x < 2**31 for x in rounds):
            raise FrameError(f"The entry {name!r} of a message is not a short list of rounds.")
    if not all(map(math.isfinite, header["weights"])):
        raise FrameError("A weight in a message is not finite.")
    answer = header.get("last")
    is_answer = isinstance(answer, list) and list(map(type, answer)) == [int, int]
    if answer is not None and not is_answer:
        raise FrameError("The entry 'last' of a message is not a round and a phase.")


def is_deeper(value: object, max_depth: int) -> bool:
    """Return true if lists and tables are nested in more than `max_depth` levels."""
    level = [value]
    for _ in range(max_depth + 1):
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
    """Return the CRC-32 of the exclusive or of a body's blocks, and of the remaining bytes.

    It detects accidental damage in a tenth of the time of `zlib.crc32` of the whole body. The
    transport protects from forged messages.
    """
    size = len(body) // BLOCK * BLOCK
    blocks = np.frombuffer(body, np.uint64, size // 8).reshape(-1, BLOCK // 8)
    remaining = memoryview(body)[size:]
    return zlib.crc32(remaining, zlib.crc32(np.bitwise_xor.reduce(blocks, axis=0)))


def digest_of(*parts: bytes) -> str:
    """Return the SHA-256 of all parts, each after its length, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in pieces_of(*parts):
        digest.update(piece)
    return digest.hexdigest()


def num_bytes_of(begin: bytes) -> int:
    """Return the length of a message; raise `FrameError` if the bytes do not begin a message."""
    if len(begin) < _HEAD.size or not begin.startswith(MAGIC):
        raise FrameError(f"{len(begin)} bytes that do not begin a message")
    _, size, _, body_size = _HEAD.unpack_from(begin)
    return int(_HEAD.size + size + body_size)


def pack(*parts: bytes) -> bytes:
    """Return several parts as one body."""
    return b"".join(pieces_of(*parts))


def pieces_of(*parts: bytes) -> list[bytes]:
    """Return the pieces that `pack` joins: the length of each part before the part."""
    return [piece for part in parts for piece in (struct.pack(">Q", len(part)), part)]


def unpack(body: Any, num: int) -> list[Any]:
    """Return the parts of a body; raise `FrameError` unless it has exactly `num` parts.

    Parts of a `memoryview` are not copied.
    """
    parts, offset = [], 0
    for _ in range(num):
        if offset + PART_BYTES > len(body):
            raise FrameError("A message is cut short.")
        (size,) = struct.unpack_from(">Q", body, offset)
        offset += PART_BYTES
        if size > len(body) - offset:
            raise FrameError("A message is cut short.")
        parts.append(body[offset : offset + size])
        offset += size
    if offset != len(body):
        raise FrameError("A message is longer than its parts.")
    return parts


def decode(data: bytes, like: ArrayTree) -> ArrayTree:
    """Return the arrays in a part of a body; raise `FrameError` if their shapes differ."""
    try:
        return wire.decode(data, like)
    except ValueError as error:
        raise FrameError(str(error)) from None
