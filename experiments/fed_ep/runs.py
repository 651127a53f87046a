"""Runs of the benchmarks: a burn-in that all methods share, then each method from there."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments import spreading
from experiments.fed_ep import methods
from experiments.fed_ep.methods import Federation, Settings
from fedmcmc import Placement
from fedmcmc.pytrees import trees

__all__ = ["MARGINAL_DRAWS", "Curve", "execute", "marginal", "point", "trouble"]

MARGINAL_DRAWS = 10
SITES_BYTES = 2**31
"""Clients' sites that take more than this lie on the host."""

Score = Callable[[Any, Any, Array], dict[str, Array]]
"""``(position, test rows, round) -> numbers``, computed after every round."""


class Curve(NamedTuple):
    """What a method did.

    `scores` are ``{name: [num_seeds, num_rounds, ...]}``, burn-in included; `state` is the run's
    last, ``None`` where it turned non-finite in the round `diverged`. `improper` is the number of
    rounds that left the approximation improper and `lost` the share of fits that were.
    """

    scores: dict[str, np.ndarray]
    state: Any
    diverged: int | None = None
    improper: int = 0
    lost: float = 0.0


def execute(
    settings: Settings,
    posterior: fedmcmc.Posterior,
    federation: Federation,
    score_fn: Score,
    placement: Placement,
) -> dict[str, Curve]:
    """Run every method of `settings`.

    Parameters
    ----------
    settings
        Settings.
    posterior
        The model, with the prior of the weight decay.
    federation
        Rows.
    score_fn
        What is computed of the point estimate after each round, on the rows held out.
    placement
        Where runs lie.
    """
    key = jax.random.key(settings.seed)
    collect = partial(_collect, score_fn, federation.test)
    common: dict[str, Any] = dict(progress=False, collect=collect, placement=placement)
    data = federation.data
    first = spreading.sample(
        key,
        methods.burn_in(settings, posterior),
        data,
        posterior.init_fn,
        num_rounds=settings.num_burnin,
        num_chains=settings.num_seeds,
        **common,
    )
    rest = settings.num_rounds - settings.num_burnin
    curves = {}
    for name in settings.methods:
        kernel = methods.build(name, settings, posterior, data)
        given = dict(common)
        state = first.state
        if name not in ("FedAvg", "FedPA"):
            store = _store(name, settings, data, state)
            if store is None:
                state = fedmcmc.switch(kernel, data, state)
            else:
                state = store.start(
                    lambda ids, k=kernel: fedmcmc.switch(k, data, first.state, clients=ids),
                    data.num_clients,
                )
                given["client_store"] = store
        try:
            run = spreading.sample(key, kernel, data, num_rounds=rest, state=state, **given)
        except fedmcmc.NonFiniteError as error:
            kept = error.samples.draws if error.samples is not None else {}
            curves[name] = Curve(_joined(first.draws, kept), None, error.round)
            continue
        told = run.draws
        curves[name] = Curve(
            _joined(first.draws, told),
            run.state,
            None,
            int((~told["proper"]).sum()),
            float(1 - told["fitted"].mean()),
        )
    return curves


def trouble(curves: dict[str, Curve]) -> dict[str, Any]:
    """Return what went wrong in the runs, for their metrics."""
    return {
        "improper_rounds": {name: curve.improper for name, curve in curves.items()},
        "lost_fits": {name: curve.lost for name, curve in curves.items()},
        "diverged": {n: c.diverged for n, c in curves.items() if c.diverged is not None},
    }


def _store(
    name: str, settings: Settings, data: fedmcmc.FederatedData, state: Any
) -> fedmcmc.HostStore | None:
    stateful = name.startswith("FedEP")
    # Two numbers per parameter, and twice that with momentum.
    size = 4 * 2 * (1 + (settings.site_momentum > 0)) * trees.num_elements(state.broadcast.position)
    return fedmcmc.HostStore() if stateful and size * data.num_clients > SITES_BYTES else None


def _joined(first: dict[str, np.ndarray], then: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: np.concatenate([values, then[name]], axis=1) if name in then else values
        for name, values in first.items()
    }


def _collect(score_fn: Score, test: Any, state: Any, info: Any) -> dict[str, Array]:
    """Return scores of the point estimate, the share of proper fits, and if the product was."""
    scores = score_fn(state.broadcast.position, test, state.broadcast.round)
    proper = jnp.array(True) if trees.is_empty(info.server) else info.server.proper
    return scores | {"fitted": jnp.mean(info.clients.usable, dtype=jnp.float32), "proper": proper}


def point(state: Any) -> Any:
    """Return the point estimates of a run's last state, leaves ``[num_seeds, 1, ...]``."""
    return jax.tree.map(lambda leaf: leaf[:, None], state.broadcast.position)


def marginal(rng_key: Array, state: Any, num_draws: int = MARGINAL_DRAWS) -> Any:
    """Return draws from the approximation, leaves ``[num_seeds, num_draws, ...]``."""
    whole = state.server.approximation.gaussian
    num_seeds = jnp.size(state.broadcast.round)

    def one(key: Array, own: fedmcmc.Gaussian) -> Any:
        return jax.vmap(own.draw)(jax.random.split(key, num_draws))

    return jax.vmap(one)(jax.random.split(rng_key, num_seeds), whole)
