"""Levels of text columns in one order for all clients, and detection of probable mistakes."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fedmcmc.data._rows import Levels, warn_caller

MAX_LEVELS = 20
"""Number of levels above which text that differs in most rows probably names the rows."""
NUM_SHOWN = 5
"""Number of levels that a message lists."""
MISSING_MARKERS = frozenset(
    {"", ".", "-", "?", "na", "n/a", "nan", "<na>", "null", "none", "missing"}
)
"""Texts that mark a missing number, in lower case."""
BLANK_MARKERS = MISSING_MARKERS - {"-", "?", "none", "missing"}
"""Texts that probably mark a missing value in any text column."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?P<mark>[.,])\d{3}((?P=mark)\d{3})*([.,]\d+)?")
_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"))
_QUOTES = str.maketrans(dict.fromkeys("\u2018\u2019\u00b4`", "'"))


@dataclass(frozen=True)
class TextPart:
    """Text column of one table."""

    owner: Any  # label of the client, or None for a table of all clients
    values: Sequence[str]  # text of each row
    categories: Levels | None = None  # declared categories in their order
    ordered: bool = False  # true if the categories are declared as ordered
    is_coded: bool = False  # true if the column is declared as categorical, ordered or not


def merge_levels(column: str, parts: Sequence[TextPart]) -> tuple[Levels, str]:
    """Return the levels of a column in one order for all clients, and the name of that order.

    The order is ``"ordered"`` (all declared orders merged), ``"as declared"`` (the same unordered
    categories at all clients), ``"numerical"`` or ``"alphabetical"``. Raise `ValueError` if
    declared orders contradict each other or are incomplete, if levels differ only in white space,
    or if text holds numbers.
    """
    for part in parts:
        if not part.is_coded:
            _refuse_numbers(name_column(column, part.owner), part.values)
    owners: dict[str, Any] = {}
    for part in parts:
        for level in dict.fromkeys((*(part.categories or ()), *part.values)):
            owners.setdefault(level, part.owner)
    report_similar(owners, f"Column {column!r}", "levels")
    _warn_of_blanks(column, parts)
    if any(part.ordered for part in parts):
        return _merge_orders(column, parts), "ordered"
    alphabetical = tuple(sorted(owners))
    levels, order = alphabetical, "alphabetical"
    if all(is_plain_number(level) for level in owners):
        levels, order = tuple(sorted(owners, key=float)), "numerical"
    declared = {part.categories for part in parts}
    # Categories that pandas inferred are in alphabetical order, which is not a declaration.
    if len(declared) == 1 and not declared & {None, levels, alphabetical}:
        return next(iter(declared)) or levels, "as declared"
    _warn_of_lost_order(column, parts, levels, order)
    if order == "alphabetical":
        _warn_of_lone_levels(column, parts)
    return levels, order


def _merge_orders(column: str, parts: Sequence[TextPart]) -> Levels:
    """Return the only order that is compatible with all ordered categories."""
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
    for level in merged:  # the list grows until it holds all levels, or a cycle remains
        for high in following[level]:
            num_before[high] -= 1
            if num_before[high] == 0:
                merged.append(high)
    if len(merged) < len(following):
        raise ValueError(
            f"Ordered categories of column {column!r} contradict each other: "
            f"{_describe_cycle(following, set(merged))}. Declare the same order at all clients."
        )
    remedy = (
        f"Declare all categories in their order at every client, for example with "
        f"pd.Categorical({column}, categories=[...], ordered=True)."
    )
    for low, high in pairwise(merged):
        if high not in following[low]:
            related = [
                f"{_join(levels, ' < ')}{_format_client(owner)}"
                for level in (low, high)
                for levels, owner in orders.items()
                if level in levels
            ]
            raise ValueError(
                f"Ordered categories of column {column!r} do not determine whether {low!r} or "
                f"{high!r} comes first: {', '.join(dict.fromkeys(related))}. {remedy}"
            )
    for part in parts:
        for level in (*(part.categories or ()), *part.values):
            if level not in following:
                raise ValueError(
                    f"{name_column(column, part.owner)} holds {level!r}, which is none of the "
                    f"ordered categories of the other clients: {_join(merged, ' < ')}. {remedy}"
                )
    return tuple(merged)


def _describe_cycle(following: Mapping[str, Mapping[str, Any]], merged: set[str]) -> str:
    """Return orders of clients that form a cycle among the levels that are not `merged`."""
    previous = {
        high: low
        for low, highs in following.items()
        if low not in merged
        for high in highs
        if high not in merged
    }
    level = next(iter(previous))
    for _ in previous:  # step back until the level is in the cycle
        level = previous[level]
    cycle = [level]
    while previous[cycle[-1]] != level:
        cycle.append(previous[cycle[-1]])
    cycle = [*reversed(cycle), cycle[-1]]
    runs: list[tuple[list[str], Any]] = []
    for low, high in pairwise(cycle):
        owner = following[low][high]
        if runs and runs[-1][1] == owner:
            runs[-1][0].append(high)
        else:
            runs.append(([low, high], owner))
    return ", ".join(f"{_join(levels, ' < ')}{_format_client(owner)}" for levels, owner in runs)


def _warn_of_lost_order(column: str, parts: Sequence[TextPart], levels: Levels, order: str) -> None:
    """Warn if the levels and a client's declared categories are in different orders."""
    codes = {level: code for code, level in enumerate(levels)}
    for part in parts:
        categories = list(part.categories or ())
        if categories not in (sorted(categories), sorted(categories, key=codes.__getitem__)):
            warn_caller(
                f"{name_column(column, part.owner)} has the categories "
                f"{_join(part.categories or (), ', ')}, and other clients have different ones: "
                f"codes are in {order} order. Declare the same categories at all clients to keep "
                f"their order."
            )
            return


