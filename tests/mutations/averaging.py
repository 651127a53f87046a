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
LANGEVIN = f"{LAW}[langevin]"
SAMPLES = "laws/test_fed_avg_law.py::test_averaged_iterates_have_their_exact_law[1-2]"
AVERAGING, INTEGRATORS = "kernels/_averaging.py", "dynamics/_integrators.py"

MUTATIONS = {
    "private momenta without one over the root of the weight": (
        "dynamics/_momentum.py",
        "jnp.sqrt((1 - correlation) / weight)",
        "jnp.sqrt(1 - correlation)",
        HALF,
    ),
    "correlation in place of its root": (
        "dynamics/_momentum.py",
        "trees.add_scaled(private, jnp.sqrt(correlation),",
        "trees.add_scaled(private, correlation,",
        HALF,
    ),
    "one momentum for all trajectories of a round": (
        "dynamics/_momentum.py",
        'return () if self.parts == "shared" else normals(rng_key, like, num)',
        'return () if self.parts == "shared" else jnp.repeat(normals(rng_key, like, 1), num, 0)',
        HALF,
    ),
    "a weight that counts twice": (
        AVERAGING,
        "message = trees.scale(weight, trees",
        "message = trees.scale(weight**2, trees",
        HALF,
    ),
    "an average that is not weighted": (
        AVERAGING,
        "message = trees.scale(weight, trees",
        "message = trees.scale(0.25, trees",
        NOISE,
    ),
    "the prior split among clients that are averaged": (
        AVERAGING,
        "trees.add(prior, over_weight(weight, estimate(drawn, position)))",
        "trees.add(trees.scale(weight, prior), over_weight(weight, estimate(drawn, position)))",
        HALF,
    ),
    "clients that move along their own log likelihood": (
        AVERAGING,
        "trees.add(prior, over_weight(weight, estimate(drawn, position)))",
        "trees.add(prior, estimate(drawn, position))",
        HALF,
    ),
    "a first kick that is whole": (
        INTEGRATORS,
        "half, kick(gradient))",
        "2 * half, kick(gradient))",
        HALF,
    ),
    "later kicks that are half": (
        INTEGRATORS,
        "half, kick(twice))",
        "half / 2, kick(twice))",
        HALF,
    ),
    "one gradient for both halves of a kick": (
        INTEGRATORS,
        "jnp.sum(g, axis=0), x) for",
        "2 * g[0], x) for",
        BATCH,
    ),
    "the first call's draws again": (
        INTEGRATORS,
        "x[1:].reshape(",
        "x[:-1].reshape(",
        REUSE,
    ),
    "noise of a gradient that is not weighted": (
        "gradients/_estimators.py",
        "        if self.weighted:",
        "        if False:",
        NOISE,
    ),
    "velocities of the covariance of momenta": (
        "dynamics/_metrics.py",
        "_times(self.roots if self._is_diagonal(normals) else self.factor, normals)",
        "normals",
        MASS,
    ),
    "kicks without the inverse mass matrix": (
        "dynamics/_metrics.py",
        "return _times(self.matrix, gradient)",
        "return gradient",
        MASS,
    ),
    "a control variate without its weight": (
        "gradients/_corrections.py",
        "trees.scale(weight_of(client, self.shares), broadcast.summed)",
        "broadcast.summed",
        CONTROL,
    ),
    "a control variate with the share of rows for the weight": (
        "gradients/_corrections.py",
        "trees.scale(weight_of(client, self.shares), broadcast.summed)",
        "trees.scale(client.share, broadcast.summed)",
        CONTROL,
    ),
    "a control variate that forgets the client's own gradient": (
        "gradients/_corrections.py",
        "lambda g: g[0] - g[1], both)",
        "lambda g: g[0], both)",
        CONTROL,
    ),
    "draws with replacement that each count as the whole": (
        "participation/_participation.py",
        "1 / (size * p[index])",
        "1 / p[index]",
        ONE,
    ),
    "draws with replacement that ignore their probability": (
        "participation/_participation.py",
        "1 / (size * p[index])",
        "jnp.full(size, p.shape[0] / size)",
        ONE,
    ),
    "no windows between two samples": (
        "dynamics/_training.py",
        "start + stride, lambda i, c: window(c, i, False)",
        "start + 1, lambda i, c: window(c, i, False)",
        SAMPLES,
    ),
    "windows between two samples with the draws of the first": (
        "dynamics/_training.py",
        "start + stride, lambda i, c: window(c, i, False)",
        "start + stride, lambda i, c: window(c, start, False)",
        SAMPLES,
    ),
    "a distinct cohort that stands for itself alone": (
        "rounds/_messages.py",
        "        if participation.weighted:",
        "        if False:",
        TWO,
    ),
    "all clients share what should be private": (
        "rounds/_phases.py",
        "client_key(rng_key, round_, client.index)",
        "client_key(rng_key, round_, 0 * client.index)",
        HALF,
    ),
    "the shared key does not change with the round": (
        "random/_streams.py",
        "jax.random.fold_in(jax.random.fold_in(rng_key, round_), jnp.uint32(_SHARED))",
        "jax.random.fold_in(rng_key, jnp.uint32(_SHARED))",
        HALF,
    ),
    "the noise of a local Langevin step off by sqrt 2": (
        INTEGRATORS,
        "jnp.sqrt(2 * jnp.asarray(step_size) * jnp.asarray(temperature))",
        "jnp.sqrt(jnp.asarray(step_size) * jnp.asarray(temperature))",
        LANGEVIN,
    ),
}
