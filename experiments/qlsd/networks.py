"""What the two experiments with networks share: settings, start, runs, predictions."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fedmcmc
from experiments import spreading
from fedmcmc import Placement, metrics
from fedmcmc.interop.flax import predictive
from fedmcmc.pytrees import convolutions, trees

__all__ = [
    "Result",
    "Run",
    "Settings",
    "adam",
    "at_start",
    "execute",
    "make",
    "predict",
    "rounds",
    "warm_start",
]

ROWS_AT_A_TIME = 1000  # of a prediction
Prediction = Callable[[Any, tuple[Any, ...]], Array]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of both; the defaults are the paper's where it states them, but for the start.

    Attributes
    ----------
    num_rows, num_test
        Training and test images, zero for all there are.
    prior_scale
        Standard deviation of the normal prior of every parameter: variance 1/5.
    step_size
        ``gamma``, for gradients that are sums over rows.
    num_levels
        ``s`` of the quantiser.
    refresh_every
        Rounds between snapshots, ``l``; lost, 100 as in the paper's other experiments.
    num_active
        Clients a round with partial participation (PP).
    num_rounds, num_burnin, thinning
        In iterations: a round of FedBE and FSGLD counts as many as it has local steps.
    sgld_rounds, sgld_burnin, sgld_thinning
        Of the methods that know no clients.
    fed_be_models, concentration
        Of FedBE; not stated.
    num_warm_steps, warm_learning_rate
        Adam's from the module's own random weights, on all rows together: where every method
        starts. The paper (S5.3) starts at a trained network of pytorchcv on CIFAR-10 and at
        PyTorch's random weights on MNIST; zero steps start at the module's random weights.
    num_bins
        Of the expected calibration error.
    convolution
        ``"lax"``, ``"patches"`` or ``"banded"``, see `experiments.models.Conv`.
    """

    seed: int = 0
    num_clients: int = 20
    num_rows: int = 0
    num_test: int = 0
    prior_scale: float = 0.2**0.5
    batch_size: int = 64
    step_size: float = 1e-7
    num_levels: int = 256
    refresh_every: int = 100
    num_active: int = 5
    num_rounds: int = 100_000
    num_burnin: int = 10_000
    thinning: int = 500
    sgld_rounds: int = 937_500
    sgld_burnin: int = 93_750
    sgld_thinning: int = 937
    fed_be_learning_rate: float = 1e-2
    fed_be_local_steps: int = 250
    fed_be_models: int = 10
    concentration: float = 0.5
    fsgld_local_steps: int = 16
    num_warm_steps: int = 10_000
    warm_learning_rate: float = 1e-3
    num_bins: int = 20
    convolution: str = "lax"

    def __post_init__(self) -> None:
        at_least_zero = ("seed", "num_rows", "num_test", "num_burnin", "sgld_burnin")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in (*at_least_zero, "num_warm_steps") else 1
            if item.type is int and value < least:
                raise ValueError(f"{item.name} must be at least {least}, got {value}.")
            if item.type is float and not value > 0:
                raise ValueError(f"{item.name} must be positive, got {value}.")
        if self.num_active > self.num_clients:
            raise ValueError(
                f"num_active must be at most num_clients={self.num_clients}, got {self.num_active}."
            )
        if self.convolution not in ("lax", "patches", "banded"):
            raise ValueError(
                f"convolution must be 'lax', 'patches' or 'banded', got {self.convolution!r}."
            )
        for local_steps in (1, self.fed_be_local_steps, self.fsgld_local_steps):
            rounds(self, local_steps)
        if self.sgld_rounds - self.sgld_burnin < self.sgld_thinning:
            raise ValueError(
                f"sgld_rounds must exceed sgld_burnin={self.sgld_burnin} by at least "
                f"sgld_thinning={self.sgld_thinning}, got {self.sgld_rounds}."
            )

    @property
    def pooled_rounds(self) -> tuple[int, int, int]:
        """Rounds, burn-in and thinning of the methods that know no clients."""
        return self.sgld_rounds, self.sgld_burnin, self.sgld_thinning


class Run(NamedTuple):
    """A method: its kernel, and rounds, burn-in and thinning."""

    kernel: fedmcmc.FederatedKernel
    rounds: tuple[int, int, int]


class Result(NamedTuple):
    """What became of a run.

    `probabilities` are the averages over draws, one array ``[num, num_classes]`` a set of inputs,
    empty where the chain turned non-finite in the round `diverged`. `relative_bits` is the size
    of a client's message over that of a position in single precision. `at_mean` are probabilities
    of the one network whose weights are the draws' mean, for the first set of inputs.
    """

    probabilities: list[np.ndarray]
    num_draws: int
    relative_bits: float
    diverged: int | None = None
    at_mean: np.ndarray | None = None


