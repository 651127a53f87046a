"""Texts that an owner reads before approving a study, for readers of any training."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import jax
import numpy as np

from fedmcmc import wire
from fedmcmc.compression import Dense, OneOf, Quantized, Sparse, WithExact
from fedmcmc.data import Dictionary, Levels
from fedmcmc.deploy._frames import printable
from fedmcmc.deploy._layout import item, join_sections, section
from fedmcmc.deploy._limits import Limits, numbers_per_message, smallest_batch
from fedmcmc.deploy._risks import (
    MessageSize,
    describe_recovery,
    inner_class_names,
    list_warnings,
    measure_message,
)
from fedmcmc.deploy._row_ranges import describe_num_rows
from fedmcmc.deploy._shapes import PhaseShapes, RunShapes, StepReport, shapes_of_run
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._words import disclosures
from fedmcmc.pytrees import trees
from fedmcmc.transforms import is_secured
from fedmcmc.types import ArrayTree, Disclosure, FederatedKernel


def describe_files(study: Study, site: str) -> str:
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
    sizes = ", ".join(f"{name} {describe_num_rows(study, name)}" for name in study.sites)
    digest = [
        *item("Digest of the study. It must be the same at all sites:"),
        f"    {study.digest}",
    ]
    code = item(f"The model is {_describe_function(study.posterior)}.")
    for name, where in study.kernels.items():
        code += item(f"The kernel (sampling method) {name!r} is {_describe_function(where)}.")
    code += item(
        "These files are Python programs, which can do whatever your account can do. Read them, or "
        "have them read, before you continue:"
    )
    for source in study.sources:
        code += [f"    {source}: {study.path(source)}", f"    SHA-256 {hashes[source]}"]
    if study.settings:
        code += item("Settings passed to these programs:")
        for name, value in study.settings.items():
            code += item(printable(f"{name} = {value!r}", None), deeper=True)
    code += item(f"Versions of the software, the same at all sites: {versions}.")
    code += item("No other code of the study runs here, and no code comes from the server.")
    rows = item(
        f"{describe_num_rows(study, site)} rows of {site}. A row holds "
        f"{_count_numbers(study.rows)}: {_describe_shapes(study.rows)}. No row leaves the site as "
        f"such."
    )
    for name, levels in study.levels.items():
        rows += item(f"Text in {name} becomes codes: {_describe_levels(levels)}.")
    if study.dictionary is not None:
        rows += _describe_dictionary(study.dictionary)
    rows += item(f"All parties see how many rows each site has: {sizes}.")
    return join_sections(
        section(f"The study {study.name!r}, for the owner of the site {site!r}", digest),
        section("Which code will run on your computer", code),
        section("Which rows it reads", rows),
    )


def _describe_dictionary(dictionary: Dictionary) -> list[str]:
    """Return lines about the checks of a site's rows."""
    lines = item(
        "The site checks its rows by this dictionary, and does not start if they differ from it:"
    )
    for line in repr(dictionary).splitlines()[1:]:
        lines += item(printable(line.strip(), None), deeper=True)
    rules = ", ".join(f"{name} {value:g}" for name, value in asdict(dictionary.rules).items())
    return lines + item(f"Rules for the rows of each site: {rules}.")


def messages_told(
    study: Study,
    site: str,
    *,
    server: str | None,
    max_numbers: int | None = None,
    min_batch: int | None = None,
    refused_columns: Sequence[str] = (),
    position: ArrayTree = None,
) -> str:
    """Return the second text for an owner: contents, number and receivers of messages, and risks.

    This runs the study's files.

    Parameters
    ----------
    study, site
        Study to be approved, and name of the owner's site.
    server
        Address of the server, or ``None`` over NVFlare.
    max_numbers, min_batch, refused_columns
        Limits of the owner; see `Limits`.
    position
        Shapes of a chain's position; by default, shapes of the result of the model's `init_fn`.

    Returns
    -------
    str
        Text that ends with warnings, if there are any.
    """
    if position is None and study.model.init_fn is not None:
        position = jax.eval_shape(study.model.init_fn, jax.random.key(0))
    limits = Limits(
        max_numbers=max_numbers, min_batch=min_batch, refused_columns=tuple(refused_columns)
    )
    kernels = {name: study.kernel(name) for name in study.kernels}
    shapes = {
        name: None if position is None else shapes_of_run(kernel, study, position)
        for name, kernel in kernels.items()
    }
    message_sizes = {
        name: measure_message(study, shape) for name, shape in shapes.items() if shape is not None
    }
    sections = [
        section("Who receives the messages", _describe_receivers(site, server)),
        section("Words in this text", item(TERMS)),
    ]
    for name, kernel in kernels.items():
        lines = _describe_kernel(study, site, kernel, shapes[name])
        sections.append(section(f"Messages of {site} in a run of the kernel {name!r}", lines))
    if study.asks:
        sections.append(
            section(f"Answers of {site} to questions of the server", _describe_answers(study))
        )
    risks = describe_recovery(study, site, message_sizes, max_numbers, kernels)
    sections += [
        section(
            "How many messages, and what you can limit",
            _describe_limits(study, message_sizes, max_numbers),
        ),
        section("Can rows be computed from the messages?", risks),
        section("What else leaves", [*item(OTHER_MESSAGES), *item(LOGGED)]),
        section("If you say no, and if you say yes", item(_describe_consequences(study))),
    ]
    warnings = list_warnings(study, site, kernels, position, limits)
    if warnings:
        lines = [line for warning in warnings for line in item(warning)]
        sections.append(section("Before you approve", lines))
    return join_sections(*sections)