def _warn_of_lone_levels(column: str, parts: Sequence[TextPart]) -> None:
    """Warn of levels that one client alone has, because clients may write a level differently.

    Columns with one level per client are names of clients, and not reported.
    """
    levels = [{*part.values} for part in parts]
    if len(parts) < 2 or all(len(texts) == 1 for texts in levels):
        return
    counts = Counter(text for texts in levels for text in texts)
    lone = [
        f"{text!r}{_format_client(part.owner)}"
        for part, texts in zip(parts, levels, strict=True)
        for text in sorted(texts)
        if counts[text] == 1
    ]
    if lone:
        shown = ", ".join([*lone[:NUM_SHOWN], "..."] if len(lone) > NUM_SHOWN else lone)
        warn_caller(
            f"Column {column!r} has levels that only one client has: {shown}. If they have another "
            f"name at other clients, write them in the same way. Pass a dictionary, or declare the "
            f"same categories at all clients, to set the levels of all clients."
        )


def report_similar(owners: Mapping[Any, Any], where: str, noun: str) -> None:
    """Raise `ValueError` for texts that look the same, and warn of texts that are similar.

    Texts look the same if they differ only in white space or in the encoding of letters. They are
    similar if they differ only in case, or in the form of dashes, quotation marks or digits.
    `owners` maps each text to the label of a client that has it, or to ``None``. Messages begin
    with `where` and call the texts `noun`.
    """
    by_look: dict[str, str] = {}
    by_form: dict[str, str] = {}
    for text, owner in owners.items():
        if not isinstance(text, str):
            continue
        # Remove spaces around the text, repeated spaces and invisible characters.
        composed = unicodedata.normalize("NFC", text)
        visible = "".join(letter for letter in composed if unicodedata.category(letter) != "Cf")
        look = " ".join(visible.split())
        form = unicodedata.normalize("NFKC", look).translate(_DASHES | _QUOTES).casefold()
        if form in by_form:
            similar = by_look.get(look, by_form[form])
            pair = (
                f"{where} has the {noun} {similar!r}{_format_client(owners[similar])} and "
                f"{text!r}{_format_client(owner)}"
            )
            if look in by_look:
                raise ValueError(
                    f"{pair}, which differ only in white space or in the encoding of letters. Make "
                    f"them equal (in pandas: .str.strip(), .str.normalize('NFC'))."
                )
            warn_caller(f"{pair}. If they mean the same, write them in the same way.")
        by_look[look] = by_form[form] = text


def _refuse_numbers(column: str, values: Sequence[str]) -> None:
    """Raise if most values of a text column are numbers, except for markers of missing values."""
    texts = list(dict.fromkeys(values))
    levels = [text for text in texts if not _is_missing_marker(text)]
    numbers = [text for text in levels if is_number(text)]
    if 2 * len(numbers) <= len(levels):
        return
    remaining = [text for text in levels if not is_number(text)] + [
        *filter(_is_missing_marker, texts)
    ]
    raise ValueError(
        f"{column} holds numbers written as text ({_join(numbers, ', ')}"
        + (f"; the other values are {_join(remaining, ', ')}" if remaining else "")
        + "), which would become codes in alphabetical order. Turn them into numbers, for example "
        "with pd.to_numeric(column"
        + (', errors="coerce"' if remaining else "")
        + ") or, in Polars, .cast(pl.Float64). If they are names of categories, declare them with "
        'column.astype("category") or .cast(pl.Categorical).'
    )


def is_number(text: str) -> bool:
    """Return whether a text is a number, possibly with a sign of a limit, spaces or a comma.

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
    """Return whether a text is a number in Python's notation."""
    return bool(_NUMBER.fullmatch(text))


def _is_missing_marker(text: str) -> bool:
    return text.strip().lower() in MISSING_MARKERS


def _warn_of_blanks(column: str, parts: Sequence[TextPart]) -> None:
    """Warn of a level that is empty or marks a missing value."""
    for part in parts:
        if part.categories is not None:
            continue
        for level in dict.fromkeys(part.values):
            if level.strip().lower() in BLANK_MARKERS:
                warn_caller(
                    f"{name_column(column, part.owner)} holds {level!r}, which becomes an ordinary "
                    f"level. If it marks a missing value, drop these rows or impute it."
                )
                return


def warn_of_names(column: str, num_levels: int, num_rows: int) -> None:
    """Warn of text that differs in most rows, because it is probably a name of each row."""
    if num_levels > MAX_LEVELS and 2 * num_levels > num_rows:
        warn_caller(
            f"Column {column!r} is text of {num_levels} different values in {num_rows} rows, "
            f"which become codes in alphabetical order. If it names rows, leave it out. If it "
            f"holds numbers written as text, turn it into numbers."
        )


def name_column(name: str, owner: object) -> str:
    """Return the beginning of a message about a column, with its client unless that is ``None``."""
    return f"Column {name!r}" + ("" if owner is None else f" of client {owner!r}")


def _format_client(owner: object) -> str:
    return "" if owner is None else f" (client {owner!r})"


def _join(levels: Iterable[Any], separator: str) -> str:
    texts = [repr(level) for level in levels]
    return separator.join([*texts[:NUM_SHOWN], "..."] if len(texts) > NUM_SHOWN else texts)
