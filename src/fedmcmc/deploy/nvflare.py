"""Sites over NVFlare's Collab API: for consortia that want its provisioning, audit and governance.

NVFlare starts a process for each site and job, identifies parties by its own certificates, and
transports bytes. Runs, states, approvals and logs come from `fedmcmc.deploy`. The module needs the
extra ``nvflare``.

Each party gives the path of its settings file in the environment variable ``FEDMCMC_SETTINGS``,
where ``{site}`` stands for its name: a job cannot choose the file. The ``resources.json`` of every
party must allow the classes in `ALLOWED`.

NVFlare sends a site's error log to the server unless the site's ``resources.json`` contains
``"allow_log_streaming": false``. Errors of this package may contain numbers from rows; they are
only in ``errors.log`` in the site's own folder.
"""

import json
import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedmcmc._checks import missing_extra_error

try:
    from nvflare.collab import CollabCallError, collab
except ImportError as error:
    raise missing_extra_error("Sites over NVFlare need", "nvflare") from error

from fedmcmc.deploy._config import open_configured_site, run_over, site_settings
from fedmcmc.deploy._frames import Refused, printable

LOG = logging.getLogger("fedmcmc.deploy")
SETTINGS = "FEDMCMC_SETTINGS"
CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
ALLOWED = (
    CONTROLLER,
    EXECUTOR,
    "fedmcmc.deploy.nvflare.FlareServer",
    "fedmcmc.deploy.nvflare.FlareSite",
)
"""Classes that ``class_allow_list`` in the ``resources.json`` of every party must hold."""
CALL_SECONDS = 600.0
"""Largest duration of a call, which may include a compilation."""
ERRORS = "errors.log"
"""File in a site's folder with the errors of the site."""
WAIT_SECONDS = 1.0
"""Seconds until a site that could not be called is called again."""


class Calls:
    """The server's end: each message is a call to a site, and its result is the answer.

    Parameters
    ----------
    sites
        Collab's proxies by name.
    timeout
        Seconds after which a call ends and the site counts as disconnected. The server then calls
        the site again, which repeats its answer.
    """

    def __init__(self, sites: Mapping[str, Any], timeout: float = CALL_SECONDS) -> None:
        self._inbox: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        self._outboxes: dict[str, queue.SimpleQueue[bytes | None]] = {
            name: queue.SimpleQueue() for name in sites
        }
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(name, proxy(timeout=timeout)), daemon=True)
            for name, proxy in sites.items()
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, name: str, site: Any) -> None:
        outbox, joined = self._outboxes[name], False
        while not self._closed.is_set():
            try:
                if not joined:
                    self._inbox.put((name, site.hello()))
                    joined = True
                data = outbox.get()
                if data is None:
                    return
                answer = site.answer(data)
                if answer:
                    self._inbox.put((name, answer))
            except CollabCallError as error:
                LOG.info("%s: no connection (%s)", name, printable(error))
                if joined:
                    self._inbox.put((name, None))
                joined = False
                while not outbox.empty():
                    outbox.get()
                self._closed.wait(WAIT_SECONDS)

    def send(self, site: str, data: bytes) -> None:
        """Send bytes to a site."""
        self._outboxes[site].put(data)

    def receive(self, timeout: float) -> tuple[str, bytes | None] | None:
        """Return a site and its message (`None` if it left), or `None` after `timeout` seconds."""
        try:
            return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def limit(self, site: str, num_bytes: int) -> None:
        """Do nothing: NVFlare delivers complete messages, and `Links` drops longer ones."""

    def close(self) -> None:
        """End all calls."""
        self._closed.set()
        for outbox in self._outboxes.values():
            outbox.put(None)


class FlareServer:
    """The server's part of a job.

    Its settings file has the format of `run_server` without ``address``, ``sites`` and keys.
    """

    @collab.main
    def run(self) -> None:
        """Run the kernel that the settings name, and write draws."""
        proxies = {str(site.name): site for site in collab.clients}
        run_over(settings_of("server"), lambda: Calls(proxies))


class FlareSite:
    """A site's part of a job.

    Its settings file has the format of `run_site` without ``server`` and keys.
    """

    @collab.init
    def open(self) -> None:
        """Open the site, which loads its rows and checks its approval.

        Raises
        ------
        RuntimeError
            If the site cannot be opened. The reason is only in the site's own error log.
        """
        self._lock, self._open = threading.Lock(), ExitStack()
        settings, base = site_settings(settings_of(collab.site_name), dials=False)
        errors = base / settings["folder"] / ERRORS
        errors.parent.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(_log_only_to(errors))
        try:
            self._site = self._open.enter_context(open_configured_site(settings, base))
        except Exception:
            LOG.exception("%s could not be opened", collab.site_name)
            self._open.close()
            raise RuntimeError(f"{collab.site_name} could not be opened: see {errors}.") from None

    @collab.publish
    def hello(self) -> bytes:
        """Return the message with which the site joins."""
        with self._lock:
            data: bytes = self._site.hello()
            return data

    @collab.publish
    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message, empty if there is none."""
        with self._lock:  # a call that timed out may still run
            try:
                return self._site.answer(data) or b""
            except Refused as error:
                LOG.error("%s", error)
                return b""

    @collab.final
    def close(self) -> None:
        """Close the site and its log."""
        self._open.close()


@contextmanager
def _log_only_to(path: Path) -> Iterator[None]:
    """Write this package's log to a file only."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.propagate = True
        LOG.removeHandler(handler)
        handler.close()


def settings_of(party: str) -> Path:
    """Return the path of this party's settings file from its environment.

    Raises
    ------
    ValueError
        If the environment variable is not set.
    """
    if SETTINGS not in os.environ:
        raise ValueError(
            f"Set the environment variable {SETTINGS} to the path of the settings file."
        )
    return Path(os.environ[SETTINGS].replace("{site}", party))


def write_job(folder: str | Path, name: str, num_sites: int) -> Path:
    """Write a job without code for NVFlare's ``submit_job``; return its folder."""
    config = Path(folder) / name / "app" / "config"
    config.mkdir(parents=True)
    meta = {"name": name, "min_clients": num_sites, "deploy_map": {"app": ["@ALL"]}}
    (config.parents[1] / "meta.json").write_text(json.dumps(meta, indent=1))
    filters: dict[str, Any] = {"task_data_filters": [], "task_result_filters": []}
    ids = {"server_obj_id": "_server", "collab_obj_ids": []}
    server = {
        "workflows": [{"id": "controller", "path": CONTROLLER, "args": ids}],
        "components": [{"id": "_server", "path": ALLOWED[2], "args": {}}],
    }
    executor = {"path": EXECUTOR, "args": {"client_obj_id": "_client", "collab_obj_ids": []}}
    site = {
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": ALLOWED[3], "args": {}}],
    }
    for party, content in (("server", server), ("client", site)):
        text = json.dumps({"format_version": 2, **content, **filters}, indent=1)
        (config / f"config_fed_{party}.json").write_text(text)
    return config.parents[1]
