"""Figure 1(c) by the law: rounds to a marginal error of infinitely many chains."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import checks, models
from experiments.checks import require
from experiments.fa_hmc import logistic, quadratic_law
from experiments.fa_hmc.error_curves import NUM_BINS, marks
from experiments.fa_hmc.logistic_figures import local_curves
from experiments.fa_hmc.quadratic_law import Quadratics, Round
from experiments.figures import COLORS, figure, label_ticks

__all__ = ["Config", "draw", "run"]

HUES = ("sky", "blue", "black", "green", "orange", "red")
SETTLED = 0.01  # of the error in the long run, within which a curve that will not arrive ends
SDS = 4.0  # of the posterior on both sides of its mean: about the range of the benchmark's draws


@dataclass(frozen=True)
class Config:
    """Settings: those of `fa_hmc/logistic` over local steps, and the errors to be reached.

    Attributes
    ----------
    thresholds
        Marginal errors, descending.
    threshold
        The one of them that Figure 1 has.
    most_rounds
        Rounds after which a curve ends that has not arrived, though it would.
    """

    seed: int = 0
    dim: int = 1000
    num_rows: int = 1000
    num_clients: int = 20
    prior_precision: float = 1.0
    gradient_noise: float = 5.0
    local_steps: tuple[int, ...] = (1, 2, 5, 10, 20, 30, 50, 70, 100)
    local_step_size: float = 0.02
    local_leapfrog: int = 10
    thresholds: tuple[float, ...] = (0.2, 0.12, 0.08, 0.05, 0.03, 0.02)
    threshold: float = 0.08
    most_rounds: int = 3000

    def __post_init__(self) -> None:
        checks.at_least(1, self, "dim", "num_clients", "local_leapfrog", "most_rounds")
        checks.at_least(self.num_clients, self, "num_rows")
        checks.positive(self, "prior_precision", "gradient_noise", "local_step_size")
        require(
            len(self.local_steps) > 1
            and self.local_steps[0] == 1
            and list(self.local_steps) == sorted(set(self.local_steps)),
            "local_steps must begin with 1, what others are compared with, and increase",
            self.local_steps,
        )
        require(
            self.threshold in self.thresholds
            and list(self.thresholds) == sorted(set(self.thresholds), reverse=True)
            and min(self.thresholds) > 0,
            f"thresholds must be positive, descend and have {self.threshold:g} among them",
            self.thresholds,
        )
        require(
            len(self.thresholds) <= len(HUES), f"at most {len(HUES)} thresholds", self.thresholds
        )


def clients_of(config: Config) -> Quadratics:
    """Return the expansions of the clients' likelihoods at the mode, with their prior."""
    settings = logistic.Config(
        seed=config.seed,
        dim=config.dim,
        num_rows=config.num_rows,
        num_clients=config.num_clients,
        prior_precision=config.prior_precision,
    )
    data = logistic.federation(settings)
    posterior = models.logistic(data, config.prior_precision)
    mode = fedmcmc.surrogates.mode(posterior, data, jnp.zeros(config.dim)).position
    expansions = fedmcmc.surrogates.taylor(posterior, data, mode)
    sizes = np.asarray(data.size, float)
    return Quadratics.of_likelihoods(
        np.asarray(expansions.precision, float),
        np.asarray(expansions.precision_mean, float),
        sizes / sizes.sum(),
        config.prior_precision,
    )


def run(config: Config, out: Path) -> dict[str, Any]:
    """Follow the law of every number of local steps; write the figure."""
    clients = clients_of(config)
    mean, covariance = quadratic_law.target(clients)
    step_size = config.local_step_size * float(np.sqrt(np.linalg.eigvalsh(covariance)[0]))
    sd = np.sqrt(np.diag(covariance))
    edges = mean[:, None] + sd[:, None] * np.linspace(-SDS, SDS, NUM_BINS + 1)
    wanted = quadratic_law.bin_shares(mean, sd, edges)
    rounds = quadratic_law.local_rounds(
        clients,
        config.local_steps,
        step_size=step_size,
        num_steps=config.local_leapfrog,
        noise=config.gradient_noise,
    )
    lines: list[dict[str, Any]] = []
    first: list[float] = []
    for num, one in rounds:
        line, errors = _line(config, num, one, edges, wanted)
        if num == 1:
            first = errors
        else:
            line |= _most_saved(first, errors)
        lines.append(line)
    metrics = {
        "table": [_row(config, line) for line in lines],
        "local_steps": lines,
        "thresholds": list(config.thresholds),
        "threshold": config.threshold,
        "dim": config.dim,
        "step_size": step_size,
    }
    return metrics | {"figures": draw(metrics, out)}


