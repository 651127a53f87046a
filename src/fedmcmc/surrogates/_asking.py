"""Answers of each client, from rows in this program or over a consortium, and their Gaussians."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._types import ArrayTree, Federation, as_functions, compiled
from fedmcmc.data import FederatedData, labels_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_gaussian
from fedmcmc.kernels import PerClientQuestion, Question
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.runs import Consortium, Sum, as_consortium
from fedmcmc.surrogates._maxima import client_cost, over_clients

Natural = tuple[Array, Array]
"""Natural parameters: ``[d]``, and ``[d (d + 1) / 2]``, a precision's upper triangle row by row, or
``[d]``, its diagonal."""


def federation_of(data: Any) -> Federation:
    """Return what is known of clients before they are asked.

    Raises
    ------
    TypeError
        If `data` is neither a `FederatedData` nor a consortium.
    """
    return as_consortium(data).federation


def rows_of(data: Any, name: str, instead: str) -> FederatedData:
    """Return data whose rows a function needs in this program.

    Raises
    ------
    TypeError
        If the clients keep their rows.
    """
    if isinstance(data, FederatedData):
        return data
    as_consortium(data)
    raise TypeError(
        f"{name} needs the rows in this program, which clients of a {type(data).__name__} keep: "
        f"{instead}."
    )


def with_labels(surrogates: Gaussian, data: Any) -> Gaussian:
    """Return one Gaussian per client with the clients' labels; see `Gaussian.labels`."""
    object.__setattr__(surrogates, "labels", labels_of(data))
    return surrogates


class PooledRows:
    """The clients of a `FederatedData`, whose sums are those over all rows at once.

    For questions whose answers are sums over rows: the same up to rounding as from client to
    client, at once.
    """

    def __init__(self, data: FederatedData) -> None:
        self.data, self.federation = data, data.federation

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all clients' answers."""
        question = as_functions(question)
        question.check_content(content, self.federation)
        value = _of_all_rows(question, self.data, content)
        num, one = self.federation.num_clients, jnp.zeros(())
        return Sum(
            value, 1, num * trees.num_bits((value, one)), float(num * trees.num_bits(content))
        )

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a kernel's clients are apart, and these rows are one."""
        raise NotImplementedError("All rows at once answer questions, and run no kernel.")


def summing(data: Any) -> Consortium:
    """Return who answers questions whose answers are sums over rows."""
    return PooledRows(data) if isinstance(data, FederatedData) else as_consortium(data)


@compiled
def _of_all_rows(question: Question, data: FederatedData, content: ArrayTree) -> ArrayTree:
    return question.answer(content, data.pooled(groups=True).client(0))


def answers(
    question: PerClientQuestion, data: Any, content: ArrayTree, *, rows_cost: int = 0
) -> ArrayTree:
    """Return every client's answer, leaves ``[num_clients, ...]``.

    Rows in this program answer in one compiled call, for which clients are taken as many at a time
    as second derivatives and `rows_cost` numbers per row allow.
    """
    question = as_functions(question)
    if isinstance(data, FederatedData):
        question.check_content(content, data.federation)
        size = trees.num_elements(content)
        cost = client_cost(data, size) + data.max_size * rows_cost
        return _computed(question, data, content, cost=cost)
    return as_consortium(data).ask(question, content).value.value


@compiled(static_argnames=("cost",))
def _computed(
    question: PerClientQuestion, data: FederatedData, content: ArrayTree, *, cost: int
) -> Any:
    @in_single_precision
    def one(index: Array) -> ArrayTree:
        return question.own(content, data.client(index))

    return over_clients(one, data.num_clients, cost)


def natural(gradient: Array, precision: Array, flat: Array, unravel: Any) -> Natural:
    """Return natural parameters of the Gaussian with this gradient and precision at `flat`."""
    fitted = as_gaussian(gradient, precision, flat, unravel)
    return trees.ravel(fitted.precision_mean), upper(precision)


def upper(matrix: Array) -> Array:
    """Return the upper triangle of ``[d, d]``, row by row; a diagonal ``[d]`` as it is."""
    return matrix[jnp.triu_indices(matrix.shape[0])] if matrix.ndim == 2 else matrix


def symmetric(triangles: Any, size: int) -> Any:
    """Return the symmetric matrices ``[..., d, d]`` of upper triangles."""
    rows, columns = np.triu_indices(size)
    places = np.zeros((size, size), np.int32)
    places[rows, columns] = places[columns, rows] = np.arange(len(rows))
    return triangles[..., places]


def natural_like(size: int, structure: str, dtype: Any) -> Any:
    """Return the shapes of `natural`."""
    entries = size * (size + 1) // 2 if structure == "dense" else size
    return tuple(jax.ShapeDtypeStruct((n,), dtype) for n in (size, entries))


@partial(jax.jit, static_argnames="structure")
def gaussians(of_clients: Natural, like: ArrayTree, structure: str) -> Gaussian:
    """Return one Gaussian per client from natural parameters, over positions as `like`."""
    eta, precision = of_clients
    flat, unravel = ravel_pytree(like)
    shaped = jax.vmap(unravel)
    if structure == "dense":
        return Gaussian(shaped(eta), symmetric(precision, flat.shape[0]), "dense")
    return Gaussian(shaped(eta), shaped(precision), "diagonal")
