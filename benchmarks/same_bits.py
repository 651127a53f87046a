"""Compare two revisions bit for bit: ``python -m benchmarks.same_bits OLD [NEW]``.

Every kernel of the contract table runs at both revisions: eight rounds of two chains on one CPU
device, with clients computed one at a time. Draws, info, totals and the final state must have the
same bits. Without NEW, the command compares OLD with the working tree, which it copies first.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("contract_rows.py")

Row = dict[str, np.ndarray] | str
"""Arrays by path, or the text of the error that the row raised."""
Pair = tuple[str, np.ndarray | None, np.ndarray | None]
"""Path, with its arrays in OLD and in NEW."""


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a row. It `fails` unless the row is the same or is only in NEW."""

    kind: str  # "same", "differs", "error", "only in OLD" or "only in NEW"
    note: str = ""

    @property
    def fails(self) -> bool:
        return self.kind not in ("same", "only in NEW")


def compare(old: Row | None, new: Row | None) -> Verdict:
    """Compare one row, which is ``None`` if a revision does not have it."""
    errors = [f"{k}: {row}" for k, row in (("OLD", old), ("NEW", new)) if isinstance(row, str)]
    if old is None or new is None:
        return Verdict("only in NEW" if old is None else "only in OLD", "; ".join(errors))
    if isinstance(old, str) or isinstance(new, str):
        return Verdict("error", "; ".join(errors))
    names = [*old, *(name for name in new if name not in old)]
    pairs = [(n, old.get(n), new.get(n)) for n in names if not n.startswith("state")]
    old_state, new_state = ({n: r[n] for n in r if n.startswith("state")} for r in (old, new))
    in_state, matching = match_states(old_state, new_state)
    differing = [pair for pair in pairs + in_state if not same(*pair[1:])]
    note = describe(differing) if differing else ""
    return Verdict("differs" if differing else "same", f"{note} {matching}".strip())


