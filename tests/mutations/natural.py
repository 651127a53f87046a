"""Bugs of FedAvg, FedPA and FedEP that their law tests must notice; see `test_mutations`."""

EP = "laws/test_fed_ep_law.py::test_every_round_is_that_of_the_loop"
SITE = f"{EP}[site-diagonal]"
AVERAGE = f"{EP}[average-scaled_identity]"
POWER = f"{EP}[power-diagonal]"
COHORT = "laws/test_fed_ep_law.py::test_cohorts_change_what_they_send[site]"
STATELESS = "laws/test_fed_ep_law.py::test_cohorts_change_what_they_send[average]"
ABSENT = "kernels/test_fed_ep.py::test_a_clients_momentum_advances_while_it_is_absent"
LEFT = "kernels/test_fed_ep.py::test_an_improper_product_is_left_again[None-average]"
RESTART = "kernels/test_fed_ep.py::test_a_client_whose_fits_are_lost_gets_a_new_site"
PER_ROW = "laws/test_fed_ep_law.py::test_scaled_identities[per row]"
FIT = "inference/test_inference.py"
LAPLACE = f"{FIT}::test_laplace_estimates_minus_the_hessian[diagonal]"
NGVI = f"{FIT}::test_a_step_of_ngvi_averages_the_information[None]"
SAMPLES = f"{FIT}::test_samples_are_the_ends_of_epochs"
CHAIN = f"{FIT}::test_moments_of_a_langevin_chain_have_their_exact_expectation"
AVG = "laws/test_fed_avg_law.py::test_every_round_of_averaging[False]"
MEMBERS = "laws/test_fed_avg_law.py::test_means_are_over_the_cohort_weighted_by_rows"
PA = "laws/test_fed_avg_law.py::test_every_round_of_posterior_averaging[True-0]"
TILTED = "inference/test_latents.py::test_moments_are_those_of_the_tilted_distribution"
ALONG = "laws/test_fed_ep_law.py::test_one_round_of_clients_that_sample_latents_along"
SAMPLED, OF_EACH = f"{ALONG}[dense]", f"{ALONG}[diagonal]"
CHAINS = "inference/_latents.py"
NATURAL, PSEUDO = "kernels/_natural.py", "kernels/_pseudo_gradients.py"

