"""One setting of FA-HMC for every step size and chain at once: one compiled program."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import fedmcmc
from experiments.qlsd.federations import Rows
from fedmcmc import metrics, rounds

__all__ = ["SCORES", "Curves", "Later", "Plan", "sweep"]

SCORES = ("accuracy", "brier", "ece", "nnll")


class Plan(NamedTuple):
    """What a program is compiled for.

    `num_integration_steps` is the paper's ``L``, `num_local_steps` its ``T``; a sample is kept
    after every `thinning` rounds.
    """

    num_integration_steps: int
    num_local_steps: int
    num_rounds: int
    thinning: int
    batch_size: int
    gradients: Literal["fresh", "reuse"]
    num_bins: int

    @property
    def num_samples(self) -> int:
        """Samples of a chain."""
        return self.num_rounds // self.thinning

    @property
    def num_gradients(self) -> int:
        """Minibatch gradients that a client computes in all rounds."""
        steps = self.num_integration_steps
        calls = steps if self.gradients == "reuse" else 2 * steps - 1
        return calls * self.num_local_steps * self.num_samples * self.thinning


class Later(NamedTuple):
    """Sums over the later samples so far.

    They begin after sample ``m / 2``, rounded down, where ``m`` is the largest power of two up to
    the number of samples so far: between a quarter and a half of two or more samples are left out,
    half of them where their number is a power of two.

    Attributes
    ----------
    block
        The sum from there to sample ``m``.
    since
        The sum after sample ``m``.
    num
        How many samples both have.
    """

    block: Array
    since: Array
    num: Array

    @classmethod
    def of_none(cls, like: Any) -> "Later":
        """Return sums of no samples with the shape of `like`."""
        zero = jnp.zeros(like.shape, like.dtype)
        return cls(zero, zero, jnp.zeros((), int))

    def add(self, value: Array, index: Array) -> "Later":
        """Return the sums after sample number `index`, counted from zero."""
        since, num = self.since + value, self.num + 1
        full = ((index + 1) & index) == 0  # a power of two
        half = (index + 1) // 2
        return Later(
            jnp.where(full, since, self.block),
            jnp.where(full, 0, since),
            jnp.where(full, index + 1 - half, num),
        )

    @property
    def mean(self) -> Array:
        """The average of the later samples."""
        return (self.block + self.since) / self.num


class Curves(NamedTuple):
    """What became of every step size and chain.

    Attributes
    ----------
    scores
        ``{name: [num_step_sizes, num_chains, num_samples]}``: of the average prediction of the
        samples so far, not a number where the chain is not finite.
    later
        The same, of the later samples so far (`Later`).
    finite
        ``[num_step_sizes, num_chains, num_samples]``.
    position
        The last ones, leaves ``[num_step_sizes, num_chains, ...]``.
    """

    scores: dict[str, Array]
    later: dict[str, Array]
    finite: Array
    position: Any


@partial(jax.jit, static_argnames="plan")
def sweep(
    plan: Plan,
    posterior: fedmcmc.Posterior,
    predict_fn: Callable[..., Array],
    data: fedmcmc.FederatedData,
    test: Rows,
    keys: Array,
    starts: Any,
    step_sizes: Array,
) -> Curves:
    """Run FA-HMC, all clients with the same momenta, and score its predictions as they go.

    Parameters
    ----------
    plan
        Static.
    posterior, predict_fn
        The model and ``(position, (features,)) -> [num, num_classes]``.
    data, test
        Rows to learn from and held out.
    keys, starts
        One a chain, ``[num_chains]`` and leaves ``[num_chains, ...]``. Chains of all step sizes
        have the same, so that these differ by nothing else; and they are those of
        `fedmcmc.sample` if ``keys[c] = fold_in(rng_key, c)``.
    step_sizes
        ``[num_step_sizes]``, leapfrog steps.
    """
    ahead = rounds.PREPARED_BYTES // keys.shape[0]
    run = partial(_run, plan, posterior, predict_fn, data, test, ahead)
    # Step sizes inside: what is random is then drawn once for all of them.
    over_steps = jax.vmap(run, in_axes=(None, None, 0))
    return jax.vmap(over_steps, in_axes=(0, 0, None), out_axes=1)(keys, starts, step_sizes)


def _run(
    plan: Plan,
    posterior: fedmcmc.Posterior,
    predict_fn: Callable[..., Array],
    data: fedmcmc.FederatedData,
    test: Rows,
    ahead_bytes: int,
    key: Array,
    start: Any,
    step_size: Array,
) -> Curves:
    kernel = fedmcmc.fa_hmc(
        posterior,
        step_size=step_size,
        num_integration_steps=plan.num_integration_steps,
        num_local_steps=plan.num_local_steps,
        rho=1.0,
        batch_size=plan.batch_size,
        gradients=plan.gradients,
    )
    between = partial(
        rounds.run_rounds, num_rounds=plan.thinning, thinning=plan.thinning, ahead_bytes=ahead_bytes
    )

    def sample(carry: tuple[Any, Array, Later], index: Array) -> tuple[Any, Any]:
        state, total, later = carry
        state, _ = between(kernel, data, key, state)
        position = state.broadcast.position
        probabilities = predict_fn(position, (test.features,))
        total, later = total + probabilities, later.add(probabilities, index)
        leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(position)]
        finite = jnp.all(jnp.stack(leaves))
        found = [_scores(p, test.label, plan.num_bins) for p in (total / (index + 1), later.mean)]
        found = jax.tree.map(lambda score: jnp.where(finite, score, jnp.nan), found)
        return (state, total, later), (*found, finite)

    shape = jax.eval_shape(predict_fn, start, (test.features,))
    state = kernel.init(fedmcmc.random.init_key(key), start, data)
    begin = state, jnp.zeros(shape.shape, shape.dtype), Later.of_none(shape)
    (state, *_), found = jax.lax.scan(sample, begin, jnp.arange(plan.num_samples))
    return Curves(*found, state.broadcast.position)


def _scores(probabilities: Array, labels: Array, num_bins: int) -> dict[str, Array]:
    found = (
        metrics.accuracy(probabilities, labels),
        metrics.brier_score(probabilities, labels),
        metrics.expected_calibration_error(probabilities, labels, num_bins),
        metrics.negative_log_likelihood(probabilities, labels),
    )
    return dict(zip(SCORES, found, strict=True))
