"""Design matrices by formulaic, whose state comes from sums over all sites."""

import ast
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmcmc.models._columns import SiteRows
from fedmcmc.models._formula import FUNCTIONS, STATEFUL, calls_in, check_expression, columns_of

if TYPE_CHECKING:
    from fedmcmc.models._schema import Numbers

NUM_QUANTILES = 1024
"""Number of rows of the table of quantiles that determines knots."""
MIN_KNOT_DISTANCE = 1e-3
"""Smallest distance between inner knots, as a fraction of the range of the knots."""


class Matrix:
    """Columns of a formula's right side with the same state at all sites.

    formulaic computes its state (levels, knots, centers) from a table of quantiles and levels,
    which all sites derive from the same sums. The rows of a site are therefore the rows of the
    matrix of all sites.

    Parameters
    ----------
    text
        Formula without a response.
    levels
        Levels of each factor in their order.
    numbers
        Summaries of each column of numbers.
    """

    def __init__(
        self, text: str, levels: Mapping[str, tuple[str, ...]], numbers: Mapping[str, "Numbers"]
    ) -> None:
        import formulaic

        self.text, self._columns = text, columns_of(text)
        self._levels = {name: levels[name] for name in self._columns if name in levels}
        self._numbers = {name: numbers[name] for name in self._columns if name not in levels}
        _check_calls(text)
        num = NUM_QUANTILES + 2
        reference: dict[str, np.ndarray] = {}
        for name, number in self._numbers.items():
            probabilities = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
            reference[name] = number.quantile(np.concatenate(([0.0], probabilities, [1.0])))
        for name, names in self._levels.items():
            reference[name] = np.resize(np.array(names, object), num)
        spec: Any = formulaic.ModelSpec(
            formulaic.Formula(text),
            output="numpy",
            na_action=formulaic.materializers.NAAction.IGNORE,
        )
        self._spec = self._evaluate(spec, reference, num).model_spec
        for call, state in self._spec.transform_state.items():
            self._set_moments(call, state)
            _check_knots(call, state)
        self.names = tuple(_shorten(self._spec))
        if len(set(self.names)) < len(self.names):
            self.names = tuple(self._spec.column_names)

    def array(self, rows: SiteRows) -> np.ndarray:
        """Return the columns of a site's complete rows, ``[num_rows, num_columns]``."""
        array = np.asarray(self._evaluate(self._spec, rows.columns, len(rows.numbers)), np.float64)
        is_wrong = ~np.isfinite(array)
        if is_wrong.any():
            row, column = np.argwhere(is_wrong)[0].tolist()
            raise ValueError(
                f"{rows.where(self.names[column], row)} is {array[row, column]}; values must be "
                f"finite."
            )
        return array

    def _evaluate(self, spec: Any, columns: Mapping[str, np.ndarray], num_rows: int) -> Any:
        import pandas as pd

        table = pd.DataFrame(index=range(num_rows))
        for name in self._columns:
            values: Any = columns[name]
            if name in self._levels:
                values = pd.Categorical(values, categories=list(self._levels[name]))
            table[name] = values
        with np.errstate(all="ignore"):
            try:
                return spec.get_model_matrix(table, context=_functions())
            except Exception as error:  # formulaic raises errors of many types
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"The terms {self.text!r} cannot be computed: {reason}") from error

    def _set_moments(self, call: str, state: dict[str, Any]) -> None:
        """Replace moments of quantiles by moments of the rows, for functions of a column."""
        node = ast.parse(call, mode="eval").body
        if "center" not in state or not isinstance(node, ast.Call):
            return
        number = self._numbers.get(getattr(node.args[0], "id", ""))
        if number is not None:
            if state["center"] is not None:
                state["center"] = np.asarray(number.mean)
            if state["scale"] is not None:
                squares = number.sd**2 * (number.count - 1)
                if state["center"] is None:
                    squares += number.count * number.mean**2
                state["scale"] = np.sqrt(squares / (number.count - state["ddof"]))


@functools.cache
def _functions() -> dict[str, Any]:
    """Return functions that formulas may call in addition to formulaic's."""
    from formulaic.materializers.types import FactorValues
    from formulaic.transforms import natural_cubic_spline, stateful_transform

    @stateful_transform
    def s(x: Any, df: int = 4, _state: dict[str, Any] | None = None) -> Any:
        # The basis is one at its knot and zero at the others, and sums to one. Without the
        # column of the lowest knot it spans no constant.
        basis = natural_cubic_spline(np.asarray(x), df=df + 1, _state=_state)
        columns = {i: basis[i + 1] for i in range(1, df + 1)}
        return FactorValues(columns, kind="numerical", format="{name}[{field}]", encoded=False)

    return {**{name: getattr(np, name) for name in FUNCTIONS}, "s": s}


def _check_calls(text: str) -> None:
    """Raise if a spline or a scaled column is a function of several columns."""
    for call in calls_in(text):
        if getattr(call.func, "id", "") in STATEFUL:
            names = [x for x in check_expression(ast.unparse(call), text)]
            if len(names) != 1:
                raise ValueError(
                    f"{ast.unparse(call)!r} must be a function of a single column, and has "
                    f"{', '.join(names) or 'none'}. Compute the column before."
                )


def _check_knots(call: str, state: Mapping[str, Any]) -> None:
    """Raise if inner knots coincide because most values are equal."""
    knots = np.unique(np.asarray(state.get("knots", ())))
    if len(knots) > 1 and np.diff(knots).min() < MIN_KNOT_DISTANCE * (knots[-1] - knots[0]):
        raise ValueError(
            f"Knots of {call} coincide, because too many values are equal. Use fewer columns (df), "
            f"or the column itself."
        )


def _shorten(spec: Any) -> list[str]:
    """Return names of columns without formulaic's marks: ``urban[Y]``, not ``urban[T.Y]``."""
    names = []
    for _, scoped_terms, columns in spec.structure:
        factors = [scoped.factor.expr for term in scoped_terms for scoped in term.factors]
        for column in columns:
            names.append(_shorten_column(column, tuple(dict.fromkeys(factors))))
    return names


def _shorten_column(column: str, factors: tuple[str, ...]) -> str:
    """Return the short name of a column, a product of some of `factors`."""
    parts = []
    while column:
        factor = max((x for x in factors if column.startswith(x)), key=len, default=column)
        remainder = column[len(factor) :]
        # The field in brackets ends where the next factor begins.
        ends = [i for x in factors if (i := remainder.find(f"]:{x}")) >= 0]
        end = 0 if not remainder.startswith("[") else min(ends, default=len(remainder) - 1) + 1
        field, column = remainder[:end], remainder[end + 1 :]
        node = ast.parse(factor, mode="eval").body if factor.startswith("C(") else None
        if isinstance(node, ast.Call) and isinstance(node.args[0], ast.Name):
            factor = node.args[0].id
        parts.append(factor + ("[" + field[3:] if field.startswith("[T.") else field))
    return ":".join(parts)
