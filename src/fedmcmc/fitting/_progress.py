"""Progress bar of a stage of unknown length: its name and the elapsed time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

LAYOUT = "{desc} [{elapsed}] {postfix}"
SECONDS_BETWEEN = 1.0


@contextmanager
def ticking(name: str, shown: bool) -> Iterator[Any]:
    """Show a bar whose clock advances while the block runs, and yield the bar.

    The clock runs in a thread because a compiled program may run for minutes without a report.
    """
    with tqdm(desc=name, bar_format=LAYOUT, disable=not shown) as bar:
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(SECONDS_BETWEEN):
                bar.refresh()

        clock = threading.Thread(target=tick, daemon=True) if shown else None
        if clock is not None:
            clock.start()
        try:
            yield bar
        finally:
            ended.set()
            if clock is not None:
                clock.join()
