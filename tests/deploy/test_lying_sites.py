"""Sites that send what they should not: the server names them, and keeps the draws before."""

import itertools
import signal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._frames import Frame, pack, unpack
from fedmcmc.deploy._guard import Guard, norms_of
from tests.contracts.model import KEY
from tests.support import studies
from tests.support.site_runs import POSITION

STUDY = studies.study_of(kernels={"main": f"{studies.HERE}:everyone"}, settings={"step_size": 0.01})
KEEPS = studies.study_of("compress: lsd_pp, memory: per client")
MASKED = studies.masked_study("lsd_pp")
PHASES = studies.study_of("sequence")


def meddling(site, change):
    """Return a site whose messages are ``change(frame of the request, frame of the answer)``."""
    answer = site.answer

    def changed(data):
        told = answer(data)
        if told is None:
            return None
        frame = change(Frame.parse(data), Frame.parse(told))
        return None if frame is None else frame.to_bytes()

    site.answer = changed
    return site


def join(study, folder, lies):
    """Return a transport with all sites; `lies` map answers and their rounds to others."""
    local = deploy.LocalTransport()
    for name in study.sites:
        site = studies.site_of(study, name, folder)
        if name in lies:

            def change(asked, frame, lie=lies[name]):
                return lie(frame, frame.tag.round) if frame.kind == "answer" else frame

            meddling(site, change)
        local.join(site)
    return local


def run(study, local, **settings):
    settings = dict(num_rounds=12, progress=False) | settings
    return deploy.run(study, KEY, "main", POSITION, transport=local, **settings)


def sends(value, rounds, *, chain=0, num_chains=1, num_true=0):
    """Return a lie: in these rounds all but the last numbers of a chain's code are `value`."""

    def lie(frame, round_):
        if round_ not in rounds:
            return frame
        parts = unpack(frame.body, 2 * num_chains)
        numbers = np.frombuffer(parts[chain], ">f4").copy()
        numbers[: len(numbers) - num_true] = value
        parts[chain] = numbers.tobytes()
        return frame._replace(body=pack(*parts))

    return lie


def undisturbed(folder, study=STUDY, **settings):
    return run(study, join(study, folder / "peace", {}), **settings)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_a_message_that_cannot_be_added_names_its_site(value, tmp_path):
    local = join(STUDY, tmp_path, {"basel": sends(value, {7}, chain=1, num_chains=2)})
    message = r"^basel: its message of round 7 \(phase 0, chain 1\) holds numbers that are not"
    with pytest.raises(deploy.SiteError, match=message) as found:
        run(STUDY, local, num_chains=2)
    expected = undisturbed(tmp_path, num_chains=2)
    samples = found.value.samples
    np.testing.assert_array_equal(samples.totals["rounds"], [7, 7])
    for a, b in zip(*map(jax.tree.leaves, (samples.draws, expected.draws)), strict=True):
        np.testing.assert_array_equal(a, b[:, :7])


@pytest.mark.parametrize(
    "lie",
    [
        sends(np.nan, range(3, 12)),
        lambda frame, round_: (
            Frame("declined", {"tag": list(frame.tag), "reason": "the limit"})
            if round_ > 2
            else frame
        ),
        lambda frame, round_: frame._replace(body=frame.body[:-1]) if round_ > 2 else frame,
    ],
    ids=["not finite", "declined", "cut short"],
)
def test_a_run_goes_on_without_a_site_that_lies_or_declines(lie, tmp_path):
    local = join(STUDY, tmp_path, {"basel": lie})
    sites = deploy.Sites(STUDY, local, on_missing="leave_out")
    with pytest.warns(RuntimeWarning, match="^basel is left out of this round") as warned:
        samples = sites.sample(KEY, STUDY.kernel("main"), POSITION, num_rounds=12, progress=False)
    sites.close()
    assert len(warned) == 1
    assert sites.num_missed == {"bern": 0, "basel": 9, "chur": 0}
    np.testing.assert_array_equal(samples.info["num_active"], [3 * [3] + 9 * [2]])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.draws))


