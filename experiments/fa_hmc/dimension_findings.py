"""What the report says about rounds and dimension; the numbers come from the run."""

from typing import Any

from experiments import output

__all__ = ["PAPER", "commentary"]

PAPER = """
Half of the clients have one Gaussian as their posterior, half another, so that the posterior is
Gaussian too and the 2-Wasserstein distance of a Gaussian law from it is known. With the step size
of Proposition 4.3, the square of the number of rounds to a given distance is approximately
proportional to the dimension. Our copy of the paper lacks the Gaussians, `L`, `T` and the constant
of the step size; the paper estimates means and variances from repeated runs, we show the exact law
beside them.
"""


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusion, for the report."""
    table = metrics["table"]
    first, last = table[0], table[-1]
    gaps = [abs(row["rounds, measured"] - row["rounds, exact law"]) for row in table]
    beside = [
        {
            "the paper": "Rounds squared are approximately proportional to the dimension.",
            "ours": f"Rounds grow as the dimension to the power {metrics['power']:.3g} (exact "
            f"law); the claim is the power 0.5. They grow from {first['rounds, exact law']} in "
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
