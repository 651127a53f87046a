"""Contract of every compressor: arguments, shapes, moments of its errors, and traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc.compression import Dense, OneOf, Quantized, Sparse, message_bits
from tests.contracts.model import DATA, KEY, NUM_CLIENTS, POSITIONS, Given, arguments, shapes
from tests.contracts.tables import COMPRESSORS
from tests.oracles.federations import LIMIT, z_scores

CLIENT = DATA.client(1)


def build(name, scale=1):
    return COMPRESSORS[name](Given(scale=scale))


@jax.jit
def transmit(compressor, key, message, state, client):
    draws = compressor.prepare(key, message, client)
    code, state = compressor.encode(draws, message, state, client)
    return code, compressor.decode(code, client), state


@pytest.mark.check
@pytest.mark.parametrize("name", COMPRESSORS)
def test_functions_take_the_documented_arguments(name):
    documented = {
        "init": ["like"],
        "prepare": ["rng_key", "like", "client"],
        "encode": ["draws", "message", "state", "client"],
        "decode": ["code", "sender"],
        "omega": ["like"],
        "check": ["like", "num_clients"],
    }
    for field, expected in documented.items():
        assert arguments(getattr(build(name), field)) == expected, field


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_structures_shapes_and_dtypes_do_not_change(name, position):
    compressor, message = build(name), POSITIONS[position]
    compressor.check(message, NUM_CLIENTS)
    state = compressor.init(message)
    code, decoded, after = jax.eval_shape(transmit, compressor, KEY, message, state, CLIENT)
    assert isinstance(code, Dense | Quantized | Sparse | OneOf)
    assert shapes(decoded) == shapes(message)
    assert shapes(after) == shapes(state)
    bits = jax.eval_shape(message_bits, code)
    assert (bits.shape, bits.dtype) == ((), jnp.int32)
    assert jnp.shape(compressor.omega(message)) in ((), (NUM_CLIENTS,))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_errors_have_the_declared_moments(name):
    compressor, message = build(name), jnp.array([0.3, -1.7, 0.9])
    state = compressor.init(message)
    omega = jnp.broadcast_to(compressor.omega(message), (NUM_CLIENTS,))
    keys = jax.random.split(KEY, 20000)
    for i in (0, 2):
        transmit_many = jax.vmap(transmit, (None, 0, None, None, None))
        errors = np.asarray(
            transmit_many(compressor, keys, message, state, DATA.client(i))[1], float
        )
        errors = errors - np.asarray(message)
        assert (errors**2).sum(1).mean() <= 1.02 * float(omega[i]) * float(message @ message) + 1e-9
        exact = np.abs(errors).max() == 0
        assert exact == (name == "identity")
        if compressor.unbiased and not exact:
            assert np.abs(z_scores(errors, 0.0)).max() < LIMIT
        elif not exact:
            assert np.abs(errors.mean(0)).max() > 1e-2


@pytest.mark.parametrize("name", COMPRESSORS)
def test_one_trace_serves_all_numbers(name):
    first, second = build(name), build(name, scale=2)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    assert shapes(a) == shapes(b)
    same = all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(a, b, strict=True))
    assert same == name.startswith(("identity", "top_k"))
