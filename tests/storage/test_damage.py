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
def whole():
    return numbers(run(None, 90))


@pytest.fixture(scope="module")
def directory_of_two(tmp_path_factory):
    """A directory with the checkpoint of round 60, and that of round 30 before it."""
    folder = tmp_path_factory.mktemp("two") / "c"
    run(folder, 30)
    run(folder, 60)
    return folder


@pytest.fixture
def folder(directory_of_two, tmp_path):
    return shutil.copytree(directory_of_two, tmp_path / "c")


def truncated(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def removed(path):
    path.unlink()


def file_of(folder, kind, manifest=RUN):
    """Return the path of a manifest, of its state or of its last draws."""
    if kind == "manifest":
        return folder / manifest
    record = json.loads((folder / manifest).read_text())
    return folder / (record["state"] if kind == "state" else record["draws"][-1])[0]


@pytest.mark.parametrize("damage", fast_and_slow([truncated, emptied, flipped, removed], [flipped]))
@pytest.mark.parametrize("kind", ["manifest", "state", "draws"])
def test_a_run_goes_on_from_the_checkpoint_before(kind, damage, folder, whole):
    path = file_of(folder, kind)
    damage(path)
    with pytest.warns(RuntimeWarning, match=f"{path} .*continues from the previous.*round 30"):
        again = run(folder, 90)
    assert_same(numbers(again), whole)
    assert_same(numbers(run(folder, 90)), whole)  # and there is no damage any more


@pytest.mark.parametrize("kind", ["manifest", "state"])
def test_damage_to_both_checkpoints_is_an_error(kind, folder):
    last, before = file_of(folder, kind), file_of(folder, kind, BEFORE)
    truncated(last)
    emptied(before)
    files = f"{last} is damaged .*previous.*{before} is damaged .*delete {folder} to start again"
    with pytest.raises(fedmcmc.CheckpointError, match=files):
        run(folder, 90)


def test_damage_to_the_only_checkpoint_is_an_error(tmp_path):
    run(tmp_path, 30)
    truncated(tmp_path / RUN)
    with pytest.raises(ValueError, match=f"{tmp_path / RUN} is damaged.*{BEFORE} cannot be read"):
        run(tmp_path, 60)


def edit(path, **changes):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | changes))


def test_an_edited_round_is_noticed(folder, whole):
    edit(folder / RUN, round=59)
    with pytest.warns(RuntimeWarning, match="its content does not match its checksum"):
        assert_same(numbers(run(folder, 90)), whole)


def test_a_round_that_is_not_that_of_the_state_is_noticed(folder, whole):
    write_record(folder / RUN, read_record(folder / RUN) | {"round": 59})
    with pytest.warns(RuntimeWarning, match=r"its round is 59, but the state in .* is of round 60"):
        assert_same(numbers(run(folder, 90)), whole)


@pytest.mark.parametrize("kind", fast_and_slow(["state", "draws"], ["state"]))
def test_a_part_of_another_run_is_noticed(kind, folder, tmp_path, whole):
    """Even where the manifest has its checksum."""
    run(tmp_path / "other", 30, seed=1)
    run(tmp_path / "other", 60, seed=1)
    other = json.loads((tmp_path / "other" / RUN).read_text())
    record, path = read_record(folder / RUN), file_of(folder, kind)
    shutil.copy(file_of(tmp_path / "other", kind), path)
    if kind == "state":
        record["state"][1] = other["state"][1]
    else:
        record["draws"][-1][1] = other["draws"][-1][1]
    write_record(folder / RUN, record)
    with pytest.warns(RuntimeWarning, match=f"{path} is a part of another run"):
        assert_same(numbers(run(folder, 90)), whole)


def test_draws_in_a_store_go_back_to_the_checkpoint_before(tmp_path, whole):
    def stored(folder, num_rounds):
        return run(folder / "c", num_rounds, draws_to=folder / "draws.zarr")

    pytest.importorskip("zarr")
    stored(tmp_path, 30)
    stored(tmp_path, 60)
    truncated(file_of(tmp_path / "c", "state"))
    with pytest.warns(RuntimeWarning, match="of round 30"):
        assert_same(numbers(stored(tmp_path, 90)), whole)


def test_a_checkpoint_of_an_earlier_format_is_refused(folder):
    record = json.loads((folder / RUN).read_text())
    del record["checksum"]
    (folder / RUN).write_text(json.dumps(record | {"format": "npz"}))
    with pytest.raises(fedmcmc.CheckpointError, match=r"another version of fedmcmc.*start again"):
        run(folder, 90)


