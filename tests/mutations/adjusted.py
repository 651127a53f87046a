"""Bugs of kernels that accept or reject, which law tests must notice; see `test_mutations`."""

LAW = "laws/test_hmc_law.py"
KEPT = f"{LAW}::test_chains_from_exact_draws_keep_the_law_and_accept_as_often_as_told"
STEPS, METRIC = f"{KEPT}[1-3 steps]", f"{KEPT}[another metric]"
VOID = f"{LAW}::test_faults_make_rounds_void_and_leave_the_law_alone[1-3 steps]"
WALL = f"{LAW}::test_walls_do_not_push_chains_to_where_trajectories_end_soon"
NOISY = f"{LAW}::test_noise_in_what_decides_is_paid_for_and_leaves_the_law_alone[3]"
OF_WEIGHTS = "laws/test_weighted_law.py"
TOLD = f"{OF_WEIGHTS}::test_gaussian_proposals_keep_the_law_and_are_accepted_as_often_as_told"
ALONE, CORRELATED = f"{TOLD}[independent, narrow]", f"{TOLD}[correlated, wide]"
TRIES = f"{OF_WEIGHTS}::test_a_choice_among_tries_keeps_the_law_and_moves_as_often_as_told[8]"
VOID_WEIGHTS = f"{OF_WEIGHTS}::test_faults_make_rounds_void_and_leave_the_law_alone"
MIXED = f"{OF_WEIGHTS}::test_mixtures_keep_the_law[mixture]"
MODES = "exact/test_tempered.py::test_modes_between_which_no_chain_moves_have_their_masses"
NEAR = "exact/test_tempered.py::test_evidence_and_moments_of_a_gaussian_federation_are_exact[near]"

MUTATIONS = {
    "kernels/_hamiltonian.py::_kinetic": {
        "no kinetic energy": (
            "sum(terms, jnp.zeros((), dtype)) / 2 -> 0 * sum(terms, jnp.zeros((), dtype))",
            STEPS,
        ),
    },
    "kernels/_hamiltonian.py::HamiltonianMonteCarlo.aggregate": {
        "no half kick at a trajectory's end": (
            "half_kick(old.momentum, gradient, old.step_size, self.metric) -> old.momentum",
            STEPS,
        ),
        "every proposal accepted": (
            "ends & (is_start | (draws.uniform < acceptance)) -> ends",
            STEPS,
        ),
        "a rejection that is not recorded": (
            "(server, position, next_points)"
            " -> (server, trees.select(ends, point, position), next_points)",
            STEPS,
        ),
        "the energy of the rejected end": (
            "_kinetic(draws.momentum) - at_position[0] -> _kinetic(draws.momentum) - log_density",
            STEPS,
        ),
        "the gradient of the rejected end": (
            "trees.select(ends, at_position[1], gradient) -> gradient",
            STEPS,
        ),
        "a step size that changes on the way": (
            "(point, momentum, old.step_size) -> (point, momentum, 2 * old.step_size)",
            STEPS,
        ),
        "void rounds that count": (
            "(old, broadcast.position, broadcast.extra.points) -> (server, position, next_points)",
            VOID,
        ),
        "a trajectory that ends where it meets a wall": (
            "is_start | (num_points >= old.length)"
            " -> is_start | (num_points >= old.length) | jnp.isneginf(log_density)",
            WALL,
        ),
        "noise without a penalty": ("log_ratio = log_ratio - self.value_noise / 2 -> pass", NOISY),
        "noisy differences to where the trajectory did not begin": (
            "position if self._is_noisy else broadcast.extra.centre -> broadcast.extra.centre",
            NOISY,
        ),
        "noise that is kept beside a penalty": (
            "self.posterior.logprior_fn(point).astype(log_density.dtype) -> log_density",
            NOISY,
        ),
    },
    "kernels/_hamiltonian.py::HamiltonianMonteCarlo.step": {
        "noise of the whole variance from every client": (
            "self.value_noise * share -> self.value_noise",
            NOISY,
        ),
    },
    "dynamics/_metrics.py::Metric.transposed_root_times": {
        "the transposed root of a metric": (
            "jax.tree.map(jnp.transpose, self.factor) -> self.factor",
            STEPS,
        ),
    },
    "kernels/_adjusted.py::AdjustedKernel.read_sum": {
        "a prior that is not in the gradient": (
            "trees.add(total.gradient, trees.cast_like(prior_gradient, total.gradient))"
            " -> total.gradient",
            METRIC,
        ),
        "a prior that does not decide": ("value + prior.astype(value.dtype) -> value", METRIC),
    },
    "kernels/_weighted.py::WeightedKernel.aggregate": {
        "the approximation's density left out": (
            "log_density - proposal_density -> log_density",
            ALONE,
        ),
        "the weight of what was rejected": ("log_weights[chosen] -> log_weights[1]", ALONE),
        "void rounds that are weighed": (
            "(old, broadcast.position, points) -> (server, position, next_points)",
            VOID_WEIGHTS,
        ),
    },
    "kernels/_weighted.py::GaussianMetropolis.choose": {
        "every weighted proposal accepted": (
            "(uniforms[0] < accepted).astype(jnp.int32) -> jnp.int32(1)",
            ALONE,
        ),
    },
    "kernels/_weighted.py::GaussianMetropolis.propose": {
        "a correlation with another variance": (
            "jnp.square(correlation) -> correlation",
            CORRELATED,
        ),
        "a correlated proposal from another point": (
            "mean + correlation * (position.astype(mean.dtype) - mean)"
            " -> correlation * position.astype(mean.dtype)",
            CORRELATED,
        ),
    },
    "kernels/_weighted.py::MultipleTry.choose": {
        "the old position not among the tries": (
            "jnp.argmax(log_weights + gumbel).astype(jnp.int32)"
            " -> 1 + jnp.argmax(log_weights[1:] + gumbel[1:]).astype(jnp.int32)",
            TRIES,
        ),
    },
    "gaussian/_mixtures.py::Mixture.log_density_of": {
        "a density of one part alone": ("jax.nn.logsumexp(jnp.stack(terms)) -> terms[0]", MIXED),
    },
    "exact/_tempered.py::tempered": {
        "states resampled without their weights": (
            "np.exp(island - logsumexp(island)) -> np.full(num, 1 / num)",
            MODES,
        ),
        "an evidence of the last temperature alone": (
            "log_evidence += logsumexp(log_weights, axis=1) - np.log(num)"
            " -> log_evidence = logsumexp(log_weights, axis=1) - np.log(num)",
            MODES,
        ),
    },
    "exact/_tempered.py::_Path.move": {
        "moves to the posterior at every temperature": (
            "proposed.log_density(power) - current.log_density(power)"
            " -> proposed.log_density(1.0) - current.log_density(1.0)",
            MODES,
        ),
        "moves that are always made": (
            "np.log(rng.random(num)) < log_ratio -> np.isfinite(log_ratio)",
            NEAR,
        ),
    },
}
