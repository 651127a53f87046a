"""Rounds under masks draw the numbers of a simulated secure sum, and only masked words leave."""

import contextlib
import platform
import struct
import subprocess
import sys

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy import secure
from fedmcmc.deploy._frames import Frame
from tests.support import studies
from tests.support.processes import environment
from tests.support.recorded_sites import frames_of, record_run, run_over
from tests.support.site_runs import ADAPTING, MASKED, at_sites, run_both

# One per family.
ROWS = (
    "lsd_star",
    "lsd_pp",
    "dg_sgld",
    "ensemble",
    "fa_hmc",
    "pseudo_gradients",
    "fed_ep: expansions",
    "hmc",
    "multiple_try",
    "sequence",
)
# Clients that keep a state and count bits below; two phases.
STATEFUL, SET_UP = studies.masked_study("lsd_pp"), studies.masked_study("lsd_star")


@pytest.mark.slow
@ADAPTING
@pytest.mark.parametrize("row", ROWS)
def test_sites_under_masks_draw_the_numbers_of_a_simulated_secure_sum(row, tmp_path):
    run_both(studies.masked_study(row), tmp_path, num_chains=2)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the flag that leaves out fused arithmetic is for x86",
)
def test_sites_under_masks_draw_the_same_to_the_last_bit():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.site_runs", *(MASKED + row for row in ROWS)],
        env=environment(devices=1, flags="--xla_cpu_max_isa=AVX"),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("study", [SET_UP, STATEFUL], ids=["set-up", "state"])
def test_nothing_but_masked_words_leaves_a_site(study, tmp_path):
    pairs, samples = record_run(study, tmp_path, num_rounds=3, num_chains=2)
    counted = 0
    for index, of_site in enumerate(pairs.values()):
        for request, answer in of_site:
            reply = Frame.parse(answer) if answer else None
            match Frame.parse(request).kind:
                case "welcome":
                    assert reply is None
                case "open" | "confirm" | "seal":
                    assert reply.kind == "answer" and set(reply.header) == {"tag"}
                    assert len(reply.body) in (116, 64, 0)  # a fresh key, a signature, nothing
                case "begin" | "start":
                    assert reply.kind == "ready" and set(reply.header) == {"tag"} and not reply.body
                case "setup" | "step" as kind:
                    assert reply.kind == "answer" and set(reply.header) == {"tag"}
                    _, _, number, words = secure.read_masked(reply.body)
                    assert number == index
                    # The message, two counts and, in steps, the bits below, of two chains.
                    extra = 2 if kind == "step" else 0
                    assert words.size == 2 * (3 + 2) + extra
                    counted += 64 * (words.size - extra) if kind == "step" else 0
                case kind:
                    raise AssertionError(kind)
    assert counted == samples.totals["bits_up"].sum()


def rows_in(order):
    """Return rows of integers for each site, in an order of sites."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(-50, 50, (4, 3)).astype(np.float32) for _ in order]
    return {name: {"x": rows[place]} for name, place in zip(studies.NAMES, order, strict=True)}


@pytest.mark.slow
def test_a_transcript_without_uniform_words_depends_only_on_the_sum(tmp_path, monkeypatch):
    """Sites exchange their rows, so that messages are others and their sums the same."""
    fixed = dict(identities={n: studies.public_key(n) for n in studies.NAMES}, rounds=400)
    study = studies.study_of(
        posterior=f"{studies.HERE}:straight",
        kernels={"main": f"{studies.HERE}:straight_kernel"},
        sites=dict.fromkeys(studies.NAMES, 4),
        secure=fixed,
    )
    monkeypatch.setattr("time.time_ns", lambda: 7)  # two runs of one server at the same time
    settings = dict(position=jnp.zeros(3), num_rounds=300, num_chains=2)
    transcripts = [
        record_run(study, tmp_path / f"{order[0]}", rows=rows_in(order), **settings)[0]
        for order in ((0, 1, 2), (2, 0, 1))
    ]
    sums, words = [], []
    for pairs in transcripts:
        bodies = [secure_words(of_site) for of_site in pairs.values()]
        sums.append(np.sum(bodies, axis=0, dtype=np.uint64))
        words += bodies
    np.testing.assert_array_equal(*sums)
    assert not any((a == b).any() for a, b in zip(words[:3], words[3:], strict=True))
    for numbers in (*words, words[0] + words[1], words[3] - words[4]):
        for places in numbers.view(np.uint8).reshape(-1, 8).T:
            assert stats.chisquare(np.bincount(places, minlength=256)).pvalue > 1e-7
    for pairs in zip(*(transcript.values() for transcript in transcripts), strict=True):
        first, second = ([read_plain(pair) for pair in of_site] for of_site in pairs)
        assert first == second


def secure_words(pairs):
    """Return all masked words of a site's steps, one round after another."""
    bodies = [answer.body for _, answer in frames_of(pairs, "setup", "step")]
    return np.concatenate([secure.read_masked(body)[3] for body in bodies])


