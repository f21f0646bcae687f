"""TLS of the channel: contexts that know one job only, who the other end is, and TLS over any bytes.

TLS 1.3 alone (RFC 8446): every cipher suite has forward secrecy and authenticates what it encrypts, and there
is no renegotiation. No resumption, no early data: each connection proves itself anew, and a recorded one is
worth nothing. A peer is known by the URI in its certificate, not by a host name: a node has many names, none
of them proved (URI-ID of RFC 9525, as in SPIFFE).

The TLS of asyncio's transports keeps 256 KiB for each connection and hides its handshakes until they succeed;
here they are counted and bounded, and a thousand agents fit.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Mapping
from typing import Any

from closeranks.controller.credentials import AGENT, CONTROLLER, Credentials, identity
from closeranks.errors import ConfigError, UntrustedPeer

__all__ = ["Tls", "check_peer", "client_context", "server_context"]

_READ_BYTES = 64 << 10


def server_context(credentials: Credentials) -> ssl.SSLContext:
    """The controller's side: asks every client for a certificate of this job."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _only_this_job(context, credentials, CONTROLLER)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """An agent's side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # see check_peer
    return _only_this_job(context, credentials, AGENT)


def _only_this_job(context: ssl.SSLContext, credentials: Credentials, role: str) -> ssl.SSLContext:
    if credentials.role != role:
        raise ConfigError(f"{role} needs the credentials of its own role, not those of {credentials.role}")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cadata=credentials.ca_pem)
        _load_chain(context, credentials)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"the credentials of {credentials.role} for job {credentials.job_id} can't be used ({error}); "
            "mint them anew"
        ) from error
    return context


def _load_chain(context: ssl.SSLContext, credentials: Credentials) -> None:
    """By way of a file in memory: ssl reads keys from files only, and this one has no name on any disk."""
    fd = os.memfd_create("closeranks-credentials", os.MFD_CLOEXEC)
    try:
        os.write(fd, (credentials.certificate_pem + credentials.key_pem).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=_no_password)
    finally:
        os.close(fd)


def _no_password() -> str:
    """Ours have none; without this, ssl would ask for one on the terminal."""
    return ""


def check_peer(certificate: Mapping[str, Any] | None, *, job_id: str, role: str) -> None:
    """Raise UntrustedPeer unless a verified certificate (``getpeercert()``) names this job and this role."""
    names = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]
    wanted = identity(job_id, role)
    if names != [wanted]:
        shown = ascii(", ".join(map(str, names))[:200]) if names else "nobody"
        raise UntrustedPeer(f"the certificate names {shown}, where {wanted} has to be")


class Tls:
    """One end of a TLS connection, without a socket: bytes in, bytes out."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self.established = False
        self.ended = False  # the other end has said that nothing more will come

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The other end's, verified; None before the handshake is over."""
        return self._object.getpeercert() if self.established else None

    def decrypt(self, data: bytes) -> bytes:
        """What ``data`` holds for us; b"" begins a client's handshake.

        Raises UntrustedPeer when the handshake fails or a record is forged; ``outgoing`` may hold an alert
        for the other end even then.
        """
        if data:
            self._incoming.write(data)
        plain = bytearray()
        try:
            if not self.established:
                self._object.do_handshake()
                self.established = True
            while chunk := self._object.read(_READ_BYTES):
                plain += chunk
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as error:
            raise UntrustedPeer(f"TLS: {_plain_words(error)}") from error
        return bytes(plain)

    def encrypt(self, data: bytes) -> None:
        """Have ``data`` come out of ``outgoing``."""
        self._object.write(data)

    def end(self) -> None:
        """Say that nothing more will come (close_notify, RFC 8446, section 6.1)."""
        with contextlib.suppress(
            ssl.SSLError
        ):  # the other end hasn't said so yet, or the handshake isn't over
            self._object.unwrap()

    def outgoing(self) -> bytes:
        """What has to be sent to the other end now."""
        return self._outgoing.read()


def _plain_words(error: ssl.SSLError) -> str:
    verify = getattr(error, "verify_message", "")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    return f"{reason}: {verify}" if verify else reason
