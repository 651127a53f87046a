"""Formulas of regression models with random effects, such as ``y ~ age + (1 + age | hospital)``."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedmcmc._checks import missing_extra_error

_CLOSING = {"(": ")", "[": "]", "{": "}"}
FUNCTIONS = frozenset(
    "log log2 log10 log1p exp expm1 sqrt abs sin cos tanh floor ceil minimum maximum where".split()
)
"""Functions of NumPy that a formula may call on columns."""
STATEFUL = frozenset("s bs cr cs cc poly center scale standardize".split())
"""Functions whose columns depend on quantiles or moments of all clients' rows."""
_CODINGS = frozenset("C I Treatment Sum Poly Helmert Diff".split())
_CONTRASTS = frozenset("treatment sum poly helmert diff SAS".split())
_NODES = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.List, ast.Tuple,
)  # fmt: skip


@dataclass(frozen=True)
class RandomTerm:
    """Random effects ``(left | factors)`` of a formula.

    Attributes
    ----------
    left
        Formula of the columns whose coefficients vary, such as ``1 + age``.
    factors
        Names of the columns whose combinations are the groups.
    correlated
        Whether the coefficients of a group are correlated; false for ``(left || factors)``.
    """

    left: str
    factors: tuple[str, ...]
    correlated: bool = True

    @property
    def label(self) -> str:
        """Name of the groups, such as ``hospital`` or ``hospital:patient``."""
        return ":".join(self.factors)


@dataclass(frozen=True)
class Formula:
    """Parts of a formula.

    Attributes
    ----------
    text
        Formula as written.
    response
        Text to the left of ``~``, without `trials` and `weights`.
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

    Examples
    --------
    >>> formula = parse("y | trials(n) ~ age + offset(log(t)) + (1 | hospital/patient)")
    >>> formula.fixed, formula.trials, formula.offset
    ('age', 'n', 'log(t)')
    >>> [term.label for term in formula.random]
    ['hospital', 'hospital:patient']
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
        """Whether the response is ``Surv(...)``."""
        return "time" in dict(self.outcome)

    @property
    def rows(self) -> dict[str, str]:
        """Expressions of the arrays with one number per row, by name."""
        extra = {"offset": self.offset, "trials": self.trials, "weights": self.weights}
        return dict(self.outcome) | {key: text for key, text in extra.items() if text is not None}

    @property
    def parts(self) -> tuple[str, ...]:
        """Right sides of the formula, of random effects, and of models of missing covariates."""
        left = [term.left for term in self.random]
        return (self.fixed, *left, *(text for _, text in self.missing))

    @property
    def covariates(self) -> tuple[str, ...]:
        """Names of the columns of all coefficients, without grouping factors."""
        return tuple(dict.fromkeys(x for text in self.parts for x in columns_of(text)))

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the grouping factors."""
        return tuple(dict.fromkeys(x for term in self.random for x in term.factors))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that the formula needs."""
        names = [x for text in self.rows.values() for x in names_in(text)]
        return tuple(dict.fromkeys([*names, *self.covariates, *self.factors]))


def parse(text: str) -> Formula:
    """Return the parts of a formula.

    Parameters
    ----------
    text
        Formula ``response ~ terms``. Terms are those of R and of the package formulaic, ``s(x, 4)``
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
    >>> parse("use ~ age + urban + (1 + urban | district)").random
    (RandomTerm(left='1 + urban', factors=('district',), correlated=True),)
    """
    sides = [piece for _, piece in split(text, ("~",))]
    if len(sides) != 2 or not all(sides):
        raise ValueError(f"A formula is 'response ~ terms', such as 'y ~ age'; got {text!r}.")
    response, options = _read_response(sides[0])
    fixed: list[str] = []
    offsets: list[str] = []
    random: list[RandomTerm] = []
    for sign, piece in split(sides[1], ("+", "-")):
        bars = _in_brackets(piece)
        if bars is not None and len(list(split(bars, ("||", "|")))) > 1:
            if sign == "-":
                raise ValueError(f"Random effects cannot be subtracted: '- {piece}' in {text!r}.")
            random += _read_bars(bars)
        elif len(list(split(piece, ("||", "|")))) > 1:
            raise ValueError(
                f"Write random effects in brackets, such as ({piece}), and add them with '+'; got "
                f"{piece!r} in {text!r}."
            )
        elif piece.startswith("offset("):
            offsets += _arguments(piece, "offset", 1)[0]
        elif piece or sign == "-":
            fixed.append(f"{'- ' if sign == '-' else '+ ' if fixed else ''}{piece}")
    labels = [term.label for term in random]
    repeated = [label for label in labels if labels.count(label) > 1]
    if repeated:
        raise ValueError(
            f"Two terms of {text!r} have the groups {repeated[0]!r}. Write one term, such as "
            f"(1 + x || {repeated[0]}) for coefficients without correlations."
        )
    offset = " + ".join(offsets) if offsets else None
    formula = Formula(text, response, (), " ".join(fixed) or "1", tuple(random), offset, **options)
    formula = Formula(**{**vars(formula), "outcome": _read_outcome(response)})
    for expression in formula.rows.values():
        check_expression(expression, text)
    for left in (formula.fixed, *(term.left for term in random)):
        columns_of(left)
    for factor in formula.factors:
        if f"C({factor})" in terms_of(formula.fixed) or factor in terms_of(formula.fixed):
            raise ValueError(
                f"{factor!r} has both a coefficient and random effects in {text!r}. Keep one of "
                f"the two."
            )
    return formula


def split(text: str, marks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a text between `marks`, each with the mark in front of it.

    Marks in brackets and in quotes do not count.
    """
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
            mark_at_i = next((x for x in marks if text.startswith(x, i)), None)
            if mark_at_i is not None:
                yield mark, text[begin:i].strip()
                mark, begin = mark_at_i, i + len(mark_at_i)
                i = begin - 1
        i += 1
    if quote or expected:
        raise ValueError(f"{quote or expected[-1]!r} is missing at the end of {text!r}.")
    yield mark, text[begin:].strip()


