"""Runs over several processes draw the numbers of one, from rows that no process has all of."""

import json
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import distributed
from tests.contracts.model import DATA, KEY, POSITIONS, SIZES, Given
from tests.contracts.tables import KERNELS
from tests.support import process_runs
from tests.support.processes import environment


def launch_script(*script, devices=1, num=2, timeout=400):
    """Run a script in several processes to their end."""
    return subprocess.run(
        [sys.executable, "-m", "experiments.launch", "-n", str(num), *script],
        env={**environment(devices), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def launch_runs(folder, *arguments, devices=1, num=2):
    """Run `process_runs` in several processes, which write files into the folder."""
    script = ["-m", "tests.support.process_runs", str(folder), *arguments]
    done = launch_script(*script, devices=devices, num=num, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert f"[{num - 1}] done {num - 1} {num} {num * devices}" in done.stdout


def compare(name, alone, together, num=2):
    """Compare each process with a run of one process; return the clients that each loaded."""
    expected = np.load(alone / f"{name}-0.npz")
    assert len(expected.files) > 10
    for process in range(num):
        arrays = np.load(together / f"{name}-{process}.npz")
        assert arrays.files == expected.files
        for key in arrays.files:
            message = f"{name}, {process}: {key}"
            np.testing.assert_array_equal(arrays[key], expected[key], err_msg=message)
    return [json.loads((together / f"{name}-{i}.json").read_text()) for i in range(num)]


def run_both(tmp_path, names, chains, **settings):
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    for name in names:
        process_runs.run(name, alone, chains)
    launch_runs(together, str(chains), *names, **settings)
    return {name: compare(name, alone, together) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsd", "compress: qlsd_star, chain"])
def test_two_processes_give_the_draws_of_one(tmp_path, name):
    assert run_both(tmp_path, [name], 1) == {name: [[0], [1, 2]]}


@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
def test_kernels_over_two_processes_of_two_devices(tmp_path, chains):
    names = ["lsd", "fa_ld", "fed_avg", "faults: compress: lsd, memory", "relay", "lsd_pp"]
    loaded = run_both(tmp_path, names, chains, devices=2)
    # Four devices in a row, of which one has none of the three clients; or two by two, where each
    # process has some of the chains, and the rows of all clients for them.
    expected = [[0, 2], [1]] if chains == 1 else [[0, 1, 2], [0, 1, 2]]
    assert all(found == expected for found in loaded.values())


@pytest.mark.slow
def test_a_mesh_of_one_device_changes_nothing():
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given())
    alone, spread = (
        fedmcmc.sample(
            KEY,
            kernel,
            DATA,
            POSITIONS["nested"],
            num_rounds=3,
            progress=False,
            placement=fedmcmc.Placement(mesh=mesh, clients_at_a_time=1),
        )
        for mesh in (None, distributed.mesh())
    )
    chex.assert_trees_all_equal(alone.draws, spread.draws)


@pytest.mark.parametrize(
    ("sizes", "load", "message"),
    [
        ([], None, "one integer per client"),
        ([1.5], None, "dtype float64"),
        ([2, 0], None, "client 1 has none"),
        ([2, -1], None, "must not be negative"),
        ([2, 3], lambda i: np.zeros(2), r"load_fn\(1\) returned 2 rows, expected 3"),
        ([2, 2], lambda i: np.full(2, [0, np.nan][i]), "first row 0 of client 1"),
        ([2, 2], lambda i: np.zeros((2, i + 1)), r"\(1,\) at client 0, \(2,\) at client 1"),
    ],
)
def test_bad_loaders(sizes, load, message):
    with pytest.raises(ValueError, match=message):
        fedmcmc.ClientLoader(sizes, load or (lambda i: np.zeros(2))).load()


def test_a_loader_names_clients_by_their_numbers():
    loader = fedmcmc.ClientLoader([2, 2, 2], lambda i: np.full(2, [0, 0, np.inf][i]))
    with pytest.raises(ValueError, match="row 0 of client 2"):
        loader.load([1, 2])


def test_a_loader_cannot_be_used_with_surrogates():
    loader = fedmcmc.ClientLoader(SIZES, DATA.client_rows)
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given())
    settings = dict(num_rounds=2, progress=False)
    with pytest.raises(ValueError, match="needs all rows in one process"):
        fedmcmc.sample(
            KEY,
            kernel,
            loader,
            POSITIONS["nested"],
            mesh=distributed.mesh(),
            surrogates=fedmcmc.Gaussian.from_moments(np.zeros((3, 3)), variance=np.ones(3)),
            **settings,
        )
    with pytest.raises(TypeError, match="load_fn must be a function, got int"):
        fedmcmc.ClientLoader([2], 3)


UNLIKE = """
import os
num = 1 + int(os.environ["JAX_PROCESS_ID"])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num}"

import jax, jax.numpy as jnp, numpy as np
import fedmcmc
from fedmcmc import distributed

distributed.initialize()
index = jax.process_index()
assert distributed.broadcast_from_first(5.0 + index) == 5
kernel = fedmcmc.lsd(
    fedmcmc.Posterior(lambda t: -t.sum() ** 2, lambda t, x: -((x - t) ** 2).sum(-1)), step_size=0.01
)

def run(sizes, load):
    try:
        fedmcmc.sample(
            jax.random.key(0), kernel, fedmcmc.ClientLoader(sizes, load), jnp.zeros(2),
            num_rounds=2, mesh=distributed.mesh(), progress=False,
        )
    except ValueError as error:
        print("refused:", error)

run([2], lambda client: np.zeros((2, 2)))  # one client, on a device of the first process
run([2] * 3, lambda client: np.zeros((2, 2 - index)))
run([2] * 3, lambda client: np.zeros((2, 2), [float, int][index]))
run([2] * 3, lambda client: np.zeros((2, 2)))
print("ran")
"""


FAILING = """
import jax
from fedmcmc import distributed

distributed.initialize()
distributed.broadcast_from_first(0.0)
if jax.process_index() == 1:
    raise FileNotFoundError("no such rows")
distributed.broadcast_from_first(0.0)
"""


@pytest.mark.slow
def test_an_error_of_one_process_ends_all_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    start = time.monotonic()
    done = launch_script(str(script))
    assert time.monotonic() - start < 120  # and not until JAX's barrier at the end times out
    assert done.returncode == 1 and "[1] FileNotFoundError: no such rows" in done.stdout


@pytest.mark.slow
def test_all_processes_raise_if_their_data_differ(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNLIKE)
    done = launch_script(str(script))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for i in range(2):
        assert done.stdout.count(f"[{i}] refused: Process 1 of 2 has no client") == 1, done.stdout
        assert done.stdout.count(f"[{i}] refused: The clients of all processes need rows") == 2
        assert f"[{i}] ran" in done.stdout


def test_the_first_process_alone_claims_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["fedmcmc.runs._sample"], "is_first", lambda: False)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint")
    claimed = []
    monkeypatch.setattr(fedmcmc.Checkpoint, "claims", lambda *_: claimed.append(1))
    record = fedmcmc.Record(draws_to=tmp_path / "draws.zarr")
    run_small(checkpoint=checkpoint, record=record, mesh=distributed.mesh())
    assert not claimed


def test_calls_have_one_number_alone_and_in_several_processes(monkeypatch, tmp_path):
    with fedmcmc.resumable(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["fedmcmc.runs._sample"], "has_other_processes", lambda: True)
            run_small()  # no mesh, no checkpoint
        run_small(mesh=distributed.mesh())
    assert [path.name for path in tmp_path.iterdir()] == ["0002"]


def test_a_run_of_several_processes_within_an_except_block_saves_its_end(monkeypatch, tmp_path):
    monkeypatch.setattr("fedmcmc.runs._executors.has_other_processes", lambda: True)
    checkpoint = fedmcmc.Checkpoint(tmp_path)
    try:
        raise RuntimeError("the caller's own")
    except RuntimeError:
        run_small(checkpoint=checkpoint, mesh=distributed.mesh())
    assert checkpoint.exists


def test_processes_meet_after_the_checkpoint_of_a_run_that_turned_non_finite(monkeypatch, tmp_path):
    checkpoint, met = fedmcmc.Checkpoint(tmp_path), []

    def broadcast_from_first(number):
        met.append(checkpoint.exists)
        return number

    monkeypatch.setattr("fedmcmc.runs._executors.has_other_processes", lambda: True)
    monkeypatch.setattr("fedmcmc.runs._run.broadcast_from_first", broadcast_from_first)
    posterior = fedmcmc.Posterior(lambda t: -(t**2), lambda t, x: -((x - t) ** 2))
    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    with pytest.raises(fedmcmc.NonFiniteError):
        fedmcmc.sample(
            KEY,
            fedmcmc.lsd(posterior, step_size=100.0),
            data,
            0.0,
            num_rounds=100,
            checkpoint=checkpoint,
            mesh=distributed.mesh(),
            progress=False,
        )
    assert met[-1]


def run_small(**settings):
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given())
    settings = dict(num_rounds=2, progress=False) | settings
    return fedmcmc.sample(KEY, kernel, DATA, POSITIONS["nested"], **settings)


