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
    """How long chains are; see `radon.Config`."""

    seed: int
    num_draws: int
    num_chains: int
    num_rounds: int
    num_burnin: int


class Truth(NamedTuple):
    """Pooled NUTS.

    Attributes
    ----------
    names, mean, sd, ess
        ``[d]`` of the shared parameters, positive ones in logarithms.
    effects, effect_sds
        ``[num_groups, k]``.
    rhat
        The largest, of shared parameters and effects.
    leapfrogs
        Of all chains, warm-up left out: gradients of all rows.
    """

    names: list[str]
    mean: np.ndarray
    sd: np.ndarray
    ess: np.ndarray
    effects: np.ndarray
    effect_sds: np.ndarray
    rhat: float
    leapfrogs: int


class Found(NamedTuple):
    """What a sampler found.

    `shared` has sites with leaves ``[chains, draws, ...]``; `effects` ``[draws, num_groups, k]`` or
    ``None``. `ess` is given where draws are weighted, `verdict` where `fedmcmc.fit` gave one; bits
    are of all chains.
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
    own = mixing(flat)
    return Truth(
        names,
        flat.mean((0, 1)),
        flat.std((0, 1)),
        np.minimum(own.ess_bulk, own.ess_tail),
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


def row(found: Found | None, study: Study, truth: Truth) -> dict[str, Any]:
    """Return the numbers of a method, all `None` if it diverged."""
    if found is None:
        return dict.fromkeys((*METRICS, "slowest", "verdict"))
    names, flat = by_column(found.shared, study.shared)
    if found.ess is None:
        judged = mixing(flat)
        sizes = np.minimum(judged.ess_bulk, judged.ess_tail)
        rhat: float | None = float(np.nanmax(judged.rhat))
        slowest: str | None = names[int(np.nanargmin(sizes))]
        per_round: float | None = 1000 * float(np.nanmin(sizes)) / (flat.shape[0] * flat.shape[1])
    else:
        sizes, rhat, per_round = np.full(flat.shape[-1], found.ess), None, None
        slowest = None
    gaps = np.abs(flat.mean((0, 1)) - truth.mean) / truth.sd
    ratios = flat.std((0, 1)) / truth.sd
    worst = int(np.argmax(gaps))
    effects = None
    if found.effects is not None:
        effects = float(np.max(np.abs(found.effects.mean(0) - truth.effects) / truth.effect_sds))
    errors = (float(gaps[worst]), float(np.abs(ratios - 1).max()), effects or 0.0)
    return {
        "rounds": found.rounds,
        "megabits": found.bits / 1e6,
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
        "verdict": None if found.verdict is None else found.verdict.partition(":")[0],
    }


def rows(metrics: Mapping[str, Any]) -> list[Row]:
    """Return the tidy rows of a run: of the data, of pooled NUTS, and of every method."""
    truth = metrics["truth"]
    found = [Row("data", name, float(value), {}) for name, value in metrics["data"].items()]
    for name in ("mean", "sd"):
        for parameter, value in truth[name].items():
            found.append(Row("pooled NUTS", name, value, {"parameter": parameter}))
    for name in ("ess", "r_hat", "gradients"):
        found.append(Row("pooled NUTS", name, float(truth[name]), {}))
    for line in metrics["table"]:
        settings = {} if line["step_size"] is None else {"step_size": line["step_size"]}
        for name in METRICS:
            if line[name] is not None:
                slowest = {"slowest": line["slowest"]} if name == "ess_per_1000_rounds" else {}
                found.append(Row(line["method"], name, float(line[name]), settings | slowest))
        found += verdict_rows(line["method"], line["verdict"])
    return found


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
    """A study, its posteriors, and what several methods start from."""

    def __init__(self, study: Study, settings: Settings) -> None:
        self.study, self.settings = study, settings
        self.key = jax.random.key(settings.seed + 1)
        self.posterior = fedmcmc.from_numpyro(study.model, example=study.data)
        self.centered = fedmcmc.from_numpyro(study.model, example=study.data, centered=1.0)
        self.white = fedmcmc.whiten(fedmcmc.marginal(self.posterior), study.data, surrogates=False)
        assert self.white.posterior.position_fn is not None
        self.mode = self.white.posterior.position_fn(self.white.position)

    def fit(self, **kwargs: Any) -> Found:
        """Take `fedmcmc.fit`, with effects drawn afterwards by their clients."""
        found = fedmcmc.fit(
            self.posterior,
            self.study.data,
            rng_key=self.key,
            num_draws=self.settings.num_draws,
            progress=False,
            **kwargs,
        )
        weighted, report = found.corrected, found.report
        return Found(
            found.samples.constrained,
            self._drawn(found.samples.draws),
            report.rounds,
            report.bits_up + report.bits_down,
            ess=len(found.samples.draws["mu"][0]) if weighted is None else weighted.ess,
            verdict=found.verdict,
        )

    def plate(self) -> Found:
        """Take `fedmcmc.fit` on the model whose effects every client shares."""
        posterior = fedmcmc.from_numpyro(self.study.plate, example=self.study.plate_data)
        found = fedmcmc.fit(posterior, self.study.plate_data, rng_key=self.key, progress=False)
        drawn, report = found.samples.constrained, found.report
        effects = np.asarray(drawn["effect"])
        return Found(
            drawn,
            effects.reshape(-1, *effects.shape[2:]),
            report.rounds,
            report.bits_up + report.bits_down,
            ess=None if found.corrected is None else found.corrected.ess,
            verdict=found.verdict,
        )

    def langevin(self, step_size: float) -> Found:
        """Take Langevin dynamics on the shared parameters, the effects integrated out."""
        kernel = fedmcmc.lsd(self.white.posterior, step_size=step_size)
        return self._sampled(kernel, self.white.position, local=False)

    def metropolis(self, build: Callable[..., Any]) -> Found:
        """Take a kernel that accepts or rejects, with the curvature at the mode for a metric."""
        shared = fedmcmc.marginal(self.posterior)
        kernel = build(shared, self.mode, metric=self.white.metric)
        return self._sampled(kernel, self.mode, local=False)

    def joint(self, step_size: float, *, centered: bool = False, **kwargs: Any) -> Found:
        """Take Langevin dynamics on shared parameters and effects together."""
        posterior = self.centered if centered else self.posterior
        kwargs = {
            "refresh": hierarchy.independence(num_tries=2),
            "metric": self.white.metric,
        } | kwargs
        kernel = fedmcmc.lsd(posterior, step_size=step_size, **kwargs)
        return self._sampled(kernel, self.mode)

    def gibbs(self, *, recenter: bool = False) -> Found:
        """Take Gibbs sampling, in which the server draws what the effects' sums tell."""
        refresh = hierarchy.independence(num_tries=2)
        kernel = fedmcmc.fed_gibbs(
            self.centered,
            refresh=refresh,
            recenter=recenter,
            num_adapt=self.settings.num_burnin if recenter else 0,
        )
        return self._sampled(kernel, self.mode)

    def _drawn(self, draws: Any) -> np.ndarray:
        """Return effects ``[draws, num_groups, k]`` given some of the draws."""
        every = max(1, jax.tree.leaves(draws)[0].shape[1] // 1000)
        some = jax.tree.map(lambda leaf: leaf[:, ::every], draws)
        own = fedmcmc.local_draws(self.posterior, self.study.data, some, rng_key=self.key)
        return as_effects(own.draws["effect"])

    def _sampled(self, kernel: Any, position: Any, *, local: bool = True) -> Found:
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
        return Found(
            samples.constrained,
            effects,
            settings.num_rounds,
            float(np.sum(totals["bits_up"] + totals["bits_down"])),
        )


def as_effects(drawn: Any) -> np.ndarray:
    """Return effects ``[chains, draws, num_clients, 1, k]`` as ``[draws, num_groups, k]``."""
    leaf = np.asarray(drawn, np.float64)
    return leaf.reshape(-1, leaf.shape[2], leaf.shape[4])


METHODS: dict[str, tuple[str, float | None, Callable[[Bench], Found]]] = {
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
            # The table shows what is off.
            warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
            try:
                found: Found | None = sample(bench)
            except fedmcmc.NonFiniteError:
                found = None
        line = {"method": method, "step_size": step_size} | row(found, study, truth)
        lines.append(line | {"seconds": time.perf_counter() - start})
    return lines
