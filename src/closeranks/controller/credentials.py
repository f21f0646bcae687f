"""Who belongs to a job: an authority of its own, minted once, and a certificate for each of two roles.

The choices and where they come from:

- EC P-256 keys, good for 128 bits of security beyond 2030 (NIST SP 800-57 part 1 rev. 5, tables 2 and 4),
  and a curve that every TLS 1.3 implementation has to have (RFC 8446, section 9.1).
- Short lifetimes instead of revocation, and a serial number of 159 random bits (more than the 64 that the
  CA/Browser Forum's baseline requirements ask for in section 7.1). Only handshakes look at the lifetime.
- One purpose a key: the controller's serves, an agent's attaches (extended key usage, RFC 5280, 4.2.1.12).
- The authority's key signs these two and is forgotten: it is never written, so nobody can add a third.

A bundle is one text, to be handed over the way an engine hands over secrets: two lines that name job and role
(RFC 7468 lets text stand outside of the blocks), the certificate, its key, and the authority's certificate.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from closeranks.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

__all__ = [
    "AGENT", "CLOCK_SKEW_S", "CONTROLLER", "DEFAULT_LIFETIME_S", "Credentials",
    "bundle", "identity", "load", "mint", "parse_bundle",
]  # fmt: skip

CONTROLLER = "controller"
AGENT = "agent"
DEFAULT_LIFETIME_S = 30 * 86400.0
CLOCK_SKEW_S = 600.0  # clocks of two nodes may differ by so much when the job starts
_MAX_LIFETIME_S = 398 * 86400.0
_MAX_BUNDLE_BYTES = 64 << 10
_CA_FILE = "ca.pem"
_JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BLOCK = re.compile(r"-----BEGIN ([A-Z ]+)-----\n[A-Za-z0-9+/=\n]+-----END \1-----\n")
_HEADER = re.compile(r"closeranks-job: (\S+)\ncloseranks-role: (\S+)\n")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one role needs to prove itself, and to check the other. The key is in no repr."""

    job_id: str
    role: str
    ca_pem: str = field(repr=False)
    certificate_pem: str = field(repr=False)
    key_pem: str = field(repr=False)


def identity(job_id: str, role: str) -> str:
    """The URI by which a certificate names its holder."""
    return f"closeranks://{job_id}/{role}"


# --- mint -------------------------------------------------------------------------------------------