def read_plain(pair):
    """Return the parts of a request and its answer without masked words and the session."""
    request, answer = (Frame.parse(data) if data else None for data in pair)
    header = request.header | {"masks": None}
    if request.kind in ("open", "confirm", "seal"):
        return request.kind, header
    size = len(answer.body) if answer else None
    kind, answer_header = answer and answer.kind, answer and answer.header
    return request.kind, header, request.body, kind, answer_header, size


class Lossy(deploy.LocalTransport):
    """Loses a site, as if killed, before or right after its answer, in turns; it comes again."""

    def __init__(self, study, folder, victim, rounds):
        super().__init__()
        self.study, self.folder, self.victim, self.rounds = study, folder, victim, {*rounds}
        self.heard = []
        for name in study.sites:
            self.enter(name)

    def enter(self, name):
        site = studies.site_of(self.study, name, self.folder)
        self.join(site, heard=self.lose if name == self.victim else None)

    def lose(self, request, answer):
        frame = Frame.parse(request)
        if answer:
            self.heard.append((request, answer))
        if frame.kind == "step" and frame.tag.round in self.rounds:
            self.rounds.remove(frame.tag.round)
            if len(self.rounds) % 2:
                self._inbox.put((self.victim, answer))
            self._outboxes.pop(self.victim).put(None)
            self._inbox.put((self.victim, None))
            self.enter(self.victim)


def test_a_site_that_is_lost_sends_the_same_words_under_other_masks(tmp_path):
    expected = at_sites(STATEFUL, tmp_path / "undisturbed", num_rounds=7)
    local = Lossy(STATEFUL, tmp_path / "lossy", "basel", {1, 2, 5})
    samples = run_over(local, STATEFUL, num_rounds=7)
    chex.assert_trees_all_equal(samples.draws, expected.draws)
    repeated = {}
    for frame, reply in frames_of(local.heard, "step"):
        if reply.kind == "answer":
            repeated.setdefault(frame.tag.round, []).append((frame, reply.body))
    for pairs in (repeated[1], repeated[5]):  # of round 2 the server may have had all answers
        assert len({frame.body for frame, _ in pairs}) == 1  # the same question
        sessions = [frame.header["masks"]["session"] for frame, _ in pairs]
        words = [secure.read_masked(body)[3] for _, body in pairs]
        assert sessions[0] != sessions[-1] and (words[0] != words[-1]).all()


def test_a_run_under_masks_continues_from_its_checkpoint(tmp_path):
    expected = at_sites(STATEFUL, tmp_path / "expected", num_rounds=5)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=2)
    for num_rounds in (3, 5):
        samples = at_sites(
            STATEFUL, tmp_path / "sites", num_rounds=num_rounds, checkpoint=checkpoint
        )
    chex.assert_trees_all_equal(samples.draws, expected.draws)


def test_a_site_without_its_folder_does_not_start_again(tmp_path):
    """Its log, in another place, has its answers."""

    def open_site(folder, study=STATEFUL):
        with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
            return studies.site_of(study, "bern", folder, log=log)

    local = deploy.LocalTransport()
    with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
        for name in STATEFUL.sites:
            settings = dict(log=log) if name == "bern" else {}
            local.join(studies.site_of(STATEFUL, name, tmp_path, **settings))
        run_over(local, STATEFUL, num_rounds=1)
    open_site(tmp_path)  # in its folder
    with pytest.raises(
        deploy.Refused, match=r"By its log bern has answered \d+ questions under masks"
    ):
        open_site(tmp_path / "another")
    open_site(tmp_path / "another", studies.masked_study("lsd"))


# Who is refused

