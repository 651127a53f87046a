"""Masks in a run: what a study says of them, a site's part, and the server's.

A study that asks for masks names the public key of every site. A site then sends masked words and
nothing else of its rows, and only in answer to what its rules allow.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree, Disclosure, FederatedKernel
from fedmcmc.compression import Grid, Word
from fedmcmc.deploy._columns import check_keys
from fedmcmc.deploy._frames import FrameError, Refused, unpack
from fedmcmc.deploy._private import check_private
from fedmcmc.deploy._words import askable_kernels, class_names, disclosures
from fedmcmc.transforms import MIN_SITES, check_cohorts

KEY_DIGITS = 64
WANTED = {"identities", "rounds"}
COUNTS = {"answers", "minimum", "colluding"}
ALLOWED = WANTED | COUNTS | {"operator", "resolution", "most"}
RESOLUTION, MOST = 2.0**-22, 2.0**30
"""Of what the server asks, where a study does not say: log likelihoods up to 1e9, to 1e-7."""
SUMS = tuple(name for name, each in askable_kernels().items() if each.hidden_in_sums)
"""Kernels that a server may ask for under masks, for `Study.asks`."""
APART = {"PerClient"}
"""Parts of kernels in which a server could choose other numbers for each site."""
MASKS = "masks"
"""The file of a site's rules in its folder."""
STAGES = OPEN, CONFIRM, SEAL = ("open", "confirm", "seal")
"""What a server asks for, in this order, to make a session."""


def check_settings(secure: Mapping[str, Any], sites: Mapping[str, int], asks: Any) -> None:
    """Raise `ValueError` unless a study may ask for masks so."""
    check_keys(secure, sorted(WANTED), sorted(ALLOWED), "secure")
    for name in secure.keys() & (COUNTS | {"rounds"}):
        if type(secure[name]) is not int:
            raise ValueError(f"secure.{name} must be a whole number, got {secure[name]!r}.")
        if secure[name] < 0:
            raise ValueError(f"secure.{name} must be at least 0, got {secure[name]}.")
    identities = secure["identities"]
    if set(identities) != set(sites):
        raise ValueError(f"secure.identities must have a public key of each of {list(sites)}.")
    for name, key in identities.items():
        if not _is_key(key):
            raise ValueError(
                f"The identity of {name} is no public key of {KEY_DIGITS} hexadecimal digits "
                "(deploy.make_identity returns it)."
            )
    keys = [key.lower() for key in identities.values()]
    for name, key in identities.items():
        if keys.count(key.lower()) > 1:
            raise ValueError(
                f"The identity of {name} in the table secure is another site's, too: each site "
                "needs its own (fedmcmc deploy request)."
            )
    for name in asks:
        if name not in SUMS:
            why = disclosures().get(name, Disclosure()).reason
            raise ValueError(
                f"The server may not ask {name} (asks) where answers are under masks: {why}. "
                f"Allowed are {', '.join(SUMS)}; fedmcmc.whiten(surrogates=False) and "
                "fedmcmc.fit need no other."
            )
    check_operator(secure, sites)
    grid = grid_of(secure)
    if asks:
        grid.check(len(sites))


def check_operator(secure: Mapping[str, Any], sites: Mapping[str, int]) -> None:
    """Raise `ValueError` unless ``operator``, if given, is a site, and enough others are left."""
    if "operator" not in secure:
        return
    operator = secure["operator"]
    if not isinstance(operator, str) or operator not in sites:
        raise ValueError(
            f"secure.operator must be the site whose owner runs the server, one of "
            f"{', '.join(sites)}; got {operator!r}. Without operator, nobody's owner does."
        )
    num = len(sites) - num_colluding(secure)
    if num < MIN_SITES:
        raise ValueError(
            f"The owner of {operator} runs the server (secure.operator), so that {operator} counts "
            f"as one site that tells the server all it knows: of {len(sites)} sites {num} are left "
            f"among which a message is hidden, and {MIN_SITES} are needed. Add sites, or have "
            f"somebody else run the server."
        )


def num_colluding(secure: Mapping[str, Any]) -> int:
    """Return how many sites may tell the server all they know, the operator's among them."""
    colluding: int = secure.get("colluding", 0)
    return colluding + ("operator" in secure)


def grid_of(secure: Mapping[str, Any]) -> Grid:
    """Return the grid of a study's questions under masks.

    Raises
    ------
    ValueError
        If it is none.
    """
    return Grid.of(secure.get("resolution", RESOLUTION), secure.get("most", MOST))


def check_alike(words: Any) -> None:
    """Raise `Refused` where a kernel in words has numbers of its own for each site.

    With a weight of zero for all others, one message would be the sum.
    """
    found = class_names(words) & (APART | askable_kernels().keys() - {*SUMS})
    if found:
        raise Refused(
            f"The server's kernel holds numbers that differ from site to site "
            f"({', '.join(sorted(found))}), which could make one message stand out of a sum. Under "
            "masks such a kernel must be in the study's files."
        )


def _is_key(text: Any) -> bool:
    try:
        return isinstance(text, str) and len(text) == KEY_DIGITS and bool(bytes.fromhex(text))
    except ValueError:
        return False


