"""What the report says of hierarchical models; the numbers come from the runs."""

from collections.abc import Mapping
from typing import Any

from experiments import output

__all__ = ["BINARY", "FUNNEL", "GAUSSIAN", "about", "commentary", "funnel"]

COLUMNS = """
Rounds are those of one chain, with adaptation and burn-in; an exchange carries all chains. Mbit are
all bits of the run, up and down, of all chains and clients. ESS is the least of any shared
parameter (of bulk and tail; of weighted draws one over their sum of squares), ESS / 1,000 that per
1,000 kept rounds of one chain; the slowest is the parameter that has it. The error of means is the
largest distance of a mean from pooled NUTS, in posterior sds, beside its Monte Carlo standard
error, both samplers' together; sds are relative to those of pooled NUTS, the least and the most of
any parameter. `tau` and `sigma` are compared in logarithms. The error of effects is the largest of
any group's mean, in that effect's sd, of as many as there are groups (after `fit` of about 1,000
draws). Seconds are of a machine that did other things as well.
"""
QUESTION = """
A study of our own: what does federating a hierarchical model cost, and how far from pooled NUTS
does each way end? One client per group; a group's effects are its own, and no other client receives
them."""
GAUSSIAN = f"""{QUESTION} The model is `y ~ N(z effect + x slopes, sigma)`, `effect ~ N(mu, tau)`
per group, with priors `mu ~ N(0, 5)`, slopes `N(0, 2.5)`, `tau` and `sigma` half-normal of scale 1.
{COLUMNS}
"""
BINARY = f"""{QUESTION} The model is `y ~ Bernoulli(logit = z effect + x slopes)`,
`effect ~ N(mu, tau)` per group, with priors `mu ~ N(0, 5)`, slopes `N(0, 2.5)`, `tau` half-normal
of scale 1.
{COLUMNS}
"""
FUNNEL = """
Few hospitals that do not differ leave the spread of their effects, `tau`, near zero. Langevin
dynamics then has a problem with effects as they are written (centered): the gradient with respect
to `tau` grows without bound as it falls. Written as standard variables that are shifted and scaled
(`centered=0.0`, the default) they have a finite one. Moments are compared with numerical
integration of the effects and a grid over `mu` and `log tau`.
"""


def about(config: Mapping[str, Any], metrics: dict[str, Any]) -> str:
    """Return what was sampled, and how well the reference is known."""
    truth = metrics["truth"]
    return (
        f"{metrics['what']} Pooled NUTS (a plate of standard effects, 4 chains of "
        f"{config['num_reference']:,} draws after half as many): {truth['leapfrogs']:,} gradients "
        f"of all rows, least ESS {truth['least ESS']:,.0f}, R-hat {truth['R-hat']:.3f}. Kernels "
        f"run {config['num_chains']} chains of {config['num_rounds']:,} rounds, of which "
        f"{config['num_burnin']:,} are burn-in, from the mode; `fit` weights "
        f"{config['num_draws']:,} draws."
    )


LIMIT, SD_LIMIT, EFFECT_LIMIT = 0.1, 0.1, 0.15
FEWEST = 150
"""Effective draws with which an sd is known to six percent; of fewer nothing is said."""


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that matter most of a row."""
    line = {name: row[name] for name in ("method", "rounds", "Mbit", "ESS")}
    line["slowest"] = row["slowest"]
    error, sds = row["error of means"], (row["sds, least"], row["sds, most"])
    line["means off by"] = None if error is None else f"{error:.2f} (s.e. {row['its s.e.']:.2f})"
    line["sds"] = None if error is None else f"{sds[0]:.2f} to {sds[1]:.2f}"
    return line | {"effects off by": row["error of effects"], "verdict": row["verdict"]}


def commentary(metrics: dict[str, Any]) -> str:
    """Return which methods are as near pooled NUTS as wanted, and the errors of quadrature."""
    near, far, few, lost = [], [], [], []
    for row in metrics["table"]:
        if row["error of means"] is None:
            lost.append(row["method"])
            continue
        effects = row["error of effects"]
        close = (
            row["error of means"] < LIMIT
            and abs(row["sds, least"] - 1) < SD_LIMIT
            and abs(row["sds, most"] - 1) < SD_LIMIT
            and (effects is None or effects < EFFECT_LIMIT)
        )
        known = row["ESS"] >= FEWEST
        (near if close else far if known else few).append(row["method"])
    said = [
        f"Within {LIMIT:g} sd and {output.percent(SD_LIMIT)} of pooled NUTS for every shared "
        f"parameter, and {EFFECT_LIMIT:g} sd for every group's mean where effects were drawn: "
        f"{'; '.join(near) or 'none'}. Not: {'; '.join(far) or 'none'}."
    ]
    if few:
        said.append(f"With too few effective draws to tell: {'; '.join(few)}.")
    if lost:
        said.append(f"Diverged: {'; '.join(lost)}.")
    said += [
        f"Chains of {row['method']} agree on means that are {row['error of means']:.2f} sd off "
        f"(R-hat {row['R-hat']:.2f}), as they begin alike: its verdict is `failed`, which counts."
        for row in metrics["table"]
        if row["verdict"] == "failed" and row["R-hat"] and row["error of means"] > LIMIT
    ]
    for row in metrics["table"]:
        if row["method"] == "`fed_gibbs`":
            said.append(
                "In a round of `fed_gibbs` clients are asked twice: parameters of rows have an "
                "exchange of their own, which needs all clients, so that here nobody may be "
                f"absent. Its slowest parameter is `{row['slowest']}`. Slopes of what varies "
                "between groups (uranium of a county, the kind of a school) are held back by the "
                "effects, which were drawn at the slope that was; so is the mean of the effects."
            )
        if row["method"] == "`fed_gibbs(recenter=True)`":
            said.append(
                "With `recenter=True` clients are asked a third time, for sixteen candidates at "
                "which effects make up for the slopes: its slowest parameter, "
                f"`{row['slowest']}`, has {row['ESS / 1,000']:.0f} effective draws per 1,000 "
                "rounds."
            )
    if any("every client" in row["method"] for row in metrics["table"]):
        said.append(
            "With every group's effect at every client all effects are shared parameters: their "
            "gradients and draws cross in every round, and every client sees them."
        )
    parts = [output.markdown_table([_short(row) for row in metrics["table"]]), " ".join(said)]
    if "quadrature" in metrics:
        parts += [
            "Errors of the quadrature at the posterior mean, against more nodes (float64):",
            output.markdown_table(metrics["quadrature"]),
        ]
    return "\n\n".join(parts)


def funnel(metrics: dict[str, Any]) -> str:
    """Return what was sampled, and what the columns are."""
    mean, sd = (metrics["exact"][f"{what} of mu, log tau"] for what in ("mean", "sd"))
    return (
        f"{metrics['num_hospitals']} hospitals of {metrics['rows_per_hospital']} simulated rows, "
        f"one client each; {metrics['num_chains']} chains of {metrics['num_rounds']:,} rounds, "
        f"{metrics['num_burnin']:,} of them burn-in, every fifth kept; clients draw their effects "
        f"exactly (`conjugate()`). The grid has means {mean[0]:.3f} and {mean[1]:.2f} of `mu` and "
        f"`log tau`, sds {sd[0]:.3f} and {sd[1]:.2f}. In the table means are distances from "
        f"those in sds and sds are ratios, of the chains that did not diverge (a number that is "
        f"not finite, or beyond 50)."
    )
