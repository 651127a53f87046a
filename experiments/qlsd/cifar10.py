"""Table 4 and Figure 2 of Vono et al. (2022): ResNet-20 on CIFAR-10 beside HMC."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import images, spreading
from experiments.images import Images
from experiments.models import Mlp, ResNet
from experiments.qlsd import network_figures, network_hmc, network_methods, networks
from experiments.qlsd.federations import Federation, some_rows
from experiments.qlsd.image_federations import contiguous_blocks, dominant_digits
from experiments.qlsd.network_scores import hundredths, of_mean, scores
from fedmcmc import Placement, metrics

__all__ = ["TITLE", "Config", "draw", "run", "table"]

TITLE = "Table 4 and Figure 2: ResNet-20 on CIFAR-10"
MAX_RHAT = 1.05  # of chains that have mixed


@dataclass(frozen=True)
class Config(networks.Settings):
    """Settings; see `experiments.qlsd.networks.Settings`.

    Attributes
    ----------
    source
        ``"cifar10"``, or ``"digits"``: scikit-learn's 1797 digits of 8 by 8 and a perceptron, for
        which Hamiltonian Monte Carlo mixes in minutes.
    num_blocks, width
        Of the residual network: 3 and 16 make ResNet-20.
    hidden, proportion
        Of the digits: units of the hidden layer, and how many of a client's images have its label.
    pool
        Images are averages over squares of so many pixels a side.
    jpeg_test
        Whether the test images in the folder are all 10000, as JPEG, or 1000 exact ones.
    dg_step_size, dg_tolerance, dg_local_steps
        Of DG-SGLD: what the authors of DG-SGLD used for a network.
    reference
        A file (``.npy``, or text with commas) of the published HMC's probabilities
        ``[num_test, 10]`` for all test images in their order; empty for an HMC of ours.
    hmc_chains, hmc_steps, hmc_warmup, hmc_draws
        Of that: chains, leapfrog steps per draw, and draws dropped and kept per chain. The
        published one takes tens of thousands of leapfrog steps per draw.
    hmc_random_start
        Whether each of its chains starts at random weights of its own, not where all methods do.
    """

    num_rounds: int = 20_000
    num_burnin: int = 10_000
    thinning: int = 10
    sgld_rounds: int = 20_000
    sgld_burnin: int = 10_000
    sgld_thinning: int = 10
    source: str = "cifar10"
    hidden: int = 16
    proportion: float = 0.5
    num_blocks: int = 3
    width: int = 16
    pool: int = 1
    jpeg_test: bool = True
    dg_step_size: float = 1e-5
    dg_tolerance: float = 1e-4
    dg_local_steps: int = 1
    reference: str = ""
    hmc_chains: int = 2
    hmc_steps: int = 1000
    hmc_warmup: int = 10
    hmc_draws: int = 10
    hmc_random_start: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        networks.rounds(self, self.dg_local_steps)
        if self.source not in ("cifar10", "digits"):
            raise ValueError(f"source must be 'cifar10' or 'digits', got {self.source!r}.")
        if self.proportion > 1:
            raise ValueError(f"proportion must be at most 1, got {self.proportion}.")
        if 32 % self.pool:
            raise ValueError(f"pool must divide 32, got {self.pool}.")
        if self.hmc_chains < 2 or self.hmc_draws < 4:
            raise ValueError(
                "hmc_chains must be at least 2 and hmc_draws at least 4, got "
                f"{self.hmc_chains} and {self.hmc_draws}."
            )
        if self.reference and (self.pool > 1 or self.num_test or self.source != "cifar10"):
            raise ValueError(
                "reference is of all test images of CIFAR-10 in full: it needs pool=1, num_test=0 "
                "and source=cifar10"
            )


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run every method from one start, and the reference; write predictions and figures."""
    key = jax.random.key(config.seed)
    test_key, start_key, hmc_key, run_key = jax.random.split(key, 4)
    federation, module = problem(config)
    data, test = federation.data, federation.test
    chosen = some_rows(test_key, len(test.label), config.num_test or None)
    labels, inputs = test.label[chosen], [test.features[chosen]]
    posterior, predict_fn = networks.make(module, data, config.prior_scale)
    start = networks.warm_start(start_key, config, posterior, data)
    results = {"start": networks.at_start(predict_fn, start, inputs)}
    for i, (name, method) in enumerate(methods(config, posterior, data, start).items()):
        method_key = jax.random.fold_in(run_key, i)
        results[name] = networks.execute(
            method_key, method, data, start, predict_fn, inputs, placement
        )
    if config.reference:
        reference, of_chain = network_hmc.read(config.reference, labels), {}
        diagnostics: dict[str, float] = {}
    else:
        draws, diagnostics = network_hmc.draw(hmc_key, config, posterior, data, start)
        each = network_hmc.by_chain(draws, predict_fn, inputs[0])
        diagnostics["rhat of predictions"] = network_hmc.rhat_of_predictions(
            draws, predict_fn, inputs[0]
        )
        reference, of_chain = each.mean(axis=0), {"HMC": each}
    good = {name: r.probabilities for name, r in results.items() if r.probabilities}
    found = {
        name: measure(p[0], labels, reference, config.num_bins) | of_mean(results[name], labels)
        for name, p in good.items()
    }
    # As published: one chain against the others.
    hmc = scores(reference, labels, config.num_bins)
    for each in of_chain.values():
        hmc |= compare(each[0], each[1:].mean(axis=0))
    found = {"HMC": hmc, **found}
    np.savez_compressed(
        out / "predictions.npz", labels=labels, HMC=reference, **{n: p[0] for n, p in good.items()}
    )
    shown = {"HMC": [reference], **good}
    kept = {
        "table": [
            table_row(name, found.get(name, {}), results.get(name)) for name in ("HMC", *results)
        ],
        "curves": {n: network_figures.curves(p, labels, config.num_bins) for n, p in shown.items()},
        "scores": found,
        "diverged": {n: r.diverged for n, r in results.items() if r.diverged is not None},
        "hmc": diagnostics,
        "settings": asdict(config),
        "num_rows": data.num_rows,
        "num_test": len(labels),
        "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(start)),
    }
    return kept | {"figures": draw(kept, out)}


