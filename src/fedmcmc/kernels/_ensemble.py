"""Ensembles: clients train models, the server fits a distribution to them and draws from it.

Source: Chen and Chao (2021), FedBE: making Bayesian model ensemble applicable to federated
learning.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    FederatedState,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Posterior,
    StepInfo,
    as_functions,
    register_dataclass,
)
from fedmcmc.dynamics import Length, Training, training
from fedmcmc.kernels._shared import LocalTraining, expect_blocks, is_plain, name_of, report
from fedmcmc.participation import full
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import integers_below, normals, realize_normals

if TYPE_CHECKING:
    import optax

Distiller = Callable[[Array, ArrayTree, ArrayTree], ArrayTree]
"""``(rng_key, mean, members) -> position``, members with leaves ``[num_models, *event]``."""


class Ensemble:
    """A distribution of models, fitted to sums over the clients' models.

    A client tells its model as `moved`, how far its training took it from the broadcast position;
    its weight is inside the message, so that whoever takes part, a mean is one of those who did.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def init(self, position: ArrayTree) -> Any:
        """Return what is fitted before the first round.

        It has a ``.mean``, the weighted mean of the clients' models.
        """
        raise NotImplementedError

    def prepare(self, rng_key: Array) -> ArrayTree:
        """Return all that is random in a client's message."""
        return ()

    def message(self, draws: ArrayTree, share: Array, moved: ArrayTree) -> ArrayTree:
        """Return a client's message, to be summed over clients."""
        raise NotImplementedError

    def fit(self, position: ArrayTree, total: ArrayTree, previous: Any) -> Any:
        """Return what is fitted to a sum, `previous` again where the weights sum to zero."""
        raise NotImplementedError

    def draw(self, rng_key: Array, fitted: Any) -> ArrayTree:
        """Return one member."""
        raise NotImplementedError

    def members(self, rng_key: Array, fitted: Any) -> ArrayTree:
        """Return the members that a distiller is given, leaves ``[num_models, *event]``."""
        raise NotImplementedError


class _Moments(NamedTuple):
    weight: Array  # []
    first: ArrayTree  # weight times moved
    second: ArrayTree  # weight times moved squared


class _Gaussian(NamedTuple):
    mean: ArrayTree
    scale: ArrayTree  # standard deviations

    def member(self, drawn: ArrayTree) -> ArrayTree:
        noise = realize_normals(drawn, self.mean)
        return jax.tree.map(lambda m, s, z: m + s * z, self.mean, self.scale, noise)


@register_dataclass
@dataclass(frozen=True, eq=False)
class GaussianEnsemble(Ensemble):
    """Independent normal coordinates; see `gaussian_ensemble`."""

    num_models: int = field(metadata={"static": True})

    def init(self, position: ArrayTree) -> _Gaussian:
        return _Gaussian(position, trees.zeros_like(position))

    def message(self, draws: ArrayTree, share: Array, moved: ArrayTree) -> _Moments:
        """Return the client's terms of weighted moments."""
        squares = jax.tree.map(jnp.square, moved)
        return _Moments(jnp.asarray(share), trees.scale(share, moved), trees.scale(share, squares))

    def fit(self, position: ArrayTree, total: _Moments, previous: _Gaussian) -> _Gaussian:
        known = total.weight > 0
        per_weight = 1 / jnp.where(known, total.weight, 1)
        mean = trees.scale(per_weight, total.first)
        # Rounding, or a compressor's noise, may leave a variance of zero below zero.
        scale = jax.tree.map(
            lambda square, m: jnp.sqrt(jnp.maximum(square - m * m, 0)),
            trees.scale(per_weight, total.second),
            mean,
        )
        return trees.select(known, _Gaussian(trees.add(position, mean), scale), previous)

    def draw(self, rng_key: Array, fitted: _Gaussian) -> ArrayTree:
        return fitted.member(rng_key)

    def members(self, rng_key: Array, fitted: _Gaussian) -> ArrayTree:
        return jax.vmap(fitted.member)(normals(rng_key, fitted.mean, self.num_models))


def gaussian_ensemble(num_models: int = 10) -> Ensemble:
    """Fit a normal distribution with the mean and the diagonal covariance of the clients' models.

    Both are weighted by the clients' shares of the rows: ``mean = sum_i p_i w_i`` and
    ``variance = sum_i p_i (w_i - mean)^2``, where shares are rescaled to sum to one over those
    who take part. Members are drawn anew with every key.

    Parameters
    ----------
    num_models
        Members that a distiller is given.

    Notes
    -----
    The server sees sums of first and second moments about the round's start. In float32 the
    standard deviation of a coordinate is lost where it is below about 3e-4 of how far the mean
    moved in the round.

    Examples
    --------
    >>> family = gaussian_ensemble()
    >>> total = family.message((), 0.5, jnp.array([1.0])), family.message((), 0.5, jnp.array([3.0]))
    >>> fitted = family.fit(jnp.zeros(1), trees.add(*total), family.init(jnp.zeros(1)))
    >>> fitted.mean.tolist(), fitted.scale.tolist()
    ([2.0], [1.0])
    """
    return GaussianEnsemble(positive_integer(num_models, "num_models"))


