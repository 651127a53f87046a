"""Bugs of predictions that their law tests must notice; see `test_mutations`."""

MAPS = "tuning/test_random_maps.py"
MINIBATCH = f"{MAPS}::test_minibatches_have_the_predicted_moments[lsd-False]"
SCORES = f"{MAPS}::test_score_covariances_are_the_covariances_over_rows"
SUM = (
    f"{MAPS}::test_langevin_kernels_of_cohorts_have_the_predicted_moments_and_bits[server-uniform]"
)
AVERAGE = f"{MAPS}::test_averages_of_cohorts_have_the_predicted_moments[uniform]"
FAULTS = f"{MAPS}::test_faults_make_cohorts_smaller[dropped]"
SPARSE = "tuning/test_simulation.py::test_sparsified_messages_have_the_predicted_moments[star]"
ROUND = "tuning/test_simulation.py::test_a_schedule_has_its_value_in_the_predicted_round"
TIMES = "tuning/test_tune.py::test_autocorrelation_times_are_sums_over_lags[fa_hmc]"
COSTS = "tuning/test_tune_costs.py"
FUNCTIONAL = f"{COSTS}::test_the_functional_of_the_user_mixes_fastest[(0.0, 1.0)]"
USERS = f"{COSTS}::test_a_functional_takes_the_users_coordinates"
ROWS = f"{COSTS}::test_a_round_has_the_rows_of_its_gradients[lsd_pp]"
CONSTANTS = "tuning/test_constants.py"
NOISE = f"{CONSTANTS}::test_noise_at_a_position_is_the_noise_of_rounds[compressor1-2-0.6]"
BATCHES = f"{CONSTANTS}::test_noise_at_a_position_is_the_noise_of_rounds[None-2-1.0]"
RELAY = f"{CONSTANTS}::test_noise_of_a_relay_with_exact_surrogates_is_its_constant"

MUTATIONS = {
    "tuning/_constants.py::noise_at_mode": {
        "noise of minibatches at the mode of size N instead of N^2": (
            "sizes ** 2 / batch_size -> sizes / batch_size",
            BATCHES,
        ),
        "noise at the mode that counts its mean": (
            "(omega + 1) / probability * (slopes + noise) - slopes"
            " -> (omega + 1) / probability * (slopes + noise)",
            NOISE,
        ),
    },
    "tuning/_constants.py::relay_constants": {
        "a relay's constant without the probabilities of visits": (
            "sizes ** 2.0 / shares -> sizes ** 2.0 * len(shares)",
            RELAY,
        ),
    },
    "gradients/_minibatches.py::Minibatch.variance_factor": {
        "predicted noise of minibatches of size N instead of N^2": ("size ** 2 -> size", MINIBATCH),
        "predicted noise of minibatches without replacement off": (
            "jnp.maximum(size - 1, 1) -> size",
            MINIBATCH,
        ),
    },
    "surrogates/_scores.py::ScoreCovariances.own": {
        "covariance of scores around zero": (
            "scores(rows, mask) - mean -> scores(rows, mask)",
            SCORES,
        ),
    },
    "participation/_participation.py::Uniform.counts": {
        "counts of distinct clients taken for independent ones": (
            "share * (1 - share) * num_clients / max(num_clients - 1, 1) -> share * (1 - share)",
            SUM,
        ),
    },
    "tuning/_linearized.py::_linearize_cohorts": {
        "a client's own noise counted by the variance of its count": (
            "counts.own + counts.sign * counts.common ** 2 + counts.mean ** 2"
            " -> counts.own + counts.sign * counts.common ** 2",
            AVERAGE,
        ),
        "noise that clients share counted at the mean cohort": (
            "noise += counts.own[i] * common @ common.T -> pass",
            AVERAGE,
        ),
    },
    "tuning/_random_maps.py::RandomMap.stationary": {
        "cohorts that pull to different places taken for one": (
            "self.noise + self._over_cohorts(pulls[:, :, None], np.eye(1)) -> self.noise",
            SUM,
        ),
        "cohorts that differ in curvature taken for one": (
            "noise + self._over_cohorts(self.client_maps, covariance) -> noise",
            SUM,
        ),
    },
    "tuning/_random_maps.py::_sum_autocovariances": {
        "autocorrelations of the transposed map": (
            "np.linalg.solve(eye - on_position, (eye + on_position) @ covariance)"
            " -> np.linalg.solve(eye - on_position.T, (eye + on_position.T) @ covariance)",
            TIMES,
        ),
    },
    "transforms/_faulty.py::FaultyParticipation.counts": {
        "faults that add no variance": (
            "diagonal * arrives ** 2 + square * arrives * (1 - arrives) -> diagonal * arrives ** 2",
            FAULTS,
        ),
    },
    "tuning/_simulation.py::_estimate_moments": {
        "standard errors of fewer chains": ("2 * sds -> 20 * sds", SPARSE),
    },
    "tuning/_simulation.py::simulate_chains": {
        "a schedule simulated at round zero": (
            "jnp.asarray(round_, jnp.int32) -> jnp.asarray(0, jnp.int32)",
            ROUND,
        ),
    },
    "tuning/_search.py::StepSizeSearch._try": {
        "a functional that does not count": (
            "prediction.functional_rounds -> prediction.slowest",
            FUNCTIONAL,
        ),
    },
    "tuning/_predictions.py::_gradient": {
        "a functional of whitened coordinates": (
            "user_position(kernel, position) -> position",
            USERS,
        ),
    },
    "tuning/_row_counts.py::count_rows_per_round": {
        "rows of the first round taken for those of all": ("np.mean(counts) -> counts[0]", ROWS),
    },
}