TERMS = (
    "The parameters are the unknown numbers of the model, and a position is one choice of values "
    "for them. A chain is a series of positions, one per round. The log likelihood is a number "
    "that measures how well the model with these values fits the rows. The gradient is how it "
    "changes with each parameter, and the curvature is how the gradient changes."
)
OTHER_MESSAGES = (
    "When the site connects: its name, the digest of the study, versions of the software, digests "
    "of the kernels, and a random number for its process. When something fails: the kind of error. "
    "When the site declines a request: the reason."
)
LOGGED = "The site records each message in its audit log before the message leaves."


def _describe_receivers(site: str, server: str | None) -> list[str]:
    receiver = (
        f"The server at {server} receives the messages of {site}, encrypted on the way. Your site "
        "connects to the server, and nobody can connect to your site."
        if server is not None
        else f"The server of the NVFlare job receives the messages of {site}, over the connections "
        "of NVFlare."
    )
    return [
        *item(receiver),
        *item(
            "The other sites receive what the server computes from the messages of all sites: "
            "positions of chains, and sums that some kernels send with them."
        ),
        *item("The result of the study goes to whoever runs the server."),
    ]


def _describe_kernel(
    study: Study, site: str, kernel: FederatedKernel, shapes: RunShapes | None
) -> list[str]:
    by_class, lines = disclosures(), []
    for family in inner_class_names(kernel):
        lines += item(f"{family}: {by_class.get(family, Disclosure()).content}.")
    lines += _describe_batches(study, site, kernel)
    if shapes is None:
        unknown = "Sizes depend on where the server starts the chains: the model has no init_fn."
        return [*lines, *item(unknown), *item(_describe_protection(study, kernel))]
    for number, code in enumerate(shapes.setup, 1):
        which = f" ({number} of {len(shapes.setup)})" if len(shapes.setup) > 1 else ""
        content = _describe_words(code) if study.secure else _describe_message(code)
        lines += item(f"Before the first round, once per run and chain{which}: {content}.")
    for number, phase in enumerate(shapes.phases, 1):
        which = f", part {number} of {len(shapes.phases)}" if len(shapes.phases) > 1 else ""
        content = (
            _describe_words(phase.code, phase.report) if study.secure else _describe_phase(phase)
        )
        lines += item(f"One message per round and chain{which}: {content}.")
    if jax.tree.leaves(shapes.client):
        size = _count_numbers(shapes.client)
        lines += item(f"Between rounds the site keeps {size} per chain on its own disk.")
    return lines + item(_describe_protection(study, kernel))


def _describe_batches(study: Study, site: str, kernel: FederatedKernel) -> list[str]:
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
    return item(f"It uses minibatches of {size:,} of the {num:,} rows, at random. {chosen}")


def _describe_protection(study: Study, kernel: FederatedKernel) -> str:
    if study.secure:
        return _describe_masks(study)
    if is_secured(kernel):
        return (
            "The server reads each message of this site. The messages are whole numbers whose sum "
            "does not depend on their order, but the study uses no masks."
        )
    return "The server reads each message of this site: the study uses no masks."


def _describe_masks(study: Study) -> str:
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


