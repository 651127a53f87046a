"""Messages of each kernel and each question, also of new ones, yield no more than is counted.

The tests find rows of the table of contracts, and classes that a study may allow, themselves.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy, surrogates, wire
from fedmcmc.deploy._frames import Frame
from fedmcmc.deploy._shapes import shapes_of_run
from fedmcmc.deploy._words import from_words
from fedmcmc.kernels import Points, evaluations, expansions
from tests.contracts.model import KEY, POSITIONS, Given
from tests.contracts.tables import KERNELS
from tests.deploy.attacks.support import (
    PERMISSIVE,
    Network,
    joined,
    numbers_in,
    parts_of,
    server_of,
)
from tests.support import studies
from tests.support.lanes import fast_and_slow

POSITION = POSITIONS["nested"]
VICTIM = "bern"
NUM_CHAINS, NUM_ROUNDS = 4, 4  # the last round takes no snapshot
FAST = ("langevin",)
ROWS = fast_and_slow(
    [row for row, build in KERNELS.items() if not build(POSITION, Given()).participation.pooled],
    FAST,
)
pytestmark = pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning", "ignore::UserWarning")


def make_runner(kernel):
    """Return a function that makes a server run its own kernel."""
    settings = dict(num_rounds=2, progress=False)
    return lambda model, sites: sites.sample(KEY, kernel(model), POSITION, **settings)


POINTS = Points(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), POSITION), POSITION)
ASKED = {
    "CommonExpansions": lambda model, sites: surrogates.taylor(model, sites, POSITION),
    "Evaluations": lambda model, sites: sites.ask(evaluations(model, gradients=True), POINTS),
    "Expansions": lambda model, sites: sites.ask(expansions(model), POINTS),
    "Falls": lambda model, sites: fedmcmc.whiten(model, sites, POSITION, surrogates=False),
    "GaussianMetropolis": make_runner(lambda model: KERNELS["gaussian_mh"](POSITION, Given(model))),
    "HamiltonianMonteCarlo": make_runner(lambda model: fedmcmc.hmc(model, POSITION, step_size=0.1)),
    "Langevin": make_runner(
        lambda model: fedmcmc.langevin(model, fedmcmc.full_gradient(), step_size=0.01)
    ),
    "MultipleTry": make_runner(lambda model: KERNELS["multiple_try"](POSITION, Given(model))),
    "Natural": make_runner(lambda model: fedmcmc.fed_ep(model, first_sites="expansion")),
    "OwnExpansions": lambda model, sites: surrogates.laplace(
        KEY, model, sites, position=POSITION, check="ignore"
    ),
    "ScoreCovariances": lambda model, sites: surrogates.score_covariance(model, sites, POSITION),
    "Underdamped": make_runner(lambda model: KERNELS["underdamped"](POSITION, Given(model))),
}
"""What makes a server ask for each class that a study's `asks` may name."""
QUESTIONS = sorted({*deploy.SUMS, *deploy.FIT, *deploy.SETUP})
FAST_QUESTIONS = ("Evaluations",)


def open_table_site(study, name, folder, **changes):
    return studies.site_of(study, name, folder, **(PERMISSIVE | changes))


class Conversation:
    """Requests of a server to a site, which a call of functions caused, and the answers."""

    def __init__(self, study, call, folder):
        self.study, self.folder = study, folder
        network = Network(study, folder, opened=open_table_site)
        with server_of(study, network) as sites:
            call(study.model, sites)
        self.exchanges = [x for x in network.exchanges[VICTIM] if x.request.kind != "welcome"]
        self.site = network.sites[VICTIM]
        begins = [x.request for x in self.exchanges if x.request.kind == "begin"]
        self.shapes = {frame.tag.run: self._shapes(frame) for frame in begins}

    @classmethod
    def of_row(cls, row, folder):
        """Return the conversation of a run of a kernel of the table."""
        study = studies.study_of(row)
        settings = dict(num_rounds=NUM_ROUNDS, num_chains=NUM_CHAINS, progress=False)

        def call(model, sites):
            sites.sample(KEY, study.kernel("main"), POSITION, **settings)

        return cls(study, call, folder)

    @classmethod
    def of_question(cls, name, folder):
        """Return the conversation in which a server uses a class that a study may allow."""
        study = studies.study_of(asks=QUESTIONS, kernels={})
        return cls(study, ASKED[name], folder)

    def _shapes(self, begin):
        study, words = self.study, begin.header["kernel"]
        kernel = study.kernel_of(words, parts_of(begin.body)[0])
        position = from_words(begin.header["position"], None, study.functions)
        return shapes_of_run(kernel, study, position)

    @property
    def num_numbers(self):
        """Number of numbers that left the site."""
        return sum(numbers_in(self.shapes[x.request.tag.run], x) for x in self.exchanges)

    def again(self, site, change=lambda frame: frame):
        """Yield pairs of answers: the first one, and of `site` in another attempt."""
        for exchange in self.exchanges:
            tag = exchange.request.tag
            header = exchange.request.header | {"tag": [*tag[:3], tag.attempt + 1]}
            frame = change(exchange.request._replace(header=header))
            yield exchange, Frame.parse(site.answer(frame.to_bytes()))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    """A function that returns the conversation of a row or a question, each held once."""
    held = {}

    def of(name):
        make = Conversation.of_question if name in QUESTIONS else Conversation.of_row
        if name not in held:
            held[name] = make(name, tmp_path_factory.mktemp("sites"))
        return held[name]

    return of


