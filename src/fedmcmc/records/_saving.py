"""Storage of `Samples` in NetCDF files."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedmcmc.records._netcdf import SavedResult
from fedmcmc.types import Broadcast, FederatedState, MissingFunction

TREES = ("draws", "final_draws", "local")
REASON = (
    "Functions are not part of a saved result. Pass model= to fedmcmc.load to restore the "
    "functions of a model."
)


def store_samples(samples: Any) -> SavedResult:
    """Return the content of a file with draws, their names, and all facts about the run."""
    saved = SavedResult({"kind": "samples"})
    record = saved.record
    for name in TREES:
        record[name] = saved.store(getattr(samples, name), name)
    try:
        record["constrained"] = saved.store(samples.constrained, "posterior")
    except ValueError:  # the collected values are not positions
        record["constrained"] = None
    if samples.local is not None:
        record["constrained_local"] = saved.store(samples.constrained_local, "constrained_local")
    record["info"] = saved.store(samples.info, "info")
    record["totals"] = saved.store(samples.totals, "totals")
    record["local_mask"] = saved.store(samples.local_mask, "local_mask")
    record["reason_not_judged"] = samples.reason_not_judged
    if samples.diagnosis is not None:
        record["reason_not_judged"] = str(samples.diagnosis)
    for name in ("stopped", "warnings", "settings", "versions"):
        record[name] = getattr(samples, name)
    return saved


def restore_samples(cls: Any, saved: SavedResult, constrain_fn: Callable[..., Any] | None) -> Any:
    """Return the samples in a file. A run cannot continue from them."""
    record = saved.record
    values: dict[str, Any] = {name: saved.restore(record[name]) for name in TREES}
    values |= {name: saved.restore(record[name]) for name in ("info", "totals", "local_mask")}
    values |= {name: record[name] for name in ("stopped", "settings", "versions")}
    values |= {
        "warnings": tuple(record["warnings"]),
        "reason_not_judged": record["reason_not_judged"],
    }
    num_chains = next(iter(values["info"].values())).shape[0]
    position = jax.tree.map(lambda leaf: leaf[:, -1], values["draws"])
    state = FederatedState(Broadcast(jnp.zeros(num_chains, jnp.int32), position), (), ())
    computed: dict[str, Any] = {}
    for name, fn in (("constrained", "constrain_fn"), ("constrained_local", "constrain_local_fn")):
        if record.get(name) is not None:
            computed[name] = saved.restore(record[name])
            values[fn] = MissingFunction(REASON)
    if constrain_fn is not None:
        values["constrain_fn"] = constrain_fn
    return cls(state=state, **values).with_computed(computed)
