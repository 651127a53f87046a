"""A folder per party with all that it needs: keys, certificates, the study, settings."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedmcmc.deploy._pki import (
    SERVER,
    make_authority,
    make_identity,
    make_party,
    read_identity,
    sign_request,
)
from fedmcmc.deploy._study import Study

AUTHORITY = "authority"
PARTIES = "parties.toml"


class Party(NamedTuple):
    """What all may know of a party: fingerprint of its certificate, and a site's identity."""

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
    """Make an authority, and a folder per party that its owner is given as a whole.

    Parameters
    ----------
    study
        A study's TOML file.
    folder
        Where to; new or empty. ``authority`` in it stays with whoever runs the consortium.
    server
        ``"host:port"`` at which sites reach the server.
    hosts
        Other names and addresses of the server.
    requests
        A folder with ``NAME.csr`` and ``NAME.identity.pub`` of parties that have made their own
        keys (`make_request`, `make_identity`). Keys of the others are made here.

    Returns
    -------
    dict
        The parties by name, the server among them, as also written to ``parties.toml``.

    Raises
    ------
    FileExistsError
        If `folder` holds anything.
    ValueError
        If the study's files lie outside of its folder, a site is called as the server is, or
        `server` has no port.
    """
    path, folder = Path(study), Path(folder)
    agreed = Study.read(path)
    _ = agreed.digest  # raises where a file is missing
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"server must be 'host:port', got {server!r}.")
    if SERVER in agreed.sites or AUTHORITY in agreed.sites:
        raise ValueError(f"A site cannot be called {SERVER!r} or {AUTHORITY!r}.")
    strange = [name for name in agreed.sites if Path(name).name != name or name.startswith(".")]
    if strange:
        raise ValueError(f"Names of sites become names of folders, which {strange} cannot be.")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: new keys would undo those that are in it.")
    make_authority(folder / AUTHORITY, f"{agreed.name} consortium")
    wanted = None if requests is None else Path(requests)
    parties = {}
    for name in (SERVER, *agreed.sites):
        names = [host, *hosts] if name == SERVER else ()
        parties[name] = _keys(folder / AUTHORITY, folder / name / "keys", name, names, wanted)
        _copy_study(agreed, path, folder / name / "study")
    for name in agreed.sites:
        text = _site_toml(name, path.name, server)
        (folder / name / "site.toml").write_text(text)
    pins = {name: parties[name].fingerprint for name in agreed.sites}
    (folder / SERVER / "server.toml").write_text(_server_toml(agreed, path.name, port, pins))
    (folder / PARTIES).write_text(_parties_toml(parties))
    return parties


def _keys(
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
    identity = read_identity(public)
    shutil.copyfile(public, folder / public.name)
    return Party(pin, identity)


def _copy_study(study: Study, path: Path, folder: Path) -> None:
    sources = [source for source in study.sources if source.endswith(".py")]
    for source in sources:
        if Path(source).is_absolute() or ".." in Path(source).parts:
            raise ValueError(f"{source} of the study {study.name!r} lies outside of its folder.")
    for source in (path.name, *sources):
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / source, folder / source)


def _site_toml(name: str, study: str, server: str) -> str:
    return f"""\
# Settings of the site {name}. Paths are relative to this file's folder.
name = "{name}"
study = "study/{study}"
approval = "approval.json"        # fedmcmc deploy approve writes it
rows = "rows.npz"                 # yours: arrays by column, np.savez("rows.npz", x=..., y=...)
folder = "state"                  # on a disk that stays
server = "{server}"
key = "keys/{name}.key"
certificate = "keys/{name}.crt"
authority = "keys/ca.crt"

[limits]                          # your own, whatever the server asks
# most_rounds = 20000             # in all, over all runs
# min_rows = 20
min_sites = 3
# refused_columns = ["postcode"]
"""


def _server_toml(study: Study, name: str, port: str, pins: dict[str, str]) -> str:
    kernel = next(iter(study.kernels), "fit")
    fingerprints = "\n".join(f'{_quoted(site)} = "{pin}"' for site, pin in pins.items())
    run = "" if kernel == "fit" else _RUN
    return f"""\
# Settings of the server. Paths are relative to this file's folder.
study = "study/{name}"
address = "0.0.0.0:{port}"
key = "keys/server.key"
certificate = "keys/server.crt"
authority = "keys/ca.crt"

[sites]                           # fingerprints of certificates; without its own, nobody gets in
{fingerprints}

[run]
kernel = "{kernel}"
seed = {secrets.randbits(31)}                 # who knows it knows the noise of all sites
draws = "draws.npz"
{run}"""


_RUN = """\
num_rounds = 2000
num_burnin = 200
num_chains = 4
checkpoint = "checkpoint"
every_rounds = 100
"""


def _parties_toml(parties: dict[str, Party]) -> str:
    lines = ["# Public: compare these by telephone.", "[fingerprints]"]
    lines += [f'{_quoted(name)} = "{party.fingerprint}"' for name, party in parties.items()]
    lines += ["", "[identities]"]
    lines += [
        f'{_quoted(name)} = "{party.identity}"' for name, party in parties.items() if party.identity
    ]
    return "\n".join(lines) + "\n"


def _quoted(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
