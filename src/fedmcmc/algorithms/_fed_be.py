"""FedBE, an ensemble of Bayesian models.

Source: Chen and Chao (2021), FedBE: making Bayesian model ensemble applicable to federated
learning.
"""

from typing import TYPE_CHECKING, Literal

from jax import Array

from fedmcmc import kernels
from fedmcmc._types import FederatedKernel, Number, Participation, Posterior
from fedmcmc.gradients import for_batch_size

if TYPE_CHECKING:
    import optax


def fed_be(
    posterior: Posterior,
    *,
    client_optimizer: "optax.GradientTransformation",
    num_local_steps: int,
    ensemble: Literal["gaussian", "dirichlet"] = "gaussian",
    batch_size: int | float | None = None,
    learning_rate: Number = 1.0,
    concentration: float | Array = 0.5,
    num_models: int = 10,
    participation: Participation | None = None,
    distill: kernels.Distiller | None = None,
    replace: bool = True,
) -> FederatedKernel:
    """Build a federated Bayesian model ensemble (FedBE).

    Clients train the broadcast model on their own rows, and the server fits a distribution to the
    trained models. Draws are members of this ensemble, whose predictions are averaged.

    Parameters
    ----------
    posterior
        Model; the paper uses a flat prior. Clients minimize minus the mean log likelihood of their
        rows minus ``log prior / num_rows``.
    client_optimizer
        Optimizer of optax, which is initialized again in each round.
    num_local_steps
        Number of steps of the optimizer per round.
    ensemble
        ``"gaussian"`` fits a normal distribution with diagonal covariance to the clients' models,
        weighted by their shares of the rows; each draw is a new member. ``"dirichlet"`` makes
        `num_models` new means ``sum_i g_i p_i w_i / sum_i g_i p_i`` of the clients' models ``w_i``
        per round, for shares ``p_i`` and a Dirichlet vector ``g``; a draw is one of these means.
    batch_size, replace
        See `fedmcmc.lsd`.
    learning_rate
        Factor of the optimizer's updates: a number, or a schedule of the round.
    concentration
        Parameter ``alpha`` of the Dirichlet distribution.
    num_models
        Number of members of the Dirichlet ensemble, and of the members passed to `distill`.
    participation
        Participation rule, all clients by default; means are over the clients that take part.
    distill
        ``(rng_key, mean, members) -> position``, which computes the start of the next round. The
        paper's last step is `fedmcmc.distillation`, with unlabeled inputs at the server. By default
        the next round starts at the weighted mean, as in federated averaging.

    Notes
    -----
    The server receives only sums, so the ensemble does not contain the clients' own models, which
    the paper adds. A client sends ``2 * d + 1`` numbers for a Gaussian ensemble and
    ``(num_models + 1) * (d + 1)`` for a Dirichlet one. This function follows the paper; the
    authors' code fits the Gaussian to updates of unit norm with equal weights and draws a tenth of
    the spread, uses no shares in the Dirichlet weights, and sharpens the averaged predictions.
    `fedmcmc.ensemble` supports compressed messages.

    References
    ----------
    Chen and Chao (2021), section 4.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, optax
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: 0.0, lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1)
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((1, 2))])
    >>> kernel = fed_be(posterior, client_optimizer=optax.sgd(0.5), num_local_steps=20)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, jnp.zeros(2), num_rounds=50, progress=False
    ... )
    >>> samples.state.server.mean.round(2).tolist(), samples.draws.shape
    ([[0.75, 0.75]], (1, 50, 2))
    """
    if ensemble == "gaussian":
        family = kernels.gaussian_ensemble(num_models)
    elif ensemble == "dirichlet":
        family = kernels.dirichlet_ensemble(concentration, num_models)
    else:
        raise ValueError(f'ensemble must be "gaussian" or "dirichlet", got {ensemble!r}.')
    return kernels.ensemble(
        posterior,
        for_batch_size(batch_size, replace=replace),
        family,
        client_optimizer=client_optimizer,
        num_local_steps=num_local_steps,
        learning_rate=learning_rate,
        participation=participation,
        distill=distill,
    )
