"""Commands of a consortium: ``fedmcmc deploy``, and the commands that run sites and servers."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmcmc.deploy._account import describe_files, messages_told
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import verify_log
from fedmcmc.deploy._columns import rows_of_site
from fedmcmc.deploy._config import leave_study, read_rows, site_settings
from fedmcmc.deploy._consortium import AUTHORITY, make_consortium
from fedmcmc.deploy._endings import Interrupted
from fedmcmc.deploy._frames import Refused, printable
from fedmcmc.deploy._layout import item
from fedmcmc.deploy._links import SiteError
from fedmcmc.deploy._names import toml_key
from fedmcmc.deploy._pki import make_identity, make_request, sign_request
from fedmcmc.deploy._sources import search_path
from fedmcmc.deploy._study import Study
from fedmcmc.runs import NonFiniteError

PACKAGES_WITH_NEWS = ("arviz", "jax")
"""Packages whose logs of ordinary events are not shown."""


def isolate_process(script: str, *, is_module: bool) -> None:
    """Exclude the working directory from imports, and other users from new files.

    A study's author may have put modules into the folder in which a command is started.

    Parameters
    ----------
    script
        Name of the equivalent command without ``python -m``.
    is_module
        Flag for a process that ``python -m`` started. It has already imported modules from the
        working directory, unless Python was started with ``-P``.

    Raises
    ------
    SystemExit
        If ``python -m`` started the process without ``-P``.
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
    """Return the main function of a command with a settings file as its argument.

    Without arguments the function reads the arguments of the process, and isolates the process
    (`isolate_process`).

    Parameters
    ----------
    script
        Name of the command.
    about
        Description of the command.
    run
        Function that takes the path of the settings file.
    is_module
        Flag for a command that ``python -m`` started.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        """Run the command; return the exit status."""
        parser = argparse.ArgumentParser(prog=script, description=about)
        text = "a TOML file; see docs/reference/deployment_settings.md"
        parser.add_argument("settings", help=text)
        options = parser.parse_args(arguments)
        if arguments is None:
            isolate_process(script, is_module=is_module)
        handler = logging.StreamHandler()
        handler.setFormatter(_PrintableFormatter("%(asctime)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        for name in PACKAGES_WITH_NEWS:
            logging.getLogger(name).setLevel(logging.WARNING)
        return _exit_status(lambda: run(options.settings))

    return main


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add ``init``, ``request``, ``sign``, ``approve``, ``leave`` and ``verify-log`` to a parser.

    Parsed arguments have a function `run`, which takes them and returns the exit status.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], Any], text: str, **kwargs: Any
    ) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=text, description=text, **kwargs)
        subparser.set_defaults(run=lambda options: _exit_status(lambda: run(options)))
        return subparser

    consent = argparse.ArgumentParser(add_help=False)
    consent.add_argument(
        "--settings", default="site.toml", help="settings of the site (default: %(default)s)"
    )
    consent.add_argument("--yes", action="store_true", help="answer yes to all questions")

    init = add("init", _init, "create an authority, and a complete folder for each party")
    init.add_argument("study", help="the study's TOML file")
    init.add_argument("--server", required=True, help="host:port of the server for the sites")
    init.add_argument("--host", action="append", default=[], help="another name of the server")
    init.add_argument("--folder", default="consortium", help="new folder (default: %(default)s)")
    init.add_argument("--requests", help="folder of requests from parties with their own keys")

    request = add("request", _request, "create a key, and a request for its certificate")
    request.add_argument("name", help="name of the site in the study, or server")
    request.add_argument("--folder", default="keys", help="folder of keys (default: %(default)s)")

    sign = add("sign", _sign, "create the certificate for a request")
    sign.add_argument("request", help="a file NAME.csr")
    sign.add_argument(
        "--authority",
        default=f"consortium/{AUTHORITY}",
        help="folder of ca.key (default: %(default)s)",
    )
    sign.add_argument(
        "--host", action="append", default=[], help="a name at which sites reach a server"
    )

    text = "show the effects of a study at a site, and approve it"
    approve = add("approve", _approve, text, parents=[consent])
    approve.add_argument("study", nargs="?", help="its TOML file (default: from the settings)")
    add("leave", _leave, "leave a study under masks permanently", parents=[consent])

    verify = add("verify-log", _verify, "check a site's audit log line by line")
    verify.add_argument("log", help="the file")
    verify.add_argument("--holds", metavar="HASH", help="hash of a line, noted earlier")


def _exit_status(run: Callable[[], object]) -> int:
    """Call a function; return 1 after an expected error, 130 if interrupted, otherwise 0."""
    try:
        status = run()
    except KeyboardInterrupt as error:
        print(_printable_lines(f"Interrupted. {error}"), file=sys.stderr)
        return error.status if isinstance(error, Interrupted) else 128 + signal.SIGINT
    except (Refused, SiteError, NonFiniteError, ValueError, OSError) as error:
        print(_printable_lines(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0


class _PrintableFormatter(logging.Formatter):
    """Formatter of a log that escapes unprintable characters, also in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return _printable_lines(super().format(record))


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line, None) for line in text.split("\n"))


