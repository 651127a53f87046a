"""Surrogates of the clients' likelihoods: exact for quadratic models, checked for all models."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.special
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import FederatedData, Gaussian, Posterior, surrogates
from fedmcmc.data._federated import Legend
from fedmcmc.runs import SimulatedConsortium
from tests.oracles.federations import LIMIT, z_scores
from tests.oracles.laws import location_noise
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(3)
TRACES = []


def assert_close(actual, expected, tolerance=2e-5):
    """Compare to a tolerance relative to the largest entry."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def flat_clients(tree):
    """Ravel positions of several leaves with a leading client axis."""
    return np.asarray(jax.vmap(lambda t: ravel_pytree(t)[0])(tree))


# A location model over a pytree: rows N(x; theta, (L' L)^-1), with L per client.

LIKE = {"b": {"c": jnp.zeros(())}, "a": jnp.zeros((2, 1))}  # raveled in order of keys: a, then c
PRIOR_PRECISION = np.array([[2.0, 0.4, 0.0], [0.4, 1.5, -0.3], [0.0, -0.3, 1.0]])
PRIOR_MEAN = np.array([0.5, 0.0, -1.0])


def flat_loglikelihood(flat, rows):
    scaled = jnp.einsum("nij,nj->ni", rows["factor"], rows["x"] - flat[None, :])
    return -0.5 * jnp.sum(scaled**2, axis=-1)


def location_loglikelihood(position, rows):
    flat = jnp.concatenate([position["a"].ravel(), position["b"]["c"][None]])
    return flat_loglikelihood(flat, rows)


def gaussian_logprior(position):
    gap = ravel_pytree(position)[0] - jnp.asarray(PRIOR_MEAN)
    return -0.5 * gap @ (jnp.asarray(PRIOR_PRECISION) @ gap)


LOCATION = Posterior(gaussian_logprior, location_loglikelihood)


class Location:
    """Ragged clients, one of a single row, and the natural parameters of their likelihoods."""

    def __init__(self, sizes=(7, 1, 12, 4), seed=0, ranks=None):
        rng = np.random.default_rng(seed)
        factors = (0.5 * rng.normal(size=(len(sizes), 3, 3)) + np.eye(3)).round(2)
        for factor, rank in zip(factors, ranks or [3] * len(sizes), strict=True):
            factor[rank:] = 0
        rows = [rng.normal(2, 1.5, size=(n, 3)).round(2) for n in sizes]
        self.row_precisions = factors.transpose(0, 2, 1) @ factors
        self.precisions = np.array(sizes)[:, None, None] * self.row_precisions
        means = np.array([x.mean(0) for x in rows])
        self.precision_means = np.einsum("sij,sj->si", self.precisions, means)
        self.data = FederatedData.from_clients(
            [
                {"x": x, "factor": np.broadcast_to(factor, (len(x), 3, 3))}
                for x, factor in zip(rows, factors, strict=True)
            ]
        )

    def check(self, fitted, diagonal_at=None):
        assert jax.tree.structure(fitted.precision_mean) == jax.tree.structure(LIKE)
        if diagonal_at is None:
            assert_close(fitted.precision, self.precisions)
            assert_close(flat_clients(fitted.precision_mean), self.precision_means)
            return
        diagonals = np.diagonal(self.precisions, axis1=1, axis2=2)
        assert_close(flat_clients(fitted.precision), diagonals)
        point = flat_clients(diagonal_at)
        gradients = self.precision_means - np.einsum("sij,sj->si", self.precisions, point)
        fitted_gradients = jax.vmap(Gaussian.grad_log)(fitted, diagonal_at)
        assert_close(flat_clients(fitted_gradients), gradients)


def like(a, b, c):
    return {"b": {"c": jnp.array(c)}, "a": jnp.array([[a], [b]])}


@pytest.fixture(scope="module")
def location():
    return Location()


CENTERS = [like(0.0, 0.0, 0.0), like(3.0, -5.0, 1.5)]


