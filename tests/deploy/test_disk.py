"""Files that a site stores between answers: complete, checked, and few."""

import pytest

from fedmcmc.deploy._disk import Disk


def test_a_sites_files_are_checked_when_they_are_read(tmp_path):
    disk = Disk(tmp_path)
    disk.write("run", {"a": 1}, b"state", b"pending")
    assert disk.read("run", 2) == ({"a": 1}, [b"state", b"pending"])
    assert disk.read("other", 2) is None and disk.marked("run", 3) is None
    disk.mark("run", [3, 4], b"three", keep=[])
    disk.mark("run", [7], b"seven", keep=[4])
    assert disk.marked("run", 7) == b"seven"
    for path in list(tmp_path.glob("run-*/*")):  # of a process that was killed while it wrote
        path.with_name(path.name + ".partial").write_bytes(b"")
    disk.mark("run", [8], b"eight", keep=[4])
    assert disk.marked("run", 8) == b"eight" and disk.marked("run", 4) == b"three"
    assert disk.marked("run", 8) is None  # of rounds that are run again
    assert disk.marked("run", 3) is None and disk.marked("run", 7) is None
    disk.count_numbers(12)
    assert Disk(tmp_path).num_numbers == 12
    (path,) = tmp_path.glob("run-*/state")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match="damaged"):
        disk.read("run", 2)


def test_a_state_that_was_cut_short_leaves_the_previous_one(tmp_path):
    """The site did not answer then, so the previous state is its state."""
    disk = Disk(tmp_path)
    for number in range(5):
        disk.write("run", {"a": number}, bytes([number]) * 5000, b"pending")
        assert Disk(tmp_path).read("run", 2)[0] == {"a": number}
    (path,) = tmp_path.glob("run-*/state")
    content = path.read_bytes()
    places = [content.index(bytes([number]) * 5000) for number in (4, 3)]
    for number, place in zip((3, None), places, strict=True):
        torn = bytearray(path.read_bytes())
        torn[place + 4000 : place + 5000] = bytes([2]) * 1000
        path.write_bytes(torn)
        if number is not None:
            assert disk.read("run", 2) == ({"a": number}, [bytes([number]) * 5000, b"pending"])
    with pytest.raises(OSError, match="damaged"):
        disk.read("run", 2)
    path.write_bytes(content)
    restarted = Disk(tmp_path)
    for number, size in ((5, 5000), (6, 50_000), (7, 10)):  # more than fits, and less
        restarted.write("run", {"a": number}, bytes([number]) * size, b"")
        assert Disk(tmp_path).read("run", 2) == ({"a": number}, [bytes([number]) * size, b""])


def test_a_disk_has_the_files_of_few_runs(tmp_path):
    disk = Disk(tmp_path)
    for number in range(20):
        disk.begin(str(number))
        disk.write(str(number), {}, b"")
    assert disk.read("19", 1) is not None and len(list(tmp_path.glob("run-*"))) <= 17
