"""Names in a study: all parties read them, and sites' names become folders and certificates."""

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from fedmcmc.deploy._frames import printable

MAX_BYTES = 64
"""Bytes of UTF-8 that a certificate's common name may have."""


def check_printable(names: Mapping[str, Iterable[Any]]) -> None:
    """Raise unless names are printable text, so that no name can change what a terminal shows.

    Parameters
    ----------
    names
        Names by what they name: ``{"a site": [...]}``.

    Raises
    ------
    ValueError
        With the first other name, escaped.
    """
    for what, group in names.items():
        for name in group:
            if not isinstance(name, str) or not name.isprintable():
                raise ValueError(
                    f"The name of {what} must be printable text (no line breaks, control or "
                    f"invisible characters), got {printable(repr(name))}."
                )


def check_site_names(names: Iterable[str]) -> None:
    """Raise unless names of sites are clear: without spaces around them, and told apart by readers.

    Raises
    ------
    ValueError
        If one is empty, or two differ by case or by Unicode form alone.
    """
    known: dict[str, str] = {}
    for name in names:
        if not name or name != name.strip():
            raise ValueError(f"A site's name must not be empty or have spaces around it: {name!r}.")
        other = known.setdefault(fold(name), name)
        if other is not name:
            raise ValueError(
                f"The sites {other!r} and {name!r} differ by case or by Unicode form alone "
                f"({other.encode()!r} and {name.encode()!r}): rename one."
            )


def fold(name: str) -> str:
    """Return a name without case and Unicode form, as some file systems compare names."""
    return unicodedata.normalize("NFKC", name).casefold()


def check_party_name(name: str) -> None:
    """Raise unless a party's name can be that of a folder and of a certificate.

    Raises
    ------
    ValueError
        If it cannot.
    """
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
    """Return text as TOML writes it, in quotes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """Return a key as TOML writes it, in quotes if needed."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else toml_text(name)
