"""What a study does, in plain words, for the owner of a site who is asked to approve it."""

import textwrap
from typing import Any

import jax
import numpy as np

from fedmcmc import wire
from fedmcmc._types import ArrayTree, FederatedKernel
from fedmcmc.compression import Dense, OneOf, Quantized, Sparse, WithExact, host_words
from fedmcmc.data import Levels
from fedmcmc.deploy._masks import grid_of
from fedmcmc.deploy._shapes import Exchange, shapes_of_run
from fedmcmc.deploy._study import Study, software
from fedmcmc.pytrees import trees
from fedmcmc.transforms import is_secured

WIDTH = 92
ANSWERS = {
    "AllBut": "the same as another question without one site's rows; beside that other answer it "
    "tells the server what that one site's was",
    "Averaging": "how far its own copy of the chain has moved, times its weight",
    "CommonExpansions": "the mean and covariance of what its rows alone say, near a point that the "
    "server chooses, for itself and not as a term of a sum",
    "Consensus": "the pull of its own chain on the server's",
    "EnsembleKernel": "a model trained on its rows, times its weight, and squares of that",
    "Evaluations": "its log likelihoods, and if asked their gradients, at points that the server "
    "chooses",
    "Expansions": "its log likelihood, the gradient and the curvature at points that the server "
    "chooses",
    "Falls": "what its log likelihood loses at points around the mode",
    "FederatedGibbs": "the sums of its latents' statistics, by how much they have changed, and "
    "at proposals of the server its log likelihood and the gradient",
    "GaussianMetropolis": "its log likelihoods at points that the server proposes",
    "HamiltonianMonteCarlo": "its log likelihood and the gradient at positions of the chain",
    "JointLangevin": "the gradient of what its rows and latents say together, at latents that it "
    "draws itself",
    "Langevin": "the gradient of its log likelihood at the chain's position (or what the study's "
    "estimator makes of it)",
    "LeaveGroupsOut": "how well each of its groups of rows is predicted by the others, summed over "
    "its groups",
    "LeaveOneOut": "how well each of its rows is predicted by the others, summed over its rows",
    "MultipleTry": "its log likelihoods at points that the server proposes",
    "Natural": "how its own Gaussian of the parameters has changed; all changes together are the "
    "mean and covariance of what its rows alone say, the most telling messages of all",
    "OwnExpansions": "the mean and covariance of what its rows alone say, for itself and not as a "
    "term of a sum",
    "PseudoGradients": "how far a model came that it has trained on its rows, and its share of all "
    "rows",
    "Redrawn": "the answer to another question about outcomes that it draws from the model in "
    "place of its own, beside its own other columns",
    "RefreshedRelay": "how far it has moved the chain, in rounds in which the chain visits it, and "
    "in some of them gradient and curvature of its own log likelihood where the chain is",
    "Relay": "how far it has moved the chain, in rounds in which the chain visits it",
    "Replication": "functions of its rows, and of outcomes that the model draws in their place",
    "ScoreCovariances": "how its rows' gradients vary, a matrix for itself and not a term of a sum",
    "WithoutClient": "mean and sds of the posterior without its rows, for itself and not as a term "
    "of a sum",
}
"""What a site sends, by families of kernels; docs/privacy.md says what each tells."""


