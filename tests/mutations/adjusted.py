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
HMC, WEIGHTED = "kernels/_hamiltonian.py", "kernels/_weighted.py"
TEMPERED = "exact/_tempered.py"

MUTATIONS = {
    "no kinetic energy": (
        HMC,
        "return sum(terms, jnp.zeros((), dtype)) / 2",
        "return 0 * sum(terms, jnp.zeros((), dtype))",
        STEPS,
    ),
    "no half kick at a trajectory's end": (
        HMC,
        "momentum = half_kick(old.momentum, gradient, old.step_size, self.metric)",
        "momentum = old.momentum",
        STEPS,
    ),
    "every proposal accepted": (
        HMC,
        "moves = ends & (is_start | (draws.uniform < acceptance))",
        "moves = ends",
        STEPS,
    ),
    "a rejection that is not recorded": (
        HMC,
        "position=position,",
        "position=trees.select(ends & densities.is_complete, point, position),",
        STEPS,
    ),
    "the energy of the rejected end": (
        HMC,
        "_kinetic(draws.momentum) - at_position[0], old.energy",
        "_kinetic(draws.momentum) - log_density, old.energy",
        STEPS,
    ),
    "the gradient of the rejected end": (
        HMC,
        "origin_gradient = trees.select(ends, at_position[1], gradient)",
        "origin_gradient = gradient",
        STEPS,
    ),
    "a step size that changes on the way": (
        HMC,
        "ends, (position, draws.momentum, new_step), (point, momentum, old.step_size)",
        "ends, (position, draws.momentum, new_step), (point, momentum, 2 * old.step_size)",
        STEPS,
    ),
    "the transposed root of a metric": (
        "dynamics/_metrics.py",
        "return _times(jax.tree.map(jnp.transpose, self.factor), gradient)",
        "return _times(self.factor, gradient)",
        STEPS,
    ),
    "a prior that is not in the gradient": (
        "kernels/_adjusted.py",
        "gradient = trees.add(total.gradient, trees.cast_like(prior_gradient, total.gradient))",
        "gradient = total.gradient",
        METRIC,
    ),
    "a prior that does not decide": (
        "kernels/_adjusted.py",
        "log_density = value + prior.astype(value.dtype)",
        "log_density = value",
        METRIC,
    ),
    "void rounds that count": (
        HMC,
        "densities.is_complete,\n            (server, position, next_points)",
        "densities.is_complete | True,\n            (server, position, next_points)",
        VOID,
    ),
    "a trajectory that ends where it meets a wall": (
        HMC,
        "ends = is_start | (num_points >= old.length)",
        "ends = is_start | (num_points >= old.length) | jnp.isneginf(log_density)",
        WALL,
    ),
    "noise without a penalty": (
        HMC,
        "log_ratio = log_ratio - self.value_noise / 2",
        "pass",
        NOISY,
    ),
    "a penalty of the whole variance": (
        HMC,
        "log_ratio = log_ratio - self.value_noise / 2",
        "log_ratio = log_ratio - self.value_noise",
        NOISY,
    ),
    "noise of the whole variance from every client": (
        HMC,
        "jnp.sqrt(self.value_noise * share)",
        "jnp.sqrt(self.value_noise)",
        NOISY,
    ),
    "noisy differences to where the trajectory did not begin": (
        HMC,
        "position if self._is_noisy else broadcast.extra.centre",
        "broadcast.extra.centre",
        NOISY,
    ),
    "noise that is kept beside a penalty": (
        HMC,
        "point_density = self.posterior.logprior_fn(point).astype(log_density.dtype)",
        "point_density = log_density",
        NOISY,
    ),
    "the approximation's density left out": (
        WEIGHTED,
        "log_weights = jnp.concatenate([log_weight[None], log_density - proposal_density])",
        "log_weights = jnp.concatenate([log_weight[None], log_density])",
        ALONE,
    ),
    "every weighted proposal accepted": (
        WEIGHTED,
        "return (uniforms[0] < accepted).astype(jnp.int32), accepted",
        "return jnp.int32(1), accepted",
        ALONE,
    ),
    "the weight of what was rejected": (
        WEIGHTED,
        "log_weights[chosen],",
        "log_weights[1],",
        ALONE,
    ),
    "a correlation with another variance": (
        WEIGHTED,
        "share = jnp.sqrt(1 - jnp.square(correlation))",
        "share = jnp.sqrt(1 - correlation)",
        CORRELATED,
    ),
    "a correlated proposal from another point": (
        WEIGHTED,
        "correlated_mean = mean + correlation * (position.astype(mean.dtype) - mean)",
        "correlated_mean = correlation * position.astype(mean.dtype)",
        CORRELATED,
    ),
    "the old position not among the tries": (
        WEIGHTED,
        "return jnp.argmax(log_weights + gumbel)",
        "return 1 + jnp.argmax(log_weights[1:] + gumbel[1:])",
        TRIES,
    ),
    "the best of the tries": (
        WEIGHTED,
        "return jnp.argmax(log_weights + gumbel)",
        "return jnp.argmax(log_weights)",
        TRIES,
    ),
    "void rounds that are weighed": (
        WEIGHTED,
        "densities.is_complete,\n            (server, position, next_points)",
        "densities.is_complete | True,\n            (server, position, next_points)",
        VOID_WEIGHTS,
    ),
    "a density of one part alone": (
        "gaussian/_mixtures.py",
        "return jax.nn.logsumexp(jnp.stack(terms))",
        "return terms[0]",
        MIXED,
    ),
    "states resampled without their weights": (
        TEMPERED,
        "start + _resample(np.exp(island - logsumexp(island)), num_seeds, rng)",
        "start + _resample(np.full(num, 1 / num), num_seeds, rng)",
        MODES,
    ),
    "moves to the posterior at every temperature": (
        TEMPERED,
        "log_ratio = proposed.log_density(power) - current.log_density(power)",
        "log_ratio = proposed.log_density(1.0) - current.log_density(1.0)",
        MODES,
    ),
    "moves that are always made": (
        TEMPERED,
        "accept = np.log(rng.random(num)) < log_ratio",
        "accept = np.isfinite(log_ratio)",
        NEAR,
    ),
    "an evidence of the last temperature alone": (
        TEMPERED,
        "log_evidence += logsumexp(log_weights, axis=1) - np.log(num)",
        "log_evidence = logsumexp(log_weights, axis=1) - np.log(num)",
        MODES,
    ),
}
