"""Kernels with compressors and participation rules, computed in three ways.

``python -m tests.compositions.rows NAME ...`` needs two devices of the host and prints ``same``.
"""

import sys

import jax
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from tests.contracts.kernels import with_latents
from tests.contracts.model import DATA, KEY, POSITIONS, POSTERIOR, P, make_data, surrogates

POSITION = POSITIONS["vector"]
MESH = jax.make_mesh((2,), ("clients",)) if jax.device_count() == 2 else None
TRAINING = dict(client_optimizer=optax.sgd(0.05), num_local_steps=2, batch_size=2)


def sites(build):
    mean = inference.sgd_mean(optax.sgd(0.05), num_samples=3)
    return lambda settings: build(
        POSTERIOR,
        inference=inference.scaled_identity(mean, precision_per_row=0.5),
        damping=0.2,
        initial_precision=0.5,
        **settings,
    )


KERNELS = {
    "lsd": lambda settings: fedmcmc.lsd(POSTERIOR, step_size=0.01, batch_size=2, **settings),
    "lsd_star": lambda settings: fedmcmc.lsd_star(
        POSTERIOR, POSITION, step_size=0.01, batch_size=2, **settings
    ),
    "lsd_pp": lambda settings: fedmcmc.lsd_pp(
        POSTERIOR, step_size=0.01, batch_size=2, refresh_every=2, **settings
    ),
    "fed_be": lambda settings: fedmcmc.fed_be(POSTERIOR, **TRAINING, **settings),
    "fa_ld": lambda settings: fedmcmc.fa_ld(
        POSTERIOR, step_size=0.01, num_local_steps=2, batch_size=2, **settings
    ),
    "fa_hmc": lambda settings: fedmcmc.fa_hmc(
        POSTERIOR, step_size=0.05, num_integration_steps=2, num_local_steps=2, rho=0.5, **settings
    ),
    "fed_avg": lambda settings: fedmcmc.fed_avg(POSTERIOR, **TRAINING, **settings),
    "fed_pa": lambda settings: fedmcmc.fed_pa(
        POSTERIOR,
        client_optimizer=optax.sgd(0.05),
        shrinkage=0.1,
        num_samples=2,
        num_local_steps=2,
        batch_size=2,
        **settings,
    ),
    "fed_ep": sites(fedmcmc.fed_ep),
    "fed_sep": sites(fedmcmc.fed_sep),
    "adf": sites(fedmcmc.adf),
}
# These kernels have a fixed participation rule.
FIXED = {
    "dsgld": fedmcmc.dsgld(POSTERIOR, step_size=0.01, num_local_steps=(2, 1, 3), batch_size=2),
    "fsgld": fedmcmc.fsgld(
        POSTERIOR,
        surrogates(POSITION),
        step_size=0.01,
        num_local_steps=2,
        batch_size=2,
        probabilities=P,
    ),
    "dg_sgld": fedmcmc.dg_sgld(
        POSTERIOR, step_size=0.01, num_local_steps=2, tolerance=0.1, batch_size=2
    ),
}
# All clients take part: kernels with latents refuse server memories of absent clients.
FIXED["lsd_latents"] = fedmcmc.lsd(
    with_latents(POSTERIOR), step_size=0.01, refresh=fedmcmc.hierarchy.ula(num_steps=2)
)
POOLED = {
    "sgld": fedmcmc.sgld(POSTERIOR, step_size=0.01, batch_size=2),
    "psgld": fedmcmc.psgld(POSTERIOR, step_size=0.01, batch_size=2),
}
# All clients take part in these kernels, and their compressors must be functions of the message.
APPROXIMATION = fedmcmc.Gaussian.from_moments(POSITION, variance=0.3 + 0 * POSITION)
ACCEPT_REJECT = {
    "hmc": fedmcmc.hmc(POSTERIOR, POSITION, step_size=0.4, max_integration_steps=3),
    "hmc: noise": fedmcmc.hmc(POSTERIOR, POSITION, step_size=0.4, value_noise=0.5),
    "mala": fedmcmc.mala(POSTERIOR, POSITION, step_size=0.1, num_adapt=2),
    "gaussian_mh": fedmcmc.gaussian_mh(POSTERIOR, APPROXIMATION, correlation=0.5),
    "multiple_try": fedmcmc.multiple_try(POSTERIOR, APPROXIMATION, num_tries=4),
}
# These kernels send exact parts only.
GIBBS = {
    "fed_gibbs": fedmcmc.fed_gibbs(
        with_latents(POSTERIOR, (False,)),
        refresh=fedmcmc.hierarchy.independence(),
        participation=fedmcmc.uniform(2),
    ),
    "fed_gibbs_rows": fedmcmc.fed_gibbs(
        with_latents(POSTERIOR, (True,)), refresh=fedmcmc.hierarchy.independence()
    ),
}
COMPRESSORS = {
    "identity": fedmcmc.compression.identity(),
    "quantize": fedmcmc.quantize(8),
    "memory": fedmcmc.memory(fedmcmc.quantize(8)),
}
OF_GRADIENTS = {"top_k": fedmcmc.top_k(0.5, error_feedback=False)}
PARTICIPATIONS = {
    "full": fedmcmc.full(),
    "bernoulli": fedmcmc.bernoulli(0.7),
    "uniform": fedmcmc.uniform(2),
}


