"""Sites over NVFlare's Collab API: for consortia that want its provisioning, audit and governance.

NVFlare starts a process for each site and job, knows who is who by its own certificates, and
carries bytes. Runs, states, approvals and logs are those of `fedmcmc.deploy`. Needs the extra
``nvflare``.

Each party says where its settings file lies in the environment variable ``FEDMCMC_SETTINGS``, in
which ``{site}`` stands for its name: a job cannot choose it. Each site's own ``resources.json``
must allow the two classes of this module, and those of `write_job`.

NVFlare sends a site's log of errors to the server unless the site's ``resources.json`` says
``"allow_log_streaming": false``. What goes wrong in this package is kept from that log, as it may
hold numbers of rows: it is in ``errors.log`` in the site's own folder.
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

from fedmcmc._checks import not_installed

try:
    from nvflare.collab import CollabCallError, collab
except ImportError as error:
    raise not_installed("Sites over NVFlare need", "nvflare") from error

from fedmcmc.deploy._config import opened_site, run_over, site_settings
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
"""A call may last as long as a site compiles."""
ERRORS = "errors.log"
"""In a site's folder: what went wrong there."""
WAIT_SECONDS = 1.0
"""Before a site that could not be called is called again."""


class Calls:
    """The server's end: each message is a call of a site, whose result is the answer.

    Parameters
    ----------
    sites
        Collab's proxies by name.
    timeout
        Seconds after which a call is given up and the site counts as having left. It is then called
        again, and gives the answer that it has or has not given.
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
        """Return who sent what, `None` for the bytes if a call failed, `None` if nobody."""
        try:
            return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Call nobody any more."""
        self._closed.set()
        for outbox in self._outboxes.values():
            outbox.put(None)


class FlareServer:
    """The server's part of a job.

    Its settings file is that of `run_server` without ``address``, ``sites`` and keys.
    """

    @collab.main
    def run(self) -> None:
        """Run what the settings say, and write draws."""
        proxies = {str(site.name): site for site in collab.clients}
        run_over(settings_of("server"), lambda: Calls(proxies))


class FlareSite:
    """A site's part of a job.

    Its settings file is that of `run_site` without ``server`` and keys.
    """

    @collab.init
    def open(self) -> None:
        """Open the site, which loads its rows and checks its approval.

        Raises
        ------
        RuntimeError
            If that cannot be done; why is in the site's own log of errors alone.
        """
        self._lock, self._open = threading.Lock(), ExitStack()
        given, base = site_settings(settings_of(collab.site_name), dials=False)
        errors = base / given["folder"] / ERRORS
        errors.parent.mkdir(parents=True, exist_ok=True)
        self._open.enter_context(_logged_alone(errors))
        try:
            self._site = self._open.enter_context(opened_site(given, base))
        except Exception:
            LOG.exception("%s could not be opened", collab.site_name)
            self._open.close()
            raise RuntimeError(f"{collab.site_name} could not be opened: see {errors}.") from None

    @collab.publish
    def hello(self) -> bytes:
        """Return what the site says of itself."""
        with self._lock:
            data: bytes = self._site.hello()
            return data

    @collab.publish
    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message, empty if there is none."""
        with self._lock:  # a call that was given up may still run
            try:
                return self._site.answer(data) or b""
            except Refused as error:
                LOG.error("%s", error)
                return b""

    @collab.final
    def close(self) -> None:
        """Put the site's log on the disk."""
        self._open.close()


@contextmanager
def _logged_alone(path: Path) -> Iterator[None]:
    """Have this package's log in a file, and nowhere else."""
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
    """Return where this party's settings file lies, as its own environment says.

    Raises
    ------
    ValueError
        If it does not.
    """
    if SETTINGS not in os.environ:
        raise ValueError(f"Say in the environment variable {SETTINGS} where the settings lie.")
    return Path(os.environ[SETTINGS].replace("{site}", party))


def write_job(folder: str | Path, name: str, num_sites: int) -> Path:
    """Write a job in which no code travels, for NVFlare's ``submit_job``; return its folder."""
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
    for which, content in (("server", server), ("client", site)):
        text = json.dumps({"format_version": 2, **content, **filters}, indent=1)
        (config / f"config_fed_{which}.json").write_text(text)
    return config.parents[1]
