"""Limits of a site's owner: on rows, sites, minibatches, and numbers that leave the site."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import jax
from jax.tree_util import Partial

from fedmcmc.compression import Word
from fedmcmc.deploy._audit import AuditLog
from fedmcmc.deploy._columns import column_names
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._shapes import StepReport
from fedmcmc.deploy._study import Study
from fedmcmc.dynamics import Length
from fedmcmc.gradients import Epochs
from fedmcmc.kernels import Points
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, FederatedKernel, GradientEstimator

MIN_ROWS = 20
"""Fewest rows of a site by default."""
ROWS_PER_PARAMETER = 3
"""Fewest rows per parameter of the model by default: sums over fewer rows at known positions can be
solved for the rows."""
MIN_SITES_UNDER_MASKS = 3
"""Fewest sites of a study under masks by default."""
MAX_MESSAGE_BYTES = 2**28
"""Default length of the longest message, in bytes, before the shapes of a run are known."""


@dataclass(frozen=True)
class Limits:
    """Limits that a site enforces whatever the server requests: ``[limits]`` in site.toml.

    Parameters
    ----------
    max_numbers
        Most numbers that leave the site over all runs: every number in a message or a report, per
        chain, exchange and question. Under masks every masked word counts. ``None`` for no limit.
    min_rows
        Fewest rows of the site. By default 20, checked when the site opens, and 3 per parameter of
        the model, checked when a run begins.
    min_batch
        Fewest rows in a minibatch at this site; by default the larger of 20 and 3 per parameter.
    min_sites
        Fewest sites in the study; by default 3 under masks and 1 without.
    refused_columns
        Names of columns that no study may use; ``"a"`` also refuses ``"a.b"``.
    max_bytes
        Length of the longest message, in bytes, that the site accepts before the shapes of a run
        are known.

    Raises
    ------
    ValueError
        If a limit has another type or is out of range.

    Examples
    --------
    >>> Limits(max_numbers=10_000, refused_columns=["postcode"]).refused_columns
    ('postcode',)
    """

    max_numbers: int | None = None
    min_rows: int | None = None
    min_batch: int | None = None
    min_sites: int | None = None
    refused_columns: Sequence[str] = ()
    max_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        for name in ("max_numbers", "min_rows", "min_batch", "min_sites", "max_bytes"):
            value = getattr(self, name)
            if value is None and name != "max_bytes":
                continue
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"The limit {name} must be a whole number of at least 1, got {value!r}."
                )
        columns = self.refused_columns
        if not isinstance(columns, list | tuple) or not all(
            isinstance(column, str) and column for column in columns
        ):
            raise ValueError(
                f'The limit refused_columns must be a list of column names, such as ["postcode"], '
                f"got {columns!r}."
            )
        object.__setattr__(self, "refused_columns", tuple(columns))

    def min_batch_of(self, num_parameters: int) -> int:
        """Return the fewest rows in a minibatch for a model with this number of parameters."""
        return self.min_batch or max(MIN_ROWS, ROWS_PER_PARAMETER * num_parameters)

    def unknown_columns(self, study: Study) -> list[str]:
        """Return the refused columns that the study does not have, such as misspelled ones."""
        names = column_names(study.rows)
        return [c for c in self.refused_columns if not any(_is_within(name, c) for name in names)]

    def check_study(self, study: Study, site: str) -> None:
        """Raise `Refused` if rows or sites are too few, or if the study uses a refused column."""
        num_rows, num_sites = study.sites[site], len(study.sites)
        smallest = self.min_rows or MIN_ROWS
        if num_rows < smallest:
            raise Refused(
                f"{site} has {num_rows} rows but needs at least {smallest} to take part "
                f"(min_rows). The owner of {site} can set min_rows in [limits] of its settings."
            )
        smallest = self.min_sites or (MIN_SITES_UNDER_MASKS if study.secure else 1)
        if num_sites < smallest:
            raise Refused(
                f"The study {study.name!r} has {num_sites} sites, but {site} takes part only in "
                f"studies of at least {smallest} (min_sites). The owner of {site} can set "
                f"min_sites in [limits] of its settings."
            )
        refused = [
            name
            for name in column_names(study.rows)
            if any(_is_within(name, column) for column in self.refused_columns)
        ]
        if refused:
            raise Refused(
                f"{site} refuses the columns {refused} (refused_columns), which the study "
                f"{study.name!r} declares. Remove them from its [rows]."
            )

    def check_run(
        self, kernel: FederatedKernel, study: Study, site: str, position: ArrayTree
    ) -> None:
        """Raise `Refused` if rows are too few for the parameters, or a minibatch is too small.

        `position` has the shapes of the server's broadcast, used if the model has no `init_fn`.
        """
        num_rows, num = study.sites[site], num_parameters(study, position)
        smallest = ROWS_PER_PARAMETER * num
        if self.min_rows is None and num_rows < smallest:
            raise Refused(
                f"{site} has {num_rows} rows, but a model of {num} parameters needs at least "
                f"{smallest} rows, {ROWS_PER_PARAMETER} per parameter: sums over fewer rows can be "
                f"solved for the rows. The owner of {site} can set min_rows in [limits] of its "
                f"settings."
            )
        if study.dictionary is not None:
            try:
                study.dictionary.check_parameters(num, num_rows, site)
            except ValueError as error:
                raise Refused(str(error)) from None
        rows, smallest = smallest_batch(kernel, num_rows), self.min_batch_of(num)
        if rows is not None and rows < smallest:
            raise Refused(
                f"The kernel uses minibatches of {rows} rows at {site}, which requires at least "
                f"{smallest} rows per minibatch (min_batch); the last minibatch of a pass over "
                f"{num_rows} rows holds the remaining rows. Use larger minibatches or full "
                f"gradients; the owner of {site} can set min_batch in [limits] of its settings."
            )


LIMITS = tuple(field.name for field in fields(Limits))
"""Keys of the table ``limits`` in a site's settings."""


