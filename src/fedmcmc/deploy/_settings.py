"""Readers and checks of settings files: TOML, lists of names, addresses."""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedmcmc.deploy._frames import MAX_DEPTH, is_deeper

MAX_PORT = 2**16 - 1
"""Largest port number."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise `ValueError` if it is not one."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is a folder, a pipe or a device: give a TOML file.")
    try:
        content = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a valid TOML file: {error}.") from None
    except RecursionError:
        content = None
    if content is None or is_deeper(content, MAX_DEPTH):
        raise ValueError(f"{path} has more than {MAX_DEPTH} tables or lists within one another.")
    return content


def check_texts(table: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raise `ValueError` unless the entries of a table with these names are nonempty texts."""
    for name in names:
        if name in table and (not isinstance(table[name], str) or not table[name]):
            raise ValueError(f"{where}: {name} must be a text in quotes, got {table[name]!r}.")


def check_names(names: object, allowed: Collection[str], where: str) -> None:
    """Raise `ValueError` unless `names` is a list of names from `allowed`."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f"{where} must be a list of names, got {names!r}.")
    for name in names:
        if not isinstance(name, str) or name not in allowed:
            raise ValueError(
                f"{where} holds {name!r}, which is unknown.{hint(name, allowed)} Known are "
                f"{', '.join(sorted(allowed))}."
            )


def hint(name: object, allowed: Collection[str]) -> str:
    """Return a question that suggests a similar allowed name, or an empty text."""
    similar = difflib.get_close_matches(str(name), allowed, 1)
    return f" Is {similar[0]} meant?" if similar else ""


def check_address(address: object, where: str) -> tuple[str, int]:
    """Return the host and the port of ``"host:port"``; raise `ValueError` for anything else."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise ValueError(
            f"{where} must be 'host:port' with a port of at most {MAX_PORT}, got {address!r}."
        )
    return host, int(port)
