"""Sessions, masks and a site's own rules: the specification's bytes, and every refusal."""

import itertools
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from scipy import stats

from fedmcmc.compression import Grid, host_words
from fedmcmc.deploy._session import pair_key
from fedmcmc.deploy._sums import masked_frame, stream
from fedmcmc.deploy.secure import (
    Handshake,
    MaskGroup,
    MaskTag,
    RuleError,
    Session,
    SessionError,
    SiteRules,
    mask,
    read_masked,
    transcript,
    unmask,
)

TAG = MaskTag(5, 0, 0)


def hexadecimal(words):
    return [f"{word:016x}" for word in words]


def identities(num):
    return [Ed25519PrivateKey.from_private_bytes(bytes([1 + i]) * 32) for i in range(num)]


def consortium_of(num, document="an approved document", **settings):
    public = tuple(key.public_key().public_bytes_raw() for key in identities(num))
    return MaskGroup(transcript(document), public, **settings)


def handshakes(num, **settings):
    consortium = consortium_of(num, **settings)
    return [Handshake(consortium, i, key) for i, key in enumerate(identities(num))]


def sessions_of(num, **settings):
    sites = handshakes(num, **settings)
    hellos = [site.hello for site in sites]
    confirmations = [site.confirm(hellos) for site in sites]
    return [site.session(confirmations) for site in sites]


def random_words(num_sites, num, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, (num_sites, num), np.uint64)


# The vectors of the specification


def test_the_stream_of_the_specification():
    words = stream(bytes(range(32)), MaskTag(7, 1, 2), 3)
    assert hexadecimal(words) == ["a646812b71cc3082", "f3ab6446411b2cca", "8014eff44013bf8f"]


def test_pair_key_and_masks_of_the_specification():
    identifier = transcript("fedmcmc/session/1", b"\x03" * 32)
    assert identifier.hex() == "f09d2df855dcdeb853f44263b6d3bc3a9678cfaf9f2bbe42d5020562094efd59"
    private = [X25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2)]
    public = [key.public_key().public_bytes_raw() for key in private]
    keys = [pair_key(private[i], public[1 - i], identifier, i, 1 - i) for i in (0, 1)]
    wanted = "b6a99c5027952c0579dc83066af0c30de394e96d9e96a66a6601211b30279db8"
    assert [key.hex() for key in keys] == [wanted, wanted]
    words = np.array([1, -2, 2**40], np.int64).astype(np.uint64)
    masked = [
        mask(words, Session(identifier, consortium_of(3), i, {1 - i: keys[i]}), MaskTag(5, 0, 0))
        for i in (0, 1)
    ]
    assert hexadecimal(masked[0]) == ["0ff125a5eeb7ecf3", "f6feb7317824dfed", "125ad68f89cf3765"]
    assert hexadecimal(masked[1]) == ["f00eda5a1148130f", "090148ce87db200f", "eda52b707630c89b"]
    assert unmask(masked).astype(np.int64).tolist() == [2, -4, 2**41]


def test_the_question_and_noise_key_of_the_specification():
    query = transcript("fedmcmc/query/1", b"\x04" * 32, b"\x05" * 32)
    assert query.hex() == "f502061f8dada49d04ce796fd3b7da97640d0dd4521296cb21cb45a238c797e0"
    expand = HKDFExpand(hashes.SHA256(), 32, info=b"fedmcmc/noise/1" + query)
    wanted = "b6efc697427b5cfc1a08b36adbd191bdf12eadc187f8eaf9308a3c55c9c71ad3"
    assert expand.derive(b"\x06" * 32).hex() == wanted


# Masks


@pytest.mark.parametrize("num", range(3, 17))
def test_masks_cancel(num):
    sessions, words = sessions_of(num), random_words(num, 11)
    masked = [mask(own, session, TAG) for own, session in zip(words, sessions, strict=True)]
    np.testing.assert_array_equal(unmask(masked), words.sum(axis=0))
    assert all((a != b).all() for a, b in zip(masked, words, strict=True))


@pytest.mark.parametrize(
    "changed",
    [MaskTag(4, 0, 0), MaskTag(5, 1, 0), MaskTag(5, 0, 1), "a bit of a key", "a missing site"],
)
def test_masks_do_not_cancel_where_anything_differs(changed):
    sessions, words = sessions_of(3), random_words(3, 4)
    tags = [TAG, changed if isinstance(changed, MaskTag) else TAG, TAG]
    if changed == "a bit of a key":
        key = sessions[0].pair_keys[1]
        sessions[0].pair_keys[1] = bytes([key[0] ^ 1]) + key[1:]
    masked = [mask(own, s, tag) for own, s, tag in zip(words, sessions, tags, strict=True)]
    if changed == "a missing site":
        masked, words = masked[:2], words[:2]
    assert (unmask(masked) != words.sum(axis=0)).all()


