"""Random effects of real groups: every method beside NUTS on pooled rows."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

import fedmcmc
from experiments import loaders, models
from experiments.tidy import Row, from_numbers
from fedmcmc import hierarchy
from fedmcmc.diagnostics import mixing
from fedmcmc.pytrees import trees

SLOPES = {
    "radon": ("floor", "uranium"),
    "exam": ("girl",),
    "schools": ("status", "minority", "catholic"),
    "contraception": ("urban", "age", "age2", "one_child", "two_children", "more_children"),
    "immunization": ("two_years", "mother25", "rural", "indigenous"),
}
"""Names of the columns of `x` in each data set."""
LIMITS = (0.1, 0.1, 0.15)
"""Errors of means, of standard deviations and of effects below which a method is close."""


class Draws(NamedTuple):
    """Draws ``[chains, draws, d]`` of shared parameters and ``[draws, groups, k]`` of effects.

    `bits` sum over chains. `ess` is computed from the chains unless draws are weighted.
    """

    shared: np.ndarray
    effects: np.ndarray | None
    rounds: int = 0
    bits: float = 0.0
    ess: float | None = None
    verdict: str = ""


def rows(
    data: str,
    methods: Sequence[str],
    num_reference: int,
    num_draws: int,
    num_chains: int,
    num_rounds: int,
    num_burnin: int,
    seed: int,
    nodes: Sequence[int] = (),
    most_nodes: int = 25,
) -> list[Row]:
    """Return rows of the data, of pooled NUTS, of all methods, and of errors of quadrature.

    `data` and `methods` are names in `SLOPES` and `METHODS`. Pooled NUTS has four chains of
    `num_reference` draws, `fedmcmc.fit` has `num_draws` weighted draws, and kernels have chains
    whose `num_rounds` include burn-in. Errors of the quadrature with `nodes` are differences to
    `most_nodes`.
    """
    if data not in SLOPES or not {*methods} <= {*METHODS}:
        raise ValueError(f"data must be one of {[*SLOPES]} and methods some of {[*METHODS]}.")
    lengths = {"num_chains": num_chains, "num_rounds": num_rounds, "num_burnin": num_burnin}
    bench = Bench(getattr(loaders, data)()[0], jax.random.key(seed + 1), num_draws, lengths)
    num_effects = bench.data.rows["z"].shape[1]
    names = [f"{site}[{i}]" for site in ("mu", "tau") for i in range(num_effects)]
    names += [*SLOPES[data], *(() if bench.binary else ("sigma",))]
    exact, summary = bench.pooled(jax.random.key(seed), num_reference)
    counts = {"num_rows": bench.data.num_rows, "num_clients": bench.data.num_clients}
    table = from_numbers("data", {}, counts) + from_numbers("pooled NUTS", {}, summary)
    means, sds = exact.shared.mean((0, 1)), exact.shared.std((0, 1))
    for name, mean, sd in zip(names, means, sds, strict=True):
        table += from_numbers("pooled NUTS", {"parameter": name}, {"mean": mean, "sd": sd})
    for method in methods:
        table += _of_method(method, bench, exact, names)
    return table + (_quadrature(bench.data, nodes, most_nodes, means) if nodes else [])


class Bench:
    """Posteriors of one data set, with the mode and the metric that several methods use."""

    def __init__(self, data: fedmcmc.FederatedData, key: Any, num_draws: int, lengths: Any):
        self.data, self.key, self.num_draws, self.lengths = data, key, num_draws, lengths
        self.binary = np.issubdtype(np.asarray(data.rows["y"]).dtype, np.integer)
        self.posterior = models.random_effects(data)
        self.centered = models.random_effects(data, centered=1.0)
        self.marginal = fedmcmc.marginal(self.posterior)
        self.white = fedmcmc.whiten(self.marginal, data, surrogates=False)
        assert self.white.posterior.position_fn is not None
        self.mode = self.white.posterior.position_fn(self.white.position)
        group = np.repeat(np.arange(data.num_clients), np.asarray(data.sizes))
        self.plate_data = fedmcmc.FederatedData.from_arrays({**data.rows, "group": group}, group)

    def plate(self, z: Any, x: Any, group: Any, y: Any = None) -> None:
        """Give rows of all groups their outcomes; a NumPyro model with all effects in a plate."""
        mu, tau, slopes = models.shared_by_groups(z, x)
        sigma = None if self.binary else numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("groups", self.data.num_clients):
            standard = numpyro.sample("standard", dist.Normal(0, 1).expand(mu.shape).to_event(1))
        effect = numpyro.deterministic("effect", mu + tau * standard)
        eta = jnp.sum(z * effect[group], -1) + x @ slopes
        with numpyro.plate("rows", len(eta)):
            outcome = dist.Bernoulli(logits=eta) if self.binary else dist.Normal(eta, sigma)
            numpyro.sample("y", outcome, obs=y)

    def pooled(self, key: Any, num_draws: int) -> tuple[Draws, dict[str, float]]:
        """Sample the plate model by NUTS."""
        lengths = {"num_warmup": num_draws // 2, "num_samples": num_draws, "num_chains": 4}
        run = MCMC(NUTS(self.plate), chain_method="vectorized", progress_bar=False, **lengths)
        run.run(key, **self.plate_data.rows)
        drawn = run.get_samples(group_by_chain=True)
        shared = _by_column(drawn)
        rhat = float(np.nanmax(mixing([shared, drawn["effect"]]).rhat))
        if not rhat < 1.02:
            raise RuntimeError(f"Pooled NUTS has not converged: R-hat {rhat:.3f}.")
        draws = Draws(shared, _by_group(drawn["effect"]))
        return draws, {"ess": _smaller_ess(shared).min(), "r_hat": rhat}

    def fit(self, **kwargs: Any) -> Draws:
        """Sample by `fedmcmc.fit`; clients draw their effects given about 1,000 of the draws."""
        settings = {"rng_key": self.key, "num_draws": self.num_draws, "progress": False}
        fitted = fedmcmc.fit(self.posterior, self.data, **settings, **kwargs)
        num = fitted.samples.draws["mu"].shape[1]
        thinned = jax.tree.map(lambda leaf: leaf[:, :: max(1, num // 1000)], fitted.samples.draws)
        local = fedmcmc.local_draws(self.posterior, self.data, thinned, rng_key=self.key)
        return _of_fit(fitted, local.draws["effect"], num)

    def fit_plate(self) -> Draws:
        """Sample by `fedmcmc.fit` the model in which all clients share all effects."""
        posterior = fedmcmc.from_numpyro(self.plate, example=self.plate_data)
        fitted = fedmcmc.fit(posterior, self.plate_data, rng_key=self.key, progress=False)
        return _of_fit(fitted, fitted.samples.constrained["effect"], None)

    def joint(self, step_size: float = 0.1, centered: bool = False, refresh: Any = None) -> Draws:
        """Sample shared parameters and effects together by Langevin dynamics."""
        posterior = self.centered if centered else self.posterior
        refresh = refresh or hierarchy.independence(num_tries=2)
        settings = {"step_size": step_size, "refresh": refresh, "metric": self.white.metric}
        return self.sample(fedmcmc.lsd(posterior, **settings))

    def gibbs(self, recenter: bool = False) -> Draws:
        """Sample by Gibbs steps: the server draws `mu` and `tau` given sums over the effects."""
        adapt = self.lengths["num_burnin"] if recenter else 0
        refresh = hierarchy.independence(num_tries=2)
        settings: dict[str, Any] = {"refresh": refresh, "num_adapt": adapt}
        return self.sample(fedmcmc.fed_gibbs(self.centered, recenter=recenter, **settings))

    def mala_on_marginal(self) -> Draws:
        """Sample shared parameters by MALA."""
        kernel = fedmcmc.mala(self.marginal, self.mode, metric=self.white.metric)
        return self.sample(kernel, local=False)

    def lsd_on_marginal(self) -> Draws:
        """Sample shared parameters by Langevin dynamics."""
        kernel = fedmcmc.lsd(self.white.posterior, step_size=0.1)
        return self.sample(kernel, self.white.position, local=False)

    def sample(self, kernel: Any, start: Any = None, local: bool = True) -> Draws:
        """Sample by a kernel, by default from the mode; with `local` it draws effects as well."""
        settings = {**self.lengths, "record": fedmcmc.Record(local=local), "progress": False}
        start = self.mode if start is None else start
        samples = fedmcmc.sample(self.key, kernel, self.data, start, **settings)
        effects = _by_group(samples.constrained_local["effect"]) if local else None
        bits = float(np.sum(samples.totals["bits_up"] + samples.totals["bits_down"]))
        return Draws(_by_column(samples.constrained), effects, self.lengths["num_rounds"], bits)


METHODS: dict[str, Callable[[Bench], Draws]] = {
    "fit": Bench.fit,
    "Gaussian at the mode": lambda b: b.fit(effort="approximate"),
    "mala on marginal": Bench.mala_on_marginal,
    "lsd on marginal": Bench.lsd_on_marginal,
    "fed_gibbs": Bench.gibbs,
    "fed_gibbs, recentered": lambda b: b.gibbs(recenter=True),
    "lsd": Bench.joint,
    "lsd, small steps": lambda b: b.joint(step_size=0.02),
    "lsd, centered": lambda b: b.joint(centered=True),
    "lsd, ula effects": lambda b: b.joint(refresh=hierarchy.ula(0.2, num_steps=5)),
    "fit, shared effects": Bench.fit_plate,
}


def _of_method(method: str, bench: Bench, exact: Draws, names: Sequence[str]) -> list[Row]:
    """Return the rows of a method; one that diverged has its seconds alone.

    Errors of means are in posterior sds, the largest of parameters. Megabits are of all chains and
    clients, `ess` is the smallest of the shared parameters, ``ess_per_1000_rounds`` that per kept
    round of a chain, and ``error_over_limit`` the largest error divided by its limit.
    """
    start, table = time.perf_counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)  # rows show how far off it is
        try:
            drawn = METHODS[method](bench)
        except fedmcmc.NonFiniteError:
            return [Row(method, "seconds", time.perf_counter() - start, {})]
    flat, ess = drawn.shared, np.full(len(names), drawn.ess or np.nan)
    if drawn.ess is None:
        ess = _smaller_ess(flat)
        slowest = {"slowest": names[int(np.nanargmin(ess))]}
        per_round = 1000 * np.nanmin(ess) / flat[..., 0].size
        table += from_numbers(method, slowest, {"ess_per_1000_rounds": per_round})
        table += from_numbers(method, {}, {"r_hat": np.nanmax(mixing(flat).rhat)})
    exact_mean, exact_sd = exact.shared.mean((0, 1)), exact.shared.std((0, 1))
    gaps, ratios = np.abs(flat.mean((0, 1)) - exact_mean) / exact_sd, flat.std((0, 1)) / exact_sd
    worst = int(np.argmax(gaps))
    errors = {"error_of_means": gaps[worst], "error_of_sds": np.abs(ratios - 1).max()}
    if drawn.effects is not None and exact.effects is not None:
        distances = np.abs(drawn.effects.mean(0) - exact.effects.mean(0)) / exact.effects.std(0)
        errors["error_of_effects"] = distances.max()
    numbers = {
        "rounds": drawn.rounds,
        "megabits": drawn.bits / 1e6,
        "ess": np.nanmin(ess),
        "error_of_means s.e.": np.sqrt(1 / ess[worst] + 1 / _smaller_ess(exact.shared)[worst]),
        "smallest_sd_ratio": ratios.min(),
        "largest_sd_ratio": ratios.max(),
        **errors,
        "error_over_limit": max(e / m for e, m in zip(errors.values(), LIMITS, strict=False)),
        "seconds": time.perf_counter() - start,
    }
    table += from_numbers(method, {}, numbers)
    return table + verdict_rows(method, drawn.verdict)


def verdict_rows(method: str, verdict: str) -> list[Row]:
    """Return a row such as ``verdict_exact`` for a verdict of `fedmcmc.fit`, none without one."""
    word, _, correction = verdict.partition(":")[0].partition(" ")
    settings = {"correction": correction.strip("()")} if correction else {}
    return [Row(method, f"verdict_{word}", 1.0, settings)] if word else []


def _by_column(drawn: Mapping[str, Any]) -> np.ndarray:
    """Return draws ``[chains, draws, d]`` of shared parameters, `tau` and `sigma` in logarithms."""
    columns = []
    for site in ("mu", "tau", "slopes", "sigma"):
        if site in drawn:
            leaf = np.asarray(drawn[site], np.float64)
            flat = leaf.reshape(*leaf.shape[:2], -1)
            columns.append(np.log(flat) if site in ("tau", "sigma") else flat)
    return np.concatenate(columns, -1)


def _by_group(drawn: Any) -> np.ndarray:
    """Return effects ``[chains, draws, num_groups, ..., k]`` as ``[draws, num_groups, k]``."""
    leaf = np.asarray(drawn, np.float64)
    return leaf.reshape(-1, leaf.shape[2], leaf.shape[-1])


def _smaller_ess(draws: np.ndarray) -> np.ndarray:
    judged = mixing(draws)
    return np.minimum(judged.ess_bulk, judged.ess_tail)


def _of_fit(fitted: Any, effects: Any, unweighted: float | None) -> Draws:
    report, ess = fitted.report, fitted.corrected.ess if fitted.corrected else unweighted
    shared, bits = _by_column(fitted.samples.constrained), report.bits_up + report.bits_down
    return Draws(shared, _by_group(effects), report.rounds, bits, ess, fitted.verdict)


def _quadrature(data: Any, nodes: Sequence[int], most_nodes: int, place: np.ndarray) -> list[Row]:
    """Return errors of the log likelihood and of its gradient near the posterior mean, float64."""
    table: list[Row] = []
    with jax.enable_x64(True):
        columns = {n: np.asarray(c, c.dtype.name.replace("32", "64")) for n, c in data.rows.items()}
        groups = np.repeat(np.arange(data.num_clients), np.asarray(data.sizes))
        data = fedmcmc.FederatedData.from_arrays(columns, groups)
        num = columns["z"].shape[1]
        parts = jnp.split(jnp.asarray(place)[None], (num, 2 * num), axis=1)
        position = dict(zip(("mu", "tau", "slopes"), parts, strict=True))

        def potential(at: Any, num_nodes: int) -> Any:
            posterior = models.random_effects(data, marginal_nodes=num_nodes)
            return fedmcmc.metrics.potential(posterior, data, at)[0]

        with_slope = jax.value_and_grad(potential)
        value, slope = with_slope(position, most_nodes)
        for num_nodes in nodes:
            estimate, estimated_slope = with_slope(position, num_nodes)
            gap = trees.ravel(estimated_slope) - trees.ravel(slope)
            numbers = {"error_of_log_likelihood": value - estimate}
            numbers["error_of_gradient"] = np.abs(gap).max()
            table += from_numbers("quadrature", {"nodes": num_nodes}, numbers)
    return table
