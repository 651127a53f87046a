"""Runs of several methods after a burn-in that all share (Guo et al. 2023).

A study gives `methods`, the configs of kernels by name, and `settings`. A text ``$name`` in a
config stands for the setting `name`, which may be a config itself. `runs` lists what is run:
mappings of ``method`` and of settings to values, where lists stand for all their values.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fedmcmc
from experiments import wiring
from fedmcmc import inference
from fedmcmc.pytrees import trees

__all__ = ["BASELINES", "BURN_IN", "Curve", "draws_of", "execute", "without_prior"]

BURN_IN = "FedAvg"
BASELINES = (BURN_IN, "FedPA")
"""Methods without an approximation, which continue the burn-in's state as it is."""
CLIENT_BYTES = 2**31
"""Clients' states above this size are kept on the host, for one seed at a time."""


class Curve(NamedTuple):
    """Run of a method.

    Attributes
    ----------
    scores
        Arrays ``[num_seeds, num_rounds, ...]`` by name, burn-in included. Besides the scores of the
        study: `fitted`, the share of clients' fits that were proper, and `proper`, whether the
        approximation was.
    state, diverged
        The last state; of a run that turned non-finite ``None``, and the round.
    method, settings
        Name of the method, and its settings that differ from the study's.
    """

    scores: dict[str, np.ndarray]
    state: Any
    diverged: int | None = None
    method: str = ""
    settings: Mapping[str, Any] = {}


def execute(
    methods: Mapping[str, Any],
    settings: Mapping[str, Any],
    runs: Sequence[Mapping[str, Any]],
    supplies: wiring.Supplies,
    score_fn: Callable[[Any, Array], dict[str, Array]],
    *,
    seed: int,
    num_seeds: int,
    num_burnin: int,
    num_rounds: int,
) -> Iterator[Curve]:
    """Run the burn-in, which is ``methods["FedAvg"]``, and each method from there.

    Parameters
    ----------
    methods, settings, runs
        As in the module's docstring.
    supplies
        Data and model.
    score_fn
        Scores of a position and the number of the round, computed after each round.
    num_burnin, num_rounds
        Rounds of the burn-in, and rounds in all.

    Raises
    ------
    ValueError
        If `runs` has an unknown method or setting, or there are no rounds after the burn-in.
    """
    if not 0 < num_burnin < num_rounds:
        raise ValueError(f"num_burnin must lie between 1 and {num_rounds - 1}, got {num_burnin}.")
    chosen = list(_variants(runs, methods, settings))
    data, key = supplies.data, jax.random.key(seed)
    common: dict[str, Any] = dict(collect=partial(_collect, score_fn), progress=False)
    burn_in = fedmcmc.sample(
        key,
        wiring.build(_filled(methods[BURN_IN], settings), BURN_IN, supplies),
        data,
        supplies.posterior.init_fn,
        num_rounds=num_burnin,
        num_chains=num_seeds,
        placement=fedmcmc.Placement(),
        **common,
    )
    common["num_rounds"] = num_rounds - num_burnin
    for method, changes in chosen:
        kernel = wiring.build(_filled(methods[method], {**settings, **changes}), method, supplies)
        switch = None if method in BASELINES else partial(fedmcmc.switch, kernel, data)
        parts = [slice(None)]
        if switch is not None:
            clients = jax.eval_shape(switch, burn_in.state).clients
            if 4 * trees.num_elements(clients) > CLIENT_BYTES:
                parts = [slice(i, i + 1) for i in range(num_seeds)]
        curves = []
        for part in parts:
            start = (burn_in.state, burn_in.draws)
            state, before = jax.tree.map(lambda leaf, part=part: leaf[part], start)
            # The first seed keeps the key with which all seeds would run together.
            part_key = jax.random.fold_in(key, part.start) if part.start else key
            store = fedmcmc.HostStore() if len(parts) > 1 else None
            curves.append(_continued(part_key, kernel, data, state, before, switch, store, common))
        yield _joined(curves)._replace(method=method, settings=changes)


