"""Table 3 of Guo et al. (2023): tag prediction among hundreds of thousands of users."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import checks, spreading
from experiments.fed_ep import (
    image_figures,
    methods,
    runs,
    tag_data,
    tag_figures,
    tag_model,
)
from experiments.fed_ep.tag_figures import draw
from fedmcmc import Placement, metrics

__all__ = ["Config", "draw", "run"]


@dataclasses.dataclass(frozen=True)
class Config(methods.Settings):
    """Settings; the defaults are the paper's.

    Attributes
    ----------
    dataset
        ``"stackoverflow"``, or ``"synthetic"``, with `num_clients` users who write `mean_rows`
        sentences on average.
    num_words, num_tags
        Of the vocabularies, the most frequent ones of Stack Overflow.
    max_rows
        Sentences of a user at most.
    num_test, test_rows
        Sentences held out, and how many of them a round is scored on.
    best_window
        Rounds of the running mean of which the best is reported.
    """

    dataset: str = "stackoverflow"
    num_clients: int = 342_477
    mean_rows: float = 10.0
    num_words: int = 10_000
    num_tags: int = 500
    max_rows: int = 1000
    num_test: int = 100_000
    test_rows: int = 10_000
    best_window: int = 100
    cohort_size: int = 10
    num_burnin: int = 800
    num_epochs: int = 5
    pa_burnin: int = 2
    batch_size: int = 100
    client_learning_rate: float = 50.0
    server_optimizer: str = "adagrad"
    server_learning_rate: float = 5.0
    weight_decay: float = 0.0
    covariance: float = 1e-8
    scale: float = 1.0
    shrinkage: float = 1e-6
    ngvi_epochs: int = 10
    ngvi_samples: int = 10
    methods: tuple[str, ...] = tuple(m for m in methods.METHODS if not m.startswith("FedEP "))

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.at_least(1, self, "num_clients", "num_words", "num_tags", "max_rows", "num_test")
        checks.at_least(1, self, "test_rows", "best_window")
        checks.require(self.mean_rows >= 1, "mean_rows must be at least 1", self.mean_rows)
        checks.require(self.num_words < 2**15, "num_words must be less than 32768", self.num_words)
        checks.require(
            self.best_window <= self.num_rounds - self.num_burnin,
            "best_window must be at most num_rounds - num_burnin",
            self.best_window,
        )
        checks.require(
            self.dataset in ("stackoverflow", "synthetic"),
            "dataset must be 'stackoverflow' or 'synthetic'",
            self.dataset,
        )


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all methods; write the curves' figure."""
    if config.dataset == "stackoverflow":
        federation = tag_data.stack_overflow(
            config.num_words, config.num_tags, config.max_rows, config.num_test
        )
    else:
        federation = tag_data.synthetic(
            config.seed,
            num_clients=config.num_clients,
            num_words=config.num_words,
            num_tags=config.num_tags,
            mean_rows=config.mean_rows,
            max_rows=config.max_rows,
            num_test=config.num_test,
        )
    posterior = tag_model.posterior(config.num_words, config.num_tags)
    score_fn = partial(tag_model.score, jax.random.key(config.seed + 1), config.test_rows)
    curves = runs.execute(config, posterior, federation, score_fn, placement)
    table, by_round, spreads = [], {}, {}
    window = min(config.best_window, tag_figures.WINDOW)
    for name, curve in curves.items():
        found = tag_model.rates(curve.scores["counts"])
        by_round[name] = {k: v.mean(axis=0).tolist() for k, v in found.items()}
        spreads[name] = {k: image_figures.deviations(v, window) for k, v in found.items()}
        row: dict[str, Any] = {"method": name}
        for kind, values in found.items():
            # Of the rounds in which methods differ; before there is little recall and no error.
            own = values[:, config.num_burnin :]
            best = np.asarray(metrics.best_running_mean(own, config.best_window))
            row[kind] = float(best.mean())
            row[f"sd of {kind}"] = float(best.std(ddof=1)) if best.size > 1 else None
        table.append(row)
    result = {
        "table": table,
        "data": federation.text,
        "num_parameters": (config.num_words + 1) * config.num_tags,
        "settings": dataclasses.asdict(config),
        "by_round": by_round,
        "by_round_sd": spreads,
        **runs.trouble(curves),
    }
    result["figures"] = tag_figures.draw(result, out)
    return result
