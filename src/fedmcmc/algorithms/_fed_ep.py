"""FedEP, FedSEP and assumed density filtering: Gaussian approximations by expectation propagation.

Source: Guo et al. (2023), Federated learning as variational inference: a scalable expectation
propagation approach.
"""

from typing import TYPE_CHECKING, Literal

from fedmcmc._checks import expect
from fedmcmc._types import FederatedKernel, Number, Participation, Posterior
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference import Inference, importance, mcmc_local
from fedmcmc.kernels import natural
from fedmcmc.participation import cohorts_of

if TYPE_CHECKING:
    import optax

DAMPING = 0.7
"""Where nothing is chosen: at one a few rounds suffice for posteriors near a Gaussian."""


def fed_ep(
    posterior: Posterior,
    *,
    inference: Inference | None = None,
    cohort_size: int | None = None,
    damping: Number | None = None,
    server_optimizer: "optax.GradientTransformation | None" = None,
    client_optimizer: "optax.GradientTransformation | None" = None,
    structure: Literal["diagonal", "scaled_identity", "dense"] | None = None,
    participation: Participation | None = None,
    prior: Gaussian | None = None,
    initial_precision: Number = 0.0,
    first_sites: Literal["constant", "expansion"] | None = None,
    max_norm: Number | None = None,
) -> FederatedKernel:
    """Federated expectation propagation: each client keeps and refines a site.

    The approximation is the prior's factor times one Gaussian site per client. A client of the
    cohort fits a Gaussian to its likelihood times its cavity (the approximation divided by the
    client's own site). It sends the change of natural parameters from the approximation to that
    fit. Server and client both apply the change, so the approximation stays the product of the
    prior and the sites.

    Parameters
    ----------
    posterior
        The model.
    inference
        How a client fits: `fedmcmc.inference.importance`, `exact_gaussian`, `scaled_identity` (the
        paper's I), `mcmc` (M), `laplace` (L) or `ngvi` (V). Without one, all defaults are for
        models of up to 64 numbers: `importance`, a dense structure, damping 0.7, and expansions
        for first sites, so that the run is to start at the mode; nothing is random then but draws,
        and a few rounds come to rest (``until=fedmcmc.at_rest()``). With one, defaults are the
        paper's: a diagonal structure, no damping, constants for first sites. A posterior with
        latents of groups takes `fedmcmc.inference.mcmc_local`, which is random, and is its default.
    cohort_size
        Clients per round, drawn uniformly without replacement; ``None`` for all.
    damping
        Multiplies changes, on both sides: a number or a schedule of the round. With many clients
        at once, plain steps overshoot: the released code takes one over the cohort's size. It
        multiplies what an optimizer returns; one that is not linear in what it is given (Adagrad,
        Adam) is to be given the mean, ``optax.chain(optax.scale(1 / cohort_size), ...)``.
    server_optimizer, client_optimizer
        As from optax, along changes of natural parameters; plain steps by default. The
        approximation is the product of the prior and the sites if both are the same and linear in
        the changes (SGD with or without momentum). Otherwise the sums of their steps must agree in
        the long run. A client that was absent first takes the steps that its momentum asks for in
        the rounds that it missed; see `fedmcmc.natural`.
    structure
        Of the approximation and the sites.
    participation
        Any other rule without repeats, in place of `cohort_size`.
    prior
        A `fedmcmc.Gaussian` for the prior; by default the server finds it from the log prior.
        ``Gaussian.uniform(position)`` for a flat one, also where the posterior has another (whose
        part a ``weight_decay`` of the clients then plays, as in the released code).
    initial_precision
        Precision per row of the first sites, about the first position; zero for constants.
    first_sites
        ``"constant"``, or ``"expansion"`` of the log likelihood at the first position, see
        `fedmcmc.natural`.
    max_norm
        Longer changes are scaled down to this Euclidean norm; see `fedmcmc.natural`.

    Returns
    -------
    FederatedKernel
        Draws are from the approximation, ``state.broadcast.position`` is its mean (the point
        estimate), ``state.server.approximation.gaussian`` the `Gaussian`, and
        ``state.clients.site`` the sites, which serve as surrogates of `fedmcmc.fsgld` as they are.
        In ``samples.state`` all of them have a leading chain axis.

    Notes
    -----
    A client whose fit is not proper changes nothing (``samples.info["num_lost"]`` counts them). If
    the product of all sites is not proper, position and draws stay those of the last proper one,
    which is also the clients' cavity until the product is proper again; see `fedmcmc.natural`.

    For Gaussian likelihoods: with dense sites, constants to begin with and all clients, one round
    gives the posterior; with diagonal sites (moments matched) or a scaled identity the mean is
    exact wherever a run comes to rest.

    References
    ----------
    Guo et al. (2023), section 2.1 and Algorithms 1, 3 and 4.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> kernel = fed_ep(posterior, inference=fedmcmc.inference.exact_gaussian())
    >>> init, step = fedmcmc.simulate(kernel, data)
    >>> state, info = jax.jit(step)(jax.random.key(0), init(jnp.array(0.0)))
    >>> fitted = state.server.approximation.gaussian
    >>> float(fitted.mean()), float(fitted.precision)  # 3 / 8 of precision 8
    (0.375, 8.0)
    """
    expect(posterior, Posterior, "posterior")
    plain = inference is not None
    if inference is None:
        inference = importance() if posterior.local is None else mcmc_local()
    return natural(
        posterior,
        inference,
        cavity="site",
        structure=("diagonal" if plain else "dense") if structure is None else structure,
        damping=(1.0 if plain else DAMPING) if damping is None else damping,
        server_optimizer=server_optimizer,
        client_optimizer=client_optimizer,
        participation=cohorts_of(cohort_size, participation),
        prior=prior,
        initial_precision=initial_precision,
        first_sites=("constant" if plain else "expansion") if first_sites is None else first_sites,
        max_norm=max_norm,
    )


