"""Liang et al. (2024), 5.3 to 5.5: FA-HMC and FA-LD on images, with predictions scored as they run.

Draws of networks are too large to keep. Predictions are therefore averaged while chains run, in one
compiled program for all step sizes and chains of a setting.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc
from experiments.claims import Number
from experiments.loaders import Loaded
from experiments.models import num_classes
from experiments.special import fa_hmc_gains
from experiments.special.fa_hmc_gains import SCORES, Score, better
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics, rounds
from fedmcmc.pytrees import trees

__all__ = ["Later", "rows", "sweep"]

POWER_STEPS = 20  # The estimate of the largest curvature is then within a few percent.


def rows(
    data: Loaded,
    model: Callable[..., fedmcmc.Posterior],
    kernel: Callable[..., fedmcmc.FederatedKernel],
    leapfrog_steps: Sequence[int],
    at_local_steps: int,
    local_steps: Sequence[int],
    at_leapfrog_steps: int,
    step_sizes: Sequence[float],
    num_rounds: int,
    thinning: int,
    num_chains: int,
    num_bins: int,
    seed: int,
) -> list[Row]:
    """Return scores at the best step sizes, gains of longer trajectories, and curves over rounds.

    Parameters
    ----------
    data, model
        Images, and the function of them that returns a classification.
    kernel
        `fedmcmc.fa_hmc` without its steps, with `gradients`.
    leapfrog_steps, at_local_steps
        Values of ``L``, from 1, which are compared at one ``T``.
    local_steps, at_leapfrog_steps
        Values of ``T``, from 1, which are compared at one ``L``.
    step_sizes
        Ascending multiples of ``2 / sqrt(lambda)``, above which leapfrog steps are unstable:
        ``lambda`` is the largest curvature of any client's weighted loss at the first chain's
        start. Larger steps can be stable if the curvature falls on the way from there.
    """
    if leapfrog_steps[0] != 1 or local_steps[0] != 1 or list(step_sizes) != sorted(step_sizes):
        raise ValueError("leapfrog_steps and local_steps must begin with 1, step_sizes increase.")
    federation, test = data
    posterior = model(federation)
    keys = jax.random.split(jax.random.split(jax.random.key(seed))[1], 3)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    start_keys, chain_keys = (fold(keys[i], jnp.arange(num_chains)) for i in (0, 2))
    starts = jax.vmap(posterior.init_fn)(start_keys)
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    curvature = fedmcmc.estimate_smoothness(
        keys[1], posterior, federation, start, num_steps=POWER_STEPS
    ).largest
    limit = 2 / math.sqrt(curvature)
    steps = jnp.asarray(step_sizes, jnp.result_type(float)) * limit
    classes = jnp.arange(num_classes(federation))
    sizes = dict(num_samples=num_rounds // thinning, thinning=thinning, num_bins=num_bins)
    sweeps = {
        "L": {num: (num, at_local_steps) for num in leapfrog_steps},
        "T": {num: (at_leapfrog_steps, num) for num in local_steps},
    }
    numbers = {"step_limit": limit, "num_rows": federation.num_rows, "num_test": len(test["label"])}
    tidy_rows = from_numbers("data", {}, {**numbers, "num_parameters": trees.num_elements(start)})
    results = {}
    for place in dict.fromkeys(place for places in sweeps.values() for place in places.values()):
        settings = dict(zip(fa_hmc_gains.NAMES.values(), place, strict=True))
        arguments = posterior, federation, test, classes, chain_keys, starts, steps
        scores, later, finite = sweep(partial(kernel, **settings), *arguments, **sizes)
        results[place] = {
            name: _best(name, scores, step_sizes)._replace(later=_best(name, later, step_sizes))
            for name in SCORES
        }
        method = "FA-LD" if place[0] == 1 else "FA-HMC"
        calls = place[0] if kernel.keywords["gradients"] == "reuse" else 2 * place[0] - 1
        numbers = {
            "num_gradients": calls * place[1] * (num_rounds // thinning) * thinning,
            "num_diverged": np.sum(~np.asarray(finite)[:, :, -1].all(axis=1)),
        }
        tidy_rows += from_numbers(method, settings, numbers)
        for name, score in results[place].items():
            tidy_rows += _rows(method, settings, name, score, thinning)
            later_settings = {**settings, "samples": "later"}
            tidy_rows += _rows(method, later_settings, name, score.later, thinning)
    tidy_rows += fa_hmc_gains.rows(sweeps, results)
    later = {place: {n: s.later for n, s in scores.items()} for place, scores in results.items()}
    return tidy_rows + fa_hmc_gains.rows(sweeps, later, samples="later")


def _rows(
    method: str, settings: dict[str, Any], name: str, score: Score, thinning: int
) -> list[Row]:
    """Return rows of a score, its step size, and its curve over rounds."""
    averages = [Number(*pair) for pair in zip(score.curve, score.errors, strict=True)]
    numbers = {name: averages[-1], f"{name}_step_size": score.step_size}
    numbers[f"{name}_step_at_end"] = score.at_end
    if name != "accuracy":
        numbers[f"accuracy_where_{name}_is_best"] = score.accuracy
    tidy_rows = from_numbers(method, settings, numbers)
    for i, average in enumerate(averages):
        curve = {f"{name}_by_round": average}
        tidy_rows += from_numbers(method, settings, curve, x=float((i + 1) * thinning))
    return tidy_rows


def _best(name: str, scores: Mapping[str, Array], multiples: Sequence[float]) -> Score:
    """Return a score at the step size whose last mean over chains is best, NaN if all diverged."""
    chains = np.asarray(scores[name], np.float64)
    final = better(name, chains[:, :, -1].mean(axis=1))
    best = int(np.argmax(np.where(np.isfinite(final), final, -np.inf)))
    accuracy = np.asarray(scores["accuracy"], np.float64)[best, :, -1].mean()
    at_end = len(multiples) > 1 and best in (0, len(multiples) - 1)
    step_size = multiples[best] if np.isfinite(final[best]) else math.nan
    return Score(step_size, at_end, float(accuracy), chains[best])


class Later(NamedTuple):
    """Sums over the later samples so far.

    They begin after sample ``m / 2``, rounded down, where ``m`` is the largest power of two up to
    the number of samples so far. `block` is the sum from there to sample ``m``, `since` the sum
    after it, and `num` the number of samples in both.
    """

    block: Array
    since: Array
    num: Array

    def add(self, value: Array, index: Array) -> "Later":
        """Return the sums after sample number `index`, counted from zero."""
        since, num = self.since + value, self.num + 1
        full = ((index + 1) & index) == 0  # a power of two
        block, since = jnp.where(full, since, self.block), jnp.where(full, 0, since)
        return Later(block, since, jnp.where(full, index + 1 - (index + 1) // 2, num))

    @property
    def mean(self) -> Array:
        """Average of the later samples."""
        return (self.block + self.since) / self.num


@partial(jax.jit, static_argnames=("make_kernel", "num_samples", "thinning", "num_bins"))
def sweep(
    make_kernel: Callable[..., fedmcmc.FederatedKernel],
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    test: Any,
    classes: Array,
    keys: Array,
    starts: Any,
    step_sizes: Array,
    *,
    num_samples: int,
    thinning: int,
    num_bins: int,
) -> tuple[dict[str, Array], dict[str, Array], Array]:
    """Run a kernel at all step sizes and score its predictions as it runs.

    Chains of all step sizes have the same `keys` and `starts`, one per chain, so that they differ
    by nothing else. They are the chains of `fedmcmc.sample` if ``keys[c] = fold_in(rng_key, c)``.

    Returns
    -------
    tuple
        Scores by name of the average prediction of the samples so far, of the later ones so far
        (`Later`), and whether positions are finite: ``[num_step_sizes, num_chains, num_samples]``.
        Scores are NaN where positions are not finite.
    """
    ahead = rounds.PREPARED_BYTES // keys.shape[0]

    def run(key: Array, start: Any, step_size: Array) -> Any:
        kernel = make_kernel(posterior, step_size=step_size)

        def sample(carry: tuple[Any, Array, Later], index: Array) -> tuple[Any, Any]:
            state, total, later = carry
            state, _ = rounds.run_rounds(
                kernel, data, key, state, thinning, thinning=thinning, ahead_bytes=ahead
            )
            position = state.broadcast.position
            probabilities = _predict(posterior, position, test, classes)
            total, later = total + probabilities, later.add(probabilities, index)
            leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(position)]
            finite = jnp.all(jnp.stack(leaves))
            scores = [
                _scores(p, test["label"], num_bins) for p in (total / (index + 1), later.mean)
            ]
            scores = jax.tree.map(lambda score: jnp.where(finite, score, jnp.nan), scores)
            return (state, total, later), (*scores, finite)

        zero = jnp.zeros((len(test["label"]), len(classes)))
        state = kernel.init(fedmcmc.random.init_key(key), start, data)
        begin = state, zero, Later(zero, zero, jnp.zeros((), int))
        return jax.lax.scan(sample, begin, jnp.arange(num_samples))[1]

    # Step sizes inside: random numbers are then drawn once for all of them.
    over_steps = jax.vmap(run, in_axes=(None, None, 0))
    return jax.vmap(over_steps, in_axes=(0, 0, None), out_axes=1)(keys, starts, step_sizes)


def _predict(posterior: fedmcmc.Posterior, position: Any, rows: Any, classes: Array) -> Array:
    """Return probabilities of the classes, ``[num_rows, num_classes]``."""

    def term(label: Array) -> Array:
        labels = jnp.full_like(rows["label"], label)
        return posterior.loglikelihood_fn(position, {**rows, "label": labels})

    return jnp.exp(jax.vmap(term, out_axes=1)(classes))


def _scores(probabilities: Array, labels: Array, num_bins: int) -> dict[str, Array]:
    ece = partial(metrics.expected_calibration_error, num_bins=num_bins)
    functions = (metrics.accuracy, metrics.brier_score, ece, metrics.negative_log_likelihood)
    return {n: f(probabilities, labels) for n, f in zip(SCORES, functions, strict=True)}
