"""One row for every public constructor of a kernel, estimator, participation, compressor, ...

A row's name is the constructor's, or the constructor's, a colon and a variant. A new constructor
gets a row here (a kernel in `kernels.py`), and the tests of this folder then hold for it.
"""

import inspect
import typing

import jax.numpy as jnp
import optax

import fedmcmc
from fedmcmc.dynamics import preconditioners
from tests.contracts.kernels import PLAIN
from tests.contracts.model import LEVELS, POSITIONS, RATES, P, reordered, surrogates

# Compressors: ``build(given)``

COMPRESSORS = {
    "identity": lambda given: fedmcmc.compression.identity(),
    "quantize": lambda given: fedmcmc.quantize(given.levels),
    "quantize: per leaf": lambda given: fedmcmc.quantize(given.levels, per_leaf=True),
    "quantize: per client": lambda given: fedmcmc.quantize(given.table(LEVELS) * given.scale),
    "sparsify": lambda given: fedmcmc.sparsify(0.4 * given.scale),
    "top_k": lambda given: fedmcmc.top_k(0.5),
    "top_k: no feedback": lambda given: fedmcmc.top_k(0.5, error_feedback=False),
    "clip": lambda given: fedmcmc.compression.clip(0.6 * given.scale),
    "chain": lambda given: fedmcmc.compression.chain(
        fedmcmc.sparsify(0.4 * given.scale), fedmcmc.quantize(given.levels)
    ),
    "per_client": lambda given: fedmcmc.per_client(
        (fedmcmc.quantize(given.levels), fedmcmc.sparsify(0.4 * given.scale)),
        given.table(jnp.array([0, 1, 1])),
    ),
    "per_client: biased": lambda given: fedmcmc.per_client(
        (
            fedmcmc.top_k(0.5),
            fedmcmc.quantize(given.table(LEVELS)),
            fedmcmc.compression.clip(0.6 * given.scale),
        ),
        given.table(jnp.array([0, 1, 2])),
    ),
    "memory": lambda given: fedmcmc.memory(fedmcmc.quantize(given.levels)),
    "memory: per client": lambda given: fedmcmc.memory(
        fedmcmc.quantize(given.table(LEVELS)), given.table(RATES) * given.scale, of="active"
    ),
    "memory: of operators per client": lambda given: fedmcmc.memory(
        COMPRESSORS["per_client"](given)
    ),
    "memory: of errors": lambda given: fedmcmc.memory(fedmcmc.top_k(0.5), 0.3 * given.scale),
}

COMPRESSED = (
    ("sgld", "identity"),
    ("dsgld", "quantize"),
    ("fsgld", "quantize: per leaf"),
    ("augment", "quantize"),
    ("augment: fed_avg", "memory"),
    ("fsgld: refreshed", "quantize"),
    ("relay", "top_k"),
    ("langevin", "clip"),
    ("langevin: noise of clients", "quantize"),
    ("underdamped", "memory"),
    ("lsd", "memory"),
    ("lsd: latents", "quantize"),
    ("qlsd", "top_k: no feedback"),
    ("lsd_star", "quantize: per client"),
    ("qlsd_star", "chain"),
    ("lsd_pp", "memory: per client"),
    ("qlsd_pp", "quantize"),
    ("psgld", "sparsify"),
    ("consensus", "memory"),
    ("dg_sgld", "quantize"),
    ("share_momentum: dg_sgld", "sparsify"),
    ("ensemble", "clip"),
    ("fed_be", "memory"),
    ("averaging", "memory"),
    ("sequence", "quantize"),
    ("fa_ld", "memory: per client"),
    ("fa_hmc", "memory"),
    ("fed_avg", "memory"),
    ("fed_pa", "quantize"),
    ("pseudo_gradients", "sparsify"),
    ("fed_ep", "quantize: per leaf"),
    ("fed_ep: expansions", "memory"),
    ("fed_ep: latents", "quantize"),
    ("natural_parameters: fed_ep", "quantize"),
    ("fed_sep", "memory"),
    ("adf", "top_k: no feedback"),
    ("natural", "memory"),
    ("fed_gibbs", "identity"),
    ("fed_gibbs: of rows", "identity"),
    ("hmc", "top_k: no feedback"),
    ("hmc: noise", "identity"),
    ("mala", "clip"),
    ("gaussian_mh", "identity"),
    ("gaussian_mh: independent", "identity"),
    ("multiple_try", "identity"),
    ("dsgld", "memory"),
    ("lsd", "memory: of errors"),
    ("dg_sgld", "per_client: biased"),
    ("fa_ld", "per_client"),
    ("lsd_pp", "memory: of operators per client"),
)