@pytest.mark.parametrize("center", CENTERS)
def test_taylor_and_laplace_are_exact_for_a_quadratic_log_likelihood(location, center):
    location.check(surrogates.taylor(LOCATION, location.data, center))
    diagonal = surrogates.taylor(LOCATION, location.data, center, structure="diagonal")
    of_clients = jax.tree.map(lambda x: jnp.broadcast_to(x, (4, *x.shape)), center)
    location.check(diagonal, diagonal_at=of_clients)
    location.check(surrogates.laplace(KEY, LOCATION, location.data, position=center))


def test_the_default_position_is_drawn_by_the_posterior(location):
    with pytest.raises(ValueError, match="pass position="):
        surrogates.laplace(KEY, LOCATION, location.data)
    with pytest.raises(ValueError, match="pass position="):
        surrogates.sampled(KEY, LOCATION, location.data, 0.1)
    posterior = LOCATION._replace(init_fn=lambda rng_key: CENTERS[1])
    location.check(surrogates.laplace(KEY, posterior, location.data))


def test_analytic_surrogates_are_exact_for_ragged_clients(location):
    def statistics(rows, mask):
        precision = jnp.einsum("nij,nik->njk", rows["factor"], rows["factor"])
        weight = mask.astype(precision.dtype)
        return (
            jnp.einsum("n,njk->jk", weight, precision),
            jnp.einsum("n,njk,nk->j", weight, precision, rows["x"]),
            jnp.sum(weight),
        )

    def gaussian(total, size):
        precision, eta, count = total
        # `size` must be the number of rows: any other would break the exact equality below.
        return Gaussian(like_of(eta * size / count), precision, "dense")

    def like_of(flat):
        return {"b": {"c": flat[2]}, "a": flat[:2, None]}

    location.check(surrogates.analytic(statistics, gaussian, location.data))
    singular = Location(ranks=[3, 2, 3, 3]).data
    with pytest.raises(ValueError, match=r"analytic.* 1 of 4 clients. client 1 \(1 rows\).*taylor"):
        surrogates.analytic(statistics, gaussian, singular)
    with pytest.warns(UserWarning, match="client 1"):
        surrogates.analytic(statistics, gaussian, singular, check="warn")
    named = replace(singular, legend=Legend(("Bern", "Chur", 7, 9)))
    with pytest.warns(UserWarning, match=r"client 'Chur' \(1 rows\)"):
        q = surrogates.analytic(statistics, gaussian, named, check="warn")
    assert q.labels == ("Bern", "Chur", 7, 9) and (q * q).labels is None


@pytest.mark.parametrize("method", ["taylor", pytest.param("laplace", marks=pytest.mark.slow)])
def test_surrogates_sum_over_several_chunks_of_rows(method):
    big = Location(sizes=(5000, 3))
    assert not fedmcmc.data.single_chunk(big.data.client(0))
    if method == "taylor":
        big.check(surrogates.taylor(LOCATION, big.data, CENTERS[1]))
    else:
        big.check(surrogates.laplace(KEY, LOCATION, big.data, position=CENTERS[1]))


def test_a_fraction_of_a_gaussian_prior_is_removed_exactly():
    improper = Location(ranks=[3, 1, 2, 3])
    with pytest.raises(ValueError, match=r"laplace.* 2 of 4 clients. client 1 \(1 rows\)"):
        surrogates.laplace(KEY, LOCATION, improper.data, position=CENTERS[0])
    fitted = surrogates.laplace(
        KEY, LOCATION, improper.data, position=CENTERS[0], prior_fraction=0.25
    )
    improper.check(fitted)
    improper.check(surrogates.taylor(LOCATION, improper.data, CENTERS[1]))


# Logistic regression: not quadratic, and improper where classes are separable.

SIZES = (60, 40, 25, 3)
SMALL = (np.array([[1.0, 0.0], [-0.5, 0.87], [0.5, 0.87]]), np.array([1.0, 1.0, 0.0]))
SEPARABLE = (np.array([[1.0, 0.0], [-0.5, 0.87], [0.5, 0.87]]), np.array([1.0, 0.0, 1.0]))


