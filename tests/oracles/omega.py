"""Messages as strings of zeros and ones, one codeword after another: slow, and easy to check."""

import jax
import numpy as np

from fedmcmc.compression import Dense, OneOf, Sparse


def omega(n):
    """Return the codeword of `n` as Elias (1975) builds it, from its end to its beginning."""
    word = "0"
    while n > 1:
        word = f"{n:b}" + word
        n = len(f"{n:b}") - 1
    return word


def raw(numbers):
    """Return the bits of floating-point numbers."""
    return "".join(f"{byte:08b}" for x in np.ravel(numbers) for byte in x.tobytes()[::-1])


def message(code):
    """Return a string as long as the message of `code`."""
    if isinstance(code, OneOf):
        width, num = 0, len(code.codes)
        while 2**width < num:
            width += 1
        return "?" * width + message(code.codes[int(code.place)])
    if isinstance(code, Dense):
        return "".join(raw(leaf) for leaf in jax.tree.leaves(code.values))
    if isinstance(code, Sparse):
        return sparse(jax.tree.leaves(code.values))
    norms, leaves = jax.tree.leaves(code.norm), jax.tree.leaves(code.levels)
    parts = [[leaf] for leaf in leaves] if len(norms) == len(leaves) else [leaves]
    return "".join(quantized(n, flat(ks)) for n, ks in zip(norms, parts, strict=True))


def flat(leaves):
    return [x for leaf in leaves for x in np.ravel(leaf)]


def quantized(norm, levels):
    if norm == 0:
        return raw(norm)
    signs = ["-" if k < 0 else "+" for k in levels if k]
    dense = "".join(omega(abs(int(k)) + 1) for k in levels) + "".join(signs)
    values = "".join(omega(abs(int(k))) for k in levels if k)
    sparse_ = places(levels) + "".join(signs) + values
    return raw(norm) + "?" + min(dense, sparse_, key=len)


def sparse(leaves):
    numbers = flat(leaves)
    return "?" + min(raws(numbers), places(numbers) + raws(x for x in numbers if x), key=len)


def raws(numbers):
    return "".join(raw(x) for x in numbers)


def places(numbers):
    sent = [j for j, x in enumerate(numbers) if x]
    gaps = [j - i for i, j in zip([-1, *sent], sent, strict=False)]
    return omega(len(sent) + 1) + "".join(map(omega, gaps))
