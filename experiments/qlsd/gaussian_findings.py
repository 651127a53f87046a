"""What the report says about the Gaussian experiment; the numbers come from the run."""

from typing import Any

from experiments import output

__all__ = ["PAPER", "commentary"]

PAPER = """
Twenty clients with 10 to 199 rows around very different means; the posterior of the overall mean,
in 50 dimensions, is sampled with minibatches of a tenth of a client's rows and the step size
`1 / L` (`L` is the number of rows, the smoothness of the potential). The paper plots the squared
error of the running average against the bits sent (Figure 1; the numbers are in the plot only) and
concludes that QLSD* with 16 bits reaches the error of LSD* with about 2.5 times fewer bits, and
that QLSD, whose messages do not vanish at the mode, levels off far above when it has few bits.
Figure S2 gives each setting the same number of bits and asks for the best number of levels.

The released notebook counts bits by the bounds of Alistarh et al. (2017) with natural logarithms;
both conventions of the bound are beside the bits of real messages below. Its step size for Figure 1
is `0.01 / L` and its batches are single rows, unlike the text. Ours are drawn with replacement,
which the text does not settle; without it, the noise of a minibatch of a tenth has a tenth less
variance. Figure S2's budget is counted by the bound with logarithms to base 2.
"""


def commentary(metrics: dict[str, Any]) -> str:
    """Return what a run says about the paper's conclusions, for the report."""
    rows = {row["algorithm"]: row for row in metrics["table"]}
    plain, posterior = rows["LSD*"], metrics["posterior_variance"]
    stars = [row for name, row in rows.items() if name.startswith("QLSD*")]
    others = [row for name, row in rows.items() if name.startswith("QLSD,")]
    best = stars[-1]
    largest = max(abs(row["z (MSE)"]) for row in rows.values())
    beside = [
        {
            "the paper": f"{best['algorithm']} needs about 2.5 times fewer bits than LSD* for the "
            "same error.",
            "ours": f"Its error is {best['MSE of average'] / plain['MSE of average']:.3g} times "
            f"LSD*'s after as many rounds, with {best['fewer bits than LSD*']:.2f} times fewer "
            f"bits in real messages ({best['by bound, log2']:.2f} by the bound with log2, "
            f"{best['by bound, ln']:.2f} as the paper counts).",
        },
        {
            "the paper": "QLSD with few bits levels off far above; QLSD* does not.",
            "ours": "Variance a coordinate over the posterior's: "
            + ", ".join(f"{r['algorithm']} {r['variance'] / posterior:.3g}" for r in others + stars)
            + f"; LSD* {plain['variance'] / posterior:.3g}. The latter's is the price of the step "
            "size itself, at `1 / L` a factor of two.",
        },
        {
            "the paper": "Figure S2 asks which number of levels is best for a given number of "
            "bits; its answer is in the plot only.",
            "ours": _budget(metrics["budget"]),
        },
    ]
    return (
        output.markdown_table(beside)
        + f"\n\nAgainst the law (exact for LSD*): the largest |z| of {len(rows)} comparisons is "
        f"{largest:.2g}. Columns: variance a coordinate; squared error of the average of all kept "
        "rounds; bits of one client's message, counted, and by the published bounds; and how many "
        "times fewer those are than 32 bits a number."
    )


def _budget(budget: dict[str, Any]) -> str:
    error = budget["error"]
    best = min((value, i, j) for i, line in enumerate(error) for j, value in enumerate(line))
    of_levels = [min(line) for line in error]
    return (
        f"Least error at s = {budget['levels'][best[1]]} ({budget['rounds'][best[1]]} rounds); "
        f"with s = {budget['levels'][0]} it is {of_levels[0] / best[0]:.2g} times that, with s = "
        f"{budget['levels'][-1]} {of_levels[-1] / best[0]:.2g} times."
    )
