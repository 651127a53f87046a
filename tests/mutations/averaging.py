"""Bugs of the averaging family that its law tests must notice; see `test_mutations`."""

LAW = "laws/test_fa_hmc_law.py::test_law_after_two_and_four_rounds"
HALF = f"{LAW}[half]"
NOISE = f"{LAW}[noise-fresh]"
BATCH = f"{LAW}[batch-fresh]"
REUSE = f"{LAW}[batch-reuse]"
CONTROL = f"{LAW}[control-variate-weights-noise]"
MASS = f"{LAW}[mass-dense]"
ONE = f"{LAW}[scheme-one]"
TWO = f"{LAW}[scheme-two]"
SAMPLES = "laws/test_fed_avg_law.py::test_averaged_iterates_have_their_exact_law[1-2]"

MUTATIONS = {
    "dynamics/_momentum.py::Momentum.combine": {
        "private momenta without one over the root of the weight": (
            "(1 - correlation) / weight -> 1 - correlation",
            HALF,
        ),
        "correlation in place of its root": ("jnp.sqrt(correlation) -> correlation", HALF),
    },
    "dynamics/_momentum.py::Momentum.prepare": {
        "one momentum for all trajectories of a round": (
            "normals(rng_key, like, num) -> jnp.repeat(normals(rng_key, like, 1), num, 0)",
            HALF,
        ),
    },
    "kernels/_averaging.py::Averaging.step": {
        "a weight that counts twice": (
            "trees.scale(weight, trees.subtract(position, broadcast.position))"
            " -> trees.scale(weight ** 2, trees.subtract(position, broadcast.position))",
            HALF,
        ),
        "the prior split among clients that are averaged": (
            "trees.add(prior, over_weight(weight, estimate(drawn, position)))"
            " -> trees.add(trees.scale(weight, prior), over_weight(weight, estimate(drawn,"
            " position)))",
            HALF,
        ),
        "clients that move along their own log likelihood": (
            "over_weight(weight, estimate(drawn, position)) -> estimate(drawn, position)",
            HALF,
        ),
    },
    "dynamics/_integrators.py::Leapfrog.move": {
        "a first kick that is whole": (
            "trees.add_scaled(self.mass.root_times(noise), half, kick(gradient))"
            " -> trees.add_scaled(self.mass.root_times(noise), 2 * half, kick(gradient))",
            HALF,
        ),
        "later kicks that are half": (
            "trees.add_scaled(velocity, half, kick(twice))"
            " -> trees.add_scaled(velocity, half / 2, kick(twice))",
            HALF,
        ),
        "the first call's draws again": ("x[1:] -> x[:-1]", REUSE),
    },
    "dynamics/_integrators.py::_two_halves": {
        "one gradient for both halves of a kick": ("jnp.sum(g, axis=0) -> 2 * g[0]", BATCH),
    },
    "gradients/_estimators.py::Noisy.start": {
        "noise of a gradient that is not weighted": ("self.weighted -> False", NOISE),
    },
    "dynamics/_metrics.py::Metric.root_times": {
        "velocities of the covariance of momenta": (
            "_times(self.roots if self._is_diagonal(normals) else self.factor, normals) -> normals",
            MASS,
        ),
    },
    "dynamics/_metrics.py::Metric.times": {
        "kicks without the inverse mass matrix": (
            "_times(self.matrix, gradient) -> gradient",
            MASS,
        ),
    },
    "gradients/_corrections.py::Scaffold.correction": {
        "a control variate with the share of rows for the weight": (
            "weight_of(client, self.shares) -> client.share",
            CONTROL,
        ),
    },
    "gradients/_corrections.py::ZeroSum.estimate": {
        "a control variate that forgets the client's own gradient": (
            "g[0] - g[1] -> g[0]",
            CONTROL,
        ),
    },
    "participation/_participation.py::Categorical.prepare": {
        "draws with replacement that ignore their probability": (
            "1 / (size * p[index]) -> jnp.full(size, p.shape[0] / size)",
            ONE,
        ),
    },
    "dynamics/_training.py::train.sample_and_gap": {
        "windows between two samples with the draws of the first": (
            "window(c, i, False) -> window(c, start, False)",
            SAMPLES,
        ),
    },
    "rounds/_messages.py::_sum_active": {
        "a distinct cohort that stands for itself alone": ("participation.weighted -> False", TWO),
    },
    "rounds/_phases.py::_client_key": {
        "all clients share what should be private": ("client.index -> 0 * client.index", HALF),
    },
    "random/_streams.py::shared_key": {
        "the shared key does not change with the round": (
            "jax.random.fold_in(rng_key, round_) -> rng_key",
            HALF,
        ),
    },
}
