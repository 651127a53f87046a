"""Distillation: gradient descent towards an ensemble's predictions, with averaged iterates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedmcmc

KEY = jax.random.key(5)


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
    actual = jax.jit(distill)(KEY, {"w": jnp.asarray(mean)}, {"w": jnp.asarray(members)})
    teacher = np.mean([softmax(x @ w) for w in (mean, *members)], axis=0)
    w, averaged = mean, []
    for step in range(8):
        w = w - 0.5 * x.T @ (softmax(x @ w) - teacher) / 9
        if step in (2, 5):
            averaged.append(w)
    np.testing.assert_allclose(actual["w"], np.mean(averaged, axis=0), rtol=1e-5, atol=1e-6)


def test_distillation_on_minibatches_agrees_with_the_ensemble():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(40, 3)), rng.normal(size=(3, 4))
    settings = dict(optimizer=optax.adam(0.1), num_steps=400, batch_size=16, average_from=200)
    distill = jax.jit(fedmcmc.distillation(lambda w, inputs: inputs @ w, x, **settings))
    members = jnp.broadcast_to(jnp.asarray(w), (3, 3, 4))
    # A common shift of all classes changes no prediction, so start and members agree already.
    near = np.asarray(distill(KEY, jnp.asarray(w) + 0.3, members))
    np.testing.assert_allclose(softmax(x @ near), softmax(x @ w), atol=2e-3)
    # If no model agrees with the ensemble, the divergence has no slope at the distilled model.
    far, reseeded = (
        np.asarray(distill(key, -jnp.asarray(w), members)) for key in (KEY, jax.random.key(9))
    )
    teacher = (3 * softmax(x @ w) + softmax(-x @ w)) / 4
    slopes = [np.abs(x.T @ (softmax(x @ v) - teacher)).max() for v in (-w, far)]
    assert slopes[1] < 0.1 * slopes[0]
    assert np.abs(reseeded - far).max() > 1e-4
