"""The twin: a kernel on Gaussian clients, simulated on the server where no law of it is known.

It costs no round of communication. Chains are independent, so that every standard error is that of
a mean over chains, whatever the kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, compiled
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules, trees
from fedmcmc.rounds import PREPARED_BYTES, run_rounds
from fedmcmc.tuning._gaussian_clients import GaussianClients
from fedmcmc.tuning._laws import rounds_per_draw

MAX_CHAINS, MIN_CHAINS = 256, 32
STATE_NUMBERS = 2**20
"""In the states of all chains, about: larger ones fall out of a processor's cache."""
SEGMENT = 128
"""Rounds of one call."""
BURN_IN, LOOK = 6, 4
"""Of the former many relaxation times and of the latter many segments at least: chains start in
draws of the target, memories and snapshots do not."""
WANTED_DRAWS = 10_000
"""Effective draws: means to a hundredth of an sd, sds to 0.7 percent."""
MAX_NUMBERS, MAX_ROUNDS = 2**26, 2**21
"""Of draws kept, and rounds of all chains together, at most."""
WINDOW = 5
"""Autocorrelations are summed over so many of their times (Sokal's rule)."""
FAR = 1e4
"""Target sds at which a chain counts as running away."""


class Simulated(NamedTuple):
    """What the chains say, with standard errors.

    Attributes
    ----------
    mean, covariance
        ``[d]`` and ``[d, d]``; NaN where chains run away.
    mean_error, sd_error
        ``[d]``, standard errors of means and of standard deviations.
    on_position, spectral_radius
        The regression of a position on the one before, and its largest eigenvalue.
    rounds_per_draw, slowest
        Autocorrelation times of the coordinates and of the slowest direction.
    bits
        Per round.
    num_rounds
        Of all chains together, after burn-in.
    of_functional
        Autocorrelation time along the direction that was asked for; NaN without one.
    """

    mean: np.ndarray
    covariance: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray
    on_position: np.ndarray
    spectral_radius: float
    rounds_per_draw: np.ndarray
    slowest: float
    bits: float
    num_rounds: int
    of_functional: float = float("nan")


