"""FedAvg with optimizers on both sides, and FedPA: optimization that corrects for local covariance.

Sources: McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized
data; Reddi et al. (2021), Adaptive federated optimization; Al-Shedivat et al. (2021), Federated
learning via posterior averaging.
"""

from typing import TYPE_CHECKING

from fedmcmc._types import FederatedKernel, Number, Participation, Posterior
from fedmcmc.dynamics import local_steps, training
from fedmcmc.kernels import displacement, posterior_delta, pseudo_gradients
from fedmcmc.participation import cohorts_of

if TYPE_CHECKING:
    import optax


def fed_avg(
    posterior: Posterior,
    *,
    client_optimizer: "optax.GradientTransformation",
    num_local_epochs: int | None = None,
    num_local_steps: int | None = None,
    batch_size: int | None = None,
    server_optimizer: "optax.GradientTransformation | None" = None,
    cohort_size: int | None = None,
    participation: Participation | None = None,
    client_learning_rate: Number = 1.0,
    server_learning_rate: Number = 1.0,
) -> FederatedKernel:
    """Federated averaging, with an optimizer at the clients and one at the server (FedOpt).

    A client of the cohort trains from the broadcast position and sends how far it came; the server
    takes minus the mean, weighted by the clients' numbers of rows, for a gradient.

    Parameters
    ----------
    posterior
        The model; a flat prior is the papers' case. A client minimizes minus the mean log
        likelihood of its rows minus ``log prior / num_rows``, so that with one local step the
        server descends minus the log posterior, over the number of all rows.
    client_optimizer
        As from optax; its state starts anew in every round, and a schedule in it counts local
        steps.
    num_local_epochs, num_local_steps
        Either passes over a client's rows per round, each in a new order, or steps on minibatches
        drawn with replacement.
    batch_size
        Rows per step, an integer; ``None`` for all of a client's. Where an epoch is not a multiple
        of it, its last step takes the rows that are left.
    server_optimizer
        As from optax: ``optax.sgd(lr, momentum)``, ``optax.adagrad``, ``optax.adam``,
        ``optax.yogi``. By default the server averages positions, ``optax.sgd(1.0)``.
    cohort_size
        Clients per round, drawn uniformly without replacement; ``None`` for all.
    participation
        Any other rule, in place of `cohort_size`.
    client_learning_rate, server_learning_rate
        Multiply what the optimizers return: numbers or schedules of the round. Another one needs
        no new compilation, another optimizer does.

    Returns
    -------
    FederatedKernel
        Its draws are the server's position, a point estimate.

    Notes
    -----
    The large-batch SGD of the papers, where clients send gradients, is ``num_local_steps=1``.

    On quadratics ``A_k`` with minima ``m_k``, full gradients and ``K`` plain steps of size ``lr``
    the fixed point is ``(sum_k w_k M_k)^{-1} sum_k w_k M_k m_k`` with
    ``M_k = I - (I - lr A_k)^K``, which is not the posterior mean where the ``A_k`` differ.

    References
    ----------
    Reddi et al. (2021), Algorithm 1.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> kernel = fed_avg(posterior, client_optimizer=optax.sgd(0.5), num_local_epochs=5)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=30, progress=False
    ... )
    >>> float(samples.draws[0, -1].round(3))
    0.75
    """
    length, estimator = local_steps(num_local_epochs, num_local_steps, batch_size)
    return pseudo_gradients(
        posterior,
        estimator,
        displacement(),
        training=training(client_optimizer, length, client_learning_rate, name="client_optimizer"),
        server_optimizer=server_optimizer,
        learning_rate=server_learning_rate,
        participation=cohorts_of(cohort_size, participation),
    )


def fed_pa(
    posterior: Posterior,
    *,
    client_optimizer: "optax.GradientTransformation",
    shrinkage: Number,
    num_samples: int,
    num_burnin: int = 0,
    num_discarded: int = 0,
    num_local_epochs: int | None = None,
    num_local_steps: int | None = None,
    batch_size: int | None = None,
    server_optimizer: "optax.GradientTransformation | None" = None,
    cohort_size: int | None = None,
    participation: Participation | None = None,
    client_learning_rate: Number = 1.0,
    server_learning_rate: Number = 1.0,
) -> FederatedKernel:
    """Federated posterior averaging: pseudo-gradients of Gaussians fitted to local samples.

    A client's training is taken for sampling: after a burn-in, the average of the iterates of an
    epoch (or of `num_local_steps` steps) is one sample of its local posterior. It sends
    ``C^{-1} (theta - m)`` with the samples' mean ``m`` and shrunken covariance ``C``, see
    `fedmcmc.posterior_delta`. With exact moments the fixed point is the posterior mean for
    Gaussian likelihoods, where that of federated averaging is not.

    Parameters
    ----------
    posterior, client_optimizer, batch_size, server_optimizer, cohort_size, participation
        As for `fedmcmc.fed_avg`.
    shrinkage
        The paper's ``rho``, at least zero; zero takes the identity for the covariance. Larger
        values trust the samples' covariance more, and need more samples or smaller steps.
    num_samples, num_burnin
        Samples per round, and epochs (or windows) before the first.
    num_discarded
        Epochs (or windows) between two samples that are not used, so that samples depend less on
        each other.
    num_local_epochs
        Epochs in all, by default as many as `num_burnin`, `num_samples` and `num_discarded` take;
        if there are more, they are burn-in.
    num_local_steps
        In place of epochs, windows of so many steps on minibatches drawn with replacement.
    client_learning_rate, server_learning_rate
        As for `fedmcmc.fed_avg`.

    Returns
    -------
    FederatedKernel
        Its draws are the server's position, a point estimate. Its state fits `fedmcmc.fed_avg` of
        the same server optimizer, with which the paper burns in:
        ``sample(..., state=burnt_in.state)`` goes on from there.

    References
    ----------
    Al-Shedivat et al. (2021), Algorithms 1 to 4.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: 0.0, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> kernel = fed_pa(
    ...     posterior,
    ...     client_optimizer=optax.sgd(0.5),
    ...     shrinkage=0.01,
    ...     num_samples=5,
    ...     num_local_epochs=10,
    ... )
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, 0.0, num_rounds=30, progress=False
    ... )
    >>> float(samples.draws[0, -1].round(3))
    0.75
    """
    if num_local_epochs is None and num_local_steps is None:
        num_local_epochs = num_burnin + num_samples + (num_samples - 1) * num_discarded
    length, estimator = local_steps(
        num_local_epochs, num_local_steps, batch_size, num_samples, num_burnin, num_discarded
    )
    return pseudo_gradients(
        posterior,
        estimator,
        posterior_delta(shrinkage),
        training=training(client_optimizer, length, client_learning_rate, name="client_optimizer"),
        server_optimizer=server_optimizer,
        learning_rate=server_learning_rate,
        participation=cohorts_of(cohort_size, participation),
    )
