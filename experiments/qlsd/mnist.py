"""Table S2 of Vono et al. (2022): LeNet-5 on MNIST, Fashion-MNIST out of distribution."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedmcmc
from experiments import images, spreading
from experiments.models import LeNet5
from experiments.qlsd import network_figures, network_methods, networks
from experiments.qlsd.federations import some_rows
from experiments.qlsd.image_federations import dominant_digits
from experiments.qlsd.network_scores import hundredths, of_mean, scores
from fedmcmc import Placement, metrics

__all__ = ["TITLE", "Config", "draw", "run"]

TITLE = "Table S2 and Figures S5, S6: LeNet-5 on MNIST"
COLUMNS = ("accuracy %", "ECE", "Brier", "nNLL")


@dataclass(frozen=True)
class Config(networks.Settings):
    """Settings; see `experiments.qlsd.networks.Settings`. The start is random, as in the paper.

    Banded convolutions are the fastest of this network, on CPUs and on a GPU.

    Attributes
    ----------
    proportion
        Of a client's images that are of its dominant label; lost in our copy of the paper.
    psgld_step_size
        Of preconditioned SGLD.
    """

    convolution: str = "banded"
    num_warm_steps: int = 0
    proportion: float = 0.8
    psgld_step_size: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.proportion <= 1:
            raise ValueError(f"proportion must be at most 1, got {self.proportion}.")


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run every method from one start; write predictions and figures."""
    key = jax.random.key(config.seed)
    split_key, test_key, start_key, run_key = jax.random.split(key, 4)
    digits = images.mnist()
    digits = digits._replace(x_train=digits.x_train[..., None], x_test=digits.x_test[..., None])
    federation = dominant_digits(
        split_key, digits, config.num_clients, config.proportion, num_rows=config.num_rows or None
    )
    clothes = images.scale_pixels(images.fashion_mnist().x_test[..., None], "standard")
    chosen = some_rows(test_key, len(digits.y_test), config.num_test or None)
    labels = federation.test.label[chosen]
    inputs = [federation.test.features[chosen], clothes[chosen]]
    data = federation.data
    module = LeNet5(method=config.convolution)
    posterior, predict_fn = networks.make(module, data, config.prior_scale)
    start = networks.warm_start(start_key, config, posterior, data)
    results = {"start": networks.at_start(predict_fn, start, inputs)}
    for i, (name, method) in enumerate(methods(config, posterior, data, start).items()):
        method_key = jax.random.fold_in(run_key, i)
        results[name] = networks.execute(
            method_key, method, data, start, predict_fn, inputs, placement
        )
    found = {name: measure(result, labels, config.num_bins) for name, result in results.items()}
    good = {name: result.probabilities for name, result in results.items() if result.probabilities}
    parts = {
        f"{name} {part}": both[i]
        for name, both in good.items()
        for i, part in enumerate(("in", "out"))
    }
    np.savez_compressed(out / "predictions.npz", labels=labels, **parts)
    kept = {
        "table": [table_row(name, found[name], result) for name, result in results.items()],
        "curves": {n: network_figures.curves(p, labels, config.num_bins) for n, p in good.items()},
        "scores": found,
        "diverged": {n: r.diverged for n, r in results.items() if r.diverged is not None},
        "settings": asdict(config),
        "num_rows": data.num_rows,
        "num_test": len(labels),
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(start)),
    }
    return kept | {"figures": draw(kept, out)}


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figures of a run."""
    found = metrics["curves"]
    return network_figures.calibration(
        out, found, metrics["settings"]["num_bins"]
    ) + network_figures.entropies_in_out(out, found)


def methods(
    config: Config, posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, start: Any
) -> dict[str, networks.Run]:
    """Return the methods of Table S2 in its order."""
    batch = dict(batch_size=config.batch_size)
    sgld = fedmcmc.sgld(posterior, step_size=config.step_size, **batch)
    psgld = fedmcmc.psgld(posterior, step_size=config.psgld_step_size, **batch)
    quantised = network_methods.qlsd_runs(config, posterior)
    return {
        "SGLD": networks.Run(sgld, config.pooled_rounds),
        "pSGLD": networks.Run(psgld, config.pooled_rounds),
        **{name: quantised[name] for name in ("QLSD", "QLSD PP", "QLSD++", "QLSD++ PP")},
        "FedBE-Gauss": network_methods.fed_be_run(config, posterior, "gaussian"),
        "FedBE-Dirichlet": network_methods.fed_be_run(config, posterior, "dirichlet"),
        "FSGLD": network_methods.fsgld_run(config, posterior, data, start),
    }


def measure(result: networks.Result, labels: np.ndarray, num_bins: int) -> dict[str, float]:
    """Return the scores of Table S2 as fractions, and the AUC of telling clothes from digits."""
    if not result.probabilities:
        return {}
    inside, outside = result.probabilities
    entropies = metrics.predictive_entropy(inside), metrics.predictive_entropy(outside)
    found = scores(inside, labels, num_bins) | of_mean(result, labels)
    return found | {"auc": float(metrics.ood_auc(*entropies))}


def table_row(method: str, found: dict[str, float], result: networks.Result) -> dict[str, Any]:
    """Return one line, in the units of Table S2 (except for AUC and bits)."""
    names = ("accuracy", "ece", "brier", "nnll")
    columns = {t: hundredths(found.get(n)) for n, t in zip(names, COLUMNS, strict=True)}
    return {
        "method": method,
        **columns,
        "accuracy %, mean network": hundredths(found.get("accuracy_of_mean")),
        "AUC": found.get("auc"),
        "draws": result.num_draws,
        "bits / 32 d": result.relative_bits,
    }
