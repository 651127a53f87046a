"""A study of ours: surrogates of FSGLD that expectation propagation refits in every round."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from numpyro.diagnostics import effective_sample_size
from sklearn.datasets import load_breast_cancer

import fedmcmc
from experiments import models, setup
from experiments.claims import Number
from experiments.reference import nuts, require_converged
from experiments.tidy import Row, from_numbers
from fedmcmc import inference, surrogates


def rows(
    data: Mapping[str, Any],
    prior_scale: float,
    step_size: float,
    local_steps: Sequence[int],
    fed_ep: Mapping[str, Any],
    num_chains: int,
    num_updates: int,
    num_burnin_updates: int,
    num_reference_draws: int,
    seed: int,
) -> list[Row]:
    """Return errors of means and standard deviations against NUTS, in posterior sds.

    They are root mean squares over coefficients, NaN where a chain diverged. An update is a local
    step of a chain; `fed_ep` has arguments of `_fit_sites`.
    """
    clients = breast_cancer(**data)
    posterior = models.logistic(clients, prior_precision=prior_scale**-2)
    start = jnp.zeros(clients.rows["features"].shape[1])
    exact = _run_nuts(seed + 1, posterior, clients, start, num_reference_draws)
    mode = surrogates.mode(posterior, clients, start).position
    options: dict[str, Any] = dict(position=start, prior_fraction=1.0, check="ignore")
    laplace = surrogates.laplace(jax.random.key(0), posterior, clients, **options)
    gaussians = {
        "none (DSGLD)": None,
        "Taylor at the common mode": surrogates.taylor(posterior, clients, mode),
        "Laplace, each client's own": laplace,
        **_fit_sites(seed + 2, posterior, clients, start, **fed_ep),
    }
    kernels = {("one machine (SGLD)", 1): fedmcmc.sgld(posterior, step_size=step_size)}
    for (method, gaussian), steps in itertools.product(gaussians.items(), local_steps):
        build: Any = fedmcmc.dsgld
        if gaussian is not None:
            build = partial(fedmcmc.fsgld, surrogates=gaussian)
        kernels[method, steps] = build(posterior, step_size=step_size, num_local_steps=steps)
    lengths: dict[str, Any] = dict(num_chains=num_chains, progress=False)
    tidy_rows = []
    for (method, steps), kernel in kernels.items():
        lengths |= dict(num_rounds=num_updates // steps, thinning=max(100 // steps, 1))
        lengths["num_burnin"] = -(-num_burnin_updates // steps)
        numbers: dict[str, Any] = {"mean_error": None, "sd_error": None}
        with contextlib.suppress(fedmcmc.NonFiniteError):
            samples = fedmcmc.sample(jax.random.key(seed + 3), kernel, clients, start, **lengths)
            draws = np.asarray(samples.draws, np.float64)
            if np.abs(draws).max() <= 100 * prior_scale:  # else it diverged
                numbers = _errors(draws, exact)
        tidy_rows += from_numbers(method, {"local_steps": steps}, numbers)
    return tidy_rows


def breast_cancer(
    num_clients: int, num_rows: int, num_components: int, proportion: float, seed: int
) -> fedmcmc.FederatedData:
    """Return principal components of breast cancers, a constant, and whether each is benign.

    A proportion of each client's rows has one label. If it is near one, a client's rows determine
    little more than a side on which coefficients lie, and its likelihood is far from Gaussian.
    """
    raw = load_breast_cancer()
    x = (raw.data - raw.data.mean(axis=0)) / raw.data.std(axis=0)
    scores = x @ np.linalg.svd(x, full_matrices=False).Vh[:num_components].T
    chosen = np.random.default_rng(seed).permutation(len(x))[:num_rows]
    features = np.append(scores[chosen] / scores.std(axis=0), np.ones((num_rows, 1)), axis=1)
    columns = {"features": features.astype("f4"), "label": raw.target[chosen].astype("i4")}
    key = jax.random.key(seed)
    ids = fedmcmc.partition.dominant_label(key, columns["label"], num_clients, proportion)
    return fedmcmc.FederatedData.from_arrays(columns, ids)


def _run_nuts(
    seed: int, posterior: Any, clients: Any, start: Any, num_draws: int
) -> list[np.ndarray]:
    """Return means and sds of NUTS on all rows, and Monte Carlo errors of both, each ``[dim]``."""
    potential_fn = Partial(setup.potential, posterior, clients.rows)
    counts = dict(num_warmup=1000, num_draws=num_draws)
    chains = nuts(jax.random.key(seed), potential_fn, jnp.tile(start, (4, 1)), **counts)
    draws = np.asarray(require_converged(chains).draws, np.float64)
    sd, ess = draws.std(axis=(0, 1)), effective_sample_size(draws)
    return [draws.mean(axis=(0, 1)), sd, sd / ess**0.5, sd / (2 * ess) ** 0.5]


def _fit_sites(
    seed: int,
    posterior: Any,
    clients: Any,
    start: Any,
    rounds: Sequence[int],
    damping: float,
    step_size: float,
    **chain: int,
) -> dict[str, fedmcmc.Gaussian]:
    """Return sites of FedEP after each number of rounds, by the names of the methods.

    Clients draw from their tilted distributions by Langevin steps. Rounds are damped except for the
    first, which fits each likelihood under the prior alone.
    """
    mean = inference.langevin_mean(step_size, num_burnin=chain["num_samples"] // 10, **chain)
    moments: dict[str, Any] = dict(inference=inference.mcmc(mean), structure="dense")
    kernel, sites = fedmcmc.fed_ep(posterior, **moments), {}
    state, position, num_done = None, start, 0
    for num in sorted({1, *rounds}):
        common: dict[str, Any] = dict(state=state, num_rounds=num - num_done, progress=False)
        state = fedmcmc.sample(jax.random.key(seed), kernel, clients, position, **common).state
        position, num_done = None, num
        kernel = fedmcmc.fed_ep(posterior, damping=damping, **moments)
        if num in rounds:
            name = f"FedEP, {num} round{'s' if num > 1 else ''}"
            sites[name] = jax.tree.map(lambda leaf: leaf[0], state.clients.site)
    return sites


def _errors(draws: np.ndarray, exact: Sequence[np.ndarray]) -> dict[str, Number]:
    """Return errors of the draws ``[num_chains, num_draws, dim]`` of independent chains."""
    mean, sd = draws.mean(axis=(0, 1)), draws.std(axis=(0, 1))
    averages = draws.mean(axis=1), np.square(draws - mean).mean(axis=1) / (2 * sd)
    errors = {}
    for i, (name, moment) in enumerate((("mean_error", mean), ("sd_error", sd))):
        error = averages[i].std(axis=0, ddof=1) / len(draws) ** 0.5
        gaps = moment - exact[i], np.hypot(error, exact[2 + i])
        errors[name] = Number(*(float(np.mean((gap / exact[1]) ** 2) ** 0.5) for gap in gaps))
    return errors