class Outflow:
    """Count of all numbers that have left a site, kept in its folder and in its audit log.

    The larger of the two holds at start, so a folder that was removed or restored from a backup
    does not lower the count. Every line of the audit log holds the total.
    """

    def __init__(self, site: str, disk: Disk, log: AuditLog | None, limits: Limits) -> None:
        self._site, self._disk, self._log, self._limit = site, disk, log, limits.max_numbers
        self._previous_answer: tuple[str, bytes, bytes] | None = None
        self._record(max(disk.num_numbers, 0 if log is None else log.num_numbers))

    def _record(self, total: int) -> None:
        self.total = total
        if self._log is not None:
            self._log.num_numbers = total

    def add(self, num: int, place: str, question: bytes, content: bytes) -> None:
        """Count an answer of `num` numbers before it leaves.

        If the answer repeats the previous answer of this process, with the same place in the run,
        question and content, it is already counted. The first answer after a restart always counts,
        because a server can make a site restart.

        Raises
        ------
        Refused
            If the count would exceed the owner's limit; the answer is then not counted.
        """
        # Another process of this site may have counted.
        self._record(max(self.total, self._disk.num_numbers))
        answer = (place, question, content)
        if answer == self._previous_answer:
            return
        if self._limit is not None and self.total + num > self._limit:
            raise Refused(
                f"{self._site} has sent {self.total:,} numbers, and {num:,} more would exceed the "
                f"limit of {self._limit:,} (max_numbers). The owner of {self._site} can raise "
                f"max_numbers in [limits] of its settings."
            )
        self._disk.count_numbers(self.total + num)
        self._record(self.total + num)
        self._previous_answer = answer


def numbers_per_message(code: ArrayTree, report: StepReport | None = None, *, masked: bool) -> int:
    """Return the number of numbers that leave a site in one message of one chain.

    The report is ``None`` before the first round. If the code consists of masked words, these
    replace the report except for the bits of the broadcast. Shapes of code and report are enough.
    """
    if report is None:
        return _num_numbers(code)
    return _num_numbers(code) + _num_numbers(report.bits_down if masked else report)


def _num_numbers(tree: ArrayTree) -> int:
    """Return the number of numbers in a tree; a word of a secure sum is one."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Word))
    shapes = (leaf.low.shape if isinstance(leaf, Word) else leaf.shape for leaf in leaves)
    return sum(map(math.prod, shapes))


def num_parameters(study: Study, position: ArrayTree = None) -> int:
    """Return the number of unconstrained parameters of a study's model.

    `position` has the shapes of the broadcast, used if the model has no `init_fn`.
    """
    if study.model.init_fn is not None:
        position = jax.eval_shape(study.model.init_fn, jax.random.key(0))
    elif isinstance(position, Points):
        one_point = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), position.points
        )
        return max(map(trees.num_elements, (position.centre, one_point)))
    return int(trees.num_elements(position))


def smallest_batch(kernel: FederatedKernel | GradientEstimator, num_rows: int) -> int | None:
    """Return the rows in the smallest minibatch of a kernel, ``None`` if it uses all rows.

    Every part of the kernel with a number `batch_size` counts, including parts of the study's own
    classes. The last minibatch of a pass over the rows holds the remaining rows. A fractional
    `batch_size` is multiplied by `num_rows`.
    """
    rows = []
    for part in _parts(kernel):
        batch_size = getattr(part, "batch_size", None)
        if not isinstance(batch_size, Real):
            continue
        fraction_size = max(int(num_rows * float(batch_size) * (1 + 2**-20)), 1)
        size = int(batch_size) if isinstance(batch_size, Integral) else fraction_size
        passes = isinstance(part, Epochs) or (isinstance(part, Length) and part.num_steps is None)
        rows.append((passes and size > 0 and num_rows % size) or size)
    return min([*rows, num_rows]) if rows else None


def _parts(tree: object) -> Iterator[Any]:
    """Yield a kernel and all its parts, static fields included."""
    yield tree
    parts: list[Any] = []
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, list | tuple):
        parts = list(tree)
    elif isinstance(tree, Partial):
        parts = [*tree.args, *tree.keywords.values()]
    elif is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, field.name) for field in fields(tree)]
    elif isinstance(tree, FederatedKernel | GradientEstimator):
        parts = list(vars(tree).values())
    for part in parts:
        yield from _parts(part)


def _is_within(name: str, column: str) -> bool:
    """Return true if `name` is this column or a part of it."""
    return name == column or name.startswith(f"{column}.")
