"""LSD, QLSD, QLSD* and QLSD++ have exactly the law of the closed form, round by round.

Independent chains from one start are compared with the exact mean and covariance, of the chain and
of the clients' memories together, after every one of a few rounds: no burn-in, no tolerance.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from tests.oracles import chains, laws, laws_qlsd
from tests.oracles.chains import split_keys
from tests.oracles.federations import LIMIT, worst_z
from tests.oracles.federations_qlsd import Curved
from tests.support.lanes import fast_and_slow

NUM_CHAINS = 16384
NUM_ROUNDS = 5
FEDERATION = Curved()
P = np.array([0.5, 0.9, 0.6, 0.3])
RATES = np.array([0.3, 0.5, 0.2, 0.4])
OWN_KEEP = [0.3, 1.0, 0.6 * 0.7, 0.3]
"""Shares of entries that the clients' compressors keep: sparse, all, sparse twice."""
STEPS = [0.004, 0.008, 0.006, 0.009, 0.005]
TEMPERATURES = [2.0, 0.5, 0.0, 1.0, 3.0]
RULES = {
    "full": (fedmcmc.full, laws_qlsd.everyone),
    "bernoulli": (lambda: fedmcmc.bernoulli(P), lambda num: laws_qlsd.bernoulli(P)),
    "cohort": (lambda: fedmcmc.uniform(2), lambda num: laws_qlsd.cohorts(2, num)),
    "one": (lambda: fedmcmc.categorical(), lambda num: laws_qlsd.cohorts(1, num)),
    "realised": (
        lambda: fedmcmc.bernoulli(0.4, rescale="realised"),
        lambda num: laws_qlsd.realised(0.4, num),
    ),
}
CASES = {
    "lsd-split-minibatch": dict(rule="bernoulli", split=True, batch=3, temperature=TEMPERATURES),
    "lsd-cohort-distinct-rows": dict(rule="cohort", batch=3, replace=False, step_size=STEPS),
    "qlsd-sparse-realised": dict(rule="realised", keep=0.3, temperature=0.2),
    "star-off-the-mode": dict(rule="bernoulli", centre=True, batch=2, keep=0.4, temperature=0.1),
    "pp-memory-of-all": dict(rule="bernoulli", refresh_every=2, batch=2, keep=0.5, rates=RATES),
    "pp-memory-of-the-active": dict(
        rule="cohort", refresh_every=2, batch=2, keep=0.5, rates=0.4, memory_of="active"
    ),
    "pp-operators-per-client": dict(
        rule="bernoulli", refresh_every=2, batch=2, keep=OWN_KEEP, rates="default"
    ),
    "lsd": dict(rule="full", temperature=1.5),
    "lsd-one": dict(rule="one", batch=2),
    "lsd-realised-split": dict(rule="realised", split=True, batch=2),
    "qlsd-sparse": dict(rule="full", keep=0.3, split=True),
    "qlsd-sparse-bernoulli-minibatch": dict(rule="bernoulli", keep=0.3, batch=2, split=True),
    "star-split-realised": dict(rule="realised", centre=True, keep=0.5, split=True),
    "star-distinct-rows": dict(rule="full", centre=True, batch=3, replace=False, temperature=0.1),
    "fixed-point": dict(rule="bernoulli", centre=True, centred=False, batch=2, keep=0.5),
    "pp-split": dict(rule="bernoulli", refresh_every=2, batch=2, split=True, temperature=0.1),
    "pp-every-round": dict(rule="cohort", refresh_every=1, batch=2, keep=0.5, rates=RATES),
    "pp-memory-realised": dict(rule="realised", refresh_every=3, batch=2, keep=0.5, rates=RATES),
    # At a keep of one half the first squared deviation would be the same whatever is sent.
    "pp-memory-default-rate": dict(
        rule="full", refresh_every=3, batch=2, keep=0.6, rates="default"
    ),
    "qlsd-memory": dict(rule="bernoulli", keep=0.5, rates=0.5, step_size=STEPS),
    "qlsd-operators-per-client": dict(rule="full", keep=OWN_KEEP, temperature=0.2),
    "pp-thinned-twice": dict(rule="bernoulli", refresh_every=2, keep=(0.5, 0.6), rates=RATES),
}
FAST = (
    "lsd-split-minibatch",
    "lsd-cohort-distinct-rows",
    "qlsd-sparse-realised",
    "star-off-the-mode",
    "pp-memory-of-the-active",
)


def make_schedule(numbers):
    """Return a number, or a schedule from a list with a number per round."""
    if np.ndim(numbers) == 0:
        return numbers
    return lambda round_: jnp.asarray(numbers)[round_]


def build(federation, settings):
    """Return the kernel and its law."""
    settings = dict(step_size=0.006, temperature=1.0, keep=1.0) | settings
    options = dict(settings)
    rule, law_rule = RULES[options.pop("rule")]
    centre = federation.centre if options.pop("centre", False) else None
    public = dict(
        step_size=make_schedule(options["step_size"]),
        temperature=make_schedule(options["temperature"]),
        batch_size=options.get("batch"),
        replace=options.get("replace", True),
        participation=rule(),
        prior="split" if options.get("split") else "server",
    )
    keep = options.pop("keep")
    kernel = build_kernel(federation.posterior, centre, public, options, compressor(keep))
    sent = np.array(keep) if keep is OWN_KEEP else np.prod(keep)
    if isinstance(options.get("rates"), str):
        options["rates"] = sent  # 1 / (1 + omega)
    return kernel, federation.langevin(
        keep=sent,
        participation=law_rule(len(federation.sizes)),
        centre=centre,
        **options,
    )


