"""`import fedmcmc` imports little, and the rest on first use."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedmcmc


def names_for_type_checkers():
    """Return the names under ``if TYPE_CHECKING`` of the root package, with their modules."""
    tree = ast.parse(Path(fedmcmc.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname: line.module
        for line in block.body
        for alias in line.names
        if isinstance(line, ast.ImportFrom)
    }


def test_large_packages_are_imported_on_first_use():
    code = (
        "import sys, fedmcmc\n"
        "print(*(x for x in sys.argv[1:] if x in sys.modules))\n"
        "fedmcmc.fit, fedmcmc.metrics.reliability, fedmcmc.deploy.Site\n"
    )
    packages = ("criticism", "deploy", "fitting", "interop", "metrics", "tuning")
    names = [f"fedmcmc.{package}" for package in packages]
    names += ["arviz_stats", "scipy.optimize", "scipy.stats", "flax", "pandas"]
    run = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


def test_type_checkers_and_the_interpreter_see_the_same_names():
    seen = names_for_type_checkers()
    functions = {name: module for name, module in seen.items() if module != "fedmcmc"}
    assert functions == fedmcmc._FUNCTIONS
    assert {name for name, module in seen.items() if module == "fedmcmc"} <= {*fedmcmc._PACKAGES}


def test_names_are_listed_before_they_are_imported():
    names = dir(fedmcmc)
    assert names == sorted(names)
    assert {"fit", "sample", "criticism", "from_numpyro", "lsd"} <= {*names}
    for name in names:
        getattr(fedmcmc, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'fedmcmc' has no attribute 'fitt'"):
        fedmcmc.fitt  # noqa: B018
