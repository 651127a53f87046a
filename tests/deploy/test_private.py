"""Who may read what lies on the disk of a site, of a server and of a consortium."""

import os
import stat
import tomllib

import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._config import open_configured_site, run_over, site_settings
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy.secure import SiteRules
from fedmcmc.storage import write_atomically
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.commands import MODEL, NAMES, SIZES, Consortium
from tests.support.consortium import credentials, make_keys
from tests.support.site_runs import POSITION

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX systems")


@pytest.fixture(autouse=True)
def open_umask():
    """Let new files be readable by everybody, unless they are made otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder):
    """Return what others may do with a folder or with anything in it."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            found[str(path.relative_to(folder))] = oct(mode)
    return found


@pytest.mark.parametrize(
    "study",
    [
        studies.study_of("compress: lsd_pp, memory: per client"),
        pytest.param(studies.masked_study("lsd_pp"), marks=pytest.mark.slow),
    ],
    ids=["states", "masked"],
)
def test_others_read_nothing_in_the_folder_of_a_site(study, tmp_path):
    local = deploy.LocalTransport()
    studies.join_all(local, study, tmp_path)
    settings = dict(transport=local, num_rounds=2, progress=False)
    deploy.run(study, KEY, "main", POSITION, **settings)
    for name in study.sites:
        assert list((tmp_path / name).rglob("*")) and open_to_others(tmp_path / name) == {}


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
    """Also in a folder that others can read, and beside a file that was left half written."""
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


@pytest.fixture
def kits(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    sites = "\n".join(f"{name} = {num}" for name, num in zip(NAMES, SIZES, strict=True))
    (folder / "study.toml").write_text(
        'name = "three clinics"\nposterior = "model.py:posterior"\n'
        'rows = { dtype = "float32", shape = [2] }\n'
        f'[sites]\n{sites}\n[kernels]\nmain = "model.py:kernel"\n[settings]\nstep_size = 0.01\n'
    )
    made = tmp_path / "consortium"
    made.mkdir(mode=0o755)
    deploy.make_consortium(folder / "study.toml", made, "localhost:7443")
    return made


def test_others_read_nothing_of_a_consortium(kits):
    assert open_to_others(kits) == {}
    with (kits / "bern" / "site.toml").open("rb") as file:
        settings = tomllib.load(file)
    certificate = (kits / "bern" / "keys" / "server.crt").read_bytes()
    assert settings["server_fingerprint"] == deploy.fingerprint(certificate)
    assert certificate == (kits / "server" / "keys" / "server.crt").read_bytes()
    assert not (kits / "bern" / "keys" / "server.key").exists()


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


def test_what_a_server_writes_is_closed_to_others(tmp_path):
    """Draws, checkpoint and settings with the seed, also where they were open before."""
    run = dict(kernel="main", seed=3, draws="out/draws.npz", position="model.py:start")
    run |= dict(num_rounds=4, checkpoint="out/checkpoint", every_rounds=2, progress=False)
    clinics, local = Consortium(tmp_path, run=run), deploy.LocalTransport()
    out = tmp_path / "out"
    (out / "checkpoint").mkdir(parents=True)
    (out / "draws.npz").write_bytes(b"")
    for name in NAMES:
        local.join(clinics._site(name, tmp_path / name))
    umask = os.umask(0o022)
    run_over(tmp_path / "server.toml", lambda: local)
    assert os.umask(umask) == 0o022  # as it was
    out.chmod(0o700)
    assert (out / "checkpoint" / "run.json").exists() and open_to_others(out) == {}
    assert stat.S_IMODE((tmp_path / "server.toml").stat().st_mode) == 0o600


def test_the_log_of_a_site_is_closed_to_others(tmp_path):
    clinics = Consortium(tmp_path)
    log = tmp_path / "bern.audit.log"
    log.write_bytes(b"")
    with open_configured_site(*site_settings(tmp_path / "bern.toml")) as site:
        assert site.study.digest == clinics.study.digest
    assert log.stat().st_size and stat.S_IMODE(log.stat().st_mode) == 0o600
    assert open_to_others(tmp_path / "bern") == {}
    np.testing.assert_equal(stat.S_IMODE((tmp_path / "bern").stat().st_mode), 0o700)
