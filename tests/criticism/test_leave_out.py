"""Posteriors without a client, against exact Gaussians, refits, and `conflict`."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc import criticism
from fedmcmc.criticism._leave_out import WeightedPoints, WithoutClient
from fedmcmc.criticism._wrapped import LeaveOneOutConsortium, LeaveOneOutQuestion
from fedmcmc.gaussian import Gaussian, as_dense
from fedmcmc.kernels import Points, evaluations
from fedmcmc.runs import as_consortium
from tests.criticism.federation import LOGISTIC, clients, messages

SIZES = (60, 40, 25, 30)
PRIOR = Gaussian.from_moments(jnp.zeros(2), 2.5**2 * jnp.eye(2))


def linear(theta, rows):
    return -0.5 * (rows["y"] - rows["x"] @ theta["b"]) ** 2


LINEAR = fedmcmc.Posterior(lambda theta: -0.5 * jnp.sum((theta["b"] / 2.5) ** 2), linear)


def linear_data(sizes=SIZES):
    rng, result = np.random.default_rng(0), []
    for i, size in enumerate(sizes):
        x = np.stack([np.ones(size), rng.normal(size=size)], 1).astype(np.float32)
        y = x @ [0.5, 1.0 - 0.4 * (i == 2)] + rng.normal(size=size)
        result.append({"x": x, "y": y.astype(np.float32)})
    return result


def exact(result, without=None):
    """Return mean and covariance, without a client."""
    rows = [x for i, x in enumerate(result) if i != without]
    x, y = (np.concatenate([r[k] for r in rows]).astype(float) for k in ("x", "y"))
    covariance = np.linalg.inv(np.eye(2) / 2.5**2 + x.T @ x)
    return covariance @ x.T @ y, covariance


def gaussian(rows):
    """Return the posterior of all rows."""
    mean, covariance = exact(rows)
    return Gaussian.from_moments({"b": jnp.asarray(mean)}, jnp.asarray(covariance))


ROWS = linear_data()
DATA = fedmcmc.FederatedData.from_clients(ROWS)
START = {"b": jnp.zeros(2)}
LINEAR_PRIOR = Gaussian.from_moments(START, 2.5**2 * jnp.eye(2))


@pytest.fixture(scope="module")
def corrected():
    return fedmcmc.correct(jax.random.key(0), LINEAR, DATA, gaussian(ROWS), num_draws=8000)


def check_moments(result, rows, client, num_errors=4):
    """Check mean and sd without a client, within Monte Carlo errors."""
    expected, spread = exact(rows, without=client)
    sd, error = np.sqrt(np.diag(spread)), num_errors / np.sqrt(result.ess[client])
    np.testing.assert_allclose(result.mean[client], expected, atol=(error * sd).max())
    np.testing.assert_allclose(result.sd[client], sd, rtol=error)


def test_moments_and_shifts_without_a_client_are_exact(corrected):
    result = criticism.leave_out(LINEAR, DATA, corrected)
    mean, covariance = exact(ROWS)
    assert result.reliable.all() and result.totals["rounds"] == 1
    for i in range(4):
        check_moments(result, ROWS, i)
        shift = (mean - exact(ROWS, without=i)[0]) / np.sqrt(np.diag(covariance))
        np.testing.assert_allclose(result.shift[i], shift, atol=8 / np.sqrt(result.ess[i]))
    assert np.abs(result.shift[2, 1]) > 0.3  # client 2 differs
    assert result.coordinates == ("b[0]", "b[1]")
    assert "b[1]" in repr(result) and result.to_dict()["k_hat"] == result.k_hat.tolist()
    expansions = fedmcmc.surrogates.taylor(LINEAR, DATA, START)
    prior = as_dense(Gaussian.from_moments(START, variance=jnp.array(2.5**2)))
    expected = criticism.conflict(expansions, prior).shift
    np.testing.assert_allclose(result.shift, expected, atol=0.15)


def test_draws_of_equal_weight_have_the_moments_without_a_client():
    mean, covariance = exact(ROWS)
    z = np.random.default_rng(0).normal(size=(8000, 2))
    draws = {"b": (mean + z @ np.linalg.cholesky(covariance).T).astype(np.float32)}
    result = criticism.leave_out(LINEAR, DATA, draws)
    for i in range(4):
        check_moments(result, ROWS, i)
    assert result.labels == tuple(range(4))


def test_a_client_of_large_weight_warns_and_is_refitted():
    rows = linear_data((300, 8, 8))
    q, data = gaussian(rows), fedmcmc.FederatedData.from_clients(rows)
    large = fedmcmc.correct(jax.random.key(0), LINEAR, data, q)
    with pytest.warns(fedmcmc.SamplingWarning, match="leave_out: k-hat above 0.70 for 1 of 3"):
        result = criticism.leave_out(LINEAR, data, large)
    assert result.reliable.tolist() == [False, True, True]
    assert repr(result).count("unreliable") == 1 and not result.refitted.any()
    # With expansions, the remaining clients evaluate draws of their posterior.
    mode = {"b": jnp.asarray(exact(rows)[0], jnp.float32)}
    expansions = fedmcmc.surrogates.taylor(LINEAR, data, mode)
    again = criticism.leave_out(LINEAR, data, large, surrogates=expansions, prior=LINEAR_PRIOR)
    assert again.reliable.all() and again.refitted.tolist() == [True, False, False]
    check_moments(again, rows, 0)
    np.testing.assert_allclose(again.mean[1:], result.mean[1:])
    assert again.totals["rounds"] == 2 and repr(again).count("refitted") == 1
    # Without prior= the prior is a Gaussian at the model's prior, which here is normal.
    derived = criticism.leave_out(LINEAR, data, large, surrogates=expansions)
    np.testing.assert_allclose(derived.mean, again.mean, rtol=1e-4)


@pytest.fixture(scope="module")
def labeled():
    """Return a fit of a NumPyro model to clients with labels, the last of which differs."""
    result = dict(zip((1, 2, "Bern"), linear_data((60, 40, 50)), strict=True))
    result["Bern"] = {**result["Bern"], "y": result["Bern"]["y"] + result["Bern"]["x"][:, 1]}

    def model(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2.5).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    data = fedmcmc.FederatedData.from_clients(result)
    fitted = fedmcmc.fit(model, data, rng_key=jax.random.key(0), progress=False)
    return data, fitted, [result[label] for label in data.labels]


@pytest.mark.filterwarnings("ignore:leave_out")
def test_a_fit_has_labels_of_clients(labeled):
    data, fitted, rows = labeled
    q = fedmcmc.surrogates.taylor(fitted.posterior, data, fitted.gaussian.mean())
    result = criticism.leave_out(fitted.posterior, data, fitted, surrogates=q)
    for i in range(3):
        expected, spread = exact(rows, without=i)
        sd = np.sqrt(np.diag(spread))
        np.testing.assert_allclose(result.mean[i], expected, atol=0.15 * sd.max())
    assert result.labels == (1, 2, "Bern") and result.to_dict()["labels"] == [1, 2, "Bern"]
    first_words = [line.split()[0] for line in repr(result).splitlines()[1:]]
    assert first_words[0] == "Bern" and sorted(first_words[1:]) == ["1", "2"]
    with pytest.warns(fedmcmc.SamplingWarning, match="first client 'Bern'|first client 1:"):
        few = criticism.leave_out(fitted.posterior, data, fitted.samples)
    assert few.labels == (1, 2, "Bern")


def test_the_conflict_of_a_fit_equals_the_conflict_of_its_expansions(labeled):
    data, fitted, _ = labeled
    mode = fitted.gaussian.mean()
    q = fedmcmc.surrogates.taylor(fitted.posterior, data, mode)
    expected = criticism.conflict(q, LINEAR_PRIOR)
    draws = jax.tree.map(lambda leaf: leaf.reshape(-1, 2), fitted.samples.draws)
    for source in (fitted, fitted.samples, draws):  # quadratic: any center will do
        result = criticism.conflict(fitted.posterior, data, source)
        np.testing.assert_allclose(result.statistic, expected.statistic, rtol=1e-3)
        np.testing.assert_allclose(result.shift, expected.shift, rtol=1e-2, atol=1e-3)
        assert result.labels == expected.labels == (1, 2, "Bern")
    lines = repr(expected).splitlines()
    assert lines[1].split()[0] == "Bern" and expected.to_dict()["labels"] == [1, 2, "Bern"]
    assert criticism.conflict(q, LINEAR_PRIOR, labels="abc").labels == ("a", "b", "c")
    with pytest.raises(ValueError, match="labels must name the 3 clients, got 2"):
        criticism.conflict(q, LINEAR_PRIOR, labels="ab")


def test_all_clients_except_for_one_answer_questions():
    remaining = LeaveOneOutConsortium(as_consortium(DATA), 1)
    assert remaining.federation.num_clients == 3
    assert remaining.federation.num_rows == 60 + 25 + 30
    assert remaining.federation.sizes.tolist() == [60, 25, 30]
    points = Points({"b": jnp.ones((3, 2))}, START)
    result = remaining.ask(evaluations(LINEAR), points).value.value
    without = fedmcmc.FederatedData.from_clients([x for i, x in enumerate(ROWS) if i != 1])
    expected = as_consortium(without).ask(evaluations(LINEAR), points).value.value
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    with pytest.raises(NotImplementedError, match="run no kernel"):
        remaining.sample(jax.random.key(0), None)
    with pytest.raises(ValueError, match="unbiased compressor"):
        fedmcmc.compress(LeaveOneOutQuestion(LINEAR, evaluations(LINEAR), 1), fedmcmc.top_k(0.1))


@pytest.mark.slow
def test_a_refit_without_the_client_has_the_same_moments():
    result = clients("logistic", SIZES)
    data = fedmcmc.FederatedData.from_clients(result)

    def fitted(data):
        mode = fedmcmc.surrogates.mode(LOGISTIC, data, jnp.zeros(2)).position
        q = fedmcmc.surrogates.taylor(LOGISTIC, data, mode).sum() * PRIOR
        return fedmcmc.correct(jax.random.key(0), LOGISTIC, data, q, num_draws=8000)

    without = criticism.leave_out(LOGISTIC, data, fitted(data))
    for i in (1, 2):
        refit = fitted(fedmcmc.FederatedData.from_clients(result[:i] + result[i + 1 :]))
        error = 4 * np.sqrt(1 / without.ess[i] + 1 / refit.ess)
        np.testing.assert_allclose(without.mean[i], refit.mean(), atol=(error * refit.sd()).max())
        np.testing.assert_allclose(without.sd[i], refit.sd(), rtol=error)


@pytest.mark.slow
def test_whitened_draws_are_in_the_models_coordinates():
    data = fedmcmc.FederatedData.from_clients(clients("logistic", SIZES))
    white = fedmcmc.whiten(LOGISTIC, data, jnp.zeros(2))
    standard = Gaussian.from_moments(jnp.zeros(2), variance=jnp.array(1.0))
    corrected = fedmcmc.correct(jax.random.key(0), white.posterior, data, standard)
    with pytest.raises(ValueError, match="posterior that was given to whiten"):
        criticism.leave_out(white.posterior, data, corrected)
    result = criticism.leave_out(LOGISTIC, data, corrected)
    q = fedmcmc.surrogates.taylor(LOGISTIC, data, jnp.asarray(corrected.mean()))
    np.testing.assert_allclose(result.shift, criticism.conflict(q, PRIOR).shift, atol=0.35)


def content(num=200):
    rng = np.random.default_rng(0)
    points = {"b": jnp.asarray(rng.normal([0.5, 1.0], 0.1, (num, 2)), jnp.float32)}
    ratios = jnp.asarray(rng.normal(size=num), jnp.float32)
    return WeightedPoints(points, ratios, {"b": jnp.array([0.5, 1.0])}, jnp.full(2, 0.1))


def test_a_client_fills_only_its_own_row():
    for i, message in enumerate(messages(WithoutClient(LINEAR, 4), DATA, content())):
        table = message.value.value
        assert table.shape == (4, 6)  # two means, two sds, k-hat, effective draws
        assert table[i].all() and not np.delete(table, i, 0).any()


def test_a_point_of_zero_density_gets_no_weight():
    hard = LINEAR._replace(
        loglikelihood_fn=lambda theta, rows: jnp.where(
            theta["b"][0] > 0.2, linear(theta, rows), -jnp.inf
        )
    )
    corrected = fedmcmc.correct(jax.random.key(0), hard, DATA, gaussian(ROWS), num_draws=2000)
    result = criticism.leave_out(hard, DATA, corrected)
    assert np.isfinite(result.mean).all() and np.isfinite(result.k_hat).all()


def test_wrong_arguments_raise(corrected):
    q = Gaussian.from_moments(START, jnp.eye(2))
    scalar = LINEAR._replace(loglikelihood_fn=lambda theta, rows: theta["b"][0])
    for error, message, posterior, data, draws, settings in (
        (ValueError, "draws must be a fit", LINEAR, DATA, {"b": jnp.float32(1)}, {}),
        (TypeError, r"posterior must be a fedmcmc\.Posterior", linear, DATA, corrected, {}),
        (TypeError, "FederatedData or a consortium", LINEAR, ROWS, corrected, {}),
        (ValueError, "or neither", LINEAR, DATA, corrected, {"prior": q}),
        (
            ValueError,
            "one Gaussian per client",
            LINEAR,
            DATA,
            corrected,
            {"surrogates": q, "prior": q},
        ),
        (ValueError, "loglikelihood_fn", scalar, DATA, corrected, {}),
    ):
        with pytest.raises(error, match=message):
            criticism.leave_out(posterior, data, draws, **settings)
