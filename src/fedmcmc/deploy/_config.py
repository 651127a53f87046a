"""Sites and servers as settings files describe them."""

import logging
import signal
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import AuditLog
from fedmcmc.deploy._columns import check_keys
from fedmcmc.deploy._endings import (
    Interrupted,
    check_run,
    handling_signals,
    log_end,
    noting_signals,
    write_draws,
    write_partial_draws,
)
from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._grpc import Credentials, GrpcServer, serve_site
from fedmcmc.deploy._limits import LIMITS, Limits
from fedmcmc.deploy._links import SiteError
from fedmcmc.deploy._private import close_to_others, private_files
from fedmcmc.deploy._seeds import key_of_seed
from fedmcmc.deploy._server import Sites
from fedmcmc.deploy._settings import check_texts, read_toml
from fedmcmc.deploy._site import Site
from fedmcmc.deploy._site_masks import MASKS, rules_of
from fedmcmc.deploy._study import Study
from fedmcmc.deploy._transport import Transport
from fedmcmc.fitting import fit
from fedmcmc.records import Samples
from fedmcmc.reports import can_draw
from fedmcmc.runs import NonFiniteError
from fedmcmc.storage import Checkpoint, lock_checkpoint
from fedmcmc.types import ArrayTree

LOG = logging.getLogger("fedmcmc.deploy")
CREDENTIAL_KEYS = ("key", "certificate", "authority")
SERVER_IDENTITY_KEYS = ("server_name", "server_fingerprint")
"""Optional keys of a site's settings that describe the server's certificate."""
SITES_OPTIONS = ("on_missing", "timeout", "max_norm")
"""Entries of the table ``run`` that are arguments of `Sites`."""
SAMPLE_OPTIONS = ("num_rounds", "num_burnin", "thinning", "num_chains", "progress")
"""Entries of the table ``run`` that are arguments of `Sites.sample`."""


def run_site(path: str | Path) -> None:
    """Run a site from its settings file until the process receives SIGTERM or SIGINT.

    Parameters
    ----------
    path
        TOML file, to whose folder all paths in it are relative. Required entries: ``name``,
        ``study`` (TOML file), ``approval`` (file of ``fedmcmc deploy approve``) or ``approved``
        (digest), ``rows`` (``.npz`` file; with a dictionary also ``.csv`` or ``.parquet``),
        ``folder`` (state of the site), ``server`` (``"host:port"``), ``key``, ``certificate`` and
        ``authority``. Optional entries: ``server_fingerprint`` (the only accepted certificate of
        the server, in the file ``server.crt`` next to `authority`), ``server_name`` (if the
        certificate has another name than the host), ``identity`` (file, for masks), ``log`` (audit
        log; by default ``audit.log`` next to this file, so that removing ``folder`` resets no
        count), and the table ``limits`` (see `Limits`).

    Raises
    ------
    Refused
        If site and server do not agree.
    ValueError
        If the settings are not valid, or the rows do not fit the study.
    """
    settings, base = site_settings(path)
    stop = threading.Event()
    with handling_signals(lambda *_: stop.set()), open_configured_site(settings, base) as site:
        study = site.study
        LOG.info(
            "%s of the study %s (%s) calls %s",
            *(site.name, study.name, study.digest[:16], settings["server"]),
        )
        serve_site(
            site,
            settings["server"],
            _credentials(settings, base),
            server_name=settings.get("server_name"),
            stop=stop,
        )


@contextmanager
def open_configured_site(settings: Mapping[str, Any], base: Path) -> Iterator[Site]:
    """Open a site and its log for this process only."""
    study, approved = Study.read(base / settings["study"]), _read_approval(settings, base)
    rows = read_rows(base / settings["rows"], study)
    with _open_log(settings, base) as log:
        yield Site(
            study,
            settings["name"],
            rows,
            folder=base / settings["folder"],
            approved=approved,
            identity=base / settings["identity"] if "identity" in settings else None,
            log=log,
            **settings.get("limits", {}),
        )


