"""The command ``fedmcmc``, and ``python -m fedmcmc``: what a consortium does beside running.

Without a command it prints versions, devices and placements, for the report of a bug.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import jax

from fedmcmc.deploy import add_commands, isolate_process
from fedmcmc.placement import Placement, distributed
from fedmcmc.storage import versions

__all__ = ["about", "main"]

FOR_DEVELOPMENT = ("docs", "test")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="fedmcmc", description=__doc__)
    shown = ", ".join(f"{name} {number}" for name, number in versions().items())
    parser.add_argument("--version", action="version", version=shown)
    parser.set_defaults(run=lambda given: print(about()) or 0)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    text = "keys, approvals and logs of real sites; see docs/deploy.md"
    add_commands(commands.add_parser("deploy", help=text, description=text))
    given = parser.parse_args(arguments)
    if given.command == "deploy" and arguments is None:
        isolate_process("fedmcmc deploy", is_module=__name__ == "__main__")
    status: int = given.run(given)
    return status


def about() -> str:
    """Return versions, devices and placements, one line each; nothing of whose machine it is.

    Examples
    --------
    >>> from fedmcmc.__main__ import about
    >>> [line.split(":")[0] for line in about().splitlines()[:3]]
    ['fedmcmc', 'python', 'jax']
    """
    packages = _packages()
    settings = ("jax_enable_x64", "jax_platforms", "jax_default_matmul_precision")
    distributed.require_devices()
    devices = jax.local_devices()
    lines = {
        "fedmcmc": versions()["fedmcmc"],
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "jax": f"{jax.__version__}, jaxlib {_installed('jaxlib')}",
        "packages": ", ".join(f"{name} {_installed(name)}" for name in packages.pop("", [])),
    }
    for extra, names in packages.items():
        lines[f"extra {extra}"] = ", ".join(f"{name} {_installed(name)}" for name in names)
    lines["devices"] = f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})"
    lines["cores"], lines["processes"] = str(os.cpu_count()), str(jax.process_count())
    lines["settings"] = ", ".join(f"{name}={getattr(jax.config, name)}" for name in settings)
    for num_chains in (1, 4):
        placed = Placement.over_devices(num_chains)
        lines[f"placement of {num_chains} chains" if num_chains > 1 else "placement"] = str(placed)
    return "\n".join(f"{name}: {line}" for name, line in lines.items())


def _packages() -> dict[str, list[str]]:
    """Return the packages that fedmcmc asks for, by extra; ``""`` for those it always needs."""
    found: dict[str, list[str]] = {}
    for requirement in requires("fedmcmc") or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
        names = found.setdefault(extra[1] if extra else "", [])
        if name not in ("fedmcmc", "jax", "jaxlib", *names):
            names.append(name)
    return {
        extra: names for extra, names in found.items() if names and extra not in FOR_DEVELOPMENT
    }


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