class _Sums(NamedTuple):
    weight: Array  # [1 + num_models]
    moved: ArrayTree  # leaves [1 + num_models, *event], weight times moved


class _Members(NamedTuple):
    mean: ArrayTree
    models: ArrayTree  # leaves [num_models, *event]


@register_dataclass
@dataclass(frozen=True, eq=False)
class DirichletEnsemble(Ensemble):
    """Means of the clients' models with random weights; see `dirichlet_ensemble`."""

    concentration: Array
    num_models: int = field(metadata={"static": True})

    def init(self, position: ArrayTree) -> _Members:
        num = self.num_models
        models = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape)), position)
        return _Members(position, models)

    def prepare(self, rng_key: Array) -> Array:
        """Draw the client's weight in each member."""
        return jax.random.gamma(rng_key, self.concentration, (self.num_models,))

    def message(self, draws: Array, share: Array, moved: ArrayTree) -> _Sums:
        """Return the client's terms of the members and of the mean."""
        # The mean is the member whose weights are not random.
        weight = trees.cast(share, draws) * jnp.concatenate([jnp.ones_like(draws[:1]), draws])
        return _Sums(weight, jax.tree.map(lambda x: _column(weight, x[None]) * x[None], moved))

    def fit(self, position: ArrayTree, total: _Sums, previous: _Members) -> _Members:
        """Divide by the weights, member by member."""
        known = total.weight > 0
        per_weight = 1 / jnp.where(known, total.weight, 1)

        def leafwise(at: Array, moved: Array, mean: Array, models: Array) -> Array:
            old = jnp.concatenate([mean[None], models])
            new = at[None] + _column(per_weight, moved) * moved
            return jnp.where(_column(known, old), new, old)

        new = jax.tree.map(leafwise, position, total.moved, previous.mean, previous.models)
        return _Members(jax.tree.map(lambda x: x[0], new), jax.tree.map(lambda x: x[1:], new))

    def draw(self, rng_key: Array, fitted: _Members) -> ArrayTree:
        chosen = integers_below(rng_key, jnp.asarray(self.num_models), ())
        return jax.tree.map(lambda x: x[chosen], fitted.models)

    def members(self, rng_key: Array, fitted: _Members) -> ArrayTree:
        return fitted.models


def _column(vector: Array, leaf: Array) -> Array:
    return trees.cast(vector, leaf).reshape(vector.shape + (1,) * (leaf.ndim - 1))


def dirichlet_ensemble(concentration: float | Array = 0.5, num_models: int = 10) -> Ensemble:
    """Make members that are means of the clients' models with random weights.

    Member ``m`` is ``sum_i g_im p_i w_i / sum_i g_im p_i`` with shares ``p_i`` of the rows and
    ``g_im ~ Gamma(concentration)``, drawn by client ``i``: proportional to a Dirichlet vector.

    Parameters
    ----------
    concentration
        Of the symmetric Dirichlet distribution, ``alpha``. Small ones make members that are close
        to single clients' models, large ones members close to the mean.
    num_models
        Members per round. A client sends one weighted model for each, and one for the mean.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> family = dirichlet_ensemble(0.5, num_models=3)
    >>> draws = family.prepare(jax.random.key(0))
    >>> family.message(draws, 0.5, jnp.zeros(2)).moved.shape
    (4, 2)
    """
    alpha = schedules.number(concentration, "concentration", minimum=0.0, strict=True)
    if isinstance(alpha, schedules.Scheduled):
        raise TypeError("concentration must be a number; a schedule is not supported.")
    return DirichletEnsemble(alpha, positive_integer(num_models, "num_models"))


class _Draws(NamedTuple):
    gradient: ArrayTree  # leaves [num_local_steps, ...]
    family: ArrayTree


