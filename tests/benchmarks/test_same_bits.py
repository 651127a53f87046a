"""The comparison of `benchmarks.same_bits`: what it takes for the same, and what it says if not."""

import numpy as np
import pytest

from benchmarks.same_bits import compare, report

KEY = np.array([1, 2], np.uint32)


def make_row(**changes):
    row = {
        "draws": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
        "info['gradient_norm']": np.array([1.0, np.nan], np.float32),
        "state.clients.own": np.zeros(3, np.float32),
        "state.server": KEY,
        "totals['bits_up']": np.array([640, 640]),
    }
    return row | changes


def renamed(row, **names):
    """Return `row`, its paths ``state.<old>`` renamed to ``state.<new>``, in the same order."""
    names = {f"state.{old}": f"state.{new}" for old, new in names.items()}
    return {names.get(name, name): leaf for name, leaf in row.items()}


def test_equal_rows_are_the_same_with_nan():
    assert compare(make_row(), make_row()).kind == "same"
    assert compare(make_row(), make_row()).note == ""


@pytest.mark.parametrize("name", ["draws", "state.clients.own", "info['gradient_norm']"])
def test_one_bit_differs(name):
    leaf = make_row()[name].copy()
    leaf.view(np.uint32).flat[0] ^= 1
    verdict = compare(make_row(), make_row(**{name: leaf}))
    assert verdict.kind == "differs" and verdict.fails
    assert name in verdict.note and ", 1 units in the last place" in verdict.note


def test_signs_of_zeros_and_payloads_of_nan_are_bits():
    for name, leaf in (
        ("state.clients.own", -np.zeros(3, np.float32)),
        ("info['gradient_norm']", -make_row()["info['gradient_norm']"] * np.float32([-1, 1])),
    ):
        assert compare(make_row(), make_row(**{name: leaf})).kind == "differs"


def test_largest_difference_of_all_leaves():
    draws = make_row()["draws"].copy()
    draws[0, 0] = -draws[0, 0]
    changed = make_row(**{"draws": draws, "totals['bits_up']": np.array([640, 647])})
    note = compare(make_row(), changed).note
    assert note == f"draws and 1 more: at most 7, {2 * 0x3F800000} units in the last place"


def test_other_shapes_and_types():
    wider = make_row(draws=make_row()["draws"].astype(np.float64))
    assert "float32[2, 3] became float64[2, 3]" in compare(make_row(), wider).note
    flat = make_row(draws=make_row()["draws"].reshape(3, 2))
    assert "[2, 3] became float32[3, 2]" in compare(make_row(), flat).note


def test_renamed_paths_of_a_state():
    row = make_row()
    moved = renamed(row, **{"clients.own": "clients.own_state"})
    assert compare(row, moved).note == "[state matched by order]"
    assert not compare(row, moved).fails
    # In another order, and where a name that remains now holds something else.
    swapped = renamed(row, **{"server": "clients.own", "clients.own": "late"})
    turned = dict(reversed(swapped.items()))
    assert compare(row, turned).note == "[state matched as a multiset]"
    assert not compare(row, turned).fails
    moved["state.server"] = KEY + KEY
    assert compare(row, moved).note.startswith("state.server: at most 2")


def test_leaves_that_came_or_went():
    row = make_row()
    assert "state.late only in NEW" in compare(row, make_row(**{"state.late": KEY})).note
    assert "state.late only in OLD" in compare(make_row(**{"state.late": KEY}), row).note
    assert compare(row, make_row(**{"state.late": KEY})).fails
    # Outside of the state a name is part of the contract.
    assert compare(row, make_row(**{"info['round']": KEY})).kind == "differs"
    renamed_draws = {"draws['a']" if name == "draws" else name: x for name, x in row.items()}
    assert compare(row, renamed_draws).fails


def test_report_of_rows_that_are_missing_or_raise():
    row, other = make_row(), make_row(draws=np.ones((2, 3), np.float32))
    old = {"a": row, "b": row, "gone": row, "raises": row}
    lines, fails = report(old, {"a": row, "b": other, "new": row, "raises": "ValueError: no"})
    assert fails
    assert [line.split()[:2] for line in lines[:2]] == [["a", "same"], ["b", "differs"]]
    assert lines[2:5] == ["gone    only in OLD", "raises  error        NEW: ValueError: no",
                          "new     only in NEW"]  # fmt: skip
    assert lines[-1] == "1 rows same, 1 differ, 1 with errors, 1 only in OLD, 1 only in NEW."


@pytest.mark.parametrize(
    ("old", "new", "fails"),
    [
        ({"a": {}}, {"a": {}, "b": {}}, False),
        ({"a": {}, "b": {}}, {"a": {}}, True),
        ({"a": "E: x"}, {"a": "E: x"}, True),
        ({"a": {}}, {"a": "E: x"}, True),
    ],
)
def test_only_what_is_new_does_not_fail(old, new, fails):
    assert report(old, new)[1] is fails


def test_a_new_row_that_raises_is_told():
    assert report({}, {"a": "E: x"})[0][0] == "a  only in NEW  NEW: E: x"
