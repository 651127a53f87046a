"""Leave-one-out cross-validation of rows, as sums.

Source: Vehtari, Gelman and Gabry (2017); Vehtari et al. (2024) for the smoothed weights.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from jax.tree_util import register_dataclass

from fedmcmc._types import ArrayTree, Client, Exact, Federation, Posterior
from fedmcmc.criticism._draws import equal_draws, one_of
from fedmcmc.criticism._pareto import smoothed_tail, tail_length
from fedmcmc.criticism._rows import exact_sum, over_rows
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.exact import threshold
from fedmcmc.gradients import row_terms
from fedmcmc.kernels import Question, check_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import as_consortium


class Left(NamedTuple):
    """A client's sums over its rows, of ``m`` models; three parts each, see `exact_sum`.

    Attributes
    ----------
    elpd, squared, p_loo
        ``[m, 3]``: of the log predictive densities, their squares, and what leaving the row out
        costs.
    differences
        ``[m, m, 3]``, of the squared differences of two models' densities, row by row.
    bad, very_bad
        ``[m]``, rows whose k-hat is above the threshold, and above one.
    judged, others, not_finite
        ``[]``, rows in the sums, rows of a client that has too few to send any, and rows whose log
        likelihood is not finite at some draw.
    """

    elpd: Any
    squared: Any
    p_loo: Any
    differences: Any
    bad: Any
    very_bad: Any
    judged: Any
    others: Any
    not_finite: Any


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class LeaveOneOut(Question):
    """How well models predict each row from all others; what is asked about are their draws.

    The content is a tuple of positions, one per model, leaves ``[num_draws, *event]``.
    """

    others: tuple[Posterior, ...]
    least: Any  # rows of a client that may send sums
    worst: Array  # [m], k-hats above are bad
    tails: tuple[int, ...] = field(metadata={"static": True})  # lengths, one per model

    @property
    def models(self) -> tuple[Posterior, ...]:
        """All models."""
        return (self.posterior, *self.others)

    def answer(self, content: ArrayTree, client: Client) -> Exact:
        def of_rows(rows: ArrayTree, mask: Array, number: Array) -> Left:
            found = [
                _left_out(model, draws, rows, tail)
                for model, draws, tail in zip(self.models, content, self.tails, strict=True)
            ]
            elpd, p_loo, khat, finite = (jnp.stack(x) for x in zip(*found, strict=True))
            judged = mask & finite.all(0)
            differences = elpd[:, None] - elpd[None]

            def count(condition: Array) -> Array:
                return jnp.sum(condition & mask, axis=-1, dtype=elpd.dtype)

            return Left(
                exact_sum(elpd, judged),
                exact_sum(elpd**2, judged),
                exact_sum(p_loo, judged),
                exact_sum(differences**2, judged),
                count(judged & (khat > self.worst[:, None])),
                count(judged & (khat > 1)),
                count(judged),
                jnp.zeros((), elpd.dtype),
                count(~finite.all(0)),
            )

        num = sum(jax.tree.leaves(draws)[0].shape[0] for draws in content)
        sums = over_rows(of_rows, client, num)
        enough = client.size >= self.least
        nothing = trees.zeros_like(sums)._replace(others=client.size.astype(sums.judged.dtype))
        return Exact(trees.select(enough, sums, nothing))

    def answer_like(self, content: ArrayTree) -> Exact:
        num, dtype = len(self.tails), jnp.result_type(float)
        shapes = [(num, 3)] * 3 + [(num, num, 3), (num,), (num,), (), (), ()]
        return Exact(Left(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        for model, draws in zip(self.models, content, strict=True):
            check_model(model, one_of(draws), federation)


def _left_out(
    posterior: Posterior, draws: ArrayTree, rows: ArrayTree, num_tail: int
) -> tuple[Array, Array, Array, Array]:
    """Return log predictive density, its optimism, k-hat, and whether all is finite, ``[num]``."""
    terms = jax.vmap(lambda draw: row_terms(posterior.loglikelihood_fn, draw, rows))(draws).T

    def of_row(log_density: Array) -> tuple[Array, Array, Array]:
        num = log_density.shape[0]
        largest, _ = jax.lax.top_k(-log_density, num_tail + 1)
        tail, khat = smoothed_tail(largest)
        before = largest[:-1] - largest[0]
        # Below the tail, weight times density is one, up to a factor that weights share.
        weights = jnp.sum(jnp.exp(-log_density - largest[0])) + jnp.sum(
            jnp.exp(tail) - jnp.exp(before)
        )
        products = num - num_tail + jnp.sum(jnp.exp(tail - before))
        elpd = jnp.log(products) - jnp.log(weights) - largest[0]
        return elpd, logsumexp(log_density) - np.log(num) - elpd, khat

    finite = jnp.isfinite(terms).all(1)
    return *jax.vmap(of_row)(jnp.where(finite[:, None], terms, 0)), finite


@dataclass(frozen=True)
class Loo:
    """How well a model predicts each row from all others.

    Attributes
    ----------
    elpd, se
        Sum of the rows' log predictive densities, and its standard error,
        ``sqrt(num_rows * variance)``.
    p_loo
        Effective number of parameters: what leaving each row out costs in nats.
    num_rows
        Rows in the sums.
    num_not_judged
        Rows of clients with fewer rows than `minimum_rows`, which are in no sum.
    num_bad, num_very_bad
        Rows whose k-hat is above `good_k`, and above one: their densities cannot be trusted.
    good_k
        ``min(1 - 1 / log10(num_draws), 0.7)``.
    num_draws
        Draws used.
    totals
        ``rounds``, ``bits_up`` and ``bits_down`` of the exchange.
    """

    elpd: float
    se: float
    p_loo: float
    num_rows: int
    num_not_judged: int
    num_bad: int
    num_very_bad: int
    good_k: float
    num_draws: int
    totals: dict[str, float]

    @property
    def verdict(self) -> str:
        """``"good"``, ``"doubtful"`` (a k-hat above `good_k`) or ``"failed"`` (one above one)."""
        return "failed" if self.num_very_bad else "doubtful" if self.num_bad else "good"

    def __repr__(self) -> str:
        """Return the figures, and how many rows they can be trusted for."""
        others = self.num_not_judged
        return (
            f"elpd_loo {self.elpd:.1f} (se {self.se:.1f}), p_loo {self.p_loo:.1f}; "
            f"{self.num_rows:,} rows, {self.num_draws:,} draws\n"
            f"{self.verdict}: {_told(self.num_rows, self.num_bad, self.num_very_bad, self.good_k)}"
            + f"\n{others:,} rows of clients with too few rows are not judged"
            * bool(others)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the verdict."""
        return {**self.__dict__, "verdict": self.verdict}


