"""Ensembles: clients train models, and the server fits a distribution of models to draw from.

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
from fedmcmc.dynamics import Length, Training, training
from fedmcmc.kernels._shared import LocalTraining, as_constant, expect_blocks, is_plain, report
from fedmcmc.participation import full
from fedmcmc.pytrees import trees
from fedmcmc.random import integers_below, normals, realize_normals
from fedmcmc.types import (
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

if TYPE_CHECKING:
    import optax

Distiller = Callable[[Array, ArrayTree, ArrayTree], ArrayTree]
"""``(rng_key, mean, members) -> position``, members with leaves ``[num_models, *event]``."""


class Ensemble:
    """Distribution of models that is fitted to sums over the clients' models.

    A client's model enters as `moved`, the displacement from the broadcast position in its
    training. The message contains the client's weight, so means are over those who took part.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def init(self, position: ArrayTree) -> Any:
        """Return the fit before the first round; its ``.mean`` is the mean of the models."""
        raise NotImplementedError

    def prepare(self, rng_key: Array) -> ArrayTree:
        """Return the random numbers of a client's message."""
        return ()

    def message(self, draws: ArrayTree, share: Array, moved: ArrayTree) -> ArrayTree:
        """Return a client's message, a term of a sum over clients."""
        raise NotImplementedError

    def fit(self, position: ArrayTree, total: ArrayTree, previous: ArrayTree) -> Any:
        """Return the fit to a sum of messages; `previous` if its weights are zero."""
        raise NotImplementedError

    def draw(self, rng_key: Array, fitted: ArrayTree) -> ArrayTree:
        """Draw a member."""
        raise NotImplementedError

    def members(self, rng_key: Array, fitted: ArrayTree) -> ArrayTree:
        """Return the members for a distiller, leaves ``[num_models, *event]``."""
        raise NotImplementedError


class _Moments(NamedTuple):
    weight: Array  # []
    moved: ArrayTree  # weight times moved
    moved_squared: ArrayTree  # weight times moved squared


class _Gaussian(NamedTuple):
    mean: ArrayTree
    scale: ArrayTree  # standard deviations

    def member(self, drawn: ArrayTree) -> ArrayTree:
        noise = realize_normals(drawn, self.mean)
        return jax.tree.map(lambda m, s, z: m + s * z, self.mean, self.scale, noise)


@register_dataclass
@dataclass(frozen=True, eq=False)
class GaussianEnsemble(Ensemble):
    """Ensemble with independent normal coordinates; see `gaussian_ensemble`."""

    num_models: int = field(metadata={"static": True})

    def init(self, position: ArrayTree) -> _Gaussian:
        return _Gaussian(position, trees.zeros_like(position))

    def message(self, draws: ArrayTree, share: Array, moved: ArrayTree) -> _Moments:
        """Return the client's terms of weighted moments."""
        squares = jax.tree.map(jnp.square, moved)
        return _Moments(jnp.asarray(share), trees.scale(share, moved), trees.scale(share, squares))

    def fit(self, position: ArrayTree, total: _Moments, previous: _Gaussian) -> _Gaussian:
        has_weight = total.weight > 0
        per_weight = 1 / jnp.where(has_weight, total.weight, 1)
        mean = trees.scale(per_weight, total.moved)
        # Rounding or the noise of a compressor can make a variance negative.
        scale = jax.tree.map(
            lambda square, m: jnp.sqrt(jnp.maximum(square - m * m, 0)),
            trees.scale(per_weight, total.moved_squared),
            mean,
        )
        return trees.select(has_weight, _Gaussian(trees.add(position, mean), scale), previous)

    def draw(self, rng_key: Array, fitted: _Gaussian) -> ArrayTree:
        return fitted.member(rng_key)

    def members(self, rng_key: Array, fitted: _Gaussian) -> ArrayTree:
        return jax.vmap(fitted.member)(normals(rng_key, fitted.mean, self.num_models))