def test_a_site_is_left_out_of_the_chain_in_which_it_lies(tmp_path):
    """And keeps what was counted of it in the other chain."""
    lie = sends(np.nan, {4}, num_chains=2)
    local = join(STUDY, tmp_path, {"chur": lie})
    with pytest.warns(RuntimeWarning, match="^chur is left out"):
        samples = run(STUDY, local, num_chains=2, on_missing="leave_out")
    expected = undisturbed(tmp_path, num_chains=2)
    np.testing.assert_array_equal(samples.info["num_active"][:, 4], [2, 3])
    np.testing.assert_array_equal(samples.draws["a"][1], expected.draws["a"][1])
    assert not np.array_equal(samples.draws["a"][0], expected.draws["a"][0])


def test_a_run_that_diverges_at_all_sites_is_no_fault_of_one(tmp_path):
    study = studies.study_of(kernels=STUDY.kernels, settings={"step_size": 1e30})
    for on_missing in ("wait", "leave_out"):
        with pytest.raises(fedmcmc.NonFiniteError, match="step size is too large"):
            run(study, join(study, tmp_path / on_missing, {}), on_missing=on_missing)


def test_a_large_gradient_is_told(tmp_path):
    local = join(STUDY, tmp_path, {"basel": sends(1e6, range(8, 10))})
    message = r"^basel: its message of round 8 .* norm 1\.73e\+06; the largest of its 8 before"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        run(STUDY, local)
    assert len([w for w in warned if w.category is RuntimeWarning]) == 1


def test_a_limit_of_norms_holds(tmp_path):
    lies = {"basel": sends(1e6, {8})}
    with pytest.raises(deploy.SiteError, match=r"^basel: .* above max_norm = 1000\.0") as found:
        run(STUDY, join(STUDY, tmp_path / "a", lies), max_norm=1e3)
    assert found.value.samples.num_draws == 8
    with pytest.warns(RuntimeWarning, match="^basel is left out.*above max_norm"):
        samples = run(
            STUDY, join(STUDY, tmp_path / "b", lies), max_norm=1e3, on_missing="leave_out"
        )
    np.testing.assert_array_equal(samples.info["num_active"][0], 8 * [3] + [2] + 3 * [3])


def test_a_term_of_a_sum_before_the_first_round_is_checked(tmp_path):
    study = studies.study_of("lsd_star")

    def lie(frame, round_):
        if frame.header["tag"][1] or len(frame.body) != 8 + 12:
            return frame
        return frame._replace(body=pack(np.full(3, np.nan, ">f4").tobytes()))

    for on_missing in ("wait", "leave_out"):
        local = join(study, tmp_path / on_missing, {"chur": lie})
        with pytest.raises(deploy.SiteError, match=r"^chur, before the first round: its") as found:
            run(study, local, on_missing=on_missing)
        assert found.value.samples is None


def test_limits_of_norms_are_refused_where_nobody_could_keep_them():
    with pytest.raises(ValueError, match="nobody can read under masks: remove max_norm = 3"):
        deploy.Sites(studies.masked_study("lsd"), deploy.LocalTransport(), max_norm=3)
    for wrong in (0, -1.0, "3", True, np.nan):
        with pytest.raises(ValueError, match="max_norm must be a number above 0, got"):
            deploy.Sites(STUDY, deploy.LocalTransport(), max_norm=wrong)
        with pytest.raises(ValueError, match="timeout must be a number of seconds above 0, got"):
            deploy.Sites(STUDY, deploy.LocalTransport(), timeout=wrong)
    study = studies.study_of("secure_sum: lsd_star")
    sites = deploy.Sites(study, deploy.LocalTransport(), max_norm=3)
    with pytest.raises(ValueError, match="messages of a secure sum are words: remove max_norm"):
        sites.sample(KEY, study.kernel("main"), POSITION, num_rounds=2)


def test_sites_whose_messages_grow_together_are_not_suspected():
    """A chain that jumps far away: then all gradients grow."""
    guard, sent = Guard(["a", "b"], None), np.ones((2, 1), bool)
    sizes = itertools.chain(6 * [(1.0, 30.0)], [(1e5, 2e7), (1e4, 1e5)])
    for round_, pair in enumerate(sizes):
        codes = [np.full((1, 1), size, np.float32) for size in pair]
        assert guard.check(codes, sent, round_, 0) == []
    with pytest.warns(RuntimeWarning, match="^b: .*round 9"):
        guard.check([np.full((1, 1), x, np.float32) for x in (1e5, 1e12)], sent, 9, 0)


