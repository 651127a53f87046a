"""FSGLD whose surrogates are refitted at given rounds has the very law of the closed form.

Of a Gaussian client an expansion is exact wherever it is taken. So given who has refitted, a visit
is an affine map with the first or the exact surrogate of each client; the law after a round is a
mixture over who has, which the visits decide.
"""

import itertools

import jax
import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws
from tests.oracles.federations import LIMIT, Federation, worst_z
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
NUM_ROUNDS = 8
FEDERATION = Federation()
F = Federation.probabilities
STEP_SIZE = 0.006
CASES = {
    "flat": dict(structure="flat", num_local_steps=5, batch=3),
    "half": dict(structure="flat", num_local_steps=(2, 7, 1, 4), alpha=0.5),
    "dense": dict(structure="dense", num_local_steps=5),
}
COMPARED = (3, 4, 5, 6, 8)


def first_surrogates(structure):
    """Return the first surrogates, and their ``(precisions, means)``; flat ones know nothing."""
    if structure != "flat":
        return FEDERATION.surrogates(structure)
    zeros = np.zeros_like(FEDERATION.precisions), np.zeros_like(FEDERATION.means)
    return fedmcmc.Gaussian(zeros[1], zeros[0], "dense"), zeros


def refreshed_law(structure, *, every, until, batch=None, num_rounds=NUM_ROUNDS, **settings):
    """Return the laws after ``0 .. num_rounds`` rounds."""
    first = first_surrogates(structure)[1]
    exact = (FEDERATION.precisions, FEDERATION.means)
    num = len(F)

    def visit(law, fitted, s):
        surrogates = [
            np.stack([new[i] if i in fitted else old[i] for i in range(num)])
            for old, new in zip(first, exact, strict=True)
        ]
        relay = FEDERATION.law(
            surrogates=surrogates, batch=batch, probabilities=F, step_size=STEP_SIZE, **settings
        )
        alone = relay._replace(probabilities=np.eye(num)[s])
        return alone.after(law, relay.lengths[s])

    dimension = len(FEDERATION.start)
    start = laws.Moments(FEDERATION.start, np.zeros((dimension, dimension)))
    parts = {frozenset(): (1.0, start)}
    found = [start]
    for round_ in range(num_rounds):
        # A refresh of round zero has been answered by the first surrogates.
        refits = every <= round_ < until
        ways = {}
        for fitted, (weight, law) in parts.items():
            for s in range(num):
                after = fitted | {s} if refits else fitted
                ways.setdefault(after, []).append((weight * F[s], visit(law, fitted, s)))
        parts = {}
        for fitted, some in ways.items():
            weights = np.array([w for w, _ in some])
            mixed = laws.mixture(weights / weights.sum(), [law for _, law in some])
            parts[fitted] = (weights.sum(), mixed)
        found.append(laws.mixture(*zip(*parts.values(), strict=True)))
    return found


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["half"]))
def test_law_while_surrogates_are_refitted_and_after(case):
    given = dict(CASES[case])
    structure = given.pop("structure")
    public = {"batch_size" if key == "batch" else key: x for key, x in given.items()}
    kernel = fedmcmc.fsgld(
        FEDERATION.posterior,
        first_surrogates(structure)[0],
        step_size=STEP_SIZE,
        probabilities=F,
        refresh_every=2,
        refresh_until=5,
        **public,
    )
    draws = fedmcmc.sample(
        jax.random.key(2),
        kernel,
        FEDERATION.data,
        FEDERATION.start,
        num_rounds=NUM_ROUNDS,
        num_chains=NUM_CHAINS,
        progress=False,
    ).draws
    expected = refreshed_law(structure, every=2, until=5, **given)
    for round_ in COMPARED:
        assert worst_z(draws[:, round_ - 1], expected[round_]) < LIMIT, f"after {round_} rounds"


def test_the_law_knows_what_is_refitted_and_when():
    """So that the test above could fail: other schedules have other laws."""
    start = FEDERATION.start
    settings = dict(num_local_steps=5)
    never = refreshed_law("dense", every=9, until=9, **settings)
    fixed = FEDERATION.law(
        surrogates=FEDERATION.surrogates("dense")[1],
        probabilities=F,
        step_size=STEP_SIZE,
        **settings,
    ).rounds(start, NUM_ROUNDS)
    for a, b in zip(never, fixed, strict=True):
        np.testing.assert_allclose(a.mean, b.mean, rtol=1e-10)
        np.testing.assert_allclose(a.covariance, b.covariance, rtol=1e-10, atol=1e-14)
    several = [
        [refreshed_law("flat", every=2, until=until, **settings)[i] for i in COMPARED]
        for until in (2, 3, 4, 5)
    ]
    for some, others in itertools.pairwise(several):
        assert max(map(apart, some, others)) > 3 * LIMIT


def apart(a, b):
    """Return the largest difference in standard errors of the draws."""
    variance = np.diag(a.covariance)
    of_mean = np.abs(a.mean - b.mean) / np.sqrt(variance)
    of_variance = np.abs(variance - np.diag(b.covariance)) / (np.sqrt(2) * variance)
    return np.sqrt(NUM_CHAINS) * max(of_mean.max(), of_variance.max())
