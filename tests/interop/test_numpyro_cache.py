"""`from_numpyro` returns the same functions as long as the model computes the same."""

import functools
import gc
import pickle
import weakref

import jax
import jax.monitoring
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import fedmcmc

ROWS = {"x": np.array([0.5, -1.0, 2.0], np.float32), "y": np.array([1.0, 0.0, 3.0], np.float32)}
POSITION = {"a": np.float32(0.3)}
SCALE = 1.0
TABLE = np.array([1.0, 2.0])


def with_scale(x, y, scale):
    a = numpyro.sample("a", dist.Normal(0, 2.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(a * x, scale), obs=y)


def model(x, y=None, scale=1.0):
    with_scale(x, y, scale)


def with_global(x, y=None):
    with_scale(x, y, SCALE)


def with_table(x, y=None):
    with_scale(x, y, TABLE[1])


def expected_terms(scale):
    residual = (ROWS["y"] - 0.3 * ROWS["x"]) / scale
    return -0.5 * residual**2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def compute_terms(model, **options):
    posterior = fedmcmc.from_numpyro(model, example=ROWS, check_rows=False, **options)
    return posterior, np.asarray(posterior.loglikelihood_fn(POSITION, ROWS))


def test_same_model_gives_the_same_functions():
    earlier = fedmcmc.from_numpyro(model, example=ROWS)
    shifted = {name: column + 1 for name, column in ROWS.items()}
    later = fedmcmc.from_numpyro(model, example={k: np.resize(x, 7) for k, x in shifted.items()})
    assert earlier.logprior_fn is later.logprior_fn
    assert earlier.loglikelihood_fn is later.loglikelihood_fn
    assert earlier == later and hash(earlier) == hash(later)


def test_starts_are_checked_with_the_rows_of_their_own_call():
    def bounded(y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Uniform(a - 1, a + 1), obs=y)

    keys = jax.random.split(jax.random.key(0), 20)
    for middle in (-1.0, 1.0):
        rows = {"y": np.full(3, middle, np.float32)}
        posterior = fedmcmc.from_numpyro(bounded, example=rows, check_rows=False)
        starts = np.array([posterior.init_fn(key)["a"] for key in keys])
        assert (np.abs(starts - middle) <= 1).all()


def test_changed_global_builds_again(monkeypatch):
    earlier, values = compute_terms(with_global)
    np.testing.assert_allclose(values, expected_terms(1.0), rtol=1e-5)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    later, values = compute_terms(with_global)
    np.testing.assert_allclose(values, expected_terms(3.0), rtol=1e-5)
    assert earlier.loglikelihood_fn != later.loglikelihood_fn


def test_array_changed_in_place_builds_again(monkeypatch):
    np.testing.assert_allclose(compute_terms(with_table)[1], expected_terms(2.0), rtol=1e-5)
    monkeypatch.setitem(globals(), "TABLE", TABLE.copy())
    TABLE[1] = 5.0
    np.testing.assert_allclose(compute_terms(with_table)[1], expected_terms(5.0), rtol=1e-5)


def test_changed_variable_of_a_closure_builds_again():
    scale = 1.0

    def closed(x, y=None):
        with_scale(x, y, scale)

    np.testing.assert_allclose(compute_terms(closed)[1], expected_terms(1.0), rtol=1e-5)
    scale = 0.5
    np.testing.assert_allclose(compute_terms(closed)[1], expected_terms(0.5), rtol=1e-5)


def test_changed_default_builds_again(monkeypatch):
    np.testing.assert_allclose(compute_terms(model)[1], expected_terms(1.0), rtol=1e-5)
    monkeypatch.setattr(model, "__defaults__", (None, 4.0))
    np.testing.assert_allclose(compute_terms(model)[1], expected_terms(4.0), rtol=1e-5)


def test_arguments_of_partials_are_compared():
    unit = compute_terms(functools.partial(with_scale, scale=1.0))
    double = compute_terms(functools.partial(with_scale, scale=2.0))
    unit_again = compute_terms(functools.partial(with_scale, scale=1.0))
    np.testing.assert_allclose(double[1], expected_terms(2.0), rtol=1e-5)
    np.testing.assert_array_equal(unit[1], unit_again[1])
    assert unit[0] == unit_again[0] != double[0]


def test_objects_of_methods_are_compared():
    class Study:
        def __init__(self, scale):
            self.scale = scale

        def model(self, x, y=None):
            with_scale(x, y, self.scale)

        def __call__(self, x, y=None):
            with_scale(x, y, self.scale)

    study = Study(1.0)
    for scale in (1.0, 2.0):
        study.scale = scale
        np.testing.assert_allclose(compute_terms(study.model)[1], expected_terms(scale), rtol=1e-5)
        np.testing.assert_allclose(compute_terms(study)[1], expected_terms(scale), rtol=1e-5)
        np.testing.assert_allclose(compute_terms(Study(3.0))[1], expected_terms(3.0), rtol=1e-5)


def test_handlers_are_compared():
    for factor in (1.0, 2.0):
        _, values = compute_terms(handlers.scale(model, scale=factor))
        np.testing.assert_allclose(values, factor * expected_terms(1.0), rtol=1e-5)


def test_options_are_compared():
    def effects(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        effect = numpyro.sample("effect", dist.Normal(mu, 2.0), infer={"local": True})
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    rows = {"y": np.zeros(3, np.float32)}
    centered = fedmcmc.from_numpyro(effects, example=rows, centered=1.0)
    decentered = fedmcmc.from_numpyro(effects, example=rows, centered=0.0)
    again = fedmcmc.from_numpyro(effects, example=rows, centered=1.0)
    assert set(centered.local.like.tree) == {"effect"}
    assert set(decentered.local.like.tree) == {"effect_decentered"}
    assert centered == again and centered.local.prior_spread_fn is again.local.prior_spread_fn


def test_each_data_set_is_checked():
    def coin(y):
        p = numpyro.sample("p", dist.Beta(2, 2))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Bernoulli(p), obs=y)

    fedmcmc.from_numpyro(coin, example={"y": np.array([0, 1, 1])})
    with pytest.raises(ValueError, match="row 2 of example"):
        fedmcmc.from_numpyro(coin, example={"y": np.array([0, 1, 2])})


def test_a_dropped_model_is_freed():
    def local(x, y=None):
        with_scale(x, y, 1.0)

    posterior = fedmcmc.from_numpyro(local, example=ROWS, check_rows=False)
    assert posterior.logprior_fn(POSITION).shape == ()
    watched = weakref.ref(local)
    del local, posterior
    gc.unfreeze()
    gc.collect()
    assert watched() is None


def test_a_second_fit_compiles_at_most_three_programs():
    compiled = []

    def listen(name, seconds, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(seconds)

    def data(seed):
        y = np.random.default_rng(seed).normal(1.0, 1.0, 60).astype(np.float32)
        x = np.ones(60, np.float32)
        halves = [{"x": x[:30], "y": y[:30]}, {"x": x[30:], "y": y[30:]}]
        return fedmcmc.FederatedData.from_clients(halves), y

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        counts = []
        for seed in range(2):
            federation, y = data(seed)
            fitted = fedmcmc.fit(model, federation, rng_key=jax.random.key(seed), progress=False)
            variance = 1 / (60 + 1 / 4)
            mean = variance * y.sum()
            assert abs(fitted.samples.constrained["a"].mean() - mean) < 0.1 * variance**0.5
            counts.append(len(compiled))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert counts[0] > 10
    assert counts[1] - counts[0] <= 3


def test_a_posterior_traced_after_a_change_is_not_cached(monkeypatch):
    # Nothing is traced before the global changes, so the functions follow the change.
    unchecked = fedmcmc.from_numpyro(with_global, example=ROWS, check_rows=False)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    unchecked.loglikelihood_fn(POSITION, ROWS)
    np.testing.assert_allclose(compute_terms(with_global)[1], expected_terms(3.0), rtol=1e-5)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    np.testing.assert_allclose(compute_terms(with_global)[1], expected_terms(1.0), rtol=1e-5)


def test_models_with_callbacks_are_built_again():
    def called(x, y, scale_fn):
        like = jax.ShapeDtypeStruct((), np.float32)
        with_scale(x, y, jax.pure_callback(scale_fn, like, np.float32(0)))

    for scale in (1.0, 2.0):
        bound = functools.partial(called, scale_fn=lambda _, scale=scale: np.float32(scale))
        np.testing.assert_allclose(compute_terms(bound)[1], expected_terms(scale), rtol=1e-5)


def test_a_redefined_distribution_draws_with_its_new_method():
    def define_distribution(value):
        class Constant(dist.Normal):
            def log_prob(self, y):
                return super().log_prob(y)

            def sample(self, key, sample_shape=()):
                return 0 * super().sample(key, sample_shape) + value

        return Constant

    current_class = define_distribution(1.0)

    def observed(x, y=None):
        a = numpyro.sample("a", dist.Normal(0, 2.0))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", current_class(a * x, 1.0), obs=y)

    for value in (1.0, 5.0):
        current_class = define_distribution(value)
        posterior = fedmcmc.from_numpyro(observed, example=ROWS, check_rows=False)
        drawn = jax.jit(posterior.resample_fn)(jax.random.key(0), POSITION, ROWS)
        np.testing.assert_array_equal(drawn["y"], value)


def test_a_pickled_posterior_follows_the_current_model(monkeypatch):
    content = pickle.dumps(compute_terms(with_global)[0])
    for scale in (3.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        loaded = pickle.loads(content)
        values = loaded.loglikelihood_fn(POSITION, ROWS)
        np.testing.assert_allclose(values, expected_terms(scale), rtol=1e-5)
        assert loaded.logprior_fn._origin is loaded.loglikelihood_fn._origin