def leave_study(settings: Mapping[str, Any], base: Path) -> None:
    """Let a site leave its study under masks permanently.

    Raise `Refused` if the study is not the approved one or does not use masks, and `ValueError` if
    the site is running.
    """
    study, name = Study.read(base / settings["study"]), settings["name"]
    approved = _read_approval(settings, base)
    if isinstance(approved, Approval):
        approved.check(study, name)  # before files of an unapproved study could run
    elif study.digest != approved:
        raise Refused(f"The study {study.name!r} is not the one that {name} has approved.")
    if not study.secure:
        raise Refused(
            f"The study {study.name!r} has no masks, so totals before and after would reveal the "
            f"messages of {name}: stop the site, and do not start it again."
        )
    with _open_log(settings, base) as log:
        rules_of(study, base / settings["folder"] / MASKS).leave()
        log.write("left", site=name, study=study.digest)


@contextmanager
def _open_log(settings: Mapping[str, Any], base: Path) -> Iterator[AuditLog]:
    """Lock a site's folder and open its log."""
    with lock_checkpoint(Checkpoint(base / settings["folder"])):
        log = AuditLog(base / settings.get("log", "audit.log"))
        try:
            yield log
        finally:
            log.close()


def _read_approval(settings: Mapping[str, Any], base: Path) -> Approval | str:
    """Return the site's approval, or the digest of the approved study."""
    if "approved" in settings:
        return str(settings["approved"])
    return Approval.read(base / settings["approval"])