ALL = [*ROWS, *fast_and_slow(QUESTIONS, FAST_QUESTIONS)]


def test_every_class_that_a_study_may_ask_is_met_here():
    assert sorted(ASKED) == QUESTIONS


@pytest.mark.parametrize("name", ALL)
def test_a_question_asked_again_has_the_same_bytes(name, conversations):
    """A server repeats a question, after a site has started again, to average over noise."""
    conversation = conversations(name)
    site = open_table_site(conversation.study, VICTIM, conversation.folder)
    for exchange, answer in conversation.again(site):
        assert (answer.kind, answer.body) == (exchange.answer.kind, exchange.answer.body)


def phases_with_draws(conversation):
    """Return the numbers of the phases in which clients draw anything."""
    (shapes,), client = conversation.shapes.values(), conversation.study.client_like
    kernel, key = conversation.study.kernel("main"), jax.random.key(0)
    drawn = [
        jax.eval_shape(partial(phase.prepare, like=exchange.broadcast), key, client=client)
        for phase, exchange in zip(kernel.phases, shapes.phases, strict=True)
    ]
    return {number for number, tree in enumerate(drawn) if jax.tree.leaves(tree)}


def reproduced(conversation):
    """Yield parts that the server computes as a simulated site, and those that received.

    It has broadcasts and keys, and in this test even the rows.
    """
    kernel, client = conversation.study.kernel("main"), conversation.site.client
    (shapes,) = conversation.shapes.values()
    keys = jnp.stack([jax.random.fold_in(KEY, chain) for chain in range(NUM_CHAINS)])
    states: list = []

    @partial(jax.jit, static_argnames="number")
    def step(key, broadcast, state, weight, number):
        weighted = replace(client, weight=weight)
        return fedmcmc.rounds.client_step(kernel, number, key, broadcast, state, weighted)

    for exchange in conversation.exchanges:
        if exchange.request.kind != "step":
            continue
        header, number = exchange.request.header, exchange.request.tag.phase
        active = np.flatnonzero(header["active"])
        like = shapes.phases[number].broadcast
        sent = [wire.decode(part, like) for part in parts_of(exchange.request.body)[: len(active)]]
        states = states or NUM_CHAINS * [kernel.client_init(sent[0], client)]
        received = parts_of(exchange.answer.body)[: len(active)]
        for broadcast, chain, part in zip(sent, active, received, strict=True):
            weight = jnp.asarray(header["weights"][chain], client.share.dtype)
            code, states[chain], _ = step(keys[chain], broadcast, states[chain], weight, number)
            yield number, wire.encode(jax.tree.map(np.asarray, code)), part


@pytest.mark.parametrize("row", ROWS)
def test_a_server_cannot_reproduce_what_a_site_drew(row, conversations):
    """It has keys, positions and, in this test, the rows, but not the site's secret."""
    conversation = conversations(row)
    drawn = phases_with_draws(conversation)
    if drawn:
        assert any(
            n in drawn and mine != received for n, mine, received in reproduced(conversation)
        )


@pytest.mark.parametrize("row", ROWS)
def test_noise_is_not_the_same_at_two_positions_of_one_round(row, conversations):
    """A server repeats a question at a position that differs in the last bit to cancel noise."""
    conversation = conversations(row)
    final = conversation.exchanges[-1].request
    if final.tag.phase not in phases_with_draws(conversation):
        return

    def change(frame):
        if frame.tag[1:3] != final.tag[1:3]:
            return frame
        parts = [part[:7] + bytes([part[7] ^ 1]) + part[8:] for part in parts_of(frame.body)]
        return frame._replace(body=joined(parts))

    site = open_table_site(conversation.study, VICTIM, conversation.folder)
    *_, (exchange, answer) = conversation.again(site, change)
    assert answer.kind == "answer"
    like = conversation.shapes[final.tag.run].phases[final.tag.phase].code
    num = len(parts_of(answer.body)) // 2
    before, after = (
        jax.tree.leaves([wire.decode(part, like) for part in parts_of(body)[:num]])
        for body in (exchange.answer.body, answer.body)
    )
    assert any(
        np.abs(np.asarray(a, float) - np.asarray(b, float)).max() > 1e-3 * np.abs(a).max()
        for a, b in zip(before, after, strict=True)
        if np.size(a)
    )


@pytest.mark.parametrize("name", ALL)
def test_all_numbers_that_leave_are_counted(name, conversations, tmp_path):
    """A kernel whose messages hold more than is counted would get around the owner's limit."""
    conversation = conversations(name)
    num = conversation.num_numbers
    assert num > 0
    site = open_table_site(conversation.study, VICTIM, tmp_path / "enough", max_numbers=num)
    assert {answer.kind for _, answer in conversation.again(site)} <= {"ready", "answer"}
    site = open_table_site(conversation.study, VICTIM, tmp_path / "one less", max_numbers=num - 1)
    *_, (_, answer) = conversation.again(site)
    assert answer.kind == "declined" and "max_numbers" in answer.header["reason"]