def _line(
    config: Config, num: int, one: Round, edges: np.ndarray, wanted: np.ndarray
) -> tuple[dict[str, Any], list[float]]:
    """Return how the error of one number of local steps falls, and where to; and all errors."""

    def error(shares: np.ndarray) -> float:
        return float(np.abs(shares - wanted).sum(1).mean() / 2)

    def in_the_long_run(of: Round) -> float:
        return error(quadratic_law.bin_shares(*quadratic_law.stationary(of), edges))

    left, wanting = in_the_long_run(one), list(config.thresholds)
    law = quadratic_law.moments(one, np.zeros(config.dim))
    before: list[tuple[np.ndarray, np.ndarray]] = []
    total, begin, errors, arrivals = np.zeros_like(wanted), 0, [], []
    while wanting and len(before) < config.most_rounds:
        before.append(next(law))
        total += quadratic_law.bin_shares(*before[-1], edges)
        while begin < len(before) // 2:
            total -= quadratic_law.bin_shares(*before[begin], edges)
            begin += 1
        errors.append(error(total / (len(before) - begin)))
        while wanting and errors[-1] <= wanting[0]:
            arrivals.append({"error": wanting.pop(0), "rounds": len(before)})
        # An error can be less on the way than in the long run, so that it is followed to the end.
        if wanting and wanting[0] <= left and abs(errors[-1] - left) < SETTLED * left:
            break
    kept = [n for n in (1, *marks(max(2, len(errors)))) if n <= len(errors)]
    line = {
        "T": num,
        "rounds run": len(errors),
        "error in the long run": left,
        "with exact gradients": in_the_long_run(one.with_exact_gradients()),
        "arrivals": arrivals,
        "curve": [(n, errors[n - 1]) for n in kept],
    }
    return line, errors


def _most_saved(first: list[float], errors: list[float]) -> dict[str, Any]:
    """Return the most times that one local step takes as many rounds, and the error where it does.

    That is the error after some round: between two of them only the rounds of one local step grow.
    """
    found = [
        (1 + next(i for i, one in enumerate(first) if one <= error), 1 + num, error)
        for num, error in enumerate(errors)
        if error >= min(first)
    ]
    rounds, own, error = max(found, key=lambda of: of[0] / of[1], default=(0, 1, None))
    return {"times fewer rounds, at most": rounds / own, "rounds": own, "to error": error}


def _row(config: Config, line: Mapping[str, Any]) -> dict[str, Any]:
    found = {at["error"]: at["rounds"] for at in line["arrivals"]}
    rounds = {f"rounds to {level:g}": found.get(level) for level in config.thresholds}
    rest = ("times fewer rounds, at most", "to error", "error in the long run")
    return {"T": line["T"]} | rounds | {name: line.get(name) for name in rest}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figure of a run; return its file and caption."""
    lines = metrics["local_steps"]
    with figure(out / "law.png", 1, 2) as (_, axes):
        left, right = axes[0]
        local_curves(left, [x for x in lines if x["curve"]], metrics["threshold"])
        right.set(xscale="log", yscale="log", xlabel="local steps T", ylabel="rounds to the error")
        for level, hue in zip(metrics["thresholds"], HUES, strict=False):
            there = [
                (x["T"], at["rounds"])
                for x in lines
                for at in x["arrivals"]
                if at["error"] == level
            ]
            if there:
                nums, rounds = zip(*there, strict=True)
                right.plot(nums, rounds, "o-", ms=4, color=COLORS[hue], label=f"error {level:g}")
        right.legend()
        for place in (left.yaxis, right.xaxis, right.yaxis):
            label_ticks(place)
    caption = (
        f"The law of infinitely many chains in dimension {metrics['dim']}. Left: marginal errors "
        "against rounds; dashed: the threshold of Figure 1(c) above. Right: rounds to several "
        "errors over local steps; lines end where a larger T does not arrive."
    )
    return [{"file": "law.png", "caption": caption}]
