"""Bits of messages and the speed of writing them.

``python -m benchmarks.wire`` prints the bits of all messages with the published bounds.
``python -m benchmarks.wire docs/guides/compression.md`` writes the tables of that page, between its
markers. ``python -m benchmarks wire`` prints the speeds alone.
"""

import functools
import platform
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import row
from fedmcmc import compression, wire
from fedmcmc.compression import bound_bits

DIMENSIONS = (50, 784, 7850, 10**6)
BITS = (0, 1, 2, 4, 8, 16)
FRACTIONS = (0.01, 0.1)
NUMBERS = 4 * 10**6  # random numbers per row of the table
MAX_MESSAGES = 1000
SIZE = 10**6
COMPARED = 784  # dimension of the published compression factors
REPEATS = 15


def write_tables(path: Path) -> None:
    """Replace the tables of a page, each between ``<!-- name -->`` and ``<!-- end -->``."""
    text = path.read_text()
    for name, lines in tables().items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{path} has no table between <!-- {name} --> and <!-- end -->.")
        text = pattern.sub(lambda match, lines=lines: f"{match[1]}\n{lines}\n\n{match[2]}", text)
    path.write_text(text)


def tables() -> dict[str, str]:
    """Return the tables of the page by name."""
    bits, bounds = {}, {}
    for d in DIMENSIONS:
        for name, compressor in compressors().items():
            bits[name, d], *_ = measure(compressor, d)
        for p in BITS:
            bounds[p, d] = published_bounds(p, d)
            check_bound(bits[_quantizer(p), d], p, d)
    longer = sum(bits[_quantizer(p), d] > bound[0] for (p, d), bound in bounds.items())
    header = ("compressor", *(f"d = {d:,}" for d in DIMENSIONS))
    rows = [
        (f"`{name}`", *(f"{bits[name, d] / d:.3g}" for d in DIMENSIONS)) for name in compressors()
    ]
    factors = [
        (
            f"`{_quantizer(p)}`",
            *(f"{32 * COMPARED / x:.2f}" for x in bounds[p, COMPARED]),
            f"{32 * COMPARED / bits[_quantizer(p), COMPARED]:.2f}",
        )
        for p in (4, 8, 16)
    ]
    return {
        "bits": _markdown(header, rows),
        "bounds": _markdown(("compressor", "bound (ln)", "bound (log2)", "measured"), factors)
        + f"\n\nMessages are longer than the bound with ln in {longer} of {len(bounds)} cases.",
        "speeds": _markdown(
            ("compressor", "encode, MB/s", "decode, MB/s"),
            [
                (f"`{name}`", *(f"{4 / s:,.0f}" for s in seconds))
                for name, (_, *seconds) in speeds().items()
            ],
        )
        + f"\n\nMachine: one core, {platform.machine()}, NumPy {np.__version__}.",
        "counting": _markdown(
            ("compressor", "encode", "encode and count"),
            [
                (f"`{name}`", *(f"{1000 * s:.2f} ms" for s in pair))
                for name, pair in counting().items()
            ],
        ),
    }


def compressors() -> dict[str, compression.Compressor]:
    """Return the compressors whose messages are measured, by name."""
    quantizers = {_quantizer(p): compression.quantize(2**p) for p in BITS}
    return quantizers | {
        f"{fn.__name__}({fraction})": fn(fraction)
        for fn in (compression.sparsify, compression.top_k)
        for fraction in FRACTIONS
    }


def published_bounds(p: int, d: int) -> list[float]:
    """Return the bound on the bits of a message, with natural and with binary logarithms."""
    return [float(bound_bits(d, 2**p, base=base)) for base in ("natural", "log2")]


def check_bound(number: float, p: int, d: int) -> None:
    """Raise unless messages are shorter than the bound just where its sparse code applies."""
    if (number < published_bounds(p, d)[1]) != (4**p + d**0.5 <= d / 2):
        raise AssertionError(f"The statement of the page on bounds is wrong for d={d}, s={2**p}.")


def print_bits() -> None:
    """Print the bits of all messages with their standard errors, and the published bounds."""
    rows = []
    for d in DIMENSIONS:
        limits = {_quantizer(p): published_bounds(p, d) for p in BITS}
        for name, compressor in compressors().items():
            bounds = (f"{bound:,.1f}" for bound in limits.get(name, ()))
            cells = list(bounds) or ["", ""]
            rows.append((f"{d:,}", f"`{name}`", *cells, *_row(d, *measure(compressor, d))))
    header = ("d", "compressor", "bound (ln)", "bound (log2)", "bits", "sparse", "compression")
    print(_markdown(header, rows))


