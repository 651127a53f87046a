"""Liang et al. (2024), Figure 2 and section 4: rounds to a distance on Gaussian clients, exactly.

`fedmcmc.predict_bias` has the stationary distribution in up to 512 dimensions. This module has the
rounds before, for many step sizes at once or in more dimensions, in float64.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice, repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import solve_discrete_lyapunov

import fedmcmc
from experiments import loaders, models
from experiments.tidy import Row
from experiments.tidy import from_numbers as numbers_of
from fedmcmc.tuning import proposition_step_size

Settings = Mapping[str, Any]


class Round(NamedTuple):
    """A round ``theta' = on_position theta + shift + N(0, noise)``."""

    on_position: np.ndarray
    shift: np.ndarray
    noise: np.ndarray


class Clients(NamedTuple):
    """Gaussian clients: curvatures and means ``[num_clients, d]`` along their principal axes.

    `axes` has these in columns, ``[num_clients, d, d]``; `weights`, ``[num_clients]``, sum to one.
    """

    curvatures: np.ndarray
    means: np.ndarray
    axes: np.ndarray
    weights: np.ndarray

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sum of matrices with these eigenvalues ``[..., num_clients, d]``."""
        scaled = self.axes * (self.weights[:, None] * values)[..., None, :]
        return np.tensordot(scaled, self.axes, axes=((-3, -1), (0, 2)))

    def vector(self, values: np.ndarray) -> np.ndarray:
        """Return the weighted sum of those matrices times the clients' means, ``[..., d]``."""
        along = self.weights[:, None] * values * self.means
        return np.einsum("bij,...bj->...i", self.axes, along)

    def target(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and covariance of the posterior."""
        covariance = np.linalg.inv(self.matrix(self.curvatures))
        return covariance @ self.vector(self.curvatures), covariance

    def rounds(
        self, local_steps: Sequence[int], step: Any, length: int, rho: float = 1, noise: float = 0
    ) -> Iterator[Round]:
        """Yield rounds of these numbers of trajectories, ascending, with the axes of `step` first.

        A trajectory of `length` steps moves ``theta - mean`` along the axes to
        ``cos(L phi) (theta - mean) + step sin(L phi) / sin(phi) momentum``, where
        ``cos phi = 1 - step^2 curvature / 2``. The two half kicks between two drifts share a
        gradient. `rho` is the correlation of the clients' momenta, and `noise` the standard
        deviation of the noise on each coordinate of a client's gradient.
        """
        step = np.asarray(step, float)[..., None, None]
        angle = np.arccos(1 - step**2 * self.curvatures / 2)
        # A full kick acts like a momentum in the leapfrog steps that remain.
        *after_kicks, moved = (
            step * np.sin(n * angle) / np.sin(angle) for n in range(1, 1 + length)
        )
        of_noise = (step * moved / 2) ** 2 + sum((step * kick) ** 2 for kick in after_kicks)
        of_noise = noise**2 * self.weights[:, None] * of_noise
        rotation = np.cos(length * angle)
        total, power = np.zeros(()), np.ones_like(rotation)
        for num in range(1, 1 + max(local_steps)):
            shared = self.matrix(power * moved)
            total = total + rho * shared @ shared.swapaxes(-1, -2)
            if noise or rho < 1:
                total = total + self.matrix(power**2 * ((1 - rho) * moved**2 + of_noise))
            power = power * rotation
            if num in local_steps:
                yield Round(self.matrix(power), self.vector(1 - power), total)


def moments(rounds: Iterable[Round], start: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Yield mean and variance of every coordinate after each round."""
    mean, covariance = start, np.zeros((start.size, start.size))
    for affine in rounds:
        mean = (affine.on_position @ mean[..., None])[..., 0] + affine.shift
        covariance = affine.on_position @ covariance @ affine.on_position.swapaxes(-1, -2)
        covariance = covariance + affine.noise
        yield mean, np.diagonal(covariance, axis1=-2, axis2=-1)


def stationary(affine: Round) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of every coordinate in the long run."""
    mean = np.linalg.solve(np.eye(len(affine.shift)) - affine.on_position, affine.shift)
    return mean, np.diagonal(solve_discrete_lyapunov(affine.on_position, affine.noise))


def sample(seed: int, *arguments: Any, **settings: Any) -> fedmcmc.Samples:
    """Run `fedmcmc.sample` without a diagnosis, for chains that need not be stationary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.DiagnosisWarning)
        return fedmcmc.sample(jax.random.key(seed), *arguments, progress=False, **settings)


