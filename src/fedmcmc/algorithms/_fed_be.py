"""FedBE.

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
    """Federated Bayesian model ensemble: a distribution fitted to the models of a federation.

    Clients train the broadcast model on their own rows, the server fits a distribution to what
    comes back, and draws are members of that ensemble: average the predictions over them.

    Parameters
    ----------
    posterior
        The model; a flat prior is the paper's case. Clients minimize minus the mean log likelihood
        of their rows minus ``log prior / num_rows``.
    client_optimizer
        As from optax; its state starts anew in every round.
    num_local_steps
        Steps of the optimizer per round.
    ensemble
        ``"gaussian"``: a normal distribution with mean and diagonal covariance of the clients'
        models, weighted by their shares of the rows; every draw is a new member.
        ``"dirichlet"``: `num_models` means of the clients' models with random weights, drawn anew
        in every round, ``sum_i g_i p_i w_i / sum_i g_i p_i`` for shares ``p_i`` and a Dirichlet
        vector ``g``; a draw is one of them.
    batch_size
        Rows per gradient, or below one the fraction of a client's rows; ``None`` for all of them.
    learning_rate
        Multiplies the optimizer's updates: a number, or a schedule of the round.
    concentration
        Of the Dirichlet distribution, ``alpha``.
    num_models
        Members of the Dirichlet ensemble; those given to `distill`, of either.
    participation
        Everyone by default; means are over those who take part.
    distill
        ``(rng_key, mean, members) -> position``: the next round's start. The paper's last step is
        `fedmcmc.distillation`, with unlabeled inputs of the server. By default the next round
        starts at the weighted mean, as in federated averaging.
    replace
        Whether minibatches are drawn with replacement.

    Notes
    -----
    The server sees sums alone, so that the clients' own models, which the paper adds to the
    ensemble, are not in it; and for a Dirichlet ensemble a client sends `num_models` weighted
    models and one for the mean, ``(num_models + 1) * (d + 1)`` numbers. A Gaussian one takes
    ``2 * d + 1``.

    The authors' released code differs from their paper, which is followed here: it fits the
    Gaussian tensor by tensor to updates of unit norm with equal weights and draws a tenth of the
    spread, its Dirichlet weights leave the shares out, and it sharpens the averaged predictions.

    For compressed messages see `fedmcmc.ensemble`.

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
