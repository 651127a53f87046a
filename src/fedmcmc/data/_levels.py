"""Levels of text columns: one order for all clients, and values that are probably mistakes."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedmcmc.data._rows import Levels, warn_caller

MAX_LEVELS = 20
"""Number of levels above which text that differs in most rows is probably no category."""
NUM_SHOWN = 5
"""Number of levels that a message shows."""
MISSING_MARKERS = frozenset(
    {"", ".", "-", "?", "na", "n/a", "nan", "<na>", "null", "none", "missing"}
)
"""Texts that stand for a missing number, in lower case."""
BLANK_MARKERS = MISSING_MARKERS - {"-", "?", "none", "missing"}
"""Texts that probably stand for a missing value in any text column."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?P<mark>[.,])\d{3}((?P=mark)\d{3})*([.,]\d+)?")
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"))
_QUOTES = str.maketrans(dict.fromkeys("\u2018\u2019\u00b4`", "'"))


@dataclass(frozen=True)
class TextPart:
    """Text column of one table.

    Attributes
    ----------
    owner
        Label of the client, or ``None`` for a table of all clients.
    values
        Text of each row.
    categories
        Declared categories in their order, or ``None`` if none are declared.
    ordered
        Whether the categories are declared as ordered.
    is_coded
        Whether the column is declared as categorical, with or without an order.
    """

    owner: Any
    values: Sequence[str]
    categories: Levels | None = None
    ordered: bool = False
    is_coded: bool = False


def merge_levels(column: str, parts: Sequence[TextPart]) -> tuple[Levels, str]:
    """Return the levels of a column in one order for all clients, and the name of that order.

    The order is ``"ordered"`` (all declared orders merged), ``"as declared"`` (the same unordered
    categories at all clients), ``"numerical"`` or ``"alphabetical"``.

    Raises
    ------
    ValueError
        If declared orders contradict one another or leave the order open, if levels differ only in
        white space, or if text holds numbers.
    """
    for part in parts:
        if not part.is_coded:
            _refuse_numbers(_whose(column, part.owner), part.values)
    owners: dict[str, Any] = {}
    for part in parts:
        for level in dict.fromkeys((*(part.categories or ()), *part.values)):
            owners.setdefault(level, part.owner)
    report_similar(owners, f"Column {column!r}", "levels")
    _warn_of_blanks(column, parts)
    if any(part.ordered for part in parts):
        return _ordered_levels(column, parts), "ordered"
    alphabetical = tuple(sorted(owners))
    levels, order = alphabetical, "alphabetical"
    if all(is_plain_number(level) for level in owners):
        levels, order = tuple(sorted(owners, key=float)), "numerical"
    declared = {part.categories for part in parts}
    # Categories that pandas found are in alphabetical order, which nobody chose.
    if len(declared) == 1 and not declared & {None, levels, alphabetical}:
        return next(iter(declared)) or levels, "as declared"
    _warn_of_lost_order(column, parts, levels, order)
    return levels, order


