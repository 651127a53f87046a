"""Random and mutated frames, at a site and at the server: nothing escapes and nothing changes."""

import contextlib
import json
import logging
import random
import shutil
import warnings
import zlib
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy import _frames
from fedmcmc.deploy._frames import FrameError
from fedmcmc.deploy._links import Links
from fedmcmc.deploy._shapes import shapes_of_run
from tests.contracts.model import KEY
from tests.support import hostile, studies
from tests.support.site_runs import POSITION

STUDY = studies.study_of("compress: lsd_pp, memory: per client")
NUM_FRAMES = [2_000, pytest.param(10_000, marks=pytest.mark.slow)]
MAX_GROWTH = 100 * hostile.MEBI
JUNK = (
    *(None, True, -5, 2**70, 1.5, 1e308, float("nan"), "x", "\x1b[2J", [], {}, [[]], [None]),
    *(
        {"a": 1},
        [2**70],
        ["x", 0, 0, 0],
        ["", -9, 0, 0],
        40 * [1],
        [True, 1],
        50 * "long ",
        [1e999],
    ),
)


def framed(header, body):
    """Return a frame whose checksum is right, whatever it holds."""
    text = json.dumps(header).encode()
    crc = zlib.crc32(text, _frames.checksum(body))
    return _frames._HEAD.pack(_frames.MAGIC, len(text), crc, len(body)) + text + body


def damaged(rng, data):
    """Return bytes that are no frame: some changed, cut off, added, or random ones."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            return data + rng.randbytes(rng.randrange(1, 100))
        case _:
            changed = bytearray(data)
            for place in rng.sample(range(len(data)), rng.randrange(1, 9)):
                changed[place] ^= rng.randrange(1, 256)
            return bytes(changed)


def mutated(rng, data, valid=()):
    """Return a frame with a right checksum, one of whose entries is junk, or whose body is.

    `valid` has pairs of entries and junk that a receiver takes.
    """
    frame = _frames.Frame.parse(data)
    header, body = {"kind": frame.kind, **frame.header}, frame.body
    if body and rng.random() < 0.3:
        return framed(header, body[: rng.randrange(len(body))])
    name = rng.choice(list(header))
    value = rng.choice([x for x in JUNK if not any(name == n and x == v for n, v in valid)])
    if rng.random() < 0.2 and (name, None) not in valid:
        del header[name]
    else:
        header[name] = value
    return framed(header, body)


def frames_of(rng, num, frames, target, valid=()):
    """Yield damaged frames of a run, and mutations of one of them."""
    for _ in range(num):
        yield (
            damaged(rng, rng.choice(frames)) if rng.random() < 0.5 else mutated(rng, target, valid)
        )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """What the server and bern send each other in a run."""
    folder, local, pairs = tmp_path_factory.mktemp("run"), deploy.LocalTransport(), []
    for name in STUDY.sites:
        site = studies.site_of(STUDY, name, folder)
        heard = (lambda *pair: pairs.append(pair)) if name == "bern" else None
        local.join(site, heard=heard)
    settings = dict(transport=local, num_rounds=4, num_chains=2, progress=False)
    deploy.run(STUDY, KEY, "main", POSITION, **settings)
    return pairs, folder


@pytest.fixture
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "fedmcmc.deploy")


def memory():
    if Path("/proc/self/statm").exists():
        return hostile.growth()
    return contextlib.nullcontext([0])


@pytest.mark.parametrize("num", NUM_FRAMES)
def test_frames_that_are_none_change_nothing_at_a_site(num, recorded, tmp_path, quiet):
    pairs, folder = recorded
    site = studies.site_of(STUDY, "bern", tmp_path)
    for path in (folder / "bern").glob("secret"):  # from which its clients draw
        shutil.copy(path, tmp_path / "bern")
    rng = random.Random(num)
    asked = [data for data, _ in pairs]
    steps = [i for i, data in enumerate(asked) if _frames.Frame.parse(data).kind == "step"]
    last = steps[1]
    for data, answer in pairs[: last + 1]:
        assert (site.answer(data) or b"") == answer

    def found():
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
        return {path: path.read_bytes() for path in files}

    state, files = jax.tree.map(np.array, site.state), found()
    # What a server may say that repeats a round.
    valid = [("last", None), ("marks", []), ("keep", [])]
    with memory() as grown:
        for data in frames_of(rng, num, asked, asked[last], valid):
            answer = site.answer(data)
            kind = _frames.Frame.parse(answer).kind
            assert kind in ("error", "unready", "declined"), _frames.Frame.parse(data)
    assert grown[0] < MAX_GROWTH
    chex.assert_trees_all_equal(site.state, state)
    assert found() == files
    for data, answer in pairs[last:]:
        assert (site.answer(data) or b"") == answer


class Feed:
    """A transport over which what was put into it comes."""

    def __init__(self):
        self.news = []

    def send(self, site, data):
        pass

    def limit(self, site, num_bytes):
        pass

    def receive(self, timeout):
        return self.news.pop() if self.news and timeout else None


@pytest.mark.parametrize("num", NUM_FRAMES)
def test_frames_that_are_none_change_nothing_at_the_server(num, recorded, tmp_path, quiet):
    rng, feed = random.Random(num), Feed()
    links = Links(STUDY, feed, timeout=60.0)
    hellos = {
        name: studies.site_of(STUDY, name, tmp_path).hello() for name in ("bern", "basel", "chur")
    }
    for name in ("bern", "basel"):
        links._admit(name, hellos[name], {})
    answers = [answer for _, answer in recorded[0] if answer]
    right = [data for data in answers if _frames.Frame.parse(data).kind == "answer"][-1]
    tag = _frames.Frame.parse(right).tag
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        shapes_of_run(STUDY.kernel("main"), STUDY, POSITION).phases[0].code,
    )

    def read(site, body):
        return [_frames.decode(part, like) for part in _frames.unpack(body, 4)[:2]]

    def exchange():
        return links.exchange({"bern": b""}, "answer", tag, read, max_bytes=2**16)["bern"]

    feed.news = [("bern", right)]
    expected, num_errors = exchange(), 0
    with memory() as grown, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hellos that are not taken
        for data in frames_of(rng, num, answers, right):
            if rng.random() < 0.05:
                links._admit("chur", mutated(rng, hellos["chur"]), {})
            feed.news = [("bern", right), ("bern", data)]
            try:
                found = exchange()
            except deploy.SiteError as error:
                assert str(error).startswith("bern")
                num_errors += 1
                continue
            chex.assert_trees_all_equal(found, expected)
            assert {"bern", "basel"} <= links.joined
    assert grown[0] < MAX_GROWTH
    assert 0 < num_errors < num / 2  # bodies that were cut


def bits_changed(rng, data):
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 20)):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("num", NUM_FRAMES)
def test_codes_that_are_none_are_refused_as_such(num, recorded):
    """With a right checksum, as a dishonest site would send them."""
    rng = random.Random(num)
    like = shapes_of_run(STUDY.kernel("main"), STUDY, POSITION).phases[0].code
    frames = [_frames.Frame.parse(answer) for _, answer in recorded[0] if answer]
    bodies = [frame.body for frame in frames if frame.kind == "answer"]
    codes = [body[8 : 8 + int.from_bytes(body[:8], "big")] for body in bodies]
    with memory() as grown:
        for _ in range(num):
            with contextlib.suppress(FrameError):
                _frames.decode(bits_changed(rng, rng.choice(codes)), like)
    assert grown[0] < MAX_GROWTH