@pytest.mark.parametrize("launched_by", [{}, {"COUNT": "2", "INDEX": "0", "ADDRESS": "host0:1"}])
def test_arguments_of_initialize_precede_the_launchers(monkeypatch, launched_by):
    for name in ("COUNT", "INDEX", "ADDRESS"):
        monkeypatch.delenv(getattr(distributed, name), raising=False)
    for name, value in launched_by.items():
        monkeypatch.setenv(getattr(distributed, name), value)
    passed = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: passed.append(arguments))
    arguments = dict(coordinator_address="host9:1", num_processes=4, process_id=3)
    distributed.initialize(**arguments)
    assert passed == [arguments]


def test_a_launcher_must_set_all_variables(monkeypatch):
    monkeypatch.setenv(distributed.COUNT, "2")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID must be set"):
        distributed.initialize()
    with pytest.raises(ValueError, match="number of devices, 1, got 2"):
        distributed.mesh(2)


def test_a_loader_continues_without_a_mesh(tmp_path):
    """And draws the numbers of the data that it loads."""
    loader = fedmcmc.ClientLoader(SIZES, DATA.client_rows, allow_nonfinite=True)
    kernel, position = KERNELS["lsd"](POSITIONS["nested"], Given()), POSITIONS["nested"]

    def run(data, num_rounds, mesh=None, **settings):
        placement = fedmcmc.Placement(mesh=mesh, clients_at_a_time=1)
        settings |= dict(num_rounds=num_rounds, placement=placement, progress=False)
        return fedmcmc.sample(KEY, kernel, data, position, **settings)

    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    run(loader, 3, distributed.mesh(), checkpoint=checkpoint)
    resumed, expected = run(loader, 6, checkpoint=checkpoint), run(DATA, 6)
    chex.assert_trees_all_equal(resumed.draws, expected.draws)


def test_a_script_that_exits_with_an_error_leaves(monkeypatch):
    codes = []
    monkeypatch.setattr(distributed.os, "_exit", codes.append)
    for code in (None, 0, 1):
        distributed.leave(code)
    assert codes == []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for code in (None, 0, 3, "a message"):
        distributed.leave(code)
    assert codes == [3, 1]


@pytest.mark.parametrize(
    ("platforms", "error", "message"),
    [
        (
            "cuda",
            AssertionError(),
            r'=cuda: .*pip install "jax\[cuda12\]"\) .*=cpu\.$',
        ),
        ("tpu", RuntimeError("no libtpu.so"), r'"jax\[tpu\]".* JAX reports: no libtpu.so\.$'),
        ("rocm", RuntimeError("unknown"), "=rocm: install JAX for that platform on a machine"),
    ],
)
def test_a_platform_without_a_device_is_named(monkeypatch, platforms, error, message):
    def fail():
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        for find in (distributed.require_devices, distributed.mesh):
            with pytest.raises(RuntimeError, match=message):
                find()
    finally:
        jax.config.update("jax_platforms", before)
