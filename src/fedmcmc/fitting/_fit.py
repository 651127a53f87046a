"""One call: modes, curvature, importance correction, and chains if these do not suffice."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import Array

from fedmcmc._checks import positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import SamplingWarning
from fedmcmc.fitting._compilations import compiling_ahead
from fedmcmc.fitting._decisions import decide
from fedmcmc.fitting._findings import warn_of_unidentified, warn_of_verdict
from fedmcmc.fitting._fitted import Fitted, describe
from fedmcmc.fitting._gibbs import check_gibbs, fit_by_gibbs
from fedmcmc.fitting._results import make_fitted
from fedmcmc.fitting._stages import SEARCH, Problem, run_step
from fedmcmc.hierarchy import MAX_DIMENSIONS, marginal
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.random import as_key
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import ArrayTree, Posterior, as_functions

EFFORTS = ("auto", "exact", "approximate")


@in_single_precision
def fit(
    model: Callable[..., object] | Posterior,
    data: FederatedData | Consortium,
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

    The fit weights draws of Gaussians at the modes. If the weights do not pass, it runs expectation
    propagation, Hamiltonian Monte Carlo or tempering; docs/explanation/exactness.md describes
    stages and verdicts. Models with more than three random effects per group run Gibbs sampling
    instead, which ignores `num_draws` and `latency`.

    Parameters
    ----------
    model, data, rng_key
        NumPyro model or `Posterior`, `FederatedData` or consortium, and random key.
    num_draws
        Number of weighted draws per correction, at least 100.
    effort
        ``"approximate"`` stops at the Gaussians; ``"exact"`` runs chains unless a correction
        passes; ``"auto"`` is ``"exact"``, but runs no chains for more than 2,000 parameters or if
        ``1050 * latency`` exceeds an hour.
    max_rounds
        Maximum number of rounds of chains.
    latency
        Seconds per round for remote clients.
    position
        Initial position of a `Posterior` without ``init_fn``.
    progress
        If true, a progress bar is shown for each stage.

    Returns
    -------
    Fitted
        ``.samples``, ``.verdict``, ``.log_evidence`` and ``.report``. The verdict's kind is
        ``"passed"`` (Monte Carlo errors of at most 0.05 sd for means and 5 % for sds),
        ``"doubtful"``, ``"approximate"`` or ``"failed"``, the last three with a `SamplingWarning`.

    Raises
    ------
    TypeError, ValueError
        If model and data do not match, or the posterior is improper along a direction.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> fitted = fit(posterior, data, rng_key=jax.random.key(0), position=0.0, progress=False)
    >>> print(fitted.verdict.kind)
    passed
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {EFFORTS}, got {effort!r}.")
    positive_integer(num_draws, "num_draws")
    positive_integer(max_rounds, "max_rounds")
    if latency is not None and not latency >= 0:
        raise ValueError(f"latency must be at least 0 seconds per round, got {latency!r}.")
    posterior, consortium = _as_posterior(model, data)
    settings = dict(effort=effort, num_draws=num_draws, max_rounds=max_rounds, latency=latency)
    key = as_key(rng_key)
    if posterior.local is not None:  # more random effects per group than quadrature supports
        check_gibbs(posterior, effort, max_rounds)
        fitted = fit_by_gibbs(posterior, consortium, key, max_rounds, position, progress)
        return warn_of_verdict(describe(fitted, consortium, settings), effort, consortium)
    problem = Problem(
        as_functions(posterior._replace(position_fn=None)),
        consortium,
        key,
        num_draws,
        effort,
        max_rounds,
        latency or 0.0,
        position,
        progress,
    )
    # Warnings of single stages are in the report, and the verdict warns.
    with compiling_ahead(problem):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            results = run_step(problem, SEARCH)
        messages = warn_of_unidentified(results.search.unidentified, consortium)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplingWarning)
            verdict, results = decide(problem, results)
    fitted = make_fitted(problem, results, posterior, verdict)
    return warn_of_verdict(describe(fitted, consortium, settings), effort, consortium, messages)


def _as_posterior(
    model: Callable[..., object] | Posterior, data: FederatedData | Consortium
) -> tuple[Posterior, Consortium]:
    """Return the posterior, with random effects integrated out if possible, and the consortium."""
    consortium = as_consortium(data)
    if isinstance(model, Posterior):
        return _integrate_out_effects(model), consortium
    if not callable(model):
        raise TypeError(
            f"fit takes a NumPyro model or a fedmcmc.Posterior, got {type(model).__name__}."
        )
    from fedmcmc.interop.numpyro import from_numpyro

    example = data
    if not isinstance(data, FederatedData):
        example = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape[1:]), leaf.dtype),
            consortium.federation.rows,
        )
    posterior = _integrate_out_effects(from_numpyro(model, example=example))
    if posterior.local is not None:  # Gibbs sampling needs centered effects
        posterior = from_numpyro(model, example=example, centered=1.0)
    return posterior, consortium


def _integrate_out_effects(posterior: Posterior) -> Posterior:
    """Integrate random effects out if there are few per group."""
    local: Any = posterior.local
    if local is None or trees.num_elements(local.like.tree) > MAX_DIMENSIONS:
        return posterior
    return marginal(posterior)
