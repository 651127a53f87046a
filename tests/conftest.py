"""Shared by all tests: the oracles' folder on the path, compiled programs kept in bounds."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `laws` is imported by name

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
