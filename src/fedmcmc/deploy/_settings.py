"""Readers and checks of settings files: TOML, lists of names, addresses."""

import difflib
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

MOST_PORT = 2**16 - 1
"""Largest port number."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises
    ------
    ValueError
        If the file is not TOML; the message names the file and the line.
    """
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a valid TOML file: {error}.") from None


def check_names(names: Any, allowed: Collection[str], where: str) -> None:
    """Raise unless `names` is a list of names from `allowed`.

    Raises
    ------
    ValueError
        With the allowed names, and the one that resembles the unknown name.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"{where} must be a list of names, got {names!r}.")
    for name in names:
        if not isinstance(name, str) or name not in allowed:
            raise ValueError(
                f"{where} holds {name!r}, which is unknown.{hint(name, allowed)} Known are "
                f"{', '.join(sorted(allowed))}."
            )


def hint(name: Any, allowed: Collection[str]) -> str:
    """Return a question that suggests a similar allowed name, or an empty text."""
    similar = difflib.get_close_matches(str(name), allowed, 1)
    return f" Is {similar[0]} meant?" if similar else ""


def check_address(address: Any, where: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    Raises
    ------
    ValueError
        If the address is not ``"host:port"``.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MOST_PORT:
        raise ValueError(
            f"{where} must be 'host:port' with a port of at most {MOST_PORT}, got {address!r}."
        )
    return host, int(port)
