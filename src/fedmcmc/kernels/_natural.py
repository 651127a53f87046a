"""Natural parameters: clients refine Gaussian factors, and the server multiplies them.

The global approximation is a Gaussian ``q``. A client fits a Gaussian to its likelihood times a
cavity, and sends how much the global natural parameters are to change for it: that change is the
message, so that the server only ever sums, and any compressor applies.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
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
    Refined,
    SetupPhase,
    StepInfo,
    Traits,
    as_functions,
    register_dataclass,
)
from fedmcmc.gaussian import (
    STRUCTURES,
    Gaussian,
    is_proper,
    plus_precision,
    symmetric,
    with_mean,
)
from fedmcmc.hierarchy import marginal, refuse_two_levels
from fedmcmc.inference import Inference, LatentInference
from fedmcmc.kernels._latents import check_latent_model, judged
from fedmcmc.kernels._natural_update import NaturalUpdate
from fedmcmc.kernels._prior_site import PriorSite
from fedmcmc.kernels._shared import check_model, name_of
from fedmcmc.kernels._sites import FirstSites, first_site
from fedmcmc.participation import full, mean_share
from fedmcmc.pytrees import schedules, trees

if TYPE_CHECKING:
    import optax

CAVITIES = ("site", "average", "power", "global", "none")


class _Sent(NamedTuple):
    """What is broadcast besides the position.

    Attributes
    ----------
    approximation
        The product of all factors while it is proper, else the last product that was (the product
        itself if none was).
    site
        All sites together with ``"power"``, the average site with ``"average"``, else ``()``.
    proper
        ``[]`` bool, whether the product is proper.
    known
        ``[]`` bool, whether any product was proper so far.
    """

    approximation: Gaussian
    site: Any
    proper: Array
    known: Array


class _Approximation(NamedTuple):
    """The last proper global Gaussian, and whether there has been one, ``[]`` bool."""

    gaussian: Gaussian
    known: Array


class _Server(NamedTuple):
    """What the server keeps besides the broadcast."""

    approximation: _Approximation
    product: Gaussian  # of all factors, proper or not
    prior: Gaussian
    optimizer: ArrayTree
    num_clients: Array  # [] int32
    sum_scale: Any  # [], multiplies a weighted sum of messages, or () for a plain sum
    num_filtered: Any  # [], sum of the dampings of a filter's rounds, or () for other cavities


NAMES = {"site": "fed_ep", "average": "fed_sep", "power": "fed_sep", "global": "adf"}
"""Names of algorithms by their cavity."""


def _name(kernel: "Natural") -> str:
    return NAMES.get(kernel.cavity, "natural")


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Natural(FederatedKernel):
    """Clients refine Gaussian factors, the server multiplies them; see `natural`."""

    posterior: Posterior
    participation: Participation
    inference: Inference
    prior: PriorSite
    update: NaturalUpdate
    initial_precision: Any
    cavity: str = field(metadata={"static": True})
    structure: str = field(metadata={"static": True})
    expands: bool = field(metadata={"static": True})  # whether first sites are expansions

    traits = Traits(approximates=True, has_local_steps=True)
    disclosure = Disclosure(
        "a change of this site's summary of its rows: estimates of the parameters, and how certain "
        "they are. Added up, the changes are this summary. No other kind of message reveals more",
        hidden_in_sums=True,
        warning="the messages add up to the estimates, and their certainty, of the rows of {rows}.",
    )

    @property
    def name(self) -> str:
        return name_of(self, _name)

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
        """Whether clients keep sites."""
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
    ) -> tuple[Broadcast, _Server]:
        self.participation.check(federation.num_clients)
        position = trees.as_floats(position, "position")
        check = check_model if self.posterior.local is None else check_latent_model
        check(self.posterior, position, federation)
        self.inference.check(self.posterior, position, federation, self.structure)
        prior = self.prior.init(self.posterior, rng_key, position)
        sites = self._first_site(position, jnp.asarray(federation.num_rows))
        for expansions in totals:
            sites = sites * expansions
        whole = prior * sites
        proper = is_proper(whole)
        optimizer = self.update.server_optimizer
        share = None
        if self.participation.weighted:
            share = mean_share(self.participation, federation.num_clients)
        server = _Server(
            _Approximation(whole, proper),
            whole,
            prior,
            () if optimizer == () else optimizer.init(whole),
            jnp.int32(federation.num_clients),
            () if share is None else share,
            jnp.zeros(()) if self.cavity == "global" else (),
        )
        # Clients begin where the run does, also where a prior alone has a mean (zero, for a
        # network).
        extra = self._sent(server, proper)
        return Broadcast(jnp.zeros((), jnp.int32), position, extra), server

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        if not self.stateful:
            return ()
        site = self._first_site(broadcast.position, client.size)
        if self.expands:
            site = site * self._expansions.site(broadcast.position, client)
        latents: ArrayTree = ()
        if isinstance(self.inference, LatentInference):
            latents = self.inference.first_locals(self.posterior, broadcast.position, client)
        return first_site(site, self.update.client_optimizer, latents, broadcast.round)

    def _first_site(self, position: ArrayTree, num_rows: Array) -> Gaussian:
        """Return a site about `position`, of the initial precision per row."""
        per_row = schedules.value(self.initial_precision, jnp.zeros((), jnp.int32))
        number = num_rows.astype(jnp.result_type(float)) * per_row
        centered = plus_precision(Gaussian.uniform(position, self.structure), number)
        return with_mean(position, centered.precision, self.structure)

    def _sent(self, server: _Server, proper: Array) -> _Sent:
        """Return what is broadcast besides the position, `proper` for whether the product is."""
        last = server.approximation
        site: Any = ()
        if self.cavity in ("average", "power"):
            site = server.product / server.prior
        if self.cavity == "average":
            site = site ** (1 / server.num_clients.astype(jnp.result_type(float)))
        approximation = trees.select(last.known, last.gaussian, server.product)
        return _Sent(approximation, site, proper, last.known)

    def _own(self, sent: _Sent, client_state: Any, client: Client) -> Gaussian:
        """Return the factor of the approximation that is the client's."""
        if self.cavity == "average":
            return sent.site
        if self.cavity == "power":
            return sent.site**client.share
        return client_state.site

    def _cavity(self, sent: _Sent, client_state: Any, client: Client) -> tuple[Gaussian, Gaussian]:
        """Return what the client's likelihood is multiplied by, and what its fit replaces.

        If the product is not proper, or the client's last fit was not, the cavity is the last
        proper approximation: fits then do not fail because of sites that are far off, and the
        fit over this cavity is a new site.
        """
        q = sent.approximation
        if self.cavity == "global":
            return q, q
        if self.cavity == "none":
            return trees.zeros_like(q), client_state.site
        own = self._own(sent, client_state, client)
        falls_back = ~sent.proper
        if self.stateful:
            falls_back |= client_state.lost
        falls_back &= sent.known
        return trees.select(falls_back, (q, q * own), (q / own, q))

    def message_like(self, like: Broadcast) -> ArrayTree:
        return trees.shapes_of(like.extra.approximation)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        return self.inference.prepare(rng_key, like.position, client)

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        site: Any = client_state
        if self.stateful and not trees.is_empty(site.next_round):
            moved, state = self.update.through_missed_rounds(
                site.site, site.optimizer, site.next_round, broadcast.round
            )
            site = site._replace(site=moved, optimizer=state, next_round=broadcast.round)
        cavity, before = self._cavity(broadcast.extra, site, client)
        given = (
            self.posterior,
            draws,
            broadcast.position,
            cavity,
            client,
            broadcast.round,
        )
        if isinstance(self.inference, LatentInference):
            (tilted, gradient_norm), latents = self.inference.fit_latents(*given, site.locals)
            site = site._replace(locals=latents)
        else:
            tilted, gradient_norm = self.inference.fit(*given)
        proper = is_proper(tilted)
        if self.stateful:
            site = site._replace(lost=~proper)
        change = trees.select(proper, tilted / before, trees.zeros_like(tilted))
        change = self.update.limited(change, broadcast.round)
        info = StepInfo(
            bits=jnp.asarray(trees.num_bits(change), jnp.int32),
            gradient_norm=gradient_norm,
            usable=proper,
            # The position follows from the natural parameters.
            bits_down=jnp.asarray(trees.num_bits(broadcast.extra), jnp.int32),
        )
        return change, site, info

    def commit(self, message: Gaussian, broadcast: Broadcast, client_state: ArrayTree) -> ArrayTree:
        if not self.stateful:
            return client_state
        kept: Any = client_state
        message = symmetric(message)  # as the server reads the sum
        site, state = self.update.at_client(message, kept.site, kept.optimizer, broadcast.round)
        kept = kept._replace(site=site, optimizer=state)
        if trees.is_empty(kept.next_round):
            return kept
        return kept._replace(next_round=kept.next_round + 1)

    def prepare_server(self, rng_key: Array, like: Broadcast) -> ArrayTree:
        return rng_key  # as it is: the prior's factor draws from it

    def aggregate(
        self, rng_key: Array, broadcast: Broadcast, server_state: _Server, total: Gaussian
    ) -> tuple[Broadcast, _Server, ArrayTree]:
        # If rounding made the approximation's precision not symmetric, each client would take that
        # out: it would grow by their number in every round.
        total = symmetric(total)
        if not trees.is_empty(server_state.sum_scale):
            total = total**server_state.sum_scale
        whole, optimizer = self.update.at_server(
            total, server_state.product, server_state.optimizer, broadcast.round
        )
        damping = schedules.value(self.update.damping, broadcast.round)
        last = server_state.approximation
        prior = self.prior.refine(self.posterior, rng_key, server_state.prior, last, damping)
        whole = whole * (prior / server_state.prior) if self.prior.moves else whole
        proper = is_proper(whole)
        shift = jnp.where(proper & last.known, _shift(last.gaussian, whole), jnp.inf)
        position = trees.select(proper, whole.mean(), broadcast.position)
        approximation = _Approximation(
            trees.select(proper, whole, last.gaussian), proper | last.known
        )
        filtered = server_state.num_filtered
        if not trees.is_empty(filtered):
            filtered = trees.cast(filtered + damping, filtered)
        server = server_state._replace(
            approximation=approximation,
            product=whole,
            prior=prior,
            optimizer=optimizer,
            num_filtered=filtered,
        )
        moved = broadcast._replace(
            round=broadcast.round + 1, position=position, extra=self._sent(server, proper)
        )
        return moved, server, Refined(proper, shift.astype(jnp.float32))

    def draw(self, rng_key: Array, state: FederatedState) -> ArrayTree:
        approximation = state.server.approximation
        return trees.select(
            approximation.known, approximation.gaussian.draw(rng_key), state.broadcast.position
        )


