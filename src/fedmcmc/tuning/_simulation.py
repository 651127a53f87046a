"""Simulation of a kernel on Gaussian clients, for kernels whose rounds are no affine maps.

It needs no communication. Chains are independent, so the standard error of any moment comes from
the variance between chains.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import FederatedData
from fedmcmc.pytrees import schedules, trees
from fedmcmc.rounds import PREPARED_BYTES, run_rounds
from fedmcmc.tuning._gaussian_clients import GaussianClients, replace_nodes
from fedmcmc.tuning._random_maps import rounds_per_draw
from fedmcmc.types import ArrayTree, FederatedKernel, FederatedState, compiled

MAX_CHAINS, MIN_CHAINS = 256, 32
STATE_ELEMENTS = 2**20
"""Approximate number of elements in the states of all chains; more fill a processor's cache."""
SEGMENT = 128
"""Rounds per compiled call."""
BURN_IN_TIMES, SEGMENTS_PER_CHECK = 6, 4
"""Minimal burn-in, in relaxation times and in segments. Chains start at draws from the target, but
memories and snapshots do not."""
TARGET_DRAWS = 10_000
"""Effective draws, for standard errors of 0.01 sd for means and 0.7 percent for sds."""
MAX_ELEMENTS, MAX_ROUNDS = 2**26, 2**21
"""Limits on numbers in the stored draws, and on rounds of all chains."""
WINDOW = 5
"""Number of autocorrelation times over which autocorrelations are summed (Sokal's rule)."""
DIVERGENCE_SDS = 1e4
"""Distance from the target's mean, in sds, at which a chain counts as diverged."""


class SimulatedMoments(NamedTuple):
    """Estimates from chains: the fields of a `Prediction` that a simulation determines."""

    mean: np.ndarray
    covariance: np.ndarray
    mean_error: np.ndarray
    sd_error: np.ndarray
    on_position: np.ndarray
    spectral_radius: float
    rounds_per_draw: np.ndarray
    slowest: float
    bits: float = 0.0
    num_simulated: int = 0
    functional_rounds: float = float("nan")


