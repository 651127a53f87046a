"""The oracle of the QLSD family: published anchors, formulas, enumeration of every path."""

import itertools

import laws
import laws_qlsd
import laws_quantised
import numpy as np
import pytest

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


def random_clients(rng, num, d):
    factor = rng.normal(size=(num + 1, d, d))
    spd = factor @ factor.transpose(0, 2, 1) / d + 0.5 * np.eye(d)
    return spd[:num], rng.normal(size=(num, d)), spd[num], rng.normal(size=d)


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


# Enumeration: Algorithms 1, 2, S1, S2 and S3 of Vono et al. (2022), written out.


class Written:
    """The algorithms on numbers that are linear in Langevin's normals.

    A vector is ``[d, 1 + num_normals]``: its value without noise and its slope in each normal.
    """

    def __init__(self, d, num_rounds, settings):
        rng = np.random.default_rng(5)
        self.d, self.num_rounds, self.settings = d, num_rounds, settings
        self.sizes = (3, 2)
        self.rows = [rng.normal(size=(n, d)) for n in self.sizes]
        self.curvatures = [random_clients(rng, n, d)[0] for n in self.sizes]
        _, _, self.prior_precision, self.prior_mean = random_clients(rng, 1, d)
        self.centre, self.position = rng.normal(size=d), rng.normal(size=d)

    def constant(self, x):
        return np.concatenate([np.asarray(x)[:, None], np.zeros((self.d, self.slopes))], axis=1)

    @property
    def slopes(self):
        return self.d * self.num_rounds

    def prior(self, x):
        return self.prior_precision @ (self.constant(self.prior_mean) - x)

    def rows_gradient(self, i, rows, x):
        gradient = (
            self.sizes[i]
            / len(rows)
            * sum(self.curvatures[i][j] @ (self.constant(self.rows[i][j]) - x) for j in rows)
        )
        return gradient + self.split * self.sizes[i] / sum(self.sizes) * self.prior(x)

    @property
    def split(self):
        return self.settings.get("split", False)

    def message(self, i, batch, theta, zeta):
        gradient = self.rows_gradient(i, batch, theta)
        everything = range(self.sizes[i])
        if "refresh_every" in self.settings:
            at_snapshot = self.rows_gradient(i, everything, zeta)
            return gradient - self.rows_gradient(i, batch, zeta) + at_snapshot
        if self.settings.get("centre"):
            centre = self.constant(self.centre)
            gradient = gradient - self.rows_gradient(i, batch, centre)
            if not self.settings.get("centred", True):
                gradient = gradient + self.rows_gradient(i, everything, centre)
        return gradient

    def server(self, theta):
        """Return what the server adds by itself."""
        if not (self.settings.get("centre") and self.settings.get("centred", True)):
            return 0 if self.split else self.prior(theta)
        centre = self.constant(self.centre)
        everything = (self.rows_gradient(i, range(n), centre) for i, n in enumerate(self.sizes))
        # The prior at the centre cancels: in the gradient there, and in the prior's difference.
        return sum(everything) + (0 if self.split else self.prior(theta))

    def outcomes(self, i):
        """Return ``(probability, batch, kept)`` of client `i` in a round."""
        n, m = self.sizes[i], self.settings.get("batch")
        if m is None:
            batches = [tuple(range(n))]
        elif self.settings.get("replace", True):
            batches = list(itertools.product(range(n), repeat=m))
        else:
            batches = list(itertools.combinations(range(n), min(m, n)))
        keep = self.settings.get("keep", 1.0)
        found = []
        for batch, kept in itertools.product(batches, itertools.product((0, 1), repeat=self.d)):
            chance = np.prod(np.where(kept, keep, 1 - keep)) / len(batches)
            if chance > 0:
                found.append((chance, batch, np.array(kept)[:, None] / keep))
        return found

    def round(self, round_, state):
        """Yield ``(probability, state)`` after one round from ``(theta, etas, zeta)``."""
        theta, etas, zeta = state
        rates = self.settings.get("rates", np.zeros(2))
        if round_ % self.settings.get("refresh_every", 1) == 0:
            zeta = theta
        step_size = self.settings["step_size"][round_]
        noise = np.zeros((self.d, 1 + self.slopes))
        first = 1 + self.d * round_
        noise[:, first : first + self.d] = np.eye(self.d)
        noise = np.sqrt(2 * step_size * self.settings["temperature"][round_]) * noise
        own = self.settings.get("memory_of") == "active"
        for chance, weights in self.settings["participation"]:
            active = np.flatnonzero(weights)
            for drawn in itertools.product(*(self.outcomes(i) for i in active)):
                probability, new = chance, list(etas)
                total = self.server(theta) + (0 if own else sum(etas))
                for i, (p, batch, kept) in zip(active, drawn, strict=True):
                    said = kept * (self.message(i, batch, theta, zeta) - etas[i])
                    total = total + weights[i] * (said + own * etas[i])
                    new[i] = etas[i] + rates[i] * said
                    probability *= p
                yield probability, (theta + step_size * total + noise, new, zeta)

    def law(self):
        """Return the law of ``(theta, etas)`` after all rounds, over every path at once."""
        nothing = self.constant(np.zeros(self.d))[None]
        start = self.constant(self.position)[None]
        weights, state = np.ones(1), (start, [nothing] * 2, start)
        for round_ in range(self.num_rounds):
            branches = list(self.round(round_, state))
            weights = np.concatenate([p * weights for p, _ in branches])
            theta = np.concatenate([theta for _, (theta, _, _) in branches])
            etas = [np.concatenate([etas[i] for _, (_, etas, _) in branches]) for i in range(2)]
            state = (theta, etas, np.concatenate([zeta for _, (_, _, zeta) in branches]))
        states = np.concatenate([state[0], *state[1]], axis=1)
        means, slopes = states[:, :, 0], states[:, :, 1:]
        mean = weights @ means
        gaps = means - mean
        noise = np.einsum("n,nik,njk->ij", weights, slopes, slopes, optimize=True)
        return laws.Moments(mean, noise + gaps.T @ (weights[:, None] * gaps))


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
