"""Checks of single messages before the server adds them: finite, and not suddenly large."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc.compression import Quantized, WithExact
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Answer
from fedmcmc.types import ArrayTree, Uncompressed

LARGEST = 1e35
"""Largest norm of a message. Sums of larger float32 numbers could overflow. For a log likelihood of
minus infinity, kernels send -1e30, which is far smaller."""
LARGEST_FAST = 1e35
"""Largest sum of squares that is computed in float32."""
MAX_GROWTH = 1_000.0
"""Growth of a site's messages beyond which the server warns. Gradients grow with the distance from
the mode, so an honest chain would have to jump a thousand times as far as ever before. The messages
of all sites would then grow together."""
NUM_FIRST = 5
"""Messages of a site in a phase before its growth is checked: memories and step sizes settle."""


class Fault(NamedTuple):
    """Message that the server cannot add."""

    site: int  # number of the site
    chains: np.ndarray  # [num_chains] bool, chains with such a message
    text: str  # problem


class Guard:
    """Checks of the unmasked messages of one run.

    The largest accepted norm of a message is `max_norm`, or `LARGEST` if this is ``None``.
    """

    def __init__(self, names: Sequence[str], max_norm: float | None) -> None:
        self.names, self.max_norm = names, max_norm
        self._history: dict[int, _History] = {}
        self._suspected: set[int] = set()

    def check(
        self, codes: Sequence[ArrayTree], sent: np.ndarray, round_: int, phase: int
    ) -> list[Fault]:
        """Return the messages of a phase that cannot be added; warn of messages that grew.

        If several sites sent messages in a chain and none of them is finite, the chain has left the
        region where the model is finite. No site is at fault then, and the run ends with
        `fedmcmc.NonFiniteError`, like a simulated run.

        The sites' codes have leaves ``[num_chains, ...]``; `sent` are flags ``[num_sites,
        num_chains]`` of sites that sent a message in a chain.
        """
        norms = np.stack([norms_of(code, sent.shape[1]) for code in codes])
        limit = LARGEST if self.max_norm is None else min(self.max_norm, LARGEST)
        good = sent & (norms <= limit)
        faults = []
        if not np.array_equal(good, sent):
            faults = self._faults(norms, sent, round_, phase)
        self._compare(np.where(good, norms, 0), round_, phase)
        return faults

    def _faults(self, norms: np.ndarray, sent: np.ndarray, round_: int, phase: int) -> list[Fault]:
        wild = sent & ~(norms <= LARGEST)
        is_shared = (wild.sum(axis=0) > 1) & (wild == sent).all(axis=0)
        wild &= ~is_shared
        above = np.zeros_like(wild)
        if self.max_norm is not None:
            above = sent & ~(norms <= self.max_norm)
        faults = []
        for index in np.flatnonzero((wild | above).any(axis=1)):
            chains = wild[index] | above[index]
            chain = int(np.flatnonzero(chains)[0])
            place = f"round {round_} (phase {phase}, chain {chain})"
            problem = f"has the norm {norms[index, chain]:.3g}, above max_norm = {self.max_norm}."
            if wild[index, chain]:
                problem = (
                    "holds numbers that are not finite, or too large to be added. The site's rows "
                    "or software are at fault, or the step size is too large for this posterior."
                )
            faults.append(Fault(int(index), chains, f"its message of {place} {problem}"))
        return faults

    def _compare(self, norms: np.ndarray, round_: int, phase: int) -> None:
        """Warn once per site if a message is much larger than all its previous messages."""
        history = self._history.setdefault(phase, _History.new(len(self.names)))
        largest = norms.max(axis=1)
        has_history = history.largest > 0
        growth = np.where(has_history, largest / np.where(has_history, history.largest, 1), 1)
        if (growth <= MAX_GROWTH).all():
            self._history[phase] = history.after(largest)
            return
        for index in np.flatnonzero((growth > MAX_GROWTH) & (history.num >= NUM_FIRST)).tolist():
            other_growth = np.delete(growth, index)
            is_shared = growth[index] <= MAX_GROWTH * max(1.0, other_growth.max(initial=0.0))
            if is_shared or index in self._suspected:
                continue
            self._suspected.add(index)
            warnings.warn(
                f"{self.names[index]}: its message of round {round_} (phase {phase}) has the norm "
                f"{largest[index]:.3g}; the largest of its {history.num[index]} before had "
                f"{history.largest[index]:.3g}, and no other site's messages grew as much. Ask the "
                f"site: its rows or software may have changed, and later draws may be wrong. "
                f"max_norm= sets a limit.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._history[phase] = history.after(largest)


class _History(NamedTuple):
    """Largest norm and number of the sites' messages in a phase so far, ``[num_sites]`` each."""

    largest: np.ndarray
    num: np.ndarray

    @classmethod
    def new(cls, num_sites: int) -> "_History":
        return cls(np.zeros(num_sites), np.zeros(num_sites, int))

    def after(self, largest: np.ndarray) -> "_History":
        return _History(np.maximum(self.largest, largest), self.num + (largest > 0))


