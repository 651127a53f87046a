"""What kernels share whose clients keep latents of their groups: where these begin, and checks."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import (
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
from fedmcmc.hierarchy import (
    Groups,
    Here,
    Locals,
    Moved,
    Refresh,
    first_locals,
    latents_of,
    marginal,
)
from fedmcmc.kernels._shared import PROBE_ROWS, shape_of
from fedmcmc.pytrees import trees

MAX_JUDGED = 2
"""Numbers per latent up to which draws are judged by the posterior without latents."""


@dataclass(frozen=True, eq=False, repr=False)
class LatentKernel(FederatedKernel):
    """A kernel whose clients move latents of their groups, and keep them.

    A client's state is `Locals`: no broadcast holds a latent, and no message one as such.
    """

    posterior: Posterior
    refresh: Refresh
    participation: Participation

    traits = Traits(keeps_latents=True)

    @property
    def local(self) -> Local:
        """The part of the model that belongs to a group."""
        local = self.posterior.local
        assert local is not None
        return local

    @property
    def target(self) -> Posterior | None:
        return judged(self.posterior)

    def checked_start(self, position: ArrayTree, federation: Federation) -> ArrayTree:
        """Return where the chain starts, checked.

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

    def client_init(self, broadcast: Broadcast, client: Client) -> Locals:
        return _first_locals(self, broadcast.position, client)

    def first_locals(self, groups: Groups, position: ArrayTree) -> Locals:
        """Return where latents begin, given the first position."""
        return first_locals(groups, self.refresh, position)

    def moved(
        self, groups: Groups, draws: ArrayTree, broadcast: Broadcast, flat: Array, kept: ArrayTree
    ) -> Moved:
        """Return the latents refreshed at the broadcast position."""
        here = Here(broadcast.position, flat, kept, broadcast.round)
        return self.refresh.move(groups, draws, here)


@compiled  # a start computes it outside of any program, which takes longer operation by operation
def _first_locals(kernel: LatentKernel, position: ArrayTree, client: Client) -> Locals:
    return kernel.first_locals(latents_of(kernel.local, client), position)


def expect_latents(
    posterior: Posterior, refresh: Refresh, participation: Participation, name: str
) -> None:
    """Raise `TypeError` or `ValueError` unless a kernel of latents can be built of these."""
    expect(posterior, Posterior, "posterior")
    expect(refresh, Refresh, "refresh")
    expect(participation, Participation, "participation")
    if posterior.local is None:
        raise ValueError(
            f"{name} moves latents of groups, and this posterior has none: mark sites of the model "
            f"with infer={{'local': True}}, or name them in from_numpyro(model, local=[...])."
        )
    if posterior.position_fn is not None:
        raise ValueError(f"{name} takes a posterior in the model's own coordinates.")
    if participation.pooled:
        raise ValueError("Pooled rows have no groups: run a federated kernel on all clients.")
    if participation.may_repeat:
        raise ValueError(
            "Latents of a client that is drawn twice in a round would be moved once and count "
            "twice: take full, bernoulli or uniform participation."
        )


def judged(posterior: Posterior) -> Posterior:
    """Return the posterior of the shared parameters, which are what draws are of, if it is cheap.

    Else the posterior as it is, of which draws without latents are not judged.
    """
    local: Any = posterior.local
    if local.client is not None or trees.num_elements(local.like.tree) > MAX_JUDGED:
        return posterior
    return marginal(posterior)


def check_latent_model(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the log densities take this position, latents and rows."""
    local: Any = posterior.local
    like, latent = trees.shapes_of(position), local.like.tree
    several = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape), leaf.dtype), latent
    )
    rows = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape[1:]), leaf.dtype),
        federation.rows,
    )
    priors: list[tuple] = [("logprior_fn", posterior.logprior_fn, (like,))]
    place: ArrayTree = like
    if local.client is not None:
        own = local.client.like.tree
        priors.append(("local.client.logprior_fn", local.client.logprior_fn, (like, own)))
        place = (like, own)
    priors.append(("local.logprior_fn", local.logprior_fn, (place, latent)))
    for name, fn, arguments in priors:
        if (shape := shape_of(name, fn, *arguments)) != ():
            raise ValueError(f"{name} must return a scalar, got shape {shape}.")
    shape = shape_of("local.loglikelihood_fn", local.loglikelihood_fn, place, several, rows)
    if shape != (PROBE_ROWS,):
        raise ValueError(
            f"local.loglikelihood_fn must return one term per row, shape ({PROBE_ROWS},) for "
            f"{PROBE_ROWS} rows, got {shape}."
        )
