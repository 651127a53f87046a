"""Messages of a site or a server cost the receiver little, whatever they hold."""

import json
import logging
import re
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy import _frames, _grpc
from fedmcmc.deploy._frames import Frame, FrameError, Tag
from fedmcmc.deploy._links import Links
from fedmcmc.deploy._pki import make_request
from tests.support import hostile, studies
from tests.support.consortium import Threads, credentials, keys, make_keys
from tests.support.recorded_sites import run_over

__all__ = ["keys"]
MAX_GROWTH = 48 * hostile.MEBI
CHUNK = _grpc.CHUNK_BYTES
measured = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="this system does not tell a process its size"
)


@pytest.fixture
def server(keys):
    folder, pins = keys
    grpc_server = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
    yield grpc_server
    grpc_server.close()


@pytest.mark.parametrize("size", [20, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5])
def test_a_message_comes_out_of_its_parts(size):
    data = hostile.begin(size) + np.random.default_rng(size).bytes(size - hostile.HEAD)
    parts = list(_grpc.split_message(data))
    assert max(map(len, parts)) <= CHUNK
    assert list(_grpc.join_parts(parts * 2, lambda: size)) == [data, data]
    assert list(_grpc.join_parts(parts[:-1], lambda: size)) == []  # cut short


@pytest.mark.parametrize(
    ("parts", "num_read", "message"),
    [
        ([hostile.begin(101)] + 5 * [bytes(50)], 1, "101 bytes, where at most 100 are"),
        ([hostile.begin(2**63)] + 5 * [b""], 1, "where at most 100 are expected"),
        ([b"1234567"], 1, "7 bytes that do not begin"),
        ([b"1" + hostile.begin(100)], 1, "21 bytes that do not begin"),
        ([hostile.begin(100) + bytes(60), bytes(20)], 1, "80 bytes, where 100 are"),
        ([hostile.begin(30) + bytes(11)], 1, "31 bytes, where 30 are"),
        ([hostile.begin(100)] + 5 * [b""], 1, "20 bytes, where 100 are"),
    ],
)
def test_wrong_parts_end_a_connection_at_once(parts, num_read, message):
    read = []
    with pytest.raises(_grpc.TransportError, match=message):
        list(_grpc.join_parts((read.append(part) or part for part in parts), lambda: 100))
    assert len(read) == num_read


REFUSALS = {
    "compressed": "UNIMPLEMENTED",
    "deflated": "UNIMPLEMENTED",
    "whole": "RESOURCE_EXHAUSTED",
    "claim": "PERMISSION_DENIED bern sent a message of 1,099,511,627,776 bytes, where",
    "large": "PERMISSION_DENIED bern sent a message of 65,537 bytes, where at most 65,536",
    "empty": "PERMISSION_DENIED bern sent a part of 30 bytes, where 65,536 are expected",
}


@measured
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_registered_site_does_not_fill_the_memory_of_the_server(kind, keys, server, caplog):
    with (
        hostile.growth() as grown,
        hostile.process("site", keys[0], server.port, kind) as site,
    ):
        outcome = site.communicate(timeout=60)[0]
    assert outcome.startswith(REFUSALS[kind])
    assert grown[0] < MAX_GROWTH
    if outcome.startswith("PERMISSION_DENIED"):
        assert "bern sent a " in caplog.text and "its connection was ended" in caplog.text
    assert server.receive(5.0) == ("bern", None)


@measured
def test_few_messages_of_a_site_wait_at_the_server(keys, server):
    with (
        hostile.growth() as grown,
        hostile.process("site", keys[0], server.port, "many"),
    ):
        end = time.monotonic() + 20.0
        while server._arrivals.qsize() < _grpc.MAX_UNREAD and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # in which more would come
        assert server._arrivals.qsize() == _grpc.MAX_UNREAD
        for _ in range(3 * _grpc.MAX_UNREAD):
            assert server.receive(5.0) == ("bern", hostile.message(2**16))
    assert grown[0] < MAX_GROWTH