def count_faults(codes: Sequence[ArrayTree], sent: np.ndarray) -> list[Fault]:
    """Return the answers to a question whose count is not one.

    The counts of a complete sum add up to the number of sites. A wrong count would make every sum
    void, without a hint at the site.
    """
    faults = []
    for site, code in enumerate(codes):
        for node in jax.tree.leaves(code, is_leaf=lambda x: isinstance(x, Answer)):
            if not isinstance(node, Answer):
                continue
            counts = np.asarray(node.one.value)
            wrong = sent[site] & (counts != 1)
            if wrong.any():
                num = counts[wrong][0]
                text = f"its answer counts as {num:.3g} answers, and must count as one."
                faults.append(Fault(site, wrong, text))
    return faults


def norms_of(code: ArrayTree, num_chains: int) -> np.ndarray:
    """Return the norm of a code of each chain, ``[num_chains]``; NaN if a number is not finite.

    A quantized vector counts as its norm times its levels. Parts that kernels mark as exact count
    without the numbers that represent minus infinity. Words of a secure sum count as zero.
    """
    with np.errstate(all="ignore"):
        norms: np.ndarray = np.sqrt(_squares(code, num_chains))
    return norms


def _squares(code: ArrayTree, num: int, *, exact: bool = False) -> np.ndarray:
    total = np.zeros(num)
    for node in jax.tree.leaves(code, is_leaf=lambda x: isinstance(x, _KINDS)):
        if isinstance(node, WithExact):
            total += _squares(node.code, num) + _squares(node.exact, num, exact=True)
        elif isinstance(node, Uncompressed):
            total += _squares(node.value, num, exact=True)
        elif isinstance(node, Quantized):
            levels = sum(_square(leaf, num) for leaf in jax.tree.leaves(node.levels))
            total += _squares(node.norm, num) * levels
        elif _is_float(node):
            total += _square(np.where(node <= LOG_ZERO_THRESHOLD, 0, node) if exact else node, num)
    return total


_KINDS = (WithExact, Uncompressed, Quantized)


def _is_float(leaf: Any) -> bool:
    return bool(leaf.dtype.kind in "fV")  # V: bfloat16


def _square(leaf: object, num: int) -> np.ndarray:
    flat = np.asarray(leaf).reshape(num, -1)
    if flat.dtype.kind == "V":  # bfloat16, which NumPy does not add
        flat = flat.astype(np.float32)
    if flat.dtype == np.float32:  # BLAS takes a tenth of the time of sums in float64
        fast = [float(row.dot(row)) for row in flat]
        if all(square < LARGEST_FAST for square in fast):
            return np.array(fast)
    square: np.ndarray = np.einsum("ij,ij->i", flat, flat, dtype=np.float64, casting="safe")
    return square
