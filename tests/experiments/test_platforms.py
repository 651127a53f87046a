"""A platform without a device is refused in one sentence before an experiment starts."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None,
    reason="JAX is installed for GPUs here",
)
def test_a_platform_without_a_device_ends_the_program_with_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", "study=fsgld/gaussian_small"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: JAX finds no device for JAX_PLATFORMS=cuda: install JAX")
    assert 'pip install "jax[cuda12]"' in line and "make sweep-cpu" in line
