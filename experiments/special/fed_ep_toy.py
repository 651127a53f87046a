"""Guo et al. (2023), Figure 1, Table 4 and Figure 4 (left): pairs of Gaussian clients."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import make_spd_matrix

import fedmcmc
from experiments.claims import mean as mean_with_error
from experiments.models import flat_logprior
from experiments.tidy import Row, from_numbers
from fedmcmc import inference, rounds

IDENTITY = "FedEP, scaled identity"


class Pairs(NamedTuple):
    """Clients' means ``[num_pairs, 2, 2]`` and covariances ``[num_pairs, 2, 2, 2]``."""

    means: np.ndarray
    covariances: np.ndarray

    @property
    def exact(self) -> np.ndarray:
        """Global means, ``[num_pairs, 2]``."""
        precisions = np.linalg.inv(self.covariances)
        eta = np.einsum("nkij,nkj->ni", precisions, self.means)
        return np.linalg.solve(precisions.sum(1), eta[..., None])[..., 0]


def rows(
    num_problems: int,
    num_rounds: int,
    degrees: int,
    scale: float,
    figure_means: Sequence[Any],
    figure_covariances: Sequence[Any],
    seed: int,
) -> list[Row]:
    """Return distances from the global mean by round, and paths of Figure 1's clients."""
    pairs = draw_pairs(seed, num_problems, degrees, scale)
    figure = Pairs(np.array([figure_means]), np.array([figure_covariances]))
    tidy_rows = _describe(figure)
    for method, kernel in kernels().items():
        distances = _distances(kernel, pairs, num_rounds)
        tidy_rows += from_numbers(method, {}, {"distance": mean_with_error(distances[:, -1])})
        for i, distance in enumerate(distances.mean(axis=0)):
            tidy_rows.append(Row(method, "distance_by_round", distance, {}, x=i + 1.0))
        path = means_by_round(kernel, figure, num_rounds)[0, :10]
        for (i, j), value in np.ndenumerate(path):
            tidy_rows.append(Row(method, "path_in_figure_1", value, {"coordinate": j}, x=i + 1.0))
    for structure in ("scaled_identity", "diagonal"):
        settings = {"structure": structure, "dim": 1000}
        tidy_rows.append(Row("FedEP", "numbers_sent", _count_numbers_sent(**settings), settings))
    # In double precision, and with the released code's covariances, divided by `scale`.
    divided = pairs._replace(covariances=pairs.covariances / scale)
    cases = (("FedEP", "as_in_text", pairs), (IDENTITY, "as_in_text", pairs))
    with jax.enable_x64(True):
        for method, kind, clients in (*cases, (IDENTITY, "divided", divided)):
            distances = _distances(kernels()[method], clients, num_rounds).mean(axis=0)
            for num in (10, num_rounds):
                numbers = {"distance_in_double_precision": distances[num - 1]}
                tidy_rows += from_numbers(method, {"covariances": kind}, numbers, x=float(num))
    return tidy_rows


def draw_pairs(seed: int, num: int, degrees: int, scale: float) -> Pairs:
    """Draw pairs of clients from the normal-inverse-Wishart distribution.

    All have the scale matrix of the released code; the paper's text has random ones.
    """
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(np.linalg.inv(make_spd_matrix(2, random_state=0)))
    # The inverse of an inverse-Wishart matrix is a sum of squares of normals.
    normals = factor @ rng.normal(size=(num, 2, 2, degrees))
    covariances = np.linalg.inv(normals @ normals.swapaxes(-1, -2))
    root = np.linalg.cholesky(covariances / scale)
    return Pairs((root @ rng.normal(size=(num, 2, 2, 1)))[..., 0], covariances)


