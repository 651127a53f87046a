"""Warnings at the end of a run, and the error of a run in which a chain turns non-finite."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import ClientLoader, FederatedData, group_name, labels_of
from fedmcmc.diagnostics import (
    Diagnosis,
    DiagnosisWarning,
    SamplingWarning,
    diagnose,
    warnings_are_ignored,
)
from fedmcmc.gradients import has_augmented_data
from fedmcmc.hierarchy import Independence, find_latent_state
from fedmcmc.pytrees import num_bytes
from fedmcmc.random import final_key
from fedmcmc.records import Samples
from fedmcmc.runs._approximations import check_at_rest, check_single_pass, leaves_named
from fedmcmc.runs._executors import RemoteClients
from fedmcmc.runs._growth import InitialScale, describe_growth
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._unjudged import why_not_judged
from fedmcmc.transforms import counts_of
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    FederatedKernel,
    FederatedState,
    compiled,
    user_position,
)

FINAL_DRAWS, FINAL_BYTES = 1_000, 2**26
"""Number of draws per chain from the last approximation, and their maximum size."""
JUDGED_DRAWS, JUDGED_BYTES = 2**16, 2**24
"""Number of draws of all chains that are judged for an approximation, and their maximum size."""
MIN_ACCEPTANCE, MIN_PROPOSALS = 0.05, 50
"""Acceptance rate of a chain below which it is reported as stuck, and proposals needed for that."""
MIN_LATENT_ACCEPTANCE, MIN_MOVES = 0.2, 20
"""Acceptance rate and number of moves, for the latents of a group."""
MAX_LOST = 0.5
"""Fraction of the clients' results that may be lost without a warning."""


