"""A model on data, as ``data=`` and ``model=`` name them, and whether one fits the other."""

import functools
import json
from typing import Any, NamedTuple

import jax

import fedmcmc
from experiments import wiring
from experiments.wiring import ConfigError
from fedmcmc.hierarchy import MarginalTerms


class Problem(NamedTuple):
    """A model on data, with rows held out (or ``None``), and what kernels may need of them.

    Loaders may add, as `other`, rows of another data set, for predictions out of distribution.
    """

    posterior: fedmcmc.Posterior
    data: fedmcmc.FederatedData
    test: Any
    supplies: wiring.Supplies
    other: Any = None


def model_node(node: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a function that makes a posterior: a NumPyro model is wrapped."""
    target = wiring.locate(node["_target_"], "model")
    located = {"_target_": "hydra.utils.get_object", "path": node["_target_"]}
    if isinstance(target, fedmcmc.Posterior):
        return located
    if wiring.takes(target, ("data", "example")):
        return node
    model = located if len(node) == 1 else {**node, "_partial_": True}
    return {"_target_": "fedmcmc.from_numpyro", "model": model}


def load(config: dict[str, Any], names: dict[str, str] | None = None) -> Problem:
    """Return data and model of a config; jobs of one process share them, and so their programs."""
    labels = {name: (names or {}).get(name, name) for name in ("data", "model")}
    parts = (json.dumps(config[name]) for name in ("data", "model"))
    return _load(*parts, f"model={labels['model']} does not fit data={labels['data']}")


@functools.lru_cache(maxsize=4)
def _load(data_config: str, model_config: str, misfit: str) -> Problem:
    loaded = wiring.build(json.loads(data_config), "data", None)
    data, test = loaded[:2] if isinstance(loaded, tuple) else (loaded, None)
    if not isinstance(data, fedmcmc.FederatedData):
        raise ConfigError(f"data must be a fedmcmc.FederatedData, got {type(data).__name__}.")
    node = json.loads(model_config)
    try:
        posterior = wiring.build(model_node(node), "model", wiring.Supplies(data))
        _check_fit(posterior, data)
    except ConfigError as error:
        raise ConfigError(f"{misfit}: {str(error).removeprefix('model: ')}") from error
    other_rows = loaded[2] if isinstance(loaded, tuple) and len(loaded) > 2 else None
    return Problem(posterior, data, test, wiring.Supplies(data, posterior), other_rows)


def has_rows(posterior: fedmcmc.Posterior) -> bool:
    """Return whether the log likelihood has a term per row: not where groups have effects."""
    terms = posterior.loglikelihood_fn
    return posterior.local is None and not isinstance(terms, MarginalTerms)


def _check_fit(posterior: Any, data: fedmcmc.FederatedData) -> None:
    """Evaluate shapes of the log likelihood on two rows; nothing is compiled."""
    if not isinstance(posterior, fedmcmc.Posterior):
        raise ConfigError(f"it must make a fedmcmc.Posterior, got {type(posterior).__name__}.")
    start = wiring.start_of(posterior)
    if not has_rows(posterior):
        return
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype), data.rows
    )
    try:
        position = jax.eval_shape(start, jax.random.key(0))
        terms = jax.eval_shape(posterior.loglikelihood_fn, position, rows)
    except Exception as error:  # a model may raise anything on rows of another kind
        raise ConfigError(wiring.describe(error)) from error
    if terms.shape != (2,):
        raise ConfigError(f"its log likelihood of two rows has shape {terms.shape}, not (2,).")