def logistic_loglikelihood(position, rows):
    TRACES.append(1)
    x, y = rows
    logits = x @ position
    return y * logits - jax.nn.softplus(logits)


LOGISTIC = Posterior(lambda position: -0.5 * jnp.sum(position**2), logistic_loglikelihood)


def logistic_clients(seed=0, small=SMALL):
    """Three clients of random rows and one of three rows in two dimensions."""
    rng = np.random.default_rng(seed)
    clients = []
    for n in SIZES[:3]:
        x = rng.normal(size=(n, 2))
        clients.append((x, (rng.random(n) < 1 / (1 + np.exp(-x @ [0.8, -1.0]))).astype(float)))
    return [*clients, small]


def logistic_data(**kwargs):
    return FederatedData.from_clients(logistic_clients(**kwargs))


def scipy_gradient(theta, x, y):
    return x.T @ (y - 1 / (1 + np.exp(-x @ theta)))


def scipy_precision(theta, x, y):
    p = 1 / (1 + np.exp(-x @ theta))
    return (x * (p * (1 - p))[:, None]).T @ x


def laplace(data, **kwargs):
    return surrogates.laplace(KEY, LOGISTIC, data, position=jnp.zeros(2), **kwargs)


def test_taylor_has_the_derivatives_of_clients_and_of_their_sum():
    center, clients = np.array([0.7, -0.4]), logistic_clients(small=SEPARABLE)
    fitted = surrogates.taylor(LOGISTIC, FederatedData.from_clients(clients), center)
    assert_close(fitted.precision, [scipy_precision(center, x, y) for x, y in clients])
    place = jnp.asarray(center, fitted.precision.dtype)
    gradients = [scipy_gradient(center, x, y) for x, y in clients]
    assert_close(jax.vmap(Gaussian.grad_log, in_axes=(0, None))(fitted, place), gradients, 1e-4)
    assert_close(fitted.sum().grad_log(place), np.sum(gradients, 0), 1e-4)


@pytest.mark.slow
def test_laplace_equals_the_result_of_another_optimizer():
    """The last client has three rows in two dimensions, and no warning."""
    clients = logistic_clients()
    fitted = laplace(FederatedData.from_clients(clients))
    for i, (x, y) in enumerate(clients):
        result = scipy.optimize.minimize(
            lambda t, x=x, y=y: -np.sum(y * (x @ t) - np.logaddexp(0, x @ t)),
            np.zeros(2),
            jac=lambda t, x=x, y=y: -scipy_gradient(t, x, y),
            method="BFGS",
            options={"gtol": 1e-9},
        )
        precision = scipy_precision(result.x, x, y)
        assert_close(fitted.precision[i], precision, 1e-3)
        mean = Gaussian(fitted.precision_mean[i], precision, "dense").mean()
        assert_close(mean, result.x, 2e-3)


def test_laplace_names_separable_clients():
    with pytest.raises(ValueError, match=r"1 of 4 clients. client 3 \(3 rows\).*prior_fraction"):
        laplace(logistic_data(small=SEPARABLE))
    with pytest.warns(UserWarning, match="client 3"):
        laplace(logistic_data(small=SEPARABLE), check="warn")


def test_a_fit_to_other_rows_traces_nothing_and_changes_no_other_client():
    fitted = laplace(logistic_data())
    num_traces = len(TRACES)
    refitted = laplace(logistic_data(seed=1))
    assert len(TRACES) == num_traces
    assert np.all(np.asarray(fitted.precision[:3]) != np.asarray(refitted.precision[:3]))
    np.testing.assert_array_equal(fitted.precision[3], refitted.precision[3])
    np.testing.assert_array_equal(fitted.precision_mean[3], refitted.precision_mean[3])


