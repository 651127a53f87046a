"""A site wants the other sites' sums, or a posterior that it chooses.

It is registered, has a valid certificate, and answers what it likes.
"""

import contextlib

import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy, wire
from fedmcmc.deploy._config import run_over
from fedmcmc.deploy._frames import Frame
from fedmcmc.random import cohort_key, draw_key, init_key, server_key
from tests.deploy.attacks.support import (
    KEY,
    POSITION,
    ROWS,
    Network,
    joined,
    make_study,
    open_site,
    parts_of,
    run,
    sample,
    server_of,
    write_study,
)

NUM_ROUNDS = 2


# The server's noise


def key_bytes(key):
    """Return the words of a key as they could lie in a message."""
    words = np.asarray(jax.random.key_data(key)).ravel()
    return words.astype(">u4").tobytes(), words.astype("<u4").tobytes()


def keys_of_server():
    """Return all keys from which the server's noise could be computed."""
    chain = jax.random.fold_in(KEY, 0)
    rounds = [f(chain, r) for f in (server_key, cohort_key, draw_key) for r in range(NUM_ROUNDS)]
    return [KEY, chain, init_key(chain), *rounds]


def messages_to_a_site(study, folder):
    """Return all bytes that reach one site in a run, and the network."""
    network = Network(study, folder)
    run(study, network, num_rounds=NUM_ROUNDS)
    return b"".join(exchange.data for exchange in network.exchanges["chur"]), network


@pytest.mark.parametrize("masked", [False, True])
def test_a_site_finds_the_keys_of_the_servers_noise(masked, tmp_path):
    """With them it subtracts the noise from two broadcasts and has the sum of all gradients."""
    study = make_study("masked" if masked else "lsd", masked=masked)
    messages, network = messages_to_a_site(study, tmp_path)
    broadcasts = [parts_of(x.request.body)[0] for x in network.steps("chur")]
    before, after = (np.frombuffer(part[4:16], ">f4").astype(float) for part in broadcasts[:2])
    if not masked and any(data in messages for data in key_bytes(keys_of_server()[1])):
        noise = noise_of_round(study)
        total = (after - before - np.sqrt(2 * 0.01) * noise) / 0.01 + before
        truth = np.concatenate(list(ROWS.values())).sum(axis=0)
        pytest.fail(f"The sum of all rows is known to {np.abs(total - truth).max():.1e}.")
    assert not any(word in messages for key in keys_of_server() for word in key_bytes(key))


def noise_of_round(study):
    """Return the server's normal numbers of the first round, from the key of the chain."""
    kernel = study.kernel("main")
    key = server_key(jax.random.fold_in(KEY, 0), 0)
    broadcast = fedmcmc.types.Broadcast(0, POSITION)
    like = fedmcmc.pytrees.trees.shapes_of(broadcast)
    draws = kernel.phases[0].prepare_server(key, like)
    (normals,) = jax.tree.leaves(draws)
    return np.asarray(normals, float)


def test_keys_of_a_reproducible_study_are_in_its_messages(tmp_path):
    """Otherwise the search above could find nothing."""
    messages, _ = messages_to_a_site(make_study("lsd", reproducible=True), tmp_path)
    assert any(word in messages for word in key_bytes(jax.random.fold_in(KEY, 0)))


# Lies


def test_a_site_subtracts_two_positions_of_a_relay(tmp_path):
    """Nothing defends from this: the difference is the message of the one site between."""
    study = make_study("relay")
    network = Network(study, tmp_path)
    run(study, network, num_rounds=20)
    positions, messages, visits = {}, {}, {}
    for name, site in network.sites.items():
        for step in network.steps(name):
            number, shapes = step.request.tag.round, site._run.shapes.phases[0]
            (broadcast,), (code, _) = parts_of(step.request.body), parts_of(step.answer.body)
            positions[number] = site._run.readers[0](broadcast).position
            messages[number], visits[number] = wire.decode(code, like=shapes.code), name
    attacked = [r for r in range(1, 19) if visits[r - 1] == visits[r + 1] != visits[r]]
    assert attacked
    for r in attacked:
        own_position = positions[r - 1] + messages[r - 1]  # after the attacker's own visit
        difference = positions[r + 1] - own_position
        np.testing.assert_allclose(difference, messages[r], rtol=1e-4, atol=1e-6)


