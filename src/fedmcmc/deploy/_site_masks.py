"""Part of a site in a study under masks: its session, and the rules for its answers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmcmc.deploy._frames import FrameError, Refused, unpack
from fedmcmc.deploy._masks import CONFIRM, OPEN
from fedmcmc.deploy._private import check_private
from fedmcmc.deploy._study import Study

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedmcmc.deploy.secure import Session, SiteRules

MASKS = "masks"
"""File with a site's last answer, in the site's folder."""


def rules_of(study: Study, path: Path) -> "SiteRules":
    """Return the rules of a site in a study under masks."""
    from fedmcmc.deploy.secure import SiteRules

    return SiteRules(
        path,
        study.consortium,
        num_rounds=study.secure["rounds"],
        max_answers=study.secure.get("answers"),
    )


class SiteMasks:
    """A site's session and rules in a study under masks.

    `index` is the number of the site, `identity` its Ed25519 private key or the file of the key,
    and `path` the file with the site's last answer.
    """

    def __init__(
        self, study: Study, index: int, identity: "Ed25519PrivateKey | str | Path", path: Path
    ) -> None:
        from fedmcmc.deploy.secure import Handshake

        self._consortium, self._index = study.consortium, index
        self._identity = _read_identity(identity)
        self._rules = rules_of(study, path)
        if self._rules.has_left:
            raise Refused(
                f"{list(study.sites)[index]} has left the study {study.name!r} permanently, so it "
                "cannot take part again (rule 5)."
            )
        self._handshake = Handshake(self._consortium, index, self._identity)
        self._number: int | None = None
        self._session: Session | None = None

    @property
    def num_answers(self) -> int | None:
        """Number of different questions answered, ``None`` before the study's first session."""
        return None if self._rules.is_new else int(self._rules.num_answers)

    @property
    def session(self) -> str:
        """Identifier of the session in hexadecimal, empty without a session."""
        return "" if self._session is None else self._session.identifier.hex()

    def take_part(self, stage: str, number: int, body: bytes) -> bytes:
        """Return this site's message in a stage of the creation of session `number`.

        Raise `SessionError` if a received message is not signed by its site, `RuleError` if the
        session does not belong to this study, and `FrameError` if the messages do not belong to
        this stage.
        """
        from fedmcmc.deploy.secure import Handshake

        if stage == OPEN:
            if number != self._number:
                self._handshake = Handshake(self._consortium, self._index, self._identity)
                self._number, self._session = number, None
            return bytes(self._handshake.hello)
        if number != self._number:
            raise FrameError("The session is not the one that this site has opened last.")
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
        header: Mapping[str, Any],
        place: tuple[int, int, int, bool],
        question: bytes,
        state_digest: bytes,
        compute: Callable[[], np.ndarray],
    ) -> bytes:
        """Return the site's words under masks; raise as `SiteRules.answer`.

        `header` is the entry ``masks`` of the request: session, attempt, and numbers of the sites
        in the sum. `place` has the round, the number of the phase, the number of phases, and true
        in the set-up. `question` is a digest of everything that the server requests from all sites.
        Masks depend on it, so nobody can add up the answers of sites that received different
        requests. The answer also depends on the site's state, which has the digest `state_digest`.
        `compute` returns the words ``[num_words]`` uint64; it is called for a new question only.
        """
        from fedmcmc.deploy.secure import MaskTag, transcript

        round_, number, num_phases, is_setup = place
        try:
            attempt, sites = int(header["attempt"]), [int(site) for site in header["sites"]]
        except (KeyError, TypeError, ValueError):
            raise FrameError(
                "A message does not name its attempt and the sites in the sum."
            ) from None
        if not 0 <= attempt < 2**16:
            raise FrameError("Attempts are counted in 16 bits.")
        tag = MaskTag.of_phase(round_, attempt, number, num_phases, setup=is_setup)
        assert self._session is not None
        session = self._session.bound_to(question)
        site_question = transcript("fedmcmc/query/1", question, state_digest)
        return self._rules.answer(session, tag, sites, site_question, compute)


def _read_identity(identity: "Ed25519PrivateKey | str | Path") -> "Ed25519PrivateKey":
    """Return a private key, or the private key in a file.

    Raise `ValueError` if it is not an Ed25519 key, or if other users can read the file.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key: Any = identity
    if isinstance(identity, str | Path):
        check_private(identity)
        key = load_pem_private_key(Path(identity).read_bytes(), None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("identity must be an Ed25519 private key, or the file of one.")
    return key
