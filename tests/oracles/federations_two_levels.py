"""A Gaussian model with a latent per client and one per group, as functions and as factors."""

import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc._types import ClientLatent, Local, Shapes

D = 2
SIZES = ((2, 1), (3,), (1, 2, 2))  # rows of each group of each client
PRIOR, OWN, GROUP = 1.5, 1.2, 0.8  # precisions of phi, and of latents of clients and groups
PULL, SHARE = np.array([0.6, -0.3]), 0.7  # means: PULL . phi, and phi[0] + SHARE * the client's
START = np.array([1.0, 0.5])
NUM_GROUPS = sum(map(len, SIZES))


def _rows():
    rng = np.random.default_rng(8)
    for sizes in SIZES:
        num = sum(sizes)
        yield {
            "x": rng.normal(size=(num, D)).round(2),
            "z": rng.normal(1, 0.5, size=num).round(2),
            "y": rng.normal(1, 1.5, size=num).round(2),
        }


ROWS = list(_rows())
LABELS = [np.repeat(np.arange(len(sizes)), sizes) for sizes in SIZES]
DATA = fedmcmc.FederatedData.from_clients(ROWS, groups=LABELS)


def _logprior(phi):
    return -0.5 * PRIOR * jnp.sum(phi**2)


def _of_client(phi, own):
    return -0.5 * OWN * (own - jnp.asarray(PULL, phi.dtype) @ phi) ** 2


def _of_group(pair, latent):
    phi, own = pair
    return -0.5 * GROUP * (latent - phi[0] - SHARE * own) ** 2


def _of_rows(pair, latents, rows):
    phi, own = pair
    return -0.5 * (rows["y"] - rows["x"] @ phi - own - rows["z"] * latents) ** 2


_NUMBER = Shapes(jnp.zeros((), jnp.result_type(float)))
LOCAL = Local(_of_group, _of_rows, _NUMBER, client=ClientLatent(_of_client, _NUMBER))
POSTERIOR = fedmcmc.Posterior(_logprior, None, local=LOCAL)


def factors():
    """Yield the normal factors of phi, the clients' latents and those of all groups."""
    size, num = D + len(SIZES) + NUM_GROUPS, len(SIZES)
    at = np.eye(size)
    for i in range(D):
        yield at[i], 0.0, PRIOR
    place = D + num
    for c, sizes in enumerate(SIZES):
        own = at[D + c]
        yield own - np.concatenate([PULL, np.zeros(size - D)]), 0.0, OWN
        for g in range(len(sizes)):
            latent = at[place + g]
            yield latent - at[0] - SHARE * own, 0.0, GROUP
            rows = ROWS[c]
            for r in np.flatnonzero(LABELS[c] == g):
                fixed = np.concatenate([rows["x"][r], np.zeros(size - D)])
                yield fixed + own + rows["z"][r] * latent, rows["y"][r], 1.0
        place += len(sizes)


def joint_vector(state, info=None):
    """Return phi and the latents of clients and groups, ``[n]``, in the order of the factors."""
    del info
    latents = state.clients.latents
    groups = [latents["group"][c, : len(sizes)] for c, sizes in enumerate(SIZES)]
    return jnp.concatenate([state.broadcast.position, latents["client"], *groups])
