"""The server wants rows: it chooses questions, positions, chains and rounds.

It has the study's files and all its messages, and may send anything at all.
"""

import contextlib
import shutil
import time
import tracemalloc
import zlib
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._frames import _HEAD, MAGIC, Frame, checksum
from fedmcmc.deploy._words import to_words
from fedmcmc.types import PerClient, as_functions
from tests.deploy.attacks.support import (
    NAMES,
    Network,
    Unscrupulous,
    at_position,
    error_of_rows,
    gradients_in,
    joined,
    make_study,
    open_site,
    parts_of,
    predicted_batches,
    run,
    sample,
    sent,
    server_of,
    totals_of,
)

NOT_RECOVERED = 1.0
"""Rows are whole numbers up to 50 in size: a larger error hides which ones they are."""
NUM_CHAINS = 100
"""Chains whose messages are equations for the 15 rows of all sites."""


# Minibatches


def langevin(batch_size):
    """Return a function that makes a kernel of the server, whose position hardly moves."""
    return lambda model: fedmcmc.langevin(model, fedmcmc.minibatch(batch_size), step_size=1e-9)


def solved_rows(study, network, name):
    """Return all rows as a least-squares solution, from totals and predicted batches."""
    if study.secure:
        totals = totals_of(network, NUM_CHAINS)
    else:
        steps = [network.steps(site)[0] for site in NAMES]
        totals = sum(gradients_in(step.answer, NUM_CHAINS) for step in steps)
    return np.linalg.lstsq(predicted_batches(name, NUM_CHAINS), totals)[0]


@pytest.mark.parametrize("masked", [False, True])
def test_a_server_asks_for_batches_of_one_row(masked, tmp_path):
    """If the study allows `Langevin`, the server chooses the batch size, and a message is a row."""
    kernel = "masked" if masked else "lsd"
    study = make_study(kernel, asks=("Langevin",), masked=masked, cls=Unscrupulous)
    network = Network(study, tmp_path)
    with pytest.raises(deploy.SiteError, match=r"(?i)(bern|basel|chur): .*(minibatch|full.grad)"):
        run(study, network, study.adapt_kernel(langevin(1)(study.model)))


def test_a_server_asks_for_batches_below_the_owners_limit(tmp_path):
    """The study lets the server choose minibatches, and owners how small they may be."""
    asks = ("Langevin", "Minibatch")
    study = make_study(asks=asks, cls=Unscrupulous)
    too_small = r"(bern|basel|chur): .*min_batch"
    limits = dict(min_rows=1, min_batch=3)
    network = Network(study, tmp_path / "three", limits=limits)
    with pytest.raises(deploy.SiteError, match=too_small):
        run(study, network, langevin(2)(study.model))
    by_default = Network(study, tmp_path / "default", limits=dict(min_rows=1))
    with pytest.raises(deploy.SiteError, match=too_small):
        run(study, by_default, langevin(4)(study.model))
    run(study, Network(study, tmp_path / "enough", limits=limits), langevin(3)(study.model))


@pytest.mark.parametrize("name", ["minibatch", "masked minibatch"])
def test_a_server_predicts_which_rows_are_in_each_batch(name, tmp_path):
    """It solves for single rows from many chains at one position, of an approved kernel."""
    study = make_study(name, masked=name.startswith("masked"))
    network = Network(study, tmp_path)
    run(study, network, num_chains=NUM_CHAINS)
    assert error_of_rows(solved_rows(study, network, "minibatch")) > NOT_RECOVERED


def test_owners_who_approve_a_reproducible_run_give_their_rows_to_the_server(tmp_path):
    """If the server may know all noise, the same attack works, as the text for owners warns."""
    study = make_study("minibatch", reproducible=True)
    network = Network(study, tmp_path)
    run(study, network, num_chains=NUM_CHAINS)
    assert error_of_rows(solved_rows(study, network, "minibatch")) < 0.01
    with pytest.raises(ValueError, match="reproducible"):
        make_study("masked minibatch", masked=True, reproducible=True)


@pytest.fixture(scope="module")
def noisy_gradients(tmp_path_factory):
    """Return the noisy gradients of bern in two chains, requested in several ways.

    The gradient is the same at all positions.
    """
    study, folder, gradients = make_study("noisy"), tmp_path_factory.mktemp("noisy"), {}

    def shift(name, frame):
        return at_position(frame, 1.0) if frame.kind in ("start", "step") else frame

    for how, request in {"once": None, "again": None, "shifted": shift, "no secret": None}.items():
        if how == "no secret":
            shutil.rmtree(folder / "bern")
        network = Network(study, folder, request=request)
        run(study, network, num_chains=2)
        gradients[how] = gradients_in(network.steps("bern")[0].answer, 2)
    return gradients


def test_a_server_asks_again_to_average_the_noise_away(noisy_gradients):
    """Sites that started again answer the same question with the same noise."""
    np.testing.assert_array_equal(noisy_gradients["once"], noisy_gradients["again"])
    assert (np.abs(noisy_gradients["once"][0] - noisy_gradients["once"][1]) > 1e-3).all()


