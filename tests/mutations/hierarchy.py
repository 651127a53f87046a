"""Bugs of latents of groups that tests must notice; see `test_mutations`."""

MOVES = "hierarchy/test_refresh.py::test_moves_reach_the_conditional"
DRAWS = "hierarchy/test_local_draws.py::test_draws_follow_a_gaussian_conditional[0.0]"
EXACT = "hierarchy/test_marginal.py::test_a_gaussian_model_is_integrated_exactly[0.0-5]"
SLOPES = "hierarchy/test_marginal.py::test_gradients_are_those_of_the_value[1]"
LAYOUTS = "hierarchy/test_marginal.py::test_the_layout_of_groups_does_not_matter"
NEW = "hierarchy/test_new_group.py::test_a_new_group_is_drawn_from_the_population[0.0]"
ALONE = "hierarchy/test_unpooled.py::test_draws_are_those_of_the_groups_own_rows"
CENTERED = (
    "interop/test_numpyro_centering.py::"
    "test_the_recommended_centering_loses_no_information[30.0-0-1]"
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

MUTATIONS = {
    "hierarchy/_refresh.py::Independence.move": {
        "proposals are wider than their density says by the root of two": (
            "jax.vmap(solve_upper, (None, 1), 1)(factor, scaled)"
            " -> jnp.sqrt(2.0) * jax.vmap(solve_upper, (None, 1), 1)(factor, scaled)",
            MOVES,
        ),
        "every proposal is accepted": ("new_weight - weight -> jnp.inf", MOVES),
    },
    "hierarchy/_refresh.py::draw_per_group": {
        "all groups of a client share their draws": (
            "jax.random.fold_in(rng_key, group) -> jax.random.fold_in(rng_key, 0 * group)",
            DRAWS,
        ),
    },
    "hierarchy/_local_draws.py::_draw": {
        "all clients share their draws": ("client.index -> 0 * client.index", DRAWS),
    },
    "hierarchy/_new_group.py::_draw": {
        "a new group has a row of its own": (
            "Client(rows, zero, zero, zero, weight, weight, 1)"
            " -> Client(rows, zero, zero + 1, zero, weight, weight, 1)",
            NEW,
        ),
    },
    "interop/_numpyro_centering.py::_least_dependent": {
        "sites are centered as if groups differed by one": (
            "share * spread ** (middle - 1) -> share",
            CENTERED,
        ),
    },
    "hierarchy/_unpooled.py::unpooled": {
        "what rows alone say of a group has the population's prior": (
            "local._replace(logprior_fn=_Flat()) -> local",
            ALONE,
        ),
    },
    "fitting/_gibbs.py::_judge": {
        "chains that do not agree are called exact": ("chains.agree -> True", FITTED),
    },
    "hierarchy/_latents.py::_log_density": {
        "the prior of a latent counts twice": (
            "prior + groups.fold(of_rows).astype(prior.dtype)"
            " -> 2 * prior + groups.fold(of_rows).astype(prior.dtype)",
            EXACT,
        ),
    },
    "hierarchy/_latents.py::Groups.total": {
        "the gradient of the client's first latents alone": (
            "jnp.where(self.present, self.log_density(position, flat), 0)"
            " -> self.log_density(position, flat)[:1]",
            METRIC,
        ),
    },
    "hierarchy/_latents.py::missing_information": {
        "a prediction in which latents take no information": (
            "jnp.einsum('gki,gkj->ij', whitened, whitened)"
            " -> 0 * jnp.einsum('gki,gkj->ij', whitened, whitened)",
            PREDICTED,
        ),
    },
    "hierarchy/_marginal.py::MarginalTerms.terms": {
        "the mode is not differentiated": (
            "mode + solve(cholesky(curvature), gradient) -> mode",
            SLOPES,
        ),
        "groups that a client does not have count": (
            "jnp.where(groups.present, total, 0) -> jnp.where(groups.present, total, 1)",
            LAYOUTS,
        ),
    },
    "hierarchy/_marginal.py::quadrature_error": {
        "what draws share counts as an error of a quadrature": (
            "differences - differences.mean() -> differences",
            QUADRATURE,
        ),
    },
    "hierarchy/_marginal.py::_failures": {
        "searches that fail are not counted": (
            "groups.present & ~is_mode -> groups.present & False",
            SEARCHES,
        ),
        "a saddle counts as a mode": (
            "(mode.gain < MAX_GAIN) & peaked -> mode.gain < MAX_GAIN",
            SADDLES,
        ),
    },
    "hierarchy/_gaussian_moves.py::Ula.move": {
        "Langevin steps of latents with the noise of half the temperature": (
            "2 * step -> step",
            STEPS,
        ),
    },
    "hierarchy/_gaussian_moves.py::Conjugate.move": {
        "a draw of a latent with twice the variance": (
            "solve_upper(factor, draws.astype(flat.dtype))"
            " -> jnp.sqrt(2.0) * solve_upper(factor, draws.astype(flat.dtype))",
            METRIC,
        ),
    },
    "kernels/_joint.py::JointLangevin.aggregate": {
        "a metric for the drift and not for the noise": (
            "overdamped_langevin(position, gradient, noise, step_size, 1.0, self.metric)"
            " -> overdamped_langevin(position, self.metric.times(gradient), noise, step_size, 1.0)",
            METRIC,
        ),
        "the shared prior counts twice": (
            "trees.add(total, jax.grad(self.posterior.logprior_fn)(position))"
            " -> trees.add_scaled(total, 2, jax.grad(self.posterior.logprior_fn)(position))",
            METRIC,
        ),
    },
    "kernels/_joint.py::JointLangevin.step": {
        "the order is ignored": (
            "flat if self.gradient_first else moved.flat -> moved.flat",
            STEPS,
        ),
        "latents shrink between rounds": (
            "groups.as_latents(flat) -> groups.as_latents(0.8 * flat)",
            STEPS,
        ),
    },
    "rounds/_messages.py::where_active": {
        "latents of absent clients move": ("jnp.where(_column(active, a), a, b) -> a", SOME),
    },
    "kernels/_gibbs_sums.py::RunningSum.plus": {
        "the server forgets the sums of absent clients": (
            "trees.add(self.total, change) -> change",
            GIBBS,
        ),
    },
    "kernels/_gibbs_sums.py::compute_changes": {
        "a recount begins with changes of sums": (
            "trees.select(jnp.asarray(starts), trees.zeros_like(old), old) -> old",
            GIBBS,
        ),
    },
    "kernels/_gibbs.py::FederatedGibbs.aggregate": {
        "the origin of sums of squares stays where it was at the start": (
            "trees.select(ends, next_origin, origins.next) -> origins.next",
            FAR,
        ),
    },
    "kernels/_gibbs.py::FederatedGibbs.step": {
        "parameters are recentered and latents stay": (
            "transport_latents(self, client_state, broadcast) -> before",
            SCHOOLS,
        ),
    },
    "kernels/_gibbs.py::fed_gibbs": {
        "changes of sums are weighted by one over a probability": (
            "replace(participation, weighted=False) -> replace(participation, weighted=True)",
            GIBBS,
        ),
    },
    "kernels/_gibbs.py::FederatedGibbs.server_density": {
        "the server counts the prior twice": (
            "prior + self.population.logdensity_fn(position, sums)"
            " -> 2 * prior + self.population.logdensity_fn(position, sums)",
            SWEPT,
        ),
    },
    "kernels/_gibbs_recentering.py::RecenteringPhase.aggregate": {
        "parameters are recentered as if their prior were flat": (
            "answer.difference + priors -> answer.difference",
            RECENTERED,
        ),
    },
    "kernels/_gibbs_recentering.py::RecenteringPhase.step": {
        "latents make up for slopes as if their population had no say": (
            "rows + jnp.sum(jnp.where(groups.present, change, 0)) -> rows",
            RECENTERED,
        ),
    },
    "kernels/_gibbs_recentering.py::draw_candidates": {
        "candidates lie around where the chain is": (
            "step * (normals[0] + normals[1:]) -> step * 2 ** 0.5 * normals[1:]",
            RECENTERED,
        ),
    },
    "interop/_numpyro_population.py::population_of": {
        "a spread of rounded sums may be negative": (
            "jnp.maximum(squares - total ** 2 / num, lowest) -> squares - total ** 2 / num",
            NEGATIVE,
        ),
    },
    "dynamics/_slices.py::slice_sweeps": {
        "a level under the density from the wrong distribution": (
            "jnp.log1p(-below) -> 2 * jnp.log1p(-below)",
            SLICES,
        ),
    },
    "kernels/_gibbs_rows.py::judge": {
        "every proposal of parameters of rows is accepted": (
            "is_judged & (uniform < chance) -> is_judged",
            ROWS,
        ),
        "the way back of a proposal is ignored": (
            "(forward - backward) / (4 * step) -> 0 * (forward - backward)",
            ROWS,
        ),
    },
    "kernels/_gibbs_rows.py::propose": {
        "proposals with half the noise": ("2 * step -> step", ROWS),
    },
    "hierarchy/_trajectories.py::Trajectories.move": {
        "every trajectory of a latent is accepted": (
            "draw.uniforms < chance -> draw.uniforms < 2",
            PATHS,
        ),
        "the kinetic energy at the end of a trajectory is forgotten": (
            "momentum ** 2 -> begin[1] ** 2",
            PATHS,
        ),
    },
    "hierarchy/_trajectories.py::Trajectories.prepare": {
        "momenta of trajectories are off by the root of two": (
            "jax.random.normal(momentum, (num, size), dtype)"
            " -> jnp.sqrt(2.0) * jax.random.normal(momentum, (num, size), dtype)",
            PATHS,
        ),
    },
}
