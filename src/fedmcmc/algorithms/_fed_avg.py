"""FedAvg with optimizers at clients and server, and FedPA, which corrects for local covariance.

Sources: McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized
data; Reddi et al. (2021), Adaptive federated optimization; Al-Shedivat et al. (2021), Federated
learning via posterior averaging.
"""

from typing import TYPE_CHECKING

from fedmcmc.dynamics import local_steps, training
from fedmcmc.kernels import displacement, posterior_delta, pseudo_gradients
from fedmcmc.participation import cohorts_of
from fedmcmc.types import FederatedKernel, Number, Participation, Posterior

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
    """Build federated averaging with an optimizer at the clients and one at the server (FedOpt).

    Each client of the cohort trains from the broadcast position and sends its displacement. The
    server uses minus their mean, weighted by numbers of rows, as a gradient (Reddi et al. 2021,
    Algorithm 1). Draws are a point estimate.

    Parameters
    ----------
    posterior
        Model, see `fedmcmc.pseudo_gradients`; the papers use a flat prior.
    client_optimizer, server_optimizer
        Optimizers of optax. The clients' optimizer starts again in each round, and its schedules
        count local steps. The server's default, ``optax.sgd(1.0)``, averages positions.
    num_local_epochs, num_local_steps
        Number of passes over a client's rows per round, each in a new order, or number of steps on
        minibatches drawn with replacement. Exactly one of them is required.
    batch_size
        Number of rows per step; ``None`` for all. An epoch ends with a step on the remaining rows.
    cohort_size, participation
        Number of clients drawn uniformly per round, or another rule; all by default.
    client_learning_rate, server_learning_rate
        Factors of the updates, numbers or schedules of the round. A new number compiles nothing
        again, a new optimizer does.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc, optax
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> kernel = fed_avg(posterior, client_optimizer=optax.sgd(0.5), num_local_epochs=9)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=9, progress=False)
    >>> float(samples.draws[0, -1].round(2))
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
    """Build federated posterior averaging: pseudo-gradients of Gaussians fitted to local samples.

    A client treats its training as sampling. After a burn-in, the average of the iterates of each
    epoch (or of `num_local_steps` steps) is one sample of its local posterior. The client sends
    ``C^{-1} (theta - m)``, with the samples' mean ``m`` and shrunken covariance ``C`` (Al-Shedivat
    et al. 2021, Algorithms 1 to 4). Draws are a point estimate. The paper burns in by `fed_avg`:
    ``sample(..., state=burnt_in.state)``.

    Parameters
    ----------
    posterior, client_optimizer, batch_size, server_optimizer, cohort_size, participation
        See `fedmcmc.fed_avg`.
    client_learning_rate, server_learning_rate
        See `fedmcmc.fed_avg`.
    shrinkage
        ``rho`` of the paper, see `fedmcmc.kernels.posterior_delta`.
    num_samples, num_burnin
        Number of samples per round, and number of epochs (or windows) before the first sample.
    num_discarded
        Number of unused epochs (or windows) between two samples, which reduce their correlation.
    num_local_epochs
        Total number of epochs, by default the number that the three arguments above require.
        Additional epochs extend the burn-in.
    num_local_steps
        Number of steps per window on minibatches with replacement; replaces epochs by windows.

    Examples
    --------
    >>> import optax, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> settings = dict(shrinkage=0.01, num_samples=5, num_local_epochs=10)
    >>> fed_pa(posterior, client_optimizer=optax.sgd(0.5), **settings).name
    'fed_pa'
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