@pytest.mark.parametrize("how", ["shifted", "no secret"])
def test_a_server_asks_at_two_positions_to_cancel_the_noise(how, noisy_gradients):
    """The difference would be free of noise; a site that lost its secret also has new noise."""
    assert (np.abs(noisy_gradients["once"] - noisy_gradients[how]) > 1e-3).all()


# Limits


def test_a_server_asks_many_chains_in_one_round(tmp_path):
    """A limit on rounds would let any number of answers leave."""
    study = make_study()
    network = Network(study, tmp_path, max_numbers=1000)
    with pytest.raises(deploy.SiteError, match=r"(bern|basel|chur): .*(max_numbers|1,?000)"):
        run(study, network, num_chains=200)
    assert sum(sent(study, network, name) for name in NAMES) <= 3 * 1000


# Masks


@pytest.fixture(scope="module")
def masked_federation(tmp_path_factory):
    """Return a study under masks, its network, and a server that has run two honest rounds."""
    study = make_study("masked", masked=True, asks=deploy.SUMS, cls=Unscrupulous)
    network = Network(study, tmp_path_factory.mktemp("masked"))
    with server_of(study, network) as sites:
        sample(sites, study, num_rounds=2)
        yield study, network, sites


def with_header(frame, **fields):
    return frame._replace(header=frame.header | fields)


SINGLING = {
    "a subset": (
        lambda frame: with_header(frame, masks=frame.header["masks"] | {"sites": [0, 1]}),
        "bern: .*not over",
    ),
    "weights": (lambda frame: with_header(frame, weights=[1024.0]), "bern: .*one weight"),
    "no masks": (lambda frame: with_header(frame, masks=None), "bern: .*uses masks"),
    "another position": (lambda frame: at_position(frame, 0.5), "do not cancel"),
}


@pytest.mark.parametrize("what", SINGLING)
def test_a_server_singles_out_a_message_under_masks(what, masked_federation):
    """A sum without all others, or with more weight on one message, is that message.

    So is the total less the messages of all others, which are the same at the honest position.
    """
    study, network, sites = masked_federation
    change, message = SINGLING[what]

    def request(name, frame):
        is_last = frame.kind == "step" and frame.tag.round == 1
        return change(frame) if is_last and name == "bern" else frame

    network.change_request = request
    with pytest.raises(deploy.SiteError, match=message):
        sample(sites, study, num_rounds=2)
    network.change_request = None


def at_round(frame, number):
    """Return the same question with the number of an earlier round."""
    tag = [frame.tag.run, number, *frame.tag[2:]]
    parts = [np.array(number, ">i4").tobytes() + part[4:] for part in parts_of(frame.body)]
    return with_header(frame, tag=tag)._replace(body=joined(parts))


REPEATED = {
    "with another position": (lambda frame: at_position(frame, 0.5), "another content"),
    "after the next": (lambda frame: at_round(frame, 0), "is before"),
}


@pytest.mark.parametrize("how", REPEATED)
def test_a_server_repeats_a_round_under_masks(how, masked_federation):
    """The difference of two answers under one mask would be in clear."""
    study, network, sites = masked_federation
    sample(sites, study, num_rounds=2)
    change, message = REPEATED[how]
    frame = network.steps("bern")[-1].request
    reply = Frame.parse(network.sites["bern"].answer(change(frame).to_bytes()))
    assert reply.kind == "declined" and not reply.body
    assert message in reply.header["reason"]


def test_a_server_weighs_sites_by_numbers_of_its_kernel(masked_federation):
    """With a weight of zero for all others, one message is the sum."""
    study, _, sites = masked_federation
    weights = jnp.array([1.0, 0.0, 0.0])
    estimator = fedmcmc.noisy(fedmcmc.full_gradient(), 1.0, weighted=True, weights=weights)
    kernel = fedmcmc.langevin(study.model, estimator, step_size=0.1)
    with pytest.raises(deploy.SiteError, match=r"(bern|basel|chur): .*(PerClient|full.grad)"):
        sample(sites, study, kernel)
    for step_size, is_refused in ((0.2, False), ([0.2, 0.0], False), (PerClient(weights), True)):
        kernel = fedmcmc.lsd(study.model, step_size=0.1)
        words = to_words(as_functions(replace(kernel, step_size=step_size)), study.functions)
        with pytest.raises(deploy.Refused) if is_refused else contextlib.nullcontext():
            study.kernel_of(*words)


# Words


@pytest.fixture(scope="module")
def plain_federation(tmp_path_factory):
    """Return a study without masks, its network, and a server that has run it once."""
    study = make_study(asks=("Langevin",))
    network = Network(study, tmp_path_factory.mktemp("plain"))
    with server_of(study, network) as sites:
        sample(sites, study)
        yield study, network, sites


