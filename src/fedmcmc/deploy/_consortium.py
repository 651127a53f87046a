"""Folders of all parties with keys, certificates, the study and settings."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmcmc.deploy._names import (
    MAX_BYTES,
    check_party_name,
    check_site_names,
    fold,
    toml_key,
    toml_text,
)
from fedmcmc.deploy._pki import (
    SERVER,
    SERVER_CERTIFICATE,
    make_authority,
    make_identity,
    make_party,
    public_identity,
    sign_request,
)
from fedmcmc.deploy._private import private_folder
from fedmcmc.deploy._seeds import new_seed
from fedmcmc.deploy._settings import check_address, read_toml
from fedmcmc.deploy._sources import is_file, read_source
from fedmcmc.deploy._study import Study

AUTHORITY = "authority"
STUDY = "study"
PARTIES = "parties.toml"


class Party(NamedTuple):
    """Public data of a party: fingerprint of its certificate, and a site's identity."""

    fingerprint: str
    identity: str


def make_consortium(
    study: str | Path,
    folder: str | Path,
    server: str,
    *,
    hosts: Sequence[str] = (),
    requests: str | Path | None = None,
) -> dict[str, Party]:
    """Create a certificate authority, and a folder per party for its owner.

    Parameters
    ----------
    study
        TOML file of a study. If it has a table ``secure`` without ``identities``, the copies of the
        parties receive the identities.
    folder
        New or empty folder. The operator of the consortium keeps the folder ``authority`` in it.
    server
        ``"host:port"`` of the server for the sites.
    hosts
        Other names and addresses of the server.
    requests
        Folder with ``NAME.csr`` and ``NAME.identity.pub`` of parties that created their own keys
        (``fedmcmc deploy request``). This function creates the keys of all other parties.

    Returns
    -------
    dict
        Parties by name, including the server, as in ``parties.toml``.

    Raises
    ------
    FileExistsError
        If `folder` is not empty.
    ValueError
        If the file is not a study, its files are outside of its folder, a site's name cannot be the
        name of a folder and a certificate, or `server` has no port.
    """
    path, folder = Path(study), Path(folder)
    entries = read_toml(path)
    host, _ = check_address(server, "server")
    names = list(entries.get("sites", {}))
    for name in names:
        check_party_name(name)
        if fold(name) in (SERVER, AUTHORITY, STUDY, PARTIES):
            raise ValueError(f"No site can be called {name}: the consortium has a folder for it.")
    check_site_names(names)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} is not empty, and new keys would replace the keys in it. If only the study "
            f"has changed, copy {path.name} and the files that it names to the folder {STUDY}/ of "
            "each party; each owner then runs 'fedmcmc deploy approve' again (section 'Change the "
            "study' in docs/guides/operations.md)."
        )
    try:
        inbox = None if requests is None else Path(requests)
        return _write_folders(path, entries, folder, server, [host, *hosts], inbox)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete consortium is of no use
        raise


def _write_folders(
    path: Path,
    entries: dict[str, Any],
    folder: Path,
    server: str,
    hosts: Sequence[str],
    requests: Path | None,
) -> dict[str, Party]:
    private_folder(folder)
    authority = f"{entries.get('name')} consortium".encode()[:MAX_BYTES].decode(errors="ignore")
    make_authority(folder / AUTHORITY, authority)
    parties = {
        name: _write_keys(
            folder / AUTHORITY,
            folder / name / "keys",
            name,
            hosts if name == SERVER else (),
            requests,
        )
        for name in (SERVER, *entries.get("sites", {}))
    }
    text = path.read_text(encoding="utf-8")
    if "secure" in entries and "identities" not in entries["secure"]:
        text += "\n[secure.identities]\n" + _table(_identities(parties))
    study = _copy_study(path, text, folder / STUDY)
    for name in parties:
        shutil.copytree(folder / STUDY, folder / name / STUDY)
    for name in study.sites:
        keys = folder / name / "keys"
        shutil.copyfile(folder / SERVER / "keys" / SERVER_CERTIFICATE, keys / SERVER_CERTIFICATE)
        pin = parties[SERVER].fingerprint
        text = _site_toml(name, path.name, server, pin, masked=bool(study.secure))
        (folder / name / "site.toml").write_text(text, encoding="utf-8")
    pins = {name: parties[name].fingerprint for name in study.sites}
    port = server.rpartition(":")[2]
    text = _server_toml(study, path.name, port, pins)
    (folder / SERVER / "server.toml").write_text(text, encoding="utf-8")
    (folder / PARTIES).write_text(
        "# Public: compare these by telephone.\n[fingerprints]\n"
        + _table({name: party.fingerprint for name, party in parties.items()})
        + "\n[identities]\n"
        + _table(_identities(parties)),
        encoding="utf-8",
    )
    private_folder(folder)
    return parties


