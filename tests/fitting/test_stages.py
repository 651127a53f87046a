"""Tests of the list of stages of a fit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc.fitting._decisions import MAX_PARAMETERS, _find_reason_to_stop
from fedmcmc.fitting._modes import ModeSearch, PosteriorMode
from fedmcmc.fitting._report import StageReport
from fedmcmc.fitting._stages import WEIGHTING, Problem, StageResult, StageResults, Step, run_steps
from fedmcmc.runs import SimulatedConsortium
from fedmcmc.types import as_functions
from tests.fitting.models import FEDERATION

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


def results(clipped=0, size=3, unidentified=(), caveats=()):
    mode = PosteriorMode(np.zeros(size), 0.0, np.eye(size), 0.0, clipped, np.zeros((size, clipped)))
    search = ModeSearch((mode,), 8, jnp.zeros(size), 0, 0.0, 0.0, unidentified)
    return StageResults(search, caveats=caveats)


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


@pytest.mark.parametrize(
    ("message", "changes", "after"),
    [
        ("", {}, results()),
        (
            '2,001 parameters: effort="exact" would run up to 100 rounds',
            {},
            results(size=MAX_PARAMETERS + 1),
        ),
        ('effort="exact" would take up to 1,050 rounds, 2.6 hours', {"latency": 9.0}, results()),
        ("no draws can pass", {}, results(caveats=("rounding",))),
        ("no row depends on a, b: change the model", {}, results(unidentified=("a", "b"))),
    ],
)
def test_auto_has_a_reason_to_run_no_chains(message, changes, after):
    problem = replace(PROBLEM, **changes)
    reason = _find_reason_to_stop(problem, after)
    assert reason.startswith(message) and bool(reason) == bool(message)
    assert _find_reason_to_stop(replace(problem, effort="exact"), after) == ""


def test_auto_runs_no_chains_if_an_effect_is_not_marked_as_local():
    def model(y=None):
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, spread))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    data = fedmcmc.FederatedData.from_clients([{"y": np.zeros(3) + i} for i in range(3)])
    with pytest.warns(UserWarning, match="Site 'effect' has one value for all clients"):
        posterior = fedmcmc.from_numpyro(model, example=data)
    assert posterior.unmarked_local == ("effect",)
    problem = replace(PROBLEM, posterior=as_functions(posterior))
    assert _find_reason_to_stop(problem, results()).startswith("effect may lack infer=")
    assert _find_reason_to_stop(replace(problem, effort="exact"), results()) == ""
