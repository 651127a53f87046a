"""The model of El Mekkaoui et al. (2021), section 5.2: Bayesian distance metric learning.

A pair of utterances ``(x, x')`` with ``y = 1`` if they are the same letter and ``y = -1`` if not:
``P(y | pair) = sigmoid(-y (d_A(x, x')^2 - mu))``, ``A = sum_k gamma_k v_k v_k'``, ``v_k`` the top
eigenvectors of the data. (The paper prints ``y`` as 0 or 1, for which the probabilities of the
two outcomes would not sum to one; this is the form of Yang, Jin and Sukthankar 2007.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedmcmc

__all__ = ["Pairs", "loglikelihood", "make_posterior"]


class Pairs(NamedTuple):
    """Pairs as rows: `features` ``[num_pairs, num_components]`` and `sign` ``[num_pairs]``.

    A feature is the squared difference of the two utterances along one eigenvector; all that the
    distance needs. The sign is 1 for similar pairs and -1 for dissimilar ones.
    """

    features: np.ndarray | Array
    sign: np.ndarray | Array


def logprior(prior_scale: Array, position: dict[str, Array]) -> Array:
    """Independent normals of the same scale on ``gamma`` and ``mu``."""
    square = jnp.sum(position["gamma"] ** 2) + position["mu"] ** 2
    return -0.5 * square / prior_scale**2


def loglikelihood(position: dict[str, Array], pairs: Pairs) -> Array:
    """``log sigmoid(-y (d^2 - mu))`` of each pair."""
    distance = pairs.features @ position["gamma"]
    return jax.nn.log_sigmoid(-pairs.sign * (distance - position["mu"]))


def make_posterior(prior_scale: float) -> fedmcmc.Posterior:
    """Return the model, split for a federation."""
    prior = jax.tree_util.Partial(logprior, jnp.float32(prior_scale))
    return fedmcmc.Posterior(prior, jax.tree_util.Partial(loglikelihood))
