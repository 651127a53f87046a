"""FSGLD whose surrogates are refitted at given rounds has exactly the law of the closed form.

The expansion of a Gaussian client is exact at every point. Given the set of clients that have
refitted, a visit is an affine map with the first or the exact surrogate of each client. The law
after a round is a mixture over these sets, and the visits decide them.
"""

import functools
import itertools

import numpy as np
import pytest

import fedmcmc
from tests.oracles import laws
from tests.oracles.chains import run, split_keys
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
    """Return the first surrogates, and their ``(precisions, means)``, zero for flat ones."""
    if structure != "flat":
        return FEDERATION.surrogates(structure)
    zeros = np.zeros_like(FEDERATION.precisions), np.zeros_like(FEDERATION.means)
    return fedmcmc.Gaussian(zeros[1], zeros[0], "dense"), zeros


def refreshed_law(structure, *, every, until, batch=None, num_rounds=NUM_ROUNDS, **settings):
    """Return the laws after ``0 .. num_rounds`` rounds."""
    first = first_surrogates(structure)[1]
    exact = (FEDERATION.precisions, FEDERATION.means)
    num = len(F)

    @functools.cache
    def relay(fitted):
        surrogates = [
            np.stack([new[i] if i in fitted else old[i] for i in range(num)])
            for old, new in zip(first, exact, strict=True)
        ]
        return FEDERATION.law(
            surrogates=surrogates, batch=batch, probabilities=F, step_size=STEP_SIZE, **settings
        )

    start = laws.at_point(FEDERATION.start)
    parts = {frozenset(): (1.0, start)}
    after_rounds = [start]
    for round_ in range(num_rounds):
        # The first surrogates answer a refresh of round zero.
        refits = every <= round_ < until
        ways = {}
        for fitted, (weight, law) in parts.items():
            for s in range(num):
                visited = relay(fitted).visit(s, law, relay(fitted).lengths[s])
                ways.setdefault(fitted | {s} if refits else fitted, []).append(
                    (weight * F[s], visited)
                )
        parts = {}
        for fitted, pairs in ways.items():
            weights = np.array([weight for weight, _ in pairs])
            mixed = laws.mixture(weights / weights.sum(), [law for _, law in pairs])
            parts[fitted] = (weights.sum(), mixed)
        after_rounds.append(laws.mixture(*zip(*parts.values(), strict=True)))
    return after_rounds


@pytest.mark.parametrize("case", fast_and_slow(CASES, ["half"]))
def test_law_while_surrogates_are_refitted_and_after(case):
    settings = dict(CASES[case])
    structure = settings.pop("structure")
    public = {"batch_size" if key == "batch" else key: x for key, x in settings.items()}
    kernel = fedmcmc.fsgld(
        FEDERATION.posterior,
        first_surrogates(structure)[0],
        step_size=STEP_SIZE,
        probabilities=F,
        refresh_every=2,
        refresh_until=5,
        **public,
    )
    keys = split_keys(NUM_CHAINS, seed=2)
    draws = run(kernel, FEDERATION.data, FEDERATION.start, keys, NUM_ROUNDS)
    expected = refreshed_law(structure, every=2, until=5, **settings)
    for round_ in COMPARED:
        assert worst_z(draws[:, round_ - 1], expected[round_]) < LIMIT, f"after {round_} rounds"


def test_the_law_depends_on_what_is_refitted_and_when():
    """The test above can fail: other schedules have other laws."""
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
    for earlier, later in itertools.pairwise(several):
        assert max(map(measure_distance, earlier, later)) > 3 * LIMIT


def measure_distance(a, b):
    """Return the largest difference in standard errors of the draws."""
    variance = np.diag(a.covariance)
    of_mean = np.abs(a.mean - b.mean) / np.sqrt(variance)
    of_variance = np.abs(variance - np.diag(b.covariance)) / (np.sqrt(2) * variance)
    return np.sqrt(NUM_CHAINS) * max(of_mean.max(), of_variance.max())
