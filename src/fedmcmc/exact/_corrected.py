"""What a correction by importance weights returns: weighted draws, evidence, a verdict."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array

from fedmcmc._checks import not_installed
from fedmcmc._types import Absent, ArrayTree, WithFunctions, as_functions, mapped
from fedmcmc.diagnostics import Verdict
from fedmcmc.gaussian import Mixture
from fedmcmc.pytrees import named_leaves, variables
from fedmcmc.random import as_key

Fn = Callable[[ArrayTree], ArrayTree]


class Round(NamedTuple):
    """One round of a correction: a proposal, its draws, what their weights say.

    `khat` and `ess` are those of the round's own draws; `exchanges` counts rounds of
    communication, of which a large number of draws takes several.
    """

    khat: float
    ess: float
    exchanges: int
    bits_up: float
    bits_down: float


@dataclass(frozen=True, repr=False)
class Corrected(WithFunctions):
    """Weighted draws of the posterior, and whether they can be trusted.

    Attributes
    ----------
    draws
        Pytree of NumPy arrays, leaves ``[num_draws, *event]``, of the last round alone, in the
        user's coordinates, unconstrained.
    log_weights
        ``[num_draws]`` float64, smoothed; their exponentials sum to one.
    khat
        Shape of the tail of the weights.
    ess
        Effective draws, one over the sum of squared weights.
    log_evidence, log_evidence_sd
        Log of ``p(data)`` with the standard error of its estimate. Right only if log prior and log
        likelihood are normalized, as those of `fedmcmc.from_numpyro` are; nothing can check it.
        NaN if the model's prior is improper.
    proposal
        What the draws are of, a `Mixture` over raveled sampled positions.
    rounds
        One `Round` per proposal, the last being that of the draws.
    totals
        ``rounds`` of communication, ``bits_up`` and ``bits_down`` of all clients.
    verdict
        A `fedmcmc.diagnostics.Verdict` of kind ``"passed"``, ``"doubtful"`` or ``"failed"``.
    constrain_fn
        Unconstrained position to the user's parameters, ``None`` for the identity.
    """

    draws: ArrayTree
    log_weights: np.ndarray
    khat: float
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
        """Return verdict, figures and cost."""
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
        """Effective draws per draw."""
        return self.ess / self.num_draws

    @property
    def weights(self) -> np.ndarray:
        """The weights, ``[num_draws]``; they sum to one."""
        return np.exp(self.log_weights)

    @property
    def constrained(self) -> ArrayTree:
        """The draws in the user's parameters, leaves ``[num_draws, ...]``, weighted as `draws`."""
        return self._mapped(self.constrain_fn)

    def mean(self, fn: Fn | None = None) -> ArrayTree:
        """Return the posterior mean of ``fn(position)``, by default of the user's parameters."""
        return jax.tree.map(self._mean, self._mapped(fn or self.constrain_fn))

    def sd(self, fn: Fn | None = None) -> ArrayTree:
        """Return the posterior sd of ``fn(position)``, by default of the user's parameters."""

        def of(leaf: np.ndarray) -> np.ndarray:
            return np.sqrt(self._mean((leaf - self._mean(leaf)) ** 2))

        return jax.tree.map(of, self._mapped(fn or self.constrain_fn))

    def quantile(self, p: Any, fn: Fn | None = None) -> ArrayTree:
        """Return quantiles of ``fn(position)``, leaves ``[*p, ...]``: weighted, none in between."""
        levels = np.asarray(p, float)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"p must lie between 0 and 1, got {p!r}.")

        def of(leaf: np.ndarray) -> np.ndarray:
            order = np.argsort(leaf, axis=0)
            above = np.cumsum(self.weights[order], axis=0)
            place = (above[None] < levels.reshape(-1, *(1,) * leaf.ndim) - 1e-12).sum(1)
            place = np.minimum(place, len(leaf) - 1)
            found = np.take_along_axis(np.take_along_axis(leaf, order, 0), place, 0)
            return found.reshape(*levels.shape, *leaf.shape[1:])

        return jax.tree.map(of, self._mapped(fn or self.constrain_fn))

    def resample(
        self, rng_key: Array, num: int | None = None, *, replace: bool = True
    ) -> ArrayTree:
        """Return draws of equal weight, leaves ``[num, *event]``, in the order of `draws`.

        With replacement by systematic resampling, which copies a draw ``num`` times its weight,
        rounded up or down; without, each at most once, by the Gumbel trick: then the draws are
        those of the posterior only where `num` is small beside `ess`.
        """
        index = self._chosen(rng_key, num, replace)
        return jax.tree.map(lambda leaf: leaf[index], self.draws)

    def to_datatree(self, *, constrained: bool = True, **kwargs: Any) -> Any:
        """Return resampled draws as an ArviZ ``DataTree``, as many as there are draws, one chain.

        Names of variables are those of `fedmcmc.Samples.to_datatree`.
        ``sample_stats["log_weight"]`` holds the weight of each before resampling.

        Raises
        ------
        ImportError
            If arviz-base is not installed (the extra ``arviz``).
        """
        try:
            from arviz_base import from_dict
        except ImportError as error:
            raise not_installed("to_datatree needs arviz-base", "arviz") from error
        index = self._chosen(jax.random.key(0), None, True)
        draws = self.constrained if constrained else self.draws
        posterior = variables(named_leaves(jax.tree.map(lambda leaf: leaf[index][None], draws)))
        weights = {"log_weight": self.log_weights[index][None]}
        return from_dict({"posterior": posterior, "sample_stats": weights}, **kwargs)

    def _chosen(self, rng_key: Array, num: int | None, replace: bool) -> np.ndarray:
        num = self.num_draws if num is None else num
        rng_key = as_key(rng_key)
        if replace:
            first = float(jax.random.uniform(rng_key, ()))
            places = (np.arange(num) + first) / num
            ends = np.cumsum(self.weights)
            return np.searchsorted(ends / ends[-1], places).clip(max=self.num_draws - 1)
        if num > self.num_draws:
            raise ValueError(f"Without replacement there are {self.num_draws} draws, not {num}.")
        gumbel = np.asarray(jax.random.gumbel(rng_key, (self.num_draws,)), np.float64)
        return np.sort(np.argsort(-(self.log_weights + gumbel))[:num])

    def _mapped(self, fn: Fn | None) -> ArrayTree:
        if fn is None:
            return self.draws
        if isinstance(fn, Absent):
            return self.computed("constrained", fn)
        if fn is self.constrain_fn:  # compiled once for all results of a posterior
            return jax.tree.map(np.asarray, mapped(as_functions(fn), self.draws, num_axes=1))
        return jax.tree.map(np.asarray, jax.jit(jax.vmap(fn))(self.draws))

    def _mean(self, leaf: np.ndarray) -> np.ndarray:
        mean: np.ndarray = np.tensordot(self.weights, np.asarray(leaf, np.float64), axes=1)
        return mean
