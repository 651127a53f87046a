"""How every kernel of the table of contracts is built: ``build(position, given)``."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import inference
from fedmcmc.dynamics import preconditioners
from fedmcmc.pytrees import trees
from fedmcmc.types import Local, Shapes, Static
from tests.contracts.model import LEVELS, RATES, P, jittered, surrogates


def build_relay(position, given):
    del position
    return fedmcmc.relay(
        given.posterior,
        fedmcmc.noisy(fedmcmc.full_gradient(), 0.5 * given.scale),
        participation=fedmcmc.categorical(given.table(P)),
        step_size=given.step_size,
    )


def build_sgld(position, given):
    del position
    return fedmcmc.sgld(given.posterior, step_size=given.step_size, batch_size=2)


def build_dsgld(position, given):
    del position
    return fedmcmc.dsgld(
        given.posterior, step_size=given.step_size, num_local_steps=2, batch_size=2
    )


def build_fsgld(position, given):
    return fedmcmc.fsgld(
        given.posterior,
        given.table(surrogates(position)),
        step_size=given.step_size,
        num_local_steps=2,
        probabilities=given.table(P),
    )


def build_refreshed(position, given):
    return fedmcmc.fsgld(
        given.posterior,
        given.table(surrogates(position)),
        step_size=given.step_size,
        num_local_steps=2,
        batch_size=2,
        probabilities=given.table(P),
        alpha=0.5 * given.scale,
        refresh_every=1,
        refresh_until=20 * given.scale,
    )


def build_langevin(position, given):
    del position
    return fedmcmc.langevin(
        given.posterior,
        fedmcmc.noisy(fedmcmc.minibatch(2, replace=False), 0.1 * given.scale),
        step_size=given.step_size,
        temperature=0.5 * given.scale,
        participation=fedmcmc.bernoulli(given.table(P)),
        prior="split",
        preconditioner=preconditioners.rms(0.4 * given.scale, 1e-3),
    )


def build_noisy_messages(position, given):
    del position
    kernel = fedmcmc.langevin(
        given.posterior, fedmcmc.minibatch(2), step_size=given.step_size, noise="clients"
    )
    return fedmcmc.share_momentum(kernel, 0.3 * given.scale)


def build_underdamped(position, given):
    del position
    return fedmcmc.underdamped(
        given.posterior,
        fedmcmc.minibatch(2),
        step_size=given.step_size,
        friction=2.0 * given.scale,
        participation=fedmcmc.bernoulli(given.table(P)),
    )


def build_lsd(position, given):
    del position
    return fedmcmc.lsd(
        given.posterior,
        step_size=given.step_size,
        batch_size=2,
        participation=fedmcmc.uniform(2),
    )


def build_qlsd(position, given):
    del position
    return fedmcmc.qlsd(
        given.posterior,
        step_size=given.step_size,
        compressor=fedmcmc.quantize(given.levels),
        batch_size=2,
        participation=fedmcmc.bernoulli(0.4 * given.scale, rescale="realised"),
    )


def centre(position, given):
    return jax.tree.map(lambda x: x + 0.5 * given.scale, position)


def build_lsd_star(position, given):
    return fedmcmc.lsd_star(
        given.posterior, centre(position, given), step_size=given.step_size, batch_size=2
    )


def build_qlsd_star(position, given):
    return fedmcmc.qlsd_star(
        given.posterior,
        centre(position, given),
        compressor=fedmcmc.quantize(given.table(LEVELS) * given.scale),
        step_size=given.step_size,
        batch_size=0.5,
        participation=fedmcmc.bernoulli(given.table(P)),
        prior="split",
    )


def build_lsd_pp(position, given):
    del position
    return fedmcmc.lsd_pp(
        given.posterior,
        step_size=given.step_size,
        batch_size=2,
        refresh_every=2,
        participation=fedmcmc.uniform(2),
    )


def build_qlsd_pp(position, given):
    del position
    return fedmcmc.qlsd_pp(
        given.posterior,
        compressor=fedmcmc.quantize(given.levels),
        memory_rate=given.table(RATES) * given.scale,
        step_size=given.step_size,
        batch_size=2,
        refresh_every=2,
        participation=fedmcmc.bernoulli(given.table(P)),
    )


def build_psgld(position, given):
    del position
    return fedmcmc.psgld(
        given.posterior, step_size=given.step_size, batch_size=2, decay=0.4 * given.scale
    )


def build_consensus(position, given):
    del position
    return fedmcmc.consensus(
        given.posterior,
        fedmcmc.noisy(fedmcmc.minibatch(2), 0.1 * given.scale),
        step_size=given.table(P) * given.step_size,
        num_local_steps=2,
        tolerance=0.2 * given.scale,
    )


def build_dg_sgld(position, given):
    del position
    return fedmcmc.dg_sgld(
        given.posterior,
        step_size=given.step_size,
        num_local_steps=2,
        tolerance=given.table(P) * given.scale,
        batch_size=2,
    )


def build_shared_noise(position, given):
    return fedmcmc.share_momentum(build_dg_sgld(position, given), 0.5 * given.scale)


OPTIMIZER = optax.sgd(0.05, momentum=0.5)
ADAM = optax.adam(0.1)


def logits(position, inputs):
    return inputs * ravel_pytree(position)[0][0]


def build_ensemble(position, given):
    del position
    return fedmcmc.ensemble(
        given.posterior,
        fedmcmc.svrg(fedmcmc.minibatch(2), 2),
        fedmcmc.kernels.dirichlet_ensemble(0.5 * given.scale, num_models=2),
        client_optimizer=OPTIMIZER,
        num_local_steps=2,
        participation=fedmcmc.uniform(2),
        distill=fedmcmc.distillation(
            logits,
            jnp.arange(6.0).reshape(3, 2),
            optimizer=OPTIMIZER,
            num_steps=2,
        ),
    )


def build_fed_be(position, given):
    del position
    return fedmcmc.fed_be(
        given.posterior,
        client_optimizer=OPTIMIZER,
        num_local_steps=2,
        batch_size=2,
        learning_rate=given.scale,
        participation=fedmcmc.uniform(2),
    )


def build_averaging(position, given):
    return fedmcmc.averaging(
        given.posterior,
        fedmcmc.conducive(
            fedmcmc.noisy(fedmcmc.full_gradient(), 0.1 * given.scale, weighted=True),
            given.table(surrogates(position)),
        ),
        integrator=fedmcmc.dynamics.leapfrog(
            3,
            gradients="reuse",
            inverse_mass_matrix=jax.tree.map(lambda x: jnp.full_like(x, given.scale), position),
        ),
        step_size=given.step_size,
        num_local_steps=2,
        momentum=fedmcmc.dynamics.independent_momentum(),
        participation=fedmcmc.categorical(given.table(P), cohort_size=2),
    )


def build_fa_ld(position, given):
    del position
    return fedmcmc.fa_ld(
        given.posterior,
        step_size=given.step_size,
        num_local_steps=3,
        batch_size=2,
        weights=given.table(P),
        participation=fedmcmc.bernoulli(0.4 * given.scale, rescale="realised"),
    )


def build_fa_hmc(position, given):
    del position
    return fedmcmc.fa_hmc(
        given.posterior,
        step_size=5 * given.step_size,
        num_integration_steps=3,
        num_local_steps=2,
        rho=0.4 * given.scale,
        batch_size=2,
        gradient_noise=0.1 * given.scale,
        control_variate=True,
    )


def build_sequence(position, given):
    del position
    settings = dict(step_size=given.step_size, batch_size=2)
    return fedmcmc.sequence(
        fedmcmc.fa_hmc(
            given.posterior,
            num_integration_steps=2,
            num_local_steps=2,
            rho=0.4 * given.scale,
            control_variate=True,
            **settings,
        ),
        fedmcmc.lsd_pp(given.posterior, refresh_every=2, **settings),
    )


def build_fed_avg(position, given):
    del position
    return fedmcmc.fed_avg(
        given.posterior,
        client_optimizer=OPTIMIZER,
        num_local_epochs=2,
        batch_size=2,
        server_optimizer=ADAM,
        cohort_size=2,
        client_learning_rate=given.scale,
    )


def build_fed_pa(position, given):
    del position
    return fedmcmc.fed_pa(
        given.posterior,
        client_optimizer=OPTIMIZER,
        shrinkage=0.1 * given.scale,
        num_samples=3,
        num_burnin=1,
        batch_size=2,
        participation=fedmcmc.uniform(2),  # someone each round, so that a chain always moves
    )


def build_pseudo_gradients(position, given):
    del position
    return fedmcmc.pseudo_gradients(
        given.posterior,
        fedmcmc.scaffold(fedmcmc.minibatch(2)),
        fedmcmc.kernels.posterior_delta(0.3),
        training=fedmcmc.dynamics.training(
            OPTIMIZER, fedmcmc.dynamics.Length(3, num_steps=2), 0.5 * given.scale
        ),
    )


def tilted_mean(given):
    return inference.sgd_mean(
        OPTIMIZER, num_samples=3, batch_size=2, learning_rate=given.scale, weight_decay=0.1
    )


def build_fed_ep(position, given):
    del position
    return fedmcmc.fed_ep(
        given.posterior,
        inference=inference.mcmc(tilted_mean(given), shrinkage=0.2 * given.scale),
        cohort_size=2,
        damping=0.2 * given.scale,
        initial_precision=0.5,
        server_optimizer=OPTIMIZER,
        client_optimizer=OPTIMIZER,
        max_norm=50.0 * given.scale,
    )


def build_fed_ep_at_rest(position, given):
    del position
    return fedmcmc.fed_ep(
        given.posterior,
        inference=inference.importance(32),
        first_sites="expansion",
        damping=0.4 * given.scale,
    )


def build_fed_ep_of_latents(position, given):
    del position
    refresh = fedmcmc.hierarchy.independence(5 * given.scale)
    return fedmcmc.fed_ep(
        with_latents(given.posterior),
        inference=inference.mcmc_local(refresh, num_samples=40, num_burnin=2, thinning=2),
        cohort_size=2,
        damping=0.4 * given.scale,
        structure="dense",
    )


def build_natural_parameters(position, given):
    return fedmcmc.natural_parameters(
        build_fed_ep(position, given),
        damping=0.4 * given.scale,
        server_optimizer=OPTIMIZER,
        max_norm=5.0 * given.scale,
    )


def build_fed_sep(position, given):
    del position
    return fedmcmc.fed_sep(
        given.posterior,
        inference=inference.scaled_identity(tilted_mean(given), precision_per_row=given.scale),
        structure="scaled_identity",
        damping=0.2,
        participation=fedmcmc.bernoulli(given.table(P)),
    )


def build_adf(position, given):
    del position
    return fedmcmc.adf(
        given.posterior,
        inference=inference.mcmc(
            tilted_mean(given), shrinkage=0.1, clip=2.0, match_precision_per_row=given.scale
        ),
        participation=fedmcmc.uniform(1),
        structure="dense",
    )


def build_natural(position, given):
    return fedmcmc.natural(
        given.posterior,
        inference.scaled_identity(tilted_mean(given), variance=0.3 * given.scale),
        cavity="none",
        damping=0.5,
        prior=fedmcmc.Gaussian(position, jax.tree.map(jnp.ones_like, position), "diagonal"),
    )


def build_hmc(position, given):
    return fedmcmc.hmc(
        given.posterior,
        centre(position, given),
        step_size=20 * given.step_size,
        max_integration_steps=3,
        metric=jax.tree.map(lambda x: jnp.full_like(x, 0.5 * given.scale), position),
        num_adapt=4 * given.scale,
    )


def build_noisy_hmc(position, given):
    return fedmcmc.hmc(
        given.posterior,
        centre(position, given),
        step_size=20 * given.step_size,
        max_integration_steps=2,
        value_noise=0.5 * given.scale,
    )


def build_mala(position, given):
    metric = 0.1 * given.scale * np.eye(trees.num_elements(position))
    return fedmcmc.mala(given.posterior, centre(position, given), metric=metric)


def approximation(position, given):
    variance = jax.tree.map(lambda x: jnp.full_like(x, 0.3 * given.scale), position)
    return fedmcmc.Gaussian.from_moments(centre(position, given), variance=variance)


def build_gaussian_mh(position, given):
    return fedmcmc.gaussian_mh(
        given.posterior, approximation(position, given), correlation=0.4 * given.scale
    )


def build_independence(position, given):
    return fedmcmc.gaussian_mh(given.posterior, approximation(position, given))


def build_multiple_try(position, given):
    q = fedmcmc.Gaussian.uniform(position, "dense")
    dense = fedmcmc.Gaussian(q.precision_mean, q.precision + 3 * np.eye(len(q.precision)), "dense")
    return fedmcmc.multiple_try(given.posterior, dense**given.scale, num_tries=5)


@cache
def with_latents(posterior, row_parameters=None):
    """Return a posterior with a number per group by which its rows are shifted.

    `row_parameters` says of each leaf of a position whether it is one of rows, too; by default all are.
    """

    def logprior_fn(position, latent):
        return -0.5 * (latent - jnp.sum(ravel_pytree(position)[0])) ** 2

    def loglikelihood_fn(position, latents, rows):
        leaves, treedef = jax.tree.flatten(position)
        flags = [True] * len(leaves) if row_parameters is None else row_parameters
        seen = [x if flag else jnp.zeros_like(x) for x, flag in zip(leaves, flags, strict=True)]
        shifted = {"x": rows["x"] - latents[:, None]}
        return posterior.loglikelihood_fn(jax.tree.unflatten(treedef, seen), shifted)

    def origin_fn(position):
        return jnp.sum(ravel_pytree(position)[0])

    def statistics_fn(latent, origin):
        return latent - origin, (latent - origin) ** 2

    def logdensity_fn(position, sums):
        mean, (first, second) = origin_fn(position) - sums.origin, sums.total
        return -0.5 * (second - 2 * mean * first + sums.num_latents * mean**2)

    flags = () if row_parameters is None else row_parameters

    population = fedmcmc.types.Population(
        statistics_fn,
        logdensity_fn,
        origin_fn=origin_fn,
        row_parameters=Static(flags),
    )
    like = Shapes(jax.ShapeDtypeStruct((), jnp.result_type(float)))
    local = Local(logprior_fn, loglikelihood_fn, like, population=population)
    return posterior._replace(loglikelihood_fn=None, local=local)


def build_joint(position, given):
    return fedmcmc.lsd(
        with_latents(given.posterior),
        step_size=given.step_size,
        refresh=fedmcmc.hierarchy.ula(0.2 * given.scale, num_steps=2),
        num_draws=2,
        metric=jax.tree.map(lambda x: jnp.full_like(x, 0.5 * given.scale), position),
        participation=fedmcmc.bernoulli(given.table(P)),
    )


def build_gibbs(position, given):
    none = (False,) * len(jax.tree.leaves(position))
    return fedmcmc.fed_gibbs(
        with_latents(given.posterior, none),
        refresh=fedmcmc.hierarchy.independence(5 * given.scale, num_tries=2),
        server_moves=1,
        participation=fedmcmc.bernoulli(given.table(P)),
    )


def build_gibbs_of_rows(position, given):
    first = tuple(i == 0 for i in range(len(jax.tree.leaves(position))))
    return fedmcmc.fed_gibbs(
        with_latents(given.posterior, first),
        refresh=fedmcmc.hierarchy.independence(num_tries=2),
        server_moves=1,
        num_adapt=4 * given.scale,
        recenter=True,
    )


def build_augment(position, given):
    return fedmcmc.augment(build_dsgld(position, given), jittered)


def build_augmented_training(position, given):
    return fedmcmc.augment(build_fed_avg(position, given), jittered)


PLAIN = {
    "sgld": build_sgld,
    "dsgld": build_dsgld,
    "fsgld": build_fsgld,
    "fsgld: refreshed": build_refreshed,
    "relay": build_relay,
    "langevin": build_langevin,
    "langevin: noise of clients": build_noisy_messages,
    "underdamped": build_underdamped,
    "augment": build_augment,
    "augment: fed_avg": build_augmented_training,
    "lsd": build_lsd,
    "lsd: latents": build_joint,
    "qlsd": build_qlsd,
    "lsd_star": build_lsd_star,
    "qlsd_star": build_qlsd_star,
    "lsd_pp": build_lsd_pp,
    "qlsd_pp": build_qlsd_pp,
    "psgld": build_psgld,
    "consensus": build_consensus,
    "dg_sgld": build_dg_sgld,
    "share_momentum: dg_sgld": build_shared_noise,
    "ensemble": build_ensemble,
    "fed_be": build_fed_be,
    "averaging": build_averaging,
    "fa_ld": build_fa_ld,
    "fa_hmc": build_fa_hmc,
    "sequence": build_sequence,
    "fed_avg": build_fed_avg,
    "fed_pa": build_fed_pa,
    "pseudo_gradients": build_pseudo_gradients,
    "fed_ep": build_fed_ep,
    "fed_ep: expansions": build_fed_ep_at_rest,
    "fed_ep: latents": build_fed_ep_of_latents,
    "natural_parameters: fed_ep": build_natural_parameters,
    "fed_sep": build_fed_sep,
    "adf": build_adf,
    "natural": build_natural,
    "fed_gibbs": build_gibbs,
    "fed_gibbs: of rows": build_gibbs_of_rows,
    "hmc": build_hmc,
    "hmc: noise": build_noisy_hmc,
    "mala": build_mala,
    "gaussian_mh": build_gaussian_mh,
    "gaussian_mh: independent": build_independence,
    "multiple_try": build_multiple_try,
    # Further kernels: a line here, and a pair in `COMPRESSED` of `tables.py`.
}