def match_states(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> tuple[list[Pair], str]:
    """Return the pairs of arrays to compare in two states, and a note on the matching.

    Arrays are matched by path if the paths are the same, else by the order of flattening. If that
    does not make them equal, they are matched as multisets: equal arrays are removed in pairs, and
    the remaining arrays differ.
    """
    if old.keys() == new.keys():
        return [(name, old[name], new[name]) for name in old], ""
    in_order = list(zip(old, old.values(), new.values(), strict=False))
    fits = len(old) == len(new) and all(bits(x)[:2] == bits(y)[:2] for _, x, y in in_order)
    if fits and all(same(x, y) for _, x, y in in_order):
        return [*in_order], "[state matched by order]"
    removed = {name: x for name, x in old.items() if not same(x, new.get(name))}
    added = {name: y for name, y in new.items() if not same(old.get(name), y)}
    for name, x in list(removed.items()):
        twin = next((new_name for new_name, y in added.items() if same(x, y)), None)
        if twin is not None:
            del removed[name], added[twin]
    if fits and removed:
        return [*in_order], "[state matched by order]"
    remaining = (*removed, *(name for name in added if name not in removed))
    pairs = [(name, removed.get(name), added.get(name)) for name in remaining]
    return pairs, "[state matched as a multiset]"


def bits(x: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return x.dtype.str, x.shape, x.tobytes()


def same(x: np.ndarray | None, y: np.ndarray | None) -> bool:
    return x is not None and y is not None and bits(x) == bits(y)


def describe(differing: list) -> str:
    """Return where leaves differ, and their largest difference, also in units in the last place."""
    name, x, y = differing[0]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    if x is None or y is None:
        return f"{name} only in {'NEW' if x is None else 'OLD'}{more and ','}{more}"
    if bits(x)[:2] != bits(y)[:2]:
        return f"{name}{more}: {x.dtype}{list(x.shape)} became {y.dtype}{list(y.shape)}"
    sizes = [
        distances(x, y)
        for _, x, y in differing
        if x is not None and y is not None and bits(x)[:2] == bits(y)[:2]
    ]
    largest, units = (max(column) for column in zip(*sizes, strict=True))
    return f"{name}{more}: at most {largest:.3g}, {units:.0f} units in the last place"


def distances(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute difference, and the largest in units in the last place.

    Both are infinite if a differing number is not finite, for example NaN with other bits.
    """
    if x.dtype.kind in "biu":
        largest = float(np.abs(x.astype(object) - y.astype(object)).max())
        return largest, largest
    if x.dtype.kind != "f":
        return np.inf, np.inf
    integer = np.dtype(f"i{x.dtype.itemsize}")
    differs = x.ravel().view(integer) != y.ravel().view(integer)
    x, y = x.ravel()[differs], y.ravel()[differs]
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return np.inf, np.inf
    # Floats of one sign have the order of their bits. For negative floats the order is reversed.
    steps = [v.view(integer).astype(object) for v in (x, y)]
    steps = [np.where(s < 0, np.iinfo(integer).min - s, s) for s in steps]
    largest = np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
    return float(largest), float(np.abs(steps[0] - steps[1]).max())


def report(old: dict[str, Row], new: dict[str, Row]) -> tuple[list[str], bool]:
    """Return the lines of the table, and True if any row fails."""
    names = [*old, *(name for name in new if name not in old)]
    verdicts = {name: compare(old.get(name), new.get(name)) for name in names}
    width = max(map(len, names), default=0)
    lines = [f"{name:<{width}}  {v.kind:<11}  {v.note}".rstrip() for name, v in verdicts.items()]
    number = Counter(v.kind for v in verdicts.values())
    lines.append(
        f"{number['same']} rows same, {number['differs']} differ, {number['error']} with errors, "
        f"{number['only in OLD']} only in OLD, {number['only in NEW']} only in NEW."
    )
    return lines, any(v.fails for v in verdicts.values())


def check_out(revision: str | None, root: Path, stack: ExitStack) -> None:
    """Fill `root` with a revision's files, or with a copy of the working tree for ``None``."""
    if revision is None:
        for folder in ("src", "tests"):
            shutil.copytree(
                ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    stack.callback(subprocess.run, [*git, "remove", "--force", str(root)], capture_output=True)
    if subprocess.run([*git, "add", "--quiet", "--detach", str(root), revision]).returncode:
        sys.exit(f"Could not check out {revision!r}.")


def run_rows(root: Path, out: Path, jobs: int, chosen: list[str]) -> dict[str, Row]:
    """Return the arrays or the error of every row of one revision's table."""
    out.mkdir()
    paths = os.pathsep.join(str(p) for p in (root / "src", root))
    # Level 3 hides XLA's messages about every program that it reads from the cache.
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": paths}
    workers = []
    with ExitStack() as stack:
        for share in range(jobs):
            # -P keeps the worker's own folder from preceding the revision's folders on the path.
            args = [sys.executable, "-P", str(WORKER), str(root), str(out), str(share), str(jobs)]
            workers.append(subprocess.Popen([*args, *chosen], env=env, cwd=root))
            stack.callback(workers[-1].kill)
        status = [worker.wait() for worker in workers]
    rows: dict[str, Row] = {}
    for share in range(jobs):
        listed = out / f"names-{share}.json"
        if not listed.exists():
            sys.exit(f"A worker in {root} ended with status {status[share]} before its first row.")
        names = json.loads(listed.read_text())
        for i in range(share, len(names), jobs):
            if (out / f"{i}.npz").exists():
                with np.load(out / f"{i}.npz") as arrays:
                    rows[names[i]] = dict(arrays)
            elif (out / f"{i}.txt").exists():
                rows[names[i]] = (out / f"{i}.txt").read_text()
            else:
                rows[names[i]] = f"its worker ended with status {status[share]}"
    return {name: rows[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_bits", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="a git revision")
    parser.add_argument(
        "new", metavar="NEW", nargs="?", help="a git revision (default: the working tree)"
    )
    parser.add_argument(
        "--rows", nargs="+", default=[], metavar="NAME", help="run only these kernels"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="number of parallel processes"
    )
    parser.add_argument("--isa", help="largest instruction set; AVX has no fused multiply-adds")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="folder that keeps compiled programs"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that worktrees are removed
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_bits_")))
        # Equal programs have equal keys, so the second revision compiles only its new programs.
        cache = (args.cache or folder / "programs").resolve()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PLATFORMS"] = "cpu"
        if args.isa:
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={args.isa}"
            os.environ["XLA_FLAGS"] = flags.strip()
        revisions = {"OLD": args.old, "NEW": args.new}
        for (
            name,
            revision,
        ) in revisions.items():  # before any run, so that later edits change nothing
            check_out(revision, folder / name, stack)
        results = {}
        for name, revision in revisions.items():
            start_time = time.perf_counter()
            results[name] = run_rows(folder / name, folder / f"{name}-rows", args.jobs, args.rows)
            seconds = time.perf_counter() - start_time
            label = revision or "working tree"
            print(f"{name} ({label}): {len(results[name])} rows in {seconds:.0f} s", flush=True)
    unknown = [name for name in args.rows if name not in results["OLD"] | results["NEW"]]
    if unknown:
        sys.exit(f"Neither revision has a row {unknown[0]!r}.")
    lines, failed = report(results["OLD"], results["NEW"])
    print("\n".join(lines))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
