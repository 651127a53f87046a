"""Fits that several tests share."""

import jax
import pytest

import fedmcmc
from tests.fitting import models


@pytest.fixture(scope="session")
def poisson_fit():
    data, key = models.count_data(), jax.random.key(11)
    return fedmcmc.fit(models.poisson, data, rng_key=key, progress=False)
