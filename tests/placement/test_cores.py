"""One device per core, and the devices that a run without a placement uses."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.placement import _choice
from fedmcmc.placement._choice import MIN_OPERATIONS, split_devices
from fedmcmc.pytrees import num_operations
from tests.support.processes import environment

ON_THREE_CORES = """
import jax
import fedmcmc
from fedmcmc.placement import _cores

_cores.num_cores = lambda: 3
"""


def run_script(script, devices=None):
    """Return the output of a script in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(devices=devices) | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_all_cores_are_devices():
    script = ON_THREE_CORES + "fedmcmc.use_all_cores(); print(jax.local_device_count())"
    assert run_script(script + "; fedmcmc.use_all_cores()").split() == ["3"]


def test_devices_made_otherwise_are_accepted():
    script = ON_THREE_CORES + "print(jax.local_device_count()); fedmcmc.use_all_cores()"
    assert run_script(script, devices=3).split() == ["3"]


def test_it_is_too_late_after_a_computation(monkeypatch):
    jax.block_until_ready(jnp.ones(1))
    monkeypatch.setattr("fedmcmc.placement._cores.num_cores", lambda: 1000)
    message = r"^JAX already runs with \d+ CPU devices?, and this process may use 1000 cores: call "
    with pytest.raises(RuntimeError, match=message):
        fedmcmc.use_all_cores()


@pytest.mark.parametrize(
    ("num_devices", "num_chains", "num_clients", "operations", "expected"),
    [
        (2, 30, 50, MIN_OPERATIONS, (2, 1)),
        (2, 30, 50, 10, (2, 1)),
        (2, 1, 50, MIN_OPERATIONS, (1, 2)),
        (2, 1, 50, 10, (1, 1)),
        (2, 1, 1, MIN_OPERATIONS, (1, 1)),
        (8, 4, 50, MIN_OPERATIONS, (4, 2)),
        (8, 4, 50, 10, (4, 1)),
        (8, 30, 50, MIN_OPERATIONS, (6, 1)),
        (8, 7, 3, MIN_OPERATIONS, (7, 1)),
        (8, 1, 3, MIN_OPERATIONS, (1, 3)),
    ],
)
def test_chains_are_spread_first(num_devices, num_chains, num_clients, operations, expected):
    assert split_devices(num_devices, num_chains, num_clients, operations) == expected


def test_operations_of_loops_branches_and_products_are_counted():
    x = jnp.ones((8, 8))

    def step(carry, _):
        return jax.lax.cond(carry.sum() > 0, lambda y: y @ x, lambda y: y, carry), None

    jaxpr = jax.make_jaxpr(lambda y: jax.lax.scan(step, y, length=5)[0])(x)
    product = 2 * 8**3
    assert 5 * product <= num_operations(jaxpr) < 6 * product
    image, kernel = jnp.ones((1, 3, 6, 6)), jnp.ones((4, 3, 2, 2))
    jaxpr = jax.make_jaxpr(lambda y: jax.lax.conv(y, kernel, (1, 1), "VALID"))(image)
    assert num_operations(jaxpr) == 2 * (4 * 5 * 5) * (3 * 2 * 2)


PROBLEM = """
import jax, jax.numpy as jnp, numpy as np
import fedmcmc

def problem(dim, sizes=(20, 20, 20, 20)):
    rng = np.random.default_rng(0)
    clients = [rng.normal(size=(n, dim)).astype(np.float32) for n in sizes]
    posterior = fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
    )
    data = fedmcmc.FederatedData.from_clients(clients)
    return posterior, data, jnp.zeros(dim)

def run(kernel, data, position, **settings):
    settings = dict(num_rounds=20, progress=False) | settings
    return fedmcmc.sample(jax.random.key(0), kernel, data, position, **settings)
"""