def loo(
    posterior: Posterior,
    data: Any,
    draws: Any,
    *,
    num_draws: int = 1000,
    minimum_rows: int = 10,
    efficiency: float | None = None,
    secure_sum: bool = False,
    rng_key: Array | None = None,
) -> Loo:
    """Estimate how well the model predicts each row from all others, in one exchange of sums.

    Every client weights the draws for each of its rows as if the row had been left out, smooths
    the weights, and sends sums over its rows. Rows and their densities stay where they are.

    Parameters
    ----------
    posterior
        The model, normalized if densities are to be compared; in its own coordinates.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    draws
        Of the posterior: `fedmcmc.Corrected` (resampled), `fedmcmc.Samples` (of a sampler without
        bias; draws at even distances), or a pytree of positions, leaves ``[num, *event]``, of equal
        weight.
    num_draws
        How many draws are sent at most, at least 100.
    minimum_rows
        A client with fewer rows sends no sum, as that of one row is the row's own density; its rows
        are counted.
    efficiency
        Effective draws per draw, at most one: the fewer, the longer the tail of the weights. By
        default that of `draws`: of `Samples` the mean over coordinates, one of a pytree.
    secure_sum
        Whether sums are added where nobody sees a single client's: `minimum_rows` then does not
        hold.
    rng_key
        For resampling weighted draws, by default ``jax.random.key(0)``.

    Returns
    -------
    Loo
        Equal to ArviZ's ``loo`` on the pooled rows, up to rounding.

    Raises
    ------
    ValueError
        If draws are too few, or no client has enough rows, or a log likelihood is not finite.

    Warns
    -----
    SamplingWarning
        If the k-hat of some row is above ``min(1 - 1 / log10(num_draws), 0.7)``: such rows are
        counted, not mended.

    Notes
    -----
    With ``L[s, j] = log p(y_j | theta_s)`` and weights ``w_s`` smoothed from ``exp(-L[s, j])``, a
    row's density is ``e_j = log sum_s w_s exp(L[s, j])``. Clients send the number of rows, the sums
    of ``e_j``, of its square and of ``log mean_s exp(L[s, j]) - e_j``, and how many k-hats are
    above the threshold and above one.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2 - 0.919, lambda theta, x: -0.5 * (x - theta) ** 2 - 0.919
    ... )
    >>> x = jax.random.normal(jax.random.key(0), (60,))
    >>> data = fedmcmc.FederatedData.from_clients([x[:20], x[20:]])
    >>> exact = x.sum() / 61 + jax.random.normal(jax.random.key(1), (4000,)) / jnp.sqrt(61)
    >>> print(loo(posterior, data, exact))
    elpd_loo -83.7 (se 4.8), p_loo 0.9; 60 rows, 1,000 draws
    good: k-hat of all rows below 0.67
    """
    chosen = equal_draws(draws, posterior, num_draws, rng_key)
    efficiencies = [chosen.efficiency if efficiency is None else efficiency]
    sums, totals = ask((posterior,), data, (chosen,), efficiencies, minimum_rows, secure_sum)
    found = result_of(sums, 0, chosen.num, totals)
    warn_of_rows(found, "loo")
    return found


