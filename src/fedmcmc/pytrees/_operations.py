"""Counts of the operations of a traced function, without compilation."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr | Jaxpr]:
    """Return the jaxprs inside an equation: bodies of loops, branches, calls."""
    jaxprs = []
    for value in eqn.params.values():
        values = value if isinstance(value, (tuple, list)) else (value,)
        jaxprs += [item for item in values if isinstance(item, ClosedJaxpr | Jaxpr)]
    return jaxprs


def num_operations(jaxpr: ClosedJaxpr | Jaxpr) -> int:
    """Return the number of scalar operations, roughly.

    A product of matrices counts its multiplications and additions, another operation the elements
    of its results. A condition counts its largest branch. A loop of unknown length counts once.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> num_operations(jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(jnp.ones((10, 10))))
    2100
    """
    opened = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return sum(map(_of_equation, opened.eqns))


def _of_equation(eqn: JaxprEqn) -> int:
    inner = [num_operations(item) for item in inner_jaxprs(eqn)]
    if inner and eqn.primitive.name == "cond":
        return max(inner)
    if inner:
        return int(eqn.params.get("length", 1)) * sum(inner)
    elements = sum(map(_num_elements, eqn.outvars))
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        shape: Any = eqn.invars[0].aval
        return 2 * elements * math.prod(shape.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1]
        shape = kernel.aval
        return 2 * elements * _num_elements(kernel) // max(shape.shape[numbers.rhs_spec[0]], 1)
    return elements


def _num_elements(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))
