"""Storage of fits of formula models in NetCDF files.

A file has no code: models consist of dataclasses of `fedmcmc.models` and distributions of NumPyro,
which are stored by their names and fields.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np
from numpyro import distributions as dist
from numpyro.distributions import constraints, transforms

from fedmcmc.data import row_values
from fedmcmc.fitting import store_fitted
from fedmcmc.records import SavedResult

PACKAGE = "fedmcmc.models"
ATTRIBUTES = {"base_distribution": "base_dist"}
"""Attributes of distributions that differ from the names of their arguments."""


def store_model_fit(fit: Any) -> SavedResult:
    """Return the content of a file with the fit, its formula, schema, priors and model."""
    saved = store_fitted(fit.fitted)
    shapes = fit.settings.get("row shapes") if fit.data is None else _row_shapes(fit.data)
    saved.record |= {
        "kind": "model",
        "formula": fit.formula,
        "design": _class_name(fit.design),
        "parsed": as_record(fit.design.formula),
        "schema": fit.design.schema.to_dict(),
        "family": as_record(fit.family),
        "priors": as_record(fit.priors),
        "model": as_record(fit.model),
        "settings": as_record(dict(fit.settings) | {"row shapes": shapes}),
    }
    return saved


def _row_shapes(data: Any) -> dict[str, Any]:
    """Return the shape and type of a row's columns by name."""
    return {
        name: (tuple(map(int, x.shape[1:])), np.dtype(x.dtype).name)
        for name, x in row_values(data.rows).items()
    }


def as_record(value: Any) -> Any:
    """Return an object in the form of JSON.

    Raises
    ------
    ValueError
        If the object consists of other parts than dataclasses of `fedmcmc.models`, distributions of
        NumPyro, containers, numbers and text.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [as_record(x) for x in value]}
    if is_dataclass(value) and type(value).__module__.startswith(f"{PACKAGE}."):
        content = {x.name: as_record(getattr(value, x.name)) for x in fields(value)}
        return {"class": _class_name(value), "fields": content}
    if isinstance(value, Mapping):
        return {"dict": [[key, as_record(x)] for key, x in value.items()]}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return {"array": array.tolist(), "dtype": array.dtype.name}
    if isinstance(value, constraints.Constraint):
        value = getattr(value, "base_constraint", value)  # without batch dimensions
    for name, constraint in vars(constraints).items():
        if value is constraint:
            return {"constraint": name}
    for kind, module in (("distribution", dist), ("transform", transforms)):
        name = type(value).__name__
        if getattr(module, name, None) is type(value):
            arguments = [
                x for x in inspect.signature(type(value)).parameters if x != "validate_args"
            ]
            content = {x: as_record(getattr(value, ATTRIBUTES.get(x, x))) for x in arguments}
            return {kind: name, "arguments": content}
    raise ValueError(
        f"A fit with a {type(value).__name__} ({value!r}) cannot be saved: priors must be "
        f"distributions of NumPyro. Save fit.fitted instead."
    )


def _class_name(value: object) -> str:
    module = type(value).__module__.removeprefix(f"{PACKAGE}.")
    return f"{module}.{type(value).__name__}"
