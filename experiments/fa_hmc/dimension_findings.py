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
            "ours": f"A line explains {100 * metrics['explained']:.1f} % of the variance of rounds "
            f"squared (exact law); rounds grow as the dimension to the power "
            f"{metrics['power']:.3g}, from {first['rounds, exact law']} in dimension "
            f"{first['dimension']} to {last['rounds, exact law']} in dimension "
            f"{last['dimension']}. The power is not one half exactly: the start is "
            f"the root of the dimension away, which costs a logarithm.",
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
