"""Gibbs sampling where latents have too many numbers per group to be integrated out."""

import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc._types import (
    ArrayTree,
    FederatedKernel,
    Population,
    Posterior,
    Static,
    as_functions,
)
from fedmcmc.diagnostics import (
    SamplingWarning,
    StopDecision,
    StoppingRule,
    Verdict,
    VerdictKind,
)
from fedmcmc.fitting._chains import ESS, RHAT, Chains, judge_chains
from fedmcmc.fitting._fitted import Fitted, reported
from fedmcmc.fitting._report import Stage
from fedmcmc.hierarchy import hmc, independence
from fedmcmc.kernels import fed_gibbs
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples
from fedmcmc.runs import Consortium

NUM_CHAINS, ADAPTING, FIRST_CHECK, GROWTH = 8, 300, 100, 1.25
"""Chains; rounds left out, in which steps adapt; draws per chain at the first check, and how many
times as many at each further one."""
FOR_INDEPENDENCE = 8
"""Numbers per group up to which proposals around the mode are accepted often enough."""


def check_many(posterior: Posterior, effort: str, max_rounds: int) -> None:
    """Raise `ValueError` unless Gibbs sampling takes the model, and may take its rounds."""
    local: Any = posterior.local
    size = trees.num_elements(local.like.tree)
    if local.population is None:
        raise ValueError(
            f"This model has {size} numbers per group, too many for fit to integrate out. Above "
            f"three it takes fedmcmc.fed_gibbs, for which local sites must be Normal or "
            f"MultivariateNormal given shared ones, in a Posterior of "
            f"from_numpyro(model, centered=1.0). fedmcmc.lsd(posterior, refresh=...) takes any "
            f"model, with an error of the order of its step size."
        )
    if effort == "approximate":
        raise ValueError(
            f"This model has {size} numbers per group, too many for fit to integrate out, so that "
            f'there is no Gaussian to stop at: effort must be "auto" or "exact".'
        )
    if max_rounds <= ADAPTING + FIRST_CHECK:
        raise ValueError(
            f"This model has {size} numbers per group, for which fit runs chains of Gibbs "
            f"sampling: max_rounds must be above {ADAPTING + FIRST_CHECK}, got {max_rounds}."
        )


def kernel_for(posterior: Posterior) -> FederatedKernel:
    """Return the Gibbs sampler of a model, whose refresh suits the size of a latent."""
    local: Any = posterior.local
    size = trees.num_elements(local.like.tree)
    small = size <= FOR_INDEPENDENCE
    refresh = independence(num_tries=2) if small else hmc(num_adapt=ADAPTING)
    # Any of the parameters of rows may be a slope of what varies between groups.
    population: Population = local.population
    flags = population.of_rows
    flags = flags.value if isinstance(flags, Static) else flags
    recenter = any(flags) and population.origin_fn is not None
    return fed_gibbs(posterior, refresh=refresh, num_adapt=ADAPTING, recenter=recenter)


def fit_by_gibbs(
    posterior: Posterior,
    consortium: Consortium,
    rng_key: Array,
    max_rounds: int,
    position: ArrayTree | None,
    progress: bool,
) -> Fitted:
    """Fit a model whose latents stay: chains that move them are all there is."""
    chains, stage = run_gibbs(
        rng_key,
        as_functions(posterior),
        consortium,
        position=position,
        max_rounds=max_rounds,
        progress=progress,
    )
    verdict = verdict_of(chains, stage, max_rounds)
    samples = replace(
        chains.samples,
        constrain_fn=posterior.constrain_fn,
        stopped={**chains.samples.stopped, "verdict": verdict},
    )
    size = trees.num_elements(chains.samples.state.broadcast.position) // samples.num_chains
    report = reported((stage,), verdict, samples, consortium.federation, size)
    return Fitted(samples, verdict, np.nan, np.nan, report, posterior)


def run_gibbs(
    rng_key: Array,
    posterior: Posterior,
    consortium: Consortium,
    *,
    position: ArrayTree | None,
    max_rounds: int,
    progress: bool,
) -> tuple[Chains, Stage]:
    """Run eight chains until R-hat and effective sizes of shared parameters are as wanted."""
    begun = time.perf_counter()
    layout = "{desc} [{elapsed}] {postfix}"
    with tqdm(desc="chains", bar_format=layout, disable=not progress) as bar:
        with warnings.catch_warnings():
            # What the chains say of themselves is in the verdict.
            warnings.simplefilter("ignore", SamplingWarning)
            samples = consortium.sample(
                rng_key,
                as_functions(kernel_for(posterior)),
                position=posterior.init_fn if position is None else position,
                num_burnin=ADAPTING,
                num_chains=NUM_CHAINS,
                until=_agreed(),
                max_rounds=max_rounds,
                progress=False,
            )
        rhat, ess, errors = judge_chains(samples.draws)
        num_rounds = int(np.max(samples.totals["rounds"]))
        accepted = samples.info.get("acceptance")
        of_rows = (
            ""
            if accepted is None
            else (f"; {float(np.mean(accepted)):.0%} of proposals for parameters of rows accepted")
        )
        why = (
            f"{ADAPTING} rounds of adaptation left out; clients move their effects, the server "
            f"draws what it needs their sums for{of_rows}"
        )
        method = f"Gibbs, {NUM_CHAINS} chains"
        chains = Chains(samples, num_rounds, rhat, ess, errors, method, why)
        stage = Stage(
            "chains",
            method,
            num_rounds,
            *_bits(samples),
            time.perf_counter() - begun,
            rhat=rhat,
            ess=ess,
            verdict="agree" if chains.agree else "disagree",
            why=why,
        )
        bar.set_postfix_str(stage.verdict)
    return chains, stage


def verdict_of(chains: Chains, stage: Stage, max_rounds: int) -> Verdict:
    """Return the verdict on chains that follow the posterior in the long run."""
    cost = f"{stage.rounds:,} rounds, {(stage.bits_up + stage.bits_down) / 1e6:,.1f} Mbit"
    details = f"{NUM_CHAINS} chains of Gibbs sampling, {cost}"
    if chains.agree:
        return Verdict(VerdictKind.PASSED, "MCMC", details=details, **chains.figures)
    longer = "raise max_rounds, or reparametrize" if chains.num_rounds >= max_rounds else "change"
    reason = f"chains do not agree, or are too short ({chains.wanted}): {longer} the model"
    return Verdict(VerdictKind.FAILED, reason=reason, details=details, **chains.figures)


def _agreed() -> StoppingRule:
    """Stop where `Chains` would agree."""

    def check(draws: ArrayTree) -> StopDecision:
        rhat, ess, errors = judge_chains(draws)
        figures = {"rhat": rhat, "ess": ess, "error": errors.mean, "sd_error": errors.sd}
        return StopDecision(rhat < RHAT and ess >= ESS and errors.are_small, figures)

    def next_check(num: int) -> int:
        return FIRST_CHECK if num == 0 else int(np.ceil(num * GROWTH))

    return StoppingRule(next_check, check, f"R-hat below {RHAT:g}, {ESS:g} effective draws", 2)


def _bits(samples: Samples) -> tuple[float, float]:
    up, down = (float(np.sum(samples.totals[way])) for way in ("bits_up", "bits_down"))
    return up, down
