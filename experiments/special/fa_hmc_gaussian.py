"""Liang et al. (2024), Figure 2 and section 4: rounds to a distance on Gaussian clients, exactly.

`fedmcmc.predict_bias` has the stationary distribution in up to 512 dimensions. This module has the
rounds before, for many step sizes at once or in more dimensions, in float64.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
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

__all__ = ["Clients", "Round", "Settings", "dimension", "moments", "over_local_steps", "stationary"]

Settings = Mapping[str, Any]


class Round(NamedTuple):
    """A round ``theta' = on_position theta + shift + N(0, of_momenta + of_gradients)``."""

    on_position: np.ndarray
    shift: np.ndarray
    of_momenta: np.ndarray
    of_gradients: np.ndarray


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

    def trajectory(self, step_size: Any, num_steps: int) -> tuple[Any, Any, Any]:
        """Return ``(P, Q, V)`` along the axes: ``theta - mean -> P (theta - mean) + Q momentum``.

        ``V`` is the variance that gradients of unit noise add, if the two half kicks between two
        drifts share a gradient. With ``cos phi = 1 - step_size^2 curvature / 2``,
        ``P = cos(L phi)`` and ``Q = step_size sin(L phi) / sin(phi)``.
        """
        step = np.asarray(step_size, float)[..., None, None]
        cosine = 1 - step**2 * self.curvatures / 2
        if np.abs(cosine).max() >= 1:
            limit = 2 / math.sqrt(self.curvatures.max())
            raise ValueError(f"step_size must be below {limit:.4g}, got {step.max():.4g}.")
        angle = np.arccos(cosine)
        # A full kick acts like a momentum in the leapfrog steps that remain.
        moved = [step * np.sin(n * angle) / np.sin(angle) for n in range(1, num_steps + 1)]
        of_noise = (step * moved[-1] / 2) ** 2 + sum((step * m) ** 2 for m in moved[:-1])
        return np.cos(num_steps * angle), moved[-1], of_noise

    def rounds(
        self,
        local_steps: Sequence[int],
        step: Any,
        length: int,
        rho: float = 1.0,
        noise: float = 0.0,
    ) -> Iterator[Round]:
        """Yield rounds of these numbers of trajectories, ascending, with the axes of `step` first.

        `rho` is the correlation of the clients' momenta, and `noise` the standard deviation of the
        noise on each coordinate of a client's gradient.
        """
        rotation, moved, of_noise = self.trajectory(step, length)
        momenta, gradients, power = np.zeros(()), np.zeros(()), np.ones_like(rotation)
        for num in range(1, 1 + max(local_steps)):
            shared = self.matrix(power * moved)
            momenta = momenta + rho * shared @ shared.swapaxes(-1, -2)
            if rho < 1:
                momenta = momenta + (1 - rho) * self.matrix((power * moved) ** 2)
            if noise:
                variance = noise**2 * self.weights[:, None] * power**2 * of_noise
                gradients = gradients + self.matrix(variance)
            power = power * rotation
            if num in local_steps:
                yield Round(self.matrix(power), self.vector(1 - power), momenta, gradients)


def moments(round_of: Callable[[int], Round], start: np.ndarray) -> Iterator[tuple[Any, Any]]:
    """Yield mean and variance of every coordinate after rounds ``round_of(0)``, and so on."""
    mean, covariance, num = start, np.zeros((start.size, start.size)), 0
    while True:
        affine = round_of(num)
        mean = (affine.on_position @ mean[..., None])[..., 0] + affine.shift
        covariance = affine.on_position @ covariance @ affine.on_position.swapaxes(-1, -2)
        covariance = covariance + affine.of_momenta + affine.of_gradients
        yield mean, np.diagonal(covariance, axis1=-2, axis2=-1)
        num += 1


