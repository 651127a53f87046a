"""Gibbs sampling over clients: the law of every round, exact in the long run whoever takes part."""

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc.hierarchy import conjugate, hmc, independence
from tests.oracles import laws_joint
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_gibbs import DATA, MODEL, POSTERIOR, SLICED
from tests.oracles.federations_joint import PROBABILITIES, START, joint_vector
from tests.support.lanes import fast_and_slow

NUM_CHAINS, ROUNDS = 8192, (1, 3, 10)
CASES = {
    "all clients": (np.ones(3), fedmcmc.full()),
    "some clients": (PROBABILITIES, fedmcmc.bernoulli(PROBABILITIES)),
}


def run(posterior, refresh, num_rounds, **settings):
    return fedmcmc.sample(
        jax.random.key(5),
        fedmcmc.fed_gibbs(posterior, refresh=refresh, **settings),
        DATA,
        START,
        num_rounds=num_rounds,
        num_chains=NUM_CHAINS,
        collect=joint_vector,
        progress=False,
    ).draws


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["some clients"]))
def test_law_of_every_round(case):
    probabilities, participation = CASES[case]
    draws = run(POSTERIOR, conjugate(), max(ROUNDS), participation=participation)
    rounds = [
        (chance, laws_joint.gibbs_round(MODEL, weights > 0))
        for chance, weights in laws_joint.cohorts(probabilities)
    ]
    laws = laws_joint.laws_of(rounds, MODEL.at_modes(START), max(ROUNDS))
    for round_ in ROUNDS:
        assert worst_z(draws[:, round_ - 1], laws[round_]) < LIMIT, f"after {round_} rounds"


SERVERS = {
    "slices": (SLICED, conjugate(), dict(server_moves=2)),
    "slices, metropolis": (SLICED, independence(num_tries=2), dict(server_moves=1)),
    "trajectories": (POSTERIOR, hmc(4, num_steps=3, num_adapt=10), {}),
    "sums anew": (POSTERIOR, conjugate(), dict(resum_every=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVERS)
def test_in_the_long_run_it_is_the_posterior(case):
    posterior, refresh, settings = SERVERS[case]
    draws = run(posterior, refresh, 24, **settings)
    for round_ in (20, 24):
        assert worst_z(draws[:, round_ - 1], MODEL.posterior) < LIMIT, f"after {round_} rounds"
