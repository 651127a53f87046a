"""Langevin dynamics on shared parameters and latents: the law of every round, at any step size."""

import numpy as np
import pytest

import fedmcmc
from fedmcmc.hierarchy import conjugate, independence, ula
from tests.oracles import laws_joint
from tests.oracles.chains import run, split_keys
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_joint import (
    DATA,
    MODEL,
    POSTERIOR,
    PROBABILITIES,
    START,
    joint_vector,
)
from tests.support.lanes import fast_and_slow

NUM_CHAINS, ROUNDS = 8192, (1, 3, 10)
STEP = 0.06
METRIC = np.array([[0.8, 0.3], [0.3, 1.2]])
SOME = dict(participation=fedmcmc.bernoulli(PROBABILITIES))


def langevin(steps):
    return ula(0.6, num_steps=steps), lambda group: laws_joint.ula(group, 0.6, steps)


CASES = {
    "refresh first": (langevin(1), {}),
    "gradient first": (langevin(1), dict(order="gradient_first")),
    "three steps": (langevin(3), {}),
    "three steps, gradient first": (langevin(3), dict(order="gradient_first")),
    "some clients": (langevin(3), SOME),
    "exact": ((conjugate(), laws_joint.exact), {}),
    "exact, many draws": ((conjugate(), laws_joint.exact), dict(num_draws=3)),
    "exact, a metric": ((conjugate(), laws_joint.exact), dict(metric=METRIC)),
    "exact, some clients": ((conjugate(), laws_joint.exact), SOME),
    # All six tries are rejected so rarely that the latents are exact draws.
    "independence": ((independence(num_tries=6), laws_joint.exact), {}),
}
FAST = ["exact, a metric"]


def compute_laws(case):
    (_, refresh), settings = CASES[case]
    settings = {"order": "refresh_first", **settings}
    probabilities = PROBABILITIES if settings.pop("participation", None) else np.ones(3)
    rounds = [
        (chance, laws_joint.langevin_round(MODEL, refresh, weights, step_size=STEP, **settings))
        for chance, weights in laws_joint.cohorts(probabilities)
    ]
    return laws_joint.laws_of(rounds, MODEL.at_modes(START), max(ROUNDS))


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST))
def test_law_of_every_round(case):
    (refresh, _), settings = CASES[case]
    kernel = fedmcmc.lsd(POSTERIOR, step_size=STEP, refresh=refresh, **settings)
    draws = run(kernel, DATA, START, split_keys(NUM_CHAINS, seed=4), max(ROUNDS), joint_vector)
    laws = compute_laws(case)
    for round_ in ROUNDS:
        assert worst_z(draws[:, round_ - 1], laws[round_]) < LIMIT, f"after {round_} rounds"
