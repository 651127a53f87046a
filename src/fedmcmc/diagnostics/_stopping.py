"""When to stop: rules that a run asks, on its draws so far, whether it has sampled enough."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree
from fedmcmc.diagnostics._mixing import worst


class StopDecision(NamedTuple):
    """Whether to stop, and the figures that say so."""

    stop: bool
    figures: dict[str, float]


class StoppingRule(NamedTuple):
    """A rule for `fedmcmc.sample`, asked at numbers of draws that depend on nothing but the rule.

    Attributes
    ----------
    next_check
        ``num_draws -> num_draws``: after how many draws per chain to ask next, given how many there
        were when it was asked last (zero before the first time).
    check
        ``draws -> StopDecision``, where `draws` has leaves ``[num_chains, num_draws, *event]``.
    name
        What the rule wants, in words.
    min_chains
        Chains without which it cannot be asked.
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
    """Stop two or more chains once the worst R-hat is low and the effective sample sizes enough.

    Both are ArviZ's, of every coordinate of the draws after burn-in: R-hat the larger of the
    rank-normalized split and folded ones, the effective sample size that of the bulk. They are
    computed at `min_draws` draws per chain and then at each further `growth` times as many.

    Parameters
    ----------
    threshold
        Above one. Gelman et al. stop at 1.1; Vehtari et al. (2021) advise 1.01.
    min_ess
        Over all chains together; zero asks for R-hat alone.
    min_draws
        Draws per chain before the first check, four at least.
    growth
        Above one; how much longer the chains are at each check.

    Raises
    ------
    ValueError
        If a number is out of range.

    Notes
    -----
    Draws that agree need not be right: a bias that all chains share, as that of local steps at
    clients that differ, does not show in R-hat. See `fedmcmc.predict_bias`.

    References
    ----------
    Liang et al. (2024), Remark 4.2; Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0),
    ...     fedmcmc.fa_hmc(posterior, step_size=0.2, num_integration_steps=3, num_local_steps=1),
    ...     data,
    ...     0.0,
    ...     num_chains=4,
    ...     num_burnin=20,
    ...     until=rhat_below(1.01),
    ...     max_rounds=10_000,
    ...     progress=False,
    ... )
    >>> samples.stopped["reached"], samples.stopped["rhat"] < 1.01
    (True, True)
    """
    for name, number, least, strict in (
        ("threshold", threshold, 1.0, True),
        ("min_ess", min_ess, 0.0, False),
        ("min_draws", min_draws, 4, False),
        ("growth", growth, 1.0, True),
    ):
        if not np.isfinite(number) or number < least or (strict and number == least):
            bound = "above" if strict else "at least"
            raise ValueError(f"{name} must be a number {bound} {least}, got {number!r}.")

    def next_check(num_draws: int) -> int:
        return max(int(min_draws), num_draws + 1, int(np.ceil(num_draws * growth)))

    def check(draws: ArrayTree) -> StopDecision:
        rhat, ess = worst(draws)
        # Not a number, as of a coordinate that never moved, is no reason to stop.
        return StopDecision(bool(rhat < threshold and ess >= min_ess), {"rhat": rhat, "ess": ess})

    return StoppingRule(
        next_check,
        check,
        f"R-hat below {threshold:g} and at least {min_ess:g} effective draws",
        min_chains=2,
    )


def at_rest(threshold: float = 0.01, *, num_rounds: int = 3) -> StoppingRule:
    """Stop a kernel that refines an approximation once rounds hardly move it.

    That is where each of the last kept rounds, of every chain, moved no mean by more than
    `threshold` of its sds, and no logarithm of an sd by more (``samples.info["shift"]``). With
    cohorts this is required of more rounds, since clients that were absent may still move it.

    Parameters
    ----------
    threshold
        Positive. Inference that is random (`fedmcmc.inference.mcmc`, `sgd_mean`) never rests below
        its own noise.
    num_rounds
        Number of kept rounds of all clients. With cohorts, the number of passes: as many rounds as
        `num_rounds` times the number of clients takes.

    Raises
    ------
    ValueError
        If a number is out of range.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -jnp.log(jnp.cosh(x - theta))
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> mode = fedmcmc.surrogates.mode(posterior, data, 0.0)
    >>> kernel = fedmcmc.fed_ep(posterior)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0),
    ...     kernel,
    ...     data,
    ...     mode.position,
    ...     until=at_rest(),
    ...     max_rounds=50,
    ...     progress=False,
    ... )
    >>> samples.stopped["reached"], samples.stopped["rounds"] < 20
    (True, True)
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
    """Return each chain's shifts in its last passes over the clients, and if these are complete.

    A pass is as many rounds as it takes until as many clients took part as there are. Rounds that
    are fewer than `num_passes` of these are not complete, and all are returned.
    """
    shifts, complete = [], True
    for shift, active in zip(info["shift"], info["num_active"], strict=True):
        visits = np.cumsum(active[::-1], dtype=np.int64)
        num = 1 + int(np.sum(visits < num_passes * int(info["num_clients"])))
        complete &= num <= len(shift)
        shifts.append(shift[-num:])
    return shifts, complete
