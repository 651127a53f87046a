"""Stages of a fit: a row of its report each, what they cost, and the draws that come of them."""

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import ArrayTree, Broadcast, FederatedState
from fedmcmc.exact import Corrected
from fedmcmc.fitting._predicted import HOPELESS
from fedmcmc.fitting._report import Stage
from fedmcmc.records import Samples
from fedmcmc.storage import versions

COSTS = ("rounds", "bits_up", "bits_down")


def row_of(stage: str, method: str, found: Corrected) -> Stage:
    """Return the row of a correction."""
    totals = found.totals
    return Stage(
        stage,
        method,
        int(totals["rounds"]),
        totals["bits_up"],
        totals["bits_down"],
        0.0,
        khat=found.khat,
        ess=found.ess,
        verdict=str(found.verdict.kind),
        why=str(found.verdict),
    )


def forecast(method: str, khat: float, why: str) -> Stage:
    """Return the row of a prediction, which costs nothing, and may rule a correction out."""
    verdict = f"k-hat above {HOPELESS:g}" if khat > HOPELESS else "worth a round"
    return Stage("prediction", method, 0, 0.0, 0.0, 0.0, khat=khat, verdict=verdict, why=why)


def cost_of(samples: Samples, rounds: int | None = None) -> tuple[int, float, float]:
    """Return exchanges (those of all chains are one) and bits of all chains."""
    totals = samples.totals
    up, down = (float(np.sum(totals[way])) for way in ("bits_up", "bits_down"))
    return int(np.max(totals["rounds"])) if rounds is None else rounds, up, down


def one_chain(draws: ArrayTree) -> ArrayTree:
    """Return draws ``[num, *event]`` as those of one chain."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], draws)


def as_samples(draws: ArrayTree, stages: list[Stage]) -> Samples:
    """Return draws of equal weight, leaves ``[num_chains, num, *event]``."""
    num_chains, num = jax.tree.leaves(draws)[0].shape[:2]
    first = jax.tree.map(lambda leaf: jnp.asarray(leaf[:, 0]), draws)
    rounds = jnp.zeros(num_chains, jnp.int32)
    nothing = FederatedState(Broadcast(rounds, first), (), ())
    info = {"draw": np.tile(np.arange(num), (num_chains, 1))}
    totals = {
        name: np.full(num_chains, sum(getattr(stage, name) for stage in stages) / num_chains)
        for name in COSTS
    }
    return Samples(
        draws, info, nothing, totals, settings=what_was_done(stages), versions=versions()
    )


def what_was_done(stages: list[Stage]) -> dict[str, str]:
    """Return what was done, stage by stage, as a page of the draws tells it."""
    return {
        f"stage {number}: {stage.stage}": f"{stage.method}; {stage.rounds:,} "
        f"round{'s' * (stage.rounds != 1)}" + f"; {stage.verdict}" * bool(stage.verdict)
        for number, stage in enumerate(stages, 1)
    }
