"""Bad input: one clear error that says what was given and what is expected, and nothing lost."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.runs import _executors as module
from fedmcmc.runs import _pace

POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients([np.ones((3, 2)), np.zeros((2, 2))])


def surrogates(num_clients=2, dim=2):
    return fedmcmc.Gaussian.from_moments(
        jnp.zeros((num_clients, dim)), variance=jnp.ones((num_clients, dim))
    )


def run(kernel, position=None, data=DATA, **settings):
    settings = {"num_rounds": 4, "progress": False, **settings}
    start = jnp.zeros(2) if position is None else position
    return fedmcmc.sample(jax.random.key(0), kernel, data, start, **settings)


def fsgld(q=None, **settings):
    settings = {"step_size": 0.01, "num_local_steps": 2, **settings}
    return fedmcmc.fsgld(POSTERIOR, surrogates() if q is None else q, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(fsgld(surrogates(3))), r"2 clients.*\(3, 2\)"),
        (lambda: run(fsgld(surrogates(2, 5))), r"positions of shapes \(2,\)"),
        (lambda: fsgld(probabilities=jnp.array([0.5, 0.6])), "sum of 1.1"),
        (lambda: fsgld(probabilities=jnp.array([1.5, -0.5])), "smallest entry of -0.5"),
        (lambda: run(fsgld(probabilities=jnp.ones(3) / 3)), "3 clients.*2 clients"),
        (lambda: fsgld(step_size=-1.0), "step_size must be a finite number above 0"),
        (lambda: fsgld(step_size=jnp.ones(2)), r"step_size must be a scalar.*\(2,\)"),
        (lambda: fsgld(step_size=float("nan")), "step_size must be a finite number"),
        (lambda: fsgld(num_local_steps=0), "num_local_steps must be a positive integer"),
        (lambda: fsgld(batch_size=2.5), "batch_size must be a positive integer"),
        (lambda: fsgld(temperature=-1.0), "temperature must be a finite number at least 0"),
        (lambda: run(fsgld(), position=jnp.array([jnp.nan, 0.0])), "start position holds NaN"),
        (lambda: run(fsgld(), num_rounds=0), "num_rounds must be an integer of at least 1"),
        (lambda: run(fsgld(), num_burnin=5), "num_rounds includes burn-in"),
        (lambda: run(fsgld(), thinning=0), "thinning must be"),
        (lambda: run(fsgld(), num_rounds=9, thinning=10), "thinning=10 keeps no draw of the 9"),
        (lambda: fedmcmc.sample(jax.random.key(0), fsgld(), DATA, num_rounds=1), "Give a position"),
        (lambda: fedmcmc.bernoulli(0.0), "probabilities in"),
        (lambda: fedmcmc.uniform(0), "cohort_size must be a positive integer"),
        (
            lambda: fsgld(fedmcmc.Gaussian.from_moments(0.0, variance=1.0)),
            "with a leading client axis",
        ),
        (
            lambda: fsgld(fedmcmc.Gaussian.from_moments(jnp.full((2, 2), jnp.nan), variance=1.0)),
            "NaN or infinite natural parameters",
        ),
        (
            lambda: run(
                fedmcmc.relay(
                    POSTERIOR,
                    fedmcmc.full_gradient(),
                    participation=fedmcmc.full(),
                    step_size=0.1,
                )
            ),
            "one client per round",
        ),
        (
            lambda: run(
                fedmcmc.relay(
                    POSTERIOR,
                    fedmcmc.conducive(
                        fedmcmc.full_gradient(), surrogates(), shares=jnp.ones(3) / 3
                    ),
                    participation=fedmcmc.categorical(),
                    step_size=0.1,
                )
            ),
            r"shares must have shape \(2,\)",
        ),
        (
            lambda: run(
                fedmcmc.dsgld(
                    POSTERIOR._replace(loglikelihood_fn=lambda t, x: -jnp.sum((x - t) ** 2)),
                    step_size=0.1,
                    num_local_steps=1,
                )
            ),
            r"one term per row, shape \(11,\) for 11 rows, got \(\)",
        ),
        (
            lambda: run(lsd(), position=jnp.zeros((2, 2))),
            r"loglikelihood_fn does not take a position of shapes \(2, 2\) and rows of shapes \(11",
        ),
        (
            lambda: run(lsd(), position={"a": jnp.zeros(2)}),
            r"does not take a position of shapes \{'a': \(2,\)\}",
        ),
        (
            lambda: run(
                fedmcmc.lsd(POSTERIOR._replace(logprior_fn=lambda t: -(t**2)), step_size=0.1)
            ),
            r"logprior_fn must return a scalar, got shape \(2,\)",
        ),
        (
            lambda: run(fedmcmc.lsd_star(POSTERIOR, jnp.array([jnp.nan, 0.0]), step_size=0.1)),
            "centre holds NaN",
        ),
    ],
)
def test_settings(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def lsd(**settings):
    return fedmcmc.lsd(POSTERIOR, **{"step_size": 0.01, **settings})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedmcmc.quantize(0), "num_levels must be an integer, at least 1.*got 0"),
        (lambda: fedmcmc.quantize(1.5), "num_levels must be an integer.*got 1.5"),
        (lambda: fedmcmc.quantize(2**24), r"at most 8388608, got 16777216"),
        (lambda: fedmcmc.quantize(float("inf")), "num_levels must be an integer"),
        (lambda: fedmcmc.quantize(jnp.ones((2, 2))), r"one per client, got shape \(2, 2\)"),
        (lambda: fedmcmc.sparsify(0.0), "fraction must be a finite number above 0"),
        (lambda: fedmcmc.sparsify(1.1), r"fraction must be in \(0, 1\], got 1.1"),
        (lambda: fedmcmc.top_k(0.0), "fraction must be a finite number above 0"),
        (lambda: fedmcmc.top_k(1.1), r"fraction must be in \(0, 1\], got 1.1"),
        (lambda: fedmcmc.compression.clip(0.0), "norm must be a finite number above 0"),
        (lambda: fedmcmc.compression.chain(), "at least one compressor"),
        (
            lambda: fedmcmc.compression.chain(fedmcmc.memory(fedmcmc.quantize(2))),
            "chain holds a memory",
        ),
        (lambda: fedmcmc.per_client([], [0]), "at least one compressor"),
        (
            lambda: fedmcmc.per_client([fedmcmc.memory(fedmcmc.quantize(2))], [0]),
            r"per_client holds a memory; write memory\(per_client",
        ),
        (
            lambda: fedmcmc.per_client([fedmcmc.quantize(2)], [0, 1]),
            "which must hold indices of the 1 compressors, 0 to 0, got 0 to 1",
        ),
        (
            lambda: fedmcmc.per_client([fedmcmc.quantize(2)], [0.0]),
            r"which must be one integer per client, got shape \(1,\) and dtype float32",
        ),
        (
            lambda: run(
                fedmcmc.compress(lsd(), fedmcmc.per_client([fedmcmc.quantize(2)], [0, 0, 0]))
            ),
            "which has 3 entries, but the data has 2 clients",
        ),
        (lambda: fedmcmc.memory(fedmcmc.quantize(2), 1.1), "rate must be a number.*at most 1"),
        (lambda: fedmcmc.memory(fedmcmc.quantize(2), -0.1), "rate must be a number, at least 0"),
        (lambda: fedmcmc.memory(fedmcmc.quantize(2), of="some"), "of must be"),
        (
            lambda: fedmcmc.memory(fedmcmc.memory(fedmcmc.quantize(2))),
            "compressor without a memory",
        ),
        (lambda: fedmcmc.memory(fedmcmc.top_k(0.5)), "needs a rate for a biased compressor"),
        (
            lambda: fedmcmc.compress(fsgld(), fedmcmc.memory(fedmcmc.quantize(2), of="all")),
            "messages are not weighted",
        ),
        (
            lambda: run(fedmcmc.compress(lsd(), fedmcmc.quantize(jnp.array([1, 2, 3])))),
            "num_levels has 3 entries, but the data has 2 clients",
        ),
        (
            lambda: run(
                fedmcmc.compress(lsd(), fedmcmc.memory(fedmcmc.quantize(2), jnp.ones(3) / 3))
            ),
            "rate has 3 entries, but the data has 2 clients",
        ),
        (lambda: fedmcmc.svrg(fedmcmc.full_gradient(), 0), "refresh_every must be a positive"),
        (
            lambda: fedmcmc.svrg(fedmcmc.svrg(fedmcmc.full_gradient(), 2), 2),
            "cannot go around an estimator with a reference",
        ),
        (
            lambda: fedmcmc.fixed_point(fedmcmc.svrg(fedmcmc.full_gradient(), 2), jnp.zeros(2)),
            "cannot go around an estimator with a reference",
        ),
        (
            lambda: run(fedmcmc.lsd_star(POSTERIOR, jnp.zeros(3), step_size=0.01)),
            "centre must be shaped as the position",
        ),
        (lambda: lsd(prior="client"), 'prior must be "server" or "split"'),
        (lambda: lsd(batch_size=0), "batch_size must be a positive integer"),
        (lambda: fedmcmc.bernoulli(0.5, rescale="none"), "rescale must be"),
        (
            lambda: fedmcmc.bernoulli(jnp.array([0.5, 0.4]), rescale="realised"),
            "one probability for all clients",
        ),
        (lambda: fedmcmc.psgld(POSTERIOR, step_size=0.1, decay=1.5), "decay must be at most 1"),
        (
            lambda: fedmcmc.psgld(POSTERIOR, step_size=0.1, num_noiseless=-1),
            "num_noiseless must be an integer",
        ),
    ],
)
def test_settings_of_compression_and_langevin(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "build",
    [
        lambda: fedmcmc.compression.clip(lambda round_: 1.0),
        lambda: fedmcmc.sparsify(lambda round_: 0.5),
        lambda: fedmcmc.dynamics.preconditioners.rms(lambda round_: 0.5),
        lambda: jax.jit(lambda q: fedmcmc.top_k(q).omega(jnp.zeros(3)))(0.5),
    ],
)
def test_numbers_that_cannot_change(build):
    with pytest.raises(TypeError, match=r"schedule|static"):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fedmcmc.FederatedData.from_clients([]), "at least one client"),
        (
            lambda: fedmcmc.FederatedData.from_clients([np.ones((2, 1)), np.ones((0, 1))]),
            "client 1 has none",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients([np.ones((2, 1)), np.ones((2, 3))]),
            r"\(1,\) at client 0, \(3,\) at client 1",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients([{"x": np.ones(2)}, {"y": np.ones(2)}]),
            "same structure",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients([{"x": np.ones(2), "y": np.ones(3)}]),
            r"same number of rows.*\(2,\), \(3,\)",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients(
                [{"x": np.ones(2)}, {"x": np.array([1.0, np.nan, 2.0])}]
            ),
            r"\['x'\], first row 1 of client 1",
        ),
        (
            lambda: fedmcmc.FederatedData.from_arrays(np.ones(3), np.array([0, 2, 2])),
            "client 1 has none",
        ),
        (
            lambda: fedmcmc.FederatedData.from_arrays(np.ones(3), np.array([0.0, 1.0, 1.0])),
            "dtype float64",
        ),
        (
            lambda: fedmcmc.FederatedData.from_arrays(np.ones(3), np.array([0, -1, 1])),
            "client_ids must be 0 or larger, got -1 in row 1",
        ),
        (
            lambda: fedmcmc.FederatedData.from_arrays(np.ones(2), np.array([-1, -1])),
            "client_ids must be 0 or larger, got -1 in row 0",
        ),
        (
            lambda: fedmcmc.FederatedData.from_arrays(
                np.ones(3), np.array([0, 1, 5]), num_clients=2
            ),
            "client_ids must be smaller than num_clients=2, got 5 in row 2",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients([{"id": np.array([2**40, 5])}]),
            r"\['id'\] do not fit into int32",
        ),
        (
            lambda: fedmcmc.FederatedData.from_clients([np.array([1e300, 0.0])]),
            "first row 0 of client 0",
        ),
        (lambda: fedmcmc.FederatedData.from_clients([np.array(["a"])]), "must be numbers"),
        (
            lambda: fedmcmc.Gaussian.from_moments(jnp.zeros(2), jnp.array([[1.0, 2], [2, 1]])),
            "smallest eigenvalue is -1",
        ),
        (
            lambda: fedmcmc.Gaussian.from_moments(jnp.zeros(2), jnp.eye(3)),
            "must be a covariance matrix over the raveled mean",
        ),
        (lambda: fedmcmc.Gaussian.from_moments(jnp.zeros(2)), "either covariance= or variance="),
        (
            lambda: fedmcmc.Gaussian.from_moments(jnp.zeros(2), variance=jnp.array([1.0, -1.0])),
            "must be positive",
        ),
    ],
)
def test_data(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_diverging_step_size_keeps_the_draws_before():
    kernel = fsgld(surrogates(), step_size=0.6)
    with pytest.raises(fedmcmc.NonFiniteError, match="step size is too large") as caught:
        run(kernel, position=jnp.ones(2), num_rounds=400, num_chains=2)
    error = caught.value
    assert 0 < error.samples.num_draws <= error.round
    assert error.samples.draws.shape == (2, error.samples.num_draws, 2)
    assert np.isfinite(error.samples.draws).all()
    assert (error.samples.info["round"] < error.round).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(error.samples.state))
    assert "the error of that client's surrogate" in str(error)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda relay: fedmcmc.faults(relay, drop=0.1),
        lambda relay: fedmcmc.compress(relay, fedmcmc.quantize(16)),
        lambda relay: fedmcmc.sequence(relay, relay),
    ],
)
def test_a_wrapped_kernel_has_the_divergence_hint_of_the_inner_kernel(wrap):
    relay = fsgld(surrogates(), step_size=0.6)
    hint = relay.traits.divergence_hint
    assert hint and wrap(relay).traits.divergence_hint == hint
    assert not fedmcmc.lsd(POSTERIOR, step_size=0.6).traits.divergence_hint


def test_what_a_diverged_run_returns_belongs_together():
    kernel = fedmcmc.dsgld(
        POSTERIOR, step_size=lambda r: jnp.where(r < 300, 0.01, 50.0), num_local_steps=2
    )
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(kernel, num_rounds=1000)
    samples = caught.value.samples
    assert caught.value.round > 300
    assert samples.num_draws == samples.totals["rounds"][0] == caught.value.round
    assert int(samples.state.broadcast.round[0]) == caught.value.round
    np.testing.assert_array_equal(samples.state.broadcast.position[0], samples.draws[0, -1])


def test_a_state_must_fit_like_a_fresh_start():
    kernel = fsgld()
    samples = run(kernel, num_chains=2)
    again = run(kernel, state=samples.state)
    assert again.num_chains == 2
    for other in (fsgld(surrogates(3)), fsgld(surrogates(2, 5))):
        with pytest.raises(ValueError, match="one Gaussian per client"):
            run(other, state=samples.state)
    with pytest.raises(ValueError, match="state does not fit"):
        run(kernel, state=samples.state, num_chains=3)
    other = fedmcmc.lsd(POSTERIOR, step_size=0.01)
    with pytest.raises(ValueError, match=r"another kernel\): .*other types"):
        run(other, state=samples.state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedmcmc.sample(0, fsgld(), DATA, jnp.zeros(2), num_rounds=1), "rng_key must be"),
        (lambda: run(fedmcmc.fsgld), "kernel must be a FederatedKernel, got function"),
        (lambda: run(fsgld(), data=[np.ones(2)]), "data must be a FederatedData"),
        (lambda: fsgld([surrogates()]), "surrogates must be one fedmcmc.Gaussian"),
        (lambda: fsgld(step_size="1e-3"), "step_size must be a scalar number .*, got .1e-3"),
        (
            lambda: fedmcmc.sample(jax.random.key(0), lsd(), DATA, "origin", num_rounds=1),
            r"^position must be a number or an array of numbers, got 'origin' \(str\)",
        ),
        (
            lambda: fedmcmc.sample(
                jax.random.key(0), lsd(), DATA, {"scale": np.array(["1"])}, num_rounds=1
            ),
            r"^position\['scale'\] must be a number or an array of numbers, got array",
        ),
        (
            lambda: fedmcmc.sample(
                jax.random.key(0), lsd(), DATA, lambda key: "origin", num_rounds=1
            ),
            r"^position\(rng_key\) must be a number or an array of numbers, got 'origin'",
        ),
        (
            lambda: fedmcmc.fit(
                POSTERIOR, DATA, rng_key=jax.random.key(0), position="origin", progress=False
            ),
            "^position must be a number or an array of numbers, got 'origin'",
        ),
        (lambda: fedmcmc.whiten(POSTERIOR, DATA, "origin"), "^position must be a number"),
        (
            lambda: fedmcmc.tune(None, POSTERIOR, DATA, surrogates()),
            "kernel_fn must be a function that takes step_size= .*, got NoneType",
        ),
        (
            lambda: fedmcmc.tune(lsd(), POSTERIOR, DATA, surrogates()),
            "kernel_fn must be a function that takes step_size= .*, got Langevin",
        ),
        (
            lambda: fedmcmc.tune(lsd, None, DATA, surrogates()),
            "posterior must be a fedmcmc.Posterior, got NoneType",
        ),
        (
            lambda: fedmcmc.tune(lsd, POSTERIOR, None, surrogates()),
            "data must be a fedmcmc.FederatedData or a consortium of clients, got NoneType",
        ),
    ],
)
def test_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_no_such_client():
    with pytest.raises(IndexError, match="no client 2, only 0 to 1"):
        DATA.client(2)


def test_interrupt_returns_what_was_kept(monkeypatch):
    real, calls = module.run_segment, []

    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "run_segment", interrupted)
    monkeypatch.setattr(_pace, "MAX_SEGMENT", 1)
    monkeypatch.setattr(_pace, "SEGMENT_SECONDS", 0.0)
    with pytest.warns(RuntimeWarning, match="Interrupted"):
        samples = run(fsgld(), num_rounds=5000)
    assert 0 < samples.num_draws < 5000
    assert int(samples.state.broadcast.round[0]) == samples.num_draws


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: lsd(participation=0.5),
            "participation must be a fedmcmc.types.Participation, got float",
        ),
        (
            lambda: fedmcmc.lsd(lambda t: 0.0, step_size=0.1),
            "posterior must be a fedmcmc.Posterior",
        ),
        (lambda: fedmcmc.compress(lsd(), 16), "compressor must be a fedmcmc.Compressor, got int"),
        (lambda: fedmcmc.compress(lsd(), fedmcmc.quantize), "compressor must be a fedmcmc.Compr"),
        (
            lambda: fedmcmc.compress(POSTERIOR, fedmcmc.quantize(2)),
            "kernel must be a fedmcmc.FederatedKernel, got Posterior",
        ),
        (lambda: lsd(step_size=".1"), "step_size must be a scalar number or a schedule"),
        (
            lambda: fedmcmc.dsgld(None, step_size=0.1, num_local_steps=1),
            "posterior must be a fedmcmc.Posterior, got NoneType",
        ),
        (
            lambda: fedmcmc.dg_sgld(None, step_size=0.1, num_local_steps=1, tolerance=1.0),
            "posterior must be a fedmcmc.Posterior, got NoneType",
        ),
    ],
)
def test_mix_ups_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_sample_takes_at_most_fourteen_keywords():
    parameters = inspect.signature(fedmcmc.sample).parameters.values()
    assert sum(p.kind is p.KEYWORD_ONLY for p in parameters) <= 14


def test_a_record_is_asked_for():
    with pytest.raises(TypeError, match=r"record must be a fedmcmc\.Record, got dict"):
        run(lsd(), record={})
