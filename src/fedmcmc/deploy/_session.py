"""Sessions: sites that know each other's keys agree, through a server, on keys that it cannot know.

Two exchanges per session. Each site signs a fresh key (*hello*), checks all others' against the
identities that its owner approved, and signs what it saw (*confirm*). Who has all confirmations
knows that every site saw the same: the server can neither take a site's place nor split them. Fresh
keys are nowhere but in memory, so a stolen disk opens no old message.
"""

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedmcmc._checks import missing_extra_error

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
except ImportError as error:
    raise missing_extra_error("fedmcmc.deploy needs cryptography", "deploy") from error

from fedmcmc.deploy._frames import Refused
from fedmcmc.transforms import MIN_SITES

NONCE_BYTES, KEY_BYTES, SIGNATURE_BYTES, DIGEST_BYTES = 16, 32, 64, 32
HELLO_BYTES = 4 + NONCE_BYTES + KEY_BYTES + SIGNATURE_BYTES


class SessionError(Refused):
    """What came from the server is not what the other sites of the study signed."""


def transcript(domain: str, *parts: bytes) -> bytes:
    """Return the SHA-256 digest of a domain and parts, each preceded by its length.

    So no two lists of parts have the same bytes.

    Examples
    --------
    >>> transcript("fedmcmc/query/1", b"ab", b"c") != transcript("fedmcmc/query/1", b"a", b"bc")
    True
    """
    digest = hashlib.sha256()
    for part in (domain.encode(), *parts):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True)
class Consortium:
    """Who adds up their messages: what of an approved study the masks depend on.

    Attributes
    ----------
    study
        The digest of the approved document, 32 bytes.
    sites
        The sites' Ed25519 public keys, 32 bytes each, in the document's order; a site's number is
        its place here. They come with the document, and never from the server.
    minimum
        Sites that the owner asks for at least.
    colluding
        Sites that may tell the server all they know.

    Raises
    ------
    ValueError
        If a sum over these sites would not hide a single message, or keys are not distinct.
    """

    study: bytes
    sites: tuple[bytes, ...]
    minimum: int = MIN_SITES
    colluding: int = 0

    def __post_init__(self) -> None:
        num = len(self.sites)
        if len(self.study) != DIGEST_BYTES or any(len(key) != KEY_BYTES for key in self.sites):
            raise ValueError("A study's digest and its sites' public keys are 32 bytes each.")
        if len(set(self.sites)) != num:
            raise ValueError("Two sites of this study have the same public key.")
        if self.colluding < 0 or self.minimum < 1:
            raise ValueError(
                f"minimum and colluding count sites, got {self.minimum} and {self.colluding}."
            )
        least = max(MIN_SITES, self.minimum)
        if num < least:
            raise ValueError(
                f"A secure sum over {num} sites is refused: at least {least} are needed. Of two, "
                "each subtracts its own message from the total and has the other's."
            )
        if num - self.colluding < MIN_SITES:
            raise ValueError(
                f"With {self.colluding} of {num} sites colluding, fewer than {MIN_SITES} are "
                "left among whom a message is hidden."
            )


@dataclass(frozen=True)
class Session:
    """Keys that a site shares with each other site of its study, for one session.

    Attributes
    ----------
    identifier
        What all sites signed, 32 bytes.
    consortium
        Who takes part: all of its sites.
    index
        The site's own number.
    pair_keys
        A key for each other site, by its number.
    """

    identifier: bytes
    consortium: Consortium
    index: int
    pair_keys: dict[int, bytes] = field(repr=False)

    def bound_to(self, question: bytes) -> "Session":
        """Return the session with keys for one question alone.

        Masks of sites that were asked different things do not cancel, so a server that asks some
        sites something else than others has random words. And no mask is ever for two questions.
        """
        info = b"fedmcmc/question/1" + question
        keys = {
            other: HKDFExpand(hashes.SHA256(), KEY_BYTES, info).derive(key)
            for other, key in self.pair_keys.items()
        }
        return replace(self, pair_keys=keys)


