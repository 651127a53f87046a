"""Minibatches whose rows are transformed at random: the exact distribution, and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from tests.oracles import laws
from tests.oracles.federations import LIMIT, Federation, worst_z, z_scores
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
FEDERATION = Federation()
F = Federation.probabilities
KEY = jax.random.key(5)
JITTER = 0.7
SETTINGS = dict(step_size=0.006, num_local_steps=5, probabilities=F, temperature=0.05)


def flip_and_jitter(rng_key, rows):
    """Return rows with a random sign each, plus normals."""
    sign_key, noise_key = jax.random.split(rng_key)
    x = rows["x"]
    sign = jax.random.rademacher(sign_key, (x.shape[0], 1), x.dtype)
    return rows | {"x": sign * x + JITTER * jax.random.normal(noise_key, x.shape, x.dtype)}


def same(rng_key, rows):
    """Return the rows unchanged."""
    return rows


def run(kernel, data=FEDERATION.data, start=FEDERATION.start, **settings):
    settings = dict(num_rounds=4, progress=False) | settings
    return fedmcmc.sample(KEY, kernel, data, start, **settings)


def law(batch):
    """Return the exact distribution of DSGLD on rows with random signs and normals.

    A transformed row has mean zero and second moment ``x x' + JITTER^2 I``, and transformations of
    two rows, or of one row in two steps, are independent.
    """
    noises = []
    for rows, precision in zip(FEDERATION.rows, FEDERATION.row_precisions, strict=True):
        second = rows.T @ rows / len(rows) + JITTER**2 * np.eye(rows.shape[1])
        noises.append(len(rows) ** 2 / batch * precision @ second @ precision)
    return laws.relay(
        FEDERATION.precisions,
        np.zeros_like(FEDERATION.means),
        prior_precision=FEDERATION.prior_precision,
        prior_mean=FEDERATION.prior_mean,
        noises=np.array(noises),
        **SETTINGS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("of_estimator", [True, False])
def test_chains_have_the_exact_distribution_over_transformations(of_estimator):
    """The noise must contain rows and transformations, with new draws in each local step."""
    if of_estimator:
        settings = dict(SETTINGS)
        kernel = fedmcmc.relay(
            FEDERATION.posterior,
            fedmcmc.augmented(fedmcmc.minibatch(3), flip_and_jitter),
            participation=fedmcmc.categorical(settings.pop("probabilities")),
            **settings,
        )
    else:
        plain = fedmcmc.dsgld(FEDERATION.posterior, batch_size=3, **SETTINGS)
        kernel = fedmcmc.augment(plain, flip_and_jitter)
    draws = run(kernel, num_rounds=8, thinning=4, num_chains=NUM_CHAINS).draws
    expected = law(3).rounds(FEDERATION.start, 8)
    assert worst_z(draws[:, 0], expected[4]) < LIMIT
    assert worst_z(draws[:, 1], expected[8]) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [True, False])
def test_a_warning_names_the_posterior_that_it_compares_with(transforms):
    estimator = fedmcmc.minibatch(2)
    if transforms:
        estimator = fedmcmc.augmented(estimator, flip_and_jitter)
    kernel = fedmcmc.langevin(FEDERATION.posterior, estimator, step_size=0.01)
    with pytest.warns(fedmcmc.DiagnosisWarning, match="are not the posterior's") as record:
        run(kernel, num_rounds=3_000, num_chains=2)
    words = str(record[0].message)
    assert ("the original rows" in words) == transforms
    assert ("a smaller step" in words) == (not transforms)


def test_each_local_step_of_each_client_and_round_has_a_distinct_key():
    kernel = fedmcmc.augment(
        fedmcmc.dsgld(FEDERATION.posterior, batch_size=2, **SETTINGS), flip_and_jitter
    )
    broadcast = fedmcmc.types.Broadcast(jnp.int32(0), jnp.asarray(FEDERATION.start, jnp.float32))
    all_keys = []
    for key in jax.random.split(KEY, 3):
        for i in range(4):
            drawn = kernel.prepare(jax.random.fold_in(key, i), broadcast, FEDERATION.data.client(i))
            assert drawn.gradient.keys.shape == (5,)
            all_keys += [
                tuple(words) for words in np.asarray(jax.random.key_data(drawn.gradient.keys))
            ]
    assert len(set(all_keys)) == len(all_keys) == 60


@pytest.mark.parametrize("estimator", [fedmcmc.minibatch(4), fedmcmc.epochs(2)])
def test_rows_are_transformed_once_per_call(estimator):
    data = fedmcmc.FederatedData.from_clients([np.zeros((5, 1), np.float32)])
    client = data.client(0)
    wrapped = fedmcmc.augmented(estimator, lambda rng_key, rows: rows + 1)
    draws = wrapped.prepare(KEY, jnp.zeros(()), client, 3)

    def loglikelihood(position, rows):
        return position * rows[:, 0]

    def estimate(draws):
        return wrapped.estimate(loglikelihood, draws, jnp.zeros(()), (), client)

    # Each of the 5 rows is 0 + 1.
    assert jax.jit(jax.vmap(estimate))(draws).tolist() == [5.0] * 3


TRAINING = dict(client_optimizer=optax.sgd(0.01), batch_size=2)
KERNELS = {
    "dsgld": lambda p: fedmcmc.dsgld(p, batch_size=3, **SETTINGS),
    "fa_hmc": lambda p: fedmcmc.fa_hmc(
        p, step_size=0.02, num_integration_steps=2, num_local_steps=2, batch_size=0.5
    ),
    "fed_avg": lambda p: fedmcmc.fed_avg(p, num_local_epochs=2, **TRAINING),
    "fed_be": lambda p: fedmcmc.fed_be(p, num_local_steps=3, **TRAINING),
    "fed_ep": lambda p: fedmcmc.fed_ep(
        p,
        inference=inference.mcmc(
            inference.sgd_mean(optax.sgd(0.01), num_samples=2, batch_size=2), shrinkage=0.5
        ),
        initial_precision=1.0,
    ),
    "compressed": lambda p: fedmcmc.compress(
        fedmcmc.lsd(p, step_size=0.006, batch_size=2), fedmcmc.quantize(4)
    ),
}


@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["fa_hmc", "compressed"]))
def test_only_a_transformation_that_changes_rows_changes_draws(name):
    """With unchanged rows, draws have the same bits."""
    kernel = KERNELS[name](FEDERATION.posterior)
    start = jnp.asarray(FEDERATION.start, jnp.float32)

    def position_after_a_round(kernel):
        init, step = fedmcmc.simulate(kernel, FEDERATION.data)
        return jax.jit(step)(KEY, init(start))[0].broadcast.position

    plain = position_after_a_round(kernel)
    unchanged = position_after_a_round(fedmcmc.augment(kernel, same))
    np.testing.assert_array_equal(unchanged, plain)
    flipped = position_after_a_round(fedmcmc.augment(kernel, flip_and_jitter))
    assert np.abs(flipped - plain).max() > 1e-3


def test_chains_draw_independent_transformations():
    """Transformations are the only noise: the chain has none, and a minibatch has all rows."""
    data = fedmcmc.FederatedData.from_clients([np.zeros((2, 1), np.float32)])
    posterior = fedmcmc.Posterior(
        lambda theta: 0.0, lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1)
    )
    estimator = fedmcmc.augmented(
        fedmcmc.minibatch(2, replace=False),
        lambda rng_key, rows: rows + jax.random.normal(rng_key, rows.shape),
    )
    kernel = fedmcmc.langevin(posterior, estimator, step_size=0.1, temperature=0.0)
    draws = run(kernel, data, jnp.zeros(1), num_rounds=1, num_chains=NUM_CHAINS).draws[:, 0, 0]
    # theta' = 0.1 (z_1 + z_2).
    assert abs(z_scores(draws, 0.0)) < LIMIT
    assert abs(z_scores(np.asarray(draws, float) ** 2, 0.02)) < LIMIT
    assert abs(z_scores(draws[::2].astype(float) * draws[1::2], 0.0)) < LIMIT


POSTERIOR = FEDERATION.posterior


def dsgld(**settings):
    return fedmcmc.dsgld(POSTERIOR, step_size=0.1, num_local_steps=1, **settings)


BATCHES = fedmcmc.minibatch(2)
AUGMENTED = fedmcmc.augmented(BATCHES, same)
FIRST_ROW = fedmcmc.augment(
    dsgld(batch_size=3), lambda key, rows: jax.tree.map(lambda x: x[:1], rows)
)
HALF_PRECISION = fedmcmc.augment(
    dsgld(batch_size=3), lambda key, rows: jax.tree.map(lambda x: x.astype(jnp.float16), rows)
)
LSD_PP = fedmcmc.lsd_pp(POSTERIOR, step_size=0.1, batch_size=2, refresh_every=3)
LSD_STAR = fedmcmc.lsd_star(POSTERIOR, jnp.zeros(3), step_size=0.1, batch_size=2)
UNCHANGED = fedmcmc.augment(dsgld(batch_size=3), same)
EXACT, _ = FEDERATION.surrogates("exact")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fedmcmc.augmented(fedmcmc.full_gradient(), same),
            "augmented needs fedmcmc.minibatch or fedmcmc.epochs.*got FullGradient",
        ),
        (
            lambda: fedmcmc.svrg(AUGMENTED, 5),
            "svrg takes full passes over the original rows",
        ),
        (
            lambda: fedmcmc.scaffold(fedmcmc.noisy(AUGMENTED, 0.1)),
            "scaffold takes full passes over the original rows",
        ),
        (
            lambda: fedmcmc.augment(dsgld(), same),
            r"uses FullGradient\(\), has no minibatches whose rows could be transformed",
        ),
        (
            lambda: fedmcmc.augment(LSD_PP, same),
            "svrg, which this kernel uses, takes full passes",
        ),
        (
            lambda: fedmcmc.augment(LSD_STAR, same),
            "fixed_point, which this kernel uses, takes full passes",
        ),
        (lambda: fedmcmc.augment(UNCHANGED, same), "are transformed already"),
        (
            lambda: run(FIRST_ROW),
            r"with the shapes and types of its argument: factor must be float32\[3, 3, 3\]",
        ),
        (lambda: run(HALF_PRECISION), r"factor must be float32\[3, 3, 3\], got float16"),
        (
            lambda: fedmcmc.predict_bias(UNCHANGED, FEDERATION.data, EXACT),
            "supports no augmentation",
        ),
    ],
)
def test_unsuitable_estimators_and_kernels_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_arguments_of_a_wrong_type_are_refused():
    with pytest.raises(TypeError, match="augment_fn must be a function"):
        fedmcmc.augmented(BATCHES, 0.1)
    with pytest.raises(TypeError, match=r"kernel must be a fedmcmc\.FederatedKernel"):
        fedmcmc.augment(BATCHES, same)
