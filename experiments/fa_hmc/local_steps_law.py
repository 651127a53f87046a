"""Settings of the study of local steps, and rounds to a distance by the exact law."""

import math
from dataclasses import dataclass

import numpy as np

from experiments import checks
from experiments.checks import require
from experiments.fa_hmc import dimension, dimension_law
from experiments.fa_hmc.dimension_law import Scalars

__all__ = ["CASES", "Settings", "first", "grid", "level"]

CASES = ("vanilla", "noisy gradients", "own momenta")


@dataclass(frozen=True)
class Settings:
    """Settings; the paper states none of these.

    Attributes
    ----------
    dim, num_clients, means, variances, num_integration_steps, start
        As in Figure 2 (`fa_hmc/dimension`).
    local_steps
        ``T`` that are tried.
    gradient_noise
        Standard deviation of the noise on each coordinate of a client's gradient.
    rho
        Correlation of the clients' momenta where they are not shared.
    noises
        Noises of gradients for which rounds are told, too.
    tolerance
        The 2-Wasserstein distance to be reached, in posterior standard deviations, over ``T``.
    tolerances, schedule_local_steps
        Distances per coordinate that constant and falling steps are to reach, and ``T`` there.
    num_step_sizes, most_rounds
        Of the grids, and rounds in which a chain has to arrive.
    num_runs, simulated
        Simulated chains, of which the distance is estimated beside the law, and the largest ``T``
        at which they run.
    """

    seed: int = 0
    dim: int = 100
    num_clients: int = 10
    means: tuple[float, float] = (1.0, -1.0)
    variances: tuple[float, float] = (1.0, 0.5)
    num_integration_steps: int = 10
    start: float = 3.0
    local_steps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200)
    gradient_noise: float = 20.0
    rho: float = 0.0
    noises: tuple[float, ...] = (0.0, 5.0, 10.0, 15.0, 20.0, 40.0, 80.0)
    tolerance: float = 0.5
    tolerances: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01)
    schedule_local_steps: int = 2
    num_step_sizes: int = 200
    most_rounds: int = 20_000
    num_runs: int = 200
    simulated: int = 10

    def __post_init__(self) -> None:
        checks.at_least(1, self, "schedule_local_steps", "num_integration_steps", "most_rounds")
        checks.at_least(2, self, "num_step_sizes")
        checks.positive(self, "gradient_noise", "tolerance")
        checks.between(-1e-9, 1, self, "rho")
        require(
            min(self.noises, default=-1) >= 0,
            "noises must be one or more that are not negative",
            self.noises,
        )
        for name in ("local_steps", "tolerances"):
            values = getattr(self, name)
            require(
                len(values) > 1 and min(values) > 0,
                f"{name} must be two or more that are positive",
                values,
            )
        self.of_figure()

    def of_figure(self) -> dimension.Config:
        """Return the settings of Figure 2 that these are."""
        return dimension.Config(
            num_clients=self.num_clients,
            means=self.means,
            variances=self.variances,
            num_integration_steps=self.num_integration_steps,
            start=self.start,
            num_runs=self.num_runs,
        )

    def case(self, name: str) -> dict[str, float]:
        """Return noise and correlation of one of the cases."""
        noise = self.gradient_noise if name == "noisy gradients" else 0.0
        return {"noise": noise, "rho": self.rho if name == "own momenta" else 1.0}


def grid(config: Settings, clients: Scalars) -> np.ndarray:
    """Return step sizes up to trajectories of a quarter of the narrowest client's period."""
    longest = math.pi / 2 / math.sqrt(clients.curvatures.max()) / config.num_integration_steps
    return np.geomspace(longest / 1000, longest, config.num_step_sizes)


def level(config: Settings, clients: Scalars) -> float:
    """Return the distance per coordinate that is the tolerance over ``T``."""
    return config.tolerance * math.sqrt(dimension_law.target(clients)[1] / config.dim)


def first(
    config: Settings,
    clients: Scalars,
    steps: np.ndarray,
    num_local_steps: int,
    level: float,
    case: dict[str, float],
) -> tuple[int, int] | None:
    """Return after how many rounds the first step size comes to a distance, and which it is.

    `level` is the distance per coordinate, `case` the noise and correlation of `Settings.case`;
    ``None`` where none comes to it in the rounds that a chain has.
    """
    one = dimension_law.map_of_round(
        clients,
        step_size=steps,
        num_steps=config.num_integration_steps,
        num_local_steps=num_local_steps,
        **case,
    )
    return dimension_law.first_to(
        clients, lambda _: one, level, start=config.start, most=config.most_rounds
    )
