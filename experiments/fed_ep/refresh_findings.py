"""What the report says about refreshed surrogates; the numbers come from the run."""

from typing import Any

from experiments import output

__all__ = ["PAPER", "commentary"]

KINDS = ("error of the mean", "error of sds")
PAPER = """
El Mekkaoui et al. (2021) fit FSGLD's surrogates once, before the run, each client alone, and leave
open whether refreshing them during the run would help. The sites of expectation propagation are
surrogates of the same form that are refreshed by design: a client refits its own Gaussian where the
others' say that the posterior lies. This study takes logistic regression on few rows a client, most
of one label (breast cancer data, which scikit-learn ships): a client alone hardly bounds the
coefficients. Surrogates are, with dense precisions: Laplace's at each client's own maximum under
the prior; FedEP's sites after so many rounds (after one: the moments of each likelihood under the
prior, which is a fit of each client alone as well); and second-order expansions at the common mode.
Gradients are full ones, so that nothing but the surrogates and the step size matters.
"""


def commentary(metrics: dict[str, Any]) -> str:
    """Return errors by local steps, and how far refreshing goes."""
    steps = metrics["local_steps"]
    found = {(row["surrogates"], row["local steps"]): row for row in metrics["table"]}
    names = list(dict.fromkeys(row["surrogates"] for row in metrics["table"]))
    noise = max(row["Monte Carlo error"] or 0 for row in metrics["table"])
    parts = [
        f"{metrics['num_clients']} clients, {metrics['num_rows']} rows, {metrics['dim']} "
        f"coefficients, step size {metrics['step_size']:g}. Errors against NUTS on all rows, in "
        "posterior standard deviations, root mean squares over coefficients, by the number of "
        f"local steps a visit; Monte Carlo errors of means are at most {noise:.3f}. A run is "
        "lost where one of its chains ran off (100 prior standard deviations away, or not finite)."
    ]
    for kind in KINDS:
        rows = []
        for name in names:
            line = {kind: name}
            for t in steps:
                row = found.get((name, t))
                value = "" if row is None else row[kind]
                line[str(t)] = "lost" if value is None else value and f"{value:.3f}"
            rows.append(line)
        parts.append(output.markdown_table(rows))
    return "\n\n".join([*parts, _finding(metrics, found)])


def _finding(metrics: dict[str, Any], found: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Compare the sites of the fewest and of the most rounds."""
    few, many = (
        f"FedEP, {rounds} round{'s' if rounds > 1 else ''}"
        for rounds in (metrics["ep_rounds"][0], metrics["ep_rounds"][-1])
    )
    lines = []
    for t in metrics["local_steps"]:
        before, after = (found[name, t]["error of sds"] for name in (few, many))
        if before is None or after is None:
            lost = [name for name, x in ((few, before), (many, after)) if x is None]
            lines.append(f"- `T = {t}`: lost with {' and with '.join(lost)}.")
            continue
        noise = found[many, t]["Monte Carlo error"]
        verdict = (
            "refreshing helps"
            if after < before - noise
            else (
                "refreshing hurts" if after > before + noise else "no difference beyond the noise"
            )
        )
        lines.append(
            f"- `T = {t}`: {verdict}; standard deviations are off by {before:.3f} ({few}) "
            f"and by {after:.3f} ({many})."
        )
    return "\n".join(lines)
