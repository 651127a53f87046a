"""Consensus: each client moves a local position, tied to the server's position by a quadratic.

Source: Vono et al. (2019) and Vono et al. (2021) for the augmented density; Plassier et al. (2021)
for the sampler. On Gaussian targets the server's and the clients' positions together follow one
linear recursion with Gaussian noise.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.dynamics import Momentum, independent_momentum
from fedmcmc.gradients import Noisy, prior_share
from fedmcmc.kernels._shared import ClientDraws, LocalLangevin, expect_blocks, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    PerClient,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)


class _ConsensusState(NamedTuple):
    position: ArrayTree
    estimator: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Consensus(LocalLangevin):
    """Clients move local positions tied to the server's position; see `consensus`."""

    step_size: Number
    tolerance: Number
    temperature: Number
    num_local_steps: int = field(metadata={"static": True})
    momentum: Momentum  # correlation of the clients' noise

    traits = replace(LocalLangevin.traits, has_local_steps=True)
    disclosure = Disclosure(
        "the difference between the site's own chain and the chain of the server"
    )

    @property
    def base_name(self) -> str:
        return "consensus" if isinstance(self.estimator, Noisy) else "dg_sgld"

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> Array:
        """Return the number of clients."""
        for name in ("step_size", "tolerance"):
            number = getattr(self, name)
            if isinstance(number, PerClient) and number.values.shape[0] != federation.num_clients:
                raise ValueError(
                    f"{name} has {number.values.shape[0]} entries, but the data has "
                    f"{federation.num_clients} clients."
                )
        return jnp.asarray(float(federation.num_clients))

    def client_init(self, broadcast: Broadcast, client: Client) -> _ConsensusState:
        return _ConsensusState(broadcast.position, super().client_init(broadcast, client))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ClientDraws:
        draws = super().prepare(rng_key, like, client)
        return draws._replace(noise=()) if self.momentum.parts == "shared" else draws

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return self.momentum.prepare_shared(rng_key, like.position, self.num_local_steps)

    def step(
        self,
        draws: ClientDraws,
        broadcast: Broadcast,
        client_state: _ConsensusState,
        client: Client,
    ) -> tuple[ArrayTree, _ConsensusState, StepInfo]:
        estimate, estimator_state, down = self.begin(broadcast, client_state.estimator, client)
        step_size = _value(self.step_size, broadcast.round, client)
        pull = 1 / _value(self.tolerance, broadcast.round, client)
        temperature = schedules.value(self.temperature, broadcast.round)

        def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            gradient = estimate(drawn, position)
            prior = prior_share(client, jax.grad(self.posterior.logprior_fn)(position))
            gap = trees.subtract(broadcast.position, position)
            return trees.add_scaled(trees.add(gradient, prior), pull, gap)

        momentum, correlation = self.momentum, self.momentum.correlation(broadcast.round)

        def noise_fn(noise: tuple[ArrayTree, ArrayTree], like: ArrayTree) -> ArrayTree:
            return momentum.combine(*noise, jnp.ones(()), correlation, like)

        position, mean_square, _ = self.move(
            gradient_fn,
            draws._replace(noise=(draws.noise, broadcast.shared)),
            client_state.position,
            step_size,
            temperature,
            noise_fn=noise_fn,
        )
        message = trees.scale(pull, trees.subtract(position, broadcast.position))
        info = report(message, mean_square, bits_down=down)
        return message, _ConsensusState(position, estimator_state), info

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return realize_normals(rng_key, like.position)

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: Array, total: ArrayTree
    ) -> tuple[Broadcast, Array, ArrayTree]:
        """Draw the server's position given the clients' positions."""
        tolerance = self.tolerance
        if isinstance(tolerance, PerClient):
            variance = 1 / jnp.sum(1 / tolerance.values)
        else:
            variance = schedules.value(tolerance, broadcast.round) / server_state
        temperature = schedules.value(self.temperature, broadcast.round)
        position = trees.add_scaled(broadcast.position, variance, total)
        noise = realize_normals(rng_key, position)
        position = trees.add_scaled(position, jnp.sqrt(variance * temperature), noise)
        return self.next_broadcast(broadcast, position), server_state, ()


def consensus(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    step_size: Number,
    num_local_steps: int,
    tolerance: Number,
    temperature: Number = 1.0,
) -> FederatedKernel:
    """Build a kernel whose clients move local positions and whose server draws their center.

    The chain of ``theta`` and one ``z_i`` per client has the density proportional to
    ``prod_i density_i(z_i) exp(-|z_i - theta|^2 / (2 tolerance_i))``, where ``density_i`` is the
    client's likelihood times its share of the prior. In a round each client takes `num_local_steps`
    Langevin steps in its ``z_i``. The server then draws ``theta`` given all ``z_i``: normal with
    precision ``Q = sum_i 1 / tolerance_i`` and mean ``theta + sum_i (z_i - theta) / tolerance_i /
    Q``. Each client sends its term of this sum.

    Parameters
    ----------
    posterior
        Model. Each client adds to its log likelihood ``size / num_rows`` of the log prior.
    estimator
        Gradient estimator for a client's log likelihood, evaluated at ``z_i``.
    step_size
        Step size of the clients: a number, a schedule of the round, or ``[num_clients]``.
    num_local_steps
        Number of Langevin steps per client and round.
    tolerance
        Variance of ``z_i`` around ``theta``, in the same forms as `step_size`.
    temperature
        Factor of the variance of all noise, at the clients and at the server.

    Returns
    -------
    FederatedKernel
        All clients take part in every round. ``state.clients.position`` holds ``z_i``, leaves
        ``[num_clients, *event]``; it starts at the first position of the chain.

    Raises
    ------
    ValueError
        If a number is out of range; from `init` if the numbers do not fit the data.
    """
    participation = full()
    expect_blocks(posterior, estimator, participation)
    return as_functions(
        Consensus(
            posterior,
            estimator,
            participation,
            _number(step_size, "step_size"),
            _number(tolerance, "tolerance"),
            schedules.number(temperature, "temperature", minimum=0.0),
            positive_integer(num_local_steps, "num_local_steps"),
            independent_momentum(),
        )
    )


def _number(x: Number, name: str) -> Any:
    """Return `x`, a positive number, a schedule, or one number per client, as leaves."""
    is_schedule = callable(x) and not isinstance(x, Array)
    array = jnp.zeros(()) if is_schedule else jnp.asarray(x)
    if array.ndim == 0:
        return schedules.number(x, name, minimum=0.0, strict=True)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.number):
        raise ValueError(
            f"{name} must be a number, a schedule of the round, or one number per client, got an "
            f"array of shape {array.shape} and dtype {array.dtype}."
        )
    if not isinstance(array, jax.core.Tracer):
        values = np.asarray(array)
        if not np.all(np.isfinite(values) & (values > 0)):
            raise ValueError(f"{name} must hold finite numbers above 0, got {values}.")
    return PerClient(array.astype(jnp.result_type(float)))


def _value(number: Number, round_: Array, client: Client) -> Array:
    return number.of(client) if isinstance(number, PerClient) else schedules.value(number, round_)
