"""A model on data, as ``data=`` and ``model=`` name them, and whether one fits the other."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import jax

import fedmcmc
from experiments import wiring
from experiments.wiring import ConfigError
from fedmcmc.hierarchy import MarginalTerms


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


def load(config: dict[str, Any], names: Mapping[str, str] | None = None) -> wiring.Supplies:
    """Return data and model of a config; jobs of one process share them, and so their programs."""
    labels = [f"{key}={(names or {}).get(key, key)}" for key in ("model", "data")]
    parts = (json.dumps(config[key]) for key in ("data", "model"))
    return _load(*parts, " does not fit ".join(labels))


@functools.lru_cache(maxsize=4)
def _load(data_config: str, model_config: str, misfit: str) -> wiring.Supplies:
    loaded = wiring.build(json.loads(data_config), "data", None)
    data, *held_out = loaded if isinstance(loaded, tuple) else (loaded,)
    if not isinstance(data, fedmcmc.FederatedData):
        raise ConfigError(f"data must be a fedmcmc.FederatedData, got {type(data).__name__}.")
    try:
        node = model_node(json.loads(model_config))
        posterior = wiring.build(node, "model", wiring.Supplies(data))
        _check_fit(posterior, data)
    except ConfigError as error:
        raise ConfigError(f"{misfit}: {str(error).removeprefix('model: ')}") from error
    return wiring.Supplies(data, posterior, *held_out)


def has_rows(posterior: fedmcmc.Posterior) -> bool:
    """Return whether the log likelihood has a term per row: not where groups have effects."""
    terms = posterior.loglikelihood_fn
    return posterior.local is None and not isinstance(terms, MarginalTerms)


def _check_fit(posterior: Any, data: fedmcmc.FederatedData) -> None:
    """Evaluate the shape of the log likelihood; nothing is compiled."""
    if not isinstance(posterior, fedmcmc.Posterior):
        raise ConfigError(f"it must make a fedmcmc.Posterior, got {type(posterior).__name__}.")
    if posterior.init_fn is None:
        raise ConfigError("it has no start: give its fedmcmc.Posterior an init_fn.")
    if not has_rows(posterior):
        return
    try:
        position = jax.eval_shape(posterior.init_fn, jax.random.key(0))
        terms = jax.eval_shape(posterior.loglikelihood_fn, position, data.rows)
    except Exception as error:  # a model may raise anything on rows of another kind
        raise ConfigError(wiring.describe(error)) from error
    if terms.shape != (data.num_rows,):
        raise ConfigError(
            f"its log likelihood must have a term for each of {data.num_rows} rows, got the shape "
            f"{terms.shape}."
        )
