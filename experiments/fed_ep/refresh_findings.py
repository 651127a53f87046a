"""What the report says about refreshed surrogates; the numbers come from the run."""

import math
from typing import Any

from experiments import output

__all__ = ["PAPER", "commentary"]

TIMES = 2.0
NOISY = 0.5  # of a standard deviation, the Monte Carlo error of one that hardly mixed
KINDS = ("error of the mean", "error of sds")
PAPER = """
El Mekkaoui et al. (2021) fit FSGLD's surrogates once, before the run, each client alone, and
believe that for very complex models it could be useful to refresh them. The sites of expectation
propagation are surrogates of the same form that are refreshed by design: a client refits its own
Gaussian where the others' say that the posterior lies. This study takes logistic regression on few
rows per client, most of one label (breast cancer data, which scikit-learn ships): a client alone
hardly bounds the coefficients. Surrogates are, with dense precisions: Laplace's at each client's
own maximum under the prior; FedEP's sites after so many rounds (after one: the moments of each
likelihood under the prior, which is a fit of each client alone as well); and Taylor expansions of
second order at the common mode. `T` is the number of local steps of a visit. Gradients are full
ones, so that nothing but the surrogates and the step size matters. It is one data set, one split
and one fit of the sites: how much these matter was not measured.
"""


def commentary(metrics: dict[str, Any]) -> str:
    """Return errors by local steps, and how far refreshing goes."""
    steps = metrics["local_steps"]
    found = {(row["surrogates"], row["local steps"]): row for row in metrics["table"]}
    names = list(dict.fromkeys(row["surrogates"] for row in metrics["table"]))
    noise = [
        max(row[name] or 0 for row in metrics["table"])
        for name in ("its Monte Carlo error", "theirs")
    ]
    parts = [
        f"{metrics['num_clients']} clients, {metrics['num_rows']} rows, {metrics['dim']} "
        f"coefficients, step size {metrics['step_size']:g}. Errors against NUTS on all rows, in "
        "posterior standard deviations, root mean squares over coefficients, by the number `T` of "
        f"local steps a visit; Monte Carlo errors are at most {noise[0]:.3f} (means) and "
        f"{noise[1]:.3f} (sds). A run is "
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
    """Compare the sites of the fewest and of the most rounds, and both with doing without."""
    names = [name for name, _ in found]
    few, many = (
        f"FedEP, {rounds} round{'s' if rounds > 1 else ''}"
        for rounds in (metrics["ep_rounds"][0], metrics["ep_rounds"][-1])
    )
    lines = []
    for t in metrics["local_steps"]:
        if found[few, t]["error of sds"] is None or found[many, t]["error of sds"] is None:
            lost = [name for name in (few, many) if found[name, t]["error of sds"] is None]
            lines.append(f"- `T = {t}`: lost with {' and with '.join(lost)}.")
        else:
            before, after = found[few, t], found[many, t]
            verdict = _compared(after, before, "refreshing helps", "refreshing hurts")
            lines.append(
                f"- `T = {t}`: {verdict}; standard deviations are off by "
                f"{before['error of sds']:.3f} ({few}) and by {after['error of sds']:.3f} ({many})."
            )
        others = [
            name
            for name in dict.fromkeys(names)
            if name not in (few, many) and not name.startswith(("FedEP", "one machine"))
        ]
        for name in others:
            if found[name, t]["error of sds"] is None or found[many, t]["error of sds"] is None:
                continue
            verdict = _compared(found[many, t], found[name, t], "better", "worse")
            lines.append(f"  - {many} against {name}: {verdict}.")
        alive = [n for n in dict.fromkeys(names) if found.get((n, t), {}).get("error of sds")]
        if found[many, t]["error of sds"] is None:
            lines.append(f"  - Not lost: {', '.join(alive) or 'none'}.")
    lines.append(
        f"\nBy errors of standard deviations; a difference counts beyond {TIMES:g} of its Monte "
        f"Carlo errors, taken as independent. Where such an error is above {NOISY:g}, they are too "
        "noisy to say, and errors of means are compared instead."
    )
    return "\n".join(lines)


def _compared(one: dict[str, Any], other: dict[str, Any], better: str, worse: str) -> str:
    """Compare errors of standard deviations, or of means where those are mostly noise."""
    error = math.hypot(one["theirs"], other["theirs"])
    if error > NOISY:
        by_means = _judged(one, other, KINDS[0], "its Monte Carlo error", better, worse)
        return (
            f"too noisy to say by standard deviations ({one[KINDS[1]]:.3f} against "
            f"{other[KINDS[1]]:.3f}, Monte Carlo error {error:.3f}); by means ({one[KINDS[0]]:.3f} "
            f"against {other[KINDS[0]]:.3f}) {by_means}"
        )
    return _judged(one, other, KINDS[1], "theirs", better, worse)


def _judged(
    one: dict[str, Any], other: dict[str, Any], kind: str, noise: str, better: str, worse: str
) -> str:
    difference = one[kind] - other[kind]
    if abs(difference) <= TIMES * math.hypot(one[noise], other[noise]):
        return "no difference beyond the noise"
    return better if difference < 0 else worse
