"""What grids of settings say about Table 8 and Figure 6."""

from typing import Any

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Given,
    Verdict,
    all_or_some,
    first_that_holds,
    on_other_data,
)
from experiments.fed_ep.differences import FALL, PARTS, accuracy, difference
from experiments.fed_ep.findings import other_data, seeds
from experiments.fed_ep.hyperparameters import fallen_values, groups, spread

__all__ = ["more_epochs", "settings"]

# Of Table 8, points from the worst to the best value of a setting at most.
SETTINGS_SPREAD = {"FedEP": 1.7, "FedSEP": 0.4}


def settings(family: str) -> Any:
    """Judge whether a family's accuracy hardly depends on its settings, and stays."""

    def judge(metrics: Given, config: Given) -> Verdict:
        own = {n: of for n, of in groups(metrics).items() if n.startswith(f"{family} ")}
        if not own:
            return Verdict(UNTESTABLE, f"no setting of {family} was run")
        spreads = {name: spread(metrics, of) for name, of in own.items()}
        # A best accuracy that does not last is not robust.
        lost = {name: fallen_values(metrics, of, FALL) for name, of in own.items()}
        limit = SETTINGS_SPREAD[family]
        holds = [d.points + d.noise <= limit and not lost[n] for n, d in spreads.items()]
        fails = [d.points - d.noise > limit or lost[n] for n, d in spreads.items()]
        word = all_or_some(holds, [bool(x) for x in fails])
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
            + f"; {seeds(config)}{other_data(config, 'cifar100')}",
        )

    return judge


def more_epochs(metrics: Given, config: Given) -> Verdict:
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
        f"{metrics['settings']['window']} rounds {early}, in the last {end}; {seeds(config)}"
        f"{other_data(config, 'cifar100')}",
    )
