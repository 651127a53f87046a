"""Interrupts (Ctrl-C) during a run, which end the run without losing finished rounds."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MAX_HELD = 3
"""Number of interrupts in a row at which `KeyboardInterrupt` is raised in any case."""


class Interrupts:
    """Handler of interrupts (SIGINT) that raises only where finished rounds are safe.

    The context manager replaces Python's handler in the main thread, unless the user has installed
    another handler. Within `allowed`, an interrupt raises `KeyboardInterrupt`. Further interrupts
    are held back until `check` or the next `allowed`, because a second Ctrl-C would end the code
    that saves the draws.
    """

    def __init__(self) -> None:
        self.num_held = 0
        self._raises = True
        self._previous: Any = None

    def __enter__(self) -> "Interrupts":
        """Replace Python's handler."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore Python's handler."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._raises or self.num_held + 1 >= MAX_HELD:
            self._raises, self.num_held = False, 0
            raise KeyboardInterrupt
        self.num_held += 1

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise interrupts inside the context, and a held interrupt at its start."""
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def check(self) -> None:
        """Raise if an interrupt is held; otherwise let the next interrupt raise at once."""
        self._raises = True
        if self.num_held:
            self._raises, self.num_held = False, 0
            raise KeyboardInterrupt