def stationary(affine: Round) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of every coordinate in the long run."""
    mean = np.linalg.solve(np.eye(len(affine.shift)) - affine.on_position, affine.shift)
    noise = affine.of_momenta + affine.of_gradients
    return mean, np.diagonal(solve_discrete_lyapunov(affine.on_position, noise))


class _Target(NamedTuple):
    """Two kinds of clients whose coordinates have one distribution, and a start of each."""

    num_clients: int
    means: Sequence[float]
    variances: Sequence[float]
    start: float
    num_integration_steps: int

    def coordinate(self) -> Clients:
        half, num = self.num_clients // 2, self.num_clients
        mean, variance = (np.repeat(np.array(x), half) for x in (self.means, self.variances))
        parts = 1 / variance[:, None], mean[:, None], np.ones((num, 1, 1))
        return Clients(*parts, np.full(num, 1 / num))

    def distance(self, mean: Any, variance: Any) -> Any:
        """Return the 2-Wasserstein distance of a normal coordinate, in posterior sds."""
        center, square = (moment.item() for moment in self.coordinate().target())
        return np.hypot(mean - center, np.sqrt(variance) - math.sqrt(square)) / math.sqrt(square)

    def round_at(self, step: Any, num_local_steps: int, **case: float) -> Round:
        steps = [num_local_steps], step, self.num_integration_steps
        return next(self.coordinate().rounds(*steps, **case))

    def first(self, level: float, round_of: Any, limit: int) -> tuple[float, int]:
        """Return after how many rounds a chain is near, infinity if never, and which it is."""
        laws = islice(moments(round_of, np.array([self.start])), limit)
        for num, (mean, variance) in enumerate(laws, start=1):
            distances = self.distance(mean, variance).ravel()
            if distances.min() <= level:
                return num, int(distances.argmin())
        return math.inf, -1


def dimension(
    target: Settings, dims: list[int], num_local_steps: int, tolerance: float, chains: Settings
) -> list[Row]:
    """Return rounds by dimension at Proposition 4.3's step size, exact and of simulated chains.

    The tolerance is a distance of all coordinates, in posterior standard deviations.
    """
    clients, table = _Target(**target), []
    all_rounds, ratios = [], []
    sizes = {name: target[name] for name in ("num_clients", "means", "variances")}
    for dim in dims:
        kernel = {"num_local_steps": num_local_steps}
        kernel["num_integration_steps"] = clients.num_integration_steps
        # Half the tolerance is for the distance in the long run, half for the start's.
        accuracy = {"dimension": dim, "tolerance": tolerance / 2}
        step = proposition_step_size(1 / min(clients.variances), **accuracy, **kernel)
        affine, root = clients.round_at(step, num_local_steps), math.sqrt(dim)
        distance_left = root * clients.distance(*stationary(affine)).item()
        if distance_left > tolerance:
            raise ValueError(f"tolerance must be above {distance_left:.3g} in dimension {dim}.")
        rounds, _ = clients.first(tolerance / root, lambda _, affine=affine: affine, 100_000)
        data, _ = loaders.quadratic(dim=dim, **sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedmcmc.DiagnosisWarning)  # chains on their way
            draws = fedmcmc.sample(
                jax.random.key(chains["seed"]),
                fedmcmc.fa_hmc(models.quadratic(data), step_size=step, **kernel),
                data,
                jnp.full(dim, clients.start),
                num_rounds=int(1.2 * rounds) + 2,
                num_chains=chains["num_chains"],
                progress=False,
            ).draws
        measured = root * clients.distance(draws.mean((0, 2)), draws.var((0, 2)))
        numbers = {
            "step_size": step,
            "rounds": rounds,
            "rounds_measured": 1 + np.argmax(np.append(measured, 0) <= tolerance),
            "distance_left": distance_left,
        }
        table += numbers_of("FA-HMC", {"dimension": dim}, numbers)
        all_rounds.append(rounds)
        distance = root * clients.distance(clients.start, 0.0)
        ratios.append(rounds / (root * math.log(distance / tolerance)))
    summary = {
        "power": np.polyfit(np.log(dims), np.log(all_rounds), 1)[0],
        "smallest_rounds_over_root_log": min(ratios),
        "largest_rounds_over_root_log": max(ratios),
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

    The tolerance is a distance of all coordinates in posterior standard deviations, those of
    `falling` are distances of each. `cases` are arguments of `Clients.rounds`. A chain that takes
    more than `most_rounds` never arrives.
    """
    clients, table = _Target(**target), []
    # Up to trajectories of a quarter of the narrowest client's period.
    longest = math.pi / 2 * math.sqrt(min(clients.variances)) / clients.num_integration_steps
    steps, level = np.geomspace(longest / 1000, longest, num_step_sizes), tolerance / math.sqrt(dim)
    noisy = cases["noisy gradients"]

    def fewest(num: int, level: float, case: Settings, tried: Any) -> tuple[float, int]:
        affine = clients.round_at(tried, num, **case)
        return clients.first(level, lambda _: affine, most_rounds)

    # One step size for all local steps, as in Figure 1(c): there a U comes from drift alone.
    fixed = steps[[fewest(local_steps[0], level, noisy, steps)[1]]]
    runs = [(name, "rounds", case, steps) for name, case in cases.items()]
    runs += [(f"{name}, one step size", "rounds", case, fixed) for name, case in cases.items()]
    runs += [("noisy gradients", "rounds_by_noise", {"noise": noise}, steps) for noise in noises]
    for name, metric, case, tried in runs:
        place = {"gradient_noise": case["noise"]} if metric == "rounds_by_noise" else {}
        arrivals = [fewest(num, level, case, tried) for num in local_steps]
        for num, (rounds, best) in zip(local_steps, arrivals, strict=True):
            numbers = {metric: rounds, "step_size": tried[best] if best >= 0 else math.nan}
            table += numbers_of(name, {**place, "num_local_steps": num}, numbers)
        all_rounds = [rounds for rounds, _ in arrivals]
        fewest_rounds, end = min(all_rounds), min(all_rounds[0], all_rounds[-1])
        if math.isfinite(fewest_rounds) and tried is steps:
            table += numbers_of(name, place, {"ends_over_fewest": end / fewest_rounds})
    grid = np.meshgrid(steps[-60:], np.geomspace(0.3, 3000, 25))
    first_steps, halvings = (values.ravel() for values in grid)
    num = falling["num_local_steps"]

    def round_of(index: int) -> Round:  # `fedmcmc.inverse_sqrt_schedule`
        return clients.round_at(first_steps / np.sqrt(1 + index / halvings), num, **noisy)

    for distance in falling["tolerances"]:
        place = {"tolerance": distance}
        constant, _ = fewest(num, distance, noisy, steps)
        table += numbers_of("constant step", place, {"rounds_to_tolerance": constant})
        rounds, _ = clients.first(distance, round_of, int(min(constant, most_rounds)))
        numbers = {"rounds_to_tolerance": rounds, "saving": constant / rounds}
        logarithm = math.log(clients.distance(clients.start, 0.0) / distance)
        numbers["saving_over_logarithm"] = numbers["saving"] / logarithm
        table += numbers_of("falling step", place, numbers)
    return table
