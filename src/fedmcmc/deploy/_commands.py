"""The commands of a consortium: ``fedmcmc deploy``, and those that run a site and a server."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmcmc.deploy._account import files_told, messages_told
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import verify_log
from fedmcmc.deploy._config import leave_study, site_settings
from fedmcmc.deploy._consortium import AUTHORITY, make_consortium
from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._links import SiteError
from fedmcmc.deploy._pki import make_identity, make_request, sign_request
from fedmcmc.deploy._study import Study


def command(module: str, about: str | None, run: Callable[[str], Any]) -> Callable[..., int]:
    """Return the main function of a module that runs something as a settings file says.

    Parameters
    ----------
    module
        Its name.
    about
        Its docstring.
    run
        Takes the path of a TOML file.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        """Run what a settings file says; return the exit status."""
        parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
        parser.add_argument("settings", help="a TOML file; see docs/deploy.md")
        given = parser.parse_args(arguments)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        logging.getLogger("jax").setLevel(logging.WARNING)
        return _status(lambda: run(given.settings))

    return main


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add ``init``, ``request``, ``sign``, ``approve``, ``leave`` and ``verify-log`` to a parser.

    What it parses has a function `run`, which takes it and returns the exit status.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], Any], text: str) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=lambda given: _status(lambda: run(given)))
        return made

    init = add("init", _init, "make an authority, and a folder per party with all that it needs")
    init.add_argument("study", help="the study's TOML file")
    init.add_argument("--server", required=True, help="host:port at which sites reach the server")
    init.add_argument("--host", action="append", default=[], help="another name of the server")
    init.add_argument("--folder", default="consortium", help="where to (default: %(default)s)")
    init.add_argument("--requests", help="a folder of requests, of parties that have own keys")

    request = add("request", _request, "make an own key, and a request for its certificate")
    request.add_argument("name", help="of the site in the study, or server")
    request.add_argument("--folder", default="keys", help="where to (default: %(default)s)")

    sign = add("sign", _sign, "make a certificate of a request")
    sign.add_argument("request", help="a file NAME.csr")
    sign.add_argument(
        "--authority",
        default=f"consortium/{AUTHORITY}",
        help="the folder of ca.key (default: %(default)s)",
    )
    sign.add_argument(
        "--host", action="append", default=[], help="of a server: where sites reach it"
    )

    approve = add("approve", _approve, "show what a study does at a site, and approve it")
    approve.add_argument("study", nargs="?", help="its TOML file (default: that of the settings)")
    approve.add_argument(
        "--settings", default="site.toml", help="of the site (default: %(default)s)"
    )
    approve.add_argument("--yes", action="store_true", help="approve without being asked")

    leave = add("leave", _leave, "leave a study under masks for good, at a site")
    leave.add_argument("--settings", default="site.toml", help="of the site (default: %(default)s)")
    leave.add_argument("--yes", action="store_true", help="leave without being asked")

    verify = add("verify-log", _verify, "check a site's audit log line by line")
    verify.add_argument("log", help="the file")
    verify.add_argument("--holds", metavar="HASH", help="a line's hash that was noted down before")


def _status(run: Callable[[], Any]) -> int:
    """Run something; return 1 where it says what is wrong, 0 otherwise."""
    try:
        found = run()
    except (Refused, SiteError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return found if isinstance(found, int) else 0


def _init(given: argparse.Namespace) -> None:
    folder = Path(given.folder)
    parties = make_consortium(
        given.study, folder, given.server, hosts=given.host, requests=given.requests
    )
    width = max(map(len, parties))
    print(f"Each party gets its own folder in {folder}/, on a channel that its owner trusts:")
    for name, party in parties.items():
        print(f"  {name:{width}}  certificate {party.fingerprint}")
    print(f"{folder / AUTHORITY}/ca.key stays here: who has it can be any party.")


def _request(given: argparse.Namespace) -> None:
    path = make_request(given.folder, given.name)
    print(f"{path.with_suffix('.key')} stays here. To whoever runs the consortium go:")
    print(f"  {path}")
    if given.name != "server":
        identity = make_identity(given.folder, given.name)
        print(f"  {path.with_name(given.name + '.identity.pub')}  ({identity})")


def _sign(given: argparse.Namespace) -> None:
    path = Path(given.request)
    pin = sign_request(given.authority, path, path.parent, path.stem, hosts=given.host)
    if given.host:
        print(f"{path.with_suffix('.crt')}, for each site, as server.crt beside its ca.crt, and in")
        print(f'its site.toml: server_fingerprint = "{pin}"')
        return
    print(f"{path.with_suffix('.crt')}, for the server's settings: {path.stem} = {pin!r}")


def _approve(given: argparse.Namespace) -> int:
    settings, base = site_settings(given.settings, dials=False)
    if "approval" not in settings:
        raise ValueError(f'{given.settings} must say approval = "approval.json" to be written to.')
    path, name = Path(given.study or base / settings["study"]), settings["name"]
    study = Study.read(path)
    if name not in study.sites:
        raise Refused(f"The study {study.name!r} has no site {name!r}.")
    before = base / settings["approval"]
    if before.exists():
        last = Approval.read(before)
        print(f"{name} has approved {last.digest} at {last.time}. What is another now:")
        print("\n".join(f"  {text}" for text in last.differences(study) or ["nothing"]) + "\n")
    print(files_told(study, name) + "\n")
    # What leaves is known once the files have run, so an owner is asked before that, too.
    if not (given.yes or _agrees("Have you read the files, and may they run here?")):
        return 1
    limits = settings.get("limits", {})
    told = messages_told(
        study, name, server=settings.get("server"), most_rounds=limits.get("most_rounds")
    )
    print(told + "\n")
    if not (given.yes or _agrees(f"Does {name} approve this study?")):
        return 1
    Approval.of(study, name).save(before)
    print(f"{before} says that {name} approves {study.digest}.")
    if (base / settings["study"]).resolve() != path.resolve():
        print(f"{given.settings} still says study = {settings['study']!r}, which is another file.")
    return 0


def _leave(given: argparse.Namespace) -> int:
    settings, base = site_settings(given.settings, dials=False)
    name = settings["name"]
    print(
        f"{name} then answers nothing more in this study, also after a restart, and the study is "
        "over for all: the others need a new one without it."
    )
    if not (given.yes or _agrees(f"Does {name} leave for good?")):
        return 1
    leave_study(settings, base)
    print(f"{name} has left.")
    return 0


def _agrees(question: str) -> bool:
    try:
        answer = input(f"{question} [yes/no] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() == "yes":
        return True
    print("Nothing was done.")
    return False


def _verify(given: argparse.Namespace) -> None:
    found = verify_log(given.log, holds=given.holds)
    print(
        f"{given.log}: {found.num_lines:,} lines follow one another. {found.num_answers:,} "
        f"messages of {found.num_bytes:,} bytes left. The last hash, to be noted down elsewhere:"
        f"\n{found.last}"
    )
