"""Draws of a formula model by the user's names, linear predictors and expected outcomes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.hierarchy import LatentDraws
from fedmcmc.models._priors import sd_names
from fedmcmc.pytrees import trees

MAX_DRAWS = 1000
"""Number of draws for which effects of groups are drawn."""
Values = Mapping[str, np.ndarray]
"""Site to draws in the user's space, ``[num_draws, *event]``."""


class EffectDraws(NamedTuple):
    """Draws of the shared parameters, and for each one a draw of the effects of all groups.

    Attributes
    ----------
    positions
        Unconstrained, leaves ``[1, num_draws, *event]``.
    values
        Site to draws of shared parameters in the user's space, ``[num_draws, *event]``.
    latents
        Result of `fedmcmc.local_draws`, or ``None`` for a model without effects of groups.
    """

    positions: Any
    values: Values
    latents: LatentDraws | None

    def of_term(self, term: Any) -> np.ndarray:
        """Return effects of a local term, ``[num_draws, num_clients, max_groups, k]``."""
        assert self.latents is not None
        draws = np.asarray(self.latents.draws[f"effect_{term.label}"], np.float64)[0]
        return draws.reshape(*draws.shape[:3], -1)


def thin(draws: Any, limit: int) -> Any:
    """Return at most `limit` evenly spaced draws, leaves ``[num, *event]``, of all chains."""

    def of_leaf(leaf: Any) -> np.ndarray:
        merged = np.asarray(leaf)
        merged = merged.reshape(-1, *merged.shape[2:])
        num = min(limit, len(merged))
        return merged[((np.arange(num) + 0.5) * len(merged) / num).astype(int)]

    return jax.tree.map(of_leaf, draws)


def named_draws(sites: Mapping[str, Any], design: Any, family: Any) -> dict[str, np.ndarray]:
    """Return draws ``[num_chains, num_draws]`` by the names of `ModelFit.summary`.

    The intercept refers to the user's columns instead of centered ones.
    """
    arrays = {name: np.asarray(x, np.float64) for name, x in sites.items()}
    draws: dict[str, np.ndarray] = {}
    coefficients = arrays.pop("b", None)
    if "Intercept" in arrays:
        intercept = arrays.pop("Intercept")
        if coefficients is not None:
            intercept = intercept - coefficients @ np.asarray(design.centers, np.float64)
        draws["Intercept"] = intercept
    if coefficients is not None and "cutpoints" in arrays:
        shift = coefficients @ np.asarray(design.centers, np.float64)
        arrays["cutpoints"] = arrays["cutpoints"] + shift[..., None]
    if coefficients is not None:
        draws |= {name: coefficients[..., i] for i, name in enumerate(design.names)}
    for name in family.parameters:
        if name in arrays:
            draws |= _elements(name, arrays[name])
    for model in getattr(design, "covariates", ()):
        draws |= model.name_draws(arrays)
    for term in design.terms:
        sd = arrays[f"sd_{term.label}"]
        sd = sd.reshape(*sd.shape[:2], -1)
        draws |= {name: sd[..., i] for i, name in enumerate(sd_names(term))}
        factor = arrays.get(f"cor_{term.label}")
        if factor is not None:
            correlations = factor @ np.swapaxes(factor, -1, -2)
            for name, (i, j) in cor_names(term).items():
                draws[name] = correlations[..., i, j]
    return draws


def cor_names(term: Any) -> dict[str, tuple[int, int]]:
    """Return the names of the correlations of a random term, with the pair of coefficients."""
    pairs = zip(*np.triu_indices(len(term.names), 1), strict=True)
    return {
        f"cor_{term.label}[{term.names[i]}, {term.names[j]}]": (int(i), int(j)) for i, j in pairs
    }


