"""Wheel and sdist as users get them: built, installed in new environments, and used."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from fedmcmc._checks import EXTRAS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FEDERATION = """
import jax
import numpy as np
import fedmcmc

def log_likelihood(theta, rows):
    return -0.5 * (rows - theta) ** 2

data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
posterior = fedmcmc.Posterior(lambda theta: -0.5 * theta**2, log_likelihood)
kernel = fedmcmc.lsd(posterior, step_size=0.1)

def sample(**settings):
    return fedmcmc.sample(
        jax.random.key(0), kernel, data, 0.0, num_rounds=20, progress=False, **settings
    )
"""

# What each extra promises; without it the same lines say which one to install.
USES = {
    "arviz": FEDERATION + "sample().to_datatree().to_netcdf('draws.nc')",
    "deploy": """
        from fedmcmc.__main__ import main

        raise SystemExit(main(["deploy", "request", "zurich"]))
    """,
    "flax": FEDERATION
    + """
from fedmcmc import from_flax
try:
    from flax import linen
except ImportError:
    linen = None
module = linen and linen.Dense(1)
example = {"x": np.ones((2, 1), np.float32), "y": np.zeros(2, np.float32)}
from_flax(module, example=example, prior_scale=1.0, likelihood="bernoulli")
""",
    "plots": FEDERATION
    + """
import numpyro
import numpyro.distributions as dist

def model(rows):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(rows)):
        numpyro.sample("x", dist.Normal(theta, 1.0), obs=rows)

fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False).report.save("fit.html")
""",
    "zarr": FEDERATION + "sample(record=fedmcmc.Record(draws_to='draws.zarr'))",
}


def run(*command, folder, **settings):
    """Run a command in a folder; return what it does, with its output as text."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**env, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
        **settings,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build = run(sys.executable, "-m", "hatchling", "build", "-d", folder, folder=ROOT)
    assert build.returncode == 0, build.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture
def environment(built, tmp_path):
    """Return a function that makes an environment with the wheel and an extra: its folder."""
    _, wheel = built
    folder = tmp_path / "environment"

    def make(extra=""):
        python = folder / "bin" / "python"
        run(sys.executable, "-m", "venv", folder, folder=tmp_path, check=True)
        what = f"{wheel}[{extra}]" if extra else wheel
        pins = ROOT / "constraints.txt"
        install = run(python, "-m", "pip", "install", "-c", pins, what, folder=tmp_path)
        assert install.returncode == 0, install.stderr
        return folder / "bin"

    yield make
    shutil.rmtree(folder, ignore_errors=True)  # half a gigabyte


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_sdist_builds_the_same_wheel(built, tmp_path):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = tmp_path / "again"
    build = run(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", again, folder=source
    )
    assert build.returncode == 0, build.stderr
    (rebuilt,) = again.iterdir()
    assert rebuilt.name == wheel.name
    assert contents(rebuilt) == contents(wheel)
    # What the targets of the Makefile, and the tests, look at.
    for name in ("README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "tests"):
        assert (source / name).exists(), name
    for name in ("docs", "examples", "configs", ".ci", ".github", ".pre-commit-config.yaml"):
        assert (source / name).exists(), name


def test_a_wheel_holds_the_package_and_nothing_else(built):
    names = contents(built[1])
    metadata = f"fedmcmc-{PROJECT['version']}.dist-info/"
    assert "fedmcmc/py.typed" in names
    assert {name.partition("/")[0] + "/" for name in names} == {"fedmcmc/", metadata}
    modules = {path.relative_to(ROOT / "src").as_posix() for path in ROOT.glob("src/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_a_wheel_runs_where_nothing_else_is(environment, tmp_path):
    programs = environment()
    script = tmp_path / "script.py"
    script.write_text(FEDERATION + "print(fedmcmc.__version__, sample().draws.shape)")
    ran = run(programs / "python", "-W", "error", script, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"{PROJECT['version']} (1, 20)\n"
    told = run(programs / "fedmcmc", folder=tmp_path).stdout
    assert f"fedmcmc: {PROJECT['version']}\n" in told
    assert re.search(r"^extra flax: flax missing$", told, re.MULTILINE)
    for extra, lines in USES.items():
        script.write_text(textwrap.dedent(lines))
        failed = run(programs / "python", script, folder=tmp_path)
        assert failed.returncode != 0, extra
        (told,) = re.findall(r"pip install (.+)", failed.stderr)
        assert tuple(shlex.split(told)) == EXTRAS[extra], failed.stderr


def test_every_extra_is_tried():
    elsewhere = {"docs", "experiments", "nvflare", "test"}  # make test-nvflare has its own lane
    elsewhere |= {"cuda12", "tpu"}  # need a GPU or a TPU, and download gigabytes
    assert set(USES) | elsewhere == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("extra", USES)
def test_an_extra_brings_what_it_promises(environment, tmp_path, extra):
    programs = environment(extra)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(USES[extra]))
    ran = run(programs / "python", script, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_the_extra_of_experiments_runs_one(environment, tmp_path):
    programs = environment("experiments")
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "hydra_plugins", tmp_path / "hydra_plugins")
    sizes = ("special.num_problems=2", "special.num_rounds=2")
    command = ["-m", "experiments.run", "study=fed_ep/toy", *sizes]
    ran = run(programs / "python", *command, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
