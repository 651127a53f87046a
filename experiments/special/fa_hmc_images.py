"""Liang et al. (2024), 5.3 to 5.5: scores of the predictions of FA-HMC and FA-LD on images.

Draws of networks are too large to keep. One compiled program for all step sizes and chains of a
setting averages predictions instead.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy import stats

import fedmcmc
from experiments.claims import Number
from experiments.confidence import class_probabilities
from experiments.loaders import Loaded
from experiments.models import num_classes
from experiments.restarts import once
from experiments.tidy import Row, from_numbers
from fedmcmc import metrics, rounds

SIGNS = {"accuracy": 1, "brier": -1, "ece": -1, "nll": -1}  # at which larger scores are better
NAMES = {"L": "num_integration_steps", "T": "num_local_steps"}
Place = tuple[int, int]  # L and T
LEVEL = 0.05  # of Welch's test


class Score(NamedTuple):
    """Score of a setting, with the sign at which larger is better, at its best step size."""

    step_size: float  # a multiple of the largest stable step
    at_end: bool  # whether it is an end of the grid
    chains: np.ndarray  # [num_chains, num_samples], of the average prediction so far
    later: Any = None  # the same of the later samples alone

    @property
    def means(self) -> list[Number]:
        """Means over chains after every sample; errors are NaN for one chain."""
        errors = self.chains.std(axis=0) / (math.sqrt(len(self.chains) - 1) or math.nan)
        return [Number(*pair) for pair in zip(self.chains.mean(axis=0), errors, strict=True)]


class Gain(NamedTuple):
    """Share of another score by which a score is better; NaN if it cannot be judged."""

    rank: float  # 2: significantly better; 1: only in all samples; 0: no difference; -1, -2: worse
    share: Number  # twice its error is half of the interval of Welch's test
    at_half: float | None = None  # share after half of the samples, if significant and now smaller


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

    Values of ``L``, `leapfrog_steps`, are compared at one ``T``, and values of ``T``,
    `local_steps`, at one ``L``. Ascending `step_sizes` are multiples of ``2 / sqrt(lambda)``, above
    which leapfrog steps are unstable: ``lambda`` is the largest curvature of any client's weighted
    loss at the first chain's start.
    """
    federation, test = data
    posterior = model(federation)
    keys = jax.random.split(jax.random.split(jax.random.key(seed))[1], 3)
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    start_keys, chain_keys = (fold(keys[i], jnp.arange(num_chains)) for i in (0, 2))
    starts = jax.vmap(posterior.init_fn)(start_keys)
    start = jax.tree.map(lambda leaf: leaf[0], starts)
    # Twenty steps estimate the largest curvature within a few percent.
    smoothness = fedmcmc.estimate_smoothness(keys[1], posterior, federation, start, num_steps=20)
    limit = 2 / math.sqrt(smoothness.largest)
    steps = jnp.asarray(step_sizes, jnp.result_type(float)) * limit
    classes = jnp.arange(num_classes(federation))
    arguments = posterior, federation, test, classes, chain_keys, starts, steps
    sizes = dict(num_rounds=num_rounds, thinning=thinning, num_bins=num_bins)
    sweeps = {
        "L": {num: (num, at_local_steps) for num in leapfrog_steps},
        "T": {num: (at_leapfrog_steps, num) for num in local_steps},
    }
    table, results = from_numbers("data", {}, {"step_limit": limit}), {}
    places = dict.fromkeys(place for sweep_ in sweeps.values() for place in sweep_.values())
    for place in places:
        settings = _settings(place)
        both = once(partial(sweep, partial(kernel, **settings), *arguments, **sizes))
        for name in SIGNS:
            score, later = (_best(name, scores, step_sizes) for scores in both)
            results[name, place] = score._replace(later=later)
            table += _rows(settings, name, score, thinning)
            table += _rows({**settings, "samples": "later"}, name, later, thinning)
    for name, samples in itertools.product(SIGNS, ({}, {"samples": "later"})):
        scores = {p: results[name, p].later if samples else results[name, p] for p in places}
        for settings, gain in _gains(sweeps, scores):
            half = {} if gain.at_half is None else {f"{name}_gain_at_half": gain.at_half}
            numbers = {f"{name}_gain": gain.share, **half}
            table += from_numbers("FA-HMC", {**settings, **samples}, numbers)
    return table


def _settings(place: Place) -> dict[str, int]:
    return dict(zip(NAMES.values(), place, strict=True))


def _best(name: str, scores: Mapping[str, Array], multiples: Sequence[float]) -> Score:
    """Return a score at the step size whose last mean over chains is best."""
    chains = SIGNS[name] * np.asarray(scores[name], np.float64)
    final = chains[:, :, -1].mean(axis=1)
    best = int(np.argmax(np.where(np.isfinite(final), final, -np.inf)))
    return Score(multiples[best], best in (0, len(multiples) - 1), chains[best])


def _rows(settings: dict[str, Any], name: str, score: Score, thinning: int) -> list[Row]:
    """Return rows of a score, its step size, and its curve over rounds."""
    method = "FA-LD" if settings["num_integration_steps"] == 1 else "FA-HMC"
    means = [SIGNS[name] * mean for mean in score.means]
    numbers = {name: means[-1], f"{name}_step_size": score.step_size}
    table = from_numbers(method, settings, numbers)
    for num, mean in enumerate(means, start=1):
        table += from_numbers(method, settings, {f"{name}_by_round": mean}, x=float(num * thinning))
    return table


