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
LAWS, LINEARIZED = "tuning/_random_maps.py", "tuning/_linearized.py"
MINIBATCHES, TWIN = "gradients/_minibatches.py", "tuning/_simulation.py"

MUTATIONS = {
    "noise of minibatches at the mode of size N instead of N^2": (
        "tuning/_constants.py",
        "sizes**2 / batch_size * scatter",
        "sizes / batch_size * scatter",
        BATCHES,
    ),
    "noise at the mode that counts its mean": (
        "tuning/_constants.py",
        "(slopes + noise) - slopes",
        "(slopes + noise)",
        NOISE,
    ),
    "a relay's constant without the probabilities of visits": (
        "tuning/_constants.py",
        "(sizes**2.0 / shares * np.asarray(x))",
        "(sizes**2.0 * len(shares) * np.asarray(x))",
        RELAY,
    ),
    "predicted noise of minibatches off by sqrt 2": (
        "tuning/_gaussian_clients.py",
        "factor = np.sqrt(np.asarray(",
        "factor = np.sqrt(2 * np.asarray(",
        MINIBATCH,
    ),
    "predicted noise of minibatches of size N instead of N^2": (
        MINIBATCHES,
        "return size**2 / num_rows * correction",
        "return size / num_rows * correction",
        MINIBATCH,
    ),
    "predicted noise of minibatches without replacement off": (
        MINIBATCHES,
        "(size - num_rows) / jnp.maximum(size - 1, 1)",
        "(size - num_rows) / size",
        MINIBATCH,
    ),
    "covariance of scores around zero": (
        "surrogates/_scores.py",
        "scores(rows, mask) - mean, 0)",
        "scores(rows, mask), 0)",
        SCORES,
    ),
    "counts of distinct clients taken for independent ones": (
        "participation/_participation.py",
        "variance = share * (1 - share) * num_clients / max(num_clients - 1, 1)",
        "variance = share * (1 - share)",
        SUM,
    ),
    "a client's own noise counted by the variance of its count": (
        LINEARIZED,
        "counts.sign * counts.common**2 + counts.mean**2",
        "counts.sign * counts.common**2",
        AVERAGE,
    ),
    "noise that clients share counted at the mean cohort": (
        LINEARIZED,
        "        noise += counts.own[i] * common @ common.T\n",
        "",
        AVERAGE,
    ),
    "cohorts that pull to different places taken for one": (
        LAWS,
        "noise = self.noise + self._over_cohorts(pulls[:, :, None], np.eye(1))",
        "noise = self.noise",
        SUM,
    ),
    "cohorts that differ in curvature taken for one": (
        LAWS,
        "noise + self._over_cohorts(self.client_maps, covariance)",
        "noise",
        SUM,
    ),
    "faults that add no variance": (
        "transforms/_faulty.py",
        "diagonal * arrives**2 + square * arrives * (1 - arrives)",
        "diagonal * arrives**2",
        FAULTS,
    ),
    "standard errors of fewer chains": (
        TWIN,
        "variances.std(0, ddof=1) / root_num / (2 * sds)",
        "variances.std(0, ddof=1) / root_num / (20 * sds)",
        SPARSE,
    ),
    "a schedule simulated at round zero": (
        TWIN,
        "number = jnp.asarray(round_, jnp.int32)",
        "number = jnp.asarray(0, jnp.int32)",
        ROUND,
    ),
    "autocorrelations of the transposed map": (
        LAWS,
        "np.linalg.solve(eye - on_position, (eye + on_position) @ covariance)",
        "np.linalg.solve(eye - on_position.T, (eye + on_position.T) @ covariance)",
        TIMES,
    ),
    "a functional that does not count": (
        "tuning/_search.py",
        "rounds = prediction.functional_rounds",
        "rounds = prediction.slowest",
        FUNCTIONAL,
    ),
    "a functional of whitened coordinates": (
        "tuning/_predictions.py",
        "functional(user_position(kernel, position))",
        "functional(position)",
        USERS,
    ),
    "rows of the first round taken for those of all": (
        "tuning/_row_counts.py",
        "float(np.mean(counts))",
        "float(counts[0])",
        ROWS,
    ),
}