def gaussian_ensemble(num_models: int = 10) -> Ensemble:
    """Return an ensemble with the mean and diagonal covariance of the clients' models.

    Both are weighted by the clients' shares ``p_i`` of the rows, rescaled to sum to one over those
    who take part: ``mean = sum_i p_i w_i`` and ``variance = sum_i p_i (w_i - mean)^2``.

    Parameters
    ----------
    num_models
        Number of members for a distiller.

    Notes
    -----
    The server receives sums of first and second moments about the start of the round. In float32 it
    loses standard deviations below about 3e-4 of the mean's displacement in the round.

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
    """Ensemble of means with random weights; see `dirichlet_ensemble`."""

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
        # Entry 0 is the mean, whose weights are not random.
        weight = trees.cast(share, draws) * jnp.concatenate([jnp.ones_like(draws[:1]), draws])
        return _Sums(weight, jax.tree.map(lambda x: _column(weight, x[None]) * x[None], moved))

    def fit(self, position: ArrayTree, total: _Sums, previous: _Members) -> _Members:
        """Divide each member by its weight."""
        has_weight = total.weight > 0
        per_weight = 1 / jnp.where(has_weight, total.weight, 1)

        def fit_leaf(position: Array, moved: Array, mean: Array, models: Array) -> Array:
            old = jnp.concatenate([mean[None], models])
            new = position[None] + _column(per_weight, moved) * moved
            return jnp.where(_column(has_weight, old), new, old)

        new = jax.tree.map(fit_leaf, position, total.moved, previous.mean, previous.models)
        return _Members(jax.tree.map(lambda x: x[0], new), jax.tree.map(lambda x: x[1:], new))

    def draw(self, rng_key: Array, fitted: _Members) -> ArrayTree:
        chosen = integers_below(rng_key, jnp.asarray(self.num_models), ())
        return jax.tree.map(lambda x: x[chosen], fitted.models)

    def members(self, rng_key: Array, fitted: _Members) -> ArrayTree:
        return fitted.models


def _column(vector: Array, leaf: Array) -> Array:
    return trees.cast(vector, leaf).reshape(vector.shape + (1,) * (leaf.ndim - 1))


def dirichlet_ensemble(concentration: float | Array = 0.5, num_models: int = 10) -> Ensemble:
    """Return an ensemble of means of the clients' models with random weights.

    Member ``m`` is ``sum_i g_im p_i w_i / sum_i g_im p_i`` with the shares ``p_i`` of the rows.
    Client ``i`` draws ``g_im ~ Gamma(concentration)``, so that ``g_m`` is proportional to a
    Dirichlet vector.

    Parameters
    ----------
    concentration
        Concentration of the symmetric Dirichlet distribution. With a small value members are close
        to single clients' models, with a large value close to the mean.
    num_models
        Number of members. A client sends a weighted model for each member, and one for the mean.

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
    alpha = as_constant(concentration, "concentration")
    return DirichletEnsemble(alpha, positive_integer(num_models, "num_models"))


class _EnsembleDraws(NamedTuple):
    gradient: ArrayTree  # leaves [num_local_steps, ...]
    family: ArrayTree


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class EnsembleKernel(LocalTraining):
    """Kernel that fits a distribution to the clients' trained models; see `ensemble`."""

    family: Ensemble
    training: Training
    distill: ArrayTree

    disclosure = Disclosure(
        "a model trained on the rows of this site, times the weight of the site, and the squares "
        "of its numbers"
    )

    @property
    def base_name(self) -> str:
        return "fed_be" if is_plain(self.estimator) else "ensemble"

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> Any:
        return self.family.init(position)

    def message_like(self, like: Broadcast) -> ArrayTree:
        key = jax.eval_shape(lambda: jax.random.key(0))
        share = jax.ShapeDtypeStruct((), jnp.result_type(float))
        draws = jax.eval_shape(self.family.prepare, key)
        return jax.eval_shape(self.family.message, draws, share, trees.shapes_of(like.position))

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> _EnsembleDraws:
        family_key, gradient_key = jax.random.split(rng_key)
        gradient = super().prepare(gradient_key, like, client)
        return _EnsembleDraws(gradient, self.family.prepare(family_key))

    def step(
        self, draws: _EnsembleDraws, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        trained, client_state, down = self.train(draws.gradient, broadcast, client_state, client)
        moved = trees.subtract(trained.position, broadcast.position)
        message = self.family.message(draws.family, client.share, moved)
        return message, client_state, report(message, trained.square, bits_down=down)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return rng_key  # for the members and the distiller

    def aggregate(
        self, rng_key: Array, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, Any, ArrayTree]:
        """Fit the distribution, and broadcast its mean or its distilled model."""
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

    In a round each client of the cohort takes `num_local_steps` optimizer steps from the broadcast
    position and sends the sums that `family` needs. Draws are members of the fitted ensemble,
    ``state.server`` with ``.mean``, and ``.scale`` or ``.models``. Messages contain weights, so a
    compressor (except ``quantize(num_levels, per_leaf=True)``) biases the weighted mean.

    Parameters
    ----------
    posterior, participation
        See `pseudo_gradients`. If nobody takes part, the ensemble does not change.
    estimator
        Gradient estimator for a client's log likelihood.
    family
        `gaussian_ensemble` or `dirichlet_ensemble`.
    client_optimizer
        Optax optimizer, which starts again in every round; schedules in it count local steps.
    num_local_steps
        Number of optimizer steps per round.
    learning_rate
        Factor of the optimizer's updates: a number or a schedule of the round.
    distill
        ``(rng_key, mean, members) -> position``, such as `fedmcmc.distillation`; returns the model
        that is broadcast next. By default this is the mean, as in federated averaging.

    Raises
    ------
    TypeError, ValueError
        If an optimizer or function has the wrong type, or a number is out of range; from `init` if
        the numbers do not fit the data.
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
