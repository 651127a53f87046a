"""Random effects: real groups, compared with NUTS on pooled rows, and few groups, with a grid."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

import fedmcmc
from experiments import loaders, models
from experiments.reference import flat
from experiments.tidy import Row, from_numbers
from fedmcmc import hierarchy, rounds
from fedmcmc.diagnostics import mixing
from fedmcmc.pytrees import trees

LIMITS = (0.1, 0.1, 0.15)
"""Errors of means, of standard deviations and of effects below which a method is close."""
FURTHEST = 50.0
"""A chain whose ``log tau`` or `mu` went further has diverged."""
THINNING = 5


class Draws(NamedTuple):
    """Draws ``[chains, draws, d]`` of shared parameters and ``[draws, groups, k]`` of effects.

    `bits` sum over chains. `ess` is computed from the chains unless draws are weighted.
    """

    shared: np.ndarray
    effects: np.ndarray | None
    rounds: int = 0
    bits: float = 0.0
    ess: float | None = None
    has_failed: bool | None = None


def groups(
    data: Literal["radon", "exam", "schools", "contraception", "immunization"],
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
    """Return rows of the data, of pooled NUTS, of some of `METHODS`, and of errors of quadrature.

    Pooled NUTS has four chains of `num_reference` draws, `fedmcmc.fit` has `num_draws` weighted
    draws, and kernels have chains whose `num_rounds` include burn-in. Errors of the quadrature with
    `nodes` are differences to `most_nodes`.
    """
    if not {*methods} <= {*METHODS}:
        raise ValueError(f"methods must be some of {[*METHODS]}.")
    lengths = {"num_chains": num_chains, "num_rounds": num_rounds, "num_burnin": num_burnin}
    bench = Bench(getattr(loaders, data)()[0], jax.random.key(seed + 1), num_draws, lengths)
    exact, summary = bench.pooled(jax.random.key(seed), num_reference)
    counts = {"num_rows": bench.data.num_rows, "num_clients": bench.data.num_clients}
    table = from_numbers("data", {}, counts) + from_numbers("pooled NUTS", {}, summary)
    for method in methods:
        table += _compare(method, bench, exact)
    mean = exact.shared.mean((0, 1))
    return table + (_quadrature(bench.data, nodes, most_nodes, mean) if nodes else [])


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
        sizes = {"mu": data.rows["z"].shape[1], "tau": data.rows["z"].shape[1]}
        sizes |= {"slopes": data.rows["x"].shape[1], "sigma": 0 if self.binary else 1}
        self.names = [f"{site}[{i}]" for site, size in sizes.items() for i in range(size)]
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
        return self.sample(fedmcmc.lsd(posterior, **settings), self.mode)

    def gibbs(self, **settings: Any) -> Draws:
        """Sample by Gibbs steps: the server draws `mu` and `tau` given sums over the effects."""
        refresh = hierarchy.independence(num_tries=2)
        kernel = fedmcmc.fed_gibbs(self.centered, refresh=refresh, **settings)
        return self.sample(kernel, self.mode)

    def sample(self, kernel: Any, start: Any, local: bool = True) -> Draws:
        """Sample by a kernel, which with `local` draws effects as well."""
        settings = {**self.lengths, "record": fedmcmc.Record(local=local), "progress": False}
        samples = fedmcmc.sample(self.key, kernel, self.data, start, **settings)
        effects = _by_group(samples.constrained_local["effect"]) if local else None
        bits = float(np.sum(samples.totals["bits_up"] + samples.totals["bits_down"]))
        return Draws(_by_column(samples.constrained), effects, self.lengths["num_rounds"], bits)


METHODS: dict[str, Callable[[Bench], Draws]] = {
    "fit": Bench.fit,
    "Gaussian at the mode": lambda b: b.fit(effort="approximate"),
    "mala on marginal": lambda b: b.sample(
        fedmcmc.mala(b.marginal, b.mode, metric=b.white.metric), b.mode, local=False
    ),
    "lsd on marginal": lambda b: b.sample(
        fedmcmc.lsd(b.white.posterior, step_size=0.1), b.white.position, local=False
    ),
    "fed_gibbs": Bench.gibbs,
    "fed_gibbs, recentered": lambda b: b.gibbs(recenter=True, num_adapt=b.lengths["num_burnin"]),
    "lsd": Bench.joint,
    "lsd, small steps": lambda b: b.joint(step_size=0.02),
    "lsd, centered": lambda b: b.joint(centered=True),
    "lsd, ula effects": lambda b: b.joint(refresh=hierarchy.ula(0.2, num_steps=5)),
    "fit, shared effects": Bench.fit_plate,
}


def _compare(method: str, bench: Bench, exact: Draws) -> list[Row]:
    """Return the rows of a method; one that diverged has its seconds alone.

    Errors of means are in posterior sds, the largest of parameters. Megabits are summed over chains
    and clients, `ess` is the smallest of the shared parameters, and ``error_over_limit`` the
    largest error divided by its limit.
    """
    start, table = time.perf_counter(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedmcmc.SamplingWarning)  # rows show how far off it is
        try:
            drawn = METHODS[method](bench)
        except fedmcmc.NonFiniteError:
            return [Row(method, "seconds", time.perf_counter() - start, {})]
    shared, ess = drawn.shared, np.full(drawn.shared.shape[-1], drawn.ess or np.nan)
    numbers: dict[str, Any] = {"rounds": drawn.rounds, "megabits": drawn.bits / 1e6}
    if drawn.ess is None:
        ess = _smaller_ess(shared)
        slowest = {"slowest": bench.names[int(np.nanargmin(ess))]}
        per_round = 1000 * np.nanmin(ess) / shared[..., 0].size
        table += from_numbers(method, slowest, {"ess_per_1000_rounds": per_round})
        numbers["r_hat"] = np.nanmax(mixing(shared).rhat)
    if drawn.has_failed is not None:
        numbers["verdict_failed"] = drawn.has_failed
    exact_mean, exact_sd = exact.shared.mean((0, 1)), exact.shared.std((0, 1))
    gaps = np.abs(shared.mean((0, 1)) - exact_mean) / exact_sd
    ratios, worst = shared.std((0, 1)) / exact_sd, int(np.argmax(gaps))
    errors = {"error_of_means": gaps[worst], "error_of_sds": np.abs(ratios - 1).max()}
    if drawn.effects is not None and exact.effects is not None:
        distances = np.abs(drawn.effects.mean(0) - exact.effects.mean(0)) / exact.effects.std(0)
        errors["error_of_effects"] = distances.max()
    numbers |= {
        "ess": np.nanmin(ess),
        "error_of_means s.e.": np.sqrt(1 / ess[worst] + 1 / _smaller_ess(exact.shared)[worst]),
        "smallest_sd_ratio": ratios.min(),
        "largest_sd_ratio": ratios.max(),
        **errors,
        "error_over_limit": max(e / m for e, m in zip(errors.values(), LIMITS, strict=False)),
        "seconds": time.perf_counter() - start,
    }
    return table + from_numbers(method, {}, numbers)


def _by_column(drawn: Mapping[str, Any]) -> np.ndarray:
    """Return draws ``[chains, draws, d]`` of shared parameters, `tau` and `sigma` in logarithms."""
    sites = [site for site in ("mu", "tau", "slopes", "sigma") if site in drawn]
    values = {site: np.asarray(drawn[site], np.float64) for site in sites}
    return flat([np.log(v) if s in ("tau", "sigma") else v for s, v in values.items()], 2)


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
    has_failed = fitted.verdict.kind == "failed"
    return Draws(shared, _by_group(effects), report.rounds, bits, ess, has_failed)


def _quadrature(data: Any, nodes: Sequence[int], most_nodes: int, mean: np.ndarray) -> list[Row]:
    """Return errors of the log likelihood and of its gradient near the posterior mean, float64."""
    table: list[Row] = []
    with jax.enable_x64(True):
        num = data.rows["z"].shape[1]
        parts = jnp.split(jnp.asarray(mean)[None], (num, 2 * num), axis=1)
        position = dict(zip(("mu", "tau", "slopes"), parts, strict=True))

        def potential(point: Any, num_nodes: int) -> Any:
            posterior = models.random_effects(data, marginal_nodes=num_nodes)
            return fedmcmc.metrics.potential(posterior, data, point)[0]

        with_slope = jax.value_and_grad(potential)
        value, slope = with_slope(position, most_nodes)
        for num_nodes in nodes:
            estimate, estimated_slope = with_slope(position, num_nodes)
            gap = trees.ravel(estimated_slope) - trees.ravel(slope)
            errors = {"error_of_log_likelihood": value - estimate}
            errors["error_of_gradient"] = np.abs(gap).max()
            table += from_numbers("quadrature", {"nodes": num_nodes}, errors)
    return table


def funnel(
    num_hospitals: int,
    rows_per_hospital: int,
    spread: float,
    step_sizes: Sequence[float],
    num_chains: int,
    num_rounds: int,
    num_burnin: int,
    seed: int,
) -> list[Row]:
    """Compare the moments of all methods with a grid's.

    Langevin dynamics has every step size in `step_sizes` and no metric; `spread` is the standard
    deviation of the hospitals' effects, and rounds include burn-in.
    """
    data, _ = loaders.funnel(num_hospitals, rows_per_hospital, spread, seed)
    build = partial(fedmcmc.from_numpyro, models.means_of_groups, example=data)
    centered, shifted = build(centered=1.0), build(centered=0.0)
    draw = hierarchy.conjugate()  # exact draws of the effects, so that nothing else is off
    kernels: dict[tuple[str, float | None], Any] = {
        (name, step): fedmcmc.lsd(posterior, step_size=step, refresh=draw)
        for name, posterior in (("lsd, centered", centered), ("lsd", shifted))
        for step in step_sizes
    }
    gibbs, largest = partial(fedmcmc.fed_gibbs, centered, refresh=draw), step_sizes[-1]
    kernels["fed_gibbs", None] = gibbs()
    kernels["fed_gibbs, half absent", None] = gibbs(participation=fedmcmc.bernoulli(0.5))
    kernels["lsd on marginal", largest] = fedmcmc.lsd(fedmcmc.marginal(shifted), step_size=largest)
    mean, sd = exact([np.asarray(data.client_rows(i)["y"]) for i in range(num_hospitals)])
    table, key = [], jax.random.key(seed)
    start = {"mu": jnp.zeros(()), "tau": jnp.log(jnp.asarray(0.5))}

    def sample(kernel: Any, chain_key: Any) -> Any:
        state = kernel.init(chain_key, start, data)
        run = partial(rounds.run_rounds, thinning=THINNING)
        return run(kernel, data, chain_key, state, num_rounds)[1].draws

    for (method, step), kernel in kernels.items():
        chains = jax.jit(jax.vmap(partial(sample, kernel)))  # one that diverges stops no other
        draws = chains(jax.random.split(key, num_chains))
        settings = {} if step is None else {"step_size": step}
        errors = _errors(draws, num_burnin // THINNING, mean, sd)
        table += from_numbers(method, settings, errors)
    fitted = fedmcmc.fit(shifted, data, rng_key=key, progress=False)
    return table + from_numbers("fit", {}, _errors(fitted.samples.draws, 0, mean, sd))


def exact(hospitals: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return means and sds of `mu` and ``log tau`` on a grid, effects integrated out."""
    mu, log_tau = np.meshgrid(np.linspace(-3, 3, 801), np.linspace(-14, 3, 1701), indexing="ij")
    tau = np.exp(log_tau)
    log_p = -(mu**2) / 2 - tau**2 / 2 + log_tau
    for y in hospitals:
        log_p += norm.logpdf(y.astype(float).mean(), mu, np.sqrt(tau**2 + 1 / len(y)))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    values = np.stack([mu, log_tau])
    mean = (p * values).sum((1, 2))
    return mean, np.sqrt((p * values**2).sum((1, 2)) - mean**2)


def _errors(draws: Any, num_burnin: int, mean: np.ndarray, sd: np.ndarray) -> dict[str, float]:
    """Return the share of chains that diverged, and errors of the moments of the other chains.

    Errors of means are in standard deviations; standard deviations are ratios. All are NaN if all
    chains diverged.
    """
    drawn = np.stack([draws["mu"], draws["tau"]], axis=-1).astype(np.float64)[:, num_burnin:]
    finite = (np.isfinite(drawn) & (np.abs(drawn) < FURTHEST)).all((1, 2))
    errors: dict[str, float] = {"diverged": 1 - finite.mean()}
    chains = drawn[finite] if finite.any() else np.full((1, 1, 2), np.nan)
    gaps, ratios = (chains.mean((0, 1)) - mean) / sd, chains.std((0, 1)) / sd
    for name, gap, ratio in zip(("mu", "log_tau"), gaps, ratios, strict=True):
        errors |= {f"error_of_mean_{name}": gap, f"sd_ratio_{name}": ratio}
    return errors
