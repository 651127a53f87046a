"""What a run warns of at its end, and the error that ends it where a chain turns non-finite."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc._types import Broadcast, FederatedKernel
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import (
    FEWEST_DRAWS,
    DiagnosisWarning,
    SamplingWarning,
    diagnose,
    silenced,
)
from fedmcmc.pytrees import num_bytes
from fedmcmc.records import Samples

GROWN = 1e6
"""Positions that many times larger than where they began (or than one) make a run suspicious."""
MOST_BYTES = 2**31
"""Draws that take more memory than that are not judged."""
MOST_LOST = 0.5
"""Share of the clients' results that may be lost without a warning."""


class NonFiniteError(FloatingPointError):
    """The state of a chain turned infinite or not-a-number.

    Attributes
    ----------
    samples
        The `fedmcmc.Samples` kept before the first non-finite round.
    round
        The first non-finite round.
    chains
        The chains that are not finite.
    """

    def __init__(self, message: str, samples: Samples, round_: int, chains: list[int]) -> None:
        super().__init__(message)
        self.samples = samples
        self.round = round_
        self.chains = chains

    def __reduce__(self) -> tuple[Any, ...]:
        """Say what it is made of again, for processes that hand it on."""
        return type(self), (self.args[0], self.samples, self.round, self.chains)


def warn(message: str, *, depth: int = 6, category: type = SamplingWarning) -> None:
    """Warn, attributing the warning to the user's line `depth` frames up.

    The default is that of a call of `sample` where `Run.go` ends.
    """
    warnings.warn(message, category, stacklevel=depth)


def diagnosed(samples: Samples, kernel: FederatedKernel, data: Any, *, positions: bool) -> Samples:
    """Return samples with what their draws say of themselves, and warn of what is wrong.

    Nothing is computed where fewer than 400 draws were kept, or too many, the user's filters ignore
    the warnings, what was kept are no `positions`, or the kernel does not sample.
    """
    target, bytes_ = kernel.target, num_bytes(samples.draws)
    too_few = samples.num_chains * samples.num_draws < FEWEST_DRAWS
    if too_few or not positions or target is None or silenced() or not 0 < bytes_ < MOST_BYTES:
        return samples
    rows = data if isinstance(data, FederatedData) else None
    try:
        found = diagnose(samples.draws, target, rows, approximates=kernel.approximates)
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, the draws are there
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        warn(f"The draws could not be judged: {what}", depth=4, category=DiagnosisWarning)
        return samples
    for finding in found.findings:
        warn(finding, depth=4, category=DiagnosisWarning)
    return replace(samples, diagnosis=found)


def warn_lost(info: dict[str, np.ndarray]) -> None:
    """Warn where most clients sent nothing, which draws and positions need not show."""
    lost, active = info.get("num_lost", np.zeros(0)).sum(), info["num_active"].sum()
    if lost > MOST_LOST * active:
        warn(
            f"{lost / active:.0%} of the clients' results in the kept rounds were of no use (a "
            "Gaussian that is not proper, or numbers that are not finite), so that these clients "
            "changed nothing: see samples.info['num_lost']. What may help: smaller local steps "
            "(for clients with few rows inference.sgd_mean has row_curvature=), more samples or "
            "shrinkage= in inference.mcmc, a positive initial_precision, a damping nearer to zero.",
        )


def warn_excluded(info: dict[str, np.ndarray]) -> None:
    """Warn where most messages were left out: the run then moves little, or without clients."""
    excluded = info.get("num_excluded", np.zeros(0)).sum()
    sent = excluded + info["num_active"].sum()
    if excluded > MOST_LOST * sent:
        warn(
            f"{excluded / sent:.0%} of the messages of the kept rounds were left out because they "
            "were not finite: see samples.info['num_excluded']. Unless faults were asked for, the "
            "step size is too large for this posterior, or a log density or gradient is not finite "
            "there.",
        )


def warn_unreached(stopped: dict[str, Any]) -> None:
    """Warn that a run ended without what its rule asked for."""
    figures = {k: v for k, v in stopped.items() if isinstance(v, float)}
    found = ", ".join(f"{k} {v:.4g}" for k, v in figures.items()) or "too few draws to tell"
    warn(
        f"Stopped after {stopped['rounds']} rounds without {stopped['rule']} ({found}). Go on with "
        f"sample(..., state=samples.state).",
    )


def largest(broadcast: Broadcast) -> float:
    """Return the largest absolute coordinate of all chains' positions."""
    leaves = jax.tree.leaves(broadcast.position)
    return max((float(jnp.max(jnp.abs(leaf))) for leaf in leaves if leaf.size), default=0.0)


def warn_grown(before: float, after: float) -> None:
    """Warn where a run went far away without a number that is not finite."""
    if after > GROWN * max(before, 1.0):
        warn(
            f"The position grew to {after:.3g} from {before:.3g} at the start of this run. Unless "
            "parameters of this model are that large, steps are too large for it and the draws are "
            "of no use: use a smaller step size or learning rate (for inference.sgd_mean with few "
            "rows per client also row_curvature=).",
        )


def non_finite(samples: Samples, first_bad: np.ndarray, round_: int) -> NonFiniteError:
    """Return the error of a run in which chains turned non-finite, `round_` being the first."""
    chains = np.flatnonzero(first_bad >= 0).tolist()
    hint = " At the start of a run also try a position nearer to the mode." * (round_ == 0)
    return NonFiniteError(
        f"Chain {chains[0]} turned non-finite in round {round_} ({len(chains)} of "
        f"{len(first_bad)} chains did by the end of the segment). The step size is too large "
        f"for this posterior, or a log density or gradient is not finite there.{hint} The "
        f"{samples.num_draws} draws per chain from the rounds before are in `error.samples`.",
        samples,
        round_,
        chains,
    )
