"""Local training against a loop in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc.dynamics import Visitor, local_steps, train, training

RATE = 0.1
ROWS = np.array([1.0, -2.0, 4.0, 0.5, 3.0])


class Windows(Visitor):
    """Ends and averages of the windows with samples, ``[num_samples]`` each."""

    averages = True

    def init(self, position):
        return jnp.zeros((2, 4))

    def visit(self, summary, index, position, average):
        return summary.at[:, index].set(jnp.stack([position, average]))


@pytest.mark.parametrize(
    "num_samples, num_burnin, num_discarded", [(2, 0, 0), (2, 1, 0), (2, 0, 1)]
)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_windows_and_first_gradient(num_steps, num_samples, num_burnin, num_discarded):
    data = fedmcmc.FederatedData.from_clients([ROWS])
    length, _ = local_steps(None, num_steps, None, num_samples, num_burnin, num_discarded)
    settings = training(optax.sgd(RATE, momentum=0.5), length)
    targets = jnp.linspace(-1, 2, length.num_windows * num_steps)
    trained = jax.jit(
        lambda x: train(
            settings,
            lambda target, position: position - target,
            targets,
            x,
            data.client(jnp.int32(0)),
            jnp.int32(0),
            Windows(),
        )
    )(jnp.float32(3.0))

    x, velocity, path, gradients = 3.0, 0.0, [], []
    for target in np.asarray(targets):
        gradients.append(x - target)
        velocity = 0.5 * velocity + gradients[-1]
        x -= RATE * velocity
        path.append(x)
    windows = np.reshape(path, (-1, num_steps))[num_burnin :: num_discarded + 1]
    expected = np.zeros((2, 4))
    expected[:, :num_samples] = windows[:, -1], windows.mean(axis=1)
    np.testing.assert_allclose(trained.position, path[-1], rtol=1e-5)
    np.testing.assert_allclose(trained.summary, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained.square, gradients[0] ** 2, rtol=1e-5)