def compressor(keep):
    if keep is OWN_KEEP:
        twice = fedmcmc.compression.chain(fedmcmc.sparsify(0.6), fedmcmc.sparsify(0.7))
        kinds = (fedmcmc.sparsify(0.3), fedmcmc.compression.identity(), twice)
        return fedmcmc.per_client(kinds, [0, 1, 2, 0])
    if np.ndim(keep):
        return fedmcmc.compression.chain(*map(fedmcmc.sparsify, keep))
    return None if keep == 1 else fedmcmc.sparsify(keep)


def build_kernel(posterior, centre, public, options, compressor_):
    """Return the published algorithm, or an uncompressed kernel under `compress`."""
    every, rate = options.get("refresh_every"), options.get("rates")
    rate = None if isinstance(rate, str) else rate
    if centre is not None and not options.get("centred", True):
        estimator = fedmcmc.minibatch(public.pop("batch_size"), replace=public.pop("replace"))
        kernel = fedmcmc.langevin(posterior, fedmcmc.fixed_point(estimator, centre), **public)
        return fedmcmc.compress(kernel, compressor_)
    if compressor_ is None:
        if every is not None:
            return fedmcmc.lsd_pp(posterior, refresh_every=every, **public)
        if centre is not None:
            return fedmcmc.lsd_star(posterior, centre, **public)
        return fedmcmc.lsd(posterior, **public)
    if every is not None:
        memory = dict(memory_rate=rate, memory_of=options.get("memory_of", "all"))
        public = public | memory | dict(refresh_every=every)
        return fedmcmc.qlsd_pp(posterior, compressor=compressor_, **public)
    if "rates" in options:
        compressor_ = fedmcmc.memory(compressor_, rate)
    if centre is not None:
        return fedmcmc.qlsd_star(posterior, centre, compressor=compressor_, **public)
    return fedmcmc.qlsd(posterior, compressor=compressor_, **public)


def get_state(state):
    """Return theta and the clients' memories, if there are any, as one vector."""
    position = state.broadcast.position
    memory = getattr(getattr(state.clients, "compressor", ()), "memory", position[:0])
    return jnp.concatenate([position, memory.reshape(-1)])


def run(kernel, federation, *, num_rounds=NUM_ROUNDS, seed=0, collect=get_state):
    """Return theta and memories after every round, ``[num_chains, num_rounds, D]``."""
    keys = split_keys(NUM_CHAINS, seed)
    return chains.run(kernel, federation.data, federation.start, keys, num_rounds, collect)


def get_state_and_server_memory(state):
    return jnp.concatenate([get_state(state), state.server.memory])


def assert_law(draws, law, start):
    size = draws.shape[-1]
    for round_, expected in enumerate(law.rounds(start, draws.shape[1])[1:]):
        visible = laws.push(expected, np.eye(size, len(expected.mean)))
        assert worst_z(draws[:, round_], visible) < LIMIT, f"after {round_ + 1} rounds"


@pytest.mark.parametrize("case", fast_and_slow(CASES, FAST, ["pp-memory-of-the-active"]))
def test_law_of_every_round(case):
    kernel, law = build(FEDERATION, CASES[case])
    if case != "pp-memory-of-all":
        assert_law(run(kernel, FEDERATION), law, FEDERATION.start)
        return
    # The server never receives a memory: it adds up what changes them.
    draws = run(kernel, FEDERATION, collect=get_state_and_server_memory)
    draws, total = draws[..., :-3], draws[..., -3:]
    memories = draws[..., 3:].reshape(*draws.shape[:2], 4, 3)
    np.testing.assert_allclose(total, memories.sum(2), rtol=1e-5, atol=1e-4)
    assert_law(draws, law, FEDERATION.start)


def cold_at_first(round_):
    return jnp.where(round_ == 0, 0.0, 0.5)


@pytest.mark.parametrize("rates", [np.zeros(4), RATES], ids=["forgetful", "memory"])
def test_law_of_two_quantised_rounds(rates):
    """Rounding to levels of the norm; the first round has no other noise but participation."""
    kernel = fedmcmc.qlsd_pp(
        FEDERATION.posterior,
        compressor=fedmcmc.quantize(2),
        memory_rate=jnp.asarray(rates),
        refresh_every=1,
        batch_size=None,
        step_size=0.006,
        temperature=cold_at_first,
        participation=fedmcmc.bernoulli(P),
    )
    expected = FEDERATION.quantised(
        num_levels=2,
        step_sizes=(0.006, 0.006),
        temperature=0.5,
        participation=laws_qlsd.bernoulli(P),
        rates=rates,
    )
    draws = run(kernel, FEDERATION, num_rounds=2)
    for round_, law in enumerate(expected):
        assert worst_z(draws[:, round_, :3], law) < LIMIT, f"after {round_ + 1} rounds"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.parametrize("case", ["star-off-the-mode", "pp-memory-of-all"])
def test_law_on_other_federations(case, seed):
    federation = Curved(seed)
    kernel, law = build(federation, CASES[case])
    assert_law(run(kernel, federation, seed=seed), law, federation.start)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pp-every-round", "qlsd-sparse-realised"])
def test_law_after_many_rounds_is_stationary(case):
    kernel, law = build(FEDERATION, CASES[case])
    limit, late = law.stationary(), law.rounds(FEDERATION.start, 120)[-1]
    scale = np.sqrt(np.diag(limit.covariance))
    # Far below the standard error of the draws.
    assert np.abs((late.mean - limit.mean) / scale).max() < 1e-3
    assert np.abs((late.covariance - limit.covariance) / np.outer(scale, scale)).max() < 1e-3
    draws = run(kernel, FEDERATION, num_rounds=120)[:, -1]
    visible = laws.push(limit, np.eye(draws.shape[-1], len(scale)))
    assert worst_z(draws, visible) < LIMIT