def sampled(data, rng_key=KEY, check="error", **kwargs):
    precisions = jnp.array([15.0, 10.0, 6.0, 1.0])  # about each client's largest
    return surrogates.sampled(
        rng_key,
        LOGISTIC,
        data,
        0.3 / precisions[: data.num_clients],
        position=jnp.zeros(2),
        structure="dense",
        check=check,
        **kwargs,
    )


def test_sampled_names_separable_clients():
    with pytest.raises(ValueError, match=r"1 of 4 clients. client 3 \(3 rows\).*not stationary"):
        sampled(logistic_data(small=SEPARABLE))
    # Three rows that are not separable raise no error for any key.
    for seed in range(5):
        sampled(logistic_data(), rng_key=jax.random.key(seed))
    typed, raw = sampled(logistic_data()), sampled(logistic_data(), jax.random.PRNGKey(3))
    np.testing.assert_array_equal(typed.precision, raw.precision)


METHODS = {
    "taylor": lambda data, **kwargs: surrogates.taylor(LOGISTIC, data, jnp.ones(2), **kwargs),
    "sampled": sampled,
    "laplace": laplace,
}


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_other_clients_do_not_enter(name):
    fit = METHODS[name]
    clients = [(np.full_like(x, np.nan), np.full_like(y, np.nan)) for x, y in logistic_clients()]
    clients[1] = logistic_clients()[1]
    broken_data = FederatedData.from_clients(clients, allow_nonfinite=True)
    clean = fit(logistic_data())
    with pytest.warns(UserWarning, match=r"3 of 4 clients.*not finite"):
        broken = fit(broken_data, check="warn")
    chex.assert_trees_all_equal(
        *(
            jax.tree.map(lambda leaf: leaf[1], (q.precision, q.precision_mean))
            for q in (clean, broken)
        )
    )
    assert all(np.isnan(leaf[0]).all() for leaf in (broken.precision, broken.precision_mean))


@pytest.mark.parametrize("name", fast_and_slow(METHODS, ["taylor", "sampled"]))
def test_a_client_alone_has_the_fit_that_it_has_with_others(name):
    fit = METHODS[name]
    with_others = fit(logistic_data())
    alone = fit(FederatedData.from_clients(logistic_clients()[:1]))
    for field in ("precision", "precision_mean"):
        assert getattr(alone, field).shape[0] == 1
        assert_close(getattr(alone, field)[0], getattr(with_others, field)[0], 1e-4)


# The moments of local chains.


def chain_moments(precision, noise, step_size, num, thinning):
    """Return the covariance, and the mean of the sample covariance of `num` samples."""
    d = len(precision)
    step = np.eye(d) - step_size * precision
    constant = 2 * step_size * np.eye(d) + step_size**2 * noise
    sigma = np.linalg.solve(np.eye(d * d) - np.kron(step, step), constant.ravel()).reshape(d, d)
    lag, mean = np.linalg.matrix_power(step, thinning), num * sigma
    moved = sigma
    for k in range(1, num):
        moved = lag @ moved
        mean = mean + (num - k) * (moved + moved.T)
    return sigma, num / (num - 1) * (sigma - mean / num**2)


