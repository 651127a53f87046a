"""Ends the processes of a launcher that was killed; `fedmcmc.launch` runs this file by its path.

Standard input, of which the launcher alone holds the other end, says in each line which processes
are running now. It ends with the launcher, however that dies. Nothing of fedmcmc is imported, so
that it is there at once and stays small.
"""

import contextlib
import os
import sys
from collections.abc import Iterable

WARDEN = __file__
"""The program that ends the processes of a run whose launcher is gone."""
KILL = 9  # SIGKILL, a name that Windows lacks; there any number ends a process


def main(lines: Iterable[str]) -> None:
    """Kill the processes that the last of `lines` names."""
    running: list[str] = []
    for line in lines:
        running = line.split()
    for number in running:
        with contextlib.suppress(OSError):  # it ended in the meantime
            os.kill(int(number), KILL)


if __name__ == "__main__":
    main(sys.stdin)
