"""Rounds, bits and seconds until a posterior is accurate: `fit`, exact kernels, tuned kernels.

``python -m benchmarks exact`` prints the table of docs/explanation/exactness.md. Every row has the
same criterion: every mean is within 0.05 sd of pooled NUTS, and every sd within 5 percent. For
chains, the rounds end at the first checkpoint from which on the criterion holds. The seconds
include the whole run to that checkpoint and its compilation.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from benchmarks import federations
from examples import demo
from experiments.data import DataNotFound

BIAS, SPREAD = 0.05, 0.05
CHECKPOINTS = (50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
CHAINS = 64
"""Number of chains of exact kernels, which share a message. Other kernels run 4 chains."""


def problems() -> Iterator[tuple[str, Any, Callable[[], fedmcmc.FederatedData]]]:
    yield "4 hospitals, d = 3", demo.model, lambda: demo.load_trial()[0]
    yield "heart disease, d = 7", federations.logistic, federations.heart
    yield "radon, 85 counties, d = 4", federations.linear, federations.radon
    logistic = federations.simulated
    yield (
        "logistic, 20 clients, d = 20",
        federations.logistic,
        lambda: logistic(federations.logistic, 20, (30, 300), 20, 0),
    )
    yield (
        "logistic, 20 clients, d = 100",
        federations.logistic,
        lambda: logistic(federations.logistic, 20, (100, 400), 100, 1),
    )
    yield (
        "Poisson, 20 clients, d = 4",
        federations.poisson,
        lambda: logistic(federations.poisson, 20, (5, 100), 4, 1),
    )


def reference(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, start: Any
) -> tuple[np.ndarray, float]:
    """Return draws of NUTS on the pooled rows, and the seconds of the run."""
    start_time = time.perf_counter()
    draws = federations.truth(posterior, data, start, num_samples=5000)
    return draws, time.perf_counter() - start_time


def blackjax_seconds(
    posterior: fedmcmc.Posterior, data: fedmcmc.FederatedData, start: Any
) -> float:
    """Return the seconds of BlackJAX's NUTS with window adaptation and the same number of draws."""
    import blackjax

    def log_density(position: Any) -> jax.Array:
        terms = posterior.loglikelihood_fn(position, data.rows)
        return posterior.logprior_fn(position) + jnp.sum(terms)

    start_time = time.perf_counter()

    def chain(key: jax.Array) -> Any:
        warm_key, key = jax.random.split(key)
        warmup = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = warmup.run(warm_key, start, num_steps=1000)
        step = blackjax.nuts(log_density, **parameters).step

        def one(state: Any, key: jax.Array) -> Any:
            state, _ = step(key, state)
            return state, state.position

        return jax.lax.scan(one, state, jax.random.split(key, 5000))[1]

    jax.block_until_ready(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(8), 4)))
    return time.perf_counter() - start_time