def _ordered_levels(column: str, parts: Sequence[TextPart]) -> Levels:
    """Return the only order that agrees with all ordered categories."""
    orders: dict[Levels, Any] = {}
    for part in parts:
        if part.ordered and part.categories is not None:
            orders.setdefault(part.categories, part.owner)
    following: dict[str, dict[str, Any]] = {level: {} for levels in orders for level in levels}
    for levels, owner in orders.items():
        for low, high in pairwise(levels):
            following[low].setdefault(high, owner)
    num_before = dict.fromkeys(following, 0)
    for highs in following.values():
        for high in highs:
            num_before[high] += 1
    merged = [level for level, num in num_before.items() if num == 0]
    for level in merged:  # grows until all levels are in it, or a cycle is left
        for high in following[level]:
            num_before[high] -= 1
            if num_before[high] == 0:
                merged.append(high)
    if len(merged) < len(following):
        raise ValueError(
            f"Ordered categories of column {column!r} contradict one another: "
            f"{_cycle(following, set(merged))}. Declare the same order at all clients."
        )
    remedy = (
        f"Declare all categories in their order at every client, as by "
        f"pd.Categorical({column}, categories=[...], ordered=True)."
    )
    for low, high in pairwise(merged):
        if high not in following[low]:
            having = [
                f"{_listed(levels, ' < ')}{_at(owner)}"
                for level in (low, high)
                for levels, owner in orders.items()
                if level in levels
            ]
            raise ValueError(
                f"Ordered categories of column {column!r} do not determine whether {low!r} or "
                f"{high!r} comes first: {', '.join(dict.fromkeys(having))}. {remedy}"
            )
    known = set(merged)
    for part in parts:
        for level in (*(part.categories or ()), *part.values):
            if level not in known:
                raise ValueError(
                    f"{_whose(column, part.owner)} holds {level!r}, which is none of the ordered "
                    f"categories of the other clients: {_listed(merged, ' < ')}. {remedy}"
                )
    return tuple(merged)


def _cycle(following: Mapping[str, Mapping[str, Any]], outside: set[str]) -> str:
    """Return the orders of clients that form a cycle among the levels that are not `outside`."""
    before = {
        high: low
        for low, highs in following.items()
        if low not in outside
        for high in highs
        if high not in outside
    }
    level = next(iter(before))
    for _ in before:  # walks back until it is in the cycle
        level = before[level]
    cycle = [level]
    while before[cycle[-1]] != level:
        cycle.append(before[cycle[-1]])
    cycle = [*reversed(cycle), cycle[-1]]
    runs: list[tuple[list[str], Any]] = []
    for low, high in pairwise(cycle):
        owner = following[low][high]
        if runs and runs[-1][1] == owner:
            runs[-1][0].append(high)
        else:
            runs.append(([low, high], owner))
    return ", ".join(f"{_listed(levels, ' < ')}{_at(owner)}" for levels, owner in runs)


def _warn_of_lost_order(column: str, parts: Sequence[TextPart], levels: Levels, order: str) -> None:
    """Warn if the levels are in another order than the categories that a client declares."""
    places = {level: place for place, level in enumerate(levels)}
    for part in parts:
        categories = list(part.categories or ())
        if categories not in (sorted(categories), sorted(categories, key=places.__getitem__)):
            warn_caller(
                f"{_whose(column, part.owner)} has the categories "
                f"{_listed(part.categories or (), ', ')}, and other clients have others: codes "
                f"are in {order} order. Declare the same categories at all clients to keep their "
                f"order."
            )
            return


def report_similar(owners: Mapping[Any, Any], where: str, what: str) -> None:
    """Report texts that are probably the same one.

    Parameters
    ----------
    owners
        Texts, each with the label of a client that has it; ``None`` if the client is unknown.
    where, what
        Beginning of the message, and the noun for the texts.

    Raises
    ------
    ValueError
        If two texts look the same: they differ only in white space or in the encoding of a letter.

    Warns
    -----
    UserWarning
        If two texts differ only in case, or in kinds of dashes, quotation marks or digits.
    """
    seen: dict[str, str] = {}
    similar: dict[str, str] = {}
    for text, owner in owners.items():
        if not isinstance(text, str):
            continue
        visible = _visible(text)
        if visible in seen:
            other = seen[visible]
            raise ValueError(
                f"{where} has the {what} {other!r}{_at(owners[other])} and {text!r}{_at(owner)}, "
                f"which differ only in white space or in the encoding of letters. Make them equal "
                f"(in pandas: .str.strip(), .str.normalize('NFC'))."
            )
        seen[visible] = text
        form = unicodedata.normalize("NFKC", visible).translate(_DASHES | _QUOTES).casefold()
        if form in similar:
            other = similar[form]
            warn_caller(
                f"{where} has the {what} {other!r}{_at(owners[other])} and {text!r}{_at(owner)}. "
                f"If they mean the same, write them in the same way."
            )
        similar[form] = text


