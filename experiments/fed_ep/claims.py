"""The claims of Guo et al. (2023), in the paper's order."""

from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Claim,
    Given,
    Verdict,
    first_that_holds,
    on_other_data,
)
from experiments.fed_ep.findings import difference_noise
from experiments.fed_ep.hyperparameters import best, groups
from experiments.fed_ep.image_figures import smooth
from experiments.fed_ep.linear import lead

__all__ = ["CLAIMS"]

FEW_POINTS = 1.0  # of accuracy, beyond which noise hides what the paper's curves show
CIFAR = ("fed_ep/cifar", "fed_ep/cifar10_gpu", "fed_ep/cifar10_small")
GRIDS = ("fed_ep/hyperparameters", "fed_ep/hyperparameters_cifar10_small")
SMALL = ("fed_ep/linear", "fed_ep/cifar10_components_raw_small")
SCALED = ("fed_ep/cifar10_components_small",)
LARGE = ("fed_ep/linear_pixels", "fed_ep/cifar10_pixels_small")


def _toy(metrics: Given, config: Given) -> Verdict:
    del config
    distance = {row["method"]: row["distance"] for row in metrics["table"]}
    others = min(distance["FedAvg"], distance["FedPA"])
    word = REPRODUCED if distance["FedEP"] < 1e-4 < others else CONTRADICTED
    listed = ", ".join(f"{n} {distance[n]:.2g}" for n in ("FedAvg", "FedPA", "FedEP"))
    return Verdict(word, f"{listed} (the paper: 0.54, 0.26, 1.1e-7)")


def _identity(metrics: Given, config: Given) -> Verdict:
    del config
    curves = {n: np.array(v) for n, v in metrics["by_round"].items()}
    own, diagonal = curves["FedEP, scaled identity"], curves["FedEP"]
    slower, arrives = own[4] > diagonal[4], own[-1] < 1e-4
    word = first_that_holds((slower and arrives, REPRODUCED), otherwise=CONTRADICTED)
    return Verdict(
        word,
        f"distance {own[4]:.2g} after 5 rounds ({diagonal[4]:.2g} with a diagonal), "
        f"{own[-1]:.1g} after {len(own)}",
    )


def _best(metrics: Given) -> dict[str, float]:
    column = f"accuracy in {metrics['settings']['checkpoints'][-1]} rounds"
    return {row["method"]: row[column] for row in metrics["table"] if row[column] is not None}


def _data(config: Given, papers: str) -> str:
    return "" if config["dataset"] == papers else f" ({config['dataset']}, not {papers})"


