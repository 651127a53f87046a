"""Worker of `same_bits`: run rows of one revision's contract table and write their arrays.

This is the only part of `same_bits` that depends on the package. `contract_table` and `run_row`
handle revisions with other names. The revision's ``src`` and root come first on the path.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import fedmcmc

TABLES = ("tests.contracts.tables", "tests.contracts.contract_tables")
MODELS = ("tests.contracts.model", "tests.contracts.contract_model")


def contract_table() -> tuple[dict[str, Callable], ModuleType]:
    """Return the builders of all kernels and the module of their model.

    If the table or the model moves, add its new module to `TABLES` or `MODELS`.
    """
    return _first(TABLES).KERNELS, _first(MODELS)


def run_row(build: Callable, model: ModuleType) -> Any:
    """Return the `Samples` of one kernel, with clients computed one at a time.

    If the API changes, support both versions here.
    """
    kernel = build(model.POSITIONS["nested"], model.Given())
    data = model.DATA.pooled() if kernel.participation.pooled else model.DATA
    where = {}
    if hasattr(data, "chunked"):
        data = data.chunked(1)
    else:  # newer revisions set the execution in the run, not in the data
        where["placement"] = fedmcmc.Placement(clients_at_a_time=1)
    return fedmcmc.sample(
        model.KEY,
        kernel,
        data,
        model.POSITIONS["nested"],
        num_rounds=8,
        num_burnin=0,
        thinning=1,
        num_chains=2,
        progress=False,
        **where,
    )


def named_arrays(samples: Any) -> dict[str, np.ndarray]:
    """Return all arrays by their paths in `samples`, in the order of flattening."""
    named = {}
    for part in ("draws", "info", "state", "totals"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(samples, part)):
            if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            named[part + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return named


def _first(modules: tuple[str, ...]) -> ModuleType:
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its imports does not
    raise ModuleNotFoundError(f"none of {', '.join(modules)}: has the contract table moved?")


def main(root: str, out: str, share: int, jobs: int, chosen: list[str]) -> None:
    table, model = contract_table()
    for module in (fedmcmc, model):
        if not Path(module.__file__ or "").resolve().is_relative_to(Path(root).resolve()):
            raise ImportError(f"{module.__name__} is {module.__file__}, which is not under {root}.")
    names = [name for name in table if not chosen or name in chosen]
    Path(out, f"names-{share}.json").write_text(json.dumps(names))
    for i in range(share, len(names), jobs):
        try:
            arrays = named_arrays(run_row(table[names[i]], model))
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            Path(out, f"{i}.txt").write_text(f"{type(error).__name__}: {text}")
        else:
            np.savez(Path(out, f"{i}.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
