"""Runs that are interrupted or killed, against one that never was: the same to the last bit."""

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
from fedmcmc.diagnostics import StopDecision
from fedmcmc.types import register_dataclass
from tests.support import killed_run
from tests.support.killed_run import assert_same
from tests.support.kills import kill_until_done
from tests.support.processes import environment


def short(folder, kind="plain", rounds=900, **changed):
    settings = dict(num_rounds=rounds, num_burnin=101) if kind != "store" else {}
    return killed_run.run(kind, folder, **(settings | changed))


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("zarr", marks=pytest.mark.slow),
        pytest.param("store", marks=pytest.mark.slow),
        pytest.param("coded", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_pieces_is_one_run(kind, tmp_path):
    """The second call runs some rounds more, from what the first wrote."""
    whole = killed_run.numbers(short(tmp_path / "whole", kind, rounds=600))
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=70)
    for rounds in (333, 600):
        found = short(tmp_path / "pieces", kind, checkpoint=checkpoint, num_rounds=rounds)
    assert_same(killed_run.numbers(found), whole)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Keyed(fedmcmc.FederatedKernel):
    """A kernel with random keys in its states, which the design does not forbid a user."""

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
        own, key = jax.random.split(client_state[1])
        return message + jax.random.normal(own, message.shape), (inner, key), info

    def prepare_server(self, rng_key, like):
        return self.kernel.prepare_server(rng_key, like)

    def aggregate(self, rng_key, broadcast, server_state, total):
        own, key = jax.random.split(server_state[1])
        total = jax.tree.map(lambda leaf: leaf + jax.random.normal(own, leaf.shape), total)
        broadcast, inner, info = self.kernel.aggregate(rng_key, broadcast, server_state[0], total)
        return broadcast, (inner, key), info


def keyed(kernel):
    return Keyed(kernel, kernel.participation)


@pytest.mark.slow
def test_a_state_that_holds_typed_keys_goes_on(tmp_path):
    kernel = keyed(fedmcmc.lsd(killed_run.posterior(), step_size=1e-3))

    def run(name, num_rounds, impl="threefry2x32", mesh=None):
        return fedmcmc.sample(
            jax.random.key(0, impl=impl),
            kernel,
            killed_run.data(),
            jnp.zeros(3),
            num_rounds=num_rounds,
            num_chains=2,
            progress=False,
            checkpoint=fedmcmc.Checkpoint(tmp_path / name, every_rounds=30),
            placement=fedmcmc.Placement(mesh=mesh, clients_at_a_time=1),
        )

    def numbers(samples):
        (_, server), (_, clients) = samples.state.server, samples.state.clients
        keys = [np.asarray(jax.random.key_data(key)) for key in (server, clients)]
        return [np.asarray(samples.draws), np.asarray(samples.state.broadcast.position), *keys]

    run("pieces", 50)
    run("pieces", 80, mesh=jax.make_mesh((1,), ("clients",)))
    found, whole = run("pieces", 120), run("whole", 120)
    assert found.state.server[1].dtype == whole.state.server[1].dtype
    assert_same(numbers(found), numbers(whole))
    again = numbers(run("whole", 120))  # read back, and no round run
    assert_same(again, numbers(whole))
    with pytest.raises(ValueError, match="belongs to another run"):
        run("pieces", 120, impl="rbg")


@pytest.mark.slow
def test_a_finished_run_runs_no_round_more(tmp_path):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    first = short(tmp_path, checkpoint=checkpoint)
    record = (tmp_path / "c" / "run.json").stat().st_mtime_ns
    again = short(tmp_path, checkpoint=checkpoint)
    assert (tmp_path / "c" / "run.json").stat().st_mtime_ns == record
    assert_same(killed_run.numbers(first), killed_run.numbers(again))
    with pytest.raises(ValueError, match="is at round 900, beyond the requested 800 rounds"):
        short(tmp_path, rounds=800, checkpoint=checkpoint)


