"""A consortium's own certificate authority, a key and certificate per party, and identities.

An owner may make its own key (`make_request`), whose certificate the authority signs
(`sign_request`), so that no key travels.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedmcmc._checks import missing_extra_error
from fedmcmc.deploy._names import check_party_name

DAYS = 365
"""How long certificates are valid."""
SERVER = "server"
SERVER_CERTIFICATE = f"{SERVER}.crt"
"""The server's certificate, beside a site's own and that of the authority."""


def make_authority(folder: str | Path, name: str = "fedmcmc consortium") -> None:
    """Make ``ca.crt`` and ``ca.key`` in `folder`; the key stays with who runs the consortium.

    Raises
    ------
    FileExistsError
        If there is one.
    """
    x509, *_ = _cryptography()
    folder, key = Path(folder), _new_key()
    subject = _name(name)
    certificate = (
        _unsigned(subject, key.public_key())
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, _sha256())
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_secret(folder / "ca.key", key)
    (folder / "ca.crt").write_bytes(_pem(certificate))


def make_party(
    authority: str | Path,
    folder: str | Path,
    name: str,
    *,
    hosts: Sequence[str] = (),
) -> str:
    """Make ``NAME.crt`` and ``NAME.key``, signed by an authority, and copy ``ca.crt`` beside them.

    Parameters
    ----------
    authority
        The folder of `make_authority`.
    folder
        Where to.
    name
        Of a site in the study; the server's is ``"server"``.
    hosts
        Names and addresses at which sites reach the server. A certificate with hosts is a server's
        and no site's, so that no site can pose as the server.

    Returns
    -------
    str
        The certificate's fingerprint, to which the server pins the name.

    Raises
    ------
    FileExistsError
        If the party has a certificate in `folder`.
    ValueError
        If `name` cannot be that of a file or a certificate.
    """
    check_party_name(name)
    authority, folder = Path(authority), Path(folder)
    key = _new_key()
    certificate = _signed(authority, name, key.public_key(), hosts)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_secret(folder / f"{name}.key", key)
    _write_certificate(authority, folder, name, certificate)
    return fingerprint((folder / f"{name}.crt").read_bytes())


def make_request(folder: str | Path, name: str) -> Path:
    """Make ``NAME.key``, and ``NAME.csr`` for whoever has the authority; return its path.

    Raises
    ------
    FileExistsError
        If the party has a key in `folder`.
    ValueError
        If `name` cannot be that of a file or a certificate.
    """
    check_party_name(name)
    x509, _, serialization = _cryptography()
    folder, key = Path(folder), _new_key()
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    request = request.sign(key, _sha256())
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_secret(folder / f"{name}.key", key)
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
    """Make ``NAME.crt`` of a request by `make_request` or OpenSSL; return its fingerprint.

    A request proves that who made it has the key, and nothing more: that it is the owner's own has
    to be known otherwise, as by its fingerprint over the telephone.

    Parameters
    ----------
    authority, folder, name, hosts
        As of `make_party`.
    request
        A PEM file, whose common name is `name`.

    Raises
    ------
    ValueError
        If it is no such request.
    """
    x509, *_ = _cryptography()
    try:
        found = x509.load_pem_x509_csr(Path(request).read_bytes())
    except ValueError:
        raise ValueError(f"{request} is no certificate request in PEM.") from None
    if not found.is_signature_valid:
        raise ValueError(f"{request} is not signed by its own key: it was altered.")
    named = [str(part.value) for part in found.subject.get_attributes_for_oid(_common_name())]
    if named != [name]:
        raise ValueError(f"{request} is a request of {named}, not of {name!r}.")
    certificate = _signed(Path(authority), name, found.public_key(), hosts)
    _write_certificate(Path(authority), Path(folder), name, certificate)
    return fingerprint((Path(folder) / f"{name}.crt").read_bytes())


def make_identity(folder: str | Path, name: str) -> str:
    """Make a site's identity for masks: the file ``{name}.identity``, an Ed25519 private key.

    Beside it lies ``{name}.identity.pub``, the public one. By it the other sites know a site,
    whatever the server says (`deploy.secure`).

    Returns
    -------
    str
        Its public key in hexadecimal.

    Raises
    ------
    FileExistsError
        If there is one.
    """
    *_, serialization = _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_secret(Path(folder) / f"{name}.identity", key)
    public = key.public_key()
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (Path(folder) / f"{name}.identity.pub").write_bytes(pem)
    return public.public_bytes_raw().hex()


def public_identity(path: str | Path) -> str:
    """Return an Ed25519 public key in a PEM file, 32 bytes in hexadecimal.

    Raises
    ------
    ValueError
        If it holds none.
    """
    *_, serialization = _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    found = serialization.load_pem_public_key(Path(path).read_bytes())
    if not isinstance(found, Ed25519PublicKey):
        raise ValueError(f"{path} holds no Ed25519 public key.")
    return found.public_bytes_raw().hex()


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate in hexadecimal, as OpenSSL shows it without colons."""
    x509, *_ = _cryptography()
    from cryptography.hazmat.primitives import hashes

    found: str = x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()
    return found


