"""The commands of a consortium: ``fedmcmc deploy``, and those that run a site and a server."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmcmc.deploy._account import files_told, messages_told
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import verify_log
from fedmcmc.deploy._config import leave_study, site_settings
from fedmcmc.deploy._consortium import AUTHORITY, make_consortium
from fedmcmc.deploy._endings import Interrupted
from fedmcmc.deploy._frames import Refused, printable
from fedmcmc.deploy._links import SiteError
from fedmcmc.deploy._names import toml_key
from fedmcmc.deploy._pki import make_identity, make_request, sign_request
from fedmcmc.deploy._sources import search_path
from fedmcmc.deploy._study import Study
from fedmcmc.runs import NonFiniteError


def isolate_process(script: str, *, is_module: bool) -> None:
    """Import nothing more from the working directory, and let no other user read new files.

    A study's author may have put modules into the folder that a command is started in.

    Parameters
    ----------
    script
        Command that does the same without ``python -m``.
    is_module
        Whether ``python -m`` started this process. It then has imported modules from the working
        directory already, unless Python was started with ``-P``.

    Raises
    ------
    SystemExit
        If it was started so without ``-P``.
    """
    if is_module and not sys.flags.safe_path:
        sys.exit(
            "Python's -m imports modules from the working directory, where a study's author may "
            f"have put some: run {script}, or start Python with -P."
        )
    os.umask(0o077)
    sys.path[:] = search_path()


def command(
    script: str, about: str | None, run: Callable[[str], Any], *, is_module: bool
) -> Callable[..., int]:
    """Return the main function of a command that runs something as a settings file says.

    Without arguments it takes those of the process, which it isolates (`isolate_process`).

    Parameters
    ----------
    script
        Name of the command.
    about
        Description of the command.
    run
        Function of the path of a TOML file.
    is_module
        Whether ``python -m`` has started the command.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        """Run what a settings file says; return the exit status."""
        parser = argparse.ArgumentParser(prog=script, description=about)
        parser.add_argument("settings", help="a TOML file; see docs/deploy.md")
        given = parser.parse_args(arguments)
        if arguments is None:
            isolate_process(script, is_module=is_module)
        handler = logging.StreamHandler()
        handler.setFormatter(_PrintableFormatter("%(asctime)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
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
    """Run something; return 1 where it says what is wrong, 130 if interrupted, 0 otherwise."""
    try:
        found = run()
    except KeyboardInterrupt as error:
        print(_printable_lines(f"Interrupted. {error}"), file=sys.stderr)
        return error.status if isinstance(error, Interrupted) else 128 + signal.SIGINT
    except (Refused, SiteError, NonFiniteError, ValueError, OSError) as error:
        print(_printable_lines(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return found if isinstance(found, int) else 0


class _PrintableFormatter(logging.Formatter):
    """Formatter of a log that escapes what is not printable, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return _printable_lines(super().format(record))


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line, None) for line in text.split("\n"))


def _show(text: str) -> None:
    print(_printable_lines(text))


def _init(given: argparse.Namespace) -> None:
    folder = Path(given.folder)
    parties = make_consortium(
        given.study, folder, given.server, hosts=given.host, requests=given.requests
    )
    width = max(map(len, parties))
    _show(f"Each party gets its own folder in {folder}/, on a channel that its owner trusts:")
    for name, party in parties.items():
        _show(f"  {name:{width}}  certificate {party.fingerprint}")
    _show(f"{folder / AUTHORITY}/ca.key stays here: who has it can be any party.")


def _request(given: argparse.Namespace) -> None:
    path = make_request(given.folder, given.name)
    _show(f"{path.with_suffix('.key')} stays here. To whoever runs the consortium go:")
    _show(f"  {path}")
    if given.name != "server":
        identity = make_identity(given.folder, given.name)
        _show(f"  {path.with_name(given.name + '.identity.pub')}  ({identity})")


def _sign(given: argparse.Namespace) -> None:
    path = Path(given.request)
    pin = sign_request(given.authority, path, path.parent, path.stem, hosts=given.host)
    certificate = path.with_suffix(".crt")
    if given.host:
        _show(f"{certificate}, for each site, as server.crt beside its ca.crt, and in its")
        _show(f'site.toml: server_fingerprint = "{pin}"')
        return
    _show(f"{certificate}, for the server's settings: {toml_key(path.stem)} = {pin!r}")


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
        _show(f"{name} has approved {last.digest} at {last.time}. What is another now:")
        _show("\n".join(f"  {text}" for text in last.differences(study) or ["nothing"]) + "\n")
    _show(files_told(study, name) + "\n")
    # What leaves is known once the files have run, so an owner is asked before that, too.
    if not (given.yes or _agrees("Have you read the files, and may they run here?")):
        return 1
    limits = settings.get("limits", {})
    told = messages_told(
        study,
        name,
        server=settings.get("server"),
        most_numbers=limits.get("most_numbers"),
        min_batch=limits.get("min_batch"),
        refused_columns=limits.get("refused_columns", ()),
    )
    _show(told + "\n")
    if not (given.yes or _agrees(f"Does {name} approve this study?")):
        return 1
    Approval.of(study, name).save(before)
    _show(f"{before} says that {name} approves {study.digest}.")
    if (base / settings["study"]).resolve() != path.resolve():
        _show(f"{given.settings} still says study = {settings['study']!r}, which is another file.")
    return 0


def _leave(given: argparse.Namespace) -> int:
    settings, base = site_settings(given.settings, dials=False)
    name = settings["name"]
    _show(
        f"{name} then answers nothing more in this study, also after a restart, and the study is "
        "over for all: the others need a new one without it."
    )
    if not (given.yes or _agrees(f"Does {name} leave for good?")):
        return 1
    leave_study(settings, base)
    _show(f"{name} has left.")
    return 0


def _agrees(question: str) -> bool:
    try:
        answer = input(f"{question} [yes/no] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() == "yes":
        return True
    _show("Nothing was done.")
    return False


def _verify(given: argparse.Namespace) -> None:
    found = verify_log(given.log, holds=given.holds)
    _show(
        f"{given.log}: {found.num_lines:,} lines follow one another. {found.num_answers:,} "
        f"messages of {found.num_bytes:,} bytes left. The last hash, to be noted down elsewhere:"
        f"\n{found.last}"
    )
