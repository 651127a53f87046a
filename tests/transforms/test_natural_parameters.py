"""`natural_parameters` builds the same kernels as arguments of `fed_ep`."""

import chex
import optax
import pytest

import fedmcmc
from fedmcmc import inference
from tests.oracles.federations import Federation

FEDERATION = Federation()
SETTINGS = dict(
    damping=0.3,
    server_optimizer=optax.sgd(0.5, momentum=0.5),
    client_optimizer=optax.sgd(0.5, momentum=0.5),
    max_norm=20.0,
)


def fed_ep(**settings):
    return fedmcmc.fed_ep(
        FEDERATION.posterior,
        inference=inference.exact_gaussian(),
        structure="dense",
        first_sites="constant",
        initial_precision=1.0,
        cohort_size=2,
        **settings,
    )


def test_arguments_of_fed_ep_are_shorthands():
    """The transform must also reach a kernel inside another transform."""
    changed = fedmcmc.natural_parameters(fed_ep(damping=0.9), **SETTINGS)
    chex.assert_trees_all_equal(changed, fed_ep(**SETTINGS))
    code = fedmcmc.quantize(64)
    inner = fedmcmc.compress(fedmcmc.natural_parameters(fed_ep(), **SETTINGS), code)
    outer = fedmcmc.natural_parameters(fedmcmc.compress(fed_ep(), code), **SETTINGS)
    chex.assert_trees_all_equal(inner, outer)


@pytest.mark.parametrize(
    ("kernel", "settings", "message"),
    [
        (
            lambda: fedmcmc.lsd(FEDERATION.posterior, step_size=0.1),
            {},
            "messages of lsd are not changes of natural parameters",
        ),
        (
            lambda: fedmcmc.adf(FEDERATION.posterior, inference=inference.exact_gaussian()),
            dict(client_optimizer=optax.sgd(0.1)),
            "clients of adf keep no sites",
        ),
        (fed_ep, dict(damping=0.0), "damping must be a finite number above 0"),
    ],
)
def test_unsuitable_kernels_and_settings_are_refused(kernel, settings, message):
    with pytest.raises(ValueError, match=message):
        fedmcmc.natural_parameters(kernel(), **settings)
