"""Result of a correction by importance weights: weighted draws, evidence and a verdict."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import Verdict
from fedmcmc.gaussian import Mixture
from fedmcmc.pytrees import named_leaves, variables
from fedmcmc.random import as_key
from fedmcmc.types import (
    ArrayTree,
    MissingFunction,
    WithFunctions,
    as_functions,
    compiled,
    vmap_axes,
)

Fn = Callable[[ArrayTree], ArrayTree]


class Round(NamedTuple):
    """Diagnostics and cost of one proposal of a correction.

    `k_hat` and `ess` describe the weights of the draws of this proposal. `exchanges` counts rounds
    of communication; many draws need several.
    """

    k_hat: float
    ess: float
    exchanges: int
    bits_up: float
    bits_down: float


@dataclass(frozen=True, repr=False)
class Corrected(WithFunctions):
    """Weighted draws of the posterior, with a verdict on their quality.

    Attributes
    ----------
    draws
        Draws of the last proposal in the user's unconstrained coordinates, a pytree of NumPy arrays
        with leaves ``[num_draws, *event]``.
    log_weights
        Log of the smoothed weights, ``[num_draws]`` float64; the weights sum to one.
    k_hat
        Shape of the tail of the weights.
    ess
        Number of effective draws, one over the sum of squared weights.
    log_evidence, log_evidence_sd
        Log of ``p(data)`` and its standard error; NaN if the prior is improper. The value is
        correct only if log prior and log likelihood are normalized, as with
        `fedmcmc.from_numpyro`; no check can establish this.
    proposal
        Distribution of the draws, a `Mixture` over raveled sampled positions.
    rounds
        One `Round` per proposal; the last one belongs to the draws.
    totals
        ``rounds`` of communication, ``bits_up`` and ``bits_down`` of all clients.
    verdict
        A `fedmcmc.diagnostics.Verdict` of kind ``"passed"``, ``"doubtful"`` or ``"failed"``.
    constrain_fn
        Function from an unconstrained position to the user's parameters; ``None`` for the identity.
    log_ratios
        Log of the unnormalized weights before smoothing, ``[num_draws]`` float64.
    """

    draws: ArrayTree
    log_weights: np.ndarray
    k_hat: float
    ess: float
    log_evidence: float
    log_evidence_sd: float
    proposal: Mixture
    rounds: tuple[Round, ...]
    totals: dict[str, float]
    verdict: Verdict
    constrain_fn: Fn | None = field(default=None)
    log_ratios: np.ndarray = field(default_factory=lambda: np.zeros(0))

    FUNCTIONS: ClassVar[dict[str, str]] = {"constrain_fn": "constrained"}

    def __repr__(self) -> str:
        """Return the verdict and the evidence."""
        return (
            f"Corrected: {self.num_draws:,} weighted draws, {self.verdict}\n"
            f"log evidence {self.log_evidence:.4g} (sd {self.log_evidence_sd:.2g}, if prior and "
            f"likelihood are normalized)"
        )

    @property
    def num_draws(self) -> int:
        """Number of weighted draws."""
        return len(self.log_weights)

    @property
    def ess_share(self) -> float:
        """Number of effective draws per draw."""
        return self.ess / self.num_draws

    @property
    def weights(self) -> np.ndarray:
        """Weights, ``[num_draws]``; they sum to one."""
        return np.exp(self.log_weights)

    @property
    def constrained(self) -> ArrayTree:
        """Draws in the user's parameters, leaves ``[num_draws, ...]``, with the same weights."""
        return self._mapped(self.constrain_fn)

    def mean(self, fn: Fn | None = None) -> ArrayTree:
        """Return the posterior mean of ``fn(position)``, by default of the user's parameters."""
        return jax.tree.map(self._mean, self._mapped(fn or self.constrain_fn))

    def sd(self, fn: Fn | None = None) -> ArrayTree:
        """Return the posterior sd of ``fn(position)``, by default of the user's parameters."""

        def sd_of(leaf: np.ndarray) -> np.ndarray:
            return np.sqrt(self._mean((leaf - self._mean(leaf)) ** 2))

        return jax.tree.map(sd_of, self._mapped(fn or self.constrain_fn))

    def quantile(self, p: ArrayLike, fn: Fn | None = None) -> ArrayTree:
        """Return weighted quantiles of ``fn(position)``, leaves ``[*p, ...]``, each at a draw."""
        levels = np.asarray(p, float)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"p must lie between 0 and 1, got {p!r}.")

        def quantiles_of(leaf: np.ndarray) -> np.ndarray:
            order = np.argsort(leaf, axis=0)
            cumulative = np.cumsum(self.weights[order], axis=0)
            rank = (cumulative[None] < levels.reshape(-1, *(1,) * leaf.ndim) - 1e-12).sum(1)
            rank = np.minimum(rank, len(leaf) - 1)
            values = np.take_along_axis(np.take_along_axis(leaf, order, 0), rank, 0)
            return values.reshape(*levels.shape, *leaf.shape[1:])

        return jax.tree.map(quantiles_of, self._mapped(fn or self.constrain_fn))

    def resample(
        self, rng_key: Array, num: int | None = None, *, replace: bool = True
    ) -> ArrayTree:
        """Return draws of equal weight, leaves ``[num, *event]``, in the order of `draws`.

        With replacement, systematic resampling copies a draw ``num`` times its weight, rounded up
        or down. Without replacement, the Gumbel trick uses each draw at most once, and the result
        follows the posterior only if `num` is small compared with `ess`.
        """
        index = self._resampled_index(rng_key, num, replace)
        return jax.tree.map(lambda leaf: leaf[index], self.draws)

    def to_datatree(self, *, constrained: bool = True, **kwargs: Any) -> Any:
        """Return `num_draws` resampled draws as an ArviZ ``DataTree`` with one chain.

        Variables have the same names as in `fedmcmc.Samples.to_datatree`.
        ``sample_stats["log_weight"]`` holds the log weight of each draw before resampling.

        Raises
        ------
        ImportError
            If arviz-base is not installed (the extra ``arviz``).
        """
        try:
            from arviz_base import from_dict
        except ImportError as error:
            raise missing_extra_error("to_datatree needs arviz-base", "arviz") from error
        index = self._resampled_index(jax.random.key(0), None, True)
        draws = self.constrained if constrained else self.draws
        posterior = variables(named_leaves(jax.tree.map(lambda leaf: leaf[index][None], draws)))
        weights = {"log_weight": self.log_weights[index][None]}
        return from_dict({"posterior": posterior, "sample_stats": weights}, **kwargs)

    def _resampled_index(self, rng_key: Array, num: int | None, replace: bool) -> np.ndarray:
        num = self.num_draws if num is None else num
        rng_key = as_key(rng_key)
        if replace:
            offset = float(draw_uniform(rng_key))
            levels = (np.arange(num) + offset) / num
            cumulative = np.cumsum(self.weights)
            index = np.searchsorted(cumulative / cumulative[-1], levels)
            return index.clip(max=self.num_draws - 1)
        if num > self.num_draws:
            raise ValueError(
                f"num must be at most {self.num_draws} without replacement, the number of draws; "
                f"got {num}."
            )
        gumbel = np.asarray(jax.random.gumbel(rng_key, (self.num_draws,)), np.float64)
        return np.sort(np.argsort(-(self.log_weights + gumbel))[:num])

    def _mapped(self, fn: Fn | None) -> ArrayTree:
        if fn is None:
            return self.draws
        if isinstance(fn, MissingFunction):
            return self.computed("constrained", fn)
        if fn is self.constrain_fn:  # `vmap_axes` compiles once for all results of a posterior
            return jax.tree.map(np.asarray, vmap_axes(as_functions(fn), self.draws, num_axes=1))
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(fn))(self.draws))

    def _mean(self, leaf: np.ndarray) -> np.ndarray:
        mean: np.ndarray = np.tensordot(self.weights, np.asarray(leaf, np.float64), axes=1)
        return mean


@compiled(optimize=False)
def draw_uniform(rng_key: Array) -> Array:
    return jax.random.uniform(rng_key, ())


def ravel_draws(draws: ArrayTree) -> np.ndarray:
    """Return draws with leaves ``[num_chains, num_draws, *event]`` as ``[num, d]`` float64."""
    return np.concatenate(
        [
            np.asarray(leaf, np.float64).reshape(leaf.shape[0] * leaf.shape[1], -1)
            for leaf in jax.tree.leaves(draws)
        ],
        axis=1,
    )
