"""Runs of the benchmarks: a burn-in that all methods share, then each method from there."""

from collections.abc import Callable, Mapping
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
"""Clients' sites that take more than this lie on the host, those of one seed at a time.

Those of `fed_ep/cifar` take 90 GB per seed, which the host must have.
"""

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
    variants: Mapping[str, tuple[str, Settings]] | None = None,
) -> dict[str, Curve]:
    """Run every method of `settings`, or all `variants`, after a burn-in that all share.

    Parameters
    ----------
    settings
        Settings, of the burn-in too.
    posterior
        The model, with the prior of the weight decay.
    federation
        Rows.
    score_fn
        What is computed of the point estimate after each round, on the rows held out.
    placement
        Where runs lie.
    variants
        By name, a method and the settings it runs with; by default each method of `settings`.
    """
    if variants is None:
        variants = {name: (name, settings) for name in settings.methods}
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
    for name, (method, own) in variants.items():
        kernel = methods.build(method, own, posterior)
        go_on = partial(_go_on, kernel, data, num_rounds=rest, **common)
        if method in ("FedAvg", "FedPA"):
            curves[name] = go_on(key, first.draws, first.state)
        elif _sites_bytes(method, own, data, first.state) <= SITES_BYTES:
            state = fedmcmc.switch(kernel, data, first.state)
            curves[name] = go_on(key, first.draws, state)
        else:
            # One seed after the other, so that the host holds the sites of one alone.
            seeds = [
                _with_store(go_on, kernel, data, key, first, seed)
                for seed in range(settings.num_seeds)
            ]
            curves[name] = _joined_seeds(seeds)
    return curves


def _go_on(
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    key: Array,
    before: dict[str, np.ndarray],
    state: Any,
    **settings: Any,
) -> Curve:
    """Run a method from where the burn-in, of which `before` are the scores, ended."""
    try:
        run = spreading.sample(key, kernel, data, state=state, **settings)
    except fedmcmc.NonFiniteError as error:
        kept = error.samples.draws if error.samples is not None else {}
        return Curve(_joined(before, kept), None, error.round)
    told = run.draws
    return Curve(
        _joined(before, told),
        run.state,
        None,
        int((~told["proper"]).sum()),
        float(1 - told["fitted"].mean()),
    )


def _with_store(
    go_on: Callable[..., Curve],
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    key: Array,
    first: fedmcmc.Samples,
    seed: int,
) -> Curve:
    """Run one seed with its clients' states on the host, and keep none of them."""
    if seed:  # the first keeps the key with which all seeds would run at once
        key = jax.random.fold_in(key, seed)
    one = partial(jax.tree.map, lambda leaf: leaf[seed : seed + 1])
    state, before = one(first.state), one(first.draws)
    store = fedmcmc.HostStore()
    start = store.start(
        lambda ids: fedmcmc.switch(kernel, data, state, clients=ids), data.num_clients
    )
    curve = go_on(key, before, start, client_store=store)
    last = curve.state
    return curve._replace(state=None if last is None else last._replace(clients=()))


def _joined_seeds(seeds: list[Curve]) -> Curve:
    """Return what runs of one seed each did as one curve, as long as the shortest."""
    num = min(next(iter(seed.scores.values())).shape[1] for seed in seeds)
    scores = {
        name: np.concatenate([seed.scores[name][:, :num] for seed in seeds])
        for name in seeds[0].scores
    }
    lost = [seed.diverged for seed in seeds if seed.diverged is not None]
    whole = Curve(
        scores,
        None,
        min(lost, default=None),
        sum(seed.improper for seed in seeds),
        float(np.mean([seed.lost for seed in seeds])),
    )
    if lost:
        return whole
    states = [seed.state for seed in seeds]
    return whole._replace(state=jax.tree.map(lambda *x: jnp.concatenate(x), *states))


def trouble(curves: dict[str, Curve]) -> dict[str, Any]:
    """Return what went wrong in the runs, for their metrics."""
    return {
        "improper_rounds": {name: curve.improper for name, curve in curves.items()},
        "lost_fits": {name: curve.lost for name, curve in curves.items()},
        "diverged": {n: c.diverged for n, c in curves.items() if c.diverged is not None},
    }


def _sites_bytes(method: str, settings: Settings, data: fedmcmc.FederatedData, state: Any) -> int:
    """Return how much the clients' sites take: two numbers per parameter, four with momentum."""
    if not method.startswith("FedEP"):
        return 0
    numbers = 2 * (1 + (settings.site_momentum > 0))
    size = trees.num_elements(state.broadcast.position)  # of all seeds
    return 4 * numbers * size * data.num_clients


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
