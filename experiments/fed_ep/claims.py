"""The claims of Guo et al. (2023), in the paper's order."""

from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Claim,
    Given,
    Verdict,
    first_that_holds,
    on_other_data,
)
from experiments.fed_ep.cifar_findings import TABLE_2
from experiments.fed_ep.differences import (
    FALL,
    PARTS,
    Difference,
    accuracy,
    difference,
    difference_noise,
    fell,
)
from experiments.fed_ep.emnist import COVARIANCE
from experiments.fed_ep.hyperparameters import fallen_values, groups, spread

__all__ = ["CLAIMS"]

# What the paper calls equal, in points of accuracy, by its own tables.
IDENTITY_GAP = 0.1  # of Table 2, that FedEP (I) is behind another at most
STATELESS_GAP = 1.8  # of Table 2, that FedSEP is behind FedEP at most
# Of Table 8, from the worst to the best value of a setting at most.
SETTINGS_SPREAD = {"FedEP": 1.7, "FedSEP": 0.4}
FEW_POINTS = 0.5  # a lead that a curve of accuracies hardly shows; Figure 4 has no numbers
SMALL_SIZE, LARGE_SIZE = 10_100, 172_900  # parameters of Figure 4's models
OWN, BASES = ("FedEP", "FedSEP"), ("FedAvg", "FedPA")
BEHIND_FED_PA = ("L",)  # of Table 2, in 1500 rounds
CIFAR = ("fed_ep/cifar", "fed_ep/cifar10_gpu", "fed_ep/cifar10_small")
EMNIST = ("fed_ep/emnist", "fed_ep/mnist_gpu_steps", "fed_ep/mnist_gpu", "fed_ep/mnist_small")
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


def _data(config: Given, papers: str) -> str:
    return "" if config["dataset"] == papers else f" ({config['dataset']}, not {papers})"


def _ahead(family: str, papers: str, behind_fed_pa: tuple[str, ...] = ()) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        names = [row["method"] for row in metrics["table"]]
        own = [n for n in names if n.startswith(f"{family} ") and accuracy(metrics, n) > 0]
        gains = {n[-2]: _over_better(metrics, n, n[-2] in behind_fed_pa) for n in own}
        word = first_that_holds(
            (all(g.above for g in gains.values()), REPRODUCED),
            (all(g.below for g in gains.values()), CONTRADICTED),
            (any(g.above for g in gains.values()), PARTLY),
            (any(g.below for g in gains.values()), CONTRADICTED),
            otherwise=UNTESTABLE,
        )
        word = on_other_data(word, config["dataset"] != papers)
        told = f"points over the better baseline: {_listed(gains)}"
        other = papers == "emnist62" and config["covariance"] != COVARIANCE
        if other:  # what is not the paper's method says nothing of it
            word = UNTESTABLE
            told += f"; with a `covariance` of {config['covariance']:g}, the paper's is "
            told += f"{COVARIANCE:g}"
        if papers == "emnist62" and config["row_curvature"]:
            word = UNTESTABLE
            told += "; clients' steps are scaled by `row_curvature`, which the paper does not do"
        return Verdict(word, f"{told}; {_where(metrics, config, papers, (family,))}")

    return judge


def _over_better(metrics: Given, name: str, fed_avg_alone: bool) -> Difference:
    """Return the difference to the better baseline, or to FedAvg alone."""
    bases = BASES[:1] if fed_avg_alone else BASES
    return min((difference(metrics, name, base) for base in bases), key=lambda d: d.points)


def _listed(differences: dict[str, Difference]) -> str:
    """Return differences by letter, and their noise where it is that of test images."""
    if all(d.error is None for d in differences.values()):
        listed = ", ".join(f"{x} {d.points:+.1f}" for x, d in differences.items())
        largest = max((d.noise for d in differences.values()), default=0.0)
        return f"{listed} (noise of the test images {largest:.1f})"
    return ", ".join(f"{x} {d}" for x, d in differences.items())


def _seeds(config: Given) -> str:
    return f"{config['num_seeds']} seed{'s' * (config['num_seeds'] > 1)}"


