"""The reference of the CIFAR-10 experiment: Hamiltonian Monte Carlo on all rows together."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arviz_stats.base import array_stats
from jax import Array

import fedmcmc
from experiments import reference
from experiments.qlsd import networks

__all__ = ["by_chain", "draw", "potential", "read", "rhat_of_predictions"]

ROWS_AT_A_TIME = 2000


def draw(
    rng_key: Array,
    config: Any,
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    start: Any,
) -> tuple[Any, dict[str, float]]:
    """Return draws ``[num_chains, num_draws, ...]`` and diagnostics.

    All chains start at `start`, or each at weights of its own where the settings say so.
    """
    positions = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (config.hmc_chains, *leaf.shape)), start
    )
    if config.hmc_random_start:
        keys = jax.random.split(jax.random.fold_in(rng_key, 1), config.hmc_chains)
        positions = jax.vmap(posterior.init_fn)(keys)
    found = reference.hmc(
        rng_key,
        potential(posterior, data.pooled().rows),
        positions,
        num_steps=config.hmc_steps,
        num_warmup=config.hmc_warmup,
        num_draws=config.hmc_draws,
    )
    return found.draws, found.summary()


def potential(posterior: fedmcmc.Posterior, rows: Any) -> Any:
    """Return ``position -> []``, minus the log posterior of all rows.

    Some rows at a time, and activations are computed anew for the gradient, which of all rows
    would not fit.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    size = min(num, ROWS_AT_A_TIME)
    num_blocks = -(-num // size)
    # Filled up with copies of the first row, which do not count.
    places = np.arange(num_blocks * size)
    blocks = jax.tree.map(
        lambda leaf: jnp.asarray(leaf)[np.where(places < num, places, 0)].reshape(
            num_blocks, size, *leaf.shape[1:]
        ),
        rows,
    )
    mask = jnp.asarray(places < num, jnp.float32).reshape(num_blocks, size)

    def minus_log_posterior(position: Any) -> Array:
        @jax.checkpoint
        def block(total: Array, both: tuple[Any, Array]) -> tuple[Array, None]:
            terms = posterior.loglikelihood_fn(position, both[0])
            return total + jnp.sum(terms * both[1]), None

        total, _ = jax.lax.scan(block, jnp.zeros(()), (blocks, mask))
        return -total - posterior.logprior_fn(position)

    return minus_log_posterior


def by_chain(draws: Any, predict_fn: networks.Prediction, inputs: np.ndarray) -> np.ndarray:
    """Return each chain's average prediction, ``[num_chains, num, num_classes]``."""
    num = jax.tree.leaves(draws)[0].shape[0]
    chains = (jax.tree.map(lambda leaf, c=c: leaf[c : c + 1], draws) for c in range(num))
    return np.stack([networks.predict(predict_fn, chain, inputs) for chain in chains])


def rhat_of_predictions(
    draws: Any, predict_fn: networks.Prediction, inputs: np.ndarray, num_inputs: int = 100
) -> float:
    """Return the largest R-hat of the probabilities of some inputs.

    Weights of a network have many modes that predict the same, so that chains may agree about
    predictions where their weights do not.
    """
    some = (jnp.asarray(inputs[:num_inputs]),)
    fn = jax.jit(lambda of: jax.lax.map(lambda p: predict_fn(p, some), of, batch_size=64))
    num = jax.tree.leaves(draws)[0].shape[0]
    chains = [jax.tree.map(lambda leaf, c=c: jnp.asarray(leaf[c]), draws) for c in range(num)]
    each = np.stack([np.asarray(fn(chain), np.float64) for chain in chains])
    flat = each.reshape(*each.shape[:2], -1)
    with np.errstate(invalid="ignore", divide="ignore"):  # chains that do not move
        return float(np.max(array_stats.rhat(flat, chain_axis=0, draw_axis=1)))


def read(path: str, labels: np.ndarray) -> np.ndarray:
    """Return probabilities ``[len(labels), 10]`` from a file.

    Raises
    ------
    ValueError
        Where there is no such file, or it holds something else; and where the test images are
        sorted by class, when the published predictions are in the original order.
    """
    num_rows = len(labels)
    if not Path(path).is_file():
        raise ValueError(f"reference must be a file, got {path!r}.")
    found = np.load(path) if path.endswith(".npy") else np.loadtxt(path, delimiter=",")
    if found.shape != (num_rows, 10) or not np.allclose(found.sum(axis=1), 1, atol=1e-3):
        raise ValueError(
            f"reference must hold probabilities [{num_rows}, 10], got an array {found.shape}."
        )
    if np.all(np.diff(labels) >= 0):
        raise ValueError(
            "reference is of the test images in their original order, and these are sorted by "
            "class: take them from OpenML (see experiments/images.py)."
        )
    return (found / found.sum(axis=1, keepdims=True)).astype(np.float32)
