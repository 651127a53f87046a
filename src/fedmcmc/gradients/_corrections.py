"""Corrections of gradient estimates that sum to zero over the clients, or to a known total.

The estimate ``H_c(theta)`` of client ``c`` becomes ``H_c(theta) + share_c grad log q(theta) - grad
log q_c(theta)``. Here ``q`` is the product of the ``q_c`` and the shares sum to one, so the
corrections sum to zero and the sum of the estimates does not change. There are two choices of
``q_c``:

- a Gaussian (conducive gradients);
- a log-linear density. Its slope is the client's estimate at an anchor, with the same draws. The
  anchor is a snapshot (SVRG), the broadcast position (SCAFFOLD) or a fixed point. For a fixed point
  the server may add ``grad log q`` instead of the clients (QLSD*): the corrections then sum to a
  known total.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients._augmented import refuse_augmented
from fedmcmc.gradients._estimators import (
    Derived,
    as_weights,
    check_weights,
    client_gradient,
    contains,
    weight_of,
)
from fedmcmc.pytrees import schedules, trees, where_any
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    Federation,
    GradientEstimator,
    LogDensity,
    Number,
    PerClient,
    RecomputableState,
    Reference,
    register_dataclass,
    undefined,
)


class Correction(NamedTuple):
    """Correction of a client's estimates in one round; parts that are ``()`` are omitted."""

    slope: ArrayTree = ()  # a constant gradient to add, shaped as the position
    log_q: ArrayTree = ()  # a `Gaussian`; the gradient of its log density is added
    anchor: ArrayTree = ()  # a position; the estimate there, with the same draws, is subtracted


class ZeroSum(Derived):
    """Estimator with a correction that a subclass computes.

    Attributes
    ----------
    remembers
        If true, clients keep a memory for their corrections. A client's state is then the pair of
        its memory and the inner estimator's state; otherwise it is the inner state alone.
    """

    remembers: ClassVar[bool] = False

    def initial_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> ArrayTree:
        """Return a client's memory before the first round."""
        return ()

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        """Return the correction of all estimates of a round, and the client's new memory."""
        raise undefined(self, "correction")

    def init(self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
        estimator_state = self.estimator.init(loglikelihood_fn, position, client)
        if not self.remembers:
            return estimator_state
        return self.initial_memory(loglikelihood_fn, position, client), estimator_state

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[tuple[ArrayTree, Correction], ArrayTree]:
        if self.remembers and not (isinstance(state, tuple) and len(state) == 2):
            raise ValueError(
                f"{type(self).__name__} received no state: the kernel's client_init must return "
                f"the result of estimator.init, and its step the new state, as in "
                f"fedmcmc.kernels.EstimatorKernel (docs/guides/extend.md)."
            )
        memory, estimator_state = state if self.remembers else ((), state)
        inner, estimator_state = self.estimator.start(
            loglikelihood_fn, broadcast, estimator_state, client
        )
        correction, memory = self.correction(loglikelihood_fn, broadcast, memory, client)
        state = (memory, estimator_state) if self.remembers else estimator_state
        return (inner, correction), state

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: ArrayTree,
        position: ArrayTree,
        context: tuple[ArrayTree, Correction],
        client: Client,
    ) -> ArrayTree:
        inner, (slope, log_q, anchor) = context

        def estimate_at(position_: ArrayTree) -> ArrayTree:
            return self.estimator.estimate(loglikelihood_fn, draws, position_, inner, client)

        if trees.is_empty(anchor):
            gradient = estimate_at(position)
        else:
            # Evaluate both positions in one call, so that each row is read once.
            anchor = trees.cast_like(anchor, position)
            positions = jax.tree.map(lambda a, b: jnp.stack([a, b]), position, anchor)
            both = jax.vmap(estimate_at)(positions)
            gradient = jax.tree.map(lambda g: g[0] - g[1], both)
        if not trees.is_empty(slope):
            gradient = trees.add(gradient, trees.cast_like(slope, gradient))
        if not trees.is_empty(log_q):
            gradient = trees.add(gradient, log_q.grad_log(position))
        return gradient


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Conducive(ZeroSum):
    """Estimator corrected by surrogates of the clients' likelihoods; see `conducive`."""

    disclosure = Disclosure(
        "no separate question: allows gradients corrected by a summary of the rows"
    )

    estimator: GradientEstimator
    surrogates: PerClient  # of Gaussian
    product: Gaussian = field(repr=False)
    alpha: Number
    shares: PerClient | None

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        share = weight_of(client, self.shares)
        alpha = schedules.value(self.alpha, broadcast.round)
        log_q = zero_sum_correction(self.product, self.surrogates.of(client), share, alpha)
        return Correction(log_q=log_q), memory

    def check(self, position: ArrayTree, federation: Federation) -> None:
        self.surrogates.values.check_clients(position, federation.num_clients)
        super().check(position, federation)
        check_weights("shares", self.shares, federation)


