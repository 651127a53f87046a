"""Scores of the experiments with networks."""

import numpy as np

from experiments.qlsd.networks import Result
from fedmcmc import metrics

__all__ = ["hundredths", "of_mean", "scores"]


def scores(probabilities: np.ndarray, labels: np.ndarray, num_bins: int) -> dict[str, float]:
    """Return accuracy, ECE, Brier score (fractions) and negative log likelihood (nats)."""
    return {
        "accuracy": float(metrics.accuracy(probabilities, labels)),
        "ece": float(metrics.expected_calibration_error(probabilities, labels, num_bins)),
        "brier": float(metrics.brier_score(probabilities, labels)),
        "nnll": float(metrics.negative_log_likelihood(probabilities, labels)),
    }


def of_mean(result: Result, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy of the network at the draws' mean, if there is one."""
    if result.at_mean is None:
        return {}
    return {"accuracy_of_mean": float(metrics.accuracy(result.at_mean, labels))}


def hundredths(value: float | None) -> float | None:
    """Return `value` in units of 0.01, ``None`` where there is none."""
    return None if value is None else 100 * value
