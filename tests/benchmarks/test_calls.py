"""The second call of a function, with other data of the same shapes, compiles nothing."""

import functools
import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from benchmarks.calls import CALLS, draw_cases
from benchmarks.timing import count_programs
from tests.support.lanes import fast_and_slow

FAST = (
    "fit, NumPyro model",
    "correct",
    "whiten",
    "sample, lsd",
    "tune",
    "criticism.loo",
    "criticism.predictive_check",
    "criticism.leave_out",
    "criticism.conflict",
    "local_draws",
    "hierarchy.unpooled",
    "hierarchy.new_group",
    "hierarchy.few_groups_warning",
    "tuning.noise_at_mode",
    "tuning.relay_constants",
    "real sites, lsd",
)


@pytest.mark.parametrize("name", fast_and_slow(CALLS, FAST))
def test_second_call_compiles_nothing(name):
    first, second = draw_cases()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CALLS[name](first)
        with count_programs() as programs:
            CALLS[name](second)
    assert not programs
