"""Only a site can compute its draws, and only the server its noise."""

import hashlib
import stat
from contextlib import nullcontext
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy, random, rounds, wire
from fedmcmc.deploy._frames import Frame, Tag, pack, unpack
from fedmcmc.deploy._secret import SECRET, SiteSecret
from fedmcmc.deploy._seeds import key_of_seed
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.lanes import fast_and_slow
from tests.support.recorded_sites import frames_of, record_run, run_over
from tests.support.site_runs import ONE_BY_ONE, public_keys

CHAIN_KEY = jax.random.fold_in(KEY, 0)
"""Key of the only chain of a run."""
SIZES = dict(zip(studies.NAMES, (7, 6, 5), strict=True))
BATCH_SIZE = 4
ROWS = {
    name: {"x": np.random.default_rng(i).normal(size=(n, 3)).astype(np.float32)}
    for i, (name, n) in enumerate(SIZES.items())
}
START = jnp.zeros(3)
STEP_SIZE = 2.0**-5
LIMIT = 5.0
"""Standard errors within which a figure must lie."""


MODEL = studies.straight({})


@pytest.fixture(autouse=True, scope="module")
def shared_model():
    """Give all studies one model, so that their runs share compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "straight", lambda settings: MODEL)
        yield


MASKS = dict(identities={name: studies.public_key(name) for name in SIZES}, rounds=1000)


def study_of(kernel="plain_kernel", settings=(), **changes):
    """Return a study of a model whose gradients are sums of rows."""
    return studies.study_of(
        posterior=f"{studies.HERE}:straight",
        kernels={"main": f"{studies.HERE}:{kernel}"},
        sites=SIZES,
        settings=dict(settings),
        **changes,
    )


def minibatches(kernel="plain_kernel", **changes):
    return study_of(kernel, {"batch_size": BATCH_SIZE}, **changes)


def record(study, folder, **settings):
    """Return each site's requests and answers, and the samples."""
    return record_run(study, folder, rows=ROWS, **(dict(position=START) | settings))


def simulate(study, *, key=KEY, **settings):
    data = fedmcmc.FederatedData.from_clients(list(ROWS.values()))
    settings = dict(progress=False, placement=ONE_BY_ONE) | settings
    return fedmcmc.sample(key, study.kernel("main"), data, START, **settings)


def messages_of(pairs, num_chains=1):
    """Return a site's messages ``[num_rounds, num_chains, 3]``."""
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    answers = [unpack(answer.body, 2 * num_chains) for _, answer in frames_of(pairs, "step")]
    return np.array([[wire.decode(part, like) for part in a[:num_chains]] for a in answers])


def predict_counts(study, name, num_rounds):
    """Return how often each row is in a site's minibatches, if the chain's key draws them.

    The shape is ``[num_rounds, size]``.
    """
    index, size = list(SIZES).index(name), SIZES[name]
    numbers = np.broadcast_to(np.arange(size, dtype=np.float32)[:, None], (size, 3))
    client, phase = study.client(index, {"x": numbers}), study.kernel("main").phases[-1]

    @jax.jit
    @jax.vmap
    def draw(round_):
        key = random.client_key(CHAIN_KEY, round_, index)
        return phase.prepare(key, fedmcmc.types.Broadcast(round_, START), client)

    leaves = jax.tree.leaves(draw(jnp.arange(num_rounds)))
    (rows,) = [leaf for leaf in leaves if leaf.shape[-2:] == (BATCH_SIZE, 3)]
    indices = np.asarray(rows)[..., 0].reshape(num_rounds, -1).astype(int)
    return np.array([np.bincount(places, minlength=size) for places in indices])


def totals_of(positions, chain_key):
    """Return the sums of all messages, from a chain's positions and the key of its noise."""
    kernel = studies.plain_kernel(studies.straight({}), {})
    federation = fedmcmc.FederatedData.from_clients(list(ROWS.values())).federation
    server = kernel.server_init(KEY, START, federation, ())[1]
    totals = []
    for number, (before, after) in enumerate(pairwise(positions)):
        broadcast = fedmcmc.types.Broadcast(jnp.int32(number), jnp.asarray(before))
        nothing = rounds.server_step(kernel, 0, chain_key, broadcast, server, jnp.zeros(3))[0]
        totals.append((after - np.asarray(nothing.position)) / STEP_SIZE)
    return np.array(totals)