def site_settings(path: str | Path, *, dials: bool = True) -> tuple[dict[str, Any], Path]:
    """Return the checked entries of a site's settings file, and the folder of the file.

    If `dials` is true, the site connects to the server itself, and needs ``server`` and keys.
    """
    network = ("server", *CREDENTIAL_KEYS)
    required = ("name", "study", "rows", "folder", *(network if dials else ()))
    optional = ("approved", "approval", "identity", "log", "limits", *SERVER_IDENTITY_KEYS)
    settings, base = _read_settings(path, required, (*optional, *network))
    check_texts(settings, [name for name in settings if name != "limits"], str(path))
    if ("approved" in settings) == ("approval" in settings):
        raise ValueError(f"{path}: give one of approval (a file) and approved (a digest).")
    limits = settings.get("limits", {})
    check_keys(limits, (), LIMITS, f"{path}: limits")
    try:
        Limits(**limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return settings, base


def run_server(path: str | Path) -> Samples:
    """Run the server of a study from its settings file, and write the draws.

    Parameters
    ----------
    path
        TOML file with ``study``, ``address`` (``"host:port"`` of the server), ``key``,
        ``certificate``, ``authority``, a table ``sites`` of the fingerprints of the sites'
        certificates, and a table ``run``. Required entries of ``run``: ``kernel`` (name in the
        study, or ``"fit"``), ``seed`` (32 hexadecimal digits, or an integer for
        ``jax.random.key(seed)``), ``draws`` (``.npz`` file), and ``num_rounds`` for kernels.
        Optional entries: ``position`` (numbers, or ``"file.py:name"``; by default the model's
        ``init_fn``), ``num_burnin``, ``thinning``, ``num_chains``, ``checkpoint`` (folder),
        ``every_rounds``, ``on_missing``, ``timeout``, ``max_norm``, ``progress`` and ``report``
        (HTML file).

    Returns
    -------
    Samples
        Result of the run.

    Raises
    ------
    Refused, SiteError
        If a site or the study declines, or a message of a site cannot be added.
    NonFiniteError
        If a chain is no longer finite.
    KeyboardInterrupt
        After Ctrl-C or SIGTERM.
    ValueError
        If the settings are not valid.

    Notes
    -----
    If a run of a kernel ends early, its draws are written, and a checkpoint of the last finished
    round. The same call then continues the run.
    """
    required = ("study", "address", *CREDENTIAL_KEYS, "sites", "run")
    settings, base = _read_settings(path, required, ())
    study, open_port = _prepare_server(path, settings, base)
    run = settings["run"]
    with private_files(Path(path), *_output_paths(run, base)):
        return _run_over(path, study, open_port, run, base)


def connect(path: str | Path) -> Sites:
    """Return the sites of a study, for a server that calls functions instead of one run.

    Parameters
    ----------
    path
        TOML file; see `run_server`. The table ``run`` may be missing; of its entries,
        ``on_missing``, ``timeout`` and ``max_norm`` are used.

    Returns
    -------
    Sites
        Sites, which the caller must close. The first call waits for all sites.

    Raises
    ------
    ValueError
        If the settings are not valid.
    """
    close_to_others(Path(path))  # its table run may contain a seed
    required = ("study", "address", *CREDENTIAL_KEYS, "sites")
    settings, base = _read_settings(path, required, ("run",))
    study, open_port = _prepare_server(path, settings, base)
    return Sites(study, open_port(), **_select(settings.get("run", {}), SITES_OPTIONS))


def _prepare_server(
    path: str | Path, settings: Mapping[str, Any], base: Path
) -> tuple[Study, Callable[[], GrpcServer]]:
    """Return a server's study, and a function that opens its port."""
    check_texts(settings, ("study", "address", *CREDENTIAL_KEYS), str(path))
    study, pins = Study.read(base / settings["study"]), settings["sites"]
    if not isinstance(pins, dict) or not all(isinstance(pin, str) for pin in pins.values()):
        raise ValueError(
            f"{path}: sites must be a table of fingerprints by the names of sites, got {pins!r}."
        )
    if set(pins) != set(study.sites):
        raise ValueError(f"{path}: sites must have a fingerprint for each of {list(study.sites)}.")

    def open_port() -> GrpcServer:
        server = GrpcServer(settings["address"], _credentials(settings, base), pins)
        LOG.info("the study %s (%s) waits at port %s", study.name, study.digest[:16], server.port)
        return server

    return study, open_port


def _select(table: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the entries of a table that have these names."""
    return {name: table[name] for name in names if name in table}


def run_over(path: str | Path, transport: Callable[[], Transport]) -> Samples:
    """Run the server of a study over the transport that `transport` returns; see `run_server`.

    `transport` is called after all settings have been checked.
    """
    optional = ("address", *CREDENTIAL_KEYS, "sites")
    settings, base = _read_settings(path, ("study", "run"), optional)
    run = settings["run"]
    with private_files(Path(path), *_output_paths(run, base)):
        return _run_over(path, Study.read(base / settings["study"]), transport, run, base)


def _output_paths(run: Mapping[str, Any], base: Path) -> list[Path]:
    names = ("draws", "report", "checkpoint")
    return [base / run[name] for name in names if isinstance(run.get(name), str)]


def _run_over(
    path: str | Path,
    study: Study,
    transport: Callable[[], Transport],
    run: dict[str, Any],
    base: Path,
) -> Samples:
    is_fit = run.get("kernel") == "fit"
    required = ("kernel", "seed", "draws") if is_fit else ("kernel", "seed", "draws", "num_rounds")
    optional = ("position", "progress", "report", *SITES_OPTIONS)
    kernel_options = () if is_fit else (*SAMPLE_OPTIONS, "checkpoint", "every_rounds")
    check_keys(run, required, (*optional, *kernel_options), f"{path}: run")
    check_run(path, run, base)
    if "report" in run:
        can_draw()  # raises before the run instead of after it
    if not is_fit:
        study.kernel(run["kernel"])  # raises if it does not exist
    if "position" in run or not is_fit:
        _initial_position(study, run)
    draws = base / run["draws"]
    checkpoint = base / run["checkpoint"] if "checkpoint" in run else None
    with noting_signals() as signals:
        opened: Transport | None = None
        samples: Samples | None = None

        def note_signal(number: int, frame: object) -> None:
            signals.append(number)

        try:
            # An interruption in between would lose the transport, whose threads never end.
            with handling_signals(note_signal):
                opened = transport()
            if signals:
                raise KeyboardInterrupt
            sites = Sites(study, opened, **_select(run, SITES_OPTIONS))
            samples = _run_fit(sites, run, base) if is_fit else _run_kernel(sites, run, base)
            if signals:
                raise KeyboardInterrupt
            write_draws(samples, draws)  # before the connections end, which takes a moment
            log_end(samples, path, draws, checkpoint, is_fit=is_fit)
        except (SiteError, NonFiniteError) as error:
            # Draws of a run within a fit are in the fit's own coordinates.
            partial = None if is_fit else error.samples
            text = write_partial_draws(partial, draws, checkpoint)
            error.args = (f"{error} {text}", *error.args[1:])
            LOG.error("%s", error)
            raise
        except KeyboardInterrupt:
            text = write_partial_draws(samples, draws, checkpoint)
            raise Interrupted(signals[0] if signals else signal.SIGINT, text) from None
        finally:
            if opened is not None:
                with handling_signals(note_signal):
                    opened.close()
    if "report" in run and not is_fit:
        samples.report(base / run["report"])
    return samples


def _run_kernel(sites: Sites, run: dict[str, Any], base: Path) -> Samples:
    options = _select(run, SAMPLE_OPTIONS) | {"progress": _shows_progress(run)}
    if "checkpoint" in run:
        options["checkpoint"] = Checkpoint(base / run["checkpoint"], run.get("every_rounds"))
    kernel, key = sites.study.kernel(run["kernel"]), key_of_seed(run["seed"])
    return sites.sample(key, kernel, _initial_position(sites.study, run), **options)


def _shows_progress(run: Mapping[str, Any]) -> bool:
    """Return whether to show progress: by default only at a terminal, since logs keep each line."""
    progress: bool = run.get("progress", sys.stderr.isatty())
    return progress


def _run_fit(sites: Sites, run: dict[str, Any], base: Path) -> Samples:
    fitted = fit(
        sites.study.model,
        sites,
        rng_key=key_of_seed(run["seed"]),
        position=_initial_position(sites.study, run) if "position" in run else None,
        progress=_shows_progress(run),
    )
    LOG.info("%s", fitted.verdict)
    if "report" in run:
        fitted.report.save(base / run["report"])
    return fitted.samples


def _initial_position(study: Study, run: Mapping[str, Any]) -> ArrayTree:
    """Return the position in the table ``run``, or the model's function that draws one."""
    if "position" not in run:
        if study.model.init_fn is None:
            raise ValueError("Give run.position: this model has no initial position (init_fn).")
        return study.model.init_fn
    name = run["position"]
    if not isinstance(name, str):
        return _as_numbers(name)
    position = study.found(name)
    if not callable(position):
        for leaf in jax.tree.leaves(position):
            if np.asarray(leaf).dtype.kind not in "biuf":
                raise ValueError(f"run.position: {name} must hold numbers, got {leaf!r}.")
    return position


def _as_numbers(tree: object, name: str = "run.position") -> ArrayTree:
    if isinstance(tree, dict):
        return {key: _as_numbers(part, f"{name}.{key}") for key, part in tree.items()}
    try:
        return np.asarray(tree, float)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a number or a list of numbers, got {tree!r}; or give the text "
            f"'file.py:name' of a position in the study's files."
        ) from None


def read_rows(path: Path, study: Study | None = None) -> Any:
    """Return the columns in an ``.npz`` file, nested by the dots in their names.

    A file with the single array ``rows`` gives this array. If the study has a dictionary, the file
    may be a CSV or Parquet file. Raise `ValueError` if the file is damaged, is another file, or
    contains Python objects.
    """
    is_table = path.suffix.lower() in (".csv", ".parquet")
    if is_table and study is not None and study.dictionary is not None:
        return study.dictionary.read_table(path)
    arrays = {}
    with path.open("rb") as file:
        try:
            stored = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):
            stored = None
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError(
                f"{path} is not an .npz file of arrays. Write one array per column, for example "
                f"with numpy.savez('rows.npz', age=age, arm=arm)."
                + " CSV and Parquet files need [columns] in study.toml."
                * is_table
            )
        for name in stored.files:
            try:
                arrays[name] = stored[name]
            except (EOFError, zipfile.BadZipFile, zlib.error):
                raise ValueError(
                    f"Column {name!r} of {path} is damaged or cut short: write the file again."
                ) from None
            except ValueError:
                raise ValueError(
                    f"Column {name!r} of {path} contains Python objects, which are not read. Save "
                    f"numbers, or text as numpy.array(column, dtype=str)."
                ) from None
    if set(arrays) == {"rows"}:
        return arrays["rows"]
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or leaf in node:
            raise ValueError(
                f"Column {name!r} of {path} is within another column or contains other columns: a "
                "dot separates the names of nested columns. Rename one of them."
            )
        node[leaf] = array
    return tree


def _read_settings(
    path: str | Path, required: Collection[str], optional: Collection[str]
) -> tuple[dict[str, Any], Path]:
    settings = read_toml(path)
    check_keys(settings, required, optional, f"{path}: the file")
    return settings, Path(path).parent


def _credentials(settings: Mapping[str, Any], base: Path) -> Credentials:
    files = {name: base / settings[name] for name in CREDENTIAL_KEYS}
    return Credentials(**files, server_fingerprint=settings.get("server_fingerprint"))
