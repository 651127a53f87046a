"""Which methods of a run a verdict counts, and what is said of those that it does not."""

from typing import Any

from experiments.claims import Given
from experiments.fed_ep import cifar, emnist
from experiments.fed_ep.differences import FALL, accuracy, fallen_seeds, fell
from experiments.fed_ep.findings import often_improper, other_data, own_rounds, seeds

__all__ = ["SCALED", "counted", "first_of_levels", "left_out", "scaled", "where"]

SCALED = ("L", "V")  # by `scale`
FULL: dict[str, Any] = {"cifar100": cifar.Config, "emnist62": emnist.Config}
"""Of the paper's data, the settings at full size."""
OWN = ("FedEP", "FedSEP")


def scaled(config: Given, papers: str) -> tuple[str, ...]:
    """Return the ways of inference whose factor `scale`, which the paper lacks, is not full size's.

    The factor multiplies what L and V add to the cavity, so that another one is another method.
    """
    return () if config["scale"] == FULL[papers].scale else SCALED


def counted(metrics: Given, config: Given, names: list[str], papers: str) -> list[str]:
    """Return the methods of `names` that are the paper's, and moved."""
    apart, lost = scaled(config, papers), often_improper(metrics)
    return [n for n in names if n.partition(":")[0][-2] not in apart and n not in lost]


def left_out(metrics: Given, config: Given, names: list[str], papers: str) -> str:
    """Say which methods of `names` are not judged, and why."""
    apart = [x for x in scaled(config, papers) if any(f"({x})" in n for n in names)]
    lost = [
        n for n in names if n in often_improper(metrics) and n.partition(":")[0][-2] not in apart
    ]
    told = ""
    if apart:
        told += f"; {' and '.join(apart)} not judged: `scale` is {config['scale']:g}, at full size "
        told += f"{FULL[papers].scale:g}"
    if lost:
        own, counts = own_rounds(metrics["settings"]), metrics["improper_rounds"]
        listed = ", ".join(f"{n} in {counts[n]} of {own} rounds" for n in lost)
        told += f"; not judged, as the product was improper: {listed}"
    return told


def first_of_levels(metrics: Given, config: Given) -> float:
    """Return the first threshold that some method does not reach in the burn-in they share."""
    levels = metrics["settings"]["thresholds"]

    def apart(level: float) -> bool:
        rounds = [row[f"rounds to {level:g} %"] for row in metrics["table"]]
        return any(r is None or r > config["num_burnin"] for r in rounds)

    return float(next((level for level in levels if apart(level)), levels[0]))


def where(
    metrics: Given,
    config: Given,
    papers: str,
    families: tuple[str, ...] = OWN,
    *,
    brief: bool = False,
) -> str:
    """Say how many seeds, which products were improper, which methods fell, and which data.

    With `brief` the rows on Table 2 and Figure 2, of the same run, say what befell methods.
    """
    told = "" if brief else _befallen(metrics, config, families) + _samples(config, papers)
    return f"{seeds(config)}{told}{other_data(config, papers)}"


def _befallen(metrics: Given, config: Given, families: tuple[str, ...]) -> str:
    own = config["num_seeds"] * (config["num_rounds"] - config["num_burnin"])
    improper = [
        f"{name} in {rounds} of {own} rounds"
        for name, rounds in metrics.get("improper_rounds", {}).items()
        if rounds > 0 and name.split()[0] in families
    ]
    lost = "".join(
        f"; {name} turned non-finite"
        if name in metrics["diverged"]
        else f"; {name} fell to {accuracy(metrics, name, 'end'):.1f} in the end"
        + _of_seeds(metrics, config, name)
        for name in metrics.get("by_round", ())
        if name.split()[0] in families and fell(metrics, name)
    )
    return (f"; improper product: {', '.join(improper)}" if improper else "") + lost


def _of_seeds(metrics: Given, config: Given, name: str) -> str:
    """Say how many seeds fell: their mean is that of two outcomes where some did not."""
    count = fallen_seeds(metrics, name)
    if config["num_seeds"] == 1 or count is None:
        return ""
    return f" (by more than {FALL:g} points in {count} of {config['num_seeds']} seeds)"


def _samples(config: Given, papers: str) -> str:
    """Say how many samples M and FedPA have, one an epoch, where they are not the paper's."""
    full = FULL[papers]
    own, theirs = (
        (epochs, epochs - burnin)
        for epochs, burnin in (
            (config["num_epochs"], config["pa_burnin"]),
            (full.num_epochs, full.pa_burnin),
        )
    )
    if own == theirs:
        return ""
    return f"; samples: M {own[0]}, FedPA {own[1]} (at full size {theirs[0]} and {theirs[1]})"