def _ahead(family: str, papers: str) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        best = _best(metrics)
        base = max(best["FedAvg"], best["FedPA"])
        gains = {n: v - base for n, v in best.items() if n.startswith(f"{family} ")}
        beyond = [g > difference_noise(metrics, base, base + g) for g in gains.values()]
        behind = [g < -difference_noise(metrics, base, base + g) for g in gains.values()]
        word = first_that_holds(
            (all(beyond), REPRODUCED),
            (all(behind), CONTRADICTED),
            (any(beyond), PARTLY),
            (any(behind), CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        word = on_other_data(word, config["dataset"] != papers)
        listed = ", ".join(f"{n[-2]} {g:+.1f}" for n, g in gains.items())
        return Verdict(
            word,
            f"points over the better baseline: {listed}; {_seeds(config)}{_data(config, papers)}",
        )

    return judge


def _seeds(config: Given) -> str:
    return f"{config['num_seeds']} seed{'s' * (config['num_seeds'] > 1)}"


def _plain_is_enough(metrics: Given, config: Given) -> Verdict:
    best = {n: v for n, v in _best(metrics).items() if n.startswith("FedEP ")}
    gap = max(best.values()) - best["FedEP (I)"]
    near = gap < difference_noise(metrics, best["FedEP (I)"], best["FedEP (I)"] + gap)
    return Verdict(
        on_other_data(REPRODUCED if near else CONTRADICTED, config["dataset"] != "cifar100"),
        f"{gap:.1f} points behind the best, {max(best, key=lambda n: best[n])}; "
        f"{_seeds(config)}{_data(config, 'cifar100')}",
    )


def _stateless(metrics: Given, config: Given) -> Verdict:
    best = _best(metrics)
    gaps = {
        x: best[f"FedSEP ({x})"] - best[f"FedEP ({x})"]
        for x in "IMLV"
        if f"FedSEP ({x})" in best and f"FedEP ({x})" in best
    }
    noise = difference_noise(metrics, best["FedEP (I)"], best["FedEP (I)"])
    near = all(gap > -max(noise, 2.0) for gap in gaps.values())
    listed = ", ".join(f"{x} {gap:+.1f}" for x, gap in gaps.items())
    return Verdict(
        on_other_data(REPRODUCED if near else CONTRADICTED, config["dataset"] != "cifar100"),
        f"points to FedEP: {listed} (the paper: -1.8 to +0.1); {_seeds(config)}"
        f"{_data(config, 'cifar100')}",
    )


def _calibrated(metrics: Given, config: Given) -> Verdict:
    errors = {row["method"]: row["ECE, point"] for row in metrics["table"]}
    base = min(errors["FedAvg"], errors["FedPA"])
    own = [v for n, v in errors.items() if n.startswith(("FedEP ", "FedSEP ")) and v is not None]
    smaller = [v < base for v in own]
    word = first_that_holds(
        (all(smaller), REPRODUCED), (any(smaller), PARTLY), otherwise=CONTRADICTED
    )
    word = on_other_data(word, config["dataset"] != "cifar100")
    return Verdict(
        word,
        f"ECE of the point {min(own):.1f} to {max(own):.1f} %, better baseline {base:.1f} "
        f"%; {_seeds(config)}{_data(config, 'cifar100')}",
    )


def _tags(metrics: Given, config: Given) -> Verdict:
    rates = {row["method"]: row["micro F1"] for row in metrics["table"]}
    base = max(rates["FedAvg"], rates["FedPA"])
    own = {x: rates[f"FedSEP ({x})"] for x in "ILV"}
    good = all(v > base for v in own.values())
    made_up = config["dataset"] != "stackoverflow"
    word = first_that_holds((made_up, UNTESTABLE), (good, REPRODUCED), otherwise=CONTRADICTED)
    listed = ", ".join(f"{x} {v:.1f}" for x, v in own.items())
    where = " on made-up words" if made_up else ""
    return Verdict(word, f"micro F1{where}: {listed}; the better baseline {base:.1f}")


def _fails(metrics: Given, config: Given) -> Verdict:
    rates = {row["method"]: row["micro F1"] for row in metrics["table"]}
    fails = rates["FedSEP (M)"] < rates["FedAvg"]
    made_up = config["dataset"] != "stackoverflow"
    word = first_that_holds((made_up, UNTESTABLE), (fails, REPRODUCED), otherwise=CONTRADICTED)
    where = " on made-up words" if made_up else ""
    return Verdict(word, f"micro F1{where} {rates['FedSEP (M)']:.1f}, FedAvg {rates['FedAvg']:.1f}")


def _inference(faster: bool) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        settings = metrics["settings"]
        window, first = settings["window"], settings["num_burnin"]
        within = [lead(metrics, part) for part in ("early", "best")]
        if within[0] is not None and within[1] is not None:
            (early, error), (last, error_last) = within[0], within[1]
            noise = TIMES * error
            told = f"{early:+.2f} (s.e. {error:.2f})", f"{last:+.2f} (s.e. {error_last:.2f})"
        else:  # a run that kept means over seeds alone
            curves = {x: smooth(metrics["by_round"][f"FedEP ({x})"], window) for x in "IV"}
            early = float(curves["V"][first] - curves["I"][first])
            last = float(curves["V"].max() - curves["I"].max())
            noise = difference_noise(metrics, curves["I"][first], curves["V"][first])
            told = f"{early:+.1f} (noise {noise:.1f})", f"{last:+.1f}"
        word = first_that_holds(
            (early > noise, REPRODUCED if faster else CONTRADICTED),
            # What is not seen is not told from what seeds and test images are too few to show.
            (noise > FEW_POINTS, UNTESTABLE),
            otherwise=CONTRADICTED if faster else REPRODUCED,
        )
        return Verdict(
            on_other_data(word, config["dataset"] != "cifar100"),
            f"V is {told[0]} points from I in the first {window} rounds, {told[1]} at their best; "
            f"{_seeds(config)}{_data(config, 'cifar100')}",
        )

    return judge


def _settings(metrics: Given, config: Given) -> Verdict:
    """Judge whether a method's best accuracy hardly depends on its setting."""
    spreads = {}
    for name, of in groups(metrics).items():
        values = [best(metrics, row) for row in of.values()]
        spreads[name] = (
            max(values) - min(values),
            difference_noise(metrics, min(values), max(values)),
        )
    within = [spread <= noise for spread, noise in spreads.values()]
    word = first_that_holds(
        (all(within), REPRODUCED), (any(within), PARTLY), otherwise=CONTRADICTED
    )
    listed = "; ".join(f"{name} {spread:.1f}" for name, (spread, _) in spreads.items())
    noise = max(noise for _, noise in spreads.values())
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"points between the best and the worst value: {listed} (noise {noise:.1f}); "
        f"{_seeds(config)}{_data(config, 'cifar100')}",
    )


def _more_epochs(metrics: Given, config: Given) -> Verdict:
    """Judge whether natural gradients are better with more epochs."""
    of = groups(metrics).get("FedEP (V), ngvi_epochs", {})
    values = {int(value): best(metrics, row) for value, row in of.items()}
    if len(values) < 2:
        return Verdict(UNTESTABLE, "fewer than two numbers of epochs were run")
    few, many = min(values), max(values)
    gain, noise = values[many] - values[few], difference_noise(metrics, values[few], values[many])
    word = first_that_holds(
        (gain > noise, REPRODUCED), (gain < -noise, CONTRADICTED), otherwise=UNTESTABLE
    )
    listed = ", ".join(f"{values[n]:.1f} ({n})" for n in sorted(values))
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"best accuracy by epochs: {listed}; noise {noise:.1f}; {_seeds(config)}"
        f"{_data(config, 'cifar100')}",
    )


