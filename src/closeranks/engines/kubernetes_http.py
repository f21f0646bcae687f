"""One request to the API server at a time, over TLS, bounded in time and size.

HTTP/1.1 on asyncio's streams, as a watch has to end at once when the job does: a thread that waits in
http.client can't be told to. One connection a request; nothing is followed, decompressed or kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from closeranks.errors import ConfigError, EngineError

__all__ = ["Access", "Answer", "in_cluster", "is_in_cluster", "request", "stream"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_TOKEN_BYTES = 64 << 10
_MAX_HEAD_BYTES = 32 << 10
_MAX_CHUNK_BYTES = 64 << 10  # how much is taken at once, however long a chunk is
_CONNECT_TIMEOUT_S = 10.0
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;[^\r\n]*)?\r\n")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])( [^\r\n]*)?\r\n")


@dataclass(slots=True)
class Access:
    """Where the API server is, and the files that hold what it takes to talk to it; kubelet rewrites them."""

    host: str
    port: int
    namespace: str
    token_file: Path
    ca_file: Path
    _context: ssl.SSLContext | None = field(default=None, repr=False)
    _ca_pem: str = field(default="", repr=False)

    def token(self) -> str:
        """Read anew for each request: it expires within the hour. Raises EngineError."""
        text = _read(self.token_file).strip()
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise EngineError(f"{self.token_file} holds no token of a service account")
        return text

    def context(self) -> ssl.SSLContext:
        """Trusts the cluster's own authority and no other, and checks the server's name."""
        pem = _read(self.ca_file)
        if self._context is None or pem != self._ca_pem:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_verify_locations(
                    cadata=pem.encode("ascii", "ignore").decode()
                )  # names may not be
            except (ssl.SSLError, ValueError) as error:
                raise EngineError(f"{self.ca_file} holds no certificates: {error}") from error
            self._context, self._ca_pem = context, pem
        return self._context


def is_in_cluster(env: Mapping[str, str]) -> bool:
    """Whether this process runs in a pod."""
    return bool(env.get("KUBERNETES_SERVICE_HOST"))


def in_cluster(env: Mapping[str, str], directory: Path = SERVICE_ACCOUNT) -> Access:
    """How a pod reaches the API server: Kubernetes puts that there. Raises ConfigError."""
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ConfigError(
            "this process isn't in a pod of Kubernetes: KUBERNETES_SERVICE_HOST and _PORT name no API server"
        )
    try:
        namespace = env.get("POD_NAMESPACE") or _read(directory / "namespace").strip()
    except EngineError as error:
        raise ConfigError(f"{error}; let the pod have automountServiceAccountToken: true") from error
    return Access(host, int(port), namespace, directory / "token", directory / "ca.crt")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TOKEN_BYTES * 16 + 1)
        if len(data) > _MAX_TOKEN_BYTES * 16:
            raise EngineError(f"{path} is too long to be what Kubernetes puts there")
        return data.decode()
    except OSError as error:
        raise EngineError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise EngineError(f"{path} isn't text") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """A status, and what came with it."""

    status: int
    body: bytes


async def request(
    access: Access,
    method: str,
    target: str,
    *,
    body: bytes = b"",
    content_type: str = "application/json",
    timeout_s: float,
    max_bytes: int,
) -> Answer:
    """Ask once. Raises EngineError for no answer, too late, too long or not HTTP; never for a status."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async with stream(access, method, target, body=body, content_type=content_type) as (
                status,
                found,
            ):
                async for part in found:
                    size += len(part)
                    if size > max_bytes:
                        raise EngineError(f"the API server's answer is over {max_bytes:,} bytes")
                    parts.append(part)
            return Answer(status, b"".join(parts))
    except TimeoutError:
        raise EngineError(f"the API server didn't answer within {timeout_s:g} s") from None


@contextlib.asynccontextmanager
async def stream(
    access: Access, method: str, target: str, *, body: bytes = b"", content_type: str = "application/json"
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """An answer whose body comes bit by bit. The caller bounds its time and size. Raises EngineError."""
    head = _head(access, method, target, len(body), content_type)
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await _connect(access)
        writer.write(head + body)
        await writer.drain()
        status, headers = await _answer_head(reader)
        yield status, _body(reader, headers)
    except ssl.SSLCertVerificationError as error:
        raise EngineError(f"the API server can't prove itself: {error.verify_message}") from error
    except asyncio.LimitOverrunError:
        raise EngineError("the API server's answer has a line too long for HTTP") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise EngineError(f"the connection to the API server broke: {_why(error)}") from error
    finally:
        if writer is not None:
            await _close(writer)


async def _connect(access: Access) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                access.host, access.port, ssl=access.context(), limit=_MAX_HEAD_BYTES
            )
    except TimeoutError:
        raise EngineError(f"no connection to the API server within {_CONNECT_TIMEOUT_S:g} s") from None
    _notice_silence(writer)
    return reader, writer


def _notice_silence(writer: asyncio.StreamWriter) -> None:
    """A watch may be quiet for a minute; that its other side is gone must be seen sooner."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def _close(writer: asyncio.StreamWriter) -> None:
    """At once: a goodbye would wait for the server's, which may be the one that has gone quiet."""
    writer.transport.abort()
    with contextlib.suppress(OSError):  # however it ended
        await writer.wait_closed()


def _head(access: Access, method: str, target: str, length: int, content_type: str) -> bytes:
    host = f"[{access.host}]" if ":" in access.host else access.host
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {host}:{access.port}",
        f"Authorization: Bearer {access.token()}",
        "Accept: application/json",
        "User-Agent: closeranks",
        "Connection: close",
    ]
    if length:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {length}"]
    if any(not line.isascii() or not line.isprintable() for line in lines):
        raise EngineError(f"no request can be made of {target[:100]!r}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


async def _answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    start = _STATUS.match(head)
    if start is None:
        raise EngineError("what answers at the API server's address doesn't speak HTTP")
    headers = {}
    for line in head[start.end() :].split(b"\r\n"):
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    return int(start[1]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        async for part in _chunks(reader):
            yield part
    elif re.fullmatch(rb"[0-9]{1,15}", length := headers.get(b"content-length", b"")):
        async for part in _exactly(reader, int(length)):
            yield part
    else:
        while part := await reader.read(_MAX_CHUNK_BYTES):
            yield part


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        line = await reader.readuntil(b"\r\n")
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise EngineError("the API server's answer breaks off into something else")
        if not int(match[1], 16):
            return  # trailers aren't read: the connection ends here
        async for part in _exactly(reader, int(match[1], 16)):
            yield part
        if await reader.readexactly(2) != b"\r\n":
            raise EngineError("the API server's answer breaks off into something else")


async def _exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    left = size
    while left:
        part = await reader.read(min(left, _MAX_CHUNK_BYTES))
        if not part:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(part)
        yield part


def _why(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it ended in the middle"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
