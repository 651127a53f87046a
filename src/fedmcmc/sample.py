"""The loop: one compiled program a run, called in segments so that draws leave the device."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc import schedules, streams, trees
from fedmcmc._segments import (
    Collect,
    Kept,
    Plan,
    Segment,
    block_length,
    kept_shapes,
    run_segment,
)
from fedmcmc._types import ArrayTree, FederatedKernel, FederatedState, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.errors import NonFiniteError
from fedmcmc.samples import Samples
from fedmcmc.simulate import RoundInfo, as_key

__all__ = ["local_positions", "sample"]

BUFFER_BYTES = 2**26
"""Memory for the draws that wait on the device for the end of a segment."""
MAX_SEGMENT = 2**14
"""Rounds in a segment at most."""
SEGMENT_SECONDS = 0.5
"""Time that a segment should take, so that progress moves and an interrupt is heard."""


def local_positions(state: FederatedState, info: RoundInfo) -> ArrayTree:
    """Collect all local iterates of the round, leaves ``[num_local_steps, *event]``.

    For `collect` of `sample`, with kernels that hand one chain from client to client: FSGLD's
    chain is all its local states.
    """
    del state
    return jax.tree.map(lambda leaf: leaf[0], info.clients.local_positions)


def sample(
    rng_key: Array,
    kernel: FederatedKernel,
    data: FederatedData,
    position: ArrayTree | Callable[[Array], ArrayTree] | None = None,
    *,
    num_rounds: int,
    num_burnin: int = 0,
    thinning: int = 1,
    num_chains: int = 1,
    collect: Collect | None = None,
    progress: bool = True,
    state: FederatedState | None = None,
) -> Samples:
    """Run `kernel` on `data` and keep draws.

    Parameters
    ----------
    rng_key
        Key of the run. Chain ``c`` uses ``fold_in(rng_key, c)``, so its draws do not depend on
        the number of chains.
    kernel
        A federated kernel.
    data
        Every client's rows.
    position
        Where each chain starts: a pytree, or ``rng_key -> pytree`` for a start a chain. Not
        needed where `state` is given.
    num_rounds
        Rounds to run, burn-in included.
    num_burnin
        The first rounds, not kept.
    thinning
        Of the rest every `thinning`-th round is kept (the last of each group):
        ``num_draws = (num_rounds - num_burnin) // thinning``.
    num_chains
        Chains, vmapped.
    collect
        ``(state, RoundInfo) -> pytree``, what is kept of a round; by default the kernel's draw.
        `fedmcmc.local_positions` keeps all local iterates.
    progress
        Whether to show a progress bar.
    state
        ``samples.state`` of an earlier run to go on from. With the same key the two runs give
        the very draws of an uninterrupted one.

    Returns
    -------
    Samples

    Raises
    ------
    ValueError
        On settings or data that do not fit, before anything is compiled.
    NonFiniteError
        If a chain turns non-finite; the draws before are in its `samples`.
    """
    _check_counts(num_rounds, num_burnin, thinning, num_chains)
    kernel = as_functions(kernel)
    rows = data.pooled() if kernel.participation.pooled else data
    keys = jax.vmap(lambda c: jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))
    if state is None:
        state = _start(kernel, rows, keys, position)
    else:
        _check_state(state, num_chains)
    first = int(state.broadcast.round[0])
    run = _Run(kernel, rows, keys, collect, state)
    with tqdm(total=num_rounds, unit="round", disable=not progress) as bar:
        return run.go(first, first + num_burnin, first + num_rounds, thinning, bar)


def _check_counts(num_rounds: int, num_burnin: int, thinning: int, num_chains: int) -> None:
    given = dict(
        num_rounds=num_rounds, num_burnin=num_burnin, thinning=thinning, num_chains=num_chains
    )
    for name, count in given.items():
        least = 0 if name == "num_burnin" else 1
        if int(count) != count or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}.")
    if num_burnin > num_rounds:
        raise ValueError(
            f"num_rounds counts burn-in too: got num_rounds={num_rounds}, num_burnin={num_burnin}."
        )


def _check_state(state: FederatedState, num_chains: int) -> None:
    shape = jnp.shape(state.broadcast.round)
    if shape != (num_chains,):
        raise ValueError(
            f"state must hold {num_chains} chains on the first axis of every leaf, as in "
            f"Samples.state; its round has shape {shape}."
        )


def _start(
    kernel: FederatedKernel, data: FederatedData, keys: Array, position: ArrayTree
) -> FederatedState:
    if position is None:
        raise ValueError("Give a position to start from, or the state of an earlier run.")
    place_keys, init_keys = (
        jax.vmap(lambda key, i=i: streams.draw_key(key, jnp.uint32(2**32 - 1 - i)))(keys)
        for i in range(2)
    )
    if callable(position):
        places = jax.vmap(position)(place_keys)
    else:
        places = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (len(keys), *jnp.shape(x))), position
        )
    places = jax.tree.map(_as_float, places)
    if not bool(trees.all_finite(places)):
        raise ValueError("The start position holds NaN or infinite values.")
    return jax.vmap(kernel.init, in_axes=(0, 0, None))(init_keys, places, data)


def _as_float(leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.result_type(float))


class _Run:
    """A run on the host: calls segments, moves what they keep to the host, watches for trouble."""

    def __init__(
        self,
        kernel: FederatedKernel,
        data: FederatedData,
        keys: Array,
        collect: Collect | None,
        state: FederatedState,
    ) -> None:
        self.kernel, self.data, self.keys, self.collect = kernel, data, keys, collect
        self.state = state
        # Tabulated, so that another schedule is not traced again for the same shapes.
        tabulated = schedules.tabulate(kernel, 0, 1)
        self.shapes = kept_shapes(tabulated, data, keys, state, collect)
        self.block = block_length(tabulated, data, keys, state)
        self.longest = max(MAX_SEGMENT // self.block, 1) * self.block
        self.kept: list[Kept] = []
        zero = np.zeros(len(keys), np.int64)
        self.totals = {"bits_up": zero, "bits_down": zero, "rounds": zero}

    def go(self, first: int, keep_from: int, end: int, thinning: int, bar: Any) -> Samples:
        """Run rounds ``[first, end)`` and return what was kept."""
        num_draws = (end - keep_from) // thinning
        bytes_per_draw = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.shapes)
        )
        budget = max(BUFFER_BYTES // max(bytes_per_draw * len(self.keys), 1), 1)
        capacity = int(min(num_draws, budget, self.longest))
        length, at = self.block, first
        while at < end:
            num_kept = max(at - keep_from, 0) // thinning
            full = keep_from + (num_kept + max(capacity, 1)) * thinning
            stop = min(at + min(length, self.longest), end, full)
            plan = Plan(
                *(jnp.asarray(x, jnp.int32) for x in (at, stop, keep_from, thinning, num_kept))
            )
            begun = time.perf_counter()
            try:
                segment = self._segment(plan, capacity, at)
            except KeyboardInterrupt:
                warnings.warn(
                    f"Interrupted in or after round {at}; returning what was kept before. Go on "
                    f"with sample(..., state=samples.state).",
                    RuntimeWarning,
                    stacklevel=3,
                )
                break
            took = time.perf_counter() - begun
            self._take(segment, at, stop, max(stop - keep_from, 0) // thinning - num_kept)
            bar.update(stop - at)
            length = self._next_length(length, stop - at, took)
            at = stop
        return self.samples()

    def _segment(self, plan: Plan, capacity: int, at: int) -> Segment:
        segment = run_segment(
            schedules.tabulate(self.kernel, at, self.longest),
            self.data,
            self.keys,
            self.state,
            plan,
            block=self.block,
            capacity=capacity,
            collect=self.collect,
        )
        return jax.block_until_ready(segment)

    def _take(self, segment: Segment, at: int, stop: int, num_kept: int) -> None:
        kept = jax.tree.map(lambda leaf: np.asarray(leaf[:, :num_kept]), segment.kept)
        first_bad = np.asarray(segment.first_bad)
        if (first_bad >= 0).any():
            self._stop_non_finite(kept, first_bad)
        self.kept.append(kept)
        self.state = segment.state
        high, low = np.moveaxis(np.asarray(segment.bits, np.int64), 1, 0)
        for name, bits in zip(("bits_up", "bits_down"), (high * 2**32 + low).T, strict=True):
            self.totals[name] = self.totals[name] + bits
        self.totals["rounds"] = self.totals["rounds"] + (stop - at)

    def _stop_non_finite(self, kept: Kept, first_bad: np.ndarray) -> None:
        chains = np.flatnonzero(first_bad >= 0).tolist()
        round_ = int(first_bad[first_bad >= 0].min())
        good = int((kept.info["round"] < round_).all(axis=0).sum())
        self.kept.append(jax.tree.map(lambda leaf: leaf[:, :good], kept))
        samples = self.samples()
        raise NonFiniteError(
            f"Chain {chains[0]} turned non-finite in round {round_} ({len(chains)} of "
            f"{len(first_bad)} chains did by the end of the segment). The step size is too large "
            f"for this posterior, or a log density or gradient is not finite there. The "
            f"{samples.num_draws} draws a chain from the rounds before are in `error.samples`.",
            samples,
            round_,
            chains,
        )

    @staticmethod
    def _next_length(length: int, ran: int, took: float) -> int:
        # The first call of a program compiles, which only makes the next segment short.
        return int(max(1, min(4 * length, ran * SEGMENT_SECONDS / max(took, 1e-6))))

    def samples(self) -> Samples:
        """Return what was kept so far."""
        if self.kept:
            kept = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *self.kept)
        else:
            lead = (len(self.keys), 0)
            kept = jax.tree.map(lambda s: np.zeros(lead + s.shape, s.dtype), self.shapes)
        return Samples(kept.draw, kept.info, self.state, self.totals, self.kernel.constrain_fn)