def test_norms_are_those_of_messages():
    """Of quantized vectors, of parts that are exact, and of words."""
    rng = np.random.default_rng(0)
    compressor = fedmcmc.quantize(4)
    message = {"a": rng.normal(size=3).astype(np.float32), "b": np.float32(rng.normal())}
    draws = compressor.prepare(jax.random.key(0), message, None)
    code, _ = compressor.encode(draws, jax.tree.map(jnp.asarray, message), (), None)
    decoded = np.concatenate([np.ravel(x) for x in jax.tree.leaves(compressor.decode(code, None))])
    code = jax.tree.map(lambda leaf: np.asarray(leaf)[None], code)
    np.testing.assert_allclose(norms_of(code, 1), [4 * np.linalg.norm(decoded)], rtol=1e-5)
    impossible = np.array([[3.0, -1e30], [np.nan, 0.0]], np.float32)
    norms = norms_of(
        (fedmcmc.types.Uncompressed(impossible), np.array([[4.0], [0.0]], np.float32)), 2
    )
    np.testing.assert_array_equal(norms, [5.0, np.nan])
    assert norms_of(np.full((1, 2), -1e30, np.float32), 1)[0] > 1e30
    assert norms_of(np.full((1, 2), 7, np.uint32), 1)[0] == 0


def test_proposals_at_impossible_places_are_no_fault(tmp_path):
    """Chains at a wall: sites send the lowest number there, and the chain turns back."""
    study = studies.study_of("hmc", posterior=f"{studies.HERE}:walled")
    samples = undisturbed(tmp_path, study, num_rounds=34, num_burnin=4, max_norm=1e4)
    assert (samples.info["acceptance"] == 0).any() and samples.num_draws == 30
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(samples.draws))


def test_answers_to_questions_may_be_infinite(tmp_path, caplog):
    """What Newton's method asks beyond a wall is answered, and the log names the site."""
    caplog.set_level("INFO", "fedmcmc.deploy")
    study = studies.study_of(asks=deploy.SETUP, kernels={})
    lies = {"basel": sends(np.nan, {0}, num_true=1)}  # and says that it has answered
    sites = deploy.Sites(study, join(study, tmp_path, lies))
    question = fedmcmc.kernels.expansions(study.model, curvature="none")
    content = fedmcmc.kernels.Points(jax.tree.map(lambda x: x[None], POSITION), POSITION)
    value = sites.ask(question, content).value.value
    sites.close()
    assert np.isnan(value).all() and "basel: its message of round 0" in caplog.text


@pytest.mark.parametrize("count", [0.0, 2.0, np.nan])
def test_an_answer_that_does_not_count_as_one_names_its_site(count, tmp_path):
    study = studies.study_of(asks=deploy.SETUP, kernels={})
    lies = {"basel": sends(count, range(100))}
    sites = deploy.Sites(study, join(study, tmp_path, lies))
    question = fedmcmc.kernels.expansions(study.model, curvature="none")
    content = fedmcmc.kernels.Points(jax.tree.map(lambda x: x[None], POSITION), POSITION)
    text = f"^basel: its answer counts as {count:.3g} answers, and must count as one"
    with pytest.raises(deploy.SiteError, match=text):
        sites.ask(question, content)
    sites.close()


class Endless(deploy.LocalTransport):
    """A transport over which a site sends without end what is no message."""

    def receive(self, timeout):
        return super().receive(0) or ("basel", b"")


def test_a_site_that_sends_without_end_stops_no_run_and_fills_no_log(tmp_path, caplog):
    endless = Endless()
    studies.join_all(endless, STUDY, tmp_path)
    samples = run(STUDY, endless, num_rounds=3)
    assert samples.num_draws == 3
    logged = [text for text in caplog.messages if "basel: a message was not understood" in text]
    assert 1 < len(logged) < 40 and "(2 so far)" in logged[1]


class Noisy(deploy.LocalTransport):
    """A transport over which a site also sends answers late, twice, and of other phases."""

    def __init__(self):
        super().__init__()
        self.old, self.noise = [], []

    def receive(self, timeout):
        if self.noise:
            return "basel", self.noise.pop()
        news = super().receive(timeout)
        name, data = news or ("", None)
        frame = Frame.parse(data) if name == "basel" and data else None
        if frame is not None and frame.kind == "answer":
            run_, round_, phase, attempt = frame.tag
            self.noise = [data, *self.old]
            for tag in ([run_, round_, phase + 1, attempt], [run_, round_ + 1, phase, attempt]):
                wrong = frame._replace(header={"tag": tag}, body=bytes(20))
                self.noise.append(wrong.to_bytes())
            self.old.append(data)
        return news


