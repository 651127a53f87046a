"""What a federation's clients and columns are called, for readers of a page."""

import jax

from fedmcmc.data._federated import FederatedData
from fedmcmc.data._groups import row_values
from fedmcmc.data._legend import MAX_SHOWN

MAX_NAMED = 100
"""Clients that are named on a page; more of them are rather people than institutions."""

ORDERS = {
    "ordered": "ordered categories",
    "as declared": "in the order of the categories",
    "alphabetical": "in alphabetical order",
    "numerical": "in numerical order",
}


def in_words(data: FederatedData) -> dict[str, str]:
    """Return names and sizes of clients, and columns with what their codes stand for.

    Examples
    --------
    >>> import pandas as pd
    >>> clinics = {"Bern": pd.DataFrame({"sex": ["f", "m"]}), "Jura": pd.DataFrame({"sex": ["m"]})}
    >>> in_words(FederatedData.from_clients(clinics))
    {'client names': 'Bern (2 rows), Jura (1 row)', 'columns': "sex: 0 is 'f', 1 is 'm'"}
    """
    return {"client names": _clients(data), "columns": "\n".join(_columns(data))}


def _clients(data: FederatedData) -> str:
    sizes = data.sizes.tolist()
    if len(sizes) > MAX_NAMED:
        return f"{len(sizes):,}, of {min(sizes):,} to {max(sizes):,} rows"
    groups = [None] * len(sizes) if data.num_groups is None else data.num_groups.tolist()
    named = [
        _counted(size, "row") + (f" in {_counted(num, 'group')}" if num is not None else "")
        for size, num in zip(sizes, groups, strict=True)
    ]
    return ", ".join(f"{label} ({x})" for label, x in zip(data.labels, named, strict=True))


def _counted(num: int, what: str) -> str:
    return f"{num:,} {what}{'s' * (num != 1)}"


def _columns(data: FederatedData) -> list[str]:
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(row_values(data.rows)):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "rows"
        levels = data.coding.get(name, ())
        if len(levels) > MAX_SHOWN:
            kind = f"{len(levels):,} codes"  # which may be names
        elif levels:
            kind = ", ".join(f"{code} is {level!r}" for code, level in enumerate(levels))
            if len(levels) > 2:
                kind += f" ({ORDERS[data.orders[name]]})"
        else:
            shape = ", ".join(map(str, leaf.shape[1:]))
            kind = f"{leaf.dtype}{f'[{shape}]' if shape else ''}"
        lines.append(f"{name}: {kind}")
    return lines
