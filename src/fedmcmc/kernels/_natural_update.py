"""How messages change natural parameters: damped, by optimizers, and limited in size."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect_optimizer
from fedmcmc._types import ArrayTree, Described, Number, register_dataclass
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import schedules, trees

if TYPE_CHECKING:
    import optax


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class NaturalUpdate(Described):
    """Update of natural parameters by messages; see `fedmcmc.natural_parameters`."""

    damping: Any
    server_optimizer: Any  # () for plain steps
    client_optimizer: Any  # likewise
    max_norm: Any  # () for none

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
            If a number is out of range, or an optimizer is none of optax.
        """
        expect_optimizer(server_optimizer, "server_optimizer", or_none=True)
        expect_optimizer(client_optimizer, "client_optimizer", or_none=True)
        return cls(
            schedules.number(damping, "damping", minimum=0.0, strict=True),
            () if server_optimizer is None else server_optimizer,
            () if client_optimizer is None else client_optimizer,
            () if max_norm is None else schedules.number(max_norm, "max_norm", minimum=0.0),
        )

    def limited(self, change: Gaussian, round_: Array) -> Gaussian:
        """Return a client's change of natural parameters, scaled down to the largest norm."""
        if trees.is_empty(self.max_norm):
            return change
        norm = jnp.sqrt(trees.squared_norm(change))
        limit = trees.cast(schedules.value(self.max_norm, round_), norm)
        return change ** jnp.minimum(1, limit / jnp.where(norm > 0, norm, 1))

    def at_server(
        self, change: Gaussian, product: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return the server's product after a change, and the new state of its optimizer."""
        return self._moved(self.server_optimizer, change, product, state, round_)

    def at_client(
        self, change: Gaussian, site: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return a client's site after a change, and the new state of its optimizer."""
        return self._moved(self.client_optimizer, change, site, state, round_)

    def through_missed_rounds(
        self, site: Gaussian, state: ArrayTree, next_round: Array, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        """Return a client's site after the rounds that it missed, and its optimizer's state.

        In these rounds its change is zero, so momentum moves the site as it moves the server's
        product. The site is then the client's part of that product in every round.
        """
        zero = trees.zeros_like(site)

        def step(_: Array, carry: tuple[Gaussian, ArrayTree]) -> tuple[Gaussian, ArrayTree]:
            return self.at_client(zero, *carry, round_)

        moved: tuple[Gaussian, ArrayTree] = jax.lax.fori_loop(
            next_round, round_, step, (site, state)
        )
        return moved

    def _moved(
        self, optimizer: Any, change: Gaussian, q: Gaussian, state: ArrayTree, round_: Array
    ) -> tuple[Gaussian, ArrayTree]:
        damping = schedules.value(self.damping, round_)
        if optimizer == ():
            return q * change**damping, state
        # Optimizers descend.
        updates, state = trees.descend(optimizer, change ** (-1), state, q)
        return q * updates**damping, state
