"""Predictions at average effects, for new groups and for groups of the study."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedmcmc.models._draws import (
    EffectDraws,
    draw_outcomes,
    expected_outcomes,
    fixed_part,
    scale_factor,
    shared_effects,
)

NUM_NODES = 15
"""Number of nodes of Gauss-Hermite quadrature over the effect of a new group."""
MAX_NUMBERS = 2**22
"""Number of draws times rows in one block."""


def predict_rows(
    design: Any,
    family: Any,
    effects: EffectDraws,
    rows: Mapping[str, Any],
    places: Mapping[str, np.ndarray | None],
    seed: int,
    kind: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return expected outcomes ``[num_rows, ...]`` and draws ``[num_draws, num_rows, ...]``.

    `places` has for each term ``None``, for an effect of zero, or the index of the effect per row,
    with -1 for a new group. Expected outcomes integrate over new groups by quadrature. Draws have
    an effect of the new group for each draw, which all rows share.
    """
    rng = np.random.default_rng(seed)
    terms = []
    for term in design.terms:
        place = places[term.label]
        if place is not None:
            factor = scale_factor(term, effects.values)
            new = np.einsum("sij,sj->si", factor, rng.standard_normal(factor.shape[:2]))
            terms.append((term, place, factor, _known_effects(term, effects, place), new))
    num_draws, num_rows = len(next(iter(effects.values.values()))), len(rows["x"])
    size = max(1, MAX_NUMBERS // num_draws)
    blocks = []
    for start in range(0, num_rows, size):
        part = {name: np.asarray(x)[start : start + size] for name, x in rows.items()}
        eta = fixed_part(effects.values, part)
        variance, drawn = np.zeros_like(eta), eta.copy()
        for term, place, factor, levels, new in terms:
            z = np.asarray(part[f"z_{term.label}"], np.float64)
            index = place[start : start + size]
            contribution = np.einsum("srk,rk->sr", levels[:, index], z)
            eta += np.where(index < 0, 0, contribution)
            drawn += np.where(index < 0, new @ z.T, contribution)
            spread = np.square(np.einsum("rk,skj->srj", z, factor)).sum(-1)
            variance += np.where(index < 0, spread, 0)
        expected = _integrate(family, eta, np.sqrt(variance), effects.values, part)
        if kind == "outcome":
            key = jax.random.fold_in(jax.random.key(seed), start)
            draws = draw_outcomes(family, drawn, effects.values, part, key)
        else:
            draws = expected_outcomes(family, drawn, effects.values, part)
        blocks.append((expected, draws))
    means, all_draws = zip(*blocks, strict=True)
    return np.concatenate(means), np.concatenate(all_draws, axis=1)


def _known_effects(term: Any, effects: EffectDraws, place: np.ndarray) -> np.ndarray:
    """Return effects by index, ``[num_draws, num_levels, k]``; for local terms, of all groups."""
    if (place < 0).all():
        num_draws = len(next(iter(effects.values.values())))
        return np.zeros((num_draws, 1, len(term.names)))
    if term.kind == "shared":
        return shared_effects(term, effects.values)
    draws = effects.of_term(term)
    return draws.reshape(len(draws), -1, draws.shape[-1])


def _integrate(
    family: Any, eta: np.ndarray, sd: np.ndarray, values: Any, rows: Mapping[str, Any]
) -> np.ndarray:
    """Return outcomes expected over draws and a normal effect of spread `sd`, ``[num_rows, ...]``.

    The contribution of a new group to the linear predictor is normal, so one dimension suffices.
    """
    if not sd.any():
        return expected_outcomes(family, eta, values, rows).mean(0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    parts = [
        weight * expected_outcomes(family, eta + sd * node, values, rows).mean(0)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True)
    ]
    return np.sum(parts, axis=0)
