"""Every study of a paper starts at a tiny size and measures what its record has.

``studies/<paper>.yaml`` maps a study to `arguments` that make it tiny, to `absent`, metrics of its
record that so few rounds or rows cannot give, and to ``data: true`` if its data set is no part of a
package. `chosen` is an argument that leaves out methods, since each compiles programs of its own.
"""

import sys
from pathlib import Path

import pytest
import yaml

from experiments import run, tidy

FILES = sorted((Path(__file__).parent / "studies").glob("*.yaml"))
STUDIES = {name: tiny for file in FILES for name, tiny in yaml.safe_load(file.read_text()).items()}


def marks(tiny):
    return [getattr(pytest.mark, name) for name in ("data", "slow") if tiny.get(name)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(tiny)) for name, tiny in STUDIES.items()]
)
def test_a_study_measures_what_its_record_has(name, monkeypatch, tmp_path):
    tiny = STUDIES[name]
    monkeypatch.setenv("FEDMCMC_RESULTS", str(tmp_path))
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
    chosen = [tiny["chosen"]] if "chosen" in tiny else []
    given = [f"study={name}", *tiny["arguments"], *chosen]
    grid = any(not argument.startswith("special.") for argument in given[1:])
    monkeypatch.setattr(sys, "argv", ["run", *given, *(quiet if grid else ())])
    run.main()
    assert tidy.take(tmp_path / name, tmp_path / "records") == name
    found = {(row.method, row.metric) for row in tidy.read(name, tmp_path / "records")}
    recorded = {(row.method, row.metric) for row in tidy.read(name)}
    absent = {*tiny.get("absent", ())}
    missing = {pair for pair in recorded - found if pair[1].removesuffix(" s.e.") not in absent}
    methods = {method for method, _ in found}
    assert not [pair for pair in missing if pair[0] in methods or not chosen]
