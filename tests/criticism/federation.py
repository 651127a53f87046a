"""A logistic and a normal model on ragged clients, with draws near their posteriors."""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc import rounds
from fedmcmc.types import Broadcast, as_functions
from tests.support.deployed import Site

SIZES = (37, 23, 11, 3)


def logistic(theta, rows):
    logits = rows["x"] @ theta
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


def logistic_outcomes(key, theta, rows):
    chance = jax.nn.sigmoid(rows["x"] @ theta)
    return {**rows, "y": jax.random.bernoulli(key, chance).astype(rows["y"].dtype)}


LOGISTIC = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum((theta / 2.5) ** 2), logistic, logistic_outcomes
)


def normal(theta, rows):
    z = (rows["y"] - theta["mean"]) * jnp.exp(-theta["log_sd"])
    return -0.5 * z**2 - theta["log_sd"] - 0.5 * jnp.log(2 * jnp.pi)


def normal_outcomes(key, theta, rows):
    noise = jax.random.normal(key, rows["y"].shape)
    return {**rows, "y": theta["mean"] + jnp.exp(theta["log_sd"]) * noise}


NORMAL = fedmcmc.Posterior(
    lambda theta: -0.5 * (theta["mean"] / 10) ** 2 - 0.5 * theta["log_sd"] ** 2,
    normal,
    normal_outcomes,
)
MODELS = {"logistic": LOGISTIC, "normal": NORMAL}


def clients(name, sizes=SIZES, seed=0):
    """Return one dictionary of rows per client."""
    rng = np.random.default_rng(seed)
    result = []
    for size in sizes:
        x = np.stack([np.ones(size), rng.normal(size=size)], 1).astype(np.float32)
        if name == "logistic":
            y = rng.random(size) < 1 / (1 + np.exp(-0.3 - 0.8 * x[:, 1]))
        else:
            y = rng.normal(2.0, 1.5, size)
        result.append({"x": x, "y": y.astype(np.float32)})
    return result


def federation(name, sizes=SIZES):
    return fedmcmc.FederatedData.from_clients(clients(name, sizes))


def draws_near(name, num=1000, seed=1):
    """Return draws that are about the posterior's, leaves ``[num, ...]``."""
    rng = np.random.default_rng(seed)
    if name == "logistic":
        return rng.normal([0.3, 0.8], [0.25, 0.3], (num, 2)).astype(np.float32)
    return {
        "mean": rng.normal(2.0, 0.17, num).astype(np.float32),
        "log_sd": rng.normal(0.4, 0.08, num).astype(np.float32),
    }


def log_likelihoods(posterior, rows, draws):
    """Return the log likelihood of each row at each draw, ``[num_draws, num_rows]``."""
    return np.asarray(jax.vmap(lambda theta: posterior.loglikelihood_fn(theta, rows))(draws))


@jax.jit
def send(question, content, client):
    """Return the message of a client."""
    broadcast = Broadcast(jnp.zeros((), jnp.int32), content)
    return rounds.client_step(question, 0, jax.random.key(0), broadcast, (), client)[0]


def messages(question, data, content):
    """Return the message of each client, which has only its own rows."""
    question = as_functions(question)
    clients = [Site(question, data, index).client for index in range(data.num_clients)]
    return [jax.tree.map(np.asarray, send(question, content, client)) for client in clients]


def numbers(message):
    """Return all numbers of a message, flat."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(message)])
