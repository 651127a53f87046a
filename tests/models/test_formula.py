"""Formulas are split at bars and brackets, and run no code but arithmetic."""

import pytest

from fedmcmc.models._formula import RandomTerm, columns_of, evaluate, names_in, parse, split


def test_parts_of_a_formula():
    formula = parse("use ~ age*urban + s(bmi, 4) - 1 + (1 + urban | district) + offset(log(t))")
    assert formula.outcome == (("y", "use"),)
    assert formula.fixed == "age*urban + s(bmi, 4) - 1"
    assert formula.random == (RandomTerm("1 + urban", ("district",)),)
    assert formula.offset == "log(t)"
    assert formula.columns == ("use", "t", "age", "urban", "bmi", "district")


@pytest.mark.parametrize(
    ("bars", "terms"),
    [
        ("(1 | a/b)", [("1", ("a",), True), ("1", ("a", "b"), True)]),
        ("(x | a:b)", [("x", ("a", "b"), True)]),
        ("(x || g)", [("x", ("g",), False)]),
        (
            "(0 + x | a/b:c)",
            [("0 + x", ("a",), True), ("0 + x", ("a", "b", "c"), True)],
        ),
        ("(1 | a) + (1 | b)", [("1", ("a",), True), ("1", ("b",), True)]),
        ("(1 | `ward no`)", [("1", ("ward no",), True)]),
        ("(I(x | y) | g)", [("I(x | y)", ("g",), True)]),
    ],
)
def test_bars(bars, terms):
    assert parse(f"y ~ {bars}").random == tuple(RandomTerm(*term) for term in terms)


def test_offsets_add_up():
    formula = parse("y ~ offset(log(t)) + x - offset(z) - 1")
    assert (formula.offset, formula.fixed) == ("log(t) + -(z)", "x - 1")
    assert evaluate(formula.offset, {"t": 1.0, "z": 2.0}) == -2.0
    assert (parse("y ~ offset(t)").fixed, parse("y ~ -1 + x").fixed) == ("1", "- 1 + x")


def test_a_bar_in_a_function_is_no_random_effect():
    formula = parse("y ~ I(x | z) + (a + b)**2 + C(g, levels=['u|v', 'w)'])")
    assert formula.random == ()
    assert formula.fixed == "I(x | z) + (a + b)**2 + C(g, levels=['u|v', 'w)'])"


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("Surv(t, e)", {"time": "t", "event": "e"}),
        ("Surv(t, e == 2)", {"time": "t", "event": "e == 2"}),
        ("Surv(a, b, e)", {"start": "a", "time": "b", "event": "e"}),
        ('Surv(l, u, type="interval")', {"time": "l", "upper": "u"}),
        ("log(y)", {"y": "log(y)"}),
    ],
)
def test_outcomes(response, outcome):
    formula = parse(f"{response} ~ 1")
    assert dict(formula.outcome) == outcome
    assert formula.is_survival == ("time" in outcome)


def test_options_of_the_response():
    formula = parse("y | trials(n) + weights(w) ~ x")
    assert (formula.response, formula.trials, formula.weights) == ("y", "n", "w")
    assert formula.rows == {"y": "y", "trials": "n", "weights": "w"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y", "such as 'y ~ age'; got 'y'"),
        ("y ~", "got 'y ~'"),
        ("y ~ x ~ z", "response ~ terms"),
        ("y ~ (1 |)", r"such as \(1 \| site\); got \(1 \|\)"),
        ("y ~ (1 | a/)", "Groups are names of columns.*got 'a/'"),
        ("y ~ (1 | sin(x))", "Groups are names of columns.*got 'sin"),
        ("y ~ x | g", "Random effects are in brackets"),
        ("y ~ x - (1 | g)", "Random effects are in brackets and added"),
        ("y ~ (1 | g", r"'\)' is missing"),
        ("y ~ x) + z", r"'\)' closes nothing"),
        ("y ~ (1 | g) + (0 + x | g)", r"have the groups 'g'. Write one term, such as \(1 \+ x"),
        ("y ~ g + (1 | g)", "'g' has both coefficients and random effects"),
        ("y ~ C(g) + (1 | g)", "'g' has both"),
        ("y ~ C(g, contr.sum) + (1 | g)", "'g' has both"),
        ("y ~ x + C(x)", "'x' is both a number and a factor"),
        ("y ~ C(x) + (log(x) | g)", "'x' is both a number and a factor"),
        ("y ~ foo(x)", r"'foo' in 'foo\(x\)' is no function of formulas, such as s, bs"),
        ("y ~ hashed(x)", "'hashed'"),
        ("Surv(t) ~ x", "2 or 3 arguments"),
        ('Surv(t, e, type="left") ~ x', r"Surv\(lower, upper, type="),
        ("y | foo(n) ~ x", "may end with"),
        ("y | trials(n, m) ~ x", "1 arguments"),
        ("y ~ .", "cannot be read"),
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('true')",
        "open('rows.csv')",
        "np.load('x')",
        "x.__class__",
        "(lambda: x)()",
        "[x for x in y]",
        "I(x).__class__",
        "x[0]",
        "eval('x')",
        "contr.custom(x)",
        "f'{x.real}'",
    ],
)
def test_a_formula_runs_no_other_code(code):
    with pytest.raises(ValueError, match=r"is no function of formulas|cannot be read"):
        names_in(code)
    for text in (f"y ~ {{{code}}}", f"y ~ I({code})", f"{code} ~ x", f"y ~ offset({code})"):
        with pytest.raises(ValueError, match=r"no function of formulas|cannot be read|closes"):
            parse(text)


def test_pieces_between_marks():
    text = "a + f(b + c) - 'd + e' + `g + h`"
    assert list(split(text, ("+", "-"))) == [
        ("", "a"),
        ("+", "f(b + c)"),
        ("-", "'d + e'"),
        ("+", "`g + h`"),
    ]


def test_escaped_quotes_do_not_end_a_text():
    assert [*split(r"f('a\'+(') + b", ("+",))] == [("", r"f('a\'+(')"), ("+", "b")]


def test_columns_and_values_of_expressions():
    assert columns_of("a*b + C(c, contr.sum) + np.log(d) + `e f`") == ("a", "b", "c", "d", "e f")
    assert names_in("status == 'dead'") == ["status"]
    assert evaluate("log(t) + 1", {"t": 1.0}) == 1.0