def simulated(
    clients: GaussianClients, round_: int, direction: np.ndarray | None = None
) -> Simulated:
    """Run chains of a kernel on Gaussian clients until means and sds are known well.

    With a direction ``[d]``, its autocorrelation time is wanted, too.
    """
    size, num = len(clients.target_mean), clients.data.num_clients
    num_chains = int(np.clip(STATE_NUMBERS // (size * num), MIN_CHAINS, MAX_CHAINS))
    number = jnp.asarray(round_, jnp.int32)
    kernel: FederatedKernel = jax.tree.map(
        lambda x: schedules.value(x, number) if isinstance(x, schedules.Scheduled) else x,
        clients.kernel,
        is_leaf=lambda x: isinstance(x, schedules.Scheduled),
    )
    root = np.linalg.cholesky(clients.target_covariance)
    normals = np.random.default_rng(0).normal(size=(num_chains, size))
    starts = jnp.asarray(clients.target_mean + normals @ root.T, jnp.result_type(float))
    keys = jax.random.split(jax.random.key(0), num_chains)
    states = _begin(kernel, clients.data, keys, starts, clients.mode, number)
    sds = np.sqrt(np.diag(clients.target_covariance))
    most = max(min(MAX_ROUNDS, MAX_NUMBERS // size) // (num_chains * SEGMENT), 2)
    bits = 0.0

    def run(num_segments: int) -> np.ndarray | None:
        """Return draws of segments more, ``None`` where a chain runs away."""
        nonlocal states, bits
        draws = []
        for _ in range(num_segments):
            states, drawn, sent = _segment(kernel, clients.data, keys, states)
            draws.append(np.asarray(drawn))
            # Not finite is far, too.
            if not (np.abs(draws[-1] - clients.target_mean) / sds).max() < FAR:
                return None
            bits = float(np.mean(np.asarray(sent))) / SEGMENT
        return np.concatenate(draws, 1)

    # Burn-in: as long as positions say that they remember where they started.
    num_run, num_needed = 0, 1
    while num_run < num_needed:
        draws = run(LOOK)
        if draws is None:
            return _ran_away(size)
        num_run, told = num_run + LOOK, _moments(draws)
        memory = -1 / np.log(min(told.spectral_radius, 1 - 1e-6))
        num_needed = int(np.ceil(BURN_IN * memory / SEGMENT))
        # A radius above one may yet be that of chains that run away.
        if num_needed > most and (told.spectral_radius < 1 or num_run >= most):
            unknown = np.full(size, np.inf)
            return told._replace(mean_error=unknown, sd_error=unknown, bits=bits)
    every, num_wanted = np.zeros((num_chains, 0, size)), 2
    while every.shape[1] < SEGMENT * min(num_wanted, most):
        draws = run(min(num_wanted, most) - every.shape[1] // SEGMENT)
        if draws is None:
            return _ran_away(size)
        every = np.concatenate([every, draws], 1)
        told = _moments(every)
        if np.isfinite(told.slowest):
            num_wanted = int(np.ceil(WANTED_DRAWS * told.slowest / (num_chains * SEGMENT)))
    along = float("nan")
    if direction is not None:
        along = _time((every - told.mean) @ direction)
    return told._replace(bits=bits, num_rounds=num_chains * every.shape[1], of_functional=along)


def _ran_away(size: int) -> Simulated:
    nan, matrix = np.full(size, np.nan), np.full((size, size), np.nan)
    return Simulated(nan, matrix, nan, nan, matrix, float("inf"), nan, float("nan"), 0.0, 0)


@compiled
def _begin(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    starts: Array,
    like: ArrayTree,
    round_: Array,
) -> FederatedState:
    """Return states of chains, leaves ``[num_chains, ...]``."""

    def one(key: Array, flat: Array) -> FederatedState:
        position = trees.cast_like(trees.unravel(flat, like), like)
        state = kernel.init(key, position, data)
        return state._replace(broadcast=state.broadcast._replace(round=round_))

    states: FederatedState = jax.vmap(one)(keys, starts)
    return states


@compiled
def _segment(
    kernel: FederatedKernel, data: FederatedData, keys: Array, states: FederatedState
) -> tuple[FederatedState, Array, Array]:
    """Return states after a segment, draws ``[num_chains, SEGMENT, d]``, and bits per chain."""
    ahead = PREPARED_BYTES // keys.shape[0]

    def one(key: Array, state: FederatedState) -> tuple[FederatedState, Array, Array]:
        state, records = run_rounds(kernel, data, key, state, SEGMENT, ahead_bytes=ahead)
        bits = records.bits.astype(jnp.float32)  # [2, 2], in units of 2**32 and of 1
        draws = jax.vmap(trees.ravel)(records.draws)
        return state, draws, jnp.sum(bits[0] * 2.0**32 + bits[1])

    states, draws, bits = jax.vmap(one)(keys, states)
    return states, draws, bits


def _moments(draws: np.ndarray) -> Simulated:
    """Return what draws ``[num_chains, num_rounds, d]`` of independent chains say."""
    num_chains, num_rounds, _ = draws.shape
    x = draws.astype(np.float64)
    of_chains = x.mean(1)
    mean = of_chains.mean(0)
    x -= mean
    covariance = np.einsum("cri,crj->ij", x, x) / (num_chains * num_rounds)
    variances = np.einsum("cri,cri->ci", x, x) / num_rounds
    root_num, sds = np.sqrt(num_chains), np.sqrt(np.diag(covariance))
    mean_error = of_chains.std(0, ddof=1) / root_num
    with np.errstate(invalid="ignore"):  # of chains that stand still
        sd_error = np.nan_to_num(variances.std(0, ddof=1) / root_num / (2 * sds))
    # Of a kernel whose mean is affine in the position, exact but for noise.
    before = np.einsum("cri,crj->ij", x[:, :-1], x[:, :-1])
    after = np.einsum("cri,crj->ij", x[:, :-1], x[:, 1:])
    on_position = (np.linalg.pinv(before) @ after).T
    radius = float(np.abs(np.linalg.eigvals(on_position)).max())
    times = np.array([_time(x[..., i]) for i in range(len(mean))])
    slowest = float(times.max())
    if radius < 1:  # else not long enough to tell
        slowest = max(slowest, _time(x @ rounds_per_draw(on_position, covariance)[2]))
    return Simulated(
        mean, covariance, mean_error, sd_error, on_position, radius, times, slowest, 0.0, 0
    )


def _time(x: np.ndarray) -> float:
    """Return the autocorrelation time of chains ``[num_chains, num_rounds]`` of known mean zero.

    NaN where they stand still.
    """
    if not np.any(x):
        return float("nan")
    num_rounds = x.shape[1]
    power = np.abs(np.fft.rfft(x, 2 * num_rounds, axis=1)) ** 2
    covariances = np.fft.irfft(power.mean(0))[:num_rounds] / (num_rounds - np.arange(num_rounds))
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    long_enough = np.flatnonzero(np.arange(num_rounds) >= WINDOW * times)
    return float(times[long_enough[0] if len(long_enough) else -1])
