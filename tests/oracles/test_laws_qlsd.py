"""The oracle of the QLSD family: published anchors, formulas, enumeration of every path."""

import numpy as np
import pytest

from tests.oracles import laws, laws_qlsd, laws_quantised
from tests.oracles.laws_averaging import scheme_one
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
def test_stationary_laws_equal_the_anchors(name):
    settings, variance = ANCHORS[name]
    law = laws_qlsd.langevin(**TWO, **settings).stationary()
    # One unit in the last printed digit.
    np.testing.assert_allclose(law.mean[:1], MODE, rtol=0, atol=1e-12)
    np.testing.assert_allclose(law.covariance[0, 0], variance, rtol=0, atol=1e-7)
    if "memory" in name:
        # Of descending gradients, as printed, (2.25, -2.25).
        np.testing.assert_allclose(law.mean[1:], [-2.25, 2.25], rtol=0, atol=1e-12)


P = np.array([0.3, 0.5, 0.9, 1.0])
RULES = {
    "bernoulli": (laws_qlsd.bernoulli(P), np.diag((1 - P) / P)),
    "everyone": (laws_qlsd.everyone(4), np.zeros((4, 4))),
    "with replacement": (scheme_one(P / P.sum(), 3), (np.diag(P.sum() / P) - 1) / 3),
    **{
        f"cohorts of {size}": (
            laws_qlsd.cohorts(size, 4),
            (4 - size) / (size * 3) * (4 * np.eye(4) - np.ones((4, 4))),
        )
        for size in (1, 2, 3)
    },
}


@pytest.mark.parametrize("name", RULES)
def test_weights_have_mean_one_and_a_known_covariance(name):
    """A law depends on who takes part through these moments alone."""
    rule, covariance = RULES[name]
    chances, weights = (np.array(x) for x in zip(*rule, strict=True))
    np.testing.assert_allclose(chances.sum(), 1.0)
    np.testing.assert_allclose(chances @ weights, np.ones(4))
    gaps = weights - 1
    np.testing.assert_allclose(gaps.T @ (chances[:, None] * gaps), covariance, atol=1e-12)


def test_realised_weights_are_a_mixture_over_the_number_of_clients():
    rule = laws_qlsd.realised(0.3, 3)
    np.testing.assert_allclose(sum(p for p, _ in rule), 1.0)
    np.testing.assert_allclose(sum(p * w for p, w in rule), np.ones(3))
    pairs = sum(p for p, w in rule if (w > 0).sum() == 2)
    np.testing.assert_allclose(pairs, 3 * 0.09 * 0.7 / (1 - 0.7**3))


def test_rounds_converge_to_the_stationary_law():
    a, means, p0, m0 = random_clients(np.random.default_rng(4), 2, 2)
    law = laws_qlsd.langevin(
        a,
        means,
        prior_precision=p0,
        prior_mean=m0,
        step_size=0.15,
        participation=laws_qlsd.bernoulli([0.4, 0.9]),
        keep=0.8,
        rates=[0.5, 0.3],
        refresh_every=1,
    )
    late, limit = law.rounds(np.ones(2), 150)[-1], law.stationary()
    np.testing.assert_allclose(late.mean, limit.mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(late.covariance, limit.covariance, rtol=1e-8, atol=1e-10)


def test_constant_noise_equals_minibatches_of_rows_that_share_a_curvature():
    rng = np.random.default_rng(7)
    a, _, p0, m0 = random_clients(rng, 2, 2)
    rows = [rng.normal(size=(n, 2)) for n in (3, 2)]
    settings = dict(
        means=np.array([x.mean(0) for x in rows]),
        prior_precision=p0,
        prior_mean=m0,
        step_size=0.05,
        participation=laws_qlsd.bernoulli([0.4, 0.7]),
        keep=0.5,
        rates=[0.5, 0.3],
    )
    precisions = np.array([3, 2])[:, None, None] * a
    pairs = list(zip(rows, a, strict=True))
    noises = [laws.location_noise(x, p, 1, replace=True) for x, p in pairs]
    batches = [laws.batch_noise(x, np.stack([p] * len(x)), 1, replace=True) for x, p in pairs]
    constant, drawn = (
        laws_qlsd.langevin(precisions, **settings, **noise).rounds(np.ones(2), 3)[-1]
        for noise in (dict(noises=noises), dict(batches=batches))
    )
    np.testing.assert_allclose(constant.mean, drawn.mean, rtol=1e-11)
    np.testing.assert_allclose(constant.covariance, drawn.covariance, rtol=1e-10, atol=1e-13)


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


def test_the_quantiser_has_the_mean_and_the_variance_of_the_anchor():
    v = np.array([3.0, -4.0, 0.0, 0.0])
    np.testing.assert_allclose(laws_quantised.variance(v, 2).sum(), 2.5)
    weights, codes = (np.array(x) for x in zip(*laws_quantised.quantised(v, 2), strict=True))
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
        for error in (gap, gap[:, :, None] * gap[:, None, :] - law.covariance):
            z = error.mean(0) / (error.std(0) / np.sqrt(num))
            assert np.abs(z).max() < 5.5
