"""The oracle itself: published anchors, enumeration of every path, enumeration of every batch."""

import itertools

import numpy as np
import pytest
from scipy.stats import norm

from tests.oracles import laws, laws_adjusted

CLIENTS = dict(
    precisions=np.array([[[1.0]], [[3.0]]]),
    means=np.array([[-1.0], [2.0]]),
    prior_precision=np.array([[0.5]]),
    prior_mean=np.zeros(1),
    probabilities=np.array([0.3, 0.7]),
    step_size=0.05,
)
EXACT = dict(surrogate_precisions=CLIENTS["precisions"], surrogate_means=CLIENTS["means"])
OFF = dict(surrogate_precisions=0.8 * CLIENTS["precisions"], surrogate_means=CLIENTS["means"] + 0.2)
NOISE = np.array([[[2.0]], [[4.0]]])
ANCHORS = [
    (dict(num_local_steps=1), 1.1111111, 0.4055293),
    (dict(num_local_steps=5), 1.0631629, 0.9993178),
    (dict(num_local_steps=1, **EXACT), 1.1111111, 0.2503912),
    (dict(num_local_steps=7, **EXACT), 1.1111111, 0.2503912),
    (dict(num_local_steps=1, noises=NOISE, **EXACT), 1.1111111, 0.3278933),
    (dict(num_local_steps=5, noises=NOISE, **EXACT), 1.1111111, 0.3278933),
    (dict(num_local_steps=5, **OFF), 1.1093638, 0.2745705),
    (dict(num_local_steps=5, alpha=0.5, **EXACT), 1.0992817, 0.4294409),
]


@pytest.mark.parametrize(("settings", "mean", "variance"), ANCHORS)
def test_stationary_laws_of_relays_equal_the_anchors(settings, mean, variance):
    law = laws.relay(**CLIENTS, **settings).stationary()
    # One unit in the last printed digit: the published figures are partly cut, not rounded.
    np.testing.assert_allclose(law.mean, [mean], rtol=0, atol=1e-7)
    np.testing.assert_allclose(law.covariance, [[variance]], rtol=0, atol=1e-7)


def test_plain_langevin_dynamics_have_the_known_law():
    target = laws.posterior(CLIENTS["precisions"], CLIENTS["means"], np.zeros((1, 1)), np.zeros(1))
    np.testing.assert_allclose([target.mean[0], target.covariance[0, 0]], [1.25, 0.25])
    precision, mean = laws.pool(CLIENTS["precisions"], CLIENTS["means"])
    law = laws.single(precision[0], mean[0], step_size=0.1).stationary()
    np.testing.assert_allclose([law.mean[0], law.covariance[0, 0]], [1.25, 0.3125])


def random_case(rng, num_clients=3, d=2):
    def spd(low):
        factor = rng.normal(size=(num_clients, d, d))
        return factor @ factor.transpose(0, 2, 1) / d + low * np.eye(d)

    return dict(
        precisions=spd(0.5),
        means=rng.normal(size=(num_clients, d)),
        prior_precision=spd(0.3)[0],
        prior_mean=rng.normal(size=d),
        probabilities=rng.dirichlet(3 * np.ones(num_clients)),
        step_size=0.03,
        surrogate_precisions=spd(0.2),
        surrogate_means=rng.normal(size=(num_clients, d)),
        alpha=0.7,
        temperature=1.3,
        noises=spd(0.1),
    )


def test_rounds_equal_the_enumeration_of_every_path():
    case = random_case(np.random.default_rng(0))
    num_rounds, num_local_steps, start = 3, 2, np.array([1.0, -2.0])
    f, step_size = case["probabilities"], case["step_size"]
    weights, components = [], []
    for path in itertools.product(range(3), repeat=num_rounds):
        mean, cov = start, np.zeros((2, 2))
        for s in path:
            for _ in range(num_local_steps):
                drift, jacobian = drift_of(case, s, mean)
                step = np.eye(2) + step_size * jacobian
                noise = 2 * step_size * case["temperature"] * np.eye(2)
                noise = noise + step_size**2 * case["noises"][s] / f[s] ** 2
                mean, cov = mean + step_size * drift, step @ cov @ step.T + noise
        weights.append(np.prod(f[list(path)]))
        components.append(laws.Moments(mean, cov))
    expected = laws.mixture(weights, components)
    law = laws.relay(num_local_steps=num_local_steps, **case).rounds(start, num_rounds)[-1]
    np.testing.assert_allclose(law.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(law.covariance, expected.covariance, rtol=1e-10)


def drift_of(case, s, theta):
    """Write Algorithm 1 of El Mekkaoui et al. (2021) out, gradient by gradient."""
    f, alpha = case["probabilities"][s], case["alpha"]
    q, u = case["surrogate_precisions"], case["surrogate_means"]
    drift = case["prior_precision"] @ (case["prior_mean"] - theta)
    drift = drift + case["precisions"][s] @ (case["means"][s] - theta) / f
    jacobian = -case["prior_precision"] - case["precisions"][s] / f
    for r in range(len(q)):
        drift = drift + alpha * q[r] @ (u[r] - theta)
        jacobian = jacobian - alpha * q[r]
    drift = drift - alpha * q[s] @ (u[s] - theta) / f
    return drift, jacobian + alpha * q[s] / f


def test_rounds_converge_to_the_stationary_law():
    law = laws.relay(num_local_steps=4, **random_case(np.random.default_rng(1)))
    late, limit = law.rounds(np.ones(2), 400)[-1], law.stationary()
    np.testing.assert_allclose(late.mean, limit.mean, rtol=1e-9)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-9)


