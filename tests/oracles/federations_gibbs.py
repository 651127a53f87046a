"""A Gaussian model whose shared parameters are those of the latents alone; see `laws_joint`."""

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from tests.oracles import federations_joint as joint
from tests.oracles.laws_joint import Group, Model

PULL, SPREAD = joint.PULL, joint.SPREAD
DATA, OWNERS = joint.DATA, joint.OWNERS


def _of_rows(phi, thetas, rows):
    gap = rows["y"] - jnp.sum(rows["z"] * thetas, -1)
    return -0.5 * gap**2


def _origin(phi):
    return jnp.asarray(PULL, phi.dtype) @ phi


def _statistics(theta, origin):
    away = theta - origin
    return away, jnp.outer(away, away)


def _density(phi, sums):
    first, second = sums.total
    mean, precision = _origin(phi) - sums.origin, jnp.asarray(SPREAD, phi.dtype)
    cross = jnp.outer(mean, first)
    spread = second - cross - cross.T + sums.num_latents * jnp.outer(mean, mean)
    return -0.5 * jnp.trace(precision @ spread)


def _draw(key, phi, sums):
    """Draw phi given all latents, and its prior."""
    num, pull = sums.num_latents, jnp.asarray(PULL.T @ SPREAD, phi.dtype)
    precision = jnp.asarray(joint.PRIOR, phi.dtype)
    first = sums.total[0] + num * sums.origin
    linear = precision @ jnp.asarray(joint.PRIOR_MEAN, phi.dtype) + pull @ first
    factor = jnp.linalg.cholesky(precision + num * pull @ jnp.asarray(PULL, phi.dtype))
    mean = jax.scipy.linalg.cho_solve((factor, True), linear)
    normal = jax.random.normal(key, phi.shape, phi.dtype)
    return mean + jax.scipy.linalg.solve_triangular(factor.T, normal)


POPULATION = fedmcmc.types.Population(_statistics, _density, _draw, _origin)
LOCAL = joint.LOCAL._replace(loglikelihood_fn=_of_rows, population=POPULATION)
POSTERIOR = joint.POSTERIOR._replace(local=LOCAL)
SLICED = POSTERIOR._replace(local=LOCAL._replace(population=POPULATION._replace(draw_fn=None)))


def _model():
    groups = []
    for owner, rows in zip(OWNERS, joint.rows_of_groups(), strict=True):
        z, y = rows["z"], rows["y"]
        own = (PULL.T @ SPREAD @ PULL, -PULL.T @ SPREAD, z.T @ z + SPREAD, np.zeros(2), z.T @ y)
        groups.append(Group(owner, *own))
    return Model(groups, joint.PRIOR, joint.PRIOR_MEAN)


MODEL = _model()