def _where(metrics: Given, config: Given, papers: str, families: tuple[str, ...] = OWN) -> str:
    """Say how many seeds, which methods' points stood still or fell, and which data."""
    own = config["num_seeds"] * (config["num_rounds"] - config["num_burnin"])
    still = "".join(
        f"; {name} stood still in {rounds} of {own} rounds"
        for name, rounds in metrics.get("improper_rounds", {}).items()
        if rounds > 0 and name.split()[0] in families
    )
    lost = "".join(
        f"; {name} turned non-finite"
        if name in metrics["diverged"]
        else f"; {name} fell to {accuracy(metrics, name, 'end'):.1f} in the end"
        for name in metrics.get("by_round", ())
        if name.split()[0] in families and fell(metrics, name)
    )
    return f"{_seeds(config)}{still}{lost}{_data(config, papers)}"


def _sooner(metrics: Given, config: Given) -> Verdict:
    """Judge whether all reach an accuracy in fewer rounds than the baselines."""
    level = metrics["settings"]["thresholds"][0]
    rounds = {row["method"]: row[f"rounds to {level:g} %"] for row in metrics["table"]}
    num = config["num_seeds"]
    seeds = {row["method"]: row.get(f"seeds to {level:g} %", num) for row in metrics["table"]}
    own = {n: r for n, r in rounds.items() if n.split()[0] in OWN}
    base = [rounds[n] for n in BASES if rounds[n] is not None]
    reached = [r for r in own.values() if r is not None]
    all_reach = len(reached) == len(own) and all(seeds[n] == num for n in own)
    # How far apart in rounds is noise is not known: an accuracy that only some reach is.
    ahead = all(_over_better(metrics, name, False).above for name in own)
    word = first_that_holds(
        (all_reach and not base and ahead, REPRODUCED),
        (all_reach and bool(base) and config["num_seeds"] > 1 and max(reached) < min(base), PARTLY),
        (bool(base) and not reached, CONTRADICTED),
        otherwise=UNTESTABLE,
    )

    def told(name: str) -> str:
        if rounds[name] is None:
            return f"{name} never"
        some = f" ({seeds[name]} of {num} seeds)" if seeds[name] < num else ""
        return f"{name} {rounds[name]:.0f}{some}"

    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"rounds to {level:g} %: {', '.join(told(n) for n in (*own, *BASES))} "
        f"(the first possible: {config['num_burnin'] + config['window']}); "
        f"{_where(metrics, config, 'cifar100')}",
    )


def _plain_is_enough(metrics: Given, config: Given) -> Verdict:
    names = [row["method"] for row in metrics["table"]]
    others = {x: f"FedEP ({x})" for x in "MLV" if f"FedEP ({x})" in names}
    pairs = {x: (name, "FedEP (I)") for x, name in others.items()}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    return Verdict(
        on_other_data(_within(behind, IDENTITY_GAP), config["dataset"] != "cifar100"),
        f"points of the others over I: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}; "
        f"{_where(metrics, config, 'cifar100', OWN[:1])}",
    )


def _published(pairs: dict[str, tuple[str, str]]) -> str:
    """Return the differences of Table 2 after all rounds, by letter."""
    points = {x: TABLE_2[one][1] - TABLE_2[other][1] for x, (one, other) in pairs.items()}
    return ", ".join(f"{x} {value:+.1f}" for x, value in points.items())


def _within(behind: dict[str, Difference], limit: float) -> str:
    """Judge whether nothing is further behind than `limit`; noise may hide either."""
    return _all_or_some(
        [d.points + d.noise <= limit for d in behind.values()],
        [d.points - d.noise > limit for d in behind.values()],
    )


def _all_or_some(holds: list[bool], fails: list[bool]) -> str:
    """Return the word for parts of a claim, of which some may be neither."""
    return first_that_holds(
        (all(holds), REPRODUCED),
        (any(holds), PARTLY),
        (any(fails), CONTRADICTED),
        otherwise=UNTESTABLE,
    )


