"""What a run warns of at its end, and the error that ends it where a chain turns non-finite."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import (
    ArrayTree,
    Broadcast,
    FederatedKernel,
    FederatedState,
    compiled,
    user_position,
)
from fedmcmc.data import FederatedData, group_name, labels_of
from fedmcmc.diagnostics import (
    Diagnosis,
    DiagnosisWarning,
    SamplingWarning,
    diagnose,
    silenced,
)
from fedmcmc.gradients import holds_augmented
from fedmcmc.hierarchy import Independence, locals_in
from fedmcmc.pytrees import num_bytes
from fedmcmc.random import final_key
from fedmcmc.records import Samples
from fedmcmc.runs._approximations import counted_again, fields, restless
from fedmcmc.runs._growth import Start, growth
from fedmcmc.runs._interrupts import Interrupts
from fedmcmc.runs._unjudged import why_not_judged
from fedmcmc.transforms import counts_of

FINAL_DRAWS, FINAL_BYTES = 1_000, 2**26
"""How many draws of the last approximation there are, and bytes at most."""
JUDGED_DRAWS, JUDGED_BYTES = 2**16, 2**24
"""How many the judge looks at, for the approximation's moments: of all chains, bytes at most."""
LEAST_ACCEPTED, FEWEST_PROPOSALS = 0.05, 50
"""Below this share of accepted proposals, of at least so many, a chain hardly moves."""
LEAST_MOVED, FEWEST_MOVES = 0.2, 20
"""The same of latents of a group, which are to follow shared parameters, after so many rounds."""
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


Messages = tuple[str, ...]
"""What was warned of, for `Samples.warnings`."""


def warn(message: str, *, depth: int = 6, category: type = SamplingWarning) -> Messages:
    """Warn, attributing the warning to the user's line `depth` frames up; return what was said.

    The default is that of a call of `sample` where `Run.go` ends.
    """
    warnings.warn(message, category, stacklevel=depth)
    return (message,)


