"""A study of our own: surrogates of FSGLD refreshed by expectation propagation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro.infer import MCMC, NUTS
from sklearn.datasets import load_breast_cancer

import fedmcmc
from experiments import checks, spreading
from experiments.fed_ep import refresh_figures
from experiments.fed_ep.refresh_figures import draw
from fedmcmc import Placement, inference

__all__ = ["Config", "draw", "run"]


@dataclass(frozen=True)
class Config:
    """Settings.

    Attributes
    ----------
    num_clients, num_rows, dim
        Rows in all, and principal components that serve as features, besides a constant.
    proportion
        Of a client's rows that have its dominant label: near one, a client knows little more than
        a side on which the coefficients lie, and its likelihood is far from Gaussian.
    prior_scale
        Standard deviation of every coefficient.
    step_size
        Of all chains.
    local_steps
        Of DSGLD and FSGLD, the ``T`` of a visit.
    ep_rounds
        Rounds of FedEP after which its sites are taken for surrogates.
    damping, ep_samples, ep_thinning, ep_step_size
        Of FedEP, whose clients draw from their tilted distributions by Langevin steps.
    num_chains, num_updates, burnin_updates
        Chains, and local steps of each.
    """

    seed: int = 0
    num_clients: int = 8
    num_rows: int = 80
    dim: int = 4
    proportion: float = 0.9
    prior_scale: float = 2.5
    step_size: float = 5e-4
    local_steps: tuple[int, ...] = (1, 10, 30, 100, 300)
    ep_rounds: tuple[int, ...] = (1, 2, 5, 10)
    damping: float = 0.5
    ep_samples: int = 4000
    ep_thinning: int = 20
    ep_step_size: float = 5e-3
    num_chains: int = 64
    num_updates: int = 100_000
    burnin_updates: int = 10_000
    num_reference: int = 20_000

    def __post_init__(self) -> None:
        checks.at_least(2, self, "num_clients", "num_chains", "ep_samples")
        checks.at_least(1, self, "dim", "ep_thinning", "num_reference", "num_rows")
        checks.positive(self, "prior_scale", "step_size", "ep_step_size")
        for name in ("proportion", "damping"):
            value = getattr(self, name)
            checks.require(0 < value <= 1, f"{name} must lie in (0, 1]", value)
        for name in ("local_steps", "ep_rounds"):
            value = getattr(self, name)
            checks.require(
                len(value) > 0 and min(value) >= 1, f"{name} must be positive numbers", value
            )
        checks.require(
            self.num_updates - self.burnin_updates >= 10 * max(self.local_steps),
            f"num_updates must exceed burnin_updates={self.burnin_updates} by ten visits",
            self.num_updates,
        )


COLUMNS = ("error of the mean", "its Monte Carlo error", "error of sds", "theirs")
RAN_OFF = 100
"""Chains that go so many standard deviations of the prior away are lost."""


class Moments(NamedTuple):
    """Mean and standard deviations of a sampler, and Monte Carlo errors of both; all ``[d]``."""

    mean: np.ndarray
    sd: np.ndarray
    error: np.ndarray
    sd_error: np.ndarray


def federation(config: Config) -> fedmcmc.FederatedData:
    """Return rows of the breast cancer data by dominant label: features and a sign."""
    raw = load_breast_cancer()
    x = (raw.data - raw.data.mean(axis=0)) / raw.data.std(axis=0)
    _, _, basis = np.linalg.svd(x, full_matrices=False)
    scores = x @ basis[: config.dim].T
    rng = np.random.default_rng(config.seed)
    rows = rng.permutation(len(x))[: config.num_rows]
    features = np.concatenate([scores[rows] / scores.std(axis=0), np.ones((len(rows), 1))], axis=1)
    sign = np.where(raw.target[rows] > 0, 1.0, -1.0)
    ids = fedmcmc.partition.dominant_label(
        jax.random.key(config.seed), sign, config.num_clients, config.proportion
    )
    named = {"x": features.astype(np.float32), "sign": sign.astype(np.float32)}
    return fedmcmc.FederatedData.from_arrays(named, ids)


def model(config: Config) -> fedmcmc.Posterior:
    """Return logistic regression."""

    def logprior(theta: Array) -> Array:
        return -0.5 * jnp.sum((theta / config.prior_scale) ** 2)

    def loglikelihood(theta: Array, rows: dict[str, Array]) -> Array:
        return -jax.nn.softplus(-rows["sign"] * (rows["x"] @ theta))

    return fedmcmc.Posterior(logprior, loglikelihood)


def reference(config: Config, posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData) -> Moments:
    """Return the moments of NUTS on all rows together."""

    def potential(theta: Array) -> Array:
        return -posterior.logprior_fn(theta) - jnp.sum(posterior.loglikelihood_fn(theta, data.rows))

    run = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=1000,
        num_samples=config.num_reference,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = jnp.zeros((4, config.dim + 1))
    run.run(jax.random.key(config.seed + 1), init_params=start)
    draws = np.asarray(run.get_samples(group_by_chain=True), np.float64)
    summary = numpyro.diagnostics.summary({"theta": draws})["theta"]
    if not np.max(summary["r_hat"]) < 1.01:
        raise RuntimeError(f"NUTS has not converged: R-hat {np.max(summary['r_hat']):.3f}.")
    flat = draws.reshape(-1, draws.shape[-1])
    sd, size = flat.std(axis=0), summary["n_eff"]
    return Moments(flat.mean(axis=0), sd, sd / size**0.5, sd / (2 * size) ** 0.5)


def refreshed(
    config: Config,
    posterior: fedmcmc.Posterior,
    data: fedmcmc.FederatedData,
    placement: Placement,
) -> dict[int, fedmcmc.Gaussian]:
    """Return FedEP's sites after each number of rounds, dense."""
    mean = inference.langevin_mean(
        config.ep_step_size,
        num_samples=config.ep_samples,
        num_burnin=config.ep_samples // 10,
        thinning=config.ep_thinning,
    )
    kernel = fedmcmc.fed_ep(
        posterior, inference=inference.mcmc(mean), structure="dense", damping=config.damping
    )
    # The first round fits each likelihood under the prior alone and takes it whole.
    first = fedmcmc.fed_ep(posterior, inference=inference.mcmc(mean), structure="dense")
    state, sites = None, {}
    for round_ in range(1, max(config.ep_rounds) + 1):
        samples = spreading.sample(
            jax.random.key(config.seed + 2),
            first if state is None else kernel,
            data,
            jnp.zeros(config.dim + 1) if state is None else None,
            state=state,
            num_rounds=1,
            placement=placement,
            progress=False,
        )
        state = samples.state
        if round_ in config.ep_rounds:
            sites[round_] = jax.tree.map(lambda leaf: leaf[0], state.clients.site)
    return sites


