"""Certificate authority of a consortium, keys and certificates of its parties, and identities.

An owner can also create a key (`make_request`) whose certificate the authority signs
(`sign_request`), so that no private key travels.
"""

import datetime
import importlib
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmcmc._checks import missing_extra_error
from fedmcmc.deploy._names import check_party_name


class _LazyModule:
    """Module of cryptography, an optional package, that is imported at its first use."""

    def __init__(self, name: str) -> None:
        self._name = f"cryptography.{name}"

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(importlib.import_module(self._name), name)
        except ImportError as error:
            raise missing_extra_error("Certificates need cryptography", "deploy") from error


if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
else:
    x509 = _LazyModule("x509")
    hashes = _LazyModule("hazmat.primitives.hashes")
    serialization = _LazyModule("hazmat.primitives.serialization")
    ec = _LazyModule("hazmat.primitives.asymmetric.ec")
    ed25519 = _LazyModule("hazmat.primitives.asymmetric.ed25519")

VALIDITY = datetime.timedelta(days=365)
"""Validity of certificates."""
CLOCK_TOLERANCE = datetime.timedelta(minutes=5)
"""Time by which certificates are valid before they are created, since clocks differ."""
SERVER = "server"
SERVER_CERTIFICATE = f"{SERVER}.crt"
"""File of the server's certificate, in the same folder as the authority's certificate."""


def make_authority(folder: str | Path, name: str = "fedmcmc consortium") -> None:
    """Create ``ca.crt`` and ``ca.key`` in `folder`; the operator of the consortium keeps the key.

    Raises
    ------
    FileExistsError
        If `folder` contains an authority.
    """
    folder, key = Path(folder), _new_key()
    subject = _subject(name)
    certificate = (
        _certificate_builder(subject, key.public_key())
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_private_key(folder / "ca.key", key)
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_party(
    authority: str | Path,
    folder: str | Path,
    name: str,
    *,
    hosts: Sequence[str] = (),
) -> str:
    """Create ``NAME.key`` and ``NAME.crt``, signed by an authority, and copy ``ca.crt``.

    Parameters
    ----------
    authority
        Folder of `make_authority`.
    folder
        Folder for the files.
    name
        Name of a site in the study, or ``"server"``.
    hosts
        Names and addresses at which sites reach the server. A certificate with hosts is only valid
        for a server and one without hosts only for a site, so no site can impersonate the server.

    Returns
    -------
    str
        Fingerprint of the certificate, by which the server identifies the party.

    Raises
    ------
    FileExistsError
        If `folder` contains a key of the party.
    ValueError
        If `name` cannot be the name of a file or a certificate.
    """
    check_party_name(name)
    authority, folder, key = Path(authority), Path(folder), _new_key()
    certificate = _sign_certificate(authority, name, key.public_key(), hosts)
    _write_private_key(folder / f"{name}.key", key)
    return _write_certificate(authority, folder, name, certificate)


def make_request(folder: str | Path, name: str) -> Path:
    """Create ``NAME.key``, and ``NAME.csr`` for the operator of the authority; return its path.

    Raises
    ------
    FileExistsError
        If `folder` contains a key of the party.
    ValueError
        If `name` cannot be the name of a file or a certificate.
    """
    check_party_name(name)
    folder, key = Path(folder), _new_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
    request = builder.sign(key, hashes.SHA256())
    _write_private_key(folder / f"{name}.key", key)
    path = folder / f"{name}.csr"
    path.write_bytes(request.public_bytes(serialization.Encoding.PEM))
    return path


def sign_request(
    authority: str | Path,
    request: str | Path,
    folder: str | Path,
    name: str,
    *,
    hosts: Sequence[str] = (),
) -> str:
    """Create ``NAME.crt`` from a request by `make_request` or OpenSSL; return its fingerprint.

    A request only proves that its author has the private key. Verify the author in another way,
    for example by comparing the fingerprint on the telephone.

    Parameters
    ----------
    authority, folder, name, hosts
        See `make_party`.
    request
        PEM file with the common name `name`.

    Raises
    ------
    ValueError
        If the file is not a valid request of this name.
    """
    try:
        csr = x509.load_pem_x509_csr(Path(request).read_bytes())
    except ValueError:
        raise ValueError(f"{request} is not a certificate request in PEM format.") from None
    if not csr.is_signature_valid:
        raise ValueError(f"{request} is not signed with its own key: it was changed.")
    attributes = csr.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    names = [str(attribute.value) for attribute in attributes]
    if names != [name]:
        raise ValueError(f"{request} is a request of {names}, not of {name!r}.")
    certificate = _sign_certificate(Path(authority), name, csr.public_key(), hosts)
    return _write_certificate(Path(authority), Path(folder), name, certificate)


def make_identity(folder: str | Path, name: str) -> str:
    """Create a site's identity for masks: ``NAME.identity``, an Ed25519 private key.

    ``NAME.identity.pub`` in the same folder is the public key. The other sites recognize the site
    by it, even if the server is dishonest (`deploy.secure`).

    Returns
    -------
    str
        Public key in hexadecimal.

    Raises
    ------
    FileExistsError
        If `folder` contains an identity of this name.
    """
    folder, key = Path(folder), ed25519.Ed25519PrivateKey.generate()
    _write_private_key(folder / f"{name}.identity", key)
    public = key.public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / f"{name}.identity.pub").write_bytes(pem)
    return public.public_bytes_raw().hex()