def _losses(metrics: Given, config: Given) -> Verdict:
    """Say with which loss FedEP and FedSEP end, beside FedAvg and FedPA."""
    window = metrics["settings"]["window"]
    curves = metrics.get("loss_by_round")
    if curves is None:
        return Verdict(UNTESTABLE, "this run kept accuracies alone")
    last = {name: float(np.mean(values[-window:])) for name, values in curves.items()}
    own = {n: v for n, v in last.items() if n not in ("FedAvg", "FedPA")}
    base = min(v for n, v in last.items() if n not in own)
    listed = ", ".join(f"{n} {v:.2f}" for n, v in own.items())
    return Verdict(
        UNTESTABLE,
        f"test loss in the last {window} rounds: {listed}; the better baseline {base:.2f}; "
        f"{_seeds(config)}{_data(config, 'cifar100')}",
    )


CLAIMS = (
    Claim(
        "Figure 1, Table 4",
        "Two Gaussian clients: expectation propagation reaches the global mean, FedAvg and FedPA "
        "miss it.",
        "fed_ep/toy",
        _toy,
        "toy.png",
    ),
    Claim(
        "Table 2, Figure 2",
        "CIFAR: FedEP is ahead of FedAvg and FedPA (with L in the end of FedAvg alone).",
        "fed_ep/cifar",
        _ahead("FedEP", "cifar100"),
        "rounds.png",
        CIFAR,
    ),
    Claim(
        "Table 2",
        "A scaled identity (I) is as good as the other ways of inference.",
        "fed_ep/cifar",
        _plain_is_enough,
        "rounds.png",
        CIFAR,
    ),
    Claim(
        "Table 2",
        "FedSEP, without sites at the clients, nearly matches FedEP.",
        "fed_ep/cifar",
        _stateless,
        "rounds.png",
        CIFAR,
    ),
    Claim(
        "Table 3, Figure 3",
        "Tags: FedSEP with I, L and V is ahead of FedAvg and FedPA in F1.",
        "fed_ep/tags",
        _tags,
        "rounds.png",
    ),
    Claim("Table 3", "The samples' variances (M) fail.", "fed_ep/tags", _fails, "rounds.png"),
    Claim(
        "Figure 4, left",
        "A scaled identity is slower at first and ends at nearly the same place.",
        "fed_ep/toy",
        _identity,
        "toy.png",
    ),
    Claim(
        "Figure 4, middle",
        "A small linear model: natural gradients (V) converge faster than I.",
        "fed_ep/linear",
        _inference(True),
        "rounds.png",
        SMALL,
    ),
    Claim(
        "Figure 4, middle",
        "The same with features scaled to variance one (ours; the paper does not say).",
        "fed_ep/linear",
        _inference(True),
        "rounds.png",
        SCALED,
    ),
    Claim(
        "Figure 4, right",
        "A large one: they do not.",
        "fed_ep/linear",
        _inference(False),
        "rounds.png",
        LARGE,
    ),
    Claim(
        "Table 5",
        "FedEP and FedSEP are better calibrated than FedAvg and FedPA.",
        "fed_ep/cifar",
        _calibrated,
        None,
        CIFAR,
    ),
    Claim(
        "Table 6, Figure 7",
        "EMNIST: FedSEP is ahead of FedAvg (0.8 points) and of FedPA (0.1).",
        "fed_ep/emnist",
        _ahead("FedSEP", "emnist62"),
        "rounds.png",
    ),
    Claim(
        "Figure 6",
        "Natural gradients gain from more epochs.",
        "fed_ep/hyperparameters",
        _more_epochs,
        "settings.png",
        GRIDS,
    ),
    Claim(
        "Table 8",
        "FedEP is robust in its settings.",
        "fed_ep/hyperparameters",
        _settings,
        "settings.png",
        GRIDS,
    ),
    Claim(
        "Figures 2, 3, 5, 7",
        "Losses are drawn beside accuracies (the curves are not in our copy; CIFAR here).",
        "fed_ep/cifar",
        _losses,
        "rounds.png",
        CIFAR,
    ),
)
