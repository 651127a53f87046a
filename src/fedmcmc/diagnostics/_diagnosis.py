"""Convergence diagnostics of a run."""

import warnings
from dataclasses import dataclass

import jax
import numpy as np

from fedmcmc.data import FederatedData
from fedmcmc.diagnostics._mixing import Mixing, mixing
from fedmcmc.diagnostics._moments import MAX_COORDINATES, MomentErrors, check_moments
from fedmcmc.diagnostics._psis import khat_threshold
from fedmcmc.diagnostics._weights import check_by_weights
from fedmcmc.hierarchy import (
    MORE_NODES,
    MarginalTerms,
    failed_searches,
    few_groups_warning,
    quadrature_error,
)
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Posterior

MIN_DRAWS = 400
"""Draws below which a run does not judge them."""
MIN_OF_A_CHAIN = 4
"""Draws per chain below which a run does not judge them: halves of such chains have no variance."""
MAX_RHAT, MIN_ESS = 1.01, 400.0
"""R-hat above which chains disagree, and effective draws below which they are too few."""
MAX_BIAS, MAX_SPREAD = 0.1, 1.1
"""Errors of means in posterior sds, and ratios of sds, beyond which a result is called wrong."""
FAR = 1e6
"""Distance from the median, in interquartile ranges, beyond which no posterior has draws."""
DEPTH = 20.0
"""Depth of the farthest draw (`MomentErrors.depth`) above which it cannot be a posterior's draw."""
WIDENED = 1.02
"""Ratio of sds with and without the far draws, below which these draws do no harm."""
UNSUITABLE = "not suitable here: use fedmcmc.fit"
DIVERGENCE_ADVICE = (
    "Means and sds cannot be used. Take smaller steps or fewer local steps. With many small "
    "clients, use a kernel other than fsgld and dsgld: these multiply the error of a client's "
    "surrogate by the number of clients."
)
MAX_QUADRATURE_ERROR = 0.1
"""Largest error in nats of a quadrature over latents that raises no finding."""
MIN_USABLE_ESS = 100.0
"""Effective draws below which only ten times larger errors are reported."""


class SamplingWarning(RuntimeWarning):
    """Warning that the result of a run may be wrong or that draws are too few.

    ``warnings.filterwarnings("ignore", category=fedmcmc.SamplingWarning)`` silences all of them.
    """


class DiagnosisWarning(SamplingWarning):
    """Warning about a problem that the diagnosis of a run's draws found.

    If the user's filters ignore these warnings, a run does not judge its draws and
    ``samples.diagnosis`` is ``None``.
    """


