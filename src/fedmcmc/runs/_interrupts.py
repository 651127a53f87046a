"""Ctrl-C during a run: it ends the rounds, and never costs those that were done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INSISTING = 3
"""Number of interrupts that are held back before one is raised nevertheless."""


class Interrupts:
    """Interrupts (SIGINT) of a call, raised where what was done is safe and held back elsewhere.

    As a context manager it takes the place of Python's own handler, in the main thread and if
    there is no handler of the user's. An interrupt raises `KeyboardInterrupt` within `allowed`. It
    is raised once: until `check` or the next `allowed` further ones are held back, since a second
    Ctrl-C would otherwise end the code that brings the draws to safety.
    """

    def __init__(self) -> None:
        self.num_held = 0
        self._raises = True
        self._previous: Any = None

    def __enter__(self) -> "Interrupts":
        """Take the place of Python's handler."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: Any) -> None:
        """Put Python's handler back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._raises or self.num_held + 1 >= INSISTING:
            self._raises, self.num_held = False, 0
            raise KeyboardInterrupt
        self.num_held += 1

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let interrupts be raised within, one that was held back at once."""
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise an interrupt that was held back, and let the next one be raised."""
        self._raises = True
        if self.num_held:
            self._raises, self.num_held = False, 0
            raise KeyboardInterrupt
