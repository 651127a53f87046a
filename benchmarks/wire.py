"""Bits of messages and the speed of writing them: ``python -m benchmarks.wire docs/guides/compression.md``.

``python -m benchmarks wire`` prints the speeds alone.
"""

import functools
import platform
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
NUMBERS = 4 * 10**6  # numbers drawn for one row of the table
MAX_MESSAGES = 1000
SIZE = 10**6
REPEATS = 15

TEXT = """# Bits of messages

Written by `python -m benchmarks.wire docs/guides/compression.md`; edits would be lost.

`RoundInfo.bits_up` counts the bits of every message exactly, inside jit, and `fedmcmc.wire` writes
strings of just that length. A vector that was quantised to `s` levels is sent as 32 bits of norm, a
flag, and the shorter of a *dense* code (each level `k` as `|k| + 1`, a sign where it is not zero)
and a *sparse* code (how many are not zero; their gaps, signs and `|k|`). Integers are in the omega
code of Elias. What random sparsification and top-k leave is sent as gaps and float32 numbers. The
layout is described in `fedmcmc.wire`.

## How many

Vectors of `d` standard normal numbers; bits are means over messages, with their standard errors.
"p bits" of the literature are `s = 2^p` levels. The bounds are those of Alistarh et al. (2017) on
the expected bits with the terms `o(1)` dropped (`compression.bound_bits`): *ln* with the natural
logarithm, as in the tables of Vono et al. (2022), *log2* with the binary one, as they were proved.
*Sparse* says how many messages took the sparse code, *compression* is `32 d` over the bits.

{table}

What it shows (checked when the page is written):

- Where the bound of the sparse code applies (`s^2 + sqrt(d) <= d / 2`), messages are shorter than
  it with log2; elsewhere they are longer than what is left of the dense code's without `o(1)`.
- With natural logarithms it is no bound: in {above} of {rows} rows messages are longer.
- For `d = 784` and 4, 8, 16 bits the compression is {natural} by the bound with natural
  logarithms, {log2} with binary ones, and {code} by the code.

Numbers that are not normal (differences to a memory, gradients with many zeros) cost differently;
`bits_up` has what they cost.

## How fast

One million standard normal numbers, compressed; processor time on one core, {machine}, and
megabytes of the float32 vector per second.

{speeds}

Counting inside jit for 50 clients with 7850 numbers each, processor time of a call:

{counting}

## Limits

- A message is counted in an int32: above 58 million levels (65 million float32 numbers of a
  `Sparse` code, 67 million of a `Dense` one) `compression.message_bits` raises a `ValueError`.
  Below, no sum overflows, whatever the levels up to `2^23`, which is as many as
  `compression.quantize` takes.
- Lengths of codewords are exact for every int32, also beyond the integers of float32, and for gaps
  as long as a message may be.
"""


def page() -> str:
    rows, facts = table()
    return TEXT.format(
        table=rows,
        speeds=_markdown(
            ("compressor", "bits per number", "encode", "decode"),
            [
                (f"`{name}`", f"{bits:.2f}", *(f"{s:.3f} s, {4 / s:,.0f} MB/s" for s in seconds))
                for name, (bits, *seconds) in speeds().items()
            ],
        ),
        counting=_markdown(
            ("compressor", "encode", "encode and count"),
            [
                (f"`{name}`", *(f"{1000 * s:.2f} ms" for s in pair))
                for name, pair in counting().items()
            ],
        ),
        machine=f"{platform.machine()}, NumPy {np.__version__}",
        **facts,
    )


