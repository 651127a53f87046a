"""What grids of settings say about Table 8 and Figure 6."""

from typing import Any

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    UNTESTABLE,
    Given,
    Verdict,
    first_that_holds,
    on_other_data,
)
from experiments.fed_ep.counted import counted, left_out, scaled, where
from experiments.fed_ep.differences import (
    FALL,
    PARTS,
    accuracy,
    difference,
    fall,
    fallen_methods,
)
from experiments.fed_ep.findings import ended
from experiments.fed_ep.hyperparameters import SPREAD_8, VALUES_8, groups, spread

__all__ = ["more_epochs", "settings"]

CIFAR = "cifar100"


def settings(family: str) -> Any:
    """Judge whether a family's accuracy hardly depends on its settings, and stays.

    Of the values that Table 8 has, and of those with which the point moved.
    """

    def judge(metrics: Given, config: Given) -> Verdict:
        own = {n: of for n, of in groups(metrics).items() if n.startswith(f"{family} ")}
        own = {n: _of_table_8(n, of) for n, of in own.items()}
        names = [row["method"] for of in own.values() for row in of.values()]
        if not names:
            return Verdict(UNTESTABLE, f"no setting of {family} was run")
        kept = counted(metrics, config, names, CIFAR)
        moved = {n: {v: r for v, r in of.items() if r["method"] in kept} for n, of in own.items()}
        moved = {n: of for n, of in moved.items() if len(of) > 1}
        spreads = {name: spread(metrics, of) for name, of in moved.items()}
        limit = SPREAD_8[family]
        fallen = [n for n in fallen_methods(metrics) if n.startswith(f"{family} ")]
        # A best accuracy that does not last is not robust.
        lost = {
            n: any(_ends_below(metrics, row["method"]) for row in of.values())
            for n, of in moved.items()
        }
        holds = [d.points + d.noise <= limit and not lost[n] for n, d in spreads.items()]
        fails = [d.points - d.noise > limit or lost[n] for n, d in spreads.items()]
        apart = scaled(config, CIFAR)
        whole = len(kept) == len([n for n in names if n.partition(":")[0][-2] not in apart])
        word = first_that_holds(
            (not spreads, UNTESTABLE),
            (all(holds) and whole, REPRODUCED),
            (any(holds), PARTLY),
            (any(fails), CONTRADICTED),
            otherwise=UNTESTABLE,
        )

        def told_apart(name: str) -> bool:
            return name in moved and len(moved[name]) < len(own[name])

        listed = "; ".join(
            f"{name} ({', '.join(of)}) {spread(metrics, of)}"
            + (f", judged by {', '.join(moved[name])}: {spreads[name]}" if told_apart(name) else "")
            for name, of in own.items()
            if len(of) > 1
        )
        window = metrics["settings"]["window"]
        told = "; ".join(ended(metrics, n) for n in fallen)
        return Verdict(
            on_other_data(word, config["dataset"] != CIFAR),
            f"points from the worst to the best value, at their best: {listed}; the paper, on "
            f"CIFAR-100: at most {limit:g}{left_out(metrics, config, names, CIFAR)}"
            + (f"; below their best in the last {window} rounds: {told}" if told else "")
            + f"; {where(metrics, config, CIFAR, brief=True)}",
        )

    return judge


def _of_table_8(name: str, of: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a setting that Table 8 has."""
    values = VALUES_8.get(name.partition(", ")[2], ())
    return {value: row for value, row in of.items() if float(value) in values}


def _ends_below(metrics: Given, name: str) -> bool:
    """Return whether a method ends below its best by more than `FALL`, beyond noise."""
    below = fall(metrics, name)
    return below.points - below.noise > FALL


def more_epochs(metrics: Given, config: Given) -> Verdict:
    """Judge whether natural gradients are better with more epochs."""
    of = groups(metrics).get("FedEP (V), ngvi_epochs", {})
    names = {int(value): row["method"] for value, row in of.items()}
    if len(names) < 2:
        return Verdict(UNTESTABLE, "fewer than two numbers of epochs were run")
    few, many = min(names), max(names)
    both = [names[few], names[many]]
    early, last, end = (difference(metrics, names[many], names[few], part) for part in PARTS)
    more, less = (early.above or last.above), (early.below or last.below)
    word = first_that_holds(
        (both != counted(metrics, config, both, CIFAR), UNTESTABLE),
        (early.above and last.above, REPRODUCED),
        (more, PARTLY),
        (less, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    listed = ", ".join(f"{accuracy(metrics, names[n]):.1f} ({n})" for n in sorted(names))
    return Verdict(
        on_other_data(word, config["dataset"] != CIFAR),
        f"best accuracy by epochs: {listed}; {many} less {few}: {last}, in the first "
        f"{metrics['settings']['window']} rounds {early}, in the last {end}"
        f"{left_out(metrics, config, both, CIFAR)}; {where(metrics, config, CIFAR, brief=True)}",
    )
