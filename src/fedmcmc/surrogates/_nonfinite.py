"""Rows whose log likelihood or its derivatives are finite at no position of a search."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.data import FederatedData, row_values
from fedmcmc.gradients import row_size
from fedmcmc.kernels import LOG_ZERO_THRESHOLD, Points
from fedmcmc.pytrees import trees
from fedmcmc.surrogates._ascents import NEWTON_DIMENSIONS, Expansion, Objective
from fedmcmc.types import ArrayTree, Client, Local, Posterior, as_functions, compiled

MAX_NUMBERS = 2**22
"""Largest number of array elements (rows, positions, parameters) differentiated at a time."""
MAX_POSITIONS = 32
"""Largest number of positions at which rows are evaluated."""
MAX_COLUMNS = 6
"""Largest number of columns in a message."""
MAX_BAD_SHARE = 0.5
"""Largest share of bad rows; above it the model or the scale of the columns is the problem."""
DISTANCES = (0.0, 0.01, 0.1, 0.3, 0.5, 1.0, 1.0, 2.0)
"""Standard deviations of the normal steps from a position to those around it."""
LATENT_SD = 0.5
"""Standard deviation of local latents at which rows are evaluated."""

SITE_LOGS = "At real sites, the log of a site names a row that is not finite at any start."
"""Hint in messages of a server, which sees no rows."""
FINITE, NO_DERIVATIVE, NO_VALUE = range(3)
"""Status of a row: usable, without a finite derivative, without a finite value."""


class BadRow(NamedTuple):
    """Row that no sampler can use.

    Attributes
    ----------
    row
        Number of the row.
    columns
        Values that cause the problem, by column; all values if no single column causes it.
    problem
        Name of the function that is not finite.
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
        to_text = partial(np.array2string, precision=6, threshold=8, separator=", ")
        values = [f"{name} = {to_text(value)}" for name, value in self.columns.items()]
        shown = ", ".join(values[:MAX_COLUMNS]) + ", ..." * (len(values) > MAX_COLUMNS)
        if self.share > MAX_BAD_SHARE:
            return (
                f"The log density or its derivatives are finite at none of {num_positions} starts: "
                f"scale the covariates, or pass position=, a position where they are finite. The "
                f"{self.problem} is not finite for {self.num_bad} rows at any start, for example "
                f"row {self.row} of {client} ({shown})."
            )
        count = f" {self.num_bad} rows have this problem." if self.num_bad > 1 else ""
        return (
            f"The {self.problem} of row {self.row} of {client} ({shown}) is not finite at any of "
            f"{num_positions} starts.{count} Drop such rows, replace the value (for example zero "
            f"by a small positive number), or write the density so that value and gradient are "
            f"finite: use jnp.where around the argument of the infinite function as well as around "
            f"its result."
        )