def _in_brackets(piece: str) -> str | None:
    """Return the inside of a piece that is a single pair of brackets, else ``None``."""
    if not (piece.startswith("(") and piece.endswith(")")):
        return None
    depth = 0
    for i, letter in enumerate(piece):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return piece[1:i].strip() if i == len(piece) - 1 else None
    return None


def _read_bars(bars: str) -> list[RandomTerm]:
    """Return the terms of ``left | groups``, one per level of nesting."""
    parts = list(split(bars, ("||", "|")))
    if len(parts) != 2 or not all(piece for _, piece in parts):
        raise ValueError(
            f"Random effects are (terms | group), such as (1 | hospital); got ({bars})."
        )
    (_, left), (mark, groups) = parts
    factors: tuple[str, ...] = ()
    terms = []
    for _, level in split(groups, ("/",)):
        names = tuple(piece.strip("`") for _, piece in split(level, (":",)))
        for name in names:
            if not name.isidentifier() and f"`{name}`" not in level:
                raise ValueError(
                    f"Groups are names of columns, such as hospital, hospital/patient or "
                    f"hospital:ward; got {groups!r} in ({bars})."
                )
        factors += tuple(name for name in names if name not in factors)
        terms.append(RandomTerm(left, factors, mark == "|"))
    return terms


def _read_response(text: str) -> tuple[str, dict[str, str]]:
    """Return the response without its options, and the options ``trials`` and ``weights``."""
    pieces = [piece for _, piece in split(text, ("|",))]
    options: dict[str, str] = {}
    for _, piece in split(pieces[1], ("+",)) if len(pieces) == 2 else ():
        name = piece.partition("(")[0].strip()
        if name not in ("trials", "weights"):
            raise ValueError(
                f"After the response stand 'trials(n)' or 'weights(w)', such as 'y | trials(n)'; "
                f"got {piece!r}."
            )
        options[name] = _arguments(piece, name, 1)[0][0]
    if len(pieces) > 2:
        raise ValueError(f"Write 'y | trials(n) + weights(w)' with a single bar; got {text!r}.")
    return pieces[0], options


def _read_outcome(response: str) -> tuple[tuple[str, str], ...]:
    """Return the names and expressions of the outcome's arrays."""
    if not response.startswith("Surv("):
        return (("y", response),)
    arguments, keywords = _arguments(response, "Surv", 2, 3)
    kind = ast.literal_eval(keywords.pop("type", "None"))
    names = ("time", "event") if len(arguments) == 2 else ("start", "time", "event")
    if kind in ("interval", "interval2") and len(arguments) == 2:
        names = ("time", "upper")
    elif keywords or kind not in (None, "right", "counting"):
        raise ValueError(
            f"A survival outcome is Surv(time, event), Surv(start, stop, event) or "
            f'Surv(lower, upper, type="interval"); got {response!r}.'
        )
    return tuple(zip(names, arguments, strict=True))