def zero_sum_correction(
    product: Gaussian, surrogate: Gaussian, share: Array, alpha: Array
) -> Gaussian:
    """Return the Gaussian ``(product**share / surrogate)**alpha``.

    If `product` is the product of all clients' surrogates and the shares sum to one, the gradients
    of the log densities sum to zero over the clients.
    """
    return (product**share / surrogate) ** alpha


def conducive(
    estimator: GradientEstimator,
    surrogates: Gaussian,
    alpha: Number = 1.0,
    *,
    shares: Array | None = None,
) -> GradientEstimator:
    """Add conducive gradients, built from surrogates of the clients' likelihoods.

    Control variates go inside, ``conducive(svrg(minibatch(10), 100), surrogates)``, except for
    `scaffold`, which goes outside: ``scaffold(conducive(minibatch(10), surrogates))``.

    Parameters
    ----------
    estimator
        Estimator to correct.
    surrogates
        One `Gaussian` per client, leaves ``[num_clients, ...]``, that approximates the client's
        likelihood (without prior); it need not be proper.
    alpha
        Strength, a number or schedule of the round; zero switches the correction off.
    shares
        Shares ``[num_clients]`` that sum to one; by default each client's share of rows. In a
        relay these are the client probabilities.

    Raises
    ------
    ValueError
        If `estimator` is a `scaffold`, or `surrogates` are not finite.

    Notes
    -----
    El Mekkaoui et al. (2021), eq. 5, divide the term by the client's probability ``f_s``:
    ``g_s = grad log q - grad log q_s / f_s``. Here the kernel divides the complete gradient by
    ``f_s``, so the term is ``f_s * grad log q - grad log q_s``.
    """
    expect(estimator, GradientEstimator, "estimator")
    if estimator.needs_sum:
        raise ValueError(
            "conducive around scaffold makes clients differ again at the position where the round "
            "starts, where scaffold gives all of them the same gradient: write "
            "scaffold(conducive(..., surrogates))."
        )
    surrogates = as_surrogates(surrogates)
    return Conducive(
        estimator,
        PerClient(surrogates),
        surrogates.sum(),
        schedules.number(alpha, "alpha"),
        as_weights(shares),
    )


def as_surrogates(surrogates: Gaussian) -> Gaussian:
    """Return `surrogates` with a client axis on every leaf.

    Raises
    ------
    TypeError, ValueError
        If `surrogates` is not one `Gaussian` with a leading client axis and finite natural
        parameters.
    """
    if not isinstance(surrogates, Gaussian):
        raise TypeError(
            f"surrogates must be one fedmcmc.Gaussian with a leading client axis, got "
            f"{type(surrogates).__name__}."
        )
    for leaf in jax.tree.leaves(surrogates):
        if not isinstance(leaf, jax.core.Tracer) and not np.isfinite(leaf).all():
            raise ValueError("The surrogates hold NaN or infinite natural parameters.")
    num_clients = surrogates.num_clients
    if surrogates.structure == "scaled_identity" and surrogates.precision.ndim == 0:
        # One number serves all clients.
        return replace(surrogates, precision=jnp.broadcast_to(surrogates.precision, (num_clients,)))
    return surrogates


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Scaffold(ZeroSum):
    """Estimator corrected by all clients' gradients at the round's start; see `scaffold`."""

    disclosure = Disclosure(
        "no separate question: allows gradients corrected by gradients of all sites"
    )

    estimator: GradientEstimator
    shares: PerClient | None

    @property
    def needs_sum(self) -> bool:
        return True

    def summed(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, client: Client
    ) -> ArrayTree:
        return client_gradient(loglikelihood_fn, broadcast.position, client)

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        slope = trees.scale(weight_of(client, self.shares), broadcast.summed)
        return Correction(slope=slope, anchor=broadcast.position), memory

    def check(self, position: ArrayTree, federation: Federation) -> None:
        super().check(position, federation)
        check_weights("shares", self.shares, federation)


