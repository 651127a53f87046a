"""The command ``fedmcmc`` (``python -m fedmcmc``): setup of real sites, fits, and bug reports.

Without a subcommand it prints versions, devices and placements, to be pasted into a bug report.
"""

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import jax

from fedmcmc.deploy import add_commands, isolate_process
from fedmcmc.placement import Placement, distributed
from fedmcmc.storage import versions

__all__ = ["about", "main"]

DEVELOPMENT_EXTRAS = ("docs", "test")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="fedmcmc", description=__doc__)
    version_text = ", ".join(f"{name} {number}" for name, number in versions().items())
    parser.add_argument("--version", action="version", version=version_text)
    parser.set_defaults(run=lambda options: print(about()) or 0)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    text = "keys, approvals and logs of real sites; see docs/guides/operations.md"
    add_commands(commands.add_parser("deploy", help=text, description=text))
    text = "fit the model of a study file to one CSV or Parquet file per site; see docs/guides/r.md"
    fit = commands.add_parser("fit", help=text, description=text)
    fit.add_argument("study", type=Path, help="study file (TOML) with a table [model]")
    fit.add_argument("--sites", type=Path, required=True, help="folder with a table per site")
    fit.add_argument("--out", type=Path, required=True, help="folder for the results")
    fit.set_defaults(run=fit_model)
    options = parser.parse_args(arguments)
    if options.command == "deploy" and arguments is None:
        isolate_process("fedmcmc deploy", is_module=__name__ == "__main__")
    status: int = options.run(options)
    return status


def fit_model(options: argparse.Namespace) -> int:
    """Run ``fedmcmc fit``."""
    from fedmcmc.models import run_command

    try:
        run_command(options.study, options.sites, options.out)
    except (ValueError, OSError, ImportError) as error:
        print(f"fedmcmc fit: {error}", file=sys.stderr)
        return 1
    return 0


def about() -> str:
    """Return versions, devices and placements, one per line, without names of users or machines.

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
    """Return the dependencies of fedmcmc by extra, required packages under ``""``."""
    packages: dict[str, list[str]] = {}
    for requirement in requires("fedmcmc") or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)", requirement)
        names = packages.setdefault(extra[1] if extra else "", [])
        if name not in ("fedmcmc", "jax", "jaxlib", *names):
            names.append(name)
    return {x: names for x, names in packages.items() if names and x not in DEVELOPMENT_EXTRAS}


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    sys.exit(main())
