"""Formulas of regression models with random effects, such as ``y ~ age + (1 + age | hospital)``."""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmcmc._checks import missing_extra_error

FUNCTIONS = (
    *("log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "abs", "sin", "cos", "tanh"),
    *("floor", "ceil", "minimum", "maximum", "where"),
)
"""Functions of NumPy that a formula may call on columns."""
STATEFUL = ("s", "bs", "cr", "cs", "cc", "poly", "center", "scale", "standardize")
"""Functions whose columns depend on quantiles or moments of all clients' rows."""
_CALLED = (*FUNCTIONS, *STATEFUL, "C", "I", "Treatment", "Sum", "Poly", "Helmert", "Diff")
_ATTRIBUTES = {"contr": ("treatment", "sum", "poly", "helmert", "diff", "SAS"), "np": FUNCTIONS}
_PARTS = (
    *(ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.keyword, ast.Call),
    *(ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp),
    *(ast.List, ast.Tuple),
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class RandomTerm:
    """Random effects ``(left | factors)``, without correlations for ``(left || factors)``."""

    left: str
    factors: tuple[str, ...]
    correlated: bool = True

    @property
    def label(self) -> str:
        """Name of the groups, such as ``hospital`` or ``hospital:patient``."""
        return ":".join(self.factors)


@dataclass(frozen=True)
class Formula:
    """Parts of a formula, see `parse`.

    Attributes
    ----------
    text, response
        Formula as written, and its left side without `trials` and `weights`.
    outcome
        Pairs of an array's name and its expression: ``y``, or ``time`` with ``event``, ``start`` or
        ``upper`` for a response ``Surv(...)``.
    fixed
        Formula of the coefficients that all groups share.
    random
        Random effects; ``(1 | a/b)`` is two of them, for ``a`` and for ``a:b``.
    offset, trials, weights
        Expressions of the offset, the numbers of trials and the weights, or ``None``.
    missing
        Pairs of a covariate that may be missing and the right side of its model.
    sampling_weights
        Column of the sampling weights, which `weights` are proportional to, or ``None``.
    """

    text: str
    response: str
    outcome: tuple[tuple[str, str], ...]
    fixed: str
    random: tuple[RandomTerm, ...] = ()
    offset: str | None = None
    trials: str | None = None
    weights: str | None = None
    missing: tuple[tuple[str, str], ...] = ()
    sampling_weights: str | None = None

    @property
    def is_survival(self) -> bool:
        """True if the response is ``Surv(...)``."""
        return "time" in dict(self.outcome)

    @property
    def rows(self) -> dict[str, str]:
        """Expressions of the arrays with one number per row, by name."""
        extra = {"offset": self.offset, "trials": self.trials, "weights": self.weights}
        return dict(self.outcome) | {key: text for key, text in extra.items() if text is not None}

    @property
    def parts(self) -> tuple[str, ...]:
        """Right sides of the formula, of random effects, and of models of missing covariates."""
        left = (term.left for term in self.random)
        return (self.fixed, *left, *(text for _, text in self.missing))

    @property
    def covariates(self) -> tuple[str, ...]:
        """Names of the columns of all coefficients, without grouping factors."""
        return tuple(dict.fromkeys(name for text in self.parts for name in columns_of(text)))

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the grouping factors."""
        return tuple(dict.fromkeys(name for term in self.random for name in term.factors))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that the formula needs."""
        names = [name for text in self.rows.values() for name in names_in(text)]
        return tuple(dict.fromkeys([*names, *self.covariates, *self.factors]))


def parse(text: str) -> Formula:
    """Return the parts of a formula.

    Parameters
    ----------
    text
        Formula ``response ~ terms``. Terms follow R and the package formulaic, with ``s(x, 4)``
        (a natural spline with 4 columns), ``offset(x)`` and random effects: ``(1 + x | g)``,
        ``(x || g)`` without correlations, ``(1 | a/b)`` nested and ``(1 | a:b)``. The response may
        be ``y``, ``y | trials(n)``, ``y | weights(w)``, ``Surv(time, event)``,
        ``Surv(start, stop, event)`` or ``Surv(lower, upper, type="interval")``.

    Raises
    ------
    ValueError
        If the formula is incomplete, uses unknown functions, or has a bar without a group.

    Examples
    --------
    >>> formula = parse("y | trials(n) ~ age + offset(log(t)) + (1 | hospital/patient)")
    >>> formula.fixed, formula.trials, formula.offset
    ('age', 'n', 'log(t)')
    >>> [term.label for term in formula.random]
    ['hospital', 'hospital:patient']
    """
    sides = [piece for _, piece in split(text, ("~",))]
    if len(sides) != 2 or not all(sides):
        raise ValueError(f"A formula is 'response ~ terms', such as 'y ~ age'; got {text!r}.")
    response, options = _read_response(sides[0])
    fixed, offsets = "", []
    random: list[RandomTerm] = []
    for sign, piece in split(sides[1], ("+", "-")):
        if sign != "-" and _has_bar(_in_brackets(piece)):
            random += _read_bars(piece[1:-1])
        elif _has_bar(piece) or _has_bar(_in_brackets(piece)):
            raise ValueError(
                f"Random effects are in brackets and added, such as '+ (1 | hospital)'; got "
                f"'{sign} {piece}' in {text!r}."
            )
        elif piece.startswith("offset("):
            offset = _arguments(piece, (1,))[0][0]
            offsets.append(f"-({offset})" if sign == "-" else offset)
        else:
            fixed += f" {sign or '+'} {piece}" if piece else ""
    labels = [term.label for term in random]
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated:
        raise ValueError(
            f"Two terms of {text!r} have the groups {repeated[0]!r}. Write one term, such as "
            f"(1 + x || {repeated[0]}) for coefficients without correlations."
        )
    formula = Formula(
        text,
        response,
        _read_outcome(response),
        fixed.removeprefix(" + ").strip() or "1",
        tuple(random),
        " + ".join(offsets) or None,
        options.get("trials"),
        options.get("weights"),
    )
    _ = formula.columns  # raises for unknown functions
    texts = {x for part in formula.parts for term in terms_of(part).values() for x in term}
    coded = [name for x in texts if x.startswith("C(") for name in names_in(x)]
    plain = [
        name
        for x in texts
        if not x.startswith("C(") and not x.isnumeric()
        for name in (names_in(x) if "(" in x else [x])
    ]
    both = sorted({*coded}.intersection(plain))
    if both:
        raise ValueError(
            f"{both[0]!r} is both a number and a factor C(...) in {text!r}. Use one of the two, "
            f"or make two columns."
        )
    for factors in terms_of(formula.fixed).values():
        names = [x.removeprefix("C(").partition(",")[0].rstrip(")") for x in factors]
        if len(names) == 1 and names[0] in formula.factors:
            raise ValueError(
                f"{names[0]!r} has both coefficients and random effects in {text!r}. Keep one of "
                f"the two."
            )
    return formula


def split(text: str, marks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text between marks outside of brackets, with the mark before each."""
    expected: list[str] = []
    quote, mark, begin, i = "", "", 0, 0
    while i < len(text):
        letter = text[i]
        if quote:
            i += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "\"'`":
            quote = letter
        elif letter in _CLOSING:
            expected.append(_CLOSING[letter])
        elif letter in _CLOSING.values():
            if not expected or expected.pop() != letter:
                raise ValueError(f"A bracket {letter!r} closes nothing in {text!r}.")
        elif not expected:
            new_mark = next((x for x in marks if text.startswith(x, i)), None)
            if new_mark is not None:
                yield mark, text[begin:i].strip()
                mark, begin = new_mark, i + len(new_mark)
                i = begin - 1
        i += 1
    if quote or expected:
        raise ValueError(f"{quote or expected[-1]!r} is missing at the end of {text!r}.")
    yield mark, text[begin:].strip()


def _has_bar(text: str) -> bool:
    return len(list(split(text, ("|",)))) > 1


def _in_brackets(piece: str) -> str:
    """Return the inside of a piece that is a single pair of brackets, else an empty text."""
    if piece.startswith("(") and piece.endswith(")"):
        try:
            return next(split(piece[1:-1], ()))[1]
        except ValueError:  # such as (a) + (b)
            pass
    return ""


def _read_bars(bars: str) -> Iterator[RandomTerm]:
    """Yield the terms of ``left | groups``, one per level of nesting."""
    parts = list(split(bars, ("||", "|")))
    if len(parts) != 2 or not all(piece for _, piece in parts):
        raise ValueError(f"Random effects are (terms | group), such as (1 | site); got ({bars}).")
    factors: dict[str, None] = {}
    for _, level in split(parts[1][1], ("/",)):
        for _, name in split(level, (":",)):
            if not name.isidentifier() and not (name.startswith("`") and name.endswith("`")):
                raise ValueError(
                    f"Groups are names of columns, such as hospital, hospital/patient or "
                    f"hospital:ward; got {parts[1][1]!r} in ({bars})."
                )
            factors[name.strip("`")] = None
        yield RandomTerm(parts[0][1], tuple(factors), parts[1][0] == "|")


def _read_response(text: str) -> tuple[str, dict[str, str]]:
    """Return the response without its options, and the options ``trials`` and ``weights``."""
    (_, response), *pieces = split(text, ("|", "+")) if _has_bar(text) else [("", text)]
    options = {}
    for _, piece in pieces:
        name = piece.partition("(")[0].strip()
        if name not in ("trials", "weights"):
            raise ValueError(
                f"A response may end with '| trials(n)', '| weights(w)' or '| trials(n) + "
                f"weights(w)'; got {text!r}."
            )
        options[name] = _arguments(piece, (1,))[0][0]
    return response, options


def _read_outcome(response: str) -> tuple[tuple[str, str], ...]:
    """Return the names and expressions of the outcome's arrays."""
    if not response.startswith("Surv("):
        return (("y", response),)
    arguments, keywords = _arguments(response, (2, 3))
    kind = keywords.pop("type", None)
    names = ("start", "time", "event")[3 - len(arguments) :]
    if kind in ("interval", "interval2") and len(arguments) == 2:
        names = ("time", "upper")
    elif keywords or kind not in (None, "right", "counting"):
        raise ValueError(
            f"A survival outcome is Surv(time, event), Surv(start, stop, event) or "
            f'Surv(lower, upper, type="interval"); got {response!r}.'
        )
    return tuple(zip(names, arguments, strict=True))


def _arguments(text: str, counts: tuple[int, ...]) -> tuple[list[str], dict[str, Any]]:
    """Return the positional arguments of a call as texts, and its keywords."""
    try:
        call: Any = ast.parse(text, mode="eval").body
        keywords = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r} cannot be read: {error}.") from error
    if len(call.args) not in counts:
        raise ValueError(f"{text!r} needs {' or '.join(map(str, counts))} arguments.")
    return [ast.unparse(x) for x in call.args], keywords


def read_terms(text: str) -> list[Any]:
    """Return formulaic's terms of a formula without a response."""
    try:
        import formulaic
    except ImportError as error:
        raise missing_extra_error("Formulas need formulaic and pandas", "models") from error
    try:
        return list(formulaic.SimpleFormula.from_spec(formulaic.Formula(text)))
    except (formulaic.errors.FormulaicError, SyntaxError, ValueError, RecursionError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"The terms {text!r} cannot be read: {reason}.") from error


def terms_of(text: str) -> dict[str, list[str]]:
    """Return the terms of a formula without a response, each with its factors."""
    return {str(term): [str(factor) for factor in term.factors] for term in read_terms(text)}


@functools.cache
def columns_of(text: str) -> tuple[str, ...]:
    """Return the columns of a formula without a response; raise for unknown functions."""
    factors = [factor for term in read_terms(text) for factor in term.factors]
    names = [
        [factor.expr] if factor.eval_method.value == "lookup" else names_in(factor.expr)
        for factor in factors
    ]
    return tuple(dict.fromkeys(name for x in names for name in x))


def calls_in(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the function, the text and the columns of each call in a formula."""
    for term in read_terms(text):
        for factor in term.factors:
            if factor.eval_method.value == "python":
                for node in ast.walk(ast.parse(factor.expr, mode="eval")):
                    if isinstance(node, ast.Call):
                        call = ast.unparse(node)
                        yield ast.unparse(node.func), call, names_in(call)


def names_in(expression: str) -> list[str]:
    """Return the columns of an expression of Python, or of a name in backticks.

    Raise `ValueError` unless it has only arithmetic, comparisons and functions of formulas, so that
    the formula of another site cannot run other code.
    """
    if expression.startswith("`"):
        return [expression.strip("`")]
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} cannot be read: {error.msg}.") from error
    called, names = set(), []
    for node in ast.walk(tree):  # parents come before their parts
        if isinstance(node, ast.Call):
            called.add(id(node.func))
        if isinstance(node, ast.Name):
            if id(node) not in called and node.id not in _CALLED:
                names.append(node.id)
                continue
            is_valid = id(node) not in called or node.id in _CALLED
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            is_valid = node.attr in _ATTRIBUTES.get(node.value.id, ())
        else:
            is_valid = isinstance(node, _PARTS)
        if not is_valid:
            raise ValueError(
                f"{ast.unparse(node)!r} in {expression!r} is no function of formulas, such as "
                f"{', '.join((*STATEFUL, *FUNCTIONS))}. Compute the column before."
            )
    return [name for name in dict.fromkeys(names) if name not in _ATTRIBUTES]


def evaluate(expression: str, columns: Mapping[str, Any]) -> Any:
    """Return an expression of columns, which `names_in` has accepted."""
    if expression.strip("`") in columns:
        return columns[expression.strip("`")]
    functions = {name: getattr(np, name) for name in FUNCTIONS}
    scope = {**functions, "I": lambda x: x, "np": np, **columns, "__builtins__": {}}
    with np.errstate(all="ignore"):
        return eval(compile(expression, "<formula>", "eval"), scope)