def scaffold(estimator: GradientEstimator, *, shares: Array | None = None) -> GradientEstimator:
    """Replace the client's gradient at the round's start by its share of the total gradient.

    The estimate is ``H(theta) - H(theta_0) + share * sum_c grad log p(rows_c | theta_0)``, where
    ``theta_0`` is the position at which the round starts. Both evaluations of ``H`` use the same
    draws. The kernel's round has one more phase, in which each client sends its gradient at
    ``theta_0`` after a full pass over its rows.

    Parameters
    ----------
    estimator
        Estimator ``H``. It may be a `conducive`, whose correction then acts away from
        ``theta_0``.
    shares
        Shares ``[num_clients]`` that sum to one; by default each client's share of rows. In a
        weighted average of clients these are the weights.

    Raises
    ------
    ValueError
        If `estimator` itself needs a sum over the clients, as another `scaffold` does.

    References
    ----------
    Karimireddy et al. (2020), SCAFFOLD, option I; Liang et al. (2024), Algorithm B.2.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = scaffold(fedmcmc.minibatch(10))
    """
    expect(estimator, GradientEstimator, "estimator")
    refuse_augmented(estimator, "scaffold")
    if estimator.needs_sum:
        raise ValueError(
            "scaffold needs an estimator that does not itself need a sum over the clients (as "
            "another scaffold does)."
        )
    return Scaffold(estimator, as_weights(shares))


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class FixedPoint(ZeroSum):
    """Estimator of differences to the gradient at a fixed point; see `fixed_point`."""

    disclosure = Disclosure(
        "no separate question: allows gradients minus gradients at a fixed position"
    )

    estimator: GradientEstimator
    centre: ArrayTree
    centred: bool = field(metadata={"static": True})

    remembers = True

    def initial_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> ArrayTree:
        return () if self.centred else client_gradient(loglikelihood_fn, self.centre, client)

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        return Correction(slope=memory, anchor=self.centre), memory

    def check(self, position: ArrayTree, federation: Federation) -> None:
        super().check(position, federation)
        if not trees.same_shapes(self.centre, position):
            raise ValueError(
                f"centre must be shaped as the position, {jax.tree.map(jnp.shape, position)}, got "
                f"{jax.tree.map(jnp.shape, self.centre)}."
            )
        leaves = jax.tree.leaves(self.centre)
        if not all(isinstance(x, jax.core.Tracer) or np.isfinite(x).all() for x in leaves):
            raise ValueError("centre holds NaN or infinite numbers.")


def fixed_point(
    estimator: GradientEstimator, centre: ArrayTree, *, centred: bool = False
) -> GradientEstimator:
    """Use the gradient at a fixed position `centre` as a control variate.

    The estimate is ``H(theta) - H(centre) + grad log p(rows | centre)``. Both evaluations of ``H``
    use the same rows; the last term takes one full pass over the rows before the first round.

    Parameters
    ----------
    estimator
        Estimator ``H``. `conducive` goes outside, as for `svrg`.
    centre
        Position of the control variate, best near the mode.
    centred
        If true, omit the last term. The server must then add the sum of the clients' gradients at
        the center, which is zero if the center maximizes the likelihood.

    References
    ----------
    Baker et al. (2019), Control variates for SGMCMC, eq. 5; with ``centred=True``, Vono et al.
    (2022), Algorithm S1.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = fixed_point(fedmcmc.minibatch(10), jnp.zeros(3))
    """
    _check_inner(estimator, "fixed_point")
    return FixedPoint(estimator, trees.as_floats(centre, "centre"), bool(centred))


@register_dataclass
@dataclass(frozen=True, eq=False)
class Snapshot(Reference):
    """Position at the most recent round that is a multiple of `period`."""

    period: int = field(metadata={"static": True})

    def round_of(self, round_: Array) -> Array:
        return round_ - round_ % self.period

    def update(self, round_: Array, position: ArrayTree, previous: ArrayTree) -> ArrayTree:
        if previous is None:
            return position
        return trees.select(round_ % self.period == 0, position, previous)

    def missing(self, broadcast: Broadcast, state: "tuple[_SnapshotMemory, ArrayTree]") -> Array:
        # In a refresh round the snapshot is the position, which is sent anyway.
        latest = self.round_of(broadcast.round)
        return (state[0].sent != latest) & (broadcast.round != latest)


