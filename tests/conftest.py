"""Shared by all tests: how programs are compiled, and how many are kept."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") and version("jaxlib").startswith("0.10."):
    # A lane that compiles quickly (see the Makefile). XLA's newer emitters of loops take twice as
    # long as those before them, and to cut a program of a test in 32 parts costs more than the
    # parts. Later versions do not know the first flag, and abort on unknown ones.
    given = os.environ.get("XLA_FLAGS", "").split()
    quick = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    os.environ["XLA_FLAGS"] = " ".join([*given, *(flag for flag in quick if flag not in given)])

import jax
import pytest

MAPS = Path("/proc/self/maps")
MAX_MAPS = 30_000
"""Linux grants a process 65,530 memory maps, compiled programs take some each, and a compiler that
gets no more of them crashes the process."""


def pytest_configure(config):
    """Judge no draws where a test does not ask for it: most runs of tests are far too short.

    Those of examples are judged: none may warn.
    """
    if not config.getoption("doctestmodules"):
        config.addinivalue_line("filterwarnings", "ignore::fedmcmc.DiagnosisWarning")


def pytest_collection_finish():
    """Look for cycles less often, and not among what was imported: a seventh of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def num_maps() -> int:
    return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def programs_kept_in_bounds():
    """Drop compiled programs after a module where the process holds many."""
    yield
    if num_maps() > MAX_MAPS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def programs_kept_in_bounds_within_a_module(request):
    """The same after a slow test where it holds very many: a module has up to a hundred of them."""
    yield
    if request.node.get_closest_marker("slow") and num_maps() > 1.5 * MAX_MAPS:
        jax.clear_caches()
