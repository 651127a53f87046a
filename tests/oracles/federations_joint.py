"""A Gaussian model with latents of groups, as data and functions, and its quadratic form."""

import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc.types import Local, Shapes
from tests.oracles.laws_joint import Group, Model

D, K = 2, 2
OWNERS = (0, 0, 1, 2, 2, 2)  # of groups
ROWS = (2, 1, 3, 1, 2, 1)  # of groups
PULL = np.array([[0.6, -0.3], [0.2, 0.5]])  # a latent's prior mean is PULL phi
SPREAD = np.array([[1.5, 0.3], [0.3, 1.0]])  # a latent's prior precision
PRIOR, PRIOR_MEAN = np.array([[1.5, 0.2], [0.2, 1.0]]), np.array([0.5, -1.0])
START = np.array([1.0, 0.5])
PROBABILITIES = np.array([0.5, 0.7, 0.4])


def _logprior(phi):
    gap = phi - jnp.asarray(PRIOR_MEAN, phi.dtype)
    return -0.5 * gap @ jnp.asarray(PRIOR, phi.dtype) @ gap


def _of_latent(phi, theta):
    gap = theta - jnp.asarray(PULL, phi.dtype) @ phi
    return -0.5 * gap @ jnp.asarray(SPREAD, phi.dtype) @ gap


def _of_rows(phi, thetas, rows):
    """Normal outcomes, ``N(x' phi + z' theta, 1)`` per row."""
    gap = rows["y"] - rows["x"] @ phi - jnp.sum(rows["z"] * thetas, -1)
    return -0.5 * gap**2


LOCAL = Local(_of_latent, _of_rows, Shapes(jnp.zeros(K, jnp.result_type(float))))
POSTERIOR = fedmcmc.Posterior(_logprior, None, local=LOCAL)


def rows_of_groups():
    rng = np.random.default_rng(5)
    for size in ROWS:
        yield {
            "x": rng.normal(size=(size, D)).round(2),
            "z": rng.normal(size=(size, K)).round(2),
            "y": rng.normal(1, 1.5, size=size).round(2),
        }


def _model():
    groups = []
    for owner, rows in zip(OWNERS, rows_of_groups(), strict=True):
        x, z, y = rows["x"], rows["z"], rows["y"]
        groups.append(
            Group(
                owner,
                x.T @ x + PULL.T @ SPREAD @ PULL,
                x.T @ z - PULL.T @ SPREAD,
                z.T @ z + SPREAD,
                x.T @ y,
                z.T @ y,
            )
        )
    return Model(groups, PRIOR, PRIOR_MEAN)


MODEL = _model()


def make_data():
    """Return three clients of 2, 1 and 3 groups, whose rows lie in turns."""
    clients, labels = [], []
    for client in range(3):
        own = [
            (i, r)
            for i, (o, r) in enumerate(zip(OWNERS, rows_of_groups(), strict=True))
            if o == client
        ]
        label = np.concatenate([[i] * ROWS[i] for i, _ in own])
        joined = {k: np.concatenate([r[k] for _, r in own]) for k in ("x", "z", "y")}
        # Groups keep the order of their first rows.
        order = np.argsort(
            [np.sum(label[:j] == label[j]) for j in range(len(label))], kind="stable"
        )
        clients.append({k: v[order] for k, v in joined.items()})
        labels.append(label[order])
    return fedmcmc.FederatedData.from_clients(clients, groups=labels)


DATA = make_data()


def joint_vector(state, info=None):
    """Return phi and the latents of all groups, ``[n]``, in the order of the model."""
    del info
    latents = state.clients.latents  # [clients, most groups, k]
    own = [latents[client, OWNERS[:i].count(client)] for i, client in enumerate(OWNERS)]
    return jnp.concatenate([state.broadcast.position, *own])
