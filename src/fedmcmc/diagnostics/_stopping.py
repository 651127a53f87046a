"""Stopping rules that a run checks on its draws so far."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fedmcmc._checks import positive_integer
from fedmcmc.diagnostics._mixing import worst_mixing
from fedmcmc.types import ArrayTree


class StopDecision(NamedTuple):
    """Decision to stop or continue, with the figures it rests on."""

    stop: bool
    figures: dict[str, float]


class StoppingRule(NamedTuple):
    """Stopping rule for `fedmcmc.sample`.

    Attributes
    ----------
    next_check
        ``num_draws -> num_draws``: number of draws per chain at the next check, from the number at
        the previous check (zero before the first check).
    check
        ``draws -> StopDecision``, where `draws` has leaves ``[num_chains, num_draws, *event]``.
    name
        Condition in words.
    min_chains
        Smallest number of chains.
    reads
        ``"draws"``, or ``"info"``: `check` then gets ``samples.info`` so far, arrays
        ``[num_chains, num_draws]``, and ``num_clients``.
    """

    next_check: Callable[[int], int]
    check: Callable[[Any], StopDecision]
    name: str
    min_chains: int = 1
    reads: Literal["draws", "info"] = "draws"


def rhat_below(
    threshold: float = 1.01, *, min_ess: float = 400.0, min_draws: int = 100, growth: float = 1.25
) -> StoppingRule:
    """Stop two or more chains when R-hat is low and effective sample sizes are large.

    ArviZ computes both for each coordinate of the draws after burn-in: rank-normalized R-hat (the
    larger of split and folded) and the bulk effective sample size. Chains that agree can still
    share a bias; see `fedmcmc.predict_bias`.

    Parameters
    ----------
    threshold
        Largest R-hat, above one. Gelman et al. stop at 1.1; Vehtari et al. (2021) advise 1.01.
    min_ess
        Smallest effective sample size over all chains together; zero disables this condition.
    min_draws
        Number of draws per chain before the first check, at least four.
    growth
        Ratio of chain lengths between checks, above one.

    Raises
    ------
    ValueError
        If a number is out of range.

    References
    ----------
    Liang et al. (2024), Remark 4.2; Vehtari et al. (2021).

    Examples
    --------
    >>> rule = rhat_below(1.01)  # fedmcmc.sample(..., until=rule)
    >>> rule.next_check(0), rule.next_check(100)
    (100, 125)
    >>> rule.check(np.random.default_rng(0).normal(size=(4, 1000))).stop
    True
    """
    for name, number, minimum, strict in (
        ("threshold", threshold, 1.0, True),
        ("min_ess", min_ess, 0.0, False),
        ("min_draws", min_draws, 4, False),
        ("growth", growth, 1.0, True),
    ):
        if not np.isfinite(number) or number < minimum or (strict and number == minimum):
            bound = "above" if strict else "at least"
            raise ValueError(f"{name} must be a number {bound} {minimum}, got {number!r}.")

    def next_check(num_draws: int) -> int:
        return max(int(min_draws), num_draws + 1, int(np.ceil(num_draws * growth)))

    def check(draws: ArrayTree) -> StopDecision:
        rhat, ess = worst_mixing(draws)
        # R-hat is NaN for a coordinate that never moved; the run then continues.
        return StopDecision(bool(rhat < threshold and ess >= min_ess), {"rhat": rhat, "ess": ess})

    return StoppingRule(
        next_check,
        check,
        f"R-hat below {threshold:g} and at least {min_ess:g} effective draws",
        min_chains=2,
    )


def at_rest(threshold: float = 0.01, *, num_rounds: int = 3) -> StoppingRule:
    """Stop a kernel that refines an approximation when rounds hardly move the approximation.

    In each of the latest kept rounds of every chain, no mean may move by more than `threshold` sds,
    and no log sd by more than `threshold` (``samples.info["shift"]``). With cohorts the condition
    covers more rounds, since absent clients may still move the approximation.

    Parameters
    ----------
    threshold
        Largest shift, positive. Random inference (`fedmcmc.inference.mcmc`, `sgd_mean`) never moves
        less than its noise.
    num_rounds
        Number of kept rounds of all clients. With cohorts, number of passes over the clients.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> rule = at_rest(0.01, num_rounds=2)  # fedmcmc.sample(..., until=rule)
    >>> info = {"shift": np.array([[0.5, 0.002, 0.001]]), "num_active": np.full((1, 3), 4)}
    >>> rule.check(info | {"num_clients": 4})
    StopDecision(stop=True, figures={'shift': 0.002})
    """
    if not (np.isfinite(threshold) and threshold > 0):
        raise ValueError(f"threshold must be a positive number, got {threshold!r}.")
    num_rounds = positive_integer(num_rounds, "num_rounds")

    def check(info: dict[str, np.ndarray]) -> StopDecision:
        shifts, complete = last_passes(info, num_rounds)
        shift = max(float(chain.max()) for chain in shifts)
        return StopDecision(complete and shift <= threshold, {"shift": shift})

    return StoppingRule(
        lambda num_draws: max(num_rounds, num_draws + 1),
        check,
        f"{num_rounds} rounds of all clients that move the approximation by at most {threshold:g} "
        f"sd",
        reads="info",
    )


def last_passes(info: dict[str, Any], num_passes: int) -> tuple[list[np.ndarray], bool]:
    """Return each chain's shifts in its latest passes over the clients, and true if complete.

    A pass ends when the number of client visits reaches the number of clients. If there are fewer
    than `num_passes` passes, the shifts of all rounds are returned with false.
    """
    shifts, complete = [], True
    for shift, active in zip(info["shift"], info["num_active"], strict=True):
        visits = np.cumsum(active[::-1], dtype=np.int64)
        num = 1 + int(np.sum(visits < num_passes * int(info["num_clients"])))
        complete &= num <= len(shift)
        shifts.append(shift[-num:])
    return shifts, complete