class _SnapshotGradient(NamedTuple):
    round: Array  # [] int32, round of the snapshot, -1 for none
    gradient: ArrayTree


class _SnapshotMemory(NamedTuple):
    sent: Array  # [] int32, round of the last snapshot sent to the client, -1 for none
    gradient: RecomputableState  # of _SnapshotGradient


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Svrg(ZeroSum):
    """Estimator of differences to the gradient at a snapshot; see `svrg`."""

    disclosure = Disclosure(
        "no separate question: allows questions in which gradients of minibatches are corrected "
        "by gradients of all rows"
    )

    estimator: GradientEstimator
    refresh_every: int = field(metadata={"static": True})

    remembers = True

    @property
    def reference(self) -> Snapshot:
        return Snapshot(self.refresh_every)

    def initial_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> _SnapshotMemory:
        never = jnp.full((), -1, jnp.int32)
        cached = RecomputableState(_SnapshotGradient(never, trees.zeros_like(position)))
        return _SnapshotMemory(never, cached)

    def correction(
        self,
        loglikelihood_fn: LogDensity,
        broadcast: Broadcast,
        memory: _SnapshotMemory,
        client: Client,
    ) -> tuple[Correction, _SnapshotMemory]:
        """Compute the gradient at the snapshot if the snapshot is new."""
        snapshot = broadcast.extra
        if trees.is_empty(snapshot):
            raise ValueError(
                "svrg received no snapshot: the kernel's server must put the result of "
                "estimator.reference.update into Broadcast.extra, as "
                "fedmcmc.kernels.EstimatorKernel does (docs/guides/extend.md)."
            )
        cached = memory.gradient.value
        latest = self.reference.round_of(broadcast.round)
        gradient = where_any(
            cached.round != latest,
            client_gradient,
            cached.gradient,
            loglikelihood_fn,
            snapshot,
            client,
        )
        memory = _SnapshotMemory(latest, RecomputableState(_SnapshotGradient(latest, gradient)))
        return Correction(slope=gradient, anchor=snapshot), memory


def svrg(estimator: GradientEstimator, refresh_every: int) -> GradientEstimator:
    """Use the gradient at a recent snapshot of the position as a control variate.

    The estimate is ``H(theta) - H(zeta) + grad log p(rows | zeta)``, where ``zeta`` is the position
    at the last round that is a multiple of `refresh_every`. Both evaluations of ``H`` use the
    same rows. The last term takes a full pass over the rows, once per client and snapshot: in the
    first round after a refresh in which the client takes part.

    Parameters
    ----------
    estimator
        Estimator ``H``. `conducive` goes outside:
        ``conducive(svrg(minibatch(10), 100), surrogates)``.
    refresh_every
        Number of rounds between snapshots.

    Raises
    ------
    ValueError
        If `refresh_every` is not a positive integer, or `estimator` is a `conducive` or `scaffold`,
        whose corrections would cancel.

    References
    ----------
    Johnson and Zhang (2013); Dubey et al. (2016); Algorithm 2 of Vono et al. (2022), where
    `refresh_every` is ``l``.

    Examples
    --------
    >>> import fedmcmc
    >>> estimator = svrg(fedmcmc.minibatch(10), refresh_every=100)
    """
    refresh_every = positive_integer(refresh_every, "refresh_every")
    _check_inner(estimator, "svrg")
    return Svrg(estimator, refresh_every)


def _check_inner(estimator: GradientEstimator, name: str) -> None:
    """Raise `ValueError` if subtracting the estimate at an anchor would cancel a correction."""
    expect(estimator, GradientEstimator, "estimator")
    refuse_augmented(estimator, name)
    if estimator.reference is not None:
        raise ValueError(f"{name} cannot go around an estimator with a reference, such as svrg.")
    if contains(estimator, Conducive):
        raise ValueError(
            f"{name} cancels the correction of conducive, so {name}(conducive(...)) keeps the "
            f"differences between clients: write conducive({name}(...), surrogates)."
        )
    if estimator.needs_sum:
        raise ValueError(
            f"{name} cancels the correction of scaffold, so {name}(scaffold(...)) keeps the "
            f"differences between clients: write scaffold(...) without {name}."
        )