class NonFiniteError(FloatingPointError):
    """Error of a run in which the state of a chain turned infinite or NaN.

    Attributes
    ----------
    samples
        `fedmcmc.Samples` kept before the first non-finite round.
    round
        First non-finite round.
    chains
        Chains that are not finite.
    """

    def __init__(self, message: str, samples: Samples, round_: int, chains: list[int]) -> None:
        super().__init__(message)
        self.samples = samples
        self.round = round_
        self.chains = chains

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, for errors in other processes."""
        return type(self), (self.args[0], self.samples, self.round, self.chains)


Messages = tuple[str, ...]
"""Messages of warnings, for `Samples.warnings`."""


def warn(message: str, *, depth: int = 6, category: type = SamplingWarning) -> Messages:
    """Warn at the user's line, `depth` frames up, and return the message.

    The default depth is for functions that `Run._finish` calls.
    """
    warnings.warn(message, category, stacklevel=depth)
    return (message,)


def with_final_draws(
    samples: Samples, kernel: FederatedKernel, keys: Array, *, is_weighted: bool
) -> tuple[Samples, ArrayTree]:
    """Return samples with draws from the last approximation, and the draws to be judged.

    The samples get one draw per kept round, or 1,000 per chain if these fit into 64 MiB. If the
    diagnosis weights draws (`is_weighted`), the second result has more draws. If the kernel has no
    approximation, the samples are returned unchanged, and the second result is ``None``.
    """
    if not kernel.traits.approximates or not samples.num_draws:
        return samples, None
    bytes_per_draw = max(num_bytes(samples.state.broadcast.position), 1)  # all chains
    num = max(samples.num_draws, min(FINAL_DRAWS, FINAL_BYTES // bytes_per_draw))
    num_judged = min(JUDGED_DRAWS // samples.num_chains, JUDGED_BYTES // bytes_per_draw)
    state = samples.state._replace(clients=())
    draws = _draw(kernel, keys, state, num=max(num, num_judged) if is_weighted else num)
    draws = jax.tree.map(np.asarray, draws)
    return replace(samples, final_draws=jax.tree.map(lambda x: x[:, :num], draws)), draws


@compiled(static_argnames=("num",))
def _draw(kernel: FederatedKernel, keys: Array, state: FederatedState, *, num: int) -> ArrayTree:
    def draw(key: Array, index: Array, chain: FederatedState) -> ArrayTree:
        position = kernel.draw(jax.random.fold_in(final_key(key), index), chain)
        return user_position(kernel, position)

    over_draws = jax.vmap(draw, in_axes=(None, 0, None))
    return jax.vmap(over_draws, in_axes=(0, None, 0))(keys, jnp.arange(num), state)


def warn_stuck(samples: Samples, data: FederatedData | ClientLoader | RemoteClients) -> Messages:
    """Warn if the latents of a group hardly moved at the end of a run."""
    local_states = find_latent_state(samples.state.clients)
    if local_states is None:
        return ()
    accepted = local_states.accepted
    rates = np.where(np.asarray(accepted.num)[..., None] < MIN_MOVES, 1, accepted.mean).mean(0)
    if rates.min() >= MIN_LATENT_ACCEPTANCE:
        return ()
    client, group = np.unravel_index(rates.argmin(), rates.shape)
    group_labels = data.group_labels if isinstance(data, FederatedData) else None
    name = group_name(labels_of(data), group_labels, int(client), int(group))
    return warn(
        f"In recent rounds {rates.min():.0%} of the proposals for the latents of {name} were "
        f"accepted, so they hardly move and slow down the shared parameters. Possible remedies: "
        f"more num_tries= of hierarchy.independence; hierarchy.hmc for more than about eight "
        f"numbers per group; a longer num_adapt= of hmc.",
        depth=5,
    )


def warn_adapting(samples: Samples, kernel: FederatedKernel) -> Messages:
    """Warn if draws were kept in rounds in which step sizes still adapted."""
    num_adapt = max(_maxima_named(kernel, "num_adapt"), default=0)
    if not num_adapt:
        return ()
    # Kernels with a Metropolis correction count their own rounds, from zero after a `switch`.
    num_counted = max(_maxima_named(samples.state.server, "num_rounds"), default=None)
    before = 0 if num_counted is None else int(np.max(samples.state.broadcast.round)) - num_counted
    rounds = np.asarray(samples.info.get("round", ()))
    subject, remedy = "kept draws are", f"give num_burnin={num_adapt}"
    if kernel.traits.approximates:  # only the last approximation counts
        rounds, subject = rounds[..., -1:], "approximations are"
        remedy = f"run more than {num_adapt} rounds"
    num_early = int(np.sum(rounds < before + num_adapt))
    if num_early:
        return warn(
            f"{num_early} of {rounds.size} {subject} from rounds in which step sizes still "
            f"adapted, and are not exact: {remedy}, or give a smaller num_adapt= of the kernel or "
            f"of its refresh.",
            depth=5,
        )
    return ()


def _maxima_named(tree: ArrayTree, name: str) -> list[int]:
    """Return the maximum of each leaf that is stored in a field called `name`."""
    return [int(np.max(leaf)) for leaf in leaves_named(tree, name)]


def finish(
    samples: Samples,
    kernel: FederatedKernel,
    keys: Array,
    data: FederatedData | ClientLoader | RemoteClients,
    *,
    start: InitialScale,
    has_positions: bool,
    interrupts: Interrupts,
    reraises_interrupts: bool,
) -> Samples:
    """Return samples with draws from a last approximation and a diagnosis; warn of problems.

    If an error occurs here, the samples are returned without a diagnosis. `has_positions` is false
    if the draws are results of the user's `collect`. After divergence, findings about the draws are
    omitted, because they follow from it and more rounds are no remedy.
    """
    messages = (*samples.warnings, *warn_stuck(samples, data), *warn_adapting(samples, kernel))
    for finding in (check_at_rest(samples), check_single_pass(samples)):
        if finding is not None:
            messages += warn(finding, depth=4, category=DiagnosisWarning)
    try:
        divergence = warn_divergence(kernel, start, samples.state.broadcast)
        messages += divergence
        if not has_positions:
            return replace(samples, warnings=messages)
        is_weighted = isinstance(data, FederatedData) and not warnings_are_ignored()
        with interrupts.allowed():
            samples, judged = with_final_draws(samples, kernel, keys, is_weighted=is_weighted)
            draws = samples.draws if samples.final_draws is None else samples.final_draws
            diagnosis = judge(draws, kernel, data, judged)
    except Warning:
        raise  # the user's filters turn warnings into errors
    except (Exception, KeyboardInterrupt) as error:
        if reraises_interrupts and isinstance(error, KeyboardInterrupt):
            raise
        messages += warn(reason_not_judged(error), depth=4, category=DiagnosisWarning)
        return replace(samples, warnings=messages, reason_not_judged=messages[-1])
    for finding in () if diagnosis is None or divergence else diagnosis.findings:
        messages += warn(finding, depth=4, category=DiagnosisWarning)
    return replace(samples, diagnosis=diagnosis, warnings=messages)


def reason_not_judged(error: BaseException) -> str:
    """Return the message for an error in the diagnosis."""
    return f"The draws could not be judged: {type(error).__name__}: {error}".splitlines()[0]


def judge(
    draws: ArrayTree,
    kernel: FederatedKernel,
    data: FederatedData | ClientLoader | RemoteClients,
    approximation: ArrayTree = None,
) -> Diagnosis | None:
    """Return a diagnosis of draws, ``None`` if there is a reason against it (`why_not_judged`).

    `approximation` has additional draws from a kernel's approximation.
    """
    if why_not_judged(draws, kernel):
        return None
    rows = data if isinstance(data, FederatedData) else None
    return diagnose(
        draws,
        kernel.target,
        rows,
        approximates=kernel.traits.approximates,
        approximation=approximation,
        integrates=not kernel.traits.keeps_latents,
        proposes=any(
            isinstance(node, Independence)
            for node in jax.tree.leaves(kernel, is_leaf=lambda x: isinstance(x, Independence))
        ),
        transforms=has_augmented_data(kernel),
    )


def warn_lost(info: dict[str, np.ndarray]) -> Messages:
    """Warn if most clients' results were unusable, which draws may not show."""
    lost, active = info.get("num_lost", np.zeros(0)).sum(), info["num_active"].sum()
    if lost > MAX_LOST * active:
        return warn(
            f"{lost / active:.0%} of the clients' results in the kept rounds were unusable "
            "(improper Gaussians, or numbers that are not finite), so these clients changed "
            "nothing: see samples.info['num_lost']. Possible remedies: smaller local steps (for "
            "clients with few rows inference.sgd_mean has row_curvature=), more samples or "
            "shrinkage= in inference.mcmc, a positive initial_precision, a smaller damping=.",
        )
    return ()


