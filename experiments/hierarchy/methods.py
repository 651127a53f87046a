"""Samplers of a study: rounds, bits, effective draws and distance from pooled NUTS of each."""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC, NUTS

import fedmcmc
from experiments.hierarchy.studies import Study
from experiments.tidy import Row
from fedmcmc import hierarchy
from fedmcmc.diagnostics import mixing

__all__ = ["METHODS", "Settings", "Truth", "pooled", "rows", "table", "verdict_rows"]

METRICS = (
    "rounds",
    "megabits",
    "ess",
    "ess_per_1000_rounds",
    "r_hat",
    "error_of_means",
    "error_of_means s.e.",
    "smallest_sd_ratio",
    "largest_sd_ratio",
    "error_of_effects",
    "error_of_sds",
    "error_over_limit",
    "seconds",
)
"""Numbers of a method. Megabits are of all chains and clients, in both directions. `ess` is the
smallest of the shared parameters, and ``ess_per_1000_rounds`` that per kept round of a chain. The
errors of means are distances from pooled NUTS in posterior standard deviations, the largest of
shared parameters or of effects. ``error_over_limit`` is the largest error divided by its limit."""
LIMITS = (0.1, 0.1, 0.15)
"""Errors of means, of standard deviations and of effects below which a method is close."""
POSITIVE = ("tau", "sigma")


class Settings(NamedTuple):
    """Lengths of chains; see `radon.Config`."""

    seed: int
    num_draws: int
    num_chains: int
    num_rounds: int
    num_burnin: int


class Truth(NamedTuple):
    """Posterior moments from pooled NUTS.

    Attributes
    ----------
    names, mean, sd, ess
        Shared parameters, ``[d]``, positive ones in logarithms.
    effects, effect_sds
        ``[num_groups, k]``.
    rhat
        Largest R-hat of shared parameters and effects.
    leapfrogs
        Number of gradients of all rows, in all chains after warm-up.
    """

    names: list[str]
    mean: np.ndarray
    sd: np.ndarray
    ess: np.ndarray
    effects: np.ndarray
    effect_sds: np.ndarray
    rhat: float
    leapfrogs: int


class Draws(NamedTuple):
    """Draws of a sampler, and what they cost.

    Attributes
    ----------
    shared
        Sites with leaves ``[chains, draws, ...]``.
    effects
        Effects ``[draws, num_groups, k]``, or ``None`` if they were not drawn.
    rounds, bits
        Rounds of a chain, and bits of all chains.
    ess
        Effective draws, if draws are weighted.
    verdict
        Verdict of `fedmcmc.fit`.
    """

    shared: Mapping[str, Any]
    effects: np.ndarray | None
    rounds: int
    bits: float
    ess: float | None = None
    verdict: str | None = None