def problem(config: Config) -> tuple[Federation, Any]:
    """Return the clients with the images held out, and the network."""
    if config.source == "digits":
        key = jax.random.fold_in(jax.random.key(config.seed), 1)
        federation = dominant_digits(
            key, images.small_digits(), config.num_clients, config.proportion
        )
        return federation, Mlp((config.hidden,), 10, jnp.tanh)
    photographs = images.cifar10(jpeg_test=config.jpeg_test)
    federation = contiguous_blocks(
        shrink(photographs, config.pool), config.num_clients, num_rows=config.num_rows or None
    )
    return federation, ResNet(config.num_blocks, width=config.width, method=config.convolution)


def draw(metrics: dict[str, Any], out: Path) -> list[dict[str, str]]:
    """Write the figures of a run."""
    found = metrics["curves"]
    return network_figures.entropies(out, found) + network_figures.calibration(
        out, found, metrics["settings"]["num_bins"]
    )


def shrink(given: Images, pool: int) -> Images:
    """Average squares of `pool` pixels a side."""

    def smaller(x: np.ndarray) -> np.ndarray:
        num, height, width, channels = x.shape
        squares = x.reshape(num, height // pool, pool, width // pool, pool, channels)
        return squares.mean(axis=(2, 4), dtype=np.float32)

    if pool == 1:
        return given
    return given._replace(x_train=smaller(given.x_train), x_test=smaller(given.x_test))


def methods(
    config: Config, posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, start: Any
) -> dict[str, networks.Run]:
    """Return the methods of Table 4 in its order."""
    batch = dict(batch_size=config.batch_size)
    sgld = fedmcmc.sgld(posterior, step_size=config.step_size, **batch)
    quantised = network_methods.qlsd_runs(config, posterior)
    gibbs = fedmcmc.dg_sgld(
        posterior,
        step_size=config.dg_step_size,
        tolerance=config.dg_tolerance,
        num_local_steps=config.dg_local_steps,
        **batch,
    )
    return {
        "SGLD": networks.Run(sgld, config.pooled_rounds),
        **{name: quantised[name] for name in ("QLSD++", "QLSD++ PP")},
        "FedBE-Dirichlet": network_methods.fed_be_run(config, posterior, "dirichlet"),
        "FedBE-Gauss": network_methods.fed_be_run(config, posterior, "gaussian"),
        "DG-SGLD": networks.Run(gibbs, networks.rounds(config, config.dg_local_steps)),
        "FSGLD": network_methods.fsgld_run(config, posterior, data, start),
    }


def compare(probabilities: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Return agreement and total variation."""
    return {
        "agreement": float(metrics.agreement(probabilities, reference)),
        "tv": float(metrics.total_variation(probabilities, reference)),
    }


def measure(
    probabilities: np.ndarray, labels: np.ndarray, reference: np.ndarray, num_bins: int
) -> dict[str, float]:
    """Return the scores of Table 4, and those of Table S2."""
    return scores(probabilities, labels, num_bins) | compare(probabilities, reference)


def table_row(
    method: str, found: dict[str, float], result: networks.Result | None
) -> dict[str, Any]:
    """Return one line, in the units of Table 4 and, for ECE and nNLL, of Table S2."""
    return {
        "method": method,
        "accuracy %": hundredths(found.get("accuracy")),
        "accuracy %, mean network": hundredths(found.get("accuracy_of_mean")),
        "agreement": found.get("agreement"),
        "TV": found.get("tv"),
        "ECE": hundredths(found.get("ece")),
        "nNLL": hundredths(found.get("nnll")),
        "draws": None if result is None else result.num_draws,
        "bits / 32 d": None if result is None else result.relative_bits,
    }


def table(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a run, without distances to a reference that has not mixed."""
    left_out = () if _mixed(metrics) else ("agreement", "TV")
    return [
        {name: value for name, value in row.items() if name not in left_out}
        for row in metrics["table"]
    ]


def _mixed(metrics: dict[str, Any]) -> bool:
    hmc = metrics["hmc"]
    rhat = hmc.get("rhat of predictions", hmc.get("rhat")) if hmc else 1.0
    return rhat is not None and rhat <= MAX_RHAT