def run(kernel, data, **settings):
    return fedmcmc.sample(
        KEY, kernel, data, POSITION, num_rounds=3, num_chains=2, progress=False, **settings
    )


def leaves(samples):
    parts = (samples.draws, dict(samples.info), samples.totals, samples.state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(parts)]


# Latents and their sums differ in the last bit between devices with different bounds on rows.
ROUNDED = ("fed_gibbs_rows",)


def compare(kernel, *, on_mesh, rounded=False):
    """Compare clients one by one with two devices and, up to rounding, with all clients together.

    These are laws 2 and 8 of DESIGN.md.
    """
    if not on_mesh:  # pooled rows belong to one client, which one device computes
        with pytest.raises(ValueError, match="mesh"):
            run(kernel, DATA, mesh=MESH)
    reference = leaves(run(kernel, DATA, placement=fedmcmc.Placement(clients_at_a_time=1)))
    assert all(np.isfinite(leaf).all() for leaf in reference)
    if on_mesh:
        spread = fedmcmc.Placement(mesh=MESH, clients_at_a_time=1)
        for a, b in zip(reference, leaves(run(kernel, DATA, placement=spread)), strict=True):
            if rounded:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(a, b)
    for a, b in zip(reference, leaves(run(kernel, DATA)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def check_independence(kernel):
    """Check that a client's new state depends only on its own rows and the broadcast.

    These are laws 1 and 3 of DESIGN.md.
    """
    start = kernel.init(jax.random.key(0), POSITION, DATA)
    client_states = []
    for data in (DATA, make_data(shifted=(2,))):
        _, step = fedmcmc.simulate(kernel, data)
        client_states.append(step(KEY, start)[0].clients)
    for a, b in zip(*map(jax.tree.leaves, client_states), strict=True):
        np.testing.assert_array_equal(a[:2], b[:2])


def bare_kernels(name):
    """Return the kernel with each participation rule that it supports."""
    if name in KERNELS:
        return {rule: KERNELS[name](dict(participation=p)) for rule, p in PARTICIPATIONS.items()}
    return {"fixed": (FIXED | POOLED | ACCEPT_REJECT | GIBBS)[name]}


def compressors(name):
    """Return the compressors that the kernel supports."""
    if name in GIBBS:
        return {"identity": fedmcmc.compression.identity()}
    if name not in ACCEPT_REJECT:
        return COMPRESSORS
    of_gradients = OF_GRADIENTS if ACCEPT_REJECT[name].uses_gradients else {}
    return {"identity": fedmcmc.compression.identity(), **of_gradients}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for rule, bare in bare_kernels(name).items():
            for compressor_name, compressor in compressors(name).items():
                print(name, rule, compressor_name, flush=True)
                kernel = fedmcmc.compress(bare, compressor)
                compare(kernel, on_mesh=name not in POOLED, rounded=name in ROUNDED)
                if name not in POOLED:
                    check_independence(kernel)
    print("same")
