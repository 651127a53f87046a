"""A run of less than a second, for tests of what it leaves in a directory."""

import jax
import jax.numpy as jnp

import fedmcmc
from tests.support import killed_run


def kernel(**settings):
    settings = dict(step_size=1e-3, batch_size=2) | settings
    return fedmcmc.lsd(killed_run.posterior(), **settings)


def run(folder, num_rounds=60, *, seed=0, chosen=None, draws_to=None, **settings):
    """Run until round `num_rounds`, with a checkpoint in `folder` unless it is None."""
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


def rule_at(num_draws, then=lambda num: None, spacing=20, name="enough draws"):
    """Return a rule that stops a run at `num_draws`; each check first calls `then`."""

    def check(draws):
        num = len(draws[0])
        then(num)
        return fedmcmc.diagnostics.StopDecision(num >= num_draws, {})

    return fedmcmc.diagnostics.StoppingRule(lambda num: num + spacing, check, name)
