"""The command ``fedmcmc fit``: a model of a study file, fitted to one table per site."""

import ast
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc.data import Dictionary
from fedmcmc.models._formula import parse
from fedmcmc.models._glm import glm
from fedmcmc.models._survival import survival
from fedmcmc.models._tables import pandas

OPTIONS = (
    *("family", "link", "hazard", "intervals", "aft", "cause", "follow_up"),
    *("weights", "trials", "max_missing", "method"),
)
KEYS = ("formula", "priors", "client", "seed", "settings", *OPTIONS)
"""Entries of the table ``[model]`` of a study file."""


def run_command(study: Path, sites: Path, out: Path) -> None:
    """Fit the model of a study file, and write its results.

    Parameters
    ----------
    study
        TOML file with a table ``[model]``: ``formula``, ``family`` and other arguments of `glm`, or
        ``hazard`` and other arguments of `survival`, ``seed``, and ``settings`` of `fedmcmc.fit`.
        Its other tables are a `fedmcmc.data.Dictionary`, which is optional.
    sites
        Folder with one CSV or Parquet file per site.
    out
        Folder for ``draws.csv``, ``summary.csv``, ``schema.json`` and ``report.html``.

    Raises
    ------
    ValueError
        If the study file is not valid, or for the reasons listed in `glm`.
    """
    content = tomllib.loads(study.read_text(encoding="utf-8"))
    model = read_model(content.pop("model", None), study)
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
    fit_model: Any = survival if parse(formula).is_survival else glm
    fit = fit_model(formula, read_sites(sites, dictionary), **arguments, **model)
    write_results(fit, out)
    print(f"{fit}\nResults are in {out}: draws.csv, summary.csv, schema.json, report.html")


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


def read_sites(folder: Path, dictionary: Dictionary | None = None) -> dict[str, Any]:
    """Return the table of each site; the name of a file without its ending is the site's name.

    A dictionary determines the types of columns, and each site's rows are checked against it.
    """
    pd = pandas()
    tables: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".csv", ".parquet"):
            continue
        if path.stem in tables:
            raise ValueError(f"{folder} has two files of the site {path.stem!r}.")
        if dictionary is not None:
            table = dictionary.read_table(path)
            dictionary.check(table, path.stem)
            if isinstance(table, dict):
                table = pd.DataFrame({name: column.tolist() for name, column in table.items()})
        else:
            table = (pd.read_csv if path.suffix == ".csv" else pd.read_parquet)(path)
        tables[path.stem] = table
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
