"""The text that an owner reads before approving a study, in words for readers of any training."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedmcmc import wire
from fedmcmc._types import ArrayTree, Disclosure, FederatedKernel
from fedmcmc.compression import Dense, OneOf, Quantized, Sparse, WithExact
from fedmcmc.data import Levels
from fedmcmc.deploy._columns import column_names
from fedmcmc.deploy._frames import printable
from fedmcmc.deploy._limits import Limits, num_parameters, numbers_per_message, smallest_batch
from fedmcmc.deploy._recovery import messages_to_recover
from fedmcmc.deploy._shapes import PhaseShapes, RunShapes, shapes_of_run
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._words import disclosures
from fedmcmc.pytrees import trees
from fedmcmc.transforms import is_secured

WIDTH = 92


class _Counts(NamedTuple):
    """Numbers that leave a site in one message, per round and chain.

    Attributes
    ----------
    equations
        Numbers that depend on rows.
    leaving
        All numbers, as `limits.most_numbers` counts them.
    """

    equations: int
    leaving: int


def files_told(study: Study, site: str) -> str:
    """Return the first text for an owner, about code and rows, without running the code.

    Parameters
    ----------
    study
        Study to be approved.
    site
        Name of the owner's site.
    """
    hashes = study.to_dict()["files"]
    versions = ", ".join(f"{name} {value}" for name, value in software().items())
    sizes = ", ".join(f"{name} {num}" for name, num in study.sites.items())
    lines = [
        *_heading(f"The study {study.name!r}, for the owner of the site {site!r}"),
        *_item("Digest of the study. It must be the same at all sites:"),
        f"    {study.digest}",
        "",
        *_heading("Which code will run on your computer"),
        *_item(f"The model is {_function_in(study.posterior)}."),
    ]
    for name, where in study.kernels.items():
        lines += _item(f"The kernel (sampling method) {name!r} is {_function_in(where)}.")
    lines += _item(
        "These files are Python programs, which can do whatever your account can do. Read them, or "
        "have them read, before you continue:"
    )
    for source in study.sources:
        lines += [f"    {source}: {study.path(source)}", f"    SHA-256 {hashes[source]}"]
    if study.settings:
        lines += _item("Settings passed to these programs:")
        for name, value in study.settings.items():
            lines += _item(printable(f"{name} = {value!r}", None), deeper=True)
    lines += [
        *_item(f"Versions of the software, the same at all sites: {versions}."),
        *_item("No other code of the study runs here, and no code comes from the server."),
        "",
        *_heading("Which rows it reads"),
        *_item(
            f"{study.sites[site]:,} rows of {site}. A row holds {_numbers(study.rows)}: "
            f"{_shape_text(study.rows)}. No row leaves the site as such."
        ),
    ]
    for name, levels in study.levels.items():
        lines += _item(f"Text in {name} becomes codes: {_levels_text(levels)}.")
    lines += _item(f"All parties see how many rows each site has: {sizes}.")
    return _text(lines)


def messages_told(
    study: Study,
    site: str,
    *,
    server: str | None,
    most_numbers: int | None = None,
    min_batch: int | None = None,
    refused_columns: Sequence[str] = (),
    position: ArrayTree = None,
) -> str:
    """Return the second text for an owner: contents, number and receivers of messages, and risks.

    This runs the study's files.

    Parameters
    ----------
    study, site
        As for `files_told`.
    server
        Address of the server, or ``None`` over NVFlare.
    most_numbers, min_batch, refused_columns
        The owner's limits; see `Site`.
    position
        Shapes of a chain's position; by default, of what the model's `init_fn` returns.

    Returns
    -------
    str
        Text that ends with warnings, if there are any.
    """
    if position is None and study.model.init_fn is not None:
        position = jax.eval_shape(study.model.init_fn, jax.random.key(0))
    kernels = {name: study.kernel(name) for name in study.kernels}
    shapes = {
        name: None if position is None else shapes_of_run(kernel, study, position)
        for name, kernel in kernels.items()
    }
    counts = {name: _counts(study, shape) for name, shape in shapes.items() if shape is not None}
    lines = [*_receivers(study, site, server), "", *_terms()]
    for name, kernel in kernels.items():
        lines += ["", *_heading(f"Messages of {site} in a run of the kernel {name!r}")]
        lines += _messages_of_kernel(study, site, kernel, shapes[name])
    if study.asks:
        lines += ["", *_heading(f"Answers of {site} to questions of the server")]
        lines += _answers(study)
    lines += ["", *_heading("How many messages, and what you can limit")]
    lines += _number_of_messages(study, counts, most_numbers)
    lines += ["", *_heading("Can rows be computed from the messages?")]
    lines += _recovery(study, site, counts, most_numbers, kernels)
    lines += [
        "",
        *_heading("What else leaves"),
        *_item(
            "When the site connects: its name, the digest of the study, versions of the software, "
            "digests of the kernels, and a random number for its process. When something fails: "
            "the kind of error. When the site declines a request: the reason."
        ),
        *_item("The site records each message in its audit log before the message leaves."),
        "",
        *_heading("If you say no, and if you say yes"),
        *_item(_consequences(study)),
    ]
    warnings = _warnings(
        study, site, kernels, position, most_numbers, min_batch, tuple(refused_columns)
    )
    if warnings:
        lines += ["", *_heading("Before you approve")]
        for warning in warnings:
            lines += _item(warning)
    return _text(lines)


def _receivers(study: Study, site: str, server: str | None) -> list[str]:
    by = (
        f"The server at {server} receives the messages of {site}, encrypted on the way. Your site "
        "connects to the server, and nobody can connect to your site."
        if server is not None
        else f"The server of the NVFlare job receives the messages of {site}, over the connections "
        "of NVFlare."
    )
    return [
        *_heading("Who receives the messages"),
        *_item(by),
        *_item(
            "The other sites receive what the server computes from the messages of all sites: "
            "positions of chains, and sums that some kernels send with them."
        ),
        *_item("The result of the study goes to whoever runs the server."),
    ]


def _terms() -> list[str]:
    return [
        *_heading("Words in this text"),
        *_item(
            "The parameters are the unknown numbers of the model, and a position is one choice of "
            "values for them. A chain is a series of positions, one per round. The log likelihood "
            "is a number that measures how well the model with these values fits the rows. The "
            "gradient is how it changes with each parameter, and the curvature is how the gradient "
            "changes."
        ),
    ]


def _messages_of_kernel(
    study: Study, site: str, kernel: FederatedKernel, shapes: RunShapes | None
) -> list[str]:
    lines: list[str] = []
    told = disclosures()
    for family in _families(kernel):
        lines += _item(f"{family}: {told.get(family, Disclosure()).content}.")
    lines += _batches_text(study, site, kernel)
    if shapes is None:
        unknown = "Sizes depend on where the server starts the chains: the model has no init_fn."
        return [*lines, *_item(unknown), *_item(_protection(study, kernel))]
    for number, code in enumerate(shapes.setup, 1):
        which = f" ({number} of {len(shapes.setup)})" if len(shapes.setup) > 1 else ""
        masked = numbers_per_message(code, masked=True)
        content = _words_text(masked) if study.secure else _message_text(code)
        lines += _item(f"Before the first round, once per run and chain{which}: {content}.")
    for number, exchange in enumerate(shapes.phases, 1):
        which = f", part {number} of {len(shapes.phases)}" if len(shapes.phases) > 1 else ""
        masked = numbers_per_message(exchange.code, exchange.report, masked=True)
        content = _words_text(masked) if study.secure else _exchange_text(exchange)
        lines += _item(f"One message per round and chain{which}: {content}.")
    if jax.tree.leaves(shapes.client):
        size = _numbers(shapes.client)
        lines += _item(f"Between rounds the site keeps {size} per chain on its own disk.")
    return lines + _item(_protection(study, kernel))


def _batches_text(study: Study, site: str, kernel: FederatedKernel) -> list[str]:
    num = study.sites[site]
    size = smallest_batch(kernel, num)
    if size is None:
        return []
    chosen = (
        "The draw follows from numbers that the server sends (reproducible), so all parties know "
        "which rows are in each message."
        if study.reproducible
        else "The site draws them secretly for each message, so nobody else knows which rows they "
        "are."
    )
    return _item(f"It uses minibatches of {size:,} of the {num:,} rows, at random. {chosen}")


def _protection(study: Study, kernel: FederatedKernel) -> str:
    if study.secure:
        return _masks_text(study)
    if is_secured(kernel):
        return (
            "The server reads each message of this site. The messages are whole numbers whose sum "
            "does not depend on their order, but the study uses no masks."
        )
    return "The server reads each message of this site: the study uses no masks."


def _masks_text(study: Study) -> str:
    num, colluding = len(study.sites), study.secure.get("colluding", 0)
    operator = study.secure.get("operator")
    text = (
        f"The study uses masks: the server reads only totals over all {num} sites, and no message "
        "of a single site. This holds as long as at least three sites share no keys with it."
    )
    if operator is not None:
        text += (
            f" The owner of {operator!r} runs the server, so the messages of the other {num - 1} "
            "sites are hidden among each other."
        )
    else:
        text += (
            " The study does not name an owner who runs the server (secure.operator): if one does, "
            f"only {num - 1} sites are hidden among each other."
        )
    if colluding:
        text += f" This still holds if the server knows all that {colluding} more sites know."
    return text + " Masks hide whose rows they are, not what the totals reveal about all rows."


def _answers(study: Study) -> list[str]:
    lines = _item(
        "The server may ask these questions (asks in the study). It chooses at how many positions, "
        "so the sizes of answers are not known beforehand:"
    )
    told = disclosures()
    for name in dict.fromkeys(study.asks):
        lines += _item(f"{name}: {told[name].content}.", deeper=True)
    if study.secure:
        lines += _item(
            f"Answers are masked, too: the server reads only totals over all {len(study.sites)} "
            "sites."
        )
    else:
        lines += _item("The server reads each answer of this site: the study uses no masks.")
    return lines


def _number_of_messages(
    study: Study, counts: dict[str, _Counts], most_numbers: int | None
) -> list[str]:
    if most_numbers is None:
        lines = _item(
            "No limit is set: the server may ask for any number of messages. Set "
            "limits.most_numbers in your settings file to what the planned runs need."
        )
    else:
        lines = _item(
            f"At most {most_numbers:,} numbers leave this site, in all runs and answers together "
            "(limits.most_numbers in your settings file). Then it declines."
        )
    for name, count in counts.items():
        text = f"A message of the kernel {name!r} is {count.leaving:,} numbers"
        if most_numbers is not None:
            num = most_numbers // count.leaving
            text += (
                f", so {num:,} messages can leave. With a message in each round, these are "
                f"{num:,} rounds of one chain, or {num // 4:,} of four chains"
            )
        lines += _item(text + ".")
    if study.secure:
        answers = study.secure.get("answers")
        more = f", and {answers:,} answers in all runs" if answers is not None else ""
        lines += _item(
            f"The study itself allows {study.secure['rounds']:,} rounds per run{more} (secure)."
        )
    return lines + _item(
        "You can set these limits in the table limits of your settings file: most_numbers; "
        "min_rows, min_batch and min_sites, the fewest rows of this site, rows in a minibatch and "
        "sites in the study; refused_columns, the columns that no study may use. The site declines "
        "whatever is beyond a limit."
    )


def _consequences(study: Study) -> str:
    text = (
        "If you say no, nothing changes: without an approval of this study the site does not take "
        "part. If you say yes, the approval is for exactly this study: a changed study needs a new "
        "one. You can stop the site at any time. Messages that have left cannot be called back."
    )
    if study.secure:
        text += " Under masks, fedmcmc deploy leave ends the study for all sites."
    return text


def _recovery(
    study: Study,
    site: str,
    counts: dict[str, _Counts],
    most_numbers: int | None,
    kernels: dict[str, FederatedKernel],
) -> list[str]:
    per_row = trees.num_elements(study.rows)
    num = sum(study.sites.values()) if study.secure else study.sites[site]
    owner = "all sites together" if study.secure else "this site"
    lines = _item(
        f"The {num:,} rows of {owner} hold {num:,} x {per_row} = {num * per_row:,} numbers. Each "
        "number in a message is one equation for them. Whoever has as many equations as unknown "
        "numbers can compute the rows."
    )
    for name, count in counts.items():
        needed = messages_to_recover(num, per_row, count.equations)
        lines += _item(
            f"From about {needed:,} messages of the kernel {name!r} on, whoever runs the server "
            f"could compute all {num:,} rows of {owner}"
            f"{', though not whose they are' if study.secure else ''}. "
            + _allowed(needed, count, most_numbers)
        )
        size = smallest_batch(kernels[name], study.sites[site])
        if size is not None:
            lines += _batch_recovery(study, name, size, per_row, count, most_numbers)
    if study.asks:
        possible = most_numbers is None or most_numbers >= num * per_row
        lines += _item(
            f"The same holds for answers: {num * per_row:,} numbers in answers could be enough for "
            f"all rows. Your settings allow that many: {_yes(possible)}."
        )
    return lines + _item(
        "A dishonest server needs far fewer messages to compute a single row, such as the data of "
        "one patient. It chooses positions so that only this row changes the answer: tens of "
        "messages for one row, and fewer than ten for a row with unusual values. No limit with "
        "which the study can run prevents that: approve only if you trust whoever runs the server "
        "not to do it."
    )


def _batch_recovery(
    study: Study, name: str, size: int, per_row: int, count: _Counts, most_numbers: int | None
) -> list[str]:
    rows = size * len(study.sites) if study.secure else size  # in one total
    needed = messages_to_recover(rows, per_row, count.equations)
    if study.reproducible:
        return _item(
            f"The server can repeat a minibatch at other positions (reproducible), so about "
            f"{needed:,} messages are enough for the {size:,} rows of a minibatch. "
            + _allowed(needed, count, most_numbers)
        )
    lines = _item("Secret minibatches can raise this number, by an unknown factor.")
    if needed == 1:
        lines += _item(
            f"Minibatches of the kernel {name!r} are so small that one message could be enough to "
            "compute their rows."
        )
    return lines


def _allowed(needed: int, count: _Counts, most_numbers: int | None) -> str:
    if most_numbers is None:
        return "Your settings allow any number of messages: yes, this is possible."
    num = most_numbers // count.leaving
    answer = "yes, this is possible" if num >= needed else "no, too few for all of them"
    return f"Your settings allow {num:,} messages: {answer}."


def _warnings(
    study: Study,
    site: str,
    kernels: dict[str, FederatedKernel],
    position: ArrayTree,
    most_numbers: int | None,
    min_batch: int | None,
    refused_columns: Sequence[str],
) -> list[str]:
    num_rows, classes = study.sites[site], {*study.asks}
    classes.update(family for kernel in kernels.values() for family in _families(kernel))
    warnings = []
    if most_numbers is None:
        warnings.append("limits.most_numbers is not set, so nothing limits how much leaves.")
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
        allowed = Limits(min_batch=min_batch).min_batch_of(num)
        if smallest is not None and smallest < allowed:
            warnings.append(
                f"A kernel uses minibatches of size {smallest:,}. This site allows no fewer than "
                f"{allowed:,} rows (limits.min_batch), so it will decline."
            )
        if min_batch is not None and min_batch < fewest:
            warnings.append(
                f"limits.min_batch = {min_batch:,} is below the default of {fewest:,}. The fewer "
                "rows are in a minibatch, the more a message reveals about each."
            )
    columns = ", ".join(map(repr, column_names(study.rows)))
    for name in Limits(refused_columns=refused_columns).unknown_columns(study):
        warnings.append(
            f"limits.refused_columns names {name!r}, which is no column of this study, so the site "
            f"does not decline. Check the spelling: the columns are {columns}."
        )
    rows = "all sites together" if study.secure else "this site alone"
    told = disclosures()
    names_by_warning: dict[str, list[str]] = {}
    for name in sorted(classes):
        names_by_warning.setdefault(told.get(name, Disclosure()).warning, []).append(name)
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


def _counts(study: Study, shapes: RunShapes) -> _Counts:
    masked, phases = bool(study.secure), shapes.phases
    leaving = sum(numbers_per_message(p.code, p.report, masked=masked) for p in phases)
    equations = sum(numbers_per_message(p.code, masked=masked) for p in phases)
    # The last two words of a masked code count messages out of range and messages of no use.
    return _Counts(equations - 2 * masked * len(phases), leaving)


def _exchange_text(exchange: PhaseShapes) -> str:
    num = trees.num_elements(exchange.report)
    size = len(wire.encode(_zeros(exchange.report)))
    return (
        f"{_message_text(exchange.code)}. {num} more numbers ({size} bytes) state how many bits "
        "were sent, how large the gradient is, and whether the result is usable"
    )


def _words_text(num: int) -> str:
    return f"{num:,} masked numbers of 8 bytes. They look random until all sites' numbers are added"


def _message_text(code: ArrayTree) -> str:
    if isinstance(code, WithExact | Dense | Quantized | Sparse | OneOf):
        inner, exact = (code.code, code.exact) if isinstance(code, WithExact) else (code, ())
        return f"{_code_text(inner, trees.num_elements(exact))}, in as few bytes as possible"
    size = len(wire.encode(_zeros(code)))
    return f"{_numbers(code)} ({size:,} bytes)"


def _code_text(code: ArrayTree, num_exact: int) -> str:
    if isinstance(code, OneOf):
        return " or ".join(_code_text(option, num_exact) for option in code.codes)
    numbers = code.levels if isinstance(code, Quantized) else code.values
    num = trees.num_elements(numbers) + num_exact
    return f"{num:,} numbers as a code ({type(code).__name__})"


def _levels_text(levels: Levels) -> str:
    return ", ".join(f"{code} is {level!r}" for code, level in enumerate(levels))


def _numbers(tree: ArrayTree) -> str:
    num = trees.num_elements(tree)
    return "1 number" if num == 1 else f"{num:,} numbers"


def _shape_text(tree: ArrayTree) -> str:
    """Return the names, shapes and types of the arrays in a tree."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = " x ".join(map(str, leaf.shape)) or "1"
        parts.append(f"{name} {shape} {np.dtype(leaf.dtype)}".strip())
    return ", ".join(parts)


def _families(kernel: Any) -> list[str]:
    """Return the classes of a kernel that transforms are applied to, each once."""
    inner = [getattr(kernel, "kernel", None), *getattr(kernel, "kernels", ())]
    names = [
        name for part in inner if isinstance(part, FederatedKernel) for name in _families(part)
    ]
    return list(dict.fromkeys(names)) or [type(kernel).__name__]


def _zeros(like: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)


def _yes(condition: bool) -> str:
    return "yes" if condition else "no"


def _function_in(where: str) -> str:
    source, _, name = where.partition(":")
    return f"the function {name} in {source}"


def _text(lines: Sequence[str]) -> str:
    """Join lines, with every character escaped that could hide or change what a terminal shows."""
    return "\n".join(printable(line, None) for line in lines)


def _heading(text: str) -> list[str]:
    return [text, "-" * len(text)]


def _item(text: str, *, deeper: bool = False) -> list[str]:
    indent = "    " if deeper else "  "
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