def table() -> tuple[str, dict[str, object]]:
    rows, bits, bounds = [], {}, {}
    for d in DIMENSIONS:
        for p in BITS:
            at = d, 2**p
            bits[at], *rest = measure(compression.quantize(2**p), d)
            bounds[at] = [float(bound_bits(*at, base=base)) for base in ("natural", "log2")]
            name = f"`quantize({2**p})`"
            given = (f"{bound:,.1f}" for bound in bounds[at])
            rows.append((f"{d:,}", str(p), name, *given, *_row(d, bits[at], *rest)))
        for name in ("sparsify", "top_k"):
            for fraction in FRACTIONS:
                found = measure(getattr(compression, name)(fraction), d)
                rows.append((f"{d:,}", "", f"`{name}({fraction})`", "", "", *_row(d, *found)))
    for (d, s), number in bits.items():
        if (number < bounds[d, s][1]) != (s**2 + d**0.5 <= d / 2):
            raise AssertionError(f"What the page says of the bound is wrong for {d}, {s}.")
    header = ("d", "p", "compressor", "bound (ln)", "bound (log2)", "bits", "sparse", "compression")
    chosen = [(784, 2**p) for p in (4, 8, 16)]
    return _markdown(header, rows), {
        "above": sum(number > bounds[at][0] for at, number in bits.items()),
        "rows": len(bits),
        "natural": ", ".join(f"{32 * 784 / bounds[at][0]:.2f}" for at in chosen),
        "log2": ", ".join(f"{32 * 784 / bounds[at][1]:.2f}" for at in chosen),
        "code": ", ".join(f"{32 * 784 / bits[at]:.2f}" for at in chosen),
    }


def _row(d, mean, error, sparse):
    return f"{mean:,.1f} ({error:,.1f})", f"{100 * sparse:.0f} %", f"{32 * d / mean:,.2f}"


def measure(compressor, d):
    """Return the mean of the bits, its standard error and the share of sparse codes."""
    num = max(4, min(MAX_MESSAGES, NUMBERS // d))
    keys = jax.random.split(jax.random.key(0), num)
    codes = jax.jit(jax.vmap(lambda key: _message(compressor, key, d)))(keys)
    bits = np.asarray(jax.jit(jax.vmap(compression.message_bits))(codes))
    codes = jax.device_get(codes)
    flags = []
    for i in range(num):
        data = wire.encode(jax.tree.map(lambda x, i=i: x[i], codes))
        if len(data) != -(-bits[i] // 8):
            raise AssertionError(f"{len(data)} bytes were written for {bits[i]} bits counted.")
        head = 4 if isinstance(codes, compression.Quantized) else 0  # the norm
        flags.append(data[head] >> 7)
    return bits.mean(), bits.std(ddof=1) / np.sqrt(num), np.mean(flags)


def _message(compressor, rng_key, d):
    of_vector, of_draws = jax.random.split(rng_key)
    v = jax.random.normal(of_vector, (d,))
    draws = compressor.prepare(of_draws, _like(d), None)
    return compressor.encode(draws, v, compressor.init(_like(d)), None)[0]


def _like(d):
    return jax.ShapeDtypeStruct((d,), jnp.float32)


def speeds():
    """Return, for each compressor, bits per number and seconds to encode and to decode."""
    compressors = {f"quantize({2**p})": compression.quantize(2**p) for p in BITS}
    compressors |= {f"sparsify({q})": compression.sparsify(q) for q in FRACTIONS}
    compressors["identity()"] = compression.identity()
    found = {}
    for name, compressor in compressors.items():
        code = jax.device_get(_message(compressor, jax.random.key(1), SIZE))
        data = wire.encode(code)
        seconds = (
            _seconds(functools.partial(wire.encode, code)),
            _seconds(functools.partial(wire.decode, data, code)),
        )
        found[name] = 8 * len(data) / SIZE, *seconds
    return found


def counting(num_clients=50, d=7850):
    """Return, for each number of bits, seconds to quantise, and to quantise and count."""
    found = {}
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

        found[f"quantize({num_levels})"] = [
            _seconds(functools.partial(_blocked, jax.jit(jax.vmap(fn)), draws, vectors))
            for fn in (encode, count)
        ]
    return found


def _blocked(fn, *args):
    jax.block_until_ready(fn(*args))


def _seconds(fn):
    fn()
    times = []
    for _ in range(REPEATS):
        begun = time.process_time()
        fn()
        times.append(time.process_time() - begun)
    return min(times)


def _markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bench() -> None:
    for name, (bits, *seconds) in speeds().items():
        for way, s in zip(("encode", "decode"), seconds, strict=True):
            print(
                f"{f'wire, 1e6 of {name}, {way}':<44}{4 / s:>12,.0f} MB/s"
                f"{s:>20.3f}   goal: under 0.5 s ({bits:.2f} bits per number)"
            )
    for name, (alone, both) in counting().items():
        print(row(f"{name} and bits, 50 x 7850", 1 / both, "calls/s", both / alone, "over encode"))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
