"""Checks of names in a study: all parties read them, and some become folders and certificates."""

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from fedmcmc.deploy._frames import printable

MAX_BYTES = 64
"""Longest common name of a certificate, in bytes of UTF-8."""


def check_printable(names: Mapping[str, Iterable[Any]]) -> None:
    """Raise `ValueError` unless names are printable text, which cannot manipulate a terminal.

    The keys of `names` are the kinds of the names, such as ``"a site"``.
    """
    for kind, group in names.items():
        for name in group:
            if not isinstance(name, str) or not name.isprintable():
                raise ValueError(
                    f"The name of {kind} must be printable text (no line breaks, control or "
                    f"invisible characters), got {printable(repr(name))}."
                )


def check_site_names(names: Iterable[str]) -> None:
    """Raise `ValueError` unless a reader can distinguish the names of sites.

    Names must not be empty, have surrounding spaces, or differ only in case or Unicode form.
    """
    by_fold: dict[str, str] = {}
    for name in names:
        if not name or name != name.strip():
            raise ValueError(f"A site's name must not be empty or have spaces around it: {name!r}.")
        previous = by_fold.setdefault(fold(name), name)
        if previous is not name:
            raise ValueError(
                f"The sites {previous!r} and {name!r} differ by case or by Unicode form alone "
                f"({previous.encode()!r} and {name.encode()!r}): rename one."
            )


def fold(name: str) -> str:
    """Return a name without case and Unicode form, because some file systems ignore them."""
    return unicodedata.normalize("NFKC", name).casefold()


def check_party_name(name: str) -> None:
    """Raise `ValueError` unless a party's name can name a folder and a certificate."""
    check_printable({"a party": [name]})
    check_site_names([name])
    size = len(name.encode())
    if size > MAX_BYTES:
        raise ValueError(
            f"The name {name!r} has {size} bytes, and a certificate's common name has at most "
            f"{MAX_BYTES}: shorten it."
        )
    if name.startswith(".") or {*name} & {*"/\\"}:
        raise ValueError(
            f"The name {name!r} becomes that of a folder, so that it must not start with a dot or "
            "hold a slash or a backslash."
        )


def toml_text(text: str) -> str:
    """Return text as a quoted TOML string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a name as a TOML key, quoted if needed."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else toml_text(name)


def keys_within(table: object) -> list[Any]:
    """Return the keys of a table and of all tables in it."""
    if isinstance(table, Mapping):
        return [*table, *(key for part in table.values() for key in keys_within(part))]
    parts = table if isinstance(table, list | tuple) else ()
    return [key for part in parts for key in keys_within(part)]
