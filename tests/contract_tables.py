"""One row for every public constructor of a kernel, estimator, participation, compressor, ...

A row's name is the constructor's, or the constructor's, a colon and a variant. A new constructor
gets a row here, and the tests of `test_contract_*.py` then hold for it.
"""

import inspect
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import fedmcmc
from fedmcmc import preconditioners

NUM_CLIENTS = 3
SIZES = (5, 1, 4)
P = jnp.array([0.5, 0.2, 0.3])
LEVELS = jnp.array([3, 7, 5])
RATES = jnp.array([0.3, 0.1, 0.2])
KEY = jax.random.key(3)
POSITIONS = {
    "scalar": jnp.array(0.3),
    "vector": jnp.array([0.3, -0.2, 0.5]),
    "nested": {"a": jnp.array(0.3), "b": {"c": jnp.array([-0.2, 0.5])}},
}


def logprior(position):
    return -0.5 * jnp.sum(ravel_pytree(position)[0] ** 2)


def loglikelihood(position, rows):
    """Not quadratic, so that a minibatch's gradients at two places differ by something random."""
    flat = ravel_pytree(position)[0]
    return -jnp.sum(jnp.sqrt(1 + (rows["x"][:, : flat.size] - flat) ** 2), axis=-1)


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)


def make_data(sizes=SIZES, spoilt=(), shifted=(), order=None):
    """Return ragged clients; rows of those in `spoilt` are NaN, of those in `shifted` others."""
    clients = []
    for i, n in enumerate(sizes):
        x = np.random.default_rng(i).normal(i, 1.0, size=(n, 3)).astype(np.float32)
        x = x * np.float32(np.nan) if i in spoilt else x
        clients.append({"x": x - 4.0 if i in shifted else x})
    order = range(len(sizes)) if order is None else order
    return fedmcmc.FederatedData.from_clients([clients[i] for i in order], allow_nonfinite=True)


DATA = make_data()


class Given(NamedTuple):
    """What a row of the table is built with, besides the position."""

    posterior: fedmcmc.Posterior = POSTERIOR
    scale: float = 1  # 1 or 2, multiplies the kernel's numbers
    order: tuple = (0, 1, 2)  # of the clients

    def table(self, values: Any) -> Any:
        """Return one entry a client, in this order."""
        return jax.tree.map(lambda leaf: leaf[jnp.array(self.order)], values)

    @property
    def step_size(self):
        return 0.01 * self.scale

    @property
    def levels(self):
        return 4 * self.scale


def surrogates(position):
    mean = jax.tree.map(lambda x: jnp.stack([x, x + 1, x - 1]), position)
    return fedmcmc.Gaussian.from_moments(
        mean, variance=jax.tree.map(lambda x: jnp.full_like(x, 0.4), mean)
    )


# Kernels: ``build(position, given)``


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


OPTIMIZER = optax.sgd(0.05, momentum=0.5)


def logits(position, inputs):
    return inputs * ravel_pytree(position)[0][0]


