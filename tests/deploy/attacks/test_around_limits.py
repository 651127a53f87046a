"""A dishonest server that gets around what limits count, and around the smallest minibatch."""

import jax
import jax.numpy as jnp
import optax
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._limits import num_parameters, smallest_batch
from fedmcmc.dynamics import Length
from fedmcmc.kernels import Points
from tests.deploy.attacks.support import Network, make_study, open_site, posterior, run

MODEL = posterior({})


def test_the_last_minibatch_of_a_pass_holds_the_rows_that_are_left():
    """Of 61 rows in batches of 20, one row is in a batch alone, which counts for all rows."""
    training = dict(client_optimizer=optax.sgd(0.1), num_local_epochs=1, batch_size=20)
    kernels = (
        fedmcmc.langevin(MODEL, fedmcmc.epochs(20), step_size=0.01),
        fedmcmc.fed_avg(MODEL, **training),
        Length(1, batch_size=20),
    )
    assert [smallest_batch(kernel, 61) for kernel in kernels] == [1, 1, 1]
    assert [smallest_batch(kernel, 60) for kernel in kernels] == [20, 20, 20]


def test_equal_answers_to_different_questions_count(tmp_path):
    """That nothing changed says something of the rows, too."""
    study = make_study()
    network = Network(study, tmp_path, max_numbers=20)
    with pytest.raises(deploy.SiteError, match="max_numbers"):
        run(study, network, num_rounds=20)
    answers = [x.answer.body for x in network.steps("bern") if x.answer.kind == "answer"]
    assert len(answers) > 1 and len(set(answers)) == 1


def test_two_sites_in_one_folder_share_a_count(tmp_path):
    study = make_study()
    one, other = (open_site(study, "bern", tmp_path) for _ in range(2))
    one._outflow.add(5, "round 3", b"question", b"answer")
    other._outflow.add(5, "round 3", b"question", b"another")
    assert one.disk.num_numbers == other._outflow.total == 10


def test_parameters_cannot_be_hidden_by_the_shapes_that_a_server_chooses():
    """Numbers without a sign count, and points with a center of fewer numbers."""
    model = make_study()
    assert model.model.init_fn is None
    words = jax.ShapeDtypeStruct((8,), jnp.uint32)
    assert num_parameters(model, words) == 8
    point = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    points = Points(point, jax.ShapeDtypeStruct((), jnp.float32))
    assert num_parameters(model, points) == 8