def test_a_damaged_record_of_files_is_an_error(tmp_path):
    pytest.importorskip("zarr")
    run(tmp_path / "c", 30, draws_to=tmp_path / "draws.zarr")
    truncated(tmp_path / "c" / "files.json")
    with pytest.raises(
        fedmcmc.CheckpointError, match=rf"files.json is damaged .*delete {tmp_path / 'c'}"
    ):
        run(tmp_path / "c", 60, draws_to=tmp_path / "draws.zarr")


def test_two_checkpoints_are_kept_and_no_more(folder):
    for num_rounds in (70, 80, 90):
        run(folder, num_rounds)
    records = [json.loads((folder / name).read_text()) for name in (RUN, BEFORE)]
    assert [record["round"] for record in records] == [90, 80]
    named = {part[0] for record in records for part in [record["state"], *record["draws"]]}
    assert {path.name for path in folder.glob("*.npz")} == named


@pytest.mark.parametrize("damage", fast_and_slow([truncated, removed], [removed]))
def test_damage_to_early_draws_costs_these_alone(damage, tmp_path):
    """Both checkpoints name the part, so none can be used whole."""
    for num_rounds in (30, 50, 60):
        run(tmp_path, num_rounds)
    whole = run(None, 90)
    early = tmp_path / json.loads((tmp_path / RUN).read_text())["draws"][1][0]
    copy = early.read_bytes()
    damage(early)
    lost = f"{early} .*draws of rounds 30 to 49 are lost.*restore a copy.*delete {tmp_path} "
    for num_rounds in (90, 90, 95):  # resumed, read back, and resumed from its own checkpoint
        with pytest.warns(RuntimeWarning, match=lost):
            again = run(tmp_path, num_rounds)
        kept = [*range(30), *range(50, num_rounds)]
        np.testing.assert_array_equal(again.info["round"][0], kept)
        np.testing.assert_array_equal(again.draws[:, :70], np.delete(whole.draws, slice(30, 50), 1))
        assert "rounds 30 to 49 are lost" in again.warnings[0]
        np.testing.assert_array_equal(again.totals["rounds"], num_rounds)
    early.write_bytes(copy)
    assert_same(numbers(run(tmp_path, 95)), numbers(run(None, 95)))


def test_lost_draws_are_named_by_their_rounds(tmp_path):
    settings = dict(num_burnin=10, thinning=5)
    for num_rounds in (35, 60, 70):
        run(tmp_path, num_rounds, **settings)
    removed(tmp_path / json.loads((tmp_path / RUN).read_text())["draws"][1][0])
    with pytest.warns(RuntimeWarning, match="rounds 35 to 59 are lost"):
        again = run(tmp_path, 80, **settings)
    np.testing.assert_array_equal(again.info["round"][0], [14, 19, 24, 29, 34, 64, 69, 74, 79])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "holds no record of fedmcmc"),
        ("[]", "holds no record of fedmcmc"),
        ('"text"', "holds no record of fedmcmc"),
        ('{"format": 2}', "has no checksum"),
    ],
)
def test_a_manifest_that_holds_something_else_is_damaged(content, reason, folder, whole):
    (folder / RUN).write_text(content)
    with pytest.warns(RuntimeWarning, match=f"{RUN} is damaged .it {reason}.*of round 30"):
        assert_same(numbers(run(folder, 90)), whole)


def test_a_manifest_without_some_entries_is_damaged(folder):
    for name in (RUN, BEFORE):
        record = read_record(folder / name)
        del record["draws"], record["state"]
        write_record(folder / name, record)
    with pytest.raises(
        fedmcmc.CheckpointError, match=rf"lacks draws, state.*copy.*delete {folder} to start again"
    ):
        run(folder, 90)


def test_a_checkpoint_of_other_versions_warns(folder, whole):
    record = read_record(folder / RUN)
    now = record["versions"]["jax"]
    record["versions"]["jax"] = "0.4.1"
    write_record(folder / RUN, record)
    told = f"in {folder} was written with jax 0.4.1, now {now}: draws from round 60 on may differ"
    with pytest.warns(RuntimeWarning, match=told):
        again = run(folder, 90)
    assert "jax 0.4.1" in again.warnings[0]
    assert_same(numbers(again), whole)
    run(folder, 90)  # written by this version, and no warning