def _show(text: str) -> None:
    print(_printable_lines(text))


def _init(options: argparse.Namespace) -> None:
    folder = Path(options.folder)
    parties = make_consortium(
        options.study, folder, options.server, hosts=options.host, requests=options.requests
    )
    width = max(map(len, parties))
    _show(f"Send each party its folder in {folder}/, over a channel that its owner trusts:")
    for name, party in parties.items():
        _show(f"  {name:{width}}  certificate {party.fingerprint}")
    _show(f"Keep {folder / AUTHORITY}/ca.key: with it anybody can impersonate any party.")


def _request(options: argparse.Namespace) -> None:
    path = make_request(options.folder, options.name)
    _show(f"Keep {path.with_suffix('.key')}. Send to the operator of the consortium:")
    _show(f"  {path}")
    if options.name != "server":
        identity = make_identity(options.folder, options.name)
        _show(f"  {path.with_name(options.name + '.identity.pub')}  ({identity})")


def _sign(options: argparse.Namespace) -> None:
    path = Path(options.request)
    pin = sign_request(options.authority, path, path.parent, path.stem, hosts=options.host)
    certificate = path.with_suffix(".crt")
    if options.host:
        _show(f"Copy {certificate} to each site as server.crt in the folder of its ca.crt, and set")
        _show(f'in its site.toml: server_fingerprint = "{pin}"')
        return
    _show(f"Created {certificate}. Add to the server's settings: {toml_key(path.stem)} = {pin!r}")


def _approve(options: argparse.Namespace) -> int:
    settings, base = site_settings(options.settings, dials=False)
    if "approval" not in settings:
        raise ValueError(
            f'{options.settings} must contain approval = "approval.json", the file to write to.'
        )
    path, name = Path(options.study or base / settings["study"]), settings["name"]
    study = Study.read(path)
    if name not in study.sites:
        raise Refused(f"The study {study.name!r} has no site {name!r}.")
    file = base / settings["approval"]
    if file.exists():
        previous = Approval.read(file)
        differences = previous.differences(study) or ["nothing"]
        _show(f"{name} has approved {previous.digest} at {previous.time}. Changes since then:")
        _show("\n".join(f"  {text}" for text in differences) + "\n")
    _show(describe_files(study, name))
    rows_text = _describe_rows_file(study, name, base / settings["rows"])
    _show("\n".join(item(rows_text)) + "\n")
    # Messages are known only after the files have run, so the owner must agree before that, too.
    if not (options.yes or _agrees("Have you read the files, and may they run here?")):
        return 1
    limits = settings.get("limits", {})
    text = messages_told(
        study,
        name,
        server=settings.get("server"),
        max_numbers=limits.get("max_numbers"),
        min_batch=limits.get("min_batch"),
        refused_columns=limits.get("refused_columns", ()),
    )
    _show(text + "\n")
    if not (options.yes or _agrees(f"Does {name} approve this study?")):
        return 1
    Approval.of(study, name).save(file)
    _show(f"{name} approves {study.digest}: written to {file}.")
    if (base / settings["study"]).resolve() != path.resolve():
        _show(f"{options.settings} names another file: change study = {settings['study']!r}.")
    return 0


def _describe_rows_file(study: Study, name: str, path: Path) -> str:
    """Return a sentence on whether the file of a site's rows fits the study."""
    if not path.exists():
        return f"The file of rows {path} is missing: the site does not start without it."
    try:
        rows_of_site(study, name, read_rows(path, study))
    except (ValueError, TypeError, OSError) as error:
        return f"The site would not start, because the rows in {path} do not fit the study: {error}"
    return f"The rows in {path} fit the study."


def _leave(options: argparse.Namespace) -> int:
    settings, base = site_settings(options.settings, dials=False)
    name = settings["name"]
    _show(
        f"{name} will not answer in this study again, even after a restart, and the study is over "
        "for all: the other sites need a new one without it."
    )
    if not (options.yes or _agrees(f"Does {name} leave permanently?")):
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


def _verify(options: argparse.Namespace) -> None:
    summary = verify_log(options.log, holds=options.holds)
    _show(
        f"{options.log}: {summary.num_lines:,} lines form a valid chain. {summary.num_answers:,} "
        f"messages of {summary.num_bytes:,} bytes left. Note the last hash elsewhere:"
        f"\n{summary.last}"
    )