def test_local_laws_start_after_one_step_and_end_at_the_boundary():
    law = laws.relay(num_local_steps=3, **random_case(np.random.default_rng(3)))
    start = law.rounds(np.ones(2), 2)[-1]
    local = law.local(start)
    one_step = law._replace(num_local_steps=1).after(start, 1)
    np.testing.assert_allclose(local[0].covariance, one_step.covariance)
    np.testing.assert_allclose(local[2].covariance, law.rounds(np.ones(2), 3)[-1].covariance)


def test_a_mixture_has_the_moments_of_its_parts():
    rng = np.random.default_rng(6)
    weights, draws = np.array([0.2, 0.3, 0.5]), rng.normal(size=(3, 50, 2))
    parts = [laws.Moments(x.mean(0), np.cov(x.T, bias=True)) for x in draws]
    chances, pooled = np.repeat(weights / 50, 50), draws.reshape(-1, 2)
    law = laws.mixture(weights, parts)
    np.testing.assert_allclose(law.mean, chances @ pooled, rtol=1e-10)
    expected = np.cov(pooled.T, aweights=chances, bias=True)
    np.testing.assert_allclose(law.covariance, expected, rtol=1e-10)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize(("num_rows", "batch_size"), [(5, 2), (4, 3), (3, 5), (1, 2)])
def test_location_noise_equals_the_enumeration_of_every_batch(num_rows, batch_size, replace):
    rng = np.random.default_rng(4)
    rows, theta = rng.normal(size=(num_rows, 2)), rng.normal(size=2)
    precision = np.array([[2.0, 0.5], [0.5, 1.0]])
    if replace:
        batches = itertools.product(range(num_rows), repeat=batch_size)
    else:
        batches = itertools.combinations(range(num_rows), min(batch_size, num_rows))
    estimates = np.array(
        [num_rows * np.mean((rows[list(b)] - theta) @ precision, axis=0) for b in batches]
    )
    expected = np.cov(estimates.T, bias=True)
    noise = laws.location_noise(rows, precision, batch_size, replace=replace)
    np.testing.assert_allclose(noise, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("replace", [True, False])
def test_rows_of_different_curvature_equal_the_enumeration_of_every_sequence(replace):
    rng = np.random.default_rng(5)
    rows, factors = rng.normal(size=(3, 2)), rng.normal(size=(3, 2, 2))
    curvatures, step_size, start = factors @ factors.transpose(0, 2, 1), 0.1, np.ones(2)
    pairs = itertools.product(range(3), repeat=2)
    batches = list(pairs if replace else itertools.combinations(range(3), 2))
    components = []
    for path in itertools.product(batches, repeat=3):
        mean, cov = start, np.zeros((2, 2))
        for batch in path:
            curvature = 1.5 * sum(curvatures[j] for j in batch)
            slope = 1.5 * sum(curvatures[j] @ rows[j] for j in batch)
            step = np.eye(2) - step_size * curvature
            mean, cov = step @ mean + step_size * slope, step @ cov @ step.T + 0.2 * np.eye(2)
        components.append(laws.Moments(mean, cov))
    expected = laws.mixture(np.full(len(components), 1 / len(components)), components)
    total = curvatures.sum(0)
    law = laws.relay(
        total[None],
        np.linalg.solve(total, np.einsum("nij,nj->i", curvatures, rows))[None],
        prior_precision=np.zeros((2, 2)),
        prior_mean=np.zeros(2),
        probabilities=[1.0],
        step_size=step_size,
        num_local_steps=3,
        batches=[laws.batch_noise(rows, curvatures, 2, replace=replace)],
    ).rounds(start, 1)[-1]
    np.testing.assert_allclose(law.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(law.covariance, expected.covariance, rtol=1e-12)


def test_an_unstable_step_size_has_no_law():
    with pytest.raises(ValueError, match="finite second moment"):
        laws.single(np.eye(1), np.zeros(1), step_size=2.5).stationary()


def test_the_penalty_obeys_detailed_balance():
    log_ratios = np.linspace(-5, 5, 21)
    there, back = (laws_adjusted.penalized(sign * log_ratios, 0.7) for sign in (1, -1))
    np.testing.assert_allclose(np.log(there / back), log_ratios, atol=1e-10)
    certain = 2 * norm.cdf(-np.sqrt(0.7) / 2)
    np.testing.assert_allclose(laws_adjusted.penalized(0.0, 0.7), certain)