@pytest.fixture(scope="module")
def begins_with(plain_federation):
    """Return a function of a change of a kernel's words, which returns a site's reply to them."""
    study, network, _ = plain_federation
    begin = [x.request for x in network.exchanges["bern"] if x.request.kind == "begin"][-1]
    kernel = fedmcmc.langevin(study.model, fedmcmc.full_gradient(), step_size=0.1)
    words, numbers = to_words(as_functions(kernel), study.functions)

    def answer(change):
        request = with_header(begin, kernel=change(words), tag=["other", -1, -1, time.time_ns()])
        request = request._replace(body=joined([numbers, *parts_of(begin.body)[1:]]))
        return Frame.parse(network.sites["bern"].answer(request.to_bytes()))

    return answer


def named(words, name):
    """Return words that name another class for the estimator."""
    fields = words["fields"] | {"estimator": {"class": name, "fields": {}}}
    return words | {"fields": fields}


CODE = (
    "os:system",
    "subprocess:Popen",
    "builtins:eval",
    "fedmcmc.deploy._site:Site",
    "fedmcmc.deploy._disk:Disk",
    "fedmcmc.storage:Checkpoint",
    "tests.deploy.attacks.support:Exchange",
    "..:x",
)


def test_a_site_accepts_the_words_of_a_kernel_that_is_allowed(begins_with):
    """Otherwise the tests below could not show why a site refuses other classes."""
    assert begins_with(lambda words: words).kind == "ready"


@pytest.mark.parametrize("name", CODE)
def test_a_server_names_other_code_in_a_kernel(name, begins_with):
    """A site builds what the study allows, and nothing else that Python can import."""
    reply = begins_with(lambda words: named(words, name))
    assert reply.kind in ("error", "declined")
    outermost = begins_with(lambda words: {"class": name, "fields": {}})
    assert outermost.kind == "declined"
    assert "does not allow the kernel" in outermost.header["reason"]


def test_a_server_asks_for_a_class_that_the_study_does_not_name(begins_with):
    """`WithoutClient` and similar classes reveal single sites' answers."""
    for name in ("WithoutClient", "LeaveOneOut", "Averaging", "Relay"):
        reply = begins_with(lambda words, kind=f"fedmcmc.kernels:{name}": words | {"class": kind})
        assert reply.kind == "declined"
        assert f"does not allow the kernel '{name}'" in reply.header["reason"]


# Sizes


def huge_frames():
    """Return messages that claim to be large, or make much of few bytes."""
    tag = {"tag": ["x", -1, -1, 1]}
    array = {"array": ["float32", [2**40]]}
    begin = dict(kernel={"named": "main"}, chains=1, generator="threefry2x32")
    yield "large position", Frame("begin", tag | begin | {"position": array})
    yield "chains", Frame("begin", tag | begin | {"position": array, "chains": 2**40})
    yield "rounds", Frame("step", {"tag": ["x", 2**80, 0, 1]})
    yield "no chains", Frame("begin", tag | begin | {"position": array, "chains": -1})


@pytest.mark.parametrize(("what", "frame"), list(huge_frames()), ids=lambda x: str(x)[:14])
def test_a_server_asks_for_more_memory_than_there_is(what, frame, tmp_path):
    """A site returns an error, without reserving the memory."""
    study = make_study()
    site = open_site(study, "bern", tmp_path)
    tracemalloc.start()
    try:
        reply = Frame.parse(site.answer(frame.to_bytes()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reply.kind in ("error", "declined", "unready")
    assert peak < 2**25


def test_a_server_sends_json_that_is_too_deep(tmp_path):
    """It would end the process that reads it."""
    site = open_site(make_study(), "bern", tmp_path)
    deep = b"[" * 100_000 + b"]" * 100_000
    header = b'{"kind": "begin", "tag": ["x", -1, -1, 1], "kernel": ' + deep + b"}"
    reply = Frame.parse(site.answer(raw_frame(header)))
    assert reply.kind == "error"
    words = {"value": 1}
    for _ in range(300):
        words = {"tuple": [words]}
    header = {"tag": ["x", -1, -1, 1], "kernel": words, "position": words, "chains": 1}
    reply = Frame.parse(site.answer(Frame("begin", header).to_bytes()))
    assert reply.kind in ("error", "declined")


def raw_frame(header):
    """Return a frame with any bytes as its header."""
    return _HEAD.pack(MAGIC, len(header), zlib.crc32(header, checksum(b"")), 0) + header


@pytest.mark.parametrize("size", [0, 3, 17, 2**20])
def test_a_server_sends_a_broadcast_of_another_shape(size, plain_federation):
    """The site expects the shapes of the run, and computes nothing from others."""
    study, network, sites = plain_federation

    def request(name, frame):
        return frame._replace(body=joined([bytes(size)])) if frame.kind == "step" else frame

    network.change_request = request
    with pytest.raises(deploy.SiteError, match=r"bern|basel|chur"):
        sample(sites, study)
    network.change_request = None
