"""Error messages about settings, positions and kernels that do not fit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import (
    bernoulli,
    compress,
    compression,
    dsgld,
    full_gradient,
    memory,
    per_client,
    quantize,
    sample,
    svrg,
)

KEY = jax.random.key(0)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta**2),
    lambda theta, x: -0.5 * jnp.sum((x - theta) ** 2, axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients([np.ones((3, 2)), np.zeros((2, 2))])
from_moments = fedmcmc.Gaussian.from_moments


def surrogates(num_clients=2, dim=2):
    return from_moments(jnp.zeros((num_clients, dim)), variance=jnp.ones((num_clients, dim)))


def run(kernel, position=None, data=DATA, **settings):
    settings = {"num_rounds": 4, "progress": False, **settings}
    return sample(KEY, kernel, data, jnp.zeros(2) if position is None else position, **settings)


def fsgld(q=None, **settings):
    settings = {"step_size": 0.01, "num_local_steps": 2, **settings}
    return fedmcmc.fsgld(POSTERIOR, surrogates() if q is None else q, **settings)


def lsd(posterior=POSTERIOR, **settings):
    return fedmcmc.lsd(posterior, **{"step_size": 0.01, **settings})


def relay(estimator, participation):
    return fedmcmc.relay(POSTERIOR, estimator, participation=participation, step_size=0.1)


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
        (lambda: sample(KEY, fsgld(), DATA, num_rounds=1), "Give a position"),
        (lambda: bernoulli(0.0), "probabilities in"),
        (lambda: fedmcmc.uniform(0), "cohort_size must be a positive integer"),
        (lambda: fsgld(from_moments(0.0, variance=1.0)), "with a leading client axis"),
        (
            lambda: fsgld(from_moments(jnp.full((2, 2), jnp.nan), variance=1.0)),
            "NaN or infinite natural parameters",
        ),
        (
            lambda: run(relay(full_gradient(), fedmcmc.full())),
            "one client per round",
        ),
        (
            lambda: run(
                relay(
                    fedmcmc.conducive(full_gradient(), surrogates(), shares=jnp.ones(3) / 3),
                    fedmcmc.categorical(),
                )
            ),
            r"shares must have shape \(2,\)",
        ),
        (
            lambda: run(lsd(POSTERIOR._replace(loglikelihood_fn=lambda t, x: -jnp.sum(x - t)))),
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
            lambda: run(lsd(POSTERIOR._replace(logprior_fn=lambda t: -(t**2)))),
            r"logprior_fn must return a scalar, got shape \(2,\)",
        ),
        (
            lambda: run(fedmcmc.lsd_star(POSTERIOR, jnp.array([jnp.nan, 0.0]), step_size=0.1)),
            "centre holds NaN",
        ),
        (lambda: quantize(0), "num_levels must be an integer, at least 1.*got 0"),
        (lambda: quantize(1.5), "num_levels must be an integer.*got 1.5"),
        (lambda: quantize(2**24), r"at most 8388608, got 16777216"),
        (lambda: quantize(float("inf")), "num_levels must be an integer"),
        (lambda: quantize(jnp.ones((2, 2))), r"one per client, got shape \(2, 2\)"),
        (lambda: fedmcmc.sparsify(0.0), "fraction must be a finite number above 0"),
        (lambda: fedmcmc.sparsify(1.1), r"fraction must be in \(0, 1\], got 1.1"),
        (lambda: fedmcmc.top_k(0.0), "fraction must be a finite number above 0"),
        (lambda: fedmcmc.top_k(1.1), r"fraction must be in \(0, 1\], got 1.1"),
        (lambda: compression.clip(0.0), "norm must be a finite number above 0"),
        (lambda: compression.chain(), "at least one compressor"),
        (lambda: compression.chain(memory(quantize(2))), "chain holds a memory"),
        (lambda: per_client([], [0]), "at least one compressor"),
        (
            lambda: per_client([memory(quantize(2))], [0]),
            r"per_client holds a memory; write memory\(per_client",
        ),
        (
            lambda: per_client([quantize(2)], [0, 1]),
            "which must hold indices of the 1 compressors, 0 to 0, got 0 to 1",
        ),
        (
            lambda: per_client([quantize(2)], [0.0]),
            r"which must be one integer per client, got shape \(1,\) and dtype float32",
        ),
        (
            lambda: run(compress(lsd(), per_client([quantize(2)], [0, 0, 0]))),
            "which has 3 entries, but the data has 2 clients",
        ),
        (lambda: memory(quantize(2), 1.1), "rate must be a number.*at most 1"),
        (lambda: memory(quantize(2), -0.1), "rate must be a number, at least 0"),
        (lambda: memory(quantize(2), of="some"), "of must be"),
        (lambda: memory(memory(quantize(2))), "compressor without a memory"),
        (lambda: memory(fedmcmc.top_k(0.5)), "needs a rate for a biased compressor"),
        (lambda: compress(fsgld(), memory(quantize(2), of="all")), "messages are not weighted"),
        (
            lambda: run(compress(lsd(), quantize(jnp.array([1, 2, 3])))),
            "num_levels has 3 entries, but the data has 2 clients",
        ),
        (
            lambda: run(compress(lsd(), memory(quantize(2), jnp.ones(3) / 3))),
            "rate has 3 entries, but the data has 2 clients",
        ),
        (lambda: svrg(full_gradient(), 0), "refresh_every must be a positive"),
        (
            lambda: svrg(svrg(full_gradient(), 2), 2),
            "cannot go around an estimator with a reference",
        ),
        (
            lambda: fedmcmc.fixed_point(svrg(full_gradient(), 2), jnp.zeros(2)),
            "cannot go around an estimator with a reference",
        ),
        (
            lambda: run(fedmcmc.lsd_star(POSTERIOR, jnp.zeros(3), step_size=0.01)),
            "centre must be shaped as the position",
        ),
        (lambda: lsd(prior="client"), 'prior must be "server" or "split"'),
        (lambda: lsd(batch_size=0), "batch_size must be a positive integer"),
        (lambda: bernoulli(0.5, rescale="none"), "rescale must be"),
        (
            lambda: bernoulli(jnp.array([0.5, 0.4]), rescale="realised"),
            "one probability for all clients",
        ),
        (lambda: fedmcmc.psgld(POSTERIOR, step_size=0.1, decay=1.5), "decay must be at most 1"),
        (
            lambda: fedmcmc.psgld(POSTERIOR, step_size=0.1, num_noiseless=-1),
            "num_noiseless must be an integer",
        ),
        (
            lambda: from_moments(jnp.zeros(2), jnp.array([[1.0, 2], [2, 1]])),
            "smallest eigenvalue is -1",
        ),
        (
            lambda: from_moments(jnp.zeros(2), jnp.eye(3)),
            "must be a covariance matrix over the raveled mean",
        ),
        (lambda: from_moments(jnp.zeros(2)), "either covariance= or variance="),
        (lambda: from_moments(jnp.zeros(2), variance=jnp.array([1.0, -1.0])), "must be positive"),
    ],
)
def test_invalid_values_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(0, fsgld(), DATA, jnp.zeros(2), num_rounds=1), "rng_key must be"),
        (lambda: run(fedmcmc.fsgld), "kernel must be a FederatedKernel, got function"),
        (lambda: run(fsgld(), data=[np.ones(2)]), "data must be a FederatedData"),
        (lambda: fsgld([surrogates()]), "surrogates must be one fedmcmc.Gaussian"),
        (lambda: fsgld(step_size="1e-3"), "step_size must be a scalar number .*, got .1e-3"),
        (
            lambda: sample(KEY, lsd(), DATA, "origin", num_rounds=1),
            r"^position must be a number or an array of numbers, got 'origin' \(str\)",
        ),
        (
            lambda: sample(KEY, lsd(), DATA, {"scale": np.array(["1"])}, num_rounds=1),
            r"^position\['scale'\] must be a number or an array of numbers, got array",
        ),
        (
            lambda: sample(KEY, lsd(), DATA, lambda key: "origin", num_rounds=1),
            r"^position\(rng_key\) must be a number or an array of numbers, got 'origin'",
        ),
        (
            lambda: fedmcmc.fit(POSTERIOR, DATA, rng_key=KEY, position="origin", progress=False),
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
        (
            lambda: lsd(participation=0.5),
            "participation must be a fedmcmc.types.Participation, got float",
        ),
        (lambda: lsd(lambda t: 0.0), "posterior must be a fedmcmc.Posterior"),
        (lambda: compress(lsd(), 16), "compressor must be a fedmcmc.Compressor, got int"),
        (lambda: compress(lsd(), quantize), "compressor must be a fedmcmc.Compr"),
        (
            lambda: compress(POSTERIOR, quantize(2)),
            "kernel must be a fedmcmc.FederatedKernel, got Posterior",
        ),
        (lambda: lsd(step_size=".1"), "step_size must be a scalar number or a schedule"),
        (
            lambda: dsgld(None, step_size=0.1, num_local_steps=1),
            "posterior must be a fedmcmc.Posterior, got NoneType",
        ),
        (
            lambda: fedmcmc.dg_sgld(None, step_size=0.1, num_local_steps=1, tolerance=1.0),
            "posterior must be a fedmcmc.Posterior, got NoneType",
        ),
        (lambda: run(lsd(), record={}), r"record must be a fedmcmc\.Record, got dict"),
        (lambda: compression.clip(lambda round_: 1.0), "schedule|static"),
        (lambda: fedmcmc.sparsify(lambda round_: 0.5), "schedule|static"),
        (lambda: fedmcmc.dynamics.preconditioners.rms(lambda round_: 0.5), "schedule|static"),
        (lambda: jax.jit(lambda q: fedmcmc.top_k(q).omega(jnp.zeros(3)))(0.5), "schedule|static"),
    ],
)
def test_invalid_types_raise(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_state_that_does_not_fit_raises():
    kernel = fsgld()
    samples = run(kernel, num_chains=2)
    assert run(kernel, state=samples.state).num_chains == 2
    for kernel_of_other_shape in (fsgld(surrogates(3)), fsgld(surrogates(2, 5))):
        with pytest.raises(ValueError, match="one Gaussian per client"):
            run(kernel_of_other_shape, state=samples.state)
    with pytest.raises(ValueError, match="state does not fit"):
        run(kernel, state=samples.state, num_chains=3)
    with pytest.raises(ValueError, match=r"another kernel\): .*other types"):
        run(lsd(), state=samples.state)


def test_sample_has_at_most_fourteen_keywords():
    parameters = inspect.signature(sample).parameters.values()
    assert sum(p.kind is p.KEYWORD_ONLY for p in parameters) <= 14
