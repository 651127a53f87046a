"""Client updates per second of FedAvg and of FedJAX, on softmax regression and an MLP.

Clients are computed in three ways, because the fastest way depends on the model: together (the
default of `fedmcmc.sample` on one device), one by one, and spread over devices (one per core).
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedmcmc
from benchmarks.timing import compare, row

CLIENTS, DIM, CLASSES, HIDDEN = 500, 784, 10, 126
BATCH, RATE = 20, 0.05
UPDATES, FEDJAX_UPDATES = 7_000, 1_000
# FedJAX is not a dependency, because it requires old versions of packages that we need.
INSTALL = "pip install --no-deps fedjax==0.0.17 && pip install dm-haiku msgpack requests"


class Model(NamedTuple):
    start: dict[str, jax.Array]
    loglikelihood: Callable[[Any, Any], jax.Array]
    goal: float


def softmax_regression() -> Model:
    return Model(
        {"w": jnp.zeros((DIM, CLASSES)), "b": jnp.zeros(CLASSES)},
        lambda theta, rows: _categorical(rows["x"] @ theta["w"] + theta["b"], rows["y"]),
        goal=3.0,
    )


def mlp() -> Model:
    rng = np.random.default_rng(1)
    start = {
        "w1": rng.normal(size=(DIM, HIDDEN)) / np.sqrt(DIM),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(size=(HIDDEN, CLASSES)) / np.sqrt(HIDDEN),
        "b2": np.zeros(CLASSES),
    }

    def loglikelihood(theta: Any, rows: Any) -> jax.Array:
        hidden = jax.nn.relu(rows["x"] @ theta["w1"] + theta["b1"])
        return _categorical(hidden @ theta["w2"] + theta["b2"], rows["y"])

    return Model({k: jnp.asarray(v, jnp.float32) for k, v in start.items()}, loglikelihood, 1.2)


def _categorical(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return chosen[:, 0]


def federation(num_clients: int = CLIENTS) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(n, DIM)).astype(np.float32),
            "y": rng.integers(0, CLASSES, n).astype(np.int32),
        }
        for n in rng.integers(50, 151, num_clients)
    ]


def ours(
    model: Model,
    data: fedmcmc.FederatedData,
    cohort_size: int | None,
    rounds: int,
    batch_size: int | None = BATCH,
    placement: fedmcmc.Placement | None = None,
) -> Callable[[], Any]:
    posterior = fedmcmc.Posterior(lambda theta: jnp.zeros(()), model.loglikelihood)
    kernel = fedmcmc.fed_avg(
        posterior,
        client_optimizer=optax.sgd(RATE),
        num_local_epochs=1,
        batch_size=batch_size,
        cohort_size=cohort_size,
    )
    # Keep one draw, because FedJAX keeps only the last parameters.
    return lambda: (
        fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            model.start,
            num_rounds=rounds,
            thinning=rounds,
            progress=False,
            placement=placement,
        ).draws
    )


def import_fedjax() -> ModuleType | None:
    # FedJAX 0.0.17 calls `jax.tree_map`, which newer versions of JAX lack. Restore it for this
    # process.
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map
    try:
        import fedjax
        import fedjax.algorithms.fed_avg
    except ModuleNotFoundError as error:
        print(f"FedJAX is skipped ({error}). To compare with it: {INSTALL}")
        return None
    return fedjax


def theirs(
    fedjax: ModuleType,
    model: Model,
    clients: list[dict[str, np.ndarray]],
    cohort_size: int,
    rounds: int,
    batch_size: int = BATCH,
) -> Callable[[], Any]:
    """Return a function that runs FedJAX as documented: a sampler, and the default backend, jit."""
    data = fedjax.InMemoryFederatedData({f"{i:04d}": rows for i, rows in enumerate(clients)})
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.grad(lambda theta, rows, rng_key: -model.loglikelihood(theta, rows)),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=batch_size),
    )

    def run() -> Any:
        sampler = fedjax.client_samplers.UniformGetClientSampler(data, cohort_size, seed=0)
        state = algorithm.init(model.start)
        for _ in range(rounds):
            state, _ = algorithm.apply(state, sampler.sample())
        return state.params

    return run


def check(fedjax: ModuleType, model: Model) -> None:
    """Compare parameters after rounds with full batches, the only case without randomness."""
    # All clients have the same size, because FedJAX has one batch size for all clients.
    clients = [{k: leaf[:50] for k, leaf in rows.items()} for rows in federation(4)]
    data = fedmcmc.FederatedData.from_clients(clients)
    our_parameters = jax.tree.map(lambda leaf: leaf[0, -1], ours(model, data, None, 3, None)())
    their_parameters = theirs(fedjax, model, clients, 4, 3, 50)()
    for name, leaf in their_parameters.items():
        np.testing.assert_allclose(our_parameters[name], leaf, rtol=1e-4, atol=1e-4)
    changes = [jnp.abs(leaf - model.start[name]).max() for name, leaf in their_parameters.items()]
    assert float(max(changes)) > 1e-3


def bench() -> None:
    """Print the rows; several devices add rows."""
    fedjax, clients = import_fedjax(), federation()
    data = fedmcmc.FederatedData.from_clients(clients)
    placements = {
        "clients together": fedmcmc.Placement(),
        "clients one by one": fedmcmc.Placement(clients_at_a_time=1),
    }
    if jax.device_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("clients",))
        # Devices exchange their sums instead of every message.
        placements["clients over devices"] = fedmcmc.Placement(mesh=mesh, totals="psum")
    for name, model in {"softmax regression": softmax_regression(), "MLP": mlp()}.items():
        if fedjax is not None:
            check(fedjax, model)
        for cohort_size in (10, 100):
            # Run many rounds of ours, because the first segment of a run is not typical.
            rounds, fedjax_rounds = UPDATES // cohort_size, FEDJAX_UPDATES // cohort_size
            updates = dict.fromkeys(placements, rounds * cohort_size)
            work = {
                key: ours(model, data, cohort_size, rounds, placement=placement)
                for key, placement in placements.items()
            }
            if fedjax is not None:
                work["FedJAX"] = theirs(fedjax, model, clients, cohort_size, fedjax_rounds)
                updates["FedJAX"] = fedjax_rounds * cohort_size
            _print_rows(f"{name}, {cohort_size} per round", model.goal, work, updates, placements)


def _print_rows(
    name: str, goal: float, work: dict[str, Any], updates: dict[str, int], placements: Any
) -> None:
    seconds = compare(work, repeats=3)
    rates = {key: updates[key] / s for key, s in seconds.items()}
    unit = "updates/s"
    if "FedJAX" not in rates:
        print(f"FedAvg, {name}: over clients together")
        for key in placements:
            print(row(f"  {key}", rates[key], unit, rates[key] / rates["clients together"], ""))
        return
    print(row(f"FedAvg, {name}: FedJAX", rates["FedJAX"], unit, 1.0, ""))
    for key in placements:
        ratio = rates[key] / rates["FedJAX"]
        print(row(f"  {key}, over FedJAX", rates[key], unit, ratio, f"goal: at least {goal:g}"))


if __name__ == "__main__":
    fedmcmc.use_all_cores()
    bench()
