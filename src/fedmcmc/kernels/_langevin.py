"""Langevin dynamics on a sum of gradients: clients send gradients, the server moves the chain.

On Gaussian targets a round is a random affine map with Gaussian noise, so the stationary mean and
covariance at any step size have a closed form (``docs/explanation/exact_distributions.md``).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc.dynamics import (
    Metric,
    Momentum,
    Preconditioner,
    Rms,
    independent_momentum,
    overdamped_langevin,
)
from fedmcmc.gradients import FixedPoint, Svrg, client_gradient, prior_share
from fedmcmc.kernels._shared import TemperedKernel, expect_blocks, is_plain, report
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
    Participation,
    Posterior,
    SetupPhase,
    StepInfo,
    Traits,
    as_functions,
    register_dataclass,
)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class _GradientsAt(SetupPhase):
    """Phase that sums the gradients of the clients' log likelihoods at a point."""

    posterior: Posterior
    point: ArrayTree

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        message = client_gradient(self.posterior.loglikelihood_fn, self.point, client)
        return message, client_state, report(message, trees.squared_norm(message))

    def message_like(self, like: Broadcast) -> ArrayTree:
        return trees.shapes_of(self.point)


class _LangevinServer(NamedTuple):
    at_centre: ArrayTree  # gradient of the log posterior at the center, or ()
    preconditioner: ArrayTree