def _describe_answers(study: Study) -> list[str]:
    lines = item(
        "The server may ask these questions (asks in the study). It chooses at how many positions, "
        "so the sizes of answers are not known beforehand:"
    )
    by_class = disclosures()
    for name in dict.fromkeys(study.asks):
        lines += item(f"{name}: {by_class[name].content}.", deeper=True)
    if study.secure:
        lines += item(
            f"Answers are masked, too: the server reads only totals over all {len(study.sites)} "
            "sites."
        )
    else:
        lines += item("The server reads each answer of this site: the study uses no masks.")
    return lines


def _describe_limits(
    study: Study, message_sizes: Mapping[str, MessageSize], max_numbers: int | None
) -> list[str]:
    if max_numbers is None:
        lines = item(
            "No limit is set: the server may ask for any number of messages. Set "
            "limits.max_numbers in your settings file to what the planned runs need."
        )
    else:
        lines = item(
            f"At most {max_numbers:,} numbers leave this site, in all runs and answers together "
            "(limits.max_numbers in your settings file). Then it declines."
        )
    for name, message_size in message_sizes.items():
        text = f"A message of the kernel {name!r} is {message_size.leaving:,} numbers"
        if max_numbers is not None:
            num = max_numbers // message_size.leaving
            text += (
                f", so {num:,} messages can leave. With a message in each round, these are "
                f"{num:,} rounds of one chain, or {num // 4:,} of four chains"
            )
        lines += item(text + ".")
    if study.secure:
        answers = study.secure.get("answers")
        more = f", and {answers:,} answers in all runs" if answers is not None else ""
        lines += item(
            f"The study itself allows {study.secure['rounds']:,} rounds per run{more} (secure)."
        )
    return lines + item(
        "You can set these limits in the table limits of your settings file: max_numbers; "
        "min_rows, min_batch and min_sites, the fewest rows of this site, rows in a minibatch and "
        "sites in the study; refused_columns, the columns that no study may use. The site declines "
        "whatever is beyond a limit."
    )


def _describe_consequences(study: Study) -> str:
    text = (
        "If you say no, nothing changes: without an approval of this study the site does not take "
        "part. If you say yes, the approval is for exactly this study: a changed study needs a new "
        "one. You can stop the site at any time. Messages that have left cannot be called back."
    )
    if study.secure:
        text += " Under masks, fedmcmc deploy leave ends the study for all sites."
    return text


def _describe_phase(phase: PhaseShapes) -> str:
    num, num_bytes = trees.num_elements(phase.report), _count_bytes(phase.report)
    return (
        f"{_describe_message(phase.code)}. {num} more numbers ({num_bytes} bytes) state how many "
        "bits were sent, how large the gradient is, and whether the result is usable"
    )


def _describe_words(code: ArrayTree, report: StepReport | None = None) -> str:
    num = numbers_per_message(code, report, masked=True)
    return f"{num:,} masked numbers of 8 bytes. They look random until all sites' numbers are added"


def _describe_message(code: ArrayTree) -> str:
    if isinstance(code, WithExact | Dense | Quantized | Sparse | OneOf):
        inner, exact = (code.code, code.exact) if isinstance(code, WithExact) else (code, ())
        return f"{_describe_code(inner, trees.num_elements(exact))}, in as few bytes as possible"
    return f"{_count_numbers(code)} ({_count_bytes(code):,} bytes)"


def _describe_code(code: ArrayTree, num_exact: int) -> str:
    if isinstance(code, OneOf):
        return " or ".join(_describe_code(option, num_exact) for option in code.codes)
    numbers = code.levels if isinstance(code, Quantized) else code.values
    num = trees.num_elements(numbers) + num_exact
    return f"{num:,} numbers as a code ({type(code).__name__})"


def _describe_levels(levels: Levels) -> str:
    return ", ".join(f"{code} is {level!r}" for code, level in enumerate(levels))


def _count_numbers(tree: ArrayTree) -> str:
    num = trees.num_elements(tree)
    return "1 number" if num == 1 else f"{num:,} numbers"


def _describe_shapes(tree: ArrayTree) -> str:
    """Return the names, shapes and types of the arrays in a tree."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = " x ".join(map(str, leaf.shape)) or "1"
        parts.append(f"{name} {shape} {np.dtype(leaf.dtype)}".strip())
    return ", ".join(parts)


def _count_bytes(like: ArrayTree) -> int:
    """Return the number of bytes of an encoded tree with these shapes."""
    return len(wire.encode(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)))


def _describe_function(where: str) -> str:
    source, _, name = where.partition(":")
    return f"the function {name} in {source}"
