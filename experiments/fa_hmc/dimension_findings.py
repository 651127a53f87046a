"""What the report says about rounds and dimension; the numbers come from the run."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import output
from experiments.fa_hmc import dimension_law

__all__ = ["PAPER", "about", "commentary", "with_logarithm"]

PAPER = """
Half of the clients have one Gaussian as their posterior, half another, so that the posterior is
Gaussian too and the 2-Wasserstein distance of a Gaussian law from it is known. With the step size
of Proposition 4.3, the square of the number of rounds to a given distance is "approximately
proportional" to the dimension. Our copy of the paper lacks the Gaussians, `L`, `T`, the distance,
the start and the dimensions, which are ours. It has lost the step size, too: formula (2) of the
proposition is missing, and with it how the step falls with the dimension. We derived the power of
the dimension from the conclusion, that rounds grow as its root, and chose the constant. So a run
tests whether the conclusion holds with a step that was made for it, on these Gaussians; it does not
test the paper's step. The paper estimates means and variances from repeated runs, we show the exact
law beside them.
"""


def with_logarithm(metrics: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """Return least and largest of rounds over the root of ``d`` and the start's logarithm.

    That is the logarithm of the start's 2-Wasserstein distance from the posterior over the
    tolerance, which grows as the root of ``d`` too: a chain that contracts at a rate of
    ``d**-0.5`` needs so many rounds.
    """
    half = config["num_clients"] // 2
    means, variances = (np.repeat(config[name], half) for name in ("means", "variances"))
    weights = np.full(config["num_clients"], 1 / config["num_clients"])
    mean, variance = dimension_law.target(dimension_law.Scalars(1 / variances, means, weights))
    distance = np.hypot(config["start"] - mean, np.sqrt(variance)) / np.sqrt(variance)
    dims, rounds = (
        np.array([row[name] for row in metrics["table"]], float)
        for name in ("dimension", "rounds, exact law")
    )
    ratio = rounds / (np.sqrt(dims) * np.log(np.sqrt(dims) * distance / config["tolerance"]))
    return float(ratio.min()), float(ratio.max())


def about(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return what was run, and how far a logarithm explains what the power exceeds a half by."""
    low, high = with_logarithm(metrics, config)
    half = config["num_clients"] // 2
    first, second = (
        f"mean {mean:g} and variance {variance:g}"
        for mean, variance in zip(config["means"], config["variances"], strict=True)
    )
    return (
        f"In every coordinate {half} clients have a Gaussian of {first}, {half} one of {second}. "
        f"L = {config['num_integration_steps']}, T = {config['num_local_steps']}; all coordinates "
        f"start at {config['start']:g}. All directions have the same curvature: the condition "
        "number is 1. Divided by sqrt(d) log(start's distance / tolerance), where the start's "
        "distance grows as sqrt(d) too, the rounds of the exact law lie between "
        f"{low:.3g} and {high:.3g}."
    )


def _last_power(table: list[dict[str, Any]]) -> float:
    rounds, dims = (
        np.log([row[name] for row in table[-2:]]) for name in ("rounds, exact law", "dimension")
    )
    return float(np.diff(rounds)[0] / np.diff(dims)[0])


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusion, for the report."""
    table = metrics["table"]
    first, last = table[0], table[-1]
    gaps = [abs(row["rounds, measured"] - row["rounds, exact law"]) for row in table]
    beside = [
        {
            "the paper": "Rounds squared are approximately proportional to the dimension.",
            "ours": f"Rounds grow as the dimension to the power {metrics['power']:.3g} (exact "
            f"law); the claim is the power 0.5. Between the two largest dimensions it is "
            f"{_last_power(table):.2f}. They grow from {first['rounds, exact law']} in "
            f"dimension {first['dimension']} to {last['rounds, exact law']} in dimension "
            f"{last['dimension']}, and their square over the dimension from "
            f"{first['rounds^2 / d']:.3g} to {last['rounds^2 / d']:.3g}. The start is the root of "
            f"the dimension away, which costs a logarithm. A line explains "
            f"{100 * metrics['explained']:.1f} % of the variance of rounds squared, but that is "
            "weak evidence: lines explain slightly bent curves as well.",
        },
        {
            "the paper": "Estimated from repeated runs.",
            "ours": f"{metrics['num_runs']} runs reach the distance at most {max(gaps)} rounds "
            f"from where the exact law does.",
        },
    ]
    return (
        output.markdown_table(beside)
        + f"\n\nThe tolerance is {metrics['tolerance']:g} standard deviations of the posterior. "
        "`distance left`, in the same unit, is the bias of local steps at stationarity: the "
        "suggested step size keeps it near a constant in all dimensions."
    )
