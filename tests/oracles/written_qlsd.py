"""Algorithms 1, 2, S1, S2 and S3 of Vono et al. (2022), written out over every path.

In float64 NumPy; imports nothing of fedmcmc, and of the oracle only what names moments.
"""

import itertools

import numpy as np

from tests.oracles import laws

__all__ = ["Written", "random_clients"]


def random_clients(rng, num, d):
    """Return `num` clients' precisions and means, and a prior's."""
    factor = rng.normal(size=(num + 1, d, d))
    spd = factor @ factor.transpose(0, 2, 1) / d + 0.5 * np.eye(d)
    return spd[:num], rng.normal(size=(num, d)), spd[num], rng.normal(size=d)


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
        results = []
        for batch, mask in itertools.product(batches, itertools.product((0, 1), repeat=self.d)):
            chance = np.prod(np.where(mask, keep, 1 - keep)) / len(batches)
            if chance > 0:
                results.append((chance, batch, np.array(mask)[:, None] / keep))
        return results

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
                for i, (p, batch, mask) in zip(active, drawn, strict=True):
                    sent = mask * (self.message(i, batch, theta, zeta) - etas[i])
                    total = total + weights[i] * (sent + own * etas[i])
                    new[i] = etas[i] + rates[i] * sent
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