@measured
def test_a_site_that_reads_nothing_has_to_join_again(keys, server):
    """If sites may be missing, a run would continue, and its waiting messages would grow."""
    message = bytes(2 * hostile.MEBI)
    with hostile.growth() as grown, hostile.process("site", keys[0], server.port, "silent"):
        end = time.monotonic() + 30.0
        while server._connections.get("bern") is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(200):
            server.send("bern", message)
        assert server.receive(5.0) == ("bern", None)
    assert grown[0] < MAX_GROWTH


@measured
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "claim",
            r"sent a message of 1,099,511,627,776 bytes, where at most 268,435,456 are expec",
        ),
        ("compressed", r"bern: no connection \((INTERNAL|UNIMPLEMENTED)\)"),
        ("deflated", r"bern: no connection \((INTERNAL|UNIMPLEMENTED)\)"),
        ("whole", r"bern: no connection \(RESOURCE_EXHAUSTED\)"),
    ],
)
def test_a_server_does_not_fill_the_memory_of_a_site(kind, reason, keys, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    mine = credentials(keys[0], "bern")

    def reasons():
        return "\n".join((*caplog.messages, *threads.errors.values()))

    with hostile.process("server", keys[0], 0, kind) as server, hostile.growth() as grown:
        threads, end = Threads(int(server.stdout.readline())), time.monotonic() + 20.0
        threads.join(studies.study_of(), "bern", tmp_path, mine)
        while not re.search(reason, reasons()) and time.monotonic() < end:
            time.sleep(0.01)
        threads.end()
    assert re.search(reason, reasons())
    assert grown[0] < MAX_GROWTH


class Limited(deploy.LocalTransport):
    """Notes how long messages are, and how long they may be."""

    def __init__(self):
        super().__init__()
        self.limits, self.lengths = {}, {}

    def limit(self, site, num_bytes):
        self.limits[site] = num_bytes

    def receive(self, timeout):
        news = super().receive(timeout)
        if news is not None and news[1] is not None:
            name, data = news
            assert len(data) <= self.limits.get(name, _frames.JOIN_BYTES)
            self.lengths[name] = max(self.lengths.get(name, 0), len(data))
        return news


@pytest.mark.parametrize(
    "study",
    [
        studies.study_of("compress: lsd_pp, memory: per client"),
        pytest.param(studies.masked_study("lsd_pp"), marks=pytest.mark.slow),
        pytest.param(studies.study_of("fed_ep"), marks=pytest.mark.slow),
    ],
    ids=["compressed", "masked", "fed_ep"],
)
def test_the_server_expects_messages_as_long_as_those_of_the_run(study, tmp_path):
    local = Limited()
    studies.join_all(local, study, tmp_path)
    run_over(local, study, num_rounds=3, num_chains=3)
    for name, num_bytes in local.limits.items():
        assert local.lengths[name] < num_bytes < _frames.JOIN_BYTES + 4 * local.lengths[name]


class Answering(deploy.LocalTransport):
    """Answers each request at once with the same message."""

    message = b""

    def send(self, site, data):
        if not data:
            self._inbox.put((site, self.message))


def test_a_message_that_is_longer_than_expected_is_not_read(tmp_path, caplog):
    study, local = studies.study_of(), Answering()
    links, tag = Links(study, local, timeout=0.2), Tag("run", 0, 0, 1)
    header, body = {"tag": list(tag)}, bytes(_frames.JOIN_BYTES + 1000)
    local.message = Frame("answer", header, body).to_bytes()
    links._admit("bern", studies.site_of(study, "bern", tmp_path).hello(), {})
    for limit, answered in ((0, set()), (2000, {"bern"}), (0, {"bern"})):
        settings = dict(max_bytes=limit, may_miss=True)
        answers = links.exchange({"bern": b""}, "answer", tag, lambda *_: 0, **settings)
        assert answers.keys() == answered  # late answers to longer requests may come
    assert "bern: a message was not understood: 66,599 bytes are more" in caplog.text


def test_a_run_with_longer_messages_than_the_owner_accepts_is_declined(tmp_path):
    study, local = studies.study_of(), deploy.LocalTransport()
    studies.join_all(local, study, tmp_path, max_bytes=66_000)
    message = (
        r"The messages of this run have up to 66,\d+ bytes, and \w+ accepts at most 66,000: set"
    )
    with pytest.raises(deploy.SiteError, match=message):
        run_over(local, study, num_rounds=1, num_chains=5)


def framed(header):
    """Return a frame with some header, whose checksum is right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    crc = zlib.crc32(text, _frames.checksum(b""))
    return _frames._HEAD.pack(_frames.MAGIC, len(text), crc, 0) + text


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"kind": "x", "a": "' + bytes(2**20) + b'"}', "do not begin as a message"),
        (b'{"kind": "x", "a": ' + 70 * b"[" + 70 * b"]" + b"}", "more than 64 levels"),
        (b'{"kind": "x", "a": ' + 70 * b'{"a":' + b"0" + 70 * b"}" + b"}", "more than 64 levels"),
        (b'{"kind": "x", "a": ' + 10**5 * b"[" + 10**5 * b"]" + b"}", "not readable"),
        (b'{"kind": "x", "a": ' + 10**5 * b"1" + b"}", "not readable"),
    ],
    ids=["long", "lists", "tables", "very deep", "large number"],
)
def test_headers_are_short_and_flat(header, message):
    with pytest.raises(FrameError, match=message):
        Frame.parse(framed(header))


def test_a_header_that_nobody_would_accept_is_not_sent():
    with pytest.raises(ValueError, match="use fewer chains"):
        Frame("step", {"weights": [1.0] * 300_000}).to_bytes()


def pinned(folder, name, pin):
    files = (folder / f"{name}.key", folder / f"{name}.crt", folder / "ca.crt")
    return deploy.Credentials(*files, server_fingerprint=pin)


def colons(pin):
    """Return a fingerprint as OpenSSL shows it."""
    return ":".join(pin[i : i + 2].upper() for i in range(0, len(pin), 2))


def test_a_site_accepts_the_pinned_certificate_of_the_server_and_no_other(tmp_path, caplog):
    pins = make_keys(tmp_path, studies.NAMES)
    other = tmp_path / "other"
    deploy.make_party(tmp_path, other, "server", hosts=("localhost",))  # of the same authority
    certificate = (tmp_path / "server.crt").read_bytes()
    pin = deploy.fingerprint(certificate)
    # Certificates after the pinned one in the file are not trusted.
    (tmp_path / "server.crt").write_bytes(certificate + (tmp_path / "ca.crt").read_bytes())
    mine = pinned(tmp_path, "bern", colons(pin))
    caplog.set_level(logging.INFO)
    for folder, is_expected in ((other, False), (tmp_path, True)):
        server = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
        threads = Threads(server.port)
        threads.join(studies.study_of(), "bern", tmp_path / folder.name, mine)
        news = server.receive(20.0 if is_expected else 2.0)
        assert (news is not None) == is_expected
        threads.end()
        server.close()
        assert threads.errors == {}
    refusals = [text for text in caplog.messages if f"not the pinned one ({pin})" in text]
    assert len(refusals) == 1 and refusals[0].startswith("bern: the server at localhost:")


def test_a_site_logs_a_change_of_its_connection_once(keys, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_grpc, "MAX_WAIT_SECONDS", 0.1)
    caplog.set_level(logging.INFO)
    folder, pins = keys
    server = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
    address, threads, study = f"127.0.0.1:{server.port}", Threads(server.port), studies.study_of()
    threads.join(study, "bern", tmp_path, credentials(folder, "bern"))
    for _ in range(2):
        links = Links(study, server, 1.0)
        links._admit(*server.receive(20.0), {})
        wait_until(lambda: "bern joined the run of the study" in caplog.text)
        server.close()
        wait_until(lambda: "bern: the server ended the run; waiting" in caplog.text)
        time.sleep(1.0)
        assert "no connection" not in caplog.text and caplog.text.count("bern joined") == 1
        caplog.clear()
        server = deploy.GrpcServer(address, credentials(folder, "server"), pins)
    server.close()
    threads.end()
    closed = Threads(server.port)
    closed.join(study, "basel", tmp_path / "other", credentials(folder, "basel"))
    wait_until(lambda: "basel: no connection (UNAVAILABLE); calling" in caplog.text)
    time.sleep(1.0)
    closed.end()
    assert caplog.text.count("basel: no connection") == 1


def wait_until(holds):
    end = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_pin_is_that_of_the_file_beside_the_authority(tmp_path):
    make_keys(tmp_path, ["bern"])
    with pytest.raises(ValueError, match=r"server\.crt has the fingerprint .* is 0000"):
        pinned(tmp_path, "bern", "0" * 64).read()
    (tmp_path / "server.crt").unlink()
    with pytest.raises(ValueError, match=r"needs the server's certificate in .*server\.crt"):
        pinned(tmp_path, "bern", "0" * 64).read()


def test_the_sign_command_prints_the_pin_of_a_renewed_certificate(tmp_path, capsys):
    make_keys(tmp_path, ["bern"])
    make_request(tmp_path / "new", "server")
    request = str(tmp_path / "new" / "server.csr")
    arguments = ["sign", request, "--authority", str(tmp_path), "--host", "localhost"]
    assert main(["deploy", *arguments]) == 0
    pin = re.search(r'server_fingerprint = "([0-9a-f]{64})"', capsys.readouterr().out)[1]
    with pytest.raises(ValueError, match="has the fingerprint"):
        pinned(tmp_path, "bern", pin).read()
    shutil.copy(tmp_path / "new" / "server.crt", tmp_path)
    assert pinned(tmp_path, "bern", pin).read()[2] == (tmp_path / "server.crt").read_bytes()


def test_of_two_processes_of_a_site_the_newer_one_stays(tmp_path, caplog):
    study, local = studies.study_of(), deploy.LocalTransport()
    links = Links(study, local, timeout=1.0)
    older, newer = (studies.site_of(study, "bern", tmp_path / text) for text in ("a", "b"))

    def settle():
        for _ in range(20):  # until messages that cause others have come
            links._read_queued()
            time.sleep(0.01)

    local.join(older)
    settle()
    local.join(newer)  # as after a crash, too, when the old connection is still open
    settle()
    assert local.refused == {} and links.joined == {"bern"}
    local.join(newer)  # the same process connects again
    settle()
    assert local.refused == {} and not caplog.records
    local.join(older)
    with pytest.warns(RuntimeWarning, match="a newer process of bern has joined"):
        settle()
    assert "the server ends this older one" in local.refused["bern"] and links.joined == set()
    for _ in range(2):
        local.join(newer)
        settle()
    assert links.joined == {"bern"}
    ended = [text for text in caplog.messages if "older process of this site ran" in text]
    assert len(ended) == 1
    local.close()


def test_a_refusal_of_another_process_ends_no_site(tmp_path):
    site = studies.site_of(studies.study_of(), "bern", tmp_path)
    header = {"reason": "a newer process has joined", "process": "other"}
    assert site.answer(Frame("refused", header).to_bytes()) is None
    with pytest.raises(deploy.Refused, match="a newer process"):
        site.answer(Frame("refused", header | {"process": site.process}).to_bytes())


def test_two_processes_of_a_site_over_the_network(keys, server, tmp_path):
    study = studies.study_of()
    links = Links(study, server, timeout=1.0)
    threads = [Threads(server.port) for _ in range(2)]
    for number, site in enumerate(threads):
        site.join(study, "bern", tmp_path / str(number), credentials(keys[0], "bern"))
        end = time.monotonic() + 20.0
        while len(links._processes.get("bern", ())) <= number:
            links._read_queued()
            assert time.monotonic() < end
            time.sleep(0.01)
    with pytest.warns(RuntimeWarning, match="a newer process of bern"):
        while not threads[0].errors or "bern" not in links.joined:
            links._read_queued()
            assert time.monotonic() < end
            time.sleep(0.01)
    assert "ends this older one" in threads[0].errors["bern"] and threads[1].errors == {}
    for site in threads:
        site.end()
