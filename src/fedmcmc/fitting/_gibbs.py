"""Gibbs sampling for models with too many random effects per group to integrate out."""

import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array

from fedmcmc.diagnostics import (
    MAX_RHAT,
    MIN_ESS,
    SamplingWarning,
    StopDecision,
    StoppingRule,
    Verdict,
    VerdictKind,
)
from fedmcmc.fitting._chains import REQUIREMENTS, Chains, is_converged, judge_chains
from fedmcmc.fitting._fitted import Fitted, make_report
from fedmcmc.fitting._progress import ticking
from fedmcmc.fitting._report import StageReport, cost_of
from fedmcmc.hierarchy import hmc, independence
from fedmcmc.kernels import fed_gibbs
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    Population,
    Posterior,
    Static,
    as_functions,
)

NUM_CHAINS, NUM_ADAPT = 8, 300
"""Number of chains; number of initial rounds that adapt the step sizes and are excluded."""
INITIAL_CHECK, GROWTH = 100, 1.25
"""Number of draws per chain at the initial check; growth factor until the next check."""
MAX_INDEPENDENCE_SIZE = 8
"""Number of effects per group up to which independent proposals are accepted often enough."""


def check_gibbs(posterior: Posterior, effort: str, max_rounds: int) -> None:
    """Raise `ValueError` unless Gibbs sampling supports the model and the settings."""
    local: Any = posterior.local
    size = trees.num_elements(local.like.tree)
    if local.population is None:
        raise ValueError(
            f"This model has {size} effects per group, too many for fit to integrate out. Above "
            f"three, fit needs a model for fedmcmc.fed_gibbs: a Posterior from "
            f"from_numpyro(model, centered=1.0) whose local sites are Normal or MultivariateNormal "
            f"given the shared sites. fedmcmc.lsd(posterior, refresh=...) supports any model, with "
            f"an error of the order of its step size."
        )
    if effort == "approximate":
        raise ValueError(
            f"This model has {size} effects per group, too many for fit to integrate out, so it "
            f'has no Gaussian approximation: effort must be "auto" or "exact".'
        )
    if max_rounds <= NUM_ADAPT + INITIAL_CHECK:
        raise ValueError(
            f"This model has {size} effects per group, so fit runs chains of Gibbs sampling: "
            f"max_rounds must be above {NUM_ADAPT + INITIAL_CHECK}, got {max_rounds}."
        )


def _build_kernel(posterior: Posterior) -> FederatedKernel:
    """Return the Gibbs sampler with a refresh that suits the number of effects per group."""
    local: Any = posterior.local
    is_small = trees.num_elements(local.like.tree) <= MAX_INDEPENDENCE_SIZE
    refresh = independence(num_tries=2) if is_small else hmc(num_adapt=NUM_ADAPT)
    # A parameter of the rows may be the slope of a covariate that varies between groups.
    population: Population = local.population
    flags = population.row_parameters
    flags = flags.value if isinstance(flags, Static) else flags
    recenter = any(flags) and population.origin_fn is not None
    return fed_gibbs(posterior, refresh=refresh, num_adapt=NUM_ADAPT, recenter=recenter)


def fit_by_gibbs(
    posterior: Posterior,
    consortium: Consortium,
    rng_key: Array,
    max_rounds: int,
    position: ArrayTree | None,
    progress: bool,
) -> Fitted:
    """Fit a model by chains that sample shared parameters and random effects."""
    chains, stage = _run_gibbs(
        rng_key,
        as_functions(posterior),
        consortium,
        position=position,
        max_rounds=max_rounds,
        progress=progress,
    )
    verdict = _judge(chains, stage, max_rounds)
    samples = replace(
        chains.samples,
        constrain_fn=posterior.constrain_fn,
        stopped={**chains.samples.stopped, "verdict": verdict},
    )
    size = trees.num_elements(chains.samples.state.broadcast.position) // samples.num_chains
    report = make_report((stage,), verdict, samples, consortium.federation, size)
    return Fitted(samples, verdict, np.nan, np.nan, report, posterior)


def _run_gibbs(
    rng_key: Array,
    posterior: Posterior,
    consortium: Consortium,
    *,
    position: ArrayTree | None,
    max_rounds: int,
    progress: bool,
) -> tuple[Chains, StageReport]:
    """Run eight chains until the draws of the shared parameters agree."""
    start = time.perf_counter()
    with ticking("chains", progress) as bar:
        with warnings.catch_warnings():
            # The verdict reports the diagnostics of the chains.
            warnings.simplefilter("ignore", SamplingWarning)
            samples = consortium.sample(
                rng_key,
                as_functions(_build_kernel(posterior)),
                position=posterior.init_fn if position is None else position,
                num_burnin=NUM_ADAPT,
                num_chains=NUM_CHAINS,
                until=_stop_on_agreement(),
                max_rounds=max_rounds,
                progress=False,
            )
        rhat, ess, errors = judge_chains(samples.draws)
        why = (
            f"{NUM_ADAPT} rounds of adaptation excluded; clients sample their effects, the server "
            f"samples the shared parameters"
        )
        acceptance = samples.info.get("acceptance")
        if acceptance is not None:
            why += f"; {float(np.mean(acceptance)):.0%} of proposals for row parameters accepted"
        cost = cost_of(samples)
        method = f"Gibbs, {NUM_CHAINS} chains"
        chains = Chains(samples, cost[0], rhat, ess, errors, method, why)
        stage = StageReport(
            "chains",
            method,
            *cost,
            time.perf_counter() - start,
            rhat=rhat,
            ess=ess,
            verdict="agree" if chains.agree else "disagree",
            why=why,
        )
        bar.set_postfix_str(stage.verdict)
    return chains, stage


def _judge(chains: Chains, stage: StageReport, max_rounds: int) -> Verdict:
    cost = f"{stage.rounds:,} rounds, {(stage.bits_up + stage.bits_down) / 1e6:,.1f} Mbit"
    details = f"{NUM_CHAINS} chains of Gibbs sampling, {cost}"
    if chains.agree:
        return Verdict(VerdictKind.PASSED, "MCMC", details=details, **chains.figures)
    remedy = "raise max_rounds, or reparametrize" if chains.num_rounds >= max_rounds else "change"
    reason = f"chains do not agree, or are too short ({REQUIREMENTS}): {remedy} the model"
    return Verdict(VerdictKind.FAILED, reason=reason, details=details, **chains.figures)


def _stop_on_agreement() -> StoppingRule:
    """Return the rule that stops the chains as soon as they agree."""

    def check(draws: ArrayTree) -> StopDecision:
        rhat, ess, errors = judge_chains(draws)
        figures = {"rhat": rhat, "ess": ess, "error": errors.mean, "sd_error": errors.sd}
        return StopDecision(is_converged(rhat, ess, errors), figures)

    def next_check(num: int) -> int:
        return INITIAL_CHECK if num == 0 else int(np.ceil(num * GROWTH))

    return StoppingRule(
        next_check, check, f"R-hat below {MAX_RHAT:g}, {MIN_ESS:g} effective draws", 2
    )
