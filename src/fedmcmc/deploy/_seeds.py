"""Seeds in a server's settings, and the keys of its runs."""

import hashlib
import logging
import re
import secrets

import jax
from jax import Array

from fedmcmc.random import secret_key

LOG = logging.getLogger("fedmcmc.deploy")
DIGITS = 32
"""Number of hexadecimal digits of a seed."""
COMMAND = f"python -c 'import secrets; print(secrets.token_hex({DIGITS // 2}))'"
"""Shell command that prints a new seed."""


def new_seed() -> str:
    """Return a new random seed of `DIGITS` hexadecimal digits."""
    return secrets.token_hex(DIGITS // 2)


def key_of_seed(seed: object) -> Array:
    """Return the key of a run from the ``seed`` of a server's settings.

    A text of 32 hexadecimal digits becomes a key of the ChaCha20 generator. An integer becomes
    ``jax.random.key(seed)``, with a warning in the log. Raise `ValueError` for anything else.
    """
    if type(seed) is int:
        LOG.warning(
            "run.seed is an integer, which can be found by search, and with it the server's noise. "
            "Use a text of %d hexadecimal digits, as made by %s.",
            *(DIGITS, COMMAND),
        )
        return jax.random.key(seed)
    if not isinstance(seed, str) or not re.fullmatch(f"[0-9a-fA-F]{{{DIGITS}}}", seed):
        raise ValueError(
            f"run.seed must be a text of {DIGITS} hexadecimal digits, as made by {COMMAND}, "
            "or an integer; it is neither."
        )
    return secret_key(hashlib.sha256(bytes.fromhex(seed)).digest())