def lie(value):
    """Return what replaces the gradients in a site's answers to rounds after the first."""

    def answer(name, request, reply):
        if name != "chur" or request.kind != "step" or request.tag.round == 0:
            return reply.to_bytes()
        parts = parts_of(reply.body)
        parts[0] = value(parts[0])
        return reply._replace(body=joined(parts)).to_bytes()

    return answer


def all_of(number):
    return lambda code: np.full(len(code) // 4, number, ">f4").tobytes()


LIES = {
    "not a number": all_of(np.nan),
    "infinite": all_of(np.inf),
    "too large to add": all_of(3e38),
    "one number less": lambda code: code[:-4],
    "one number more": lambda code: code + bytes(4),
    "nothing": lambda code: b"",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Return a study, its network, and a connected server."""
    study = make_study()
    network = Network(study, tmp_path_factory.mktemp("sites"))
    with server_of(study, network) as sites:
        yield study, network, sites


@pytest.mark.parametrize("what", LIES)
@pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning")
def test_a_site_sends_what_is_no_message(what, federation):
    """The run would end and blame the step size: the server names the sender instead."""
    study, network, sites = federation
    network.change_answer = lie(LIES[what])
    with pytest.raises(deploy.SiteError, match="chur"):
        sample(sites, study, num_rounds=NUM_ROUNDS)


def test_a_site_that_lies_is_left_out(tmp_path):
    """A server that may continue without a site continues without one that sends no numbers."""
    study = make_study()
    network = Network(study, tmp_path, answer=lie(LIES["not a number"]))
    sites = deploy.Sites(study, network, on_missing="leave_out")
    with contextlib.closing(sites), pytest.warns(RuntimeWarning, match="chur is left out"):
        samples = sample(sites, study, num_rounds=3)
    assert np.isfinite(samples.draws).all() and sites.num_missed["chur"] == 2


def test_draws_before_a_lie_are_written(tmp_path):
    """One site could undo the work of weeks."""

    def late(name, request, reply):
        lies = request.kind == "step" and request.tag.round >= 5
        return lie(LIES["not a number"])(name, request, reply) if lies else reply.to_bytes()

    study = deploy.Study.read(write_study(tmp_path))
    network = Network(study, tmp_path / "sites", answer=late)
    with pytest.raises(deploy.SiteError, match="chur"):
        run_over(tmp_path / "server.toml", lambda: network)
    with np.load(tmp_path / "draws.npz") as stored:
        (draws,) = (stored[name] for name in stored.files)
    assert draws.shape[1] == 5 and np.isfinite(draws).all()


# Names and replays


def test_a_site_calls_itself_by_anothers_name(tmp_path):
    """Its rows would count as the rows of another site."""
    study, local = make_study(), deploy.LocalTransport()
    with server_of(study, local) as sites:
        site = open_site(study, "bern", tmp_path)
        hello = Frame.parse(site.hello())
        wrong = hello._replace(header=hello.header | {"site": "chur"}).to_bytes()
        with pytest.warns(RuntimeWarning, match="registered as 'bern' but its name is 'chur'"):
            sites._links._admit("bern", wrong, {})
        assert "bern" in sites._links.refusals


def test_a_site_replays_an_answer_of_an_earlier_round(tmp_path):
    """It need not compute, and stops the chain."""
    study, bodies = make_study("masked", masked=True), []

    def answer(name, request, reply):
        if name == "chur" and request.kind == "step":
            bodies.append(reply.body)
            reply = reply._replace(body=bodies[0])
        return reply.to_bytes()

    with pytest.raises(deploy.SiteError, match="chur"):
        run(study, Network(study, tmp_path, answer=answer), num_rounds=2)


def test_answers_that_come_again_change_nothing(federation):
    """A site sends all its old answers with every new one."""
    study, network, sites = federation
    network.change_answer = None
    expected = sample(sites, study, num_rounds=3)
    sent = []

    def answer(name, request, reply):
        if name == "chur":
            for data in sent:
                network._inbox.put(("chur", data))
            sent.append(reply.to_bytes())
        return reply.to_bytes()

    network.change_answer = answer
    samples = sample(sites, study, num_rounds=3)
    network.change_answer = None
    assert len(sent) >= 3
    np.testing.assert_array_equal(samples.draws, expected.draws)
