"""FedEP, FedSEP and assumed density filtering: Gaussian approximations by expectation propagation.

Source: Guo et al. (2023), Federated learning as variational inference: a scalable expectation
propagation approach. The steps are in docs/explanation/algorithms.md.
"""

from typing import TYPE_CHECKING, Literal

from fedmcmc._checks import expect
from fedmcmc.gaussian import Gaussian
from fedmcmc.inference import Inference, importance, mcmc_local
from fedmcmc.kernels import natural
from fedmcmc.participation import cohorts_of
from fedmcmc.types import FederatedKernel, Number, Participation, Posterior

if TYPE_CHECKING:
    import optax

DAMPING = 0.7
"""Damping of `fed_ep` without settings: few rounds suffice for posteriors near a Gaussian."""


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
    """Build federated expectation propagation: each client keeps and refines a Gaussian site.

    A client of the cohort divides the approximation by its own site (this is its cavity), fits a
    Gaussian to the cavity times its likelihood, and sends the change of natural parameters, which
    both apply. `fedmcmc.natural` documents states and draws, docs/guides/fed_ep.md settings.

    Parameters
    ----------
    posterior, inference
        Model, and fit at a client: `fedmcmc.inference.importance`, `exact_gaussian`,
        `scaled_identity`, `mcmc`, `laplace`, `ngvi`, or `mcmc_local` for latents of groups. If it
        is ``None``, the defaults are for up to 64 parameters and a run that starts at the mode:
        `importance` (or `mcmc_local`), a dense structure, damping 0.7, and expansions as first
        sites. Otherwise the defaults are the paper's: a diagonal structure, no damping, and
        constant first sites.
    cohort_size, participation
        Number of clients drawn uniformly per round, or another rule without repeats; all by
        default.
    damping, server_optimizer, client_optimizer, max_norm
        See `fedmcmc.natural_parameters`.
    structure, prior, initial_precision, first_sites
        See `fedmcmc.natural`.

    References
    ----------
    Guo et al. (2023), eq. 3 and Algorithms 1, 3 and 4.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(4)])
    >>> kernel = fed_ep(posterior, inference=fedmcmc.inference.exact_gaussian())
    >>> init, step = fedmcmc.simulate(kernel, data)
    >>> state, info = jax.jit(step)(jax.random.key(0), init(jnp.array(0.0)))
    >>> state.server.approximation.gaussian.mean().tolist()  # 3 / 8
    0.375
    """
    expect(posterior, Posterior, "posterior")
    as_in_paper = inference is not None
    default_sites: Literal["constant", "expansion"] = "constant" if as_in_paper else "expansion"
    if inference is None:
        inference = importance() if posterior.local is None else mcmc_local()
    return natural(
        posterior,
        inference,
        cavity="site",
        structure=("diagonal" if as_in_paper else "dense") if structure is None else structure,
        damping=(1.0 if as_in_paper else DAMPING) if damping is None else damping,
        server_optimizer=server_optimizer,
        client_optimizer=client_optimizer,
        participation=cohorts_of(cohort_size, participation),
        prior=prior,
        initial_precision=initial_precision,
        first_sites=default_sites if first_sites is None else first_sites,
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
    """Build federated stochastic expectation propagation, whose clients keep nothing.

    All clients share one average site, which the server derives from its own state. It adds the
    changes of the clients that take part (Algorithm 3). If participation probabilities differ, a
    change is multiplied by the mean probability divided by the client's own.

    Parameters
    ----------
    posterior, inference, cohort_size, server_optimizer, structure
        See `fedmcmc.fed_ep`.
    damping
        Factor of the changes. The authors' code moves along the cohort's mean change, which is a
        damping of one over the cohort's size, times the server optimizer's step. A damping of
        ``num_clients / cohort_size`` makes a cohort represent all clients, and the approximation
        then depends on the last cohort only.
    cavity
        ``"average"``, as in the paper: the approximation divided by
        ``(q / prior)^(1 / num_clients)``. ``"power"`` uses the client's share of the rows as the
        power. With a flat prior this is the cavity in the authors' code, the approximation to the
        power ``1 - share``.
    participation, prior, initial_precision, max_norm
        See `fedmcmc.natural`.

    Notes
    -----
    For Gaussian likelihoods one round of all clients with dense sites gives the posterior from any
    start. With cohorts the approximation varies around the posterior, less so with a small
    `damping`. With diagonal or scaled-identity sites the mean at a fixed point is biased unless
    clients agree. `fedmcmc.fed_ep` has no such bias, but stores one site per client.

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
    """Build assumed density filtering, where the approximation itself is the cavity.

    A client multiplies the approximation by its likelihood each time that it takes part. One round
    of all clients counts each row once. Further rounds count rows again and make the approximation
    too narrow, so a run of more than one pass over the clients warns. Cohorts are drawn again in
    each round, so within a pass a client may take part twice or not at all.

    Parameters
    ----------
    posterior, inference, cohort_size, damping, server_optimizer, structure
        See `fedmcmc.fed_ep`.
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