def test_answers_that_come_late_or_twice_or_for_other_phases_change_nothing(tmp_path):
    expected, local = undisturbed(tmp_path), Noisy()
    studies.join_all(local, STUDY, tmp_path)
    samples = run(STUDY, local)
    chex.assert_trees_all_equal(samples.draws, expected.draws)
    assert len(local.old) == 12


def test_a_site_that_gives_another_ones_name_is_not_taken(tmp_path):
    """Its connection, and so the transport, has its own."""
    links = deploy.Sites(STUDY, deploy.LocalTransport())._links
    hello = studies.site_of(STUDY, "bern", tmp_path).hello()
    with pytest.warns(RuntimeWarning, match="registered as 'chur' but its name is 'bern'"):
        links._admit("chur", hello, {})
    assert links.joined == set()


@pytest.fixture
def ctrl_c():
    """Have Ctrl-C interrupt, also after a test that ran a site's command, which takes signals."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def declines(frame):
    return frame._replace(kind="declined", header={**frame.header, "reason": "it is late"})


def interrupts(frame):
    """The server is interrupted while it waits for this answer, and others have come."""
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("study", "at", "num_draws", "then"),
    [
        pytest.param(PHASES, (9, 1), 8, interrupts, id="phases, interrupted"),
        pytest.param(PHASES, (9, 1), 8, declines, marks=pytest.mark.slow, id="phases, declined"),
        pytest.param(KEEPS, (9, 0), 9, interrupts, marks=pytest.mark.slow, id="one, interrupted"),
        pytest.param(KEEPS, (9, 0), 9, declines, marks=pytest.mark.slow, id="one, declined"),
        pytest.param(STUDY, (9, 0), 9, declines, id="nothing kept, declined"),
        pytest.param(MASKED, (9, 0), 9, declines, marks=pytest.mark.slow, id="masked, declined"),
        pytest.param(MASKED, (9, 0), 9, interrupts, marks=pytest.mark.slow, id="masked"),
    ],
)
def test_a_run_that_ends_in_a_round_goes_on_from_it(study, at, num_draws, then, tmp_path):
    """Even where the next checkpoint is far; sites that keep a state have that of the round."""
    expected = undisturbed(tmp_path, study)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=5000)
    local, given = deploy.LocalTransport(), dict(checkpoint=checkpoint)

    def change(asked, frame):
        here = asked.kind == "step" and (asked.tag.round, asked.tag.phase) == at
        return then(frame) if here else frame

    for name in study.sites:
        local.join(meddling(studies.site_of(study, name, tmp_path / "sites"), change))
    if then is declines:
        with pytest.raises(deploy.SiteError, match=r"it is late \(in round 9\)$") as found:
            run(study, local, **given)
        samples = found.value.samples
    else:
        with pytest.warns(fedmcmc.SamplingWarning, match="Interrupted in or after round"):
            samples = run(study, local, **given)
    assert samples.num_draws == num_draws
    again = deploy.LocalTransport()
    studies.join_all(again, study, tmp_path / "sites")
    whole = run(study, again, **given)
    chex.assert_trees_all_equal(whole.draws, expected.draws)
    chex.assert_trees_all_equal(whole.info, expected.info)


def test_a_question_that_a_site_never_answers_names_it(tmp_path):
    study = studies.study_of(asks=deploy.SETUP, kernels={})
    local = join(study, tmp_path, {"basel": lambda frame, round_: declines(frame)})
    sites = deploy.Sites(study, local, on_missing="leave_out")
    question = fedmcmc.kernels.expansions(study.model, curvature="none")
    content = fedmcmc.kernels.Points(jax.tree.map(lambda x: x[None], POSITION), POSITION)
    with (
        pytest.warns(RuntimeWarning, match="^basel is left out.*it is late"),
        pytest.raises(deploy.SiteError, match=r"all 3 sites answer; .* Rounds missed: basel 20\.$"),
    ):
        sites.ask(question, content)
    sites.close()
