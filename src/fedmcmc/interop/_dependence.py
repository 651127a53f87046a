"""Dependence of a traced function's outputs on its inputs, read from its jaxpr.

Every value of a trace has a number that identifies its computation (hash consing) and a set of
flags, the union of the flags of the inputs that it depends on. Two traces by the same `Tracer` give
a value the same number exactly if they compute it in the same way. A value whose number changes
with the number of rows therefore depends on the number of rows.
"""

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from fedmcmc.types import ArrayTree

_CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
}
_ADDRESS = re.compile(r"0x[0-9a-f]+")
NO_FLAGS: frozenset = frozenset()


class Node(NamedTuple):
    """Value of a trace: the number of its computation and its flags."""

    number: int
    flags: frozenset


class Tracer:
    """Numbering of computations that is the same in every trace."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._casts: dict[int, Node] = {}

    def inputs(self, labels: Sequence[tuple[Hashable, frozenset]]) -> list[Node]:
        """Return the `Node` of each flat input."""
        return [self._node(("input", label), flags) for label, flags in labels]

    @property
    def computations(self) -> list[Hashable]:
        """All computations of the traces, in the order of their numbers."""
        return list(self._numbers)

    def uncast(self, node: Node) -> Node:
        """Return the value of which `node` is a change of dtype, or `node` itself."""
        while node.number in self._casts:
            node = self._casts[node.number]
        return node

    def outputs(
        self, closed: ClosedJaxpr, inputs: Sequence[tuple[Hashable, frozenset]]
    ) -> list[Node]:
        """Return the `Node` of each output of a closed jaxpr; `inputs` are labels and flags."""
        return self._walk(closed.jaxpr, closed.consts, self.inputs(inputs))

    def _node(self, key: Hashable, flags: frozenset) -> Node:
        return Node(self._numbers.setdefault(key, len(self._numbers)), flags)

    def _walk(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Node]) -> list[Node]:
        nodes: dict[Any, Node] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            nodes[var] = self._node(("constant", _fingerprint(value)), NO_FLAGS)

        def read(atom: object) -> Node:
            if hasattr(atom, "val"):  # a literal
                return self._node(("constant", _fingerprint(atom.val)), NO_FLAGS)
            return nodes[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            nodes.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, inputs: list[Node]) -> list[Node]:
        called = called_jaxpr(eqn)
        if called is not None:
            return self._walk(*called, inputs)
        flags = NO_FLAGS.union(*(node.flags for node in inputs))
        key = (eqn.primitive.name, _describe(eqn.params), tuple(node.number for node in inputs))
        results = [self._node((*key, i, str(var.aval)), flags) for i, var in enumerate(eqn.outvars)]
        if eqn.primitive.name == "convert_element_type":
            self._casts[results[0].number] = inputs[0]
        return results


def called_jaxpr(eqn: JaxprEqn) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr and the constants of a call, such as `jit`; ``None`` for other equations."""
    if eqn.primitive.name not in _CALLS:
        return None
    for value in eqn.params.values():
        jaxpr = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns") and len(jaxpr.invars) == len(eqn.invars):
            return jaxpr, getattr(value, "consts", ())
    return None


def output_flags(fn: Callable[..., Any], arguments: tuple[Any, ...], flags: ArrayTree) -> Any:
    """Return the flags that each output of `fn` depends on, in a tree like the outputs.

    `flags` are the flags of the inputs, sets in a tree prefix of `arguments`.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
    flat_flags = jax.tree.leaves(jax.tree.broadcast(flags, arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), propagate_flags(closed, flat_flags))


def propagate_flags(closed: ClosedJaxpr, flags: Sequence[frozenset]) -> list[frozenset]:
    """Return the flags of each output of a closed jaxpr, given the flags of each input."""
    return [node.flags for node in Tracer().outputs(closed, list(enumerate(flags)))]


def _describe(params: dict[str, Any]) -> str:
    # Functions print their address, which differs between traces.
    plain_params = {name: value for name, value in params.items() if not callable(value)}
    return _ADDRESS.sub("", str(sorted((name, str(value)) for name, value in plain_params.items())))


def _fingerprint(value: object) -> Hashable:
    if isinstance(value, jax.core.Tracer):
        return id(value)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()
