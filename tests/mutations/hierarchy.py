"""Bugs of latents of groups that tests must notice; see `test_mutations`."""

MOVES = "hierarchy/test_refresh.py::test_moves_reach_the_conditional"
DRAWS = "hierarchy/test_local_draws.py::test_draws_follow_a_gaussian_conditional[0.0]"
EXACT = "hierarchy/test_marginal.py::test_a_gaussian_model_is_integrated_exactly[0.0-5]"
SLOPES = "hierarchy/test_marginal.py::test_gradients_are_those_of_the_value[1]"
LAYOUTS = "hierarchy/test_marginal.py::test_the_layout_of_groups_does_not_matter"
NEW = "hierarchy/test_new_group.py::test_a_new_group_is_drawn_from_the_population[0.0]"
ALONE = "hierarchy/test_unpooled.py::test_draws_are_those_of_the_groups_own_rows"
CENTERED = (
    "interop/test_numpyro_centering.py::test_the_location_does_not_depend_on_the_latents[30.0-0-1]"
)
FITTED = "fitting/test_gibbs.py::test_chains_that_are_too_short_do_not_pass"
JOINT = "laws/test_joint_law.py::test_law_of_every_round"
STEPS = f"{JOINT}[three steps, gradient first]"
SOME = f"{JOINT}[some clients]"
METRIC = f"{JOINT}[exact, a metric]"
GIBBS = "laws/test_gibbs_law.py::test_law_of_every_round[some clients]"
SLICES = "laws/test_gibbs_law.py::test_in_the_long_run_it_is_the_posterior[slices]"
SWEPT = "laws/test_gibbs_law.py::test_slices_draw_what_is_shared_given_latents"
PREDICTED = "tuning/test_latents.py::test_the_prediction_for_exact_draws_of_latents_is_exact[draws]"
RECENTERED = "laws/test_gibbs_recentering_law.py::test_draws_of_the_posterior_stay_such"
SCHOOLS = (
    "laws/test_gibbs_recentering_law.py::"
    "test_slopes_of_what_varies_between_groups_get_to_the_posterior"
)
QUADRATURE = "hierarchy/test_marginal.py::test_an_inaccurate_quadrature_is_reported"
FAR = "laws/test_gibbs_law.py::test_effects_far_from_zero_have_a_spread[1.0]"
NEGATIVE = "hierarchy/test_gibbs.py::test_a_spread_is_not_below_its_rounding_error[multivariate]"
ROWS = "hierarchy/test_gibbs.py::test_parameters_of_rows_move_by_their_own_exchange[conjugate]"
PATHS = "hierarchy/test_refresh.py::test_trajectories_keep_a_conditional[hmc]"
SEARCHES = "hierarchy/test_marginal.py::test_failed_searches_are_counted"
SADDLES = "hierarchy/test_marginal.py::test_a_search_that_ends_at_a_saddle_has_failed"
LATENTS, MARGINAL = "hierarchy/_latents.py", "hierarchy/_marginal.py"
REFRESH, NORMAL = "hierarchy/_refresh.py", "hierarchy/_gaussian_moves.py"
KERNEL, SERVER = "kernels/_joint.py", "kernels/_gibbs.py"
RUNNING = "kernels/_gibbs_sums.py"
PATH, RECENTERING = "hierarchy/_trajectories.py", "kernels/_gibbs_recentering.py"
SLICED, JUDGED = "dynamics/_slices.py", "kernels/_gibbs_rows.py"