# A server that stores all messages


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_server_cannot_tell_which_rows_are_in_a_minibatch(reproducible, tmp_path):
    study = minibatches(reproducible=reproducible)
    pairs, _ = record(study, tmp_path, num_rounds=30)
    hits = []
    for name, size in SIZES.items():
        predicted = size / BATCH_SIZE * predict_counts(study, name, 30) @ ROWS[name]["x"]
        hits += [*(np.abs(predicted - messages_of(pairs[name])[:, 0]).max(axis=1) < 1e-4)]
    assert np.mean(hits) == 1 if reproducible else np.mean(hits) < 0.05


@pytest.mark.parametrize("public", [True, False])
def test_totals_under_masks_are_no_linear_system_of_rows(public, tmp_path):
    """The server computes totals without its noise; with the sites' keys it solves for rows."""
    study, num_rounds = minibatches("straight_kernel", secure=MASKS), 60
    with public_keys(1) if public else nullcontext():
        _, samples = record(study, tmp_path, num_rounds=num_rounds)
    totals = totals_of(np.concatenate([START[None], samples.draws[0]]), CHAIN_KEY)
    counts = np.concatenate(
        [n / BATCH_SIZE * predict_counts(study, name, num_rounds) for name, n in SIZES.items()],
        axis=1,
    )
    solution = np.linalg.lstsq(counts, totals, rcond=None)[0]
    residual = np.linalg.norm(totals - counts @ solution) / np.linalg.norm(
        totals - totals.mean(axis=0)
    )
    assert residual < 1e-3 if public else residual > 0.5


# A site that stores all messages


def holds_key(pairs, key):
    words = np.asarray(jax.random.key_data(key))
    sent = b"".join(request for request, _ in pairs)
    return any(words.astype(order).tobytes() in sent for order in ("<u4", ">u4"))


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_site_cannot_compute_totals(reproducible, tmp_path):
    pairs, _ = record(study_of(reproducible=reproducible), tmp_path, num_rounds=5)
    (begin, _), *_ = frames_of(pairs["bern"], "begin")
    steps = [request for request, _ in frames_of(pairs["bern"], "step")]
    broadcast = fedmcmc.types.Broadcast(jnp.int32(0), START)
    positions = [wire.decode(unpack(step.body, 1)[0], broadcast).position for step in steps]
    exact = np.sum([rows["x"].sum(axis=0) for rows in ROWS.values()], axis=0)
    if reproducible:
        words = wire.decode(unpack(begin.body, 2)[1], jnp.zeros((1, 2), jnp.uint32))
        chain_key = jax.random.wrap_key_data(jnp.asarray(words[0]))
        np.testing.assert_allclose(totals_of(positions, chain_key), 4 * [exact], atol=1e-4)
        return
    assert len(unpack(begin.body, 1)) == 1
    assert not holds_key(pairs["bern"], KEY) and not holds_key(pairs["bern"], CHAIN_KEY)
    # Without its noise a total is wrong by the step's noise over the step size.
    noise = totals_of(positions, jax.random.key(0)) - exact
    assert np.std(noise) > 0.5 * np.sqrt(2 / STEP_SIZE)


def test_of_all_keys_only_those_of_shared_draws_reach_a_site(tmp_path):
    """A key per round and chain, to the sites alone that take part."""
    study = study_of("local_kernel", {"rho": 0.5})
    pairs, _ = record(study, tmp_path, num_rounds=3, num_chains=2)
    held = []
    for chain in range(2):
        key = jax.random.fold_in(KEY, chain)
        for round_ in range(3):
            keys = (
                random.shared_key(key, round_),
                random.server_key(key, round_),
                random.client_key(key, round_, 2),
                random.shared_key(key, 3),
                key,
            )
            held.append([holds_key(pairs["chur"], each) for each in keys])
    np.testing.assert_array_equal(held, 6 * [[True, False, False, False, False]])
    for kernel, settings in (("local_kernel", {"rho": 0.0}), ("plain_kernel", {})):
        pairs, _ = record(study_of(kernel, settings), tmp_path / kernel, num_rounds=2)
        assert not holds_key(pairs["chur"], random.shared_key(CHAIN_KEY, 0))


# The same question, the same answer


def replay(site, pairs):
    """Return a site's answers to repeated requests."""
    return [site.answer(request) or b"" for request, _ in pairs]


