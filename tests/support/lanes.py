"""Which cases of a test belong to which lane: check, fast or slow."""

import pytest


def fast_and_slow(cases, fast, check=()):
    """Return all cases, those not in `fast` marked slow, those in `check` for that lane too."""
    assert set(check) <= set(fast) <= set(cases)
    marks = {case: () if case in fast else pytest.mark.slow for case in cases}
    marks |= dict.fromkeys(check, pytest.mark.check)
    return [pytest.param(case, marks=marks[case]) for case in cases]