def warn_excluded(info: dict[str, np.ndarray]) -> Messages:
    """Warn if most messages were excluded: chains move little or ignore some clients."""
    excluded = info.get("num_excluded", np.zeros(0)).sum()
    sent = excluded + info["num_active"].sum()
    if excluded > MAX_LOST * sent:
        return warn(
            f"{excluded / sent:.0%} of the messages of the kept rounds were excluded because they "
            "were not finite: see samples.info['num_excluded']. Unless fedmcmc.faults simulates "
            "such messages, the step size is too large for this posterior, or a log density or "
            "gradient is not finite at the current position.",
        )
    return ()


def warn_rejected(info: dict[str, np.ndarray]) -> Messages:
    """Warn if hardly any proposal was accepted."""
    acceptance = info.get("acceptance", np.zeros(0))
    if acceptance.size >= MIN_PROPOSALS and acceptance.mean() < MIN_ACCEPTANCE:
        return warn(
            f"Proposals of the kept rounds were accepted with a probability of "
            f"{acceptance.mean():.2g}, so the chains hardly moved: see "
            "samples.info['acceptance']. Possible remedies: a metric= (or whitened coordinates, "
            "fedmcmc.whiten), a smaller step_size, a better approximation, and a center at which "
            "the log likelihood is finite.",
        )
    return ()


def warn_unreached(stopped: dict[str, Any]) -> Messages:
    """Warn that a run ended before its stopping rule was satisfied."""
    figures = {k: v for k, v in stopped.items() if isinstance(v, float)}
    values = ", ".join(f"{k} {v:.4g}" for k, v in figures.items()) or "too few draws to check"
    return warn(
        f"Stopped after {stopped['rounds']} rounds without {stopped['rule']} ({values}). Continue "
        f"with sample(..., state=samples.state).",
    )


def warn_divergence(kernel: FederatedKernel, start: InitialScale, end: Broadcast) -> Messages:
    """Warn if a run diverged although all values stayed finite."""
    growth = describe_growth(kernel, start, end)
    if growth is None:
        return ()
    hint = kernel.traits.divergence_hint
    return warn(
        f"{growth}. Unless parameters of this model have that size, the "
        f"steps are too large and the draws are useless: use a smaller step size or learning rate "
        f"(for inference.sgd_mean with few rows per client also row_curvature=)."
        f"{hint and ' ' + hint}",
        depth=5,
    )


def non_finite_error(
    samples: Samples,
    first_bad: np.ndarray,
    round_: int,
    divergence_hint: str,
    server_state: ArrayTree,
) -> NonFiniteError:
    """Return the error of a run in which `round_` is the first round that is not finite.

    `divergence_hint` comes from the kernel's `Traits`; `server_state` is the servers' state after
    that round, leaves ``[num_chains, ...]``.
    """
    chains = np.flatnonzero(first_bad >= 0).tolist()
    counts = counts_of(server_state)
    if counts is not None and np.any(counts.saturated):
        message = (
            f"A message of chain {chains[0]} in round {round_} held a number beyond the range of "
            f"its secure sum, or a number that is not finite ({np.sum(counts.saturated)} messages "
            f"by the end of the segment). Give secure_sum a larger max_abs=, with a coarser "
            f"resolution= if necessary. If the chain diverges, use a smaller step size."
        )
    else:
        hint = " At the start of a run also try a position nearer to the mode." * (round_ == 0)
        message = (
            f"Chain {chains[0]} turned non-finite in round {round_} ({len(chains)} of "
            f"{len(first_bad)} chains did by the end of the segment). The step size is too large "
            f"for this posterior, or a log density or gradient is not finite at its "
            f"position.{hint}"
            f"{divergence_hint and ' ' + divergence_hint}"
        )
    draws = f"The {samples.num_draws} draws per chain from the rounds before are in"
    message = f"{message} {draws} `error.samples`."
    return NonFiniteError(message, replace(samples, warnings=(message,)), round_, chains)