class _NoisyDraws(NamedTuple):
    """Random numbers of a client that adds noise to its gradient."""

    noise: ArrayTree  # leaves [1, *event]
    gradient: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Langevin(TemperedKernel):
    """Clients send gradients, the server moves the chain; see `langevin`."""

    step_size: Number
    temperature: Number
    centre: ArrayTree  # reference point of centered gradients, or ()
    preconditioner: Preconditioner | None
    metric: Metric
    split_prior: bool = field(metadata={"static": True})
    client_noise: Momentum | None = None  # correlation of the clients' noise

    disclosure = Disclosure(
        "the gradient of the log likelihood at the position of the chain", hidden_in_sums=True
    )

    @property
    def base_name(self) -> str:
        estimator = self.estimator
        if isinstance(self.preconditioner, Rms):
            is_psgld = is_plain(estimator) and self.participation.pooled
            return "psgld" if is_psgld else "langevin"
        if isinstance(estimator, FixedPoint):
            return "lsd_star"
        if isinstance(estimator, Svrg):
            return "lsd_pp"
        return "lsd" if is_plain(estimator) else "langevin"

    @property
    def traits(self) -> Traits:  # type: ignore[override]  # the settings decide, not the class
        noisy = self.client_noise is not None
        return replace(TemperedKernel.traits, noise_in_messages=noisy)

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        if trees.is_empty(self.centre):
            return ()
        return (_GradientsAt(self.posterior, self.centre),)

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> _LangevinServer:
        at_centre: ArrayTree = ()
        for gradient in totals:
            at_centre = trees.add(gradient, jax.grad(self.posterior.logprior_fn)(self.centre))
        self.metric.check(position)
        scales: ArrayTree = ()
        if self.preconditioner is not None:
            scales = self.preconditioner.init(position, federation)
        return _LangevinServer(at_centre, scales)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        if self.client_noise is None:
            return super().prepare(rng_key, like, client)
        noise_key, gradient_key = jax.random.split(rng_key)
        noise = self.client_noise.prepare(noise_key, like.position, 1)
        return _NoisyDraws(noise, super().prepare(gradient_key, like, client))

    def prepare_shared(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        if self.client_noise is None:
            return ()
        return self.client_noise.prepare_shared(rng_key, like.position, 1)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        gradient_draws = draws if self.client_noise is None else draws.gradient
        message = estimate(gradient_draws, broadcast.position)
        if self.split_prior:
            prior = prior_share(client, self._prior_gradient(broadcast.position))
            message = trees.add(message, prior)
        info = report(message, trees.squared_norm(message), bits_down=down)
        if self.client_noise is not None:
            message = trees.add(message, self._noise_of(client, draws.noise, broadcast))
        return message, client_state, info

    def _noise_of(self, client: Client, normals: ArrayTree, broadcast: Broadcast) -> ArrayTree:
        """Return a client's noise; its sum over clients has variance ``2 T / step_size``."""
        momentum = self.client_noise
        assert momentum is not None
        position, round_ = broadcast.position, broadcast.round
        client_normals, shared = jax.tree.map(lambda leaf: leaf[0], (normals, broadcast.shared))
        share = client.share
        momenta = momentum.combine(
            client_normals, shared, share, momentum.correlation(round_), position
        )
        step_size = schedules.value(self.step_size, round_)
        temperature = schedules.value(self.temperature, round_)
        return trees.scale(share * jnp.sqrt(2 * temperature / step_size), momenta)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return () if self.client_noise is not None else realize_normals(rng_key, like.position)

    def aggregate(
        self,
        rng_key: ArrayTree,
        broadcast: Broadcast,
        server_state: _LangevinServer,
        total: ArrayTree,
    ) -> tuple[Broadcast, _LangevinServer, ArrayTree]:
        position = broadcast.position
        gradient = total
        if not self.split_prior:
            gradient = trees.add(gradient, self._prior_gradient(position))
        if not trees.is_empty(server_state.at_centre):
            gradient = trees.add(gradient, server_state.at_centre)
        step_size = schedules.value(self.step_size, broadcast.round)
        temperature = schedules.value(self.temperature, broadcast.round)
        if self.client_noise is not None:
            position = trees.add_scaled(position, step_size, gradient)
            return self.next_broadcast(broadcast, position), server_state, ()
        noise = realize_normals(rng_key, position)
        scales = server_state.preconditioner
        if self.preconditioner is None:
            position = overdamped_langevin(
                position, gradient, noise, step_size, temperature, self.metric
            )
        else:
            metric, scales = self.preconditioner.update(gradient, scales)
            temperature = self.preconditioner.temperature(temperature, broadcast.round)
            # A step along G with noise of covariance G is a plain step in other units.
            root = jax.tree.map(jnp.sqrt, metric)
            moved = overdamped_langevin(
                trees.zeros_like(position),
                jax.tree.map(jnp.multiply, root, gradient),
                noise,
                step_size,
                temperature,
            )
            position = trees.add(position, jax.tree.map(jnp.multiply, root, moved))
        moved_broadcast = self.next_broadcast(broadcast, position)
        return moved_broadcast, _LangevinServer(server_state.at_centre, scales), ()

    def _prior_gradient(self, position: ArrayTree) -> ArrayTree:
        gradient = jax.grad(self.posterior.logprior_fn)(position)
        if trees.is_empty(self.centre):
            return gradient
        return trees.subtract(gradient, jax.grad(self.posterior.logprior_fn)(self.centre))


def langevin(
    posterior: Posterior,
    estimator: GradientEstimator,
    *,
    step_size: Number,
    temperature: Number = 1.0,
    participation: Participation | None = None,
    prior: Literal["server", "split"] = "server",
    centre: ArrayTree | None = None,
    preconditioner: Preconditioner | None = None,
    metric: ArrayTree | None = None,
    noise: Literal["server", "clients"] = "server",
) -> FederatedKernel:
    """Build a kernel whose server takes Langevin steps along the sum of the clients' gradients.

    Each client of the cohort sends an estimate of the gradient of its log likelihood, weighted by
    one over its probability of taking part. A step is ``position + step_size * B gradient + sqrt(2
    * step_size * temperature) * C normal``.

    Parameters
    ----------
    posterior, estimator
        Model, and gradient estimator for a client's log likelihood.
    step_size, temperature
        Numbers or schedules of the round.
    participation
        Rule that chooses who takes part; everyone by default.
    prior
        With ``"server"`` the server adds the gradient of the prior, which is then neither
        compressed nor dropped. With ``"split"`` each client adds its share, ``size / num_rows``.
    centre
        Reference point of centered gradients (`fixed_point` with ``centred=True``). The server adds
        the sum of the clients' gradients there, from one pass over all rows.
    preconditioner
        Diagonal scale of the step, updated in each round (`fedmcmc.dynamics.preconditioners`).
    metric
        Matrix ``B = C C'``, constant: leaves shaped as the position for a diagonal, or ``[d, d]``
        over the raveled position; the identity by default. See `fedmcmc.whiten`.
    noise
        With ``"server"`` the server draws the noise. With ``"clients"`` each client adds a share
        with variance proportional to its share of the rows, which `fedmcmc.share_momentum`
        correlates. This needs full participation, no `metric` and no `preconditioner`.

    Raises
    ------
    ValueError
        If a number is out of range; from `init` if the data does not fit.
    """
    if prior not in ("server", "split"):
        raise ValueError(f'prior must be "server" or "split", got {prior!r}.')
    if metric is not None and preconditioner is not None:
        raise ValueError("Use either preconditioner= or metric=, not both.")
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    if noise not in ("server", "clients"):
        raise ValueError(f'noise must be "server" or "clients", got {noise!r}.')
    if noise == "clients":
        _check_client_noise(participation, metric, preconditioner)
    return as_functions(
        Langevin(
            posterior,
            estimator,
            participation,
            schedules.number(step_size, "step_size", minimum=0.0, strict=True),
            schedules.number(temperature, "temperature", minimum=0.0),
            () if centre is None else trees.as_floats(centre, "centre"),
            preconditioner,
            Metric.of(metric),
            prior == "split",
            independent_momentum() if noise == "clients" else None,
        )
    )


def _check_client_noise(
    participation: Participation, metric: ArrayTree, preconditioner: ArrayTree
) -> None:
    if metric is not None or preconditioner is not None:
        raise ValueError(
            'noise="clients" does not support metric= and preconditioner=: remove them, or sample '
            "in other coordinates (fedmcmc.whiten)."
        )
    if participation.may_drop or participation.cohort_size is not None or participation.pooled:
        raise ValueError(
            'noise="clients" needs the noise of all clients in every round: use full participation.'
        )