def pooled(study: Study, settings: Settings, num_draws: int) -> Truth:
    """Sample the model with a plate of all groups' effects on all rows by NUTS."""
    kernel = NUTS(study.plate)
    run = MCMC(
        kernel,
        num_warmup=num_draws // 2,
        num_samples=num_draws,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    run.run(jax.random.key(settings.seed), **study.rows, extra_fields=("num_steps",))
    draws = run.get_samples(group_by_chain=True)
    names, flat = by_column(draws, study.shared)
    effects = np.asarray(draws["effect"], np.float64)
    judged = mixing([flat, effects])
    rhat = float(np.nanmax(judged.rhat))
    if not rhat < 1.02:
        raise RuntimeError(f"Pooled NUTS has not converged: R-hat {rhat:.3f}.")
    shared_mixing = mixing(flat)
    return Truth(
        names,
        flat.mean((0, 1)),
        flat.std((0, 1)),
        np.minimum(shared_mixing.ess_bulk, shared_mixing.ess_tail),
        effects.mean((0, 1)),
        effects.std((0, 1)),
        rhat,
        int(np.sum(run.get_extra_fields()["num_steps"])),
    )


def by_column(drawn: Mapping[str, Any], shared: tuple[str, ...]) -> tuple[list[str], np.ndarray]:
    """Return names and draws ``[chains, draws, d]`` of sites, positive ones in logarithms."""
    names, columns = [], []
    for name in shared:
        leaf = np.asarray(drawn[name], np.float64)
        flat = leaf.reshape(*leaf.shape[:2], -1)
        is_vector = leaf.ndim > 2
        names += [f"{name}[{i}]" for i in range(flat.shape[-1])] if is_vector else [name]
        columns.append(np.log(flat) if name in POSITIVE else flat)
    return names, np.concatenate(columns, -1)


def row(sampled: Draws | None, study: Study, truth: Truth) -> dict[str, Any]:
    """Return the numbers of a method, all `None` if it diverged."""
    if sampled is None:
        return dict.fromkeys((*METRICS, "slowest", "verdict"))
    names, flat = by_column(sampled.shared, study.shared)
    if sampled.ess is None:
        judged = mixing(flat)
        sizes = np.minimum(judged.ess_bulk, judged.ess_tail)
        rhat: float | None = float(np.nanmax(judged.rhat))
        slowest: str | None = names[int(np.nanargmin(sizes))]
        per_round: float | None = 1000 * float(np.nanmin(sizes)) / (flat.shape[0] * flat.shape[1])
    else:
        sizes, rhat, per_round = np.full(flat.shape[-1], sampled.ess), None, None
        slowest = None
    gaps = np.abs(flat.mean((0, 1)) - truth.mean) / truth.sd
    ratios = flat.std((0, 1)) / truth.sd
    worst = int(np.argmax(gaps))
    effects = None
    if sampled.effects is not None:
        effects = float(np.max(np.abs(sampled.effects.mean(0) - truth.effects) / truth.effect_sds))
    errors = (float(gaps[worst]), float(np.abs(ratios - 1).max()), effects or 0.0)
    return {
        "rounds": sampled.rounds,
        "megabits": sampled.bits / 1e6,
        "ess": float(np.nanmin(sizes)),
        "ess_per_1000_rounds": per_round,
        "r_hat": rhat,
        "error_of_means": errors[0],
        "error_of_means s.e.": float(np.sqrt(1 / sizes[worst] + 1 / truth.ess[worst])),
        "smallest_sd_ratio": float(ratios.min()),
        "largest_sd_ratio": float(ratios.max()),
        "error_of_effects": effects,
        "error_of_sds": errors[1],
        "error_over_limit": max(e / limit for e, limit in zip(errors, LIMITS, strict=True)),
        "slowest": slowest,
        "verdict": None if sampled.verdict is None else sampled.verdict.partition(":")[0],
    }


def rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Return the tidy rows of a run: of the data, of pooled NUTS, and of every method."""
    truth = metrics["truth"]
    tidy = [Row("data", name, float(value), {}) for name, value in metrics["data"].items()]
    for name in ("mean", "sd"):
        for parameter, value in truth[name].items():
            tidy.append(Row("pooled NUTS", name, value, {"parameter": parameter}))
    for name in ("ess", "r_hat", "gradients"):
        tidy.append(Row("pooled NUTS", name, float(truth[name]), {}))
    for line in metrics["table"]:
        settings = {} if line["step_size"] is None else {"step_size": line["step_size"]}
        for name in METRICS:
            if line[name] is not None:
                slowest = {"slowest": line["slowest"]} if name == "ess_per_1000_rounds" else {}
                tidy.append(Row(line["method"], name, float(line[name]), settings | slowest))
        tidy += verdict_rows(line["method"], line["verdict"])
    return tidy


def verdict_rows(method: str, verdict: str | None) -> list[Row]:
    """Return a row such as ``verdict_exact`` for a verdict of `fedmcmc.fit`, none for `None`."""
    if verdict is None:
        return []
    word, _, correction = verdict.partition(" ")
    return [
        Row(
            method,
            f"verdict_{word}",
            1.0,
            {"correction": correction.strip("()")} if correction else {},
        )
    ]


class Bench:
    """Posteriors of a study, with the mode and the metric that several methods use."""

    def __init__(self, study: Study, settings: Settings) -> None:
        self.study, self.settings = study, settings
        self.key = jax.random.key(settings.seed + 1)
        self.posterior = fedmcmc.from_numpyro(study.model, example=study.data)
        self.centered = fedmcmc.from_numpyro(study.model, example=study.data, centered=1.0)
        self.white = fedmcmc.whiten(fedmcmc.marginal(self.posterior), study.data, surrogates=False)
        assert self.white.posterior.position_fn is not None
        self.mode = self.white.posterior.position_fn(self.white.position)

    def fit(self, **kwargs: Any) -> Draws:
        """Sample by `fedmcmc.fit`; clients draw their effects afterwards."""
        fitted = fedmcmc.fit(
            self.posterior,
            self.study.data,
            rng_key=self.key,
            num_draws=self.settings.num_draws,
            progress=False,
            **kwargs,
        )
        weighted, report = fitted.corrected, fitted.report
        return Draws(
            fitted.samples.constrained,
            self._drawn(fitted.samples.draws),
            report.rounds,
            report.bits_up + report.bits_down,
            ess=len(fitted.samples.draws["mu"][0]) if weighted is None else weighted.ess,
            verdict=fitted.verdict,
        )

    def plate(self) -> Draws:
        """Sample by `fedmcmc.fit` the model in which all clients share all effects."""
        posterior = fedmcmc.from_numpyro(self.study.plate, example=self.study.plate_data)
        fitted = fedmcmc.fit(posterior, self.study.plate_data, rng_key=self.key, progress=False)
        drawn, report = fitted.samples.constrained, fitted.report
        effects = np.asarray(drawn["effect"])
        return Draws(
            drawn,
            effects.reshape(-1, *effects.shape[2:]),
            report.rounds,
            report.bits_up + report.bits_down,
            ess=None if fitted.corrected is None else fitted.corrected.ess,
            verdict=fitted.verdict,
        )

    def langevin(self, step_size: float) -> Draws:
        """Sample the shared parameters by Langevin dynamics, with the effects integrated out."""
        kernel = fedmcmc.lsd(self.white.posterior, step_size=step_size)
        return self._sampled(kernel, self.white.position, local=False)

    def metropolis(self, build: Callable[..., Any]) -> Draws:
        """Sample by a kernel that accepts or rejects; its metric is the curvature at the mode."""
        shared = fedmcmc.marginal(self.posterior)
        kernel = build(shared, self.mode, metric=self.white.metric)
        return self._sampled(kernel, self.mode, local=False)

    def joint(self, step_size: float, *, centered: bool = False, **kwargs: Any) -> Draws:
        """Sample shared parameters and effects together by Langevin dynamics."""
        posterior = self.centered if centered else self.posterior
        kwargs = {
            "refresh": hierarchy.independence(num_tries=2),
            "metric": self.white.metric,
        } | kwargs
        kernel = fedmcmc.lsd(posterior, step_size=step_size, **kwargs)
        return self._sampled(kernel, self.mode)

    def gibbs(self, *, recenter: bool = False) -> Draws:
        """Sample by Gibbs steps: the server draws `mu` and `tau` given sums over the effects."""
        refresh = hierarchy.independence(num_tries=2)
        kernel = fedmcmc.fed_gibbs(
            self.centered,
            refresh=refresh,
            recenter=recenter,
            num_adapt=self.settings.num_burnin if recenter else 0,
        )
        return self._sampled(kernel, self.mode)

    def _drawn(self, draws: Any) -> np.ndarray:
        """Return effects ``[draws, num_groups, k]`` given about 1,000 of the draws."""
        thinning = max(1, jax.tree.leaves(draws)[0].shape[1] // 1000)
        thinned = jax.tree.map(lambda leaf: leaf[:, ::thinning], draws)
        local = fedmcmc.local_draws(self.posterior, self.study.data, thinned, rng_key=self.key)
        return as_effects(local.draws["effect"])

    def _sampled(self, kernel: Any, position: Any, *, local: bool = True) -> Draws:
        settings = self.settings
        samples = fedmcmc.sample(
            self.key,
            kernel,
            self.study.data,
            position,
            num_rounds=settings.num_rounds,
            num_burnin=settings.num_burnin,
            num_chains=settings.num_chains,
            record=fedmcmc.Record(local=local),
            progress=False,
        )
        effects = as_effects(samples.constrained_local["effect"]) if local else None
        totals = samples.totals
        return Draws(
            samples.constrained,
            effects,
            settings.num_rounds,
            float(np.sum(totals["bits_up"] + totals["bits_down"])),
        )


def as_effects(drawn: Any) -> np.ndarray:
    """Return effects ``[chains, draws, num_clients, 1, k]`` as ``[draws, num_groups, k]``."""
    leaf = np.asarray(drawn, np.float64)
    return leaf.reshape(-1, leaf.shape[2], leaf.shape[4])


METHODS: dict[str, tuple[str, float | None, Callable[[Bench], Draws]]] = {
    "fit": ("fit", None, lambda bench: bench.fit()),
    "gaussian": ("Gaussian at the mode", None, lambda bench: bench.fit(effort="approximate")),
    "mala": ("mala on marginal", None, lambda bench: bench.metropolis(fedmcmc.mala)),
    "langevin": ("lsd on marginal", 0.1, lambda bench: bench.langevin(0.1)),
    "gibbs": ("fed_gibbs", None, lambda bench: bench.gibbs()),
    "recentered": ("fed_gibbs, recentered", None, lambda bench: bench.gibbs(recenter=True)),
    "joint": ("lsd", 0.1, lambda bench: bench.joint(0.1)),
    "joint_small": ("lsd, small steps", 0.02, lambda bench: bench.joint(0.02)),
    "joint_centered": ("lsd, centered", 0.1, lambda bench: bench.joint(0.1, centered=True)),
    "joint_ula": (
        "lsd, ula effects",
        0.1,
        lambda bench: bench.joint(0.1, refresh=hierarchy.ula(0.2, num_steps=5)),
    ),
    "plate": ("fit, shared effects", None, lambda bench: bench.plate()),
}
"""By the name in settings: the name in the records, the step size, and the function to call."""


def table(study: Study, settings: Settings, methods: tuple[str, ...], truth: Truth) -> list[Any]:
    """Return the numbers of each method; those that diverged have none but seconds."""
    bench, lines = Bench(study, settings), []
    for name in methods:
        method, step_size, sample = METHODS[name]
        start = time.perf_counter()
        with warnings.catch_warnings():
            # The table shows how far off the draws are.
            warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
            try:
                sampled: Draws | None = sample(bench)
            except fedmcmc.NonFiniteError:
                sampled = None
        line = {"method": method, "step_size": step_size} | row(sampled, study, truth)
        lines.append(line | {"seconds": time.perf_counter() - start})
    return lines