def test_a_repeated_question_has_the_same_answer_also_after_a_restart(tmp_path):
    study = minibatches()
    pairs, _ = record(study, tmp_path, num_rounds=4, num_chains=2)
    answers = [answer for _, answer in pairs["bern"]]
    rows = dict(rows=ROWS["bern"])
    assert replay(studies.site_of(study, "bern", tmp_path, **rows), pairs["bern"]) == answers
    folder = tmp_path / "another"
    another = studies.site_of(study, "bern", folder, **rows)
    (folder / "bern" / SECRET).write_bytes(bytes(32))
    others = replay(another, pairs["bern"])
    (begin, *steps), (same, *different) = (x[-5:] for x in (answers, others))
    assert begin == same and all(a != b for a, b in zip(steps, different, strict=True))


def test_a_run_that_is_repeated_has_the_same_draws_and_one_of_another_key_others(tmp_path):
    """Clients alone draw, at one position, so that the key of the run changes nothing else."""
    study = study_of("local_kernel", {"rho": 0.0})
    runs = [
        record(study, tmp_path, key=key, num_rounds=3)[1].draws
        for key in (KEY, KEY, jax.random.key(1))
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).all()


@pytest.fixture(scope="module")
def in_a_run(tmp_path_factory):
    """A site within a run of two chains, whose clients keep a state."""
    folder, local = tmp_path_factory.mktemp("run"), deploy.LocalTransport()
    study = studies.study_of("lsd_pp")
    sites = studies.join_all(local, study, folder)
    run_over(local, study, num_rounds=2, num_chains=2)
    return sites["bern"], folder


def key_words(site, *, round_=1, body="a", weights=(1.0, 1.0), active=(True, True), **of_run):
    """Return the words of the clients' keys, ``[2, 8]``."""
    run = site._run
    before = {name: getattr(run, name) for name in of_run}
    tag = Tag(run.name, round_, 0, run.attempt)
    try:
        for name, value in of_run.items():
            setattr(run, name, value)
        keys = site._keys(run, tag, body, np.float32(weights), list(active), None)
    finally:
        for name, value in before.items():
            setattr(run, name, value)
    return keys.private


def check_differ(words, others):
    """Check that two sets of keys share no word."""
    np.testing.assert_array_equal(words != others, True)


def test_keys_of_clients_depend_on_all_that_a_step_depends_on(in_a_run):
    site, _ = in_a_run
    first = key_words(site)
    check_differ(*first)
    np.testing.assert_array_equal(first, key_words(site, attempt=7))
    for changes in (dict(round_=2), dict(digest="another run"), dict(body="b"), dict(origin="c")):
        check_differ(key_words(site, **changes), first)
    for changes in (dict(active=(False, True)), dict(weights=(2.0, 1.0))):
        changed = key_words(site, **changes)
        check_differ(changed[0], first[0])
        np.testing.assert_array_equal(changed[1], first[1])


def test_states_from_different_messages_have_different_origins(tmp_path):
    """Even if a run draws nothing: another run may start from its state, and draw."""
    study = studies.study_of(
        kernels={"main": f"{studies.HERE}:natural", "other": f"{studies.HERE}:expansions"}
    )
    frames, site = {"main": {}, "other": {}}, None
    for kernel, requests in frames.items():
        local, origins = deploy.LocalTransport(), []
        site, *others = (studies.site_of(study, n, tmp_path / kernel) for n in study.sites)

        def note(data, answer, site=site, requests=requests, origins=origins):
            frame = Frame.parse(data)
            requests.setdefault(frame.kind, frame)
            if frame.kind in ("start", "step"):
                origins.append(site._run.pending_origin)

        local.join(site, heard=note)
        for other_site in others:
            local.join(other_site)
        run_over(local, study, kernel=kernel, num_rounds=3)
        assert len(origins) == len(set(origins)) == 4

    def origin_of(folder, *messages, kind="ready"):
        site = studies.site_of(study, "bern", tmp_path / folder)
        answers = [Frame.parse(site.answer(frame.to_bytes())) for frame in messages]
        assert answers[-1].kind == kind
        return site._run

    # The same start of a run of another kernel.
    draws, drawless = frames["main"], frames["other"]
    starts = [draws["start"]._replace(body=drawless["start"].body), drawless["start"]]
    runs = [
        origin_of(name, requests["begin"], start)
        for name, requests, start in zip("ab", frames.values(), starts, strict=True)
    ]
    assert runs[0].origin != runs[1].origin
    # Another message in a run that draws nothing.
    step = drawless["step"]
    changed = step._replace(body=step.body[:-1] + bytes([step.body[-1] ^ 1]))
    runs = [
        origin_of(f"{i}", drawless["begin"], drawless["start"], message, kind="answer")
        for i, message in enumerate((step, step, changed))
    ]
    assert not any(run.has_private_draws for run in runs)
    origins = [run.pending_origin for run in runs]
    assert origins[0] == origins[1] != origins[2]