def _name(kernel: "EnsembleKernel") -> str:
    return "fed_be" if is_plain(kernel.estimator) else "ensemble"


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class EnsembleKernel(LocalTraining):
    """Clients train models, the server fits a distribution to them; see `ensemble`."""

    family: Ensemble
    training: Training
    distill: Any

    disclosure = Disclosure(
        "a model trained on the rows of this site, times the weight of the site, and the squares "
        "of its numbers"
    )

    @property
    def name(self) -> str:
        return name_of(self, _name)

    def first_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> Any:
        return self.family.init(position)

    def message_like(self, like: Broadcast) -> ArrayTree:
        key = jax.eval_shape(lambda: jax.random.key(0))
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))

        def message(rng_key: Array, share_: Array, moved: ArrayTree) -> ArrayTree:
            return self.family.message(self.family.prepare(rng_key), share_, moved)

        return jax.eval_shape(message, key, share, trees.shapes_of(like.position))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _Draws:
        family_key, gradient_key = jax.random.split(rng_key)
        gradient = super().prepare(gradient_key, like, client)
        return _Draws(gradient, self.family.prepare(family_key))

    def step(
        self, draws: _Draws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        trained, client_state, down = self.train(draws.gradient, broadcast, client_state, client)
        moved = trees.subtract(trained.position, broadcast.position)
        message = self.family.message(draws.family, client.share, moved)
        return message, client_state, report(message, trained.mean_square, bits_down=down)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return rng_key  # as it is: members and distillation draw from it

    def aggregate(
        self, rng_key: Array, broadcast: Broadcast, server_state: Any, total: ArrayTree
    ) -> tuple[Broadcast, Any, ArrayTree]:
        """Fit the distribution, and broadcast its mean or what is distilled of its members."""
        family = self.family
        fitted = family.fit(broadcast.position, total, server_state)
        position = fitted.mean
        if self.distill is not None:
            members_key, distill_key = jax.random.split(rng_key)
            members = family.members(members_key, fitted)
            position = self.distill(distill_key, fitted.mean, members)
        return self.next_broadcast(broadcast, position), fitted, ()

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        return self.family.draw(rng_key, state.server)


def ensemble(
    posterior: Posterior,
    estimator: GradientEstimator,
    family: Ensemble,
    *,
    client_optimizer: "optax.GradientTransformation",
    num_local_steps: int,
    learning_rate: Number = 1.0,
    participation: Participation | None = None,
    distill: Distiller | None = None,
) -> FederatedKernel:
    """Build a kernel whose clients train models and whose server fits a distribution to them.

    In a round each client of the cohort takes `num_local_steps` of its optimizer from the
    broadcast position and sends what `family` needs of its model. The kernel's draws are members
    of the fitted ensemble.

    Parameters
    ----------
    posterior
        The model. A client minimizes minus the mean over its rows of the log likelihood and of
        its share of the log prior (``log prior / num_rows``, the same for all).
    estimator
        Of the gradient of a client's log likelihood.
    family
        `gaussian_ensemble` or `dirichlet_ensemble`.
    client_optimizer
        As from optax. Its state starts anew in every round, so a schedule in it counts local
        steps.
    num_local_steps
        Steps of the optimizer per round.
    learning_rate
        Multiplies the optimizer's updates: a number, or a schedule of the round. Another one
        needs no new compilation, another optimizer does.
    participation
        Everyone by default. Messages are weighted by one over the probability of taking part,
        which cancels where all have the same: means are over those who take part. If nobody
        does, the ensemble stays.
    distill
        ``(rng_key, mean, members) -> position`` makes one model of the ensemble, which is
        broadcast next; see `fedmcmc.distillation`. By default that is the weighted mean of the
        clients' models, as in federated averaging.

    Returns
    -------
    FederatedKernel
        ``state.server`` is the fitted ensemble: ``.mean``, and ``.scale`` or ``.models``. Its
        members are not those of the clients themselves, which the server never sees.

    Raises
    ------
    TypeError
        If `client_optimizer` is not one of optax, or `distill` not a function.
    ValueError
        On numbers out of range, and from `init` where they do not fit the data.

    Notes
    -----
    The weights of a weighted mean are part of a message. A compressor that treats a message as
    one vector adds noise to them too, and a quotient of two sums with noise has a bias of second
    order; with ``quantize(num_levels, per_leaf=True)`` the one weight of the Gaussian ensemble
    crosses exactly, and its mean is unbiased. A Dirichlet member's weight is drawn, may be small,
    and stands in the denominator: compressed coarsely, members spread much wider than uncompressed
    ones, and one whose weights are all rounded to zero stays that of the round before.
    """
    if not isinstance(family, Ensemble):
        raise TypeError(
            "family must be an Ensemble (gaussian_ensemble, dirichlet_ensemble), got "
            f"{type(family).__name__}."
        )
    if distill is not None and not callable(distill):
        raise TypeError(f"distill must be a function or None, got {type(distill).__name__}.")
    participation = full() if participation is None else participation
    expect_blocks(posterior, estimator, participation)
    length = Length(1, num_steps=positive_integer(num_local_steps, "num_local_steps"))
    return as_functions(
        EnsembleKernel(
            posterior,
            estimator,
            participation,
            family,
            training(client_optimizer, length, learning_rate, name="client_optimizer"),
            distill,
        )
    )