def files_told(study: Study, site: str) -> str:
    """Return what of a study's files will run at a site and on which rows, running none of them."""
    sites = ", ".join(f"{name} {num}" for name, num in study.sites.items())
    hashes = study.to_dict()["files"]
    files = [f"{source}: {study.path(source)}" for source in study.sources]
    lines = [
        *_heading(f'The study "{study.name}", as {site} is asked to approve it'),
        *_item("Its digest, which all owners must see:"),
        f"    {study.digest}",
        "",
        *_heading("What will run here"),
        *_item(f"The model is {_told(study.posterior)}."),
        *(
            line
            for name, where in study.kernels.items()
            for line in _item(f"The kernel {name!r} is {_told(where)}.")
        ),
        *_item("These files are Python, which can do whatever you can. Read them:"),
    ]
    for source, line in zip(study.sources, files, strict=True):
        lines += [f"    {line}", f"    SHA-256 {hashes[source]}"]
    if study.settings:
        lines += _item("They are given these settings:")
        lines += [f"    {name} = {value!r}" for name, value in study.settings.items()]
    versions = ", ".join(f"{name} {value}" for name, value in software().items())
    lines += [
        *_item(f"With {versions}: the same at all sites."),
        *_item("Nothing else that runs comes from the study, and nothing from the server."),
        "",
        *_heading("On which rows"),
        *_item(f"{study.sites[site]} rows of {site}, each {_shape_told(study.rows)}."),
        *(
            line
            for name, levels in study.levels.items()
            for line in _item(f"Text in {name} becomes codes: {_levels_told(levels)}.")
        ),
        *_item(f"Everybody learns how many rows each site has: {sites}."),
    ]
    return "\n".join(lines)


def messages_told(
    study: Study,
    site: str,
    *,
    server: str | None,
    most_rounds: int | None = None,
    position: ArrayTree = None,
) -> str:
    """Return what leaves a site, how often, to whom, and how protected. It runs the study's files.

    Parameters
    ----------
    study, site
        Of whom.
    server
        Its address, ``None`` over NVFlare.
    most_rounds
        Rounds that the site answers in all.
    position
        Shapes of a chain's position, by default those of the model's `init_fn`.
    """
    way = (
        f"The server at {server}, over TLS with certificates both ways, and nobody on the way. "
        f"{site} calls the server; nobody can call {site}."
        if server is not None
        else "The server of the job, over the connections that NVFlare secures."
    )
    lines = [
        *_heading("Who hears it"),
        *_item(way),
        *_item(
            "Other sites hear what the server makes of the sums of all messages: positions of "
            "chains, and what a kernel broadcasts beside them."
        ),
        "",
    ]
    if position is None and study.model.init_fn is not None:
        position = jax.eval_shape(study.model.init_fn, jax.random.key(0))
    for name in study.kernels:
        lines += [*_heading(f"What leaves {site}, in runs of the kernel {name!r}")]
        lines += [*_kernel_told(study, study.kernel(name), position), ""]
    if study.asks:
        lines += [
            *_heading(f"What leaves {site}, where the server asks questions of its own"),
            *_item(
                "The server may ask, with points and numbers that it chooses, so that sizes depend "
                "on these (asks in the study):"
            ),
        ]
        for name in study.asks:
            lines += _item(
                f"{name}: {ANSWERS.get(name, 'see this class in fedmcmc')}.", deeper=True
            )
        lines += [*_item(_protection_of_answers(study)), ""]
    often = (
        f"At most {most_rounds:,} rounds in all, over all runs, then no more: limits.most_rounds "
        "in your settings."
        if most_rounds is not None
        else "As many rounds as the server asks for: your settings set no limits.most_rounds. Set "
        "it. Many answers about few rows tell a lot of them."
    )
    lines += [
        *_heading("How often"),
        *_item(often),
        "",
        *_heading("What else leaves"),
        *_item(
            "When it connects: its name, the study's digest, versions, digests of the kernels. "
            "Where something fails: what kind of error it was. Where it declines: the reason."
        ),
        *_item("Each message is in the site's audit log before it leaves."),
    ]
    return "\n".join(lines)


def _kernel_told(study: Study, kernel: FederatedKernel, position: ArrayTree) -> list[str]:
    lines: list[str] = []
    for family in _families(kernel):
        words = ANSWERS.get(family, "what its class in fedmcmc says")
        lines += _item(f"{family}: the site sends {words}.")
    if position is None:
        return [
            *lines,
            *_item("Sizes are known once the server says where chains start: no init_fn."),
        ]
    shapes = shapes_of_run(kernel, study, position)
    for number, code in enumerate(shapes.setup, 1):
        lines += _item(
            f"Once per run and chain, before the first round ({number} of {len(shapes.setup)}): "
            f"{_words_told(code) if study.secure else _message_told(code)}."
        )
    for number, exchange in enumerate(shapes.phases, 1):
        which = f", exchange {number} of {len(shapes.phases)}" if len(shapes.phases) > 1 else ""
        leaves = _words_told(exchange.code) if study.secure else _exchange_told(exchange)
        lines += _item(f"Per round and chain{which}: {leaves}.")
    if jax.tree.leaves(shapes.client):
        kept = f"Between rounds the site keeps {_shape_told(shapes.client)} per chain, on its disk."
        lines += _item(kept)
    return lines + _item(_protection(study, kernel))


