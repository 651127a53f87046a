"""The step size that is best for each score, and what comes of it."""

from typing import Any

import numpy as np

from experiments.fa_hmc.image_sweep import SCORES

__all__ = ["best_step", "num_diverged", "orientation", "tuned"]


def orientation(name: str) -> int:
    """Return 1 for a score that is better when it is larger, else -1."""
    return 1 if name == "accuracy" else -1


def best_step(name: str, scores: np.ndarray) -> int | None:
    """Return the number of the step size whose last score, on average over chains, is best.

    Parameters
    ----------
    name
        Of the score.
    scores
        ``[num_step_sizes, num_chains, num_samples]``. A step size of which any chain's last score
        is not finite never wins; ``None`` if there is no other.
    """
    last = orientation(name) * scores[:, :, -1].mean(axis=1, dtype=np.float64)
    last = np.where(np.isfinite(last), last, -np.inf)
    at = int(np.argmax(last))
    return at if np.isfinite(last[at]) else None


def num_diverged(finite: np.ndarray) -> int:
    """Return how many step sizes have a chain that is not finite at its end."""
    return int(np.sum(~finite[:, :, -1].all(axis=1)))


def tuned(scores: dict[str, np.ndarray], multiples: tuple[float, ...]) -> dict[str, dict[str, Any]]:
    """Return for each score its best step size, and mean and deviation over chains with it.

    Parameters
    ----------
    scores
        ``{name: [num_step_sizes, num_chains, num_samples]}``.
    multiples
        ``[num_step_sizes]``, ascending, of the largest stable step.

    Returns
    -------
    dict
        For each of `SCORES`: `step` (of `multiples`), `edge` (``"smallest"`` or ``"largest"`` where
        it is the grid's, else ``""``), `curve` and `curve_sd` (lists a sample), `mean` and `sd`
        (their last entries), `accuracy` (the mean of the last ones with this step). The deviations
        are ``None`` for one chain, and all are ``None`` where every step size diverged.
    """
    found = {}
    for name in SCORES:
        at = best_step(name, scores[name])
        if at is None:
            nothing = dict.fromkeys(("step", "curve", "curve_sd", "mean", "sd", "accuracy"))
            found[name] = nothing | {"edge": ""}
            continue
        chains = np.asarray(scores[name][at], np.float64)
        mean = chains.mean(axis=0)
        deviation = chains.std(axis=0, ddof=1).tolist() if len(chains) > 1 else None
        edge = {0: "smallest", len(multiples) - 1: "largest"}.get(at, "")
        found[name] = {
            "step": float(multiples[at]),
            "edge": edge if len(multiples) > 1 else "",
            "curve": mean.tolist(),
            "curve_sd": deviation,
            "mean": float(mean[-1]),
            "sd": None if deviation is None else deviation[-1],
            "accuracy": float(np.mean(scores["accuracy"][at, :, -1], dtype=np.float64)),
        }
    return found
