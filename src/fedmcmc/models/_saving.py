"""Storage of fits of formula models, and loading of all saved results."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fedmcmc.data import row_values
from fedmcmc.fitting import Fitted, store_fitted
from fedmcmc.hierarchy import MAX_DIMENSIONS, marginal
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples, SavedResult, read_netcdf, restore_samples, write_netcdf
from fedmcmc.types import Posterior

if TYPE_CHECKING:
    from fedmcmc.models._model_fit import ModelFit


def load(path: str | Path, *, posterior: Posterior | None = None) -> Any:
    """Load a result that ``save`` of `Samples`, `Fitted` or `ModelFit` wrote.

    Loading runs no code from the file. A `ModelFit` gets its model again from formula, schema and
    priors. Other results have draws, in the user's parameters too, verdict and report, but no
    functions.

    Parameters
    ----------
    path
        Path of the file.
    posterior
        For a `Fitted` or `Samples`, the posterior of the model (`fedmcmc.from_numpyro`), whose
        functions the result gets.

    Returns
    -------
    Samples, Fitted or ModelFit
        The result. It contains no rows; `ModelFit.with_data` adds them.

    Raises
    ------
    ValueError
        If the file is damaged, or was not written by ``save``.
    ImportError
        If the extra ``arviz`` is not installed.
    """
    saved = read_netcdf(path)
    kind = saved.record["kind"]
    if kind == "samples":
        fn = None if posterior is None else posterior.constrain_fn
        return restore_samples(Samples, saved, fn)
    if kind == "fitted":
        return Fitted.from_saved(saved, posterior)
    return restore_model_fit(saved)