def ask(
    models: tuple[Posterior, ...],
    data: Any,
    draws: tuple[Any, ...],
    efficiencies: list[float],
    minimum_rows: int,
    secure_sum: bool,
) -> tuple[Left, dict[str, float]]:
    """Return the sums of all clients over their rows, and what the exchange cost."""
    for efficiency in efficiencies:
        if not 0 < efficiency <= 1:
            raise ValueError(f"efficiency must lie in (0, 1], got {efficiency!r}.")
    if minimum_rows < 1:
        raise ValueError(f"minimum_rows must be at least 1, got {minimum_rows!r}.")
    consortium = as_consortium(data)
    tails = tuple(tail_length(x.num, e) for x, e in zip(draws, efficiencies, strict=True))
    worst = jnp.array([threshold(x.num) for x in draws])
    least = 1 if secure_sum else minimum_rows
    question = LeaveOneOut(models[0], models[1:], least, worst, tails)
    asked = consortium.ask(question, tuple(x.positions for x in draws))
    sums: Left = asked.value.value
    if sums.not_finite > 0:
        raise ValueError(
            f"The log likelihood is not finite for {int(sums.not_finite)} rows at some of the "
            "draws: the model overflows there, or gives these rows no probability."
        )
    if sums.judged == 0:
        raise ValueError(
            f"No client has at least {minimum_rows} rows, so none sends a sum. Lower minimum_rows, "
            "or use a secure sum."
        )
    totals = {"rounds": asked.rounds, "bits_up": asked.bits_up, "bits_down": asked.bits_down}
    return sums, totals


def result_of(sums: Left, model: int, num_draws: int, totals: dict[str, float]) -> Loo:
    """Return what the sums say of one of the models."""
    elpd, squared, p_loo = (
        float(np.asarray(x, np.float64)[model].sum()) for x in (sums.elpd, sums.squared, sums.p_loo)
    )
    num = int(sums.judged)
    return Loo(
        elpd,
        float(np.sqrt(max(squared - elpd**2 / num, 0.0))),
        p_loo,
        num,
        int(sums.others),
        int(sums.bad[model]),
        int(sums.very_bad[model]),
        threshold(num_draws),
        num_draws,
        totals,
    )


def _told(num: int, bad: int, very_bad: int, good: float) -> str:
    if not bad:
        return f"k-hat of all rows below {good:.2f}"
    return f"k-hat of {bad:,} of {num:,} rows above {good:.2f}, of {very_bad:,} above 1"


def warn_of_rows(found: Loo, name: str) -> None:
    """Warn where the densities of some rows cannot be trusted."""
    if found.num_bad:
        told = _told(found.num_rows, found.num_bad, found.num_very_bad, found.good_k)
        warnings.warn(
            f"{name}: {told}: without such a row the posterior is another, and its density here "
            "is unreliable.",
            SamplingWarning,
            stacklevel=3,
        )
