"""A site answers what it should, and nothing else; a server takes what it should."""

import random
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame, Tag, pack, unpack
from fedmcmc.deploy._links import Links
from tests.contracts.model import DATA, KEY
from tests.support import studies
from tests.support.site_runs import ADAPTING, ONE_BY_ONE, POSITION, at_sites, close

MEMORY = "compress: lsd_pp, memory: per client"
STUDY = studies.study_of(MEMORY)


def site_of(folder, name="bern", study=STUDY, **settings):
    return studies.site_of(study, name, folder, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(min_rows=6), "has 5 rows but needs at least 6"),
        (dict(min_sites=4), "studies of at least 4 "),
        (dict(refused_columns=["x", "age"]), r"refuses the columns \['x'\]"),
        (dict(approved="0" * 64), "is not the one approved"),
    ],
    ids=str,
)
def test_a_site_takes_no_part_in_what_its_owner_does_not_allow(settings, message, tmp_path):
    with pytest.raises(deploy.Refused, match=message):
        site_of(tmp_path, **settings)


def test_rows_must_be_those_of_the_study(tmp_path):
    with pytest.raises(ValueError, match="bern has 4 rows, the study 'contract' says 5"):
        deploy.Site(STUDY, "bern", {"x": np.ones((4, 3))}, folder=tmp_path)
    with pytest.raises(ValueError, match="The rows of bern are not those"):
        deploy.Site(STUDY, "bern", {"x": np.ones((5, 2))}, folder=tmp_path)
    with pytest.raises(ValueError, match="The rows of bern are not those"):
        deploy.Site(STUDY, "bern", {"y": np.ones((5, 3))}, folder=tmp_path)
    with pytest.raises(deploy.Refused, match="no site 'zug'"):
        deploy.Site(STUDY, "zug", {"x": np.ones((5, 3))}, folder=tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (dict(settings={"row": MEMORY, "more": 1}), "its study differs from the server's"),
        (dict(row="lsd"), "its study differs from the server's"),
    ],
    ids=str,
)
def test_a_site_with_another_study_is_not_taken(other, message, tmp_path):
    study = studies.study_of(**({"row": MEMORY} | other))
    local = deploy.LocalTransport()
    links = Links(STUDY, local, timeout=1.0)
    local.join(site_of(tmp_path, study=study))
    with pytest.warns(RuntimeWarning, match=f"bern was not accepted: {message}"):
        links._read_queued()
    local.close()
    assert message in links.refusals["bern"] and message in local.refused["bern"]


@pytest.mark.parametrize("name", ["fedmcmc", "jax", "64-bit floats"])
def test_a_site_with_other_software_is_not_taken(name, tmp_path):
    links = Links(STUDY, deploy.LocalTransport(), timeout=1.0)
    frame = Frame.parse(site_of(tmp_path).hello())
    assert links._find_objection("bern", frame.header) == ""
    frame.header["software"][name] = "other"
    assert links._find_objection("bern", frame.header).startswith(f"{name} is other at the site")
    frame.header["kernels"] = {}
    del frame.header["software"]
    assert "lacks the versions of its software" in links._find_objection("bern", frame.header)


def recorded(study, folder, num_rounds=3):
    """Return the messages of a run to each site and its answers, and the samples."""
    local, heard = deploy.LocalTransport(), {name: [] for name in study.sites}
    for name, pairs in heard.items():
        site = studies.site_of(study, name, folder)
        local.join(site, heard=lambda *pair, pairs=pairs: pairs.append(pair))
    samples = deploy.run(
        study, KEY, "main", POSITION, transport=local, num_rounds=num_rounds, progress=False
    )
    return heard, samples


