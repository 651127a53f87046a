"""Figure 1, Table 4 and Figure 4 (left) of Guo et al. (2023): two Gaussian clients."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, restarts
from experiments.fed_ep.toy_figures import draw
from experiments.fed_ep.toy_problems import IDENTITY, Problems, random_problems
from fedmcmc import inference, rounds

__all__ = ["Config", "draw", "run"]

# The clients of Figure 1, from the released code.
FIGURE_MEANS = ((7.0, -10.6), (0.2, 2.24))
FIGURE_COVARIANCES = (((11.0, -5.3), (-5.3, 3.5)), ((5.0, 4.9), (4.9, 5.5)))


@dataclass(frozen=True)
class Config:
    """Settings; the defaults are the paper's.

    Attributes
    ----------
    num_problems
        Random pairs of clients.
    num_rounds
        Of expectation propagation, without damping.
    degrees, scale
        Of the normal-inverse-Wishart distribution the clients are drawn from.
    random_scale
        Whether each problem has its own scale matrix (the paper's words), or all have that of the
        released code, ``make_spd_matrix(2, random_state=0)`` of scikit-learn.
    """

    seed: int = 0
    num_problems: int = 200
    num_rounds: int = 100
    degrees: int = 7
    scale: float = 0.2
    random_scale: bool = False

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_rounds")
        checks.at_least(2, self, "num_problems")
        checks.at_least(2, self, "degrees")
        checks.positive(self, "scale")


def federations(problems: Problems) -> fedmcmc.FederatedData:
    """Return one federation a problem, stacked: every leaf has a leading problem axis.

    A client has a single row, its mean and a factor of its precision.
    """
    factors = np.linalg.cholesky(np.linalg.inv(problems.covariances)).swapaxes(-1, -2)
    one = fedmcmc.FederatedData.from_arrays(
        {"mean": problems.means[0], "factor": factors[0]}, np.arange(2)
    )
    rows = {"mean": jnp.asarray(problems.means), "factor": jnp.asarray(factors)}
    num = problems.means.shape[0]
    stacked = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), one)
    return stacked.__class__(
        rows=jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), rows, one.rows),
        start=stacked.start,
        size=stacked.size,
        share=stacked.share,
        max_size=one.max_size,
    )


def flat_prior(position: jax.Array) -> jax.Array:
    """Return an improper uniform density."""
    return jnp.zeros((), position.dtype)


def loglikelihood(position: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """Return the log of a client's Gaussian, the likelihood of its one row."""
    scaled = jnp.einsum("nij,nj->ni", rows["factor"], position - rows["mean"])
    return -0.5 * jnp.sum(scaled**2, axis=-1)


POSTERIOR = fedmcmc.Posterior(flat_prior, loglikelihood)


def kernels() -> dict[str, fedmcmc.FederatedKernel]:
    """Return the paper's three methods and expectation propagation with a scaled identity."""
    exact, mean = inference.exact_gaussian(), inference.exact_mean()
    return {
        # Identity covariance and no cavity: the mean of the clients' own optima.
        "FedAvg": fedmcmc.natural(
            POSTERIOR,
            inference.scaled_identity(mean, variance=1.0),
            cavity="none",
            structure="scaled_identity",
        ),
        "FedPA": fedmcmc.natural(POSTERIOR, exact, cavity="none"),
        "FedEP": fedmcmc.fed_ep(POSTERIOR, inference=exact),
        "FedEP, scaled identity": fedmcmc.fed_ep(
            POSTERIOR, inference=inference.scaled_identity(mean, precision=IDENTITY)
        ),
    }


@jax.jit(static_argnums=2)
def means_of_rounds(
    kernel: fedmcmc.FederatedKernel, data: fedmcmc.FederatedData, num_rounds: int
) -> jax.Array:
    """Run all problems in one program; return the global means ``[n, num_rounds, 2]``."""

    def one(own: fedmcmc.FederatedData) -> jax.Array:
        key = jax.random.key(0)
        state = kernel.init(key, jnp.zeros(2), own)
        mean = lambda state, _: state.broadcast.position  # noqa: E731
        return rounds.run_rounds(kernel, own, key, state, num_rounds, collect=mean)[1].draws

    return jax.vmap(one)(data)


def _kept_means(kernel: fedmcmc.FederatedKernel, problems: Problems, num_rounds: int) -> np.ndarray:
    """Return the means of all rounds, or what an attempt that was killed kept of them."""
    data = federations(problems)
    return restarts.once(lambda: np.asarray(means_of_rounds(kernel, data, num_rounds), float))


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run the random problems and Figure 1's; write figures."""
    problems = random_problems(config)
    figure = Problems(np.array([FIGURE_MEANS]), np.array([FIGURE_COVARIANCES]))
    distances, paths, table = {}, {}, []
    for name, kernel in kernels().items():
        gaps = _kept_means(kernel, problems, config.num_rounds) - problems.exact[:, None]
        distances[name] = np.linalg.norm(gaps, axis=-1)
        paths[name] = _kept_means(kernel, figure, config.num_rounds)[0]
        last = distances[name][:, -1]
        table.append(
            {
                "method": name,
                "distance": float(last.mean()),
                "sd over problems": float(last.std(ddof=1)),
                "distance, Figure 1": float(np.linalg.norm(paths[name][-1] - figure.exact[0])),
            }
        )
    by_round = {name: values.mean(0).tolist() for name, values in distances.items()}
    metrics = {
        "table": table,
        "num_problems": config.num_problems,
        "num_rounds": config.num_rounds,
        "by_round": by_round,
        "exact": figure.exact[0].tolist(),
        "clients": {"means": figure.means[0], "covariances": figure.covariances[0]},
        "paths": {name: path[:10].tolist() for name, path in paths.items()},
    }
    metrics["figures"] = draw(metrics, out)
    return metrics
