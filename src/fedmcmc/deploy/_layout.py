"""Layout of the texts that owners read before they approve a study."""

import textwrap
from collections.abc import Sequence

from fedmcmc.deploy._frames import printable

WIDTH = 92
"""Longest line of a text, in characters."""


def join_sections(*sections: Sequence[str]) -> str:
    """Return a text of sections; characters that could manipulate a terminal are escaped."""
    return "\n\n".join("\n".join(printable(line, None) for line in section) for section in sections)


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Return the lines of a section."""
    return [title, "-" * len(title), *lines]


def item(text: str, *, deeper: bool = False) -> list[str]:
    """Return the lines of an item in a section."""
    indent = "    " if deeper else "  "
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