def test_keys_of_clients_depend_on_secret_study_site_and_rows(in_a_run):
    site, folder = in_a_run
    first, secret = key_words(site), site._secret
    context = secret._context
    assert len(context) == 3
    for i in range(3):
        changed = [part if i != j else part + b"x" for j, part in enumerate(context)]
        site._secret = SiteSecret(folder / "bern", *changed)
        check_differ(key_words(site), first)
    site._secret = secret
    again = studies.site_of(site.study, "bern", folder)
    again._run = site._run
    np.testing.assert_array_equal(key_words(again), first)
    others = {"x": studies.rows_of("bern")["x"] + np.float32(1e-6)}
    again = studies.site_of(site.study, "bern", folder, rows=others)
    again._run = site._run
    check_differ(key_words(again), first)


# The file of the secret


def test_a_secret_is_made_once_and_for_its_owner_alone(tmp_path):
    (tmp_path / f"{SECRET}.partial").write_bytes(b"of a process that was killed")
    ask = (b"question", [(b"chain",)])
    first = SiteSecret(tmp_path).keys(*ask)
    assert [path.name for path in tmp_path.iterdir()] == [SECRET]
    path = tmp_path / SECRET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(path.read_bytes()) == 32
    np.testing.assert_array_equal(SiteSecret(tmp_path).keys(*ask), first)
    path.unlink()
    check_differ(SiteSecret(tmp_path).keys(*ask), first)


def test_a_damaged_secret_ends_a_run(tmp_path):
    studies.give_secret(tmp_path / "bern", "bern")
    (tmp_path / "bern" / SECRET).write_bytes(b"short")
    with pytest.raises(deploy.SiteError, match="has 5 bytes, a site's secret has 32"):
        record(minibatches(), tmp_path, num_rounds=1)


# Draws equal a simulation's, in bits or in distribution


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(study_of(), id="gradients"),
        pytest.param(study_of("local_kernel", {"rho": 1.0}), id="shared draws"),
        pytest.param(study_of("straight_kernel", secure=MASKS), id="masks", marks=pytest.mark.slow),
    ],
)
def test_clients_without_private_draws_need_no_secret(study, tmp_path):
    key, settings = random.secret_key(bytes(32)), dict(num_rounds=6, num_chains=2)
    local = deploy.LocalTransport()
    for name in SIZES:
        local.join(studies.site_of(study, name, tmp_path, rows=ROWS[name]))
        (tmp_path / name / SECRET).unlink()
    samples = run_over(local, study, key=key, position=START, **settings)
    np.testing.assert_allclose(samples.draws, simulate(study, key=key, **settings).draws, 2e-5)
    assert not list(tmp_path.glob(f"*/{SECRET}"))


@pytest.mark.parametrize("rho", fast_and_slow([0.0, 0.5], [0.5]))
def test_a_reproducible_study_draws_what_a_simulation_does(rho, tmp_path):
    study = study_of("local_kernel", {"rho": rho}, reproducible=True)
    key, settings = random.secret_key(bytes(32)), dict(num_rounds=4, num_chains=2)
    samples = record(study, tmp_path, key=key, **settings)[1]
    np.testing.assert_allclose(samples.draws, simulate(study, key=key, **settings).draws, 2e-5)


NUM_CHAINS = 400


def agree(messages, mean, variance):
    """Return whether messages ``[num, 3]`` have this mean and variance."""
    z = (messages.mean(axis=0) - mean) / np.sqrt(variance / len(messages))
    ratio = messages.var(axis=0) / variance
    spread = LIMIT * np.sqrt(2 / len(messages))
    return (np.abs(z) < LIMIT).all() and (np.abs(ratio - 1) < spread).all()


def check_law(messages, mean, variance):
    """Check messages, and that the check notices noise that is off by a factor of sqrt(2)."""
    assert agree(messages, mean, variance)
    assert not agree(mean + np.sqrt(2) * (messages - mean), mean, variance)
    assert not agree(mean + (messages - mean) / np.sqrt(2), mean, variance)


def check_independent(one, other):
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in zip(one.T, other.T, strict=True)]
    assert np.abs(correlation).max() < LIMIT / np.sqrt(len(one))


@pytest.fixture(scope="module")
def of_batches(tmp_path_factory):
    """Messages of two rounds of many chains that start at one position, by site."""
    pairs, _ = record(
        minibatches(), tmp_path_factory.mktemp("law"), num_rounds=2, num_chains=NUM_CHAINS
    )
    return {name: messages_of(pairs[name], NUM_CHAINS) for name in SIZES}


