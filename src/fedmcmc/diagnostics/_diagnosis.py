"""What a run's draws say of themselves, in one line each."""

import warnings
from dataclasses import dataclass

import jax
import numpy as np

from fedmcmc._types import ArrayTree, Posterior
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics._mixing import Mixing, mixing
from fedmcmc.diagnostics._moments import MOST_COORDINATES, Moments, check_moments
from fedmcmc.diagnostics._psis import threshold
from fedmcmc.diagnostics._weights import check_by_weights
from fedmcmc.hierarchy import (
    MORE_NODES,
    MarginalTerms,
    failed_searches,
    of_few_clients,
    of_few_groups,
    quadrature_error,
)
from fedmcmc.pytrees import trees

FEWEST_DRAWS = 400
"""Draws below which a run does not judge them."""
FEWEST_OF_A_CHAIN = 4
"""The same, per chain: halves of shorter chains have no variance."""
RHAT, ESS = 1.01, 400.0
"""R-hat above which chains disagree, and effective draws below which they are too few."""
BIAS, SPREAD = 0.1, 1.1
"""Errors of means in posterior sds, and ratios of sds, beyond which a result is called wrong."""
FAR = 1e6
"""Interquartile ranges from the median beyond which a draw is no draw of any posterior."""
DEPTH = 20.0
"""Of a draw far out, in units of how far down one draw in ten is: none of a posterior's draws."""
WIDENED = 1.02
"""Ratio of sds with and without draws far out, below which these do no harm."""
UNSUITABLE = "not suitable here: use fedmcmc.fit"
OF_NO_USE = (
    "Means and sds are of no use: take smaller steps or fewer local steps; with many small clients "
    "another kernel than fsgld or dsgld, which multiply what a client's surrogate gets wrong by "
    "the number of clients."
)
QUADRATURE = 0.1
"""Nats by which a quadrature over latents may be off."""
HOPELESS_ESS = 100.0
"""Below so many effective draws only errors ten times as large say more than that draws are few."""


class SamplingWarning(RuntimeWarning):
    """The result of a run may be wrong or too little.

    ``warnings.filterwarnings("ignore", category=fedmcmc.SamplingWarning)`` silences them all.
    """


class DiagnosisWarning(SamplingWarning):
    """What a run's draws say of themselves.

    Where the user's filters ignore these, draws are not judged: ``samples.diagnosis`` is ``None``.
    """


@dataclass(frozen=True)
class Diagnosis:
    """What a run's draws say of themselves.

    Attributes
    ----------
    mixing
        R-hat and effective sample sizes.
    moments
        Errors of mean and sds, by the posterior's gradients at draws or, of an approximation, by
        weights of points around it; ``None`` where they cannot be told.
    names
        Of the numbers of a raveled draw.
    findings
        What is wrong and what to do, one sentence or two each; empty if nothing is.
    quadrature_error
        By how many nats a quadrature over latents changes log densities of draws, see
        `fedmcmc.hierarchy.quadrature_error`; ``None`` where there is none.
    not_compared
        Reason why means and sds were not compared with the posterior; empty if they were.
    """

    mixing: Mixing
    moments: Moments | None
    names: tuple[str, ...]
    findings: tuple[str, ...]
    quadrature_error: float | None = None
    not_compared: str = ""

    @property
    def rhat(self) -> float:
        """The largest R-hat of a judged coordinate."""
        return _largest(self.mixing.rhat)

    @property
    def ess(self) -> float:
        """The smallest effective sample size of a judged coordinate, of bulk and tails."""
        return -_largest(-np.concatenate([self.mixing.ess_bulk, self.mixing.ess_tail]))

    def __str__(self) -> str:
        """Return the figures in a line, and the findings in a line each."""
        judged, size = len(self.mixing.coordinates), self.mixing.num_coordinates
        of = "" if judged == size else f" (of {judged} of {size:,} coordinates)"
        line = f"R-hat {self.rhat:.4g}, {self.ess:,.0f} effective draws{of}"
        if self.moments is not None and np.isfinite(self.moments.bias).all():
            low, high = self.moments.spread.min(), self.moments.spread.max()
            line += (
                f"; by {_source(self.moments)}, means off by up to "
                f"{np.abs(self.moments.bias).max():.2g} posterior sd, sds {low:.3g} to {high:.3g} "
                f"of the posterior's"
            )
        elif self.not_compared:
            line += f"; means and sds not compared with the posterior: {self.not_compared}"
        return "\n".join([line, *self.findings])


