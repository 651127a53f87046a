"""Liang et al. (2024), Figure 1 and section 6: marginal errors of logistic regression.

Settings `step` and `steps` are leapfrog steps in units of one over the root of the posterior's
largest curvature at the mode, and `gradient_noise` is the standard deviation of the noise on each
coordinate of a client's gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice, product, repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from scipy import ndimage
from scipy.special import ndtr

import fedmcmc
from experiments import loaders, models, setup
from experiments.claims import Number
from experiments.reference import nuts, require_converged
from experiments.special.fa_hmc_gaussian import Clients, Settings, moments, sample, stationary
from experiments.tidy import Row
from experiments.tidy import from_numbers as numbers_of

NUM_BINS = 50  # as in `fedmcmc.metrics.marginal_error`
GOOD = 1.25  # times the better method's best error, up to which a step size is good
MAX_DIMENSIONS = 512  # of `fedmcmc.predict_bias`
STATIONARY = 0.05  # of the start's distance after the burn-in, above which nothing is predicted
FACTORS = (2.5, 1.5, 1.0)  # times the threshold: errors whose rounds are reported
NUM_PARTS = 20  # of a run; it ends with the part in which the threshold is reached
SETTLED = 0.01  # of the error in the long run, within which a curve that will not arrive ends
NUM_SDS = 4.0  # of the posterior on both sides of its mean: about the range of reference draws
METHODS = ("FA-LD", "FA-LD, control variate", "FA-HMC", "FA-HMC, control variate")


class Histograms:
    """Shares of reference draws in equal bins and outside of them, ``[d, NUM_BINS + 1]``."""

    def __init__(self, reference: np.ndarray) -> None:
        self.reference, self.low, self.high = reference, reference.min(0), reference.max(0)
        self.shares = self.counts(reference) / len(reference)

    def counts(self, draws: np.ndarray) -> np.ndarray:
        """Return numbers of draws ``[num_draws, d]`` per coordinate and bin."""
        width = np.where(self.high > self.low, self.high - self.low, 1)
        size = self.low.size * (NUM_BINS + 1)
        inside = (draws >= self.low) & (draws <= self.high)
        place = np.where(inside, (draws - self.low) / width * NUM_BINS, 0).astype(int)
        place = np.where(inside, np.minimum(place, NUM_BINS - 1), NUM_BINS)
        place += np.arange(0, size, NUM_BINS + 1)
        return np.bincount(place.ravel(), minlength=size).reshape(-1, NUM_BINS + 1)

    def errors(self, draws: np.ndarray) -> np.ndarray:
        """Return the marginal error of chains ``[num_chains, num_draws, d]``, then without each."""
        shares, num = np.stack([self.counts(chain) / draws.shape[1] for chain in draws]), len(draws)
        total = shares.sum(0)
        means = [total / num, *((total - part) / (num - 1) for part in shares if num > 1)]
        return np.array([np.abs(mean - self.shares).sum(1).mean() / 2 for mean in means])

    def perfect(self, seed: int, *, num_chains: int, num_rounds: int, num_burnin: int) -> float:
        """Return the marginal error of as many independent draws of the posterior."""
        num, floor = num_chains * (num_rounds - num_burnin), fedmcmc.metrics.marginal_error_floor
        return float(np.mean(floor(jax.random.key(seed), self.reference, num, num_repeats=5)))


def _number(values: Any) -> Number:
    """Return the first value, with its standard error from the values without a chain."""
    value, *without = map(float, values)
    return Number(value, math.sqrt((len(without) - 1) * np.var(without)) if without else 0.0)


class Regression:
    """Logistic regression on `experiments.loaders.spherical`, with its scale and NUTS draws."""

    def __init__(self, data: Settings, reference: Settings | None = None) -> None:
        self.seed, prior_precision = data["seed"], data["prior_precision"]
        self.data, _ = loaders.spherical(**data, num_test=0)
        posterior = self.posterior = models.logistic(self.data, prior_precision)
        start = self.start = jnp.zeros(data["dim"])
        mode = fedmcmc.surrogates.mode(posterior, self.data, start).position
        keys = jax.random.split(jax.random.key(self.seed), 3)
        pooled = fedmcmc.estimate_smoothness(keys[0], posterior, self.data.pooled(), mode)
        self.scale = 1 / math.sqrt(pooled.largest)
        self.expansions = fedmcmc.surrogates.taylor(posterior, self.data, mode)
        curvatures = np.linalg.eigvalsh(np.asarray(self.expansions.precision, float).sum(0))
        ends = zip(("smallest", "largest"), prior_precision + curvatures[[0, -1]], strict=True)
        self.rows = numbers_of("posterior", {}, {f"{end}_curvature": x for end, x in ends})
        if reference is None:
            return
        potential_fn = Partial(setup.potential, posterior, self.data.rows)
        starts = mode + self.scale * jax.random.normal(keys[1], (4, start.size))
        exact = require_converged(nuts(keys[2], potential_fn, starts, **reference))
        self.rows += numbers_of("NUTS", {}, exact.summary)
        self.histograms = Histograms(np.asarray(exact.draws).reshape(-1, start.size))

    def kernel(self, step: float, num_integration_steps: int, **settings: Any) -> Any:
        """Return FA-HMC, or with one leapfrog step FA-LD."""
        steps = {"step_size": step * self.scale, "num_integration_steps": num_integration_steps}
        return fedmcmc.fa_hmc(self.posterior, **steps, gradients="reuse", **settings)

    def error(self, chains: Settings, kernel: Any) -> Number:
        """Return the marginal error of chains from zero, NaN if one was lost."""
        try:
            draws = sample(self.seed + 1, kernel, self.data, self.start, **chains).draws
        except fedmcmc.NonFiniteError:
            return Number(math.nan)
        return _number(self.histograms.errors(draws))


def _length(step: float) -> int:
    """Return the paper's number of leapfrog steps for exact gradients."""
    return max(1, math.floor(math.pi / 3 / step))