def _elements(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the elements of a site ``[num_chains, num_draws, *event]`` by name."""
    flat = values.reshape(*values.shape[:2], -1)
    names = trees.element_names({name: np.zeros(values.shape[2:])})
    return {x: flat[..., i] for i, x in enumerate(names)}


def scale_factor(term: Any, values: Values) -> np.ndarray:
    """Return lower factors of the covariance of a term's effects, ``[num_draws, k, k]``."""
    sd = np.asarray(values[f"sd_{term.label}"], np.float64)
    sd = sd.reshape(len(sd), -1)
    factor = values.get(f"cor_{term.label}", np.eye(sd.shape[1]))
    return sd[:, :, None] * np.asarray(factor, np.float64)


def shared_effects(term: Any, values: Values) -> np.ndarray:
    """Return effects of a shared term, ``[num_draws, num_levels, k]``."""
    z = np.asarray(values[f"z_{term.label}"], np.float64)
    z = z.reshape(len(z), term.num_levels, len(term.names))
    return z @ np.swapaxes(scale_factor(term, values), -1, -2)


def fixed_part(values: Values, rows: Mapping[str, Any]) -> np.ndarray:
    """Return the linear predictor without random effects, ``[num_draws, num_rows]``."""
    num_rows = len(rows["x"])
    eta = np.zeros((len(next(iter(values.values()))), num_rows))
    if "Intercept" in values:
        eta += np.asarray(values["Intercept"], np.float64)[:, None]
    if "b" in values:
        eta += np.asarray(values["b"], np.float64) @ np.asarray(rows["x"], np.float64).T
    return eta + np.asarray(rows.get("offset", 0.0), np.float64)


def shared_part(design: Any, values: Values, rows: Mapping[str, Any]) -> np.ndarray:
    """Return the contribution of shared random effects, ``[num_draws, num_rows]`` or a zero."""
    total = np.zeros(())
    for term in design.terms:
        if term.kind == "shared":
            effects = shared_effects(term, values)[:, rows[f"index_{term.label}"]]
            total = total + np.einsum("srk,rk->sr", effects, rows[f"z_{term.label}"])
    return total


def expected_outcomes(
    family: Any, eta: np.ndarray, values: Values, rows: Mapping[str, Any]
) -> np.ndarray:
    """Return expected outcomes ``[num_draws, num_rows]``; for ordinal, probabilities on a 3rd axis.

    With trials, the expected outcome is a count. For Student's t it is the location, also where the
    mean is infinite.
    """
    if family.name == "student":
        return np.asarray(eta, np.float64)
    name = "probs" if family.name == "ordinal" else "mean"
    return _for_each_draw(family, lambda x, _: getattr(x, name), eta, values, rows)


def draw_outcomes(
    family: Any, eta: np.ndarray, values: Values, rows: Mapping[str, Any], key: Array
) -> np.ndarray:
    """Return an outcome for each draw and row, ``[num_draws, num_rows]``."""
    return _for_each_draw(family, lambda x, key: x.sample(key), eta, values, rows, key)


def _for_each_draw(
    family: Any,
    fn: Callable[[Any, Array], Array],
    eta: np.ndarray,
    values: Values,
    rows: Mapping[str, Any],
    key: Array | None = None,
) -> np.ndarray:
    """Return ``fn(distribution of all rows, key)`` of each draw."""
    trials = rows.get("trials")
    trials = None if trials is None else jnp.asarray(trials)
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(eta))

    def of_draw(eta: Array, parameters: dict[str, Array], key: Array) -> Array:
        return fn(family.distribution(eta, parameters, trials), key)

    parameters = {name: jnp.asarray(values[name]) for name in family.parameters}
    try:
        results = jax.vmap(of_draw)(jnp.asarray(eta), parameters, keys)
    except NotImplementedError as error:
        raise ValueError(
            f"Outcomes of the family {family.name!r} have no mean that can be predicted here. For "
            f"survival times use models.survival_curves or models.restricted_mean."
        ) from error
    return np.asarray(results, np.float64)


def local_term(design: Any) -> Any:
    """Return the term whose effects stay at the clients, or ``None``."""
    return next((term for term in design.terms if term.kind != "shared"), None)