def with_final_draws(
    samples: Samples, kernel: FederatedKernel, keys: Array, *, weighed: bool
) -> tuple[Samples, ArrayTree]:
    """Return samples with draws of the last approximation, for a kernel that refines one.

    As many as rounds were kept, or 1,000 per chain if these fit into 64 MiB. Beside them what the
    judge looks at, of which these are the first; of other kernels ``None``. `weighed` says whether
    it can weigh points, which needs more draws.
    """
    if not kernel.traits.approximates or not samples.num_draws:
        return samples, None
    one = num_bytes(samples.state.broadcast.position)  # of all chains
    num = max(samples.num_draws, min(FINAL_DRAWS, FINAL_BYTES // max(one, 1)))
    judged = min(JUDGED_DRAWS // samples.num_chains, JUDGED_BYTES // max(one, 1))
    state = samples.state._replace(clients=())
    drawn = _draw(kernel, keys, state, num=max(num, judged) if weighed else num)
    drawn = jax.tree.map(np.asarray, drawn)
    return replace(samples, final_draws=jax.tree.map(lambda x: x[:, :num], drawn)), drawn


@compiled(static_argnames=("num",))
def _draw(kernel: FederatedKernel, keys: Array, state: FederatedState, *, num: int) -> ArrayTree:
    def one(key: Array, index: Array, chain: FederatedState) -> ArrayTree:
        position = kernel.draw(jax.random.fold_in(final_key(key), index), chain)
        return user_position(kernel, position)

    over_draws = jax.vmap(one, in_axes=(None, 0, None))
    return jax.vmap(over_draws, in_axes=(0, None, 0))(keys, jnp.arange(num), state)


def warn_stuck(samples: Samples, data: Any) -> Messages:
    """Warn where the latents of some group hardly moved at the end of a run."""
    found = locals_in(samples.state.clients)
    if found is None:
        return ()
    accepted = np.where(
        np.asarray(found.accepted.num)[..., None] < FEWEST_MOVES, 1, found.accepted.mean
    ).mean(0)
    if (least := accepted.min()) >= LEAST_MOVED:
        return ()
    client, group = np.unravel_index(accepted.argmin(), accepted.shape)
    group_labels = data.group_labels if isinstance(data, FederatedData) else None
    name = group_name(labels_of(data), group_labels, int(client), int(group))
    return warn(
        f"Of the proposals for the latents of {name} {least:.0%} were "
        f"accepted lately: they hardly move, and shared parameters wait for them. What may help: "
        f"more num_tries= of hierarchy.independence, for more than about eight numbers per group "
        f"hierarchy.hmc, of hmc and mala a longer num_adapt=.",
        depth=5,
    )


def warn_adapting(samples: Samples, kernel: FederatedKernel) -> Messages:
    """Warn where draws were kept of rounds in which step sizes still adapted."""
    num_adapt = max(_named(kernel, "num_adapt"), default=0)
    if not num_adapt:
        return ()
    # The adjusted kernels count from their own first round, which is a later one after a `switch`.
    counted = max(_named(samples.state.server, "num_rounds"), default=None)
    before = 0 if counted is None else int(np.max(samples.state.broadcast.round)) - counted
    rounds = np.asarray(samples.info.get("round", ()))
    what, remedy = "kept draws are", f"give num_burnin={num_adapt}"
    if kernel.traits.approximates:  # the last one is what counts
        rounds, what = rounds[..., -1:], "approximations are"
        remedy = f"run more than {num_adapt} rounds"
    early = int(np.sum(rounds < before + num_adapt))
    if early:
        return warn(
            f"{early} of {rounds.size} {what} of rounds in which step sizes still adapted, and "
            f"are not exact: {remedy}, or give a smaller num_adapt= of the kernel or of its "
            f"refresh.",
            depth=5,
        )
    return ()


def _named(tree: Any, name: str) -> list[int]:
    """Return the largest number in each leaf of a tree that is a field of this name."""
    return [int(np.max(leaf)) for leaf in fields(tree, name)]


def finished(
    samples: Samples,
    kernel: FederatedKernel,
    keys: Array,
    data: Any,
    *,
    start: Start,
    positions: bool,
    interrupts: Interrupts,
    hands_on_interrupts: bool,
) -> Samples:
    """Return samples with draws of a last approximation, and a diagnosis of their draws.

    Warns of what is wrong. Whatever goes wrong in here, the run's own draws are returned.
    `positions` says whether these are what was kept; an interrupt is handed on to a program that
    goes on from its checkpoints. Of a run that went far away only that is said: what is wrong with
    its draws follows from it, and more rounds are no remedy.
    """
    messages = (
        *samples.warnings,
        *warn_stuck(samples, data),
        *warn_adapting(samples, kernel),
    )
    for finding in (restless(samples), counted_again(samples)):
        if finding is not None:
            messages += warn(finding, depth=4, category=DiagnosisWarning)
    try:
        grown = warn_grown(kernel, start, samples.state.broadcast)
        messages += grown
        if not positions:
            return replace(samples, warnings=messages)
        weighed = isinstance(data, FederatedData) and not silenced()
        with interrupts.allowed():
            samples, approximation = with_final_draws(samples, kernel, keys, weighed=weighed)
            draws = samples.draws if samples.final_draws is None else samples.final_draws
            found = judge(draws, kernel, data, approximation)
    except Warning:
        raise  # as the user's filters ask for
    except (Exception, KeyboardInterrupt) as error:
        if hands_on_interrupts and isinstance(error, KeyboardInterrupt):
            raise
        messages += warn(not_judged(error), depth=4, category=DiagnosisWarning)
        return replace(samples, warnings=messages, not_judged=messages[-1])
    for finding in () if found is None or grown else found.findings:
        messages += warn(finding, depth=4, category=DiagnosisWarning)
    return replace(samples, diagnosis=found, warnings=messages)


def not_judged(error: BaseException) -> str:
    """Return what is said where the judge itself fails."""
    return f"The draws could not be judged: {type(error).__name__}: {error}".splitlines()[0]


def judge(
    draws: ArrayTree, kernel: FederatedKernel, data: Any, approximation: ArrayTree = None
) -> Diagnosis | None:
    """Judge draws; return ``None`` if there is a reason not to (`why_not_judged`).

    `approximation` are more draws of what a kernel refines.
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
        transforms=holds_augmented(kernel),
    )


def warn_lost(info: dict[str, np.ndarray]) -> Messages:
    """Warn where most clients sent nothing, which draws and positions need not show."""
    lost, active = info.get("num_lost", np.zeros(0)).sum(), info["num_active"].sum()
    if lost > MOST_LOST * active:
        return warn(
            f"{lost / active:.0%} of the clients' results in the kept rounds were of no use (a "
            "Gaussian that is not proper, or numbers that are not finite), so that these clients "
            "changed nothing: see samples.info['num_lost']. What may help: smaller local steps "
            "(for clients with few rows inference.sgd_mean has row_curvature=), more samples or "
            "shrinkage= in inference.mcmc, a positive initial_precision, a damping nearer to zero.",
        )
    return ()


def warn_excluded(info: dict[str, np.ndarray]) -> Messages:
    """Warn where most messages were left out: the run then moves little, or without clients."""
    excluded = info.get("num_excluded", np.zeros(0)).sum()
    sent = excluded + info["num_active"].sum()
    if excluded > MOST_LOST * sent:
        return warn(
            f"{excluded / sent:.0%} of the messages of the kept rounds were left out because they "
            "were not finite: see samples.info['num_excluded']. Unless faults were asked for, the "
            "step size is too large for this posterior, or a log density or gradient is not finite "
            "there.",
        )
    return ()


def warn_rejected(info: dict[str, np.ndarray]) -> Messages:
    """Warn where hardly any proposal was accepted: draws then repeat where a chain began."""
    acceptance = info.get("acceptance", np.zeros(0))
    if acceptance.size >= FEWEST_PROPOSALS and acceptance.mean() < LEAST_ACCEPTED:
        return warn(
            f"Proposals of the kept rounds were accepted with a probability of "
            f"{acceptance.mean():.2g}, so that the chains hardly moved: see "
            "samples.info['acceptance']. What may help: a metric= (or whitened coordinates, "
            "fedmcmc.whiten), a smaller step_size, a better approximation; and a center at which "
            "the log likelihood is finite.",
        )
    return ()


def warn_unreached(stopped: dict[str, Any]) -> Messages:
    """Warn that a run ended without what its rule asked for."""
    figures = {k: v for k, v in stopped.items() if isinstance(v, float)}
    found = ", ".join(f"{k} {v:.4g}" for k, v in figures.items()) or "too few draws to tell"
    return warn(
        f"Stopped after {stopped['rounds']} rounds without {stopped['rule']} ({found}). Go on with "
        f"sample(..., state=samples.state).",
    )


def warn_grown(kernel: FederatedKernel, start: Start, end: Broadcast) -> Messages:
    """Warn where a run ended far away without a number that is not finite."""
    went = growth(kernel, start, end)
    if went is None:
        return ()
    hint = kernel.traits.divergence_hint
    return warn(
        f"{went} at the start of this run. Unless parameters of this model are of that size, steps "
        f"are too large for it and the draws are of no use: use a smaller step size or learning "
        f"rate (for inference.sgd_mean with few rows per client also row_curvature=)."
        f"{hint and ' ' + hint}",
        depth=5,
    )


def non_finite(
    samples: Samples,
    first_bad: np.ndarray,
    round_: int,
    divergence_hint: str,
    server_state: ArrayTree,
) -> NonFiniteError:
    """Return the error of a run in which chains turned non-finite, `round_` being the first.

    `divergence_hint` is the kernel's (`Traits`); `server_state` the state of the servers
    behind that round, leaves ``[num_chains, ...]``.
    """
    chains = np.flatnonzero(first_bad >= 0).tolist()
    counts = counts_of(server_state)
    if counts is not None and np.any(counts.saturated):
        kept = f"The {samples.num_draws} draws per chain from the rounds before are in"
        return _ended(
            f"A message of chain {chains[0]} in round {round_} held a number beyond the range of "
            f"its secure sum, or one that is not finite ({np.sum(counts.saturated)} messages by "
            f"the end of the segment). Give secure_sum a larger most=, with a coarser resolution= "
            f"if it asks for one; if the chain moves away, a smaller step size. {kept} "
            "`error.samples`.",
            samples,
            round_,
            chains,
        )
    hint = " At the start of a run also try a position nearer to the mode." * (round_ == 0)
    return _ended(
        f"Chain {chains[0]} turned non-finite in round {round_} ({len(chains)} of "
        f"{len(first_bad)} chains did by the end of the segment). The step size is too large "
        f"for this posterior, or a log density or gradient is not finite there.{hint}"
        f"{divergence_hint and ' ' + divergence_hint} The "
        f"{samples.num_draws} draws per chain from the rounds before are in `error.samples`.",
        samples,
        round_,
        chains,
    )


def _ended(message: str, samples: Samples, round_: int, chains: list[int]) -> NonFiniteError:
    """Return the error, whose samples say in their report, too, how the run ended."""
    return NonFiniteError(message, replace(samples, warnings=(message,)), round_, chains)