def _variants(
    runs: Sequence[Mapping[str, Any]], methods: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the methods to run, each with its settings that differ from the study's."""
    for entry in runs:
        choices = [value if isinstance(value, list) else [value] for value in entry.values()]
        for values in itertools.product(*choices):
            changes = dict(zip(entry, values, strict=True))
            method = changes.pop("method", None)
            if method not in methods or not changes.keys() <= settings.keys():
                raise ValueError(
                    f"runs has {entry}; the methods are {', '.join(methods)}, and the settings "
                    f"{', '.join(settings)}."
                )
            yield method, changes


def _filled(node: Any, settings: Mapping[str, Any]) -> Any:
    """Return a config in which every ``$name`` is replaced by the setting."""
    if isinstance(node, str) and node.startswith("$"):
        if node[1:] not in settings:
            raise ValueError(f"{node} is not among the settings {', '.join(settings)}.")
        return _filled(settings[node[1:]], settings)
    if isinstance(node, Mapping):
        return {name: _filled(value, settings) for name, value in node.items()}
    return [_filled(item, settings) for item in node] if isinstance(node, list) else node


def _continued(
    key: Array,
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    state: Any,
    before: Mapping[str, np.ndarray],
    switch: Any,
    store: fedmcmc.HostStore | None,
    common: Mapping[str, Any],
) -> Curve:
    """Run a method from the end of the burn-in, whose scores are `before`."""
    if store is not None:
        start = store.start(lambda ids: switch(state, clients=ids), data.num_clients)
    else:
        start = state if switch is None else switch(state)
    final_state, diverged = None, None
    try:
        placement = fedmcmc.Placement(client_store=store)
        run = fedmcmc.sample(key, kernel, data, state=start, placement=placement, **common)
        after = run.draws
        final_state = run.state if store is None else run.state._replace(clients=())
    except fedmcmc.NonFiniteError as error:
        after = error.samples.draws if error.samples is not None else {}
        diverged = error.round
    scores = {
        name: np.concatenate([values, after[name]], axis=1) if name in after else values
        for name, values in before.items()
    }
    return Curve(scores, final_state, diverged)


def _joined(curves: Sequence[Curve]) -> Curve:
    """Return runs of some seeds each as one curve, which is as long as the shortest."""
    num_rounds = min(curve.scores["proper"].shape[1] for curve in curves)
    scores = {
        name: np.concatenate([curve.scores[name][:, :num_rounds] for curve in curves])
        for name in curves[0].scores
    }
    rounds = [curve.diverged for curve in curves if curve.diverged is not None]
    if rounds:
        return Curve(scores, None, min(rounds))
    return Curve(scores, jax.tree.map(lambda *x: jnp.concatenate(x), *(c.state for c in curves)))


def _collect(score_fn: Any, state: Any, info: Any) -> dict[str, Array]:
    proper = jnp.array(True) if trees.is_empty(info.server) else info.server.proper
    fitted = jnp.mean(info.clients.usable, dtype=jnp.float32)
    scores = score_fn(state.broadcast.position, state.broadcast.round)
    return {**scores, "fitted": fitted, "proper": proper}


def draws_of(rng_key: Array, curve: Curve, num_draws: int) -> Any:
    """Return draws from the last approximation, leaves ``[num_seeds, num_draws, ...]``."""
    keys = jax.random.split(rng_key, jnp.size(curve.state.broadcast.round))
    return jax.vmap(
        lambda key, gaussian: jax.vmap(gaussian.draw)(jax.random.split(key, num_draws))
    )(keys, curve.state.server.approximation.gaussian)


def averaged(
    optimizer: optax.GradientTransformation, cohort_size: int
) -> optax.GradientTransformation:
    """Return an optimizer of the cohort's mean change, for kernels that give it the sum."""
    return optax.chain(optax.scale(1 / cohort_size), optimizer)


def without_prior(posterior: fedmcmc.Posterior) -> fedmcmc.Posterior:
    """Return a model with an improper uniform prior."""
    return posterior._replace(logprior_fn=_flat)


def _flat(position: Any) -> Array:
    del position
    return jnp.zeros(())


def uniform_prior(posterior: fedmcmc.Posterior) -> fedmcmc.Gaussian:
    """Return the improper uniform density as a Gaussian."""
    return fedmcmc.Gaussian.uniform(jax.eval_shape(posterior.init_fn, jax.random.key(0)))


def natural_gradients(
    mean: Any, covariance: float, weight_decay: float, scale: float, **settings: Any
) -> inference.Inference:
    """Return `fedmcmc.inference.ngvi` that starts where the released code does."""
    start = max(covariance / scale - weight_decay, 0.0)
    return inference.ngvi(mean, initial=start, scale=scale, **settings)
