"""Positions of many chains after some rounds, in one compiled program per kind of kernel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc


def get_position(state):
    return state.broadcast.position


def split_keys(num, seed=0):
    """Return a key per chain."""
    return jax.random.split(jax.random.key(seed), num)


@partial(jax.jit, static_argnames="collect", compiler_options={"xla_backend_optimization_level": 0})
def _draw(kernel, data, start, keys, num_rounds, collect):
    init, step = fedmcmc.simulate(kernel, data)

    def run(key):
        return collect(
            jax.lax.fori_loop(0, num_rounds, lambda _, state: step(key, state)[0], init(start))
        )

    return jax.vmap(run)(keys)


def draw(kernel, data, start, keys, num_rounds, collect=get_position):
    """Return what `collect` takes from the states after some rounds, a row per key.

    A number of rounds is an argument of the program, which compiles in half the time of
    `fedmcmc.sample`.
    """
    start = jnp.asarray(start, jnp.result_type(float))
    return np.asarray(_draw(kernel, data, start, keys, num_rounds, collect))
