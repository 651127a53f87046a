"""Risks of a study for a site's rows: recovery from messages, and warnings before an approval."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedmcmc.deploy._columns import column_names
from fedmcmc.deploy._layout import item
from fedmcmc.deploy._limits import Limits, num_parameters, numbers_per_message, smallest_batch
from fedmcmc.deploy._shapes import RunShapes
from fedmcmc.deploy._study import Study
from fedmcmc.deploy._words import disclosures
from fedmcmc.pytrees import trees
from fedmcmc.types import ArrayTree, Disclosure, FederatedKernel


def messages_to_recover(num_rows: int, numbers_per_row: int, numbers_per_message: int) -> int:
    """Return the number of messages that are enough to compute all rows of a sum, at least 1.

    Each number in a message is an equation in the numbers of the rows. With as many independent
    equations as unknowns, only isolated solutions remain. The count is approximate: binary columns
    and columns of ones need fewer messages, and messages that are not independent, such as those in
    a linear regression, never determine all rows.

    >>> messages_to_recover(413, numbers_per_row=6, numbers_per_message=5)
    496
    """
    return math.ceil(num_rows * numbers_per_row / numbers_per_message)


class MessageSize(NamedTuple):
    """Numbers that leave a site per round and chain."""

    equations: int  # numbers that depend on rows
    leaving: int  # all numbers, which count for `Limits.max_numbers`


def measure_message(study: Study, shapes: RunShapes) -> MessageSize:
    """Return the size of the messages of one round and chain."""
    masked, phases = bool(study.secure), shapes.phases
    leaving = sum(numbers_per_message(p.code, p.report, masked=masked) for p in phases)
    equations = sum(numbers_per_message(p.code, masked=masked) for p in phases)
    # The last two words of a masked code count messages out of range and messages of no use.
    return MessageSize(equations - 2 * masked * len(phases), leaving)


def describe_recovery(
    study: Study,
    site: str,
    message_sizes: Mapping[str, MessageSize],
    max_numbers: int | None,
    kernels: Mapping[str, FederatedKernel],
) -> list[str]:
    """Return items on the numbers of messages from which rows can be computed."""
    per_row = trees.num_elements(study.rows)
    num = sum(study.sites.values()) if study.secure else study.sites[site]
    owner = "all sites together" if study.secure else "this site"
    lines = item(
        f"The {num:,} rows of {owner} hold {num:,} x {per_row} = {num * per_row:,} numbers. Each "
        "number in a message is one equation for them. Whoever has as many equations as unknown "
        "numbers can compute the rows."
    )
    for name, message_size in message_sizes.items():
        needed = messages_to_recover(num, per_row, message_size.equations)
        lines += item(
            f"From about {needed:,} messages of the kernel {name!r} on, whoever runs the server "
            f"could compute all {num:,} rows of {owner}"
            f"{', though not whose they are' if study.secure else ''}. "
            + _describe_allowance(needed, message_size, max_numbers)
        )
        size = smallest_batch(kernels[name], study.sites[site])
        if size is not None:
            lines += _describe_batch_recovery(study, name, size, per_row, message_size, max_numbers)
    if study.asks:
        is_possible = max_numbers is None or max_numbers >= num * per_row
        lines += item(
            f"The same holds for answers: {num * per_row:,} numbers in answers could be enough for "
            f"all rows. Your settings allow that many: {'yes' if is_possible else 'no'}."
        )
    return lines + item(
        "A dishonest server needs far fewer messages to compute a single row, such as the data of "
        "one patient. It chooses positions so that only this row changes the answer: tens of "
        "messages for one row, and fewer than ten for a row with unusual values. No limit with "
        "which the study can run prevents that: approve only if you trust whoever runs the server "
        "not to do it."
    )


def _describe_batch_recovery(
    study: Study,
    name: str,
    size: int,
    per_row: int,
    message_size: MessageSize,
    max_numbers: int | None,
) -> list[str]:
    rows = size * len(study.sites) if study.secure else size  # in one total
    needed = messages_to_recover(rows, per_row, message_size.equations)
    if study.reproducible:
        return item(
            f"The server can repeat a minibatch at other positions (reproducible), so about "
            f"{needed:,} messages are enough for the {size:,} rows of a minibatch. "
            + _describe_allowance(needed, message_size, max_numbers)
        )
    lines = item("Secret minibatches can raise this number, by an unknown factor.")
    if needed == 1:
        lines += item(
            f"Minibatches of the kernel {name!r} are so small that one message could be enough to "
            "compute their rows."
        )
    return lines


def _describe_allowance(needed: int, message_size: MessageSize, max_numbers: int | None) -> str:
    if max_numbers is None:
        return "Your settings allow any number of messages: yes, this is possible."
    num = max_numbers // message_size.leaving
    answer = "yes, this is possible" if num >= needed else "no, too few for all of them"
    return f"Your settings allow {num:,} messages: {answer}."


def list_warnings(
    study: Study,
    site: str,
    kernels: Mapping[str, FederatedKernel],
    position: ArrayTree,
    limits: Limits,
) -> list[str]:
    """Return warnings for an owner with these limits."""
    num_rows, classes = study.sites[site], {*study.asks}
    classes.update(name for kernel in kernels.values() for name in inner_class_names(kernel))
    warnings = []
    if limits.max_numbers is None:
        warnings.append("limits.max_numbers is not set, so nothing limits how much leaves.")
    if len(study.sites) == 2:
        warnings.append(
            "The study has two sites: the other site can subtract its messages from the totals "
            "that it receives, and so compute the messages of this site."
        )
    if position is not None:
        num = num_parameters(study, position)
        fewest = Limits().min_batch_of(num)
        if num_rows < fewest:
            warnings.append(
                f"This site has {num_rows:,} rows, and the model {num:,} parameters. With fewer "
                f"than {fewest:,} rows a few messages can be enough to compute all of them. The "
                "site declines unless limits.min_rows is lower."
            )
        batches = [smallest_batch(kernel, num_rows) for kernel in kernels.values()]
        smallest = min((size for size in batches if size is not None), default=None)
        allowed = limits.min_batch_of(num)
        if smallest is not None and smallest < allowed:
            warnings.append(
                f"A kernel uses minibatches of size {smallest:,}. This site allows no fewer than "
                f"{allowed:,} rows (limits.min_batch), so it will decline."
            )
        if limits.min_batch is not None and limits.min_batch < fewest:
            warnings.append(
                f"limits.min_batch = {limits.min_batch:,} is below the default of {fewest:,}. The "
                "fewer rows are in a minibatch, the more a message reveals about each."
            )
    columns = ", ".join(map(repr, column_names(study.rows)))
    for name in limits.unknown_columns(study):
        warnings.append(
            f"limits.refused_columns names {name!r}, which is no column of this study, so the site "
            f"does not decline. Check the spelling: the columns are {columns}."
        )
    rows = "all sites together" if study.secure else "this site alone"
    by_class = disclosures()
    names_by_warning: dict[str, list[str]] = {}
    for name in sorted(classes):
        names_by_warning.setdefault(by_class.get(name, Disclosure()).warning, []).append(name)
    warnings += [
        f"{', '.join(names)}: {warning.format(rows=rows)}"
        for warning, names in names_by_warning.items()
        if warning
    ]
    if study.reproducible:
        warnings.append(
            "reproducible = true: all parties know all random numbers of this site, so noise and "
            "minibatches hide nothing."
        )
    return warnings


def inner_class_names(kernel: FederatedKernel) -> list[str]:
    """Return the names of a kernel's classes without transforms, each once."""
    inner = [getattr(kernel, "kernel", None), *getattr(kernel, "kernels", ())]
    names = [name for x in inner if isinstance(x, FederatedKernel) for name in inner_class_names(x)]
    return list(dict.fromkeys(names)) or [type(kernel).__name__]
