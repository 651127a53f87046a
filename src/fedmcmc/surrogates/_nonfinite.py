"""Rows whose log likelihood, or its derivatives, are not finite at any place that was tried."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, Client, Local, Posterior, as_functions, compiled
from fedmcmc.data import FederatedData, row_values
from fedmcmc.gradients import row_size
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Points
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._ascents import NEWTON_DIMENSIONS, Objective

BUDGET = 2**22
"""Numbers of rows, positions and parameters that are differentiated at a time."""
MAX_POSITIONS = 32
MAX_COLUMNS = 6
"""Columns that a message shows."""
MAX_ROWS = 0.5
"""Share of rows beyond which the model is at fault, or the scale of its columns, and no row."""
DISTANCES = (0.0, 0.01, 0.1, 0.3, 0.5, 1.0, 1.0, 2.0)
"""Distances of other positions from one, in units of a parameter."""
SPREAD = 0.5
"""Standard deviation of local latents at which rows are evaluated."""

SITE_LOGS = "At real sites, the log of a site names a row that is not finite at any start."
"""Hint in messages of a server, which sees no rows."""
FINITE, NO_DERIVATIVE, NO_VALUE = range(3)
"""Kinds of rows: usable, without a finite derivative, without a finite value."""

Evaluate = Callable[[np.ndarray], list[Any]]


class BadRow(NamedTuple):
    """Row that no sampler can use.

    Attributes
    ----------
    row
        Number of the row.
    columns
        Values that are at fault, by column; all of the row's if no single column is.
    problem
        The function that is not finite.
    num_bad, share
        Number of such rows, and their share of all rows.
    """

    row: int
    columns: dict[str, Any]
    problem: str
    num_bad: int
    share: float

    def describe(self, client: str, num_positions: int) -> str:
        """Return an error message for a row of `client`."""
        values = [f"{name} = {_as_text(value)}" for name, value in self.columns.items()]
        shown = ", ".join(values[:MAX_COLUMNS]) + ", ..." * (len(values) > MAX_COLUMNS)
        if self.share > MAX_ROWS:
            return (
                f"The log density or its derivatives are finite at none of {num_positions} starts: "
                f"scale the covariates, or pass position=, a place where they are. The "
                f"{self.problem} is not finite for {self.num_bad} rows at any start; the first is "
                f"row {self.row} of {client} ({shown})."
            )
        others = f" {self.num_bad} rows are like this." if self.num_bad > 1 else ""
        return (
            f"The {self.problem} of row {self.row} of {client} ({shown}) is not finite at any of "
            f"{num_positions} starts.{others} Drop such rows, replace the value (a zero by a small "
            f"positive number, say), or write the density so that value and gradient are finite "
            f"there, with jnp.where around the argument of the function that is infinite as well "
            f"as around its result."
        )


def explain_nonfinite(posterior: Posterior, consortium: Any, positions: ArrayTree) -> None:
    """Raise a `ValueError` that names a row which is not finite at any of some positions.

    Return if there is no such row, since a row whose log likelihood and derivatives are finite at
    some position is no obstacle there. Return, too, if clients keep their rows: the log of each
    site names them (`nonfinite_answer`).

    Parameters
    ----------
    posterior
        The model; also with latents of groups, or with these integrated out.
    consortium
        All clients.
    positions
        Positions to try, leaves ``[num, *event]``; the first 32 are used.
    """
    data = getattr(consortium, "data", None)
    if not isinstance(data, FederatedData) or not trees.all_finite(positions):
        return
    rows, num = row_values(data.rows), _num_used(positions)
    bad = find_bad_row(posterior, rows, positions)
    if bad is not None:
        start = np.asarray(data.start)
        client = int(np.searchsorted(start, bad.row, side="right")) - 1
        bad = bad._replace(row=bad.row - int(start[client]))
        raise ValueError(bad.describe(f"client {data.labels[client]!r}", num))


def positions_around(position: ArrayTree) -> ArrayTree:
    """Return a position and others at random around it, leaves ``[num, *event]``."""
    flat, keys = trees.ravel(position), jax.random.split(jax.random.key(0), len(DISTANCES))
    steps = jax.vmap(lambda key: jax.random.normal(key, flat.shape, flat.dtype))(keys)
    points = flat + jnp.asarray(DISTANCES, flat.dtype)[:, None] * steps
    return jax.vmap(lambda x: trees.cast_like(trees.unravel(x, position), position))(points)


def explain_failures(evaluate: Objective, consortium: Any, positions: ArrayTree) -> Evaluate:
    """Return an objective that raises a `ValueError` if no start has finite derivatives.

    The message names a row if one is not finite at any of the `positions`.
    """
    calls = itertools.count()

    def evaluate_and_check(points: np.ndarray) -> list[Any]:
        found = evaluate(points)
        if next(calls) == 0 and not evaluate.any_finite:
            explain_nonfinite(evaluate.posterior, consortium, positions)
            if not isinstance(getattr(consortium, "data", None), FederatedData):
                raise ValueError(
                    f"The log density or its derivatives are finite at none of {len(points)} "
                    f"starts. {SITE_LOGS}"
                )
        return found

    return evaluate_and_check


def nonfinite_answer(posterior: Posterior, content: Any, answer: ArrayTree, client: Client) -> str:
    """Return what a site's log should have of an answer that is finite at no point, else nothing.

    Parameters
    ----------
    posterior, content
        Model of the question that was asked, and what was asked about.
    answer
        The client's answer, before it is masked.
    client
        Its rows.
    """
    if not isinstance(content, Points):
        return ""
    value = answer.value
    finite = np.isfinite(np.asarray(value.value)) & (np.asarray(value.value) > LOG_ZERO_THRESHOLD)
    for leaf in jax.tree.leaves((value.gradient, getattr(value, "curvature", ()))):
        finite &= np.isfinite(np.asarray(leaf)).reshape(len(finite), -1).all(axis=1)
    if finite.any():
        return ""
    rows = jax.tree.map(lambda leaf: leaf[: int(client.size)], row_values(client.rows))
    bad = find_bad_row(posterior, rows, content.points)
    return "" if bad is None else bad.describe("this site", len(finite))


def find_bad_row(posterior: Posterior, rows: ArrayTree, positions: ArrayTree) -> BadRow | None:
    """Return the first row that is not finite at any of some positions, ``None`` without one."""
    posterior = as_functions(posterior)
    some = jax.tree.map(lambda leaf: jnp.asarray(leaf)[: _num_used(positions)], positions)
    rows = jax.tree.map(jnp.asarray, rows)
    flags = np.asarray(_flags(posterior, some, rows))
    bad, good = np.flatnonzero(flags), np.flatnonzero(flags == FINITE)
    if len(bad) == 0:
        return None
    first = int(bad[0])
    columns = _named_columns(jax.tree.map(lambda leaf: leaf[first], rows))
    if len(good):
        # A column is at fault if the row becomes finite with another row's value in its place.
        treedef: Any = jax.tree.structure(rows)
        row, other = ([leaf[i] for leaf in jax.tree.leaves(rows)] for i in (first, int(good[0])))
        variants = [
            jnp.stack([other[i] if i == j else row[i] for j in range(len(row))])
            for i in range(len(row))
        ]
        fixed = np.asarray(_flags(posterior, some, jax.tree.unflatten(treedef, variants))) == FINITE
        columns = {
            name: value
            for (name, value), helps in zip(columns.items(), fixed, strict=True)
            if helps or not fixed.any()
        }
    problem = "log likelihood" if flags[first] == NO_VALUE else "gradient of the log likelihood"
    return BadRow(first, columns, problem, len(bad), len(bad) / len(flags))


def _num_used(positions: ArrayTree) -> int:
    return min(MAX_POSITIONS, jax.tree.leaves(positions)[0].shape[0])


@compiled
def _flags(posterior: Posterior, positions: ArrayTree, rows: ArrayTree) -> Array:
    """Return for each row whether value, or derivatives, are finite nowhere, ``[num_rows]``."""
    local = _local_of(posterior)
    num = jax.tree.leaves(positions)[0].shape[0]
    latents: ArrayTree = ()
    if local is not None:
        keys = jax.random.split(jax.random.key(0), num)
        latents = jax.vmap(partial(_latent, local.like.tree))(keys)

    def of_row(row: ArrayTree) -> Array:
        alone = jax.tree.map(lambda leaf: leaf[None], row)

        def at(position: ArrayTree, latent: ArrayTree) -> tuple[Array, Array]:
            return _is_finite(partial(_row_term, posterior, local, alone), (position, latent))

        has_value, has_derivatives = jax.vmap(at)(positions, latents)
        no_value = ~jnp.any(has_value)
        return jnp.where(
            no_value, NO_VALUE, jnp.where(jnp.any(has_derivatives), FINITE, NO_DERIVATIVE)
        )

    size = trees.num_elements(positions) + num
    return trees.map_in_lots(of_row, rows, max(1, BUDGET // (size * max(row_size(rows), 1))))


def _is_finite(
    term: Callable[[ArrayTree, ArrayTree], Array], place: tuple[ArrayTree, ArrayTree]
) -> tuple[Array, Array]:
    """Return whether a term is finite at a place, and whether its derivatives are, too."""
    flat = trees.ravel(place)

    def fn(x: Array) -> Array:
        return term(*trees.cast_like(trees.unravel(x, place), place))

    value, gradient = jax.value_and_grad(fn)(flat)
    derivatives = jnp.all(jnp.isfinite(gradient))
    if flat.shape[0] <= NEWTON_DIMENSIONS:
        product = jax.jvp(jax.grad(fn), (flat,), (jnp.ones_like(flat),))[1]
        derivatives &= jnp.all(jnp.isfinite(product))
    finite = jnp.isfinite(value)
    return finite, finite & derivatives


def _row_term(
    posterior: Posterior,
    local: Local | None,
    row: ArrayTree,
    position: ArrayTree,
    latent: ArrayTree,
) -> Array:
    if local is None:
        term: Array = posterior.loglikelihood_fn(position, row)[0]
        return term
    latents = jax.tree.map(lambda leaf: leaf[None], latent)
    term = local.loglikelihood_fn(position, latents, row)[0]
    return term


def _local_of(posterior: Posterior) -> Local | None:
    """Return the latents of groups, also where they are integrated out."""
    if posterior.local is not None:
        return posterior.local
    local: Local | None = getattr(posterior.loglikelihood_fn, "local", None)
    return local


def _latent(like: ArrayTree, rng_key: Array) -> ArrayTree:
    flat = trees.ravel(trees.zeros_like(like))
    return trees.unravel(SPREAD * jax.random.normal(rng_key, flat.shape, flat.dtype), like)


def _named_columns(row: ArrayTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "row": np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(row)
    }


def _as_text(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=6, threshold=8, separator=", ")
