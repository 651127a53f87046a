"""Files that are damaged, lost, edited or mixed up: no other draws, and a message with a remedy."""

import errno
import json
import shutil

import numpy as np
import pytest

import fedmcmc
from fedmcmc.storage._files import read_record, write_atomically, write_record
from tests.storage.small_run import numbers, run
from tests.support.killed_run import assert_same
from tests.support.lanes import fast_and_slow

RUN, BEFORE = "run.json", "run-before.json"


def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing_and_is_named(tmp_path):
    def write(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "draws.npz"
    path.write_bytes(b"earlier")
    with pytest.raises(OSError, match=r"No space left on device: .*draws\.npz"):
        write_atomically(path, write)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"earlier"


@pytest.fixture(scope="module")
def samples():
    """Samples of a run of 90 rounds without interruption."""
    return run(None, 90)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories of two runs with the checkpoints of rounds 60 and 30."""
    folder = tmp_path_factory.mktemp("two")
    for seed in (0, 1):
        for num_rounds in (30, 60):
            run(folder / str(seed), num_rounds, seed=seed)
    return folder


@pytest.fixture
def folder(directories, tmp_path):
    return shutil.copytree(directories / "0", tmp_path / "c")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


def file_of(folder, kind, manifest=RUN):
    """Return the path of a manifest, of its state or of its last draws."""
    if kind == "manifest":
        return folder / manifest
    record = json.loads((folder / manifest).read_text())
    return folder / (record["state"] if kind == "state" else record["draws"][-1])[0]


def check_falls_back(folder, samples, message):
    """Check that a run warns and continues from round 30 to the draws of an undamaged run."""
    with pytest.warns(RuntimeWarning, match=f"{message}.*continues from the previous.*round 30"):
        resumed = run(folder, 90)
    assert_same(numbers(resumed), numbers(samples))
    assert_same(numbers(run(folder, 90)), numbers(samples))  # without a warning


@pytest.mark.parametrize("damage", fast_and_slow([truncate, empty, flip, remove], [flip]))
@pytest.mark.parametrize("kind", ["manifest", "state", "draws"])
def test_a_run_continues_from_the_checkpoint_before(kind, damage, folder, samples):
    path = file_of(folder, kind)
    damage(path)
    check_falls_back(folder, samples, f"{path} ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "it holds no record of fedmcmc"),
        ("[]", "it holds no record of fedmcmc"),
        ('"text"', "it holds no record of fedmcmc"),
        ('{"format": 2}', "it has no checksum"),
        (dict(round=59), "its content does not match its checksum"),
    ],
)
def test_a_manifest_that_was_edited_is_damaged(content, reason, folder, samples):
    path = folder / RUN
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    check_falls_back(folder, samples, f"{RUN} is damaged .{reason}")


def test_a_round_that_differs_from_the_round_of_the_state_is_noticed(folder, samples):
    write_record(folder / RUN, read_record(folder / RUN) | {"round": 59})
    check_falls_back(folder, samples, "its round is 59, but the state in .* is of round 60")


@pytest.mark.parametrize("kind", fast_and_slow(["state", "draws"], ["state"]))
def test_a_part_of_another_run_is_noticed(kind, folder, directories, samples):
    """Even if the manifest has its checksum."""
    record, path = read_record(folder / RUN), file_of(folder, kind)
    foreign = json.loads((directories / "1" / RUN).read_text())
    shutil.copy(file_of(directories / "1", kind), path)
    if kind == "state":
        record["state"][1] = foreign["state"][1]
    else:
        record["draws"][-1][1] = foreign["draws"][-1][1]
    write_record(folder / RUN, record)
    check_falls_back(folder, samples, f"{path} is a part of another run")


def test_draws_in_a_store_go_back_to_the_checkpoint_before(tmp_path, samples):
    pytest.importorskip("zarr")

    def run_stored(num_rounds):
        return run(tmp_path / "c", num_rounds, draws_to=tmp_path / "draws.zarr")

    run_stored(30)
    run_stored(60)
    truncate(file_of(tmp_path / "c", "state"))
    with pytest.warns(RuntimeWarning, match="of round 30"):
        assert_same(numbers(run_stored(90)), numbers(samples))


def damage_both(kind):
    def damage(folder):
        truncate(file_of(folder, kind))
        empty(file_of(folder, kind, BEFORE))

    return damage


def damage_the_only_checkpoint(folder):
    truncate(folder / RUN)
    remove(folder / BEFORE)


def set_earlier_format(folder):
    record = json.loads((folder / RUN).read_text())
    del record["checksum"]
    (folder / RUN).write_text(json.dumps(record | {"format": "npz"}))


def remove_entries(folder):
    for name in (RUN, BEFORE):
        record = read_record(folder / name)
        del record["draws"], record["state"]
        write_record(folder / name, record)


BOTH = r"{last} is damaged .*previous.*{before} is damaged .*delete {folder} to start again"


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (damage_both("manifest"), "manifest", BOTH),
        (damage_both("state"), "state", BOTH),
        (damage_the_only_checkpoint, "manifest", "{last} is damaged.*{before} cannot be read"),
        (set_earlier_format, "manifest", "another version of fedmcmc.*start again"),
        (remove_entries, "manifest", "lacks draws, state.*copy.*delete {folder} to start again"),
    ],
    ids=["both manifests", "both states", "only checkpoint", "earlier format", "no entries"],
)
def test_damage_that_leaves_no_checkpoint_is_an_error(damage, kind, message, folder):
    paths = dict(last=file_of(folder, kind), before=file_of(folder, kind, BEFORE), folder=folder)
    damage(folder)
    with pytest.raises(fedmcmc.CheckpointError, match=message.format(**paths)):
        run(folder, 90)


def test_a_damaged_record_of_files_is_an_error(tmp_path):
    pytest.importorskip("zarr")
    run(tmp_path / "c", 30, draws_to=tmp_path / "draws.zarr")
    truncate(tmp_path / "c" / "files.json")
    message = rf"files.json is damaged .*delete {tmp_path / 'c'}"
    with pytest.raises(fedmcmc.CheckpointError, match=message):
        run(tmp_path / "c", 60, draws_to=tmp_path / "draws.zarr")


def test_a_directory_holds_two_checkpoints_and_no_more(folder):
    for num_rounds in (70, 80, 90):
        run(folder, num_rounds)
    records = [json.loads((folder / name).read_text()) for name in (RUN, BEFORE)]
    assert [record["round"] for record in records] == [90, 80]
    named = {part[0] for record in records for part in [record["state"], *record["draws"]]}
    assert {path.name for path in folder.glob("*.npz")} == named


@pytest.mark.parametrize("damage", fast_and_slow([truncate, remove], [remove]))
def test_damage_to_early_draws_loses_only_these(damage, tmp_path, samples):
    """Both checkpoints name the part, so neither can be used without a loss."""
    for num_rounds in (30, 50, 60):
        run(tmp_path, num_rounds)
    early = tmp_path / json.loads((tmp_path / RUN).read_text())["draws"][1][0]
    copy = early.read_bytes()
    damage(early)
    lost = f"{early} .*draws of rounds 30 to 49 are lost.*restore a copy.*delete {tmp_path} "
    for num_rounds in (80, 80, 90):  # resumed, read back, and resumed from its own checkpoint
        with pytest.warns(RuntimeWarning, match=lost):
            resumed = run(tmp_path, num_rounds)
        rounds = np.delete(np.arange(num_rounds), slice(30, 50))
        np.testing.assert_array_equal(resumed.info["round"][0], rounds)
        np.testing.assert_array_equal(resumed.draws, np.asarray(samples.draws)[:, rounds])
        assert "rounds 30 to 49 are lost" in resumed.warnings[0]
        np.testing.assert_array_equal(resumed.totals["rounds"], num_rounds)
    early.write_bytes(copy)
    assert_same(numbers(run(tmp_path, 90)), numbers(samples))


def test_lost_draws_are_named_by_their_rounds(tmp_path):
    settings = dict(num_burnin=10, thinning=5)
    for num_rounds in (35, 60, 70):
        run(tmp_path, num_rounds, **settings)
    remove(tmp_path / json.loads((tmp_path / RUN).read_text())["draws"][1][0])
    with pytest.warns(RuntimeWarning, match="rounds 35 to 59 are lost"):
        resumed = run(tmp_path, 80, **settings)
    np.testing.assert_array_equal(resumed.info["round"][0], [14, 19, 24, 29, 34, 64, 69, 74, 79])


def test_a_checkpoint_of_other_versions_warns(folder, samples):
    record = read_record(folder / RUN)
    now = record["versions"]["jax"]
    record["versions"]["jax"] = "0.4.1"
    write_record(folder / RUN, record)
    message = f"{folder} was written with jax 0.4.1, now {now}: draws from round 60 on may differ"
    with pytest.warns(RuntimeWarning, match=message):
        resumed = run(folder, 90)
    assert "jax 0.4.1" in resumed.warnings[0]
    assert_same(numbers(resumed), numbers(samples))
    run(folder, 90)  # this version wrote it: no warning
