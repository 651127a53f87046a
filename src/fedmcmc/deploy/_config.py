"""What the two commands do: a site and a server, as their settings files say."""

import logging
import signal
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import AuditLog
from fedmcmc.deploy._columns import check_keys
from fedmcmc.deploy._endings import (
    Interrupted,
    check_run,
    handling_signals,
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

LOG = logging.getLogger("fedmcmc.deploy")
KEYS = ("key", "certificate", "authority")
OF_SERVER = ("server_name", "server_fingerprint")
"""What a site's settings may say of the server's certificate."""


def run_site(path: str | Path) -> None:
    """Run a site as a settings file says, until it is told to stop (SIGTERM, SIGINT).

    Paths in the file are relative to its folder.

    Parameters
    ----------
    path
        A TOML file with ``name``, ``study`` (the study's file), ``approval`` (the file that
        ``fedmcmc deploy approve`` writes) or ``approved`` (the digest that the owner has agreed
        to), ``rows`` (an ``.npz`` file), ``folder`` (for the site's state), ``server``
        (``"host:port"``), ``key``, ``certificate``, ``authority``; ``server_fingerprint`` to accept
        one certificate of the server alone, which lies as ``server.crt`` beside that of the
        authority; ``server_name`` if the server's certificate has another name than its host;
        ``identity`` (a file) for a study under masks; ``log`` (for the audit log, by default
        ``audit.log`` beside this file, so that a `folder` that is removed or restored does not
        lower what it counts); and a table ``limits`` with ``most_numbers``, ``min_rows``,
        ``min_batch``, ``min_sites``, ``refused_columns``, ``most_bytes`` (see `Limits`).

    Raises
    ------
    Refused
        If site and server do not agree.
    ValueError
        If the file is not such, or rows are not those of the study.
    """
    given, base = site_settings(path)
    stop = threading.Event()
    with handling_signals(lambda *_: stop.set()), opened_site(given, base) as site:
        study = site.study
        LOG.info(
            "%s of the study %s (%s) calls %s",
            *(site.name, study.name),
            study.digest[:16],
            given["server"],
        )
        serve_site(
            site,
            given["server"],
            _credentials(given, base),
            server_name=given.get("server_name"),
            stop=stop,
        )


@contextmanager
def opened_site(given: dict[str, Any], base: Path) -> Iterator[Site]:
    """Open a site and its log, for this process alone, as its settings say."""
    study, approved = Study.read(base / given["study"]), _approved(given, base)
    folder, rows = base / given["folder"], _rows(base / given["rows"])
    with _log_of(given, base) as log:
        yield Site(
            study,
            given["name"],
            rows,
            folder=folder,
            approved=approved,
            identity=base / given["identity"] if "identity" in given else None,
            log=log,
            **given.get("limits", {}),
        )


def leave_study(given: dict[str, Any], base: Path) -> None:
    """Have a site leave its study under masks for good, as its settings say which.

    Raises
    ------
    Refused
        If the study is not the one that was approved, or has no masks.
    ValueError
        If the site runs.
    """
    study, approved, name = Study.read(base / given["study"]), _approved(given, base), given["name"]
    if isinstance(approved, Approval):
        approved.check(study, name)  # nothing of another study is run
    elif study.digest != approved:
        raise Refused(f"The study {study.name!r} is not the one that {name} has approved.")
    if not study.secure:
        raise Refused(
            f"The study {study.name!r} has no masks, under which totals before and after would "
            f"tell who left: stop the site, and do not start it again."
        )
    with _log_of(given, base) as log:
        rules_of(study, base / given["folder"] / MASKS).leave()
        log.write("left", site=name, study=study.digest)


@contextmanager
def _log_of(given: dict[str, Any], base: Path) -> Iterator[AuditLog]:
    """Open a site's log, for this process alone."""
    folder = base / given["folder"]
    with lock_checkpoint(Checkpoint(folder)):
        log = AuditLog(base / given.get("log", "audit.log"))
        try:
            yield log
        finally:
            log.close()


def _approved(given: dict[str, Any], base: Path) -> Approval | str:
    if "approved" in given:
        digest: str = given["approved"]
        return digest
    return Approval.read(base / given["approval"])


def site_settings(path: str | Path, *, dials: bool = True) -> tuple[dict[str, Any], Path]:
    """Return what a site's settings file says, checked, and the folder that its paths start at.

    Only a site that dials the server itself needs ``server`` and keys.

    Raises
    ------
    ValueError
        If it is not such.
    """
    wanted, network = ("name", "study", "rows", "folder"), ("server", *KEYS)
    allowed = ("approved", "approval", "identity", "log", "limits", *OF_SERVER, *network)
    given, base = _read(path, (*wanted, *network) if dials else wanted, allowed)
    check_texts(given, [name for name in given if name != "limits"], str(path))
    if ("approved" in given) == ("approval" in given):
        raise ValueError(f"{path}: give one of approval (a file) and approved (a digest).")
    limits = given.get("limits", {})
    _check_names(path, limits, (), LIMITS, "limits")
    try:
        Limits(**limits)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return given, base


def run_server(path: str | Path) -> Samples:
    """Run the server of a study as a settings file says, and write draws.

    Parameters
    ----------
    path
        A TOML file with ``study``, ``address`` (``"host:port"`` to wait at), ``key``,
        ``certificate``, ``authority``, a table ``sites`` of certificates' fingerprints by name, and
        a table ``run``: ``kernel`` (a name of the study's, or ``"fit"``), ``seed`` (text of 32
        hexadecimal digits, as by ``secrets.token_hex(16)``, or an integer, which makes the key
        ``jax.random.key(seed)`` and which a search can find), ``draws`` (an ``.npz`` file to
        write), and for kernels ``num_rounds``, and if wanted ``position``
        (numbers, or of the study's files ``"file.py:name"``; by default the model's ``init_fn``),
        ``num_burnin``, ``thinning``, ``num_chains``, ``checkpoint`` (a folder), ``every_rounds``,
        ``on_missing``, ``timeout``, ``most_norm``, ``progress``, ``report`` (an HTML file to
        write).

    Returns
    -------
    Samples
        What the run returned.

    Raises
    ------
    Refused, SiteError
        If a site or the study declines, or a site's message cannot be added. As with the two that
        follow, the draws that were kept before are written, and a checkpoint of the last round that
        was finished: the same call goes on from there.
    NonFiniteError
        If a chain turns non-finite.
    KeyboardInterrupt
        After Ctrl-C or SIGTERM.
    ValueError
        If the file is not such.
    """
    given, base = _read(path, ("study", "address", *KEYS, "sites", "run"), ())
    study, wait_at_port = _waiting(path, given, base)
    with private_files(Path(path), *_written(given["run"], base)):
        return _run_over(path, study, wait_at_port, given["run"], base)


def connect(path: str | Path) -> Sites:
    """Return the sites of a study, for a server that calls functions instead of one run.

    Parameters
    ----------
    path
        A TOML file as that of `run_server`; of its table ``run``, which may be missing,
        ``on_missing``, ``timeout`` and ``most_norm`` count.

    Returns
    -------
    Sites
        To be closed when all is done. The first call waits for the sites.

    Raises
    ------
    ValueError
        If the file is not such.
    """
    close_to_others(Path(path))  # its table run may have a seed
    given, base = _read(path, ("study", "address", *KEYS, "sites"), ("run",))
    study, wait_at_port = _waiting(path, given, base)
    return Sites(study, wait_at_port(), **_patience(given.get("run", {})))


def _waiting(
    path: str | Path, given: dict[str, Any], base: Path
) -> tuple[Study, Callable[[], GrpcServer]]:
    """Return a server's study, and what waits for its sites at a port."""
    check_texts(given, ("study", "address", *KEYS), str(path))
    study, pins = Study.read(base / given["study"]), given["sites"]
    if not isinstance(pins, dict) or not all(isinstance(pin, str) for pin in pins.values()):
        raise ValueError(
            f"{path}: sites must be a table of fingerprints by the names of sites, got {pins!r}."
        )
    if set(pins) != set(study.sites):
        raise ValueError(f"{path}: sites must have a fingerprint for each of {list(study.sites)}.")

    def wait_at_port() -> GrpcServer:
        server = GrpcServer(given["address"], _credentials(given, base), given["sites"])
        LOG.info("the study %s (%s) waits at port %s", study.name, study.digest[:16], server.port)
        return server

    return study, wait_at_port


def _patience(what: dict[str, Any]) -> dict[str, Any]:
    return {name: what[name] for name in ("on_missing", "timeout", "most_norm") if name in what}


def run_over(path: str | Path, transport: Callable[[], Transport]) -> Samples:
    """Run the server of a study over another transport; see `run_server`.

    Parameters
    ----------
    path
        A TOML file with ``study`` and ``run``.
    transport
        Returns the transport, once the settings have been found to be right.
    """
    given, base = _read(path, ("study", "run"), ("address", *KEYS, "sites"))
    with private_files(Path(path), *_written(given["run"], base)):
        return _run_over(path, Study.read(base / given["study"]), transport, given["run"], base)


def _written(what: dict[str, Any], base: Path) -> list[Path]:
    """Return the paths that a run writes to."""
    names = ("draws", "report", "checkpoint")
    return [base / what[name] for name in names if isinstance(what.get(name), str)]


def _run_over(
    path: str | Path,
    study: Study,
    transport: Callable[[], Transport],
    what: dict[str, Any],
    base: Path,
) -> Samples:
    fits = what.get("kernel") == "fit"
    counts = ("num_burnin", "thinning", "num_chains", "checkpoint", "every_rounds")
    more = ("position", "on_missing", "timeout", "most_norm", "progress", "report")
    wanted = ("kernel", "seed", "draws") if fits else ("kernel", "seed", "draws", "num_rounds")
    _check_names(path, what, wanted, more if fits else (*more, *counts), "run")
    check_run(path, what, base)
    if "report" in what:
        can_draw()  # rather than to say so after the run
    if not fits:
        study.kernel(what["kernel"])  # likewise
    if "position" in what or not fits:
        _position(study, what)
    draws = base / what["draws"]
    # Draws of a run within a fit are in the fit's own coordinates.
    checkpoint = base / what["checkpoint"] if "checkpoint" in what else None
    with noting_signals() as signals:
        opened: Transport | None = None
        samples: Samples | None = None

        def note(number: int, frame: Any) -> None:
            signals.append(number)

        try:
            with handling_signals(note):  # threads of a transport that is left open never end
                opened = transport()
            if signals:
                raise KeyboardInterrupt
            sites = Sites(study, opened, **_patience(what))
            samples = _fitted(sites, what, base) if fits else _sampled(sites, what, base)
            if signals:
                raise KeyboardInterrupt
            write_draws(samples, draws)  # before connections are ended, which takes a moment
        except (SiteError, NonFiniteError) as error:
            text = write_partial_draws(None if fits else error.samples, draws, checkpoint)
            error.args = (f"{error} {text}", *error.args[1:])
            LOG.error("%s", error)
            raise
        except KeyboardInterrupt:
            text = write_partial_draws(samples, draws, checkpoint)
            raise Interrupted(signals[0] if signals else signal.SIGINT, text) from None
        finally:
            if opened is not None:
                with handling_signals(note):
                    opened.close()
    if "report" in what and not fits:
        samples.report(base / what["report"])
    return samples


def _sampled(sites: Sites, what: dict[str, Any], base: Path) -> Samples:
    study = sites.study
    names = ("num_rounds", "num_burnin", "thinning", "num_chains", "progress")
    settings = {name: what[name] for name in names if name in what}
    if "checkpoint" in what:
        settings["checkpoint"] = Checkpoint(base / what["checkpoint"], what.get("every_rounds"))
    key = key_of_seed(what["seed"])
    return sites.sample(key, study.kernel(what["kernel"]), _position(study, what), **settings)


def _fitted(sites: Sites, what: dict[str, Any], base: Path) -> Samples:
    fitted = fit(
        sites.study.model,
        sites,
        rng_key=key_of_seed(what["seed"]),
        position=_position(sites.study, what) if "position" in what else None,
        progress=what.get("progress", True),
    )
    LOG.info("%s", fitted.verdict)
    if "report" in what:
        fitted.report.save(base / what["report"])
    return fitted.samples


def _position(study: Study, what: dict[str, Any]) -> ArrayTree:
    if "position" in what:
        given = what["position"]
        if not isinstance(given, str):
            return _numbers(given)
        found = study.found(given)
        return found if callable(found) else _numbers_of(found, given)
    if study.model.init_fn is None:
        raise ValueError("Give run.position: this model does not say where to start (init_fn).")
    return study.model.init_fn


def _numbers_of(tree: ArrayTree, where: str) -> ArrayTree:
    for leaf in jax.tree.leaves(tree):
        if np.asarray(leaf).dtype.kind not in "biuf":
            raise ValueError(f"run.position: {where} must hold numbers, got {leaf!r}.")
    return tree


def _numbers(tree: Any, name: str = "run.position") -> ArrayTree:
    if isinstance(tree, dict):
        return {key: _numbers(part, f"{name}.{key}") for key, part in tree.items()}
    try:
        return np.asarray(tree, float)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be a number or a list of numbers, got {tree!r}; or give the text "
            f"'file.py:name' of a position in the study's files."
        ) from None


