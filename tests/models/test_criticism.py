"""Leave-one-out and predictive checks of formula models, against ArviZ on the pooled rows."""

import numpy as np
import pytest
from scipy.special import expit, logsumexp
from scipy.stats import norm

from tests.models.stand_in import make_fit

pytest.importorskip("arviz_stats")


@pytest.fixture(scope="module")
def fit():
    return make_fit(num=1000)


def pooled_log_likelihood(fit):
    """Return the log densities of all rows at each draw, ``[num_draws, num_rows]``."""
    effects = fit.effect_draws
    latents = effects.latents.draws["effect_hospital"][0, :, :, 0, 0]
    blocks = []
    for i, (name, table) in enumerate(fit.tables.items()):
        rows = fit.design.rows(table, name)
        eta = effects.values["Intercept"][:, None] + effects.values["b"] @ np.float64(rows["x"]).T
        risk = expit(eta + latents[:, i : i + 1])
        blocks.append(np.log(np.where(rows["y"] > 0, risk, 1 - risk)))
    return np.concatenate(blocks, 1)


def test_sums_over_rows_equal_arviz_on_the_pooled_log_likelihood(fit):
    from arviz_base import from_dict
    from arviz_stats import loo

    terms = pooled_log_likelihood(fit)
    tree = from_dict(
        {"posterior": {"a": np.zeros((1, 1000))}, "log_likelihood": {"y": terms[None]}}
    )
    expected = loo(tree, reff=1.0, pointwise=True)
    result = fit.loo()
    assert result.num_rows == terms.shape[1] and result.unit == "rows"
    assert result.elpd == pytest.approx(expected.elpd, abs=2e-3)
    assert result.p_loo == pytest.approx(expected.p, abs=2e-3)
    assert result.se == pytest.approx(expected.se, rel=1e-3)


@pytest.mark.filterwarnings("ignore:loo", "ignore:Estimated")
def test_leaving_out_groups_uses_their_marginal_likelihood(fit):
    """The reference integrates each hospital's likelihood over a fine grid of effects."""
    from arviz_base import from_dict
    from arviz_stats import loo

    values = {name: np.float64(x)[0] for name, x in fit.samples.constrained.items()}
    grid = np.linspace(-6, 6, 301)
    weights = np.log(norm.pdf(grid) / norm.pdf(grid).sum())
    terms = []
    for name, table in fit.tables.items():
        rows = fit.design.rows(table, name)
        eta = values["Intercept"][:, None] + values["b"] @ np.float64(rows["x"]).T
        eta = eta[:, None] + values["sd_hospital"][:, :, None] * grid[:, None]
        risk = expit(eta)
        of_rows = np.log(np.where(rows["y"] > 0, risk, 1 - risk)).sum(-1)
        terms.append(logsumexp(of_rows + weights, axis=1))
    tree = from_dict(
        {
            "posterior": {"a": np.zeros((1, 1000))},
            "log_likelihood": {"y": np.stack(terms, -1)[None]},
        }
    )
    expected, result = loo(tree, reff=1.0), fit.loo(groups=True)
    assert result.unit == "groups" and result.num_rows == 3
    assert result.elpd == pytest.approx(expected.elpd, abs=5e-3)
    assert result.p_loo == pytest.approx(expected.p, abs=5e-3)


def test_replicated_outcomes_have_the_mean_of_the_model(fit):
    check = fit.pp_check()
    effects, latents = fit.effect_draws, fit.effect_draws.latents.draws["effect_hospital"]
    total = np.zeros(len(effects.values["Intercept"]))
    for i, (name, table) in enumerate(fit.tables.items()):
        rows = fit.design.rows(table, name)
        eta = effects.values["Intercept"][:, None] + effects.values["b"] @ np.float64(rows["x"]).T
        total += expit(eta + latents[0, :, i, 0]).sum(1)
    num_rows = sum(len(table) for table in fit.tables.values())
    assert check.observed[0] == sum(table["y"].sum() for table in fit.tables.values())
    error = np.sqrt(0.25 * num_rows / len(total))
    assert check.replicated.mean() == pytest.approx(total.mean(), abs=5 * error)
    assert check.replicated.var() > total.var()