def simulate_chains(
    clients: GaussianClients, round_: int, direction: np.ndarray | None = None
) -> SimulatedMoments:
    """Run chains of a kernel on Gaussian clients until means and sds are accurate.

    With a direction ``[d]``, also estimate its autocorrelation time.
    """
    size, num = len(clients.target_mean), clients.data.num_clients
    num_chains = int(np.clip(STATE_ELEMENTS // (size * num), MIN_CHAINS, MAX_CHAINS))
    number = jnp.asarray(round_, jnp.int32)
    kernel = replace_nodes(
        clients.kernel, schedules.Scheduled, lambda node: schedules.value(node, number)
    )
    root = np.linalg.cholesky(clients.target_covariance)
    normals = np.random.default_rng(0).normal(size=(num_chains, size))
    starts = jnp.asarray(clients.target_mean + normals @ root.T, jnp.result_type(float))
    keys = jax.random.split(jax.random.key(0), num_chains)
    states = _init_chains(kernel, clients.data, keys, starts, clients.mode, number)
    sds = np.sqrt(np.diag(clients.target_covariance))
    max_segments = max(min(MAX_ROUNDS, MAX_ELEMENTS // size) // (num_chains * SEGMENT), 2)
    bits = 0.0

    def run(num_segments: int) -> np.ndarray | None:
        """Return the draws of the next segments, or ``None`` if a chain diverges."""
        nonlocal states, bits
        draws = []
        for _ in range(num_segments):
            states, drawn, sent = _run_segment(kernel, clients.data, keys, states)
            draws.append(np.asarray(drawn))
            # Also true for draws that are not finite.
            if not (np.abs(draws[-1] - clients.target_mean) / sds).max() < DIVERGENCE_SDS:
                return None
            bits = float(np.mean(np.asarray(sent))) / SEGMENT
        return np.concatenate(draws, 1)

    num_run, num_needed = 0, 1  # segments of burn-in
    while num_run < num_needed:
        draws = run(SEGMENTS_PER_CHECK)
        if draws is None:
            return _diverged(size)
        num_run, moments = num_run + SEGMENTS_PER_CHECK, _estimate_moments(draws)
        relaxation = -1 / np.log(min(moments.spectral_radius, 1 - 1e-6))
        num_needed = int(np.ceil(BURN_IN_TIMES * relaxation / SEGMENT))
        # With an estimated radius above one, chains may still diverge.
        if num_needed > max_segments and (moments.spectral_radius < 1 or num_run >= max_segments):
            unknown = np.full(size, np.inf)
            return moments._replace(mean_error=unknown, sd_error=unknown, bits=bits)
    all_draws, num_needed = np.zeros((num_chains, 0, size)), 2
    while all_draws.shape[1] < SEGMENT * min(num_needed, max_segments):
        draws = run(min(num_needed, max_segments) - all_draws.shape[1] // SEGMENT)
        if draws is None:
            return _diverged(size)
        all_draws = np.concatenate([all_draws, draws], 1)
        moments = _estimate_moments(all_draws)
        if np.isfinite(moments.slowest):
            num_needed = int(np.ceil(TARGET_DRAWS * moments.slowest / (num_chains * SEGMENT)))
    num_simulated = num_chains * all_draws.shape[1]
    if direction is not None:
        time = _autocorrelation_time((all_draws - moments.mean) @ direction)
        moments = moments._replace(functional_rounds=time)
    return moments._replace(bits=bits, num_simulated=num_simulated)


def _diverged(size: int) -> SimulatedMoments:
    nan, matrix = np.full(size, np.nan), np.full((size, size), np.nan)
    return SimulatedMoments(nan, matrix, nan, nan, matrix, float("inf"), nan, float("nan"))


@compiled
def _init_chains(
    kernel: FederatedKernel,
    data: FederatedData,
    keys: Array,
    starts: Array,
    like: ArrayTree,
    round_: Array,
) -> FederatedState:
    """Return the states of chains, leaves ``[num_chains, ...]``."""

    def init(key: Array, flat: Array) -> FederatedState:
        position = trees.cast_like(trees.unravel(flat, like), like)
        state = kernel.init(key, position, data)
        return state._replace(broadcast=state.broadcast._replace(round=round_))

    states: FederatedState = jax.vmap(init)(keys, starts)
    return states


@compiled
def _run_segment(
    kernel: FederatedKernel, data: FederatedData, keys: Array, states: FederatedState
) -> tuple[FederatedState, Array, Array]:
    """Return states after a segment, draws ``[num_chains, SEGMENT, d]``, and bits per chain."""
    ahead = PREPARED_BYTES // keys.shape[0]

    def run(key: Array, state: FederatedState) -> tuple[FederatedState, Array, Array]:
        state, records = run_rounds(kernel, data, key, state, SEGMENT, ahead_bytes=ahead)
        bits = records.bits.astype(jnp.float32)  # [2, 2], in units of 2**32 and of 1
        draws = jax.vmap(trees.ravel)(records.draws)
        return state, draws, jnp.sum(bits[0] * 2.0**32 + bits[1])

    states, draws, bits = jax.vmap(run)(keys, states)
    return states, draws, bits


def _estimate_moments(draws: np.ndarray) -> SimulatedMoments:
    """Return estimates from draws ``[num_chains, num_rounds, d]`` of independent chains."""
    num_chains, num_rounds, _ = draws.shape
    x = draws.astype(np.float64)
    chain_means = x.mean(1)
    mean = chain_means.mean(0)
    x -= mean
    covariance = np.einsum("cri,crj->ij", x, x) / (num_chains * num_rounds)
    variances = np.einsum("cri,cri->ci", x, x) / num_rounds
    root_num, sds = np.sqrt(num_chains), np.sqrt(np.diag(covariance))
    mean_error = chain_means.std(0, ddof=1) / root_num
    with np.errstate(invalid="ignore"):  # of chains that stand still
        sd_error = np.nan_to_num(variances.std(0, ddof=1) / root_num / (2 * sds))
    # If a round's mean is affine in the position, this regression is exact up to noise.
    before = np.einsum("cri,crj->ij", x[:, :-1], x[:, :-1])
    after = np.einsum("cri,crj->ij", x[:, :-1], x[:, 1:])
    on_position = (np.linalg.pinv(before) @ after).T
    radius = float(np.abs(np.linalg.eigvals(on_position)).max())
    times = np.array([_autocorrelation_time(x[..., i]) for i in range(len(mean))])
    slowest = float(times.max())
    if radius < 1:  # otherwise there are too few draws for the slowest direction
        direction = rounds_per_draw(on_position, covariance)[2]
        slowest = max(slowest, _autocorrelation_time(x @ direction))
    return SimulatedMoments(
        mean, covariance, mean_error, sd_error, on_position, radius, times, slowest
    )


def _autocorrelation_time(x: np.ndarray) -> float:
    """Return the autocorrelation time of chains ``[num_chains, num_rounds]`` with mean zero.

    If the chains stand still, return NaN.
    """
    if not np.any(x):
        return float("nan")
    num_rounds = x.shape[1]
    power = np.abs(np.fft.rfft(x, 2 * num_rounds, axis=1)) ** 2
    covariances = np.fft.irfft(power.mean(0))[:num_rounds] / (num_rounds - np.arange(num_rounds))
    times = 2 * np.cumsum(covariances / covariances[0]) - 1
    long_enough = np.flatnonzero(np.arange(num_rounds) >= WINDOW * times)
    return float(times[long_enough[0] if len(long_enough) else -1])
