"""Corrections of gradient estimates that sum to zero over the clients, or to a known total.

The estimate ``H_c(theta)`` of client ``c`` becomes ``H_c(theta) + share_c grad log q(theta) - grad
log q_c(theta)``. Here ``q`` is the product of the ``q_c`` and the shares sum to one, so the
corrections sum to zero and the sum of the estimates does not change. There are two choices of
``q_c``:

- a Gaussian (conducive gradients);
- a log-linear density. Its slope is the client's estimate at an anchor, with the same draws. The
  anchor is a snapshot (SVRG), the position that was broadcast (SCAFFOLD) or a fixed point. For a
  fixed point the server may add ``grad log q`` instead of the clients (QLSD*): the corrections
  then sum to a known total.
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
        A `Gaussian`; the gradient of its logarithm is added.
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
    """An estimate plus a correction, which a subclass computes.

    Attributes
    ----------
    remembers
        Whether clients keep a memory for their corrections. If so, a client's state is the pair
        of its memory and the inner estimator's state; if not, the inner estimator's state alone.
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
        """Return the memory, if there is one, and the inner estimator's state."""
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