STRANGER = Ed25519PrivateKey.from_private_bytes(b"\x55" * 32)


def test_a_site_without_the_identity_of_the_study_takes_no_part(tmp_path):
    with pytest.raises(deploy.Refused, match="uses masks: give bern its identity"):
        studies.site_of(STATEFUL, "bern", tmp_path, identity=None)
    for other in (STRANGER, studies.identity_of("chur")):
        with pytest.raises(ValueError, match="not that of site 0"):
            studies.site_of(STATEFUL, "bern", tmp_path, identity=other)
    public = deploy.make_identity(tmp_path, "bern")
    study = studies.masked_study(
        "lsd", secure={"identities": STATEFUL.secure["identities"] | {"bern": public}}
    )
    studies.site_of(study, "bern", tmp_path, identity=tmp_path / "bern.identity")
    assert (tmp_path / "bern.identity").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError, match="would replace it"):
        deploy.make_identity(tmp_path, "bern")
    deploy.make_authority(tmp_path / "keys")
    with pytest.raises(ValueError, match="must be an Ed25519 private key"):
        studies.site_of(study, "bern", tmp_path, identity=tmp_path / "keys" / "ca.key")


class Between(deploy.LocalTransport):
    """A server that replaces a site's hello by a hello with the server's keys."""

    def send(self, site, data):
        frame = Frame.parse(data)
        if frame.kind == "confirm" and site != "basel":  # which would know its own
            public = list(STATEFUL.consortium.sites)
            public[1] = STRANGER.public_key().public_bytes_raw()
            mine = secure.MaskGroup(STATEFUL.consortium.study, tuple(public))
            parts = deploy._frames.unpack(frame.body, 3)
            parts[1] = secure.Handshake(mine, 1, STRANGER).hello
            data = frame._replace(body=deploy._frames.pack(*parts)).to_bytes()
        super().send(site, data)