def is_key_of(key: bytes, certificate: bytes) -> bool:
    """Return whether a private key and a certificate, both in PEM, belong together."""
    x509, _, serialization = _cryptography()
    try:
        public_key = serialization.load_pem_private_key(key, None).public_key()
        return bool(public_key == x509.load_pem_x509_certificate(certificate).public_key())
    except (ValueError, TypeError):
        return False


def first_certificate(pem: bytes) -> bytes:
    """Return the certificate whose `fingerprint` is that of a file, without others in the file."""
    x509, _, serialization = _cryptography()
    found: bytes = x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.PEM)
    return found


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise missing_extra_error("Certificates need cryptography", "deploy") from error
    return x509, ec, serialization


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _new_key() -> Any:
    _, ec, _ = _cryptography()
    return ec.generate_private_key(ec.SECP256R1())


def _common_name() -> Any:
    x509, *_ = _cryptography()
    return x509.oid.NameOID.COMMON_NAME


def _name(name: str) -> Any:
    x509, *_ = _cryptography()
    return x509.Name([x509.NameAttribute(_common_name(), name)])


def _host(host: str) -> Any:
    x509, *_ = _cryptography()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _unsigned(subject: Any, public_key: Any) -> Any:
    x509, *_ = _cryptography()
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, signs: bool) -> Any:
    x509, *_ = _cryptography()
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(authority: Path, name: str, public_key: Any, hosts: Sequence[str]) -> Any:
    """Return a party's certificate: a server's if it has hosts, or else a site's."""
    x509, _, serialization = _cryptography()
    root = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    root_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    usage = x509.oid.ExtendedKeyUsageOID
    certificate = (
        _unsigned(_name(name), public_key)
        .issuer_name(root.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([usage.SERVER_AUTH if hosts else usage.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False
        )
    )
    if hosts:  # a site is known by its fingerprint, whatever letters its name has
        alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
        certificate = certificate.add_extension(alternatives, critical=False)
    return certificate.sign(root_key, _sha256())


def _pem(certificate: Any) -> bytes:
    *_, serialization = _cryptography()
    pem: bytes = certificate.public_bytes(serialization.Encoding.PEM)
    return pem


def _write_certificate(authority: Path, folder: Path, name: str, certificate: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / f"{name}.crt").write_bytes(_pem(certificate))
    if folder.resolve() != authority.resolve():
        (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())


def _write_secret(path: Path, key: Any) -> None:
    *_, serialization = _cryptography()
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        # Nobody else may read it, from the first byte on.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileExistsError(f"{path} exists: a new one would undo the old one.") from None
    with os.fdopen(file, "wb") as opened:
        opened.write(secret)
