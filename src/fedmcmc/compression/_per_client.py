"""Compressors that differ between clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.compression._memory import Memory
from fedmcmc.compression._numbers import check_num_clients
from fedmcmc.compression._types import Compressor, OneOf
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Client, PerClient, Sender, register_dataclass


def per_client(compressors: Sequence[Compressor], which: Sequence[int] | Array) -> Compressor:
    """Compress each client's messages with its own compressor.

    Each message starts with the index of its compressor. A client's draws, code and state are the
    same as with its compressor alone, so `omega` is ``[num_clients]``. The result is unbiased if
    all compressors are.

    Parameters
    ----------
    compressors
        At least one compressor; several clients may share one. If only a number differs, pass one
        number per client instead, as in ``quantize([2, 16])``.
    which
        Integers ``[num_clients]``: client ``i`` uses ``compressors[which[i]]``.

    Raises
    ------
    ValueError
        If there is no compressor, if one is a `memory` (write ``memory(per_client(...))``), or if
        `which` does not hold one index per client (`init` checks their number).

    Notes
    -----
    All clients run one program. If clients are computed together (`jax.vmap`), every compressor
    runs for every client; if they are computed one at a time, only the client's compressor runs.

    References
    ----------
    Vono et al. (2022), supplement S1: operators that differ between clients.

    Examples
    --------
    >>> import fedmcmc
    >>> compressor = per_client([fedmcmc.quantize(16), fedmcmc.sparsify(0.25)], which=[0, 0, 1])
    >>> compressor.omega(jnp.zeros(64)).tolist()
    [0.25, 0.25, 3.0]
    """
    compressors = tuple(compressors)
    if not compressors:
        raise ValueError("per_client needs at least one compressor, got none.")
    for compressor in compressors:
        expect(compressor, Compressor, "a compressor")
    if any(isinstance(compressor, Memory) for compressor in compressors):
        raise ValueError(
            "per_client holds a memory; write memory(per_client(...), rate), whose rate may be one "
            "per client: the server adds the memories of all clients in one way."
        )
    return PerClientCompressor(compressors, PerClient(_as_indices(which, len(compressors))))


def _as_indices(which: Sequence[int] | Array, num_compressors: int) -> Array:
    indices = jnp.asarray(which)
    if indices.ndim != 1 or indices.size == 0 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"which must be one integer per client, got shape {indices.shape} and dtype "
            f"{indices.dtype}."
        )
    if not isinstance(indices, jax.core.Tracer):
        values = np.asarray(indices)
        if values.min() < 0 or values.max() >= num_compressors:
            raise ValueError(
                f"which must hold indices of the {num_compressors} compressors, 0 to "
                f"{num_compressors - 1}, got {values.min()} to {values.max()}."
            )
    return indices.astype(jnp.int32)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PerClientCompressor(Compressor):
    """Compressors with the index of each client's compressor; see `per_client`."""

    compressors: tuple[Compressor, ...]
    which: PerClient  # of [num_clients] int32

    @property
    def unbiased(self) -> bool:
        return all(inner.unbiased for inner in self.compressors)

    def init(self, like: ArrayTree) -> ArrayTree:
        return tuple(inner.init(like) for inner in self.compressors)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        # All compressors share the key: a client uses the draws of one, the same as alone.
        keys = (jax.random.clone(rng_key) for _ in self.compressors)
        return tuple(
            inner.prepare(key, like, client)
            for inner, key in zip(self.compressors, keys, strict=True)
        )

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[OneOf, ArrayTree]:
        """Return the code of the client's compressor, with zeros for the others."""
        shapes = [
            jax.eval_shape(inner.encode, inner_draws, message, inner_state, client)[0]
            for inner, inner_draws, inner_state in zip(self.compressors, draws, state, strict=True)
        ]
        index = self.which.of(client)

        def encode_with(i: int) -> tuple[OneOf, ArrayTree]:
            code, new_state = self.compressors[i].encode(draws[i], message, state[i], client)
            codes = [trees.zeros_like(like) for like in shapes]
            codes[i] = code
            return OneOf(index, tuple(codes)), (*state[:i], new_state, *state[i + 1 :])

        branches = [partial(encode_with, i) for i in range(len(self.compressors))]
        code, state = jax.lax.switch(index, branches)
        return code, state

    def decode(self, code: OneOf, sender: Sender | Client) -> ArrayTree:
        def decode_with(i: int) -> ArrayTree:
            return self.compressors[i].decode(code.codes[i], sender)

        # Some compressors decode 16-bit messages to 32 bits, but all branches need one type.
        shapes = [jax.eval_shape(partial(decode_with, i)) for i in range(len(self.compressors))]
        like = jax.tree.map(
            lambda *leaves: jax.ShapeDtypeStruct(leaves[0].shape, jnp.result_type(*leaves)), *shapes
        )

        def decode_and_cast(i: int) -> ArrayTree:
            return trees.cast_like(decode_with(i), like)

        branches = [partial(decode_and_cast, i) for i in range(len(shapes))]
        values: ArrayTree = jax.lax.switch(code.place, branches)
        return values

    def omega(self, like: ArrayTree) -> Array:
        indices = self.which.values
        clients = jnp.arange(indices.shape[0])
        bounds = [jnp.broadcast_to(inner.omega(like), indices.shape) for inner in self.compressors]
        return jnp.stack(bounds)[indices, clients]

    def check(self, like: ArrayTree, num_clients: int) -> None:
        check_num_clients(self.which, "which", num_clients)
        for inner in self.compressors:
            inner.check(like, num_clients)