def test_a_server_in_a_sites_place_is_refused(tmp_path):
    local = Between()
    studies.join_all(local, STATEFUL, tmp_path)
    with pytest.raises(deploy.SiteError, match="hello of site 1 is not signed by its approved"):
        run_over(local, STATEFUL, num_rounds=1)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A site within a run, with its pairs of requests and answers of steps."""
    local, pairs = deploy.LocalTransport(), []
    sites = studies.join_all(local, STATEFUL, tmp_path_factory.mktemp("answered"))
    local.leave("bern")
    local.join(sites["bern"], heard=lambda *pair: pairs.append(pair))
    run_over(local, STATEFUL, num_rounds=3)
    steps = [pair for pair in pairs if Frame.parse(pair[0]).kind == "step"]
    return sites["bern"], steps


def reason(site, frame):
    reply = Frame.parse(site.answer(frame.to_bytes()))
    assert reply.kind == "answer" or not reply.body
    return reply.kind, reply.header.get("reason", "")


def changed(frame, **masks):
    return frame._replace(header=frame.header | {"masks": frame.header["masks"] | masks})


def test_a_request_that_singles_out_a_message_is_declined(answered):
    site, steps = answered
    frames = [Frame.parse(data) for data, _ in steps]
    last, before = frames[-1], frames[-2]
    assert site.answer(steps[-1][0]) == steps[-1][1]  # the same question, the same words
    elsewhere = last._replace(body=last.body[:-4] + struct.pack(">f", 0.25))
    heavy = last._replace(header=last.header | {"weights": [2.0**20]})
    bare = last._replace(header={k: v for k, v in last.header.items() if k != "masks"})
    wrong = (
        (before, "rule 4"),  # a replay
        (elsewhere, "rules 1 and 2"),
        (changed(last, sites=[0, 1]), "rule 2"),
        (changed(last, sites=[0, 1, 2, 2]), "rule 2"),
        (heavy, "with one weight"),
        (bare, "uses masks, but its server does not"),
    )
    replies = [reason(site, frame) for frame, _ in wrong]
    np.testing.assert_array_equal([kind for kind, _ in replies], "declined")
    assert all(words in text for (_, text), (_, words) in zip(replies, wrong, strict=True))
    absent = last._replace(header=last.header | {"active": [False]})
    for frame in (absent, before._replace(body=before.body[:-1])):
        assert reason(site, frame)[0] == "error"
    for junk in (dict(attempt=-1), dict(attempt=2**16), dict(attempt="x"), dict(sites=None)):
        assert reason(site, changed(last, **junk))[0] == "error"
    assert reason(site, changed(last, session="00" * 32))[0] == "unready"


def test_another_attempt_has_the_same_words_under_another_mask(answered):
    site, steps = answered
    frame = Frame.parse(steps[-1][0])
    (tag, words), (other, again) = (
        secure.read_masked(Frame.parse(data).body)[1::2]
        for data in (steps[-1][1], site.answer(changed(frame, attempt=1).to_bytes()))
    )
    assert (tag.attempt, other.attempt) == (0, 1) and (words != again).all()


def test_sites_that_are_asked_different_things_do_not_add_up(tmp_path):
    """A server shows one site another position; masks depend on the question."""
    local, study = deploy.LocalTransport(), studies.masked_study("lsd")
    real = local.send

    def send(site, data):
        frame = Frame.parse(data)
        if frame.kind == "step" and site == "bern":
            body = frame.body[:-4] + struct.pack(">f", 1.0)
            data = frame._replace(body=body).to_bytes()
        real(site, data)

    local.send = send
    studies.join_all(local, study, tmp_path)
    with pytest.raises(deploy.SiteError, match="do not cancel"):
        run_over(local, study, num_rounds=2)


def test_nothing_is_answered_beyond_the_approved_rounds_and_answers(tmp_path):
    study = studies.masked_study("lsd", secure={"rounds": 3, "answers": 5})
    with pytest.raises(deploy.SiteError, match=r"beyond the 3 approved rounds \(rule 6\)"):
        at_sites(study, tmp_path, num_rounds=4)
    with pytest.raises(deploy.SiteError, match=r"All 5 approved answers .*\(rule 6\)"):
        at_sites(study, tmp_path, num_rounds=3)  # another run, from another position


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(row="lsd", settings={"row": "lsd"}), deploy.Refused, "make it a fedmcmc.secure_sum"),
        (dict(settings={"uniform": 3}), ValueError, "cohorts of this kernel change from round"),
        (dict(settings={"faults": True}), ValueError, "do not apply fedmcmc.faults to a kernel"),
    ],
    ids=["no secure sum", "cohorts", "faults"],
)
def test_kernels_that_masks_do_not_hide_are_refused(change, error, message, tmp_path):
    change = dict(change)
    row = change.pop("row", "lsd")
    settings = {"masked": True} | change.pop("settings", {})
    if "row" in settings:
        settings["masked"] = False
    study = studies.masked_study(row, settings=settings, **change)
    with pytest.raises(error, match=message):
        at_sites(study, tmp_path, num_rounds=1)


def test_studies_whose_sums_would_hide_nothing_are_refused(tmp_path):
    two = {name: studies.public_key(name) for name in studies.NAMES[:2]}
    study = studies.masked_study("lsd", secure={"identities": two}, sites=dict.fromkeys(two, 5))
    with pytest.raises(ValueError, match="over 2 sites is refused: at least 3"):
        deploy.Sites(study, deploy.LocalTransport())
    with pytest.raises(ValueError, match="over 2 sites is refused: at least 3"):
        studies.site_of(study, "bern", tmp_path, min_sites=2)
    with pytest.raises(ValueError, match="on_missing must be 'wait'"):
        deploy.Sites(STATEFUL, deploy.LocalTransport(), on_missing="leave_out")
    three = {name: studies.public_key(name) for name in studies.NAMES}
    for wrong, message in (
        ({"identities": two}, "a public key for each"),
        ({"identities": three | {"bern": "xy" * 32}}, "identity of bern is not a public key"),
        ({"identities": three | {"bern": 7}}, "identity of bern is not a public key"),
        ({"sites": 3}, "secure must hold identities, rounds"),
        ({"rounds": "many"}, "secure.rounds must be a whole number, got 'many'"),
    ):
        with pytest.raises(ValueError, match=message):
            studies.masked_study("lsd", secure=wrong)
    colluding = studies.masked_study("lsd", secure={"colluding": 1})
    with pytest.raises(ValueError, match="among 2 sites only, and at least 3"):
        deploy.Sites(colluding, deploy.LocalTransport())
    with pytest.raises(ValueError, match="at least 4 are needed"):
        deploy.Sites(studies.masked_study("lsd", secure={"minimum": 4}), deploy.LocalTransport())
