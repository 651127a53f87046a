"""A site answers requests of its study only, and a server accepts answers of its run only."""

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
from tests.support.lanes import fast_and_slow
from tests.support.recorded_sites import frames_of, record_run, run_over
from tests.support.site_runs import ADAPTING, ONE_BY_ONE, POSITION, at_sites, close

MEMORY = "compress: lsd_pp, memory: per client"
STUDY = studies.study_of(MEMORY)
NUM_ROUNDS = 9


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Each site's pairs of requests and answers in an undisturbed run, and the samples."""
    return record_run(STUDY, tmp_path_factory.mktemp("undisturbed"), num_rounds=NUM_ROUNDS)


def check_draws(samples, undisturbed):
    """Compare draws with the draws of the undisturbed run."""
    num = samples.num_draws
    expected = jax.tree.map(lambda leaf: leaf[:, :num], undisturbed[1].draws)
    chex.assert_trees_all_equal(samples.draws, expected)


def site_of(folder, name="bern", study=STUDY, **settings):
    return studies.site_of(study, name, folder, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (dict(min_rows=6), deploy.Refused, "has 5 rows but needs at least 6"),
        (dict(min_sites=4), deploy.Refused, "studies of at least 4 "),
        (dict(approved="0" * 64), deploy.Refused, "is not the one approved"),
        (
            dict(rows={"x": np.ones((4, 3))}),
            ValueError,
            "bern has 4 rows, the study 'contract' says 5",
        ),
        (dict(rows={"x": np.ones((5, 2))}), ValueError, "rows of bern are not those"),
        (dict(rows={"y": np.ones((5, 3))}), ValueError, "rows of bern have the column 'y', which"),
    ],
    ids=["min_rows", "min_sites", "approved", "number", "shape", "column"],
)
def test_a_site_refuses_other_rows_and_studies(settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        site_of(tmp_path, **settings)


def test_a_study_has_no_other_sites(tmp_path):
    with pytest.raises(deploy.Refused, match="no site 'zug'"):
        deploy.Site(STUDY, "zug", {"x": np.ones((5, 3))}, folder=tmp_path)


def test_a_server_refuses_a_site_with_another_study(tmp_path):
    study = studies.study_of(settings={"row": MEMORY, "more": 1})
    message, local = "its study differs from the server's", deploy.LocalTransport()
    links = Links(STUDY, local, timeout=1.0)
    local.join(site_of(tmp_path, study=study))
    with pytest.warns(RuntimeWarning, match=f"bern was not accepted: {message}"):
        links._read_queued()
    local.close()
    assert message in links.refusals["bern"] and message in local.refused["bern"]


def test_a_server_refuses_a_site_with_other_software(tmp_path):
    links = Links(STUDY, deploy.LocalTransport(), timeout=1.0)
    header = Frame.parse(site_of(tmp_path).hello()).header
    assert links._find_objection("bern", header) == ""
    for name in ("fedmcmc", "jax", "64-bit floats"):
        changed = header | {"software": header["software"] | {name: "other"}}
        objection = links._find_objection("bern", changed)
        assert objection.startswith(f"{name} is other at the site")
    header["kernels"] = {}
    del header["software"]
    assert "lacks the versions of its software" in links._find_objection("bern", header)


def test_the_bytes_sent_equal_the_bits_counted(tmp_path):
    study = studies.study_of("compress: dsgld, quantize")
    pairs, samples = record_run(study, tmp_path, num_rounds=3)
    counted = 0
    for of_site in pairs.values():
        for _, answer in frames_of(of_site, "step"):
            code, report = unpack(answer.body, 2)
            bits = int.from_bytes(report[:4], "big")
            assert len(code) == -(-bits // 8)
            counted += bits
    assert counted == samples.totals["bits_up"][0] > 0


def fuzzed(data, rng):
    """Return bytes that are like `data` and are not `data`."""
    broken, place = bytearray(data), rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            broken[place] ^= 1 << rng.randrange(8)
        case 1:
            del broken[place : place + rng.randrange(1, 20)]
        case 2:
            broken[place:place] = rng.randbytes(rng.randrange(1, 20))
        case _:
            broken = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(broken)


@pytest.mark.parametrize("num", fast_and_slow([2_000, 10_000], [2_000]))
def test_damaged_messages_neither_end_a_site_nor_change_its_answers(num, undisturbed, tmp_path):
    """In each stage of a run; see `test_fuzz` for wrong messages with a right checksum."""
    rng = random.Random(0)
    for name, pairs in undisturbed[0].items():
        site = site_of(tmp_path, name)
        for request, answer in pairs:
            for _ in range(num // (3 * len(pairs)) + 1):
                reply = Frame.parse(site.answer(fuzzed(request, rng)))
                assert reply.kind == "error" and reply.header["tag"] is None
            assert (site.answer(request) or b"") == answer


JUNK = (None, -1, 2**70, 0.5, "junk", [], {}, [[]], [None, -1], [2**70] * 4, True, ["a"] * 3)


@pytest.mark.parametrize("masked", [False, True])
def test_messages_that_make_no_sense_end_no_site(masked, tmp_path):
    """A wrong server may put anything into any field of any message."""
    study = studies.masked_study("lsd_pp") if masked else STUDY
    pairs, _ = record_run(study, tmp_path / "run", num_rounds=1)
    name = max(pairs, key=lambda name: len(pairs[name]))
    site, kinds, requests = studies.site_of(study, name, tmp_path / "again"), set(), set()
    for data, _ in pairs[name]:
        site.answer(data)
        frame = Frame.parse(data)
        if frame.kind == "welcome":
            continue
        requests.add(frame.kind)
        wrong = [
            frame._replace(header=frame.header | {field: junk})
            for field in frame.header
            for junk in JUNK
        ]
        bodies = (b"", frame.body[:-1], frame.body + b"x", pack(frame.body))
        wrong += [frame._replace(body=body) for body in bodies]
        kinds |= {Frame.parse(site.answer(each.to_bytes())).kind for each in wrong}
        unknown = Frame.parse(site.answer(frame._replace(kind="rows").to_bytes()))
        assert unknown.kind == "error" and "unknown" in unknown.header["reason"]
    session = {"open", "confirm", "seal"} if masked else set()
    assert "error" in kinds and requests == {"begin", "start", "step"} | session


def test_wrong_answers_of_a_site_do_not_change_a_run(undisturbed, tmp_path):
    """Damaged, late, repeated and foreign answers arrive between the right ones."""
    local, rng, earlier = deploy.LocalTransport(), random.Random(1), []

    def disturb(request, answer):
        tag = list(Frame.parse(request).tag) if answer else []
        wrong = [fuzzed(answer or b"x", rng), Frame("answer", {"tag": [tag]}, b"x").to_bytes()]
        if answer and earlier and Frame.parse(earlier[-1]).kind == "answer":
            (run, round_, phase, attempt), body = tag, Frame.parse(earlier[-1]).body
            for place in ((round_, phase + 1), (round_ + 1, phase)):
                wrong.append(Frame("answer", {"tag": [run, *place, attempt]}, body).to_bytes())
        for data in (*wrong, *earlier):
            local._inbox.put(("bern", data))
        local._inbox.put(("nobody", Frame("answer", {"tag": tag}, b"x").to_bytes()))
        if answer:
            earlier.append(answer)

    for name in STUDY.sites:
        local.join(site_of(tmp_path, name), heard=disturb if name == "bern" else None)
    check_draws(run_over(local, STUDY, num_rounds=5), undisturbed)
    assert len(earlier) > 3


def test_a_site_that_joins_again_answers_again(undisturbed, tmp_path):
    """A site is lost, as if killed, before the server has its answer, or right after, in turns."""
    local, lost = deploy.LocalTransport(), []

    def lose(request, answer):
        frame = Frame.parse(request)
        is_answer = bool(answer) and Frame.parse(answer).kind == "answer"
        if is_answer and frame.kind == "step" and list(frame.tag)[1:3] not in lost:
            lost.append(list(frame.tag)[1:3])
            if len(lost) % 2:
                local._outboxes.pop("bern").put(None)  # no later message reaches it
                local._inbox.put(("bern", answer))
            local.join(site_of(tmp_path, "bern"), heard=lose)  # with the state on its disk

    for name in STUDY.sites:
        local.join(site_of(tmp_path, name), heard=lose if name == "bern" else None)
    samples = run_over(local, STUDY, num_rounds=NUM_ROUNDS)
    assert len(lost) > 2
    check_draws(samples, undisturbed)


class Silent:
    """A transport that a site leaves in these rounds before its answer, and then joins again."""

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
def test_a_site_that_does_not_answer_is_left_out_like_a_fault(row, tmp_path):
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


@pytest.mark.parametrize(
    ("row", "settings", "error", "message"),
    [
        ("sgld", {}, deploy.Refused, "treats all rows as rows of one client"),
        ("lsd", dict(collect=lambda state, info: info), ValueError, "collect= reads clients' sta"),
        ("lsd", dict(placement=ONE_BY_ONE), ValueError, "placement= and mesh= are for simulated"),
    ],
    ids=["pooled", "collect", "placement"],
)
def test_runs_that_need_rows_are_refused(row, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        at_sites(studies.study_of(row), tmp_path, num_rounds=2, **settings)


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(studies.study_of("lsd"), id="nothing kept", marks=pytest.mark.slow),
        pytest.param(STUDY, id="states and memories"),
        pytest.param(studies.masked_study("lsd_pp"), id="masked", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_from_the_state_of_another(study, tmp_path):
    local = deploy.LocalTransport()
    studies.join_all(local, study, tmp_path)
    sites, kernel = deploy.Sites(study, local), study.kernel("main")

    def sample(num_rounds, **settings):
        return sites.sample(KEY, kernel, num_rounds=num_rounds, progress=False, **settings)

    expected, first = (sample(num, position=POSITION) for num in (6, 2))
    for _ in range(2):  # the state does not change
        second = sample(4, state=first.state)
        together = jax.tree.map(
            lambda *pair: np.concatenate(pair, axis=1), first.draws, second.draws
        )
        chex.assert_trees_all_equal(together, expected.draws)
    sites.close()


@pytest.mark.slow
def test_a_run_continues_from_a_state_only_at_its_sites(tmp_path):
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
def test_fits_at_sites_equal_fits_of_a_simulation(tmp_path):
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
        fitted, simulated = (fedmcmc.fit(study.model, x, **settings) for x in (sites, DATA))
        assert fitted.verdict.split(":")[0] == simulated.verdict.split(":")[0]
        np.testing.assert_allclose(fitted.log_evidence, simulated.log_evidence, atol=1e-3)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a.mean(), b.mean(), atol=1e-3),
            fitted.samples.draws,
            simulated.samples.draws,
        )
        assert fitted.report.rounds == simulated.report.rounds
    sites.close()


def test_a_site_has_only_its_rows(tmp_path):
    site = site_of(tmp_path, "chur")
    rows = np.asarray(site.client.rows["x"])
    np.testing.assert_array_equal(rows[:4], studies.rows_of("chur")["x"])
    assert len(rows) == DATA.max_size and np.isnan(rows[4:]).all() and int(site.client.start) == 0


def test_the_server_receives_no_text_of_an_error_at_a_site(tmp_path, monkeypatch, caplog):
    """It may contain numbers of rows."""
    study, local = studies.study_of("lsd_star"), deploy.LocalTransport()
    sites = studies.join_all(local, study, tmp_path)

    def fail(frame):
        raise RuntimeError("row 3.1415")

    monkeypatch.setattr(sites["chur"], "_step", fail)
    with pytest.raises(deploy.SiteError, match="chur: RuntimeError at a message") as caught:
        run_over(local, study, num_rounds=3)
    assert "3.1415" not in str(caught.value) and "row 3.1415" in caplog.text


def test_a_site_that_gets_a_step_before_its_run_gets_it_again(undisturbed, tmp_path):
    """The server may send over a new connection before it receives the site's hello."""
    site = site_of(tmp_path / "again")
    steps = [data for data, _ in undisturbed[0]["bern"] if Frame.parse(data).kind == "step"]
    assert Frame.parse(site.answer(steps[0])).kind == "unready"

    class Early(deploy.LocalTransport):
        """Sends the next message to a new connection first, and then how the run began."""

        is_done = False

        def send(self, name, data):
            frame = Frame.parse(data)
            if frame.kind == "step" and name == "bern" and not self.is_done:
                self.is_done = True
                local.join(site_of(tmp_path, "bern"))  # its hello still waits
            super().send(name, data)

    local = Early()
    studies.join_all(local, STUDY, tmp_path)
    samples = run_over(local, STUDY, num_rounds=NUM_ROUNDS)
    assert local.is_done
    check_draws(samples, undisturbed)


def test_the_server_waits_for_sites_until_the_timeout():
    links = Links(STUDY, deploy.LocalTransport(), timeout=0.3)
    tag = Tag("run", 0, 0, 1)
    request = {"bern": Frame("step", {"tag": list(tag)}).to_bytes()}
    for joined, shortest, longest in (({"bern"}, 0.3, 20.0), (set(), 0.0, 0.3)):
        links.joined, start = joined, time.monotonic()
        assert links.exchange(request, "answer", tag, lambda *_: None, may_miss=True) == {}
        assert shortest <= time.monotonic() - start < longest