MUTATIONS = {
    "a cavity that keeps the client's own site": (
        NATURAL,
        "(q, q * site), (q / site, q))",
        "(q, q * site), (q, q))",
        SITE,
    ),
    "a site that moves undamped": (
        NATURAL,
        "self.update.update_client(",
        "replace(self.update, damping=jnp.float32(1.0)).update_client(",
        SITE,
    ),
    "a server that moves undamped": (
        NATURAL,
        "self.update.update_server(",
        "replace(self.update, damping=jnp.float32(1.0)).update_server(",
        POWER,
    ),
    "the prior in the average site": (
        NATURAL,
        "site = site ** (1 /",
        "site = server.product ** (1 /",
        AVERAGE,
    ),
    "a power without the client's share": (
        NATURAL,
        "return extra.site**client.share",
        "return extra.site ** (1 / 4)",
        POWER,
    ),
    "sites whose messages are weighted": (
        NATURAL,
        "participation = replace(participation, weighted=False)",
        "participation = replace(participation, weighted=True)",
        COHORT,
    ),
    "a stateless cohort that stands for everyone": (
        NATURAL,
        "total = total**server_state.sum_scale",
        "total = total**1",
        STATELESS,
    ),
    "an absent client's momentum that waits": (
        "kernels/_natural_update.py",
        "next_round, round_, step, (site, state)",
        "round_, round_, step, (site, state)",
        ABSENT,
    ),
    "an improper product for a cavity": (
        NATURAL,
        "falls_back = ~extra.proper",
        "falls_back = extra.proper & ~extra.proper",
        LEFT,
    ),
    "a lost client that keeps its site": (
        NATURAL,
        "falls_back |= client_state.lost",
        "falls_back |= client_state.lost & False",
        RESTART,
    ),
    "the prior counted twice": (
        NATURAL,
        "product = prior * sites",
        "product = prior * prior * sites",
        SITE,
    ),
    "variances of the precision's diagonal": (
        "gaussian/_gaussian.py",
        "variances = jnp.diagonal(q.covariance())",
        "variances = 1 / jnp.diagonal(q.precision)",
        SITE,
    ),
    "a precision that is not a row's": (
        "inference/_moments.py",
        "number = number * fit.client.size.astype(fit.client.share.dtype)",
        "number = number * fit.client.share",
        PER_ROW,
    ),
    "the mean information of a row for the client's": (
        "inference/_fisher.py",
        "in_structure(client.size.astype(per_row.dtype) * per_row, structure)",
        "in_structure(per_row, structure)",
        LAPLACE,
    ),
    "outcomes as they were observed": (
        "inference/_fisher.py",
        "rows = resample_fn(key, position, gather(client, jnp.where(mask, offsets, 0)))",
        "rows = gather(client, jnp.where(mask, offsets, 0))",
        LAPLACE,
    ),
    "gradients that are not squared": (
        "inference/_fisher.py",
        "else jnp.sum(jnp.square(gradients), axis=0)",
        "else jnp.sum(jnp.abs(gradients), axis=0)",
        LAPLACE,
    ),
    "information at the mean in place of its average": (
        "inference/_fisher.py",
        "position = unravel(ravel_pytree(q.draw(draw_key))[0])",
        "position = mean",
        NGVI,
    ),
    "a variance divided by the number": (
        "inference/_means.py",
        "divisor = max(self._num_samples - 1, 1)",
        "divisor = self._num_samples",
        SAMPLES,
    ),
    "samples that do not see the cavity": (
        "inference/_means.py",
        "ascent = trees.add(estimate, cavity.grad_log(x))",
        "ascent = estimate",
        SAMPLES,
    ),
    "chains whose noise is off by sqrt 2": (
        "inference/_means.py",
        "scale = jnp.sqrt(2 / schedules",
        "scale = jnp.sqrt(1 / schedules",
        CHAIN,
    ),
    "the whole prior in every client's loss": (
        "kernels/_shared.py",
        "prior = prior_share(client, jax.grad(self.posterior.logprior_fn)(position))",
        "prior = jax.grad(self.posterior.logprior_fn)(position)",
        AVG,
    ),
    "clients that all count alike": (
        PSEUDO,
        "weight = jnp.where(finite, client.share, 0)",
        "weight = jnp.where(finite, 0.25, 0)",
        MEMBERS,
    ),
    "a sum in place of a mean": (
        PSEUDO,
        "mean = trees.scale(1 / jnp.where(has_weight, weight, 1), total.delta)",
        "mean = total.delta",
        MEMBERS,
    ),
    "a covariance that shrinks by another number of samples": (
        PSEUDO,
        "scale = 1 + (num - 1) * summary.rho",
        "scale = 1 + num * summary.rho",
        PA,
    ),
    "an earlier solution that is not corrected": (
        PSEUDO,
        "solution = move - weights @ solved",
        "solution = move",
        PA,
    ),
    "trajectories that are judged without the cavity": (
        CHAINS,
        "+ cavity_gain + kinetic",
        "+ 0 * cavity_gain + kinetic",
        TILTED,
    ),
    "trajectories that are judged by half their kinetic energy": (
        CHAINS,
        "0.5 * jnp.sum(momentum**2 - end_momentum**2)",
        "0.25 * jnp.sum(momentum**2 - end_momentum**2)",
        TILTED,
    ),
    "latents that stand still while the position is sampled": (
        CHAINS,
        "values, slope, moved.flat, moved.kept, accepted)",
        "values, slope, state.latents, moved.kept, accepted)",
        SAMPLED,
    ),
    "a regression that is put at the mode": (
        CHAINS,
        "position = mode + metric.root @ center",
        "position = mode",
        TILTED,
    ),
    "variances in units of the metric": (
        CHAINS,
        "    away = away @ metric.root\n",
        "",
        OF_EACH,
    ),
}
