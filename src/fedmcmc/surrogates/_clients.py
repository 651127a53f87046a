"""Answers of clients, whose rows are in this program or at a consortium, and their Gaussians."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc.data import CHUNK_ROWS, FederatedData, labels_of
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import BLOCK, as_gaussian, blockwise, row_size
from fedmcmc.kernels import PerClientQuestion, Question
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.runs import Consortium, Sum, as_consortium
from fedmcmc.types import ArrayTree, as_functions, compiled

NaturalParameters = tuple[Array, Array]
"""Precision times mean ``[d]``, and a precision: its upper triangle row by row or its diagonal."""
MAX_NUMBERS = 2**26
"""Largest number of array elements of all clients that are computed at a time."""


def require_rows(data: object, name: str, alternative: str) -> FederatedData:
    """Return `data`; raise `TypeError` if its rows are not in this program."""
    if isinstance(data, FederatedData):
        return data
    as_consortium(data)
    raise TypeError(
        f"{name} needs the rows in this program, but the rows of a {type(data).__name__} stay at "
        f"its clients: use {alternative}."
    )


def with_labels(surrogates: Gaussian, data: object) -> Gaussian:
    """Return one Gaussian per client with the clients' labels; see `Gaussian.labels`."""
    object.__setattr__(surrogates, "labels", labels_of(data))
    return surrogates


class PooledRows:
    """Consortium that computes sums over the rows of a `FederatedData` without a loop over clients.

    The sums are those of a simulated consortium up to rounding.
    """

    def __init__(self, data: FederatedData) -> None:
        self.data, self.federation = data, data.federation

    def ask(self, question: Question, content: ArrayTree) -> Sum:
        """Return the sum of all clients' answers."""
        question = as_functions(question)
        question.check_content(content, self.federation)
        value = _sum_over_rows(question, self.data, content)
        num, count = self.federation.num_clients, jnp.zeros(())
        return Sum(
            value, 1, num * trees.num_bits((value, count)), float(num * trees.num_bits(content))
        )

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `NotImplementedError`, because kernels need separate clients."""
        raise NotImplementedError("Pooled rows answer questions but run no kernel.")


def as_summing_consortium(data: object) -> Consortium:
    """Return a consortium for questions whose answers are sums over rows."""
    return PooledRows(data) if isinstance(data, FederatedData) else as_consortium(data)


@compiled
def _sum_over_rows(question: Question, data: FederatedData, content: ArrayTree) -> ArrayTree:
    return question.answer(content, data.pooled(groups=True).client(0))


def answer_per_client(
    question: PerClientQuestion, data: object, content: ArrayTree, *, numbers_per_row: int = 0
) -> ArrayTree:
    """Return every client's answer, leaves ``[num_clients, ...]``.

    Rows in this program answer in one compiled call, for several clients at a time if the memory
    for second derivatives and for `numbers_per_row` further numbers per row allows it.
    """
    question = as_functions(question)
    if isinstance(data, FederatedData):
        question.check_content(content, data.federation)
        numbers = numbers_per_client(data, trees.num_elements(content))
        numbers += data.max_size * numbers_per_row
        return _answer_from_rows(question, data, content, numbers=numbers)
    return as_consortium(data).ask(question, content).value.value


@compiled(static_argnames=("numbers",))
def _answer_from_rows(
    question: PerClientQuestion, data: FederatedData, content: ArrayTree, *, numbers: int
) -> ArrayTree:
    @in_single_precision
    def answer(index: Array) -> ArrayTree:
        return question.own(content, data.client(index))

    return map_clients(answer, data.num_clients, numbers)


def map_clients(fn: Callable[[Array], ArrayTree], num_clients: int, numbers: int) -> ArrayTree:
    """Return ``fn(index)`` for each client, stacked; a client takes about `numbers` numbers."""
    return blockwise(fn, num_clients, max(1, MAX_NUMBERS // max(numbers, 1)))


def numbers_per_client(data: FederatedData, size: int) -> int:
    """Return the approximate memory for second derivatives of a client, in numbers."""
    num_rows, num_directions = min(data.max_size, CHUNK_ROWS), min(size, BLOCK)
    return num_rows * (row_size(data.rows) + num_directions) + size * num_directions


def natural_parameters_at(
    gradient: Array, precision: Array, flat: Array, unravel: Callable[[Array], ArrayTree]
) -> NaturalParameters:
    """Return natural parameters of the Gaussian with this gradient and precision at `flat`."""
    fitted = as_gaussian(gradient, precision, flat, unravel)
    return trees.ravel(fitted.precision_mean), upper(precision)


def upper(matrix: Array) -> Array:
    """Return the upper triangle of ``[d, d]``, row by row; a diagonal ``[d]`` unchanged."""
    return matrix[jnp.triu_indices(matrix.shape[0])] if matrix.ndim == 2 else matrix


def symmetric(triangles: Any, size: int) -> Any:
    """Return symmetric matrices ``[..., d, d]`` from upper triangles."""
    rows, columns = np.triu_indices(size)
    positions = np.zeros((size, size), np.int32)
    positions[rows, columns] = positions[columns, rows] = np.arange(len(rows))
    return triangles[..., positions]


def natural_parameters_like(size: int, structure: str, dtype: object) -> Any:
    """Return the shapes of `NaturalParameters`."""
    entries = size * (size + 1) // 2 if structure == "dense" else size
    return tuple(jax.ShapeDtypeStruct((n,), dtype) for n in (size, entries))


@partial(jax.jit, static_argnames="structure")
def as_gaussians(parameters: NaturalParameters, like: ArrayTree, structure: str) -> Gaussian:
    """Return one Gaussian per client, over positions shaped as `like`."""
    eta, precision = parameters
    flat, unravel = ravel_pytree(like)
    unravel_each = jax.vmap(unravel)
    if structure == "dense":
        return Gaussian(unravel_each(eta), symmetric(precision, flat.shape[0]), "dense")
    return Gaussian(unravel_each(eta), unravel_each(precision), "diagonal")