def test_the_bytes_sent_are_the_bits_counted(tmp_path):
    heard, samples = recorded(studies.study_of("compress: dsgld, quantize"), tmp_path)
    counted = 0
    for asked, answer in (pair for pairs in heard.values() for pair in pairs):
        if Frame.parse(asked).kind == "step":
            code, report = unpack(Frame.parse(answer).body, 2)
            bits = int.from_bytes(report[:4], "big")
            assert len(code) == -(-bits // 8)
            counted += bits
    assert counted == samples.totals["bits_up"][0] > 0


def fuzzed(data, rng):
    """Return bytes that are like `data` and are not `data`."""
    broken, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            broken[at] ^= 1 << rng.randrange(8)
        case 1:
            del broken[at : at + rng.randrange(1, 20)]
        case 2:
            broken[at:at] = rng.randbytes(rng.randrange(1, 20))
        case _:
            broken = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(broken)


def test_damaged_messages_neither_end_a_site_nor_change_what_it_answers(tmp_path):
    heard, _ = recorded(STUDY, tmp_path / "run")
    rng, num = random.Random(0), 0
    for name, pairs in heard.items():
        site = site_of(tmp_path / "again", name)
        for data, answer in pairs:
            for _ in range(10_000 // (3 * len(pairs)) + 1):
                told = Frame.parse(site.answer(fuzzed(data, rng)))
                assert told.kind == "error" and told.header["tag"] is None
                num += 1
            assert (site.answer(data) or b"") == answer
    assert num > 10_000


JUNK = (None, -1, 2**70, 0.5, "junk", [], {}, [[]], [None, -1], [2**70] * 4, True, ["a"] * 3)


@pytest.mark.parametrize("masked", [False, True])
def test_messages_that_make_no_sense_end_no_site(masked, tmp_path):
    """As of a server that is wrong: any field of any message holds anything."""
    study = studies.masked_study("lsd_pp") if masked else STUDY
    heard, _ = recorded(study, tmp_path / "run", num_rounds=1)
    name = max(heard, key=lambda name: len(heard[name]))
    site, kinds, asked = studies.site_of(study, name, tmp_path / "again"), set(), set()
    for data, _ in heard[name]:
        site.answer(data)
        frame = Frame.parse(data)
        if frame.kind == "welcome":
            continue
        asked.add(frame.kind)
        for field in frame.header:
            for junk in JUNK:
                wrong = frame._replace(header=frame.header | {field: junk})
                kinds.add(Frame.parse(site.answer(wrong.to_bytes())).kind)
        for body in (b"", frame.body[:-1], frame.body + b"x", pack(frame.body)):
            wrong = frame._replace(body=body).to_bytes()
            kinds.add(Frame.parse(site.answer(wrong)).kind)
        unknown = Frame.parse(site.answer(frame._replace(kind="rows").to_bytes()))
        assert unknown.kind == "error" and "unknown" in unknown.header["reason"]
    session = {"open", "confirm", "seal"} if masked else set()
    assert "error" in kinds and asked == {"begin", "start", "step"} | session


def test_what_a_site_sends_wrongly_does_not_change_a_run(tmp_path):
    """Damaged, late and foreign answers arrive between the right ones."""
    study, local, rng = STUDY, deploy.LocalTransport(), random.Random(1)
    expected = at_sites(study, tmp_path / "peace", num_rounds=5)

    old = []

    def disturb(asked, answer):
        tag = list(Frame.parse(asked).tag) if answer else []
        local._inbox.put(("bern", fuzzed(answer or b"x", rng)))
        local._inbox.put(("bern", Frame("answer", {"tag": [tag]}, b"x").to_bytes()))
        local._inbox.put(("nobody", Frame("answer", {"tag": tag}, b"x").to_bytes()))
        for late in old:
            local._inbox.put(("bern", late))
        if answer:
            old.append(answer)

    for name in study.sites:
        local.join(site_of(tmp_path, name, study), heard=disturb if name == "bern" else None)
    samples = deploy.run(
        study, KEY, "main", POSITION, transport=local, num_rounds=5, progress=False
    )
    chex.assert_trees_all_equal(samples.draws, expected.draws)


def test_a_site_joins_again_in_the_middle_and_is_asked_again(tmp_path):
    """A site is lost, as if killed, before the server has its answer, or right after, in turns."""
    expected = at_sites(STUDY, tmp_path / "peace", num_rounds=9)
    local, lost = deploy.LocalTransport(), []

    def lose(asked, answer):
        frame = Frame.parse(asked)
        answered = bool(answer) and Frame.parse(answer).kind == "answer"
        if answered and frame.kind == "step" and list(frame.tag)[1:3] not in lost:
            lost.append(list(frame.tag)[1:3])
            if len(lost) % 2:
                local._outboxes.pop("bern").put(None)  # from here on it hears nothing
                local._inbox.put(("bern", answer))
            local.join(site_of(tmp_path, "bern"), heard=lose)  # with what is on its disk

    for name in STUDY.sites:
        local.join(site_of(tmp_path, name), heard=lose if name == "bern" else None)
    samples = deploy.run(
        STUDY, KEY, "main", POSITION, transport=local, num_rounds=9, progress=False
    )
    assert len(lost) > 2
    chex.assert_trees_all_equal(samples.draws, expected.draws)


class Silent:
    """A transport that one site leaves in some rounds before it is heard, and then joins again."""

    def __init__(self, local, site, rounds):
        self.local, self.site, self.rounds = local, site, rounds
        self.send, self.limit, self.close = local.send, local.limit, local.close

    def receive(self, timeout):
        news = self.local.receive(timeout)
        if news is not None and news[0] == self.site.name and news[1] is not None:
            frame = Frame.parse(news[1])
            if frame.kind == "answer" and frame.tag.round in self.rounds:
                self.local._inbox.put((self.site.name, self.site.hello()))
                return self.site.name, None
        return news


@pytest.mark.slow
@ADAPTING
@pytest.mark.parametrize("row", ["dg_sgld", "hmc"])
def test_a_site_that_does_not_answer_is_left_out_as_by_a_fault(row, tmp_path):
    study, local = studies.study_of(row, reproducible=True), deploy.LocalTransport()
    chur = studies.join_all(local, study, tmp_path)["chur"]
    sites = deploy.Sites(study, Silent(local, chur, {1, 2}), on_missing="leave_out")
    samples = sites.sample(KEY, study.kernel("main"), POSITION, num_rounds=5, progress=False)
    sites.close()
    assert sites.num_missed == {"bern": 0, "basel": 0, "chur": 2}
    np.testing.assert_array_equal(samples.info["num_active"], [[3, 2, 2, 3, 3]])
    kernel = study.kernel("main")
    expected = _without(kernel, client=2, rounds={1, 2}, num_rounds=5)
    jax.tree.map(lambda a, b: close(a[0], b), samples.state.broadcast, expected.broadcast)


def _without(kernel, client, rounds, num_rounds):
    """Simulate with one client absent in some rounds."""
    data, layout = DATA, fedmcmc.rounds.Layout(clients_at_a_time=1)
    drops = fedmcmc.faults(kernel, drop=0.5, rescale=False)
    key = jax.random.fold_in(KEY, 0)
    state = drops.init(fedmcmc.random.init_key(key), POSITION, data)
    for number in range(num_rounds):
        cohort, drawn = fedmcmc.rounds.prepare_round(
            drops, data, layout, key, state.broadcast, jnp.int32(number)
        )
        active = np.array(cohort.ids != client) | (number not in rounds)
        state, _ = fedmcmc.rounds.run_round(
            drops, data, layout, state, cohort._replace(active=jnp.asarray(active)), drawn
        )
    return state


def test_pooled_rows_are_refused(tmp_path):
    with pytest.raises(deploy.Refused, match="treats all rows as rows of one client"):
        at_sites(studies.study_of("sgld"), tmp_path, num_rounds=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(collect=lambda state, info: info), "collect= reads clients' states"),
        (dict(placement=ONE_BY_ONE), "placement= and mesh= are for simulated clients"),
    ],
    ids=["collect", "placement"],
)
def test_what_needs_rows_is_refused(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        at_sites(studies.study_of(), tmp_path, num_rounds=2, **settings)


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(studies.study_of("lsd"), id="nothing kept", marks=pytest.mark.slow),
        pytest.param(STUDY, id="states and memories"),
        pytest.param(studies.masked_study("lsd_pp"), id="masked", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_from_the_state_of_another(study, tmp_path):
    local = deploy.LocalTransport()
    studies.join_all(local, study, tmp_path)
    sites, kernel = deploy.Sites(study, local), study.kernel("main")
    whole = sites.sample(KEY, kernel, POSITION, num_rounds=6, progress=False)
    first = sites.sample(KEY, kernel, POSITION, num_rounds=2, progress=False)
    for _ in range(2):  # what it goes on from stays
        second = sites.sample(KEY, kernel, state=first.state, num_rounds=4, progress=False)
        for all_, a, b in zip(
            *map(jax.tree.leaves, (whole.draws, first.draws, second.draws)), strict=True
        ):
            np.testing.assert_array_equal(all_, np.concatenate([a, b], axis=1))
    sites.close()


@pytest.mark.slow
def test_a_run_goes_on_from_a_state_at_its_sites_alone(tmp_path):
    simulated = fedmcmc.sample(
        KEY, STUDY.kernel("main"), DATA, POSITION, num_rounds=2, progress=False
    )
    with pytest.raises(
        ValueError, match="must come from a run at these sites, and this one does not"
    ):
        at_sites(STUDY, tmp_path, position=None, state=simulated.state, num_rounds=2)
    samples = at_sites(STUDY, tmp_path, num_rounds=2)
    others = tmp_path / "others"
    with pytest.raises(deploy.SiteError, match="no state of round 2"):
        at_sites(STUDY, others, position=None, state=samples.state, num_rounds=2)


@pytest.mark.slow
def test_questions_and_fits_are_those_of_a_simulation(tmp_path):
    study = studies.study_of(asks=deploy.FIT, kernels={})
    local = deploy.LocalTransport()
    studies.join_all(local, study, tmp_path)
    sites = deploy.Sites(study, local)
    for effort in ("auto", "exact"):
        settings = dict(
            rng_key=jax.random.key(1),
            position=POSITION,
            num_draws=400,
            effort=effort,
            max_rounds=20,
            progress=False,
        )
        found, simulated = (fedmcmc.fit(study.model, x, **settings) for x in (sites, DATA))
        assert found.verdict.split(":")[0] == simulated.verdict.split(":")[0]
        np.testing.assert_allclose(found.log_evidence, simulated.log_evidence, atol=1e-3)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.mean(), b.mean(), atol=1e-3),
            found.samples.draws,
            simulated.samples.draws,
        )
        assert found.report.rounds == simulated.report.rounds
    sites.close()