def _visible(text: str) -> str:
    """Return a text without what cannot be seen: spaces around it, repeated or of other widths."""
    composed = unicodedata.normalize("NFC", text)
    shown = "".join(letter for letter in composed if unicodedata.category(letter) != "Cf")
    return " ".join(shown.split())


def _refuse_numbers(whose: str, values: Sequence[str]) -> None:
    """Raise if most values of a text column are numbers, apart from markers of missing ones."""
    levels = [text for text in dict.fromkeys(values) if not _is_missing(text)]
    others = [text for text in levels if not is_number(text)]
    if not levels or 2 * len(others) >= len(levels):
        return
    numbers = [text for text in levels if is_number(text)]
    markers = [text for text in dict.fromkeys(values) if _is_missing(text)]
    rest = [*others, *markers]
    raise ValueError(
        f"{whose} holds numbers written as text ({_listed(numbers, ', ')}"
        + (f"; the other values are {_listed(rest, ', ')}" if rest else "")
        + "), which would become codes in alphabetical order. Turn them into numbers, as by "
        "pd.to_numeric(column"
        + (', errors="coerce"' if rest else "")
        + ") or, in Polars, .cast(pl.Float64); if they name categories, declare that by "
        'column.astype("category") or .cast(pl.Categorical).'
    )


def is_number(text: str) -> bool:
    """Return whether a text is a number, perhaps with signs of a limit, spaces or a comma.

    Examples
    --------
    >>> [is_number(x) for x in ("1,5", "1 000", " 3 ", "<5", "1.234,5", "-.5e3", "3%")]
    [True, True, True, True, True, True, True]
    >>> [is_number(x) for x in ("inf", "3b", "1.2.3", "2024-01-05", "I")]
    [False, False, False, False, False]
    """
    plain = unicodedata.normalize("NFKC", text).translate(_DASHES | _QUOTES).casefold()
    plain = re.sub(r"[\s'_]", "", plain).lstrip("<>=≤≥~≈±").rstrip("%")
    decimal = plain.replace(",", ".")
    return bool(_NUMBER.fullmatch(decimal) or _THOUSANDS.fullmatch(plain))


def is_plain_number(text: str) -> bool:
    """Return whether a text is a number as Python writes it."""
    return bool(_NUMBER.fullmatch(text))


def _is_missing(text: str) -> bool:
    return text.strip().lower() in MISSING_MARKERS


def _warn_of_blanks(column: str, parts: Sequence[TextPart]) -> None:
    """Warn of a level that is empty or a marker of a missing value."""
    for part in parts:
        if part.categories is not None:
            continue
        for level in dict.fromkeys(part.values):
            if level.strip().lower() in BLANK_MARKERS:
                warn_caller(
                    f"{_whose(column, part.owner)} holds {level!r}, which becomes a level like any "
                    f"other. If it stands for a missing value, drop these rows or impute it."
                )
                return


def warn_of_names(column: str, num_levels: int, num_rows: int) -> None:
    """Warn of text that differs in most rows: it probably names rows."""
    if num_levels > MAX_LEVELS and 2 * num_levels > num_rows:
        warn_caller(
            f"Column {column!r} is text of {num_levels} different values in {num_rows} rows, "
            f"which become codes in alphabetical order. If it names rows, or its numbers are "
            f"written as text, leave it out or turn it into numbers."
        )


def _whose(column: str, owner: Any) -> str:
    return f"Column {column!r}" + ("" if owner is None else f" of client {owner!r}")


def _at(owner: Any) -> str:
    return "" if owner is None else f" (client {owner!r})"


def _listed(levels: Iterable[Any], between: str) -> str:
    shown = [repr(level) for level in levels]
    return between.join([*shown[:NUM_SHOWN], "..."] if len(shown) > NUM_SHOWN else shown)
