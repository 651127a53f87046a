"""Bugs of corrections and of set-up that tests must notice; see `test_mutations`."""

WEIGHTED = "exact/test_correct.py::test_weighted_draws_have_the_moments_of_the_posterior"
FAULTS = "exact/test_correct.py::test_faults_and_many_points_change_nothing"
SEPARATE = "deploy/test_setup.py::test_what_each_client_is_asked[taylor]"
PREDICTED = "fitting/test_predicted.py::test_variances_without_correlations_are_too_narrow"
DITHERED = (
    "exact/test_noise.py::test_dithered_values_cost_draws_and_keep_weights_and_evidence_exact"
)
UNIFORM = "exact/test_noise.py::test_errors_are_uniform_and_independent_of_the_value"
CORRECT, QUESTIONS = "exact/_correct.py", "kernels/_questions.py"
EVALUATIONS = "kernels/_evaluations.py"

MUTATIONS = {
    "the prior counts twice in a weight": (
        CORRECT,
        "log_target = value + np.asarray(prior, np.float64)",
        "log_target = value + 2 * np.asarray(prior, np.float64)",
        WEIGHTED,
    ),
    "clients' log likelihoods count twice in a weight": (
        CORRECT,
        "value = np.array(answer.value, np.float64)",
        "value = 2 * np.array(answer.value, np.float64)",
        WEIGHTED,
    ),
    "weights of draws are without the density that they were drawn from": (
        CORRECT,
        "log_ratios = log_target - proposal.in_strata(num).log_density(points64)",
        "log_ratios = log_target - 0 * proposal.in_strata(num).log_density(points64)",
        WEIGHTED,
    ),
    "a sum without a client is taken": (
        QUESTIONS,
        "is_complete = total.one.value == server_state.num_clients",
        "is_complete = total.one.value <= server_state.num_clients",
        FAULTS,
    ),
    "a dither that is not subtracted": (
        CORRECT,
        "value -= float(content.step) * added",
        "value -= 0 * added",
        DITHERED,
    ),
    "the dithers of one client alone subtracted": (
        CORRECT,
        "return total + dither_of(content, client, num), None",
        "return total + dither_of(content, 0, num), None",
        DITHERED,
    ),
    "the mean factor of dithered errors left in the evidence": (
        CORRECT,
        "            - target.log_mean_error\n",
        "",
        DITHERED,
    ),
    "rounded down instead of to the nearest": (
        EVALUATIONS,
        "jnp.round(scaled)",
        "jnp.floor(exact)",
        UNIFORM,
    ),
    "a dither of half the width": (
        EVALUATIONS,
        "(num,), dtype, -0.5, 0.5)",
        "(num,), dtype, -0.25, 0.25)",
        UNIFORM,
    ),
    "a predicted tail in units of the variances": (
        "fitting/_predicted.py",
        "return scales * (ahead.gradient - behind.gradient) / DIFFERENCE_SDS",
        "return scales**2 * (ahead.gradient - behind.gradient) / DIFFERENCE_SDS",
        PREDICTED,
    ),
    "clients answer in the first row of the table": (
        "kernels/_separate.py",
        "rows.at[client.index].set(leaf)",
        "rows.at[0].set(leaf)",
        SEPARATE,
    ),
}