def _arguments(call: str, name: str, *counts: int) -> tuple[list[str], dict[str, str]]:
    """Return the positional arguments and the keywords of a call as texts."""
    inside = _in_brackets(call[len(name) :].strip())
    pieces = [piece for _, piece in split(inside or "", (",",))]
    arguments, keywords = [], {}
    for piece in pieces:
        key, _, value = piece.partition("=")
        if key.strip().isidentifier() and value and not value.startswith("="):
            keywords[key.strip()] = value.strip()
        elif piece:
            arguments.append(piece)
    if len(arguments) not in counts:
        number = " or ".join(map(str, counts))
        raise ValueError(f"{name}(...) takes {number} arguments, got {call!r}.")
    return arguments, keywords


def terms_of(text: str) -> dict[str, list[str]]:
    """Return the terms of a formula without a response, each with its factors' expressions."""
    return {str(term): [str(factor) for factor in term.factors] for term in _read_terms(text)}


def columns_of(text: str) -> list[str]:
    """Return the columns of a formula without a response; raise for unknown functions."""
    names: list[str] = []
    for term in _read_terms(text):
        for factor in term.factors:
            if factor.eval_method.value == "lookup":
                names.append(factor.expr)
            elif factor.eval_method.value == "python":
                names += check_expression(factor.expr, text)
    return list(dict.fromkeys(names))


def calls_in(text: str) -> list[ast.Call]:
    """Return the calls of functions in a formula without a response, outer calls first."""
    trees = [
        ast.parse(factor.expr, mode="eval")
        for term in _read_terms(text)
        for factor in term.factors
        if factor.eval_method.value == "python"
    ]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _read_terms(text: str) -> list[Any]:
    try:
        import formulaic
    except ImportError as error:
        raise missing_extra_error("Formulas need formulaic and pandas", "models") from error
    try:
        terms: Any = formulaic.Formula(text)
        if not isinstance(terms, formulaic.SimpleFormula):
            raise ValueError("'|' and '~' separate parts.")
    except (formulaic.errors.FormulaicError, SyntaxError, ValueError, RecursionError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        raise ValueError(f"The terms {text!r} cannot be read: {reason}.") from error
    return list(terms)


def names_in(expression: str) -> list[str]:
    """Return the columns of an expression; a name in backticks is a column as well."""
    if expression.startswith("`") and expression.count("`") == 2:
        return [expression.strip("`")]
    return check_expression(expression, expression)


def check_expression(expression: str, text: str) -> list[str]:
    """Return the columns of an expression of Python.

    Raise `ValueError` unless it has only arithmetic, comparisons and functions of this module, so
    that a formula of another site cannot run other code.
    """
    if expression.startswith("`") and expression.count("`") == 2:
        return [expression.strip("`")]
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} in {text!r} cannot be read: {error.msg}.") from error
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    modules: set[int] = set()
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = node.value.id, node.attr
            modules.add(id(node.value))
            if name in {"contr": _CONTRASTS, "np": FUNCTIONS}.get(module, ()):
                continue
        elif isinstance(node, ast.Name) and id(node) in called:
            if node.id in FUNCTIONS | STATEFUL | _CODINGS:
                continue
        elif isinstance(node, _NODES):
            is_column = isinstance(node, ast.Name) and id(node) not in modules
            if is_column and node.id not in _CODINGS:
                names.append(node.id)
            continue
        known = ", ".join(sorted(FUNCTIONS | STATEFUL | {"C", "I"}))
        raise ValueError(
            f"{ast.unparse(node)!r} in {text!r} is no function of formulas. Use {known}, or compute "
            f"the column before."
        )
    return list(dict.fromkeys(names))


def evaluate(expression: str, columns: Mapping[str, Any]) -> Any:
    """Return an expression of columns, which `check_expression` has accepted."""
    import numpy as np

    if expression.strip("`") in columns:
        return columns[expression.strip("`")]
    functions = {name: getattr(np, name) for name in FUNCTIONS}
    scope = {**functions, "I": lambda x: x, "np": np, **columns, "__builtins__": {}}
    with np.errstate(all="ignore"):
        return eval(compile(expression, "<formula>", "eval"), scope)