def compare(ours: Score, theirs: Score, tried: int = 1) -> Gain:
    """Return the gain of a score, the best of `tried` ones, over another.

    It cannot be judged with one chain, or if a best step size is an end of the grid.
    """
    pairs = [*zip(ours.means, theirs.means, strict=True)]
    shares = [(our - their) / abs(pairs[-1][1].value) for our, their in pairs]
    value, error, half_width = shares[-1].value, shares[-1].error, 0.0
    if error:
        variances = np.array([mean.error**2 for mean in pairs[-1]])
        freedom = variances.sum() ** 2 * (len(ours.chains) - 1) / (variances**2).sum()
        half_width = stats.t.ppf(1 - LEVEL / (2 * tried), freedom) * error
    share = Number(value, half_width / 2)
    if ours.at_end or theirs.at_end or not half_width >= 0:
        return Gain(math.nan, Number(math.nan, share.error))
    rank = 2 * np.sign(value) if abs(value) > half_width else 0
    if not rank or ours.later is None:
        return Gain(rank, share)
    if compare(ours.later, theirs.later, tried).rank != rank:
        rank = rank / 2
    half = shares[max(len(shares) // 2 - 1, 0)].value
    return Gain(rank, share, half if abs(value) < abs(half) else None)


def _gains(
    sweeps: Mapping[str, Mapping[int, Place]], results: Mapping[Place, Score]
) -> Iterator[tuple[dict[str, Any], Gain]]:
    """Yield gains of longer trajectories, and the settings that they belong to.

    Some and all values are compared with 1, each value with 1 and with all others, and long
    trajectories with short ones of as many gradients.
    """
    for varied, places in sweeps.items():
        scores = {value: results[place] for value, place in places.items()}
        final = {value: score.means[-1].value for value, score in scores.items()}
        values = sorted((v for v in final if np.isfinite(final[v])), key=lambda v: -final[v])
        above = [value for value in values if value > 1]
        if not above or 1 not in values:
            continue
        best = [compare(scores[v], scores[1], tried=len(above)) for v in above]
        over_one = {value: compare(scores[value], scores[1]) for value in reversed(above)}
        settings = {"varied": varied, "above_one": "some"}
        yield settings, max(best, key=lambda gain: np.nan_to_num(gain.rank, nan=0.5))
        yield {**settings, "above_one": "all"}, min(over_one.values(), key=_least)
        for value in values:
            settings = {"varied": varied, NAMES[varied]: value}
            over = [compare(scores[value], scores[v]) for v in values if v != value]
            yield {"over": "others", **settings}, min(over, key=_least)
            if value > 1:
                yield {"over": "one", **settings}, over_one[value]
    for short, long in itertools.combinations(sorted(results), 2):
        if math.prod(short) == math.prod(long):
            yield {**_settings(long), "over": "equal_work"}, compare(results[long], results[short])


def _least(gain: Gain) -> Any:
    return np.nan_to_num(gain.rank, nan=-0.5)


@partial(jax.jit, static_argnames=("make_kernel", "num_rounds", "thinning", "num_bins"))
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
    num_rounds: int,
    thinning: int,
    num_bins: int,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run a kernel at all step sizes, and score its average predictions after every sample.

    Chains of all step sizes have the same `keys` and `starts`, one per chain. They are the chains
    of `fedmcmc.sample` if ``keys[c] = fold_in(rng_key, c)``.

    Returns
    -------
    tuple
        Scores by name of the average of all samples so far, and of the later ones, which come after
        sample ``m / 2``, rounded down, where ``m`` is the largest power of two up to their number.
        They are ``[num_step_sizes, num_chains, num_samples]``, NaN where a chain has diverged.
    """
    ends = range(1, 1 + num_rounds // thinning)
    begins = [2 ** (num.bit_length() - 1) // 2 for num in ends]
    ece = partial(metrics.expected_calibration_error, num_bins=num_bins)
    functions = (metrics.accuracy, metrics.brier_score, ece, metrics.negative_log_likelihood)
    settings = dict(thinning=thinning, ahead_bytes=rounds.PREPARED_BYTES // len(keys))
    terms = posterior.loglikelihood_fn

    def predict(state: Any, _: Any) -> Array:
        return class_probabilities(classes, terms, state.broadcast.position, test)

    def score(mean: Array) -> dict[str, Array]:
        values = [function(mean, test["label"]) for function in functions]
        finite = jnp.isfinite(mean).all()
        return {n: jnp.where(finite, x, jnp.nan) for n, x in zip(SIGNS, values, strict=True)}

    def run(key: Array, start: Any, step_size: Array) -> Any:
        kernel = make_kernel(posterior, step_size=step_size)

        def add(carry: Any, place: tuple[Array, Array]) -> tuple[Any, Any]:
            """Add the next sample to sums of all, of the first 2^k, and of the first 2^(k - 1)."""
            (state, total, power, half), (begin, end) = carry, place
            state, records = rounds.run_rounds(
                kernel, data, key, state, thinning, collect=predict, **settings
            )
            total = total + records.draws[0]
            is_power = jnp.maximum(2 * begin, 1) == end
            half, power = jnp.where(is_power, power, half), jnp.where(is_power, total, power)
            scores = score(total / end), score((total - half) / (end - begin))
            return (state, total, power, half), scores

        state = kernel.init(fedmcmc.random.init_key(key), start, data)
        none = jnp.zeros((len(test["label"]), len(classes)))
        places = jnp.asarray(begins), jnp.asarray(ends)
        return jax.lax.scan(add, (state, none, none, none), places)[1]

    # Step sizes inside: random numbers are then drawn once for all of them.
    over_steps = jax.vmap(run, in_axes=(None, None, 0))
    return jax.vmap(over_steps, in_axes=(0, 0, None), out_axes=1)(keys, starts, step_sizes)
