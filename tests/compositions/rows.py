"""Every kernel with compressors and participations, computed in three ways.

``python -m tests.compositions.rows NAME ...``, to be run with two devices of the host; prints
``same``.
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
    return lambda given: build(
        POSTERIOR,
        inference=inference.scaled_identity(mean, precision_per_row=0.5),
        damping=0.2,
        initial_precision=0.5,
        **given,
    )


KERNELS = {
    "lsd": lambda given: fedmcmc.lsd(POSTERIOR, step_size=0.01, batch_size=2, **given),
    "lsd_star": lambda given: fedmcmc.lsd_star(
        POSTERIOR, POSITION, step_size=0.01, batch_size=2, **given
    ),
    "lsd_pp": lambda given: fedmcmc.lsd_pp(
        POSTERIOR, step_size=0.01, batch_size=2, refresh_every=2, **given
    ),
    "fed_be": lambda given: fedmcmc.fed_be(POSTERIOR, **TRAINING, **given),
    "fa_ld": lambda given: fedmcmc.fa_ld(
        POSTERIOR, step_size=0.01, num_local_steps=2, batch_size=2, **given
    ),
    "fa_hmc": lambda given: fedmcmc.fa_hmc(
        POSTERIOR, step_size=0.05, num_integration_steps=2, num_local_steps=2, rho=0.5, **given
    ),
    "fed_avg": lambda given: fedmcmc.fed_avg(POSTERIOR, **TRAINING, **given),
    "fed_pa": lambda given: fedmcmc.fed_pa(
        POSTERIOR,
        client_optimizer=optax.sgd(0.05),
        shrinkage=0.1,
        num_samples=2,
        num_local_steps=2,
        batch_size=2,
        **given,
    ),
    "fed_ep": sites(fedmcmc.fed_ep),
    "fed_sep": sites(fedmcmc.fed_sep),
    "adf": sites(fedmcmc.adf),
}
# Who takes part is a part of these.
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
# All take part: a server's memories of absent clients are refused where these keep latents.
FIXED["lsd_latents"] = fedmcmc.lsd(
    with_latents(POSTERIOR), step_size=0.01, refresh=fedmcmc.hierarchy.ula(num_steps=2)
)
POOLED = {
    "sgld": fedmcmc.sgld(POSTERIOR, step_size=0.01, batch_size=2),
    "psgld": fedmcmc.psgld(POSTERIOR, step_size=0.01, batch_size=2),
}
# Everyone takes part in these, and only what is a function of the message may compress it.
APPROXIMATION = fedmcmc.Gaussian.from_moments(POSITION, variance=0.3 + 0 * POSITION)
WHOLE = {
    "hmc": fedmcmc.hmc(POSTERIOR, POSITION, step_size=0.4, max_integration_steps=3),
    "hmc: noise": fedmcmc.hmc(POSTERIOR, POSITION, step_size=0.4, value_noise=0.5),
    "mala": fedmcmc.mala(POSTERIOR, POSITION, step_size=0.1, num_adapt=2),
    "gaussian_mh": fedmcmc.gaussian_mh(POSTERIOR, APPROXIMATION, correlation=0.5),
    "multiple_try": fedmcmc.multiple_try(POSTERIOR, APPROXIMATION, num_tries=4),
}
# What these send is exact.
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
    "identity": fedmcmc.identity(),
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


# Latents and what is made of them differ in the last bit where a device's bound on rows is another.
ROUNDED = ("fed_gibbs_rows",)


def compare(kernel, *, on_mesh, rounded=False):
    """Laws 2 and 8: the same numbers one by one, on two devices and, up to rounding, together."""
    if not on_mesh:  # whose one client cannot be spread
        with pytest.raises(ValueError, match="mesh"):
            run(kernel, DATA, mesh=MESH)
    alone = fedmcmc.Placement(clients_at_a_time=1)
    one = leaves(run(kernel, DATA, placement=alone))
    assert all(np.isfinite(leaf).all() for leaf in one)
    if on_mesh:
        spread = fedmcmc.Placement(mesh=MESH, clients_at_a_time=1)
        for a, b in zip(one, leaves(run(kernel, DATA, placement=spread)), strict=True):
            if rounded:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(a, b)
    for a, b in zip(one, leaves(run(kernel, DATA)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def alone(kernel):
    """Laws 1 and 3: what a client keeps of a round follows from its own rows and the broadcast."""
    start = kernel.init(jax.random.key(0), POSITION, DATA)
    kept = []
    for data in (DATA, make_data(shifted=(2,))):
        _, step = fedmcmc.simulate(kernel, data)
        kept.append(step(KEY, start)[0].clients)
    for a, b in zip(*map(jax.tree.leaves, kept), strict=True):
        np.testing.assert_array_equal(a[:2], b[:2])


def bare_kernels(name):
    """Return the kernel with each participation that it can have."""
    if name in KERNELS:
        return {rule: KERNELS[name](dict(participation=p)) for rule, p in PARTICIPATIONS.items()}
    return {"its own": (FIXED | POOLED | WHOLE | GIBBS)[name]}


def compressors(name):
    """Return the compressors that the kernel can have."""
    if name in GIBBS:
        return {"identity": fedmcmc.identity()}
    if name not in WHOLE:
        return COMPRESSORS
    of_gradients = OF_GRADIENTS if WHOLE[name].uses_gradients else {}
    return {"identity": fedmcmc.identity(), **of_gradients}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for rule, bare in bare_kernels(name).items():
            for coded, compressor in compressors(name).items():
                print(name, rule, coded, flush=True)
                kernel = fedmcmc.compress(bare, compressor)
                compare(kernel, on_mesh=name not in POOLED, rounded=name in ROUNDED)
                if name not in POOLED:
                    alone(kernel)
    print("same")