class _Target:
    """Two kinds of clients whose coordinates have one distribution, and a start of each."""

    def __init__(self, target: Settings) -> None:
        self.start, self.length = target["start"], target["num_integration_steps"]
        self.variances, num = target["variances"], target["num_clients"]
        means, variances = (np.repeat(target[x], num // 2) for x in ("means", "variances"))
        parts = 1 / variances[:, None], means[:, None], np.ones((num, 1, 1))
        self.clients = Clients(*parts, np.full(num, 1 / num))
        mean, covariance = self.clients.target()
        self.mean, self.sd = mean.item(), math.sqrt(covariance.item())

    def distance(self, mean: Any, variance: Any) -> Any:
        """Return the 2-Wasserstein distance of a normal coordinate, in posterior sds."""
        return np.hypot(mean - self.mean, np.sqrt(variance) - self.sd) / self.sd

    def round(self, step: Any, num_local_steps: int, **case: float) -> Round:
        return next(self.clients.rounds([num_local_steps], step, self.length, **case))

    def first(self, level: float, rounds: Iterable[Round], limit: int) -> tuple[float, int]:
        """Return after how many rounds a chain is near, infinity if never, and which it is."""
        laws = islice(moments(rounds, np.array([self.start])), limit)
        for num, law in enumerate(laws, start=1):
            distances = self.distance(*law).ravel()
            if distances.min() <= level:
                return num, int(distances.argmin())
        return math.inf, -1


def dimension(
    target: Settings, dims: list[int], num_local_steps: int, tolerance: float, chains: Settings
) -> list[Row]:
    """Return rounds by dimension at Proposition 4.3's step size, exact and of simulated chains.

    The tolerance is a distance of all coordinates, in posterior standard deviations.
    """
    gaussian, table, exact = _Target(target), [], []
    kernel = {"num_local_steps": num_local_steps, "num_integration_steps": gaussian.length}
    sizes = {name: target[name] for name in ("num_clients", "means", "variances")}
    for dim in dims:
        # Half the tolerance is for the distance in the long run, half for the start's.
        accuracy = {"dimension": dim, "tolerance": tolerance / 2}
        step = proposition_step_size(1 / min(gaussian.variances), **accuracy, **kernel)
        rounds = repeat(gaussian.round(step, num_local_steps))
        num_rounds, _ = gaussian.first(tolerance / math.sqrt(dim), rounds, 100_000)
        data, _ = loaders.quadratic(dim=dim, **sizes)
        run = fedmcmc.fa_hmc(models.quadratic(data), step_size=step, **kernel), data
        counts = {"num_rounds": int(1.2 * num_rounds) + 2, "num_chains": chains["num_chains"]}
        draws = sample(chains["seed"], *run, jnp.full(dim, gaussian.start), **counts).draws
        distances = math.sqrt(dim) * gaussian.distance(draws.mean((0, 2)), draws.var((0, 2)))
        num_measured = 1 + np.argmax(np.append(distances, 0) <= tolerance)
        numbers = {"rounds": num_rounds, "rounds_measured": num_measured}
        table += numbers_of("FA-HMC", {"dimension": dim}, numbers)
        exact.append(num_rounds)
    roots = np.sqrt(dims)
    ratios = exact / (roots * np.log(roots * gaussian.distance(gaussian.start, 0.0) / tolerance))
    summary = {
        "power": np.polyfit(np.log(dims), np.log(exact), 1)[0],
        "smallest_rounds_over_root_log": ratios.min(),
        "largest_rounds_over_root_log": ratios.max(),
    }
    return numbers_of("FA-HMC", {}, summary) + table


def over_local_steps(
    target: Settings,
    dim: int,
    tolerance: float,
    local_steps: Sequence[int],
    cases: Mapping[str, Settings],
    noises: Sequence[float],
    falling: Settings,
    num_step_sizes: int,
    most_rounds: int,
) -> list[Row]:
    """Return rounds to a distance over local steps, gradient noises and falling step sizes.

    The tolerance is a distance of all coordinates in posterior standard deviations; the tolerances
    of `falling` are distances of each coordinate. `cases` are arguments of `Clients.rounds`. A
    chain that takes more than `most_rounds` never arrives.
    """
    gaussian, table = _Target(target), []
    # Up to trajectories of a quarter of the narrowest client's period.
    longest = math.pi / 2 * math.sqrt(min(gaussian.variances)) / gaussian.length
    steps, level = np.geomspace(longest / 1000, longest, num_step_sizes), tolerance / math.sqrt(dim)
    noisy = cases["noisy gradients"]

    def fewest(num: int, level: float, case: Settings, tried: Any) -> tuple[float, int]:
        return gaussian.first(level, repeat(gaussian.round(tried, num, **case)), most_rounds)

    # One step size for all local steps, as in Figure 1(c): there a U comes from drift alone.
    fixed = steps[[fewest(local_steps[0], level, noisy, steps)[1]]]
    runs: list[Any] = [(name, {}, case, steps) for name, case in cases.items()]
    runs += [(f"{name}, one step size", {}, case, fixed) for name, case in cases.items()]
    runs += [("noisy gradients", {"gradient_noise": x}, {"noise": x}, steps) for x in noises]
    for name, place, case, tried in runs:
        metric = "rounds_by_noise" if place else "rounds"
        rounds = [fewest(num, level, case, tried)[0] for num in local_steps]
        for num, value in zip(local_steps, rounds, strict=True):
            table += numbers_of(name, {**place, "num_local_steps": num}, {metric: value})
        if math.isfinite(min(rounds)) and tried is steps:
            ratio = min(rounds[0], rounds[-1]) / min(rounds)
            table += numbers_of(name, place, {"ends_over_fewest": ratio})
    grid = np.meshgrid(steps[-60:], np.geomspace(0.3, 3000, 25))
    first_steps, halvings = (values.ravel() for values in grid)
    num = falling["num_local_steps"]
    for distance in falling["tolerances"]:
        place = {"tolerance": distance}
        constant, _ = fewest(num, distance, noisy, steps)
        table += numbers_of("constant step", place, {"rounds_to_tolerance": constant})
        # As with `fedmcmc.tuning.inverse_sqrt_schedule`.
        tried = (first_steps / np.sqrt(1 + index / halvings) for index in count())
        falls = (gaussian.round(step, num, **noisy) for step in tried)
        fewer, _ = gaussian.first(distance, falls, int(min(constant, most_rounds)))
        logarithm = math.log(gaussian.distance(gaussian.start, 0.0) / distance)
        numbers = {"rounds_to_tolerance": fewer, "saving": constant / fewer}
        numbers["saving_over_logarithm"] = numbers["saving"] / logarithm
        table += numbers_of("falling step", place, numbers)
    return table
