"""Normal outcomes with effects of counties or schools: each method compared with pooled NUTS."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import checks
from experiments.hierarchy import methods, studies

__all__ = ["Config", "check", "compared", "rows", "run"]

rows = methods.rows


@dataclass(frozen=True)
class Config:
    """Settings.

    Attributes
    ----------
    data
        ``radon``, ``exam`` or ``schools``.
    methods
        Names of `experiments.hierarchy.methods.METHODS`.
    num_reference
        Draws per chain of pooled NUTS, which has four chains.
    num_draws
        Number of weighted draws of `fedmcmc.fit`.
    num_chains, num_rounds, num_burnin
        Lengths of the chains of kernels; the rounds include burn-in.
    """

    seed: int = 0
    data: str = "radon"
    methods: tuple[str, ...] = tuple(methods.METHODS)
    num_reference: int = 4000
    num_draws: int = 4000
    num_chains: int = 4
    num_rounds: int = 3000
    num_burnin: int = 300

    def __post_init__(self) -> None:
        check(self, studies.GAUSSIAN)


def check(config: Any, data: tuple[str, ...]) -> None:
    """Raise `ValueError` on settings out of range."""
    checks.require(config.data in data, f"data must be one of {', '.join(data)}", config.data)
    unknown = [name for name in config.methods if name not in methods.METHODS]
    choices = ", ".join(methods.METHODS)
    checks.require(
        not unknown and len(config.methods) > 0, f"methods must be some of {choices}", unknown
    )
    checks.at_least(100, config, "num_reference", "num_draws")
    checks.at_least(2, config, "num_chains")
    checks.at_least(0, config, "num_burnin")
    checks.require(
        config.num_rounds - config.num_burnin >= 100,
        "num_rounds must exceed num_burnin by at least 100",
        config.num_rounds,
    )


def run(config: Config, out: Path) -> dict[str, Any]:
    """Run pooled NUTS and all methods on one set of data."""
    return compared(studies.load(config.data), config)


def compared(study: studies.Study, config: Any) -> dict[str, Any]:
    """Return the numbers of all methods and of pooled NUTS."""
    settings = methods.Settings(
        config.seed, config.num_draws, config.num_chains, config.num_rounds, config.num_burnin
    )
    truth = methods.pooled(study, settings, config.num_reference)
    return {
        "table": methods.table(study, settings, config.methods, truth),
        "data": study.counts,
        "truth": {
            "mean": dict(zip(truth.names, truth.mean, strict=True)),
            "sd": dict(zip(truth.names, truth.sd, strict=True)),
            "ess": truth.ess.min(),
            "r_hat": truth.rhat,
            "gradients": truth.leapfrogs,
        },
    }
