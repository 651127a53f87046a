"""The server wants rows: it chooses questions, positions, chains and rounds.

It knows the study's files and all that it sends, and may send anything at all.
"""

import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame
from fedmcmc.deploy._shapes import shapes_of_run
from fedmcmc.deploy._words import to_words
from fedmcmc.types import as_functions
from tests.deploy.attacks.support import (
    KERNELS,
    NAMES,
    POSITION,
    Network,
    Unscrupulous,
    error_of_rows,
    gradients_in,
    joined,
    make_study,
    numbers_in,
    open_site,
    parts_of,
    predicted_batches,
    run,
    totals_of,
)

NOT_RECOVERED = 1.0
"""Rows are whole numbers up to 50 in size: a larger error hides which ones they are."""


# Minibatches


def langevin(batch_size):
    """Return what makes a kernel of the server's, whose position hardly moves."""
    return lambda model: fedmcmc.langevin(model, fedmcmc.minibatch(batch_size), step_size=1e-9)


def solved_rows(study, network, num_chains, kernel):
    """Return all rows as a least-squares solution, from totals and predicted batches."""
    if study.secure:
        totals = totals_of(network, num_chains)
    else:
        steps = [network.steps(name)[0] for name in NAMES]
        totals = sum(gradients_in(step.answer, num_chains) for step in steps)
    weights = predicted_batches(kernel, num_chains)
    return np.linalg.lstsq(weights, totals)[0]


@pytest.mark.parametrize("masked", [False, True])
def test_a_server_asks_for_batches_of_one_row(masked, tmp_path):
    """With `Langevin` in `asks` the server chooses the batch size, and a message is a row."""
    kernel = "masked" if masked else "lsd"
    study = make_study(kernel, asks=("Langevin",), masked=masked, cls=Unscrupulous)
    network = Network(study, tmp_path)
    with pytest.raises(deploy.SiteError, match=r"(?i)(bern|basel|chur): .*(minibatch|full.grad)"):
        run(study, network, study.adapt_kernel(langevin(1)(study.model)), num_chains=300)
        rows = solved_rows(study, network, 300, langevin(1))
        pytest.fail(f"All rows are known to {error_of_rows(rows):.1e}.")


def test_a_server_asks_for_batches_below_the_owners_limit(tmp_path):
    """The study lets the server choose minibatches, and owners how small they may be."""
    asks = ("Langevin", "Minibatch")
    study = make_study(asks=asks, cls=Unscrupulous)
    too_small = r"(bern|basel|chur): .*min_batch"
    limits = dict(min_rows=1, min_batch=3)
    network = Network(study, tmp_path / "three", limits=limits)
    with pytest.raises(deploy.SiteError, match=too_small):
        run(study, network, langevin(2)(study.model), num_chains=160)
    by_default = Network(study, tmp_path / "default", limits=dict(min_rows=1))
    with pytest.raises(deploy.SiteError, match=too_small):
        run(study, by_default, langevin(4)(study.model))
    run(study, Network(study, tmp_path / "enough", limits=limits), langevin(3)(study.model))


@pytest.mark.parametrize("name", ["minibatch", "masked minibatch"])
def test_a_server_predicts_which_rows_are_in_each_batch(name, tmp_path):
    """It solves for single rows from many chains at one position, of an approved kernel."""
    study, num_chains = make_study(name, masked=name.startswith("masked")), 300
    network = Network(study, tmp_path)
    run(study, network, num_chains=num_chains)
    assert (
        error_of_rows(solved_rows(study, network, num_chains, KERNELS["minibatch"])) > NOT_RECOVERED
    )


def test_owners_who_approve_a_reproducible_run_give_their_rows_to_the_server(tmp_path):
    """The same attack where the server may know all noise: it works, as the study says it does."""
    study, num_chains = make_study("minibatch", reproducible=True), 300
    network = Network(study, tmp_path)
    run(study, network, num_chains=num_chains)
    assert error_of_rows(solved_rows(study, network, num_chains, KERNELS["minibatch"])) < 0.01
    with pytest.raises(ValueError, match="reproducible"):
        make_study("masked minibatch", masked=True, reproducible=True)