@dataclass(frozen=True)
class Diagnosis:
    """Convergence diagnostics of a run.

    Attributes
    ----------
    mixing
        R-hat and effective sample sizes.
    moments
        Errors of the mean and of sds, computed from the posterior's gradients at draws or, for an
        approximation, from weights of points around it; ``None`` if they could not be computed.
    names
        Names of the coordinates of a raveled draw.
    findings
        Problems with their remedies, one or two sentences each; empty if there are none.
    quadrature_error
        Largest change in nats of a draw's log density when a quadrature over latents gets more
        nodes, see `fedmcmc.hierarchy.quadrature_error`; ``None`` if there is no quadrature.
    not_compared
        Reason why means and sds were not compared with the posterior; empty if they were.
    """

    mixing: Mixing
    moments: MomentErrors | None
    names: tuple[str, ...]
    findings: tuple[str, ...]
    quadrature_error: float | None = None
    not_compared: str = ""

    @property
    def rhat(self) -> float:
        """Largest R-hat of a judged coordinate."""
        return _largest(self.mixing.rhat)

    @property
    def ess(self) -> float:
        """Smallest effective sample size of a judged coordinate, in the bulk or the tails."""
        return -_largest(-np.concatenate([self.mixing.ess_bulk, self.mixing.ess_tail]))

    def __str__(self) -> str:
        """Return one line of figures, and one line per finding."""
        judged, size = len(self.mixing.coordinates), self.mixing.num_coordinates
        subset = "" if judged == size else f" (of {judged} of {size:,} coordinates)"
        line = f"R-hat {self.rhat:.4g}, {self.ess:,.0f} effective draws{subset}"
        if self.moments is not None and np.isfinite(self.moments.bias).all():
            low, high = self.moments.spread.min(), self.moments.spread.max()
            line += (
                f"; by {_describe_source(self.moments)}, means off by up to "
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
    """Compute R-hat and effective sample sizes, and compare draws with the posterior.

    `fedmcmc.sample` calls it at the end of a run that kept 400 draws or more.

    Parameters
    ----------
    draws
        Pytree with leaves ``[num_chains, num_draws, *event]``.
    posterior, data
        Posterior that the draws should follow. Without them only R-hat and ESS are computed.
    approximates
        If true, the draws are independent draws of a Gaussian approximation. With up to 64
        dimensions the approximation is checked by importance weights.
    approximation
        More draws of the same approximation, for its mean and covariance; by default `draws`.
    integrates
        If true, the kernel integrates latents out as `posterior` does, and does not move them.
    proposes
        If true, the kernel proposes latents around their modes (`fedmcmc.hierarchy.independence`).
    transforms
        If true, the kernel transforms rows at random (`fedmcmc.augment`), which changes the
        posterior.

    Returns
    -------
    Diagnosis
        Figures, and findings with remedies.

    Examples
    --------
    >>> import jax
    >>> draws = jax.random.normal(jax.random.key(0), (4, 1000)) + jax.numpy.linspace(0, 3, 1000)
    >>> diagnose(draws).findings[0][:43]
    'Chains disagree or are too short: R-hat 1.2'
    """
    names = tuple(trees.element_names(jax.tree.map(lambda leaf: np.zeros(leaf.shape[2:]), draws)))
    chains = mixing(draws)
    moments = None
    not_compared = _why_not_compared(posterior, data, len(names))
    if posterior is not None and data is not None and not not_compared:
        if approximates:
            approximation = draws if approximation is None else approximation
            moments = check_by_weights(posterior, data, approximation)
        if moments is None:
            moments = check_moments(posterior, data, draws)
        if moments is None:
            not_compared = f"too few draws for {len(names)} parameters"
    figures = Diagnosis(chains, moments, names, ())
    moment_findings = _judge_weights(moments) or [
        *_judge_depth(figures),
        *_judge_moments(figures, approximates, _bias_advice(approximates, transforms)),
    ]
    # Advice for chains that are too short does not help chains that are biased.
    findings = [*_judge_mixing(figures, advise=not moment_findings), *moment_findings]
    error = None
    if integrates and posterior is not None and data is not None:
        terms = posterior.loglikelihood_fn
        if isinstance(terms, MarginalTerms):
            error = quadrature_error(posterior, data, draws)
            findings += _judge_quadrature(error, terms)
    if posterior is not None and data is not None:
        findings += _judge_searches(posterior, data, draws, integrates, proposes)
        few_groups = few_groups_warning(posterior, int(data.group_mask.sum()), draws)
        findings += [] if few_groups is None else [few_groups]
    return Diagnosis(chains, moments, names, tuple(findings), error, not_compared)


def _why_not_compared(posterior: Posterior | None, data: FederatedData | None, size: int) -> str:
    """Return why means and sds of `size` parameters cannot be compared; empty if they can."""
    if posterior is None:
        return "no posterior to compare with"
    if data is None:
        return "the rows are not in this program"
    if posterior.local is not None:
        return "the shared parameters' density has no closed form, as clients have latents"
    if size > MAX_COORDINATES:
        return f"more than {MAX_COORDINATES} parameters"
    return ""


def _judge_quadrature(error: float, terms: MarginalTerms) -> list[str]:
    if error <= MAX_QUADRATURE_ERROR:
        return []
    nodes = terms.nodes + MORE_NODES
    return [
        f"The quadrature over latents is off by {error:.2g} nats: the log densities of draws "
        f"change by as much with {nodes} nodes instead of {terms.nodes}. Use marginal(posterior, "
        f"nodes={nodes})."
    ]


def _judge_searches(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, integrates: bool, proposes: bool
) -> list[str]:
    """Return a finding if the search for a latent's mode failed."""
    terms = posterior.loglikelihood_fn
    marginal = isinstance(terms, MarginalTerms)
    local = terms.local if isinstance(terms, MarginalTerms) else posterior.local
    if local is None or not (proposes or (integrates and marginal)):
        return []
    failed, total = failed_searches(local, data, draws)
    if not failed:
        return []
    consequence = (
        "integrals around such a point are wrong"
        if integrates and marginal
        else "proposals around such a point are seldom accepted"
    )
    return [
        f"The search for the mode of a latent failed in {failed} of {total} cases (groups at some "
        f"of the draws): {consequence}. A latent's log density must be smooth and fall on all "
        f"sides. Otherwise use fedmcmc.fed_gibbs or fedmcmc.lsd with refresh=hierarchy.hmc(), "
        f"which needs no mode."
    ]


def _judge_mixing(diagnosis: Diagnosis, *, advise: bool) -> list[str]:
    """Return a finding on R-hat, effective draws or draws far out, with advice if `advise`."""
    chains, names = diagnosis.mixing, diagnosis.names
    constant = np.flatnonzero(np.isnan(chains.rhat))
    if len(constant):
        name = names[chains.coordinates[constant[0]]]
        return [f"{name} has the same value in all draws: nothing moves it."]
    far = np.flatnonzero(chains.reach > FAR)
    if len(far):
        name = names[chains.coordinates[far[0]]]
        return [
            f"Chains ran away and came back: a draw of {name} is {chains.reach[far[0]]:.2g} "
            f"interquartile ranges from the median. R-hat and effective draws use ranks and do "
            f"not show it. {DIVERGENCE_ADVICE}"
        ]
    if not chains.disagree(MAX_RHAT).any() and diagnosis.ess >= MIN_ESS:
        return []
    ess = np.minimum(chains.ess_bulk, chains.ess_tail)
    worst = int(np.argmin(ess) if diagnosis.ess < MIN_ESS else np.argmax(chains.rhat))
    finding = (
        f"Chains disagree or are too short: R-hat {diagnosis.rhat:.4g}, {diagnosis.ess:.0f} "
        f"effective draws, worst for {names[chains.coordinates[worst]]} (required: at most "
        f"{MAX_RHAT:g}, at least {MIN_ESS:g})."
    )
    if advise:
        finding += (
            " Continue with sample(..., state=samples.state). If the model is not whitened yet, "
            "fedmcmc.whiten gives all directions the same scale, so that steps can be larger."
        )
    return [finding]


def _describe_source(moments: MomentErrors) -> str:
    if moments.k_hat is None:
        return f"gradients at {moments.num_draws:,} draws"
    return f"weights of {moments.num_draws:,} points (k-hat {moments.k_hat:.2g})"


def _judge_weights(moments: MomentErrors | None) -> list[str]:
    if moments is None or moments.k_hat is None or moments.trusted:
        return []
    return [
        f"The approximation cannot be trusted: weights of the posterior over the approximation "
        f"and wider distributions have k-hat {moments.k_hat:.2g} (required: below "
        f"{khat_threshold(moments.num_draws):.2g}), so that it misses a part of the posterior. "
        f"More rounds help while the approximation still moves. Otherwise a Gaussian is "
        f"{UNSUITABLE}, or fedmcmc.correct, which continues from these samples."
    ]


def _judge_depth(diagnosis: Diagnosis) -> list[str]:
    """Return a finding if single draws lie where a posterior has none."""
    moments = diagnosis.moments
    if moments is None or not (moments.depth > DEPTH and moments.widened > WIDENED):
        return []
    if (diagnosis.mixing.reach > FAR).any():
        return []  # `_judge_mixing` reports it
    return [
        f"Chains were thrown out and came back: the log density of the farthest draw lies "
        f"{moments.depth:.3g} times as far below the median as the 10 % quantile does (at most "
        f"about 8 times in a posterior), and such draws make an sd {moments.widened:.3g} times "
        f"as large as without them. {DIVERGENCE_ADVICE}"
    ]


def _bias_advice(approximates: bool, transforms: bool) -> str:
    if transforms:
        return (
            "That is the posterior of the original rows. This kernel transforms rows at random "
            "and samples a different posterior (see fedmcmc.augmented): the two may be this far "
            "apart at any step size"
        )
    if approximates:
        return (
            "More rounds help while the approximation still moves; structure='dense' and more "
            f"exact inference may also help. Otherwise a Gaussian is {UNSUITABLE}"
        )
    return (
        "More rounds do not help. Use a smaller step, fewer local steps, or options that reduce "
        "the bias (control_variate=True, surrogates, full batches): see fedmcmc.predict_bias"
    )


def _judge_moments(diagnosis: Diagnosis, approximates: bool, advice: str) -> list[str]:
    """Return findings on means and sds; `advice` ends the finding of an error."""
    moments, findings = diagnosis.moments, []
    if moments is None:
        return []
    if moments.not_finite:
        findings.append(
            f"The log density or its gradient is not finite at {moments.not_finite} of "
            f"{moments.num_draws} checked draws: the model gives these no weight, or overflows."
        )
    if np.isnan(moments.bias).any():
        if not moments.not_finite:
            findings.append(
                f"The posterior's gradients at {moments.num_draws} draws cannot show whether means "
                f"and sds are right: the draws' covariance is degenerate. A few draws may be far "
                f"away, or a coordinate may never move."
            )
        return findings
    few = diagnosis.ess < MIN_USABLE_ESS
    off = moments.off(10 * MAX_BIAS, 2.0) if few else moments.off(MAX_BIAS, MAX_SPREAD)
    if not off.any():
        return findings
    bias, stretch = np.abs(moments.bias), np.abs(np.log(moments.spread))
    worst = int(
        np.argmax(np.where(off, np.maximum(bias / MAX_BIAS, stretch / np.log(MAX_SPREAD)), 0))
    )
    name = diagnosis.names[worst]
    errors = f"the sd of {name} is {moments.spread[worst]:.3g} times the posterior's"
    if bias[worst] > MAX_BIAS:
        errors = f"the mean of {name} is {bias[worst]:.2g} posterior sd off, {errors}"
    if few:
        advice = (
            "With so few effective draws this shows how far away the chains are, not what to change"
        )
    owner = "The approximation's" if approximates else "These"
    findings.append(
        f"{owner} draws are not the posterior's: by {_describe_source(moments)} {errors} "
        f"({int(off.sum())} of {len(off)} coordinates are off by {MAX_BIAS:g} sd or a tenth). "
        f"{advice}."
    )
    return findings


def _largest(values: np.ndarray) -> float:
    return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")


def warnings_are_ignored() -> bool:
    """Return true if the user's filters ignore every `DiagnosisWarning`."""
    for action, message, category, module, line in warnings.filters:
        if issubclass(DiagnosisWarning, category) and not (message or module or line):
            return action == "ignore"
    return False