def test_sites_that_were_asked_different_things_do_not_add_up():
    """And the same session has other masks for each question."""
    sessions, words = sessions_of(3), random_words(3, 50)
    one, other = transcript("one question"), transcript("another")

    def total(*questions):
        bound = [s.bound_to(q) for s, q in zip(sessions, questions, strict=True)]
        return unmask([mask(own, s, TAG) for own, s in zip(words, bound, strict=True)])

    np.testing.assert_array_equal(total(one, one, one), words.sum(axis=0))
    np.testing.assert_array_equal(total(one, one, other) != words.sum(axis=0), True)
    masks = [mask(0 * words[0], sessions[0].bound_to(q), TAG) for q in (one, other)]
    np.testing.assert_array_equal(masks[0] != masks[1], True)


def test_given_the_sum_a_transcript_says_nothing_exhaustively():
    """Words modulo 16, three sites, all masks: messages of one sum have the same transcripts."""

    def transcripts(words):
        a, b, c = words
        return sorted(
            ((a + x + y) % 16, (b - x + z) % 16, (c - y - z) % 16)
            for x, y, z in itertools.product(range(16), repeat=3)
        )

    one = transcripts((1, 2, 3))
    assert one == transcripts((6, 0, 0)) == transcripts((15, 15, 8))
    assert one != transcripts((1, 2, 4))


