"""Every kernel with every kind of compressor and participation, in every layout."""

import subprocess
import sys

import pytest

import fedmcmc
from tests.compositions.rows import (
    FIXED,
    GIBBS,
    KERNELS,
    PARTICIPATIONS,
    POOLED,
    WHOLE,
    bare_kernels,
    compressors,
)
from tests.support.processes import environment


def compose(name):
    done = subprocess.run(
        [sys.executable, "-m", "tests.compositions.rows", name],
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED, *WHOLE, *GIBBS])
def test_every_row_of_the_table_can_be_built(name):
    bare = bare_kernels(name)
    assert len(bare) == (len(PARTICIPATIONS) if name in KERNELS else 1)
    for kernel in bare.values():
        for compressor in compressors(name).values():
            assert isinstance(fedmcmc.compress(kernel, compressor), fedmcmc.FederatedKernel)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KERNELS, *FIXED, *POOLED, *WHOLE, *GIBBS])
def test_every_composition_gives_the_same_numbers_in_every_layout(name):
    compose(name)
