"""Shared by all tests: compiled programs are kept in bounds."""

from pathlib import Path

import jax
import pytest

MAPS = Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Linux grants a process 65,530 memory maps, compiled programs take some each, and a compiler that
gets no more of them crashes the process."""


@pytest.fixture(autouse=True, scope="module")
def programs_kept_in_bounds():
    """Drop compiled programs after a module where the process holds many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
