"""The exact law of the Gaussian experiment, at the step size, minibatch and thinning used.

A round at shard ``s`` is an affine map, ``theta' = e_s**T theta + c_s``, plus Gaussian noise, so
means and covariances follow a linear recursion; ``docs/laws.md`` derives its fixed point. Every row
has unit curvature here, which makes the ``e_s`` numbers, not matrices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = [
    "RelayLaw",
    "constants_of_means",
    "fsgld_width",
    "one_machine",
    "relay_law",
    "simulate_shards",
]


@dataclass(frozen=True)
class RelayLaw:
    """Stationary moments of a relay between Gaussian shards of scalar curvature.

    Attributes
    ----------
    frequency
        ``[num_clients]``, how often each shard is visited.
    factor, shift, noise
        One local step at shard ``s`` is ``factor[s] * theta + shift[s] + N(0, noise[s])``; shapes
        ``[num_clients]``, ``[num_clients, d]``, ``[num_clients, d, d]``.
    num_local_steps
        Local steps a visit.
    """

    frequency: np.ndarray
    factor: np.ndarray
    shift: np.ndarray
    noise: np.ndarray
    num_local_steps: int

    def local_map(self, t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return factor, shift and noise covariance of `t` local steps."""
        e = self.factor
        power = e**t
        shift = ((1 - power) / (1 - e))[:, None] * self.shift
        return power, shift, ((1 - power**2) / (1 - e**2))[:, None, None] * self.noise

    @cached_property
    def boundary(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean ``[d]`` and covariance ``[d, d]`` of the state that is handed on."""
        f = self.frequency
        factor, shift, noise = self.local_map(self.num_local_steps)
        mean = f @ shift / (1 - f @ factor)
        off = factor[:, None] * mean + shift - mean
        spread = np.einsum("s,si,sj->ij", f, off, off) + np.einsum("s,sij->ij", f, noise)
        return mean, spread / (1 - f @ factor**2)

    def within_round(self, times: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return means ``[J, d]`` and covariances ``[J, J, d, d]`` of the states after `times`."""
        f = self.frequency
        mean, covariance = self.boundary
        maps = [self.local_map(t) for t in times]
        conditional = [factor[:, None] * mean + shift for factor, shift, _ in maps]
        means = np.stack([f @ c for c in conditional])
        blocks = np.zeros((len(times), len(times), mean.size, mean.size))
        for i, (factor, _, noise) in enumerate(maps):
            given_shard = (factor**2)[:, None, None] * covariance + noise
            for j in range(i, len(times)):
                later = self.factor ** (times[j] - times[i])
                between = np.einsum(
                    "s,si,sj->ij", f, conditional[i] - means[i], conditional[j] - means[j]
                )
                blocks[i, j] = between + np.einsum("s,sij->ij", f * later, given_shard)
                blocks[j, i] = blocks[i, j].T
        return means, blocks

    def moments(self, times: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and covariance of a state after a random one of `times`."""
        means, blocks = self.within_round(times)
        covariance = np.mean([blocks[j, j] for j in range(len(times))], axis=0)
        return means.mean(axis=0), covariance + np.cov(means.T, bias=True).reshape(covariance.shape)

    def average(
        self, times: tuple[int, ...], rounds_apart: int, num_rounds: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the law of a chain's average over ``1 .. num_rounds`` kept rounds.

        Parameters
        ----------
        times
            Local steps after which a state of a kept round counts.
        rounds_apart
            Rounds between two kept ones.
        num_rounds
            Kept rounds at most.

        Returns
        -------
        mean
            ``[d]``, the same for every length.
        covariance
            ``[num_rounds, d, d]``.
        """
        means, blocks = self.within_round((*times, self.num_local_steps))
        kept = len(times)
        own = blocks[:kept, :kept].mean(axis=(0, 1))
        onward = blocks[kept, :kept].mean(axis=0)  # state handed on, with the kept ones before it
        reach = np.mean([self.frequency @ self.factor**t for t in times])
        decay = self.frequency @ self.factor**self.num_local_steps
        lag = np.arange(1, num_rounds)
        weight = reach * decay ** (rounds_apart * lag - 1)
        length = np.arange(1, num_rounds + 1)
        pairs = length * np.concatenate([[0], np.cumsum(weight)])
        pairs = pairs - np.concatenate([[0], np.cumsum(lag * weight)])
        cross = onward + onward.T
        total = length[:, None, None] * own + pairs[:, None, None] * cross
        return means[:kept].mean(axis=0), total / (length**2)[:, None, None]


def relay_law(
    shards: np.ndarray,
    *,
    step_size: float,
    batch_size: int,
    num_local_steps: int,
    alpha: float,
    surrogate_means: np.ndarray | None = None,
) -> RelayLaw:
    """Return the law of DSGLD or FSGLD on ``N(theta, I)`` rows.

    Parameters
    ----------
    shards
        ``[num_clients, rows, d]``, visited equally often; the prior is ``N(0, I)``.
    step_size, batch_size, num_local_steps
        Of the sampler; minibatches are drawn with replacement.
    alpha
        Multiple of the conducive gradients; zero for DSGLD.
    surrogate_means
        ``[num_clients, d]``, by default those of the likelihoods, whose precisions the surrogates
        have.
    """
    num_clients, rows, dim = shards.shape
    means = shards.mean(axis=1)
    frequency = np.full(num_clients, 1 / num_clients)
    pull = rows * means / frequency[:, None]
    q = rows * (means if surrogate_means is None else surrogate_means)
    pull = pull + alpha * (q.sum(axis=0) - q / frequency[:, None])
    curvature = 1 + rows * num_clients  # the same with and without, as the shards are alike
    centred = shards - means[:, None]
    gradient_noise = rows / batch_size * np.einsum("sni,snj->sij", centred, centred)
    scale = (step_size / frequency)[:, None, None] ** 2
    noise = 2 * step_size * np.eye(dim) + scale * gradient_noise
    factor = np.full(num_clients, 1 - step_size * curvature)
    return RelayLaw(frequency, factor, step_size * pull, noise, num_local_steps)


def simulate_shards(seed: int, spread: float, num_clients: int, rows_per_client: int) -> np.ndarray:
    """Return the rows of every shard, ``[num_clients, rows, 2]``, around uniform means."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-spread, spread, (num_clients, 2))
    noise = rng.standard_normal((num_clients, rows_per_client, 2))
    return centres[:, None] + noise


def one_machine(config: Mapping[str, Any]) -> dict[str, float]:
    """Return what SGLD gives where one machine holds all rows of the Gaussian experiment.

    Parameters
    ----------
    config
        Settings of a run of ``fsgld/gaussian``.

    Returns
    -------
    ``minibatches`` and ``all rows`` are variances a coordinate over the posterior's, with the
    run's minibatches and with all rows at every step; ``scatter`` and ``within`` are the variances
    of a row, over all rows and about the mean of its shard.
    """
    shards = _shards(config)
    pooled = shards.reshape(1, -1, shards.shape[-1])
    precision = 1 + pooled.shape[1]
    settings: dict[str, Any] = dict(step_size=config["step_size"], num_local_steps=1, alpha=0.0)

    def width(rows: np.ndarray) -> float:
        law = relay_law(rows, batch_size=config["batch_size"], **settings)
        _, covariance = law.moments((1,))
        return float(precision * np.trace(covariance) / len(covariance))

    # A minibatch of rows that are all the same is as good as all rows.
    quiet = np.broadcast_to(pooled.mean(axis=1, keepdims=True), pooled.shape)
    return {
        "minibatches": width(pooled),
        "all rows": width(quiet),
        "scatter": float(pooled.var(axis=1).mean()),
        "within": float(shards.var(axis=1).mean()),
    }


def _shards(config: Mapping[str, Any]) -> np.ndarray:
    names = ("seed", "spread", "num_clients", "rows_per_client")
    return simulate_shards(**{name: config[name] for name in names})


def fsgld_width(
    config: Mapping[str, Any], *, step: float = 1.0, batch_size: int | None = None
) -> float:
    """Return FSGLD's variance a coordinate over the posterior's, at other settings than a run's.

    Parameters
    ----------
    config
        Settings of a run of ``fsgld/gaussian``; the longest of its visits are taken.
    step
        Multiple of its step size.
    batch_size
        In place of its own.
    """
    shards, num = _shards(config), max(config["num_local_steps"])
    law = relay_law(
        shards,
        step_size=step * config["step_size"],
        batch_size=batch_size or config["batch_size"],
        num_local_steps=num,
        alpha=1.0,
    )
    _, covariance = law.moments((num,))
    precision = 1 + shards.shape[0] * shards.shape[1]
    return float(precision * np.trace(covariance) / len(covariance))


def constants_of_means(config: Mapping[str, Any]) -> np.ndarray:
    """Return how many times FSGLD's constant is smaller where both are means, for each shard.

    As the constants of Theorems 1 and 2, but that ``gamma_s`` is of the average row, as ``eps_s``
    is, not of the worst, and that the grid is the mean of all rows alone.
    """
    shards = _shards(config)
    within = shards - shards.mean(axis=1, keepdims=True)
    about_all = shards - shards.mean(axis=(0, 1))
    found: np.ndarray = (about_all**2).sum(axis=(1, 2)) / (within**2).sum(axis=(1, 2))
    return found
