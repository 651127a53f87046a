"""Clients spread over devices: the numbers of one device, whatever the kernel."""

import subprocess
import sys

import pytest

from tests.support.processes import environment

SCRIPT = """
import sys
import jax, numpy as np
import fedmcmc
from tests.contracts.model import DATA, KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS

assert jax.device_count() == 2
everywhere = fedmcmc.Placement.over_devices()
one_by_one = fedmcmc.Placement.over_devices(clients_at_a_time=1)
words = "2 devices (clients over 2), clients one by one"
assert everywhere.mesh.size == 2 and str(one_by_one) == words
chains = fedmcmc.Placement.over_devices(num_chains=4)
assert str(chains) == "2 devices (chains over 2), clients together"
assert chains.mesh.shape == {"chains": 2, "clients": 1}
assert fedmcmc.Placement.over_devices(num_chains=3) == everywhere

def run(kernel, num_chains, placement):
    return fedmcmc.sample(
        KEY, kernel, DATA, POSITIONS["nested"], num_rounds=4, num_chains=num_chains, progress=False,
        placement=placement,
    )

# Three clients on two devices: one has a place for a client and none in it.
name, num_chains = sys.argv[1], int(sys.argv[2])
kernel = KERNELS[name](POSITIONS["nested"], Given())
apart = fedmcmc.Placement.over_devices(num_chains)
one, *others = (
    run(kernel, num_chains, placement)
    for placement in (fedmcmc.Placement(), everywhere, one_by_one, apart)
)
for other in others:
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, one.draws, other.draws)
    jax.tree.map(close, one.state, other.state)
    np.testing.assert_array_equal(one.info["bits_up"], other.info["bits_up"])
    np.testing.assert_array_equal(one.totals["bits_down"], other.totals["bits_down"])
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_chains"),
    [("compress: fa_hmc, memory", 2), ("faults: compress: lsd, memory", 1)],
)
def test_two_devices_compute_what_one_does(name, num_chains):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(num_chains)],
        env=environment(devices=2),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]