def test_a_site_has_nothing_but_its_own_rows(tmp_path):
    site = site_of(tmp_path, "chur")
    rows = np.asarray(site.client.rows["x"])
    np.testing.assert_array_equal(rows[:4], studies.rows_of("chur")["x"])
    assert len(rows) == DATA.max_size and np.isnan(rows[4:]).all() and int(site.client.start) == 0


def test_an_error_at_a_site_is_told_without_what_it_says(tmp_path, monkeypatch, caplog):
    """It may hold numbers of rows."""
    study, local = studies.study_of("lsd_star"), deploy.LocalTransport()
    sites = studies.join_all(local, study, tmp_path)

    def fails(frame):
        raise RuntimeError("row 3.1415")

    monkeypatch.setattr(sites["chur"], "_step", fails)
    with pytest.raises(deploy.SiteError, match="chur: RuntimeError at a message") as found:
        deploy.run(study, KEY, "main", POSITION, transport=local, num_rounds=3, progress=False)
    assert "3.1415" not in str(found.value) and "row 3.1415" in caplog.text


def test_a_site_that_is_asked_before_it_is_told_is_asked_again(tmp_path):
    """The server may send over a new connection before it has heard of it."""
    heard, samples = recorded(STUDY, tmp_path / "run", num_rounds=9)
    site = site_of(tmp_path / "again")
    steps = [data for data, _ in heard["bern"] if Frame.parse(data).kind == "step"]
    assert Frame.parse(site.answer(steps[0])).kind == "unready"

    class Early(deploy.LocalTransport):
        """Sends what comes next to a new connection first, and then how the run began."""

        def send(self, name, data):
            frame = Frame.parse(data)
            if frame.kind == "step" and name == "bern" and not self.done:
                self.done = True
                local.join(site_of(tmp_path, "bern"))  # the server has not heard of it yet
            super().send(name, data)

    local = Early()
    local.done = False
    studies.join_all(local, STUDY, tmp_path)
    again = deploy.run(STUDY, KEY, "main", POSITION, transport=local, num_rounds=9, progress=False)
    assert local.done
    chex.assert_trees_all_equal(again.draws, samples.draws)


def test_nobody_is_waited_for_longer_than_was_said():
    links = Links(STUDY, deploy.LocalTransport(), timeout=0.3)
    tag = Tag("run", 0, 0, 1)
    request = {"bern": Frame("step", {"tag": list(tag)}).to_bytes()}
    for joined, least, most in (({"bern"}, 0.3, 20.0), (set(), 0.0, 0.3)):
        links.joined, begun = joined, time.monotonic()
        assert links.exchange(request, "answer", tag, lambda *_: None, may_miss=True) == {}
        assert least <= time.monotonic() - begun < most
