"""Natural parameters: clients refine Gaussian factors, and the server multiplies them.

The global approximation is a Gaussian ``q``. A client fits a Gaussian to its likelihood times a
cavity and sends the resulting change of the global natural parameters. The server only sums these
changes, so any compressor applies.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.gaussian import (
    STRUCTURES,
    Gaussian,
    is_proper,
    plus_precision,
    symmetric,
    with_mean,
)
from fedmcmc.hierarchy import marginal
from fedmcmc.inference import Inference, LatentInference
from fedmcmc.kernels._latents import check_latent_model, judged
from fedmcmc.kernels._natural_update import NaturalUpdate
from fedmcmc.kernels._prior_site import PriorSite
from fedmcmc.kernels._shared import check_model, name_of
from fedmcmc.kernels._sites import FirstSites, first_site
from fedmcmc.participation import full, mean_share
from fedmcmc.pytrees import schedules, trees
from fedmcmc.types import (
    ApproximationReport,
    ArrayTree,
    Broadcast,
    Client,
    Disclosure,
    FederatedKernel,
    FederatedState,
    Federation,
    Number,
    Participation,
    Posterior,
    SetupPhase,
    StepInfo,
    Traits,
    as_functions,
    register_dataclass,
)

if TYPE_CHECKING:
    import optax

CAVITIES = ("site", "average", "power", "global", "none")


class _NaturalExtra(NamedTuple):
    """Broadcast in addition to the position.

    Attributes
    ----------
    approximation
        Last proper product of all factors; the present product if none was proper.
    site
        Product of all sites for ``"power"``, the average site for ``"average"``, else ``()``.
    proper
        ``[]`` bool, true if the present product is proper.
    ever_proper
        ``[]`` bool, true if a product was proper so far.
    """

    approximation: Gaussian
    site: ArrayTree
    proper: Array
    ever_proper: Array


class _Approximation(NamedTuple):
    gaussian: Gaussian  # last proper product
    ever_proper: Array  # [] bool, true if a product was proper so far


class _NaturalServer(NamedTuple):
    approximation: _Approximation
    product: Gaussian  # of all factors, proper or not
    prior: Gaussian
    optimizer: ArrayTree
    num_clients: Array  # [] int32
    sum_scale: ArrayTree  # [], factor of a weighted sum of messages, or () for a plain sum
    num_filtered: ArrayTree  # [], sum of dampings for cavity "global", else ()


NAMES = {"site": "fed_ep", "average": "fed_sep", "power": "fed_sep", "global": "adf"}
"""Names of algorithms by cavity."""


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Natural(FederatedKernel):
    """Kernel that refines a Gaussian approximation by its factors; see `natural`."""

    posterior: Posterior
    participation: Participation
    inference: Inference
    prior: PriorSite
    update: NaturalUpdate
    initial_precision: Number
    cavity: str = field(metadata={"static": True})
    structure: str = field(metadata={"static": True})
    expands: bool = field(metadata={"static": True})  # true if first sites are expansions

    traits = Traits(approximates=True, has_local_steps=True)
    disclosure = Disclosure(
        "a change of this site's summary of its rows: estimates of the parameters, and how certain "
        "they are. Added up, the changes are this summary. No other kind of message reveals more",
        hidden_in_sums=True,
        warning="the messages add up to the estimates, and their certainty, of the rows of {rows}.",
    )

    @property
    def name(self) -> str:
        return name_of(self, lambda kernel: NAMES.get(kernel.cavity, "natural"))

    @cached_property
    def setup(self) -> tuple[SetupPhase, ...]:
        return (self._expansions,) if self.expands else ()

    @property
    def _expansions(self) -> FirstSites:
        posterior = self.posterior
        if posterior.local is not None:
            posterior = marginal(posterior, nodes=1)
        return FirstSites(posterior, self.structure)

    @property
    def stateful(self) -> bool:
        """If true, clients keep sites."""
        return self.cavity in ("site", "none")

    @property
    def target(self) -> Posterior | None:
        return self.posterior if self.posterior.local is None else judged(self.posterior)

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, _NaturalServer]:
        self.participation.check(federation.num_clients)
        position = trees.as_floats(position, "position")
        check = check_model if self.posterior.local is None else check_latent_model
        check(self.posterior, position, federation)
        self.inference.check(self.posterior, position, federation, self.structure)
        prior = self.prior.init(self.posterior, rng_key, position)
        sites = self._first_site(position, jnp.asarray(federation.num_rows))
        for expansions in totals:
            sites = sites * expansions
        product = prior * sites
        proper = is_proper(product)
        optimizer = self.update.server_optimizer
        share = None
        if self.participation.weighted:
            share = mean_share(self.participation, federation.num_clients)
        server = _NaturalServer(
            _Approximation(product, proper),
            product,
            prior,
            () if optimizer == () else optimizer.init(product),
            jnp.int32(federation.num_clients),
            () if share is None else share,
            jnp.zeros(()) if self.cavity == "global" else (),
        )
        # Clients start at the position of the run, even if the product has another mean.
        extra = self._extra(server, proper)
        return Broadcast(jnp.zeros((), jnp.int32), position, extra), server

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        if not self.stateful:
            return ()
        site = self._first_site(broadcast.position, client.size)
        if self.expands:
            site = site * self._expansions.site(broadcast.position, client)
        latents: ArrayTree = ()
        if isinstance(self.inference, LatentInference):
            latents = self.inference.initial_latent_state(
                self.posterior, broadcast.position, client
            )
        return first_site(site, self.update.client_optimizer, latents, broadcast.round)

    def _first_site(self, position: ArrayTree, num_rows: Array) -> Gaussian:
        """Return a site centered at `position` with the initial precision per row."""
        per_row = schedules.value(self.initial_precision, jnp.zeros((), jnp.int32))
        number = num_rows.astype(jnp.result_type(float)) * per_row
        centered = plus_precision(Gaussian.uniform(position, self.structure), number)
        return with_mean(position, centered.precision, self.structure)

    def _extra(self, server: _NaturalServer, proper: Array) -> _NaturalExtra:
        """Return the broadcast in addition to the position; `proper` is a flag of the product."""
        site: ArrayTree = ()
        if self.cavity in ("average", "power"):
            site = server.product / server.prior
        if self.cavity == "average":
            site = site ** (1 / server.num_clients.astype(jnp.result_type(float)))
        gaussian, ever_proper = server.approximation
        approximation = trees.select(ever_proper, gaussian, server.product)
        return _NaturalExtra(approximation, site, proper, ever_proper)

    def _site(self, extra: _NaturalExtra, client_state: ArrayTree, client: Client) -> Gaussian:
        """Return the client's factor of the approximation."""
        if self.cavity == "average":
            return extra.site
        if self.cavity == "power":
            return extra.site**client.share
        return client_state.site

    def _cavity(
        self, extra: _NaturalExtra, client_state: ArrayTree, client: Client
    ) -> tuple[Gaussian, Gaussian]:
        """Return the cavity and the Gaussian that the client's fit replaces.

        If the product or the client's last fit is not proper, the cavity is the last proper
        approximation, and the new site is the fit over this cavity.
        """
        q = extra.approximation
        if self.cavity == "global":
            return q, q
        if self.cavity == "none":
            return trees.zeros_like(q), client_state.site
        site = self._site(extra, client_state, client)
        falls_back = ~extra.proper
        if self.stateful:
            falls_back |= client_state.lost
        falls_back &= extra.ever_proper
        return trees.select(falls_back, (q, q * site), (q / site, q))

    def message_like(self, like: Broadcast) -> ArrayTree:
        return trees.shapes_of(like.extra.approximation)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        return self.inference.prepare(rng_key, like.position, client)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        state: ArrayTree = client_state
        position, round_ = broadcast.position, broadcast.round
        if self.stateful and not trees.is_empty(state.next_round):
            site, optimizer = self.update.catch_up(
                state.site, state.optimizer, state.next_round, round_
            )
            state = state._replace(site=site, optimizer=optimizer, next_round=round_)
        cavity, before = self._cavity(broadcast.extra, state, client)
        arguments = (self.posterior, draws, position, cavity, client, round_)
        if isinstance(self.inference, LatentInference):
            (tilted, gradient_norm), latents = self.inference.fit_latents(*arguments, state.locals)
            state = state._replace(locals=latents)
        else:
            tilted, gradient_norm = self.inference.fit(*arguments)
        proper = is_proper(tilted)
        if self.stateful:
            state = state._replace(lost=~proper)
        change = trees.select(proper, tilted / before, trees.zeros_like(tilted))
        change = self.update.clip(change, round_)
        info = StepInfo(
            bits=jnp.asarray(trees.num_bits(change), jnp.int32),
            gradient_norm=gradient_norm,
            usable=proper,
            # Clients compute the position from the natural parameters.
            bits_down=jnp.asarray(trees.num_bits(broadcast.extra), jnp.int32),
        )
        return change, state, info

    def commit(self, message: Gaussian, broadcast: Broadcast, client_state: ArrayTree) -> ArrayTree:
        if not self.stateful:
            return client_state
        old: ArrayTree = client_state
        message = symmetric(message)  # like the sum at the server
        site, optimizer = self.update.update_client(
            message, old.site, old.optimizer, broadcast.round
        )
        new = old._replace(site=site, optimizer=optimizer)
        if trees.is_empty(old.next_round):
            return new
        return new._replace(next_round=old.next_round + 1)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return rng_key  # for the prior's factor

    def aggregate(
        self, rng_key: Array, broadcast: Broadcast, server_state: _NaturalServer, total: Gaussian
    ) -> tuple[Broadcast, _NaturalServer, ArrayTree]:
        # Each client divides by the approximation, so an asymmetry from rounding would grow by the
        # number of clients in every round.
        total = symmetric(total)
        if not trees.is_empty(server_state.sum_scale):
            total = total**server_state.sum_scale
        product, optimizer = self.update.update_server(
            total, server_state.product, server_state.optimizer, broadcast.round
        )
        damping = schedules.value(self.update.damping, broadcast.round)
        old = server_state.approximation
        prior = self.prior.refine(self.posterior, rng_key, server_state.prior, old, damping)
        product = product * (prior / server_state.prior) if self.prior.moves else product
        proper = is_proper(product)
        shift = jnp.where(proper & old.ever_proper, _shift(old.gaussian, product), jnp.inf)
        position = trees.select(proper, product.mean(), broadcast.position)
        approximation = _Approximation(
            trees.select(proper, product, old.gaussian), proper | old.ever_proper
        )
        filtered = server_state.num_filtered
        if not trees.is_empty(filtered):
            filtered = trees.cast(filtered + damping, filtered)
        server = server_state._replace(
            approximation=approximation,
            product=product,
            prior=prior,
            optimizer=optimizer,
            num_filtered=filtered,
        )
        moved = broadcast._replace(
            round=broadcast.round + 1, position=position, extra=self._extra(server, proper)
        )
        return moved, server, ApproximationReport(proper, shift.astype(jnp.float32))

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        approximation = state.server.approximation
        return trees.select(
            approximation.ever_proper,
            approximation.gaussian.draw(rng_key),
            state.broadcast.position,
        )


