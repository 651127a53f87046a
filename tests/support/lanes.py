"""Which cases of a test belong to the fast lane, and which to the slow one."""

import pytest


def fast_and_slow(cases, fast):
    """Return all cases, those not in `fast` marked slow."""
    assert set(fast) <= set(cases)
    return [pytest.param(c, marks=() if c in fast else pytest.mark.slow) for c in cases]
