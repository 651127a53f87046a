"""Figure 2 of Liang et al. (2024): rounds to a given distance against the dimension."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks
from experiments.checks import require
from experiments.fa_hmc import dimension_law
from experiments.fa_hmc.dimension_law import Scalars
from experiments.fa_hmc.grids import run_grid
from experiments.figures import COLORS, figure
from fedmcmc.tuning import proposition_step_size

__all__ = ["Config", "draw", "run"]


@dataclass(frozen=True)
class Config:
    """Settings. The two Gaussians and the constants of the paper are lost; these are ours.

    Attributes
    ----------
    dims
        Dimensions.
    num_clients
        Half of them have the first Gaussian as their posterior, half the second.
    means, variances
        Of the two, in every coordinate.
    num_integration_steps, num_local_steps
        ``L`` and ``T``.
    tolerance
        The distance to be reached, in units of the posterior's standard deviation.
    start
        Where every coordinate begins.
    num_runs
        Repetitions, of whose last iterates means and variances are estimated.
    """

    seed: int = 0
    dims: tuple[int, ...] = (2, 10, 30, 100, 200, 300, 500, 700, 1000)
    num_clients: int = 10
    means: tuple[float, float] = (1.0, -1.0)
    variances: tuple[float, float] = (1.0, 0.5)
    num_integration_steps: int = 10
    num_local_steps: int = 10
    tolerance: float = 0.5
    start: float = 3.0
    num_runs: int = 400

    def __post_init__(self) -> None:
        checks.at_least(1, self, "num_integration_steps", "num_local_steps")
        checks.at_least(2, self, "num_runs")
        checks.positive(self, "tolerance")
        require(
            self.num_clients % 2 == 0 and self.num_clients > 0,
            "num_clients must be even and positive",
            self.num_clients,
        )
        require(
            len(self.dims) >= 3 and min(self.dims) >= 1, "dims must be three or more", self.dims
        )
        for name in ("means", "variances"):
            require(len(getattr(self, name)) == 2, f"{name} must be two", getattr(self, name))
        require(min(self.variances) > 0, "variances must be positive", self.variances)


class Outcome(NamedTuple):
    """Rounds to the tolerance in one dimension."""

    dim: int
    step_size: float
    exact: int
    floor: float  # the distance that is left at stationarity
    measured: int
    at_measured: float


def clients_of(config: Config) -> Scalars:
    """Return one coordinate of the federation; clients have equal weights."""
    half = config.num_clients // 2
    means, variances = (np.repeat(np.array(x), half) for x in (config.means, config.variances))
    weights = np.full(config.num_clients, 1 / config.num_clients)
    return Scalars(1 / variances, means, weights)


def federation(clients: Scalars, dim: int) -> tuple[fedmcmc.Posterior, fedmcmc.FederatedData]:
    """Return the model: a row is the mean of a client, and its curvature over the clients."""

    def loglikelihood(theta: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        return -0.5 * jnp.sum(rows["curvature"] * (theta - rows["mean"]) ** 2, axis=-1)

    tables = zip(clients.means, clients.curvatures * clients.weights, strict=True)
    rows = [{"mean": np.full((1, dim), m), "curvature": np.full((1, dim), c)} for m, c in tables]
    return (
        fedmcmc.Posterior(lambda theta: jnp.zeros(()), loglikelihood),
        fedmcmc.FederatedData.from_clients(rows),
    )


def measured_curve(config: Config, clients: Scalars, dim: int, step_size: float, num: int) -> Any:
    """Return the distance a coordinate, from the runs' iterates after ``1 .. num`` rounds.

    Coordinates have one law, so mean and variance are taken over runs and coordinates.
    """
    posterior, data = federation(clients, dim)
    draws = run_grid(
        jax.random.key(config.seed),
        lambda eta: fedmcmc.fa_hmc(
            posterior,
            step_size=eta,
            num_integration_steps=config.num_integration_steps,
            num_local_steps=config.num_local_steps,
        ),
        data,
        jnp.full(dim, config.start),
        [step_size],
        num_chains=config.num_runs,
        num_rounds=num,
    )[0]
    mean, variance = draws.mean((0, 2)), draws.var((0, 2))
    right_mean, right_variance = dimension_law.target(clients)
    return np.hypot(mean - right_mean, np.sqrt(variance) - math.sqrt(right_variance))


def outcome(config: Config, dim: int) -> Outcome:
    """Return rounds by the exact law and by simulation, at the suggested step size."""
    clients = clients_of(config)
    sd = math.sqrt(dimension_law.target(clients)[1])
    settings = dict(
        num_integration_steps=config.num_integration_steps,
        num_local_steps=config.num_local_steps,
    )
    # Half the tolerance is for what is left at stationarity, half for the start.
    step_size = proposition_step_size(
        float(clients.curvatures.max()),
        dimension=dim,
        tolerance=config.tolerance / 2,
        **settings,
    )
    round_map = dimension_law.map_of_round(
        clients,
        step_size=step_size,
        num_steps=config.num_integration_steps,
        num_local_steps=config.num_local_steps,
        rho=1.0,
    )
    level = config.tolerance * sd / math.sqrt(dim)
    longest = 1 + int(20 / (1 - round_map[0]))
    curve = dimension_law.w2_curve(clients, round_map, start=config.start, num_rounds=longest)
    exact = dimension_law.rounds_to(curve, level)
    if exact is None:
        raise ValueError(
            f"the distance left at stationarity, {curve[-1] * math.sqrt(dim) / sd:.3g} posterior "
            f"sd in dimension {dim}, is above the tolerance {config.tolerance:g}: the clients "
            f"differ too much for the suggested step size."
        )
    found = measured_curve(config, clients, dim, step_size, int(1.2 * exact) + 2)
    measured = dimension_law.rounds_to(found, level)
    return Outcome(
        dim,
        step_size,
        exact,
        float(curve[-1]) * math.sqrt(dim) / sd,
        -1 if measured is None else measured + 1,
        float(found[-1 if measured is None else measured]) * math.sqrt(dim) / sd,
    )


def line_through(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope and intercept of a line, and the share of variance that it explains."""
    slope, intercept = np.polyfit(x, y, 1)
    left = y - (slope * x + intercept)
    return float(slope), float(intercept), float(1 - left.var() / y.var())


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run all dimensions; write the figure."""
    found = [outcome(config, dim) for dim in config.dims]
    dims = np.array(config.dims, float)
    squares = np.array([one.exact for one in found], float) ** 2
    explained = line_through(dims, squares)[2]
    power = line_through(np.log(dims), np.log([one.exact for one in found]))[0]
    metrics = {
        "table": [
            {
                "dimension": one.dim,
                "leapfrog step": one.step_size,
                "rounds, exact law": one.exact,
                "rounds, measured": one.measured,
                "distance left": one.floor,
                "rounds^2 / d": one.exact**2 / one.dim,
            }
            for one in found
        ],
        "explained": explained,
        "power": power,
        "tolerance": config.tolerance,
        "num_runs": config.num_runs,
    }
    return metrics | {"figures": draw(metrics, out)}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file name and caption."""
    dims, exact, measured = (
        np.array([row[k] for row in metrics["table"]], float)
        for k in ("dimension", "rounds, exact law", "rounds, measured")
    )
    slope, intercept, _ = line_through(dims, exact**2)
    power, scale, _ = line_through(np.log(dims), np.log(exact))
    with figure(out / "rounds.png", 1, 2) as (_, axes):
        left, right = axes[0]
        for place, values in ((left, (exact**2, measured**2)), (right, (exact, measured))):
            place.plot(dims, values[0], "o", color=COLORS["blue"], label="exact law")
            runs = f"{metrics['num_runs']} runs"
            place.plot(dims, values[1], "x", color=COLORS["red"], label=runs)
        left.plot(dims, slope * dims + intercept, ":", color=COLORS["black"], label="line")
        left.set(xlabel="dimension", ylabel="rounds squared")
        right.plot(
            dims,
            np.exp(scale) * dims**power,
            ":",
            color=COLORS["black"],
            label=f"power {power:.2g}",
        )
        half = exact[-1] * (dims / dims[-1]) ** 0.5
        right.plot(dims, half, "--", color=COLORS["pink"], label="power 0.5, the claim")
        right.set(xscale="log", yscale="log", xlabel="dimension", ylabel="rounds")
        for place in (left, right):
            place.legend()
    caption = (
        "Rounds to the tolerance against the dimension, squared (left, with a least-squares line) "
        "and on logarithmic axes (right): the exact law and simulated runs. Dotted, right: the "
        "power that fits; dashed: the power 0.5 of the claim, through the last point."
    )
    return [{"file": "rounds.png", "caption": caption}]