def rounds(settings: Settings, local_steps: int) -> tuple[int, int, int]:
    """Return rounds, burn-in and thinning of a method with so many local steps."""
    num_rounds, burnin = settings.num_rounds // local_steps, settings.num_burnin // local_steps
    thinning = max(settings.thinning // local_steps, 1)
    if num_rounds - burnin < thinning:
        raise ValueError(
            f"num_rounds must leave a draw after num_burnin={settings.num_burnin} also in rounds "
            f"of {local_steps} iterations, got {settings.num_rounds}."
        )
    return num_rounds, burnin, thinning


def make(
    module: Any, data: fedmcmc.FederatedData, prior_scale: float
) -> tuple[fedmcmc.Posterior, Prediction]:
    """Return the posterior of a flax module, and what gives probabilities ``[n, num_classes]``."""
    # The module's shapes need one row; a check on rows alone is the module's own tests' business.
    example = jax.tree.map(lambda leaf: leaf[:2], data.client_rows(0))
    posterior = fedmcmc.from_flax(
        module,
        example=tuple(example),
        prior_scale=prior_scale,
        likelihood="categorical",
        inputs=0,
        outcome=1,
        check=False,
    )
    return posterior, predictive(module, likelihood="categorical", inputs=0)


def warm_start(
    rng_key: Array, settings: Settings, posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData
) -> Any:
    """Return where all chains start: Adam's maximum of the posterior of all rows, about."""
    init_key, run_key = jax.random.split(rng_key)
    position = posterior.init_fn(init_key)
    if not settings.num_warm_steps:
        return position
    train = partial(adam, settings.num_warm_steps, settings.batch_size)
    fn = jax.jit(convolutions.canonical(train))
    rate = jnp.float32(settings.warm_learning_rate)
    return fn(run_key, posterior, data.pooled().rows, position, rate)


def adam(
    num_steps: int,
    batch_size: int,
    rng_key: Array,
    posterior: fedmcmc.Posterior,
    rows: Any,
    position: Any,
    learning_rate: Array,
) -> Any:
    """Return where Adam arrives from `position`, on the log posterior of all rows, about."""
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps))

    def loss(position_: Any, batch: Any) -> Array:
        mean = jnp.mean(posterior.loglikelihood_fn(position_, batch))
        return -mean - posterior.logprior_fn(position_) / num_rows

    def step(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], None]:
        position_, state = carry
        chosen = jax.random.randint(key, (batch_size,), 0, num_rows)
        gradient = jax.grad(loss)(position_, jax.tree.map(lambda leaf: leaf[chosen], rows))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(position_, updates), state), None

    keys = jax.random.split(rng_key, num_steps)
    return jax.lax.scan(step, (position, optimizer.init(position)), keys)[0][0]


def execute(
    rng_key: Array,
    run: Run,
    data: fedmcmc.FederatedData,
    start: Any,
    predict_fn: Prediction,
    inputs: list[np.ndarray],
    placement: Placement = spreading.ONE_DEVICE,
) -> Result:
    """Run a method and average its draws' predictions for every set of inputs."""
    num_rounds, burnin, thinning = run.rounds
    try:
        samples = spreading.sample(
            rng_key,
            run.kernel,
            data,
            start,
            num_rounds=num_rounds,
            num_burnin=burnin,
            thinning=thinning,
            placement=placement,
            progress=False,
        )
    except fedmcmc.NonFiniteError as error:
        return Result([], 0, float("nan"), error.round)
    size = trees.num_elements(start)
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=(0, 1), keepdims=True), samples.draws)
    bits = np.asarray(samples.info["bits_up"], np.float64).sum()
    messages = np.asarray(samples.info["num_active"], np.float64).sum()
    return Result(
        [predict(predict_fn, samples.draws, x) for x in inputs],
        samples.num_draws,
        float(bits / messages / (32 * size)),
        at_mean=predict(predict_fn, mean, inputs[0]),
    )


def at_start(predict_fn: Prediction, start: Any, inputs: list[np.ndarray]) -> Result:
    """Return the predictions of the one network from which all start."""
    draws = jax.tree.map(lambda leaf: leaf[None, None], start)
    return Result([predict(predict_fn, draws, x) for x in inputs], 1, 0.0)


def predict(predict_fn: Prediction, draws: Any, inputs: np.ndarray) -> np.ndarray:
    """Return the average over draws (leaves ``[num_chains, num_draws, ...]``), a block at a time.

    The last block is filled up with zeros, so that all run one program.
    """
    size = min(ROWS_AT_A_TIME, len(inputs))
    padded = np.concatenate([inputs, np.zeros((-len(inputs) % size, *inputs.shape[1:]), "f4")])
    blocks = [
        np.asarray(metrics.predictive(predict_fn, draws, (jnp.asarray(block),), sample_axes=2))
        for block in np.split(padded, len(padded) // size)
    ]
    return np.concatenate(blocks)[: len(inputs)]