ON_TWO_DEVICES = (
    PROBLEM
    + """
assert jax.device_count() == 2
from fedmcmc.placement import _choice

def check(kernel, data, position, where, **settings):
    chosen = run(kernel, data, position, **settings)
    alone = run(kernel, data, position, placement=fedmcmc.Placement(), **settings)
    assert str(chosen.placement).startswith(where), chosen.placement
    assert str(alone.placement).startswith("one device")
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, chosen.draws, alone.draws)
    jax.tree.map(close, chosen.state, alone.state)
    return chosen

posterior, data, position = problem(3)
lsd, sgld = (make(posterior, step_size=1e-3) for make in (fedmcmc.lsd, fedmcmc.sgld))
over_chains = "2 devices (chains over 2)"
check(lsd, data, position, over_chains, num_chains=4)
check(sgld, data, position, over_chains, num_chains=4)
check(lsd, data, position, "one device")
check(lsd, data, position, "one device", num_chains=3)
first = check(lsd, data, position, over_chains, num_chains=2)
check(lsd, data, position, over_chains, num_chains=2, state=first.state)
keep = lambda state, info: state.broadcast.position
check(lsd, data, position, over_chains, num_chains=2, collect=keep)
until = dict(until=fedmcmc.rhat_below(100.0), max_rounds=2000, num_rounds=None)
check(lsd, data, position, over_chains, num_chains=2, **until)

# Clients of other sizes are grouped if this saves operations.
ragged = problem(3, (2, 2, 3, 200))
where = over_chains + ", clients together, at most 4 groups by size"
check(fedmcmc.lsd(ragged[0], step_size=1e-3), *ragged[1:], where, num_chains=2)
minibatches = fedmcmc.lsd(ragged[0], step_size=1e-3, batch_size=2)
chosen = check(minibatches, *ragged[1:], over_chains, num_chains=2)
assert chosen.placement.num_buckets is None

_choice.MIN_OPERATIONS = 1
check(lsd, data, position, "2 devices (clients over 2)")
check(lsd, data, position, "one device", collect=keep)
check(sgld, data, position, "one device")
visits = fedmcmc.dsgld(posterior, step_size=1e-3, num_local_steps=2)
check(visits, data, position, "one device")
with jax.default_device(jax.devices()[1]):
    assert str(run(lsd, data, position, num_chains=2).placement).startswith("one device")
print("same")
"""
)


def test_runs_choose_their_devices():
    assert "same" in run_script(ON_TWO_DEVICES, devices=2)


def hints(capsys, num_rounds, num_chains=2, **settings):
    """Return the lines about idle cores that a run prints."""
    names = {}
    exec(PROBLEM, names)
    posterior, data, position = names["problem"](3)
    kernel = fedmcmc.lsd(posterior, step_size=1e-3)
    settings = dict(num_rounds=num_rounds, num_chains=num_chains, progress=True) | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
        names["run"](kernel, data, position, **settings)
    return [line for line in capsys.readouterr().err.splitlines() if "use_all_cores" in line]


@pytest.mark.skipif(jax.device_count() > 1, reason="about one device")
def test_a_long_run_mentions_idle_cores_once(capsys, monkeypatch):
    monkeypatch.setattr(_choice, "num_cores", lambda: 4)
    assert not hints(capsys, 20)
    monkeypatch.setattr(_choice, "MIN_RUN_OPERATIONS", 1000)
    (line,) = hints(capsys, 20)
    assert "one device for 4 cores: fedmcmc.use_all_cores() before the first" in line
    assert not hints(capsys, 20, progress=False)
    assert not hints(capsys, 20, placement=fedmcmc.Placement())
    # The clients of a short round wait for each other more than they compute.
    assert not hints(capsys, 20, num_chains=1)
    monkeypatch.setattr(_choice, "num_cores", lambda: 1)
    assert not hints(capsys, 20)


def test_draws_do_not_depend_on_the_choice_of_one_device():
    names = {}
    exec(PROBLEM, names)
    posterior, data, position = names["problem"](3)
    kernel = fedmcmc.lsd(posterior, step_size=1e-3)
    one, other = (
        names["run"](kernel, data, position, placement=placement)
        for placement in (None, fedmcmc.Placement())
    )
    np.testing.assert_array_equal(one.draws, other.draws)
