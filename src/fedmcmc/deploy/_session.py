"""Sessions: sites agree, through the server, on keys that the server cannot compute.

A session takes two exchanges. Each site signs a fresh key (*hello*), verifies the hellos of all
sites with the identities that its owner approved, and signs the list of hellos (*confirm*). With
all confirmations, a site has proof that all sites received the same hellos, so the server can
neither impersonate a site nor divide the sites. Fresh keys exist only in memory: nobody can read
old messages from a stolen disk.
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
    """Messages of a session that the other sites of the study did not sign."""


def transcript(domain: str, *parts: bytes) -> bytes:
    """Return the SHA-256 digest of a domain and parts, each after its length.

    The lengths ensure that no two lists of parts give the same bytes.

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
class MaskGroup:
    """Sites of an approved study whose masks cancel in the sum of their messages.

    Attributes
    ----------
    study
        Digest of the approved document, 32 bytes.
    sites
        Ed25519 public keys of the sites, 32 bytes each, in the order of the document. They come
        with the document, never from the server. A site's number is its index.
    minimum
        Smallest number of sites that the owner accepts.
    colluding
        Number of sites that may share all their secrets with the server.

    Raises
    ------
    ValueError
        If a sum over these sites would reveal a single message, or two sites have the same key.
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
        smallest = max(MIN_SITES, self.minimum)
        if num < smallest:
            raise ValueError(
                f"A secure sum over {num} sites is refused: at least {smallest} are needed. With "
                "two sites, each can subtract its own message from the total."
            )
        if num - self.colluding < MIN_SITES:
            raise ValueError(
                f"If {self.colluding} of {num} sites collude, messages are hidden among "
                f"{num - self.colluding} sites only, and at least {MIN_SITES} are needed."
            )


@dataclass(frozen=True)
class Session:
    """Keys that a site shares with each other site of its study in one session.

    Attributes
    ----------
    identifier
        Digest that all sites signed, 32 bytes.
    group
        Group of the study's sites, all of which take part.
    index
        Number of this site.
    pair_keys
        Key shared with each other site, by the number of that site.
    """

    identifier: bytes
    group: MaskGroup
    index: int
    pair_keys: dict[int, bytes] = field(repr=False)

    def bound_to(self, question: bytes) -> "Session":
        """Return the session with keys for one question only.

        If a server sends some sites another question, the masks do not cancel and it gets random
        words. No mask serves two questions.
        """
        info = b"fedmcmc/question/1" + question
        keys = {
            index: HKDFExpand(hashes.SHA256(), KEY_BYTES, info).derive(key)
            for index, key in self.pair_keys.items()
        }
        return replace(self, pair_keys=keys)


class Handshake:
    """One site's part in the two exchanges that create a session.

    Parameters
    ----------
    group
        Group that the site's owner approved.
    index
        Number of the site.
    identity
        Ed25519 private key of the site, whose public key is in `group`.

    Raises
    ------
    ValueError
        If `identity` does not belong to site `index`.

    Examples
    --------
    >>> keys = [Ed25519PrivateKey.generate() for _ in range(3)]
    >>> public = tuple(key.public_key().public_bytes_raw() for key in keys)
    >>> group = MaskGroup(transcript("an approved document"), public)
    >>> sites = [Handshake(group, i, key) for i, key in enumerate(keys)]
    >>> hellos = [site.hello for site in sites]  # the server forwards these, and then
    >>> confirmations = [site.confirm(hellos) for site in sites]  # these
    >>> sessions = [site.session(confirmations) for site in sites]
    >>> sessions[0].pair_keys[2] == sessions[2].pair_keys[0]
    True
    """

    def __init__(self, group: MaskGroup, index: int, identity: Ed25519PrivateKey) -> None:
        if not 0 <= index < len(group.sites) or (
            identity.public_key().public_bytes_raw() != group.sites[index]
        ):
            raise ValueError(f"This identity is not that of site {index} of the study.")
        self._group, self._index, self._identity = group, index, identity
        self._private = X25519PrivateKey.generate()
        fresh = os.urandom(NONCE_BYTES) + self._private.public_key().public_bytes_raw()
        signature = identity.sign(_hello_digest(group, index, fresh))
        self.hello = struct.pack("<I", index) + fresh + signature
        self._confirmed: tuple[bytes, list[bytes]] | None = None  # identifier and fresh keys

    def confirm(self, hellos: Sequence[bytes]) -> bytes:
        """Return the site's signature of the hellos of all sites, in the sites' order.

        Raises
        ------
        SessionError
            If a hello is missing or is not signed with its site's approved key for this study, if
            the hello of this site was changed, or if this site has confirmed another list.
        """
        self._check_length(hellos, "hellos")
        if hellos[self._index] != self.hello:
            raise SessionError(f"The hello of site {self._index} is not its own.")
        for number, hello in enumerate(hellos):
            if len(hello) != HELLO_BYTES or hello[:4] != struct.pack("<I", number):
                raise SessionError(f"The bytes for the hello of site {number} are not its hello.")
            fresh, signature = hello[4:-SIGNATURE_BYTES], hello[-SIGNATURE_BYTES:]
            error = f"The hello of site {number} is not signed by its approved key for this study."
            self._verify(number, signature, _hello_digest(self._group, number, fresh), error)
        identifier = session_identifier(self._group, hellos)
        if self._confirmed is not None and self._confirmed[0] != identifier:
            raise SessionError("This site has confirmed another list of hellos: start again.")
        public = [hello[4 + NONCE_BYTES : 4 + NONCE_BYTES + KEY_BYTES] for hello in hellos]
        self._confirmed = (identifier, public)
        return self._identity.sign(_confirm_digest(identifier, self._index))

    def session(self, confirmations: Sequence[bytes]) -> Session:
        """Return the session, after all sites have confirmed the hellos that this site received.

        Raises
        ------
        SessionError
            If a confirmation is missing or is not its site's signature of these hellos.
        """
        if self._confirmed is None:
            raise SessionError("A session is created after the hellos are confirmed.")
        identifier, public = self._confirmed
        self._check_length(confirmations, "confirmations")
        for number, signature in enumerate(confirmations):
            error = f"Site {number} has not confirmed the hellos that this site received."
            self._verify(number, signature, _confirm_digest(identifier, number), error)
        pair_keys = {}
        for number, key in enumerate(public):
            if number != self._index:
                try:
                    pair_keys[number] = pair_key(
                        self._private, key, identifier, self._index, number
                    )
                except ValueError:  # cryptography rejects points that make the secret zero
                    raise SessionError(f"The fresh key of site {number} is not a key.") from None
        return Session(identifier, self._group, self._index, pair_keys)

    def _check_length(self, messages: Sequence[bytes], name: str) -> None:
        num = len(self._group.sites)
        if len(messages) != num:
            raise SessionError(
                f"A session needs the {name} of all {num} sites of the study, got {len(messages)}."
            )

    def _verify(self, number: int, signature: bytes, message: bytes, error: str) -> None:
        """Raise `SessionError` unless site `number` has signed a message."""
        try:
            key = Ed25519PublicKey.from_public_bytes(self._group.sites[number])
            key.verify(signature, message)
        except (InvalidSignature, ValueError):
            raise SessionError(error) from None


def session_identifier(group: MaskGroup, hellos: Sequence[bytes]) -> bytes:
    """Return the digest that all sites sign after they have received these hellos."""
    return transcript("fedmcmc/session/1", group.study, *hellos)


def pair_key(
    private: X25519PrivateKey, public: bytes, identifier: bytes, index: int, peer: int
) -> bytes:
    """Return the key that sites `index` and `peer` share in a session, 32 bytes."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    info = b"fedmcmc/pair/1" + struct.pack("<II", min(index, peer), max(index, peer))
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=identifier, info=info).derive(secret)


def _hello_digest(group: MaskGroup, index: int, fresh: bytes) -> bytes:
    nonce, public = fresh[:NONCE_BYTES], fresh[NONCE_BYTES:]
    number = struct.pack("<I", index)
    return transcript("fedmcmc/hello/1", group.study, number, nonce, public)


def _confirm_digest(identifier: bytes, index: int) -> bytes:
    return transcript("fedmcmc/confirm/1", identifier, struct.pack("<I", index))