def _rows(path: Path) -> ArrayTree:
    """Return the arrays of an ``.npz`` file, names with dots as trees; one called rows alone.

    Raises
    ------
    ValueError
        If it is no such file, or holds Python objects.
    """
    arrays = {}
    with path.open("rb") as file:
        try:
            stored = np.load(file, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile):
            stored = None
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError(
                f"{path} is no .npz file of arrays. Write one array per column, as by "
                f"numpy.savez('rows.npz', age=age, arm=arm)."
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
                    f"Column {name!r} of {path} holds Python objects, which are not read. Save "
                    f"numbers, or text as numpy.array(column, dtype=str)."
                ) from None
    if set(arrays) == {"rows"}:
        return arrays["rows"]
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                break
        if not isinstance(place, dict) or last in place:
            raise ValueError(
                f"Column {name!r} of {path} is within another column or holds others: a dot "
                "separates the names of nested columns. Rename one of them."
            )
        place[last] = array
    return tree


def _read(path: str | Path, wanted: Any, allowed: Any) -> tuple[dict[str, Any], Path]:
    given = read_toml(path)
    _check_names(path, given, wanted, allowed, "the file")
    return given, Path(path).parent


def _check_names(path: Any, given: Any, wanted: Any, allowed: Any, where: str) -> None:
    check_keys(given, wanted, allowed, f"{path}: {where}")


def _credentials(given: dict[str, Any], base: Path) -> Credentials:
    key, certificate, authority = (base / given[name] for name in KEYS)
    return Credentials(key, certificate, authority, given.get("server_fingerprint"))