def _quantizer(p):
    return f"quantize({2**p})"


def _row(d, mean, error, sparse):
    return f"{mean:,.1f} ({error:,.1f})", f"{100 * sparse:.0f} %", f"{32 * d / mean:,.2f}"


def measure(compressor, d):
    """Return the mean bits, their standard error and the fraction of sparse codes."""
    num = max(4, min(MAX_MESSAGES, NUMBERS // d))
    keys = jax.random.split(jax.random.key(0), num)
    codes = jax.jit(jax.vmap(lambda key: _message(compressor, key, d)))(keys)
    bits = np.asarray(jax.jit(jax.vmap(compression.message_bits))(codes))
    codes = jax.device_get(codes)
    flags = []
    for i in range(num):
        data = wire.encode(jax.tree.map(lambda x, i=i: x[i], codes))
        if len(data) != -(-bits[i] // 8):
            raise AssertionError(
                f"{len(data)} bytes were encoded, but {bits[i]} bits were counted."
            )
        head = 4 if isinstance(codes, compression.Quantized) else 0  # the norm
        flags.append(data[head] >> 7)
    return bits.mean(), bits.std(ddof=1) / np.sqrt(num), np.mean(flags)


def _message(compressor, rng_key, d):
    key_vector, key_draws = jax.random.split(rng_key)
    v = jax.random.normal(key_vector, (d,))
    draws = compressor.prepare(key_draws, _like(d), None)
    return compressor.encode(draws, v, compressor.init(_like(d)), None)[0]


def _like(d):
    return jax.ShapeDtypeStruct((d,), jnp.float32)


def speeds():
    """Return each compressor's bits per number and its seconds to encode and to decode."""
    measured = {name: c for name, c in compressors().items() if not name.startswith("top_k")}
    measured["identity()"] = compression.identity()
    results = {}
    for name, compressor in measured.items():
        code = jax.device_get(_message(compressor, jax.random.key(1), SIZE))
        data = wire.encode(code)
        seconds = (
            _seconds(functools.partial(wire.encode, code)),
            _seconds(functools.partial(wire.decode, data, code)),
        )
        results[name] = 8 * len(data) / SIZE, *seconds
    return results


def counting(num_clients=50, d=7850):
    """Return each quantizer's seconds to encode, and to encode and count bits."""
    results = {}
    keys = jax.random.split(jax.random.key(2), num_clients)
    vectors = jax.random.normal(jax.random.key(3), (num_clients, d))
    for num_levels in (16, 256):
        compressor = compression.quantize(num_levels)
        prepare = functools.partial(compressor.prepare, like=_like(d), client=None)
        draws = jax.jit(jax.vmap(prepare))(keys)

        def encode(draws_, v, encode_=compressor.encode):
            return encode_(draws_, v, (), None)[0]

        def count(draws_, v, encode_=encode):
            code = encode_(draws_, v)
            return code, compression.message_bits(code)

        results[f"quantize({num_levels})"] = [
            _seconds(functools.partial(_blocked, jax.jit(jax.vmap(fn)), draws, vectors))
            for fn in (encode, count)
        ]
    return results


def _blocked(fn, *args):
    jax.block_until_ready(fn(*args))


def _seconds(fn):
    fn()
    times = []
    for _ in range(REPEATS):
        start_time = time.process_time()
        fn()
        times.append(time.process_time() - start_time)
    return min(times)


def _markdown(header, rows):
    num_columns = len(header)
    header, *lines = (f"| {' | '.join(line)} |" for line in (header, *rows))
    return "\n".join([header, "|" + "---|" * num_columns, *lines])


def bench() -> None:
    for name, (bits, *seconds) in speeds().items():
        for way, s in zip(("encode", "decode"), seconds, strict=True):
            print(
                f"{f'wire, 1e6 of {name}, {way}':<44}{4 / s:>12,.0f} MB/s"
                f"{s:>20.3f}   goal: under 0.5 s ({bits:.2f} bits per number)"
            )
    for name, (encode, encode_and_count) in counting().items():
        ratio, rate = encode_and_count / encode, 1 / encode_and_count
        print(row(f"{name} and bits, 50 x 7850", rate, "calls/s", ratio, "over encode"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_tables(Path(sys.argv[1]))
    else:
        print_bits()
