"""Base class and checks of kernels whose clients store latents of their groups."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.hierarchy import (
    Groups,
    LatentState,
    Refresh,
    RefreshInput,
    RefreshResult,
    groups_of,
    initial_latent_state,
    marginal,
)
from fedmcmc.kernels._shared import PROBE_ROWS, shape_of
from fedmcmc.pytrees import trees
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    Federation,
    Local,
    Participation,
    Posterior,
    Traits,
    compiled,
)

MAX_JUDGED_SIZE = 2
"""Number of elements of a latent up to which draws are judged by the marginal posterior."""


@dataclass(frozen=True, eq=False, repr=False)
class LatentKernel(FederatedKernel):
    """Kernel whose clients move and store latents of their groups.

    A client's state is `LatentState`. No broadcast contains a latent.
    """

    posterior: Posterior
    refresh: Refresh
    participation: Participation

    traits = Traits(keeps_latents=True)

    @property
    def local(self) -> Local:
        """Part of the model that belongs to a group."""
        local = self.posterior.local
        assert local is not None
        return local

    @property
    def target(self) -> Posterior | None:
        return judged(self.posterior)

    def checked_start(self, position: ArrayTree, federation: Federation) -> ArrayTree:
        """Return the initial position.

        Raises
        ------
        ValueError
            If model, position, refresh and federation do not fit together.
        """
        self.participation.check(federation.num_clients)
        position = trees.as_floats(position, "position")
        check_latent_model(self.posterior, position, federation)
        self.refresh.check(self.local, position, federation.rows)
        return position

    def client_init(self, broadcast: Broadcast, client: Client) -> LatentState:
        return _first_locals(self, broadcast.position, client)

    def initial_latent_state(self, groups: Groups, position: ArrayTree) -> LatentState:
        """Return a client's initial state, given the initial position."""
        return initial_latent_state(groups, self.refresh, position)

    def moved(
        self, groups: Groups, draws: ArrayTree, broadcast: Broadcast, flat: Array, state: ArrayTree
    ) -> RefreshResult:
        """Return the latents after a refresh at the broadcast position."""
        inputs = RefreshInput(broadcast.position, flat, state, broadcast.round)
        return self.refresh.move(groups, draws, inputs)


@compiled  # outside of a program, a start would run it operation by operation, which is slower
def _first_locals(kernel: LatentKernel, position: ArrayTree, client: Client) -> LatentState:
    return kernel.initial_latent_state(groups_of(kernel.local, client), position)


def expect_latents(
    posterior: Posterior, refresh: Refresh, participation: Participation, name: str
) -> None:
    """Raise `TypeError` or `ValueError` if a kernel of latents cannot use these arguments."""
    expect(posterior, Posterior, "posterior")
    expect(refresh, Refresh, "refresh")
    expect(participation, Participation, "participation")
    if posterior.local is None:
        raise ValueError(
            f"{name} moves latents of groups, and this posterior has none: mark sites of the model "
            f"with infer={{'local': True}}, or name them in from_numpyro(model, local=[...])."
        )
    if posterior.position_fn is not None:
        raise ValueError(f"{name} needs a posterior in the model's own coordinates.")
    if participation.pooled:
        raise ValueError("Pooled rows have no groups: run a federated kernel on all clients.")
    if participation.may_repeat:
        raise ValueError(
            "A client that is drawn twice in a round would move its latents once, and its message "
            "would count twice: use full, bernoulli or uniform participation."
        )


def judged(posterior: Posterior) -> Posterior:
    """Return the posterior by which draws of the shared parameters are judged.

    It is the marginal posterior if its integrals are inexpensive. Otherwise it is the posterior
    with latents, and the draws are not judged.
    """
    local: Any = posterior.local
    is_expensive = trees.num_elements(local.like.tree) > MAX_JUDGED_SIZE
    return posterior if is_expensive else marginal(posterior)


def check_latent_model(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` if the log densities do not accept this position, latents and rows."""
    local: Any = posterior.local
    like, latent = trees.shapes_of(position), local.like.tree
    latents = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape), leaf.dtype), latent
    )
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape[1:]), leaf.dtype),
        federation.rows,
    )
    for name, fn, arguments in (
        ("logprior_fn", posterior.logprior_fn, (like,)),
        ("local.logprior_fn", local.logprior_fn, (like, latent)),
    ):
        if (shape := shape_of(name, fn, *arguments)) != ():
            raise ValueError(f"{name} must return a scalar, got shape {shape}.")
    shape = shape_of("local.loglikelihood_fn", local.loglikelihood_fn, like, latents, rows)
    if shape != (PROBE_ROWS,):
        raise ValueError(
            f"local.loglikelihood_fn must return one term per row, shape ({PROBE_ROWS},) for "
            f"{PROBE_ROWS} rows, got {shape}."
        )
