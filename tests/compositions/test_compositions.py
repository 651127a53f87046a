"""Kernels with each compressor and participation rule that they support, in each layout."""

import subprocess
import sys

import pytest

import fedmcmc
from tests.compositions.rows import (
    ACCEPT_REJECT,
    FIXED,
    GIBBS,
    KERNELS,
    PARTICIPATIONS,
    POOLED,
    bare_kernels,
    compressors,
)
from tests.support.processes import environment

# For these kernels, the compiler's fused multiply-adds depend on the number of rows. Instructions
# up to AVX have no fused multiply-add.
UNFUSED = ("lsd_latents", *GIBBS)


def compose(name):
    flags = "--xla_cpu_max_isa=AVX" if name in UNFUSED else ""
    process = subprocess.run(
        [sys.executable, "-m", "tests.compositions.rows", name],
        env=environment(devices=2, flags=flags),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    output = process.stdout + process.stderr[-3000:]
    assert process.returncode == 0 and "same" in process.stdout, output


@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED, *ACCEPT_REJECT, *GIBBS])
def test_every_row_of_the_table_can_be_built(name):
    bare = bare_kernels(name)
    assert len(bare) == (len(PARTICIPATIONS) if name in KERNELS else 1)
    for kernel in bare.values():
        for compressor in compressors(name).values():
            assert isinstance(fedmcmc.compress(kernel, compressor), fedmcmc.FederatedKernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED, *ACCEPT_REJECT, *GIBBS])
def test_every_composition_gives_the_same_numbers_in_every_layout(name):
    compose(name)
