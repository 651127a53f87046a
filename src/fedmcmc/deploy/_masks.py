"""Table ``secure`` of a study under masks, and checks of what masks can hide.

A study under masks has the public key of every site. Nothing that depends on a site's rows leaves
the site except for masked words, which answer requests that the site's rules allow.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fedmcmc.compression import Grid, Word
from fedmcmc.deploy._columns import check_keys
from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._words import askable_kernels, class_names, disclosures
from fedmcmc.transforms import MIN_SITES, check_cohorts
from fedmcmc.types import ArrayTree, Disclosure, FederatedKernel

KEY_DIGITS = 64
"""Hexadecimal digits of a public key."""
REQUIRED_KEYS = {"identities", "rounds"}
COUNT_KEYS = {"answers", "minimum", "colluding"}
KNOWN_KEYS = REQUIRED_KEYS | COUNT_KEYS | {"operator", "resolution", "max_abs"}
DEFAULT_RESOLUTION, DEFAULT_MAX_ABS = 2.0**-22, 2.0**30
"""Grid of questions under masks: log likelihoods up to 1e9, with errors of about 1e-7."""
SUMS = tuple(name for name, each in askable_kernels().items() if each.hidden_in_sums)
"""Kernels that a server may send under masks, for `Study.asks`."""
PER_SITE_PARTS = {"PerClient"}
"""Parts of kernels that can hold different numbers for each site."""
STAGES = OPEN, CONFIRM, SEAL = ("open", "confirm", "seal")
"""Kinds of the requests that create a session, in their order."""


def check_settings(
    secure: Mapping[str, Any], sites: Mapping[str, int], asks: Sequence[str]
) -> None:
    """Raise `ValueError` unless the table ``secure`` of a study is valid."""
    check_keys(secure, sorted(REQUIRED_KEYS), sorted(KNOWN_KEYS), "secure")
    for name in secure.keys() & (COUNT_KEYS | {"rounds"}):
        if type(secure[name]) is not int:
            raise ValueError(f"secure.{name} must be a whole number, got {secure[name]!r}.")
        if secure[name] < 0:
            raise ValueError(f"secure.{name} must be at least 0, got {secure[name]}.")
    identities = secure["identities"]
    if set(identities) != set(sites):
        raise ValueError(f"secure.identities must have a public key for each of {list(sites)}.")
    for name, key in identities.items():
        if not _is_key(key):
            raise ValueError(
                f"The identity of {name} is not a public key of {KEY_DIGITS} hexadecimal digits "
                "(deploy.make_identity returns it)."
            )
    keys = [key.lower() for key in identities.values()]
    for name, key in identities.items():
        if keys.count(key.lower()) > 1:
            raise ValueError(
                f"The identity of {name} in the table secure is also the identity of another "
                "site: each site needs its own ('fedmcmc deploy request')."
            )
    for name in asks:
        if name not in SUMS:
            reason = disclosures().get(name, Disclosure()).reason
            raise ValueError(
                f"Under masks the server may not ask {name} (asks): {reason}. Allowed are "
                f"{', '.join(SUMS)}; fedmcmc.whiten(surrogates=False) and fedmcmc.fit need only "
                "these."
            )
    _check_operator(secure, sites)
    grid = grid_of(secure)
    if asks:
        grid.check(len(sites))


def _check_operator(secure: Mapping[str, Any], sites: Mapping[str, int]) -> None:
    """Raise `ValueError` if ``operator`` is not a site, or if it leaves too few other sites."""
    if "operator" not in secure:
        return
    operator = secure["operator"]
    if not isinstance(operator, str) or operator not in sites:
        raise ValueError(
            f"secure.operator must be the site whose owner runs the server, one of "
            f"{', '.join(sites)}; got {operator!r}. Remove it if no site's owner runs the server."
        )
    num = len(sites) - num_colluding(secure)
    if num < MIN_SITES:
        raise ValueError(
            f"The owner of {operator} runs the server (secure.operator), so {operator} counts as a "
            f"site that shares its keys with the server: of {len(sites)} sites {num} are left "
            f"among which a message is hidden, and {MIN_SITES} are needed. Add sites, or let "
            f"somebody else run the server."
        )


def num_colluding(secure: Mapping[str, Any]) -> int:
    """Return the number of sites that may collude with the server, the operator's included."""
    colluding: int = secure.get("colluding", 0)
    return colluding + ("operator" in secure)


def grid_of(secure: Mapping[str, Any]) -> Grid:
    """Return the grid of a study's questions under masks; raise `ValueError` if it is not valid."""
    return Grid.of(
        secure.get("resolution", DEFAULT_RESOLUTION), secure.get("max_abs", DEFAULT_MAX_ABS)
    )


def check_same_for_sites(words: object) -> None:
    """Raise `Refused` if a kernel in words can hold different numbers for each site.

    With a weight of zero for all other sites, the sum would be a single message.
    """
    names = class_names(words) & (PER_SITE_PARTS | askable_kernels().keys() - {*SUMS})
    if names:
        raise Refused(
            f"The server's kernel holds numbers that differ from site to site "
            f"({', '.join(sorted(names))}), which could reveal a single message in a sum. Under "
            "masks such a kernel must be in the study's files."
        )


def _is_key(text: object) -> bool:
    try:
        return isinstance(text, str) and len(text) == KEY_DIGITS and bool(bytes.fromhex(text))
    except ValueError:
        return False


def check_kernel(kernel: FederatedKernel, codes: tuple[ArrayTree, ...], *, waits: bool) -> None:
    """Raise unless masks can hide a kernel's messages; `codes` are from all phases.

    Raise `ValueError` if cohorts change or a message may be late or left out, and `Refused` if
    messages are not words.
    """
    leaves = jax.tree.leaves(codes, is_leaf=lambda node: isinstance(node, Word))
    if not all(isinstance(leaf, Word) for leaf in leaves):
        raise Refused(
            f"The study uses masks, and masks cannot hide the numbers that {type(kernel).__name__} "
            "sends: make it a fedmcmc.secure_sum(kernel)."
        )
    check_cohorts(kernel.participation)
    if waits or kernel.participation.excludes_broken_messages:
        raise ValueError(
            "Under masks the server cannot leave out a single message or store it for the next "
            "round: do not apply fedmcmc.faults to a kernel that runs under masks."
        )


def num_words(code: ArrayTree) -> int:
    """Return the number of integers in a code of words."""
    words = jax.tree.leaves(code, is_leaf=lambda node: isinstance(node, Word))
    return sum(math.prod(word.low.shape) for word in words)