def _shift(before: Gaussian, after: Gaussian) -> Array:
    """Return the largest change of a mean in sds or of a log sd, ``[]``."""
    old, new = before.sds(), after.sds()
    moved = trees.ravel(trees.subtract(after.mean(), before.mean())) / new
    return jnp.max(jnp.maximum(jnp.abs(moved), jnp.abs(jnp.log(new / old))), initial=0)


def _check_latents(posterior: Posterior, inference: Inference, cavity: str) -> None:
    """Raise `ValueError` unless the clients move and keep the latents of the model, if any."""
    moves_latents = isinstance(inference, LatentInference)
    if posterior.local is None:
        if moves_latents:
            raise ValueError(
                "mcmc_local moves latents of groups, but this posterior has none: use importance() "
                "or mcmc(...), or mark sites of the model with infer={'local': True}."
            )
        return
    if not moves_latents:
        raise ValueError(
            f"This posterior has latents of its groups, but {type(inference).__name__} does not "
            f"move them: use inference=fedmcmc.inference.mcmc_local(), or integrate them out with "
            f"fedmcmc.marginal(posterior)."
        )
    if cavity not in ("site", "none"):
        raise ValueError(
            "Clients without sites keep no latents: use fed_ep, or integrate the latents out with "
            "fedmcmc.marginal(posterior)."
        )