class Handshake:
    """One site's part of the two exchanges that make a session.

    Parameters
    ----------
    consortium
        As the site's owner approved it.
    index
        The site's number.
    identity
        Its Ed25519 private key, whose public key is the one in `consortium`.

    Raises
    ------
    ValueError
        If `identity` is not that of site `index`.

    Examples
    --------
    >>> keys = [Ed25519PrivateKey.generate() for _ in range(3)]
    >>> public = tuple(key.public_key().public_bytes_raw() for key in keys)
    >>> study = Consortium(transcript("an approved document"), public)
    >>> sites = [Handshake(study, i, key) for i, key in enumerate(keys)]
    >>> hellos = [site.hello for site in sites]  # a server passes these on, and then
    >>> confirmations = [site.confirm(hellos) for site in sites]  # these
    >>> sessions = [site.session(confirmations) for site in sites]
    >>> sessions[0].pair_keys[2] == sessions[2].pair_keys[0]
    True
    """

    def __init__(self, consortium: Consortium, index: int, identity: Ed25519PrivateKey) -> None:
        if not 0 <= index < len(consortium.sites) or (
            identity.public_key().public_bytes_raw() != consortium.sites[index]
        ):
            raise ValueError(f"This identity is not that of site {index} of the study.")
        self._consortium, self._index, self._identity = consortium, index, identity
        self._private = X25519PrivateKey.generate()
        fresh = os.urandom(NONCE_BYTES) + self._private.public_key().public_bytes_raw()
        signature = identity.sign(_hello_digest(consortium, index, fresh))
        self.hello = struct.pack("<I", index) + fresh + signature
        self._keys: tuple[bytes, list[bytes]] | None = None

    def confirm(self, hellos: Sequence[bytes]) -> bytes:
        """Return the site's signature of what it saw: the hellos of all sites, in their order.

        Raises
        ------
        SessionError
            If a hello is missing, is not signed by its site's approved key for this study, or the
            site's own is not the one that it sent; or if it has confirmed another list.
        """
        sites = self._consortium.sites
        if len(hellos) != len(sites):
            raise SessionError(
                f"A session needs the hellos of all {len(sites)} sites of the study, got "
                f"{len(hellos)}."
            )
        if hellos[self._index] != self.hello:
            raise SessionError(f"What came back as the hello of site {self._index} is not its own.")
        for number, (hello, key) in enumerate(zip(hellos, sites, strict=True)):
            body, signature = hello[4:-SIGNATURE_BYTES], hello[-SIGNATURE_BYTES:]
            if len(hello) != HELLO_BYTES or hello[:4] != struct.pack("<I", number):
                raise SessionError(f"What came as the hello of site {number} is none of it.")
            what = f"The hello of site {number} is not signed by its approved key for this study."
            _verify(key, signature, _hello_digest(self._consortium, number, body), what)
        identifier = session_identifier(self._consortium, hellos)
        if self._keys is not None and self._keys[0] != identifier:
            raise SessionError("This site has confirmed another list of hellos: begin anew.")
        public = [hello[4 + NONCE_BYTES : 4 + NONCE_BYTES + KEY_BYTES] for hello in hellos]
        self._keys = (identifier, public)
        return self._identity.sign(_confirm_digest(identifier, self._index))

    def session(self, confirmations: Sequence[bytes]) -> Session:
        """Return the session, once all sites have confirmed what this one saw.

        Raises
        ------
        SessionError
            If a confirmation is missing, or is not its site's signature of what this site saw.
        """
        if self._keys is None:
            raise SessionError("A session is made after the hellos were confirmed.")
        identifier, public = self._keys
        sites = self._consortium.sites
        if len(confirmations) != len(sites):
            raise SessionError(
                f"A session needs the confirmations of all {len(sites)} sites of the study, got "
                f"{len(confirmations)}."
            )
        for number, (signature, key) in enumerate(zip(confirmations, sites, strict=True)):
            what = f"Site {number} has not confirmed the hellos that this site saw."
            _verify(key, signature, _confirm_digest(identifier, number), what)
        pair_keys = {}
        for number, other in enumerate(public):
            if number != self._index:
                try:
                    pair_keys[number] = pair_key(
                        self._private, other, identifier, self._index, number
                    )
                except ValueError:  # of a point that makes the secret zero
                    raise SessionError(f"The fresh key of site {number} is not a key.") from None
        return Session(identifier, self._consortium, self._index, pair_keys)


def session_identifier(consortium: Consortium, hellos: Sequence[bytes]) -> bytes:
    """Return what all sites sign that saw these hellos."""
    return transcript("fedmcmc/session/1", consortium.study, *hellos)


def pair_key(
    private: X25519PrivateKey, public: bytes, identifier: bytes, own: int, other: int
) -> bytes:
    """Return the key that two sites share in a session, 32 bytes; both have the same."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    info = b"fedmcmc/pair/1" + struct.pack("<II", min(own, other), max(own, other))
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=identifier, info=info).derive(secret)


def _hello_digest(consortium: Consortium, index: int, fresh: bytes) -> bytes:
    nonce, public = fresh[:NONCE_BYTES], fresh[NONCE_BYTES:]
    number = struct.pack("<I", index)
    return transcript("fedmcmc/hello/1", consortium.study, number, nonce, public)


def _confirm_digest(identifier: bytes, index: int) -> bytes:
    return transcript("fedmcmc/confirm/1", identifier, struct.pack("<I", index))


def _verify(key: bytes, signature: bytes, message: bytes, what: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise SessionError(what) from None