def _stateless(metrics: Given, config: Given) -> Verdict:
    names = {row["method"] for row in metrics["table"]}
    both = [x for x in "IMLV" if {f"FedSEP ({x})", f"FedEP ({x})"} <= names]
    pairs = {x: (f"FedEP ({x})", f"FedSEP ({x})") for x in both}
    behind = {x: difference(metrics, *pair) for x, pair in pairs.items()}
    return Verdict(
        on_other_data(_within(behind, STATELESS_GAP), config["dataset"] != "cifar100"),
        f"points behind FedEP: {_listed(behind)}; the paper, on CIFAR-100: "
        f"{_published(pairs)}; "
        f"{_where(metrics, config, 'cifar100')}",
    )


def _calibrated(metrics: Given, config: Given) -> Verdict:
    errors = {row["method"]: row["ECE, point"] for row in metrics["table"]}
    base = min(errors["FedAvg"], errors["FedPA"])
    own = {n: v for n, v in errors.items() if n.split()[0] in OWN and v is not None}
    noise = difference_noise(metrics, 50.0)  # a share of a half has the most
    smaller = [n for n, v in own.items() if v < base - noise]
    larger = [n for n, v in own.items() if v > base + noise]
    word = first_that_holds(
        (len(smaller) == len(own), REPRODUCED),
        (bool(smaller), PARTLY),
        (bool(larger), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    word = on_other_data(word, config["dataset"] != "cifar100")
    return Verdict(
        word,
        f"ECE of the point after the last round in %: "
        f"{', '.join(f'{n} {v:.1f}' for n, v in own.items())}; better baseline {base:.1f} (noise "
        f"of the test images at most {noise:.1f})"
        f"{'; larger: ' + ', '.join(larger) if larger else ''}; "
        f"{_where(metrics, config, 'cifar100')}",
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
    return Verdict(
        word, f"micro F1{where}: {listed}; the better baseline {base:.1f}; {_seeds(config)}"
    )


def _fails(metrics: Given, config: Given) -> Verdict:
    rates = {row["method"]: row["micro F1"] for row in metrics["table"]}
    fails = rates["FedSEP (M)"] < rates["FedAvg"]
    made_up = config["dataset"] != "stackoverflow"
    word = first_that_holds((made_up, UNTESTABLE), (fails, REPRODUCED), otherwise=CONTRADICTED)
    where = " on made-up words" if made_up else ""
    return Verdict(
        word,
        f"micro F1{where} {rates['FedSEP (M)']:.1f}, FedAvg {rates['FedAvg']:.1f}; "
        f"{_seeds(config)}",
    )


def _inference(faster: bool) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        window, size = metrics["settings"]["window"], metrics["num_parameters"]
        early, last = (
            difference(metrics, "FedEP (V)", "FedEP (I)", part) for part in ("early", "best")
        )
        none = early.points + early.noise <= FEW_POINTS
        seen = early.above and early.points > FEW_POINTS
        if faster:
            word = first_that_holds(
                (seen, REPRODUCED),
                (early.above, PARTLY),
                (early.below or none, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        else:
            word = first_that_holds(
                (size <= SMALL_SIZE, UNTESTABLE),  # no large model
                (none, REPRODUCED),
                (seen, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        papers = f"{SMALL_SIZE / 1000:.1f}" if faster else f"{LARGE_SIZE / 1000:.1f}"
        also = "" if faster else f", and {SMALL_SIZE / 1000:.1f} of its small one"
        return Verdict(
            on_other_data(word, config["dataset"] != "cifar100"),
            f"V is {early} points from I in the first {window} rounds, {last} at their best; "
            f"{size:,} parameters (the paper: {papers} thousand{also}); "
            f"{_where(metrics, config, 'cifar100')}",
        )

    return judge


def _settings(family: str) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        """Judge whether a method's accuracy hardly depends on its setting, and stays."""
        own = {n: of for n, of in groups(metrics).items() if n.startswith(f"{family} ")}
        if not own:
            return Verdict(UNTESTABLE, f"no setting of {family} was run")
        spreads = {name: spread(metrics, of) for name, of in own.items()}
        # A best accuracy that does not last is not robust.
        lost = {name: fallen_values(metrics, of, FALL) for name, of in own.items()}
        limit = SETTINGS_SPREAD[family]
        holds = [d.points + d.noise <= limit and not lost[n] for n, d in spreads.items()]
        fails = [d.points - d.noise > limit or lost[n] for n, d in spreads.items()]
        word = _all_or_some(holds, [bool(x) for x in fails])
        listed = "; ".join(f"{name} {d}" for name, d in spreads.items())
        ends = "; ".join(
            f"{name} {value} by {points:.1f}"
            for name, values in lost.items()
            for value, points in values.items()
        )
        window = metrics["settings"]["window"]
        return Verdict(
            on_other_data(word, config["dataset"] != "cifar100"),
            f"points from the worst to the best value, at their best: {listed}; the paper, on "
            f"CIFAR-100: at most {limit:g}"
            + (f"; the last {window} rounds are further below the best: {ends}" if ends else "")
            + f"; {_seeds(config)}{_data(config, 'cifar100')}",
        )

    return judge


def _more_epochs(metrics: Given, config: Given) -> Verdict:
    """Judge whether natural gradients are better with more epochs."""
    of = groups(metrics).get("FedEP (V), ngvi_epochs", {})
    names = {int(value): row["method"] for value, row in of.items()}
    if len(names) < 2:
        return Verdict(UNTESTABLE, "fewer than two numbers of epochs were run")
    few, many = min(names), max(names)
    early, last, end = (difference(metrics, names[many], names[few], part) for part in PARTS)
    more, less = (early.above or last.above), (early.below or last.below)
    word = first_that_holds(
        (early.above and last.above, REPRODUCED),
        (more, PARTLY),
        (less, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    listed = ", ".join(f"{accuracy(metrics, names[n]):.1f} ({n})" for n in sorted(names))
    return Verdict(
        on_other_data(word, config["dataset"] != "cifar100"),
        f"best accuracy by epochs: {listed}; {many} less {few}: {last}, in the first "
        f"{metrics['settings']['window']} rounds {early}, in the last {end}; {_seeds(config)}"
        f"{_data(config, 'cifar100')}",
    )


def _losses(metrics: Given, config: Given) -> Verdict:
    """Say with which loss FedEP and FedSEP end, beside FedAvg and FedPA."""
    window = metrics["settings"]["window"]
    curves = metrics.get("loss_by_round")
    if curves is None:
        return Verdict(UNTESTABLE, "this run kept accuracies alone")
    # A record has no number where a loss is not finite.
    last = {name: np.mean(np.array(values[-window:], float)) for name, values in curves.items()}
    own = {n: v for n, v in last.items() if n not in ("FedAvg", "FedPA")}
    base = min(v for n, v in last.items() if n not in own)
    listed = ", ".join(f"{n} {_loss(v)}" for n, v in own.items())
    return Verdict(
        UNTESTABLE,
        f"test loss in the last {window} rounds: {listed}; the better baseline {base:.2f}; "
        f"{_seeds(config)}{_data(config, 'cifar100')}",
    )


def _loss(value: float) -> str:
    if not np.isfinite(value):
        return "not finite in some seed"
    return f"{value:.2f}" if value < 100 else f"{value:.1e}"


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
        _ahead("FedEP", "cifar100", BEHIND_FED_PA),
        "rounds.png",
        CIFAR,
    ),
    Claim(
        "Table 2, Figure 2",
        "CIFAR: FedSEP is ahead of FedAvg and FedPA (with L in the end of FedAvg alone).",
        "fed_ep/cifar",
        _ahead("FedSEP", "cifar100", BEHIND_FED_PA),
        "rounds.png",
        CIFAR,
    ),
    Claim(
        "Table 2",
        "CIFAR: FedEP and FedSEP reach 45 % in about half the rounds (438 to 523; FedPA 811, "
        "FedAvg 911).",
        "fed_ep/cifar",
        _sooner,
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
        EMNIST,
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
        _settings("FedEP"),
        "settings.png",
        GRIDS,
    ),
    Claim(
        "Table 8",
        "So is FedSEP, by its lines of the table.",
        "fed_ep/hyperparameters",
        _settings("FedSEP"),
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
