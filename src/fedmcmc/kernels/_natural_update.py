"""Updates of natural parameters by messages: damping, optimizers and a largest norm."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect_optimizer
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import ArrayTree, Described, Number, register_dataclass

if TYPE_CHECKING:
    import optax


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class NaturalUpdate(Described):
    """Update of natural parameters by messages; see `fedmcmc.natural_parameters`."""

    damping: Number
    server_optimizer: ArrayTree  # () for plain steps
    client_optimizer: ArrayTree  # () for plain steps
    max_norm: ArrayTree  # () for none

    @classmethod
    def of(
        cls,
        damping: Number,
        server_optimizer: "optax.GradientTransformation | None",
        client_optimizer: "optax.GradientTransformation | None",
        max_norm: Number | None,
    ) -> "NaturalUpdate":
        """Return the update with these settings.

        Raises
        ------
        ValueError, TypeError
            If a number is out of range, or an optimizer is no optax optimizer.
        """
        expect_optimizer(server_optimizer, "server_optimizer", or_none=True)
        expect_optimizer(client_optimizer, "client_optimizer", or_none=True)
        return cls(
            schedules.number(damping, "damping", minimum=0.0, strict=True),
            () if server_optimizer is None else server_optimizer,
            () if client_optimizer is None else client_optimizer,
            () if max_norm is None else schedules.number(max_norm, "max_norm", minimum=0.0),
        )

    def clip(self, change: Gaussian, round_: Array) -> Gaussian:
        """Scale a client's change of natural parameters down to the largest norm."""
        if trees.is_empty(self.max_norm):
            return change
        norm = jnp.sqrt(trees.squared_norm(change))
        limit = trees.cast(schedules.value(self.max_norm, round_), norm)
        return change ** jnp.minimum(1, limit / jnp.where(norm > 0, norm, 1))

    def update_server(
        self, change: Gaussian, product: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return the server's product after a change, and the new state of its optimizer."""
        return self._update(self.server_optimizer, change, product, state, round_)

    def update_client(
        self, change: Gaussian, site: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return a client's site after a change, and the new state of its optimizer."""
        return self._update(self.client_optimizer, change, site, state, round_)

    def catch_up(
        self, site: Gaussian, state: ArrayTree, next_round: Array, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return a client's site after the rounds that it missed, and its optimizer's state.

        The client's change is zero in these rounds, so momentum moves its site and the server's
        product in the same way, and the site stays the client's factor of the product.
        """
        zero = trees.zeros_like(site)

        def step(_: Array, carry: tuple[Gaussian, ArrayTree]) -> tuple[Gaussian, ArrayTree]:
            return self.update_client(zero, *carry, round_)

        moved: tuple[Gaussian, ArrayTree] = jax.lax.fori_loop(
            next_round, round_, step, (site, state)
        )
        return moved

    def _update(
        self, optimizer: ArrayTree, change: Gaussian, q: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        damping = schedules.value(self.damping, round_)
        if optimizer == ():
            return q * change**damping, state
        # Optax optimizers descend, so they receive the negative change.
        updates, state = trees.descend(optimizer, change ** (-1), state, q)
        return q * updates**damping, state