def test_minibatches_are_uniform(of_batches):
    """Mean and variance of a minibatch's gradient are known exactly."""
    for name, size in SIZES.items():
        rows = np.float64(ROWS[name]["x"])
        variance = size**2 / BATCH_SIZE * rows.var(axis=0)
        check_law(of_batches[name][0], rows.sum(axis=0), variance)


def test_minibatches_of_sites_rounds_and_chains_are_independent(of_batches):
    bern, basel, chur = (messages for messages in of_batches.values())
    for one, other in (
        (bern[0], basel[0]),
        (basel[0], chur[0]),
        (bern[0], bern[1]),
        (chur[0], chur[1]),
        (bern[0][1:], bern[0][:-1]),
    ):
        check_independent(one, other)


@pytest.mark.parametrize("rho", fast_and_slow([0.0, 0.5], [0.5]))
def test_noise_of_clients_has_the_distribution_of_a_simulation(rho, tmp_path):
    """Local steps: what a client sends is normal, with the moments of many simulated messages."""
    study = study_of("local_kernel", {"rho": rho})
    pairs, _ = record(study, tmp_path, num_rounds=1, num_chains=NUM_CHAINS)
    kernel, broadcast = study.kernel("main"), fedmcmc.types.Broadcast(jnp.int32(0), START)
    sent = [messages_of(pairs[name], NUM_CHAINS)[0] for name in SIZES]
    for index, name in enumerate(SIZES):
        client = study.client(index, ROWS[name])

        def message(key, client=client):
            return rounds.client_step(kernel, 0, key, broadcast, (), client)[0]

        many = np.asarray(jax.jit(jax.vmap(message))(jax.random.split(jax.random.key(9), 40_000)))
        check_law(sent[index], many.mean(axis=0), many.var(axis=0))
    correlation = np.mean([np.corrcoef(sent[0][:, i], sent[1][:, i])[0, 1] for i in range(3)])
    assert correlation < 0.15 if rho == 0 else correlation > 0.15


# Seeds and settings


def test_seeds_of_a_servers_file(caplog):
    text = "00112233445566778899AABBCCDDEEFF"
    key = key_of_seed(text)
    expected = random.secret_key(hashlib.sha256(bytes.fromhex(text)).digest())
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))
    assert not caplog.records
    np.testing.assert_array_equal(
        jax.random.key_data(key_of_seed(3)), jax.random.key_data(jax.random.key(3))
    )
    assert "can be found by search" in caplog.text
    for wrong in (text[:-1], text + "0", text[:-1] + "g", f"{text}\n", True, 1.5, None):
        with pytest.raises(ValueError, match="text of 32 hexadecimal digits"):
            key_of_seed(wrong)


def test_the_digest_of_a_study_includes_reproducible():
    plain, public = study_of(), study_of(reproducible=True)
    assert plain.digest != public.digest and public.to_dict()["reproducible"]
    with pytest.raises(ValueError, match="must be true or false, got 'yes'"):
        study_of(reproducible="yes")
    with pytest.raises(ValueError, match="and reproducible = true"):
        study_of("straight_kernel", secure=MASKS, reproducible=True)


def test_a_client_that_draws_needs_a_key():
    study = minibatches()
    client = study.client(0, ROWS["bern"])
    broadcast = fedmcmc.types.Broadcast(jnp.int32(0), START)
    nothing = rounds.ClientKeys((), ())
    with pytest.raises(ValueError, match="ClientKeys has no key"):
        rounds.client_step(study.kernel("main"), 0, nothing, broadcast, (), client)
    rounds.client_step(study_of().kernel("main"), 0, nothing, broadcast, (), client)
    private, shared = rounds.client_draws_like(study.kernel("main"), 0, broadcast, client)
    assert jax.tree.leaves(private) and not jax.tree.leaves(shared)


def test_a_site_refuses_keys_that_its_study_excludes(tmp_path):
    pairs, _ = record(minibatches(), tmp_path, num_rounds=1)
    (begin, _), *_ = frames_of(pairs["bern"], "begin")
    body = pack(*unpack(begin.body, 1), wire.encode(jax.random.key_data(KEY[None])))
    site = studies.site_of(minibatches(), "bern", tmp_path / "again", rows=ROWS["bern"])
    assert Frame.parse(site.answer(begin._replace(body=body).to_bytes())).kind == "error"