def diagnose(
    draws: ArrayTree,
    posterior: Posterior | None = None,
    data: FederatedData | None = None,
    *,
    approximates: bool = False,
    approximation: ArrayTree = None,
    integrates: bool = True,
    proposes: bool = False,
    transforms: bool = False,
) -> Diagnosis:
    """Judge draws: whether chains agree, whether they are enough, whether they are the posterior's.

    `fedmcmc.sample` calls it at the end of a run that kept 400 draws or more.

    Parameters
    ----------
    draws
        Leaves ``[num_chains, num_draws, *event]``.
    posterior, data
        What draws are meant to follow; without them only R-hat and effective sample sizes are told.
    approximates
        Whether the draws are independent ones of a Gaussian approximation, of up to 64 dimensions
        by weights of the posterior over it.
    approximation
        More draws of the same approximation, for its mean and covariance; by default `draws`.
    integrates
        Whether the draws' kernel integrates latents as `posterior` does, rather than move them.
    proposes
        Whether it proposes latents around their modes, as `fedmcmc.hierarchy.independence` does.
    transforms
        Whether it transforms rows at random (`fedmcmc.augment`), and so has another posterior.

    Examples
    --------
    >>> import jax
    >>> draws = jax.random.normal(jax.random.key(0), (4, 1000))
    >>> diagnose(draws).findings
    ()
    >>> drifting = draws + jax.numpy.linspace(0, 3, 1000)
    >>> diagnose(drifting).findings[0][:43]
    'Chains disagree or are too short: R-hat 1.2'
    """
    first = jax.tree.map(lambda leaf: np.zeros(leaf.shape[2:]), draws)
    names = tuple(trees.element_names(first))
    found = mixing(draws)
    moments = None
    not_compared = _why_not_compared(posterior, data, len(names))
    if posterior is not None and data is not None and not not_compared:
        if approximates:
            more = draws if approximation is None else approximation
            moments = check_by_weights(posterior, data, more)
        if moments is None:
            moments = check_moments(posterior, data, draws)
        if moments is None:
            not_compared = f"too few draws for {len(names)} parameters"
    whole = Diagnosis(found, moments, names, ())
    cure = _cure(approximates, transforms)
    of_moments = _of_weights(moments) or [
        *_of_depth(whole),
        *_of_moments(whole, approximates, cure),
    ]
    findings = [*_of_mixing(whole, advise=not of_moments), *of_moments]
    error = None
    if integrates and posterior is not None and data is not None:
        terms = posterior.loglikelihood_fn
        if isinstance(terms, MarginalTerms):
            error = quadrature_error(posterior, data, draws)
            findings += _of_quadrature(error, terms)
    if posterior is not None and data is not None:
        findings += _of_searches(posterior, data, draws, integrates, proposes)
        findings += [
            few
            for few in (
                of_few_clients(posterior, data.num_clients, draws),
                of_few_groups(posterior, int(data.group_mask.sum()), draws),
            )
            if few is not None
        ]
    return Diagnosis(found, moments, names, tuple(findings), error, not_compared)


def _why_not_compared(posterior: Posterior | None, data: FederatedData | None, size: int) -> str:
    """Return why means and sds of `size` parameters cannot be compared; empty if they can."""
    if posterior is None:
        return "no posterior to compare with"
    if data is None:
        return "the rows are not in this program"
    if posterior.local is not None:
        return "the density of the shared parameters without the clients' own is not known"
    if size > MOST_COORDINATES:
        return f"more than {MOST_COORDINATES} parameters"
    return ""


def _of_quadrature(error: float, terms: MarginalTerms) -> list[str]:
    if error <= QUADRATURE:
        return []
    more = terms.nodes + MORE_NODES
    return [
        f"The quadrature over latents is off by {error:.2g} nats: by so much log densities of "
        f"draws change with {more} nodes in place of {terms.nodes}. Take marginal(posterior, "
        f"nodes={more})."
    ]


def _of_searches(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, integrates: bool, proposes: bool
) -> list[str]:
    """Return what is wrong where latents have no mode that is found."""
    terms = posterior.loglikelihood_fn
    marginal = isinstance(terms, MarginalTerms)
    local = terms.local if isinstance(terms, MarginalTerms) else posterior.local
    if local is None or local.client is not None or not (proposes or (integrates and marginal)):
        return []
    failed, made = failed_searches(local, data, draws)
    if not failed:
        return []
    what = (
        "what is integrated around such a place is wrong"
        if integrates and marginal
        else "proposals around such a place are seldom accepted"
    )
    return [
        f"In {failed} of {made} cases, groups at some of the draws, the search for the mode of a "
        f"latent failed: {what}. A latent's log density must be smooth and fall to all sides; for "
        f"one that is not, fedmcmc.fed_gibbs and fedmcmc.lsd take refresh=hierarchy.hmc(), which "
        f"needs no mode."
    ]


