"""Design matrices by formulaic, whose state comes from sums over all sites."""

import ast
import functools
import re
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedmcmc.models._columns import SiteRows
from fedmcmc.models._formula import FUNCTIONS, STATEFUL, calls_in, columns_of
from fedmcmc.models._numbers import Numbers

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
        self, text: str, levels: Mapping[str, tuple[str, ...]], numbers: Mapping[str, Numbers]
    ) -> None:
        import formulaic

        self.text, self._columns = text, columns_of(text)
        self._levels = {name: levels[name] for name in self._columns if name in levels}
        self._numbers = {name: numbers[name] for name in self._columns if name not in levels}
        for function, call, names in calls_in(text):
            if function in STATEFUL and len(names) != 1:
                raise ValueError(
                    f"{call!r} must be a function of a single column, and has "
                    f"{', '.join(names) or 'none'}. Compute the column before."
                )
        probabilities = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        probabilities = np.concatenate(([0.0], probabilities, [1.0]))
        num = len(probabilities)
        columns = {name: x.quantile(probabilities) for name, x in self._numbers.items()}
        columns |= {name: np.resize(np.array(x, object), num) for name, x in self._levels.items()}
        reference = SiteRows("", num, columns, np.arange(num), {})
        spec: Any = formulaic.ModelSpec(
            formulaic.Formula(text),
            output="numpy",
            na_action=formulaic.materializers.NAAction.IGNORE,
        )
        self._spec = self._evaluate(spec, reference).model_spec
        for call, state in self._spec.transform_state.items():
            self._set_moments(call, state)
            _check_knots(call, state)
        names = _shorten(self._spec)
        is_clear = len(set(names)) == len(names)
        self.names: tuple[str, ...] = tuple(names if is_clear else self._spec.column_names)

    def array(self, rows: SiteRows) -> np.ndarray:
        """Return the columns of a site's complete rows, ``[num_rows, num_columns]``."""
        array = np.asarray(self._evaluate(self._spec, rows), np.float64)
        for name, column in zip(self.names, array.T, strict=True):
            rows.require(np.isfinite(column), name, column, "finite")
        return array

    def _evaluate(self, spec: Any, rows: SiteRows) -> Any:
        import pandas as pd
        from formulaic.errors import DataMismatchWarning

        table = pd.DataFrame(index=range(len(rows.numbers)))
        for name in self._columns:
            values: Any = rows.columns[name]
            if name in self._levels:
                names = list(self._levels[name])
                values = pd.Categorical.from_codes(rows.codes(name, names), categories=names)
            table[name] = values
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error", DataMismatchWarning)
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
        arguments = dict(zip(("center", "scale"), node.args[1:], strict=False))
        arguments |= {x.arg: x.value for x in node.keywords if x.arg}
        fixed = {  # numbers in the formula
            name
            for name, x in arguments.items()
            if not isinstance(x, ast.Constant) or not isinstance(x.value, bool)
        }
        if number is not None:
            if state["center"] is not None and "center" not in fixed:
                state["center"] = np.asarray(number.mean)
            if state["scale"] is not None and "scale" not in fixed:
                center = 0.0 if state["center"] is None else state["center"]
                squares = number.sd**2 * (number.count - 1)
                squares += number.count * (number.mean - center) ** 2
                state["scale"] = np.sqrt(squares / (number.count - state["ddof"]))


@functools.cache
def _functions() -> dict[str, Any]:
    """Return functions that formulas may call in addition to formulaic's."""
    from formulaic.materializers.types import FactorValues
    from formulaic.transforms import natural_cubic_spline, stateful_transform

    @stateful_transform  # type: ignore[untyped-decorator]
    def s(x: Any, df: int = 4, _state: dict[str, Any] | None = None) -> Any:
        # The basis is one at its knot and zero at the others, and sums to one. Without the
        # column of the lowest knot it spans no constant.
        basis = natural_cubic_spline(np.asarray(x), df=df + 1, _state=_state)
        columns = {i: basis[i + 1] for i in range(1, df + 1)}
        return FactorValues(columns, kind="numerical", format="{name}[{field}]", encoded=False)

    return {**{name: getattr(np, name) for name in FUNCTIONS}, "s": s}


def _check_knots(call: str, state: Mapping[str, Any]) -> None:
    """Raise if inner knots coincide because most values are equal."""
    knots = np.unique(np.asarray(state.get("knots", ())))
    if len(knots) > 1 and np.diff(knots).min() < MIN_KNOT_DISTANCE * (knots[-1] - knots[0]):
        raise ValueError(
            f"Knots of {call} coincide, because too many values are equal. Use fewer columns (df), "
            f"or the column itself."
        )


def _shorten(spec: Any) -> list[str]:
    """Return names of columns without formulaic's marks: ``urban[Y]``, not ``C(urban)[T.Y]``."""
    names = []
    for _, scoped_terms, columns in spec.structure:
        for column in columns:
            name = column
            for term in scoped_terms:
                texts = [re.escape(x.factor.expr) + r"(\[.*\])?" for x in term.factors]
                match = re.fullmatch(":".join(texts), column) if texts else None
                if match:
                    parts = []
                    for x, field in zip(term.factors, match.groups(default=""), strict=True):
                        coded = re.fullmatch(r"C\((\w+)(,.*)?\)", x.factor.expr)
                        field = "[" + field[3:] if field.startswith("[T.") and x.reduced else field
                        parts.append((coded[1] if coded else x.factor.expr) + field)
                    name = ":".join(parts)
            names.append(name)
    return names
