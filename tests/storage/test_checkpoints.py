"""Runs that are interrupted or killed draw the bits of a run that was not."""

import json
import os
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import streaming
from fedmcmc.types import register_dataclass
from tests.storage.small_run import kernel, rule_at, run
from tests.support import killed_run
from tests.support.killed_run import assert_same, numbers
from tests.support.kills import kill_until_done
from tests.support.lanes import fast_and_slow
from tests.support.processes import environment

KINDS = fast_and_slow(["zarr", "store"], ["zarr"])


def run_short(folder, kind="plain", num_rounds=300, **changes):
    settings = dict(num_rounds=num_rounds)
    if kind != "store":
        settings["num_burnin"] = 101
    return killed_run.run(kind, folder, **(settings | changes))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Numbers of a run of 300 rounds without interruption."""
    return numbers(run_short(tmp_path_factory.mktemp("expected")))


@pytest.mark.parametrize("kind", fast_and_slow(["plain", "zarr", "store", "coded"], ["plain"]))
def test_a_run_in_pieces_is_one_run(kind, tmp_path, expected, monkeypatch):
    """The second call continues with functions that were built again, as in another process."""
    if kind != "plain":
        expected = numbers(run_short(tmp_path / "expected", kind))
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=70)
    run_short(tmp_path / "pieces", kind, 133, checkpoint=checkpoint)
    monkeypatch.setattr(killed_run, "posterior", killed_run.posterior.__wrapped__)
    resumed = run_short(tmp_path / "pieces", kind, checkpoint=checkpoint)
    assert_same(numbers(resumed), expected)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Keyed(fedmcmc.FederatedKernel):
    """A kernel with random keys in its states, which the design allows."""

    kernel: fedmcmc.FederatedKernel
    participation: fedmcmc.types.Participation

    def server_init(self, rng_key, position, federation, totals):
        broadcast, server = self.kernel.server_init(rng_key, position, federation, totals)
        return broadcast, (server, rng_key)

    def client_init(self, broadcast, client):
        key = jax.random.fold_in(jax.random.key(5), client.index)
        return self.kernel.client_init(broadcast, client), key

    def prepare(self, rng_key, like, client):
        return self.kernel.prepare(rng_key, like, client)

    def step(self, draws, broadcast, client_state, client):
        message, inner, info = self.kernel.step(draws, broadcast, client_state[0], client)
        noise_key, key = jax.random.split(client_state[1])
        return message + jax.random.normal(noise_key, message.shape), (inner, key), info

    def prepare_server(self, rng_key, like):
        return self.kernel.prepare_server(rng_key, like)

    def aggregate(self, rng_key, broadcast, server_state, total):
        noise_key, key = jax.random.split(server_state[1])
        total = jax.tree.map(lambda x: x + jax.random.normal(noise_key, x.shape), total)
        broadcast, inner, info = self.kernel.aggregate(rng_key, broadcast, server_state[0], total)
        return broadcast, (inner, key), info


@pytest.mark.slow
def test_a_state_of_typed_keys_continues(tmp_path):
    inner = kernel(batch_size=None)
    keyed = Keyed(inner, inner.participation)

    def run_keyed(name, num_rounds, impl="threefry2x32", mesh=None):
        return fedmcmc.sample(
            jax.random.key(0, impl=impl),
            keyed,
            killed_run.data(),
            jnp.zeros(3),
            num_rounds=num_rounds,
            num_chains=2,
            progress=False,
            checkpoint=fedmcmc.Checkpoint(tmp_path / name, every_rounds=30),
            placement=fedmcmc.Placement(mesh=mesh, clients_at_a_time=1),
        )

    def words(samples):
        (_, server), (_, clients) = samples.state.server, samples.state.clients
        keys = [np.asarray(jax.random.key_data(key)) for key in (server, clients)]
        return [np.asarray(samples.draws), np.asarray(samples.state.broadcast.position), *keys]

    run_keyed("pieces", 50)
    run_keyed("pieces", 80, mesh=jax.make_mesh((1,), ("clients",)))
    resumed, expected = run_keyed("pieces", 120), run_keyed("expected", 120)
    assert resumed.state.server[1].dtype == expected.state.server[1].dtype
    assert_same(words(resumed), words(expected))
    assert_same(words(run_keyed("expected", 120)), words(expected))  # read back without a round
    with pytest.raises(ValueError, match="belongs to another run"):
        run_keyed("pieces", 120, impl="rbg")


@pytest.mark.slow
def test_a_finished_run_runs_no_round_more(tmp_path, expected):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    run_short(tmp_path, checkpoint=checkpoint)
    written = (tmp_path / "c" / "run.json").stat().st_mtime_ns
    jax.clear_caches()
    assert_same(numbers(run_short(tmp_path, checkpoint=checkpoint)), expected)
    assert (tmp_path / "c" / "run.json").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="is at round 300, beyond the requested 200 rounds"):
        run_short(tmp_path, num_rounds=200, checkpoint=checkpoint)


def test_an_interrupted_run_continues(tmp_path, expected):
    def interrupt(num_draws):
        if num_draws == 40:
            raise KeyboardInterrupt

    settings = dict(num_rounds=None, max_rounds=300, checkpoint=fedmcmc.Checkpoint(tmp_path / "c"))
    with pytest.warns(RuntimeWarning) as warned:
        cut = run_short(tmp_path, until=rule_at(1000, interrupt, name="never"), **settings)
    assert any("Interrupted" in str(warning.message) for warning in warned)
    assert cut.num_draws == 40
    with pytest.warns(RuntimeWarning, match="without never"):
        resumed = run_short(tmp_path, until=rule_at(1000, name="never"), **settings)
    assert_same(numbers(resumed), expected)


def test_a_run_that_turns_non_finite_keeps_its_draws(tmp_path):
    def run_until(limit):
        unstable = kernel(step_size=lambda r: jnp.where(r < limit, 1e-3, 1e12), batch_size=None)
        return run(tmp_path, 400, chosen=unstable)

    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run_until(200)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["round"] == caught.value.round == caught.value.samples.num_draws
    # The schedules agree in all rounds that are compared, so the run continues with another limit.
    with pytest.warns(RuntimeWarning, match="The position grew to"):  # the last finite one is far
        assert run_until(1000).num_draws == 400


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    run_short(tmp_path, num_rounds=110, checkpoint=checkpoint)
    of_exponentials = {"m": streaming.moments(jnp.exp), "r": streaming.reservoir(16)}
    for changes, message in (
        ({"num_chains": 1}, r"num_chains \(2, now 1\)"),
        ({"thinning": 2}, r"thinning \(3, now 2\)"),
        ({"num_burnin": 7}, r"num_burnin \(101, now 7\)"),
        ({"streams": {}}, "differs in streams"),
        ({"streams": of_exponentials}, "differs in streams"),
        ({"keep_draws": False}, "keep_draws"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run.*{message}"):
            run_short(tmp_path, num_rounds=110, checkpoint=checkpoint, **changes)


def test_bad_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not both"):
        fedmcmc.Checkpoint(tmp_path, every_rounds=3, every_seconds=1.0)
    with pytest.raises(TypeError, match=r"must be a fedmcmc.Checkpoint\(directory\)"):
        run_short(tmp_path, checkpoint=str(tmp_path))
    (tmp_path / "draws.zarr").mkdir()
    with pytest.raises(FileExistsError, match="give draws_to a new path"):
        run_short(tmp_path, "zarr")


def run_with_kills(folder, kind, num_kills, seed):
    """Kill the script at random times until it was so often; then let it end."""
    folder.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "experiments.launch", "-n", "2"] if kind == "processes" else []
    kills = kill_until_done(
        [sys.executable, *launcher, "-m", "tests.support.killed_run", str(folder), kind],
        environment(),
        is_ready=(folder / "started").exists,
        done=folder / "result.npz",
        before=lambda: (folder / "started").unlink(missing_ok=True),
        num_kills=num_kills,
        longest=6.0,
        seed=seed,
    )
    with np.load(folder / "result.npz") as arrays:
        return [arrays[name] for name in arrays.files], kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_kills"), [("coded", 10), ("zarr", 6), ("store", 4), ("processes", 4)]
)
def test_a_killed_process_continues_to_the_same_bytes(kind, num_kills, tmp_path):
    expected = numbers(killed_run.run(kind, tmp_path / "expected"))
    resumed, kills = run_with_kills(tmp_path / "killed", kind, num_kills, seed=11)
    assert kills > 0
    assert_same(resumed, expected)


@pytest.mark.slow
def test_draws_on_disk_equal_draws_in_memory(tmp_path):
    in_memory = run_short(tmp_path / "a")
    on_disk = run_short(tmp_path / "b", "zarr")
    assert on_disk.draws.shape == in_memory.draws.shape and on_disk.num_draws > 0
    np.testing.assert_array_equal(np.asarray(on_disk.draws), in_memory.draws)
    np.testing.assert_array_equal(on_disk.draws[:, 5:9], in_memory.draws[:, 5:9])
    xarray = pytest.importorskip("xarray")
    tree = xarray.open_datatree(tmp_path / "b" / "draws.zarr", engine="zarr", consolidated=False)
    assert tree["posterior"]["theta"].dims == ("chain", "draw", "theta_dim_0")
    np.testing.assert_array_equal(tree["sample_stats"]["bits_up"], in_memory.info["bits_up"])
    assert on_disk.to_datatree()["posterior"].sizes["draw"] == in_memory.num_draws


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_removes_files_of_an_attempt_that_died_before_its_first_checkpoint(
    kind, tmp_path, monkeypatch
):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")

    def fail(*args, **kwargs):
        raise MemoryError("no run")

    with monkeypatch.context() as patched:
        patched.setattr("fedmcmc.runs._run.Run.execute", fail)
        with pytest.raises(MemoryError):
            run_short(tmp_path, kind, 150, checkpoint=checkpoint)
    assert not checkpoint.exists
    samples = run_short(tmp_path, kind, 150, checkpoint=checkpoint)
    expected = run_short(tmp_path / "expected", kind, 150)
    assert_same(numbers(samples), numbers(expected))
    # A checkpoint of another directory does not own these files.
    with pytest.raises(FileExistsError):
        run_short(tmp_path, kind, 150, checkpoint=fedmcmc.Checkpoint(tmp_path / "other"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_does_not_own_the_files_of_another_run(kind, tmp_path):
    """Even a run that would be refused next must leave them unchanged."""
    for name in "ab":
        checkpoint = fedmcmc.Checkpoint(tmp_path / f"checkpoint_{name}")
        run_short(tmp_path / name, kind, 150, checkpoint=checkpoint)
    files = [path for path in sorted((tmp_path / "b").rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint_a")
    with pytest.raises(FileExistsError):
        run_short(tmp_path / "b", kind, 200, checkpoint=checkpoint)
    assert [path.read_bytes() for path in files] == before


def test_a_full_disk_loses_no_draw(tmp_path, monkeypatch, expected):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c", every_rounds=100)
    sync = os.fsync

    def fail(file):
        # Not before the first checkpoint: how many follow depends on the speed of the disk.
        if checkpoint.exists:
            raise OSError(28, "No space left on device")
        return sync(file)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            samples = run_short(tmp_path, checkpoint=checkpoint)
    assert_same(numbers(samples), expected)
    assert checkpoint.exists
    assert_same(numbers(run_short(tmp_path, checkpoint=checkpoint)), expected)
