"""A compressor for each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, Client, PerClient, Sender, register_dataclass
from fedmcmc.compression._memory import Memory
from fedmcmc.compression._types import Compressor, OneOf
from fedmcmc.pytrees import trees


def per_client(compressors: Sequence[Compressor], which: Sequence[int] | Array) -> Compressor:
    """Compress each client's messages by a compressor of its own.

    Parameters
    ----------
    compressors
        At least one; several clients may share one.
    which
        ``[num_clients]`` integers: client ``i`` uses ``compressors[which[i]]``.

    Raises
    ------
    ValueError
        Without any compressor, if one has a `memory` (that goes around all of them), if `which` is
        not one integer per client, each the place of a compressor; and from `init` where it has not
        as many entries as the data has clients.

    Notes
    -----
    A client draws, sends and keeps what it would with its compressor alone, so its errors obey that
    compressor's law: `omega` is ``[num_clients]``. Unbiased if all compressors are. For compressors
    of one kind whose numbers differ, give one of them numbers per client (``quantize([2, 16])``).

    A message begins with the place of its compressor, in as many bits as the largest place takes,
    so that whoever reads it needs nothing else.

    All clients run one program. Where they are computed together (`jax.vmap`) every compressor
    runs for every client, and all but one result is dropped; one at a time, only the client's own.

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
    return Assigned(compressors, PerClient(_places(which, len(compressors))))


def _places(which: Sequence[int] | Array, num: int) -> Array:
    places = jnp.asarray(which)
    if places.ndim != 1 or places.size == 0 or not jnp.issubdtype(places.dtype, jnp.integer):
        raise ValueError(
            f"which must be one integer per client, got shape {places.shape} and dtype "
            f"{places.dtype}."
        )
    if not isinstance(places, jax.core.Tracer):
        values = np.asarray(places)
        if values.min() < 0 or values.max() >= num:
            raise ValueError(
                f"which must hold places of the {num} compressors, 0 to {num - 1}, got "
                f"{values.min()} to {values.max()}."
            )
    return places.astype(jnp.int32)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Assigned(Compressor):
    """Compressors, and which client uses which; see `per_client`."""

    compressors: tuple[Compressor, ...]
    which: PerClient  # of [num_clients] int32

    @property
    def unbiased(self) -> bool:
        return all(inner.unbiased for inner in self.compressors)

    def init(self, like: ArrayTree) -> ArrayTree:
        return tuple(inner.init(like) for inner in self.compressors)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        # One key for all, as the client uses the numbers of one: those that it would draw alone.
        keys = (jax.random.clone(rng_key) for _ in self.compressors)
        return tuple(
            inner.prepare(key, like, client)
            for inner, key in zip(self.compressors, keys, strict=True)
        )

    def encode(
        self, draws: ArrayTree, message: ArrayTree, state: ArrayTree, client: Client
    ) -> tuple[OneOf, ArrayTree]:
        """Return the code of the client's compressor, and zeros for those of the others."""
        encoded = [
            jax.eval_shape(inner.encode, random, message, kept, client)[0]
            for inner, random, kept in zip(self.compressors, draws, state, strict=True)
        ]
        place = self.which.of(client)

        def by(i: int) -> tuple[OneOf, ArrayTree]:
            code, kept = self.compressors[i].encode(draws[i], message, state[i], client)
            codes = [trees.zeros_like(like) for like in encoded]
            codes[i] = code
            return OneOf(place, tuple(codes)), (*state[:i], kept, *state[i + 1 :])

        branches = [partial(by, i) for i in range(len(self.compressors))]
        code, state = jax.lax.switch(place, branches)
        return code, state

    def decode(self, code: OneOf, sender: Sender | Client) -> ArrayTree:
        def by(i: int) -> ArrayTree:
            return self.compressors[i].decode(code.codes[i], sender)

        # Of sixteen bits some compressors make thirty-two: all results must have one type.
        shapes = [jax.eval_shape(partial(by, i)) for i in range(len(self.compressors))]
        like = jax.tree.map(
            lambda *leaves: jax.ShapeDtypeStruct(leaves[0].shape, jnp.result_type(*leaves)), *shapes
        )

        def as_others(i: int) -> ArrayTree:
            return trees.cast_like(by(i), like)

        branches = [partial(as_others, i) for i in range(len(shapes))]
        values: ArrayTree = jax.lax.switch(code.place, branches)
        return values

    def omega(self, like: ArrayTree) -> Array:
        places = self.which.values
        clients = jnp.arange(places.shape[0])
        bounds = [jnp.broadcast_to(inner.omega(like), places.shape) for inner in self.compressors]
        return jnp.stack(bounds)[places, clients]

    def check(self, like: ArrayTree, num_clients: int) -> None:
        num = self.which.values.shape[0]
        if num != num_clients:
            raise ValueError(f"which has {num} entries, but the data has {num_clients} clients.")
        for inner in self.compressors:
            inner.check(like, num_clients)
