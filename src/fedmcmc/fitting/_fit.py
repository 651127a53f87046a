"""One call: modes, curvature, importance correction, and HMC where that does not do."""

import warnings
from typing import Any, Literal

import jax
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc._types import ArrayTree, Posterior, as_functions
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.fitting._decisions import decide
from fedmcmc.fitting._findings import warn_early, warned
from fedmcmc.fitting._fitted import Fitted, with_names
from fedmcmc.fitting._gibbs import check_many, fit_by_gibbs
from fedmcmc.fitting._results import result_of
from fedmcmc.fitting._runner import StageRunner
from fedmcmc.hierarchy import MOST_DIMENSIONS, marginal, refuse_two_levels
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium

EFFORTS = ("auto", "exact", "approximate")


@in_single_precision
def fit(
    model: Any,
    data: Any,
    *,
    rng_key: Array,
    num_draws: int = 4000,
    effort: Literal["auto", "exact", "approximate"] = "auto",
    max_rounds: int = 2000,
    latency: float | None = None,
    position: ArrayTree | None = None,
    progress: bool = True,
) -> Fitted:
    """Sample a posterior without pooling rows, and check the draws.

    First the modes are found, from several starts, with the curvature there (about ten rounds).
    One more round weights draws of the Gaussians that these make, which usually passes for
    regressions with more than ten rows per parameter; curvature predicts how well that will go, and
    if it is hopeless no draw is weighted. If the weights do not pass, the proposal adapts,
    expectation propagation gives another, and at last chains of Hamiltonian Monte Carlo run until
    they agree. Between several modes, or if chains do not agree, tempering leads from the Gaussians
    to the posterior.

    Parameters
    ----------
    model
        A NumPyro model of one client's rows, or a `Posterior`.
    data
        A `FederatedData`, or a consortium of clients elsewhere.
    rng_key
        Of all that is random: the same key gives the same draws.
    num_draws
        Weighted draws per correction, at least 100.
    effort
        ``"approximate"`` stops at the Gaussians; ``"exact"`` goes on to chains unless a correction
        passes; ``"auto"`` too, up to 2,000 parameters and if 1,050 rounds of `latency` seconds take
        less than an hour.
    max_rounds
        Rounds of chains at most.
    latency
        Seconds that a round takes, where clients are elsewhere; none by default.
    position
        A place to start from, for a `Posterior` without ``init_fn``.
    progress
        Whether to show a bar per stage.

    Returns
    -------
    Fitted
        ``.samples``, ``.verdict``, ``.log_evidence``, ``.report``. The verdict is a
        `fedmcmc.diagnostics.Verdict`, a sentence with ``.kind``, ``.k_hat`` and ``.error``. It
        begins with:

        - ``passed (importance)``: k-hat below 0.5 at the first correction;
        - ``passed (MCMC)``: R-hat of all chains below 1.01 and 400 effective draws, of the shared
          parameters;
        - ``passed (SMC)``: eight groups of chains of `fedmcmc.tempered` that agree;
        - ``doubtful``: a correction that passed only after its proposal was adapted or with k-hat
          above 0.5, a log likelihood too large for its floating-point type, or another check that
          left a question open;
        - ``approximate``: draws of Gaussians;
        - ``failed``: chains that do not agree, nor groups of tempering.

        Whatever passed has estimated Monte Carlo errors of at most 0.05 sd for means and 5 % for
        sds of all unconstrained coordinates; the verdict states them.

    Raises
    ------
    TypeError, ValueError
        If model and data do not fit together, before anything is sampled; if the posterior is
        improper along a direction that was tried, which the error names.

    Warns
    -----
    SamplingWarning
        If the verdict is not ``passed`` and `effort` asked for more than an approximation; if no
        row depends on a parameter, as soon as that is known; if fewer than five groups have
        effects, so that the prior of their spread matters.

    Notes
    -----
    No check proves that draws follow the posterior: a mode that no start leads to and no draw
    reaches cannot be seen.

    Examples
    --------
    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import fedmcmc
    >>> def model(x, y=None):
    ...     b = numpyro.sample("b", dist.Normal(0, 2.5).expand([2]).to_event(1))
    ...     with numpyro.plate("rows", len(x)):
    ...         numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> clinics = []
    >>> for size in (80, 40, 6):
    ...     x = rng.normal(size=size)
    ...     clinics.append({"x": x, "y": (rng.random(size) < 1 / (1 + np.exp(-x))).astype(int)})
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> fitted = fit(model, data, rng_key=jax.random.key(0), progress=False)
    >>> print(fitted.verdict.kind, fitted.verdict.error < 0.05, fitted.report.rounds < 20)
    passed True True
    >>> fitted.samples.constrained["b"].shape
    (1, 4000, 2)
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {EFFORTS}, got {effort!r}.")
    positive_integer(num_draws, "num_draws")
    positive_integer(max_rounds, "max_rounds")
    if latency is not None and not latency >= 0:
        raise ValueError(f"latency must be a number of seconds per round, got {latency!r}.")
    posterior, consortium = _understood(model, data)
    asked = dict(effort=effort, num_draws=num_draws, max_rounds=max_rounds, latency=latency)
    if posterior.local is not None:  # of more numbers than are integrated out
        check_many(posterior, effort, max_rounds)
        fitted = fit_by_gibbs(
            posterior, consortium, as_key(rng_key), max_rounds, position, progress
        )
        return warned(with_names(fitted, consortium, asked), effort, consortium)
    sampled = as_functions(posterior._replace(position_fn=None))
    run = StageRunner(sampled, consortium, as_key(rng_key), num_draws, progress)
    # What the stages find is in the report, and the verdict warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        run.find_modes(position)
    said = warn_early(run.search.untold, consortium)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        verdict = decide(run, effort, max_rounds, latency or 0.0)
    fitted = with_names(result_of(run, posterior, verdict), consortium, asked)
    return warned(fitted, effort, consortium, said)


def _understood(model: Any, data: Any) -> tuple[Posterior, Consortium]:
    """Return whom to ask, and the posterior: without latents, where they can be integrated out."""
    consortium = as_consortium(data)
    if isinstance(model, Posterior):
        return _without_latents(model), consortium
    if not callable(model):
        raise TypeError(
            f"fit takes a NumPyro model or a fedmcmc.Posterior, got {type(model).__name__}."
        )
    from fedmcmc.interop.numpyro import from_numpyro

    given: dict[str, Any] = dict(example=data)
    if not isinstance(data, FederatedData):
        given = dict(
            example=jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype),
                consortium.federation.rows,
            )
        )
    posterior = _without_latents(from_numpyro(model, **given))
    if posterior.local is not None:
        posterior = from_numpyro(model, **given, centered=1.0)  # as Gibbs sampling needs it
    return posterior, consortium


def _without_latents(posterior: Posterior) -> Posterior:
    local: Any = posterior.local
    refuse_two_levels(local)
    if local is None or trees.num_elements(local.like.tree) > MOST_DIMENSIONS:
        return posterior
    return marginal(posterior)
