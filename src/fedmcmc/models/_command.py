"""The command ``fedmcmc fit``: a model of a study file, fitted to one table per site."""

import argparse
import ast
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.data import Dictionary
from fedmcmc.models._tables import pandas

KEYS = ("formula", "family", "link", "hazard", "priors", "client", "weights", "seed", "settings")
"""Entries of the table ``[model]`` of a study file."""
HELP = "fit the model of a study file to one CSV or Parquet file per site; see docs/guides/r.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fedmcmc fit``."""
    parser.add_argument("study", type=Path, help="study file (TOML) with a table [model]")
    parser.add_argument("--sites", type=Path, required=True, help="folder with a table per site")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fit the model and write ``draws.csv``, ``summary.csv``, ``schema.json``, ``report.html``."""
    from fedmcmc import models

    content = tomllib.loads(options.study.read_text(encoding="utf-8"))
    model = read_model(content.pop("model", None), options.study)
    dictionary = Dictionary.from_dict(content) if "columns" in content else None
    client = model.pop("client", dictionary.client if dictionary is not None else None)
    arguments: dict[str, Any] = {
        "client": client or "site",
        "dictionary": dictionary,
        "priors": {name: parse_prior(x) for name, x in model.pop("priors", {}).items()},
        "rng_key": jax.random.key(model.pop("seed", 0)),
        **model.pop("settings", {}),
    }
    formula = model.pop("formula")
    fit_model = models.survival if "hazard" in model or "Surv(" in formula else models.glmm
    fit = fit_model(formula, read_sites(options.sites), **arguments, **model)
    write_results(fit, options.out)
    print(fit)
    print(f"Results are in {options.out}: draws.csv, summary.csv, schema.json, report.html")
    return 0


def read_model(model: Any, path: Path) -> dict[str, Any]:
    """Return the table ``[model]`` of a study file after a check of its names."""
    if not isinstance(model, Mapping) or "formula" not in model:
        raise ValueError(
            f'{path} needs a table [model] with a formula, such as formula = "y ~ age + '
            f'(1 | hospital)".'
        )
    unknown = [name for name in model if name not in KEYS]
    if unknown:
        raise ValueError(
            f"{path}: [model] has {unknown[0]!r}, which is unknown. Known are {', '.join(KEYS)}."
        )
    return dict(model)


def read_sites(folder: Path) -> dict[str, Any]:
    """Return the table of each site; the name of a file without its ending is the site's name."""
    tables: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".csv", ".parquet"):
            continue
        if path.stem in tables:
            raise ValueError(f"{folder} has two files of the site {path.stem!r}.")
        pd = pandas()
        if path.suffix == ".csv":
            tables[path.stem] = pd.read_csv(path)
            continue
        try:
            tables[path.stem] = pd.read_parquet(path)
        except ImportError as error:
            raise ImportError(f"{path}: Parquet files need pyarrow: pip install pyarrow") from error
    if not tables:
        raise ValueError(f"{folder} has no file with the ending .csv or .parquet.")
    return tables


def parse_prior(text: str) -> Any:
    """Return the distribution of NumPyro in a text such as ``"Normal(0, 2.5)"``.

    Examples
    --------
    >>> parse_prior("HalfNormal(1)").scale
    1
    """
    from numpyro import distributions as dist

    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        arguments = [ast.literal_eval(x) for x in call.args]
        keywords = {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
        kind = getattr(dist, call.func.id)
        assert issubclass(kind, dist.Distribution)
        return kind(*arguments, **keywords)
    except (SyntaxError, ValueError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(
            f"A prior is a distribution of NumPyro with numbers, such as 'Normal(0, 2.5)'; got "
            f"{text!r}."
        ) from error


def write_results(fit: Any, folder: Path) -> None:
    """Write the tables and the report of a fit."""
    folder.mkdir(parents=True, exist_ok=True)
    draws_table(fit.draws).to_csv(folder / "draws.csv", index=False)
    fit.summary().to_csv(folder / "summary.csv")
    schema = json.dumps(fit.design.schema.to_dict(), indent=1)
    (folder / "schema.json").write_text(schema, encoding="utf-8")
    fit.report.save(folder / "report.html")


def draws_table(draws: Mapping[str, np.ndarray]) -> Any:
    """Return a table that ``posterior::as_draws_df`` of R reads, from ``[num_chains, num_draws]``.

    Chains, iterations and draws are numbered from one, as in R.
    """
    num_chains, num_draws = next(iter(draws.values())).shape
    columns = {
        ".chain": np.repeat(np.arange(1, num_chains + 1), num_draws),
        ".iteration": np.tile(np.arange(1, num_draws + 1), num_chains),
        ".draw": np.arange(1, num_chains * num_draws + 1),
    }
    return pandas().DataFrame(columns | {name: np.ravel(x) for name, x in draws.items()})
