"""Files and tables of a run."""

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

import fedmcmc

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, Any]:
    """Return versions, device and (in a git checkout) the commit, for a record."""
    packages = ("jax", "jaxlib", "numpy", "numpyro", "hydra-core", "matplotlib")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", "src", "experiments")
    return {
        "versions": {
            "python": platform.python_version(),
            "fedmcmc": fedmcmc.__version__,
            **{name: version(name) for name in packages},
        },
        "device": jax.devices()[0].device_kind,
        "x64": bool(jax.config.jax_enable_x64),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all, whenever the process dies."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def plain(value: Any) -> Any:
    """Return `value` as JSON gives it back, arrays as lists."""
    return json.loads(json.dumps(value, default=lambda array: array.tolist()))


def format_number(value: Any) -> str:
    """Format a cell of a table: three significant digits."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e6 else f"{value:.3g}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out rows with equal keys as a Markdown table."""

    def line(cells: Iterable[Any]) -> str:
        texts = (format_number(cell).replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(texts)} |"

    lines = [line(rows[0]), "|" + "---|" * len(rows[0]), *(line(row.values()) for row in rows)]
    return "\n".join(lines)


def relative(path: Path) -> str:
    """Return `path` relative to the working directory where it lies below it."""
    path, current = path.resolve(), Path.cwd().resolve()
    return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)
