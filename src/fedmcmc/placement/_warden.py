"""A program that ends the processes of a killed launcher; `fedmcmc.launch` runs it by its path.

Each line of standard input lists the processes that run now. The input ends when the launcher dies,
because the launcher alone holds the other end. The program does not import fedmcmc, so that it
starts at once and stays small.
"""

import contextlib
import os
import sys
from collections.abc import Iterable

WARDEN = __file__
"""Path of this program."""
KILL = 9  # Windows has no signal.SIGKILL; there any number ends a process


def main(lines: Iterable[str]) -> None:
    """Kill the processes listed in the last line."""
    running: list[str] = []
    for line in lines:
        running = line.split()
    for number in running:
        with contextlib.suppress(OSError):  # it ended in the meantime
            os.kill(int(number), KILL)


if __name__ == "__main__":
    main(sys.stdin)