def errors(draws: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Return the largest error of a mean [sds] and the largest relative error of an sd."""
    bias = np.abs(draws.mean(0) - exact.mean(0)) / exact.std(0)
    return float(bias.max()), float(np.abs(draws.std(0) / exact.std(0) - 1).max())


def is_within(bias: float, spread: float) -> str:
    """Return ``"yes"`` if both errors are within the limits, else ``"no"``."""
    return "yes" if bias <= BIAS and spread <= SPREAD else "no"


def arrival(draws: Any, exact: np.ndarray, burnin: int) -> int | None:
    """Return the first checkpoint from which all errors are within the limits, or ``None``."""
    arrived = None
    num = jax.tree.leaves(draws)[0].shape[1]
    for checkpoint in CHECKPOINTS:
        if not burnin < checkpoint <= num:
            continue
        part = jax.tree.map(lambda leaf, c=checkpoint: leaf[:, burnin:c], draws)
        bias, spread = errors(federations.flat(part), exact)
        within = is_within(bias, spread) == "yes"
        arrived = (arrived or checkpoint) if within else None
    return arrived


def chain_kernels(
    white: fedmcmc.surrogates.Whitened, data: fedmcmc.FederatedData
) -> dict[str, Any]:
    """Return kernels and their numbers of chains; `fsgld` and `fa_hmc` are tuned."""
    model = white.posterior

    def tuned(build: Callable[..., Any], **grid: Any) -> Any:
        return fedmcmc.tune(build, model, data, white.surrogates, grid=grid or None).kernel

    return {
        "`hmc`": (fedmcmc.hmc(model, white.position), CHAINS),
        "`fsgld`": (
            tuned(
                lambda step_size, num_local_steps: fedmcmc.fsgld(
                    model, white.surrogates, step_size=step_size, num_local_steps=num_local_steps
                ),
                num_local_steps=[10],
            ),
            4,
        ),
        "`qlsd_pp`": (
            fedmcmc.qlsd_pp(
                model,
                step_size=0.08,
                batch_size=0.2,
                refresh_every=100,
                compressor=fedmcmc.quantize(16),
            ),
            4,
        ),
        "`fa_hmc`": (
            tuned(
                lambda step_size: fedmcmc.fa_hmc(
                    model,
                    step_size=step_size,
                    num_integration_steps=5,
                    num_local_steps=1,
                    control_variate=True,
                )
            ),
            4,
        ),
    }


def bench() -> None:
    print("| model | method | within limits | rounds | Mbit | seconds | mean off, sds | sds off |")
    print("|---|---|---|---|---|---|---|---|")

    def line(*cells: Any) -> None:
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)

    for name, model, load in problems():
        try:
            data = load()
        except DataNotFound as error:
            print(f"{name} is skipped. {error}")
            continue
        posterior = fedmcmc.from_numpyro(model, example=data)
        key = jax.random.key(1)
        start_time = time.perf_counter()
        fitted = fedmcmc.fit(model, data, rng_key=key, progress=False)
        seconds = time.perf_counter() - start_time
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf[0, 0]), fitted.samples.draws)
        exact, nuts = reference(posterior, data, start)
        bias, spread = errors(federations.flat(fitted.samples.draws), exact)
        megabits = (fitted.report.bits_up + fitted.report.bits_down) / 1e6
        kind = fitted.verdict.split(":")[0]
        cost = (f"{fitted.report.rounds:,}", f"{megabits:,.1f}", f"{seconds:.1f}")
        line(name, f"`fit`: {kind}", is_within(bias, spread), *cost, f"{bias:.3f}", f"{spread:.1%}")
        white = fedmcmc.whiten(posterior, data)
        for title, (kernel, chains) in chain_kernels(white, data).items():
            line("", title, *_of_chains(kernel, chains, data, white, exact))
        line("", "`fed_ep`, at rest", *_of_approximation(data, white, exact))
        pooled_seconds = {"NUTS on pooled rows, NumPyro": nuts}
        pooled_seconds["NUTS, BlackJAX"] = blackjax_seconds(posterior, data, start)
        for title, seconds in pooled_seconds.items():
            line("", title, "", "", "", f"{seconds:.1f}", "", "")


def _of_approximation(
    data: fedmcmc.FederatedData, white: fedmcmc.surrogates.Whitened, exact: np.ndarray
) -> tuple[str, ...]:
    """Return the cells of FedEP's row: verdict, rounds, megabits, seconds, errors."""
    if exact.shape[1] > 64:
        return "takes up to 64 parameters", "", "", "", "", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start_time = time.perf_counter()
        samples = fedmcmc.sample(
            jax.random.key(1),
            fedmcmc.fed_ep(white.posterior),
            data,
            white.position,
            until=fedmcmc.at_rest(),
            max_rounds=60,
            progress=False,
        )
        seconds = time.perf_counter() - start_time
    bias, spread = errors(federations.flat(samples.final_draws), exact)
    total = sum(float(samples.totals[way].sum()) for way in ("bits_up", "bits_down")) / 1e6
    cost = (f"{samples.totals['rounds'][0]}", f"{total:,.2f}", f"{seconds:.1f}")
    return is_within(bias, spread), *cost, f"{bias:.3f}", f"{spread:.1%}"


def _of_chains(
    kernel: Any, chains: int, data: Any, white: fedmcmc.surrogates.Whitened, exact: np.ndarray
) -> tuple[str, ...]:
    """Return the cells of a kernel's row: verdict, rounds, megabits, seconds, errors."""
    num_rounds = 2000 if chains == CHAINS else CHECKPOINTS[-1]

    def run(num_rounds: int) -> tuple[Any, float]:
        start_time = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = fedmcmc.sample(
                jax.random.key(2),
                kernel,
                data,
                white.position,
                num_rounds=num_rounds,
                num_chains=chains,
                progress=False,
            )
        return samples, time.perf_counter() - start_time

    try:
        samples, seconds = run(num_rounds)
    except fedmcmc.NonFiniteError:
        return "no: it diverges", "", "", "", "", ""
    burnin = 25
    bias, spread = errors(
        federations.flat(jax.tree.map(lambda leaf: leaf[:, burnin:], samples.draws)), exact
    )
    arrived = arrival(samples.draws, exact, burnin)
    if arrived is not None:
        num_rounds = arrived
        jax.clear_caches()
        samples, seconds = run(arrived)
    bits = sum(float(samples.totals[way].sum()) for way in ("bits_up", "bits_down")) / 1e6
    cost = (f"{num_rounds:,}", f"{bits:,.1f}", f"{seconds:.1f}")
    return "no" if arrived is None else "yes", *cost, f"{bias:.3f}", f"{spread:.1%}"


if __name__ == "__main__":
    bench()
