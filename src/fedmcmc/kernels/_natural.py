"""Natural parameters: clients refine Gaussian factors, and the server multiplies them.

The global approximation is a Gaussian ``q``. A client fits a Gaussian to its likelihood times a
cavity, and sends how much the global natural parameters are to change for it: that change is the
message, so that the server only ever sums, and any compressor applies.

Source: Guo et al. (2023), Federated learning as variational inference: a scalable expectation
propagation approach, Algorithms 1, 3 and 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    Client,
    FederatedKernel,
    FederatedState,
    Number,
    Participation,
    Posterior,
    Static,
    StepInfo,
    as_functions,
)
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import STRUCTURES, Gaussian, is_proper
from fedmcmc.inference import Inference
from fedmcmc.kernels._natural_rules import (
    CAVITIES,
    Approximation,
    Server,
    Site,
    ascend,
    cavity_of,
    change_of,
    first_sites,
    own_participation,
    start_global,
    to_broadcast,
)
from fedmcmc.kernels._prior_site import PriorSite, prior_site
from fedmcmc.kernels._shared import check_model
from fedmcmc.pytrees import schedules, trees

__all__ = ["natural"]


class _Parameters(NamedTuple):
    posterior: Posterior
    inference: Inference
    prior: PriorSite
    damping: Any
    server_optimizer: Any  # () for plain steps
    client_optimizer: Any  # likewise
    initial_precision: Any
    max_norm: Any  # () for none
    cavity: Static[str]
    structure: Static[str]
    stateful: Static[bool]


def natural(
    posterior: Posterior,
    inference: Inference,
    *,
    cavity: str = "site",
    structure: str = "diagonal",
    damping: Number = 1.0,
    server_optimizer: optax.GradientTransformation | None = None,
    client_optimizer: optax.GradientTransformation | None = None,
    participation: Participation | None = None,
    prior: Gaussian | None = None,
    num_prior_samples: int = 16,
    initial_precision: Number = 0.0,
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
        or a schedule of the round. With an optimiser, what it returns; one that is not linear in
        what it is given (Adagrad, Adam) is to be given a mean by ``optax.chain(optax.scale(...),
        ...)`` instead.
    server_optimizer, client_optimizer
        As from optax: a change is the direction of ascent that they are given, in place of the
        change itself. The client's acts on its site, and keeps its state from round to round.
    participation
        Everyone by default. With ``"average"`` and ``"power"`` a message is weighted by one over
        the client's probability of taking part, as the cohort stands for everyone; else not, as a
        site changes by just what its client sends, and a filter takes in the rows that it sees.
    prior
        The prior's Gaussian, of `structure`. By default the server finds it from the log prior,
        exactly where that is Gaussian (and has no more structure than `structure`), else refined
        in each round like a site: the Gaussian whose gradient and second derivatives are the log
        prior's expected ones under the approximation. ``Gaussian.uniform(position)`` spares the
        server that work where the log prior is constant.
    num_prior_samples
        Draws for these expectations.
    initial_precision
        Precision a row of the clients' first sites, about the first position; zero for constants. A
        schedule is read at round zero, also after `fedmcmc.switch`.
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
    is not finite) changes nothing: it keeps its site and sends zero, and ``StepInfo.usable`` says
    so. Where the product of all sites is not proper, it is kept as it is and sites go on being
    refined, while position, draws and ``state.server.approximation`` stay those of the last proper
    product (until there is one, the position is where the run started, and so are draws);
    ``RoundInfo.server`` says so.

    References
    ----------
    Guo et al. (2023), Algorithms 1, 3 and 4.
    """
    if cavity not in CAVITIES:
        raise ValueError(f"cavity must be one of {CAVITIES}, got {cavity!r}.")
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {STRUCTURES}, got {structure!r}.")
    expect(posterior, Posterior, "posterior")
    expect(inference, Inference, "inference")
    if participation is not None:
        expect(participation, Participation, "participation")
    stateful = cavity in ("site", "none")
    if client_optimizer is not None and not stateful:
        raise ValueError(f"client_optimizer acts on sites, which cavity={cavity!r} has none of.")
    clip: Any = () if max_norm is None else schedules.number(max_norm, "max_norm", minimum=0.0)
    parameters = as_functions(
        _Parameters(
            posterior,
            inference,
            prior_site(prior, structure, positive_integer(num_prior_samples, "num_prior_samples")),
            schedules.number(damping, "damping", minimum=0.0, strict=True),
            _optimizer(server_optimizer, "server_optimizer"),
            _optimizer(client_optimizer, "client_optimizer"),
            schedules.number(initial_precision, "initial_precision", minimum=0.0),
            clip,
            Static(cavity),
            Static(structure),
            Static(stateful),
        )
    )
    participation = own_participation(participation, cavity)
    return FederatedKernel(
        init=Partial(_init, parameters, participation),
        prepare=Partial(_prepare, parameters),
        step=Partial(_step, parameters),
        aggregate=Partial(_aggregate, parameters),
        draw=Partial(_draw),
        participation=participation,
        constrain_fn=parameters.posterior.constrain_fn,
        message_fn=Partial(_shapes),
        clients_apart=Static(True),
        commit=Partial(_commit, parameters) if stateful else None,
    )