def public_identity(path: str | Path) -> str:
    """Return the Ed25519 public key in a PEM file, 32 bytes in hexadecimal.

    Raise `ValueError` if the file does not contain one.
    """
    key = serialization.load_pem_public_key(Path(path).read_bytes())
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"{path} does not contain an Ed25519 public key.")
    return key.public_bytes_raw().hex()


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate in hexadecimal, as OpenSSL shows it without colons."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def is_key_of(key: bytes, certificate: bytes) -> bool:
    """Return true if a private key belongs to a certificate; both are in PEM format."""
    try:
        public_key = serialization.load_pem_private_key(key, None).public_key()
        return public_key == x509.load_pem_x509_certificate(certificate).public_key()
    except (ValueError, TypeError):
        return False


def first_certificate(pem: bytes) -> bytes:
    """Return the certificate that `fingerprint` describes, without others in the file."""
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.PEM)


def _new_key() -> "ec.EllipticCurvePrivateKey":
    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> "x509.Name":
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _host_name(host: str) -> "x509.GeneralName":
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate_builder(
    subject: "x509.Name", public_key: "CertificatePublicKeyTypes"
) -> "x509.CertificateBuilder":
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_TOLERANCE)
        .not_valid_after(now + VALIDITY)
    )


def _key_usage(*, signs_certificates: bool) -> "x509.KeyUsage":
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _sign_certificate(
    authority: Path, name: str, public_key: "CertificatePublicKeyTypes", hosts: Sequence[str]
) -> "x509.Certificate":
    """Return a certificate of a server if there are hosts, otherwise of a site."""
    root = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    root_key: Any = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    root_public: Any = root.public_key()
    usages = x509.oid.ExtendedKeyUsageOID
    builder = (
        _certificate_builder(_subject(name), public_key)
        .issuer_name(root.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([usages.SERVER_AUTH if hosts else usages.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root_public), critical=False
        )
    )
    if hosts:  # a site is identified by its fingerprint, so its name may have any characters
        alternatives = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
        builder = builder.add_extension(alternatives, critical=False)
    return builder.sign(root_key, hashes.SHA256())


def _write_certificate(
    authority: Path, folder: Path, name: str, certificate: "x509.Certificate"
) -> str:
    """Write a party's certificate next to a copy of the authority's; return its fingerprint."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / f"{name}.crt").write_bytes(pem)
    if folder.resolve() != authority.resolve():
        (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    return certificate.fingerprint(hashes.SHA256()).hex()


def _write_private_key(
    path: Path, key: "ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey"
) -> None:
    """Write a key to a new file that only its owner can read from its first byte on."""
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(pem)
    except FileExistsError:
        raise FileExistsError(f"{path} exists, and a new key would replace it.") from None
