"""Other users of a machine read nothing of a site, of a server and of a consortium."""

import contextlib
import os
import stat
import tomllib

import pytest

from fedmcmc import deploy
from fedmcmc.deploy._config import open_configured_site, run_over, site_settings
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy.secure import SiteRules
from fedmcmc.storage import write_atomically
from tests.deploy.attacks.support import (
    NAMES,
    Network,
    make_study,
    open_site,
    run,
    write_study,
)
from tests.support import studies
from tests.support.commands import Consortium
from tests.support.consortium import credentials, make_keys

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX systems")


@pytest.fixture(autouse=True)
def open_umask():
    """Let new files be readable by everybody, unless they are made otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder):
    """Return what others may do with a folder or with anything in it."""
    modes = {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in (folder, *folder.rglob("*"))
    }
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@pytest.mark.parametrize("kernel", ["snapshot", "masked"])
def test_others_read_nothing_in_the_folder_of_a_site(kernel, tmp_path):
    """A site stores its state, its secret, its log, and its last answer before it was masked."""
    study = make_study(kernel, masked=kernel == "masked")
    with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
        network = Network(study, tmp_path / "sites")
        network.enter(open_site(study, "bern", tmp_path / "sites", log=log))
        run(study, network, num_rounds=2)
    assert open_to_others(tmp_path / "bern.log") == {}
    for name in study.sites:
        folder = tmp_path / "sites" / name
        assert any(path.is_file() for path in folder.rglob("*")) and open_to_others(folder) == {}


def test_a_folder_that_others_could_read_is_closed(tmp_path):
    disk = Disk(tmp_path / "state")
    disk.write("run", {}, b"state")
    disk.mark("run", [3], b"state", keep=())
    for path in (disk.folder, *disk.folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (tmp_path / "other").write_bytes(b"")
    (disk.folder / "link").symlink_to(tmp_path / "other")
    Disk(disk.folder)
    (disk.folder / "link").unlink()
    assert open_to_others(disk.folder) == {}
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o644


def test_words_under_masks_are_closed_to_others(tmp_path):
    """Also in a folder that others can read, and next to a file that was left half written."""
    study = studies.masked_study("lsd", kernels={}, asks=deploy.SUMS)
    (tmp_path / "masks.new").write_bytes(b"left by a process that was killed")
    SiteRules(tmp_path / "masks", study.consortium, num_rounds=10).leave()
    tmp_path.chmod(0o700)
    assert open_to_others(tmp_path) == {}


def test_a_private_file_replaces_one_that_was_left_half_written(tmp_path):
    (tmp_path / "state.partial").write_bytes(b"left")
    for private, mode in ((True, 0o600), (False, 0o644)):
        write_atomically(tmp_path / "state", lambda file: file.write(b"new"), private=private)
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode
        assert (tmp_path / "state").read_bytes() == b"new"


def test_others_read_nothing_of_a_consortium(tmp_path):
    """Keys, and the seed of the server's noise; each site's settings pin the server."""
    kits = tmp_path / "consortium"
    kits.mkdir(mode=0o755)
    parties = deploy.make_consortium(write_study(tmp_path / "study"), kits, "localhost:7443")
    assert open_to_others(kits) == {}
    server_certificate = (kits / "server" / "keys" / "server.crt").read_bytes()
    for name in NAMES:
        settings = tomllib.loads((kits / name / "site.toml").read_text())
        certificate = (kits / name / "keys" / "server.crt").read_bytes()
        assert settings["server_fingerprint"] == deploy.fingerprint(certificate)
        assert settings["server_fingerprint"] == parties["server"].fingerprint
        assert certificate == server_certificate
        assert not (kits / name / "keys" / "server.key").exists()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_private_key_that_others_can_read_is_not_used(mode, tmp_path):
    pins = make_keys(tmp_path, ["bern"])
    deploy.make_identity(tmp_path, "bern")
    credentials(tmp_path, "bern").read()
    for name in ("bern.key", "server.key", "bern.identity"):
        (tmp_path / name).chmod(mode)
    message = rf"is open to other users .*\(mode {mode:04o}, expected 0600\): run 'chmod 600 .*bern"
    with pytest.raises(ValueError, match=rf"bern\.key {message}"):
        credentials(tmp_path, "bern").read()
    with pytest.raises(ValueError, match=r"server\.key is open to other users"):
        deploy.GrpcServer("127.0.0.1:0", credentials(tmp_path, "server"), pins)
    with pytest.raises(ValueError, match=rf"bern\.identity {message}"):
        studies.site_of(
            studies.masked_study("lsd"), "bern", tmp_path, identity=tmp_path / "bern.identity"
        )


def test_others_read_nothing_that_a_server_writes(tmp_path):
    """Draws, checkpoint and settings with the seed, also where they were open before."""
    study, out = deploy.Study.read(write_study(tmp_path)), tmp_path / "out"
    path = tmp_path / "server.toml"
    settings = path.read_text().replace("num_rounds = 20", "num_rounds = 4")
    path.write_text(
        settings.replace('"draws.npz"', '"out/draws.npz"').replace(
            '"checkpoint"', '"out/checkpoint"'
        )
    )
    (out / "checkpoint").mkdir(parents=True)
    (out / "draws.npz").write_bytes(b"")
    run_over(path, lambda: Network(study, tmp_path / "sites"))
    assert os.umask(0o022) == 0o022  # unchanged
    out.chmod(0o700)
    assert (out / "checkpoint" / "run.json").exists() and open_to_others(out) == {}
    assert (out / "draws.npz").stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_log_of_a_site_is_closed_to_others(tmp_path):
    clinics = Consortium(tmp_path)
    log = tmp_path / "bern.audit.log"
    log.write_bytes(b"")
    with open_configured_site(*site_settings(tmp_path / "bern.toml")) as site:
        assert site.study.digest == clinics.study.digest
    assert log.stat().st_size and stat.S_IMODE(log.stat().st_mode) == 0o600
    assert open_to_others(tmp_path / "bern") == {}
    assert stat.S_IMODE((tmp_path / "bern").stat().st_mode) == 0o700