def mint(
    job_id: str,
    directory: Path,
    lifetime_s: float = DEFAULT_LIFETIME_S,
    *,
    now: datetime | None = None,
) -> None:
    """Write ``ca.pem`` and a bundle for each role, ``controller.pem`` and ``agent.pem``, to ``directory``.

    The directory, made if need be, is its owner's alone, and so are the files; none is overwritten. Raises
    ConfigError, with what to do, where that can't be done.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise ConfigError(f"no credentials for job {job_id!r}: its id may hold letters, digits and ._- only")
    if not 0 < lifetime_s <= _MAX_LIFETIME_S:
        raise ConfigError(f"credentials can't live {lifetime_s:g} s: 1 s to {_MAX_LIFETIME_S:,.0f} s will do")
    texts = _minted(job_id, lifetime_s, now or datetime.now(UTC))
    directory = Path(directory)
    written: list[Path] = []
    try:
        _make_private(directory)
        for name, text in texts.items():
            _write_private(directory / name, text)
            written.append(directory / name)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise ConfigError(
            f"can't write credentials to {directory}: {error.strerror or error} ({error.filename}). "
            "Name a new directory on a file system with permissions."
        ) from error


def _minted(job_id: str, lifetime_s: float, now: datetime) -> dict[str, str]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigError(
            "a job on several nodes needs the library cryptography for its credentials: "
            "pip install 'closeranks[cluster]'"
        ) from error
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = _authority(ca_key, lifetime_s, now)
    ca_pem = ca.public_bytes(serialization.Encoding.PEM).decode()
    texts = {_CA_FILE: ca_pem}
    for role in (CONTROLLER, AGENT):
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = _leaf(ca, ca_key, key, job_id, role)
        key_pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode()
        header = f"closeranks-job: {job_id}\ncloseranks-role: {role}\n"
        leaf_pem = leaf.public_bytes(serialization.Encoding.PEM).decode()
        texts[f"{role}.pem"] = header + leaf_pem + key_pem + ca_pem
    return texts


def _authority(key: EllipticCurvePrivateKey, lifetime_s: float, now: datetime) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "closeranks job")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=CLOCK_SKEW_S))
        .not_valid_after(now + timedelta(seconds=lifetime_s))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _leaf(
    ca: x509.Certificate,
    ca_key: EllipticCurvePrivateKey,
    key: EllipticCurvePrivateKey,
    job_id: str,
    role: str,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    purposes = {CONTROLLER: ExtendedKeyUsageOID.SERVER_AUTH, AGENT: ExtendedKeyUsageOID.CLIENT_AUTH}
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    names = [x509.UniformResourceIdentifier(identity(job_id, role))]
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"closeranks {role}")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ca.not_valid_before_utc)
        .not_valid_after(ca.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purposes[role]]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


# --- hand over --------------------------------------------------------------------------------------


def bundle(directory: Path, role: str) -> str:
    """The text that ``role`` has to be handed, from a directory that ``mint`` wrote. It holds a key."""
    return _read_private(Path(directory) / f"{role}.pem")


def load(path: Path) -> Credentials:
    """The credentials in a bundle's file, which nobody else may be able to read. Raises ConfigError."""
    text = _read_private(Path(path))
    try:
        return parse_bundle(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_bundle(text: str) -> Credentials:
    """The credentials in a bundle's text. Raises ConfigError, without any of the text, if it is none."""
    header = _HEADER.match(text)
    blocks = {match[1]: match[0] for match in _BLOCK.finditer(text)}
    pems = [match[0] for match in _BLOCK.finditer(text) if match[1] == "CERTIFICATE"]
    job_id, role = (header[1], header[2]) if header else ("", "")
    usable = _JOB_ID.fullmatch(job_id) and role in (CONTROLLER, AGENT) and "PRIVATE KEY" in blocks
    if not usable or len(pems) != 2:
        raise ConfigError("this is no bundle of credentials, or only part of one; hand over the whole file")
    return Credentials(job_id, role, ca_pem=pems[1], certificate_pem=pems[0], key_pem=blocks["PRIVATE KEY"])


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is open to others, and credentials would go there; chmod 700 it, or name a new one"
        )


def _write_private(path: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)  # whatever the umask says
            file.write(text)
    except OSError:  # a full disk
        path.unlink()
        raise


def _read_private(path: Path) -> str:
    """Looks at the open file, not at its name, which may mean another one a moment later."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not hold us up
        with os.fdopen(fd, "rb") as file:
            if (wrong := _open_to_others(os.fstat(fd))) is not None:
                raise ConfigError(f"{path} {wrong}")
            data = file.read(_MAX_BUNDLE_BYTES + 1)
        text = data.decode("ascii")
    except OSError as error:
        raise ConfigError(f"can't read credentials from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no bundle of credentials: it isn't text") from None
    if len(data) > _MAX_BUNDLE_BYTES:
        raise ConfigError(f"{path} is no bundle of credentials: it is over {_MAX_BUNDLE_BYTES:,} bytes")
    return text


def _open_to_others(status: os.stat_result) -> str | None:
    """Why credentials aren't read from such a file, or None.

    Root's files may be readable for our group: that is how Kubernetes mounts a secret for a plain user.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file, and credentials are read from nothing else"
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}, who could put anything there: copy it to a file of your own"
    mode = stat.S_IMODE(status.st_mode)
    if mode & (0o037 if status.st_uid == 0 != os.getuid() else 0o077):
        return (
            f"may be used by others (mode {mode:04o}), and it holds a key: chmod 600 it, and if it has been "
            "like that for long, mint new credentials"
        )
    return None