def _shift(before: Gaussian, after: Gaussian) -> Array:
    """Return the largest change of a mean in sds, or of the logarithm of an sd, ``[]``."""
    old, new = before.sds(), after.sds()
    moved = trees.ravel(trees.subtract(after.mean(), before.mean())) / new
    return jnp.max(jnp.maximum(jnp.abs(moved), jnp.abs(jnp.log(new / old))), initial=0)


def _check_latents(posterior: Posterior, inference: Inference, cavity: str) -> None:
    """Raise `ValueError` unless latents are moved where there are some, and kept."""
    takes = isinstance(inference, LatentInference)
    if posterior.local is None:
        if takes:
            raise ValueError(
                "mcmc_local moves latents of groups, and this posterior has none: use importance() "
                "or mcmc(...), or mark sites of the model with infer={'local': True}."
            )
        return
    refuse_two_levels(posterior.local)
    if not takes:
        raise ValueError(
            f"This posterior has latents of its groups, which {type(inference).__name__} does not "
            f"move: give inference=fedmcmc.inference.mcmc_local(), or integrate them out by "
            f"fedmcmc.marginal(posterior)."
        )
    if cavity not in ("site", "none"):
        raise ValueError(
            "Clients that keep no site keep no latents either: use fed_ep, or integrate latents "
            "out by fedmcmc.marginal(posterior)."
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

    Parameters
    ----------
    posterior
        The model.
    inference
        How a client fits a Gaussian to its likelihood times the cavity, of `fedmcmc.inference`.
    cavity
        What the client's likelihood is multiplied by. ``"site"``: the global approximation over the
        client's own site, which it keeps (expectation propagation). ``"average"``: over the
        average site ``(q / prior)^(1 / num_clients)``; ``"power"``: over ``q / prior`` to the power
        of the client's share of the rows; ``"global"``: the global approximation itself (assumed
        density filtering). With these three clients keep nothing. ``"none"``: a
        constant; the client keeps a site, which is then its likelihood's own Gaussian.
    structure
        ``"diagonal"``, ``"scaled_identity"`` or ``"dense"``.
    damping
        Multiplies changes of natural parameters, at the server and at the clients alike: a number
        or a schedule of the round. With an optimizer, what it returns; one that is not linear in
        what it is given (Adagrad, Adam) is to be given a mean by ``optax.chain(optax.scale(...),
        ...)`` instead.
    server_optimizer, client_optimizer
        As from optax: a change is the direction of ascent that they are given, in place of the
        change itself. The client's acts on its site, and keeps its state from round to round. A
        client that was absent first takes a step with a change of zero for each round that it
        missed, at the present round's damping: its momentum moves its site as it moved the server's
        product. (In the paper a client's momentum waits, so that the product runs ahead of the
        sites; many cavities are then not proper.)
    participation
        Everyone by default. The server adds the messages of those who take part. With
        ``"average"`` and ``"power"`` a message counts the mean probability of taking part over the
        client's own, which is once if all probabilities are the same.
    prior
        The prior's Gaussian, of `structure`. By default the server finds it from the log prior,
        exactly where that is Gaussian (and has no more structure than `structure`), else refined
        in each round like a site: the Gaussian whose gradient and second derivatives are the log
        prior's expected ones under the approximation. ``Gaussian.uniform(position)`` spares the
        server that work where the log prior is constant.
    num_prior_samples
        Draws for these expectations.
    initial_precision
        Precision per row of the clients' first sites, about the first position; zero for constants.
        A schedule is read at round zero, also after `fedmcmc.switch`.
    first_sites
        ``"constant"``, or ``"expansion"``: each client's log likelihood to second order at the
        first position, which is best the mode (`fedmcmc.surrogates.mode`, `fedmcmc.whiten`). The
        first approximation is then Laplace's, for one exchange more before the first round.
    max_norm
        Changes of a longer Euclidean norm are scaled down to it, at the client; the released code
        does so, the paper does not.

    Returns
    -------
    FederatedKernel
        ``state.broadcast.position`` is the approximation's mean (in the first round, where the run
        starts), the `Gaussian` itself is
        ``state.server.approximation.gaussian``, the clients' sites are ``state.clients.site``;
        draws are from the approximation.

    Notes
    -----
    A client whose fit is not proper (a precision that is not positive definite, or a number that
    is not finite) changes nothing: it keeps its site and sends zero (``StepInfo.usable``). The next
    time its cavity is the whole approximation, and its site becomes what the fit has beyond that.
    If the product of all factors is not proper (``RoundInfo.server``), position, draws and
    ``state.server.approximation`` stay those of the last proper product, and clients refine their
    sites with that for a cavity, until the product, ``state.server.product``, is proper again.
    Until there is a proper product, position and draws are where the run started.

    References
    ----------
    Guo et al. (2023), Federated learning as variational inference: a scalable expectation
    propagation approach, Algorithms 1, 3 and 4.
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
        raise ValueError(f"client_optimizer acts on sites, which cavity={cavity!r} has none of.")
    if participation.repeats and cavity in ("site", "none"):
        raise ValueError(
            "A client that keeps a site takes part at most once per round: use "
            "uniform(cohort_size) or bernoulli(...), or a stateless cavity."
        )
    _check_latents(posterior, inference, cavity)
    # A site changes by just what its client sends, a filter takes in just the rows that it sees.
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