def _of_mixing(diagnosis: Diagnosis, *, advise: bool) -> list[str]:
    """Return what is wrong with R-hat and effective draws; `advise` if nothing else is wrong.

    What helps chains that are too short makes nothing right that is wrong in the long run.
    """
    found, names = diagnosis.mixing, diagnosis.names
    still = np.flatnonzero(np.isnan(found.rhat))
    if len(still):
        name = names[found.coordinates[still[0]]]
        return [f"{name} has the same value in all draws: nothing moves it."]
    far = np.flatnonzero(found.reach > FAR)
    if len(far):
        name = names[found.coordinates[far[0]]]
        return [
            f"Chains ran away and came back: a draw of {name} is {found.reach[far[0]]:.2g} "
            f"interquartile ranges from the median, which ranks (R-hat, effective draws) do not "
            f"see. {OF_NO_USE}"
        ]
    if not found.disagree(RHAT).any() and diagnosis.ess >= ESS:
        return []
    least = np.minimum(found.ess_bulk, found.ess_tail)
    worst = int(np.argmin(least) if diagnosis.ess < ESS else np.argmax(found.rhat))
    told = (
        f"Chains disagree or are too short: R-hat {diagnosis.rhat:.4g}, {diagnosis.ess:.0f} "
        f"effective draws, worst for {names[found.coordinates[worst]]} (wanted: at most {RHAT:g}, "
        f"at least {ESS:g})."
    )
    if advise:
        told += (
            " Go on with sample(..., state=samples.state); if the model is not whitened yet, "
            "fedmcmc.whiten makes all directions alike, so that steps can be larger."
        )
    return [told]


def _source(moments: Moments) -> str:
    if moments.khat is None:
        return f"gradients at {moments.num_draws:,} draws"
    return f"weights of {moments.num_draws:,} points (k-hat {moments.khat:.2g})"


def _of_weights(moments: Moments | None) -> list[str]:
    """Return what is wrong where weights cannot be trusted."""
    if moments is None or moments.khat is None or moments.trusted:
        return []
    return [
        f"The approximation cannot be trusted: weights of the posterior over it and what is wider "
        f"have k-hat {moments.khat:.2g} (wanted: below {threshold(moments.num_draws):.2g}), so "
        f"that it misses a part of the posterior. More rounds help while it still moves; else a "
        f"Gaussian is {UNSUITABLE}, or fedmcmc.correct, which goes on from these samples."
    ]


def _of_depth(diagnosis: Diagnosis) -> list[str]:
    """Return what is wrong where single draws lie where a posterior has none."""
    found = diagnosis.moments
    thrown = found is not None and found.depth > DEPTH and found.widened > WIDENED
    if found is None or not thrown or (diagnosis.mixing.reach > FAR).any():
        return []
    return [
        f"Chains were thrown out and came back: the log density of the draw farthest out lies "
        f"{found.depth:.3g} times as far below the median draw's as that of one draw in ten (about "
        f"8 times at most in a posterior), and such draws make an sd {found.widened:.3g} times "
        f"what it is without them. {OF_NO_USE}"
    ]


def _cure(approximates: bool, transforms: bool) -> str:
    if transforms:
        return (
            "That posterior is the one of rows as they are. This kernel transforms rows at random "
            "and samples another, see fedmcmc.augmented: the two may be that far apart, whatever "
            "the step"
        )
    if approximates:
        return (
            "More rounds help while it still moves, structure='dense' and exacter inference if it "
            f"is not the default's; else a Gaussian is {UNSUITABLE}"
        )
    return (
        "More rounds do not help; a smaller step or fewer local steps do, and what a kernel has "
        "against its bias (control_variate=True, surrogates, whole batches): see "
        "fedmcmc.predict_bias"
    )


def _of_moments(diagnosis: Diagnosis, approximates: bool, cure: str) -> list[str]:
    found, findings = diagnosis.moments, []
    if found is None:
        return []
    if found.not_finite:
        findings.append(
            f"The log density or its gradient is not finite at {found.not_finite} of "
            f"{found.num_draws} draws looked at: the model gives these no weight, or overflows."
        )
    if np.isnan(found.bias).any():
        if not found.not_finite:
            findings.append(
                f"The posterior's gradients at {found.num_draws} draws do not tell whether means "
                f"and sds are right: the draws' covariance is degenerate, as where some are far "
                f"away or a coordinate never moves."
            )
        return findings
    few = diagnosis.ess < HOPELESS_ESS
    off = found.off(10 * BIAS, 2.0) if few else found.off(BIAS, SPREAD)
    if not off.any():
        return findings
    bias, stretch = np.abs(found.bias), np.abs(np.log(found.spread))
    worst = int(np.argmax(np.where(off, np.maximum(bias / BIAS, stretch / np.log(SPREAD)), 0)))
    what = "The approximation's draws are" if approximates else "These draws are"
    of_mean = f"the mean of {diagnosis.names[worst]} is {bias[worst]:.2g} posterior sd off"
    of_sd = f"the sd of {diagnosis.names[worst]} is {found.spread[worst]:.3g} times the posterior's"
    if few:
        cure = "With so few effective draws this says how far the chains are, not what to change"
    led = f"{of_mean}, {of_sd}" if bias[worst] > BIAS else of_sd
    findings.append(
        f"{what} not the posterior's: by {_source(found)} {led} "
        f"({int(off.sum())} of {len(off)} coordinates are off by {BIAS:g} sd or a tenth). {cure}."
    )
    return findings


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")


def silenced() -> bool:
    """Return whether the user's filters ignore a `DiagnosisWarning`, wherever it comes from."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(DiagnosisWarning, category) and not (message or module or line):
            return action == "ignore"
    return False