@pytest.mark.parametrize(
    ("prior_fraction", "batch_size"), [pytest.param(0.0, None, marks=pytest.mark.slow), (0.5, 2)]
)
def test_sampled_moments_are_those_of_the_discretized_chain(prior_fraction, batch_size):
    num, copies, step_size, thinning = 400, 64, 0.05, 2
    rows = np.array([[1.0, -0.5], [0.2, 0.3], [2.0, 1.0]])
    factor, prior = np.array([[1.5, 0.4], [0.0, 0.8]]), np.array([[2.0, 0.3], [0.3, 1.0]])
    client = {"x": rows, "factor": np.broadcast_to(factor, (3, 2, 2))}
    data = FederatedData.from_clients([client] * copies)
    posterior = Posterior(
        lambda t: -0.5 * (t - 1) @ (jnp.asarray(prior) @ (t - 1)), flat_loglikelihood
    )
    fitted = surrogates.sampled(
        KEY,
        posterior,
        data,
        step_size,
        num,
        structure="dense",
        position=jnp.zeros(2),
        batch_size=batch_size,
        num_burnin=200,
        thinning=thinning,
        prior_fraction=prior_fraction,
        check="ignore",
    )
    per_row, tilt = factor.T @ factor, prior_fraction * prior
    precision = 3 * per_row + tilt
    mean = np.linalg.solve(precision, per_row @ rows.sum(0) + tilt @ np.ones(2))
    noise = np.zeros((2, 2))
    if batch_size is not None:
        noise = location_noise(rows, per_row, 2, replace=True)
    sigma, expected = chain_moments(precision, noise, step_size, num, thinning)
    if batch_size is None:  # the closed form of the docstring
        assert_close(sigma, np.linalg.inv(precision @ (np.eye(2) - step_size * precision / 2)))
    covariances = np.linalg.inv(np.asarray(fitted.precision, float) + tilt)
    etas = np.asarray(fitted.precision_mean, float) + tilt @ np.ones(2)
    means = np.einsum("sij,sj->si", covariances, etas)
    assert np.abs(z_scores(covariances, expected)).max() < LIMIT
    assert np.abs(z_scores(means, mean)).max() < LIMIT
    # The test excludes a chain without discretization error.
    assert np.abs(z_scores(covariances, np.linalg.inv(precision))).max() > LIMIT


@pytest.mark.slow
def test_a_singular_sample_covariance_is_shrunk_to_its_diagonal(location):
    def fit(**kwargs):
        fitted = surrogates.sampled(
            KEY,
            LOCATION,
            location.data,
            0.02,
            3,
            structure="dense",
            position=CENTERS[0],
            check="warn",
            **kwargs,
        )
        return np.linalg.inv(np.asarray(fitted.precision, float))

    with pytest.warns(UserWarning, match="not stationary"):
        shrunk = fit(shrinkage=0.3)
    with pytest.warns(UserWarning) as caught:
        default = fit()
    assert "singular" in str(caught[-1].message)
    assert "0.5 of it was replaced by its diagonal" in str(caught[-1].message)
    diagonal = shrunk * np.eye(3)
    sample = (shrunk - 0.3 * diagonal) / 0.7
    assert np.linalg.eigvalsh(sample)[:, 0].max() < 1e-4 * sample.max()
    assert_close(default, 0.5 * sample + 0.5 * diagonal, 1e-3)


# Many dimensions.


def sizes_in(jaxpr):
    """Yield the size of every array in a program, also in its loops."""
    for equation in jaxpr.eqns:
        yield from (np.prod(v.aval.shape, dtype=int) for v in equation.outvars)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes_in(inner)


def test_a_diagonal_in_many_dimensions_builds_no_matrix():
    d = 400
    weights = jnp.linspace(1, 2, d)

    def loglikelihood_fn(position, x):
        gap = (x - position[None, :]) * weights[None, :]
        return -0.5 * jnp.sum(gap**2, axis=-1) - jnp.sum(position) ** 2

    posterior = Posterior(lambda t: -0.5 * jnp.sum(t**2), loglikelihood_fn)
    data = FederatedData.from_clients([np.random.default_rng(0).normal(size=(2, d))])

    def fit(data_, structure):
        return surrogates.taylor(
            posterior, data_, jnp.zeros(d), structure=structure, check="ignore"
        )

    expected = 2 * (np.asarray(weights, float) ** 2 + 2)
    assert_close(jax.jit(fit, static_argnums=1)(data, "diagonal").precision, [expected])
    largest = {}
    for structure in ("diagonal", "dense"):
        program = jax.make_jaxpr(lambda data_, s=structure: fit(data_, s))(data)
        largest[structure] = max(sizes_in(program.jaxpr))
    assert largest["diagonal"] < d * d <= largest["dense"]


