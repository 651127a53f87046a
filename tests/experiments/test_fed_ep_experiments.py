"""FedEP's benchmarks of tags, toys and surrogates on tiny federations."""

import numpy as np
import pytest

import fedmcmc
from experiments.fed_ep import refresh, tags, toy, toy_problems

TINY = dict(
    num_seeds=1,
    cohort_size=3,
    num_burnin=2,
    num_rounds=5,
    num_epochs=3,
    pa_burnin=1,
    batch_size=4,
    laplace_passes=1,
    stateful_laplace_passes=1,
    ngvi_epochs=1,
    ngvi_samples=1,
    scale=1.0,
)


def test_the_toy_in_double_precision_is_that_of_the_kernels():
    config = toy.Config(num_problems=3, num_rounds=6)
    problems = toy.random_problems(config)
    for name, identity in (("FedEP", False), ("FedEP, scaled identity", True)):
        means = toy.means_of_rounds(toy.kernels()[name], toy.federations(problems), 6)
        gaps = np.linalg.norm(np.asarray(means) - problems.exact[:, None], axis=-1).mean(axis=0)
        exact = toy_problems.exact_distances(problems, 6, identity=identity)
        np.testing.assert_allclose(gaps, exact, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_tags_of_made_up_users(tmp_path):
    settings = tags.Config(
        dataset="synthetic",
        num_clients=40,
        num_words=30,
        num_tags=6,
        num_test=50,
        test_rows=30,
        best_window=2,
        client_learning_rate=1.0,
        covariance=0.1,
        server_optimizer="sgd",
        server_learning_rate=0.5,
        methods=("FedAvg", "FedSEP (L)"),
        **TINY,
    )
    found = tags.run(settings, tmp_path)
    assert [row["method"] for row in found["table"]] == ["FedAvg", "FedSEP (L)"]
    assert all(0 <= row["micro F1"] <= 100 for row in found["table"])
    assert found["by_round_sd"]["FedAvg"]["micro F1"] is None  # one seed


@pytest.mark.slow
def test_refreshed_surrogates_help_where_local_fits_do_not(tmp_path):
    settings = refresh.Config(
        local_steps=(1, 100),
        ep_rounds=(1, 5),
        num_chains=32,
        num_updates=40_000,
        burnin_updates=4_000,
        num_reference=5_000,
    )
    with pytest.warns(fedmcmc.SamplingWarning, match="grew"):  # local fits at T = 100
        found = refresh.run(settings, tmp_path)
    at = {(row["surrogates"], row["local steps"]): row for row in found["table"]}
    few, many = (at[name, 100]["error of sds"] for name in ("FedEP, 1 round", "FedEP, 5 rounds"))
    assert many < 0.15 < few
    assert at["FedEP, 5 rounds", 100]["error of the mean"] < 0.1


def test_rows_of_the_study_are_of_all_clients():
    settings = refresh.Config(num_clients=4, num_rows=40, proportion=1.0)
    data = refresh.federation(settings)
    assert data.sizes.tolist() == [10] * 4 and data.rows["x"].shape == (40, 5)
    signs = [set(data.client_rows(c)["sign"].tolist()) for c in range(4)]
    assert signs[:2] != [{-1.0, 1.0}] * 2  # dominated by one label each, as far as they last
