"""A consortium's own certificate authority, and a key and certificate per party."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DAYS = 365
"""How long certificates are valid."""
SERVER = "server"


def make_authority(folder: str | Path, name: str = "fedmcmc consortium") -> None:
    """Make ``ca.crt`` and ``ca.key`` in `folder`; the key stays with who runs the consortium.

    Raises
    ------
    FileExistsError
        If there is one.
    """
    x509, ec, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    certificate = (
        _unsigned(subject, key.public_key())
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, _sha256())
    )
    _write(Path(folder), "ca", key, certificate)


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
    """
    x509, ec, serialization = _cryptography()
    authority, folder = Path(authority), Path(folder)
    root = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes())
    root_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.oid.ExtendedKeyUsageOID
    alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts or (name,)])
    certificate = (
        _unsigned(_name(name), key.public_key())
        .issuer_name(root.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([usage.SERVER_AUTH if hosts else usage.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False
        )
        .sign(root_key, _sha256())
    )
    _write(folder, name, key, certificate)
    if folder.resolve() != authority.resolve():
        (folder / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    return fingerprint((folder / f"{name}.crt").read_bytes())


def make_identity(folder: str | Path, name: str) -> str:
    """Make a site's identity for masks: the file ``{name}.identity``, an Ed25519 private key.

    Returns
    -------
    str
        Its public key in hexadecimal, for the study's table ``secure.identities``.

    Raises
    ------
    FileExistsError
        If there is one.
    """
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    Path(folder).mkdir(parents=True, exist_ok=True)
    _write_secret(Path(folder) / f"{name}.identity", key)
    return key.public_key().public_bytes_raw().hex()


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 of a certificate in hexadecimal, as OpenSSL shows it without colons."""
    x509, *_ = _cryptography()
    from cryptography.hazmat.primitives import hashes

    found: str = x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()
    return found


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ImportError(
            'Certificates need cryptography: pip install "fedmcmc[deploy]".'
        ) from error
    return x509, ec, serialization


def _sha256() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _name(name: str) -> Any:
    x509, *_ = _cryptography()
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])


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


def _write(folder: Path, name: str, key: Any, certificate: Any) -> None:
    *_, serialization = _cryptography()
    folder.mkdir(parents=True, exist_ok=True)
    _write_secret(folder / f"{name}.key", key)
    public = certificate.public_bytes(serialization.Encoding.PEM)
    (folder / f"{name}.crt").write_bytes(public)


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
