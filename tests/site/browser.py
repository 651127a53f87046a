"""Page in a headless Chromium, controlled by the DevTools protocol over one WebSocket.

This needs no browser driver, only the small Python package `websocket-client`.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def find():
    """Return the path of a Chromium, or ``None``; the variable CHROMIUM overrides the search."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """Browser tab that opens addresses, runs JavaScript, and records requests and problems."""

    def __init__(self, address):
        self.socket = websocket.create_connection(address, timeout=SECONDS, suppress_origin=True)
        self.number = 0
        self.requests, self.problems = [], []
        self.loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **settings):
        """Return the answer to one call, and record the events before it."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": settings}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self.note(message)

    def note(self, event):
        """Record requests and errors of an event."""
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Network.loadingFailed" if not params.get("canceled"):
                self.problems.append(f"not loaded: {params['errorText']}")
            case "Runtime.exceptionThrown":
                self.problems.append(params["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([part.get("value") for part in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, address):
        """Load a page, and wait for its scripts and figures."""
        self.requests, self.problems, self.loaded = [], [], False
        self.call("Page.navigate", url=address)
        while not self.loaded:  # a late event of the previous page may set it
            self.note(json.loads(self.socket.recv()))
        self.wait_for("document.readyState == 'complete'")

    def run(self, script):
        """Return the value of an expression, after waiting for a promise."""
        settings = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **settings)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait_for(self, script):
        """Return the value of an expression as soon as it is not empty."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"After {SECONDS:.0f} s there is no value of {script}")
            time.sleep(0.05)
        return value


@contextlib.contextmanager
def browser(program):
    """Run a browser that can reach this machine only, and yield its page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            program,
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # as without a network
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
            "about:blank",
        ]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **silent) as process:
            try:
                port = _port(process, Path(folder) / "DevToolsActivePort")
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = json.load(answer)
                (address,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
                page = Page(address)
                yield page
                page.socket.close()
            finally:
                process.terminate()


def _port(process, path):
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
            return int(path.read_text().splitlines()[0])
        time.sleep(0.05)
    raise RuntimeError(f"The browser did not start: {process.args[0]}, status {process.poll()}")
