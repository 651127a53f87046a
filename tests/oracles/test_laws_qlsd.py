"""The oracle of the QLSD family: published anchors, formulas, enumeration of every path."""

import itertools

import numpy as np
import pytest

from tests.oracles import laws, laws_qlsd, laws_quantised
from tests.oracles.written_qlsd import Written, random_clients

TWO = dict(
    precisions=np.array([[[1.0]], [[3.0]]]),
    means=np.array([[-1.0], [2.0]]),
    prior_precision=np.zeros((1, 1)),
    prior_mean=np.zeros(1),
    step_size=0.1,
)
MODE = np.array([1.25])
HALF = laws_qlsd.bernoulli([0.5, 0.5])
ANCHORS = {
    "full": ({}, 0.3125),
    "bernoulli": (dict(participation=HALF), 0.5578704),
    "one of two": (dict(participation=laws_qlsd.cohorts(1, 2)), 0.6708333),
    "centre at the mode": (dict(participation=HALF, centre=MODE), 0.3703704),
    "memory of all": (dict(participation=HALF, rates=0.5), 0.3824013),
    "memory of the active": (dict(participation=HALF, rates=0.5, memory_of="active"), 0.5578704),
}


@pytest.mark.parametrize("name", ANCHORS)
def test_anchors(name):
    settings, variance = ANCHORS[name]
    law = laws_qlsd.langevin(**TWO, **settings).stationary()
    # One unit in the last printed digit.
    np.testing.assert_allclose(law.mean[:1], MODE, rtol=0, atol=1e-12)
    np.testing.assert_allclose(law.covariance[0, 0], variance, rtol=0, atol=1e-7)
    if "memory" in name:
        # Of descending gradients, as printed, (2.25, -2.25).
        np.testing.assert_allclose(law.mean[1:], [-2.25, 2.25], rtol=0, atol=1e-12)


def no_prior(d):
    return dict(prior_precision=np.zeros((d, d)), prior_mean=np.zeros(d))


def formula(a, means, step_size, factors, weights, heterogeneity, noise=0.0):
    """Return the covariance: of the plain step, multiplicative terms, and a constant."""
    d = a.shape[1]
    step = np.eye(d) - step_size * a.sum(0)
    constant = 2 * step_size * np.eye(d) + step_size**2 * (heterogeneity + noise)
    return laws.kron_solve([step, *factors], [1.0, *weights], constant)


def at_the_mode(a, means):
    mode = np.linalg.solve(a.sum(0), np.einsum("sij,sj->i", a, means))
    return mode, np.einsum("sij,sj->si", a, mode - means)


