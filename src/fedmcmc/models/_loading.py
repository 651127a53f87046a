"""Loading of saved results. Nothing in a file is run as code."""

from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints, transforms

from fedmcmc.fitting import Fitted
from fedmcmc.hierarchy import marginal
from fedmcmc.interop.numpyro import from_numpyro
from fedmcmc.models._design import Design
from fedmcmc.models._model_fit import ModelFit
from fedmcmc.models._saving import PACKAGE
from fedmcmc.models._schema import Schema
from fedmcmc.records import Samples, SavedResult, read_netcdf, restore_samples
from fedmcmc.types import Posterior


def load(path: str | Path, *, posterior: Posterior | None = None) -> Any:
    """Load a result that ``save`` of `Samples`, `Fitted` or `ModelFit` wrote.

    Loading runs no code from the file. A `ModelFit` gets its model again from formula, schema and
    priors. Other results have draws, in the user's parameters too, verdict and report, but no
    functions.

    Parameters
    ----------
    path, posterior
        Path of the file, and for a `Fitted` or `Samples` the posterior of the model, whose
        functions the result gets.

    Returns
    -------
    Samples, Fitted or ModelFit
        Result without rows; `ModelFit.with_data` adds them.

    Raises
    ------
    ValueError
        If the file is damaged, or was not written by ``save``.
    ImportError
        If the extra ``arviz`` is not installed.

    Examples
    --------
    >>> import fedmcmc, jax, tempfile
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    >>> kernel, key = fedmcmc.lsd(posterior, step_size=0.02), jax.random.key(0)
    >>> samples = fedmcmc.sample(key, kernel, data, 0.0, num_rounds=20, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = load(samples.save(folder + "/run.nc"))
    >>> bool((loaded.draws == samples.draws).all())
    True
    """
    saved = read_netcdf(path)
    kind = saved.record["kind"]
    if kind == "samples":
        fn = None if posterior is None else posterior.constrain_fn
        return restore_samples(Samples, saved, fn)
    if kind == "fitted":
        return Fitted.from_saved(saved, posterior)
    return restore_model_fit(saved)


def restore_model_fit(saved: SavedResult) -> ModelFit:
    """Return the fit in the content of a file."""
    record = saved.record
    make_design = _find_class(record["design"])
    if not issubclass(make_design, Design):
        raise ValueError(f"The file names {record['design']!r}, which is no design.")
    design = make_design(from_record(record["parsed"]), Schema.from_dict(record["schema"]))
    model, settings = from_record(record["model"]), from_record(record["settings"])
    rows = {
        name: jax.ShapeDtypeStruct((2, *shape), np.dtype(kind))
        for name, (shape, kind) in settings["row shapes"].items()
    }
    posterior = from_numpyro(model, example=rows)
    sampled = posterior if posterior.local is None else marginal(posterior)
    fitted = Fitted.from_saved(saved, sampled)
    family, priors = from_record(record["family"]), from_record(record["priors"])
    return ModelFit(
        fitted, model, posterior, None, design, family, priors, record["formula"], None, settings
    )


def from_record(record: Any) -> Any:
    """Return the object of a record of `as_record`; no other classes are made."""
    if not isinstance(record, dict):
        return record
    kind, content = next(iter(record.items()))
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](map(from_record, content))
    if kind == "dict":
        return {key: from_record(x) for key, x in content}
    if kind == "array":
        return np.asarray(content, record["dtype"])
    if kind == "constraint":
        constraint = getattr(constraints, content, None)
        if not isinstance(constraint, constraints.Constraint):
            raise ValueError(f"The file names {content!r}, which is no constraint of NumPyro.")
        return constraint
    if kind == "class":
        cls = _find_class(content)
        arguments = record["fields"]
        is_allowed = isinstance(cls, type) and is_dataclass(cls)
    else:
        base = {"distribution": dist.Distribution, "transform": transforms.Transform}[kind]
        cls = getattr(dist if kind == "distribution" else transforms, content)
        arguments = record["arguments"]
        is_allowed = isinstance(cls, type) and issubclass(cls, base)
    if not is_allowed:
        raise ValueError(f"The file names {content!r}, which is no part of a model.")
    return cls(**{name: from_record(x) for name, x in arguments.items()})


def _find_class(name: str) -> Any:
    module, _, name = name.partition(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)
