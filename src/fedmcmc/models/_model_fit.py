"""Result of a formula model: draws, verdict and everything that is computed from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import Verdict
from fedmcmc.fitting import Fitted, Report
from fedmcmc.records import Samples
from fedmcmc.types import Posterior


@dataclass(frozen=True, repr=False)
class ModelFit:
    """Fit of a formula model, from `glm`, `glmm` or `survival`.

    Attributes
    ----------
    fitted
        Result of `fedmcmc.fit`, with draws of the shared parameters.
    model
        NumPyro model.
    posterior
        Posterior of the model from `fedmcmc.from_numpyro`, with the effects of groups in ``.local``
        (`fitted` has the posterior after they are integrated out).
    data
        Rows of all clients in a simulation; ``None`` after `fedmcmc.load`.
    design, family, priors
        Design of the matrices, family of the outcome, and prior of each parameter by name.
    formula
        Text of the formula.
    tables
        Client to table of its rows, in a simulation; used by `effects`.
    settings
        Other arguments of the call, such as ``hazard``, that `save` stores.
    """

    fitted: Fitted
    model: Callable[..., Any]
    posterior: Posterior
    data: FederatedData | None
    design: Any
    family: Any
    priors: Mapping[str, Any]
    formula: str = ""
    tables: Mapping[Any, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """Draws of the shared parameters, of equal weight."""
        return self.fitted.samples

    @property
    def verdict(self) -> Verdict:
        """Verdict on the draws."""
        return self.fitted.verdict

    @property
    def report(self) -> Report:
        """Report on the stages of the fit."""
        return self.fitted.report