def _optimizer(optimizer: Any, name: str) -> Any:
    if optimizer is None:
        return ()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation or None, got "
            f"{type(optimizer).__name__}."
        )
    return optimizer


def _init(
    parameters: _Parameters,
    participation: Participation,
    rng_key: Array,
    position: ArrayTree,
    data: FederatedData,
) -> FederatedState:
    posterior, structure = parameters.posterior, parameters.structure.value
    participation.check(data.num_clients)
    position = jax.tree.map(trees.as_float, position)
    check_model(posterior, position, data)
    parameters.inference.check(posterior, position, data, structure)
    per_row = schedules.value(parameters.initial_precision, jnp.zeros((), jnp.int32))
    prior = parameters.prior.init(posterior, rng_key, position)
    whole, sites = start_global(prior, position, per_row, data, parameters.stateful.value)
    clients: ArrayTree = ()
    if parameters.stateful.value:
        clients = first_sites(sites, parameters.client_optimizer)
    proper = is_proper(whole)
    server = Server(
        Approximation(whole, proper),
        prior,
        () if parameters.server_optimizer == () else parameters.server_optimizer.init(whole),
        jnp.int32(data.num_clients),
    )
    # Clients begin where the run does, also where a prior alone has a mean (zero, for a network).
    extra = to_broadcast(parameters.cavity.value, whole, prior, server.num_clients)
    return FederatedState(Broadcast(jnp.zeros((), jnp.int32), position, extra), server, clients)


def _shapes(like: Broadcast) -> ArrayTree:
    return trees.shapes_of(like.extra[0])


def _prepare(parameters: _Parameters, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
    return parameters.inference.prepare(rng_key, like.position, client)


def _step(
    parameters: _Parameters,
    draws: ArrayTree,
    broadcast: Broadcast,
    client_state: ArrayTree,
    client: Client,
) -> tuple[Gaussian, ArrayTree, StepInfo]:
    whole, *rest = broadcast.extra
    cavity = cavity_of(parameters.cavity.value, whole, rest, client_state, client)
    tilted, gradient_norm = parameters.inference.fit(
        parameters.posterior, draws, broadcast.position, cavity, client, broadcast.round
    )
    whole_before = whole if parameters.cavity.value != "none" else client_state.site
    change, proper = change_of(tilted, whole_before, parameters.max_norm, broadcast.round)
    info = StepInfo(
        bits=jnp.asarray(trees.num_bits(change), jnp.int32),
        gradient_norm=gradient_norm,
        usable=proper,
        # The position follows from the natural parameters.
        bits_down=jnp.asarray(trees.num_bits(broadcast.extra), jnp.int32),
    )
    return change, client_state, info


def _commit(
    parameters: _Parameters, message: Gaussian, broadcast: Broadcast, client_state: Site
) -> Site:
    damping = schedules.value(parameters.damping, broadcast.round)
    site, state = ascend(
        parameters.client_optimizer, damping, message, client_state.site, client_state.optimizer
    )
    return Site(site, state)


def _aggregate(
    parameters: _Parameters,
    rng_key: Array,
    broadcast: Broadcast,
    server_state: Server,
    total: Gaussian,
) -> tuple[Broadcast, Server, ArrayTree]:
    damping = schedules.value(parameters.damping, broadcast.round)
    before = broadcast.extra[0]
    whole, optimizer = ascend(
        parameters.server_optimizer, damping, total, before, server_state.optimizer
    )
    prior = parameters.prior.refine(
        parameters.posterior, rng_key, server_state.prior, server_state.approximation, damping
    )
    whole = whole * (prior / server_state.prior) if parameters.prior.moves else whole
    proper = is_proper(whole)
    approximation = server_state.approximation
    position = trees.select(proper, whole.mean(), broadcast.position)
    kept = Approximation(
        trees.select(proper, whole, approximation.gaussian), proper | approximation.known
    )
    num_clients = server_state.num_clients
    extra = to_broadcast(parameters.cavity.value, whole, prior, num_clients)
    moved = broadcast._replace(round=broadcast.round + 1, position=position, extra=extra)
    return moved, Server(kept, prior, optimizer, num_clients), proper


def _draw(rng_key: Array, state: FederatedState) -> ArrayTree:
    kept = state.server.approximation
    return trees.select(kept.known, kept.gaussian.draw(rng_key), state.broadcast.position)