def test_a_server_asks_again_to_average_the_noise_away(tmp_path):
    """It repeats one question in new attempts of one run, with other chains beside it."""
    study = make_study("noisy")
    answers = []
    for _ in range(3):
        network = Network(study, tmp_path)
        run(study, network)
        answers.append(network.steps("bern")[0].answer.body)
    assert len(set(answers)) == 1
    network = Network(study, tmp_path)
    run(study, network, key=jax.random.key(7), num_chains=2)
    one, other = gradients_in(network.steps("bern")[0].answer, 2)
    assert (one != other).all()


def test_a_server_asks_at_two_positions_to_cancel_the_noise(tmp_path):
    """One run and round, asked at a second position: the difference would be free of noise."""
    study, reply = make_study("noisy"), []
    for shift in (0.0, 1.0):

        def shifted(name, frame, shift=shift):
            return at_position(frame, shift) if frame.kind in ("start", "step") else frame

        network = Network(study, tmp_path, request=shifted)
        run(study, network)
        reply.append(gradients_in(network.steps("bern")[0].answer)[0])
    # The gradient is the same everywhere.
    assert (np.abs(reply[0] - reply[1]) > 1e-3).all()


def at_position(frame, value):
    """Return a frame whose broadcast is at another position: round, position."""
    parts = [part[:4] + np.full(3, value, ">f4").tobytes() for part in parts_of(frame.body)]
    return frame._replace(body=joined(parts))


# Limits


def test_a_server_asks_thousands_of_chains_in_one_round(tmp_path):
    """A limit on rounds would let any number of answers leave."""
    study = make_study()
    network = Network(study, tmp_path, max_numbers=1000)
    with pytest.raises(deploy.SiteError, match=r"(bern|basel|chur): .*(max_numbers|1,?000)"):
        run(study, network, num_chains=4000)
    assert sum(sent(study, network, name) for name in NAMES) <= 3 * 1000


def test_a_server_goes_on_after_a_site_was_started_again(tmp_path):
    """It makes a site stop (or waits until it does), and asks as if nothing had been answered."""
    study, left = make_study("noisy"), 0
    for attempt in range(20):
        log = deploy.AuditLog(tmp_path / "bern.log")
        network = Network(study, tmp_path / "sites")
        network.enter(open_site(study, "bern", tmp_path / "sites", log=log, max_numbers=100))
        try:
            run(study, network, position=POSITION + attempt)
        except deploy.SiteError as error:
            assert "bern" in str(error)
            break
        finally:
            left += sent(study, network, "bern")
            log.close()
    else:
        raise AssertionError("No limit ended it.")
    assert 50 < left <= 100


def sent(study, network, name):
    """Return how many numbers have left a site."""
    shapes = shapes_of_run(study.kernel("main"), study, POSITION)
    return sum(numbers_in(shapes, exchange) for exchange in network.exchanges[name])


# Masks


def masked_run(tmp_path, request, **settings):
    study = make_study("masked", masked=True)
    run(study, Network(study, tmp_path, request=request), **(dict(num_rounds=2) | settings))


def with_header(frame, **fields):
    return frame._replace(header=frame.header | fields)


SINGLING = {
    "a subset": (
        lambda frame: with_header(frame, masks=frame.header["masks"] | {"sites": [0, 1]}),
        "not over",
    ),
    "weights": (lambda frame: with_header(frame, weights=[1024.0]), "one weight"),
    "no masks": (lambda frame: with_header(frame, masks=None), "uses masks"),
}


@pytest.mark.parametrize("what", SINGLING)
def test_a_server_singles_out_a_message_under_masks(what, tmp_path):
    """A sum without the others, or with more weight on one, is that one's message."""
    change, message = SINGLING[what]

    def request(name, frame):
        last = frame.kind == "step" and frame.tag.round == 1
        return change(frame) if last and name == "bern" else frame

    with pytest.raises(deploy.SiteError, match=f"bern: .*({message})"):
        masked_run(tmp_path, request)


