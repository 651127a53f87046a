"""Bugs of corrections and of set-up that tests must notice; see `test_mutations`."""

WEIGHTED = "exact/test_correct.py::test_weighted_draws_have_the_moments_of_the_posterior"
FAULTS = "exact/test_correct.py::test_faults_and_many_points_change_nothing"
SEPARATE = "deploy/test_setup.py::test_sites_answer_as_simulated_clients[taylor]"
PREDICTED = "fitting/test_predicted.py::test_variances_without_correlations_are_too_narrow"
DITHERED = (
    "exact/test_noise.py::test_dithered_values_cost_draws_and_keep_weights_and_evidence_exact"
)
UNIFORM = "exact/test_noise.py::test_errors_are_uniform_and_independent_of_the_value"

MUTATIONS = {
    "exact/_correct.py::CorrectionTarget._weigh": {
        "the prior counts twice in a weight": (
            "np.asarray(drawn.prior, np.float64) -> 2 * np.asarray(drawn.prior, np.float64)",
            WEIGHTED,
        ),
        "weights of draws are without the density that they were drawn from": (
            "proposal.in_strata(num).log_density(points64)"
            " -> 0 * proposal.in_strata(num).log_density(points64)",
            WEIGHTED,
        ),
    },
    "exact/_correct.py::_sum_dithers": {
        "the dithers of one client alone subtracted": (
            "dither_of(content, client, num) -> dither_of(content, 0, num)",
            DITHERED,
        ),
    },
    "exact/_correct.py::correct": {
        "the mean factor of dithered errors left in the evidence": (
            "target.log_mean_error -> 0",
            DITHERED,
        ),
    },
    "kernels/_questions.py::Question.aggregate": {
        "a sum without a client is taken": (
            "total.one.value == server_state.num_clients"
            " -> total.one.value <= server_state.num_clients",
            FAULTS,
        ),
    },
    "kernels/_evaluations.py::Evaluations.encode": {
        "rounded down instead of to the nearest": (
            "jnp.round(scaled) -> jnp.floor(scaled)",
            UNIFORM,
        ),
    },
    "kernels/_evaluations.py::dither_of": {
        "a dither of half the width": (
            "jax.random.uniform(jax.random.fold_in(key, client), (num,), dtype, -0.5, 0.5)"
            " -> jax.random.uniform(jax.random.fold_in(key, client), (num,), dtype, -0.25, 0.25)",
            UNIFORM,
        ),
    },
    "fitting/_predicted.py::predict_tail": {
        "a predicted tail in units of the variances": (
            "scales * (ahead.gradient - behind.gradient)"
            " -> scales ** 2 * (ahead.gradient - behind.gradient)",
            PREDICTED,
        ),
    },
    "kernels/_separate.py::PerClientQuestion.answer": {
        "clients answer in the first row of the table": ("client.index -> 0", SEPARATE),
    },
}