def test_masked_words_are_uniform_whatever_the_message():
    """Every byte, of two messages of one sum; and the masked words of a site are not related."""
    consortium, num = consortium_of(3), 60_000
    key = [bytes([i]) * 32 for i in range(3)]  # of the pair that lacks site i
    sessions = [
        Session(bytes(32), consortium, i, {j: key[3 - i - j] for j in range(3) if j != i})
        for i in range(3)
    ]
    zero, large = np.zeros(num, np.uint64), np.full(num, 2**52, np.uint64)
    found = []
    for words in ((zero, large, zero), (large, zero, zero)):
        masked = [mask(own, s, TAG) for own, s in zip(words, sessions, strict=True)]
        np.testing.assert_array_equal(unmask(masked), large)
        found += masked
    # A chi-square in each place of a word, and of sums of two sites, which lack the third's masks.
    for words in (*found, found[0] + found[1], found[3] - found[2]):
        for places in words.view(np.uint8).reshape(-1, 8).T:
            counts = np.bincount(places, minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
    assert (found[0] != found[3]).any()


def test_a_frame_comes_back():
    session, words = sessions_of(3)[1], random_words(1, 5)[0]
    tag = MaskTag.of_phase(2**40, 3, 0, 1)
    assert tag.exchange == 65535 and MaskTag.of_phase(2, 0, 0, 2).exchange == 0
    assert MaskTag.of_phase(7, 0, 1, 2, setup=True) == (0, 0, 2**15 + 1)
    sent = masked_frame(session, tag, words)
    assert len(sent) == 56 + 8 * 5
    identifier, found, index, back = read_masked(sent)
    assert (identifier, found, index) == (session.identifier, tag, 1)
    np.testing.assert_array_equal(back, words)
    for wrong in (sent[:-1], sent + b"\0", b"", sent[:56]):
        with pytest.raises(ValueError, match="masked words"):
            read_masked(wrong)


def test_words_are_vectors_of_uint64():
    session = sessions_of(3)[0]
    for wrong in (np.zeros(3), np.zeros((1, 3), np.uint64)):
        with pytest.raises(ValueError, match="vector of uint64"):
            mask(wrong, session, TAG)
    with pytest.raises(ValueError, match="one length"):
        unmask([np.zeros(3, np.uint64), np.zeros(2, np.uint64)])


def test_encoded_numbers_survive_masks():
    grid, x = Grid.of(2.0**-32, 2.0**20), np.float32([[1.5, -3.0], [0.25, 2.0], [-9.0, 0.5]])
    sessions = sessions_of(3)
    words = [host_words(grid.encode(own)) for own in x]
    masked = [mask(own, session, TAG) for own, session in zip(words, sessions, strict=True)]
    total = unmask(masked).astype(np.int64) * 2.0**-32
    np.testing.assert_array_equal(total, x.sum(axis=0))


# Sessions


def test_every_site_has_the_same_session_and_no_key_is_shown():
    sessions = sessions_of(4)
    assert len({session.identifier for session in sessions}) == 1
    for i, j in itertools.permutations(range(4), 2):
        assert sessions[i].pair_keys[j] == sessions[j].pair_keys[i]
    keys = {key for session in sessions for key in session.pair_keys.values()}
    assert len(keys) == 6
    assert "pair_keys" not in repr(sessions[0]) and sessions[0].pair_keys[1].hex() not in repr(
        sessions[0]
    )


def test_a_new_session_has_new_keys():
    one, other = sessions_of(3)[0], sessions_of(3)[0]
    assert one.identifier != other.identifier
    assert set(one.pair_keys.values()).isdisjoint(other.pair_keys.values())


def replaced(items, index, new):
    return [*items[:index], new, *items[index + 1 :]]


def test_a_hello_that_was_not_signed_for_this_study_is_refused():
    sites = handshakes(3)
    hellos = [site.hello for site in sites]
    stranger = Ed25519PrivateKey.from_private_bytes(b"\x77" * 32)
    # By another key than the approved one: a server in the place of site 1.
    public = replaced(consortium_of(3).sites, 1, stranger.public_key().public_bytes_raw())
    impostor = Handshake(MaskGroup(transcript("an approved document"), tuple(public)), 1, stranger)
    other_study = handshakes(3, document="another document")[1]
    swapped = struct.pack("<I", 1) + hellos[2][4:]
    fresh = X25519PrivateKey.generate().public_key().public_bytes_raw()
    replaced_key = hellos[1][:20] + fresh + hellos[1][52:]
    for wrong in (impostor.hello, other_study.hello, swapped, replaced_key):
        with pytest.raises(SessionError, match="hello of site 1 is not signed by its approved key"):
            sites[0].confirm(replaced(hellos, 1, wrong))
    for wrong in (hellos[2], hellos[1][:-1], b""):
        with pytest.raises(SessionError, match="hello of site 1"):
            sites[0].confirm(replaced(hellos, 1, wrong))
    with pytest.raises(SessionError, match="hello of site 0 is not its own"):
        sites[0].confirm(replaced(hellos, 0, handshakes(3)[0].hello))
    with pytest.raises(SessionError, match="hellos of all 3 sites"):
        sites[0].confirm(hellos[:2])


def test_a_server_cannot_split_the_cohort():
    """It shows site 0 another hello of site 2, of an earlier session: their views differ."""
    old = handshakes(3)[2].hello
    sites = handshakes(3)
    hellos = [site.hello for site in sites]
    confirmations = [
        sites[0].confirm(replaced(hellos, 2, old)),
        sites[1].confirm(hellos),
        sites[2].confirm(hellos),
    ]
    with pytest.raises(SessionError, match="Site 1 has not confirmed"):
        sites[0].session(confirmations)
    with pytest.raises(SessionError, match="Site 0 has not confirmed"):
        sites[1].session(confirmations)
    with pytest.raises(SessionError, match="another list of hellos"):
        sites[0].confirm(hellos)


def test_confirmations_of_another_session_or_another_site_are_refused():
    first, sites = handshakes(3), handshakes(3)
    replayed = [site.confirm([s.hello for s in first]) for site in first]
    with pytest.raises(SessionError, match="after the hellos"):
        sites[0].session(replayed)
    hellos = [site.hello for site in sites]
    confirmations = [site.confirm(hellos) for site in sites]
    with pytest.raises(SessionError, match="Site 2 has not confirmed"):
        sites[0].session(replaced(confirmations, 2, replayed[2]))
    with pytest.raises(SessionError, match="Site 2 has not confirmed"):
        sites[0].session(replaced(confirmations, 2, confirmations[1]))
    with pytest.raises(SessionError, match="confirmations of all 3"):
        sites[0].session(confirmations[:2])
    assert sites[0].session(confirmations).index == 0


def test_a_fresh_key_that_makes_the_secret_zero_is_refused():
    sites = handshakes(3)
    evil = sites[2]
    body = evil.hello[4:20] + bytes(32)
    study, two = transcript("an approved document"), struct.pack("<I", 2)
    message = transcript("fedmcmc/hello/1", study, two, body[:16], bytes(32))
    hellos = [
        sites[0].hello,
        sites[1].hello,
        two + body + identities(3)[2].sign(message),
    ]
    sites[0].confirm(hellos)
    identifier = transcript("fedmcmc/session/1", study, *hellos)
    confirmations = [
        key.sign(transcript("fedmcmc/confirm/1", identifier, struct.pack("<I", i)))
        for i, key in enumerate(identities(3))
    ]
    with pytest.raises(SessionError, match="fresh key of site 2 is not a key"):
        sites[0].session(confirmations)


@pytest.mark.parametrize(
    ("num", "settings", "message"),
    [
        (2, {}, "over 2 sites is refused: at least 3"),
        (4, dict(minimum=5), "at least 5 are needed"),
        (4, dict(colluding=2), "2 of 4 sites collude"),
        (4, dict(colluding=-1), "count sites"),
    ],
)
def test_too_few_sites_are_refused(num, settings, message):
    """Rule 3."""
    with pytest.raises(ValueError, match=message):
        consortium_of(num, **settings)
    consortium_of(5, colluding=2, minimum=5)


def test_keys_that_are_none_or_the_same_are_refused():
    sites = consortium_of(3).sites
    with pytest.raises(ValueError, match="same public key"):
        MaskGroup(bytes(32), (sites[0], sites[1], sites[0]))
    with pytest.raises(ValueError, match="32 bytes"):
        MaskGroup(b"", sites)
    for index in (1, 3, -1):
        with pytest.raises(ValueError, match="not that of site"):
            Handshake(consortium_of(3), index, identities(3)[0])


# A site's rules

QUESTION, OTHER = transcript("what is asked"), transcript("something else")
EVERYONE = [0, 1, 2]


class Site:
    """A site with rules on disk, which counts how often it computes."""

    def __init__(self, path, sessions=None, index=0, **settings):
        self.settings = dict(num_rounds=10) | settings
        self.path, self.consortium = path, consortium_of(3)
        self.rules = SiteRules(path, self.consortium, **self.settings)
        self.session = (sessions or sessions_of(3))[index]
        self.rules.begin(self.session)
        self.computed = 0

    def compute(self):
        self.computed += 1
        return random_words(1, 6, seed=self.computed)[0]  # another result every time

    def ask(self, tag=TAG, question=QUESTION, sites=EVERYONE, session=None):
        return self.rules.answer(session or self.session, tag, sites, question, self.compute)

    def restart(self):
        self.rules = SiteRules(self.path, self.consortium, **self.settings)


def words_in(site, answer):
    """Return the words under the masks of an answer."""
    identifier, tag, _, masked = read_masked(answer)
    assert identifier == site.session.identifier
    return masked - mask(np.zeros_like(masked), site.session, tag)


def test_one_tag_has_one_content_also_after_a_crash(tmp_path):
    """Rule 1: killed between the disk and the network, a site sends the same words."""
    site = Site(tmp_path / "rules")
    first = site.ask()
    assert site.ask() == first and site.computed == 1
    site.restart()
    assert site.ask() == first and site.computed == 1
    with pytest.raises(RuleError, match=r"another content in this session \(rules 1 and 2\)"):
        site.ask(question=OTHER)
    assert site.computed == 1


def test_words_are_on_disk_before_they_leave(tmp_path, monkeypatch):
    site = Site(tmp_path / "rules")

    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        site.ask()
    monkeypatch.undo()
    site.restart()
    assert (site.rules.num_answers, site.computed) == (0, 1)
    monkeypatch.setattr("fedmcmc.deploy._rules.mask", fail)  # on the disk, and not sent
    with pytest.raises(OSError, match="no space"):
        site.ask()
    monkeypatch.undo()
    site.restart()
    np.testing.assert_array_equal(words_in(site, site.ask()), random_words(1, 6, seed=2)[0])
    assert (site.rules.num_answers, site.computed) == (1, 2)


def test_another_attempt_has_the_same_words_under_another_mask(tmp_path):
    """Rule 2."""
    site = Site(tmp_path / "rules")
    first, second = site.ask(), site.ask(TAG._replace(attempt=1))
    assert site.computed == 1 and first != second
    np.testing.assert_array_equal(words_in(site, first), words_in(site, second))
    with pytest.raises(RuleError, match="rules 1 and 2"):
        site.ask(TAG._replace(attempt=2), question=OTHER)


@pytest.mark.parametrize("sites", [[0, 1], [0, 1, 1], [0, 1, 2, 3], []])
def test_another_cohort_gets_no_answer(tmp_path, sites):
    """Rule 2, in a new round and in the repetition of one."""
    site = Site(tmp_path / "rules")
    for tag in (TAG, TAG, TAG._replace(attempt=1)):
        with pytest.raises(RuleError, match=r"over all 3 sites of the study.*\(rule 2\)"):
            site.ask(tag, sites=sites)
        site.ask(TAG)


def test_rounds_never_go_back_within_a_session(tmp_path):
    """Rule 4; set-up comes first, and the phases of a round in their order."""
    site = Site(tmp_path / "rules")
    tags = [
        MaskTag.of_phase(0, 0, 0, 2, setup=True),
        MaskTag.of_phase(0, 0, 1, 2, setup=True),
        *(MaskTag.of_phase(r, 0, n, 2) for r in (0, 1, 3) for n in (0, 1)),
    ]
    for number, tag in enumerate(tags):
        site.ask(tag, question=transcript("question", bytes([number])))
        for earlier in tags[:number]:
            with pytest.raises(RuleError, match=r"before the last answer.*\(rule 4\)"):
                site.ask(earlier, question=OTHER)
    site.restart()
    with pytest.raises(RuleError, match="rule 4"):
        site.ask(tags[-2])
    assert site.computed == len(tags)


def test_a_new_session_may_go_back_and_answers_the_same_question_alike(tmp_path):
    site = Site(tmp_path / "rules")
    first = words_in(site, site.ask())
    old, site.session = site.session, sessions_of(3)[0]
    with pytest.raises(RuleError, match=r"begun last \(rule 4\)"):
        site.ask()
    site.rules.begin(site.session)
    np.testing.assert_array_equal(words_in(site, site.ask()), first)
    with pytest.raises(RuleError, match="begun last"):
        site.ask(session=old)
    site.session = sessions_of(3)[0]
    site.rules.begin(site.session)
    site.ask(MaskTag(2, 0, 0), question=OTHER)
    assert site.computed == 2


def test_a_session_of_another_study_is_refused(tmp_path):
    site = Site(tmp_path / "rules")
    other = sessions_of(3, document="another document")[0]
    with pytest.raises(RuleError, match="another study, not to the approved one"):
        site.rules.begin(other)
    with pytest.raises(RuleError, match="begun last"):
        site.ask(session=other)
    with pytest.raises(RuleError, match="answers of another study"):
        SiteRules(site.path, consortium_of(3, document="another document"), num_rounds=10)


def test_a_study_that_was_left_is_over(tmp_path):
    """Rule 5."""
    site = Site(tmp_path / "rules")
    site.ask()
    site.rules.leave()
    for _ in range(2):
        with pytest.raises(RuleError, match="rule 5"):
            site.ask()
        site.restart()
    site.rules.begin(sessions_of(3)[0])
    with pytest.raises(RuleError, match="rule 5"):
        site.ask()


def test_nothing_is_answered_beyond_what_was_approved(tmp_path):
    """Rule 6: rounds, and answers to different questions over all sessions."""
    site = Site(tmp_path / "rules", max_answers=3)
    for round_ in range(3):
        site.ask(MaskTag(round_, 0, 0), question=transcript("round", bytes([round_])))
    with pytest.raises(RuleError, match=r"All 3 approved answers.*\(rule 6\)"):
        site.ask(MaskTag(3, 0, 0))
    site.restart()
    site.session = sessions_of(3)[0]
    site.rules.begin(site.session)
    with pytest.raises(RuleError, match="rule 6"):
        site.ask(MaskTag(0, 0, 0))
    site.ask(MaskTag(2, 1, 0), question=transcript("round", bytes([2])))  # what it has answered
    assert site.computed == site.rules.num_answers == 3
    with pytest.raises(RuleError, match=r"beyond the 10 approved rounds \(rule 6\)"):
        site.ask(MaskTag(10, 0, 0))
    for settings in (dict(num_rounds=0), dict(num_rounds=1, max_answers=0)):
        with pytest.raises(ValueError, match="must approve at least one round"):
            SiteRules(tmp_path / "other", consortium_of(3), **settings)


def test_a_site_that_does_not_know_what_it_answered_says_so(tmp_path):
    site = Site(tmp_path / "rules")
    site.ask()
    data = bytearray(site.path.read_bytes())
    turned = bytes(data[:60]) + bytes([data[60] ^ 1]) + bytes(data[61:])
    for damaged in (data[:-1], data[:20], turned, b""):
        site.path.write_bytes(damaged)
        with pytest.raises(RuleError, match="is damaged"):
            site.restart()
    site.path.unlink()
    with pytest.raises(RuleError, match=r"is missing.* agree with the other owners on a new study"):
        site.restart()
    site.path.write_bytes(bytes(data))
    site.restart()
    assert site.rules.num_answers == 1


def test_sites_under_rules_add_up(tmp_path):
    sessions = sessions_of(3)
    sites = [Site(tmp_path / f"rules{i}", sessions, i) for i in range(3)]
    masked = [read_masked(site.ask())[3] for site in sites]
    np.testing.assert_array_equal(
        unmask(masked), sum(words_in(s, s.ask()) for s in sites).astype(np.uint64)
    )
