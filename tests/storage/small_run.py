"""A run of a second, for tests of what it leaves in a directory."""

import jax
import jax.numpy as jnp

import fedmcmc
from tests.support import killed_run


def kernel(**settings):
    given = dict(step_size=1e-3, batch_size=2) | settings
    return fedmcmc.lsd(killed_run.posterior(), **given)


def run(folder, num_rounds=60, *, seed=0, chosen=None, draws_to=None, **settings):
    """Run `num_rounds` in all, with a checkpoint in `folder` if one is given."""
    return fedmcmc.sample(
        jax.random.key(seed),
        kernel() if chosen is None else chosen,
        killed_run.data(),
        jnp.zeros(3),
        num_rounds=num_rounds,
        num_chains=2,
        progress=False,
        record=fedmcmc.Record(draws_to=draws_to),
        **(dict(checkpoint=None if folder is None else fedmcmc.Checkpoint(folder)) | settings),
    )


def numbers(samples):
    return killed_run.numbers(samples)