def natural(
    posterior: Posterior,
    inference: Inference,
    *,
    cavity: str = "site",
    structure: str = "diagonal",
    damping: Number = 1.0,
    server_optimizer: "optax.GradientTransformation | None" = None,
    client_optimizer: "optax.GradientTransformation | None" = None,
    participation: Participation | None = None,
    prior: Gaussian | None = None,
    num_prior_samples: int = 16,
    initial_precision: Number = 0.0,
    first_sites: str = "constant",
    max_norm: Number | None = None,
) -> FederatedKernel:
    """Build a kernel that refines a Gaussian approximation by messages in natural parameters.

    The algorithms are from Guo et al. (2023). ``state.server.approximation.gaussian`` is the
    approximation, ``state.broadcast.position`` its mean, and ``state.clients.site`` the sites. If a
    client's fit is not proper, the client sends zero (``StepInfo.usable`` is false); if the product
    of all factors is not proper, the last proper product stays and is the cavity of all clients.

    Parameters
    ----------
    posterior, inference
        Model, and fit of a Gaussian to likelihood times cavity, from `fedmcmc.inference`.
    cavity
        Factor of the client's likelihood. ``"site"``: the approximation ``q`` over the client's
        site (expectation propagation). ``"average"``, ``"power"``: ``q`` over ``(q / prior)`` to
        the power ``1 / num_clients``, or the client's share of the rows. ``"global"``: ``q``
        (assumed density filtering). ``"none"``: a constant. Clients keep a site with ``"site"`` and
        ``"none"`` only.
    structure
        ``"diagonal"``, ``"scaled_identity"`` or ``"dense"``.
    damping, server_optimizer, client_optimizer, max_norm
        See `fedmcmc.natural_parameters`. A client that was absent first takes a step with a change
        of zero for each missed round.
    participation
        Rule that chooses who takes part; everyone by default. With ``"average"`` and ``"power"`` a
        message is weighted by the mean probability of taking part over the client's probability.
    prior, num_prior_samples
        Gaussian factor of the prior. By default the server computes it: exact for a Gaussian log
        prior, else refined in each round from `num_prior_samples` draws.
    initial_precision
        Precision per row of the first sites, around the first position; zero for constant sites.
    first_sites
        ``"constant"``, or ``"expansion"`` of each client's log likelihood to second order at the
        first position, best the mode, so that the first approximation is Laplace's.
    """
    if cavity not in CAVITIES:
        raise ValueError(f"cavity must be one of {CAVITIES}, got {cavity!r}.")
    if first_sites not in ("constant", "expansion"):
        raise ValueError(f'first_sites must be "constant" or "expansion", got {first_sites!r}.')
    if first_sites == "expansion" and structure == "scaled_identity":
        raise ValueError('first_sites="expansion" needs a structure "dense" or "diagonal".')
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")
    expect(posterior, Posterior, "posterior")
    expect(inference, Inference, "inference")
    participation = full() if participation is None else participation
    expect(participation, Participation, "participation")
    update = NaturalUpdate.of(damping, server_optimizer, client_optimizer, max_norm)
    if client_optimizer is not None and cavity not in ("site", "none"):
        raise ValueError(
            f"client_optimizer needs sites, but clients keep none with cavity={cavity!r}."
        )
    if participation.may_repeat and cavity in ("site", "none"):
        raise ValueError(
            "A client with a site takes part at most once per round: use uniform(cohort_size), "
            'bernoulli(...), or cavity="average", "power" or "global".'
        )
    _check_latents(posterior, inference, cavity)
    # Weighted sums would differ from the changes of the sites, and count rows of a filter twice.
    if cavity not in ("average", "power"):
        participation = replace(participation, weighted=False)
    if prior is not None:
        if not isinstance(prior, Gaussian):
            raise TypeError(
                f"prior must be a fedmcmc.Gaussian or None, got {type(prior).__name__}."
            )
        if prior.structure != structure:
            raise ValueError(
                f"prior must have the structure of the approximation, {structure}, got "
                f"{prior.structure}."
            )
    num_prior_samples = positive_integer(num_prior_samples, "num_prior_samples")
    return as_functions(
        Natural(
            posterior,
            participation,
            inference,
            PriorSite(() if prior is None else prior, structure, num_prior_samples),
            update,
            schedules.number(initial_precision, "initial_precision", minimum=0.0),
            cavity,
            structure,
            first_sites == "expansion",
        )
    )
