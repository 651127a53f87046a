"""A consortium hands each party a folder, and signs certificates of keys that never travel."""

import re
import shutil
import stat
import subprocess
import tomllib

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509 import load_pem_x509_certificate

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._config import open_configured_site, site_settings
from fedmcmc.deploy._pki import make_request, sign_request
from tests.support.commands import MODEL, NAMES, SIZES, rows_of

MASKED = """

def masked(posterior, settings):
    return fedmcmc.secure_sum(fedmcmc.lsd(posterior, step_size=settings["step_size"]))
"""


@pytest.fixture
def study(tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    sites = "\n".join(f"{name} = {num}" for name, num in zip(NAMES, SIZES, strict=True))
    (folder / "study.toml").write_text(f"""
name = "three clinics"
posterior = "model.py:posterior"
rows = {{ dtype = "float32", shape = [2] }}
[sites]
{sites}
[kernels]
main = "model.py:kernel"
[settings]
step_size = 0.01
""")
    return folder / "study.toml"


def make_folders(study, tmp_path, *more):
    folder = tmp_path / "consortium"
    arguments = ["deploy", "init", str(study), "--server", "hub.example.org:7443"]
    return main([*arguments, "--folder", str(folder), *more]), folder


def read_bytes(path):
    return path.read_bytes() if path.is_file() else b""


def read(path):
    return tomllib.loads(path.read_text())


def test_each_party_gets_a_folder_with_all_that_it_needs(study, tmp_path, capsys):
    status, folder = make_folders(study, tmp_path)
    assert status == 0
    output, parties = capsys.readouterr().out, read(folder / "parties.toml")
    pins = read(folder / "server" / "server.toml")["sites"]
    assert re.fullmatch("[0-9a-f]{32}", read(folder / "server" / "server.toml")["run"]["seed"])
    digest = deploy.Study.read(study).digest
    for name in ("server", *NAMES):
        kit = folder / name
        certificate = (kit / "keys" / f"{name}.crt").read_bytes()
        pin = deploy.fingerprint(certificate)
        assert parties["fingerprints"][name] == pin and pin in output
        assert stat.S_IMODE((kit / "keys" / f"{name}.key").stat().st_mode) == 0o600
        assert deploy.Study.read(kit / "study" / "study.toml").digest == digest
        assert not (kit / "keys" / "ca.key").exists()
    assert set(parties["identities"]) == set(NAMES) == set(pins)
    for name in NAMES:
        assert pins[name] == parties["fingerprints"][name]
        settings = read(folder / name / "site.toml")
        assert settings["name"] == name and settings["server"] == "hub.example.org:7443"
        for what in ("study", "key", "certificate", "authority"):
            assert (folder / name / settings[what]).exists(), what
    # One site's keys are nowhere but in its own folder.
    secret = [path for path in folder.rglob("*") if b"PRIVATE" in read_bytes(path)]
    assert {path.name for path in secret if path.is_relative_to(folder / "bern")} == {
        "bern.key",
        "bern.identity",
    }
    assert len(secret) == 2 + 2 * len(NAMES)


@pytest.fixture
def masked(study):
    text = study.read_text().replace("model.py:kernel", "model.py:masked")
    study.write_text(f"asks = {list(deploy.FIT)}\n{text}[secure]\nrounds = 500\n")
    (study.parent / "model.py").write_text(MODEL + MASKED)
    return study


def test_a_study_under_masks_gets_the_identities_of_its_sites(masked, tmp_path, capsys):
    status, folder = make_folders(masked, tmp_path)
    assert status == 0
    identities = read(folder / "parties.toml")["identities"]
    digests = set()
    for name in NAMES:
        agreed = deploy.Study.read(folder / name / "study" / "study.toml")
        digests.add(agreed.digest)
        assert agreed.secure["identities"] == identities
        settings = read(folder / name / "site.toml")
        rows = rows_of(name)
        identity = folder / name / settings["identity"]
        site = deploy.Site(
            agreed, name, rows, folder=tmp_path / name, identity=identity, min_rows=1
        )
        assert site.name == name  # a key of another site raises
    assert len(digests) == 1
    capsys.readouterr()
    settings = ["--settings", str(folder / "bern" / "site.toml")]
    assert main(["deploy", "approve", "--yes", *settings]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "One message per round and chain: 5 masked numbers of 8 bytes" in text, text
    assert text.count("the server reads only totals over all 3 sites") == 2
    assert "The server reads each" not in text and "uses no masks" not in text


def test_an_owner_leaves_a_study_under_masks_for_good(masked, tmp_path, capsys, monkeypatch):
    _, folder = make_folders(masked, tmp_path)
    kit = folder / "bern"
    path = kit / "site.toml"
    path.write_text(path.read_text().replace("# min_rows = 20", "min_rows = 1"))
    settings = ["--settings", str(kit / "site.toml")]
    np.savez(kit / "rows.npz", rows=rows_of("bern"))
    assert main(["deploy", "leave", "--yes", *settings]) == 1  # runs nothing without an approval
    assert "There is no approval" in capsys.readouterr().err
    assert main(["deploy", "approve", "--yes", *settings]) == 0
    monkeypatch.setattr("builtins.input", lambda question: "no")
    configuration = site_settings(kit / "site.toml")
    assert main(["deploy", "leave", *settings]) == 1
    with open_configured_site(*configuration) as site:
        assert site.name == "bern"
        assert main(["deploy", "leave", "--yes", *settings]) == 1
        assert "in use" in capsys.readouterr().err
    assert main(["deploy", "leave", "--yes", *settings]) == 0
    assert "the study is over for all" in capsys.readouterr().out
    with (
        pytest.raises(deploy.Refused, match=r"bern has left .* permanently.*\(rule 5\)"),
        open_configured_site(*configuration),
    ):
        pass
    log = (kit / "audit.log").read_text().splitlines()
    assert '"what": "left"' in log[-1]


def test_keys_are_not_made_twice_and_a_study_without_masks_cannot_be_left(study, tmp_path, capsys):
    _, folder = make_folders(study, tmp_path)
    key = (folder / "bern" / "keys" / "bern.key").read_bytes()
    assert make_folders(study, tmp_path)[0] == 1
    errors = capsys.readouterr().err
    assert "is not empty" in errors and "study/ of each party; each owner then runs" in errors
    assert (folder / "bern" / "keys" / "bern.key").read_bytes() == key
    settings = ["--settings", str(folder / "bern" / "site.toml")]
    main(["deploy", "approve", "--yes", *settings])
    capsys.readouterr()
    assert main(["deploy", "leave", "--yes", *settings]) == 1
    assert "has no masks" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")
def test_openssl_reads_all_files(study, tmp_path):
    _, folder = make_folders(study, tmp_path)
    keys = folder / "bern" / "keys"

    def openssl(*arguments):
        process = subprocess.run(["openssl", *arguments], cwd=keys, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    verified = openssl("verify", "-CAfile", "ca.crt", "-purpose", "sslclient", "bern.crt")
    assert verified == "bern.crt: OK\n"
    (keys / "server.crt").write_bytes((folder / "server" / "keys" / "server.crt").read_bytes())
    checks = ("-purpose", "sslserver", "-verify_hostname", "hub.example.org")
    assert "OK" in openssl("verify", "-CAfile", "ca.crt", *checks, "server.crt")
    shown = openssl("x509", "-in", "bern.crt", "-noout", "-fingerprint", "-sha256")
    pin = read(folder / "parties.toml")["fingerprints"]["bern"]
    assert shown.strip().partition("=")[2].replace(":", "").lower() == pin
    identity = openssl("pkey", "-in", "bern.identity", "-pubout")
    assert identity == (keys / "bern.identity.pub").read_text()


def test_an_owner_makes_its_own_key(study, tmp_path, capsys):
    inbox, private = tmp_path / "inbox", tmp_path / "private"
    assert main(["deploy", "request", "bern", "--folder", str(private)]) == 0
    inbox.mkdir()
    for name in ("bern.csr", "bern.identity.pub"):  # what is sent
        shutil.copyfile(private / name, inbox / name)
    status, folder = make_folders(study, tmp_path, "--requests", str(inbox))
    assert status == 0
    assert not any(b"PRIVATE" in read_bytes(path) for path in (folder / "bern").rglob("*"))
    identities = read(folder / "parties.toml")["identities"]
    assert identities["bern"] in capsys.readouterr().out
    certificate = folder / "bern" / "keys" / "bern.crt"
    private_key = load_pem_private_key((private / "bern.key").read_bytes(), None)
    certificate = load_pem_x509_certificate(certificate.read_bytes())
    assert private_key.public_key() == certificate.public_key()


def test_a_certificate_is_renewed_by_another_request(study, tmp_path, capsys):
    _, folder = make_folders(study, tmp_path)
    main(["deploy", "request", "bern", "--folder", str(tmp_path / "new")])
    arguments = ["deploy", "sign", str(tmp_path / "new" / "bern.csr")]
    assert main([*arguments, "--authority", str(folder / "authority")]) == 0
    pin = deploy.fingerprint((tmp_path / "new" / "bern.crt").read_bytes())
    assert pin in capsys.readouterr().out
    assert pin != read(folder / "parties.toml")["fingerprints"]["bern"]


def test_a_request_of_somebody_else_is_not_signed(study, tmp_path):
    deploy.make_authority(tmp_path)
    path = make_request(tmp_path, "bern")
    with pytest.raises(ValueError, match=r"is a request of \['bern'\], not of 'basel'"):
        sign_request(tmp_path, path, tmp_path, "basel")
    path.write_bytes((tmp_path / "ca.crt").read_bytes())
    with pytest.raises(ValueError, match="is not a certificate request"):
        sign_request(tmp_path, path, tmp_path, "bern")
    assert not (tmp_path / "bern.crt").exists()


def test_a_model_outside_of_the_studys_folder_is_refused(study, tmp_path):
    study.write_text(study.read_text().replace("model.py:posterior", "../model.py:posterior"))
    (tmp_path / "model.py").write_text(MODEL)
    with pytest.raises(ValueError, match="outside of its folder"):
        deploy.make_consortium(study, tmp_path / "consortium", "hub:1")