def answered_under_masks(folder):
    """Return a site that has answered two rounds under masks, and the questions."""
    study = make_study("masked", masked=True)
    network = Network(study, folder)
    run(study, network, num_rounds=2)
    return network.sites["bern"], [x.request for x in network.steps("bern")]


def at_round(frame, number):
    """Return the same question as one of an earlier round."""
    tag = [frame.tag.run, number, *frame.tag[2:]]
    parts = [np.array(number, ">i4").tobytes() + part[4:] for part in parts_of(frame.body)]
    return with_header(frame, tag=tag)._replace(body=joined(parts))


REPEATED = {
    "with another position": (lambda frame: at_position(frame, 0.5), "another content"),
    "after the next": (lambda frame: at_round(frame, 0), "is before"),
}


@pytest.mark.parametrize("how", REPEATED)
def test_a_server_repeats_a_round_under_masks(how, tmp_path):
    """Two answers under one mask: their difference would be in clear."""
    change, message = REPEATED[how]
    site, frames = answered_under_masks(tmp_path)
    reply = Frame.parse(site.answer(change(frames[-1]).to_bytes()))
    assert reply.kind == "declined" and not reply.body
    assert message in reply.header["reason"]


def test_a_server_shows_one_site_another_position(tmp_path):
    """The total less what the others say would be that site's message."""

    def request(name, frame):
        apart = frame.kind == "step" and name == "bern"
        return at_position(frame, 0.5) if apart else frame

    with pytest.raises(deploy.SiteError, match="do not cancel"):
        masked_run(tmp_path, request)


def test_a_server_weighs_sites_apart_by_numbers_of_its_kernel(tmp_path):
    """With a weight of zero for all others, one message is the sum."""
    study = make_study("masked", masked=True, asks=("Langevin",), cls=Unscrupulous)
    weights = jnp.array([1.0, 0.0, 0.0])
    estimator = fedmcmc.noisy(fedmcmc.full_gradient(), 1.0, weighted=True, weights=weights)
    kernel = fedmcmc.langevin(study.model, estimator, step_size=0.1)
    with pytest.raises(deploy.SiteError, match=r"(bern|basel|chur): .*(PerClient|full.grad)"):
        run(study, Network(study, tmp_path), kernel)


# Words


@pytest.fixture(scope="module")
def begins_with(tmp_path_factory):
    """What a site answers where the words of the kernel are others: ``change(words) -> words``."""
    study = make_study(asks=("Langevin",))
    network = Network(study, tmp_path_factory.mktemp("words"))
    run(study, network)
    begin = [x.request for x in network.exchanges["bern"] if x.request.kind == "begin"][-1]
    kernel = fedmcmc.langevin(study.model, fedmcmc.full_gradient(), step_size=0.1)
    words, numbers = to_words(as_functions(kernel), study.functions)

    def answer(change):
        wrong = with_header(begin, kernel=change(words), tag=["other", -1, -1, time.time_ns()])
        wrong = wrong._replace(body=joined([numbers, *parts_of(begin.body)[1:]]))
        return Frame.parse(network.sites["bern"].answer(wrong.to_bytes()))

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


def test_words_of_a_kernel_that_is_allowed_are_taken(begins_with):
    """So that what the others are refused for is the class."""
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
    """`WithoutClient` and the like tell single sites' answers."""
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
    """A site says that it is wrong, without making room for it."""
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
    import zlib

    from fedmcmc.deploy._frames import _HEAD, MAGIC, checksum

    return _HEAD.pack(MAGIC, len(header), zlib.crc32(header, checksum(b"")), 0) + header


@pytest.mark.parametrize("size", [0, 3, 17, 2**20])
def test_a_server_sends_a_broadcast_of_another_shape(size, tmp_path):
    """The site knows the shapes, and computes nothing from others."""
    study = make_study()

    def request(name, frame):
        return frame._replace(body=joined([bytes(size)])) if frame.kind == "step" else frame

    with pytest.raises(deploy.SiteError, match=r"bern|basel|chur"):
        run(study, Network(study, tmp_path, request=request))
