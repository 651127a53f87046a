"""Bugs of latents of groups that tests must notice; see `test_mutations`."""

MOVES = "hierarchy/test_refresh.py::test_moves_keep_a_conditional"
DRAWS = "hierarchy/test_refresh.py::test_draws_are_those_of_a_gaussian_conditional[0.0]"
EXACT = "hierarchy/test_marginal.py::test_of_a_gaussian_model_it_is_exact[0.0-5]"
SLOPES = "hierarchy/test_marginal.py::test_gradients_are_those_of_the_value[1]"
LAYOUTS = "hierarchy/test_marginal.py::test_groups_lie_in_clients_of_their_own_or_together"
TESTS = [MOVES, DRAWS, EXACT, SLOPES, LAYOUTS]
LATENTS, MARGINAL = "hierarchy/_latents.py", "hierarchy/_marginal.py"
REFRESH = "hierarchy/_refresh.py"

MUTATIONS = {
    "proposals are wider than their density says by the root of two": (
        REFRESH,
        "places = mode[:, None] + jax",
        "places = mode[:, None] + jnp.sqrt(2.0) * jax",
        MOVES,
    ),
    "every proposal is accepted": (
        REFRESH,
        "(jnp.log(uniform) < its_weight - weight)",
        "(jnp.log(uniform) < jnp.inf)",
        MOVES,
    ),
    "all groups of a client share their draws": (
        REFRESH,
        "jax.random.fold_in(rng_key, group)",
        "jax.random.fold_in(rng_key, 0 * group)",
        DRAWS,
    ),
    "all clients share their draws": (
        "hierarchy/_local_draws.py",
        "jax.random.fold_in(key, client.index)",
        "jax.random.fold_in(key, 0 * client.index)",
        DRAWS,
    ),
    "the prior of a latent counts twice": (
        LATENTS,
        "return prior + self.fold",
        "return 2 * prior + self.fold",
        EXACT,
    ),
    "the mode is not differentiated": (
        MARGINAL,
        "center = at_mode + solve(cholesky(curvature), slope)",
        "center = at_mode",
        SLOPES,
    ),
    "groups that a client does not have count": (
        MARGINAL,
        "jnp.where(groups.present, total, 0)",
        "jnp.where(groups.present, total, 1)",
        LAYOUTS,
    ),
}