def test_partial_participation_has_the_closed_form():
    a, means, _, _ = random_clients(np.random.default_rng(0), 4, 2)
    p, step_size = np.array([0.3, 0.5, 0.9, 1.0]), 0.05
    mode, gradients = at_the_mode(a, means)
    noises = random_clients(np.random.default_rng(1), 4, 2)[0]
    odds = (1 - p) / p
    expected = formula(
        a,
        means,
        step_size,
        a,
        step_size**2 * odds,
        np.einsum("s,si,sj->ij", odds, gradients, gradients),
        np.einsum("s,sij->ij", 1 / p, noises),
    )
    law = laws_qlsd.langevin(
        a,
        means,
        **no_prior(2),
        step_size=step_size,
        participation=laws_qlsd.bernoulli(p),
        noises=noises,
    ).stationary()
    np.testing.assert_allclose(law.mean, mode, rtol=1e-10)
    np.testing.assert_allclose(law.covariance, expected, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_cohort_without_replacement_has_the_closed_form(size):
    a, means, _, _ = random_clients(np.random.default_rng(2), 4, 2)
    mode, gradients = at_the_mode(a, means)
    k, step_size = 4 * (4 - size) / (size * 3), 0.05
    expected = formula(
        a,
        means,
        step_size,
        a - a.sum(0) / 4,
        np.full(4, step_size**2 * k),
        k * gradients.T @ gradients,
    )
    law = laws_qlsd.langevin(
        a,
        means,
        **no_prior(2),
        step_size=step_size,
        participation=laws_qlsd.cohorts(size, 4),
    ).stationary()
    np.testing.assert_allclose(law.mean, mode, rtol=1e-10)
    np.testing.assert_allclose(law.covariance, expected, rtol=1e-10)


@pytest.mark.parametrize("p", [1.0, 0.4])
def test_sparsification_has_the_closed_form(p):
    a, means, _, _ = random_clients(np.random.default_rng(3), 3, 2)
    _, gradients = at_the_mode(a, means)
    step_size, keep = 0.02, 0.3
    coordinates = [np.outer(e, e) for e in np.eye(2)]
    factors = [*a, *(e @ a_i for a_i, e in itertools.product(a, coordinates))]
    # E (M / p)^2 = 1 / p of what a client that takes part adds by dropping coordinates.
    odds, omega = (1 - p) / p, (1 - keep) / (keep * p)
    expected = formula(
        a,
        means,
        step_size,
        factors,
        step_size**2 * np.array([odds] * 3 + [omega] * 6),
        odds * gradients.T @ gradients + omega * np.diag((gradients**2).sum(0)),
    )
    law = laws_qlsd.langevin(
        a,
        means,
        **no_prior(2),
        step_size=step_size,
        participation=laws_qlsd.bernoulli(np.full(3, p)),
        keep=keep,
    ).stationary()
    np.testing.assert_allclose(law.covariance, expected, rtol=1e-10)


def test_realised_weights_are_a_mixture_over_the_number_of_clients():
    rule = laws_qlsd.realised(0.3, 3)
    np.testing.assert_allclose(sum(p for p, _ in rule), 1.0)
    np.testing.assert_allclose(sum(p * w for p, w in rule), np.ones(3))
    some = sum(p for p, w in rule if (w > 0).sum() == 2)
    np.testing.assert_allclose(some, 3 * 0.09 * 0.7 / (1 - 0.7**3))


def test_rounds_converge_to_the_stationary_law():
    a, means, p0, m0 = random_clients(np.random.default_rng(4), 3, 2)
    law = laws_qlsd.langevin(
        a,
        means,
        prior_precision=p0,
        prior_mean=m0,
        step_size=0.05,
        participation=laws_qlsd.bernoulli([0.4, 0.6, 0.9]),
        keep=0.5,
        rates=[0.5, 0.4, 0.3],
        refresh_every=1,
    )
    late, limit = law.rounds(np.ones(2), 400)[-1], law.stationary()
    np.testing.assert_allclose(late.mean, limit.mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-8, atol=1e-10)


def test_an_unstable_step_size_has_no_law():
    with pytest.raises(ValueError, match="finite second moment"):
        laws_qlsd.langevin(**(TWO | dict(step_size=0.6))).stationary()
    with pytest.raises(ValueError, match="periodic"):
        laws_qlsd.langevin(**TWO, refresh_every=2).stationary()


# Enumeration of every path of the algorithms written out

UNEVEN = laws_qlsd.bernoulli([0.3, 0.8])
ENUMERATED = {
    "split prior, minibatches": dict(participation=UNEVEN, split=True, batch=1),
    "distinct rows, one of two": dict(
        participation=laws_qlsd.cohorts(1, 2), batch=2, replace=False
    ),
    "realised, sparse": dict(participation=laws_qlsd.realised(0.4, 2), keep=0.3),
    "sparse minibatches": dict(participation=UNEVEN, keep=0.3, batch=1),
    "off the mode": dict(participation=UNEVEN, centre=True, batch=1, keep=0.6),
    "off the mode, split prior": dict(participation=UNEVEN, centre=True, split=True, keep=0.6),
    "a fixed point": dict(
        participation=UNEVEN, centre=True, centred=False, split=True, batch=1, keep=0.6
    ),
    "snapshots": dict(participation=UNEVEN, refresh_every=2, batch=1, split=True),
    "snapshots and memory": dict(
        participation=UNEVEN, refresh_every=2, batch=1, keep=0.6, rates=[0.5, 0.3]
    ),
    "memory of the active": dict(
        participation=laws_qlsd.realised(0.4, 2),
        refresh_every=2,
        batch=1,
        keep=0.6,
        rates=[0.5, 0.3],
        memory_of="active",
    ),
}


@pytest.mark.parametrize(("d", "num_rounds"), [(2, 2), (1, 3)])
@pytest.mark.parametrize("name", ENUMERATED)
def test_rounds_equal_the_enumeration_of_every_path(name, d, num_rounds):
    settings = ENUMERATED[name] | dict(step_size=[0.05, 0.1, 0.07], temperature=[1.0, 2.0, 0.5])
    written = Written(d, num_rounds, settings)
    expected = written.law()
    public = {k: v for k, v in settings.items() if k not in ("split", "batch", "replace", "centre")}
    if "batch" in settings:
        public["batches"] = [
            laws.batch_noise(*pair, settings["batch"], replace=settings.get("replace", True))
            for pair in zip(written.rows, written.curvatures, strict=True)
        ]
    if settings.get("split"):
        public["shares"] = np.array(written.sizes) / sum(written.sizes)
    if settings.get("centre"):
        public["centre"] = written.centre
    precisions = np.array([c.sum(0) for c in written.curvatures])
    slopes = [
        np.einsum("nij,nj->i", *pair) for pair in zip(written.curvatures, written.rows, strict=True)
    ]
    law = laws_qlsd.langevin(
        precisions,
        np.linalg.solve(precisions, np.array(slopes)[..., None])[..., 0],
        prior_precision=written.prior_precision,
        prior_mean=written.prior_mean,
        **public,
    ).rounds(written.position, num_rounds)[-1]
    size = d * (3 if "rates" in settings else 1)
    np.testing.assert_allclose(law.mean[:size], expected.mean[:size], rtol=1e-11)
    np.testing.assert_allclose(
        law.covariance[:size, :size], expected.covariance[:size, :size], rtol=1e-10, atol=1e-13
    )


# The quantiser


def test_the_quantiser_of_the_anchor():
    v = np.array([3.0, -4.0, 0.0, 0.0])
    np.testing.assert_allclose(laws_quantised.variance(v, 2).sum(), 2.5)
    found = laws_quantised.quantised(v, 2)
    weights, codes = np.array([p for p, _ in found]), np.array([c for _, c in found])
    np.testing.assert_allclose(weights @ codes, v, atol=1e-12)
    np.testing.assert_allclose(weights @ (codes - v) ** 2, laws_quantised.variance(v, 2))
    assert set(np.abs(codes).ravel()) == {0.0, 2.5, 5.0}


@pytest.mark.parametrize("memory_of", ["all", "active"])
def test_two_quantised_rounds_equal_a_simulation(memory_of):
    rng = np.random.default_rng(6)
    a, means, p0, m0 = random_clients(rng, 2, 2)
    rule, rates, step_sizes = laws_qlsd.bernoulli([0.6, 0.8]), np.array([0.4, 0.3]), (0.1, 0.15)
    position, num = np.array([2.0, -1.0]), 100_000
    theta, eta = np.tile(position, (num, 1)), np.zeros((num, 2, 2))
    masks = np.array([w for _, w in rule])
    expected = laws_quantised.two_rounds(
        a,
        means,
        prior_precision=p0,
        prior_mean=m0,
        num_levels=2,
        step_sizes=step_sizes,
        temperature=0.5,
        participation=rule,
        position=position,
        rates=rates,
        memory_of=memory_of,
    )
    for step_size, temperature, law in zip(step_sizes, (0.0, 0.5), expected, strict=True):
        weights = masks[rng.choice(len(rule), size=num, p=[p for p, _ in rule])]
        gradient = np.einsum("sij,nsj->nsi", a, means - theta[:, None])
        v = gradient - eta
        norm = np.sqrt((v**2).sum(-1, keepdims=True))
        level = 2 * np.abs(v) / norm
        code = norm / 2 * np.sign(v) * np.floor(level + rng.uniform(size=v.shape))
        if memory_of == "all":
            total = eta.sum(1) + (weights[..., None] * code).sum(1)
        else:
            total = (weights[..., None] * (code + eta)).sum(1)
        eta = eta + (weights[..., None] > 0) * rates[:, None] * code
        noise = np.sqrt(2 * step_size * temperature) * rng.normal(size=theta.shape)
        theta = theta + step_size * (total + (m0 - theta) @ p0) + noise
        gap = theta - law.mean
        for found in (gap, gap[:, :, None] * gap[:, None, :] - law.covariance):
            z = found.mean(0) / (found.std(0) / np.sqrt(num))
            assert np.abs(z).max() < 5.5
