"""Bugs of what judges draws, and of what keeps steps short; see `test_mutations`."""

WEIGHTS = "diagnostics/test_weights.py::test_standard_errors_of_weights_are_exact[1.0]"
SPREAD = "diagnostics/test_diagnosis.py::test_the_spread_of_langevin_steps_is_exact[0.6]"
REPEATED = (
    "diagnostics/test_diagnosis.py::test_standard_errors_equal_the_spread_of_repetitions[0.3]"
)
DEPTH = "diagnostics/test_diagnosis.py::test_draws_far_out_are_reported_by_their_log_density"
SHRINK = "tuning/test_visits.py::test_visits_with_exact_surrogates_shrink_by_the_step[4]"
LOOP = "tuning/test_visits.py::test_the_worst_visit_is_that_of_a_loop_in_numpy"

MUTATIONS = {
    "diagnostics/_weights.py::_differences": {
        "points are not weighted by the posterior": (
            "(log_gaussian, log_weights) -> (log_gaussian, log_gaussian)",
            WEIGHTS,
        ),
    },
    "diagnostics/_weights.py::_points_and_values": {
        "a judge by weights counts the prior twice": (
            "posterior.logprior_fn(place) -> 2 * posterior.logprior_fn(place)",
            WEIGHTS,
        ),
    },
    "diagnostics/_weights.py::check_by_weights": {
        "an approximation's own weights are those of a wider one": (
            "(1.0, np.inf, mean, covariance) -> (1.0, np.inf, mean, 1.1 * covariance)",
            WEIGHTS,
        ),
    },
    "diagnostics/_weights.py::_compare": {
        "errors of weighted moments as of one group alone": (
            "(NUM_GROUPS - 1) / NUM_GROUPS -> 1 / NUM_GROUPS ** 2",
            WEIGHTS,
        ),
    },
    "diagnostics/_moments.py::_values_and_gradients": {
        "a judge by gradients counts the prior twice": (
            "trees.add(slope, prior_slope)"
            " -> trees.add(trees.add(slope, prior_slope), prior_slope)",
            SPREAD,
        ),
        "a log density without the prior says how far out a draw is": (
            "prior + likelihood -> likelihood",
            DEPTH,
        ),
    },
    "diagnostics/_moments.py::_errors": {
        "a spread that is a variance": (
            "np.log(draws.std(0) / sd) -> 2 * np.log(draws.std(0) / sd)",
            SPREAD,
        ),
        "a bias without the gradients' mean": (
            "draws.mean(0) - middle - inverse @ steep -> draws.mean(0) - middle",
            REPEATED,
        ),
    },
    "diagnostics/_moments.py::_compare": {
        "errors of moments by gradients as of one group alone": (
            "(NUM_GROUPS - 1) / NUM_GROUPS -> 1 / NUM_GROUPS ** 2",
            REPEATED,
        ),
    },
    "tuning/_visits.py::find_worst_visits": {
        "visits begin nearer than is said": (
            "radius * directions -> radius / np.sqrt(2) * directions",
            SHRINK,
        ),
        "a visit is not multiplied by one over its probability": (
            "jnp.asarray(weight, jnp.result_type(float)) -> jnp.ones(num, jnp.result_type(float))",
            LOOP,
        ),
        "distances after visits are averaged over clients, and not their squares": (
            "np.square -> np.asarray",
            LOOP,
        ),
    },
    "tuning/_visits.py::_directions": {
        "a visit begins on one side alone": ("-common -> common", LOOP),
    },
}
