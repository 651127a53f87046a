"""What an output of a traced function depends on, read from its jaxpr.

Every value of a trace gets a number that names the computation behind it (hash consing) and a set
of flags that names the inputs it reaches. Two traces that share one `Tracer` give a value the same
number exactly if they compute it in the same way, so a value whose number changes with the number
of rows depends on that number.
"""

import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INLINED = {
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


class Node(NamedTuple):
    """One value: the number of its computation, and the flags of the inputs it depends on."""

    number: int
    flags: frozenset


class Tracer:
    """Numbers computations, the same number for the same computation in every trace."""

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
        """Return what `node` is once changes of dtype are taken off."""
        while node.number in self._casts:
            node = self._casts[node.number]
        return node

    def outputs(self, closed: Any, inputs: Sequence[tuple[Hashable, frozenset]]) -> list[Node]:
        """Return the `Node` of each output of a closed jaxpr; `inputs` are labels and flags."""
        return self._walk(closed.jaxpr, closed.consts, self.inputs(inputs))

    def _node(self, key: Hashable, flags: frozenset) -> Node:
        return Node(self._numbers.setdefault(key, len(self._numbers)), flags)

    def _walk(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Node]) -> list[Node]:
        nodes: dict[Any, Node] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            nodes[var] = self._node(("constant", _fingerprint(value)), frozenset())

        def read(atom: Any) -> Node:
            if hasattr(atom, "val"):  # a literal
                return self._node(("constant", _fingerprint(atom.val)), frozenset())
            return nodes[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(atom) for atom in eqn.invars])
            nodes.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: list[Node]) -> list[Node]:
        if eqn.primitive.name in INLINED:
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if len(getattr(inner, "invars", ())) == len(inputs) and hasattr(inner, "eqns"):
                    return self._walk(inner, getattr(value, "consts", ()), inputs)
        flags = frozenset().union(*(node.flags for node in inputs))
        how = (eqn.primitive.name, _describe(eqn.params), tuple(node.number for node in inputs))
        results = [self._node((*how, i, str(var.aval)), flags) for i, var in enumerate(eqn.outvars)]
        if eqn.primitive.name == "convert_element_type":
            self._casts[results[0].number] = inputs[0]
        return results


def _describe(params: dict[str, Any]) -> str:
    # Functions and their wrappers print where they live, which differs from trace to trace.
    plain_params = {name: value for name, value in params.items() if not callable(value)}
    return _ADDRESS.sub("", str(sorted((name, str(value)) for name, value in plain_params.items())))


def _fingerprint(value: Any) -> Hashable:
    if isinstance(value, jax.core.Tracer):
        return id(value)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()