def explain_nonfinite(posterior: Posterior, consortium: object, positions: ArrayTree) -> None:
    """Raise if a row's log likelihood or its derivatives are finite at none of the positions.

    The `ValueError` names client, row and columns. If the rows stay at the clients, this function
    returns, and the log of each site names such rows (`nonfinite_answer`). The model may have
    latents of groups, also integrated out; `positions` has leaves ``[num, *event]``.
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
    """Return a position and random positions around it, leaves ``[num, *event]``."""
    flat, keys = trees.ravel(position), jax.random.split(jax.random.key(0), len(DISTANCES))
    steps = jax.vmap(lambda key: jax.random.normal(key, flat.shape, flat.dtype))(keys)
    points = flat + jnp.asarray(DISTANCES, flat.dtype)[:, None] * steps
    return jax.vmap(lambda x: trees.cast_like(trees.unravel(x, position), position))(points)


def explain_failures(
    evaluate: Objective, consortium: object, positions: ArrayTree
) -> Callable[[np.ndarray], list[Expansion]]:
    """Return an objective that raises a `ValueError` if no start has finite derivatives.

    The message names a row that is finite at none of the `positions`, if there is one.
    """
    calls = itertools.count()

    def evaluate_and_check(points: np.ndarray) -> list[Expansion]:
        expansions = evaluate(points)
        if next(calls) == 0 and not evaluate.any_finite:
            explain_nonfinite(evaluate.posterior, consortium, positions)
            if not isinstance(getattr(consortium, "data", None), FederatedData):
                raise ValueError(
                    f"The log density or its derivatives are finite at none of {len(points)} "
                    f"starts. {SITE_LOGS}"
                )
        return expansions

    return evaluate_and_check


def nonfinite_answer(
    posterior: Posterior, content: object, answer: ArrayTree, client: Client
) -> str:
    """Return a message for a site's log if its answer, before masks, is finite at no point.

    Otherwise the message is empty. `posterior` and `content` belong to the question.
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
    """Return the row of lowest number that is finite at none of the positions, ``None`` without."""
    posterior = as_functions(posterior)
    positions = jax.tree.map(lambda leaf: jnp.asarray(leaf)[: _num_used(positions)], positions)
    rows = jax.tree.map(jnp.asarray, rows)
    status = np.asarray(_status_of_rows(posterior, positions, rows))
    bad, good = np.flatnonzero(status), np.flatnonzero(status == FINITE)
    if len(bad) == 0:
        return None
    number = int(bad[0])
    columns = _named_columns(jax.tree.map(lambda leaf: leaf[number], rows))
    if len(good):
        # A column causes the problem if a good row's value in its place makes the row finite.
        leaves, treedef = jax.tree.flatten(rows)
        pairs = [(leaf[number], leaf[int(good[0])]) for leaf in leaves]
        variants = [
            jnp.stack([good_value if i == j else value for j in range(len(pairs))])
            for i, (value, good_value) in enumerate(pairs)
        ]
        replaced = jax.tree.unflatten(treedef, variants)
        is_fixed = np.asarray(_status_of_rows(posterior, positions, replaced)) == FINITE
        columns = {
            name: value
            for (name, value), helps in zip(columns.items(), is_fixed, strict=True)
            if helps or not is_fixed.any()
        }
    problem = "log likelihood" if status[number] == NO_VALUE else "gradient of the log likelihood"
    return BadRow(number, columns, problem, len(bad), len(bad) / len(status))


def _num_used(positions: ArrayTree) -> int:
    return min(MAX_POSITIONS, jax.tree.leaves(positions)[0].shape[0])


@compiled
def _status_of_rows(posterior: Posterior, positions: ArrayTree, rows: ArrayTree) -> Array:
    """Return the status of each row over all positions, ``[num_rows]``."""
    local = posterior.local
    if local is None:  # or integrated out
        local = getattr(posterior.loglikelihood_fn, "local", None)
    num = jax.tree.leaves(positions)[0].shape[0]
    latents: ArrayTree = ()
    if local is not None:
        keys = jax.random.split(jax.random.key(0), num)
        latents = jax.vmap(partial(_draw_latent, local.like.tree))(keys)

    def status_of_row(row: ArrayTree) -> Array:
        single = jax.tree.map(lambda leaf: leaf[None], row)
        term = partial(_row_term, posterior, local, single)
        has_value, has_derivatives = jax.vmap(partial(_is_finite, term))(positions, latents)
        no_value = ~jnp.any(has_value)
        return jnp.where(
            no_value, NO_VALUE, jnp.where(jnp.any(has_derivatives), FINITE, NO_DERIVATIVE)
        )

    size = trees.num_elements(positions) + num
    return trees.map_in_batches(
        status_of_row, rows, max(1, MAX_NUMBERS // (size * max(row_size(rows), 1)))
    )


def _is_finite(
    term: Callable[[ArrayTree, ArrayTree], Array], position: ArrayTree, latent: ArrayTree
) -> tuple[Array, Array]:
    """Return true if a term is finite, and true if its derivatives are finite, too."""
    arguments = position, latent
    flat = trees.ravel(arguments)

    def fn(x: Array) -> Array:
        return term(*trees.cast_like(trees.unravel(x, arguments), arguments))

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


def _draw_latent(like: ArrayTree, rng_key: Array) -> ArrayTree:
    flat = trees.ravel(trees.zeros_like(like))
    return trees.unravel(LATENT_SD * jax.random.normal(rng_key, flat.shape, flat.dtype), like)


def _named_columns(row: ArrayTree) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "row": np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(row)
    }
