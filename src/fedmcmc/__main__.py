"""The command ``fedmcmc``, and ``python -m fedmcmc``: what a consortium does beside running."""

import argparse
import sys
from collections.abc import Sequence

from fedmcmc.deploy import add_commands
from fedmcmc.storage import versions

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="fedmcmc", description=__doc__)
    shown = ", ".join(f"{name} {version}" for name, version in versions().items())
    parser.add_argument("--version", action="version", version=shown)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "keys, approvals and logs of real sites; see docs/deploy.md"
    add_commands(commands.add_parser("deploy", help=about, description=about))
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    sys.exit(main())