def check_kernel(kernel: FederatedKernel, codes: tuple[ArrayTree, ...], *, waits: bool) -> None:
    """Raise unless a kernel's messages can be summed under masks; `codes` are those of all phases.

    Raises
    ------
    ValueError
        If who takes part changes, or a message may be late or left out.
    Refused
        If its messages are no words.
    """
    leaves = jax.tree.leaves(codes, is_leaf=lambda node: isinstance(node, Word))
    if not all(isinstance(leaf, Word) for leaf in leaves):
        raise Refused(
            f"The study asks for masks, and {type(kernel).__name__} sends numbers that cannot be "
            "under them: make it a fedmcmc.secure_sum(kernel)."
        )
    check_cohorts(kernel.participation)
    if waits or kernel.participation.excludes_broken_messages:
        raise ValueError(
            "Under masks the server sees no single message, so it can leave none out and keep none "
            "for the next round: no fedmcmc.faults around a kernel that runs under masks."
        )


def rules_of(study: Any, path: Path) -> Any:
    """Return the `secure.SiteRules` of a site of a study with `secure`."""
    from fedmcmc.deploy.secure import SiteRules

    return SiteRules(
        path,
        study.consortium,
        num_rounds=study.secure["rounds"],
        most_answers=study.secure.get("answers"),
    )


class SiteMasks:
    """A site's part in a study under masks: its session, and its rules.

    Parameters
    ----------
    study
        With `secure`.
    index
        The site's number.
    identity
        Its Ed25519 private key, or the file that holds it.
    path
        The rules' file on the site's own disk.
    """

    def __init__(self, study: Any, index: int, identity: Any, path: Path) -> None:
        from fedmcmc.deploy.secure import Handshake

        self._consortium, self._index = study.consortium, index
        self._identity = read_identity(identity)
        self._rules = rules_of(study, path)
        if self._rules.has_left:
            raise Refused(
                f"{list(study.sites)[index]} has left the study {study.name!r} for good (rule 5)."
            )
        Handshake(self._consortium, index, self._identity)  # raises where this is another's key
        self._number: int | None = None
        self._handshake: Any = None
        self._session: Any = None

    @property
    def num_answers(self) -> int | None:
        """Answers to different questions so far, ``None`` before the study's first session."""
        return None if self._rules.is_new else int(self._rules.num_answers)

    @property
    def session(self) -> str:
        """The session's identifier in hexadecimal, empty where there is none."""
        return "" if self._session is None else self._session.identifier.hex()

    def take_part(self, stage: str, number: int, body: bytes) -> bytes:
        """Return this site's part in making session `number`.

        Raises
        ------
        SessionError
            If what came is not what the other sites signed.
        RuleError
            If the session is not one of this study.
        FrameError
            If what came is not what belongs to this stage.
        """
        from fedmcmc.deploy.secure import Handshake

        if stage == OPEN:
            if number != self._number:
                self._handshake = Handshake(self._consortium, self._index, self._identity)
                self._number, self._session = number, None
            return bytes(self._handshake.hello)
        if number != self._number:
            raise FrameError("A session that this site has not opened.")
        parts = unpack(body, len(self._consortium.sites))
        if stage == CONFIRM:
            return bytes(self._handshake.confirm(parts))
        if self._session is None:
            session = self._handshake.session(parts)
            self._rules.begin(session)
            self._session = session
        return b""

    def answer(
        self,
        asked: Mapping[str, Any],
        place: Any,
        question: bytes,
        kept: bytes,
        compute: Callable[[], np.ndarray],
    ) -> bytes:
        """Return a site's words under masks, as `SiteRules.answer` allows it.

        Parameters
        ----------
        asked
            What the server says of the masks: session, attempt, and whose messages it adds.
        place
            ``(round, number of the phase, number of phases, whether of the set-up)``.
        question
            A digest of what all sites are asked. Masks depend on it: of sites that are asked
            different things, nobody can add up the answers.
        kept
            A digest of what the answer depends on besides, which this site alone knows.
        compute
            Returns the words ``[num_words]`` uint64; called where the question is a new one.
        """
        from fedmcmc.deploy.secure import MaskTag, transcript

        round_, number, num_phases, is_setup = place
        try:
            attempt, sites = int(asked["attempt"]), [int(site) for site in asked["sites"]]
        except (KeyError, TypeError, ValueError):
            raise FrameError("A message does not say which masks are wanted.") from None
        if not 0 <= attempt < 2**16:
            raise FrameError("Attempts are counted in 16 bits.")
        tag = MaskTag.of_phase(round_, attempt, number, num_phases, setup=is_setup)
        session = self._session.bound_to(question)
        own = transcript("fedmcmc/query/1", question, kept)
        return self._rules.answer(session, tag, sites, own, compute)


def num_words(code: ArrayTree) -> int:
    """Return how many integers a code of words holds."""
    words = jax.tree.leaves(code, is_leaf=lambda node: isinstance(node, Word))
    return sum(math.prod(word.low.shape) for word in words)


def read_identity(identity: Any) -> Any:
    """Return the private key that is given, or in the file that is given.

    Raises
    ------
    ValueError
        If it is none, or if other users can read the file.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    found = identity
    if isinstance(identity, str | Path):
        check_private(identity)
        found = load_pem_private_key(Path(identity).read_bytes(), None)
    if not isinstance(found, Ed25519PrivateKey):
        raise ValueError("identity must be an Ed25519 private key, or the file of one.")
    return found