def fed_sep(
    posterior: Posterior,
    *,
    inference: Inference,
    cohort_size: int | None = None,
    damping: Number = 1.0,
    server_optimizer: "optax.GradientTransformation | None" = None,
    structure: Literal["diagonal", "scaled_identity", "dense"] = "diagonal",
    cavity: Literal["average", "power"] = "average",
    participation: Participation | None = None,
    prior: Gaussian | None = None,
    initial_precision: Number = 0.0,
    max_norm: Number | None = None,
) -> FederatedKernel:
    """Federated stochastic expectation propagation: clients keep nothing.

    As `fedmcmc.fed_ep`, but all clients share one average site, which follows from what the server
    knows. The server adds the changes of the clients that take part, as in Algorithm 3: a change
    replaces one of the average sites by the client's. If clients take part with different
    probabilities, a change counts the mean probability over the client's own.

    Parameters
    ----------
    posterior, inference, cohort_size, server_optimizer, structure
        As for `fedmcmc.fed_ep`.
    damping
        Likewise. The released code moves along the mean of the cohort's changes, which is a damping
        of one over the cohort's size, times the server optimizer's step. A damping of the number of
        clients over the cohort's size lets a cohort stand for all clients; the approximation then
        forgets all but the last cohort.
    cavity
        ``"average"``, the paper's: the approximation over ``(q / prior)^(1 / num_clients)``.
        ``"power"``: the same with the client's share of the rows for the power; with a flat prior
        that of the released code, the power ``1 - share`` of the approximation.
    participation, prior, initial_precision, max_norm
        See `fedmcmc.natural`.

    Notes
    -----
    With dense sites, Gaussian likelihoods and all clients one round gives the posterior, from any
    start. With cohorts the approximation varies from round to round about the posterior, by less if
    `damping` is small. With diagonal sites or a scaled identity the mean at rest is biased, unless
    clients agree; `fedmcmc.fed_ep` has no such bias, at the price of one site per client.

    References
    ----------
    Guo et al. (2023), section 2.2.4 and Algorithms 3 and 4; Li et al. (2015), Stochastic
    expectation propagation.
    """
    if cavity not in ("average", "power"):
        raise ValueError(f'cavity must be "average" or "power", got {cavity!r}.')
    return natural(
        posterior,
        inference,
        cavity=cavity,
        structure=structure,
        damping=damping,
        server_optimizer=server_optimizer,
        participation=cohorts_of(cohort_size, participation),
        prior=prior,
        initial_precision=initial_precision,
        max_norm=max_norm,
    )


def adf(
    posterior: Posterior,
    *,
    inference: Inference,
    cohort_size: int | None = None,
    damping: Number = 1.0,
    server_optimizer: "optax.GradientTransformation | None" = None,
    structure: Literal["diagonal", "scaled_identity", "dense"] = "diagonal",
    participation: Participation | None = None,
    prior: Gaussian | None = None,
    initial_precision: Number = 0.0,
    max_norm: Number | None = None,
) -> FederatedKernel:
    """Assumed density filtering: the approximation itself is the cavity.

    A client multiplies its likelihood into the approximation each time that it takes part. One
    round of all clients counts each row once. More rounds count rows again, so that the
    approximation becomes too narrow: a run of more than one pass over the clients warns. Cohorts
    are drawn anew in each round, so within a pass some clients are drawn twice and others not at
    all.

    Parameters
    ----------
    posterior, inference, cohort_size, damping, server_optimizer, structure
        As for `fedmcmc.fed_ep`.
    participation, prior, initial_precision, max_norm
        See `fedmcmc.natural`.

    References
    ----------
    Minka (2001), Expectation propagation for approximate Bayesian inference, section 2.
    """
    return natural(
        posterior,
        inference,
        cavity="global",
        structure=structure,
        damping=damping,
        server_optimizer=server_optimizer,
        participation=cohorts_of(cohort_size, participation),
        prior=prior,
        initial_precision=initial_precision,
        max_norm=max_norm,
    )