def test_an_interrupted_run_goes_on(tmp_path):
    whole = short(tmp_path)
    calls = []

    def asked(interrupts):
        def next_check(num):
            calls.append(num)
            if interrupts and len(calls) == 3:
                raise KeyboardInterrupt
            return num + 50

        return fedmcmc.diagnostics.StoppingRule(
            next_check, lambda draws: StopDecision(False, {}), "never"
        )

    given = dict(num_rounds=None, max_rounds=900, checkpoint=fedmcmc.Checkpoint(tmp_path / "c"))
    with pytest.warns(RuntimeWarning) as told:
        cut = short(tmp_path, until=asked(True), **given)
    assert any("Interrupted" in str(warning.message) for warning in told)
    assert 0 < cut.num_draws < whole.num_draws
    with pytest.warns(RuntimeWarning, match="without never"):
        rest = short(tmp_path, until=asked(False), **given)
    assert_same(killed_run.numbers(rest), killed_run.numbers(whole))


def test_a_run_that_turns_non_finite_keeps_what_it_has(tmp_path):
    def run(limit):
        kernel = fedmcmc.lsd(
            killed_run.posterior(), step_size=lambda r: jnp.where(r < limit, 1e-3, 1e12)
        )
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            killed_run.data(),
            jnp.zeros(3),
            num_rounds=400,
            progress=False,
            checkpoint=fedmcmc.Checkpoint(tmp_path),
        )

    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(200)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["round"] == caught.value.round == caught.value.samples.num_draws
    # The schedules agree in all rounds that are compared: the run goes on with another one.
    with pytest.warns(RuntimeWarning, match="The position grew to"):  # the last finite one is far
        assert run(1000).num_draws == 400


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    short(tmp_path, rounds=150, checkpoint=checkpoint)
    for changed, what in (
        ({"num_chains": 1}, r"num_chains \(2, now 1\)"),
        ({"thinning": 2}, r"thinning \(3, now 2\)"),
        ({"num_burnin": 7}, r"num_burnin \(101, now 7\)"),
        ({"streams": {}}, "differs in streams"),
        (
            {"streams": {"m": streaming.moments(jnp.exp), "r": streaming.reservoir(16)}},
            "differs in streams",
        ),
        ({"keep_draws": False}, "keep_draws"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run.*{what}"):
            short(tmp_path, checkpoint=checkpoint, **changed)


def test_another_kernel_model_data_key_or_start_is_refused(tmp_path):
    posterior, data = killed_run.posterior(), killed_run.data()
    given = dict(
        key=jax.random.key(0),
        kernel=fedmcmc.lsd(posterior, step_size=1e-3),
        data=data,
        start=jnp.zeros(3),
    )

    def run(**changed):
        now = given | changed
        return fedmcmc.sample(
            now["key"],
            now["kernel"],
            now["data"],
            now["start"],
            num_rounds=20,
            progress=False,
            checkpoint=fedmcmc.Checkpoint(tmp_path),
        )

    run()
    other = posterior._replace(logprior_fn=lambda theta: -0.25 * jnp.sum(theta**2))
    bare = fedmcmc.FederatedData.from_clients([data.client_rows(i) for i in range(5)])
    for changed, what in (
        (dict(kernel=fedmcmc.lsd(posterior, step_size=2e-3)), "numbers of the kernel"),
        (dict(kernel=fedmcmc.lsd(other, step_size=1e-3)), "structure of the kernel.*logprior_fn"),
        (dict(kernel=fedmcmc.sgld(posterior, step_size=1e-3)), "structure of the kernel"),
        (dict(data=bare), "rows of the data"),
        (dict(key=jax.random.key(1)), "rng_key"),
        (dict(start=jnp.ones(3)), "start"),
    ):
        with pytest.raises(ValueError, match=what):
            run(**changed)
    run()  # and the run itself is still welcome


@pytest.mark.slow
def test_the_same_model_written_again_is_the_same(tmp_path):
    """Functions made anew, as in another process, are compared by what they compute."""
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")
    first = short(tmp_path, rounds=300, checkpoint=checkpoint)
    jax.clear_caches()
    again = short(tmp_path, rounds=300, checkpoint=checkpoint)
    assert_same(killed_run.numbers(first), killed_run.numbers(again))


def test_bad_settings(tmp_path):
    with pytest.raises(ValueError, match="not both"):
        fedmcmc.Checkpoint(tmp_path, every_rounds=3, every_seconds=1.0)
    with pytest.raises(TypeError, match=r"must be a fedmcmc.Checkpoint\(directory\)"):
        short(tmp_path, checkpoint=str(tmp_path))
    (tmp_path / "draws.zarr").mkdir()
    with pytest.raises(FileExistsError, match="give draws_to a new path"):
        short(tmp_path, "zarr")


def killed(folder, kind, num_kills, seed):
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
    with np.load(folder / "result.npz") as found:
        return [found[name] for name in found.files], kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_kills"), [("coded", 10), ("zarr", 6), ("store", 4), ("processes", 4)]
)
def test_a_killed_process_goes_on_to_the_same_bytes(kind, num_kills, tmp_path):
    whole = killed_run.numbers(killed_run.run(kind, tmp_path / "whole"))
    found, kills = killed(tmp_path / "killed", kind, num_kills, seed=11)
    assert kills > 0
    assert_same(found, whole)


@pytest.mark.slow
def test_draws_on_disk_are_those_in_memory(tmp_path):
    in_memory = short(tmp_path / "a")
    on_disk = short(tmp_path / "b", "zarr")
    assert on_disk.draws.shape == in_memory.draws.shape and on_disk.num_draws > 0
    np.testing.assert_array_equal(np.asarray(on_disk.draws), in_memory.draws)
    np.testing.assert_array_equal(on_disk.draws[:, 5:9], in_memory.draws[:, 5:9])
    xarray = pytest.importorskip("xarray")
    tree = xarray.open_datatree(tmp_path / "b" / "draws.zarr", engine="zarr", consolidated=False)
    assert tree["posterior"]["theta"].dims == ("chain", "draw", "theta_dim_0")
    np.testing.assert_array_equal(tree["sample_stats"]["bits_up"], in_memory.info["bits_up"])
    assert on_disk.to_datatree()["posterior"].sizes["draw"] == in_memory.num_draws


@pytest.mark.parametrize("kind", ["zarr", pytest.param("store", marks=pytest.mark.slow)])
def test_files_of_an_attempt_that_died_before_its_first_checkpoint(kind, tmp_path, monkeypatch):
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c")

    def dies(*args, **kwargs):
        raise MemoryError("no run")

    with monkeypatch.context() as patched:
        patched.setattr("fedmcmc.runs._run.Run.execute", dies)
        with pytest.raises(MemoryError):
            short(tmp_path, kind, checkpoint=checkpoint, num_rounds=150)
    assert not checkpoint.exists
    found = short(tmp_path, kind, checkpoint=checkpoint, num_rounds=150)
    whole = short(tmp_path / "whole", kind, num_rounds=150)
    assert_same(killed_run.numbers(found), killed_run.numbers(whole))
    with pytest.raises(FileExistsError):
        short(tmp_path, kind, num_rounds=150, checkpoint=fedmcmc.Checkpoint(tmp_path / "other"))


def test_a_full_disk_costs_no_draw(tmp_path, monkeypatch):
    whole = short(tmp_path)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "c", every_rounds=100)
    sync = os.fsync

    def full(file):
        # Once the first checkpoint is there: how many follow depends on how fast the disk is.
        if checkpoint.exists:
            raise OSError(28, "No space left on device")
        return sync(file)

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            found = short(tmp_path, checkpoint=checkpoint)
    assert_same(killed_run.numbers(found), killed_run.numbers(whole))
    assert checkpoint.exists
    assert_same(
        killed_run.numbers(short(tmp_path, checkpoint=checkpoint)), killed_run.numbers(whole)
    )


@pytest.mark.parametrize("kind", [pytest.param("store", marks=pytest.mark.slow), "zarr"])
def test_a_checkpoint_gives_no_right_to_the_files_of_another_run(kind, tmp_path):
    """Even a run that would be refused next must leave them as they are."""
    for name in "ab":
        checkpoint = fedmcmc.Checkpoint(tmp_path / f"checkpoint_{name}")
        short(tmp_path / name, kind, num_rounds=150, checkpoint=checkpoint)
    files = [path for path in sorted((tmp_path / "b").rglob("*")) if path.is_file()]
    before = [path.read_bytes() for path in files]
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint_a")
    with pytest.raises(FileExistsError):
        short(tmp_path / "b", kind, num_rounds=200, checkpoint=checkpoint)
    assert [path.read_bytes() for path in files] == before
