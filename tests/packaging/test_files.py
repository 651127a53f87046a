"""The files around the code agree with each other: Makefile, workflows, metadata, pages."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fedmcmc._checks import EXTRAS as MESSAGES

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*.md")]
EXTRAS = PROJECT["optional-dependencies"]
INSTALLED = {"grpc": "grpcio"}
LATE = {"fedmcmc/deploy/_sums.py", "fedmcmc/deploy/nvflare.py"}
"""Modules that import an extra's package at once; nothing imports them before they are used."""


def by_name(path):
    return path.name


@pytest.mark.parametrize("path", WORKFLOWS, ids=by_name)
def test_a_workflow_calls_only_targets_that_exist(path):
    workflow = yaml.safe_load(path.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    lines = [step["run"] for step in steps if "run" in step]
    assert lines
    for line in lines:
        program, target, *_ = line.split()
        assert program == "make" and target in TARGETS, line
    assert all(
        re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/x@v1")) for step in steps
    )
    assert all(job["runs-on"] == "ubuntu-latest" for job in workflow["jobs"].values())


def test_the_slow_workflow_runs_every_folder_of_tests():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "slow.yml").read_text())
    parts = workflow["jobs"]["test-slow"]["strategy"]["matrix"]["part"]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(parts) == folders - {"site"}  # of which docs.yml has a job
    assert parts == sorted(parts)


def test_hooks_and_the_ci_script_call_targets_that_exist():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    entries += re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert len(entries) > 2
    words = {word for entry in entries for word in shlex.split(entry)[1:]}
    assert {word for word in words if not re.search("^-|=", word)} <= TARGETS


def test_every_target_is_phony_and_listed_by_help():
    text = (ROOT / "Makefile").read_text()
    assert set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()) == TARGETS
    assert set(re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)) == TARGETS


def test_targets_hide_lines_about_cached_programs_and_the_package_does_not():
    make = ["make", "--no-print-directory", "--eval", "shown: ; @echo $$TF_CPP_MIN_LOG_LEVEL"]
    unset = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    for variables, level in (({}, "3"), ({"TF_CPP_MIN_LOG_LEVEL": "0"}, "0")):
        done = subprocess.run(
            [*make, "shown"],
            cwd=ROOT,
            env=unset | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == level
    # A target may set variables for itself; none sets this one.
    assert (ROOT / "Makefile").read_text().count("TF_CPP_MIN_LOG_LEVEL") == 1
    sources = [*ROOT.glob("src/**/*.py"), *ROOT.glob("hydra_plugins/**/*.py")]
    assert not [path for path in sources if "TF_CPP_MIN_LOG_LEVEL" in path.read_text()]
    for page in ("README.md", "docs/tutorials/quickstart.md", "docs/guides/errors.md"):
        assert "`TF_CPP_MIN_LOG_LEVEL=3`" in (ROOT / page).read_text()


def test_pages_name_targets_that_exist():
    for path in PAGES:
        assert set(re.findall(r"`make ([a-z-]+)", path.read_text())) <= TARGETS, path


@pytest.mark.parametrize("path", FORMS, ids=by_name)
def test_a_form_for_issues_has_the_fields_that_the_host_needs(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) > 0


def test_files_agree_on_version_license_and_repository():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert str(citation["version"]) == PROJECT["version"]
    assert changes[0] == "Unreleased"
    assert changes[1].startswith(f"{PROJECT['version']} - 20")
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]


def imported(nodes):
    """Return the packages that some lines import, as they are installed."""
    packages = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add(node.module.partition(".")[0])
    names = {
        INSTALLED.get(name, name.replace("_", "-")) for name in packages - sys.stdlib_module_names
    }
    return names - {"fedmcmc"}


def required_packages(requirements):
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


def test_imported_packages_are_requirements():
    """At once by the package itself, in functions by an extra, and not by chance through others."""
    always = required_packages(PROJECT["dependencies"])
    sometimes = always.union(
        *(
            required_packages(needed)
            for extra, needed in EXTRAS.items()
            if extra not in ("docs", "test")
        )
    )
    for path in (ROOT / "src").rglob("*.py"):
        module = path.relative_to(ROOT / "src").as_posix()
        tree = ast.parse(path.read_text())
        at_once = imported(tree.body)
        assert at_once <= (sometimes if module in LATE else always), module
        assert imported(ast.walk(tree)) <= sometimes, module


@pytest.mark.parametrize("extra", MESSAGES)
def test_errors_name_the_packages_of_the_extra(extra):
    def packages(extra):
        for text in EXTRAS[extra]:
            requirement = Requirement(text)
            if requirement.name == "fedmcmc":
                yield from (x for inner in requirement.extras for x in packages(inner))
            elif requirement.marker is None or requirement.marker.evaluate():
                requirement.marker = None
                yield requirement

    assert [Requirement(text) for text in MESSAGES[extra]] == list(packages(extra))


def test_no_text_installs_fedmcmc_from_an_index():
    for path in [*ROOT.glob("src/**/*.py"), *PAGES]:
        assert not re.search(r"pip install ['\"]?fedmcmc", path.read_text()), path
