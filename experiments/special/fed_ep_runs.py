"""Runs of several methods after a burn-in that all share (Guo et al. 2023).

A study gives `methods`, the configs of kernels by name, and `settings`. A text ``$name`` in a
config stands for the setting `name`, which may be a config itself and which a run may change.
`runs` lists what is run: mappings of ``method`` and of settings to values, where lists stand for
all their values.
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
from experiments import setup, wiring
from experiments.tidy import Row
from fedmcmc import inference
from fedmcmc.pytrees import trees

BURN_IN = "FedAvg"
BASELINES = (BURN_IN, "FedPA")
"""Methods without an approximation, which continue the burn-in's state as it is."""
CLIENT_BYTES = 2**31
"""Clients' states above this size are kept on the host, for one seed at a time."""

without_prior = setup.flat_prior


class Curve(NamedTuple):
    """Run of a method.

    Attributes
    ----------
    scores
        Arrays ``[num_seeds, num_rounds, ...]`` by name, burn-in included. Besides the scores of the
        study: `fitted`, the share of clients' fits that were proper, and `proper`, whether the
        approximation was.
    state
        The last state, ``None`` of a run that turned non-finite.
    method, settings
        Name of the method, and its settings that differ from the study's.
    """

    scores: dict[str, np.ndarray]
    state: Any
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

    `score_fn` returns scores of a position and the number of its round; `num_rounds` includes the
    burn-in. The other arguments are described at the top of this module.

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

    def build(method: str, changes: Mapping[str, Any]) -> fedmcmc.FederatedKernel:
        return wiring.build(_filled(methods[method], {**settings, **changes}), method, supplies)

    lengths = dict(num_rounds=num_burnin, num_chains=num_seeds)
    kernel, init_fn = build(BURN_IN, {}), supplies.posterior.init_fn
    burn_in = fedmcmc.sample(key, kernel, data, init_fn, **lengths, **common)
    common["num_rounds"] = num_rounds - num_burnin
    for method, changes in chosen:
        kernel = build(method, changes)
        switch = _as_it_is if method in BASELINES else partial(fedmcmc.switch, kernel, data)
        clients = jax.eval_shape(switch, burn_in.state).clients
        on_host = 4 * trees.num_elements(clients) > CLIENT_BYTES
        parts = [slice(i, i + 1) for i in range(num_seeds)] if on_host else [slice(None)]
        curves = [_continued(part, key, kernel, data, burn_in, switch, common) for part in parts]
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
    return node


def _as_it_is(state: Any) -> Any:
    return state


def _continued(
    part: slice, key: Array, kernel: Any, data: Any, burn_in: Any, switch: Any, common: Any
) -> Curve:
    """Run a method from the end of the burn-in, for all seeds or for one, with a host store."""
    state, before = jax.tree.map(lambda leaf: leaf[part], (burn_in.state, burn_in.draws))
    placement = fedmcmc.Placement()
    if part == slice(None):
        start = switch(state)
    else:
        # The first seed keeps the key with which all seeds would run together.
        key = jax.random.fold_in(key, part.start) if part.start else key
        store = fedmcmc.HostStore()
        start = store.start(lambda ids: switch(state, clients=ids), data.num_clients)
        placement = fedmcmc.Placement(client_store=store)
    try:
        run = fedmcmc.sample(key, kernel, data, state=start, placement=placement, **common)
        after = run.draws
        final_state = run.state if part == slice(None) else run.state._replace(clients=())
    except fedmcmc.NonFiniteError as error:
        after = error.samples.draws if error.samples is not None else {}
        final_state = None
    scores = {
        name: np.concatenate([values, after[name]], axis=1) if name in after else values
        for name, values in before.items()
    }
    return Curve(scores, final_state)


def _joined(curves: Sequence[Curve]) -> Curve:
    """Return runs of some seeds each as one curve, which is as long as the shortest."""
    num_rounds = min(curve.scores["proper"].shape[1] for curve in curves)
    scores = {
        name: np.concatenate([curve.scores[name][:, :num_rounds] for curve in curves])
        for name in curves[0].scores
    }
    states = [curve.state for curve in curves]
    is_lost = any(state is None for state in states)
    return Curve(scores, None if is_lost else jax.tree.map(lambda *x: jnp.concatenate(x), *states))


def _collect(score_fn: Any, state: Any, info: Any) -> dict[str, Array]:
    proper = jnp.array(True) if trees.is_empty(info.server) else info.server.proper
    fitted = jnp.mean(info.clients.usable, dtype=jnp.float32)
    scores = score_fn(state.broadcast.position, state.broadcast.round)
    return {**scores, "fitted": fitted, "proper": proper}


def num_lost(curve: Curve, num_burnin: int) -> dict[str, Any]:
    """Return the number of improper rounds and the share of improper fits after the burn-in."""
    proper, fitted = (curve.scores[name][:, num_burnin:] for name in ("proper", "fitted"))
    return {"improper_rounds": (~proper).sum(), "lost_fits": 1 - fitted.mean()}


def rows_by_round(curve: Curve, metric: str, values: np.ndarray, window: int) -> list[Row]:
    """Return means over seeds of `values`, ``[num_seeds, num_rounds]``, for each round.

    If there are several seeds, return also standard deviations of running means of `window` rounds.
    """
    points = {metric: (1, values.mean(axis=0))}
    if len(values) > 1:
        views = np.lib.stride_tricks.sliding_window_view(values, window, axis=1)
        points[f"{metric}_sd"] = (window, views.mean(axis=-1).std(axis=0, ddof=1))
    return [
        Row(curve.method, name, value, curve.settings, x=float(x))
        for name, (start, by_round) in points.items()
        for x, value in enumerate(by_round, start)
    ]


def averaged(
    optimizer: optax.GradientTransformation, cohort_size: int
) -> optax.GradientTransformation:
    """Return an optimizer of the cohort's mean change, for kernels that give it the sum."""
    return optax.chain(optax.scale(1 / cohort_size), optimizer)


def uniform_prior(posterior: fedmcmc.Posterior) -> fedmcmc.Gaussian:
    """Return the improper uniform density as a Gaussian."""
    return fedmcmc.Gaussian.uniform(jax.eval_shape(posterior.init_fn, jax.random.key(0)))


def natural_gradients(
    mean: Any, covariance: float, weight_decay: float, scale: float, **settings: Any
) -> inference.Inference:
    """Return `fedmcmc.inference.ngvi` that starts where the released code does."""
    start = max(covariance / scale - weight_decay, 0.0)
    return inference.ngvi(mean, initial=start, scale=scale, **settings)
