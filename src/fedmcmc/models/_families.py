"""Families of outcomes: links, further parameters, distributions, and checks of the outcome."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist

from fedmcmc.models._distributions import (
    HurdlePoisson,
    LinkedBinomial,
    LogGamma,
    LogitBeta,
    LogNegativeBinomial,
    LogPoisson,
    OrderedCumulative,
)

Parameters = Mapping[str, Any]


class _Kind(NamedTuple):
    """Fixed properties of a family; the first link is the default."""

    links: tuple[str, ...]
    parameters: tuple[str, ...]
    outcome: str
    distribution_fn: Callable[[str, Array, Parameters, Any], dist.Distribution]


_BINARY_LINKS = ("logit", "probit", "cloglog")
_OUTCOMES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "real": ("a finite number", np.isfinite),
    "positive": ("a positive number", lambda y: np.isfinite(y) & (y > 0)),
    "share": ("a number strictly between 0 and 1", lambda y: (y > 0) & (y < 1)),
    "binary": ("0 or 1", lambda y: np.isin(y, (0, 1))),
    "count": ("an integer of at least 0", lambda y: (y >= 0) & (y == np.floor(y))),
    "category": ("a category, coded 0, 1, ...", lambda y: (y >= 0) & (y == np.floor(y))),
}


def _mean_of(link: str, predictor: Array) -> Array:
    return jnp.exp(predictor) if link == "log" else predictor


_KINDS: dict[str, _Kind] = {
    "gaussian": _Kind(
        ("identity", "log"),
        ("sigma",),
        "real",
        lambda link, eta, p, _: dist.Normal(_mean_of(link, eta), p["sigma"]),
    ),
    "student": _Kind(
        ("identity",),
        ("sigma", "nu"),
        "real",
        lambda _, eta, p, __: dist.StudentT(p["nu"], eta, p["sigma"]),
    ),
    "bernoulli": _Kind(
        _BINARY_LINKS, (), "binary", lambda link, eta, _, __: LinkedBinomial(eta, link)
    ),
    "binomial": _Kind(
        _BINARY_LINKS, (), "count", lambda link, eta, _, trials: LinkedBinomial(eta, link, trials)
    ),
    "poisson": _Kind(("log",), (), "count", lambda _, eta, __, ___: LogPoisson(eta)),
    "negative_binomial": _Kind(
        ("log",), ("shape",), "count", lambda _, eta, p, __: LogNegativeBinomial(eta, p["shape"])
    ),
    "gamma": _Kind(
        ("log",), ("shape",), "positive", lambda _, eta, p, __: LogGamma(eta, p["shape"])
    ),
    "beta": _Kind(
        ("logit",), ("precision",), "share", lambda _, eta, p, __: LogitBeta(eta, p["precision"])
    ),
    "ordinal": _Kind(
        ("logit", "probit"),
        ("cutpoints",),
        "category",
        lambda link, eta, p, _: OrderedCumulative(eta, p["cutpoints"], link),
    ),
    "zero_inflated_poisson": _Kind(
        ("log",),
        ("zero_inflation",),
        "count",
        lambda _, eta, p, __: _zero_inflated(LogPoisson(eta), p),
    ),
    "zero_inflated_negative_binomial": _Kind(
        ("log",),
        ("shape", "zero_inflation"),
        "count",
        lambda _, eta, p, __: _zero_inflated(LogNegativeBinomial(eta, p["shape"]), p),
    ),
    "hurdle_poisson": _Kind(
        ("log",), ("hurdle",), "count", lambda _, eta, p, __: HurdlePoisson(eta, p["hurdle"])
    ),
}
FAMILIES = tuple(_KINDS)
"""Names of the families of `glm` and `glmm`."""


def _zero_inflated(counts: dist.Distribution, parameters: Parameters) -> dist.Distribution:
    gate = jnp.broadcast_to(parameters["zero_inflation"], counts.batch_shape)
    return dist.ZeroInflatedDistribution(counts, gate=gate)


@dataclass(frozen=True)
class Family:
    """Distribution of an outcome, given the linear predictor.

    Attributes
    ----------
    name, link
        One of `FAMILIES`, and the function that maps the mean (for ``"ordinal"``: cumulative
        probabilities) to the linear predictor.
    """

    name: str
    link: str

    @property
    def links(self) -> tuple[str, ...]:
        """Links of this family, its default in front."""
        return _KINDS[self.name].links

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters besides the linear predictor, such as ``sigma``."""
        return _KINDS[self.name].parameters

    @property
    def has_intercept(self) -> bool:
        """False if cut points take the place of the intercept."""
        return self.name != "ordinal"

    def distribution(
        self, predictor: Array, parameters: Parameters, trials: Any = None
    ) -> dist.Distribution:
        """Return the distribution of outcomes with the linear `predictor`, ``[num_rows]``."""
        return _KINDS[self.name].distribution_fn(self.link, predictor, parameters, trials)

    def check(self, outcome: np.ndarray, trials: np.ndarray | None = None, where: str = "") -> None:
        """Raise `ValueError` if an outcome is impossible; `where` names column and client."""
        expected, is_possible = _OUTCOMES[_KINDS[self.name].outcome]
        values = np.asarray(outcome, np.float64)
        possible = is_possible(values)
        if trials is not None:
            possible &= values <= np.asarray(trials)
            expected += " and at most the number of trials"
        if not possible.all():
            row = int(np.flatnonzero(~possible)[0])
            limit = "" if trials is None else f" of {np.asarray(trials)[row]:g} trials"
            raise ValueError(
                f"The outcome{where} must be {expected} for the family {self.name!r}; row {row} "
                f"has {values[row]:g}{limit}."
            )


def find_family(name: str | Family, link: str | None = None) -> Family:
    """Return the family with a name and a link, or the default link.

    Raises
    ------
    ValueError
        If there is no such family, or if it lacks the link.
    """
    if isinstance(name, Family):
        link = link or name.link
        name = name.name
    if name not in _KINDS:
        raise ValueError(f"family must be one of {', '.join(map(repr, FAMILIES))}, got {name!r}.")
    links = _KINDS[name].links
    if link is not None and link not in links:
        raise ValueError(
            f"The family {name!r} has the links {', '.join(map(repr, links))}, got {link!r}."
        )
    return Family(name, link or links[0])