MUTATIONS = {
    "proposals are wider than their density says by the root of two": (
        REFRESH,
        "places = mode[:, None] + jax",
        "places = mode[:, None] + jnp.sqrt(2.0) * jax",
        MOVES,
    ),
    "every proposal is accepted": (
        REFRESH,
        "(jnp.log(uniform) < new_weight - weight)",
        "(jnp.log(uniform) < jnp.inf)",
        MOVES,
    ),
    "all groups of a client share their draws": (
        REFRESH,
        "draw(jax.random.fold_in(rng_key, group))",
        "draw(jax.random.fold_in(rng_key, 0 * group))",
        DRAWS,
    ),
    "all clients share their draws": (
        "hierarchy/_local_draws.py",
        "jax.random.fold_in(key, client.index)",
        "jax.random.fold_in(key, 0 * client.index)",
        DRAWS,
    ),
    "a new group has a row of its own": (
        "hierarchy/_new_group.py",
        "Client(rows, zero, zero, zero, weight, weight, 1)",
        "Client(rows, zero, zero + 1, zero, weight, weight, 1)",
        NEW,
    ),
    "sites are centered as if groups differed by one": (
        "interop/_numpyro_centering.py",
        "share * spread ** (middle - 1) < middle",
        "share < middle",
        CENTERED,
    ),
    "what rows alone say of a group has the population's prior": (
        "hierarchy/_unpooled.py",
        "local._replace(logprior_fn=_Flat())",
        "local",
        ALONE,
    ),
    "chains that do not agree are called exact": (
        "fitting/_gibbs.py",
        "    if chains.agree:\n",
        "    if True:\n",
        FITTED,
    ),
    "the prior of a latent counts twice": (
        LATENTS,
        "return prior + self.fold",
        "return 2 * prior + self.fold",
        EXACT,
    ),
    "the mode is not differentiated": (
        MARGINAL,
        "center = mode + solve(cholesky(curvature), slope)",
        "center = mode",
        SLOPES,
    ),
    "what draws share counts as an error of a quadrature": (
        MARGINAL,
        "differences - differences.mean()",
        "differences",
        QUADRATURE,
    ),
    "groups that a client does not have count": (
        MARGINAL,
        "jnp.where(groups.present, total, 0)",
        "jnp.where(groups.present, total, 1)",
        LAYOUTS,
    ),
    "Langevin steps of latents with the noise of half the temperature": (
        NORMAL,
        "jnp.sqrt(2 * step) * noise",
        "jnp.sqrt(step) * noise",
        STEPS,
    ),
    "a draw of a latent with twice the variance": (
        NORMAL,
        "solve_upper(factor, draws.astype(flat.dtype))",
        "jnp.sqrt(2.0) * solve_upper(factor, draws.astype(flat.dtype))",
        METRIC,
    ),
    "a metric for the drift and not for the noise": (
        KERNEL,
        "position, gradient, noise, step_size, 1.0, self.metric",
        "position, self.metric.times(gradient), noise, step_size, 1.0",
        METRIC,
    ),
    "the shared prior counts twice": (
        KERNEL,
        "trees.add(total, jax.grad(self.posterior.logprior_fn)(position))",
        "trees.add_scaled(total, 2, jax.grad(self.posterior.logprior_fn)(position))",
        METRIC,
    ),
    "the order is ignored": (
        KERNEL,
        "flat if self.gradient_first else moved.flat",
        "moved.flat",
        STEPS,
    ),
    "the gradient of the client's first latents alone": (
        LATENTS,
        "jnp.where(self.present, self.log_density(position, flat), 0)",
        "self.log_density(position, flat)[:1]",
        METRIC,
    ),
    "latents of absent clients move": (
        "rounds/_messages.py",
        "jnp.where(_column(active, a), a, b)",
        "a",
        SOME,
    ),
    "latents shrink between rounds": (
        "kernels/_joint.py",
        "LatentState(groups.as_latents(flat), refresh_state, acceptance)",
        "LatentState(groups.as_latents(0.8 * flat), refresh_state, acceptance)",
        STEPS,
    ),
    "the server forgets the sums of absent clients": (
        RUNNING,
        "total = trees.add(self.total, change)",
        "total = change",
        GIBBS,
    ),
    "a recount begins with changes of sums": (
        RUNNING,
        "trees.select(jnp.asarray(starts), trees.zeros_like(old), old)",
        "old",
        GIBBS,
    ),
    "the origin of sums of squares stays where it was at the start": (
        SERVER,
        "trees.select(ends, next_origin, origins.next)",
        "origins.next",
        FAR,
    ),
    "a prediction in which latents take no information": (
        LATENTS,
        'return jnp.einsum("gki,gkj->ij", whitened, whitened)',
        'return 0 * jnp.einsum("gki,gkj->ij", whitened, whitened)',
        PREDICTED,
    ),
    "parameters are recentered and latents stay": (
        SERVER,
        "begin = groups.as_flat(transport_latents(self, client_state, broadcast))",
        "begin = groups.as_flat(before)",
        SCHOOLS,
    ),
    "parameters are recentered as if their prior were flat": (
        RECENTERING,
        "answer.difference + priors, -jnp.inf)",
        "answer.difference, -jnp.inf)",
        RECENTERED,
    ),
    "latents make up for slopes as if their population had no say": (
        RECENTERING,
        "return rows + jnp.sum(jnp.where(groups.present, change, 0))",
        "return rows",
        RECENTERED,
    ),
    "candidates lie around where the chain is": (
        RECENTERING,
        "step * (normals[0] + normals[1:])",
        "step * 2**0.5 * normals[1:]",
        RECENTERED,
    ),
    "a spread of rounded sums may be negative": (
        "interop/_numpyro_population.py",
        "jnp.maximum(squares - total**2 / num, lowest)",
        "squares - total**2 / num",
        NEGATIVE,
    ),
    "changes of sums are weighted by one over a probability": (
        SERVER,
        "participation = replace(participation, weighted=False)",
        "participation = replace(participation, weighted=True)",
        GIBBS,
    ),
    "searches that fail are not counted": (
        MARGINAL,
        "groups.present & ~is_mode",
        "groups.present & ~is_mode & (jnp.arange(groups.num) < 0)",
        SEARCHES,
    ),
    "a saddle counts as a mode": (
        MARGINAL,
        "(mode.gain < MAX_GAIN) & peaked",
        "mode.gain < MAX_GAIN",
        SADDLES,
    ),
    "a level under the density from the wrong distribution": (
        SLICED,
        "log_density(position) + jnp.log1p(-below)",
        "log_density(position) + 2 * jnp.log1p(-below)",
        SLICES,
    ),
    "the server leaves the prior out": (
        SERVER,
        "return prior + self.population",
        "return 0 * prior + self.population",
        SWEPT,
    ),
    "the server counts the prior twice": (
        SERVER,
        "return prior + self.population",
        "return 2 * prior + self.population",
        SWEPT,
    ),
    "every proposal of parameters of rows is accepted": (
        JUDGED,
        "is_judged & (uniform < chance)",
        "is_judged",
        ROWS,
    ),
    "the way back of a proposal is ignored": (
        JUDGED,
        "(forward - backward) / (4 * step)",
        "0 * (forward - backward)",
        ROWS,
    ),
    "proposals with half the noise": (
        JUDGED,
        "jnp.sqrt(2 * step) * normals",
        "jnp.sqrt(step) * normals",
        ROWS,
    ),
    "every trajectory of a latent is accepted": (
        PATH,
        "accepted = (draw.uniforms < chance) & groups.present",
        "accepted = (draw.uniforms < 2) & groups.present",
        PATHS,
    ),
    "momenta of trajectories are off by the root of two": (
        PATH,
        "jax.random.normal(momentum, (num, size), dtype),",
        "jnp.sqrt(2.0) * jax.random.normal(momentum, (num, size), dtype),",
        PATHS,
    ),
    "the kinetic energy at the end of a trajectory is forgotten": (
        PATH,
        "jnp.sum(begin[1] ** 2 - momentum**2, -1)",
        "jnp.sum(begin[1] ** 2 - begin[1] ** 2, -1)",
        PATHS,
    ),
}
