"""Parties share studies by their digests, and kernels by their names or in words."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.criticism._loo_question import LeaveOneOut
from fedmcmc.deploy._frames import FrameError, pack, unpack
from fedmcmc.deploy._study import kernel_digest
from fedmcmc.deploy._words import from_words, to_words
from fedmcmc.gaussian import defensive
from fedmcmc.kernels import PointRecipe, Points, evaluations
from tests.contracts.model import POSITIONS, POSTERIOR, Given
from tests.contracts.tables import KERNELS
from tests.support.commands import Consortium
from tests.support.studies import NAMES, masked_study, public_key, study_of

FUNCTIONS = study_of().functions
# Kernels of this package's parts; further rows hold functions of optax or of the tables.
IN_WORDS = ("relay", "qlsd_pp", "fa_hmc", "fed_ep: expansions", "hmc", "faults: hmc", "sequence")


SINGLE_ANSWERS = (
    "LeaveOneOutQuestion",
    "CommonExpansions",
    "LeaveOneOut",
    "OwnExpansions",
    "Relay",
    "Replication",
    "ScoreCovariances",
    "WithoutClient",
)
"""Questions and kernels whose sums reveal the answers of single sites, which masks exclude."""
QUESTION = LeaveOneOut(POSTERIOR, (), 2, jnp.array([0.5]), (30,))
KERNELS_IN_WORDS = {row: KERNELS[row](POSITIONS["nested"], Given()) for row in IN_WORDS}


@pytest.mark.parametrize("name", [*KERNELS_IN_WORDS, "LeaveOneOut"])
def test_kernels_come_back_from_words(name):
    kernel = fedmcmc.types.as_functions(KERNELS_IN_WORDS.get(name, QUESTION))
    words, body = to_words(kernel, FUNCTIONS)
    chex.assert_trees_all_equal(from_words(words, body, FUNCTIONS), kernel)


def test_contents_of_questions_come_back_from_words_and_so_do_their_shapes():
    key_words = jnp.zeros(2, jnp.uint32)
    recipe = PointRecipe(key_words, defensive(jnp.zeros(3), jnp.eye(3)), jnp.zeros(3), 100)
    for content in (Points(jnp.ones((4, 3)), jnp.zeros(3)), recipe):
        words, body = to_words(content, FUNCTIONS)
        chex.assert_trees_all_equal(from_words(words, body, FUNCTIONS), content)
        like = from_words(words, None, FUNCTIONS)
        assert like.centre == jax.ShapeDtypeStruct((3,), jnp.float32)
        assert to_words(like, FUNCTIONS) == (words, b"")


def test_a_kernel_with_functions_of_its_own_is_not_put_into_words():
    kernel = KERNELS["fed_avg"](POSITIONS["vector"], Given())
    with pytest.raises(deploy.Refused, match="Put a kernel with its own functions"):
        to_words(fedmcmc.types.as_functions(kernel), FUNCTIONS)


@pytest.mark.parametrize(
    "words",
    [
        {"class": "os:PathLike", "fields": {}},
        {"class": "fedmcmc.storage._checkpoints:Checkpoint", "fields": {"directory": {"value": 1}}},
        {"class": "fedmcmc.types:as_functions", "fields": {}},
        {"class": "fedmcmc.kernels._shared:jax", "fields": {}},
        {"class": "fedmcmc.kernels.nothing:Nothing", "fields": {}},
        {"class": "fedmcmc.types:PerClient", "fields": {"vales": {"value": 1}}},
        {"function": "__import__"},
        {"array": ["object", [1]]},
        {"array": ["float32", [2**62]]},
        {"array": ["float32", [-1]]},
        {"array": "float32"},
        {"value": []},
        {"list": 3},
        {"dict": []},
        {},
        [],
        None,
        {"unknown": 1},
    ],
    ids=str,
)
def test_words_that_name_other_code_build_nothing(words):
    with pytest.raises(FrameError):
        from_words(words, b"", FUNCTIONS)


def test_words_that_nest_without_end_build_nothing():
    words = {"value": 1}
    for _ in range(500):
        words = {"list": [words]}
    with pytest.raises(FrameError):
        from_words(words, b"", FUNCTIONS)


def test_a_server_sends_the_name_of_a_kernel_of_the_study():
    study = study_of("fed_avg")
    words, body = study.words_of(KERNELS["fed_avg"](POSITIONS["nested"], Given()))
    assert (words, body) == ({"named": "main"}, b"")
    assert kernel_digest(study.kernel_of(words, body)) == study.kernel_digests["main"]


def test_both_ends_refuse_a_kernel_that_is_not_in_the_study():
    study, kernel = study_of("lsd"), fedmcmc.lsd(POSTERIOR, step_size=0.02)
    with pytest.raises(deploy.Refused, match="'contract' does not allow the kernel 'Langevin'"):
        study.words_of(kernel)
    allowing = study_of("lsd", asks=("Langevin",))
    words, body = allowing.words_of(kernel)
    assert float(allowing.kernel_of(words, body).step_size) == np.float32(0.02)
    with pytest.raises(deploy.Refused, match="does not allow the kernel"):
        study.kernel_of(words, body)
    with pytest.raises(deploy.Refused, match="has no kernel 'other'"):
        study.kernel_of({"named": "other"}, b"")


def test_kernels_differ_by_every_number():
    digests = {
        kernel_digest(fedmcmc.lsd(POSTERIOR, step_size=step)) for step in (0.1, 0.1000001, 0.2)
    }
    schedules = {
        kernel_digest(fedmcmc.lsd(POSTERIOR, step_size=lambda r, s=s: s / (1 + r)))
        for s in (0.1, 0.2)
    }
    assert len(digests) == 3 and len(schedules) == 2


def test_a_study_in_files_has_the_digest_of_all_of_it(tmp_path):
    clinics = Consortium(tmp_path)
    text, digest = (tmp_path / "study.toml").read_text(), clinics.study.digest
    assert deploy.Study.read(tmp_path / "study.toml").digest == digest
    for old, new in (
        ("step_size = 0.01", "step_size = 0.02"),
        ("bern = 5\nbasel = 1", "basel = 1\nbern = 5"),  # the clients have this order
        ('"float32"', '"float64"'),
        ("three clinics", "four clinics"),
    ):
        assert old in text
        (tmp_path / "study.toml").write_text(text.replace(old, new))
        assert deploy.Study.read(tmp_path / "study.toml").digest != digest, new
    (tmp_path / "study.toml").write_text(text)
    model = (tmp_path / "model.py").read_text()
    (tmp_path / "model.py").write_text(model + "\n")
    assert deploy.Study.read(tmp_path / "study.toml").digest != digest


def test_the_model_of_a_study_that_was_not_approved_is_not_run(tmp_path):
    clinics = Consortium(tmp_path)
    (tmp_path / "model.py").write_text("raise RuntimeError('run')")
    study = deploy.Study.read(tmp_path / "study.toml")
    with pytest.raises(deploy.Refused, match="is not the one approved"):
        deploy.Site(
            study,
            "bern",
            np.zeros((5, 2), np.float32),
            folder=tmp_path / "bern",
            approved=clinics.study.digest,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sites={}), "mapping from names"),
        (dict(sites=["bern", "basel"]), r"mapping from names.*got \['bern', 'basel'\]"),
        (dict(sites={"bern": 0}), "of at least 1, got 0 for 'bern'"),
        (dict(sites={"bern": True}), "of at least 1, got True for 'bern'"),
        (dict(name=3), "name of a study must be text, got 3"),
        (dict(rows={"x": jax.ShapeDtypeStruct((-1,), "f4")}), r"'x' of rows has a negative .*-1"),
        (dict(rows={}), "at least one column"),
        (dict(posterior="tests.support.studies"), "must be 'package.module:name'"),
        (dict(asks=("Langevins",)), "asks"),
        (dict(asks=("langevin",)), "asks"),
        (dict(asks=("os.system",)), "asks"),
        (dict(asks=("",)), "asks"),
        (dict(secure={"rounds": -5}), "secure.rounds must be at least 0, got -5"),
        (
            dict(secure={"identities": dict.fromkeys(NAMES, public_key("bern"))}),
            "also the identity of another site",
        ),
        *((dict(secure={}, asks=(name,)), f"may not ask {name}") for name in SINGLE_ANSWERS),
    ],
    ids=str,
)
def test_a_study_that_is_none_is_refused(changes, message):
    make_study = masked_study if "secure" in changes else study_of
    with pytest.raises(ValueError, match=message):
        make_study("lsd", **changes)


def test_an_error_names_what_a_study_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"have no tests\.support\.studies:nothing"):
        _ = study_of(posterior="tests.support.studies:nothing").model
    with pytest.raises(ValueError, match="not installed"):
        _ = study_of(posterior="fedmcmc_nowhere:posterior").digest
    with pytest.raises(ValueError, match="cannot be read"):
        _ = study_of(posterior="nowhere.py:posterior", folder=tmp_path).digest
    (tmp_path / "study.toml").write_text('name = "x"\n')
    with pytest.raises(ValueError, match="must hold name, posterior, rows, sites"):
        deploy.Study.read(tmp_path / "study.toml")


def test_bodies_come_apart_as_they_were_put_together():
    parts = [b"", b"ab", b"c" * 1000]
    assert unpack(pack(*parts), 3) == parts
    for broken in (pack(*parts)[:-1], pack(*parts) + b"x", b"", pack(b"a")):
        with pytest.raises(FrameError):
            unpack(broken, 3)


def test_a_question_crosses_in_words():
    study = study_of(asks=deploy.FIT)
    words, body = study.words_of(evaluations(study.model, gradients=True))
    question = study.kernel_of(words, body)
    assert question.gradients and isinstance(question.posterior, fedmcmc.Posterior)


def test_a_server_computes_with_the_functions_of_the_study():
    """A kernel made of another model, whose functions have the same names."""
    study = study_of("lsd")
    namesake = fedmcmc.Posterior(lambda theta: jnp.zeros(()), POSTERIOR.loglikelihood_fn)
    namesake.logprior_fn.__qualname__ = POSTERIOR.logprior_fn.__qualname__
    namesake.logprior_fn.__module__ = POSTERIOR.logprior_fn.__module__
    kernel = KERNELS["lsd"](POSITIONS["nested"], Given(namesake))
    assert study.adapt_kernel(kernel) is study.kernel("main")
    unknown = fedmcmc.lsd(POSTERIOR, step_size=0.5)
    assert study.adapt_kernel(unknown) is unknown
