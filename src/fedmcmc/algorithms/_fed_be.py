"""FedBE, an ensemble of Bayesian models.

Source: Chen and Chao (2021), FedBE: making Bayesian model ensemble applicable to federated
learning.
"""

from typing import TYPE_CHECKING, Literal

from jax import Array

from fedmcmc import kernels
from fedmcmc.gradients import for_batch_size
from fedmcmc.types import FederatedKernel, Number, Participation, Posterior

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
    """Build a federated Bayesian model ensemble (FedBE; Chen and Chao 2021, section 4).

    Clients train the broadcast model on their own rows, and the server fits a distribution to the
    trained models from sums. Draws are members of this ensemble, whose predictions are averaged.
    docs/explanation/design.md lists differences to the authors' code.

    Parameters
    ----------
    posterior, client_optimizer, num_local_steps, learning_rate, participation, distill
        See `fedmcmc.ensemble`; the paper uses a flat prior. The paper's `distill` is
        `fedmcmc.distillation`.
    ensemble
        ``"gaussian"`` fits a normal distribution with diagonal covariance to the clients' models,
        weighted by their shares of the rows; each draw is a new member. ``"dirichlet"`` makes
        `num_models` new means ``sum_i g_i p_i w_i / sum_i g_i p_i`` of the clients' models ``w_i``
        per round, for shares ``p_i`` and a Dirichlet vector ``g``; a draw is one of these means.
    batch_size, replace
        See `fedmcmc.lsd`.
    concentration
        Parameter ``alpha`` of the Dirichlet distribution.
    num_models
        Number of members of the Dirichlet ensemble, and of the members passed to `distill`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc, optax
    >>> posterior = fedmcmc.Posterior(lambda t: 0.0, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(1)])
    >>> kernel = fed_be(posterior, client_optimizer=optax.sgd(0.5), num_local_steps=20)
    >>> samples = fedmcmc.sample(jax.random.key(0), kernel, data, 0.0, num_rounds=9, progress=False)
    >>> samples.state.server.mean.round(2).tolist(), samples.draws.shape
    ([0.75], (1, 9))
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