def build_ensemble(position, given):
    del position
    return fedmcmc.ensemble(
        given.posterior,
        fedmcmc.svrg(fedmcmc.minibatch(2), 2),
        fedmcmc.dirichlet_ensemble(0.5 * given.scale, num_models=2),
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


PLAIN = {
    "sgld": build_sgld,
    "dsgld": build_dsgld,
    "fsgld": build_fsgld,
    "relay": build_relay,
    "langevin": build_langevin,
    "lsd": build_lsd,
    "qlsd": build_qlsd,
    "lsd_star": build_lsd_star,
    "qlsd_star": build_qlsd_star,
    "lsd_pp": build_lsd_pp,
    "qlsd_pp": build_qlsd_pp,
    "psgld": build_psgld,
    "consensus": build_consensus,
    "dg_sgld": build_dg_sgld,
    "ensemble": build_ensemble,
    "fed_be": build_fed_be,
    # Further kernels: a line here, and one in COMPRESSED.
}

# Compressors: ``build(given)``

COMPRESSORS = {
    "identity": lambda given: fedmcmc.identity(),
    "quantize": lambda given: fedmcmc.quantize(given.levels),
    "quantize: per leaf": lambda given: fedmcmc.quantize(given.levels, per_leaf=True),
    "quantize: per client": lambda given: fedmcmc.quantize(given.table(LEVELS) * given.scale),
    "sparsify": lambda given: fedmcmc.sparsify(0.4 * given.scale),
    "top_k": lambda given: fedmcmc.top_k(0.5),
    "top_k: no feedback": lambda given: fedmcmc.top_k(0.5, error_feedback=False),
    "clip": lambda given: fedmcmc.clip(0.6 * given.scale),
    "chain": lambda given: fedmcmc.chain(
        fedmcmc.sparsify(0.4 * given.scale), fedmcmc.quantize(given.levels)
    ),
    "memory": lambda given: fedmcmc.memory(fedmcmc.quantize(given.levels)),
    "memory: per client": lambda given: fedmcmc.memory(
        fedmcmc.quantize(given.table(LEVELS)), given.table(RATES) * given.scale, of="active"
    ),
    "memory: of errors": lambda given: fedmcmc.memory(fedmcmc.top_k(0.5), 0.3 * given.scale),
}

COMPRESSED = (
    ("sgld", "identity"),
    ("dsgld", "quantize"),
    ("fsgld", "quantize: per leaf"),
    ("relay", "top_k"),
    ("langevin", "clip"),
    ("lsd", "memory"),
    ("qlsd", "top_k: no feedback"),
    ("lsd_star", "quantize: per client"),
    ("qlsd_star", "chain"),
    ("lsd_pp", "memory: per client"),
    ("qlsd_pp", "quantize"),
    ("psgld", "sparsify"),
    ("consensus", "memory"),
    ("dg_sgld", "quantize"),
    ("ensemble", "clip"),
    ("fed_be", "memory"),
    ("dsgld", "memory"),
    ("lsd", "memory: of errors"),
)


def build_compressed(kernel, compressor):
    def build(position, given):
        return fedmcmc.compress(PLAIN[kernel](position, given), COMPRESSORS[compressor](given))

    return build


KERNELS = PLAIN | {
    f"compress: {kernel}, {compressor}": build_compressed(kernel, compressor)
    for kernel, compressor in COMPRESSED
}

# Gradient estimators: ``(build, whether the sum over clients is exact)``, at POSITIONS["vector"]

ESTIMATORS = {
    "full_gradient": (lambda: fedmcmc.full_gradient(), True),
    "conducive": (
        lambda: fedmcmc.conducive(fedmcmc.full_gradient(), surrogates(POSITIONS["vector"]), 0.7),
        True,
    ),
    "minibatch": (lambda: fedmcmc.minibatch(2), False),
    "minibatch: fraction": (lambda: fedmcmc.minibatch(0.5, replace=False), False),
    "noisy": (lambda: fedmcmc.noisy(fedmcmc.minibatch(2, replace=False), 0.5), False),
    "fixed_point": (lambda: fedmcmc.fixed_point(fedmcmc.minibatch(2), jnp.full(3, 3.0)), False),
    "fixed_point: full": (
        lambda: fedmcmc.fixed_point(fedmcmc.full_gradient(), jnp.full(3, 3.0)),
        True,
    ),
    "svrg": (lambda: fedmcmc.svrg(fedmcmc.minibatch(2), 4), False),
    "svrg: full": (lambda: fedmcmc.svrg(fedmcmc.full_gradient(), 4), True),
}

PARTICIPATIONS = {
    "full": lambda: fedmcmc.full(),
    "bernoulli": lambda: fedmcmc.bernoulli(P),
    "bernoulli: one": lambda: fedmcmc.bernoulli(0.3),
    "bernoulli: realised": lambda: fedmcmc.bernoulli(0.3, rescale="realised"),
    "uniform": lambda: fedmcmc.uniform(2),
    "categorical": lambda: fedmcmc.categorical(P),
    "categorical: uniform": lambda: fedmcmc.categorical(),
}

PRECONDITIONERS = {"rms": lambda: preconditioners.rms(0.9, 1e-3, num_noiseless=2)}

TABLES = {
    fedmcmc.FederatedKernel: (fedmcmc, KERNELS),
    fedmcmc.GradientEstimator: (fedmcmc, ESTIMATORS),
    fedmcmc.Participation: (fedmcmc, PARTICIPATIONS),
    fedmcmc.Compressor: (fedmcmc, COMPRESSORS),
    preconditioners.Preconditioner: (preconditioners, PRECONDITIONERS),
}


def constructors(kind, module):
    """Return names of public functions of `module` that are annotated to return `kind`."""
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}
    return {n for n, f in functions.items() if typing.get_type_hints(f).get("return") is kind}


def names(rows):
    """Return the constructors that have a row."""
    return {row.split(":")[0] for row in rows}


def shapes(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def arguments(function):
    return list(inspect.signature(function).parameters)