@pytest.mark.slow
def test_checks_in_many_dimensions_are_of_coordinates():
    d = 300
    posterior = Posterior(
        lambda t: -0.5 * jnp.sum(t**2),
        lambda t, rows: -0.5 * jnp.sum(((rows[0] - t[None, :]) * rows[1]) ** 2, axis=-1),
    )
    x, weights = np.random.default_rng(0).normal(size=(4, d)), np.linspace(1, 2, d)

    def data(weights):
        return FederatedData.from_clients([(x, np.tile(weights, (4, 1))), (x[:1], weights[None])])

    kwargs = dict(position=jnp.zeros(d), structure="diagonal")
    fitted = surrogates.laplace(KEY, posterior, data(weights), **kwargs)
    assert_close(fitted.precision, [4 * weights**2, weights**2], 1e-4)
    drawn = surrogates.sampled(KEY, posterior, data(weights), 0.1, **kwargs)
    assert np.all(np.asarray(drawn.precision) > 0)
    flat = data(np.where(np.arange(d) == 7, 0, weights))
    with pytest.raises(ValueError, match=r"2 of 2 clients.*flat"):
        surrogates.laplace(KEY, posterior, flat, **kwargs)
    with pytest.raises(ValueError, match=r"2 of 2 clients.*not stationary"):
        surrogates.sampled(KEY, posterior, flat, 0.1, **kwargs)


@pytest.mark.slow
def test_three_separable_rows_in_five_dimensions():
    x = np.random.default_rng(0).normal(size=(3, 5))
    data = FederatedData.from_clients([(x, (x[:, 0] > 0).astype(float))])
    kwargs = dict(position=jnp.zeros(5), structure="diagonal")
    with pytest.raises(ValueError, match=r"client 0 \(3 rows\)"):
        surrogates.laplace(KEY, LOGISTIC, data, **kwargs)
    with pytest.raises(ValueError, match=r"client 0 \(3 rows\).*not stationary"):
        surrogates.sampled(KEY, LOGISTIC, data, 0.3, **kwargs)
    fitted = surrogates.taylor(LOGISTIC, data, jnp.zeros(5))
    assert np.isfinite(fitted.precision).all()


# The common center and its cost.


def test_the_mode_is_the_maximum_of_the_posterior():
    data = logistic_data(small=SEPARABLE)
    x, y = (np.concatenate(parts) for parts in zip(*logistic_clients(small=SEPARABLE), strict=True))
    root = scipy.optimize.root(lambda t: scipy_gradient(t, x, y) - t, np.zeros(2))
    mode = surrogates.mode(LOGISTIC, data, jnp.full(2, 3.0))
    assert_close(mode.position, root.x, 1e-4)
    assert mode.gradient_norm < 1e-2
    assert 2 < mode.num_exchanges < 40
    with pytest.raises(ValueError, match="not finished after 1 steps"):
        surrogates.mode(LOGISTIC, data, jnp.full(2, 3.0), max_steps=1)
    with pytest.raises(ValueError, match="not-a-number"):
        surrogates.mode(LOGISTIC, data, jnp.full(2, np.nan))


@pytest.mark.slow
def test_a_search_with_rounded_messages_raises_with_the_reason():
    """More steps do not help: two answers to one question differ. Biased compressors raise."""
    data = logistic_data(small=SEPARABLE)

    def through(compressor):
        return SimulatedConsortium(
            data, transform=lambda kernel: fedmcmc.compress(kernel, compressor)
        )

    with pytest.raises(ValueError, match=r"the same question has two answers, gradients .* apart"):
        surrogates.mode(LOGISTIC, through(fedmcmc.quantize(8)), jnp.zeros(2), max_steps=20)
    fine = surrogates.mode(LOGISTIC, through(fedmcmc.quantize(2**20)), jnp.zeros(2))
    plain = surrogates.mode(LOGISTIC, data, jnp.zeros(2))
    assert_close(fine.position, plain.position, 1e-3)
    with pytest.raises(ValueError, match="derivatives need an unbiased compressor"):
        surrogates.mode(LOGISTIC, through(fedmcmc.compression.clip(0.1)), jnp.zeros(2))