def _best(errors: Mapping[Any, Number]) -> Any:
    return min(errors, key=lambda key: np.nan_to_num(errors[key].value, nan=math.inf))


def rows(
    data: Settings, reference: Settings, rounds: Settings, errors: Settings | None = None
) -> list[Row]:
    """Return rounds over local steps, and errors over step sizes if there are settings for them.

    Runs over local steps end at the threshold, or at another one of the limits: `num_rounds`, or
    `num_gradients` of a client in one chain.
    """
    model, limits, kernel = Regression(data, reference), rounds["limits"], rounds["kernel"]
    table = model.rows + (_over_step_sizes(model, **errors) if errors else [])
    levels = [factor * limits["threshold"] for factor in FACTORS]
    for num in rounds["local_steps"]:
        of_gradients = limits["num_gradients"] // (num * kernel["num_integration_steps"])
        num_rounds = min(limits["num_rounds"], of_gradients)
        sizes = {"num_chains": rounds["num_chains"], "num_rounds": -(-num_rounds // NUM_PARTS)}
        parts = _parts(model, model.kernel(num_local_steps=num, **kernel), sizes)
        marks, curves = error_curve(parts, model.histograms, num_rounds, levels[-1])
        for level in levels:
            reached = _number([_crossing(marks, curve, level) for curve in curves.T])
            if math.isfinite(reached.value):
                place = {"target_error": level, "num_local_steps": num}
                table += numbers_of("FA-HMC", place, {"rounds_to_error": reached})
        table += _curve(num, dict(zip(marks, curves[:, 0], strict=True)))
    return table


def _over_step_sizes(
    model: Regression, chains: Settings, kernel: Settings, steps: list[float], leapfrogs: list[int]
) -> list[Row]:
    """Return errors of FA-LD and FA-HMC, with the best of `leapfrogs` if gradients are noisy."""
    perfect = model.histograms.perfect(model.seed + 3, **chains)
    table = numbers_of("perfect sampler", {}, {"marginal_error": perfect})
    for kind, noise in (("exact", 0.0), ("noisy", kernel["gradient_noise"])):
        errors: dict[str, dict[float, Number]] = {"FA-LD": {}, "FA-HMC": {}}
        settings = {**kernel, "gradient_noise": noise}
        for step in steps:
            place = {"gradients": kind, "step_size": step * model.scale}
            lengths = leapfrogs if noise else [_length(step)]
            for name, choices in (("FA-LD", {1}), ("FA-HMC", {*lengths} - {1})):
                kernels = {n: model.kernel(step, n, **settings) for n in sorted(choices)}
                tried = {n: model.error(chains, kernel) for n, kernel in kernels.items()}
                if tried:
                    best = _best(tried)
                    errors[name][step] = tried[best]
                    of_best = {**place, "num_integration_steps": best}
                    table += numbers_of(name, of_best, {"marginal_error": tried[best]})
            if step in errors["FA-HMC"]:
                gain = 1 - errors["FA-HMC"][step] / errors["FA-LD"][step]
                table += numbers_of("FA-HMC", place, {"gain": gain})
        table += _compared({"gradients": kind}, errors, steps)
    return table


def _compared(place: Settings, errors: Mapping[str, Any], steps: list[float]) -> list[Row]:
    """Return the gain at the best step sizes, and how many step sizes are good."""
    theirs, ours = (of[_best(of)] for of in errors.values())
    limit, num, table = GOOD * min(ours, theirs).value, len(steps) // 2, []
    for method, of in errors.items():
        good = np.array([of.get(step, math.inf) <= limit for step in steps])
        # Good step sizes in a row around the best.
        groups, _ = ndimage.label(good)
        around = np.array(steps)[good & (groups == groups[steps.index(_best(of))])]
        extent = around[-1] / around[0] if len(around) else 0
        numbers = {"num_good_steps": len(around), "good_step_range": extent}
        table += numbers_of(method, place, numbers)
    numbers = {"best_gain": 1 - ours / theirs, "num_small_steps": num}
    numbers["num_good_small_steps"] = good[:num].sum()  # of FA-HMC, the last method
    return table + numbers_of("FA-HMC", place, numbers)


def drift(
    data: Settings, reference: Settings, chains: Settings, num_local_steps: int, steps: list[float]
) -> list[Row]:
    """Return errors with exact gradients, with and without control variates, and predicted ones."""
    model = Regression(data, reference)
    table, ratios = model.rows, []
    errors: dict[str, dict[float, Number]] = {name: {} for name in METHODS}
    for name, step in product(METHODS, steps):
        length = _length(step) if name.startswith("FA-HMC") else 1
        if name.startswith("FA-HMC") and length == 1:
            continue  # the same chains as FA-LD's
        settings = {"num_local_steps": num_local_steps, "control_variate": "variate" in name}
        kernel = model.kernel(step, length, **settings)
        errors[name][step] = error = model.error(chains, kernel)
        place = {"step_size": step * model.scale, "num_integration_steps": length}
        table += numbers_of(name, place, {"marginal_error": error})
        if data["dim"] <= MAX_DIMENSIONS:
            law = fedmcmc.predict_bias(kernel, model.data, model.expansions)
            num_reference = len(model.histograms.reference)
            ratios.append(_expected(model.seed, law, num_reference, **chains) / error.value)
    best = {name: errors[name][_best(errors[name])] for name in METHODS}
    bases = zip(METHODS[:2], ("FA-LD", "corrected_FA-LD"), strict=True)
    for (base, over), name in product(bases, METHODS):
        if name != base:
            gain = {"best_gain": 1 - best[name] / best[base]}
            table += numbers_of(name, {"over": over}, gain)
    perfect = model.histograms.perfect(model.seed + 3, **chains)
    table += numbers_of("perfect sampler", {}, {"marginal_error": perfect})
    step = _best(errors["FA-HMC"])
    plain, corrected = (errors[name][step].value - perfect for name in METHODS[2:])
    table += numbers_of("FA-HMC", {}, {"share_of_drift": 1 - corrected / plain})
    for end, of in (("smallest", np.nanmin), ("largest", np.nanmax)):
        if ratios:
            table += numbers_of("predict_bias", {}, {f"{end}_predicted_over_measured": of(ratios)})
    return table


def _expected(
    seed: int, law: Any, num_reference: int, num_chains: int, num_rounds: int, num_burnin: int
) -> float:
    """Return the error of autoregressive chains with the predicted distribution, or NaN."""
    if law.spectral_radius**num_burnin > STATIONARY:
        return math.nan
    rng, shape = np.random.default_rng(seed), (num_rounds - num_burnin, num_chains, law.bias.size)
    correlation = (law.rounds_per_draw - 1) / (law.rounds_per_draw + 1)
    innovation = np.sqrt(1 - correlation**2)
    errors = []
    for _ in range(3):
        noise = rng.normal(size=shape)
        chains = accumulate(noise, lambda past, new: correlation * past + innovation * new)
        draws = (law.bias + law.spread * np.concatenate([*chains])).astype(np.float32)
        reference = rng.normal(size=(num_reference, law.bias.size)).astype(np.float32)
        errors.append(fedmcmc.metrics.marginal_error(draws, reference))
    return float(np.mean(errors))


def _curve(num_local_steps: int, errors: Mapping[int, float]) -> list[Row]:
    place, metric = {"num_local_steps": num_local_steps}, "marginal_error_by_round"
    return [Row("FA-HMC", metric, float(y), place, x=float(x)) for x, y in errors.items()]


def _marks(num_rounds: int) -> list[int]:
    """Return 1 and rounds that grow by about a twenty-fourth of a factor e, to the last one."""
    grid = np.geomspace(min(2, num_rounds), num_rounds, 1 + int(24 * np.log(num_rounds)))
    return sorted({int(num) for num in [1, *grid, num_rounds]})


def _parts(model: Regression, kernel: Any, sizes: Settings) -> Iterator[np.ndarray]:
    """Yield the draws of a run in parts, each computed when the next one is needed."""
    state = None
    while True:
        samples = sample(model.seed + 2, kernel, model.data, model.start, state=state, **sizes)
        yield samples.draws
        state = samples.state


def error_curve(
    parts: Iterator[np.ndarray], histograms: Histograms, num_rounds: int, enough: float
) -> tuple[list[int], np.ndarray]:
    """Return rounds, and marginal errors of the draws so far without their first half.

    Errors ``[num_rounds, 1 + num_chains]`` are of all chains, then of all but one chain. The
    curve ends where none is above `enough`. The parts of a run are ``[num_chains, num_draws, d]``.
    """
    draws, errors, marks = next(parts), [], _marks(num_rounds)[1:]  # none of the first half
    for mark in marks:
        while draws.shape[1] < mark:
            draws = np.concatenate([draws, next(parts)], axis=1)
        errors.append(histograms.errors(draws[:, mark // 2 : mark]))
        if errors[-1].max() <= enough:
            break
    return marks[: len(errors)], np.array(errors)


def _crossing(rounds: Sequence[int], errors: np.ndarray, level: float) -> float:
    """Return where errors fall to a level, on straight lines between logarithms, or NaN."""
    i = int(np.argmax(np.append(errors, 0.0) <= level))
    around = slice(max(i - 1, 0), i + 1)
    places = -np.log(errors[around]), np.log(rounds[around])
    return math.exp(np.interp(-math.log(level), *places, right=math.nan))


def exact_rounds(
    data: Settings, kernel: Settings, local_steps: list[int], levels: list[float], most_rounds: int
) -> list[Row]:
    """Return rounds of infinitely many chains on second-order expansions at the mode.

    `local_steps` ascend from one, with which the others are compared; the errors `levels` descend.
    """
    model = Regression(data)
    expansions = model.expansions
    weights = np.asarray(model.data.size, float)[:, None] / model.data.num_rows
    curvatures, axes = np.linalg.eigh(np.asarray(expansions.precision, float) / weights[..., None])
    curvatures += data["prior_precision"]
    slopes = np.asarray(expansions.precision_mean, float) / weights
    means = np.einsum("bij,bi->bj", axes, slopes) / curvatures
    clients = Clients(curvatures, means, axes, weights[:, 0])
    mean, covariance = clients.target()
    sd, smallest = np.sqrt(np.diag(covariance)), np.linalg.eigvalsh(covariance)[0]
    edges = mean[:, None] + sd[:, None] * np.linspace(-NUM_SDS, NUM_SDS, NUM_BINS + 1)

    def shares(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Return the share of each normal in every bin, and outside of all."""
        inside = np.diff(ndtr((edges - mean[:, None]) / np.sqrt(variance)[:, None]), axis=1)
        return np.concatenate([inside, 1 - inside.sum(1, keepdims=True)], axis=1)

    exact_shares, table, curves = shares(mean, sd**2), model.rows, {}

    def error(bins: np.ndarray) -> float:
        return float(np.abs(bins - exact_shares).sum(1).mean() / 2)

    settings = local_steps, kernel["step"] * math.sqrt(smallest), kernel["num_integration_steps"]
    noisy, exact = (clients.rounds(*settings, noise=x) for x in (kernel["gradient_noise"], 0.0))
    for num, affine, noiseless in zip(local_steps, noisy, exact, strict=True):
        long_run, past, total = error(shares(*stationary(affine))), [], np.zeros(())
        numbers = {"error_in_long_run": long_run}
        numbers["error_in_long_run_exact_gradients"] = error(shares(*stationary(noiseless)))
        table += numbers_of("FA-HMC", {"num_local_steps": num}, numbers)
        curves[num] = errors = []
        for law in islice(moments(repeat(affine), np.zeros_like(mean)), most_rounds):
            past.append(law)
            total = total + shares(*law)
            if len(past) % 2 == 0:
                total = total - shares(*past[len(past) // 2 - 1])
            errors.append(error(total / (len(past) - len(past) // 2)))
            missing = [level for level in levels if level < min(errors)]
            # An error can be smaller on the way than in the long run, so it is followed to the end.
            settled = abs(errors[-1] - long_run) < SETTLED * long_run
            if not missing or (settled and missing[0] <= long_run):
                break
    return table + _saved(curves, levels)


def _saved(curves: Mapping[int, list[float]], levels: Sequence[float]) -> list[Row]:
    """Return rounds to errors, and how many times fewer they are than with one local step."""

    def rounds_to(num: int, level: float) -> float:
        return next((i for i, error in enumerate(curves[num], start=1) if error <= level), math.inf)

    table: list[Row] = []
    for level in levels:
        arrivals = {num: rounds_to(num, level) for num in curves}
        for num, value in arrivals.items():
            place = {"target_error": level, "num_local_steps": num}
            table += numbers_of("FA-HMC", place, {"rounds_to_error": value})
        numbers: dict[str, float] = {"fewest_rounds": min(arrivals.values())}
        numbers["times_fewer_rounds"] = arrivals[1] / numbers["fewest_rounds"]
        numbers["smallest_best_local_steps"] = min(arrivals, key=lambda num: arrivals[num])
        table += numbers_of("FA-HMC", {"target_error": level}, numbers)
    for num, errors in curves.items():
        table += _curve(num, {mark: errors[mark - 1] for mark in _marks(len(errors))})
        # Between two rounds of this number only the rounds of one local step grow.
        ratios = [rounds_to(1, error) / i for i, error in enumerate(errors, start=1)]
        saved = np.nan_to_num(ratios, posinf=0)
        if num > 1 and saved.any():
            i = int(saved.argmax())
            others_as_fast = sum(rounds_to(n, errors[i]) <= i + 1 for n in curves) - 1
            numbers = {"most_times_fewer_rounds": saved[i], "others_as_fast": others_as_fast}
            table += numbers_of("FA-HMC", {"num_local_steps": num}, numbers)
    return table
