"""Verdicts and the Monte Carlo errors that they state."""

import copy
import json
import pickle

import numpy as np
import pytest

from fedmcmc.diagnostics import (
    Verdict,
    VerdictKind,
    chain_errors,
    errors_of_weighted,
    group_errors,
)


def test_a_verdict_is_a_sentence_with_figures():
    verdict = Verdict(
        "failed",
        reason="chains disagree.",
        details="80 rounds",
        r_hat=1.2,
        error=0.2,
        sd_error=0.01,
    )
    assert verdict == (
        "failed: chains disagree; Monte Carlo errors up to 0.2 sd (means) and 1 % (sds) (required: "
        "at most 0.05 sd and 5 %), R-hat 1.200; 80 rounds."
    )
    assert verdict.kind is VerdictKind.FAILED and verdict.error == 0.2 and np.isnan(verdict.k_hat)
    assert Verdict("passed", "SMC", error=0.01, sd_error=0.01).startswith("passed (SMC): Monte")
    assert json.loads(json.dumps({"verdict": verdict})) == {"verdict": str(verdict)}
    with pytest.raises(ValueError, match="is not a valid VerdictKind"):
        Verdict("exact")


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_verdict_is_copied_with_its_figures(copy_of):
    verdict = Verdict("passed", "MCMC", error=0.03, sd_error=0.02, ess=900.0, details="5 rounds")
    result = copy_of(verdict)
    assert type(result) is Verdict and result == verdict
    assert vars(result).keys() == vars(verdict).keys()
    assert result.kind is VerdictKind.PASSED and result.ess == 900 and result.details == "5 rounds"


RNG = np.random.default_rng(7)
NUM, REPEATS = 2000, 300


def test_errors_of_weighted_draws_equal_the_spread_of_repetitions():
    """Gaussian draws, weighted to a narrower Gaussian."""
    means, sds, errors = [], [], []
    for _ in range(REPEATS):
        x = RNG.normal(size=(NUM, 1))
        weights = np.exp(-(x[:, 0] ** 2) / 2)  # target N(0, 1 / 2)
        weights /= weights.sum()
        mean = weights @ x
        means.append(mean[0] / np.sqrt(0.5))
        sds.append(np.sqrt(weights @ (x - mean) ** 2)[0] / np.sqrt(0.5))
        errors.append(errors_of_weighted(x, weights))
    errors = np.mean(errors, axis=0)
    # A standard deviation of 300 repetitions has a relative error of four per cent.
    np.testing.assert_allclose(errors, [np.std(means), np.std(sds)], rtol=0.16)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_errors_of_chains_equal_the_spread_of_repetitions(correlation):
    """Autoregressive chains, by effective sample sizes."""
    noise = RNG.normal(size=(REPEATS, 4, NUM, 1)) * np.sqrt(1 - correlation**2)
    x = np.zeros_like(noise)
    x[:, :, 0] = RNG.normal(size=noise[:, :, 0].shape)
    for i in range(1, NUM):
        x[:, :, i] = correlation * x[:, :, i - 1] + noise[:, :, i]
    errors = np.mean([chain_errors(chains) for chains in x[:40]], axis=0)
    exact = [
        np.sqrt((1 + correlation) / (1 - correlation) / (4 * NUM)),
        np.sqrt((1 + correlation**2) / (1 - correlation**2) / (8 * NUM)),
    ]
    np.testing.assert_allclose(errors, exact, rtol=0.12)
    result = [x.mean((1, 2, 3)).std(), x.std((1, 2, 3)).std()]
    np.testing.assert_allclose(result, exact, rtol=0.16)


def test_errors_of_groups_equal_the_spread_of_repetitions():
    """Groups whose draws depend on each other: only the differences of groups show the error."""
    means, sds, errors = [], [], []
    for _ in range(REPEATS):
        x = np.repeat(np.log(RNG.gamma(2.0, size=(8, 60, 1))), 10, axis=1)  # skewed
        errors.append(group_errors(x))
        means.append(x.mean())
        sds.append(x.std())
    errors, scale = np.mean(errors, axis=0), np.mean(sds)
    np.testing.assert_allclose(errors, [np.std(means) / scale, np.std(sds) / scale], rtol=0.2)


def test_without_a_fourth_moment_the_width_of_an_interval_is_judged():
    """Of Cauchy draws no sd exists; their central 90 % interval has an error of about 3 %."""
    x = RNG.standard_cauchy(size=(20_000, 2))
    weighted = errors_of_weighted(x, np.full(20_000, 5e-5))
    assert weighted.sd < 0.02 and chain_errors(x.reshape(4, 5000, 2)).sd < 0.02
    assert group_errors(x.reshape(8, 2500, 2)).sd < 0.1


def test_a_number_that_never_moves_has_no_error():
    x = np.concatenate([RNG.normal(size=(4, 1000, 1)), np.ones((4, 1000, 1))], axis=2)
    for errors in (chain_errors(x), group_errors(x)):
        assert errors.mean < 0.1
    assert chain_errors(np.ones((4, 1000, 1))) == (0, 0)
