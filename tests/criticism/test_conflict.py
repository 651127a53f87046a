"""Conflict of clients: formulas, identities, and uniform p-values where no client differs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import fedmcmc
from fedmcmc.criticism import _conflict, conflict
from fedmcmc.gaussian import Gaussian

RANKS = (3, 3, 2, 1, 3, 2)
PRIOR = np.array([[1.0, 0.3, 0.0], [0.3, 2.0, 0.1], [0.0, 0.1, 1.5]])


def designs(ranks=RANKS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(rank, 3)) * rng.uniform(0.5, 3, 3) for rank in ranks]


def surrogates(rng, design_matrices, theta, shifts=None):
    """Return Gaussians of clients with ``X theta + noise``, in float64 on the host."""
    precision, eta = [], []
    for i, x in enumerate(design_matrices):
        coefficients = theta + (0 if shifts is None else shifts[i])
        outcome = x @ coefficients + rng.normal(size=len(x))
        precision.append(x.T @ x)
        eta.append(x.T @ outcome)
    return Gaussian(np.array(eta), np.array(precision), "dense")


def prior_of(precision=PRIOR):
    return Gaussian(np.zeros(3), precision, "dense")


def by_pseudo_inverse(q, prior):
    """Return the statistics as the docstring has them."""
    a, eta = np.asarray(q.precision, float), np.asarray(q.precision_mean, float)
    total, total_eta = prior.precision + a.sum(0), prior.precision_mean + eta.sum(0)
    result = []
    for i in range(len(a)):
        cavity = np.linalg.inv(total - a[i])
        g = eta[i] - a[i] @ cavity @ (total_eta - eta[i])
        result.append(g @ np.linalg.pinv(a[i] + a[i] @ cavity @ a[i], rcond=1e-9) @ g)
    pinv = [np.linalg.pinv(x, rcond=1e-9) for x in a]
    squares = sum(e @ p @ e for e, p in zip(eta, pinv, strict=True))
    return np.array(result), squares - eta.sum(0) @ np.linalg.pinv(a.sum(0)) @ eta.sum(0)


@pytest.fixture(autouse=True, scope="module")
def in_float64():
    with jax.enable_x64(True):
        yield


def test_statistics_equal_formulas_of_pseudo_inverses():
    rng = np.random.default_rng(1)
    q = surrogates(rng, designs(), rng.normal(size=3))
    result = conflict(q, prior_of())
    statistic, heterogeneity = by_pseudo_inverse(q, prior_of())
    assert result.ranks.tolist() == list(RANKS)
    np.testing.assert_allclose(result.statistic, statistic, rtol=1e-8)
    np.testing.assert_allclose(result.heterogeneity, heterogeneity, rtol=1e-8)
    assert result.heterogeneity_degrees == sum(RANKS) - 3
    np.testing.assert_allclose(result.p_values, stats.chi2.sf(statistic, RANKS), rtol=1e-8)
    assert result.heterogeneity_p_value == pytest.approx(
        stats.chi2.sf(heterogeneity, sum(RANKS) - 3)
    )


def test_shifts_equal_those_of_posteriors_without_a_client():
    rng = np.random.default_rng(2)
    q, prior = surrogates(rng, designs(), rng.normal(size=3)), prior_of()
    result = conflict(q, prior)
    a, eta = q.precision, q.precision_mean
    for i in range(len(a)):
        remaining = [j for j in range(len(a)) if j != i]
        without = np.linalg.solve(PRIOR + a[remaining].sum(0), eta[remaining].sum(0))
        covariance = np.linalg.inv(PRIOR + a.sum(0))
        expected = (covariance @ eta.sum(0) - without) / np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(result.shift[i], expected, rtol=1e-8)


def test_single_numbers_have_closed_forms():
    # Two clients and a flat prior are a z-test.
    means, variances = np.array([[0.3], [1.8]]), np.array([0.5, 0.2])
    q = Gaussian(means / variances[:, None], (1 / variances)[:, None, None], "dense")
    result = conflict(q, Gaussian(np.zeros(1), np.zeros((1, 1)), "dense"))
    z2 = (means[1, 0] - means[0, 0]) ** 2 / variances.sum()
    np.testing.assert_allclose([*result.statistic, result.heterogeneity], z2)
    assert result.heterogeneity_degrees == 1
    assert result.i_squared == pytest.approx(max(0, 1 - 1 / z2))
    # A single client, of mean 2 and variance 1 / 4, is compared with the prior.
    q = Gaussian(np.array([[8.0]]), np.array([[[4.0]]]), "dense")
    result = conflict(q, Gaussian(np.zeros(1), np.array([[1.0]]), "dense"))
    assert result.statistic[0] == pytest.approx(4 / 1.25)
    assert result.heterogeneity == pytest.approx(0) and result.heterogeneity_p_value == 1


def repeat(seed, num, prior):
    """Return conflicts of federations whose clients share a truth that the prior draws."""
    rng, x = np.random.default_rng(seed), designs()
    factor = np.linalg.cholesky(np.linalg.inv(PRIOR))
    return [conflict(surrogates(rng, x, factor @ rng.normal(size=3)), prior) for _ in range(num)]


def test_p_values_are_uniform_if_no_client_differs():
    results = repeat(3, 600, prior_of())
    p_values = np.array([x.p_values for x in results])
    for p in p_values.T:
        assert stats.kstest(p, "uniform").pvalue > 1e-3
    law = stats.chi2(sum(RANKS) - 3)
    assert stats.kstest([x.heterogeneity for x in results], law.cdf).pvalue > 1e-3
    # The smallest, times the number of clients, is below 0.05 about that often.
    assert 0.02 < (p_values.min(1) * len(RANKS) < 0.05).mean() < 0.09
    # The test would notice a wrong prior.
    p_values = np.array([x.p_values for x in repeat(4, 300, prior_of(8 * PRIOR))])
    assert min(stats.kstest(p, "uniform").pvalue for p in p_values.T) < 1e-3


def test_a_client_that_differs_is_named():
    rng, shifts = np.random.default_rng(5), np.zeros((6, 3))
    shifts[4] = [0, 4.0, 0]
    result = conflict(surrogates(rng, designs(), np.zeros(3), shifts), prior_of())
    assert np.argmin(result.p_values) == 4 and result.p_values[4] < 0.01
    assert result.heterogeneity_p_value < 0.05 and result.i_squared > 0.3
    lines = repr(result).splitlines()
    assert lines[1].split()[0] == "4" and "heterogeneity" in lines[-1]
    assert result.to_dict()["p_values"][4] == result.p_values[4]


def test_a_client_without_information_does_not_differ():
    q = Gaussian(
        np.array([[1.0, 0.0], [0.0, 0.0]]), np.stack([np.eye(2), np.zeros((2, 2))]), "dense"
    )
    result = conflict(q, Gaussian(np.zeros(2), np.eye(2), "dense"))
    assert result.ranks.tolist() == [2, 0] and result.p_values[1] == 1
    assert result.statistic[1] == 0 and not result.shift[1].any()


@pytest.mark.parametrize("structure", ["diagonal", "scaled_identity"])
def test_sparse_structures_equal_dense_ones(structure):
    variance = {"diagonal": np.array([[1.0, 2.0], [0.5, 0.1]]), "scaled_identity": np.ones(2)}
    mean = np.array([[0.0, 1.0], [2.0, -1.0]])
    q = Gaussian.from_moments(jnp.asarray(mean), variance=jnp.asarray(variance[structure]))
    prior = {"diagonal": jnp.ones(2), "scaled_identity": jnp.array(1.0)}[structure]
    prior = Gaussian.from_moments(jnp.zeros(2), variance=prior)
    dense = jax.vmap(fedmcmc.gaussian.as_dense)
    expected = conflict(dense(q), fedmcmc.gaussian.as_dense(prior))
    np.testing.assert_allclose(conflict(q, prior).statistic, expected.statistic)


def test_units_of_a_parameter_change_nothing():
    rng = np.random.default_rng(6)
    q = surrogates(rng, designs(), rng.normal(size=3))
    unit = np.diag([1e-4, 1.0, 1e5])
    scaled = Gaussian(q.precision_mean @ unit, unit @ q.precision @ unit, "dense")
    result = conflict(scaled, prior_of(unit @ PRIOR @ unit))
    expected = conflict(q, prior_of())
    assert result.ranks.tolist() == expected.ranks.tolist()
    np.testing.assert_allclose(result.statistic, expected.statistic, rtol=1e-6)
    np.testing.assert_allclose(result.shift, expected.shift, rtol=1e-6)


def test_expansions_in_float32_have_the_ranks_of_their_rows():
    with jax.enable_x64(False):
        x = [
            np.random.default_rng(i).normal(size=(n, 3)).astype(np.float32)
            for i, n in enumerate((40, 2, 1))
        ]
        posterior = fedmcmc.Posterior(
            lambda theta: -0.5 * jnp.sum(theta**2),
            lambda theta, rows: -0.5 * (rows["y"] - rows["x"] @ theta) ** 2,
        )
        data = fedmcmc.FederatedData.from_clients(
            [{"x": a, "y": a[:, 0] + np.float32(0.1)} for a in x]
        )
        q = fedmcmc.surrogates.taylor(posterior, data, jnp.array([1.0, 0, 0]))
        prior = Gaussian(jnp.zeros(3), jnp.eye(3), "dense")
        assert conflict(q, prior).ranks.tolist() == [3, 2, 1]


def test_wrong_arguments_raise():
    q, prior = surrogates(np.random.default_rng(7), designs(), np.zeros(3)), prior_of()
    eta, precision = q.precision_mean, q.precision
    bent = precision - 9 * np.eye(3)[None] * (np.arange(6) == 2)[:, None, None]
    for error, message, first, second in (
        (TypeError, r"surrogates must be a fedmcmc\.Gaussian", precision, prior),
        (TypeError, r"prior must be a fedmcmc\.Gaussian", q, None),
        (ValueError, "one Gaussian per client", q, Gaussian(np.zeros(2), np.eye(2), "dense")),
        (ValueError, "one Gaussian per client", Gaussian(np.array(0.0), np.eye(1), "dense"), prior),
        (
            ValueError,
            "client 2 has a direction of negative curvature",
            Gaussian(eta, bent, "dense"),
            prior,
        ),
        (
            ValueError,
            r"Without client 0 .* no proper density",
            Gaussian(eta[:1], precision[:1], "dense"),
            prior_of(np.zeros((3, 3))),
        ),
        (ValueError, "finite", Gaussian(eta * np.nan, precision, "dense"), prior),
    ):
        with pytest.raises(error, match=message):
            conflict(first, second)


def heavy_tailed(theta, rows):
    return -jnp.log1p((rows - theta) ** 2)


def mixed(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def test_an_expansion_with_negative_curvature_names_the_remedy(monkeypatch):
    rows = [np.zeros(3), np.zeros(3), np.full(3, 4.0)]
    data = fedmcmc.FederatedData.from_clients(rows)
    posterior = fedmcmc.Posterior(lambda theta: -0.5 * theta**2, heavy_tailed)
    message = r"client 2 has a direction of negative curvature.*criticism\.leave_out.*laplace"
    with pytest.raises(ValueError, match=message):
        conflict(posterior, data, np.linspace(-0.1, 0.1, 200))

    indefinite = Gaussian(np.zeros((3, 2)), np.stack([np.diag([1.0, -0.5])] * 3), "dense")
    prior = Gaussian(np.zeros(2), 9 * np.eye(2), "dense")
    monkeypatch.setattr(_conflict, "_expansions", lambda *arguments: (indefinite, prior))
    posterior = fedmcmc.marginal(fedmcmc.from_numpyro(mixed, example=data))
    with pytest.raises(ValueError, match=r"With random effects.*Use criticism\.leave_out"):
        conflict(posterior, data, {"mu": np.zeros(200), "tau": np.zeros(200)})
