"""Bugs of what judges draws, and of what keeps steps short; see `test_mutations`."""

WEIGHTS = "diagnostics/test_weights.py::test_errors_are_those_of_the_law[1.0]"
SPREAD = "diagnostics/test_diagnosis.py::test_the_spread_of_langevin_steps_is_found[0.6]"
REPEATED = "diagnostics/test_diagnosis.py::test_standard_errors_are_those_of_repetitions[0.3]"
DEPTH = (
    "diagnostics/test_diagnosis.py::test_draws_that_were_thrown_out_are_said_by_their_log_density"
)
SHRINK = "tuning/test_visits.py::test_visits_with_exact_surrogates_shrink_by_the_step[4]"
LOOP = "tuning/test_visits.py::test_the_worst_visit_is_that_of_a_loop_in_numpy"
BY_WEIGHTS, BY_GRADIENTS = "diagnostics/_weights.py", "diagnostics/_moments.py"
VISITS = "tuning/_visits.py"

MUTATIONS = {
    "points are not weighted by the posterior": (
        BY_WEIGHTS,
        "for logs in (log_gaussian, log_weights):",
        "for logs in (log_gaussian, log_gaussian):",
        WEIGHTS,
    ),
    "a judge by weights counts the prior twice": (
        BY_WEIGHTS,
        "return likelihood + posterior.logprior_fn(place)",
        "return likelihood + 2 * posterior.logprior_fn(place)",
        WEIGHTS,
    ),
    "an approximation's own weights are those of a wider one": (
        BY_WEIGHTS,
        "Mixture.of([(1.0, np.inf, mean, covariance)])",
        "Mixture.of([(1.0, np.inf, mean, 1.1 * covariance)])",
        WEIGHTS,
    ),
    "errors of weighted moments as of one group alone": (
        BY_WEIGHTS,
        "variance = (NUM_GROUPS - 1) / NUM_GROUPS",
        "variance = 1 / NUM_GROUPS**2",
        WEIGHTS,
    ),
    "a judge by gradients counts the prior twice": (
        BY_GRADIENTS,
        "trees.ravel(trees.add(slope, prior_slope))",
        "trees.ravel(trees.add(trees.add(slope, prior_slope), prior_slope))",
        SPREAD,
    ),
    "a spread that is a variance": (
        BY_GRADIENTS,
        "return bias, np.log(draws.std(0) / sd)",
        "return bias, 2 * np.log(draws.std(0) / sd)",
        SPREAD,
    ),
    "a bias without the gradients' mean": (
        BY_GRADIENTS,
        "draws.mean(0) - middle - inverse @ steep",
        "draws.mean(0) - middle",
        REPEATED,
    ),
    "errors of moments by gradients as of one group alone": (
        BY_GRADIENTS,
        "np.sqrt((NUM_GROUPS - 1) / NUM_GROUPS * (away**2).sum(0))",
        "np.sqrt(1 / NUM_GROUPS**2 * (away**2).sum(0))",
        REPEATED,
    ),
    "visits begin nearer than is said": (
        VISITS,
        "away = radius * directions @ root.T",
        "away = radius / np.sqrt(2) * directions @ root.T",
        SHRINK,
    ),
    "a visit is not multiplied by one over its probability": (
        VISITS,
        "jnp.asarray(weight, jnp.result_type(float)),",
        "jnp.ones(num, jnp.result_type(float)),",
        LOOP,
    ),
    "a visit begins on one side alone": (
        VISITS,
        "np.concatenate([common, -common])",
        "np.concatenate([common, common])",
        LOOP,
    ),
    "distances after visits are averaged over clients, and not their squares": (
        VISITS,
        "* np.square(ratios)[..., :-2]",
        "* np.asarray(ratios)[..., :-2]",
        LOOP,
    ),
    "a log density without the prior says how far out a draw is": (
        BY_GRADIENTS,
        "return prior + likelihood, trees",
        "return likelihood, trees",
        DEPTH,
    ),
}