def test_the_mode_in_many_dimensions_is_found_by_gradients():
    """Near the mode, differences of values are rounding errors."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 300)).astype(np.float32)
    y = (rng.random(400) < scipy.special.expit(x @ rng.normal(size=300) / 17)).astype(np.float32)
    data = FederatedData.from_arrays((x, y), np.arange(400) % 3)
    mode = surrogates.mode(LOGISTIC, data, jnp.zeros(300))
    theta, rows = np.zeros(300), x.astype(float)
    for _ in range(10):
        chance = scipy.special.expit(rows @ theta)
        precision = rows.T @ (rows * (chance * (1 - chance))[:, None]) + np.eye(300)
        theta += np.linalg.solve(precision, rows.T @ (y - chance) - theta)
    gap = mode.position - theta
    assert gap @ precision @ gap / 2 < 1e-6  # nats; in float32
    assert mode.num_exchanges < 60
    numbers = 2 * 300 + 1 + 300 + 1  # a position and the center, a value, a gradient, and a one
    assert mode.bits_up + mode.bits_down == 32 * 3 * numbers * mode.num_exchanges


def test_a_posterior_that_is_flat_in_a_direction_has_a_mode():
    """A constant that is added to the scores of all three classes changes nothing."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(200, 2)).astype(np.float32), rng.integers(0, 3, 200)

    def classes(theta, rows):
        return jax.nn.log_softmax(rows[0] @ theta)[jnp.arange(len(rows[1])), rows[1]]

    posterior = Posterior(lambda theta: 0.0 * jnp.sum(theta), classes)
    data = FederatedData.from_arrays((x, y), np.arange(200) % 3)
    starts = (jnp.zeros((2, 3)), jnp.ones((2, 3)) * jnp.array([[2.0], [-1.0]]))
    a, b = (surrogates.mode(posterior, data, start).position for start in starts)
    assert_close(a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True), 1e-3)
    saddle = Posterior(lambda theta: theta[0] ** 2 - theta[1] ** 2, lambda t, rows: 0.0 * rows[1])
    with pytest.raises(ValueError, match="not finished"):
        surrogates.mode(saddle, data, jnp.zeros(2))


@pytest.mark.parametrize(
    ("structure", "numbers"), [("dense", 5 + 15), ("diagonal", 5 + 5), ("scaled_identity", 5 + 1)]
)
def test_setup_bits_count_symmetric_precisions_once(structure, numbers):
    q = Gaussian.uniform({"a": jnp.zeros((2, 2)), "b": jnp.zeros(())}, structure)
    q = jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *x.shape)), q)
    bits = q.precision_mean["b"].dtype.itemsize * 8
    assert surrogates.setup_bits(q) == 2 * 3 * numbers * bits
    assert surrogates.setup_bits(q, num_exchanges=7) == (2 * numbers + 7 * 11) * 3 * bits


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(structure="scaled_identity"), "structure must be one of"),
        (dict(check="maybe"), "check must be one of"),
        (dict(num_samples=1), "num_samples must be an integer of at least 2"),
        (dict(num_burnin=-1), "num_burnin"),
        (dict(thinning=0), "thinning"),
        (dict(step_size=-0.1), "step_size must be positive"),
        (dict(step_size=np.ones(3)), r"one per client, \(4,\)"),
        (dict(prior_fraction=-1.0), "prior_fraction"),
        (dict(shrinkage=1.5), "shrinkage must lie"),
        (dict(batch_size=0), "batch_size"),
    ],
)
def test_invalid_arguments_raise(location, kwargs, message):
    kwargs = dict(step_size=0.1, position=CENTERS[0]) | kwargs
    with pytest.raises(ValueError, match=message):
        surrogates.sampled(KEY, LOCATION, location.data, **kwargs)
