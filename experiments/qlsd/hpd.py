"""Errors of highest-posterior-density regions, with standard errors, and what messages cost."""

from typing import Any, NamedTuple

import numpy as np

from fedmcmc.compression import bound_bits
from fedmcmc.metrics import hpd_error, hpd_threshold

__all__ = ["PUBLISHED_ALPHA", "STRETCHES", "Gap", "Run", "curves", "gap", "row"]

PUBLISHED_ALPHA = 0.5025
"""What the released notebook evaluates as 99 %: element 99 of 200 from 0.01 to 0.99."""

CURVE_ALPHAS = np.linspace(0.02, 0.98, 49)
STRETCHES = 10  # of a single chain, that stand in for chains


class Run(NamedTuple):
    """What is kept of the draws of one algorithm."""

    name: str
    bits: float | None  # p, None where nothing is compressed
    potential: np.ndarray  # [num_chains, num_draws]
    bits_up: float  # counted, of all messages of a round, mean over all rounds and chains


class Gap(NamedTuple):
    """`error` is ``|eta - eta_ref| / |eta_ref|``; `signed` is without the absolute value."""

    error: float
    signed: float
    standard_error: float


def gap(potential: np.ndarray, reference: np.ndarray, alpha: float = 0.01) -> Gap:
    """Compare thresholds of all chains together; the standard error is a jackknife over chains.

    A single chain is cut into `STRETCHES` of consecutive draws instead, which must be much longer
    than the chain remembers.

    Parameters
    ----------
    potential, reference
        ``[num_chains, num_draws]`` and ``[num_chains, num_reference]`` with as many chains, of
        which those with the same number may depend on each other. A single chain has `STRETCHES`
        draws or more.
    alpha
        One minus the region's probability.
    """
    if len(reference) != len(potential):
        raise ValueError(
            f"potential and reference need as many chains, got {len(potential)} and "
            f"{len(reference)}."
        )
    both = (np.asarray(potential, np.float64), np.asarray(reference, np.float64))
    apart = both if len(potential) > 1 else tuple(_stretches(x) for x in both)
    num = len(apart[0])
    error = float(hpd_error(both[0].ravel(), both[1].ravel(), alpha))
    eta, eta_ref = (_threshold(x, alpha) for x in both)
    without = [
        [_threshold(np.delete(x, chain, axis=0), alpha) for x in apart] for chain in range(num)
    ]
    left_out = np.array([(own - ref) / abs(eta_ref) for own, ref in without])
    variance = (num - 1) / num * ((left_out - left_out.mean()) ** 2).sum()
    return Gap(error, (eta - eta_ref) / abs(eta_ref), float(np.sqrt(variance)))


def _stretches(potential: np.ndarray) -> np.ndarray:
    """Return ``[STRETCHES, n]`` of a chain ``[1, num_draws]``, without what is left over."""
    length = potential.shape[1] // STRETCHES
    if not length:
        raise ValueError(
            f"a single chain needs {STRETCHES} draws or more, got {potential.shape[1]}."
        )
    return potential[0, : STRETCHES * length].reshape(STRETCHES, length)


def row(
    run: Run,
    reference: np.ndarray,
    plain_bits: float,
    dimension: int,
) -> dict[str, Any]:
    """Return one line of the table.

    Parameters
    ----------
    run
        Of the algorithm.
    reference
        The reference's potentials.
    plain_bits
        Bits of a round without compression in which all clients speak.
    dimension
        Of the vectors that are quantised, each with a norm of its own.
    """
    real, middle = (gap(run.potential, reference, alpha) for alpha in (0.01, PUBLISHED_ALPHA))
    bounds: list[float | None] = [None, None]
    if run.bits is not None:
        bounds = [
            32 * dimension / float(bound_bits(dimension, 2**run.bits, base=base))
            for base in ("log2", "natural")
        ]
    return {
        "algorithm": run.name,
        "HPD error": real.error,
        "s.e.": real.standard_error,
        "at published level": middle.error,
        "s.e. there": middle.standard_error,
        "sign": "+" if middle.signed > 0 else "-",
        "bits per round": run.bits_up,
        "efficiency": plain_bits / run.bits_up,
        "by bound, log2": bounds[0],
        "by bound, ln": bounds[1],
    }


def curves(potential: np.ndarray, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Return the error at 49 levels of probability ``1 - alpha``, for the figure."""
    error = hpd_error(potential.ravel(), reference.ravel(), CURVE_ALPHAS)
    return {"probability": 1 - CURVE_ALPHAS, "error": np.asarray(error, np.float64)}


def _threshold(potential: np.ndarray, alpha: float) -> float:
    return float(hpd_threshold(potential.ravel(), alpha))