def _protection(study: Study, kernel: FederatedKernel) -> str:
    if study.secure:
        colluding = study.secure.get("colluding", 0)
        others = f", and at most {colluding} sites tell it all they know" if colluding else ""
        return (
            f"Under masks: the server sees the sum over all {len(study.sites)} sites, and no "
            f"message of this site by itself, if it follows the protocol{others}. At most "
            f"{study.secure['rounds']:,} rounds per run. Sums over many rounds can still tell much "
            "about rows."
        )
    if is_secured(kernel):
        return (
            "Messages are integers whose sum has the same bits in any order, but without masks: "
            "the server sees each message of this site by itself."
        )
    return "The server sees each message of this site by itself: it is not masked."


def _protection_of_answers(study: Study) -> str:
    if not study.secure:
        return "The server sees each answer of this site by itself: it is not masked."
    grid = grid_of(study.secure)
    return (
        f"Answers are rounded to multiples of 2**{-grid.digits}, up to {grid.most:g} in size, and "
        f"masked as the messages of kernels are: the server sees the sums over all "
        f"{len(study.sites)} sites."
    )


def _exchange_told(exchange: Exchange) -> str:
    report = len(wire.encode(_zeros(exchange.report)))
    return (
        f"{_message_told(exchange.code)}; with it, in {report} bytes, how many bits that took, the "
        "size of the gradient, and whether the result was of use"
    )


def _words_told(code: ArrayTree) -> str:
    num = len(host_words(_zeros(code)))
    return f"{num:,} words of 8 bytes under masks, which by themselves are random numbers"


def _message_told(code: ArrayTree) -> str:
    if isinstance(code, WithExact | Dense | Quantized | Sparse | OneOf):
        inner, exact = (code.code, code.exact) if isinstance(code, WithExact) else (code, ())
        return f"{_code_told(inner, trees.num_elements(exact))}, in as few bytes as it takes"
    size = len(wire.encode(_zeros(code)))
    return f"{_shape_told(code)}, {size:,} bytes"


def _code_told(code: ArrayTree, num_exact: int) -> str:
    if isinstance(code, OneOf):
        return " or ".join(_code_told(one, num_exact) for one in code.codes)
    numbers = code.levels if isinstance(code, Quantized) else code.values
    return f"a code ({type(code).__name__}) of {trees.num_elements(numbers) + num_exact} numbers"


def _levels_told(levels: Levels) -> str:
    return ", ".join(f"{code} is {level!r}" for code, level in enumerate(levels))


def _shape_told(tree: ArrayTree) -> str:
    """Return how many numbers of which type lie where in a tree."""
    parts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shape = " x ".join(map(str, leaf.shape)) or "1"
        parts.append(f"{name} {shape} {np.dtype(leaf.dtype)}".strip())
    return ", ".join(parts)


def _families(kernel: Any) -> list[str]:
    """Return the classes of a kernel that transforms are applied to, each once."""
    inner = [getattr(kernel, "kernel", None), *getattr(kernel, "kernels", ())]
    found = [
        name for part in inner if isinstance(part, FederatedKernel) for name in _families(part)
    ]
    return list(dict.fromkeys(found)) or [type(kernel).__name__]


def _zeros(like: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), like)


def _told(where: str) -> str:
    source, _, name = where.partition(":")
    return f"{name} in {source}"


def _heading(text: str) -> list[str]:
    return [text, "-" * len(text)]


def _item(text: str, *, deeper: bool = False) -> list[str]:
    indent = "    " if deeper else "  "
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False
    )
