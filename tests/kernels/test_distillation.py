"""Distillation: gradient descent towards an ensemble's predictions, with averaged iterates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc

KEY = jax.random.key(5)
SGD = optax.sgd(0.1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_distillation_is_gradient_descent_on_the_divergence_with_averaged_iterates():
    rng = np.random.default_rng(0)
    x, mean, members = rng.normal(size=(9, 2)), rng.normal(size=(2, 3)), rng.normal(size=(4, 2, 3))
    distill = fedmcmc.distillation(
        lambda w, inputs: inputs["x"] @ w["w"],
        {"x": x},
        optimizer=optax.sgd(0.5),
        num_steps=8,
        average_from=2,
        average_every=3,
    )
    found = jax.jit(distill)(KEY, {"w": jnp.asarray(mean)}, {"w": jnp.asarray(members)})
    teacher = np.mean([softmax(x @ w) for w in (mean, *members)], axis=0)
    w, kept = mean, []
    for step in range(8):
        w = w - 0.5 * x.T @ (softmax(x @ w) - teacher) / 9
        if step in (2, 5):
            kept.append(w)
    np.testing.assert_allclose(found["w"], np.mean(kept, axis=0), rtol=1e-5, atol=1e-6)


def test_distillation_on_minibatches_finds_a_model_that_agrees_with_the_ensemble():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(40, 3)), rng.normal(size=(3, 4))
    distill = fedmcmc.distillation(
        lambda w, inputs: inputs @ w,
        x,
        optimizer=optax.adam(0.1),
        num_steps=400,
        batch_size=16,
        average_from=200,
    )
    members = jnp.broadcast_to(jnp.asarray(w), (3, 3, 4))
    found = np.asarray(distill(KEY, jnp.asarray(w) + 0.3, members))
    # A common shift of all classes changes no prediction, so start and members agree already.
    np.testing.assert_allclose(softmax(x @ found), softmax(x @ w), atol=2e-3)
    # Where no model agrees with the ensemble, one whose divergence has no slope left.
    far = np.asarray(distill(KEY, -jnp.asarray(w), members))
    teacher = (3 * softmax(x @ w) + softmax(-x @ w)) / 4
    slopes = [np.abs(x.T @ (softmax(x @ v) - teacher)).max() for v in (-w, far)]
    assert slopes[1] < 0.1 * slopes[0]
    other = np.asarray(distill(jax.random.key(9), -jnp.asarray(w), members))
    assert np.abs(other - far).max() > 1e-4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(inputs={"a": np.ones(3), "b": np.ones(4)}), ValueError, "of the same positive"),
        (dict(inputs=()), ValueError, "of the same positive length"),
        (dict(num_steps=0), ValueError, "num_steps must be a positive integer"),
        (dict(average_from=5), ValueError, "average_from must be below num_steps, got 5 and 5"),
        (dict(average_from=-1), ValueError, "average_from must be"),
        (dict(average_every=0), ValueError, "average_every must be a positive integer"),
        (dict(batch_size=0), ValueError, "batch_size must be a positive integer"),
        (dict(optimizer=None), TypeError, "optimizer must be an optax"),
    ],
)
def test_bad_distillation(change, error, message):
    settings = dict(inputs=np.ones((3, 2)), optimizer=SGD, num_steps=5) | change
    with pytest.raises(error, match=message):
        fedmcmc.distillation(lambda w, x: x @ w, settings.pop("inputs"), **settings)
