"""Bugs of FedAvg, FedPA and FedEP that their law tests must notice; see `test_mutations`."""

EP = "laws/test_fed_ep_law.py::test_every_round_is_that_of_the_loop"
SITE = f"{EP}[site-diagonal]"
AVERAGE = f"{EP}[average-scaled_identity]"
POWER = f"{EP}[power-diagonal]"
UNEQUAL = (
    "kernels/test_fed_ep.py"
    "::test_the_product_is_that_of_the_sites_if_clients_take_part_unequally_often"
)
STATELESS = "laws/test_fed_ep_law.py::test_cohorts_change_what_they_send[average]"
ABSENT = "kernels/test_fed_ep.py::test_momenta_of_server_and_clients_advance_together[1]"
LEFT = "kernels/test_fed_ep.py::test_a_run_recovers_from_an_improper_product[2-site]"
RESTART = "kernels/test_fed_ep.py::test_a_client_whose_fits_are_lost_gets_a_new_site"
PER_ROW = "laws/test_fed_ep_law.py::test_scaled_identities_follow_the_loop[per row]"
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

MUTATIONS = {
    "kernels/_natural.py::Natural._cavity": {
        "a cavity that keeps the client's own site": ("q / site -> q", SITE),
        "an improper product for a cavity": (
            "falls_back &= extra.ever_proper -> falls_back = extra.proper & ~extra.proper",
            LEFT,
        ),
        "a lost client that keeps its site": (
            "client_state.lost -> client_state.lost & False",
            RESTART,
        ),
    },
    "kernels/_natural.py::Natural.commit": {
        "a site that moves undamped": (
            "self.update -> replace(self.update, damping=jnp.float32(1.0))",
            SITE,
        ),
    },
    "kernels/_natural.py::Natural.aggregate": {
        "a server that moves undamped": (
            "self.update.update_server"
            " -> replace(self.update, damping=jnp.float32(1.0)).update_server",
            POWER,
        ),
        "a stateless cohort that stands for everyone": (
            "total ** server_state.sum_scale -> total ** 1",
            STATELESS,
        ),
    },
    "kernels/_natural.py::Natural._extra": {
        "the prior in the average site": (
            "site ** (1 / server.num_clients.astype(jnp.result_type(float)))"
            " -> server.product ** (1 / server.num_clients.astype(jnp.result_type(float)))",
            AVERAGE,
        ),
    },
    "kernels/_natural.py::Natural._site": {
        "a power without the client's share": ("client.share -> 1 / 4", POWER),
    },
    "kernels/_natural.py::natural": {
        "sites whose messages are weighted": (
            "replace(participation, weighted=False) -> replace(participation, weighted=True)",
            UNEQUAL,
        ),
    },
    "kernels/_natural.py::Natural.server_init": {
        "the prior counted twice": ("prior * sites -> prior * prior * sites", SITE),
    },
    "kernels/_natural_update.py::NaturalUpdate.catch_up": {
        "an absent client's momentum that waits": (
            "jax.lax.fori_loop(next_round, round_, step, (site, state))"
            " -> jax.lax.fori_loop(round_, round_, step, (site, state))",
            ABSENT,
        ),
    },
    "gaussian/_gaussian.py::project": {
        "variances of the precision's diagonal": (
            "jnp.diagonal(q.covariance()) -> 1 / jnp.diagonal(q.precision)",
            SITE,
        ),
    },
    "inference/_moments.py::ScaledIdentity.precision": {
        "a precision that is not a row's": (
            "fit.client.size.astype(fit.client.share.dtype) -> fit.client.share",
            PER_ROW,
        ),
    },
    "inference/_fisher.py::Laplace.information": {
        "the mean information of a row for the client's": (
            "client.size.astype(per_row.dtype) * per_row -> per_row",
            LAPLACE,
        ),
    },
    "inference/_fisher.py::fisher": {
        "outcomes as they were observed": (
            "resample_fn(key, position, gather(client, jnp.where(mask, offsets, 0)))"
            " -> gather(client, jnp.where(mask, offsets, 0))",
            LAPLACE,
        ),
        "gradients that are not squared": ("jnp.square -> jnp.abs", LAPLACE),
    },
    "inference/_fisher.py::Ngvi.information": {
        "information at the mean in place of its average": (
            "unravel(ravel_pytree(q.draw(draw_key))[0]) -> mean",
            NGVI,
        ),
    },
    "inference/_means.py::SampleMean.find": {
        "a variance divided by the number": (
            "max(self._num_samples - 1, 1) -> self._num_samples",
            SAMPLES,
        ),
        "samples that do not see the cavity": (
            "trees.add(estimate, cavity.grad_log(x)) -> estimate",
            SAMPLES,
        ),
    },
    "inference/_means.py::LangevinMean.descent": {
        "chains whose noise is off by sqrt 2": (
            "2 / schedules.value(self.step_size, round_)"
            " -> 1 / schedules.value(self.step_size, round_)",
            CHAIN,
        ),
    },
    "kernels/_shared.py::LocalTraining.train": {
        "the whole prior in every client's loss": (
            "prior_share(client, jax.grad(self.posterior.logprior_fn)(position))"
            " -> jax.grad(self.posterior.logprior_fn)(position)",
            AVG,
        ),
    },
    "kernels/_pseudo_gradients.py::PseudoGradients.step": {
        "clients that all count alike": ("client.share -> 0.25", MEMBERS),
    },
    "kernels/_pseudo_gradients.py::PseudoGradients.aggregate": {
        "a sum in place of a mean": (
            "trees.scale(1 / jnp.where(has_weight, weight, 1), total.delta) -> total.delta",
            MEMBERS,
        ),
    },
    "kernels/_pseudo_gradients.py::PosteriorDelta.finish": {
        "a covariance that shrinks by another number of samples": ("num - 1 -> num", PA),
    },
    "kernels/_pseudo_gradients.py::_add_sample": {
        "an earlier solution that is not corrected": ("move - weights @ solved -> move", PA),
    },
    "inference/_latents.py::_Chain.trajectory": {
        "trajectories that are judged without the cavity": (
            "jnp.sum(values - state.values) + cavity_gain"
            " -> jnp.sum(values - state.values) + 0 * cavity_gain",
            TILTED,
        ),
        "trajectories that are judged by half their kinetic energy": (
            "0.5 * jnp.sum(momentum ** 2 - end_momentum ** 2)"
            " -> 0.25 * jnp.sum(momentum ** 2 - end_momentum ** 2)",
            TILTED,
        ),
    },
    "inference/_latents.py::_Chain.move": {
        "latents that stand still while the position is sampled": (
            "_ChainState(state.shift, values, slope, moved.flat, moved.kept, accepted)"
            " -> _ChainState(state.shift, values, slope, state.latents, moved.kept, accepted)",
            SAMPLED,
        ),
    },
    "inference/_latents.py::_fit_site": {
        "a regression that is put at the mode": ("mode + metric.root @ center -> mode", TILTED),
        "variances in units of the metric": ("away = away @ metric.root -> pass", OF_EACH),
    },
}
