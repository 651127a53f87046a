"""Bugs of corrections and of set-up that tests must notice; see `test_mutations`."""

WEIGHTED = "exact/test_correct.py::test_weighted_draws_are_the_posteriors"
FAULTS = "exact/test_correct.py::test_faults_and_many_points_change_nothing"
SEPARATE = "deploy/test_setup.py::test_what_each_client_is_asked[taylor]"
PREDICTED = "fitting/test_predicted.py::test_variances_without_correlations_are_too_narrow"
TESTS = [PREDICTED, WEIGHTED, FAULTS, SEPARATE]
CORRECT, QUESTIONS = "exact/_correct.py", "kernels/_questions.py"

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
        "whole = total.one.value == server_state.num_clients",
        "whole = total.one.value <= server_state.num_clients",
        FAULTS,
    ),
    "a predicted tail in units of the variances": (
        "fitting/_predicted.py",
        "return scales * (ahead.gradient - behind.gradient) / APART",
        "return scales**2 * (ahead.gradient - behind.gradient) / APART",
        PREDICTED,
    ),
    "clients answer in the first row of the table": (
        "kernels/_separate.py",
        "rows.at[client.index].set(leaf)",
        "rows.at[0].set(leaf)",
        SEPARATE,
    ),
}
