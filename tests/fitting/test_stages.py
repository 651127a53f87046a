"""Tests of the list of stages of a fit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc.fitting._modes import ModeSearch, PosteriorMode
from fedmcmc.fitting._report import StageReport
from fedmcmc.fitting._stages import WEIGHTING, Problem, StageResult, StageResults, Step, run_steps
from fedmcmc.runs import SimulatedConsortium
from tests.fitting.test_modes import FEDERATION

PROBLEM = Problem(
    FEDERATION.posterior,
    SimulatedConsortium(FEDERATION.data),
    jax.random.key(0),
    num_draws=100,
    effort="auto",
    max_rounds=100,
    latency=0.0,
    position=None,
    progress=False,
)


def results(clipped):
    mode = PosteriorMode(np.zeros(3), 0.0, np.eye(3), 0.0, clipped, np.zeros((3, clipped)))
    return StageResults(ModeSearch((mode,), 8, jnp.zeros(3), 0, 0.0, 0.0))


def add_caveat(problem, results):
    row = StageReport("caveat", "none", 1, 2.0, 3.0)
    return StageResult(row, replace(results, caveats=(*results.caveats, "caveat")))


def test_stages_run_if_they_are_needed():
    has_no_caveat = lambda problem, results: not results.caveats  # noqa: E731
    steps = [Step("caveat", add_caveat, has_no_caveat)] * 2
    after = run_steps(PROBLEM, steps, results(clipped=0))
    assert after.caveats == ("caveat",) and after.rows[0].seconds > 0
    assert [row.stage for row in after.rows] == ["caveat"]


def test_no_draws_are_weighted_without_a_mode():
    before = results(clipped=1)
    assert run_steps(PROBLEM, WEIGHTING, before) is before
