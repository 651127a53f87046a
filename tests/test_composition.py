"""Every kernel with every kind of compressor and participation, in every layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compositions import COMPRESSORS, FIXED, KERNELS, PARTICIPATIONS, POOLED, bare_kernels

import fedmcmc

FOLDER = Path(__file__).parent


def compose(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compositions.py"), name],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED])
def test_every_row_of_the_table_can_be_built(name):
    bare = bare_kernels(name)
    assert len(bare) == (len(PARTICIPATIONS) if name in KERNELS else 1)
    for kernel in bare.values():
        for compressor in COMPRESSORS.values():
            assert isinstance(fedmcmc.compress(kernel, compressor), fedmcmc.FederatedKernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED])
def test_every_composition_gives_the_same_numbers_in_every_layout(name):
    compose(name)