def _identities(parties: dict[str, Party]) -> dict[str, str]:
    return {name: party.identity for name, party in parties.items() if party.identity}


def _write_keys(
    authority: Path, folder: Path, name: str, hosts: Sequence[str], requests: Path | None
) -> Party:
    request = None if requests is None else requests / f"{name}.csr"
    if request is None or not request.exists():
        pin = make_party(authority, folder, name, hosts=hosts)
        return Party(pin, "" if name == SERVER else make_identity(folder, name))
    assert requests is not None
    pin = sign_request(authority, request, folder, name, hosts=hosts)
    if name == SERVER:
        return Party(pin, "")
    public = requests / f"{name}.identity.pub"
    identity = public_identity(public)
    shutil.copyfile(public, folder / public.name)
    return Party(pin, identity)


def _copy_study(path: Path, text: str, folder: Path) -> Study:
    """Write a study and the files that it names to a folder; return the study."""
    folder.mkdir(parents=True)
    (folder / path.name).write_text(text, encoding="utf-8")
    study = Study.read(folder / path.name)
    for source in filter(is_file, study.sources):
        data = read_source(study.name, path.parent, source).data
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).write_bytes(data)
    _ = study.digest  # raises if a package is missing
    return study


def _site_toml(name: str, study: str, server: str, pin: str, *, masked: bool) -> str:
    keys = {suffix: toml_text(f"keys/{name}.{suffix}") for suffix in ("key", "crt", "identity")}
    identity = f"identity = {keys['identity']}\n" if masked else ""
    return f"""\
# Settings of the site {name}. Paths are relative to this file's folder.
name = {toml_text(name)}
study = {toml_text(f"study/{study}")}
approval = "approval.json"        # fedmcmc deploy approve writes it
rows = "rows.npz"                 # yours: arrays by column, np.savez("rows.npz", x=..., y=...)
folder = "state"                  # on a disk that stays
server = {toml_text(server)}
key = {keys["key"]}
certificate = {keys["crt"]}
authority = "keys/ca.crt"
server_fingerprint = "{pin}"  # of keys/server.crt; no other server is accepted
{identity}
[limits]                          # your own, whatever the server asks
# max_numbers = 1000000          # most numbers that leave this site in all runs; no default
# min_rows = 20                   # default: the larger of 20 and 3 per parameter of the model;
#                                   a number here replaces that
# min_batch = 20                  # fewest rows in a minibatch; the same default
min_sites = 3
# refused_columns = ["postcode"]
"""


def _server_toml(study: Study, name: str, port: str, pins: dict[str, str]) -> str:
    kernel = next(iter(study.kernels), "fit")
    run = "" if kernel == "fit" else _RUN
    noise = "the noise of server and sites" if study.reproducible else "the server's noise"
    knows = f"who knows it can compute {noise}"
    return f"""\
# Settings of the server. Paths are relative to this file's folder.
study = {toml_text(f"study/{name}")}
address = "0.0.0.0:{port}"
key = "keys/server.key"
certificate = "keys/server.crt"
authority = "keys/ca.crt"

[sites]                           # fingerprints of certificates; without its own, nobody gets in
{_table(pins)}
[run]
kernel = {toml_text(kernel)}
seed = "{new_seed()}"   # secret: {knows}
draws = "draws.npz"
{run}"""


_RUN = """\
num_rounds = 2000
num_burnin = 200
num_chains = 4
checkpoint = "checkpoint"
every_rounds = 100
"""


def _table(entries: dict[str, str]) -> str:
    return "".join(f"{toml_key(name)} = {toml_text(entry)}\n" for name, entry in entries.items())