def chains(
    config: Config,
    kernel: fedmcmc.FederatedKernel,
    data: fedmcmc.FederatedData,
    steps: int,
    placement: Placement,
) -> Moments | None:
    """Return the moments of a sampler's chains; ``None`` if one ran off."""
    burnin = -(-config.burnin_updates // steps)
    try:
        samples = spreading.sample(
            jax.random.key(config.seed + 3),
            kernel,
            data,
            jnp.zeros(config.dim + 1),
            num_rounds=config.num_updates // steps,
            num_burnin=burnin,
            thinning=max(100 // steps, 1),
            num_chains=config.num_chains,
            placement=placement,
            progress=False,
        )
    except fedmcmc.NonFiniteError:
        return None
    draws = np.asarray(samples.draws, np.float64)
    if np.abs(draws).max() > RAN_OFF * config.prior_scale:
        return None
    mean, sd = draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))
    # Chains are independent: the spread of what each gives is the error of their average.
    error = draws.mean(axis=1).std(axis=0, ddof=1) / config.num_chains**0.5
    squares = np.square(draws - mean).mean(axis=1).std(axis=0, ddof=1) / config.num_chains**0.5
    return Moments(mean, sd, error, squares / (2 * sd))


def run(config: Config, out: Path, placement: Placement = spreading.ONE_DEVICE) -> dict[str, Any]:
    """Run all surrogates and numbers of local steps; write the figure."""
    data, posterior = federation(config), model(config)
    truth = reference(config, posterior, data)
    start = jnp.zeros(config.dim + 1)
    centre = fedmcmc.surrogates.mode(posterior, data, start).position
    surrogates = {
        "none (DSGLD)": None,
        "Taylor at the common mode": fedmcmc.surrogates.taylor(posterior, data, centre),
        "Laplace, each client's own": fedmcmc.surrogates.laplace(
            jax.random.key(0), posterior, data, position=start, prior_fraction=1.0, check="ignore"
        ),
    }
    for rounds, sites in refreshed(config, posterior, data, placement).items():
        surrogates[f"FedEP, {rounds} round{'s' if rounds > 1 else ''}"] = sites
    table = []
    step_size = config.step_size
    pooled = chains(config, fedmcmc.sgld(posterior, step_size=step_size), data, 1, placement)
    table.append(_row("one machine (SGLD)", 1, pooled, truth))
    for name, q in surrogates.items():
        for steps in config.local_steps:
            given: dict[str, Any] = dict(step_size=step_size, num_local_steps=steps)
            if q is None:
                kernel = fedmcmc.dsgld(posterior, **given)
            else:
                kernel = fedmcmc.fsgld(posterior, q, **given)
            found = chains(config, kernel, data, steps, placement)
            table.append(_row(name, steps, found, truth))
    metrics = {
        "table": table,
        "num_rows": data.num_rows,
        "num_clients": data.num_clients,
        "dim": config.dim + 1,
        "truth": {"mean": truth.mean, "sd": truth.sd},
        "ep_rounds": list(config.ep_rounds),
        "local_steps": list(config.local_steps),
        "step_size": step_size,
    }
    metrics["figures"] = refresh_figures.draw(metrics, out)
    return metrics


def _row(name: str, steps: int, found: Moments | None, truth: Moments) -> dict[str, Any]:
    """Return root mean squares over coordinates, in posterior standard deviations."""
    row: dict[str, Any] = {"surrogates": name, "local steps": steps}
    if found is None:
        return row | dict.fromkeys(COLUMNS)
    values = (
        _rms((found.mean - truth.mean) / truth.sd),
        _rms(np.hypot(found.error, truth.error) / truth.sd),
        _rms(found.sd / truth.sd - 1),
        _rms(np.hypot(found.sd_error, truth.sd_error) / truth.sd),
    )
    return row | dict(zip(COLUMNS, values, strict=True))


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