def _loglikelihood(position: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
    """Return the log density of a client's Gaussian, the likelihood of its one row."""
    scaled = jnp.einsum("nij,nj->ni", rows["factor"], position - rows["mean"])
    return -0.5 * jnp.sum(scaled**2, axis=-1)


POSTERIOR = fedmcmc.Posterior(flat_logprior, _loglikelihood)


def kernels() -> dict[str, fedmcmc.FederatedKernel]:
    """Return the paper's methods; the precision of FedEP's identity is the released code's."""
    exact, mean = inference.exact_gaussian(), inference.exact_mean()
    identity = inference.scaled_identity(mean, precision=1.0)
    unit = inference.scaled_identity(mean, variance=1.0)
    return {
        # An identity without a cavity: the mean of the clients' own optima.
        "FedAvg": fedmcmc.natural(POSTERIOR, unit, cavity="none", structure="scaled_identity"),
        "FedPA": fedmcmc.natural(POSTERIOR, exact, cavity="none"),
        "FedEP": fedmcmc.fed_ep(POSTERIOR, inference=exact),
        IDENTITY: fedmcmc.fed_ep(POSTERIOR, inference=identity),
    }


def means_by_round(kernel: fedmcmc.FederatedKernel, pairs: Pairs, num_rounds: int) -> np.ndarray:
    """Return the means of all rounds, ``[num_pairs, num_rounds, 2]``, from one program."""
    factors = np.linalg.cholesky(np.linalg.inv(pairs.covariances)).swapaxes(-1, -2)
    columns = {"mean": jnp.asarray(pairs.means), "factor": jnp.asarray(factors)}
    example = jax.tree.map(lambda leaf: np.asarray(leaf[0]), columns)
    template = fedmcmc.FederatedData.from_arrays(example, np.arange(2))
    return np.asarray(_run_all(kernel, template, columns, num_rounds), float)


@partial(jax.jit, static_argnames="num_rounds")
def _run_all(kernel: Any, template: Any, columns: dict[str, jax.Array], num_rounds: int) -> Any:
    def run(rows: dict[str, jax.Array]) -> jax.Array:
        data, key = dataclasses.replace(template, rows=rows), jax.random.key(0)
        state = kernel.init(key, jnp.zeros(2), data)
        collect = lambda state, _: state.broadcast.position  # noqa: E731
        return rounds.run_rounds(kernel, data, key, state, num_rounds, collect=collect)[1].draws

    return jax.vmap(run)(columns)


def _distances(kernel: fedmcmc.FederatedKernel, pairs: Pairs, num_rounds: int) -> np.ndarray:
    means = means_by_round(kernel, pairs, num_rounds)
    return np.linalg.norm(means - pairs.exact[:, None], axis=-1)


def _describe(figure: Pairs) -> list[Row]:
    """Return the clients of Figure 1 and their global mean."""
    arrays = (
        ("exact", "global_mean_in_figure_1", ("coordinate",), figure.exact),
        ("", "client_mean_in_figure_1", ("client", "coordinate"), figure.means),
        ("", "client_covariance_in_figure_1", ("client", "row", "column"), figure.covariances),
    )
    return [
        Row(method, metric, value, dict(zip(axes, place, strict=True)))
        for method, metric, axes, array in arrays
        for place, value in np.ndenumerate(array[0])
    ]


def _count_numbers_sent(structure: str, dim: int) -> int:
    """Return how many numbers a client of FedEP sends for a model of `dim` parameters."""
    unit = inference.scaled_identity(inference.exact_mean(), variance=1.0)
    kernel = fedmcmc.fed_ep(POSTERIOR, inference=unit, initial_precision=1.0, structure=structure)
    row = {"mean": np.zeros((1, dim), np.float32), "factor": np.zeros((1, 1, dim), np.float32)}
    data = fedmcmc.FederatedData.from_clients([row, row])
    state = jax.eval_shape(lambda: kernel.init(jax.random.key(0), jnp.zeros(dim), data))
    return sum(leaf.size for leaf in jax.tree.leaves(kernel.message_like(state.broadcast)))
