"""One transform of gradient estimates: what is added to each client's sums to a known total.

A client's estimate ``H_c(theta)`` becomes ``H_c(theta) + share_c grad log q(theta) - grad log
q_c(theta)`` with ``q`` the product of the ``q_c`` and shares that sum to one, so the sum over
clients is left alone. The ``q_c`` are Gaussian (conducive gradients), or log-linear with the slope
that the estimate itself has at an anchor, with the same draws: a snapshot (SVRG), the position
broadcast (SCAFFOLD), or a fixed point, where ``log q`` may be left to the server (QLSD*).
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedmcmc._types import ArrayTree, Broadcast, Client, LogDensity
from fedmcmc.gradients._estimators import Derived
from fedmcmc.pytrees import trees

__all__ = ["Correction", "ZeroSum"]


class Correction(NamedTuple):
    """What a round adds to a client's estimates; a part that is ``()`` is left out.

    Attributes
    ----------
    slope
        Shaped as the position: a gradient that is added as it is.
    log_q
        A `Gaussian` the gradient of whose logarithm is added.
    anchor
        A position; the estimate there, with the same draws, is subtracted.
    """

    slope: ArrayTree = ()
    log_q: Any = ()
    anchor: ArrayTree = ()


class _Context(NamedTuple):
    inner: ArrayTree
    correction: Correction


class ZeroSum(Derived):
    """An estimate plus a correction that a subclass gives.

    Attributes
    ----------
    remembers
        Whether clients keep something for their corrections: their state is then a pair of that
        and of what the other estimator keeps, else the latter alone.
    """

    remembers: ClassVar[bool] = False

    def first_memory(
        self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client
    ) -> ArrayTree:
        """Return what a client that remembers keeps before the first round."""
        return ()

    def correction(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, memory: ArrayTree, client: Client
    ) -> tuple[Correction, ArrayTree]:
        """Return what the round adds, and the client's new memory."""
        raise NotImplementedError

    def init(self, loglikelihood_fn: LogDensity, position: ArrayTree, client: Client) -> ArrayTree:
        """Return the memory, if there is one, and what the estimator keeps."""
        estimator_state = self.estimator.init(loglikelihood_fn, position, client)
        if not self.remembers:
            return estimator_state
        return self.first_memory(loglikelihood_fn, position, client), estimator_state

    def start(
        self, loglikelihood_fn: LogDensity, broadcast: Broadcast, state: ArrayTree, client: Client
    ) -> tuple[_Context, ArrayTree]:
        """Make the round's correction."""
        memory, estimator_state = state if self.remembers else ((), state)
        inner, estimator_state = self.estimator.start(
            loglikelihood_fn, broadcast, estimator_state, client
        )
        correction, memory = self.correction(loglikelihood_fn, broadcast, memory, client)
        context = _Context(inner, correction)
        return context, (memory, estimator_state) if self.remembers else estimator_state

    def estimate(
        self,
        loglikelihood_fn: LogDensity,
        draws: ArrayTree,
        position: ArrayTree,
        context: _Context,
        client: Client,
    ) -> ArrayTree:
        """Correct the estimate."""
        slope, log_q, anchor = context.correction

        def at(place: ArrayTree) -> ArrayTree:
            return self.estimator.estimate(loglikelihood_fn, draws, place, context.inner, client)

        if trees.is_empty(anchor):
            gradient = at(position)
        else:
            # Both places in one call: linear algebra on rows is done once, on twice the columns.
            other = trees.cast_like(anchor, position)
            both = jax.vmap(at)(jax.tree.map(lambda a, b: jnp.stack([a, b]), position, other))
            gradient = jax.tree.map(lambda g: g[0] - g[1], both)
        if not trees.is_empty(slope):
            gradient = trees.add(gradient, trees.cast_like(slope, gradient))
        if not trees.is_empty(log_q):
            gradient = trees.add(gradient, log_q.grad_log(position))
        return gradient