def build_compressed(kernel, compressor):
    def build(position, given):
        return fedmcmc.compress(PLAIN[kernel](position, given), COMPRESSORS[compressor](given))

    return build


BARE = PLAIN | {
    f"compress: {kernel}, {compressor}": build_compressed(kernel, compressor)
    for kernel, compressor in COMPRESSED
}


def build_faulty(kernel):
    def build(position, given):
        return fedmcmc.faults(
            BARE[kernel](position, given),
            drop=0.1 * given.scale,
            late=0.0 if kernel in WHOLE else 0.6 * given.table(P) * given.scale,
            nan=0.2 * given.scale,
            seed=given.scale,
        )

    return build


def build_secured(kernel):
    def build(position, given):
        # For simulations: who takes part may change.
        return fedmcmc.secure_sum(PLAIN[kernel](position, given), allow_differencing=True)

    return build


# Weighted messages, a phase to set up, two phases, and clients that keep what the server reads.
SECURED = ("langevin", "lsd_star", "fa_hmc", "fed_ep: expansions", "fed_gibbs: of rows")
BARE |= {f"secure_sum: {kernel}": build_secured(kernel) for kernel in SECURED}


FAULTY = ("fed_ep", "compress: lsd, memory", "compress: sequence, quantize", "hmc", "fed_gibbs")
WHOLE = ("hmc", "fed_gibbs")
"""Kernels that have no use for a late message."""
KERNELS = BARE | {f"faults: {name}": build_faulty(name) for name in FAULTY}

# Gradient estimators: ``(build, whether the sum over clients is exact)``, at POSITIONS["vector"]

ESTIMATORS = {
    "full_gradient": (lambda: fedmcmc.full_gradient(), True),
    "conducive": (
        lambda: fedmcmc.conducive(fedmcmc.full_gradient(), surrogates(POSITIONS["vector"]), 0.7),
        True,
    ),
    "minibatch": (lambda: fedmcmc.minibatch(2), False),
    "augmented": (lambda: fedmcmc.augmented(fedmcmc.minibatch(2), reordered), False),
    "augmented: conducive": (
        lambda: fedmcmc.conducive(
            fedmcmc.augmented(fedmcmc.epochs(2), reordered), surrogates(POSITIONS["vector"])
        ),
        False,
    ),
    "minibatch: fraction": (lambda: fedmcmc.minibatch(0.5, replace=False), False),
    "epochs": (lambda: fedmcmc.epochs(2), False),
    "noisy": (lambda: fedmcmc.noisy(fedmcmc.minibatch(2, replace=False), 0.5), False),
    "fixed_point": (lambda: fedmcmc.fixed_point(fedmcmc.minibatch(2), jnp.full(3, 3.0)), False),
    "fixed_point: full": (
        lambda: fedmcmc.fixed_point(fedmcmc.full_gradient(), jnp.full(3, 3.0)),
        True,
    ),
    "svrg": (lambda: fedmcmc.svrg(fedmcmc.minibatch(2), 4), False),
    "noisy: weighted": (
        lambda: fedmcmc.noisy(fedmcmc.minibatch(2), 0.5, weighted=True, weights=P),
        False,
    ),
    "scaffold": (lambda: fedmcmc.scaffold(fedmcmc.minibatch(2)), False),
    "scaffold: full": (lambda: fedmcmc.scaffold(fedmcmc.full_gradient(), shares=P), True),
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
    "categorical: many": lambda: fedmcmc.categorical(P, cohort_size=4),
    "categorical: uniform, many": lambda: fedmcmc.categorical(cohort_size=2),
}

PRECONDITIONERS = {"rms": lambda: preconditioners.rms(0.9, 1e-3, num_noiseless=2)}

TABLES = {
    fedmcmc.FederatedKernel: (fedmcmc, KERNELS),
    fedmcmc.types.GradientEstimator: (fedmcmc, ESTIMATORS),
    fedmcmc.types.Participation: (fedmcmc, PARTICIPATIONS),
    fedmcmc.Compressor: (fedmcmc.compression, COMPRESSORS),
    preconditioners.Preconditioner: (preconditioners, PRECONDITIONERS),
}


def constructors(kind, module):
    """Return names of public functions of `module` that are annotated to return `kind`."""
    functions = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}
    optional = {"optax": optax}  # modules import it for annotations only
    hints = {n: typing.get_type_hints(f, localns=optional) for n, f in functions.items()}
    return {n for n, of in hints.items() if of.get("return") is kind}


def names(rows):
    """Return the constructors that have a row."""
    return {row.split(":")[0] for row in rows}
